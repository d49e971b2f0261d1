"""Tasks for runs with a job token."""

import json
import os
import signal
import subprocess
from pathlib import Path

import torch
from tasks import ReferenceTask


class Looks(ReferenceTask):
    """Each process writes its environment, that of a program which it starts, and its command line.

    Args:
        folder: of these files.
        kill: once, at the sixth step: ``server`` or ``trainer``; None for none.
    """

    def __init__(self, folder, kill=None, **options):
        super().__init__(**options)
        self.folder, self.kill = Path(folder), kill
        child = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
        command = Path("/proc/self/cmdline").read_text()
        (self.folder / f"seen-{os.getpid()}").write_text(json.dumps([dict(os.environ), child, command]))

    def build_scheduler(self, optimizer):
        def rate(step):
            if step == 6 and self.kill == "server":
                self._die()
            return 1.0

        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def training_step(self, model, batch, batch_idx):
        if self.kill == "trainer" and batch_idx == 6 and self.trainer.trainer_index == 1:
            self._die()
        return super().training_step(model, batch, batch_idx)

    def _die(self):
        mark = self.folder / "killed"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

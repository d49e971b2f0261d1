"""Tasks whose faults fire at most once, so that a run that starts again is not hit a second time."""

import ctypes
import os
import signal
import time
from pathlib import Path

from tasks import ReferenceTask


class MarksItsStart(ReferenceTask):
    """Creates ``<folder>/ready-<rank>`` while the rank joins, once the others would notice its loss."""

    def __init__(self, folder, **options):
        super().__init__(**options)
        self.folder = Path(folder)

    def build_model(self):
        (self.folder / f"ready-{self.trainer.trainer_index}").touch()
        return super().build_model()


class ComputesForLong(MarksItsStart):
    """Trainer 1 is killed at batch 5 of trainer 0, which computes for a minute there."""

    def training_step(self, model, batch, batch_idx):
        if batch_idx == 0:  # all ranks have taken this step when one takes the next
            (self.folder / f"pid-{self.trainer.trainer_index}").write_text(str(os.getpid()))
        if (self.trainer.trainer_index, batch_idx) == (0, 5):
            (self.folder / "killed").touch()
            os.kill(int((self.folder / "pid-1").read_text()), signal.SIGKILL)
            time.sleep(60)  # stands for work
        return super().training_step(model, batch, batch_idx)


class FaultAtBatch(ReferenceTask):
    """``fault`` in trainer 1 at batch ``batch``, unless the file ``mark`` exists: it creates that before."""

    def __init__(self, mark, fault, batch=5, **options):
        super().__init__(**options)
        self.mark, self.fault, self.batch = Path(mark), fault, batch

    def training_step(self, model, batch, batch_idx):
        if (self.trainer.trainer_index, batch_idx) == (1, self.batch) and not self.mark.exists():
            self.mark.touch()
            getattr(self, self.fault)()
        return super().training_step(model, batch, batch_idx)

    def sigkill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def sigstop(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def hold_interpreter(self):
        """No other thread of this process runs meanwhile: PyDLL keeps the interpreter's lock during the call."""
        ctypes.PyDLL(None).sleep(5)

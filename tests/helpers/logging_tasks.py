"""A task that logs from every hook, and whose process is killed once."""

import os
import signal
from pathlib import Path

from tasks import ReferenceTask

# A resumed run calls these hooks again: they belong to a start of the process, not to a step.
OF_A_START = ("train_start", "train_end")


class LogsEverywhere(ReferenceTask):
    """Kills trainer 0 once, in the training step of batch ``kill_at``, and creates the file ``mark`` before."""

    def __init__(self, mark, kill_at=None, **options):
        super().__init__(**options)
        self.mark, self.kill_at = Path(mark), kill_at

    def on_train_start(self):
        self.log("train_start", 0)

    def on_epoch_start(self, epoch):
        self.log("epoch_start", epoch)

    def on_epoch_end(self, epoch):
        self.log("epoch_end", epoch)

    def on_batch_start(self, batch_idx):
        self.log("batch_start", batch_idx)

    def on_batch_end(self, batch_idx):
        self.log("batch_end", batch_idx)

    def training_step(self, model, batch, batch_idx):
        loss = super().training_step(model, batch, batch_idx)
        self.log("loss", loss)
        if batch_idx == self.kill_at and self.trainer.trainer_index == 0 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def on_validation_end(self, batch_idx):
        self.log("validation_end", batch_idx)

    def on_checkpoint(self, state):
        self.log("checkpoint", 1, "sum")

    def on_train_end(self):
        self.log("train_end", 0)

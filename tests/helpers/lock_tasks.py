"""A task that holds the interpreter's lock in one step of one trainer, once in a run."""

import ctypes
from pathlib import Path

from tasks import ReferenceTask


class HoldsLock(ReferenceTask):
    """Trainer 1 holds the lock for a minute after its fifth batch, unless the file ``fired`` exists already."""

    def __init__(self, fired, **options):
        super().__init__(**options)
        self.fired = Path(fired)

    def on_batch_end(self, batch_idx):
        if self.trainer.trainer_index == 1 and batch_idx == 5 and not self.fired.exists():
            self.fired.touch()
            ctypes.PyDLL(None).usleep(60_000_000)

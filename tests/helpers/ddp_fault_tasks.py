"""Tasks whose faults fire at most once, so that a run that starts again is not hit a second time."""

import ctypes
import os
import signal
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

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def hold_interpreter(self):
        """No other thread of this process runs meanwhile: PyDLL keeps the interpreter's lock during the call."""
        ctypes.PyDLL(None).sleep(5)

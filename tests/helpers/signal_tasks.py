"""Tasks that signals stop, with sources of both kinds and validation scores that a test chooses."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import torch
from tasks import ReferenceTask
from torch.nn import functional as F

from paramserver.distributed.timeouts import poll_until
from paramserver.metrics import Sink


class RestartingIterable:
    """An iterable without a length that restarts from the same samples."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[i] for i in range(len(self.data)))


class SignalledAtItsStart(ReferenceTask):
    """SIGTERM reaches one rank while its task is created, before it joins the others.

    Args:
        rank: which.
        mark: a file that is written just before; no later process is sent a signal.
    """

    def __init__(self, rank, mark, **options):
        super().__init__(**options)
        log = Path("/proc/self/fd/1").readlink()
        if log.name == f"rank-{rank}.log" and not Path(mark).exists():
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGTERM)


class StopsBySignal(ReferenceTask):
    """Sends signals when certain batches begin, and scores each validation by the step that it comes after.

    Args:
        stops: lists of batch, trainer, signal and whom it is sent to: ``self`` or ``parent``, the supervisor.
        source: ``map`` or ``iterable`` (each trainer's own, of equal length).
        scores: metric ``score`` after step i + 1; the last one holds from there on.
        accumulate: batches of a step, as in the config.
    """

    def __init__(self, stops=(), source="map", scores=(0.0,), accumulate=1, **options):
        super().__init__(**options)
        self.stops = {(batch, trainer): (getattr(signal, name), whom) for batch, trainer, name, whom in stops}
        self.source, self.scores, self.accumulate = source, scores, accumulate

    def train_source(self, partition):
        if self.source == "map":
            return super().train_source(partition)
        return RestartingIterable(self._data(self.samples // partition.count, 10 + partition.index))

    def on_batch_start(self, batch_idx):
        number, whom = self.stops.get((batch_idx, self.trainer.trainer_index), (None, ""))
        if number is None:
            return
        os.kill(os.getppid() if whom == "parent" else os.getpid(), number)
        # The supervisor passes its signal on in its own time, and a few steps later the run would be over.
        stop = self.trainer.process.stop.event
        arrived = poll_until(time.monotonic() + 30, lambda: stop.is_set() or None, threading.Event(), every_s=0.005)
        assert arrived, f"the signal to {whom} did not reach this process"

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        images, labels = batch
        step = batch_idx // self.accumulate
        score = torch.tensor(float(self.scores[min(step, len(self.scores)) - 1]))
        return {"loss": F.cross_entropy(model(images), labels), "score": score}


class CountsHooks(StopsBySignal):
    """Stores how often its validations and its epochs have ended."""

    validations = epochs = 0

    def on_validation_end(self, batch_idx):
        self.validations += 1

    def on_epoch_end(self, epoch):
        self.epochs += 1

    def on_checkpoint(self, state):
        state.update(validations=self.validations, epochs=self.epochs)

    def on_resume(self, state):
        self.validations, self.epochs = state["validations"], state["epochs"]


class WithoutValidationData(CountsHooks):
    """Has a schedule by validation all the same."""

    def validation_source(self, partition):
        return None

    def build_scheduler(self, optimizer):
        return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "every": "validation"}


class IsReplaced(CountsHooks):
    """Trainer 1 dies once before its first announcement; trainer 0 waits until another process has its place.

    Args:
        marks: folder of files by which they know of it; empty: no process dies.
    """

    def __init__(self, marks="", **options):
        super().__init__(**options)
        self.marks = marks

    def on_train_start(self):
        died, replaced = Path(self.marks, "died"), Path(self.marks, "replaced")
        if self.marks and self.trainer.trainer_index == 0:
            assert poll_until(time.monotonic() + 30, lambda: replaced.exists() or None, threading.Event(), every_s=0.02)
        elif self.marks and died.exists():
            replaced.touch()
        elif self.marks:
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class EndsAtTheStart(ReferenceTask):
    """Ends its run before the first step of this process is complete.

    Args:
        how: ``raise`` or the name of a signal, before anything is trained; ``nan``, the loss of the first batch.
    """

    def __init__(self, how, **options):
        super().__init__(**options)
        self.how = how

    def on_train_start(self):
        if self.how == "raise":
            raise RuntimeError("it ends here")
        if self.how != "nan":
            os.kill(os.getpid(), getattr(signal, self.how))

    def training_step(self, model, batch, batch_idx):
        return super().training_step(model, batch, batch_idx) * float("nan")


class DiesAtTheStart(ReferenceTask):
    """Kills its process once, and the supervisor before it, while the run's folder exists without a config."""

    def __init__(self, mark, whom, **options):
        super().__init__(**options)
        mark = Path(mark)
        if not mark.exists():
            mark.write_text(" ".join(path.name for path in mark.with_name("runs").joinpath("run").iterdir()))
            if whom == "parent":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)  # without this rank the others do not start


class NeverReturns(ReferenceTask):
    """Trainers block in a hook for ever, unless the file ``returns`` exists in the folder ``marks``.

    Args:
        marks: folder for a file of each process that blocks, with its process id.
        hook: in which.
        count: at which call of it.
        trainers: which.
        how: ``lock`` (handlers of signals run), ``call`` (none runs, other threads do) or ``interpreter`` (none does).
        owns: for the hook ``step``, of the optimizer: blocks where the parameter of this index is updated.
    """

    def __init__(self, marks, hook="training_step", count=5, trainers=(0,), how="lock", owns=0, **options):
        super().__init__(**options)
        self.marks, self.hook, self.count, self.trainers, self.how = Path(marks), hook, count, tuple(trainers), how
        self.owns = owns
        self.calls = 0

    def _block_in(self, hook):
        index = -1 if self.trainer is None else self.trainer.trainer_index
        if hook != self.hook or index not in self.trainers or (self.marks / "returns").exists():
            return
        self.calls += 1
        if self.calls == self.count:
            (self.marks / f"blocks-{index}").write_text(str(os.getpid()))
            if self.how == "lock":
                lock = threading.Lock()
                lock.acquire()
                lock.acquire()
            # A call that a signal interrupts begins anew, before a handler runs.
            library = ctypes.CDLL(None) if self.how == "call" else ctypes.PyDLL(None)
            library.pthread_mutex_lock(mutex := ctypes.create_string_buffer(64))
            library.pthread_mutex_lock(mutex)

    def build_model(self):
        self._block_in("build_model")
        model = super().build_model()
        if self.hook == "get_extra_state":
            model.state = BlockingState(self)
        Records.task = self
        return model

    def training_step(self, model, batch, batch_idx):
        self._block_in("training_step")
        return super().training_step(model, batch, batch_idx)

    def validation_step(self, *arguments):
        self._block_in("validation_step")
        return super().validation_step(*arguments)

    def on_checkpoint(self, state):
        self._block_in("on_checkpoint")

    def build_optimizer(self, model):
        own = {"step": BlockingStep, "state_dict": BlockingStateDict}.get(self.hook)
        return super().build_optimizer(model) if own is None else own(model.parameters(), self)


class BlockingOptimizer(torch.optim.SGD):
    """SGD that may block as a hook of ``NeverReturns`` does."""

    def __init__(self, parameters, task):
        super().__init__(parameters, lr=0.1)
        self.task = task


class BlockingStep(BlockingOptimizer):
    """Its steps may block."""

    updates_each = "parameter"

    def step(self, closure=None):
        if self.param_groups[0]["params"][self.task.owns].grad is not None:
            self.task._block_in("step")
        return super().step(closure)


class BlockingStateDict(BlockingOptimizer):
    """The reading of its state may block, which a run with several servers refuses."""

    def state_dict(self):
        self.task._block_in("state_dict")
        return super().state_dict()


class BlockingState(torch.nn.Module):
    """A module whose state may block."""

    def __init__(self, task):
        super().__init__()
        self.task = task

    def get_extra_state(self):
        self.task._block_in("get_extra_state")
        return {"calls": self.task.calls}

    def set_extra_state(self, state):
        pass


class Records(Sink):
    """A sink that may block; the task is that of its process."""

    task = None

    def write(self, record):
        if record["kind"] == "train":
            self.task._block_in("write")

    def close(self):
        pass

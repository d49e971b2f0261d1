"""Tasks whose processes end, stop or block where only the supervisor, or its death, can end them."""

import contextlib
import ctypes
import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
from tasks import ReferenceTask

from paramserver.distributed.timeouts import poll_until
from paramserver.metrics.sinks import FanOut
from paramserver.runs.checkpoint_manager import CheckpointManager
from paramserver.runs.monitor import RunMonitor


def ranks_of(supervisor):
    """The processes of the ranks by rank. A rank writes to its own log, also where it is a fork."""
    found = {}
    for child in psutil.Process(supervisor).children():
        with contextlib.suppress(OSError):
            log = Path(f"/proc/{child.pid}/fd/1").readlink()
            if log.name.startswith("rank-"):
                found[int(log.stem.removeprefix("rank-"))] = child
    return found


class SignalsRank0(ReferenceTask):
    """Sends a signal to rank 0 when the run ends.

    Args:
        when: ``before_summary``, ``before_record`` (the summary is stored, the supervisor has not got it) or
            ``after_record``.
        number: of the signal.
        mark: a file that is written just before.
        interrupted_at: trainer 0 gets SIGTERM before this batch, which ends the run.
    """

    def __init__(self, when, number, mark, interrupted_at=None, **options):
        super().__init__(**options)
        self.interrupted_at = interrupted_at
        original = {"close": RunMonitor.close, "write": FanOut.write, "finish": CheckpointManager.close}

        def send():
            Path(mark).write_text(str(os.getpid()))
            os.kill(os.getpid(), number)

        def finish(checkpoints, *arguments, **named):
            if when == "before_summary":
                send()
            return original["finish"](checkpoints, *arguments, **named)

        def write(sinks, record, *arguments, **named):
            if when == "before_record" and record["kind"] == "end":
                send()
            original["write"](sinks, record, *arguments, **named)

        def close(monitor, *arguments, **named):
            summary = original["close"](monitor, *arguments, **named)
            if when == "after_record":
                send()
            return summary

        CheckpointManager.close, FanOut.write, RunMonitor.close = finish, write, close

    def on_batch_start(self, batch_idx):
        if batch_idx == self.interrupted_at and self.trainer.trainer_index == 0:
            os.kill(os.getpid(), signal.SIGTERM)


class StopsShardServer(ReferenceTask):
    """Stops rank 1 when the training of trainer 0 has ended."""

    def __init__(self, mark, **options):
        super().__init__(**options)
        self.mark = Path(mark)

    def on_train_end(self):
        if self.trainer.trainer_index == 0:
            shard_server = ranks_of(os.getppid())[1]
            self.mark.write_text(str(shard_server.pid))
            shard_server.send_signal(signal.SIGSTOP)


class ForksAndDies(ReferenceTask):
    """Trainer 1 starts a child that inherits everything, and is killed."""

    def __init__(self, mark, **options):
        super().__init__(**options)
        self.mark = Path(mark)

    def on_batch_start(self, batch_idx):
        if (self.trainer.trainer_index, batch_idx) == (1, 5):
            child = os.fork()
            if child == 0:
                signal.pause()
            self.mark.write_text(json.dumps({"rank": os.getpid(), "child": child}))
            os.kill(os.getpid(), signal.SIGKILL)


class Blocks(ReferenceTask):
    """Trainer 0 blocks for ever in one hook; a signal's handler may run, but ends nothing.

    Args:
        hook: in which.
        mark: a file that is written just before.
        holds_interpreter: no handler and no other thread runs either.
    """

    def __init__(self, hook, mark, holds_interpreter=False, **options):
        super().__init__(**options)
        self.hook, self.mark, self.holds_interpreter = hook, Path(mark), holds_interpreter

    def _block_in(self, hook):
        if hook != self.hook or self.trainer.trainer_index != 0:
            return
        self.mark.write_text(str(os.getpid()))
        if self.holds_interpreter:
            ctypes.PyDLL(None).sleep(1000)
        threading.Event().wait()

    def on_train_start(self):
        self._block_in("on_train_start")

    def on_batch_start(self, batch_idx):
        if batch_idx == 3:
            self._block_in("on_batch_start")

    def on_validation_start(self, batch_idx):
        self._block_in("on_validation_start")

    def on_checkpoint(self, state):
        self._block_in("on_checkpoint")

    def on_train_end(self):
        self._block_in("on_train_end")


class KilledWhileSaving(ReferenceTask):
    """Its state is the number of the checkpoint; trainer 1 kills its process in the second one, once.

    Trainer 0 waits at batch 32 until another process has resumed in its place, which joins no earlier.

    Args:
        mark: a file that is written just before.
        resumed: a file to which each trainer appends what ``on_resume`` gets.
    """

    def __init__(self, mark, resumed, **options):
        super().__init__(**options)
        self.mark, self.resumed, self.saves = Path(mark), Path(resumed), 0
        self.waits = self.mark.with_name("waits")

    def train_source(self, partition):
        if self.mark.exists():
            poll_until(time.monotonic() + 60, lambda: self.waits.exists() or None, threading.Event())
        return super().train_source(partition)

    def training_step(self, model, batch, batch_idx):
        if (self.trainer.trainer_index, batch_idx) == (0, 32):
            self.waits.touch()
            replaced = poll_until(time.monotonic() + 60, lambda: self.resumed.exists() or None, threading.Event())
            assert replaced, "trainer 1 was not replaced"
        return super().training_step(model, batch, batch_idx)

    def on_checkpoint(self, state):
        self.saves += 1
        if (self.trainer.trainer_index, self.saves) == (1, 2) and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state["saves"] = self.saves

    def on_resume(self, state):
        self.saves = state["saves"]
        with self.resumed.open("a") as file:
            file.write(f"trainer {self.trainer.trainer_index} resumes after save {self.saves}\n")

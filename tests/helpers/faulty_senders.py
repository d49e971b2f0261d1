"""Trainers whose parts of a checkpoint travel badly: slowly, or not to the end."""

import json
import os
import signal
import threading
import time
from pathlib import Path

from paramserver.checkpoint import serialization
from trainers import DdpTrainer, RpcTrainer


class DelayedParts:
    """A part leaves only when this trainer has trained some steps more, or has come to its end, and takes its time."""

    steps = 3
    _ended = False

    def init_connection(self):
        super().init_connection()
        self._trained = threading.Condition()
        carry = self._courier.submit

        def carry_late(job, *rest):
            step = self.step

            def late():
                with self._trained:
                    trained = self._trained.wait_for(lambda: self._ended or self.step >= step + self.steps, 30)
                assert trained, f"training stood still after the checkpoint of step {step}"
                threading.Event().wait(0.2)  # the slow network that is stood for
                job()

            carry(late, *rest)

        self._courier.submit = carry_late

    def agree(self, announcement):
        with self._trained:
            self._trained.notify_all()
        return super().agree(announcement)

    def save(self, reason):
        if reason in ("end", "interrupted"):
            with self._trained:
                self._ended = True
                self._trained.notify_all()
        super().save(reason)


class DelayedRpc(DelayedParts, RpcTrainer):
    pass


class DelayedDdp(DelayedParts, DdpTrainer):
    pass


class SlowRpc(DelayedRpc):
    """Parts are on their way for a while, and nothing else."""

    steps = 0


class SlowDdp(DelayedDdp):
    steps = 0


class KilledRpc(RpcTrainer):
    """Trainer 1 dies when half of its second part is with the server."""

    def init_connection(self):
        super().init_connection()
        call = self.remote.call

        def called(method, *args):
            answer = call(method, *args)
            if method == "deposit" and args[:2] == (1, 6):
                die(self)
            return answer

        self.remote.call = called


class FaultyDdp(DdpTrainer):
    """One rank gets a signal when two pieces of trainer 1's second part have left, or have come to rank 0.

    ``died`` in the folder of the runs then says who, when, and how many pieces there were.
    """

    number = signal.SIGKILL
    at = 1

    def init_connection(self):
        serialization.CHUNK_BYTES = 512
        super().init_connection()
        if self.trainer_index == self.at:
            name = "_send_piece" if self.at else "_take_piece"
            setattr(self._collection, name, self.counted(getattr(self._collection, name)))

    def counted(self, handle):
        handled = []

        def counting(*args):
            handle(*args)
            handled.append(self.step)
            if len([step for step in handled if step >= 6]) == 2:
                await_checkpoint(self)
                die(self, self.number, pieces=2, step=self.step)

        return counting


class KilledSender(FaultyDdp):
    pass


class KilledReceiver(FaultyDdp):
    at = 0


class FrozenSender(FaultyDdp):
    number = signal.SIGSTOP


class FrozenReceiver(KilledReceiver):
    number = signal.SIGSTOP


def die(trainer, number=signal.SIGKILL, **about):
    mark = {"pid": os.getpid(), "time": time.time(), **about}
    Path(trainer.config.logging.run_dir, "died").write_text(json.dumps(mark))
    os.kill(os.getpid(), number)
    threading.Event().wait(90)  # the signal may stop this thread a little later


def await_checkpoint(trainer):
    """The first one is on the disk."""
    latest = Path(trainer.config.logging.run_dir, trainer.config.logging.name, "checkpoints", "latest")
    deadline = time.monotonic() + 30
    while not latest.exists():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)

"""Trainers that send their parts of a checkpoint late, or die or freeze while they send."""

import json
import os
import signal
import threading
import time
from pathlib import Path

from paramserver.checkpoint import serialization
from paramserver.consistency import Verdict
from paramserver.trainers import DdpTrainer, RpcTrainer


class DelayedParts:
    """Sends a part only after ``steps`` more steps of training, or after the last step, and slowly."""

    steps = 3
    _ended = False

    def init_connection(self):
        super().init_connection()
        self._trained = threading.Condition()
        carry = self.control.sender.submit

        def carry_late(job, *rest):
            step = self.step

            def late():
                with self._trained:
                    trained = self._trained.wait_for(lambda: self._ended or self.step >= step + self.steps, 30)
                assert trained, f"training did not continue after the checkpoint of step {step}"
                threading.Event().wait(0.2)  # stands for a slow network
                job()

            carry(late, *rest)

        self.control.sender.submit = carry_late

    def agree(self):
        with self._trained:
            self._trained.notify_all()
        decision = super().agree()
        with self._trained:
            self._ended = decision.verdict is Verdict.END and not decision.resizes
            self._trained.notify_all()
        return decision


class DelayedRpc(DelayedParts, RpcTrainer):
    pass


class DelayedDdp(DelayedParts, DdpTrainer):
    pass


class SlowRpc(DelayedRpc):
    """Sending takes a while; training does not matter."""

    steps = 0


class SlowDdp(DelayedDdp):
    steps = 0


class KilledRpc(RpcTrainer):
    """Kills trainer 1 when the server has received half of its second part."""

    def init_connection(self):
        super().init_connection()
        send = self.server.send_part_chunk

        def send_once(step, chunk):
            send(step, chunk)
            if (self.trainer_index, step) == (1, 6):
                die(self)

        self.server.send_part_chunk = send_once


class FaultyDdp(DdpTrainer):
    """Sends one rank a signal when two chunks of trainer 1's second part have been sent, or received by rank 0.

    The file ``died`` in the folder of the runs records the process, the time and the number of chunks.
    """

    number = signal.SIGKILL
    at = 1

    def init_connection(self):
        serialization.CHUNK_BYTES = 512
        super().init_connection()
        if self.trainer_index == self.at:
            self.chunks = []  # of each part
            gather, parts = self.control.part_gather, self.control.parts
            self.count(gather, "send" if self.at else "receive", lambda: self.chunks.append(0))
            self.count(*((gather, "_send_chunk") if self.at else (parts, "add_chunk")), self.count_chunk)

    def count(self, owner, name, count):
        handle = getattr(owner, name)

        def counting(*args):
            count()
            return handle(*args)

        setattr(owner, name, counting)

    def count_chunk(self):
        if len(self.chunks) == 2 and self.chunks[1] == 2:  # before the third
            await_checkpoint(self)
            die(self, self.number, chunks=2, step=self.step)
        self.chunks[-1] += 1


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
    """Wait until the first checkpoint is on the disk."""
    latest = Path(trainer.config.logging.run_dir, trainer.config.logging.name, "checkpoints", "latest")
    deadline = time.monotonic() + 30
    while not latest.exists():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)

"""Trainers whose parts of a checkpoint travel badly: slowly, or not to the end."""

import os
import signal
import threading
from pathlib import Path

from trainers import DdpTrainer, RpcTrainer


class Held:
    """A part leaves only when this trainer has trained some steps more, or has come to its end, and takes its time."""

    steps = 3
    _ended = False

    def init_connection(self):
        super().init_connection()
        self._trained = threading.Condition()
        carry = self._courier.carry

        def carry_late(job, *rest):
            step = self.step

            def late():
                with self._trained:
                    trained = self._trained.wait_for(lambda: self._ended or self.step >= step + self.steps, 30)
                assert trained, f"training stood still after the checkpoint of step {step}"
                threading.Event().wait(0.2)  # the slow network that is stood for
                job()

            carry(late, *rest)

        self._courier.carry = carry_late

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


class HeldRpc(Held, RpcTrainer):
    pass


class HeldDdp(Held, DdpTrainer):
    pass


class LateRpc(HeldRpc):
    """Parts are on their way for a while, and nothing else."""

    steps = 0


class LateDdp(HeldDdp):
    steps = 0


class DyingRpc(RpcTrainer):
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


class DyingDdp(DdpTrainer):
    """The same in a process group."""

    def init_connection(self):
        super().init_connection()
        send = self._collection._send_piece

        def sent(piece):
            send(piece)
            if self.step >= 6:
                die(self)

        self._collection._send_piece = sent


def die(trainer):
    Path(trainer.config.logging.run_dir, "died").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)

"""A task that kills ranks once a spare process waits, and records who imported this module."""

import os
import select
import signal
import time
from pathlib import Path

from supervised_tasks import ranks_of
from tasks import ReferenceTask

LIMIT_S = 100.0

if "SPARE_IMPORTS" in os.environ:
    with Path(os.environ["SPARE_IMPORTS"]).open("a") as file:
        file.write(f"{os.getpid()}\n")


def waiting(logs):
    """The process ids of all spares that have waited for a role so far."""
    log = Path(logs) / "spares.log"
    words = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [int(line[-5]) for line in words if line[-4:] == ["waits", "for", "a", "role"]]


class KillsRanks(ReferenceTask):
    """Trainer 1 kills ranks, each after two steps of its process and once one more spare has waited.

    Args:
        folder: for a mark ``killed-<rank>`` for each rank, with the process ids of the rank and the spare.
        logs: of the run.
        ranks: which are killed, in this order.
    """

    def __init__(self, folder, logs, ranks, **options):
        super().__init__(**options)
        self.folder, self.logs, self.ranks = Path(folder), Path(logs), ranks
        self.batches = 0

    def _left(self):
        return [n for n, rank in enumerate(self.ranks) if not (self.folder / f"killed-{rank}").exists()]

    def on_batch_start(self, batch_idx):
        self.batches += 1
        if self.trainer.trainer_index == 0:
            if self.trainer.step >= 8:  # it must not train to the end meanwhile
                wait_until(lambda: not self._left() or len([*self.folder.glob("trainer-1-*")]) > 1, "no replacement")
            return
        (self.folder / f"trainer-1-{os.getpid()}").touch()
        if self.batches == 3 and (left := self._left()):
            self._kill(left[0])

    def _kill(self, number):
        wait_until(lambda: len(waiting(self.logs)) > number, "no spare waits")
        spare, process = waiting(self.logs)[number], ranks_of(os.getppid())[self.ranks[number]]
        imported = Path(os.environ["SPARE_IMPORTS"]).read_text().split()
        assert str(spare) not in imported, "a spare has run code of the user"
        (self.folder / f"killed-{self.ranks[number]}").write_text(f"{process.pid} {spare}")
        process.send_signal(signal.SIGKILL)
        if process.pid == os.getpid():
            signal.pause()


def wait_until(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        select.select([], [], [], 0.05)

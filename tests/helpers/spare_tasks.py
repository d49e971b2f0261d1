"""A task that kills ranks once a spare process waits, and records who imported this module."""

import os
import signal
import time
from pathlib import Path
from threading import Event

from supervised_tasks import ranks_of
from tasks import ReferenceTask

from paramserver.distributed.timeouts import poll_until

PAUSE_S = 4.0

if "SPARE_IMPORTS" in os.environ:
    with Path(os.environ["SPARE_IMPORTS"]).open("a") as file:
        file.write(f"{os.getpid()}\n")


def waiting(logs):
    """The process ids of all spares that have waited for a role so far."""
    log = Path(logs) / "spares.log"
    words = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [int(line[-5]) for line in words if line[-4:] == ["waits", "for", "a", "role"]]


class KillsRanks(ReferenceTask):
    """Trainer 1 kills ranks, each once one more spare has waited.

    Args:
        folder: for a mark ``killed-<rank>`` for each rank, with the process ids of the rank and the spare.
        logs: of the run.
        ranks: which are killed, in this order.
    """

    def __init__(self, folder, logs, ranks, **options):
        super().__init__(**options)
        self.folder, self.logs, self.ranks = Path(folder), Path(logs), ranks

    def _left(self):
        return [n for n, rank in enumerate(self.ranks) if not (self.folder / f"killed-{rank}").exists()]

    def on_batch_start(self, batch_idx):
        left = self._left()
        if self.trainer.trainer_index == 0 and left:  # it must not train to the end meanwhile
            poll_until(time.monotonic() + PAUSE_S, lambda: self._is_due(left[0]) or None, Event())
        elif left and self._is_due(left[0]):
            self._kill(left[0])

    def _is_due(self, number):
        return len(waiting(self.logs)) > number

    def _kill(self, number):
        spare, process = waiting(self.logs)[number], ranks_of(os.getppid())[self.ranks[number]]
        imported = Path(os.environ["SPARE_IMPORTS"]).read_text().split()
        assert str(spare) not in imported, "a spare has run code of the user"
        (self.folder / f"killed-{self.ranks[number]}").write_text(f"{process.pid} {spare}")
        process.send_signal(signal.SIGKILL)
        if process.pid == os.getpid():
            signal.pause()

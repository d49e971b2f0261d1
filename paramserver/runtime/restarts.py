"""How often, and when, a process starts again; and the trainer of a host with a co-located server, which may do so."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from paramserver.config import Config, Deadlines
from paramserver.process_utils import describe_exit

log = logging.getLogger("paramserver")

_POLL_S = 0.2
# A process that lived for longer has not died of its start.
_SHORT_LIFE_S = 10.0
_MAX_DELAY_S = 30.0


class RestartPolicy:
    """Counts the restarts of each rank. A rank starts again at once; after a second early death, with a delay.

    The delay doubles with each death soon after a start, from one second on.
    """

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self._restarts: dict[int, int] = {}
        self._short_lives: dict[int, int] = {}

    def allows(self, global_rank: int) -> bool:
        return self._restarts.get(global_rank, 0) < self.max_restarts

    def next_delay(self, global_rank: int, lived_s: float) -> tuple[float, int]:
        """Count a restart of a rank whose process lived for ``lived_s``; return the delay and the number of it."""
        number = self._restarts[global_rank] = self._restarts.get(global_rank, 0) + 1
        short = self._short_lives[global_rank] = (
            self._short_lives.get(global_rank, 0) + 1 if lived_s < _SHORT_LIFE_S and number > 1 else 0
        )
        return (min(2.0 ** (short - 1), _MAX_DELAY_S) if short else 0.0), number


class ColocatedTrainer:
    """A context manager that runs the trainer of this host, and starts it again if a signal ends it.

    ``command`` is that of this process. The trainer asks the kernel to kill it when this process dies, so that a
    command that starts again starts both. An error of the trainer ends the run by its own report.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], config: Config) -> None:
        self._command = [*command, "--colocated", "--parent", str(os.getpid())]
        self._environ = dict(environ)
        self._restarts = RestartPolicy(0 if config.server.on_loss == "fail" else config.cluster.max_restarts)
        self._limit_s = Deadlines.of(config).ended_s
        self._ends = threading.Event()
        self._has_failed = False
        # The kernel takes this thread for the parent, so it lives as long as the trainer.
        self._thread = threading.Thread(target=self._run, name="colocated-trainer", daemon=True)

    def __enter__(self) -> ColocatedTrainer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._has_failed = kind is not None
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        words: list[str] = []
        while not self._ends.is_set():
            began = time.monotonic()
            process = subprocess.Popen([*self._command, *words], env=self._environ, stdin=subprocess.DEVNULL)
            while process.poll() is None and not self._ends.wait(_POLL_S):
                pass
            if self._ends.is_set():
                self._end(process)
                return
            if process.returncode >= 0:
                return
            how = f"the trainer of this host was {describe_exit(process.returncode)}"
            if not self._restarts.allows(0):
                log.warning("%s, and is not started again", how)
                return
            delay_s, number = self._restarts.next_delay(0, time.monotonic() - began)
            log.warning("%s; it starts again (%d of %d)", how, number, self._restarts.max_restarts)
            self._ends.wait(delay_s)
            words = ["--again"]

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if self._has_failed:
            process.terminate()  # it may still wait for others
        try:
            process.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            log.warning("the trainer of this host did not end within %g s; it is killed", self._limit_s)
            process.kill()
            process.wait()

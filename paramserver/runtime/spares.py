"""Spare processes: they have imported what a rank needs, and take the role of a rank that has to start again."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paramserver.process_utils import is_stopped, kill_group
from paramserver.runtime.preloaded import assume_role, import_modules, receive_role, send_role, start_importing
from paramserver.runtime.rank_guard import RankGuard
from paramserver.runtime.restarts import RestartPolicy

log = logging.getLogger("paramserver")


@dataclass
class _Spare:
    process: subprocess.Popen[bytes]
    link: socket.socket
    started_at: float = field(default_factory=time.monotonic)

    def has_ended(self) -> bool:
        # Without reaping it: the guard must forget the process while its number is not used again.
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class Spares:
    """The spare processes of a supervisor. Its thread calls every method.

    Args:
        max_restarts: how many that die while they wait are replaced.
        log_file: receives their output until they have a role.
        guard: ends them if this process dies.
    """

    def __init__(
        self,
        count: int,
        max_restarts: int,
        environ: Mapping[str, str],
        log_file: Path,
        guard: RankGuard,
        note: Callable[[str], None],
    ) -> None:
        self._count = count
        self._policy = RestartPolicy(max_restarts)
        self._environ, self._log_file, self._guard, self._note = environ, log_file, guard, note
        self._waiting: list[_Spare] = []
        self._start_at = 0.0

    def fill(self) -> None:
        """Start the spares that are missing. Call it while no rank starts, for which the cores are needed."""
        while len(self._waiting) < self._count and time.monotonic() >= self._start_at:
            self._waiting.append(self._start())

    def _start(self) -> _Spare:
        process, link = start_importing("--spare", self._environ, self._log_file)
        self._guard.add(process.pid)
        return _Spare(process, link)

    def remove_dead(self) -> None:
        """Forget spares that have died. The first one is replaced at once, later ones as ranks are."""
        for spare in [s for s in self._waiting if s.has_ended()]:
            self._waiting.remove(spare)
            self._replace_dead(spare)

    def _replace_dead(self, spare: _Spare) -> None:
        exit_code = self._end(spare)
        how = f"a spare process is lost ({signal.Signals(-exit_code).name if exit_code < 0 else f'code {exit_code}'})"
        if self._policy.allows(0):
            delay_s, number = self._policy.next_delay(0, time.monotonic() - spare.started_at)
            self._start_at = time.monotonic() + delay_s
            self._note(f"{how}; another one starts ({number} of {self._policy.max_restarts})")
        else:
            self._count = min(self._count, len(self._waiting))
            self._note(f"{how}; it is not replaced. See {self._log_file}")

    def take(self, arguments: Sequence[str], descriptors: Sequence[int]) -> subprocess.Popen[bytes] | None:
        """Give a role to the spare that has waited longest.

        A spare that is still importing also serves: it ends sooner than a process that starts now.

        Args:
            arguments: of ``paramserver.launch``, without those of ``role_arguments``.
            descriptors: the log, then those of ``role_arguments``. The spare receives copies.

        Returns:
            The process, which the guard watches already; None if there is no spare.
        """
        self.remove_dead()
        while self._waiting:
            spare = self._waiting.pop(0)
            if not is_stopped(spare.process.pid):
                with suppress(BrokenPipeError):  # it died just now
                    send_role(spare.link, arguments, descriptors)
                    spare.link.close()
                    return spare.process
            self._replace_dead(spare)
        return None

    def close(self) -> None:
        """End all spares, and start no other one."""
        self._count = 0
        while self._waiting:
            self._end(self._waiting.pop())

    def _end(self, spare: _Spare) -> int:
        kill_group(spare.process.pid)
        self._guard.remove(spare.process.pid)
        spare.link.close()
        return spare.process.wait()


def wait_for_role(descriptor: int) -> list[str] | None:
    """Be a spare process: import what a rank needs, wait, and return the arguments of the rank to be.

    Returns:
        None if the supervisor is gone.
    """
    with socket.socket(fileno=descriptor) as link:
        import_modules()
        log.info("process %d waits for a role", os.getpid())
        role = receive_role(link)
    return None if role is None else assume_role(*role)

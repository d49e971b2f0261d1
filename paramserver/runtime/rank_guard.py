"""Ends the ranks of a run whose supervisor died, whatever they are doing.

When a supervisor dies, the kernel sends SIGTERM to its ranks (``die_with_parent``), so that they save and end. A rank
that is stopped, holds the interpreter's lock or blocks in a hook never reacts to that. So a supervisor also starts this
file as a process of its own, ``python rank_guard.py SUPERVISOR LIMIT_S``, and sends it the process ids of its ranks.
Once the supervisor is dead, the guard kills the process group of each rank as soon as the rank has ended, at the latest
``LIMIT_S`` seconds later. It imports the standard library and
``paramserver.platform`` only, to start at once and stay small.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

# Without a rank the guard ends at once.
_END_S = 5.0


class RankGuard:
    """The supervisor's end: starts the guard process, which lives until :meth:`close`.

    After this process died, ranks have ``limit_s`` to end in good order.
    """

    def __init__(self, limit_s: float) -> None:
        # Imported here: the guard process runs this file without these.
        from paramserver.cluster import process_environ
        from paramserver.cluster.network import hide_token

        environ = dict(process_environ())
        hide_token(environ)
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(limit_s)]
        # In a session of its own: neither Ctrl-C nor a signal to the supervisor's group ends it.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ, start_new_session=True, bufsize=0)

    def add(self, pid: int) -> None:
        """Guard the rank ``pid``, which leads a process group."""
        self._send(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """Forget a rank that has ended. Call it before the rank is reaped, while its number is not used again."""
        self._send(f"-{pid}\n")

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        # A guard that was killed is not worth a run: the signal of ``die_with_parent`` still ends the ranks.
        with suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())

    def close(self) -> None:
        """End the guard process. Call it once all ranks have ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()  # one that is stopped does not end by itself
        self._process.wait()


def main(supervisor: int, limit_s: float) -> None:
    ranks = _ranks_left_by(supervisor)
    deadline = time.monotonic() + limit_s
    for group, rank in ranks.items():
        if rank is not None:
            select.select([rank], [], [], max(deadline - time.monotonic(), 0.0))
        with suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(group, signal.SIGKILL)


def _ranks_left_by(supervisor: int) -> dict[int, int | None]:
    """Wait for the end of the supervisor, and return the ranks that it left: process group -> descriptor."""
    ranks: dict[int, int | None] = {}
    ends = _pidfd(supervisor)
    unread = b""
    while True:
        # Standard input also ends with the supervisor, unless a fork of it holds the other end of the pipe.
        gone = ends is None or os.getppid() != supervisor
        ready, _, _ = select.select([0] if ends is None else [0, ends], [], [], 0.0 if gone else None)
        if 0 not in ready:
            return ranks
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return ranks
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            pid = int(line[1:])
            if line.startswith(b"+"):
                ranks[pid] = _pidfd(pid)
            elif (rank := ranks.pop(pid)) is not None:
                os.close(rank)


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable once the process has ended; None = it has ended and is reaped."""
    with suppress(ProcessLookupError):
        from paramserver.platform import open_process

        return open_process(pid)
    return None


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))  # where the package is, which imports nothing else for this
    main(int(sys.argv[1]), float(sys.argv[2]))

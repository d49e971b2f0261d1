"""The fork server: a process that has imported what a rank needs, from which the supervisor forks its first ranks.

Each rank would import torch itself otherwise, which takes more than a second of a core. The fork server has no threads,
runs no code of the user, and has the environment of the ranks from its start. It ends once all ranks are started.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paramserver.errors import kind_and_message
from paramserver.process_utils import kill_group
from paramserver.runtime.preloaded import assume_role, import_modules, receive_role, send_role, start_importing
from paramserver.runtime.rank_guard import RankGuard

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_POLL_S = 0.1
_END_S = 5.0
_GO = b"1"

_subreaper_lock = threading.Lock()


class ForkedProcess:
    """A fork that is a child of this process, with what a supervisor uses of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit code; negative: the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkServer:
    """The supervisor's end: starts the fork server, which lives until :meth:`close`.

    Args:
        log_file: receives the output of the fork server.
        guard: ends it if this process dies.
        timeout_s: for the import and a fork. Without an answer by then, ranks have to be started in another way.

    Attributes:
        failed: why a fork was not made; empty if all were.
    """

    def __init__(self, environ: Mapping[str, str], log_file: Path, guard: RankGuard, timeout_s: float) -> None:
        self._guard, self._timeout_s = guard, timeout_s
        # Of an earlier attempt of the run.
        self._log_start = log_file.stat().st_size if log_file.exists() else 0
        self._process, self._link = start_importing("--fork_server", environ, log_file)
        self._guard.add(self._process.pid)
        self._log_file = log_file
        self.failed = ""

    def fork(
        self, arguments: Sequence[str], descriptors: Sequence[int], is_stopping: Callable[[], bool]
    ) -> ForkedProcess | None:
        """Start a rank as a fork, in a process group of its own, as a child of this process.

        Args:
            arguments: of ``paramserver.launch``, without those of ``role_arguments``.
            descriptors: the log, then those of ``role_arguments``. The fork receives copies.
            is_stopping: asked several times a second whether to give up.

        Returns:
            None if the fork server has failed, now or before: start a new process.
        """
        if self._link.fileno() < 0:
            return None
        with _adopt_orphans():
            try:
                send_role(self._link, [str(os.getpid()), *arguments], descriptors)
                pid = self._receive_pid(is_stopping)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except (OSError, ValueError) as error:
                # It has ended, or is too slow, or the fork is not a child of this process.
                self._close(0.0)
                self.failed = self._describe(error)
                return None
        return ForkedProcess(pid)

    def _describe(self, error: Exception) -> str:
        """Return why there is no fork: the last line that the fork server wrote, or else how it ended."""
        try:
            written = self._log_file.read_bytes()[self._log_start :].decode(errors="replace").strip()
        except OSError:
            written = ""
        if written:
            return written.splitlines()[-1]
        if isinstance(error, TimeoutError):
            return f"the process to fork them from did not answer within {self._timeout_s:g} s"
        return f"the process to fork them from ended without a message ({kind_and_message(error)})"

    def _receive_pid(self, is_stopping: Callable[[], bool]) -> int:
        deadline = time.monotonic() + self._timeout_s
        while not select.select([self._link], [], [], _POLL_S)[0]:
            if is_stopping() or time.monotonic() > deadline:
                raise TimeoutError
        return int(self._link.recv(32))

    def close(self) -> None:
        """End the fork server, but not its forks. Calling it again has no effect."""
        self._close(_END_S)

    def _close(self, limit_s: float) -> None:
        if self._link.fileno() < 0:
            return
        # It ends by itself, as it may not have released its last fork yet.
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)
        select.select([self._link], [], [], limit_s)
        self._link.close()
        kill_group(self._process.pid)
        self._guard.remove(self._process.pid)
        self._process.wait()


@contextmanager
def _adopt_orphans() -> Iterator[None]:
    """Make this process the parent of descendants whose parent ends meanwhile (prctl(2))."""
    prctl, before = ctypes.CDLL(None, use_errno=True).prctl, ctypes.c_int()
    with _subreaper_lock:
        prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            yield
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, before.value)


# In the fork server.


def serve_forks(descriptor: int) -> list[str] | None:
    """Be the fork server until the supervisor closes the socket.

    Returns:
        In each fork the arguments of the rank to be; None in the fork server at its end.
    """
    with socket.socket(fileno=descriptor) as link:
        import_modules()
        # A fork has only the thread that called it; what another thread holds would stay locked in it for ever.
        _end_library_threads()
        if names := _other_threads():
            print(f"the process to fork them from has other threads ({', '.join(names)}), which a fork would lose")
            return None
        while (role := receive_role(link)) is not None:
            (supervisor, *arguments), descriptors = role
            if _fork(link, int(supervisor)):
                break
            for received in descriptors:
                os.close(received)
    return None if role is None else assume_role(arguments, descriptors)


def _end_library_threads() -> None:
    """Let libraries end threads of their own: OpenBLAS, which numpy loads, does so at a fork, and starts them again."""
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _other_threads() -> list[str]:
    """Return the names of all threads but this one."""
    own = threading.get_native_id()
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != own]
    return [(task / "comm").read_text().strip() for task in tasks]


def _fork(link: socket.socket, supervisor: int) -> bool:
    """Fork a child of the supervisor, and send its process id; return whether this is the fork.

    A process in between ends at once, so that the supervisor adopts its child.
    """
    reading, writing = os.pipe()
    gate, release = os.pipe()
    between = os.fork()
    if between == 0:
        if rank := os.fork():
            os.setpgid(rank, rank)
            os.write(writing, str(rank).encode())
            os._exit(0)
        os.close(release)
        # Until the supervisor knows this process, which ends if the fork server does not come to that.
        if os.read(gate, 1) != _GO or os.getppid() != supervisor:
            os._exit(1)
        for descriptor in (reading, writing, gate):
            os.close(descriptor)
        return True
    os.waitpid(between, 0)
    os.close(writing)
    os.close(gate)
    link.send(os.read(reading, 32) or b"0")
    os.write(release, _GO)
    os.close(reading)
    os.close(release)
    return False

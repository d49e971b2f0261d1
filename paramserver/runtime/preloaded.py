"""Processes that have imported what a rank needs: the fork server and the spares, which get their roles by a socket.

Each rank would import torch itself otherwise, which takes more than a second of a core. The supervisor forks its first
ranks from the fork server, which has no threads, runs no code of the user, and has the environment of the ranks from
its start; it ends once all ranks are started. A spare waits to take the role of a rank that has to start again.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from paramserver.config.modes import Mode
from paramserver.errors import kind_and_message
from paramserver.importing import torch_import_without_gc
from paramserver.platform import CLOSE_ON_EXEC, FORKS_RANKS, adopt_orphans, is_stopped, other_threads, show_arguments
from paramserver.process_utils import OWN_GROUP, describe_exit, die_with_parent, kill_group
from paramserver.runtime.rank_guard import RankGuard
from paramserver.runtime.restarts import RestartPolicy

log = logging.getLogger("paramserver")

MODULES = (
    "paramserver.runtime.rank",
    "numpy.random",
    "torch._dynamo",
    "torch.profiler",
    "torch.utils.serialization",
    "encodings.idna",
)
"""What every rank imports until its first step. torch imports its compiler when the first optimizer is built."""

_COMMAND = (sys.executable, "-m", "paramserver.launch")

_MAX_MESSAGE_BYTES = 1 << 20
_MAX_DESCRIPTORS = 4

_POLL_S = 0.1
_END_S = 5.0
_GO = b"1"


def start_importing(
    flag: str, mode: Mode, environ: Mapping[str, str], log_file: Path
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start ``paramserver.launch --mode MODE --parent PID FLAG DESCRIPTOR``; return the process, and the socket to it.

    With the flag the process calls ``import_modules`` and waits for roles. The log receives its output until it has
    one.
    """
    link, child_link = socket.socketpair()
    with child_link, log_file.open("ab") as output:
        try:
            process = subprocess.Popen(
                # Long enough for ``show_arguments`` to put a rank there.
                [*_COMMAND, "--mode", mode.name, "--parent", str(os.getpid()), flag, f"{child_link.fileno():010d}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[child_link.fileno()],
                env=dict(environ),
                **OWN_GROUP,
            )
        except BaseException:
            link.close()
            raise
    return process, link


def send_role(link: socket.socket, arguments: Sequence[str], descriptors: Sequence[int]) -> None:
    """Send what ``receive_role`` returns."""
    socket.send_fds(link, [json.dumps(list(arguments)).encode() + b"\n"], list(descriptors))


def role_arguments(config: int, pipe: int, listener: int | None = None) -> list[str]:
    """Return the arguments of ``paramserver.launch`` that name descriptors of the rank's process.

    They are a file with the config, the writing end of the event pipe, and the socket of rank 0's store.
    """
    arguments = ["--config", f"/dev/fd/{config}", "--supervised", str(pipe)]
    return arguments if listener is None else [*arguments, "--listener", str(listener)]


def import_modules(mode: Mode, parent: int) -> None:
    """Import what a rank of the mode needs, and no module of the user. The process ends with its parent from now on."""
    die_with_parent(parent)
    with torch_import_without_gc():
        for name in (*MODULES, *mode.modules):
            import_module(name)
        if find_spec("tensorboard") is not None:
            import_module("torch.utils.tensorboard")


def receive_role(link: socket.socket) -> tuple[list[str], list[int]] | None:
    """Wait for the arguments and descriptors of a role; None if the supervisor has closed the socket, or is gone."""
    message, descriptors, _, _ = socket.recv_fds(link, _MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS, CLOSE_ON_EXEC)
    while not message.endswith(b"\n"):
        chunk = link.recv(_MAX_MESSAGE_BYTES) if message else b""
        if not chunk:
            return None
        message += chunk
    return json.loads(message), descriptors


def assume_role(arguments: Sequence[str], descriptors: Sequence[int]) -> list[str]:
    """Return the arguments of the rank to be. Standard output and error go to its log from here on."""
    output, *others = descriptors
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    show_arguments(arguments[:2])
    return [*arguments, *role_arguments(*others)]


# The fork server.


class ForkedProcess:
    """A fork that is a child of this process, with what a supervisor uses of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit code; negative: the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkServer:
    """The supervisor's end: starts the fork server, which lives until :meth:`close`.

    The guard ends it if this process dies. Without an answer to an import or a fork within ``timeout_s``, ranks have to
    be started in another way.
    """

    def __init__(
        self, mode: Mode, environ: Mapping[str, str], log_file: Path, guard: RankGuard, timeout_s: float
    ) -> None:
        self._guard, self._timeout_s = guard, timeout_s
        # Of an earlier attempt of the run.
        self._log_start = log_file.stat().st_size if log_file.exists() else 0
        self._log_file = log_file
        self._link: socket.socket | None = None  # None: there is no fork server, or it has ended
        self.failed = "" if FORKS_RANKS else "this system has no fork server"
        if not self.failed:
            self._process, self._link = start_importing("--fork_server", mode, environ, log_file)
            self._guard.add(self._process.pid)

    def fork(
        self, arguments: Sequence[str], descriptors: Sequence[int], is_stopping: Callable[[], bool]
    ) -> ForkedProcess | None:
        """Start a rank as a fork, in a process group of its own, as a child of this process.

        ``descriptors`` are the log, then those of ``role_arguments``; the fork receives copies. ``is_stopping`` is
        asked several times a second whether to give up. Return None if the fork server has failed, now or before: start
        a new process.
        """
        if self._link is None:
            return None
        with adopt_orphans():
            try:
                send_role(self._link, [str(os.getpid()), *arguments], descriptors)
                pid = self._receive_pid(self._link, is_stopping)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except (OSError, ValueError) as error:
                # It has ended, or is too slow, or the fork is not a child of this process.
                self.close(0.0)
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

    def _receive_pid(self, link: socket.socket, is_stopping: Callable[[], bool]) -> int:
        deadline = time.monotonic() + self._timeout_s
        while not select.select([link], [], [], _POLL_S)[0]:
            if is_stopping() or time.monotonic() > deadline:
                raise TimeoutError
        return int(link.recv(32))

    def close(self, limit_s: float = _END_S) -> None:
        """End the fork server, but not its forks. Calling it again has no effect."""
        link, self._link = self._link, None
        if link is None:
            return
        # It ends by itself, as it may not have released its last fork yet.
        with suppress(OSError):
            link.shutdown(socket.SHUT_WR)
        select.select([link], [], [], limit_s)
        link.close()
        kill_group(self._process.pid)
        self._guard.remove(self._process.pid)
        self._process.wait()


# In the fork server.


def serve_forks(descriptor: int, mode: Mode, parent: int) -> list[str] | None:
    """Be the fork server until the supervisor closes the socket; return in each fork the arguments of the rank to be.

    Return None in the fork server at its end.
    """
    with socket.socket(fileno=descriptor) as link:
        import_modules(mode, parent)
        # A fork has only the thread that called it; what another thread holds would stay locked in it for ever.
        _end_library_threads()
        if names := other_threads():
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


# Spares.


@dataclass
class _Spare:
    process: subprocess.Popen[bytes]
    link: socket.socket
    started_at: float = field(default_factory=time.monotonic)

    def has_ended(self) -> bool:
        # Without reaping it: the guard must forget the process while its number is not used again.
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@dataclass(eq=False)
class Spares:
    """The spare processes of a supervisor. Its thread calls every method.

    ``max_restarts`` that die while they wait are replaced. The log receives their output until they have a role.
    """

    _count: int
    max_restarts: InitVar[int]
    _mode: Mode
    _environ: Mapping[str, str]
    _log_file: Path
    _guard: RankGuard
    _note: Callable[[str], None]

    def __post_init__(self, max_restarts: int) -> None:
        self._policy = RestartPolicy(max_restarts)
        self._waiting: list[_Spare] = []
        self._start_at = 0.0

    def fill(self) -> None:
        """Start the spares that are missing. Call it while no rank starts, for which the cores are needed."""
        while len(self._waiting) < self._count and time.monotonic() >= self._start_at:
            process, link = start_importing("--spare", self._mode, self._environ, self._log_file)
            self._guard.add(process.pid)
            self._waiting.append(_Spare(process, link))

    def remove_dead(self) -> None:
        """Forget spares that have died. The first one is replaced at once, later ones as ranks are."""
        for spare in [s for s in self._waiting if s.has_ended()]:
            self._waiting.remove(spare)
            self._replace_dead(spare)

    def _replace_dead(self, spare: _Spare) -> None:
        exit_code = self._end(spare)
        how = f"a spare process is lost ({describe_exit(exit_code)})"
        if self._policy.allows(0):
            delay_s, number = self._policy.next_delay(0, time.monotonic() - spare.started_at)
            self._start_at = time.monotonic() + delay_s
            self._note(f"{how}; another one starts ({number} of {self._policy.max_restarts})")
        else:
            self._count = min(self._count, len(self._waiting))
            self._note(f"{how}; it is not replaced. See {self._log_file}")

    def take(self, arguments: Sequence[str], descriptors: Sequence[int]) -> subprocess.Popen[bytes] | None:
        """Give a role to the spare that has waited longest, with arguments and descriptors as for ``ForkServer.fork``.

        Return the process, which the guard watches already; None if there is no spare.
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


def wait_for_role(descriptor: int, mode: Mode, parent: int) -> list[str] | None:
    """Be a spare process: import what a rank needs, wait, and return the arguments of the rank to be.

    Return None if the supervisor is gone.
    """
    with socket.socket(fileno=descriptor) as link:
        import_modules(mode, parent)
        log.info("process %d waits for a role", os.getpid())
        role = receive_role(link)
    return None if role is None else assume_role(*role)

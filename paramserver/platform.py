"""What only Linux has, each with another way that a plain run takes elsewhere.

No other module names these calls, except for those that a plain run does not need (tests/laws/test_layers.py lists
them). ``PARAMSERVER_PORTABLE=1`` takes the other ways on Linux too, so that tests go through them. This module imports
the standard library only, as the guard of the ranks runs without the package's requirements.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

PORTABLE = not sys.platform.startswith("linux") or os.environ.get("PARAMSERVER_PORTABLE", "0") not in ("", "0")

SHARES_MEMORY = not PORTABLE
"""Segments need files in memory that cannot shrink, and sockets that end with a process. Elsewhere: messages, gloo."""

FORKS_RANKS = not PORTABLE
"""A fork server needs a supervisor that adopts its forks. Elsewhere each rank imports torch itself."""

CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
"""For ``recv_fds``: a child that is started meanwhile does not inherit the descriptors."""

_POLL_S = 0.1
_MOST_KEEPALIVE_S = 32_767  # tcp(7)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: unix(7)

_subreaper_lock = threading.Lock()


# Processes.


def open_process(pid: int) -> int:
    """Return a descriptor that is readable once the process ``pid`` has ended; the caller closes it.

    It is a pidfd, or the end of a pipe to which a thread writes.

    Raises:
        ProcessLookupError: it has ended, and is reaped.
    """
    if not PORTABLE:
        return os.pidfd_open(pid)
    os.kill(pid, 0)
    reading, writing = os.pipe()
    # Takes no lock of this package. Ends with the process that it waits for.
    threading.Thread(target=_write_at_end, args=(pid, writing), name="process-end", daemon=True).start()
    return reading


def _write_at_end(pid: int, writing: int) -> None:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # of another process, or it is reaped
        with suppress(ProcessLookupError):
            while not threading.Event().wait(_POLL_S):
                os.kill(pid, 0)
    with suppress(BrokenPipeError):  # the descriptor was closed before
        os.write(writing, b"\0")
    os.close(writing)


def has_ended(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def signal_process(descriptor: int, pid: int, number: int) -> None:
    """Send a signal to a process of ``open_process``, which a caller without pidfds has not reaped yet.

    Raises:
        ProcessLookupError: it has ended.
    """
    if PORTABLE:
        os.kill(pid, number)
    else:
        signal.pidfd_send_signal(descriptor, number)


def signal_at_end_of_parent(number: signal.Signals) -> None:
    """Let this process receive a signal when its parent dies.

    The kernel's parent is the thread that started this process; elsewhere it is its process, for which a thread looks.

    Raises:
        OSError: the kernel refuses it.
    """
    if PORTABLE:
        # Takes no lock. Ends with the process.
        threading.Thread(target=_signal_without, args=(os.getppid(), number), name="parent-end", daemon=True).start()
    elif ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _signal_without(parent: int, number: int) -> None:
    while os.getppid() == parent:
        threading.Event().wait(_POLL_S)
    os.kill(os.getpid(), number)


@contextmanager
def adopt_orphans() -> Iterator[None]:
    """Make this process the parent of descendants whose parent ends meanwhile, where that can be done (prctl(2))."""
    if PORTABLE:
        yield
        return
    prctl, before = ctypes.CDLL(None, use_errno=True).prctl, ctypes.c_int()
    with _subreaper_lock:
        prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            yield
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def descendants() -> list[int]:
    """Return the processes that run below this one; none where the system does not list them (proc(5))."""
    parents: dict[int, int] = {}
    for pid in [] if PORTABLE else [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]:
        with suppress(OSError):  # it has ended meanwhile
            state, parent = _stat(pid)[:2]
            if state != "Z":
                parents[pid] = int(parent)
    found: list[int] = []
    level = {os.getpid()}
    while level := {pid for pid, parent in parents.items() if parent in level}:
        found += level
    return found


def other_threads() -> list[str]:
    """Return the names of all threads of this process but this one, native ones too. See ``FORKS_RANKS``."""
    own = threading.get_native_id()
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != own]
    return [(task / "comm").read_text().strip() for task in tasks]


def show_arguments(arguments: Sequence[str]) -> None:
    """Show ``arguments`` as the last ones of this process, for ``ps``, in the place of its own last two.

    What does not fit there is cut off. Where the kernel has no such place, nothing happens.
    """
    if PORTABLE:
        return
    start, end = map(int, _stat(os.getpid())[45:47])
    size = sum(len(word) + 1 for word in sys.orig_argv[-2:])
    shown = "\0".join(arguments).encode()[: size - 1].ljust(size, b"\0")
    with suppress(OSError), Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        if memory.read(end - start) == Path("/proc/self/cmdline").read_bytes():
            memory.seek(end - size)
            memory.write(shown)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # that of another user
    return True


def is_stopped(pid: int) -> bool:
    """Return whether a signal stopped the process ``pid``, such as SIGSTOP; False where that is not known."""
    return not PORTABLE and _stat(pid)[0] == "T"


def cpu_ticks(pid: int) -> int:
    """Return the CPU time that all threads of the process ``pid`` have taken, in clock ticks (proc(5)).

    Where that is not known a process counts as busy.
    """
    if PORTABLE:
        return int(time.monotonic() * os.sysconf("SC_CLK_TCK"))
    user, system = _stat(pid)[11:13]
    return int(user) + int(system)


def start_ticks(pid: int) -> int:
    """Return when the kernel started the process ``pid``, in clock ticks since boot (proc(5)); 0 = not known."""
    return 0 if PORTABLE else int(_stat(pid)[19])


def core_wait_ns() -> int | None:
    """Return for how long this thread could run and had no core; None where the kernel does not count."""
    if PORTABLE:
        return None
    try:
        # CPU time, time on a run queue, number of slices (Linux, Documentation/scheduler/sched-stats.rst).
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1])
    except OSError:
        return None


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name of the program."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return stat.rpartition(")")[2].split()


# This machine.


def num_usable_cores() -> int:
    return (os.cpu_count() or 1) if PORTABLE else len(os.sched_getaffinity(0))


def host_number() -> str:
    """Return what all processes of this machine share, and on Linux of this boot and this network namespace only."""
    if PORTABLE:
        import uuid

        return f"{uuid.getnode():012x}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/net').readlink()}"


# Files and sockets.


def memory_file(name: str, sealable: bool = False) -> int:
    """Return the descriptor of a new file without a place in any folder, which ends with its last user.

    It is in memory, or where temporary files are.
    """
    if not PORTABLE:
        return os.memfd_create(name, os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealable else 0))
    import tempfile

    descriptor, path = tempfile.mkstemp(prefix=f"{name}-")
    Path(path).unlink()
    return descriptor


def open_memory_file(pid: int, descriptor: int) -> int:
    """Open for reading what ``memory_file`` returned in the process ``pid``, of the same user (proc(5)).

    It may be another file, of a process that has this number here; opening that does not block either.

    Raises:
        OSError: there is no such process or descriptor, as seen from here.
    """
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def seal(descriptor: int) -> None:
    """Let no process change the size of a sealable file, which would kill those that map it."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def abstract_address(name: str) -> str:
    """Return the address of a unix socket that is in no folder, and ends with its process (unix(7))."""
    return f"\0{name}"


def peer_uid(connected: socket.socket) -> int:
    """Return the user of the process at the other end of a unix socket."""
    _, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


class WakeupFd:
    """Wakes a thread in ``poll``: an eventfd, or a pipe. ``set`` is safe from any thread, also after ``close``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        if PORTABLE:
            self._fd, self._writing = os.pipe()
            os.set_blocking(self._fd, False)
            os.set_blocking(self._writing, False)
        else:
            self._fd = self._writing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        # The lock keeps a late writer from writing to another file that got this number after close().
        with self._lock:
            if self._fd >= 0:
                with suppress(BlockingIOError):  # it is readable for long
                    os.write(self._writing, (1).to_bytes(8, sys.byteorder))

    def clear(self) -> None:
        """Make the descriptor unreadable again, in the thread that was woken; no effect if it is not readable."""
        with suppress(BlockingIOError):
            os.read(self._fd, 1 << 16)

    def close(self) -> None:
        with self._lock:
            for descriptor in {self._fd, self._writing} - {-1}:
                os.close(descriptor)
            self._fd = self._writing = -1


def end_unacknowledged(connection: socket.socket, after_s: float) -> None:
    """Let a TCP connection end when what was sent has not been acknowledged for so long, or nothing has when it idles.

    Without it the kernel's limit is about 15 minutes (tcp(7)), as it is on other systems.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if not PORTABLE:
        seconds = min(max(round(after_s), 1), _MOST_KEEPALIVE_S)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)


# Control groups (cgroups(7)), by which a container or a scheduler limits this process.


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Yield the mounted folders of this process's group and of its ancestors, each with whether it is of version 1."""
    lines = [line.split(":", 2) for line in read_text(root / "proc/self/cgroup").splitlines()]
    paths = {tuple(controllers.split(",")): path for _, controllers, path in lines}
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        (top, mountpoint), (kind, _, options) = before.split()[3:5], after.split()[:3]
        is_v1 = kind == "cgroup" and controller in options.split(",")
        if not is_v1 and kind != "cgroup2":
            continue
        listed = controller if is_v1 else ""
        path = PurePosixPath(next((path for controllers, path in paths.items() if listed in controllers), "/"))
        # A container mounts its own group only, and those below it.
        inner = path.relative_to(top) if path.is_relative_to(top) else PurePosixPath()
        for group in (inner, *inner.parents):
            yield root / mountpoint.lstrip("/") / group, is_v1


def cpu_limit(root: Path = Path("/")) -> float | None:
    """Return how many cores the groups let this process use at a time; None without a limit."""
    limits = []
    for folder, is_v1 in group_folders("cpu", root):
        if is_v1:
            words = [read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        else:
            words = read_text(folder / "cpu.max").split()
        # Without a limit, the quota is "max", or -1 in version 1.
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def available_bytes(root: Path = Path("/")) -> int:
    """Return how much this process may still allocate: the host's MemAvailable, or less if a control group limits it.

    As in MemAvailable, the page cache does not count as usage of a control group, because the kernel reclaims it.
    ``proc`` and the control groups are mounted in ``root``.
    """
    fields = dict(line.split(":", 1) for line in read_text(root / "proc/meminfo").splitlines())
    mem_available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([mem_available, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield limit minus usage of this process's memory group and of its ancestors, version 1 or 2."""
    for folder, is_v1 in group_folders("memory", root):
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
        limit, usage = (read_text(folder / name).strip() for name in files)
        if limit not in ("", "max") and usage:
            counts = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
            names = (f"{'total_' if is_v1 else ''}{name}" for name in ("inactive_file", "active_file"))
            yield int(limit) - int(usage) + sum(int(counts.get(name, 0)) for name in names)


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for lack of memory: of this process's group, or of the host."""
    files = [f / ("memory.oom_control" if v1 else "memory.events") for f, v1 in group_folders("memory", root)]
    for file in (*files, root / "proc/vmstat"):  # the root group of version 2 has no such file
        counts = dict(line.split(maxsplit=1) for line in read_text(file).splitlines())
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return 0


def read_text(file: Path) -> str:
    """Return the text of a file; empty if it does not exist, as in the root group or one that was just removed."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

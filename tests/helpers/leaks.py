"""Detects what a test leaves behind: threads, processes, environment variables, signal handlers, ports, RPC agents."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramserver.process_utils import STOP_SIGNALS

# Daemon threads of this project; daemon threads of libraries may stay.
OUR_THREADS = (
    "updates",
    "colocated-trainer",
    "feeder",
    "coordinator",
    "publisher",
    "receiver",
    "heartbeat",
    "checkpoint-writer",
    "checkpoint-sender",
    "control-channel",
    "segment-host",
    "calls-",
    "store-relay",
    "watchdog",
    "stop-limit",
    "fault-director",
    "zap-authenticator",
    "prometheus",
)
# Set by pytest for each phase, and by scikit-learn and torch's compiler while they are imported.
_NOT_OURS = frozenset(
    {"PYTEST_CURRENT_TEST", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
)
_PATIENCE_S = 2.0
_HELPERS = ("resource_tracker", "forkserver.py")


def variables() -> dict[str, str]:
    """Return the environment variables that a test must restore."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_OURS}


def changed_variables(before: dict[str, str]) -> list[str]:
    now = variables()
    return [f"variable {name}" for name in sorted(now.keys() | before.keys()) if now.get(name) != before.get(name)]


@dataclass(frozen=True)
class ProcessSnapshot:
    """The state of this process that every test must restore."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    environ: dict[str, str]
    handlers: dict[int, Any]
    ports: frozenset[str]
    states: frozenset[str]

    @classmethod
    def take(cls) -> ProcessSnapshot:
        return cls(
            frozenset(threading.enumerate()),
            frozenset(_children()),
            variables(),
            {int(number): signal.getsignal(number) for number in STOP_SIGNALS},
            frozenset(_listening()),
            frozenset(_states()),
        )

    def leaks(self) -> list[str]:
        """Describe what exists now and did not at the snapshot. Threads that are ending are joined first."""
        for thread in _ours(set(threading.enumerate()) - self.threads):
            thread.join(_PATIENCE_S)
        now = ProcessSnapshot.take()
        if now.ports - self.ports or now.states - self.states:
            gc.collect()  # the traceback of a caught error may hold a store or an agent
            now = ProcessSnapshot.take()
        found = [f"thread {thread.name}" for thread in _ours(now.threads - self.threads)]
        found += [f"child process {pid} ({_command(pid)})" for pid in now.children - self.children]
        found += changed_variables(self.environ)
        found += [f"handler of {signal.Signals(n).name}" for n in now.handlers if now.handlers[n] != self.handlers[n]]
        found += [f"listening socket {port}" for port in sorted(now.ports - self.ports)]
        return found + sorted(now.states - self.states)

    def restore_environ(self) -> None:
        """Restore the environment variables, so that only one test fails for a changed one."""
        for name in [n for n in os.environ if n not in self.environ and n not in _NOT_OURS]:
            del os.environ[name]
        os.environ.update(self.environ)


def _ours(threads: set[threading.Thread] | frozenset[threading.Thread]) -> list[threading.Thread]:
    alive = [t for t in threads if t.is_alive() and (not t.daemon or t.name.startswith(OUR_THREADS))]
    return sorted(alive, key=lambda t: t.name)


def _children() -> list[int]:
    """Children of any thread, zombies included; the fork server and multiprocessing's helper stay on purpose."""
    lists = []
    for file in Path("/proc/self/task").glob("*/children"):
        try:
            lists.append(file.read_text())
        except OSError:
            continue  # the thread has just ended
    pids = [int(pid) for text in lists for pid in text.split()]
    return [pid for pid in pids if not any(name in _command(pid) for name in _HELPERS)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return "gone"


def _listening() -> set[str]:
    """Inodes of the listening TCP sockets of this process.

    Each is asked: the kernel takes 15 ms for each table of all sockets, where many ports may be in use.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - for each test twice: Path takes several times as long
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            if target.startswith("socket:[") and _listens(int(name)):
                found.add(target[8:-1])
        except OSError:
            continue  # the descriptor of this very listing, or one that was closed meanwhile
    return found


def _listens(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as one:
        is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
        return is_tcp and bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _states() -> list[str]:
    """Global states of modules that are set; a module that is not imported has none."""
    checks = {
        "an initialised process group": ("torch.distributed", lambda m: m.is_initialized()),
        "an RPC agent": ("torch.distributed.rpc", lambda m: m.api._is_current_rpc_agent_set()),
        "a hosted parameter server": ("paramserver.distributed.rpc_calls", lambda m: bool(m._handlers)),
        "a role": ("paramserver.context", lambda m: m._role is not None),
    }
    return [what for what, (name, is_there) in checks.items() if name in sys.modules and is_there(sys.modules[name])]

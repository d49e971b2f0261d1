"""Other processes of tests: whether those run that a test ends, and calls in a fork.

A process may be reaped between any two system calls.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable

import psutil


def is_alive(pid: int) -> bool:
    """Return whether the process ``pid`` runs; a zombie that no process has reaped yet does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def wait_until_ended(pids: Iterable[int], timeout_s: float = 20.0) -> None:
    """Wait for the end of these processes.

    Raises:
        AssertionError: some of them still run after ``timeout_s`` seconds.
    """
    pids, deadline = list(pids), time.monotonic() + timeout_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"processes {alive} are left of {pids}"
        select.select([], [], [], 0.02)


def error_in_fork(call: Callable[[], object], timeout_s: int = 10) -> str:
    """Return the text of the error that a call raises in a fork of this process; empty if none.

    Raises:
        AssertionError: it has not returned within ``timeout_s`` seconds.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(timeout_s)
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - reported to the test
            os.write(writer, str(error).encode())
        os._exit(0)  # without what this process would do at its exit
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0, "the call in the fork has not returned"
    return text

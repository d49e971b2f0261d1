"""Whether other processes run, for tests that end them. A process may be reaped between any two system calls."""

from __future__ import annotations

import select
import time
from collections.abc import Iterable

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

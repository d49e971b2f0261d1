"""Bounded waits: a call in a thread that is abandoned after a timeout, and a poll with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from paramserver.errors import DeadlineExceeded, Interrupted

T = TypeVar("T")


# How soon an interrupted wait ends.
_POLL_S = 0.1
_INTERRUPTED_S = 2.0


def call_with_timeout(
    timeout_s: float, what: str, function: Callable[[], T], interrupted: threading.Event | None = None
) -> T:
    """Return the result of ``function``, which runs in a thread that is abandoned after ``timeout_s``.

    The error message names ``what`` the call waits for, as in "the shutdown of the RPC agent".

    Raises:
        DeadlineExceeded: the function did not return in time.
        Interrupted: ``interrupted`` was set first.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # noqa: BLE001 - re-raised by the caller
            failure.append(error)

    # Takes no lock. A daemon, so that an abandoned call does not keep the process alive.
    thread = threading.Thread(target=run, name=f"within-{what}", daemon=True)
    thread.start()
    if interrupted is None:
        thread.join(timeout_s)
    else:
        deadline = time.monotonic() + timeout_s
        while thread.is_alive() and not interrupted.is_set() and (left_s := deadline - time.monotonic()) > 0:
            thread.join(min(left_s, _POLL_S))
        if interrupted.is_set():
            thread.join(_INTERRUPTED_S)  # a call that is about to return leaves no thread behind
        if thread.is_alive() and interrupted.is_set():
            raise Interrupted(f"interrupted while waiting for {what}")
    if thread.is_alive():
        raise DeadlineExceeded(f"{what} did not finish within {round(timeout_s, 2):g} s")
    if failure:
        raise failure[0]
    return outcome[0]


def poll_until(
    deadline: float, ready: Callable[[], T | None], interrupted: threading.Event, every_s: float = 0.02
) -> T | None:
    """Call ``ready``, at least once, until it returns something else than None, and return that.

    Return None if the deadline (of ``time.monotonic()``) passed or ``interrupted`` was set first.
    """
    while (answer := ready()) is None:
        if time.monotonic() >= deadline or interrupted.wait(every_s):
            return None
    return answer

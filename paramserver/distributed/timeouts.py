"""Waits that end: a call in a thread that may be given up, and a poll with a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from paramserver.errors import DeadlineExceeded

T = TypeVar("T")


def call_with_timeout(timeout_s: float, what: str, function: Callable[[], T]) -> T:
    """The result of ``function``, run in a thread that is given up after ``timeout_s``.

    For calls into torch that a frozen peer can hold for longer than their own timeout. What the function raises is
    raised here.

    Raises:
        DeadlineExceeded: it did not return in time; ``what`` says what was waited for.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it
            failure.append(error)

    thread = threading.Thread(target=run, name=f"within-{what}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise DeadlineExceeded(f"{what} did not finish within {timeout_s:g} s")
    if failure:
        raise failure[0]
    return outcome[0]


def poll_until(
    deadline: float, ready: Callable[[], T | None], interrupted: threading.Event, every_s: float = 0.02
) -> T | None:
    """The first answer of ``ready`` that is not None; None where ``deadline`` or ``interrupted`` came first.

    Only for what offers no way to wait, such as a port that nobody listens on yet.
    """
    while (answer := ready()) is None:
        if time.monotonic() >= deadline or interrupted.wait(every_s):
            return None
    return answer

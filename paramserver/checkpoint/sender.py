"""A thread that finishes what training has begun: one job at a time, in the order given."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from paramserver.errors import DeadlineExceeded, ParamserverError

_log = logging.getLogger(__name__)
_WAKE_S = 5.0
_GIVE_UP_S = 3.0

SEND_TIMEOUT_S = 600.0
"""How long a part of a checkpoint may take from its trainer to the disk's queue on rank 0."""


class BackgroundSender:
    """Carries out jobs in a thread of its own, so that their owner goes on at once. A context manager.

    One job is in progress and none waits: who gives the next one waits for the end of the last. So at most one copy of
    what is carried exists, and couriers of several processes that get the same jobs stay in step.

    Args:
        background: False carries out each job in the caller's own thread, before it goes on.
        what: of what is carried, for messages.
        heard: ``time.monotonic()`` of the last sign that what is carried moves; until then nobody waits too long.
    """

    def __init__(self, background: bool, what: str, heard: Callable[[], float] = lambda: 0.0) -> None:
        self.background = background
        self.what = what
        self._heard = heard
        self._changed = threading.Condition()
        self._job: Callable[[], None] | None = None
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None], timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Begin ``job`` once the last one has ended.

        Raises:
            Exception: the last job's failure, or this one's without ``background``.
            DeadlineExceeded: the last one did not end, or move, within ``timeout_s`` seconds.
        """
        if not self.background:
            job()
            return
        self.wait(timeout_s)
        with self._changed:
            if self._closed:
                raise ParamserverError(f"the courier of {self.what} must be open to take a job; it is closed")
            self._job = job
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="checkpoint-sender", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Wait until nothing is in progress.

        Raises:
            Exception: a job's failure.
            DeadlineExceeded: it did not end, or move, within ``timeout_s`` seconds.
        """
        self._await_idle(timeout_s, self._heard)

    def _await_idle(self, timeout_s: float, heard: Callable[[], float]) -> None:
        began = time.monotonic()
        with self._changed:
            while self._job is not None:
                remaining_s = max(began, heard()) + timeout_s - time.monotonic()
                if remaining_s <= 0:
                    raise DeadlineExceeded(
                        f"{self.what} must be with rank 0 within {timeout_s:g} s, and is not; look at the network and "
                        "at rank 0's disk, or save less often"
                    )
                self._changed.wait(remaining_s)
            if self._error is not None:
                raise self._error

    def close(self, timeout_s: float) -> None:
        """Finish the job in progress, and end the thread.

        Raises:
            Exception: a job's failure.
            DeadlineExceeded: it did not end within ``timeout_s`` seconds; the thread is given up.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._await_idle(timeout_s, lambda: 0.0)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            failure: BaseException | None = None
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - kept: the next call raises it to the owner
                failure = error
            with self._changed:
                self._job, self._error = None, self._error or failure
                self._changed.notify_all()
            del job  # and what it holds

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while self._job is None:
                if self._closed:
                    return None
                self._changed.wait(_WAKE_S)
            return self._job

    def __enter__(self) -> BackgroundSender:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Close on the failing path (an owner that ends well has called ``finish``): a moment for what is in progress.

        Raises nothing: what failed here is recorded, what ends the owner is told by the owner.
        """
        try:
            self.close(_GIVE_UP_S)
        except Exception as failure:  # noqa: BLE001 - recorded
            _log.warning("%s did not arrive: %s", self.what, failure)

"""A thread that sends a trainer's part of a checkpoint to rank 0 while the trainer trains."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from paramserver.errors import DeadlineExceeded, ParamserverError

_log = logging.getLogger(__name__)
_WAKE_S = 5.0
_ABORT_S = 3.0

SEND_TIMEOUT_S = 600.0
"""How long a part of a checkpoint may take from its trainer to the writer's queue on rank 0."""


class BackgroundSender:
    """Runs jobs in its own thread, one at a time and in order. A context manager.

    One job is in progress and none waits: ``submit`` waits for the end of the last one. So at most one copy of what is
    sent exists, and the senders of processes that submit the same jobs stay in step. Owns the thread
    ``checkpoint-sender``. Without ``background`` each job runs in the caller's thread, before ``submit`` returns.
    ``last_progress`` is ``time.monotonic()`` of the last sign of progress; each one extends the deadline of a wait.
    """

    def __init__(self, background: bool, what: str, last_progress: Callable[[], float] = lambda: 0.0) -> None:
        self.background = background
        self.what = what
        self._last_progress = last_progress
        self._changed = threading.Condition()
        # ``_changed`` guards ``_job``, ``_closed`` and ``_error``. ``_job`` is the one in progress; none waits in
        # addition.
        self._job: Callable[[], None] | None = None
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None], timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Start ``job`` once the last one has ended.

        Raises:
            Exception: the last job's failure, or this one's without ``background``.
            DeadlineExceeded: the last one did not end, or make progress, within ``timeout_s`` seconds.
        """
        if not self.background:
            job()
            return
        self.wait(timeout_s)
        # Only the training thread submits, so no other job can appear between the wait and this block.
        with self._changed:
            if self._closed:
                raise ParamserverError(f"the sender of {self.what} must be open to take a job; it is closed")
            self._job = job
            self._changed.notify_all()
            if self._thread is None:
                # A daemon: the job may be inside a call to a dead rank 0, which nothing interrupts. Made at the first
                # job, as a run without checkpoints needs none.
                self._thread = threading.Thread(target=self._work, name="checkpoint-sender", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Wait until no job is in progress.

        Raises:
            Exception: a job's failure.
            DeadlineExceeded: it did not end, or make progress, within ``timeout_s`` seconds.
        """
        self._wait_idle(timeout_s, self._last_progress)

    def _wait_idle(self, timeout_s: float, last_progress: Callable[[], float]) -> None:
        began = time.monotonic()
        with self._changed:
            while self._job is not None:
                # Called under the lock, so ``last_progress`` must not block. Computed again after each wake-up, as
                # progress may have moved the deadline meanwhile.
                remaining_s = max(began, last_progress()) + timeout_s - time.monotonic()
                if remaining_s <= 0:
                    raise DeadlineExceeded(
                        f"{self.what} must be with rank 0 within {timeout_s:g} s, and is not; look at the network and "
                        "at rank 0's disk, or save less often"
                    )
                self._changed.wait(remaining_s)
            if self._error is not None:
                raise self._error

    def close(self, timeout_s: float) -> None:
        """Wait for the job in progress, and end the thread. Progress does not extend this wait.

        Raises:
            Exception: a job's failure.
            DeadlineExceeded: it did not end within ``timeout_s`` seconds; the thread is abandoned.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # After ``_closed`` is set: the job in progress ends, and no other is accepted meanwhile.
        self._wait_idle(timeout_s, lambda: 0.0)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def abort(self) -> None:
        """Close on the failing path (an owner that ends well has called ``wait``), with a short deadline.

        Raises nothing: a failure here is logged, as the owner already has the error that ends it.
        """
        try:
            self.close(_ABORT_S)
        except Exception as failure:  # noqa: BLE001 - logged
            _log.warning("%s did not arrive: %s", self.what, failure)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            failure: BaseException | None = None
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - kept: the next call raises it to the owner
                failure = error
            with self._changed:
                # ``_job`` is cleared only after the job: a caller that waited for None may use what the job used.
                self._job, self._error = None, self._error or failure
                self._changed.notify_all()
            del job  # and the copy that it holds, which would otherwise live until the next job

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while self._job is None:
                if self._closed:
                    return None
                self._changed.wait(_WAKE_S)
            # The job stays in ``_job`` while it runs; ``_work`` clears it.
            return self._job

    def __enter__(self) -> BackgroundSender:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abort()

"""The thread of a server that computes updates, so that no handler waits while an update is computed."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from paramserver.config.deadlines import GRACE_S
from paramserver.context import place_of_user_code

log = logging.getLogger("paramserver")

Job = Callable[[], None]
SubmitFn = Callable[[Job], None]


def run_now(job: Job) -> None:
    """Run a job in the thread that submits it: for a server whose calls all come from one thread."""
    job()


class UpdateExecutor:
    """Runs jobs one after the other, in the order in which they are submitted.

    It alone writes the parameters and the optimizer's state of a server that runs. A job takes the lock of the server
    only for what follows from its result, never while it computes, so handlers, and with them liveness, do not depend
    on how long an update takes. ``close`` waits ``timeout_s`` for the job that runs.

    Example::

        >>> updates, done = UpdateExecutor(timeout_s=5.0), threading.Event()
        >>> updates.submit(done.set)
        >>> done.wait(5.0)
        True
        >>> updates.close()
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closing = False
        self._error: BaseException | None = None
        self._job_began = math.inf
        # Ends with ``close``. A job handles its own errors; one that escapes is raised there.
        self._thread = threading.Thread(target=self._run, name="updates", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Run ``job`` after those that were submitted before; from any thread. It is dropped after ``close``."""
        self._jobs.put(job)

    def stuck_place(self) -> str:
        """Return where in the code of the user a job is that has run for longer than ``GRACE_S``; "" if nowhere."""
        is_long = time.monotonic() - self._job_began > GRACE_S
        return place_of_user_code([self._thread]) if is_long else ""

    def abandon(self) -> None:
        """Let ``close`` not wait for the job that runs: the run ends because it does not."""
        self._timeout_s = 0.0

    def close(self) -> None:
        """Wait for the job that runs, and end the thread; those after it are dropped, as the run has ended.

        A job that does not end in time is abandoned with its thread, so that the run ends with its own reason.

        Raises:
            BaseException: what ended the thread before.
        """
        self._closing = True
        self._jobs.put(None)
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            log.warning("the update in progress did not end within %g s; its thread is abandoned", self._timeout_s)
        elif self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None and not self._closing:
                self._job_began = time.monotonic()
                job()
                self._job_began = math.inf
        except BaseException as error:
            self._error = error
            log.exception("the thread of updates ends")

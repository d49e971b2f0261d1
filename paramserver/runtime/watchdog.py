"""A watchdog: writes the stacks of all threads of a rank that makes no progress to its log."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path

# A rank that holds the interpreter's lock is ended after ``lost_after_s``; its stacks are written before that.
WATCHDOG_SHARE = 0.7
_POLLS = 5


class Watchdog:
    """Writes the stacks of a process once it held the interpreter's lock for long, or made no progress for longer.

    A thread of the C runtime writes (``faulthandler.dump_traceback_later``), so that it needs no lock. The thread
    ``watchdog`` defers it again and again: it cannot while another thread holds the lock, and does not without
    progress. There is one timer in a process.

    Args:
        log: the file to append to.
        progress: returns a number that changes with the work of this process.
        lost_after_s: a process that runs no Python for most of this time is written.
        stalled_after_s: so is one whose progress does not change for this time.

    Example::

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = Path(folder) / "rank-0.log"
        ...     with Watchdog(log, progress=lambda: 0, lost_after_s=0.2, stalled_after_s=0.0) as watchdog:
        ...         written = watchdog.stalled.wait(20.0) and _wait_for_text(log, "most recent call first", 20.0)
        >>> written
        True
    """

    def __init__(self, log: Path, progress: Callable[[], object], lost_after_s: float, stalled_after_s: float) -> None:
        self._log = log
        self._progress = progress
        self._limit_s = lost_after_s * WATCHDOG_SHARE
        self._stalled_after_s = stalled_after_s
        self.stalled = threading.Event()
        self._closed = threading.Event()
        # Takes no lock. Ends with ``__exit__``.
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._file = self._log.open("ab")
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._file.close()

    def _run(self) -> None:
        last, since = self._progress(), time.monotonic()
        while not self._closed.wait(self._limit_s / _POLLS):
            current, now = self._progress(), time.monotonic()
            if current != last:
                last, since = current, now
                self.stalled.clear()
            if now - since < self._stalled_after_s:
                faulthandler.dump_traceback_later(self._limit_s, file=self._file)
            elif not self.stalled.is_set():
                faulthandler.dump_traceback_later(self._limit_s, file=self._file)  # the last time: it will be written
                self.stalled.set()


def _wait_for_text(file: Path, text: str, limit_s: float) -> bool:
    """Return whether ``text`` appears in ``file`` within ``limit_s``."""
    deadline, poll = time.monotonic() + limit_s, threading.Event()
    while text not in file.read_text(errors="replace"):
        if time.monotonic() > deadline:
            return False
        poll.wait(0.01)
    return True

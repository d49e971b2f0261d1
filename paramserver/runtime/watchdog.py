"""The stacks of a rank that hangs or crashes, in its log."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR2
"""Makes a supervised rank write the stacks of its threads."""

_POLLS = 10


def write_stacks_on_signal() -> None:
    """Write the stacks of all threads to standard error at each ``STACKS_SIGNAL``, also while a thread holds the lock.

    They are written at the signal of a crash too, such as SIGSEGV, of which the process dies.

    Call it in the main thread, before other threads start: the signal is handled in the thread ``stacks``, so that it
    does not interrupt a system call of another one. For the life of the process.
    """
    # Written in C, in the thread that the kernel chooses: one that holds the interpreter's lock changes no stack.
    faulthandler.enable(file=sys.stderr, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [STACKS_SIGNAL])

    def receive() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACKS_SIGNAL])
        threading.Event().wait()

    # Takes no lock. Ends with the process.
    threading.Thread(target=receive, name="stacks", daemon=True).start()


class Watchdog:
    """Writes the stacks of a process that makes no progress, once each time.

    ``progress`` returns a value that changes with the work of this process.
    """

    def __init__(self, log: Path, progress: Callable[[], object], stalled_after_s: float) -> None:
        self._log = log
        self._progress = progress
        self._stalled_after_s = stalled_after_s
        self.written = threading.Event()
        self._closed = threading.Event()
        # Takes no lock. Ends with ``__exit__``.
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        last, since = self._progress(), time.monotonic()
        while not self._closed.wait(self._stalled_after_s / _POLLS):
            current, now = self._progress(), time.monotonic()
            if current != last:
                last, since = current, now
                self.written.clear()
            elif now - since > self._stalled_after_s and not self.written.is_set():
                with self._log.open("a") as file:
                    print(f"no step for {self._stalled_after_s:g} s; the stacks of all threads:", file=file, flush=True)
                    faulthandler.dump_traceback(file, all_threads=True)
                self.written.set()

"""What lies between the thread that receives and the feeder: samples on one way, what became of them on the other."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence

from paramserver.online.validator import SampleAccepted


class WakeupFd:
    """Wakes a thread that polls. ``ring`` is for any thread, also after ``close``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def hear(self) -> None:
        """Take note, in the thread that polls, once it was woken."""
        os.eventfd_read(self._descriptor)

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1


class HandoffQueue:
    """Samples that were accepted, in their order, until the buffer has them.

    One thread receives: ``put``, ``settled``, ``end``, ``fail``. One takes: ``take``, ``taken``. Anybody closes. It has
    no limit of its own: who sends may have so many on their way, and no more.

    Args:
        bell: rung when something was taken, or when all is over.
    """

    def __init__(self, bell: WakeupFd) -> None:
        self._bell = bell
        self._changed = threading.Condition()
        self._waiting: deque[SampleAccepted] = deque()
        self._handed: deque[SampleAccepted] = deque()
        self._settled: list[SampleAccepted] = []
        self._error: BaseException | None = None
        self._ended = False
        self._closed = False

    def put(self, accepted: Sequence[SampleAccepted]) -> None:
        with self._changed:
            self._waiting.extend(accepted)
            self._changed.notify()

    def settled(self) -> list[SampleAccepted]:
        """What the buffer has got since this was asked last."""
        with self._changed:
            settled, self._settled = self._settled, []
        return settled

    def is_empty(self) -> bool:
        """Whether the buffer has got everything, and all of that was ``settled``."""
        with self._changed:
            return not (self._waiting or self._handed or self._settled)

    def simulations(self) -> list[int]:
        """Those of which the buffer has not got everything, or not all of that was ``settled``."""
        with self._changed:
            return sorted({one.key[0] for one in (*self._waiting, *self._handed, *self._settled)})

    def end(self) -> None:
        """No more will come: ``take`` gives what waits, and then None."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """No more can come: ``take`` raises this at once, unless all had ended before."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify()

    def take(self, most: int, timeout: float | None) -> list[SampleAccepted] | None:
        """Up to ``most`` of what waits; nothing where none came within ``timeout`` seconds; None at the end.

        Raises:
            BaseException: what made the receiving thread fail.
        """
        with self._changed:
            self._changed.wait_for(self._is_due, timeout)
            if self._closed:
                return None
            if self._error is not None and not self._ended:
                raise self._error
            group = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            self._handed.extend(group)
            return group if group or not self._ended else None

    def _is_due(self) -> bool:
        return bool(self._waiting) or self._ended or self._closed or self._error is not None

    def taken(self, n: int) -> None:
        """The buffer has got the next ``n`` of what ``take`` gave."""
        with self._changed:
            self._settled += [self._handed.popleft() for _ in range(n)]
        self._bell.ring()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Nobody takes any more: what waits is dropped."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()
        self._bell.ring()

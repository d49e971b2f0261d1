"""The queue between the receiver thread and the feeder: samples in one direction, acknowledgements in the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from paramserver.online.validator import SampleAccepted
from paramserver.platform import WakeupFd


class HandoffQueue:
    """Accepted samples in order of arrival, kept until the buffer has stored them.

    A sample passes three stages: waiting (after ``put``), handed out (after ``get``) and stored (after
    ``mark_stored``), and leaves the queue with ``pop_stored``. Only then does the receiver thread acknowledge it, which
    is how back-pressure reaches the clients. The queue has no capacity: the clients' windows bound it.

    Threads: the receiver thread calls ``put``, ``pop_stored``, ``finish`` and ``fail``; the feeder calls ``get`` and
    ``mark_stored``; any thread may call ``close``. One condition guards all fields. No caller holds it while it blocks
    on a socket or on the buffer. ``wakeup`` is set when samples were stored or the queue is closed; it wakes the
    receiver thread.

    Example::

        >>> queue = HandoffQueue(WakeupFd())
        >>> queue.put([SampleAccepted(None, (), (0, step)) for step in range(3)])
        >>> [sample.key for sample in queue.get(2, timeout_s=0)]
        [(0, 0), (0, 1)]
        >>> queue.mark_stored(1)
        >>> [sample.key for sample in queue.pop_stored()]
        [(0, 0)]
        >>> queue.is_empty()
        False
    """

    def __init__(self, wakeup: WakeupFd) -> None:
        self._wakeup = wakeup
        self._changed = threading.Condition()
        self._waiting: deque[SampleAccepted] = deque()
        self._handed_out: deque[SampleAccepted] = deque()
        self._stored: list[SampleAccepted] = []
        self._error: BaseException | None = None
        self._finished = False
        self.closed = False

    # Called by the receiver thread.

    def put(self, samples: Sequence[SampleAccepted]) -> None:
        with self._changed:
            self._waiting.extend(samples)
            self._changed.notify()

    def pop_stored(self) -> list[SampleAccepted]:
        """The samples that the buffer has stored since the last call."""
        with self._changed:
            stored, self._stored = self._stored, []
        return stored

    def is_empty(self) -> bool:
        """Whether the buffer has stored all samples, and ``pop_stored`` has returned them all."""
        with self._changed:
            return not (self._waiting or self._handed_out or self._stored)

    def pending_simulations(self) -> list[int]:
        """The simulations of the samples that are in the queue, in any stage."""
        with self._changed:
            return sorted({sample.key[0] for sample in (*self._waiting, *self._handed_out, *self._stored)})

    def finish(self) -> None:
        """No more samples come: ``get`` returns what waits, and then None."""
        with self._changed:
            self._finished = True
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """No more samples can come: ``get`` raises this error at once, unless the queue was finished before."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify()

    # Called by the feeder.

    def get(self, max_samples: int, timeout_s: float | None) -> list[SampleAccepted] | None:
        """Up to ``max_samples`` of the waiting samples; an empty list after ``timeout_s`` seconds; None at the end.

        Raises:
            BaseException: the error of the receiver thread.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting or self._finished or self.closed or self._error is not None, timeout_s
            )
            # In this order: after close() nothing is wanted, and an error after the end is of no concern.
            if self.closed:
                return None
            if self._error is not None and not self._finished:
                raise self._error
            samples = [self._waiting.popleft() for _ in range(min(max_samples, len(self._waiting)))]
            self._handed_out.extend(samples)
            return samples if samples or not self._finished else None

    def mark_stored(self, n: int) -> None:
        """The buffer has stored the next ``n`` samples that ``get`` returned."""
        with self._changed:
            self._stored += [self._handed_out.popleft() for _ in range(n)]
        self._wakeup.set()

    # Called by any thread.

    def close(self) -> None:
        """Drop the waiting samples and wake both threads: ``get`` returns None, the receiver thread ends."""
        with self._changed:
            self.closed = True
            self._waiting.clear()
            self._changed.notify()
        self._wakeup.set()

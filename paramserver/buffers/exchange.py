"""Who waits for what: the one lock between the producers and the consumer of a buffer."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from paramserver.buffers.batch import Batch, Counters
from paramserver.buffers.checks import check_limits
from paramserver.buffers.contents import Contents, Prepared
from paramserver.buffers.order import Slots
from paramserver.errors import BufferClosed, BufferExhausted, BufferTimeout


class Exchange(ABC):
    """The waiting half of ``Buffer``, which says what the arguments mean."""

    def __init__(
        self,
        capacity: int,
        *,
        seed: int | Sequence[int] = 0,
        watermark: int = 0,
        max_bytes: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        check_limits(capacity, watermark, max_bytes, batch_size)
        self.capacity = capacity
        self.watermark = watermark
        self._rng = np.random.default_rng(seed)
        self._contents = Contents(capacity, max_bytes)
        # What the consumer asked for last, or is going to ask for.
        self._asked = batch_size or 1
        self._lock = threading.Lock()
        # Producers wait for room, the consumer until it is ready. Two conditions, so that a put wakes no producer.
        self._room = threading.Condition(self._lock)
        self._ready = threading.Condition(self._lock)
        # The n that the consumer waits for; 0 while it does not wait.
        self._wanted = 0
        self._finished = self._closed = False
        self._mark: Any = None
        self._counters = Counters()
        self._restore_order(np.empty(0, np.int64), 0)

    # What a kind decides, always under the lock.

    @abstractmethod
    def _needed(self, n: int) -> int:
        """Return how many samples must be held before ``get_batch(n)`` goes on."""

    @abstractmethod
    def _append(self, slot: int) -> None:
        """Take a new sample into the order."""

    @abstractmethod
    def _draw(self, n: int) -> tuple[Slots, Slots, int]:
        """Serve up to n samples: their slots, those of them to release, and how many were new."""

    @abstractmethod
    def _order(self) -> Slots:
        """Return the slots held, in the order from which draws are made."""

    @abstractmethod
    def _restore_order(self, slots: Slots, unseen: int) -> None:
        """Start with an order of exactly these slots, of which the first ``unseen`` count as such for a reservoir."""

    def _admits(self, size: int) -> bool:
        """Whether a sample of this size may be put now."""
        held = self._contents
        return held.count < self.capacity and (held.max_bytes is None or held.bytes + size <= held.max_bytes)

    def _make_room(self, size: int) -> None:
        """Evict what must go for an admitted sample of this size."""

    def _is_ready(self, n: int) -> bool:
        return self._contents.count >= self._needed(n)

    # Producers.

    def put(self, sample: Any, key: Any = None, timeout: float | None = None, *, last: bool = False) -> None:
        """Put one sample, with its identity ``key``; wait while there is no room.

        Where samples are stacked, their values are copied; other objects are held as they are. ``last`` finishes the
        buffer in the same moment, so that no draw can fall between the last sample and the knowledge that it was that.

        Raises:
            BufferTimeout: there was no room for ``timeout`` seconds.
            BufferClosed: closed or finished, before or meanwhile; the sample was not taken.
            ValueError: the sample requires gradients, or can never be held within ``max_bytes``.
        """
        deadline = _deadline(timeout)
        with self._putting(last):
            self._put(sample, key, deadline)

    def put_many(
        self,
        samples: Iterable[Any],
        keys: Iterable[Any] | None = None,
        timeout: float | None = None,
        *,
        last: bool = False,
        mark: Any = None,
    ) -> int:
        """Put all samples in order and return their number. Errors as of ``put``, and how many were put.

        ``mark`` is kept from the last sample on, for the state: what the producer needs to go on after it.
        """
        # A generator is read before the lock is taken: it may take its time.
        samples = list(samples)
        keys = [None] * len(samples) if keys is None else list(keys)
        if len(keys) != len(samples):
            raise ValueError(f"keys ({len(keys)}) must be as many as samples ({len(samples)}); give one key per sample")
        deadline = _deadline(timeout)
        with self._putting(last):
            for done, (sample, key) in enumerate(zip(samples, keys, strict=True)):
                try:
                    self._put(sample, key, deadline)
                except (BufferTimeout, BufferClosed) as error:
                    raise type(error)(f"{error}; {done} of {len(samples)} samples were put") from error
            self._mark = mark
        return len(samples)

    @contextmanager
    def _putting(self, last: bool) -> Iterator[None]:
        """The lock, until what was put is copied."""
        with self._lock:
            try:
                yield
            finally:
                self._contents.flush()
            if last:
                self._finished = True
                self._wake_all()

    def _put(self, sample: Any, key: Any, deadline: float | None) -> None:
        self._check_put()
        prepared = self._prepare(sample)
        while not self._admits(prepared[2]):
            self._await_room(prepared[2], deadline)
            # While this one waited, another producer's sample may have changed how samples are kept.
            if prepared[0] is not self._contents.storage:
                prepared = self._prepare(sample)
        self._make_room(prepared[2])
        self._append(self._contents.insert(prepared, key))
        self._counters.puts += 1
        self._tell_consumer()

    def _prepare(self, sample: Any) -> Prepared:
        return self._contents.prepare(sample, max(self.watermark, self._asked))

    def _check_put(self) -> None:
        self._check_open()
        if self._finished:
            raise BufferClosed("the buffer must not be finished when a sample is put; call finish() after the last put")

    def _await_room(self, size: int, deadline: float | None) -> None:
        """Wait once for something to change."""
        held = self._contents
        # Nothing can be got either: no room would ever come. Only max_bytes can lead here.
        if not self._is_ready(self._asked):
            raise ValueError(
                f"max_bytes ({held.max_bytes}) must hold what a get waits for, {self._needed(self._asked)} samples; "
                f"{held.count} take {held.bytes} bytes and the next one {size}; raise max_bytes"
            )
        # The caller looked for room just before, so a wake-up that comes with the timeout is not lost.
        remaining = _remaining(deadline)
        if remaining is not None and remaining <= 0:
            raise BufferTimeout(
                f"a put must find room before its timeout, {held.count} of {self.capacity} samples are held "
                f"({held.unseen} unseen); get faster or raise the timeout"
            )
        since = time.monotonic()
        self._room.wait(remaining)
        self._counters.put_wait_s += time.monotonic() - since
        self._check_put()

    def _tell_consumer(self) -> None:
        # Waking it for each sample of a batch would cost a thread switch per put.
        if self._wanted and self._is_ready(self._wanted):
            self._ready.notify()

    # The consumer.

    def get(self, timeout: float | None = None) -> Any:
        """One sample, as ``get_batch(1)`` draws it."""
        return self.get_batch(1, timeout).samples[0]

    def get_batch(self, n: int, timeout: float | None = None) -> Batch:
        """Draw n samples; wait until as many and the watermark are held. After ``finish()`` what is there, at once.

        Raises:
            BufferTimeout: not ready for ``timeout`` seconds.
            BufferExhausted: finished and empty.
            BufferClosed: closed, before or meanwhile.
            ValueError: n samples can never be held.
        """
        with self._lock:
            if not self._await_ready(n, timeout):
                raise BufferTimeout(
                    f"get_batch({n}) must be served within {timeout} s, {self._contents.count} samples are held "
                    f"({self._contents.unseen} unseen) and {self._needed(n)} needed; feed faster or raise the timeout"
                )
            slots, gone, new = self._draw(n)
            # Gathered before the lock is free again: the next put may write into a released slot.
            batch = self._contents.batch(slots, new)
            self._contents.release(gone)
            self._counters.gets += len(slots)
            self._counters.batches += 1
            # Each sample served makes room for one put at most; in bytes it may be room for many small ones.
            if self._contents.max_bytes is None:
                self._room.notify(len(slots))
            else:
                self._room.notify_all()
            return batch

    def wait_ready(self, n: int, timeout: float | None) -> bool:
        """Wait until ``get_batch(n)`` would return at once: True; or until ``timeout`` seconds passed: False.

        It stays true until the next get, except in a reservoir of objects with ``max_bytes``, where one large sample
        may evict several small ones.

        Raises:
            BufferExhausted: finished and empty.
            BufferClosed: closed, before or meanwhile.
        """
        with self._lock:
            return self._await_ready(n, timeout)

    def _await_ready(self, n: int, timeout: float | None) -> bool:
        self._check_open()
        self._check_n(n)
        deadline = _deadline(timeout)
        while not self._finished and not self._is_ready(n):
            remaining = _remaining(deadline)
            if remaining is not None and remaining <= 0:
                return False
            self._await_samples(n, remaining)
        if self._contents.count == 0:
            raise BufferExhausted("the buffer must hold samples to get one, it is finished and empty; stop getting")
        return True

    def _await_samples(self, n: int, remaining: float | None) -> None:
        # _wanted is reset also where a signal handler raises in the wait.
        since = time.monotonic()
        self._wanted = n
        try:
            self._ready.wait(remaining)
        finally:
            self._wanted = 0
            self._counters.get_wait_s += time.monotonic() - since
        self._check_open()

    def _check_n(self, n: int) -> None:
        if n < 1 or n > self.capacity:
            raise ValueError(
                f"n ({n}) must be from 1 to the capacity ({self.capacity}); ask for fewer or raise capacity"
            )
        # A producer may be waiting for a get that now needs more than max_bytes admits.
        if n > self._asked:
            self._room.notify_all()
        self._asked = n

    # Both ends.

    def finish(self) -> None:
        """No more samples will come: wake everyone, let the consumer drain. Again, or after close: no effect."""
        with self._lock:
            self._finished = True
            self._wake_all()

    def close(self) -> None:
        """Stop now: every wait, and every later put and get, raises BufferClosed."""
        with self._lock:
            self._closed = True
            self._wake_all()

    def _wake_all(self) -> None:
        self._room.notify_all()
        self._ready.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise BufferClosed("the buffer must be open, it was closed; make a new one")

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def exhausted(self) -> bool:
        """Finished and empty."""
        with self._lock:
            return self._finished and self._contents.count == 0

    def __len__(self) -> int:
        return self._contents.count

    def servings_left(self) -> int | None:
        """How many samples will still be served, counted with their repetitions; None while more may come."""
        with self._lock:
            return self._servings_held() if self._finished else None

    def _servings_held(self) -> int:
        return self._contents.count


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - time.monotonic()

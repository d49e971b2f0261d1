"""Who waits for what: the one lock between the producers and the consumer of a buffer.

The limits of a buffer, refused at the start where no wait could ever end.

What a buffer is to its owner: an exchange of samples that can be looked at, saved and loaded.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from paramserver.buffers.batch import Batch, BufferInfo, ServingCounts
from paramserver.buffers.contents import Prepared, SampleStore
from paramserver.buffers.slots import Slots
from paramserver.buffers.storage import Take
from paramserver.errors import BufferClosed, BufferExhausted, BufferTimeout, CheckpointError


def check_limits(capacity: int, watermark: int, max_bytes: int | None, batch_size: int | None) -> None:
    check_at_least("capacity", capacity, 1, "set it to the number of samples that a trainer may hold")
    check_at_least("watermark", watermark, 0, "use 0 for none")
    if max_bytes is not None:
        check_at_least("max_bytes", max_bytes, 1, "leave it out for no limit")
    if watermark > capacity:
        raise ValueError(
            f"watermark ({watermark}) must be at most capacity ({capacity}), else it is never reached; "
            "lower watermark or raise capacity"
        )
    if batch_size is not None:
        check_at_least("batch_size", batch_size, 1, "leave it out where it is not known")
        if batch_size > capacity:
            raise ValueError(
                f"batch_size ({batch_size}) must be at most capacity ({capacity}), else no batch is ever gathered; "
                "lower batch_size or raise capacity"
            )


def check_min_new(min_new_per_batch: int, batch_size: int | None, capacity: int) -> None:
    check_at_least("min_new_per_batch", min_new_per_batch, 0, "use 0 for none")
    name, limit = ("capacity", capacity) if batch_size is None else ("batch_size", batch_size)
    if min_new_per_batch > limit:
        raise ValueError(
            f"min_new_per_batch ({min_new_per_batch}) must be at most {name} ({limit}), else no batch is ever "
            "gathered; lower min_new_per_batch"
        )


def check_at_least(name: str, value: int, least: int, cure: str) -> None:
    if value < least:
        raise ValueError(f"{name} ({value}) must be at least {least}; {cure}")


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
        self._contents = SampleStore(capacity, max_bytes)
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
        self._counters = ServingCounts()
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


class Buffer(Exchange):
    """Samples between many producer threads and ONE consumer thread, the trainer's.

    ``Fifo``, ``Firo`` and ``Reservoir`` say which sample is served next and which goes. ``finish()`` says that no more
    samples will come: what is held is drained. ``close()`` stops at once and wakes everyone with BufferClosed.
    ``timeout=None`` waits without limit and is meant for feeder threads, whose owner calls ``close()``; everyone else
    gives a timeout in seconds. Draws come from ``numpy.random.default_rng(seed)`` and depend on the sequence of puts
    and gets only.

    Args:
        capacity: samples held at most.
        seed: of the draws.
        watermark: samples held before the first get.
        max_bytes: bytes of samples held at most.
        batch_size: the ``n`` that will be asked for, where it is known.
    """

    kind: ClassVar[str]

    def expected_batches(self, samples: int, batch_size: int) -> int | None:
        """Batches that ``samples`` puts will give; None where that depends on timing."""
        return None

    def info(self) -> BufferInfo:
        """Take a snapshot; also of a closed buffer."""
        with self._lock:
            held = self._contents
            return BufferInfo(
                kind=self.kind,
                population=held.count,
                unseen=held.unseen,
                capacity=self.capacity,
                bytes=held.bytes,
                seen_histogram=held.histogram(),
                **vars(self._counters),
            )

    # Checkpoints.

    def state_dict(self, samples: bool = True, take: Take | None = None) -> dict[str, Any]:
        """Everything that the next draws depend on, for ``torch.load(weights_only=True)``, taken under the lock.

        ``counters.puts`` agrees with the content. A finished buffer is finished after loading; who has more samples by
        then sets ``finished`` to False first.

        Args:
            samples: False stores keys only, for samples that ``fetch`` can give back.
            take: gives memory for the columns of samples, of so many bytes; None = fresh memory.

        Raises:
            UnsupportedConfiguration: a sample or key cannot be stored without pickling its class.
            BufferClosed: closed.
        """
        # One lock for all of it: the position of the source is derived from the number of puts.
        with self._lock:
            self._check_open()
            return {
                "kind": self.kind,
                "finished": self._finished,
                "counters": dict(vars(self._counters)),
                "mark": self._mark,
                "rng": self._rng.bit_generator.state,
                **self._own_state(),
                **self._contents.state(self._order(), samples, take),
            }

    def load_state_dict(self, state: dict[str, Any], fetch: Callable[[Any], Any] | None = None) -> None:
        """Replace the content; the next draws are those of the buffer that was saved. For before the feeder starts.

        Args:
            state: of ``state_dict``, of a buffer of the same kind.
            fetch: gives the sample of a key, for a state without samples.

        Raises:
            CheckpointError: another kind, more samples than fit, or keys without ``fetch``.
        """
        self._check_state(state, fetch)
        samples = [fetch(key) for key in state["keys"]] if fetch and state["samples"] is None else None
        contents = SampleStore(self.capacity, self._contents.max_bytes)
        contents.restore(state, samples)
        # Nothing has changed so far: what is refused leaves the buffer as it was.
        with self._lock:
            self._check_open()
            self._contents = contents
            # The saved order is the order of the slots now, so the same draws give the same samples.
            self._counters = ServingCounts(**state["counters"])
            self._finished = state["finished"]
            self._mark = state["mark"]
            self._rng.bit_generator.state = state["rng"]
            self._restore_order(np.arange(contents.count), contents.unseen)
            self._load_own_state(state)
            self._wake_all()

    def _check_state(self, state: dict[str, Any], fetch: Callable[[Any], Any] | None) -> None:
        if state["kind"] != self.kind:
            raise CheckpointError(
                f"buffer.kind ({self.kind}) must be the checkpoint's, {state['kind']}; set buffer.kind to it"
            )
        count = len(state["keys"])
        if count > self.capacity:
            raise CheckpointError(
                f"capacity ({self.capacity}) must hold the {count} samples of the checkpoint; raise it"
            )
        if count and state["samples"] is None and fetch is None:
            raise CheckpointError(
                f"fetch (None) must be given, the state has {count} keys and no samples; give a function of a key"
            )

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Take back what ``_own_state`` gave."""

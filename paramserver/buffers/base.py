"""The base class of all buffers: blocking put and get under a single lock, limits, and checkpoints.

``Buffer`` owns the lock, the waits and the counters; its ``SampleStore`` holds the samples. A subclass decides in which
order samples are served.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from paramserver.buffers.positions import AppliedPositions
from paramserver.buffers.storage import AllocateBytes, Batch, SampleStore, Slots, StackedSamples
from paramserver.errors import BufferClosed, BufferExhausted, BufferTimeout, CheckpointError


@dataclass
class ServingCounts:
    """What a buffer counts since its creation, also across a checkpoint. Attributes as in ``BufferInfo``."""

    puts: int = 0
    gets: int = 0
    batches: int = 0
    evicted: int = 0
    put_wait_s: float = 0.0
    get_wait_s: float = 0.0
    stale: int = 0


@dataclass(frozen=True)
class BufferInfo:
    """A consistent snapshot of a buffer's counts.

    Attributes:
        kind: fifo, firo or reservoir.
        population: samples held.
        unseen: of these, how many were never served.
        capacity: samples that may be held.
        puts: samples put since creation.
        gets: samples served since creation.
        batches: batches served since creation.
        evicted: samples that a reservoir removed, in a put or, after ``finish()``, in the get that served them; and
            those that were removed as too old after they were served.
        put_wait_s: seconds that producers were blocked, summed over them.
        get_wait_s: seconds that the consumer was blocked.
        bytes: size of the samples held.
        stale: samples that were never served, as they had become too old (``expire``).
        seen_histogram: {times served: samples}, over every sample ever put, held or removed.

    Example::

        >>> from paramserver.buffers import Fifo
        >>> buffer = Fifo(capacity=8)
        >>> buffer.put(1.5, key=0)
        >>> info = buffer.info()
        >>> info.kind, info.population, info.unseen
        ('fifo', 1, 1)
    """

    kind: str
    population: int
    unseen: int
    capacity: int
    puts: int
    gets: int
    batches: int
    evicted: int
    put_wait_s: float
    get_wait_s: float
    bytes: int
    stale: int
    seen_histogram: dict[int, int]


class SlotIndex(ABC):
    """The slots in use, in the order in which a buffer draws them.

    A restored one starts with ``slots``, of which the first ``num_unseen`` were never served.
    """

    def __init__(self, capacity: int, slots: Slots, num_unseen: int) -> None:
        self._slots = np.empty(capacity, np.int64)
        self._slots[: len(slots)] = slots
        self._count = len(slots)
        self.unseen = num_unseen

    def __len__(self) -> int:
        return self._count

    @abstractmethod
    def extend(self, slots: Slots) -> None:
        """Add the slots of new samples, in their order."""

    def keep(self, stays: npt.NDArray[np.bool_]) -> None:
        """Remove the slots that are not marked, in the order of ``slots``; the others stay in their order.

        So it makes no difference whether slots are added before or after it, except among those that were served.
        """
        left = self.slots()[stays]
        self._slots[: len(left)] = left
        self._count = len(left)

    def slots(self) -> Slots:
        """Return a copy of all slots in their order."""
        held: Slots = self._slots[: self._count].copy()
        return held


class Buffer(ABC):
    """Samples between any number of producer threads and ONE consumer thread, the trainer's.

    A put blocks while there is no room, a get blocks until enough samples are held. ``finish()`` marks the end of the
    input: what is held is drained. ``close()`` stops at once and wakes every waiting thread with BufferClosed.
    ``timeout=None`` waits without limit; it is meant for feeder threads, whose owner calls ``close()``. All other
    callers pass a timeout in seconds. Random draws come from ``numpy.random.default_rng(seed)`` and depend only on the
    sequence of puts and gets.

    Args:
        capacity: samples held at most.
        seed: of the draws.
        watermark: samples held before the first get.
        max_bytes: bytes of samples held at most.
        batch_size: the ``n`` of future gets, if it is known.

    Example::

        >>> from paramserver.buffers import Fifo
        >>> buffer = Fifo(capacity=8)
        >>> buffer.put_many([0.5, 1.5, 2.5], keys=["a", "b", "c"])
        3
        >>> buffer.finish()
        >>> batch = buffer.get_batch(2, timeout=1.0)
        >>> batch.keys, batch.stacked
        (['a', 'b'], tensor([0.5000, 1.5000], dtype=torch.float64))
        >>> buffer.get_batch(2, timeout=1.0).keys  # the last batch of a drain may be smaller
        ['c']
        >>> buffer.exhausted
        True
    """

    kind: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    """Keyword arguments of this kind beyond those of ``Buffer``; ``make_buffer`` refuses the others."""
    in_order: ClassVar[bool] = False
    """Samples are served in the order of the source, however many are read ahead."""
    repeats: ClassVar[bool] = False
    """How often a sample is served depends on the draws."""
    times_due: int | None = None
    """How often each sample is served; None = at least once, and no fixed number of times."""

    def __init__(
        self,
        capacity: int,
        *,
        seed: int | Sequence[int] = 0,
        watermark: int = 0,
        max_bytes: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        _check_limits(capacity, watermark, max_bytes, batch_size)
        self.capacity = capacity
        self.watermark = watermark
        self._rng = np.random.default_rng(seed)
        self._store = SampleStore(capacity, max_bytes)
        self._index = self._index_type(capacity, np.empty(0, np.int64), 0)
        # Samples that must be held for any get, until the buffer is finished.
        self._least = watermark
        # The n of the last get; before it the expected one.
        self._batch_size = batch_size or 1
        # Guards everything below and the store. Two conditions on it, so that a put wakes no other producer.
        self._lock = threading.Lock()
        self._can_put = threading.Condition(self._lock)
        self._can_get = threading.Condition(self._lock)
        # The n that the consumer waits for; 0 while it does not wait.
        self._waiting_puts = 0
        self._awaited = 0
        self.finished = self.closed = False
        self._mark: Any = None
        self._counters = ServingCounts()
        # With ``limit_age``: what returns the step of a sample, the oldest that is served, and whether any is older.
        self._step_of: Callable[[Any], int] | None = None
        self._oldest: int | None = None
        self._some_stale = False
        self.num_expired = 0  # samples that were removed as too old, in this process

    # Producers.

    def put(self, sample: Any, key: Any = None, timeout: float | None = None, *, last: bool = False) -> None:
        """Put one sample, with its identity ``key``; wait while there is no room.

        Values of samples that can be stacked are copied; other objects are held as they are.

        Args:
            sample: nested tuples, lists and dicts of tensors, arrays and numbers, or any object.
            key: identifies the sample in batches and checkpoints.
            timeout: seconds; None = no limit.
            last: finish the buffer atomically with this put, so that no get can fall in between.

        Raises:
            BufferTimeout: there was no room for ``timeout`` seconds.
            BufferClosed: closed or finished, before or during the wait; the sample was not put.
            ValueError: the sample requires gradients, or can never be held within ``max_bytes``.
        """
        deadline = _deadline(timeout)
        with self._lock:
            self._put(sample, key, deadline)
            if last:
                self.finished = True
                self._wake_all()

    def put_many(
        self,
        samples: Iterable[Any],
        keys: Iterable[Any] | None = None,
        timeout: float | None = None,
        *,
        last: bool = False,
        mark: Any = None,
        served: Iterable[int | None] | None = None,
    ) -> int:
        """Put all samples in order and return their number. A put that waits for room lets gets in between.

        Args:
            samples, keys: as of ``put``; one key per sample, or None.
            timeout: seconds for all of them; None = no limit.
            last: finish the buffer atomically with the last sample.
            mark: stored in checkpoints from the last sample on: what the producer needs to continue after it.
            served: how often another process has served each of the samples already (``AppliedPositions.times``). One
                that was served as often as is due, or None, is counted as put and served, and not held.

        Raises:
            BufferTimeout, BufferClosed, ValueError: as of ``put``; the first two state how many samples were put.
        """
        # A generator may be slow, so it is consumed before the lock is taken.
        samples = samples if isinstance(samples, StackedSamples) else list(samples)
        keys = [None] * len(samples) if keys is None else list(keys)
        before = None if served is None else list(served)
        if len(keys) != len(samples):
            raise ValueError(f"keys ({len(keys)}) must be as many as samples ({len(samples)}); give one key per sample")
        deadline = _deadline(timeout)
        with self._lock:
            done, error = self._put_all(samples, keys, before, deadline, mark, last)
            if error is not None:
                raise type(error)(f"{error}; {done} of {len(samples)} samples were put") from error
        return done

    def offer(
        self,
        samples: Sequence[Any],
        keys: Sequence[Any],
        *,
        last: bool = False,
        mark: Any = None,
        served: Sequence[int | None] | None = None,
    ) -> int:
        """Put as many of the samples, in order, as there is room for now, and return their number.

        Args:
            samples, keys, served: as of ``put_many``.
            last, mark: as of ``put_many``, if all samples are put.

        Raises:
            BufferClosed, ValueError: as of ``put``.
        """
        with self._lock:
            done, error = self._put_all(samples, keys, served, _deadline(0.0), mark, last)
            if isinstance(error, BufferClosed):
                raise error
        return done

    def skip(self, count: int, stale: int = 0) -> None:
        """Count the next ``count`` samples as put and served as often as is due; another process has served them.

        Of these, and of those that were put before they were counted, that process has counted ``stale``.

        Raises:
            BufferClosed: closed or finished.
        """
        with self._lock:
            self._skip(count, min(count, stale))
            self._counters.stale += stale

    # The age of samples.

    def limit_age(self, step_of: Callable[[Any], int]) -> None:
        """Let ``expire`` remove samples. Call it before the first put, and before ``load_state_dict``.

        Args:
            step_of: returns the step of a sample.
        """
        self._step_of = step_of

    def expire(self, oldest: int) -> None:
        """From now on serve no sample with a step below ``oldest``. One that is held, or is put, is removed.

        What is served then does not depend on when they are removed, except by a reservoir. One that was never served
        is counted as ``stale``.

        Example::

            >>> from paramserver.buffers import Fifo
            >>> buffer = Fifo(capacity=8)
            >>> buffer.limit_age(lambda sample: sample)
            >>> buffer.put_many([3, 5, 4, 6], keys="abcd")
            4
            >>> buffer.expire(oldest=5)
            >>> buffer.get_batch(2).keys, buffer.info().stale
            (['b', 'd'], 2)

        Raises:
            ValueError: ``limit_age`` was not called.
        """
        if self._step_of is None:
            raise ValueError("expire must know the step of each sample; call limit_age first")
        with self._lock:
            if self._oldest is None or oldest > self._oldest:
                self._oldest, self._some_stale = oldest, True
            self._remove_stale()

    def _is_stale(self, sample: Any) -> bool:
        return self._oldest is not None and self._step_of is not None and self._step_of(sample) < self._oldest

    def _note_steps(self, slots: Slots, samples: Iterable[Any]) -> None:
        if self._step_of is not None:
            self._store.steps[slots] = steps = [self._step_of(sample) for sample in samples]
            self._some_stale |= self._oldest is not None and min(steps) < self._oldest

    def _remove_stale(self) -> None:
        if not self._some_stale or self._oldest is None:
            return
        self._some_stale = False
        slots = self._index.slots()
        is_stale = self._store.steps[slots] < self._oldest
        if stale := slots[is_stale].size:
            self._index.keep(~is_stale)
            never_served = int(np.count_nonzero(self._store.served[slots[is_stale]] == 0))
            self._counters.stale += never_served
            self._counters.evicted += stale - never_served
            self.num_expired += stale
            self._store.release(slots[is_stale])
            self._can_put.notify_all()

    # The consumer.

    def get(self, timeout: float | None = None) -> Any:
        """Return one sample, drawn like ``get_batch(1)``."""
        return self.get_batch(1, timeout).samples[0]

    def get_batch(self, n: int, timeout: float | None = None) -> Batch:
        """Draw n samples; wait until n and the watermark are held. After ``finish()`` draw what is left, at once.

        Raises:
            BufferTimeout: not ready for ``timeout`` seconds.
            BufferExhausted: finished and empty.
            BufferClosed: closed, before or during the wait.
            ValueError: n samples can never be held.
        """
        with self._lock:
            store = self._store
            if not self._wait_ready(n, timeout):
                raise BufferTimeout(
                    f"get_batch({n}) must be served within {timeout} s, {store.count} samples are held "
                    f"({store.unseen} unseen) and {max(n, self._least)} needed; feed faster or raise the timeout"
                )
            slots, removed, new = self._draw(n)
            # Gather before the lock is free again: the next put may write to a released slot.
            batch = store.gather(slots, new)
            store.release(removed)
            self._counters.gets += len(slots)
            self._counters.batches += 1
            # Each sample served makes room for one put at most; in bytes it may be room for many small ones.
            if self._waiting_puts:
                self._can_put.notify(len(slots) if store.max_bytes is None else self._waiting_puts)
            return batch

    def wait_ready(self, n: int, timeout: float | None) -> bool:
        """Wait until ``get_batch(n)`` would return at once. Return whether it would, False after ``timeout`` seconds.

        A True holds until the next get, except in a reservoir of objects with ``max_bytes``, where one large sample may
        evict several small ones.

        Raises:
            BufferExhausted: finished and empty.
            BufferClosed: closed, before or during the wait.
        """
        with self._lock:
            return self._wait_ready(n, timeout)

    def remaining_servings(self) -> int | None:
        """Return how many samples are still to be served, with repetitions; None until the buffer is finished."""
        with self._lock:
            return self._servings_held() if self.finished else None

    def is_ahead(self, samples: int) -> bool:
        """Return whether enough was put for a step of ``samples`` and the next one, where nothing is put in a step.

        Buffers that draw from all that they hold are filled by one more step's samples with each step, up to their
        capacity. It depends on the numbers of puts and gets only.
        """
        with self._lock:
            return self._counters.puts >= self.watermark + 2 * (self._counters.gets + samples)

    def expected_batches(self, samples: int, batch_size: int) -> int | None:
        """Return how many batches ``samples`` puts make; None if that depends on timing."""
        return None

    # Both sides.

    def finish(self) -> None:
        """End the input: wake all threads and let the consumer drain. No effect if repeated or after ``close()``."""
        with self._lock:
            self.finished = True
            self._wake_all()

    def close(self) -> None:
        """Stop now: every wait, and every later put and get, raises BufferClosed."""
        with self._lock:
            self.closed = True
            self._wake_all()

    @property
    def stale(self) -> int:
        """As in ``info``."""
        return self._counters.stale

    @property
    def puts(self) -> int:
        """As in ``info``."""
        return self._counters.puts

    @property
    def put_waits(self) -> bool:
        """Whether a producer waits for room."""
        return self._waiting_puts > 0

    @property
    def exhausted(self) -> bool:
        """Whether the buffer is finished and empty."""
        with self._lock:
            return self.finished and self._store.count == 0

    def __len__(self) -> int:
        return self._store.count

    def info(self) -> BufferInfo:
        """Return a snapshot of all counts; also of a closed buffer."""
        with self._lock:
            store = self._store
            return BufferInfo(
                kind=self.kind,
                population=store.count,
                unseen=store.unseen,
                capacity=self.capacity,
                bytes=store.bytes,
                seen_histogram=store.histogram(),
                **vars(self._counters),
            )

    def applied(self) -> AppliedPositions:
        """Return which samples were served so far, and how often."""
        with self._lock:
            applied = self._store.applied(self._counters.puts, self.times_due)
            applied.count = self._counters.gets
            return applied

    # Checkpoints.

    def state_dict(self, samples: bool = True, allocate: AllocateBytes | None = None) -> dict[str, Any]:
        """Return everything that the next draws depend on, for ``torch.load(weights_only=True)``.

        ``counters.puts`` agrees with the content. A finished buffer is finished after loading; a caller that has more
        samples by then sets ``finished`` to False first.

        Args:
            samples: False stores only keys, for samples that ``load_state_dict`` can fetch again.
            allocate: returns memory for the columns of samples, of so many bytes; None = fresh memory.

        Raises:
            UnsupportedConfiguration: a sample or key cannot be stored without pickling its class.
            BufferClosed: closed.
        """
        # One lock for all of it: the source derives its position from the number of puts.
        with self._lock:
            if self.closed:
                raise _closed_error()
            return {
                "kind": self.kind,
                "finished": self.finished,
                "counters": dict(vars(self._counters)),
                "mark": self._mark,
                "rng": self._rng.bit_generator.state,
                **self._extra_state(),
                **self._store.state_dict(self._index.slots(), samples, allocate),
            }

    def load_state_dict(self, state: dict[str, Any], fetch: Callable[[Any], Any] | None = None) -> None:
        """Replace the content; the next draws are those of the saved buffer. Call it before the feeder starts.

        Args:
            state: from ``state_dict`` of a buffer of the same kind.
            fetch: returns the sample of a key, for a state without samples.

        Raises:
            CheckpointError: another kind, more samples than fit, or keys without ``fetch``.
        """
        self._check_state(state, fetch)
        samples = [fetch(key) for key in state["keys"]] if fetch and state["samples"] is None else None
        store = SampleStore(self.capacity, self._store.max_bytes)
        store.load_state_dict(state, samples)
        # Nothing has changed so far: a refused state leaves the buffer as it was.
        with self._lock:
            if self.closed:
                raise _closed_error()
            self._store = store
            self._counters = ServingCounts(**state["counters"])
            self.finished = state["finished"]
            self._mark = state["mark"]
            self._rng.bit_generator.state = state["rng"]
            # The store has the saved order as slots 0, 1, ..., so the same random numbers draw the same samples.
            self._index = self._index_type(self.capacity, np.arange(store.count), store.unseen)
            for slots, held in store.held_in_groups(np.arange(store.count)) if self._step_of is not None else ():
                self._note_steps(slots, held)
            self._load_extra_state(state)
            self._wake_all()

    # To add a buffer: subclass Buffer, set ``kind`` (and ``options``) and ``_index_type``, implement ``_draw``, and
    # override what differs of the rest. Then add the class to the registry in kinds.py, and its kind and options
    # to BUFFERS in config/schema.py. All of these methods are called with the lock held, so they must not block.

    _index_type: ClassVar[type[SlotIndex]]
    """The structure that keeps the slots in the order of the draws."""

    @abstractmethod
    def _draw(self, n: int) -> tuple[Slots, Slots, int]:
        """Serve up to n samples; return their slots, those of them that are to be removed, and how many were new."""

    def _is_ready(self, n: int) -> bool:
        """Return whether ``get_batch(n)`` returns at once while the buffer is not finished."""
        return self._store.count >= n and self._store.count >= self._least

    def _make_room(self, size: int) -> bool:
        """Return whether a sample of ``size`` bytes can be put now; evict samples for it first if the kind does so."""
        store = self._store
        return store.count < self.capacity and (store.max_bytes is None or store.bytes + size <= store.max_bytes)

    def _servings_held(self) -> int:
        """Return how often the samples held will be served in a drain."""
        return self._store.count

    def _check_state(self, state: dict[str, Any], fetch: Callable[[Any], Any] | None) -> None:
        """Raise CheckpointError for a state that this buffer cannot load."""
        if state["kind"] != self.kind:
            raise CheckpointError(
                f"buffer.kind ({self.kind}) must be the checkpoint's, {state['kind']}; set buffer.kind to it"
            )
        count = len(state["keys"])
        if count > self.capacity:
            raise CheckpointError(
                f"buffer.capacity ({self.capacity}) must hold the {count} samples of the checkpoint; raise it"
            )
        if count and state["samples"] is None and fetch is None:
            raise CheckpointError(
                f"fetch (None) must be given, the state has {count} keys and no samples; give a function of a key"
            )

    def _extra_state(self) -> dict[str, Any]:
        """Return what the next draws depend on and only this kind has."""
        return {}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what ``_extra_state`` returned."""

    # Waits, with the lock held.

    def _not_open_error(self) -> BufferClosed:
        if self.closed:
            return _closed_error()
        return BufferClosed("the buffer must not be finished when a sample is put; call finish() after the last put")

    def _skip(self, count: int, never_served: int = 0) -> None:
        if self.closed or self.finished:
            raise self._not_open_error()
        served, times = count - never_served, self.times_due or 1
        self._counters.puts += count
        self._counters.gets += served * times
        self._store.count_removed(served, times)
        if never_served:
            self._store.count_removed(never_served, 0)

    def _put_all(
        self,
        samples: Sequence[Any],
        keys: Sequence[Any],
        served: Sequence[int | None] | None,
        deadline: float | None,
        mark: Any,
        last: bool,
    ) -> tuple[int, BufferTimeout | BufferClosed | None]:
        """Put samples until there is no room before the deadline; return how many, and the error if not all."""
        done, due = 0, self.times_due or 1
        together = served is None
        try:
            while done < len(samples):
                if together:
                    put = self._put_together(samples, keys, done)
                    together = put is not None
                    if put:
                        done += put
                        continue
                times = 0 if served is None else served[done]
                if times is None or times >= due:
                    self._skip(1)
                elif self._is_stale(samples[done]):  # before others are evicted for it
                    self._skip(1, never_served=1)
                    self._counters.stale += 1
                    self.num_expired += 1
                else:
                    self._put(samples[done], keys[done], deadline, times)
                done += 1
        except (BufferTimeout, BufferClosed) as error:
            # Without its traceback: in a cycle with the frames of the callers that would keep the samples in memory.
            return done, error.with_traceback(None)
        self._mark = mark
        if last:
            self.finished = True
            self._wake_all()
        return done, None

    def _put_together(self, samples: Sequence[Any], keys: Sequence[Any], start: int) -> int | None:
        """Put as many samples from ``start`` on as there is room for without an eviction; return how many.

        None: they must be put one by one, because of what they are.
        """
        if self.closed or self.finished:
            raise self._not_open_error()
        end = min(start + self._store.room(), len(samples))
        if end <= start:
            return 0
        try:
            prepared = self._store.prepare(samples[start:end], max(self.watermark, self._batch_size))
        except ValueError:
            return None  # one of them is refused: those before it are put first
        if prepared is None:
            return None
        self._insert(*prepared, samples[start:end], keys[start:end])
        return end - start

    def _put(self, sample: Any, key: Any, deadline: float | None, served: int = 0) -> None:
        store = self._store
        while True:
            if self.closed or self.finished:
                raise self._not_open_error()
            # Again after each wait: another producer's sample may have changed how samples are stored.
            prepared = store.prepare([sample], max(self.watermark, self._batch_size))
            assert prepared is not None
            values, size = prepared
            if self._make_room(size):
                break
            self._wait_for_room(size, deadline)
        self._insert(values, size, [sample], [key], served)

    def _insert(self, values: Any, size: int, samples: Sequence[Any], keys: Sequence[Any], served: int = 0) -> None:
        """Insert samples that were prepared, for which there is room, each served so many times elsewhere."""
        slots = self._store.insert(values, size, keys, self._counters.puts, served)
        self._index.extend(slots)
        self._note_steps(slots, samples)
        self._counters.puts += len(keys)
        self._counters.gets += served * len(keys)
        # Notified only once its n is complete: waking the consumer for each sample would switch threads at every put.
        if self._awaited and self._is_ready(self._awaited):
            self._can_get.notify()

    def _wait_for_room(self, size: int, deadline: float | None) -> None:
        """Wait until the buffer changes."""
        store = self._store
        # The consumer waits as well, so there would never be room. Only max_bytes can lead here.
        if not self._is_ready(self._batch_size):
            raise ValueError(
                f"max_bytes ({store.max_bytes}) must hold what a get waits for, {max(self._batch_size, self._least)} "
                f"samples; {store.count} take {store.bytes} bytes and the next one {size}; raise max_bytes"
            )
        # Checked after the caller tried to make room, so a notification that arrives with the timeout is not lost.
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            raise BufferTimeout(
                f"a put must find room before its timeout, {store.count} of {self.capacity} samples are held "
                f"({store.unseen} unseen); get samples faster or raise the timeout"
            )
        # The wait releases the lock: gets and the puts of other producers take place meanwhile.
        self._waiting_puts += 1
        try:
            self._can_put.wait(None if deadline is None else deadline - now)
        finally:
            self._waiting_puts -= 1
        self._counters.put_wait_s += time.monotonic() - now

    def _wait_ready(self, n: int, timeout: float | None) -> bool:
        if self.closed:
            raise _closed_error()
        if n < 1 or n > self.capacity:
            raise ValueError(
                f"n ({n}) must be from 1 to the capacity ({self.capacity}); ask for fewer or raise capacity"
            )
        if n > self._batch_size:
            # A blocked producer must check again whether max_bytes can hold what this get waits for.
            self._can_put.notify_all()
        self._batch_size = n
        ready = self._is_ready_now(n)
        if not ready and (timeout is None or timeout > 0):
            ready = self._wait_for_samples(n, timeout)
        if not ready:
            return False
        if self._store.count == 0:
            raise BufferExhausted("the buffer must hold samples to get one, it is finished and empty; stop getting")
        return True

    def _wait_for_samples(self, n: int, timeout: float | None) -> bool:
        since = time.monotonic()
        self._awaited = n
        try:
            ready = self._can_get.wait_for(lambda: self.closed or self._is_ready_now(n), timeout)
        finally:
            # Also when a signal handler raises during the wait.
            self._awaited = 0
            self._counters.get_wait_s += time.monotonic() - since
        if self.closed:
            raise _closed_error()
        return ready

    def _is_ready_now(self, n: int) -> bool:
        self._remove_stale()
        return self.finished or self._is_ready(n)

    def _wake_all(self) -> None:
        self._can_put.notify_all()
        self._can_get.notify_all()


def check_at_least(name: str, value: int, least: int, cure: str) -> None:
    if value < least:
        raise ValueError(f"{name} ({value}) must be at least {least}; {cure}")


def _check_limits(capacity: int, watermark: int, max_bytes: int | None, batch_size: int | None) -> None:
    """Refuse limits with which a wait could never end."""
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
        check_at_least("batch_size", batch_size, 1, "leave it out if it is not known")
        if batch_size > capacity:
            raise ValueError(
                f"batch_size ({batch_size}) must be at most capacity ({capacity}), else no batch is ever gathered; "
                "lower batch_size or raise capacity"
            )


def _closed_error() -> BufferClosed:
    return BufferClosed("the buffer must be open, it was closed; make a new one")


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout

"""The kinds of buffers: first in, first out; first in, random out; and a reservoir. ``make_buffer`` makes one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from paramserver.buffers.base import Buffer, SlotIndex, check_at_least
from paramserver.buffers.storage import Slots
from paramserver.errors import CheckpointError

# The orders in which slots are drawn, each O(1) per slot and without Python loops over slots.


class SlotQueue(SlotIndex):
    """Slots in the order in which they were added: a ring buffer."""

    _head = 0

    def extend(self, slots: Slots) -> None:
        self._slots[self._places(self._count, len(slots))] = slots
        self._count += len(slots)

    def pop(self, n: int) -> Slots:
        oldest: Slots = self._slots[self._places(0, n)].copy()
        self._head = (self._head + n) % len(self._slots)
        self._count -= n
        return oldest

    def keep(self, stays: npt.NDArray[np.bool_]) -> None:
        super().keep(stays)
        self._head = 0

    def slots(self) -> Slots:
        held: Slots = self._slots[self._places(0, self._count)].copy()
        return held

    def _places(self, start: int, n: int) -> slice | Slots:
        """Return where the slots ``start`` to ``start + n - 1`` of the queue are in the ring."""
        first = (self._head + start) % len(self._slots)
        if first + n <= len(self._slots):
            return slice(first, first + n)
        return np.arange(first, first + n) % len(self._slots)


class SlotBag(SlotIndex):
    """Slots in arbitrary order. A hole is filled from the tail: positions stay dense, so any one can be drawn."""

    def extend(self, slots: Slots) -> None:
        self._slots[self._count : self._count + len(slots)] = slots
        self._count += len(slots)

    def at(self, positions: Slots) -> Slots:
        return self._slots[positions]

    def remove(self, positions: Slots) -> None:
        """Remove the slots at these positions, which must be distinct."""
        if len(positions):
            start = self._count - len(positions)
            holes, movers = _holes_and_movers(positions, start, self._count)
            self._slots[holes] = self._slots[movers]
            self._count = start


class SeenUnseenBag(SlotBag):
    """A bag in two parts: positions [0, unseen) were never served, positions [unseen, len) were."""

    def extend(self, slots: Slots) -> None:
        seen, new = self._slots[self.unseen : self._count], len(slots)
        # The seen slots that are in the way move to the end, in their order; those that are not stay.
        ahead = min(new, len(seen))
        moved = np.roll(seen, -new) if ahead < new else seen[:ahead].copy()
        self._slots[self._count + new - len(moved) : self._count + new] = moved
        self._slots[self.unseen : self.unseen + new] = slots
        self._count += new
        self.unseen += new

    def keep(self, stays: npt.NDArray[np.bool_]) -> None:
        self.unseen = int(np.count_nonzero(stays[: self.unseen]))
        super().keep(stays)

    def mark_seen(self, positions: Slots) -> None:
        """Move the slots at these positions, all below ``unseen``, to positions [new unseen, old unseen)."""
        if len(positions):
            start = self.unseen - len(positions)
            holes, movers = _holes_and_movers(positions, start, self.unseen)
            self._slots[holes], self._slots[movers] = self._slots[movers], self._slots[holes]
            self.unseen = start


def _holes_and_movers(positions: Slots, start: int, stop: int) -> tuple[Slots, Slots]:
    """Return the ``positions`` below ``start``, and the places in [start, stop) that are not among ``positions``."""
    # len(positions) == stop - start, so both have the same length: each hole gets one mover.
    stays = np.ones(stop - start, np.bool_)
    stays[positions[positions >= start] - start] = False
    return positions[positions < start], start + np.flatnonzero(stays)


# Buffers.


class CountedBuffer(Buffer):
    """Each sample is served exactly ``pseudo_epochs`` times and keeps its slot until the last of them.

    While input continues a batch holds no sample twice. At the end of a drain it may: when fewer than ``n`` samples are
    left but more servings. So the number of batches is ``ceil(samples * pseudo_epochs / n)``.
    """

    options = ("pseudo_epochs",)

    def __init__(
        self,
        capacity: int,
        *,
        seed: int | Sequence[int] = 0,
        watermark: int = 0,
        pseudo_epochs: int = 1,
        max_bytes: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(capacity, seed=seed, watermark=watermark, max_bytes=max_bytes, batch_size=batch_size)
        check_at_least("pseudo_epochs", pseudo_epochs, 1, "use 1 to serve each sample once")
        self.pseudo_epochs = self.times_due = pseudo_epochs

    def expected_batches(self, samples: int, batch_size: int) -> int | None:
        return -(-samples * self.pseudo_epochs // batch_size)

    @abstractmethod
    def _draw_distinct(self, n: int) -> tuple[Slots, Slots, int]:
        """Serve n distinct samples once; returns as of ``_draw``."""

    def _draw(self, n: int) -> tuple[Slots, Slots, int]:
        held = self._store.count
        slots, removed, new = self._draw_distinct(min(n, held))
        # Only in a drain: fewer than n samples are left but more servings, so some are served a second time.
        while len(slots) < n and held > len(removed):
            more, more_removed, _ = self._draw_distinct(min(n - len(slots), held - len(removed)))
            slots, removed = np.concatenate([slots, more]), np.concatenate([removed, more_removed])
        return slots, removed, new

    def _servings_held(self) -> int:
        return self._store.count * self.pseudo_epochs - int(self._store.served[self._index.slots()].sum())

    def _check_state(self, state: dict[str, Any], fetch: Callable[[Any], Any] | None) -> None:
        super()._check_state(state, fetch)
        if state["pseudo_epochs"] != self.pseudo_epochs:
            raise CheckpointError(
                f"buffer.pseudo_epochs ({self.pseudo_epochs}) must be {state['pseudo_epochs']}, as in the "
                "checkpoint; set it to that"
            )

    def _extra_state(self) -> dict[str, Any]:
        return {"pseudo_epochs": self.pseudo_epochs}


class Fifo(CountedBuffer):
    """Oldest first; with ``pseudo_epochs`` a served sample goes to the tail. The first get waits for the watermark.

    Example::

        >>> buffer = Fifo(capacity=4, pseudo_epochs=2)
        >>> buffer.put_many([1.0, 2.0, 3.0], keys=["a", "b", "c"])
        3
        >>> buffer.finish()
        >>> [buffer.get_batch(2).keys for _ in range(3)]
        [['a', 'b'], ['c', 'a'], ['b', 'c']]
    """

    kind: ClassVar[str] = "fifo"
    in_order = True
    _index_type = SlotQueue
    _index: SlotQueue
    _started = False

    def _draw_distinct(self, n: int) -> tuple[Slots, Slots, int]:
        self._started, self._least = True, 0
        slots = self._index.pop(n)
        new, times = self._store.serve(slots)
        if self.pseudo_epochs == 1:
            return slots, slots, new
        done = times >= self.pseudo_epochs
        self._index.extend(slots[~done])
        return slots, slots[done], new

    def is_ahead(self, samples: int) -> bool:
        with self._lock:
            return self._store.count >= max(2 * samples, self._least)

    def _extra_state(self) -> dict[str, Any]:
        return {**super()._extra_state(), "started": self._started}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        self._started = state["started"]
        self._least = 0 if self._started else self.watermark


class Firo(CountedBuffer):
    """Uniformly at random among the samples held, of which there are at least ``watermark`` until ``finish()``.

    Example::

        >>> buffer = Firo(capacity=4, seed=0)
        >>> buffer.put_many([1.0, 2.0, 3.0, 4.0], keys="abcd")
        4
        >>> buffer.get_batch(4).keys
        ['d', 'c', 'a', 'b']
    """

    kind: ClassVar[str] = "firo"
    _index_type = SlotBag
    _index: SlotBag

    def _draw_distinct(self, n: int) -> tuple[Slots, Slots, int]:
        # O(n) for any number held, and already in random order.
        positions = self._rng.choice(len(self._index), n, replace=False)
        slots = self._index.at(positions)
        new, times = self._store.serve(slots)
        done = slice(None) if self.pseudo_epochs == 1 else times >= self.pseudo_epochs
        self._index.remove(positions[done])
        return slots, slots[done], new


class Reservoir(Buffer):
    """Uniformly at random over seen and unseen samples, which stay. A put into a full buffer evicts a random seen one.

    After ``finish()`` each get evicts what it serves, until the buffer is empty. Every sample is served at least once.

    The policy is that of Melissa's training reservoir (Meyer et al., "High Throughput Training of Deep Surrogates from
    Large Ensemble Runs", SC 2023, https://arxiv.org/abs/2309.16743): only samples that were served are ever evicted.

    Args:
        min_new_per_batch: so many samples of a batch, at least, were never served before, until ``finish()``.
        capacity, seed, watermark, max_bytes, batch_size: as of ``Buffer``.

    Example::

        >>> buffer = Reservoir(capacity=4, seed=0)
        >>> buffer.put_many([1.0, 2.0], keys="ab")
        2
        >>> [sorted(buffer.get_batch(2).keys) for _ in range(3)]
        [['a', 'b'], ['a', 'b'], ['a', 'b']]
        >>> buffer.info().seen_histogram
        {3: 2}
    """

    kind: ClassVar[str] = "reservoir"
    repeats = True
    options = ("min_new_per_batch",)
    _index_type = SeenUnseenBag
    _index: SeenUnseenBag

    def __init__(
        self,
        capacity: int,
        *,
        seed: int | Sequence[int] = 0,
        watermark: int = 0,
        min_new_per_batch: int = 0,
        max_bytes: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(capacity, seed=seed, watermark=watermark, max_bytes=max_bytes, batch_size=batch_size)
        check_at_least("min_new_per_batch", min_new_per_batch, 0, "use 0 for none")
        name, limit = ("capacity", capacity) if batch_size is None else ("batch_size", batch_size)
        if min_new_per_batch > limit:
            raise ValueError(
                f"min_new_per_batch ({min_new_per_batch}) must be at most {name} ({limit}), else no batch is ever "
                "gathered; lower min_new_per_batch"
            )
        self.min_new_per_batch = min_new_per_batch

    def _is_ready(self, n: int) -> bool:
        return self._store.count >= max(n, self._least) and self._index.unseen >= min(self.min_new_per_batch, n)

    def _make_room(self, size: int) -> bool:
        store = self._store
        unseen_bytes = store.bytes - store.seen_bytes
        if store.unseen >= self.capacity or (store.max_bytes is not None and unseen_bytes + size > store.max_bytes):
            return False
        # Now there is room once all seen samples are evicted, so the loop ends.
        while not super()._make_room(size):
            position = self._rng.integers(self._index.unseen, len(self._index), size=1)
            store.release(self._index.at(position))
            self._index.remove(position)
            self._counters.evicted += 1
        return True

    def _skip(self, count: int, never_served: int = 0) -> None:
        super()._skip(count, never_served)
        self._counters.evicted += count - never_served

    def _draw(self, n: int) -> tuple[Slots, Slots, int]:
        index = self._index
        n = min(n, len(index))
        must = 0 if self.finished else min(self.min_new_per_batch, n)
        unseen = index.unseen
        if must:
            index.mark_seen(self._rng.choice(unseen, must, replace=False))
        # The samples that must be new are at positions [left, unseen) now; the rest is drawn from the other positions.
        left = index.unseen
        rest = self._rng.choice(len(index) - must, n - must, replace=False)
        if must:
            rest[rest >= left] += must
        slots = index.at(np.concatenate([np.arange(left, unseen), rest]) if must else rest)
        if left:
            index.mark_seen(rest[rest < left])
        new, _ = self._store.serve(slots)
        if not self.finished:
            return slots, slots[:0], new
        # The drawn samples that were unseen are at [new unseen, unseen) now, the others where they were.
        index.remove(np.concatenate([np.arange(index.unseen, unseen), rest[rest >= unseen]]))
        self._counters.evicted += n
        return slots, slots, new


# The config lists the same kinds and their options (BUFFERS in config/schema.py): it may not import this folder.
REGISTRY: dict[str, type[Buffer]] = {
    "fifo": Fifo,
    "firo": Firo,
    "reservoir": Reservoir,
}


def buffer_class(kind: str) -> type[Buffer]:
    """Return the class of a kind of the config, which declares what holds for it."""
    return REGISTRY[kind]


def make_buffer(
    kind: str,
    *,
    capacity: int,
    seed: int | Sequence[int] = 0,
    watermark: int = 0,
    pseudo_epochs: int = 1,
    max_bytes: int | None = None,
    min_new_per_batch: int = 0,
    batch_size: int | None = None,
) -> Buffer:
    """Make a buffer of this kind.

    Args:
        kind: fifo | firo | reservoir.
        capacity: samples held at most.
        seed: of the draws.
        watermark: samples held before the first get.
        pseudo_epochs: fifo, firo: servings of each sample.
        max_bytes: bytes of samples held at most.
        min_new_per_batch: reservoir: unseen samples per batch, at least, while input continues.
        batch_size: samples per batch, if it is known.

    Raises:
        ValueError: a value out of its range, of another kind, or one with which a wait could never end.

    Example::

        >>> buffer = make_buffer("reservoir", capacity=100, min_new_per_batch=2, batch_size=8)
        >>> buffer.kind, len(buffer)
        ('reservoir', 0)
        >>> make_buffer("fifo", capacity=100, min_new_per_batch=2)
        Traceback (most recent call last):
        ValueError: min_new_per_batch (2) must be 0 with fifo; use it with reservoir
    """
    if kind not in REGISTRY:
        near = get_close_matches(str(kind), REGISTRY, n=1)
        hint = f'did you mean "{near[0]}"?' if near else "choose one of them"
        raise ValueError(f"kind ({kind}) must be one of {', '.join(REGISTRY)}; {hint}")
    options: dict[str, Any] = {}
    check_at_least("pseudo_epochs", pseudo_epochs, 1, "use 1 to serve each sample once")
    for name, value, neutral in (("pseudo_epochs", pseudo_epochs, 1), ("min_new_per_batch", min_new_per_batch, 0)):
        if name in REGISTRY[kind].options:
            options[name] = value
        elif value != neutral:
            kinds = " or ".join(other for other, buffer in REGISTRY.items() if name in buffer.options)
            raise ValueError(f"{name} ({value}) must be {neutral} with {kind}; use it with {kinds}")
    return REGISTRY[kind](
        capacity, seed=seed, watermark=watermark, max_bytes=max_bytes, batch_size=batch_size, **options
    )

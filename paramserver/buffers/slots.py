"""Which slot comes next: index structures over a fixed number of slots, O(1) per slot and without Python loops."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Slots: TypeAlias = npt.NDArray[np.int64]


class FreeSlots:
    """Slots that hold nothing. Used ones are handed out again first, so memory is touched up to the peak only."""

    def __init__(self, capacity: int) -> None:
        self._stack = np.empty(capacity, np.int64)
        self._size = 0
        self._untouched = 0

    def take(self) -> int:
        if self._size:
            self._size -= 1
            return int(self._stack[self._size])
        self._untouched += 1
        return self._untouched - 1

    def give(self, slots: Slots) -> None:
        self._stack[self._size : self._size + len(slots)] = slots
        self._size += len(slots)


class IndexQueue:
    """Slots in the order in which they came."""

    def __init__(self, capacity: int) -> None:
        self._slots = np.empty(capacity, np.int64)
        self._head = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, slot: int) -> None:
        self._slots[(self._head + self._count) % len(self._slots)] = slot
        self._count += 1

    def extend(self, slots: Slots) -> None:
        self._slots[self._places(self._count, len(slots))] = slots
        self._count += len(slots)

    def take(self, n: int) -> Slots:
        """Remove the n oldest."""
        taken = self._slots[self._places(0, n)]
        self._head = (self._head + n) % len(self._slots)
        self._count -= n
        return taken

    def slots(self) -> Slots:
        return self._slots[self._places(0, self._count)]

    def _places(self, start: int, n: int) -> Slots:
        return np.arange(self._head + start, self._head + start + n) % len(self._slots)


class IndexBag:
    """Slots in no order of meaning. A hole is filled from the tail, so the slots stay dense and any can be drawn."""

    def __init__(self, capacity: int) -> None:
        self._slots = np.empty(capacity, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, slot: int) -> None:
        self._slots[self._count] = slot
        self._count += 1

    def extend(self, slots: Slots) -> None:
        self._slots[self._count : self._count + len(slots)] = slots
        self._count += len(slots)

    def peek(self, positions: Slots) -> Slots:
        """Return the slots at these positions."""
        peeked: Slots = self._slots[positions]
        return peeked

    def remove(self, positions: Slots) -> None:
        """Drop the slots at these positions, which must differ from each other."""
        if not len(positions):
            return
        start = self._count - len(positions)
        holes, movers = _holes_and_movers(positions, start, self._count)
        self._slots[holes] = self._slots[movers]
        self._count = start

    def slots(self) -> Slots:
        held: Slots = self._slots[: self._count].copy()
        return held


class SeenUnseenBag(IndexBag):
    """A bag in two runs: positions [0, unseen) were never served, [unseen, len) were."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.unseen = 0

    def append(self, slot: int) -> None:
        # The first of the seen makes place for it and goes to the end.
        self._slots[self._count] = self._slots[self.unseen]
        self._slots[self.unseen] = slot
        self._count += 1
        self.unseen += 1

    def see(self, positions: Slots) -> None:
        """Turn unseen into seen: the slots at these positions, all below ``unseen``, go to [new unseen, old unseen)."""
        if not len(positions):
            return
        start = self.unseen - len(positions)
        holes, movers = _holes_and_movers(positions, start, self.unseen)
        self._slots[holes], self._slots[movers] = self._slots[movers], self._slots[holes]
        self.unseen = start

    def restore(self, slots: Slots, unseen: int) -> None:
        self.extend(slots)
        self.unseen = unseen


def _holes_and_movers(positions: Slots, start: int, stop: int) -> tuple[Slots, Slots]:
    """Of a run whose last places are [start, stop): the positions before it, and the places in it that stay."""
    # As many stay as there are holes before the run, so the two lists pair up.
    stays = np.ones(stop - start, np.bool_)
    stays[positions[positions >= start] - start] = False
    return positions[positions < start], start + np.flatnonzero(stays)

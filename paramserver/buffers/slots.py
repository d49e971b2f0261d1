"""The order in which a buffer draws the slots that hold its samples.

One structure per drawing order, each over a fixed number of slots, O(1) per slot and without Python loops over slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Slots: TypeAlias = npt.NDArray[np.int64]


class SlotIndex(ABC):
    """The slots in use. A restored one starts with ``slots``, of which the first ``num_unseen`` were never served."""

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

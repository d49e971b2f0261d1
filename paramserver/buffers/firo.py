"""First in, random out."""

from __future__ import annotations

from typing import ClassVar

from paramserver.buffers.counted import CountedBuffer
from paramserver.buffers.slots import IndexBag, Slots


class Firo(CountedBuffer):
    """Uniformly at random among the samples held, of which there are at least ``watermark`` until ``finish()``."""

    kind: ClassVar[str] = "firo"
    _bag: IndexBag

    def _needed(self, n: int) -> int:
        return max(n, self.watermark)

    def _append(self, slot: int) -> None:
        self._bag.append(slot)

    def _round(self, n: int) -> tuple[Slots, Slots, int]:
        # O(n) for any number held, and already in random order.
        positions = self._rng.choice(len(self._bag), n, replace=False)
        slots = self._bag.peek(positions)
        new = self._contents.serve(slots)
        done = slice(None) if self.pseudo_epochs == 1 else self._is_done(slots)
        self._bag.remove(positions[done])
        return slots, slots[done], new

    def _order(self) -> Slots:
        return self._bag.slots()

    def _restore_order(self, slots: Slots, unseen: int) -> None:
        self._bag = IndexBag(self.capacity)
        self._bag.extend(slots)

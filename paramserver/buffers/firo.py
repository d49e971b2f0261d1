"""First in, random out."""

from __future__ import annotations

from typing import ClassVar

from paramserver.buffers.base import CountedBuffer
from paramserver.buffers.slots import SlotBag, Slots


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

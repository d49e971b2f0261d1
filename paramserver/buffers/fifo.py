"""First in, first out; and first in, random out."""

from __future__ import annotations

from typing import Any, ClassVar

from paramserver.buffers.base import CountedBuffer
from paramserver.buffers.slots import SlotBag, SlotQueue, Slots


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

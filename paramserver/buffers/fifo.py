"""First in, first out."""

from __future__ import annotations

from typing import Any, ClassVar

from paramserver.buffers.counted import CountedBuffer
from paramserver.buffers.slots import IndexQueue, Slots


class Fifo(CountedBuffer):
    """Oldest first; with ``pseudo_epochs`` a served sample goes to the tail. The watermark holds back the first get."""

    kind: ClassVar[str] = "fifo"
    _ring: IndexQueue
    _started = False

    def _needed(self, n: int) -> int:
        return n if self._started else max(n, self.watermark)

    def _append(self, slot: int) -> None:
        self._ring.append(slot)

    def _round(self, n: int) -> tuple[Slots, Slots, int]:
        self._started = True
        slots = self._ring.take(n)
        new = self._contents.serve(slots)
        if self.pseudo_epochs == 1:
            return slots, slots, new
        done = self._is_done(slots)
        self._ring.extend(slots[~done])
        return slots, slots[done], new

    def _order(self) -> Slots:
        return self._ring.slots()

    def _restore_order(self, slots: Slots, unseen: int) -> None:
        self._ring = IndexQueue(self.capacity)
        self._ring.extend(slots)

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "started": self._started}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self._started = state["started"]

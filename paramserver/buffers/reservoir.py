"""A reservoir: samples are served again until newer ones take their place.

The policy is that of Melissa's training reservoir (Meyer et al., "High Throughput Training of Deep Surrogates from
Large Ensemble Runs", SC 2023, https://arxiv.org/abs/2309.16743): only samples that were served are ever evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from paramserver.buffers.base import Buffer, check_min_new
from paramserver.buffers.slots import SeenUnseenBag, Slots


class Reservoir(Buffer):
    """Uniformly at random over seen and unseen samples, which stay. A put into a full buffer evicts a random seen one.

    After ``finish()`` each get evicts what it serves, until the buffer is empty. Every sample is served at least once.

    Args:
        min_new_per_batch: at least so many samples of a batch were never served before, until ``finish()``.
        capacity, seed, watermark, max_bytes, batch_size: as of ``Buffer``.
    """

    kind: ClassVar[str] = "reservoir"
    _bag: SeenUnseenBag

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
        check_min_new(min_new_per_batch, batch_size, capacity)
        self.min_new_per_batch = min_new_per_batch

    def _needed(self, n: int) -> int:
        return max(n, self.watermark)

    def _is_ready(self, n: int) -> bool:
        return super()._is_ready(n) and self._bag.unseen >= min(self.min_new_per_batch, n)

    def _admits(self, size: int) -> bool:
        held = self._contents
        fits = held.max_bytes is None or held.bytes - held.seen_bytes + size <= held.max_bytes
        return fits and held.unseen < self.capacity

    def _make_room(self, size: int) -> None:
        # _admits() made sure that the seen ones suffice.
        while not super()._admits(size):
            position = self._rng.integers(self._bag.unseen, len(self._bag), size=1)
            self._contents.release(self._bag.peek(position))
            self._bag.remove(position)
            self._counters.evicted += 1

    def _append(self, slot: int) -> None:
        self._bag.append(slot)

    def _draw(self, n: int) -> tuple[Slots, Slots, int]:
        n = min(n, len(self._bag))
        must = 0 if self._finished else min(self.min_new_per_batch, n)
        unseen = self._bag.unseen
        if must:
            self._bag.see(self._rng.choice(unseen, must, replace=False))
        # What must be new lies in [left, unseen) now; the rest is drawn from the places around it.
        left = self._bag.unseen
        rest = self._rng.choice(len(self._bag) - must, n - must, replace=False)
        if must:
            rest[rest >= left] += must
        slots = self._bag.peek(np.concatenate([np.arange(left, unseen), rest]) if must else rest)
        self._bag.see(rest[rest < left])
        new = self._contents.serve(slots)
        if not self._finished:
            return slots, slots[:0], new
        # The drawn ones that were unseen lie in [new unseen, unseen) now, the others where they were.
        self._bag.remove(np.concatenate([np.arange(self._bag.unseen, unseen), rest[rest >= unseen]]))
        self._counters.evicted += n
        return slots, slots, new

    def _order(self) -> Slots:
        return self._bag.slots()

    def _restore_order(self, slots: Slots, unseen: int) -> None:
        self._bag = SeenUnseenBag(self.capacity)
        self._bag.restore(slots, unseen)

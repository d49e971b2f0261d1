"""A reservoir: samples are served again until newer ones replace them.

The policy is that of Melissa's training reservoir (Meyer et al., "High Throughput Training of Deep Surrogates from
Large Ensemble Runs", SC 2023, https://arxiv.org/abs/2309.16743): only samples that were served are ever evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from paramserver.buffers.base import Buffer, check_at_least
from paramserver.buffers.slots import SeenUnseenBag, Slots


class Reservoir(Buffer):
    """Uniformly at random over seen and unseen samples, which stay. A put into a full buffer evicts a random seen one.

    After ``finish()`` each get evicts what it serves, until the buffer is empty. Every sample is served at least once.

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

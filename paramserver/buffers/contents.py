"""Everything that a buffer holds, by slot: the sample, its key, how often it was served. Not thread-safe."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from paramserver.buffers.batch import Batch
from paramserver.buffers.sample_tree import encode_key
from paramserver.buffers.slots import FreeSlots, Slots
from paramserver.buffers.storage import ObjectStorage, Storage, Take, storage_for, storage_from_state
from paramserver.errors import CheckpointError, UnsupportedConfiguration

Prepared: TypeAlias = tuple[Storage, Any, int]
"""The storage that prepared a sample, what it will write, and the sample's bytes."""


class SampleStore:
    """Samples in slots 0 to capacity - 1. ``bytes`` counts what is held, ``seen_bytes`` the part served before."""

    def __init__(self, capacity: int, max_bytes: int | None) -> None:
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.storage: Storage | None = None
        self.bytes = 0
        self.seen_bytes = 0
        self.count = 0
        self.unseen = 0
        self.served = np.zeros(capacity, np.int64)
        # Grows: zeros above are not touched before they are used, but objects are, and capacity may be a large number.
        self._keys = np.empty(min(capacity, 1024), np.object_)
        self._held = np.zeros(capacity, np.bool_)
        self._free = FreeSlots(capacity)
        # {times served: samples that left}
        self._gone: dict[int, int] = {}

    def prepare(self, sample: Any, at_least: int) -> Prepared:
        """Ready a sample for ``insert``; the first one decides how samples are stored.

        Raises:
            ValueError: a tensor requires gradients, or ``max_bytes`` cannot hold ``at_least`` samples like the first.
        """
        storage = self.storage
        if storage is None:
            storage = storage_for(sample, self.capacity, self.max_bytes)
            prepared = storage.prepare(sample)
            assert prepared is not None, "a storage takes the sample that it was made for"
            self._check_room(prepared[1], at_least)
            self.storage = storage
            return storage, *prepared
        prepared = storage.prepare(sample)
        if prepared is None:
            # Sized before anything is moved, because this may refuse the sample.
            prepared = ObjectStorage().prepare(sample)
            storage = self._move_to_objects(storage)
        self._check_room(prepared[1], 1)
        return storage, *prepared

    def _check_room(self, size: int, at_least: int) -> None:
        if self.max_bytes is not None and size * at_least > self.max_bytes:
            raise ValueError(
                f"max_bytes ({self.max_bytes}) must hold at least {at_least} samples (watermark or batch size), "
                f"one has {size} bytes; raise max_bytes to {size * at_least}"
            )

    def _move_to_objects(self, columns: Storage) -> Storage:
        """Keep the samples themselves from here on: what came does not fit the columns."""
        objects = ObjectStorage()
        slots = np.flatnonzero(self._held)
        for slot, sample in zip(slots.tolist(), columns.gather(slots)[1](), strict=True):
            objects.write(slot, *objects.prepare(sample))
        self.storage = objects
        self._count_bytes()
        return objects

    def insert(self, prepared: Prepared, key: Any) -> int:
        storage, values, size = prepared
        slot = self._occupy(key)
        storage.write(slot, values, size)
        self.bytes += size
        return slot

    def flush(self) -> None:
        """Copy what was inserted, so that the samples given may change."""
        if self.storage is not None:
            self.storage.flush()

    def _occupy(self, key: Any) -> int:
        slot = self._free.take()
        if slot == len(self._keys):
            self._keys = np.concatenate([self._keys, np.empty(len(self._keys), np.object_)])
        self._keys[slot] = key
        self._held[slot] = True
        self.served[slot] = 0
        self.count += 1
        self.unseen += 1
        return slot

    def serve(self, slots: Slots) -> int:
        """Count one more serving of each of these different slots; returns how many had never been served."""
        assert self.storage is not None
        times = self.served[slots]
        # The slots differ, so none of these writes is lost to another.
        self.served[slots] = times + 1
        if times.all():
            return 0
        new = slots[times == 0]
        self.seen_bytes += self.storage.bytes_of(new)
        self.unseen -= len(new)
        return len(new)

    def batch(self, slots: Slots, new: int) -> Batch:
        assert self.storage is not None
        stacked, rebuild = self.storage.gather(slots)
        return Batch(self._keys[slots].tolist(), len(slots), new, stacked, rebuild)

    def release(self, slots: Slots) -> None:
        """Let go of samples, each of which was served before."""
        if not len(slots):
            return
        assert self.storage is not None
        size = self.storage.bytes_of(slots)
        self.bytes -= size
        self.seen_bytes -= size
        self.count -= len(slots)
        self._add_times(self._gone, slots)
        # Let go of the objects now, not when the slot is used again.
        self._keys[slots] = None
        self._held[slots] = False
        self.storage.forget(slots)
        self._free.give(slots)

    def _add_times(self, histogram: dict[int, int], slots: Slots) -> None:
        counts = np.bincount(self.served[slots])
        for times in np.flatnonzero(counts).tolist():
            histogram[times] = histogram.get(times, 0) + int(counts[times])

    def histogram(self) -> dict[int, int]:
        """Count {times served: samples}, of those that are held and those that left."""
        total = dict(self._gone)
        self._add_times(total, np.flatnonzero(self._held))
        return dict(sorted(total.items()))

    def state(self, order: Slots, samples: bool, take: Take | None = None) -> dict[str, Any]:
        """Return what ``restore`` takes; the held slots are listed in ``order``. One copy of all samples is made."""
        keys = [encode_key(key) for key in self._keys[order].tolist()]
        if not samples and None in keys:
            raise UnsupportedConfiguration(
                "a key (None) must be given with every sample that is saved without its values; put samples with keys"
            )
        return {
            "keys": keys,
            "served": torch.from_numpy(self.served[order]),
            "gone": dict(self._gone),
            "samples": self.storage.state(order, take) if samples and self.storage is not None and len(order) else None,
        }

    def restore(self, state: dict[str, Any], samples: list[Any] | None) -> None:
        """Fill empty contents, the saved samples into slots 0, 1, ... in the saved order.

        Args:
            state: what ``state`` returned.
            samples: the samples themselves, where the state has keys only.
        """
        keys = state["keys"]
        if samples is not None:
            for sample, key in zip(samples, keys, strict=True):
                prepared = self.prepare(sample, 1)
                self._check_restored(self.bytes + prepared[2], len(keys))
                self.insert(prepared, key)
        elif keys:
            self.storage = storage_from_state(state["samples"], self.capacity, self.max_bytes)
            for key in keys:
                self._occupy(key)
        self.served[: len(keys)] = state["served"].numpy()
        self.unseen = int(np.count_nonzero(self.served[: len(keys)] == 0))
        self.flush()
        self._gone = dict(state["gone"])
        self._count_bytes()
        self._check_restored(self.bytes, len(keys))

    def _check_restored(self, size: int, count: int) -> None:
        if self.max_bytes is not None and size > self.max_bytes:
            raise CheckpointError(
                f"max_bytes ({self.max_bytes}) must hold the {count} samples of the checkpoint, at least {size} "
                "bytes; raise it"
            )

    def _count_bytes(self) -> None:
        slots = np.flatnonzero(self._held)
        if self.storage is not None:
            self.bytes = self.storage.bytes_of(slots)
            self.seen_bytes = self.storage.bytes_of(slots[self.served[slots] > 0])

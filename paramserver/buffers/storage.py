"""What a buffer holds: the sample in each slot, its key, its position and how often it was served.

``SampleStore`` keeps the accounts. A storage keeps the values: ``ColumnStorage`` in one tensor per leaf while all
samples have the same layout, ``ObjectStorage`` as the objects themselves otherwise. Not thread-safe: the buffer calls
all of it under its lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paramserver.buffers.positions import AppliedPositions
from paramserver.buffers.sample_tree import (
    INT64,
    LeafSpec,
    SampleSpec,
    TensorLeaf,
    decode,
    encode,
    encode_keys,
    sample_spec_of,
    size_of,
)
from paramserver.errors import CheckpointError, UnsupportedConfiguration

# Samples that ``held_in_groups`` yields at once.
_GROUP = 64

Slots: TypeAlias = npt.NDArray[np.int64]

AllocateBytes: TypeAlias = Callable[[int], npt.NDArray[np.uint8]]
"""Returns memory of so many bytes."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples that were drawn together, in memory that only the batch uses.

    Attributes:
        size: number of samples.
        new: how many of them were served for the first time.
        positions: of each sample: n for the n-th that was put, from 0 on.
        stacked: what ``torch.utils.data.default_collate`` returns for ``samples``; None if they cannot be stacked.

    Example::

        >>> from paramserver.buffers import Fifo
        >>> buffer = Fifo(capacity=4)
        >>> buffer.put_many([(1, 0.5), (2, 1.5)], keys=["a", "b"])
        2
        >>> batch = buffer.get_batch(2)
        >>> batch.stacked
        [tensor([1, 2]), tensor([0.5000, 1.5000], dtype=torch.float64)]
        >>> batch.samples
        [(1, 0.5), (2, 1.5)]
        >>> batch.positions
        array([0, 1])
    """

    size: int
    new: int
    positions: npt.NDArray[np.int64]
    stacked: Any | None
    _keys: npt.NDArray[Any] = field(repr=False)
    _rebuild: Callable[[], list[Any]] = field(repr=False)

    def __len__(self) -> int:
        return self.size

    @cached_property
    def keys(self) -> list[Any]:
        """The key of each sample, as it was put."""
        keys: list[Any] = self._keys.tolist()
        return keys

    @cached_property
    def samples(self) -> list[Any]:
        """The samples in the types they were put in. Tensors and arrays are rows of ``stacked``, not copies."""
        return self._rebuild()


class _Keys:
    """The key of each slot: in an array of whole numbers until a key is something else, then as objects."""

    def __init__(self, capacity: int) -> None:
        self._array: npt.NDArray[Any] = np.zeros(capacity, np.int64)
        self._used = 0

    def set(self, slots: Slots, keys: Sequence[Any]) -> None:
        self._used = max(self._used, int(slots[-1]) + 1)  # slots that are used for the first time come last
        if self._array.dtype != np.object_:
            if set(map(type, keys)) == {int} and min(keys) in INT64 and max(keys) in INT64:
                self._array[slots] = keys
                return
            self._array = self._array[: self._used].astype(np.object_)
        if self._used > len(self._array):
            # Grows on demand: the kernel maps pages of zeros when they are first written, but object arrays are
            # written at once, and capacity may be large.
            more = max(len(self._array), 1024, self._used - len(self._array))
            self._array = np.concatenate([self._array, np.empty(more, np.object_)])
        self._array[slots] = np.fromiter(keys, np.object_, len(keys))  # which does not unpack tuples

    def get(self, slots: Slots) -> npt.NDArray[Any]:
        """Return a copy of the keys of these slots."""
        keys: npt.NDArray[Any] = self._array[slots]
        return keys

    def drop(self, slots: Slots) -> None:
        """Drop the references to these keys now, not when their slots are used again."""
        if self._array.dtype == np.object_:
            self._array[slots] = None


class SampleStore:
    """Samples in slots 0 to capacity - 1.

    Attributes:
        seen_bytes: size of those that were served at least once; counted only with ``max_bytes``.
        served: how often the sample in each slot was served.
        positions: of the sample in each slot, see ``Batch``.
        steps: from which the age of the sample in each slot counts, see ``Buffer.limit_age``.
    """

    def __init__(self, capacity: int, max_bytes: int | None) -> None:
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.storage: Storage | None = None
        self.bytes = 0
        self.seen_bytes = 0
        self.count = 0
        self.unseen = 0
        self.served = np.zeros(capacity, np.int64)
        self.positions = np.zeros(capacity, np.int64)
        self.steps = np.zeros(capacity, np.int64)
        self._keys = _Keys(capacity)
        self._held = np.zeros(capacity, np.bool_)
        # Freed slots are used again first, so memory is touched only up to the largest number of samples held.
        self._free: list[int] = []
        self._untouched = 0
        # {times served: samples that were removed}
        self._removed: dict[int, int] = {}

    def room(self) -> int:
        """Return how many samples can be put together now; with ``max_bytes`` only those of one layout."""
        free = self.capacity - self.count
        if self.max_bytes is None:
            return free
        if not isinstance(self.storage, ColumnStorage):
            return 0
        return min(free, (self.max_bytes - self.bytes) // max(self.storage.row_bytes, 1))

    def prepare(self, samples: Sequence[Any], at_least: int) -> tuple[Any, int] | None:
        """Convert samples to what ``insert`` takes: their values, and the bytes of each. The first decides the storage.

        None: they must be prepared one by one, as they are not all of its layout.

        Raises:
            ValueError: a tensor requires gradients, or ``max_bytes`` cannot hold ``at_least`` samples like the first.
        """
        if self.storage is None:
            layout = sample_spec_of(samples[0])
            rows = 0 if layout is None else _num_rows(layout, self.capacity, self.max_bytes)
            storage: Storage = ObjectStorage() if layout is None else ColumnStorage(layout, rows)
            first = storage.prepare(samples[:1])
            assert first is not None, "a storage accepts the sample that it was made for"
            self._check_max_bytes(first[1], at_least)
            self.storage = storage
        prepared = self.storage.prepare(samples)
        if prepared is None and len(samples) == 1:
            # Prepared before any sample is moved, because this may refuse the sample.
            prepared = ObjectStorage().prepare(samples)
            self._move_to_objects(self.storage)
        if prepared is not None:
            self._check_max_bytes(prepared[1], 1)
        return prepared

    def _check_max_bytes(self, size: int, at_least: int) -> None:
        if self.max_bytes is not None and size * at_least > self.max_bytes:
            raise ValueError(
                f"max_bytes ({self.max_bytes}) must hold at least {at_least} samples (watermark or batch size), "
                f"one has {size} bytes; raise max_bytes to {size * at_least}"
            )

    def _move_to_objects(self, columns: Storage) -> None:
        """Keep objects from here on: a sample does not have the layout of the columns."""
        objects = ObjectStorage()
        slots = np.flatnonzero(self._held)
        for slot, sample in zip(slots.tolist(), columns.gather(slots)[1](), strict=True):
            objects.add(slot, sample)
        self.storage = objects
        self._count_bytes()

    def insert(self, values: Any, size: int, keys: Sequence[Any], position: int, served: int = 0) -> Slots:
        """Copy what ``prepare`` returned, with nothing in between, and return the slots in order."""
        assert self.storage is not None
        count = len(keys)
        again = self._free[-count:]
        del self._free[-count:]
        end = self._untouched + count - len(again)
        slots = np.array([*again, *range(self._untouched, end)], np.int64)
        self._untouched = end
        self._keys.set(slots, keys)
        self._held[slots] = True
        self.served[slots] = served
        self.positions[slots] = np.arange(position, position + count)
        self.count += count
        if not served:
            self.unseen += count
        elif self.max_bytes is not None:
            self.seen_bytes += size * count
        self.bytes += size * count
        self.storage.write(slots, values, size)
        return slots

    def serve(self, slots: Slots) -> tuple[int, Slots]:
        """Count one more serving of these distinct slots; return how many are new, and the servings of each by now."""
        assert self.storage is not None
        times = self.served[slots] + 1
        # The slots are distinct, so this indexed write counts each of them.
        self.served[slots] = times
        new = len(times) - np.count_nonzero(times - 1) if self.unseen else 0
        if new:
            self.unseen -= new
            if self.max_bytes is not None:
                self.seen_bytes += self.storage.bytes_of(slots[times == 1])
        return new, times

    def gather(self, slots: Slots, new: int) -> Batch:
        """Return a copy of the samples in these slots, of which ``new`` are served for the first time."""
        assert self.storage is not None
        stacked, rebuild = self.storage.gather(slots)
        return Batch(len(slots), new, self.positions[slots], stacked, self._keys.get(slots), rebuild)

    def release(self, slots: Slots) -> None:
        """Remove the samples in these slots."""
        if not len(slots):
            return
        assert self.storage is not None
        seen = slots[self.served[slots] > 0]
        self.unseen -= len(slots) - len(seen)
        if self.max_bytes is not None:
            self.seen_bytes -= self.storage.bytes_of(seen)
        self.bytes -= self.storage.remove(slots)
        self.count -= len(slots)
        self._count_servings(slots, self._removed)
        self._keys.drop(slots)
        self._held[slots] = False
        self._free.extend(slots.tolist())

    def held_in_groups(self, slots: Slots) -> Iterator[tuple[Slots, list[Any]]]:
        """Yield these slots and their samples, some at a time."""
        for start in range(0, len(slots), _GROUP):
            assert self.storage is not None
            group = slots[start : start + _GROUP]
            yield group, self.storage.gather(group)[1]()

    def count_removed(self, samples: int, times: int) -> None:
        """Count samples that were served ``times`` times elsewhere and are not held here."""
        self._removed[times] = self._removed.get(times, 0) + samples

    def applied(self, puts: int, times_due: int | None) -> AppliedPositions:
        """Return the servings so far of positions 0 to ``puts - 1``, each of which is held or complete."""
        due, held = times_due or 1, np.flatnonzero(self._held)
        served = np.minimum(self.served[held], due)
        left = dict(zip(self.positions[held].tolist(), served.tolist(), strict=True))
        low = min((position for position, times in left.items() if times < due), default=puts)
        above = {position: times for position in range(low, puts) if (times := left.get(position, due))}
        return AppliedPositions(low, above)

    def _count_servings(self, slots: Slots, histogram: dict[int, int]) -> None:
        counts = np.bincount(self.served[slots])
        for times in np.flatnonzero(counts).tolist():
            histogram[times] = histogram.get(times, 0) + int(counts[times])

    def histogram(self) -> dict[int, int]:
        total = dict(self._removed)
        self._count_servings(np.flatnonzero(self._held), total)
        return dict(sorted(total.items()))

    def state_dict(self, order: Slots, samples: bool, allocate: AllocateBytes | None = None) -> dict[str, Any]:
        """Return the state, with the held slots listed in ``order``. Each sample is copied once."""
        keys = encode_keys(self._keys.get(order).tolist())
        if not samples and None in keys:
            raise UnsupportedConfiguration(
                "a key (None) must be given with every sample that is saved without its values; put samples with keys"
            )
        values = samples and self.storage is not None and len(order)
        return {
            "keys": keys,
            "served": torch.from_numpy(self.served[order]),
            "positions": torch.from_numpy(self.positions[order]),
            "removed": dict(self._removed),
            "samples": self.storage.state_dict(order, allocate) if values and self.storage is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any], samples: list[Any] | None) -> None:
        """Fill an empty store in the saved order; ``samples`` are given if the state has keys only."""
        keys = state["keys"]
        if samples is not None:
            for sample, key in zip(samples, keys, strict=True):
                prepared = self.prepare([sample], 1)
                assert prepared is not None
                self._check_loaded(self.bytes + prepared[1], len(keys))
                self.insert(*prepared, [key], 0)
        elif keys:
            self.storage = _storage_from_state(state["samples"], self.capacity, self.max_bytes)
            self.count = self._untouched = len(keys)
            self._held[: len(keys)] = True
            self._keys.set(np.arange(len(keys)), keys)
        self.served[: len(keys)] = state["served"].numpy()
        self.positions[: len(keys)] = state["positions"].numpy()
        self.unseen = int(np.count_nonzero(self.served[: len(keys)] == 0))
        self._removed = dict(state["removed"])
        self._count_bytes()
        self._check_loaded(self.bytes, len(keys))

    def _check_loaded(self, size: int, count: int) -> None:
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


Gathered: TypeAlias = tuple[Any | None, Callable[[], list[Any]]]


class Column:
    """The values of one leaf, a row per slot.

    numpy allocates and gathers: it touches no page before it is used, asks for huge pages for large arrays, and one
    ``take`` costs less than ``index_select``, which may wait for torch's other threads.
    """

    def __init__(self, leaf: LeafSpec, rows: int) -> None:
        # The first producer may be in inference mode: a tensor made there could not be written outside of it.
        with torch.inference_mode(False):
            memory = torch.from_numpy(np.empty((rows, leaf.row_bytes), np.uint8))
            flat = memory.view(leaf.dtype) if leaf.row_bytes else torch.empty((rows, 0), dtype=leaf.dtype, device="cpu")
            self.rows = flat.view(rows, *leaf.shape)
        self.array: npt.NDArray[Any] = numpy_view(self.rows)
        self._is_tensor = isinstance(leaf, TensorLeaf)

    def write(self, slots: Slots, values: list[Any] | npt.NDArray[Any]) -> None:
        if isinstance(values, np.ndarray):
            self.array[slots] = values
        elif self._is_tensor and len(slots) == 1:
            self.rows[int(slots[0])].copy_(values[0])
        elif self._is_tensor:
            # One stack and one write: a call per sample would cost more than the copy.
            self.array[slots] = numpy_view(torch.stack(values).resolve_conj().resolve_neg())
        elif self.array.ndim == 1:
            self.array[slots] = values
        else:
            # Stacking arrays would copy them twice, and numpy visits them one by one there too.
            for slot, value in zip(slots.tolist(), values, strict=True):
                self.array[slot] = value

    def gather_into(self, slots: Slots, allocate: AllocateBytes) -> Tensor:
        """Copy the rows of these slots to memory from ``allocate``."""
        shape = (len(slots), *self.array.shape[1:])
        # numpy makes the view: torch refuses one of no bytes, which a leaf of shape (0,) has.
        rows = allocate(self.array.itemsize * math.prod(shape)).view(self.array.dtype).reshape(shape)
        # Every slot is a row, so "clip" changes no value; the default mode would gather into a temporary and copy it.
        self.array.take(slots, axis=0, out=rows, mode="clip")
        return torch.from_numpy(rows).view(self.rows.dtype)


class ColumnStorage:
    """A preallocated tensor (rows, *shape) per leaf; a batch is one gather per leaf.

    Samples are first prepared, then written once there is room for them.
    """

    def __init__(self, layout: SampleSpec, rows: int) -> None:
        self.layout = layout
        leaves = layout.leaves()
        self.row_bytes = sum(leaf.row_bytes for leaf in leaves)
        try:
            self._columns = [Column(leaf, rows) for leaf in leaves]
        except MemoryError as error:
            raise ValueError(
                f"capacity ({rows}) must fit into memory, {rows} samples of {self.row_bytes} bytes do not; "
                "lower capacity or set max_bytes"
            ) from error

    def prepare(self, samples: Sequence[Any]) -> tuple[list[Any], int] | None:
        """Return what ``write`` takes, and the bytes of each sample; None if they cannot be kept here together."""
        if isinstance(samples, StackedSamples):
            return (samples.columns, self.row_bytes) if samples.layout == self.layout else None
        columns: list[list[Any]] = []
        return (columns, self.row_bytes) if self.layout.flatten(samples, columns) else None

    def write(self, slots: Slots, values: list[Any], size: int) -> None:
        for column, rows in zip(self._columns, values, strict=True):
            column.write(slots, rows)

    def gather(self, slots: Slots) -> Gathered:
        """Return the stacked batch, or None, and a function that returns the samples; both own their memory."""
        # ``view`` for a dtype that numpy lacks.
        columns = [torch.from_numpy(one.array.take(slots, axis=0)).view(one.rows.dtype) for one in self._columns]
        return self.layout.stack(iter(columns)), partial(_rebuild, self.layout, columns, len(slots))

    def bytes_of(self, slots: Slots) -> int:
        return self.row_bytes * len(slots)

    def remove(self, slots: Slots) -> int:
        """Remove these samples and return their bytes."""
        return self.row_bytes * len(slots)  # a row is free once its slot is

    def state_dict(self, slots: Slots, allocate: AllocateBytes | None = None) -> dict[str, Any]:
        template = encode(self.gather(slots[:1])[1]()[0])
        memory: AllocateBytes = allocate or (lambda size: np.empty(size, np.uint8))
        return {"template": template, "columns": [column.gather_into(slots, memory) for column in self._columns]}

    def load(self, columns: list[Tensor]) -> None:
        """Copy saved columns to rows 0, 1, ..."""
        for column, saved in zip(self._columns, columns, strict=True):
            column.rows[: len(saved)].copy_(saved)


class ObjectStorage:
    """The objects themselves, not copied; methods as of ``ColumnStorage``."""

    def __init__(self) -> None:
        self._samples: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}

    def prepare(self, samples: Sequence[Any]) -> tuple[Any, int] | None:
        return (samples, size_of(samples[0])) if len(samples) == 1 else None  # each may have another size

    def write(self, slots: Slots, values: Sequence[Any], size: int) -> None:
        self._samples[int(slots[0])], self._sizes[int(slots[0])] = values[0], size

    def add(self, slot: int, sample: Any) -> None:
        self._samples[slot], self._sizes[slot] = sample, size_of(sample)

    def gather(self, slots: Slots) -> Gathered:
        return None, partial(list, [self._samples[slot] for slot in slots.tolist()])

    def bytes_of(self, slots: Slots) -> int:
        return sum(self._sizes[slot] for slot in slots.tolist())

    def remove(self, slots: Slots) -> int:
        removed = 0
        for slot in slots.tolist():
            del self._samples[slot]
            removed += self._sizes.pop(slot)
        return removed

    def state_dict(self, slots: Slots, allocate: AllocateBytes | None = None) -> dict[str, Any]:
        return {"objects": [encode(self._samples[slot]) for slot in slots.tolist()]}


Storage: TypeAlias = ColumnStorage | ObjectStorage


class StackedSamples(Sequence[Any]):
    """Samples of one layout, in an array per leaf like ``Column.array``. Their tensors and arrays are rows of these."""

    def __init__(self, layout: SampleSpec, columns: list[npt.NDArray[Any]], size: int) -> None:
        self.layout = layout
        self.columns = columns
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            size = len(range(*index.indices(self.size)))
            return StackedSamples(self.layout, [column[index] for column in self.columns], size)
        place = range(self.size)[index]
        return next(iter(self[place : place + 1]))

    def __iter__(self) -> Iterator[Any]:
        pairs = zip(self.layout.leaves(), self.columns, strict=True)
        tensors = [torch.from_numpy(column).view(leaf.dtype) for leaf, column in pairs]
        return iter(_rebuild(self.layout, tensors, self.size))


def stack_samples(samples: Sequence[Any]) -> Sequence[Any]:
    """Return samples of one layout in a form that pickles and is put fast, others as they are."""
    if isinstance(samples, StackedSamples):
        return samples
    layout = sample_spec_of(samples[0]) if samples else None
    flat: list[list[Any]] = []
    if layout is None or not layout.flatten(samples, flat):
        return samples
    columns = []
    for leaf, values in zip(layout.leaves(), flat, strict=True):
        column = Column(leaf, len(samples))
        column.write(np.arange(len(samples)), values)
        columns.append(column.array)
    return StackedSamples(layout, columns, len(samples))


def join_states(states: Sequence[dict[str, Any] | None], places: Sequence[tuple[int, int]]) -> dict[str, Any] | None:
    """Return the state of a storage that holds the samples at ``places``, in that order.

    A place is (index of the state, index of the sample in it). A state is None where a storage was empty.
    """
    held = [state for state in states if state is not None]
    if not places or not held:
        return None
    template = held[0].get("template")
    if template is None or not all("template" in state and _same_layout(template, state["template"]) for state in held):
        return {"objects": [_encoded_sample(states[which], i) for which, i in places]}
    starts = np.cumsum([0, *(0 if state is None else len(state["columns"][0]) for state in states)])
    rows = torch.tensor([int(starts[which]) + i for which, i in places])
    columns = zip(*(state["columns"] for state in held), strict=True)
    return {"template": template, "columns": [torch.cat(column)[rows] for column in columns]}


def stored_samples(state: dict[str, Any], count: int) -> Iterator[Any]:
    """Yield the first ``count`` samples of the state of a storage."""
    return (decode(_encoded_sample(state, index)) for index in range(count))


def _storage_from_state(state: dict[str, Any], capacity: int, max_bytes: int | None) -> Storage:
    """Rebuild the storage of a saved state, with its samples in slots 0, 1, ..."""
    if "objects" in state:
        objects = ObjectStorage()
        for slot, tree in enumerate(state["objects"]):
            objects.add(slot, decode(tree))
        return objects
    layout = sample_spec_of(decode(state["template"]))
    assert layout is not None, "a template is a sample that was stacked before"
    columns = ColumnStorage(layout, max(_num_rows(layout, capacity, max_bytes), len(state["columns"][0])))
    columns.load(state["columns"])
    return columns


def _num_rows(layout: SampleSpec, capacity: int, max_bytes: int | None) -> int:
    """Return how many rows to allocate: at most as many as ``max_bytes`` holds."""
    row_bytes = sum(leaf.row_bytes for leaf in layout.leaves())
    return capacity if max_bytes is None else max(min(capacity, max_bytes // max(row_bytes, 1)), 1)


def _same_layout(template: list[Any], other: list[Any]) -> bool:
    layout = sample_spec_of(decode(template))
    return layout is not None and layout.flatten([decode(other)], [])


def _encoded_sample(state: dict[str, Any] | None, index: int) -> list[Any]:
    assert state is not None
    if "objects" in state:
        tree: list[Any] = state["objects"][index]
        return tree
    layout = sample_spec_of(decode(state["template"]))
    assert layout is not None
    return encode(_rebuild(layout, [column[index : index + 1] for column in state["columns"]], 1)[0])


def _rebuild(layout: SampleSpec, columns: list[Tensor], size: int) -> list[Any]:
    return layout.rebuild(iter(columns), size)


def numpy_view(tensor: Tensor) -> npt.NDArray[Any]:
    """Share the memory; a dtype that numpy lacks (bfloat16, float8) is viewed as integers of its size."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_INTEGERS[tensor.dtype.itemsize]).numpy()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

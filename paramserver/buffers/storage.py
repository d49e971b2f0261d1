"""How samples are kept: one tensor per leaf where all are alike, the objects themselves otherwise."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paramserver.buffers.sample_tree import LeafSpec, SampleSpec, TensorLeaf, decode, encode, sample_spec_of, size_of
from paramserver.buffers.slots import Slots

# Rows that wait to be written together.
_AT_ONCE = 64

Gathered: TypeAlias = tuple[Any | None, Callable[[], list[Any]]]

Take: TypeAlias = Callable[[int], "npt.NDArray[np.uint8]"]
"""Gives memory of so many bytes."""


class Storage(ABC):
    """Samples by slot. A sample is first prepared, which may wait for room, and then written."""

    @abstractmethod
    def prepare(self, sample: Any) -> tuple[Any, int] | None:
        """Return what ``write`` takes, and its bytes; None where the sample cannot be kept here."""

    @abstractmethod
    def write(self, slot: int, prepared: Any, size: int) -> None: ...

    def flush(self) -> None:
        """Have everything that was written in its place, before it is read."""

    @abstractmethod
    def gather(self, slots: Slots) -> Gathered:
        """Return the stacked batch, or None, and a function that gives the samples; both keep their own memory."""

    @abstractmethod
    def bytes_of(self, slots: Slots) -> int: ...

    @abstractmethod
    def forget(self, slots: Slots) -> None: ...

    @abstractmethod
    def state(self, slots: Slots, take: Take | None = None) -> dict[str, Any]: ...


class Column:
    """The values of one leaf, a row per slot.

    numpy allocates and gathers: no page is touched before it is used, large arrays ask for huge pages, and one ``take``
    costs less than ``index_select``, which with several threads can wait for all of them.
    """

    def __init__(self, leaf: LeafSpec, rows: int) -> None:
        # The first producer's mode must not mark the column: nobody else could write into it.
        with torch.inference_mode(False):
            memory = torch.from_numpy(np.empty((rows, leaf.row_bytes), np.uint8))
            flat = memory.view(leaf.dtype) if leaf.row_bytes else torch.empty((rows, 0), dtype=leaf.dtype, device="cpu")
            self.rows = flat.view(rows, *leaf.shape)
        self._is_tensor = isinstance(leaf, TensorLeaf)
        self._array: npt.NDArray[Any] = _numpy_view(self.rows)

    def write(self, slots: list[int], values: list[Any]) -> None:
        if len(slots) > 1:
            self._write_many(slots, values)
        elif self._is_tensor:
            self.rows[slots[0]].copy_(values[0])
        else:
            self._array[slots[0]] = values[0]

    def _write_many(self, slots: list[int], values: list[Any]) -> None:
        """One stacking and one write: of samples by the dozen, a call for each would cost more than the copy."""
        if self._is_tensor:
            self._array[slots] = _numpy_view(torch.stack(values).resolve_conj().resolve_neg())
        elif self._array.ndim == 1:
            self._array[slots] = values
        else:
            # Stacking arrays would copy them twice, and saves nothing: numpy goes through them one by one there too.
            for slot, value in zip(slots, values, strict=True):
                self._array[slot] = value

    def gather(self, slots: Slots) -> Tensor:
        return torch.from_numpy(self._array.take(slots, axis=0)).view(self.rows.dtype)

    def gather_into(self, slots: Slots, take: Take) -> Tensor:
        """The same in memory that ``take`` gives."""
        shape = (len(slots), *self.rows.shape[1:])
        memory = torch.from_numpy(take(self.rows.element_size() * math.prod(shape)))
        rows = memory.view(self.rows.dtype).view(shape)
        # Every slot is a row, so nothing is clipped; the default would gather elsewhere first, and then copy.
        self._array.take(slots, axis=0, out=_numpy_view(rows), mode="clip")
        return rows


class ColumnStorage(Storage):
    """A preallocated tensor (rows, *shape) per leaf; a batch is one gather per leaf."""

    def __init__(self, layout: SampleSpec, rows: int) -> None:
        self.layout = layout
        leaves = layout.leaves()
        self.row_bytes = sum(leaf.row_bytes for leaf in leaves)
        try:
            self._columns = [Column(leaf, rows) for leaf in leaves]
            self._slots: list[int] = []
            self._values: list[list[Any]] = []
        except MemoryError as error:
            raise ValueError(
                f"capacity ({rows}) must fit into memory, {rows} samples of {self.row_bytes} bytes do not; "
                "lower capacity or set max_bytes"
            ) from error

    def prepare(self, sample: Any) -> tuple[list[Any], int] | None:
        leaves: list[Any] = []
        return (leaves, self.row_bytes) if self.layout.flatten(sample, leaves) else None

    def write(self, slot: int, prepared: list[Any], size: int) -> None:
        """Take it down; ``flush`` copies."""
        self._slots.append(slot)
        self._values.append(prepared)
        if len(self._slots) == _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if not self._slots:
            return
        for column, values in zip(self._columns, zip(*self._values, strict=True), strict=True):
            column.write(self._slots, list(values))
        self._slots, self._values = [], []

    def gather(self, slots: Slots) -> Gathered:
        columns = self._rows(slots)
        return self.layout.stack(iter(columns)), partial(_rebuild, self.layout, columns, len(slots))

    def bytes_of(self, slots: Slots) -> int:
        return self.row_bytes * len(slots)

    def forget(self, slots: Slots) -> None:
        """Nothing to let go: rows are reused."""

    def state(self, slots: Slots, take: Take | None = None) -> dict[str, Any]:
        template = _rebuild(self.layout, self._rows(slots[:1]), 1)[0]
        columns = self._rows(slots) if take is None else [one.gather_into(slots, take) for one in self._columns]
        return {"template": encode(template), "columns": columns}

    def load(self, columns: list[Tensor]) -> None:
        for column, saved in zip(self._columns, columns, strict=True):
            column.rows[: len(saved)].copy_(saved)

    def _rows(self, slots: Slots) -> list[Tensor]:
        self.flush()
        return [column.gather(slots) for column in self._columns]


class ObjectStorage(Storage):
    """The objects themselves, not copied."""

    def __init__(self) -> None:
        self._samples: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}

    def prepare(self, sample: Any) -> tuple[Any, int]:
        return sample, size_of(sample)

    def write(self, slot: int, prepared: Any, size: int) -> None:
        self._samples[slot] = prepared
        self._sizes[slot] = size

    def gather(self, slots: Slots) -> Gathered:
        return None, partial(list, [self._samples[slot] for slot in slots.tolist()])

    def bytes_of(self, slots: Slots) -> int:
        return sum(self._sizes[slot] for slot in slots.tolist())

    def forget(self, slots: Slots) -> None:
        for slot in slots.tolist():
            del self._samples[slot], self._sizes[slot]

    def state(self, slots: Slots, take: Take | None = None) -> dict[str, Any]:
        return {"objects": [encode(self._samples[slot]) for slot in slots.tolist()]}


def storage_for(sample: Any, capacity: int, max_bytes: int | None) -> Storage:
    """Make the storage that suits a first sample."""
    layout = sample_spec_of(sample)
    return ObjectStorage() if layout is None else ColumnStorage(layout, _rows(layout, capacity, max_bytes))


def storage_from_state(state: dict[str, Any], capacity: int, max_bytes: int | None) -> Storage:
    """Rebuild the storage that a state was taken of, its samples in slots 0, 1, ..."""
    if "objects" in state:
        objects = ObjectStorage()
        for slot, tree in enumerate(state["objects"]):
            objects.write(slot, *objects.prepare(decode(tree)))
        return objects
    layout = sample_spec_of(decode(state["template"]))
    assert layout is not None, "a template is a sample that was stacked before"
    columns = ColumnStorage(layout, max(_rows(layout, capacity, max_bytes), len(state["columns"][0])))
    columns.load(state["columns"])
    return columns


def join_states(states: Sequence[dict[str, Any] | None], places: Sequence[tuple[int, int]]) -> dict[str, Any] | None:
    """The state of a storage that has the samples at ``places``, in their order: which state, which sample of it."""
    held = [state for state in states if state is not None]
    if not places or not held:
        return None
    template = held[0].get("template")
    if template is None or not all("template" in state and _same_layout(template, state["template"]) for state in held):
        return {"objects": [_sample_tree(states[which], i) for which, i in places]}
    starts = np.cumsum([0, *(0 if state is None else len(state["columns"][0]) for state in states)])
    rows = torch.tensor([int(starts[which]) + i for which, i in places])
    columns = zip(*(state["columns"] for state in held), strict=True)
    return {"template": template, "columns": [torch.cat(column).index_select(0, rows) for column in columns]}


def _same_layout(one: list[Any], other: list[Any]) -> bool:
    layout = sample_spec_of(decode(one))
    return layout is not None and layout.flatten(decode(other), [])


def _sample_tree(state: dict[str, Any] | None, index: int) -> list[Any]:
    assert state is not None
    if "objects" in state:
        tree: list[Any] = state["objects"][index]
        return tree
    layout = sample_spec_of(decode(state["template"]))
    assert layout is not None
    return encode(_rebuild(layout, [column[index : index + 1] for column in state["columns"]], 1)[0])


def _rows(layout: SampleSpec, capacity: int, max_bytes: int | None) -> int:
    """Rows to allocate: no more than ``max_bytes`` admits."""
    row_bytes = sum(leaf.row_bytes for leaf in layout.leaves())
    return capacity if max_bytes is None else max(min(capacity, max_bytes // max(row_bytes, 1)), 1)


def _rebuild(layout: SampleSpec, columns: list[Tensor], size: int) -> list[Any]:
    return layout.rebuild(iter(columns), size)


def _numpy_view(tensor: Tensor) -> npt.NDArray[Any]:
    """Share the memory; a dtype that numpy lacks (bfloat16, float8) is seen as integers of its size."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_INTEGERS[tensor.dtype.itemsize]).numpy()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

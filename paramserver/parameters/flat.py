"""Flat tensors: parameters or module buffers in a few tensors, with the tensors of the model as views of them.

A version is then copied, sent and averaged in a few operations, whatever the number of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paramserver.errors import UnsupportedConfiguration

# Views start at multiples of a cache line: unaligned ones cost linear layers up to 15 %.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class TensorSlot:
    """The place of one tensor in the flat tensor ``group``: element offset, shape and strides."""

    name: str
    group: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """The places of named tensors in flat tensors. The first of these has no embedding table, and may be empty."""

    dtypes: tuple[torch.dtype, ...]  # of each flat tensor; several have the same dtype if they are sent as buckets
    sizes: tuple[int, ...]  # of each flat tensor, in elements
    slots: tuple[TensorSlot, ...]
    # The slots of embedding tables, by their numbers. Each is in a flat tensor of its own; these follow all others.
    tables: tuple[int, ...] = ()
    num_sparse: int = 0  # of the last flat tensors, which take memory in a segment only where they are written

    @classmethod
    def of(
        cls, tensors: Iterable[tuple[str, Tensor]], flat_bytes: float = math.inf, tables: Collection[str] = ()
    ) -> FlatLayout:
        """Return the layout of ``tensors`` in their order, in flat tensors of ``flat_bytes`` at most.

        A single tensor that is larger gets one of its own, and so does each of ``tables``, given by name.

        Raises:
            UnsupportedConfiguration: a tensor is sparse.
        """
        in_order = dict(tensors)
        # The gradient of the first flat tensor is sent in another way than those of tables.
        has_dense = not tables or in_order.keys() - set(tables)
        dtypes: list[torch.dtype] = [] if has_dense else [torch.float32]
        sizes: list[int] = [] if has_dense else [0]
        slots: dict[str, TensorSlot] = {}
        filling: dict[torch.dtype, int] = {}
        for name, tensor in sorted(in_order.items(), key=lambda item: item[0] in tables):
            if tensor.is_sparse or tensor.layout is not torch.strided:
                raise UnsupportedConfiguration(f"{name} is a sparse tensor; parameters and buffers must be dense")
            step = max(ALIGNMENT_BYTES // tensor.element_size(), 1)
            size = -(-tensor.numel() // step) * step
            group = None if name in tables else filling.get(tensor.dtype)
            if group is None or (sizes[group] and (sizes[group] + size) * tensor.element_size() > flat_bytes):
                group = filling[tensor.dtype] = len(sizes)
                dtypes.append(tensor.dtype)
                sizes.append(0)
            # The elements of a row of a table follow each other.
            stride = torch.empty(tensor.shape, device="meta").stride() if name in tables else _dense_stride(tensor)
            slots[name] = TensorSlot(name, group, sizes[group], tuple(tensor.shape), tuple(stride))
            sizes[group] += size
        numbers = tuple(number for number, name in enumerate(in_order) if name in tables)
        return cls(tuple(dtypes), tuple(sizes), tuple(slots[name] for name in in_order), numbers)

    def of_gradients(self) -> FlatLayout:
        """Return the layout of gradients: this one, and a flat tensor for each table, with the rows of its gradient.

        See ``RowSegment`` (parameters/tables.py).
        """
        rows = tuple(1 + self.slots[number].shape[0] for number in self.tables)
        dtypes = (*self.dtypes, *(torch.int64 for _ in rows))
        return replace(self, dtypes=dtypes, sizes=(*self.sizes, *rows), num_sparse=2 * len(rows))

    def without_tables(self) -> FlatLayout:
        """Return the layout without embedding tables, for the flat tensors that precede theirs."""
        tables = set(self.tables)
        slots = tuple(slot for number, slot in enumerate(self.slots) if number not in tables)
        count = len(self.sizes) - len(self.tables)
        return FlatLayout(self.dtypes[:count], self.sizes[:count], slots)

    @property
    def total_bytes(self) -> int:
        return sum(n * dtype.itemsize for n, dtype in zip(self.sizes, self.dtypes, strict=True))

    def allocate(self, device: torch.device | str = "cpu") -> list[Tensor]:
        """Return new flat tensors of zeros."""
        return [torch.zeros(n, dtype=dtype, device=device) for n, dtype in zip(self.sizes, self.dtypes, strict=True)]

    def views(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return each named tensor as a view of ``flats``, which may be views themselves.

        An embedding table whose flat tensor is empty, as in a snapshot, is left out.
        """
        starts = [flat.storage_offset() for flat in flats]
        empty = {n for n in self.tables if self.slots[n].numel and not len(flats[self.slots[n].group])}
        return {
            s.name: torch.as_strided(flats[s.group], s.shape, s.stride, starts[s.group] + s.offset)
            for number, s in enumerate(self.slots)
            if number not in empty
        }

    def clone_dense(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return a copy of flat tensors, in which those of embedding tables are empty."""
        tables = {self.slots[number].group for number in self.tables}
        return [(flat[:0] if n in tables else flat).detach().clone() for n, flat in enumerate(flats)]


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's own strides if it has no gaps in memory (channels_last too), else contiguous ones."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return tuple(torch.empty(tensor.shape, device="meta").stride())
        expected *= size
    return tuple(tensor.stride())


def has_gaps(tensor: Tensor, slot: TensorSlot) -> bool:
    """Return whether a tensor has gaps in memory, so that its slot has other strides."""
    # An expanded tensor has a stride of 0 instead: its elements are one in memory, and cannot be written separately.
    expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.numel() > 0 and tuple(tensor.stride()) != slot.stride and not expanded


class FlatTensors:
    """Named tensors moved into flat tensors: afterwards each of them is a view of ``flats``.

    Tied parameters stay tied: ``named_parameters()`` names a shared tensor once, and its ``data`` is replaced in place.
    ``others`` are further tensors of the model, by name, which stay where they are, and ``tables`` the names of
    embedding tables. ``allocate`` returns the flat tensors; by default they are memory of this process.

    Raises:
        UnsupportedConfiguration: two tensors share memory, or one is sparse.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        allocate: Callable[[FlatLayout], list[Tensor]] | None = None,
        flat_bytes: float = math.inf,
        others: Mapping[str, Tensor] | None = None,
        tables: Collection[str] = (),
    ) -> None:
        _check_separate_memory(tensors, others or {})
        self.layout = FlatLayout.of(tensors.items(), flat_bytes, tables)
        self.tensors = dict(tensors)
        device = next((t.device for t in tensors.values()), torch.device("cpu"))
        self.flats = self.layout.allocate(device) if allocate is None else allocate(self.layout)
        self.views = self.layout.views(self.flats)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                self.views[name].copy_(tensor)
                tensor.data = self.views[name]

    def check_views(self) -> None:
        """Check that each tensor still is a view of ``flats``.

        Raises:
            UnsupportedConfiguration: one was replaced (``p.data = ...``).
        """
        for name, tensor in self.tensors.items():
            if tensor.data_ptr() != self.views[name].data_ptr():
                raise UnsupportedConfiguration(
                    f"{name} was replaced by another tensor; copy into it instead (with torch.no_grad(): p.copy_(new))"
                )

    def clone(self) -> list[Tensor]:
        """Return a snapshot without embedding tables, which is immutable by convention."""
        return self.layout.clone_dense(self.flats)


def gradient_leaf(flat: Tensor) -> Tensor:
    """Return an autograd leaf on the CPU for gradients of ``flat``, which arrive there. It has no memory of its own."""
    if flat.device.type == "cpu":
        return flat.detach().requires_grad_()
    return torch.zeros((), dtype=flat.dtype).expand(flat.shape).requires_grad_()


def _check_separate_memory(moved: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Refuse a tensor that shares memory with one of ``moved``: they would become independent when that is moved."""
    first: dict[int, tuple[str, Tensor]] = {}  # in each storage
    taken: dict[int, Tensor] = {}  # the bytes of a storage in which there are several, once there is a second one
    for name, tensor in (*moved.items(), *others.items()):
        if not tensor.numel() or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in first:
            if name in moved:
                first[key] = name, tensor
            continue
        if key not in taken:
            taken[key] = torch.zeros(storage.nbytes(), dtype=torch.bool)
            _bytes_of(first[key][1], taken[key]).fill_(True)
        own = _bytes_of(tensor, taken[key])
        if bool(own.any()):
            other = next(n for n, t in moved.items() if n != name and _shares_memory(t, tensor))
            cure = "to tie them, give both modules one Parameter"
            if name not in moved:
                cure = f"use the parameter itself in its place, or give {name} memory of its own (clone())"
            raise UnsupportedConfiguration(f"{other} and {name} share memory but are two tensors; {cure}")
        if name in moved:
            own.fill_(True)


def _bytes_of(tensor: Tensor, storage: Tensor) -> Tensor:
    """Return the bytes of a tensor as a view of ``storage``, which has one element for each byte."""
    size = tensor.element_size()
    stride = (*(step * size for step in tensor.stride()), 1)
    return torch.as_strided(storage, (*tensor.shape, size), stride, tensor.storage_offset() * size)


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    storage = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)
    _bytes_of(one, storage).fill_(True)
    return bool(_bytes_of(other, storage).any())


def trainable_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def other_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters and the module buffers, by name."""
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {**frozen, **dict(model.named_buffers())}

"""Parameters as a few flat tensors, with the model's own tensors as views of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paramserver.errors import UnsupportedConfiguration

# Views begin at multiples of a cache line: unaligned ones cost linear layers up to 15 %.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class TensorSlot:
    """Where one tensor lies in the flat tensor ``group``: element offset, shape and strides."""

    name: str
    group: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class FlatLayout:
    """How named tensors lie in flat tensors: ``dtypes[g]`` and ``sizes[g]`` (elements) of each, a slot per tensor.

    Each flat tensor is of one dtype; of one dtype there are several where they are to travel one by one.
    """

    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int, ...]
    slots: tuple[TensorSlot, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]], flat_bytes: float = math.inf) -> FlatLayout:
        """The layout of ``tensors`` in their order; one flat tensor exceeds ``flat_bytes`` only by a single tensor."""
        dtypes: list[torch.dtype] = []
        sizes: list[int] = []
        slots: list[TensorSlot] = []
        filling: dict[torch.dtype, int] = {}
        for name, tensor in tensors:
            if tensor.is_sparse or tensor.layout is not torch.strided:
                raise UnsupportedConfiguration(f"{name} is a sparse tensor; parameters and buffers must be dense")
            step = max(ALIGNMENT_BYTES // tensor.element_size(), 1)
            size = -(-tensor.numel() // step) * step
            group = filling.get(tensor.dtype)
            if group is None or (sizes[group] and (sizes[group] + size) * tensor.element_size() > flat_bytes):
                group = filling[tensor.dtype] = len(sizes)
                dtypes.append(tensor.dtype)
                sizes.append(0)
            slots.append(TensorSlot(name, group, sizes[group], tuple(tensor.shape), _dense_stride(tensor)))
            sizes[group] += size
        return cls(tuple(dtypes), tuple(sizes), tuple(slots))

    @property
    def total_bytes(self) -> int:
        return sum(n * dtype.itemsize for n, dtype in zip(self.sizes, self.dtypes, strict=True))

    def narrowed(self, dtype: torch.dtype) -> FlatLayout:
        """The same places with elements of ``dtype``, where those are smaller."""
        narrow = tuple(dtype if dtype.itemsize < own.itemsize else own for own in self.dtypes)
        return replace(self, dtypes=narrow)

    def allocate(self, device: torch.device | str = "cpu", *, pinned: bool = False) -> list[Tensor]:
        """Fresh flat tensors of zeros; ``pinned`` in memory that a GPU copies from and to without a detour."""
        shapes = zip(self.sizes, self.dtypes, strict=True)
        return [torch.zeros(n, dtype=dtype, device=device, pin_memory=pinned) for n, dtype in shapes]

    def views(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Each named tensor as a view of ``flats``, which may be views themselves."""
        starts = [flat.storage_offset() for flat in flats]
        return {
            s.name: torch.as_strided(flats[s.group], s.shape, s.stride, starts[s.group] + s.offset) for s in self.slots
        }


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides where it fills its memory without gaps (channels_last too), else contiguous ones."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return tuple(torch.empty(tensor.shape, device="meta").stride())
        expected *= size
    return tuple(tensor.stride())


class FlatTensors:
    """Named tensors moved into flat storage: afterwards each of them is a view of ``flats``.

    Ties survive, because ``named_parameters()`` names a shared tensor once and its ``data`` is replaced in place.

    Args:
        tensors: by name.
        allocate: makes the flat tensors, where they are not to be this process's own memory.
        flat_bytes: see ``FlatLayout.of``.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        allocate: Callable[[FlatLayout], list[Tensor]] | None = None,
        flat_bytes: float = math.inf,
    ) -> None:
        _refuse_shared_memory(tensors)
        self.layout = FlatLayout.of(tensors.items(), flat_bytes)
        self.tensors = dict(tensors)
        device = next((t.device for t in tensors.values()), torch.device("cpu"))
        self.flats = self.layout.allocate(device) if allocate is None else allocate(self.layout)
        self.views = self.layout.views(self.flats)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                self.views[name].copy_(tensor)
                tensor.data = self.views[name]

    def check_views(self) -> None:
        """Raise where a tensor is no longer the view that it was made (``p.data = ...``)."""
        for name, tensor in self.tensors.items():
            if tensor.data_ptr() != self.views[name].data_ptr():
                raise UnsupportedConfiguration(
                    f"{name} was replaced by another tensor; copy into it instead (with torch.no_grad(): p.copy_(new))"
                )

    def copy_(self, flats: Sequence[Tensor]) -> None:
        """Overwrite all tensors; ``flats`` may lie on another device."""
        with torch.no_grad():
            for mine, theirs in zip(self.flats, flats, strict=True):
                mine.copy_(theirs)

    def clone(self) -> list[Tensor]:
        """Immutable by convention: a snapshot that nobody writes to."""
        return [flat.detach().clone() for flat in self.flats]


def _refuse_shared_memory(tensors: Mapping[str, Tensor]) -> None:
    """Two tensors in one place would part company when each is moved to a place of its own."""
    places: dict[int, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and (other := places.setdefault(tensor.data_ptr(), name)) != name:
            raise UnsupportedConfiguration(
                f"{other} and {name} share memory but are two tensors; to tie them, give both modules one Parameter"
            )


def trainable_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name; refused by name where no gradient can be averaged."""
    parameters: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not parameter.is_floating_point():
            raise UnsupportedConfiguration(
                f"parameter {name} has dtype {parameter.dtype}; trained parameters must be floating point"
            )
        parameters[name] = parameter
    return parameters


def module_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The module buffers (BatchNorm statistics and the like), by name."""
    return dict(model.named_buffers())

"""The modules of a model by name: module buffers are found, sent and loaded by it, and changes of layers are noticed.

A forward may assign a module buffer anew, give it another shape or dtype, or register it. So no tensor of a buffer is
bound: each use finds the buffers by their names.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import is_
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paramserver.errors import TaskError
from paramserver.metrics.records import TableUse
from paramserver.parameters.flat import FlatLayout, TensorSlot
from paramserver.parameters.numerics import mean_in_order

Buffers: TypeAlias = dict[str, Tensor | None]


@dataclass(frozen=True, eq=False)
class PackedBuffers:
    """Module buffers of a model at one time, on the CPU. Immutable by convention.

    The description (names, shapes, dtypes, which have no tensor and which are not persistent) is pickled, as it is
    mostly equal to the one before, and then not read again.
    """

    description: bytes
    flats: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self.flats)

    def values(self) -> Buffers:
        """Return the buffers by name, as views of the flat tensors; None for one that has no tensor."""
        layout, absent, _ = _read(self.description)
        return {**layout.views(self.flats), **dict.fromkeys(absent)}


@lru_cache(maxsize=16)
def _read(description: bytes) -> tuple[FlatLayout, tuple[str, ...], frozenset[str]]:
    layout, absent, transient = pickle.loads(description)
    return layout, absent, transient


@torch.no_grad()
def mean_buffers(several: Sequence[PackedBuffers | None]) -> PackedBuffers | None:
    """Return the mean of module buffers of floating type, added in the order given, and all others of the first.

    All are those of the first if another one has buffers of other names, shapes or dtypes.
    """
    given = [packed for packed in several if packed is not None]
    if not given or any(packed.description != given[0].description for packed in given):
        return given[0] if given else None
    flats = []
    for of_all in zip(*(packed.flats for packed in given), strict=True):
        # Those of 8 bits cannot be added.
        has_mean = of_all[0].dtype.itemsize > 1 and (of_all[0].is_floating_point() or of_all[0].is_complex())
        flats.append(mean_in_order(of_all) if has_mean else of_all[0])
    return PackedBuffers(given[0].description, tuple(flats))


class ModelTree:
    """The modules, parameters and module buffers of a model, as they are now and as they were at the start.

    The model is built completely, and not changed since the optimizer was made. ``table_uses`` has what gradients had
    of embedding tables, by name, where that is counted.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.table_uses: dict[str, TableUse] = {}
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._read_modules()
        self._modules_at_start = dict(model.named_modules(remove_duplicate=False))
        self._with_buffers = _with_buffers(self._modules_at_start)
        # Buffers that a load writes to in place: those that no forward has assigned.
        self._own = {name: buffer for name, buffer in self.buffers().items() if is_writable(buffer)}
        self._packed_kinds: list[tuple[object, ...]] | None = None
        self._layout = FlatLayout.of([])
        self._description = b""
        self._numbered_kinds: tuple[list[tuple[object, ...]], int] = [], 0

    # Parameters and layers.

    def _read_modules(self) -> None:
        self._modules = {f"{name}." if name else "": module for name, module in self.model.named_modules()}
        self._tree = [
            (module, dict(module._modules), (*module._parameters.keys(),), (*module._parameters.values(),))
            for module in self._modules.values()
        ]

    def clear_gradients(self) -> None:
        """Release the gradients of all parameters, as ``zero_grad`` does."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def check_parameters(self) -> None:
        """Check that all parameters are those of the start; a layer without parameters and buffers may change.

        Raises:
            TaskError: a layer or a parameter was replaced, added or removed, or is no longer frozen; the message names
                it.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise TaskError(
                    f"parameter {name} was frozen when the run began and is not now; it would not be trained on all "
                    "ranks. Leave it trainable in build_model, and give it a learning rate of 0 until it is to be "
                    "trained"
                )
        # Called for each update: a few comparisons for each module, and nothing more if it is as it was.
        for module, children, names, parameters in self._tree:
            own = module._parameters
            if (*own.keys(),) != names or module._modules != children or not all(map(is_, own.values(), parameters)):
                break
        else:
            return
        now = dict(self.model.named_parameters(remove_duplicate=False))
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for name in sorted(self._parameters.keys() | now.keys()):
            if name not in now or now[name] is not self._parameters.get(name):
                self._refuse(name, modules, _change_of(name, self._parameters, now))
        for name in sorted(_with_buffers(modules) ^ self._with_buffers):
            if (name in modules) != (name in self._modules_at_start):
                self._refuse(f"{name}.", modules, _change_of(name, self._modules_at_start, modules))
        self._read_modules()

    def _refuse(self, name: str, modules: Mapping[str, nn.Module], change: str) -> None:
        what = f"parameter {name}"
        path = name.split(".")
        for depth in range(1, len(path)):
            layer = ".".join(path[:depth])
            if modules.get(layer) is not self._modules_at_start.get(layer):
                what, change = f"layer {layer}", _change_of(layer, self._modules_at_start, modules)
                break
        raise TaskError(
            f"{what} was {change} after the start of the run, and would not be trained: the optimizer and the other "
            "processes have the parameters that build_model made; make all layers and parameters there"
        )

    # Module buffers.

    def buffers(self) -> Buffers:
        """Return the module buffers by name; None for one that is registered and has no tensor or no shape yet."""
        return {
            f"{prefix}{name}": None if buffer is None or is_lazy(buffer) else buffer
            for prefix, module in self._modules.items()
            if module._buffers
            for name, buffer in module._buffers.items()
        }

    def buffer_kinds(self) -> int:
        """Return a number of names, shapes and dtypes of all module buffers; in each process the same for the same."""
        kinds = _kinds(self.buffers())
        if kinds != self._numbered_kinds[0]:
            self._numbered_kinds = kinds, zlib.crc32(repr(kinds).encode())
        return self._numbered_kinds[1]

    def pack_buffers(self) -> PackedBuffers:
        """Return a copy of all module buffers."""
        buffers = self.buffers()
        kinds = _kinds(buffers)
        if kinds != self._packed_kinds:
            self._layout, self._description = self._describe(buffers)
            self._packed_kinds = kinds  # last: what cannot be described is refused again
        return PackedBuffers(self._description, _copy(buffers, self._layout) if buffers else ())

    def pack_changed_buffers(self, since: PackedBuffers) -> PackedBuffers | None:
        """Return a copy of the module buffers whose values differ from those of ``since``; None if there are none."""
        now, before = self.buffers(), since.values()
        names = sorted(now.keys() | before.keys())
        changed = {name: now.get(name) for name in names if not _equal(now.get(name), before.get(name))}
        if not changed:
            return None
        layout, description = self._describe(changed)
        return PackedBuffers(description, _copy(changed, layout))

    def _describe(self, buffers: Buffers) -> tuple[FlatLayout, bytes]:
        """Return the layout of buffers, and their description; one tensor with several names is there once."""
        first: dict[int, str] = {}
        held = {name: buffer for name, buffer in buffers.items() if buffer is not None}
        once = {name: buffer for name, buffer in held.items() if first.setdefault(id(buffer), name) == name}
        layout = FlatLayout.of(once.items())
        slots = {slot.name: slot for slot in layout.slots}
        tied = [(name, slots[first[id(buffer)]]) for name, buffer in held.items() if name not in once]
        again = (TensorSlot(name, s.group, s.offset, s.shape, s.stride) for name, s in tied)
        layout = FlatLayout(layout.dtypes, layout.sizes, (*layout.slots, *again))
        absent = tuple(name for name, buffer in buffers.items() if buffer is None)
        transient = frozenset(
            f"{prefix}{name}" for prefix, module in self._modules.items() for name in module._non_persistent_buffers_set
        )
        return layout, pickle.dumps((layout, absent, transient & buffers.keys()))

    def load_buffers(self, packed: PackedBuffers, partial: bool = False) -> None:
        """Give the model these buffers, whatever it has: those of other shapes or dtypes, or none, are replaced.

        They are all buffers of a model, or with ``partial`` some, and all others stay.

        Raises:
            TaskError: the model has no such layer, or something else of that name.
        """
        own, targets, sources, placed = self.buffers(), [], [], {}
        values = packed.values()
        for name, value in values.items():
            mine = own.get(name)
            if value is None:
                if mine is not None:
                    self._set(name, None, packed)
            elif mine is not None and mine is self._own.get(name) and _kind(mine) == _kind(value):
                targets.append(mine)
                sources.append(value)
            else:
                # Not in place: the tensor that a forward assigned may be a view of something else.
                device = next(self.model.parameters()).device if mine is None else mine.device
                # One tensor with several names stays one.
                place = value.untyped_storage().data_ptr(), value.storage_offset(), value.numel()
                if place not in placed or not value.numel():
                    placed[place] = value.to(device, copy=True)
                self._own[name] = placed[place]
                self._set(name, placed[place], packed)
        for name, mine in own.items():
            if mine is not None and name not in values and not partial:
                self._set(name, None, packed)
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)

    def _set(self, name: str, value: Tensor | None, packed: PackedBuffers) -> None:
        _, _, transient = _read(packed.description)
        set_buffer(self.model, name, value, persistent=name not in transient)


def set_buffer(model: nn.Module, name: str, value: Tensor | None, persistent: bool = True) -> None:
    """Give a model the buffer ``name``, in the place of the one that it has or as a new one; None for no tensor.

    Raises:
        TaskError: there is no such module, or it has something else of that name.
    """
    prefix, _, last = name.rpartition(".")
    try:
        module = model
        for part in prefix.split(".") if prefix else ():  # a model of TorchScript has no get_submodule
            module = module._modules[part]  # type: ignore[assignment]
        if value is not None:
            # That of TorchScript has no ``get``.
            old = module._buffers[last] if last in module._buffers else None  # noqa: SIM401
            value = value.to(next(model.parameters()).device if old is None else old.device)
        if last in module._buffers:
            module._buffers[last] = value
        else:
            module.register_buffer(last, value, persistent)
    except (AttributeError, KeyError) as error:
        raise TaskError(
            f"module buffer {name} was registered in mid-run, and the model that build_model makes cannot have it "
            f"({str(error).strip(chr(34))}); register it there (self.register_buffer({last!r}, None))"
        ) from error


def buffer_kinds(model: nn.Module) -> dict[str, tuple[object, ...]]:
    """Return shape and dtype of each module buffer that a ``state_dict()`` has, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: _kind(buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not is_lazy(buffer) and name not in module._non_persistent_buffers_set
    }


def changed_kinds(before: Mapping[str, tuple[object, ...]], now: Mapping[str, tuple[object, ...]]) -> list[str]:
    """Return the names of buffers that have another shape or dtype than before, or that are there only once."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _with_buffers(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of modules with buffers; a loss, for example, has registered one without a tensor."""
    return {name for name, module in modules.items() if any(b is not None for b in module._buffers.values())}


def _change_of(name: str, before: Mapping[str, object], now: Mapping[str, object]) -> str:
    return "removed" if name not in now else "replaced" if name in before else "added"


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype


def _kinds(buffers: Buffers) -> list[tuple[object, ...]]:
    first: dict[int, str] = {}
    return [
        (name, None) if buffer is None else (name, first.setdefault(id(buffer), name), buffer.shape, buffer.dtype)
        for name, buffer in buffers.items()
    ]


@torch.no_grad()
def _copy(buffers: Buffers, layout: FlatLayout) -> tuple[Tensor, ...]:
    flats = layout.allocate()
    sources = [buffer for buffer in buffers.values() if buffer is not None]
    if sources:
        views = layout.views(flats)
        torch._foreach_copy_([views[name] for name, buffer in buffers.items() if buffer is not None], sources)
    return tuple(flats)


def is_writable(tensor: Tensor | None) -> bool:
    """Return whether each element of a tensor has memory of its own."""
    if tensor is None or tensor.layout is not torch.strided:
        return False
    return all(stride > 0 or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return _kind(one) == _kind(other) and torch.equal(one.detach().cpu(), other)

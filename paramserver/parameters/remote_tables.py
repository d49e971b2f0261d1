"""Embedding tables whose rows are on servers.

A trainer looks up those that its batch uses, and builds its model without memory for them: a large table is then memory
in which the same few pages are mapped repeatedly. Whatever ``build_model`` does to it takes the same random numbers as
elsewhere, so that everything else in the model is the same in every process. Its own values are of no use.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from paramserver.errors import TaskError
from paramserver.parameters.tables import EMBEDDINGS, LARGE_BYTES, sparse_gradient
from paramserver.platform import PORTABLE, memory_file

LookupFn = Callable[[Tensor, Tensor], Tensor]
"""Returns rows of a table, (number of rows, width), given the ids as they are used, and as int64, sorted and unique."""

_EMBED = {embed: inspect.signature(embed) for embed in (F.embedding, F.embedding_bag)}
# What neither reads nor writes the values of a parameter. ``backward`` and ``grad`` may be called with ``inputs``.
_METHODS = frozenset(
    {
        *("__hash__", "__len__", "backward", "dim", "element_size", "get_device", "grad", "nelement", "numel", "size"),
        *("is_complex", "is_contiguous", "is_floating_point", "is_shared", "storage_offset", "stride"),
        *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_"),
        *("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"),
        *("empty_like", "full_like", "ones_like", "zeros_like"),
    }
)
_VALUES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})  # the other properties do not read them either


class RemoteTable(nn.Parameter):
    """A parameter without memory: ``nn.Embedding`` and ``nn.EmbeddingBag`` read the rows of their ids on the servers.

    Any other read or write of its values is refused. Its gradient is sparse, as that of the table would be. A parameter
    that a model has becomes one by ``make_remote``, so that the references to it stay.
    """

    table: str  # its name
    look_up: LookupFn

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (signature := _EMBED.get(func)) is not None:
            call = signature.bind(*args, **kwargs)
            _use_rows(call.arguments)
            return func(*call.args, **call.kwargs)
        # A property is read and written by the methods of its descriptor.
        of, name = getattr(func, "__self__", None), getattr(func, "__name__", "")
        is_allowed = name in _METHODS
        if isinstance(of, GetSetDescriptorType):
            name = of.__name__
            is_allowed = name not in _VALUES
        if is_allowed:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        table = next((f"table {own.table}" for own in args if isinstance(own, RemoteTable)), "an embedding table")
        raise TaskError(
            f"{name} of {table} must not be used in a trainer, as its rows are on the servers, and "
            "nn.Embedding and nn.EmbeddingBag look up those of a batch; read the table in the model.pt of a checkpoint"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.table}, shape={tuple(self.shape)}, dtype={self.dtype})"


def make_remote(parameter: nn.Parameter, name: str, look_up: LookupFn) -> None:
    """Make a parameter of a model a ``RemoteTable``; its memory is released."""
    parameter.data = torch.zeros(1, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
    parameter.__class__ = RemoteTable
    assert isinstance(parameter, RemoteTable)
    parameter.table, parameter.look_up = name, look_up


def exclude_from_compile(model: nn.Module) -> None:
    """Let ``torch.compile`` call the modules of remote tables as they are: lookups cannot be traced."""
    for module in model.modules():
        if isinstance(module, EMBEDDINGS) and isinstance(module.weight, RemoteTable):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign, no-untyped-call]


def _use_rows(arguments: dict[str, Any]) -> None:
    """Let the arguments of a function be the rows that it uses, and their places, instead of a table and ids."""
    ids, table = arguments["input"], arguments["weight"]
    assert isinstance(table, RemoteTable)
    if not arguments.get("sparse", False) or arguments.get("scale_grad_by_freq", False):
        raise TaskError(f"table {table.table} must be used with sparse=True and without scale_grad_by_freq")
    rows, places = torch.unique(ids, return_inverse=True)
    if rows.numel() and not 0 <= int(rows[0]) <= int(rows[-1]) < len(table):
        raise IndexError("index out of range in self")  # the message of torch; see ``describe_missing_row``
    rows = rows.to(torch.int64)
    padding = arguments.get("padding_idx")
    if padding is not None:
        # Its gradient is left out, and a bag does not contain it.
        at = (rows == (padding + len(table) if padding < 0 else padding)).nonzero()
        arguments["padding_idx"] = int(at[0, 0]) if len(at) else None
    apply: Any = _RowsFunction.apply
    arguments["input"] = places.to(ids.dtype)
    arguments["weight"] = apply(table, table.look_up(ids, rows).to(table.device), rows)


class _RowsFunction(torch.autograd.Function):
    """Returns rows of a table; their gradient, which is sparse, becomes that of the table."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.shape = rows, table.shape
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (own,) = gradients
        if own is None:
            return None, None, None
        rows = ctx.rows[own._indices()[0]]
        return sparse_gradient(rows, own._values(), ctx.shape, own.is_coalesced()), None, None


# Building a model in a process that owns no rows.


_CAN_REPEAT = not PORTABLE
_CHUNK_BYTES = 2 * 2**20
_PROT_NONE, _MAP_FIXED = 0, 0x10  # of mmap(2) on Linux; Python's mmap has no names for them
_MOST_CHUNKS = 4096  # a process has at most 65,530 mappings (vm.max_map_count)


@contextmanager
def tables_without_memory() -> Iterator[Callable[[nn.Module], None]]:
    """Let large tables that are made in this context take no memory.

    It is entered with a function that is to be called with the model, which gives all of them that are not trained
    memory of their own: their values are loaded.
    """
    made: list[Tensor] = []

    def allocate_untrained(model: nn.Module) -> None:
        places = {table.data_ptr() for table in made}
        for parameter in model.parameters():
            if parameter.data_ptr() in places and not parameter.requires_grad:
                parameter.data = torch.zeros_like(parameter)
        made.clear()

    inits = {kind: kind.__init__ for kind in EMBEDDINGS if _CAN_REPEAT}
    try:
        for kind, init in inits.items():
            kind.__init__ = _replace(init, made)  # type: ignore[method-assign]
        yield allocate_untrained
    finally:
        for kind, init in inits.items():
            kind.__init__ = init  # type: ignore[method-assign]


def _replace(init: Callable[..., None], made: list[Tensor]) -> Callable[..., None]:
    """Return a constructor of ``nn.Embedding`` or ``nn.EmbeddingBag`` that adds each large table to ``made``."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def replaced(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        own = call.arguments
        dtype = own["dtype"] or torch.get_default_dtype()
        device = torch.device(own["device"] or torch.get_default_device())
        shape = own["num_embeddings"], own["embedding_dim"]
        is_large = shape[0] * shape[1] * dtype.itemsize >= LARGE_BYTES
        if own["_weight"] is not None or not own["sparse"] or device.type != "cpu" or not is_large:
            init(*args, **kwargs)
            return
        table = own["_weight"] = repeated_memory(shape, dtype)
        made.append(table)
        init(*call.args, **call.kwargs)
        own["self"].reset_parameters()  # as without ``_weight``

    return replaced


@contextmanager
def adagrad_without_memory(tables: Iterable[Tensor]) -> Iterator[None]:
    """Let the state that ``torch.optim.Adagrad`` makes for large tables, when it is built here, take no memory.

    It has the right value in each row. No row may be written: the state is replaced, or parts of it are copied, first.
    Classes that are derived from it are not known to do that.
    """
    places = {table.data_ptr(): table.shape for table in tables if table.nbytes >= LARGE_BYTES and _CAN_REPEAT}
    init = torch.optim.Adagrad.__init__

    @functools.wraps(init)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> None:
        with _FullWithoutMemory(places) if type(self) is torch.optim.Adagrad else nullcontext():
            init(self, *args, **kwargs)

    torch.optim.Adagrad.__init__ = replaced  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.optim.Adagrad.__init__ = init  # type: ignore[method-assign]


class _FullWithoutMemory(TorchFunctionMode):
    """Lets ``torch.full_like`` of the tensors at these places return repeated memory."""

    def __init__(self, places: Mapping[int, torch.Size]) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.full_like and self._places.get(args[0].data_ptr()) == args[0].shape:
            return repeated_memory(tuple(args[0].shape), args[0].dtype).fill_(args[1])
        return func(*args, **(kwargs or {}))


def repeated_memory(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return a tensor over a few pages of memory that are mapped repeatedly; its values are of no use."""
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    chunk = max(_CHUNK_BYTES, -(-num_bytes // _MOST_CHUNKS // mmap.PAGESIZE) * mmap.PAGESIZE)
    total = -(-num_bytes // chunk) * chunk
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_size_t]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def map_pages(address: int | None, size: int, access: int, flags: int, file: int) -> int:
        place: int | None = libc.mmap(address, size, access, flags, file, 0)
        if place is None or place == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"no address space for a table of {num_bytes / 2**20:,.0f} MiB")
        return place

    file = memory_file("table")
    try:
        os.ftruncate(file, chunk)
        start = map_pages(None, total, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        buffer = (ctypes.c_char * num_bytes).from_address(start)
        weakref.finalize(buffer, libc.munmap, start, total).atexit = False
        for place in range(start, start + total, chunk):
            map_pages(place, chunk, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, file)
    finally:
        os.close(file)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)

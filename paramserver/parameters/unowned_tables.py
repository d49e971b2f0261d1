"""Building a model in a process that owns no rows of its embedding tables: a large one takes next to no memory.

A table is then memory in which the same few pages are mapped repeatedly. Whatever ``build_model`` does to
it takes the same random numbers as elsewhere, so that everything else in the model is the same in every process. Its
own values are of no use; the process gets those that it needs from the servers.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paramserver.parameters.tables import EMBEDDINGS, LARGE_BYTES
from paramserver.platform import PORTABLE, memory_file

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

    Example::

        >>> table = torch.nn.Parameter(torch.zeros(500_000, 16))
        >>> with adagrad_without_memory([table]):
        ...     optimizer = torch.optim.Adagrad([table], initial_accumulator_value=0.5)
        >>> optimizer.state[table]["sum"][[0, 499_999], 0]
        tensor([0.5000, 0.5000])
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

"""Staging: a private copy of a state, made quickly, that is written while training continues."""

from __future__ import annotations

import copy
import mmap
import sys
import threading
import weakref
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paramserver.errors import TaskError

_LARGE_BYTES = 2**20


class StagingPool:
    """Lends large blocks of memory and takes them back for the next checkpoint.

    The first touch of a fresh page costs more than copying into it. A block returns to the pool when nothing refers to
    it any more, a tensor on it and its views included, in whatever thread that happens. So the pool holds as much
    memory as copies were alive at one time: one copy of the state, where each checkpoint is written before the next is
    staged. Thread-safe.
    """

    def __init__(self) -> None:
        # Re-entrant: the garbage collector may run a finalizer, which takes this lock, inside ``acquire``.
        self._lock = threading.RLock()
        self._free: dict[int, list[mmap.mmap]] = {}
        self._bytes = 0

    def acquire(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return ``size_bytes`` of memory with any content. Small blocks are left to the allocator."""
        if size_bytes < _LARGE_BYTES:
            return np.empty(size_bytes, np.uint8)
        with self._lock:
            fitting = [size for size, free in self._free.items() if free and size_bytes <= size <= 2 * size_bytes]
            if fitting:
                memory = self._free[min(fitting)].pop()
            else:
                # No huge pages: to find one, the kernel may have to move others out of the way first.
                memory = mmap.mmap(-1, size_bytes)
                self._bytes += size_bytes
        block = np.frombuffer(memory, np.uint8, size_bytes)
        weakref.finalize(block, self._release, memory).atexit = False
        return block

    def _release(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._free.setdefault(len(memory), []).append(memory)

    def trim(self) -> None:
        """Free the blocks that are not lent. Call it when a copy is complete: that copy had no use for them."""
        with self._lock:
            self._bytes -= sum(size * len(free) for size, free in self._free.items())
            self._free.clear()

    @property
    def size_bytes(self) -> int:
        """Bytes that are lent or kept."""
        return self._bytes


_NESTED = (dict, list, tuple)
_Memo = dict[Hashable, torch.Tensor]


def stage_copy(obj: Any, pool: StagingPool | None = None, what: str = "a state") -> Any:
    """Copy nested dict, list and tuple of tensors so that the copy shares nothing that can change with the original.

    Large copies are made in the pool, or in fresh memory. Return the same structure; classes of dictionaries and named
    tuples, and a ``state_dict``'s ``_metadata``, are kept.

    Raises:
        TaskError: it contains itself, or is nested too deeply.
    """
    try:
        return _copied(obj, {}, pool)
    except RecursionError:
        pass
    raise TaskError(
        f"{what} holds {_why_too_deep(obj)}; store tensors, numbers, strings, and lists or dicts of them, each level "
        "once"
    )


def _why_too_deep(obj: Any) -> str:
    """Return where a nested value contains itself, or that it is nested too deeply."""
    # No recursion: each entry is a value that is still to be looked at, with its path and the values around it.
    left: list[tuple[Any, str, tuple[int, ...]]] = [(obj, "", ())]
    while left:
        value, path, around = left.pop()
        if id(value) in around:
            return f"itself (at {path or 'the top'})"
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, _NESTED) else ()
        if len(around) < sys.getrecursionlimit():
            left += [
                (item, f"{path}[{key!r}]", (*around, id(value))) for key, item in items if isinstance(item, _NESTED)
            ]
    return "more nested levels than can be copied"


def _copied(obj: Any, memo: _Memo, pool: StagingPool | None) -> Any:
    if isinstance(obj, torch.Tensor):
        return _copied_tensor(obj.detach(), memo, pool)
    if isinstance(obj, np.ndarray | set | bytearray):
        return obj.copy()
    if isinstance(obj, dict):
        fresh = copy.copy(obj)  # keeps the class, a defaultdict's factory and the attributes of a state_dict
        for key, value in obj.items():
            fresh[key] = _copied(value, memo, pool)
        return fresh
    if isinstance(obj, list):
        return [_copied(item, memo, pool) for item in obj]
    if isinstance(obj, tuple):
        items = [_copied(item, memo, pool) for item in obj]
        return type(obj)(*items) if hasattr(obj, "_fields") else tuple(items)
    return obj


def _copied_tensor(tensor: torch.Tensor, memo: _Memo, pool: StagingPool | None) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor.cpu().clone()
    # The originals are alive during the whole copy, so two tensors cannot have the same address one after the other.
    view = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    key = (*view, tensor.device)
    if key not in memo or tensor.numel() == 0:
        memo[key] = _empty_like(tensor, pool).copy_(tensor)
    return memo[key]


def _empty_like(tensor: torch.Tensor, pool: StagingPool | None) -> torch.Tensor:
    if tensor.is_quantized:
        return torch.empty_like(tensor, device="cpu")
    strides = tensor.stride()
    if not tensor.is_contiguous():
        # Without gaps, and the dimensions in the same order. Of a plain tensor: a subclass may lack the call.
        strides = torch.empty_like(torch.empty_strided(tensor.shape, strides, device="meta")).stride()
    if pool is None or tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu")
    block = torch.from_numpy(pool.acquire(tensor.numel() * tensor.element_size()))
    return block.view(tensor.dtype).as_strided(tensor.shape, strides)

"""The cut: a private copy of a state, taken quickly, that can be written while training goes on.

Memory for the copies that checkpoints are made of, used again and again.
"""

from __future__ import annotations

import copy
import mmap
import threading
import weakref
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_LARGE_BYTES = 2**20


class StagingPool:
    """Lends memory that was touched before, where there is some: the first touch of a page costs more than its copy.

    What is lent comes back by itself when nothing refers to it any more, a tensor on it and views included, in whatever
    thread that happens. So this holds as much memory as copies were alive at one time: one copy of the state, where
    each checkpoint is written before the next is made.
    """

    def __init__(self) -> None:
        # Also taken where the collector runs a finalizer inside ``take``.
        self._lock = threading.RLock()
        self._free: dict[int, list[mmap.mmap]] = {}
        self._bytes = 0

    def acquire(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Lend ``size_bytes`` of memory with any content; small ones come from the allocator, which keeps its own."""
        if size_bytes < _LARGE_BYTES:
            return np.empty(size_bytes, np.uint8)
        with self._lock:
            memory = self._find(size_bytes)
            if memory is None:
                # Not of huge pages: to find some, the kernel may first have to move others out of the way.
                memory = mmap.mmap(-1, size_bytes)
                self._bytes += size_bytes
        lent = np.frombuffer(memory, np.uint8, size_bytes)
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent

    def _find(self, size_bytes: int) -> mmap.mmap | None:
        sizes = [size for size, free in self._free.items() if free and size_bytes <= size <= 2 * size_bytes]
        return self._free[min(sizes)].pop() if sizes else None

    def _give_back(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._free.setdefault(len(memory), []).append(memory)

    def trim(self) -> None:
        """Give up what is free; to be called when a copy is complete, as it had no use for it."""
        with self._lock:
            self._bytes -= sum(size * len(free) for size, free in self._free.items())
            self._free.clear()

    @property
    def size_bytes(self) -> int:
        """What is lent or kept."""
        return self._bytes


_Memo = dict[Hashable, torch.Tensor]


def stage_copy(obj: Any, memory: StagingPool | None = None) -> Any:
    """Copy nested dict, list and tuple of tensors so that nothing in it changes, or is shared, any more.

    Every tensor (a parameter too) becomes a plain, contiguous CPU tensor with a storage of its own size: saving a view
    of a flat tensor would otherwise write the whole flat tensor. Tensors that show the same memory in the same way
    (tied weights) share one copy. numpy arrays, sets and bytearrays are copied. Other leaves are kept as they are.

    Args:
        obj: what is copied.
        memory: where large copies are made; None = in fresh memory.

    Returns:
        The same structure; classes of dictionaries and named tuples, and a ``state_dict``'s ``_metadata``, are kept.
    """
    return _copied(obj, {}, memory)


def _copied(obj: Any, memo: _Memo, memory: StagingPool | None) -> Any:
    if isinstance(obj, torch.Tensor):
        return _tensor(obj.detach(), memo, memory)
    if isinstance(obj, np.ndarray | set | bytearray):
        return obj.copy()
    if isinstance(obj, dict):
        fresh = copy.copy(obj)  # keeps the class, a defaultdict's factory and the attributes of a state_dict
        for key, value in obj.items():
            fresh[key] = _copied(value, memo, memory)
        return fresh
    if isinstance(obj, list):
        return [_copied(item, memo, memory) for item in obj]
    if isinstance(obj, tuple):
        items = [_copied(item, memo, memory) for item in obj]
        return type(obj)(*items) if hasattr(obj, "_fields") else tuple(items)
    return obj


def _tensor(tensor: torch.Tensor, memo: _Memo, memory: StagingPool | None) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor.cpu().clone()
    # The originals stay alive during the copy, so an address cannot come up twice for two tensors.
    view = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    key = (*view, tensor.device)
    if key not in memo or tensor.numel() == 0:
        memo[key] = _empty_like(tensor, memory).copy_(tensor)
    return memo[key]


def _empty_like(tensor: torch.Tensor, memory: StagingPool | None) -> torch.Tensor:
    if memory is None or tensor.is_quantized or tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    lent = torch.from_numpy(memory.acquire(tensor.numel() * tensor.element_size()))
    return lent.view(tensor.dtype).view(tensor.shape)

"""Memory for the copies that checkpoints are made of, used again and again."""

from __future__ import annotations

import mmap
import threading
import weakref

import numpy as np
import numpy.typing as npt

__all__ = ["CopyMemory"]

_LARGE_BYTES = 2**20


class CopyMemory:
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

    def take(self, size_bytes: int) -> npt.NDArray[np.uint8]:
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
    def bytes(self) -> int:
        """What is lent or kept."""
        return self._bytes

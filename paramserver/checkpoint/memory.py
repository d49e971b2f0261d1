"""Memory for the copies that checkpoints are made of, used again and again."""

from __future__ import annotations

import mmap
import weakref

import numpy as np
import numpy.typing as npt

__all__ = ["CopyMemory"]


_LARGE_BYTES = 2**20


class CopyMemory:
    """Lends memory that was touched before, where there is some: the first touch of a page costs more than its copy.

    What is lent comes back by itself when nothing refers to it any more, a tensor or a view of it included. So this
    holds as much memory as copies were alive at one time: one copy of the state, where checkpoints are written before
    the next is made. Not thread-safe.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def take(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Lend ``size_bytes`` of memory with any content; small ones come from the allocator, which keeps its own."""
        if size_bytes < _LARGE_BYTES:
            return np.empty(size_bytes, np.uint8)
        fitting = [block for block in self._blocks if block.is_free and block.fits(size_bytes)]
        block = min(fitting, key=lambda one: one.size_bytes, default=None)
        if block is None:
            block = _Block(size_bytes)
            self._blocks.append(block)
        return block.lend(size_bytes)

    def trim(self) -> None:
        """Give up what is free; to be called when a copy is complete, as it had no use for it."""
        self._blocks = [block for block in self._blocks if not block.is_free]

    @property
    def bytes(self) -> int:
        """What is lent or kept."""
        return sum(block.size_bytes for block in self._blocks)


class _Block:
    """A mapping of its own; not of huge pages, for which the kernel may have to move others out of the way first."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._memory = mmap.mmap(-1, size_bytes)
        self._lent: weakref.ref[npt.NDArray[np.uint8]] | None = None

    @property
    def is_free(self) -> bool:
        return self._lent is None or self._lent() is None

    def fits(self, size_bytes: int) -> bool:
        return size_bytes <= self.size_bytes <= 2 * size_bytes

    def lend(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        lent = np.frombuffer(self._memory, np.uint8, size_bytes)
        self._lent = weakref.ref(lent)
        return lent

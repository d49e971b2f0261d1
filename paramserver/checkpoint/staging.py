"""Staging: a private copy of a state, made quickly, that is written while training continues.

Of some tensors a checkpoint needs no copy: a ``RowStream`` reads them by ranges of rows while their file is written.
"""

from __future__ import annotations

import copy
import math
import mmap
import os
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paramserver.errors import CheckpointError, TaskError, message_of
from paramserver.fileio import Writable

_Memory = mmap.mmap | npt.NDArray[np.uint8]


class StagingPool:
    """Lends large blocks of memory and takes them back for the next checkpoint.

    The first touch of a fresh page costs more than copying into it. A block returns to the pool when nothing refers to
    it any more, a tensor on it and its views included, in whatever thread that happens. So the pool holds as much
    memory as copies were alive at one time: one copy of the state, where each checkpoint is written before the next is
    staged. Thread-safe.
    """

    least_bytes = 2**20  # smaller blocks are left to the allocator

    def __init__(self) -> None:
        # Re-entrant: the garbage collector may run a finalizer, which takes this lock, inside ``acquire``.
        self._lock = threading.RLock()
        self._free: dict[int, list[_Memory]] = {}

    def acquire(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return ``size_bytes`` of memory with any content."""
        if size_bytes < self.least_bytes:
            return np.empty(size_bytes, np.uint8)
        with self._lock:
            fitting = [size for size, free in self._free.items() if free and size_bytes <= size <= 2 * size_bytes]
            memory = self._free[min(fitting)].pop() if fitting else self._map(size_bytes)
        block = np.frombuffer(memory, np.uint8, size_bytes)
        weakref.finalize(block, self._release, memory).atexit = False
        return block

    def _map(self, size_bytes: int) -> _Memory:
        # No huge pages: to find one, the kernel may have to move others out of the way first.
        return mmap.mmap(-1, size_bytes)

    def _discard(self, memory: _Memory) -> None:
        """Called before a block is freed."""

    def _release(self, memory: _Memory) -> None:
        with self._lock:
            self._free.setdefault(len(memory), []).append(memory)

    def trim(self) -> None:
        """Free the blocks that are not lent. Call it when a copy is complete: that copy had no use for them."""
        with self._lock:
            for memory in chain.from_iterable(self._free.values()):
                self._discard(memory)
            self._free.clear()


class FilePool(StagingPool):
    """Lends blocks that are files in a folder, best on a tmpfs: what is copied there outlives the process.

    A copy is then stored with the names of its blocks (``detach``) and read by ``attach``, while the caller keeps it.
    """

    least_bytes = 2**16

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._names: dict[int, str] = {}  # of the files, by the address of the block
        self._made = 0

    def _map(self, size_bytes: int) -> _Memory:
        path, self._made = self._folder / f"block-{self._made}", self._made + 1
        try:
            with path.open("xb+") as file:
                # A page for which there is no room would end the process when it is written to.
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            memory = _map_file(path, size_bytes, shared=True).numpy()
        except (OSError, RuntimeError):
            # What is copied there is written with the rest, which fails if there is no room for it.
            path.unlink(missing_ok=True)
            return super()._map(size_bytes)
        self._names[_address(memory)] = path.name
        return memory

    def _discard(self, memory: _Memory) -> None:
        if (name := self._names.pop(_address(memory), None)) is not None:
            (self._folder / name).unlink(missing_ok=True)

    def detach(self, state: Any) -> tuple[Any, list[str], int]:
        """Return a copy's structure, with tensors on the device meta for those in blocks; their names, and their bytes.

        The names are in the order in which ``map_leaves`` visits these tensors.
        """
        names: list[str] = []
        sizes: list[int] = []

        def detached(value: Any) -> Any:
            name = self._names.get(address_of(value))
            # Files of /dev/shm are removed where their user logs out (RemoveIPC of systemd).
            if name is None or not (self._folder / name).exists():
                return value
            names.append(name)
            sizes.append(value.nbytes)
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

        return map_leaves(detached, state), names, sum(sizes)

    @staticmethod
    def attach(state: Any, names: Sequence[str], folder: Path) -> Any:
        """Return the copy that ``detach`` was given, from its structure, the names, and the folder of the files.

        Raises:
            CheckpointError: a block is missing, or too short.
        """
        left = iter(names)
        blocks: dict[tuple[str, int], Tensor] = {}  # tensors that shared memory share it again

        def attached(value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.is_meta):
                return value
            key = name, size_bytes = next(left, ""), value.numel() * value.element_size()
            try:
                if key not in blocks:
                    if (length := (folder / name).stat().st_size) < size_bytes:
                        raise CheckpointError(f"{folder / name} cannot be read ({length} bytes of {size_bytes})")
                    blocks[key] = _map_file(folder / name, size_bytes, shared=False)
            except (OSError, RuntimeError) as error:
                raise CheckpointError(f"{folder / name} cannot be read ({message_of(error)})") from error
            return blocks[key].view(value.dtype).as_strided(value.shape, value.stride())

        return map_leaves(attached, state)


def _map_file(path: Path, size_bytes: int, shared: bool) -> Tensor:
    """Return the memory of a file; a change of what is not ``shared`` is not one of the file.

    Not by ``mmap``, which keeps a descriptor for each.
    """
    return torch.from_file(str(path), shared=shared, size=size_bytes, dtype=torch.uint8)


def _address(memory: _Memory) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


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


# Streams.


# Little enough that an update hardly waits for a range that is being copied.
_RANGE_BYTES = 2 * 2**20

# With these a part of a zip archive begins: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.
_HEADER, _HEADER_BYTES = b"PK\3\4", 30
_AFTER_CONTENT = b"PK\7\10"
_DIRECTORY = b"PK\1\2"


@dataclass(frozen=True, eq=False)
class RowStream:
    """Stands for a tensor in a state. ``read`` returns its rows when the file is written: from first to end, exclusive.

    They are read once, in order, as tensors on the CPU.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def ranges(self) -> Iterator[Tensor]:
        """Yield all rows."""
        rows = max(_RANGE_BYTES * self.shape[0] // max(self.nbytes, 1), 1)
        for first in range(0, self.shape[0], rows):
            yield self.read(first, min(first + rows, self.shape[0]))

    def placeholder(self) -> Tensor:
        """Return a tensor of this shape and dtype. Nothing writes to its memory, so that it takes none."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        # Of numpy: torch fills the memory where its algorithms have to be deterministic.
        return torch.from_numpy(np.empty(self.nbytes, np.uint8)).view(self.dtype).view(self.shape)


def concatenate(parts: Sequence[RowStream]) -> RowStream:
    """Return the tensor that has the rows of all parts, in their order."""
    if len(parts) == 1:
        return parts[0]
    ends = list(accumulate(part.shape[0] for part in parts))

    def read(first: int, end: int) -> Tensor:
        found = []
        for part, stop in zip(parts, ends, strict=True):
            start = stop - part.shape[0]
            if first < stop and end > start:
                found.append(part.read(max(first - start, 0), min(end, stop) - start))
        return torch.cat(found)

    return RowStream((ends[-1], *parts[0].shape[1:]), parts[0].dtype, read)


def address_of(value: Any) -> int:
    """Return where the elements of a tensor are; 0 for what has none in memory of its own, and for other values."""
    return value.data_ptr() if isinstance(value, Tensor) and value.layout is torch.strided else 0


def replace_tensors(state: Any, streams: Mapping[int, RowStream]) -> Any:
    """Return a nested structure with streams in the place of the tensors that have their addresses and shapes.

    What has none of them is the same object.
    """

    def replace(value: Any) -> Any:
        stream = streams.get(address_of(value))
        return stream if stream is not None and stream.shape == tuple(value.shape) else value

    return map_leaves(replace, state)


def map_leaves(function: Callable[[Any], Any], state: Any) -> Any:
    """Return a nested structure with ``function`` of each value; what it leaves as it is is the same object."""
    if isinstance(state, dict):
        items = {key: map_leaves(function, value) for key, value in state.items()}
        if all(items[key] is value for key, value in state.items()):
            return state
        fresh = copy.copy(state)  # keeps the class and the attributes of a state_dict
        fresh.update(items)
        return fresh
    if type(state) in (list, tuple):
        values = [map_leaves(function, value) for value in state]
        return state if all(own is value for own, value in zip(values, state, strict=True)) else type(state)(values)
    return function(state)


class StreamingFile:
    """A file for ``torch.save`` that gets the rows of streams in the place of their placeholders.

    ``torch.save`` writes a zip archive: of each tensor a header, its name, its bytes, and then their CRC-32, which is
    in the directory at the end too. The bytes are passed to ``write`` as they lie in memory, in one piece. Their CRC-32
    is replaced in both places.
    """

    def __init__(self, file: Writable) -> None:
        self._file = file
        self._streams: dict[int, tuple[RowStream, Tensor]] = {}  # with its placeholder, by the address of that
        self._error: Exception | None = None
        self._name = b""  # of the entry that is written
        self._name_is_next = False
        self._crcs: dict[bytes, int] = {}  # of the entries that were streamed, by name
        self._is_streamed = False  # the last write was of a stream

    def with_placeholders(self, state: Any) -> Any:
        """Return a nested structure with a placeholder for each stream; what has none is the same object."""
        return map_leaves(self._placeholder, state)

    def _placeholder(self, value: Any) -> Any:
        if not isinstance(value, RowStream):
            return value
        for known, placeholder in self._streams.values():
            if known is value:
                return placeholder
        placeholder = value.placeholder()
        if value.nbytes:
            self._streams[placeholder.data_ptr()] = value, placeholder
        return placeholder

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write ``data``, or the rows of the stream whose placeholder it is."""
        content = memoryview(data).cast("B")
        found = self._streams.get(np.frombuffer(content, np.uint8).ctypes.data) if len(content) else None
        if found is not None and found[0].nbytes == len(content):
            self._write_rows(found[0])
        else:
            self._write_other(content)
        self._is_streamed = found is not None
        return len(content)

    def _write_rows(self, stream: RowStream) -> None:
        crc = 0
        try:
            # ``torch.save`` calls this from C++ and replaces an exception by its own: it is raised by ``finish``.
            for rows in stream.ranges() if self._error is None else ():
                content = rows.contiguous().view(-1).view(torch.uint8).numpy().data
                crc = zlib.crc32(content, crc)
                self._file.write(content)
        except Exception as error:  # noqa: BLE001 - raised by ``finish``
            self._error = error
        self._crcs[self._name] = crc

    def _write_other(self, content: memoryview) -> None:
        kind = bytes(content[:4])
        if self._name_is_next:
            self._name = bytes(content)
        self._name_is_next = kind == _HEADER and len(content) == _HEADER_BYTES
        if kind == _AFTER_CONTENT and self._is_streamed:
            content = memoryview(kind + self._crcs[self._name].to_bytes(4, "little") + content[8:])
        elif kind == _DIRECTORY and self._crcs:
            content = memoryview(self._with_crcs(bytes(content)))
        self._file.write(content)

    def _with_crcs(self, directory: bytes) -> bytes:
        """Return the directory with the CRC-32 of what was streamed."""
        found, at = bytearray(directory), 0
        while directory[at : at + 4] == _DIRECTORY:
            lengths = [int.from_bytes(directory[at + place : at + place + 2], "little") for place in (28, 30, 32)]
            crc = self._crcs.get(directory[at + 46 : at + 46 + lengths[0]])
            if crc is not None:
                found[at + 16 : at + 20] = crc.to_bytes(4, "little")
            at += 46 + sum(lengths)
        # Otherwise it is the content of another entry, which begins like a directory.
        return bytes(found) if at == len(directory) else directory

    def flush(self) -> None:
        """Do nothing: ``torch.save`` requires the method."""

    def finish(self) -> None:
        """Raise what a stream raised while it was read."""
        if self._error is not None:
            raise self._error

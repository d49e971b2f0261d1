"""Objects as files that ``torch.load(weights_only=True)`` reads: tensors, plain values and numpy arrays.

What a trainer stores, as bytes that ``torch.load(weights_only=True)`` reads.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from paramserver.errors import CheckpointError, TaskError

# Small enough that what else crosses the same connection hardly waits for one, large enough that a call costs little.
CHUNK_BYTES = 8 * 2**20

# numpy moved these two functions between its versions, so they are asked for, not named.
_NUMPY_FUNCTIONS: list[Any] = [np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
_NUMPY_TYPES: list[Any] = [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUVmM"}]
_NUMPY: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [*_NUMPY_FUNCTIONS, *_NUMPY_TYPES]
_NUMPY_NAMES = {f"{known.__module__}.{known.__name__}" for known in (*_NUMPY_FUNCTIONS, *_NUMPY_TYPES)}


class Writable(Protocol):
    """What ``torch.save`` needs of a file."""

    def write(self, data: bytes | bytearray | memoryview) -> int: ...

    def flush(self) -> None: ...


def write_archive(obj: Any, file: Writable) -> None:
    """``torch.save`` of ``obj`` in one pass; it never seeks, so a digest of what was written is that of the result."""
    torch.save(obj, cast(IO[bytes], file))


def write_chunks(obj: Any, send: Callable[[npt.NDArray[np.uint8]], None]) -> None:
    """Make the file of ``obj`` that ``torch.save`` would, and hand it on while it is made: no copy of it ever exists.

    Args:
        obj: private, as this takes its time.
        send: gets one piece after the other, at most ``PIECE_BYTES`` each; its memory is used again afterwards.

    Raises:
        Exception: what ``send`` raised, or ``torch.save``.
    """
    cutter = _ChunkWriter(send)
    write_archive(obj, cutter)
    cutter.finish()


class _ChunkWriter:
    """A file that collects what is written. Copies are numpy's, which lets other threads run meanwhile."""

    def __init__(self, send: Callable[[npt.NDArray[np.uint8]], None]) -> None:
        self._send = send
        self._piece = np.empty(CHUNK_BYTES, np.uint8)
        self._filled = 0
        self._error: Exception | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        source = np.frombuffer(data, np.uint8)
        start = 0
        # torch.save calls this from C++ and hides what it raises: the first error is kept for ``finish``.
        while start < len(source) and self._error is None:
            taken = source[start : start + CHUNK_BYTES - self._filled]
            self._piece[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            start += len(taken)
            if self._filled == CHUNK_BYTES:
                self._hand_on()
        return len(source)

    def _hand_on(self) -> None:
        try:
            self._send(self._piece[: self._filled])
        except Exception as error:  # noqa: BLE001 - raised by ``finish``
            self._error = error
        self._filled = 0

    def flush(self) -> None:
        """Nothing: ``finish`` flushes, and ``torch.save`` only wants the method to be there."""

    def finish(self) -> None:
        if self._filled and self._error is None:
            self._hand_on()
        if self._error is not None:
            raise self._error


def unloadable_types(path: Path) -> list[str]:
    """Name what in the archive at ``path`` would be refused when it is loaded. Reads its small pickle only."""
    try:
        return sorted(set(get_unsafe_globals_in_checkpoint(str(path))) - _NUMPY_NAMES)
    except pickle.UnpicklingError as error:
        return [str(error)]


def load_archive(path: Path | IO[bytes]) -> Any:
    """Return the object in the archive at ``path``, or in an open file, its tensors on the CPU.

    Raises:
        CheckpointError: it is no such archive, or holds objects of other types.
    """
    try:
        with safe_globals(_NUMPY):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        cause = str(error).strip().split("\n")[0]
        raise CheckpointError(f"{path} cannot be loaded ({type(error).__name__}: {cause})") from error


def pack(state: Mapping[str, Any]) -> bytes:
    """What a trainer stores, as the bytes of a file that ``torch.load(weights_only=True)`` reads."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def check_storable(state: Mapping[str, Any], task_name: str) -> None:
    """Refuse, when it is stored, what could not be loaded again. Looks at types alone, whatever the size of tensors.

    Args:
        state: private, so that its tensors are plain ones.
        task_name: for the message.

    Raises:
        TaskError: ``on_checkpoint`` put something there that ``torch.load(weights_only=True)`` does not take.
    """
    try:
        unpack(pack(_without_values(state)))
    except Exception as error:  # pickle and torch raise many types for what they cannot take
        raise TaskError(
            f"{task_name}.on_checkpoint stored what cannot be loaded again ({str(error).splitlines()[0]}); "
            "store tensors, numbers, strings, and lists or dicts of them"
        ) from error


def _without_values(state: Any) -> Any:
    """The same nested structure with an empty tensor in the place of each."""
    if isinstance(state, torch.Tensor):
        return torch.empty(0, dtype=state.dtype)
    if isinstance(state, dict):
        fresh = copy.copy(state)
        for key, value in state.items():
            fresh[key] = _without_values(value)
        return fresh
    if type(state) in (list, tuple):
        return type(state)(_without_values(value) for value in state)
    return state


def unpack(part: bytes) -> dict[str, Any]:
    """Take back what ``pack`` made."""
    state: dict[str, Any] = load_archive(io.BytesIO(part))
    return state

"""Objects as files, bytes or chunks that ``torch.load(weights_only=True)`` reads.

They consist of tensors, plain values and numpy arrays.
"""

from __future__ import annotations

import io
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

from paramserver.checkpoint.staging import StreamingFile, map_leaves
from paramserver.errors import CheckpointError, TaskError
from paramserver.fileio import Writable

# Small enough that other messages on the same connection hardly wait for one, large enough that a call costs little.
CHUNK_BYTES = 8 * 2**20

# numpy moved these two functions between its versions, so their names are not written here.
_NUMPY_FUNCTIONS: list[Any] = [np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
_NUMPY_TYPES: list[Any] = [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUVmM"}]
_NUMPY: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [*_NUMPY_FUNCTIONS, *_NUMPY_TYPES]
_NUMPY_NAMES = {f"{known.__module__}.{known.__name__}" for known in (*_NUMPY_FUNCTIONS, *_NUMPY_TYPES)}

# What a load registers is the process's: the end of one in another thread would remove it.
_load_lock = threading.Lock()


def write_archive(obj: Any, file: Writable) -> None:
    """``torch.save`` of ``obj`` in one pass. It never seeks, so the digest of what is written is that of the file.

    Raises:
        Exception: of ``torch.save``, or of a ``RowStream`` in ``obj``.
    """
    streaming = StreamingFile(file)
    content = streaming.with_placeholders(obj)
    torch.save(content, cast(IO[bytes], file if content is obj else streaming))
    streaming.finish()


def write_chunks(obj: Any, send: Callable[[npt.NDArray[np.uint8]], None]) -> None:
    """Produce the file that ``torch.save`` makes of ``obj`` in chunks, and send each at once: no copy of it exists.

    ``obj`` is private, as training continues meanwhile. ``send`` receives one chunk after the other, of at most
    ``CHUNK_BYTES``; its memory is reused after the call.

    Raises:
        Exception: of ``send`` or ``torch.save``.
    """
    writer = _ChunkWriter(send)
    write_archive(obj, writer)
    writer.finish()


class _ChunkWriter:
    """A file that sends what is written to it. The copies are numpy's, which releases the GIL."""

    def __init__(self, send: Callable[[npt.NDArray[np.uint8]], None]) -> None:
        self._send = send
        self._chunk = np.empty(CHUNK_BYTES, np.uint8)
        self._filled = 0
        self._error: Exception | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        source = np.frombuffer(data, np.uint8)
        start = 0
        # torch.save calls this from C++ and replaces an exception by its own: the first one is kept for ``finish``.
        while start < len(source) and self._error is None:
            copied = source[start : start + CHUNK_BYTES - self._filled]
            self._chunk[self._filled : self._filled + len(copied)] = copied
            self._filled += len(copied)
            start += len(copied)
            if self._filled == CHUNK_BYTES:
                self._send_chunk()
        return len(source)

    def _send_chunk(self) -> None:
        try:
            self._send(self._chunk[: self._filled])
        except Exception as error:  # noqa: BLE001 - raised by ``finish``
            self._error = error
        self._filled = 0

    def flush(self) -> None:
        """Nothing: ``torch.save`` requires the method, and ``finish`` sends the last chunk."""

    def finish(self) -> None:
        if self._filled and self._error is None:
            self._send_chunk()
        if self._error is not None:
            raise self._error


def unloadable_types(path: Path) -> list[str]:
    """Return the types in the archive at ``path`` that ``load_archive`` refuses. Reads its small pickle only."""
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
        with _load_lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the protocol of a foreign pickle, which is about to be refused
            # Not those that the task has registered for files of its own: at its end the context removes what it is
            # given.
            registered = get_safe_globals()
            with safe_globals([one for one in _NUMPY if one not in registered]):
                return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file of another kind makes the unpickler raise anything
        what = path if isinstance(path, Path) else "a trainer's part of a checkpoint"
        raise CheckpointError(f"{what} cannot be loaded ({_why_not_loaded(error)})") from error


def _why_not_loaded(error: Exception) -> str:
    """Return why ``torch.load`` refused a file."""
    text = str(error)
    if isinstance(error, pickle.UnpicklingError):
        refused = re.search(r"GLOBAL (\S+)", text)
        held = refused[1] if refused else "what no torch.save writes"
        return f"it is a pickle with {held}, and only tensors and plain values are loaded"
    if isinstance(error, OSError):
        return error.strerror or text
    cause = text.strip().split("\n")[0]
    if isinstance(error, EOFError) or not cause:
        return "it is empty, or ends too early"
    return f"it is no file of torch.save: {type(error).__name__}: {cause}"


def check_mapping(content: Any, what: str, names: Sequence[str] = ()) -> Mapping[str, Any]:
    """Return ``content``, loaded from ``what``, if it is a dictionary with these names.

    Raises:
        CheckpointError: it is not; another program wrote the file.
    """
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{what} must hold a dictionary, and holds {type(content).__name__}; another program wrote it"
        )
    if missing := [name for name in names if name not in content]:
        raise CheckpointError(f"{what} must hold {', '.join(names)}, and lacks {missing[0]}; another program wrote it")
    return content


def pack(state: Mapping[str, Any]) -> bytes:
    """Return a trainer's part as the bytes of a file that ``torch.load(weights_only=True)`` reads."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def unpack(part: bytes) -> dict[str, Any]:
    """Return the state that ``pack`` received.

    Raises:
        CheckpointError: ``part`` is not the result of ``pack``.
    """
    return dict(check_mapping(load_archive(io.BytesIO(part)), "a trainer's part of a checkpoint"))


# Exact types that every file of ``torch.save`` may hold.
_LOADABLE = frozenset({torch.Tensor, int, float, bool, str, bytes, type(None)})


def check_storable(state: Mapping[str, Any], where: str) -> None:
    """Check, before a part is stored, that it can be loaded again. Looks at types only, so large tensors cost nothing.

    ``state`` is private, so that its tensors are plain ones.

    Raises:
        TaskError: ``where`` stored something that ``torch.load(weights_only=True)`` refuses.
    """
    if _is_plain(state):
        return
    try:
        unpack(pack(without_values(state)))
    except Exception as error:  # pickle and torch raise many types for what they cannot store
        raise TaskError(
            f"{where} stored what cannot be loaded again ({str(error).splitlines()[0]}); "
            "store tensors, numbers, strings, and lists or dicts of them"
        ) from error


def _is_plain(state: Any) -> bool:
    """Return whether a nested structure holds nothing but what each file of ``torch.save`` may hold."""
    if type(state) is dict:
        return _LOADABLE.issuperset(map(type, state)) and _is_plain(list(state.values()))
    if type(state) in (list, tuple):
        return all(_is_plain(value) for value in state if type(value) not in _LOADABLE)
    return type(state) in _LOADABLE


def without_values(state: Any) -> Any:
    """Return the same nested structure with an empty tensor in the place of each."""

    def without_value(leaf: Any) -> Any:
        return torch.empty(0, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(without_value, state)

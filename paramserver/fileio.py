"""How bytes reach the disk so that a crash at any moment leaves the old content or the new one, never a mixture."""

import errno
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Some network file systems cannot sync a folder and say so; there is nothing else to ask of them.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)


class HashingFile:
    """A new file that is written front to back once; its SHA-256 and size are computed on the way.

    A failed write is kept and raised by ``finish``: ``torch.save`` calls ``write`` from C++ and would hide the cause
    behind an error of its own.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._digest = hashlib.sha256()
        self._error: OSError | None = None
        self.size_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of ``data`` and return its length."""
        length = data.nbytes if isinstance(data, memoryview) else len(data)
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
            self._digest.update(data)
            self.size_bytes += length
        return length

    def flush(self) -> None:
        """Nothing: ``finish`` flushes, and ``torch.save`` only wants the method to be there."""

    def finish(self) -> str:
        """Bring everything to the disk, close, and return the SHA-256 in hexadecimal.

        Raises:
            OSError: a write failed, now or before.
        """
        try:
            if self._error is not None:
                raise self._error
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close, and forget what could not be flushed: on this path the file is about to be removed."""
        try:
            self._file.close()
        except OSError as error:
            self._error = self._error or error


def fsync_folder(folder: Path) -> None:
    """Make the creations, renames and removals inside ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def atomic_rename(source: Path, target: Path) -> None:
    """Rename in one indivisible act; a file takes the place of ``target``."""
    os.replace(source, target)  # noqa: PTH105 - by its own name, so that tests can let it fail on every Python


def atomic_write_text(path: Path, text: str) -> None:
    """Replace the content of ``path``: a reader, or a crash, sees the old text or the new one.

    Raises:
        OSError: the disk refused; ``path`` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        file = HashingFile(temporary)
        file.write(text.encode())
        file.finish()
        atomic_rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def json_text(value: Any, indent: int | None = None) -> str:
    """``value`` as JSON that every parser accepts.

    Tensors and numpy scalars become numbers (``item()``), longer ones lists, what JSON does not know its ``str``.
    A number that is not finite becomes ``null``, with its text beside it: ``{"loss": null, "loss_text": "nan"}``.
    """
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # tensors, numpy arrays and scalars: a plain number or (nested) lists of them
        return _plain(value.tolist())
    return str(value)


def _plain_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, item in value.items():
        number = item.tolist() if hasattr(item, "tolist") else item
        plain[str(key)] = _plain(number)
        if isinstance(number, float) and not math.isfinite(number):
            plain[f"{key}_text"] = str(float(number))
    return plain

"""Crash-safe file writes: after a crash at any moment a file has its old content or the new one, never a mixture."""

import errno
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from paramserver.errors import StorageError, UnsupportedConfiguration

# Errors of file systems that do not support fsync of a folder, such as some network file systems. Nothing else helps.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)
_SPACE = "free space on that disk, or lower checkpoint.keep"
_RIGHTS = "give this user the right to write there (also: lsattr shows an i), or choose another logging.run_dir"
_GONE = "check that the file system is there, and mount it again or choose another logging.run_dir"
DISK_CURES = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: "free space within your quota, or lower checkpoint.keep",
    errno.EMLINK: _SPACE,
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EROFS: "choose a logging.run_dir on a disk that can be written",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.ENOENT: "leave the run's folder where it is while the run writes to it",
    errno.ENOTDIR: "leave the run's folder where it is while the run writes to it",
    **dict.fromkeys((errno.EIO, errno.EUCLEAN, errno.EREMOTEIO, errno.EBADMSG), "check that disk"),
    **dict.fromkeys((errno.ENODEV, errno.ENXIO, errno.ENOMEDIUM, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN), _GONE),
    **dict.fromkeys((errno.ENOLINK, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.ENOLCK), _GONE),
}
"""What to do about an error of a disk or file system, also one over the network, by its number."""

TEMPORARY = ".tmp"
"""The end of the name of a file that is being written; the name begins with a dot."""

_BLOCK_BYTES = 2**16  # of a file that is read from its end


def is_file(path: Path) -> bool:
    """Whether ``path`` is a file; False where this user may not look, for which ``Path.is_file`` raises an error."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder; False where this user may not look, for which ``Path.is_dir`` raises an error."""
    return os.path.isdir(path)  # noqa: PTH112


def then_resume(path: Path) -> str:
    """Return how a run continues whose file ``path`` could not be written: from its checkpoint, where it has one.

    What a folder has that was moved away is not known.
    """
    around = [folder for folder in (path, *path.parents[:4]) if folder.name == "checkpoints"]
    around += [folder / "checkpoints" for folder in path.parents[:4]]
    try:
        if not path.parent.exists() or any(any(folder.glob("step-*/manifest.json")) for folder in around):
            return "then --resume"
    except OSError:  # a disk that cannot be read either
        return "then --resume"
    return "then start it again under another logging.name, as it has no checkpoint to resume from"


@contextmanager
def explain_disk_errors(path: Path, what: str = "checkpoint") -> Iterator[None]:
    """Turn an ``OSError`` about ``path`` into a ``StorageError`` with its cure."""
    try:
        yield
    except OSError as error:
        cure = DISK_CURES.get(error.errno or 0, "check that disk")
        raise StorageError(f"{what} {path} could not be written ({error}); {cure}, {then_resume(path)}") from error


@contextmanager
def explain_not_writable(what: str, cure: str = "") -> Iterator[None]:
    """Turn an ``OSError`` into the error for a folder that cannot be written to, by default that of a run."""
    try:
        yield
    except OSError as error:
        if not cure:
            cure = "make it so, or choose another logging.run_dir"
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # in the middle of a run these have another cause
                cure = DISK_CURES.get(error.errno or 0, cure)
        raise UnsupportedConfiguration(
            f"{what} must be a folder that this user can write to ({error.strerror or error}); {cure}"
        ) from error


class Writable(Protocol):
    """What ``torch.save`` needs of a file."""

    def write(self, data: bytes | bytearray | memoryview) -> int: ...

    def flush(self) -> None: ...


class HashingFile:
    """A new file that is written sequentially, with its SHA-256 and size.

    The first failure of a write is stored and raised by ``finish``: ``torch.save`` calls ``write`` from C++ and would
    replace it with a less specific error.
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
        """Do nothing: ``torch.save`` requires the method, and ``finish`` flushes."""

    def finish(self) -> str:
        """Flush to the disk (fsync), close the file and return its SHA-256 in hexadecimal.

        Raises:
            OSError: this or an earlier write failed.
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
        """Close without raising: where ``finish`` was not called, the file is about to be removed."""
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
    """Rename ``source`` atomically; an existing file ``target`` is replaced."""
    os.replace(source, target)  # noqa: PTH105 - tests replace os.replace to make it fail


def atomic_write_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` atomically: a reader, or a crash, sees the old text or the new one.

    Raises:
        OSError: the write failed; ``path`` is unchanged.
    """
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """As ``atomic_write_text``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    temporary.unlink(missing_ok=True)
    try:
        file = HashingFile(temporary)
        file.write(content)
        file.finish()
        atomic_rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def end_last_line(file: BinaryIO) -> None:
    """Let a file of JSON objects, one per line, end with a whole line. Call it before the first append.

    A process that dies while it writes a line leaves it incomplete, and what the next one appends would be part of it.
    Such a line is removed; it gets its end where nothing else is missing. ``file`` is open with ``a+b``.
    """
    end = start = file.seek(0, os.SEEK_END)
    blocks: list[bytes] = []
    while start and (not blocks or b"\n" not in blocks[-1]):
        before, start = start, max(0, start - _BLOCK_BYTES)
        file.seek(start)
        blocks.append(file.read(before - start))
    if torn := b"".join(reversed(blocks)).rpartition(b"\n")[2]:
        try:
            json.loads(torn)
        except (ValueError, RecursionError):
            if file.seek(0, os.SEEK_END) == end:  # otherwise another process is writing this line
                file.truncate(end - len(torn))
        else:
            file.write(b"\n")


def json_text(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as strict JSON, which every parser accepts.

    Tensors and numpy arrays become numbers or lists; objects that JSON does not support become their ``str``. A number
    that is not finite becomes ``null``, and a second entry of the mapping holds its text.
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
    if hasattr(value, "tolist"):  # tensors, numpy arrays and scalars: a number or nested lists of numbers
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

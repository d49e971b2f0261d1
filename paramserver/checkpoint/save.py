"""Writing checkpoints atomically.

A checkpoint comes into being by one rename of a folder that is already whole and on the disk (the order of
torchsnapshot and of every careful editor: data, sync, manifest, sync, rename, sync, pointer).

The content of a file that comes piece by piece. Needs no numpy to be imported.

Which checkpoints stay: the newest few, the best one, and never the leftovers of a writer that died.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.checkpoint.format import (
    BEST,
    LATEST,
    MANIFEST,
    FileEntry,
    Manifest,
    UnfinishedWrite,
    temporary_path,
    list_complete,
    unfinished_writes,
    read_pointer,
    why_incomplete,
    remove,
    step_name,
    step_of,
)
from paramserver.errors import TrainingError, UnsupportedConfiguration
from paramserver.fileio import HashingFile, atomic_rename, atomic_write_text, fsync_folder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class ChunkedFile:
    """The content of a file, in the order in which it came. It keeps the memory that it is given."""

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []

    def append(self, piece: npt.NDArray[np.uint8]) -> None:
        self._pieces.append(piece.data)

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._pieces)


_CURES = {
    errno.ENOSPC: "free space on that disk, or lower checkpoint.keep",
    errno.EDQUOT: "free space within your quota, or lower checkpoint.keep",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EROFS: "choose a logging.run_dir on a disk that can be written",
    errno.EACCES: "give this user the right to write there, or choose another logging.run_dir",
}
_RAW = (bytes, ChunkedFile)
_WHAT_TO_KEEP = "keep tensors, numpy arrays and plain values in it"


def write_checkpoint(folder: Path, step: int, objects: Mapping[str, Any], about: Mapping[str, Any]) -> Path:
    """Write ``folder/step-<step>`` and point ``latest`` to it; a crash at any moment leaves the previous one whole.

    Args:
        folder: the run's ``checkpoints`` folder, made where it is missing.
        step: the global step of the cut. A checkpoint of the same step is replaced.
        objects: by name, what ``torch.save`` puts into ``<name>.pt``; ``bytes`` and ``ChunkedFile`` go into a file
            ``<name>`` as they are. Nothing is copied.
        about: further entries of the manifest (mode, trainers, ...).

    Returns:
        The folder of the checkpoint.

    Raises:
        TrainingError: a file could not be written, or could not be loaded again; nothing half-written is left.
    """
    files = _file_names(objects)
    final = folder / step_name(step)
    temporary, aside = temporary_path(final, "tmp"), temporary_path(final, "old")
    with explain_disk_errors(final):
        folder.mkdir(parents=True, exist_ok=True)
        remove(temporary)
        try:
            temporary.mkdir()
            entries = {name: _write_file(temporary / name, obj) for name, obj in files.items()}
            _write_file(temporary / MANIFEST, Manifest(step, _now(), entries, about).to_text().encode())
            fsync_folder(temporary)
            _publish(temporary, final, aside)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # the first error is the one to tell
            _roll_back(aside, final)
            raise
        remove(aside)
    return final


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()


def _roll_back(aside: Path, final: Path) -> None:
    """After a failure: the checkpoint that was moved aside returns, unless its successor is in place."""
    if not os.path.lexists(aside):
        return
    if os.path.lexists(final):
        shutil.rmtree(aside, ignore_errors=True)
    else:
        atomic_rename(aside, final)


def _file_names(objects: Mapping[str, Any]) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for name, obj in objects.items():
        file = name if isinstance(obj, _RAW) else f"{name}.pt"
        if file in files or file == MANIFEST or file.startswith(".") or Path(file).name != file:
            raise ValueError(f"object name ({name}) must be a plain file name that nothing else has; rename it")
        files[file] = obj
    return files


@contextmanager
def explain_disk_errors(path: Path, what: str = "checkpoint") -> Iterator[None]:
    """Tell an ``OSError`` about ``path`` as the run's failure, with its cure."""
    try:
        yield
    except OSError as error:
        cure = _CURES.get(error.errno or 0, "check that disk")
        raise TrainingError(f"{what} {path} could not be written ({error}); {cure}, then --resume") from error


def _write_file(path: Path, obj: Any) -> FileEntry:
    with explain_disk_errors(path):
        file = HashingFile(path)
        try:
            if isinstance(obj, _RAW):
                for piece in (obj,) if isinstance(obj, bytes) else obj:
                    file.write(piece)
            else:
                _write_object(obj, file, path.stem)
            digest = file.finish()
        finally:
            file.close()
    if not isinstance(obj, _RAW):
        _refuse_unloadable(path)
    return FileEntry(file.size_bytes, digest)


def _write_object(obj: Any, file: HashingFile, name: str) -> None:
    from paramserver.checkpoint.serialization import write_archive

    try:
        write_archive(obj, file)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise TrainingError(f"checkpoint object {name} must be savable ({cause}); {_WHAT_TO_KEEP}") from error


def _refuse_unloadable(path: Path) -> None:
    """Refuse a state that cannot be loaded again now, not on the day it is needed."""
    from paramserver.checkpoint.serialization import unloadable_types

    refused = unloadable_types(path)
    if refused:
        raise TrainingError(
            f"checkpoint object {path.stem} ({', '.join(refused)}) must load with torch.load(weights_only=True); "
            f"{_WHAT_TO_KEEP}"
        )


def _publish(temporary: Path, final: Path, aside: Path) -> None:
    folder = final.parent
    if os.path.lexists(final):  # also a link that leads nowhere
        # ``latest`` must not name a hole while two folders change places.
        others = [path for path in list_complete(folder) if path != final]
        if others and read_pointer(folder, LATEST) == final:
            atomic_write_text(folder / LATEST, f"{others[0].name}\n")
        remove(aside)
        atomic_rename(final, aside)
    atomic_rename(temporary, final)
    fsync_folder(folder)
    atomic_write_text(folder / LATEST, f"{final.name}\n")


def mark_best(folder: Path, step: int) -> None:
    """Let ``folder/best`` name the checkpoint of ``step``, which retention then keeps."""
    with explain_disk_errors(folder / BEST):
        atomic_write_text(folder / BEST, f"{step_name(step)}\n")


def restore_best_pointer(folder: Path, step: int | None) -> None:
    """Let ``folder/best`` name the checkpoint of ``step`` where that is there, and nothing otherwise."""
    if step is not None and (folder / step_name(step)).is_dir():
        mark_best(folder, step)
    else:
        (folder / BEST).unlink(missing_ok=True)


def apply_retention(folder: Path, keep: int) -> list[Path]:
    """Remove all complete checkpoints but the ``keep`` newest, the one ``best`` names and the one ``latest`` names.

    Returns:
        The removed ones. What is not complete is left alone: this package did not leave it there.

    Raises:
        UnsupportedConfiguration: ``keep`` is below 1.
    """
    if keep < 1:
        raise UnsupportedConfiguration(f"checkpoint.keep ({keep}) must be at least 1; resuming needs one")
    protected = (read_pointer(folder, LATEST), read_pointer(folder, BEST))
    old = [path for path in list_complete(folder)[keep:] if path not in protected and step_of(path.name) is not None]
    for path in old:
        with explain_disk_errors(path):
            _discard(path)
    return old


def _discard(path: Path) -> None:
    """Away in one rename: a removal that is cut short must not leave a folder that looks like a checkpoint."""
    gone = temporary_path(path, "gone")
    remove(gone)
    atomic_rename(path, gone)
    remove(gone)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what dead writers left in ``folder``; to be called at the start of a run, before its first write.

    A checkpoint that was moved aside returns where its successor never took its place.

    Returns:
        The removed paths.
    """
    if not folder.is_dir():
        return []
    with explain_disk_errors(folder):
        return [
            leftover.path
            for leftover in unfinished_writes(folder)
            if not _is_alive(leftover.pid) and _remove_or_restore(leftover)
        ]


def _remove_or_restore(leftover: UnfinishedWrite) -> bool:
    if leftover.kind == "old" and not leftover.final.exists() and why_incomplete(leftover.path) is None:
        atomic_rename(leftover.path, leftover.final)
        return False
    remove(leftover.path)
    return True


def _is_alive(pid: int) -> bool:
    """Is another process of this id running? Our own id is that of a predecessor, as ids are few in a container."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

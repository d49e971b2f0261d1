"""Writing checkpoints atomically.

A checkpoint comes into being by one rename of a folder that is already whole and on the disk (the order of
torchsnapshot and of every careful editor: data, sync, manifest, sync, rename, sync, pointer).
"""

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from paramserver.checkpoint.disk import HashingFile, move, replace_text, sync_folder
from paramserver.checkpoint.layout import LATEST, beside, history, pointed, remove, step_name
from paramserver.checkpoint.manifest import MANIFEST, FileEntry, Manifest
from paramserver.checkpoint.pieces import Pieces
from paramserver.errors import TrainingError

__all__ = ["disk_errors_told", "write_checkpoint"]

_CURES = {
    errno.ENOSPC: "free space on that disk, or lower checkpoint.keep",
    errno.EDQUOT: "free space within your quota, or lower checkpoint.keep",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EROFS: "choose a logging.run_dir on a disk that can be written",
    errno.EACCES: "give this user the right to write there, or choose another logging.run_dir",
}
_RAW = (bytes, Pieces)
_WHAT_TO_KEEP = "keep tensors, numpy arrays and plain values in it"


def write_checkpoint(folder: Path, step: int, objects: Mapping[str, Any], about: Mapping[str, Any]) -> Path:
    """Write ``folder/step-<step>`` and point ``latest`` to it; a crash at any moment leaves the previous one whole.

    Args:
        folder: the run's ``checkpoints`` folder, made where it is missing.
        step: the global step of the cut. A checkpoint of the same step is replaced.
        objects: by name, what ``torch.save`` puts into ``<name>.pt``; ``bytes`` and ``Pieces`` go into a file
            ``<name>`` as they are. Nothing is copied.
        about: further entries of the manifest (mode, trainers, ...).

    Returns:
        The folder of the checkpoint.

    Raises:
        TrainingError: a file could not be written, or could not be loaded again; nothing half-written is left.
    """
    files = _file_names(objects)
    final = folder / step_name(step)
    temporary, aside = beside(final, "tmp"), beside(final, "old")
    with disk_errors_told(final):
        folder.mkdir(parents=True, exist_ok=True)
        remove(temporary)
        try:
            temporary.mkdir()
            entries = {name: _write_file(temporary / name, obj) for name, obj in files.items()}
            _write_file(temporary / MANIFEST, Manifest(step, _now(), entries, about).text().encode())
            sync_folder(temporary)
            _publish(temporary, final, aside)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # the first error is the one to tell
            _settle(aside, final)
            raise
        remove(aside)
    return final


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()


def _settle(aside: Path, final: Path) -> None:
    """After a failure: the checkpoint that was moved aside returns, unless its successor is in place."""
    if not os.path.lexists(aside):
        return
    if os.path.lexists(final):
        shutil.rmtree(aside, ignore_errors=True)
    else:
        move(aside, final)


def _file_names(objects: Mapping[str, Any]) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for name, obj in objects.items():
        file = name if isinstance(obj, _RAW) else f"{name}.pt"
        if file in files or file == MANIFEST or file.startswith(".") or Path(file).name != file:
            raise ValueError(f"object name ({name}) must be a plain file name that nothing else has; rename it")
        files[file] = obj
    return files


@contextmanager
def disk_errors_told(path: Path, what: str = "checkpoint") -> Iterator[None]:
    """Tell an ``OSError`` about ``path`` as the run's failure, with its cure."""
    try:
        yield
    except OSError as error:
        cure = _CURES.get(error.errno or 0, "check that disk")
        raise TrainingError(f"{what} {path} could not be written ({error}); {cure}, then --resume") from error


def _write_file(path: Path, obj: Any) -> FileEntry:
    with disk_errors_told(path):
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
    from paramserver.checkpoint.archive import write_archive

    try:
        write_archive(obj, file)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise TrainingError(f"checkpoint object {name} must be savable ({cause}); {_WHAT_TO_KEEP}") from error


def _refuse_unloadable(path: Path) -> None:
    """Refuse a state that cannot be loaded again now, not on the day it is needed."""
    from paramserver.checkpoint.archive import refused_types

    refused = refused_types(path)
    if refused:
        raise TrainingError(
            f"checkpoint object {path.stem} ({', '.join(refused)}) must load with torch.load(weights_only=True); "
            f"{_WHAT_TO_KEEP}"
        )


def _publish(temporary: Path, final: Path, aside: Path) -> None:
    folder = final.parent
    if os.path.lexists(final):  # also a link that leads nowhere
        # ``latest`` must not name a hole while two folders change places.
        others = [path for path in history(folder) if path != final]
        if others and pointed(folder, LATEST) == final:
            replace_text(folder / LATEST, f"{others[0].name}\n")
        remove(aside)
        move(final, aside)
    move(temporary, final)
    sync_folder(folder)
    replace_text(folder / LATEST, f"{final.name}\n")

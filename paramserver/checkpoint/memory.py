"""One checkpoint in memory: in a folder on a tmpfs, which outlives the processes of its run, but not the machine.

It is written like any other, but that large tensors are not: the copies that were staged are in files of that folder
already (``FilePool``). ``checkpoints/memory`` in the folder of the run names the folder. A run that returns to it first
writes it to the disk (``move_to_disk``), so that whatever resumes a run reads checkpoints in one place.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paramserver.checkpoint.format import LATEST, check_sizes, read_manifest, read_pointer, remove, step_of
from paramserver.checkpoint.load import Checkpoint, find_checkpoint, read_checkpoint
from paramserver.checkpoint.save import ChunkedFile, write_checkpoint
from paramserver.errors import CheckpointError, StorageError, UnsupportedConfiguration
from paramserver.fileio import atomic_write_bytes, explain_disk_errors

_log = logging.getLogger(__name__)

MEMORY = "memory"
"""The reason of a checkpoint in memory, and the name of the file that names its folder."""

_FOLLOWS, _BLOCKS = "follows", "blocks"
_PREFIX = "paramserver-"
_MOST_NAME_BYTES = 234  # of the run
_MIB = 2**20


def check_memory_folder(base: Path) -> None:
    """Check ``checkpoint.memory_folder`` before a run begins: its first use may be hours later. Makes nothing.

    Raises:
        UnsupportedConfiguration: ``base`` is no folder that this user can write to.
    """
    if not (base.is_dir() and os.access(base, os.W_OK | os.X_OK)):
        reason = "it cannot be written to" if base.is_dir() else "there is no such folder"
        raise UnsupportedConfiguration(_unusable(base, reason))


def _unusable(base: Path, reason: str | None) -> str:
    return (
        f"checkpoint.memory_folder ({base}) must be a folder, best on a tmpfs, that this user can write to ({reason}); "
        "set another one, or checkpoint.memory_every to null"
    )


def make_memory_folder(run: Path, base: Path, objects: Mapping[str, Any]) -> Path:
    """Make a folder in ``base`` for checkpoints of ``objects``, of which two are there while one replaces the other.

    Raises:
        StorageError: ``base`` is no folder that this user can write to, or has too little room for two.
    """
    needed = 2 * _size_bytes(objects)
    try:
        free = shutil.disk_usage(base).free
    except OSError as error:
        raise StorageError(_unusable(base, error.strerror)) from error
    if needed > free:
        raise StorageError(
            f"checkpoint.memory_folder ({base}) must have room for two checkpoints, as one is removed after the next "
            f"is complete: it needs {needed / _MIB:,.1f} MiB and has {free / _MIB:,.1f} MiB free; make it larger "
            "(docker run --shm-size, mount -o remount,size=...), set another one, or checkpoint.memory_every to null"
        )
    # The name is random: neither another run nor another user has it.
    folder = base.absolute() / f"{_prefix(run.resolve())}{secrets.token_hex(4)}"
    # It is named before it exists: if this process is killed in between, nothing is left that no file names.
    with explain_disk_errors(run / "checkpoints" / MEMORY, "file"):
        atomic_write_bytes(run / "checkpoints" / MEMORY, os.fsencode(f"{run.resolve()}\n{folder}\n"))
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise StorageError(_unusable(base, error.strerror)) from error
    return folder


def follows(names: Sequence[str | None], blocks: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the metadata of a checkpoint in memory. ``names`` are the checkpoints on the disk that it may continue.

    ``blocks`` are the files with its large tensors, by the name of its object; see ``FilePool.detach``.
    """
    return {_FOLLOWS: list(names), _BLOCKS: dict(blocks)}


def newer_in_memory(run: Path) -> Path | None:
    """Return the checkpoint in memory that continues the newest on the disk; None where there is none.

    It is of no use once the run has abandoned it, as after a resume on another machine or from a chosen checkpoint.
    """
    folder = memory_folder(run)
    try:
        found = None if folder is None else read_pointer(folder, LATEST)
        if found is None:
            return None
        manifest = read_manifest(found)
        if check_sizes(found, manifest):
            return None
    except CheckpointError:
        return None
    try:
        on_disk = find_checkpoint(run).name
    except CheckpointError:
        on_disk = None
    is_newer = on_disk is None or manifest.step > (step_of(on_disk) or 0)
    return found if is_newer and on_disk in manifest.metadata.get(_FOLLOWS, ()) else None


def move_to_disk(run: Path) -> str | None:
    """Write the checkpoint in memory to the disk, if it is newer, and remove what is in memory. Holds the run's lock.

    Return a sentence about it for the user; None where there is none.
    """
    found, sentence = newer_in_memory(run), None
    if found is not None:
        try:
            checkpoint, objects = _read(found)
        except CheckpointError as error:
            sentence = f"the checkpoint in memory is not used: {str(error).partition(';')[0]}"
            _log.warning("%s", sentence)
        else:
            sentence = f"{found.name} was in memory ({found.parent}), and is on the disk now"
            own = _FOLLOWS, _BLOCKS
            metadata = {key: value for key, value in checkpoint.manifest.metadata.items() if key not in own}
            write_checkpoint(run / "checkpoints", checkpoint.step, objects, metadata)
    remove_memory(run)
    return sentence


def remove_memory(run: Path) -> None:
    """Remove the checkpoint in memory of a run, if it has one on this machine."""
    if (folder := memory_folder(run)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
    remove(run / "checkpoints" / MEMORY)


def memory_folder(run: Path) -> Path | None:
    """Return the folder for the checkpoint in memory of a run, if it has one on this machine.

    So it is also where only another user may look into ``checkpoint.memory_folder``.
    """
    run = run.resolve()
    try:
        text = os.fsdecode((run / "checkpoints" / MEMORY).read_bytes())  # paths may have bytes that are no UTF-8
    except OSError:
        return None
    # In a copy of the run's folder the file names the folder of the original, which another process may use. Both paths
    # may have any end of a line.
    owner = f"{run}\n"
    folder = Path(text.removeprefix(owner).removesuffix("\n"))
    if not (text.startswith(owner) and folder.name.startswith(_prefix(run))):
        return None
    try:
        return folder if stat.S_ISDIR(folder.stat().st_mode) else None
    except PermissionError:
        return folder
    except (OSError, ValueError):
        return None


def _prefix(run: Path) -> str:
    """Return what the names of the folders of a run begin with, so short that no name has more than 255 bytes."""
    encoded = os.fsencode(run.name)
    name = run.name if len(encoded) <= _MOST_NAME_BYTES else encoded[:_MOST_NAME_BYTES].decode(errors="ignore")
    return f"{_PREFIX}{name}-"


def _read(path: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """Return the checkpoint in a folder, and what ``write_checkpoint`` writes of it to another one."""
    checkpoint = read_checkpoint(path)
    blocks = checkpoint.manifest.metadata.get(_BLOCKS, {})
    objects: dict[str, Any] = {}
    for file in checkpoint.manifest.files:
        if names := blocks.get(name := file.removesuffix(".pt")):
            from paramserver.checkpoint.staging import FilePool  # here: a launcher looks for checkpoints without torch

            objects[name] = FilePool.attach(checkpoint.load(name), names, path.parent)
        else:
            objects[file] = _mapped(path / file)
    return checkpoint, objects


def _mapped(path: Path) -> ChunkedFile:
    import numpy as np  # here: a launcher looks for checkpoints without it

    file = ChunkedFile()
    if path.stat().st_size:
        file.append(np.memmap(path, np.uint8, "r"))  # read when it is written, without a copy
    return file


def _size_bytes(value: Any) -> int:
    """Return about how many bytes a file of these objects has: those of its tensors, arrays and chunks."""
    if isinstance(value, Mapping):
        return sum(map(_size_bytes, value.values()))
    if isinstance(value, list | tuple | ChunkedFile):
        return sum(map(_size_bytes, value))
    if getattr(value, "is_sparse", False):
        return _size_bytes([value._indices(), value._values()])
    return getattr(value, "nbytes", 0)

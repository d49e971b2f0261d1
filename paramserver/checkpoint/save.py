"""Writing checkpoints atomically, choosing the best and which ones stay, and removing what a crashed process left.

A checkpoint exists from the moment at which a complete folder, already on the disk, is renamed to its final name. The
order is that of torchsnapshot: data, sync, manifest, sync, rename, sync, pointer.

This module imports neither torch nor numpy before an object is written.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.checkpoint.format import (
    BEST,
    LATEST,
    MANIFEST,
    FileEntry,
    Manifest,
    list_complete,
    read_pointer,
    remove,
    step_name,
    step_of,
    temporary_path,
    unfinished_writes,
    why_incomplete,
)
from paramserver.errors import ParamserverError, TrainingError, UnsupportedConfiguration, kind_and_message
from paramserver.fileio import HashingFile, atomic_rename, atomic_write_text, explain_disk_errors, fsync_folder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class ChunkedFile:
    """The content of a file that arrives in chunks, in the order of their arrival. The chunks are not copied."""

    def __init__(self) -> None:
        self._chunks: list[memoryview] = []

    def append(self, chunk: npt.NDArray[np.uint8]) -> None:
        """Add the next bytes; the caller does not change them any more."""
        self._chunks.append(chunk.data)

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._chunks)


_RAW = (bytes, ChunkedFile)
_WHAT_TO_KEEP = "keep tensors, numpy arrays and plain values in it"


def write_checkpoint(folder: Path, step: int, objects: Mapping[str, Any], metadata: Mapping[str, Any]) -> Path:
    """Write ``folder/step-<step>`` and point ``latest`` to it; a crash at any moment leaves the previous one intact.

    Args:
        step: the version that was staged. A checkpoint of the same step is replaced.
        objects: by name, what ``torch.save`` puts into ``<name>.pt``; ``bytes`` and ``ChunkedFile`` become a file
            ``<name>`` as they are. Nothing is copied.

    Raises:
        TrainingError: a file could not be written, or could not be loaded again; nothing half-written remains.
    """
    files = _file_names(objects)
    final = folder / step_name(step)
    temporary, replaced = temporary_path(final, "tmp"), temporary_path(final, "old")
    with explain_disk_errors(final):
        folder.mkdir(exist_ok=True)  # not its parents: a run whose folder was removed or moved must not make it again
        remove(temporary)  # of an earlier process that had this process id
        try:
            temporary.mkdir()
            # Each file is on the disk before the manifest that lists it: ``_write_file`` syncs.
            entries = {name: _write_file(temporary / name, obj) for name, obj in files.items()}
            created = datetime.now(timezone.utc).isoformat()
            _write_file(temporary / MANIFEST, Manifest(step, created, entries, metadata).to_text().encode())
            fsync_folder(temporary)
            if os.path.lexists(final):  # also a link that leads nowhere
                _move_aside(final, replaced)
            # The commit. The manifest becomes visible under the final name only here, when everything is on the disk.
            atomic_rename(temporary, final)
            fsync_folder(folder)
            # Last: ``latest`` never names a checkpoint that a power failure could still take away.
            atomic_write_text(folder / LATEST, f"{final.name}\n")
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # errors of the cleanup must not hide the first one
            _restore_replaced(replaced, final)
            raise
        remove(replaced)
    return final


def _file_names(objects: Mapping[str, Any]) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for name, obj in objects.items():
        file = name if isinstance(obj, _RAW) else f"{name}.pt"
        if file in files or file == MANIFEST or file.startswith(".") or Path(file).name != file:
            raise ValueError(f"object name ({name}) must be a plain file name that nothing else has; rename it")
        files[file] = obj
    return files


def _write_file(path: Path, obj: Any) -> FileEntry:
    """Write one file to the disk, synced, and check now that it can be loaded again."""
    with explain_disk_errors(path), closing(HashingFile(path)) as file:
        if isinstance(obj, _RAW):
            for chunk in (obj,) if isinstance(obj, bytes) else obj:
                file.write(chunk)
        else:
            _write_object(obj, file, path.stem)
        digest = file.finish()
    if not isinstance(obj, _RAW):
        _check_loadable(path)
    return FileEntry(file.size_bytes, digest)


def _write_object(obj: Any, file: HashingFile, name: str) -> None:
    from paramserver.checkpoint.serialization import write_archive

    try:
        write_archive(obj, file)
    except ParamserverError:
        raise  # of a stream: a server is lost, or a row is not finite
    except Exception as error:  # pickle and torch raise many types for what they cannot store
        cause = kind_and_message(error)
        raise TrainingError(f"checkpoint object {name} must be savable ({cause}); {_WHAT_TO_KEEP}") from error


def _check_loadable(path: Path) -> None:
    from paramserver.checkpoint.serialization import unloadable_types

    refused = unloadable_types(path)
    if refused:
        raise TrainingError(
            f"checkpoint object {path.stem} ({', '.join(refused)}) must load with torch.load(weights_only=True); "
            f"{_WHAT_TO_KEEP}"
        )


def _move_aside(final: Path, replaced: Path) -> None:
    """Make room for another checkpoint of the same step."""
    # While neither has the final name, ``latest`` must name one that exists.
    others = [path for path in list_complete(final.parent) if path != final]
    if others and read_pointer(final.parent, LATEST) == final:
        atomic_write_text(final.parent / LATEST, f"{others[0].name}\n")
    remove(replaced)
    atomic_rename(final, replaced)


def _restore_replaced(replaced: Path, final: Path) -> None:
    """After a failure: move the earlier checkpoint back, unless its successor is in place."""
    if not os.path.lexists(replaced):
        return
    if os.path.lexists(final):
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        atomic_rename(replaced, final)


def mark_best(folder: Path, step: int) -> None:
    """Point ``folder/best`` to the checkpoint of ``step``, which retention then keeps."""
    with explain_disk_errors(folder / BEST):
        atomic_write_text(folder / BEST, f"{step_name(step)}\n")


def restore_best_pointer(folder: Path, step: int | None) -> None:
    """Point ``folder/best`` to the checkpoint of ``step``; remove it where that checkpoint does not exist."""
    if step is not None and (folder / step_name(step)).is_dir():
        mark_best(folder, step)
    else:
        (folder / BEST).unlink(missing_ok=True)


def apply_retention(folder: Path, keep: int) -> list[Path]:
    """Remove all complete checkpoints but the ``keep`` newest and those that ``best`` and ``latest`` name; return them.

    An incomplete one stays: this package never leaves one behind, so it is not ours to remove.

    Raises:
        UnsupportedConfiguration: ``keep`` is below 1.
    """
    if keep < 1:
        raise UnsupportedConfiguration(f"checkpoint.keep ({keep}) must be at least 1; resuming needs one")
    protected = (read_pointer(folder, LATEST), read_pointer(folder, BEST))
    old = [path for path in list_complete(folder)[keep:] if path not in protected and step_of(path.name) is not None]
    for path in old:
        with explain_disk_errors(path):
            # Renamed first: a removal that is interrupted must not leave a folder that looks like a checkpoint.
            gone = temporary_path(path, "gone")
            remove(gone)
            atomic_rename(path, gone)
            remove(gone)
    return old


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what crashed processes left in ``folder``. The caller holds the lock of the run and writes nothing yet.

    So no process writes there, also if one has the id in a name: ids are used again. A checkpoint that was moved aside
    is moved back where its successor never took its place.
    """
    removed: list[Path] = []
    if not folder.is_dir():
        return removed
    with explain_disk_errors(folder):
        for unfinished in unfinished_writes(folder):
            path, final = unfinished.path, unfinished.final
            if unfinished.kind == "old" and not final.exists() and why_incomplete(path) is None:
                atomic_rename(path, final)
            else:
                remove(path)
                removed.append(path)
    return removed


class BestMetric:
    """The best value of one metric, its step, and the scheduled validations since then (for ``training.patience``).

    A validation that takes place only because the run ends may be the best, but it does not count for patience: a run
    that is resumed later ends where it would have ended without the interruption.
    """

    def __init__(self, metric: str, mode: str, min_delta: float = 0.0) -> None:
        # The names of these attributes are the stored keys: see ``state_dict``.
        self.metric = metric  # the name in the dictionary that ``validation_step`` returns
        self.mode = mode  # min or max
        self.min_delta = min_delta  # for patience, a value counts as better only if it is by more than this
        self.value: float | None = None
        self.step: int | None = None
        self.scheduled_value: float | None = None
        self.without_improvement = 0

    def update(self, value: float, step: int | None = None, scheduled: bool = True) -> bool:
        """Count the next validation; return whether it is strictly better than all before. NaN never is.

        With ``scheduled`` it is one by ``training.validate_every``, so it counts for patience.
        """
        value = float(value)
        # Compared with scheduled values only: a better value at the end of an interrupted run must not make the resumed
        # run stop earlier than one that was not interrupted.
        if scheduled and self._better(value, self.scheduled_value, self.min_delta):
            self.scheduled_value, self.without_improvement = value, 0
        elif scheduled:
            self.without_improvement += 1
        better = self._better(value, self.value)
        if better:
            self.value, self.step = value, step
        return better

    def _better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        # As the first value NaN would become the best, and no later value compares as better than NaN.
        if math.isnan(value):
            return False
        if than is None:
            return True
        return value < than - by if self.mode == "min" else value > than + by

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Restore ``state``, unless it is of another metric or mode: values of these cannot be compared.

        Return a note for the user that the count starts anew; None where it continues.
        """
        if (state["metric"], state["mode"]) != (self.metric, self.mode):
            return (
                f"checkpoint.best was {state['metric']} ({state['mode']}) and is {self.metric} ({self.mode}): "
                "the best value and training.patience count anew from here"
            )
        self.value, self.step = state["value"], state["step"]
        self.scheduled_value = state["scheduled_value"]
        self.without_improvement = state["without_improvement"]
        return None

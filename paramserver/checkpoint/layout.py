"""The folder of a run's checkpoints: names, the pointers ``latest`` and ``best``, and which one is the newest.

::

    checkpoints/step-00000100/              complete: nothing is renamed to such a name before it is whole
    checkpoints/latest, best                files with the name of a step folder
    checkpoints/.step-00000100.<pid>.tmp    being written
    checkpoints/.step-00000100.<pid>.old    moved aside while another of the same step takes its place
    checkpoints/.step-00000100.<pid>.gone   being removed
"""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from paramserver.checkpoint.manifest import MANIFEST, incomplete, newer_format, read_manifest
from paramserver.errors import CheckpointError

__all__ = [
    "BEST",
    "LATEST",
    "Leftover",
    "beside",
    "history",
    "is_written",
    "leftovers",
    "pointed",
    "problem",
    "remove",
    "step_name",
    "step_of",
    "written",
]

LATEST = "latest"
BEST = "best"
_STEP_FOLDER = re.compile(r"step-([0-9]{8,18})")
_LEFTOVER = re.compile(r"\.(?P<name>[^.]+)\.(?P<pid>\d+)\.(?P<kind>tmp|old|gone)")


@dataclass(frozen=True)
class Leftover:
    """A file or folder that a writer (process ``pid``) has not finished with."""

    path: Path
    final: Path
    pid: int
    kind: str


def step_name(step: int) -> str:
    """Name the folder of ``step``: ``step-00000100`` for 100.

    Raises:
        ValueError: ``step`` is negative.
    """
    if step < 0:
        raise ValueError(f"step ({step}) must be 0 or more")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a folder is named after; None where ``name`` is of something else."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match.group(1)) if match else None


def beside(final: Path, kind: str) -> Path:
    """Where this process keeps the ``tmp``, ``old`` or ``gone`` state of ``final``."""
    return final.with_name(f".{final.name}.{os.getpid()}.{kind}")


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def pointed(folder: Path, pointer: str) -> Path | None:
    """Return the checkpoint that the file ``pointer`` (``latest`` or ``best``) names, there or not, or None.

    Raises:
        CheckpointError: ``pointer`` is no file, or one that nobody may read.
    """
    file = folder / pointer
    if not os.path.lexists(file):
        return None
    if not file.is_file():
        raise CheckpointError(f"{file} must be a file with the name of a checkpoint, and is none; move it away")
    try:
        name = file.read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{file} must be a file with the name of a checkpoint ({error.strerror or error}); move it away"
        ) from error
    return folder / name if step_of(name) is not None else None


def leftovers(folder: Path) -> list[Leftover]:
    """Everything in ``folder`` that is being written, replaced or removed, or was when its writer died."""
    matches = [(path, _LEFTOVER.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    return [Leftover(path, folder / m["name"], int(m["pid"]), m["kind"]) for path, m in matches if m]


def problem(checkpoint: Path) -> str | None:
    """Why ``checkpoint`` is not complete, from its manifest and the sizes of its files; None if it is complete.

    One of a newer format counts as complete: somebody else can read it.
    """
    try:
        return incomplete(checkpoint, read_manifest(checkpoint))
    except CheckpointError as error:
        return None if _of_newer_format(checkpoint) else str(error)


def _of_newer_format(checkpoint: Path) -> bool:
    try:
        manifest = checkpoint / MANIFEST
        return manifest.is_file() and newer_format(manifest.read_text()) is not None
    except (OSError, UnicodeDecodeError):
        return False


def is_written(checkpoint: Path) -> bool:
    """Whether the folder has a manifest, which is written last: without one it never was a checkpoint."""
    try:
        os.lstat(checkpoint / MANIFEST)
    except PermissionError:
        return True  # who may not look cannot pass it over either
    except OSError:
        return False
    return True


def history(folder: Path) -> list[Path]:
    """All complete checkpoints, in the order of ``written``."""
    return [path for path in written(folder) if problem(path) is None]


def written(folder: Path) -> list[Path]:
    """All checkpoints, whole or damaged since they were written, newest first.

    Steps beyond ``latest`` come last: they are of a future that was given up when the run went back.
    One that was moved aside counts while nothing has taken its place.
    """
    if not folder.is_dir():
        return []
    places = {path.name: path for path in folder.iterdir() if step_of(path.name) is not None}
    for leftover in leftovers(folder):
        if leftover.kind == "old" and step_of(leftover.final.name) is not None:
            places.setdefault(leftover.final.name, leftover.path)
    latest = pointed(folder, LATEST)
    newest_step = step_of(latest.name) if latest else None

    def age(name: str) -> tuple[bool, int]:
        step = step_of(name) or 0
        return newest_step is not None and step > newest_step, -step

    return [places[name] for name in sorted(places, key=age) if is_written(places[name])]

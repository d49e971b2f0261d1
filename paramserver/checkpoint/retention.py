"""Which checkpoints stay: the newest few, the best one, and never the leftovers of a writer that died."""

import os
from pathlib import Path

from paramserver.checkpoint.disk import move, replace_text
from paramserver.checkpoint.layout import (
    BEST,
    LATEST,
    Leftover,
    beside,
    history,
    leftovers,
    pointed,
    problem,
    remove,
    step_name,
    step_of,
)
from paramserver.checkpoint.store import disk_errors_told
from paramserver.errors import UnsupportedConfiguration

__all__ = ["clean", "mark_best", "retain"]


def mark_best(folder: Path, step: int) -> None:
    """Let ``folder/best`` name the checkpoint of ``step``, which retention then keeps."""
    with disk_errors_told(folder / BEST):
        replace_text(folder / BEST, f"{step_name(step)}\n")


def point_best(folder: Path, step: int | None) -> None:
    """Let ``folder/best`` name the checkpoint of ``step`` where that is there, and nothing otherwise."""
    if step is not None and (folder / step_name(step)).is_dir():
        mark_best(folder, step)
    else:
        (folder / BEST).unlink(missing_ok=True)


def retain(folder: Path, keep: int) -> list[Path]:
    """Remove all complete checkpoints but the ``keep`` newest, the one ``best`` names and the one ``latest`` names.

    Returns:
        The removed ones. What is not complete is left alone: this package did not leave it there.

    Raises:
        UnsupportedConfiguration: ``keep`` is below 1.
    """
    if keep < 1:
        raise UnsupportedConfiguration(f"checkpoint.keep ({keep}) must be at least 1; resuming needs one")
    protected = (pointed(folder, LATEST), pointed(folder, BEST))
    old = [path for path in history(folder)[keep:] if path not in protected and step_of(path.name) is not None]
    for path in old:
        with disk_errors_told(path):
            _discard(path)
    return old


def _discard(path: Path) -> None:
    """Away in one rename: a removal that is cut short must not leave a folder that looks like a checkpoint."""
    gone = beside(path, "gone")
    remove(gone)
    move(path, gone)
    remove(gone)


def clean(folder: Path) -> list[Path]:
    """Remove what dead writers left in ``folder``; to be called at the start of a run, before its first write.

    A checkpoint that was moved aside returns where its successor never took its place.

    Returns:
        The removed paths.
    """
    if not folder.is_dir():
        return []
    with disk_errors_told(folder):
        return [leftover.path for leftover in leftovers(folder) if not _is_alive(leftover.pid) and _settle(leftover)]


def _settle(leftover: Leftover) -> bool:
    if leftover.kind == "old" and not leftover.final.exists() and problem(leftover.path) is None:
        move(leftover.path, leftover.final)
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

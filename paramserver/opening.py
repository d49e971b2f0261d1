"""The folder of an earlier run: whether it is one, and holds what a run leaves, before anything in it is touched."""

from __future__ import annotations

import os
from pathlib import Path

from paramserver.checkpoint.layout import BEST, LATEST, step_of
from paramserver.errors import CheckpointError, UnsupportedConfiguration
from paramserver.rundir import RunDir

__all__ = ["open_run", "refuse_unwritable"]


def open_run(path: Path) -> RunDir:
    """Open the folder of an earlier run, given by itself or by one of its checkpoints, which is then the chosen one.

    Nothing in it is changed.

    Raises:
        CheckpointError: it is not such a folder, or something else lies in the place of a file or folder of the run.
    """
    path, chosen = Path(path), None
    if path.parent.name == "checkpoints" and step_of(path.name) is not None:
        path, chosen = path.parents[1], path
    if not _is_folder(path):
        rule = "be a folder" if os.path.lexists(path) else "exist"
        raise CheckpointError(f"run folder {path} must {rule}; give the folder of a run, such as runs/<name>")
    run = RunDir(path, chosen)
    _refuse_odd(run)
    if not (run.config_file.is_file() or run.checkpoints_dir.is_dir()):
        raise CheckpointError(
            f"{path} must be a run folder, and holds neither config.yaml nor checkpoints; give one such as runs/<name>"
        )
    return run


def _refuse_odd(run: RunDir) -> None:
    for folder in _folders(run):
        if not folder.is_dir():
            raise CheckpointError(f"{folder} must be a folder, as the run made it, and is none; move it away")
        if folder in (run.path, run.checkpoints_dir) and not _may(folder, os.R_OK | os.X_OK):
            raise CheckpointError(f"{folder} must be a folder that this user can read; change its permissions")
    for file in _files(run):
        if not file.is_file():
            raise CheckpointError(f"{file} must be a file, as the run wrote it, and is none; move it away")


def refuse_unwritable(run: RunDir) -> None:
    """Refuse now what could not be gone on with when a step was made.

    Raises:
        UnsupportedConfiguration: names what this user may not read and write.
    """
    for path in (*_folders(run), *_files(run)):
        if not _may(path, os.R_OK | os.W_OK | (os.X_OK if path.is_dir() else 0)):
            raise UnsupportedConfiguration(
                f"{path} must be what this user can read and write, to go on with its run; change its permissions"
            )


def _folders(run: RunDir) -> list[Path]:
    return _there(run.path, run.checkpoints_dir, run.logs_dir, run.tensorboard_dir)


def _files(run: RunDir) -> list[Path]:
    described = (run.config_file, run.environment_file, run.summary_file, run.metrics_file, run.superseded_file)
    return _there(*described, run.checkpoints_dir / LATEST, run.checkpoints_dir / BEST)


def _there(*paths: Path) -> list[Path]:
    return [path for path in paths if os.path.lexists(path)]


def _may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name that is too long for one
        return False

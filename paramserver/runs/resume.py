"""The folder of an earlier run: whether it is one, and holds what a run leaves, before anything in it is touched.

Going on with a stored run: where its config is, and what a person is told of the way it goes on.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from paramserver.checkpoint import find_checkpoint, skipped_checkpoints
from paramserver.checkpoint.format import BEST, LATEST, step_of
from paramserver.config import Config, differences, load_config, num_trainers_of
from paramserver.errors import CheckpointError, UnsupportedConfiguration
from paramserver.runs.rundir import RunDir


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


def check_writable(run: RunDir) -> None:
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


def find_config_file(run: RunDir, given: Path | None = None) -> Path:
    """The file with the config that holds: the run's own, or ``given`` where the run has lost it.

    Raises:
        CheckpointError: there is neither, or the run never began.
    """
    if run.config_file.is_file():
        return run.config_file
    _refuse_empty(run)
    if given is None:
        raise CheckpointError(
            f"{run.path} holds checkpoints and no config.yaml; give the config that they were made with: python -m "
            f"paramserver.launch --config FILE --resume {shlex.quote(str(run.chosen or run.path))}"
        )
    return given


def _refuse_empty(run: RunDir) -> None:
    try:
        find_checkpoint(run.path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{run.path} holds no config.yaml and no checkpoint: that run never began; start it anew"
        ) from error


def describe_resume(run: RunDir, config: Config) -> list[str]:
    """From where and in which ways the run goes on, as lines.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    checkpoint = run.chosen or find_checkpoint(run.path)
    lines = [f"resuming {run.path} from {checkpoint.name}"]
    lines += [f"  passed over: {wrong}" for wrong in (() if run.chosen else skipped_checkpoints(checkpoint))]
    if not run.config_file.is_file():
        return [*lines, "  note: the run holds no config.yaml, so the given one holds"]
    stored = load_config(run.config_file)
    lines += [f"  changed: {line}" for line in differences(stored, config)]
    before, now = _samples_of_a_step(stored), _samples_of_a_step(config)
    return lines if before == now else [*lines, f"  note: a step takes {now} samples in place of {before}"]


def _samples_of_a_step(config: Config) -> str:
    return f"{num_trainers_of(config)} x {config.training.batch_size * config.training.accumulate_batches}"

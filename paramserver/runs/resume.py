"""Opening the folder of an earlier run: checks before anything in it changes, its config, and what changed in it."""

from __future__ import annotations

import json
import os
import shlex
import socket
from pathlib import Path

from paramserver.checkpoint import find_checkpoint, skipped_checkpoints
from paramserver.checkpoint.format import BEST, LATEST, step_of
from paramserver.checkpoint.memory import MEMORY, memory_folder, newer_in_memory
from paramserver.cluster import Job, ProcessIdentity, find_job, process_environ
from paramserver.config import Config, differences, load_config, num_trainers_of
from paramserver.errors import CheckpointError, UnsupportedConfiguration
from paramserver.runs.rundir import RunDir, newest_first, read_mapping

# Keys that may differ between two attempts of one job: where the processes run, and how many there are.
_KEYS_OF_ATTEMPT = ("device.", "logging.run_dir", "logging.progress", "cluster.master_", "cluster.num_")
# What an attempt of an earlier version stored by default.
_OLD_DEFAULT = "server.wire_dtype: float32 -> null"
# How a run ended that lost nothing; another attempt is an ordinary resume.
_ENDED_WELL = ("completed", "interrupted")
# What processes of a run append to; other files in that folder are the user's.
_LOGS = ("rank-*.log", "simulation-*.log", "start.log", "spares.log")


def open_run(path: Path) -> RunDir:
    """Open the folder of an earlier run. Nothing in it is changed.

    The path may also be that of one of its checkpoints, which is then the chosen one.

    Raises:
        CheckpointError: it is not such a folder, or a file of the run is not a file, or a folder not a folder.
    """
    path, chosen = Path(path), None
    if path.parent.name == "checkpoints" and step_of(path.name) is not None:
        path, chosen = path.parents[1], path
    if not os.path.isdir(path):  # noqa: PTH112 - False also where the name is too long for a folder
        rule = "be a folder" if os.path.lexists(path) else "exist"
        raise CheckpointError(f"run folder {path} must {rule}; give the folder of a run, such as runs/<name>")
    run = RunDir(path, chosen)
    # Read-only checks, all of them before the first change: a refused resume leaves the run as it was.
    _check_kinds(run)
    if not (run.config_file.is_file() or run.checkpoints_dir.is_dir()):
        raise CheckpointError(
            f"{path} must be a run folder, and holds neither config.yaml nor checkpoints; give one such as runs/<name>"
        )
    return run


def _check_kinds(run: RunDir) -> None:
    for folder in _folders(run):
        if not folder.is_dir():
            raise CheckpointError(f"{folder} must be a folder, as the run made it, and is none; move it away")
        if folder in (run.path, run.checkpoints_dir) and not _may(folder, os.R_OK | os.X_OK):
            raise CheckpointError(f"{folder} must be a folder that this user can read; change its permissions")
    for file in _files(run):
        if not file.is_file():
            raise CheckpointError(f"{file} must be a file, as the run wrote it, and is none; move it away")


def check_writable(run: RunDir) -> None:
    """Check now that this user may write everything that the resumed run writes.

    Raises:
        UnsupportedConfiguration: names what this user may not read and write.
    """
    logs = [path for pattern in _LOGS for path in run.logs_dir.glob(pattern)]
    for path in (*_folders(run), *_files(run), *logs):
        if not _may(path, os.R_OK | os.W_OK | (os.X_OK if path.is_dir() else 0)):
            raise UnsupportedConfiguration(
                f"{path} must be what this user can read and write, to resume its run; change its permissions"
            )
    # One in memory that this user may not read, as another user started the run, would be passed over without a word.
    folder = memory_folder(run.path)
    if folder is not None and not _may(folder, os.R_OK | os.W_OK | os.X_OK):
        raise UnsupportedConfiguration(
            f"{folder} must be what this user can read and write, as the run may have a newer checkpoint there; resume "
            f"it as the user who started it, or remove {run.checkpoints_dir / MEMORY} to resume without that"
        )


def _folders(run: RunDir) -> list[Path]:
    return _existing(run.path, run.checkpoints_dir, run.logs_dir, run.tensorboard_dir)


def _files(run: RunDir) -> list[Path]:
    described = (run.config_file, run.environment_file, run.summary_file, run.metrics_file, run.superseded_file)
    return _existing(*described, run.losses_file, run.checkpoints_dir / LATEST, run.checkpoints_dir / BEST)


def _existing(*paths: Path) -> list[Path]:
    # ``lexists``: a link that leads nowhere counts, and is then reported as no file.
    return [path for path in paths if os.path.lexists(path)]


def _may(path: Path, mode: int) -> bool:
    # With the effective user: that is the one that later opens the files.
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def find_config_file(run: RunDir, given: Path | None = None) -> Path:
    """Return the config file of a resume: the run's own, or ``given`` where the run has lost it.

    Raises:
        CheckpointError: there is neither, or the run never began.
    """
    if run.config_file.is_file():
        return run.config_file
    try:
        find_checkpoint(run.path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{run.path} holds no config.yaml and no checkpoint: that run never began; start it anew"
        ) from error
    if given is None:
        raise CheckpointError(
            f"{run.path} holds checkpoints and no config.yaml; give the config that they were made with: python -m "
            f"paramserver.launch --config FILE --resume {shlex.quote(str(run.chosen or run.path))}"
        )
    return given


def describe_resume(run: RunDir, config: Config) -> list[str]:
    """Return lines for the user: from which checkpoint the run resumes, and what changed in its config.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    in_memory = None if run.chosen else newer_in_memory(run.path)
    checkpoint = run.chosen or in_memory or find_checkpoint(run.path)
    where = "" if in_memory is None else f", which is in memory ({in_memory.parent})"
    lines = [f"resuming {run.path} from {checkpoint.name}{where}"]
    lines += [f"  skipped: {wrong}" for wrong in (() if run.chosen else skipped_checkpoints(checkpoint))]
    if not run.config_file.is_file():
        return [*lines, "  note: the run holds no config.yaml, so the given one is used"]
    # Read before rank 0 replaces it by the effective config.
    stored = load_config(run.config_file)
    changed = differences(stored, config)
    lines += [f"  changed: {line}" for line in changed]
    if any(line.startswith("task_args") for line in changed):
        lines.append(
            "  note: the optimizer and its schedule continue with what the checkpoint has of them, such as a learning "
            "rate, whatever task_args are now; to change that, start a new run by init_from"
        )
    # A DataLoader may give the size of a batch, where the key is not given.
    is_known = stored.has_given("batch_size") and config.has_given("batch_size")
    before, now = (_samples_of_a_step(one, is_known) for one in (stored, config))
    return lines if before == now else [*lines, f"  note: a step takes {now} samples in place of {before}"]


def _samples_of_a_step(config: Config, is_known: bool) -> str:
    batches = config.training.batches_per_step
    of_each = f"{config.training.batch_size * batches}" if is_known else f"{batches} batches"
    return f"{num_trainers_of(config)} x {of_each}"


# Runs that an earlier attempt of the same launcher or job began.


def earlier_attempt(config: Config, run: RunDir | None, identity: ProcessIdentity | None) -> RunDir | None:
    """Return the run that an earlier attempt of this command left; None in the first attempt. For rank 0.

    The identity of this process is None if it starts all ranks.

    Raises:
        CheckpointError: the config of a run of the job is broken, so it is not known whether it is the one.
        UnsupportedConfiguration: a variable of the launcher is wrong.
    """
    job = find_job(process_environ())
    if run is None:
        return None if job is None or not job.may_continue else _run_of_job(config, job)
    # A start that makes no step restores the file that it found.
    stored = read_mapping(run.environment_file, json.loads)
    launch = None if identity is None else launch_name(identity)
    same_launch = launch is not None and stored.get("launch") == launch
    same_job = job is not None and job.restarts > 0 and stored.get("job") == job.id
    return RunDir(run.path) if same_launch or same_job else None


def launch_name(identity: ProcessIdentity) -> str | None:
    """Name the launcher that starts rank 0 again after a loss. Its process is what other launches do not share."""
    return f"{identity.launch}/{socket.gethostname()}/{os.getppid()}" if identity.launch else None


def lost_processes(run: RunDir) -> bool:
    """Return whether the last attempt in this folder ended by a loss, so that what it made last is made again."""
    status = read_mapping(run.summary_file, json.loads).get("status")
    return not (status in _ENDED_WELL and run.has_checkpoint())


def _run_of_job(config: Config, job: Job) -> RunDir | None:
    """Return the newest run of a job that was started with this config, or the one of its ``logging.name``."""
    base, name = Path(config.logging.run_dir), config.logging.name
    for run in newest_first(base):
        if read_mapping(run.environment_file, json.loads).get("job") != job.id or name not in (None, run.name):
            continue
        try:
            stored = load_config(run.config_file)
        except UnsupportedConfiguration as error:
            # A later start may have to continue it, so it is not left out.
            raise CheckpointError(
                f"{run.path} is a run of this job ({job.id}), which this start may continue, and its config cannot be "
                f"read ({str(error).partition('; ')[0]}); correct that file, or move the folder away to begin a new "
                "run"
            ) from error
        changed = (line for line in differences(stored, config) if line != _OLD_DEFAULT)
        if name is not None or all(line.startswith(_KEYS_OF_ATTEMPT) for line in changed):
            return run
    return None

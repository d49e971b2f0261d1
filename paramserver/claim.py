"""A new run's folder: its name, and the claim on it of the process that starts the run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from paramserver.checkpoint.layout import step_of
from paramserver.config import Config
from paramserver.errors import UnsupportedConfiguration
from paramserver.rundir import RunDir, not_writable

__all__ = ["claim_folder", "claim_run"]


@contextmanager
def claim_run(config: Config) -> Iterator[RunDir]:
    """``claim_folder`` by what the config says; ``<task>-<mode>-<time>`` where it names no run."""
    with claim_folder(Path(config.logging.run_dir), config.logging.name, _default_name(config)) as run:
        yield run


def _default_name(config: Config) -> str:
    assert config.task is not None
    task = config.task.rpartition(":")[2].lower()
    return f"{task}-{config.mode}-{time.strftime('%Y%m%d-%H%M%S')}"


@contextmanager
def claim_folder(base: Path, name: str | None, default_name: str) -> Iterator[RunDir]:
    """Make the folder of a new run, and hold it; of several processes that want one name, one gets it.

    A folder in which a run was to start and never began (it has no config.yaml and no checkpoint) is taken over.

    Args:
        base: ``logging.run_dir``, made where it is missing.
        name: ``logging.name``. None takes ``default_name``, or ``default_name-2``, ``-3``, ... where that exists.
        default_name: usually ``<task>-<mode>-<time>``.

    Raises:
        UnsupportedConfiguration: ``name`` exists already, or is not the name of a folder, or ``base`` cannot be
            written to.
    """
    wanted = default_name if name is None else name
    if wanted in ("", ".", "..") or Path(wanted).name != wanted:
        raise UnsupportedConfiguration(f"logging.name ({wanted}) must be the name of one folder; leave out / and ..")
    with ExitStack() as claim:
        try:
            run = _made(base, name, default_name, claim)
        except OSError as error:
            raise not_writable(f"logging.run_dir ({base})", error) from error
        yield run


def _made(base: Path, name: str | None, default_name: str, claim: ExitStack) -> RunDir:
    base.mkdir(parents=True, exist_ok=True)
    path = base / (default_name if name is None else name)
    number = 1
    while not _claimed(path, claim, may_be_there=name is not None):
        if name is not None:
            raise UnsupportedConfiguration(
                f"the run folder {path} exists already; choose another logging.name, or --resume it"
            )
        number += 1
        path = base / f"{default_name}-{number}"
    run = RunDir(path)
    run.logs_dir.mkdir(exist_ok=True)
    run.checkpoints_dir.mkdir(exist_ok=True)
    return run


def _claimed(path: Path, claim: ExitStack, may_be_there: bool) -> bool:
    """Take ``path`` by making it, or where one that never began is there; False where it is somebody else's."""
    try:
        path.mkdir()
    except FileExistsError:
        if not may_be_there or not _never_began(path):
            return False
    try:
        claim.enter_context(RunDir(path).claim())
    except UnsupportedConfiguration:
        return False
    if not _never_began(path):  # somebody was there between the look and the claim
        claim.close()
        return False
    _tidy(path)
    return True


def _never_began(path: Path) -> bool:
    """Whether the folder holds nothing but what is there before a run begins, and no process is at work in it."""
    run = RunDir(path)
    if not path.is_dir() or any(e.name not in _KEPT and not _REMAINS.fullmatch(e.name) for e in path.iterdir()):
        return False
    if run.checkpoints_dir.is_dir() and any(step_of(e.name) is not None for e in run.checkpoints_dir.iterdir()):
        return False
    try:
        with run.lock():
            return True
    except UnsupportedConfiguration:
        return False


# What a start makes until rank 0 stores the config; and what is of no use to another one, such as half a file.
_KEPT = ("checkpoints", "logs", ".claim", ".claim.json", ".lock", ".lock.json")
_REMAINS = re.compile(r"summary\.json|\.launch-\d+\.yaml|\..+\.\d+\.tmp")


def _tidy(path: Path) -> None:
    for entry in path.iterdir():
        if _REMAINS.fullmatch(entry.name):
            entry.unlink()

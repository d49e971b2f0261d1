"""A new run's folder: its name, and the claim on it of the process that starts the run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from paramserver.checkpoint.layout import step_of
from paramserver.config import Config
from paramserver.errors import UnsupportedConfiguration
from paramserver.rundir import RunDir, not_writable

__all__ = ["Claim", "claim_folder", "claim_run"]


class Claim:
    """Holds a run's folder from its making on, until the attempt to start the run is over.

    Rank 0 locks the folder later, and may be another process. In between, nobody else may take the folder for one that
    a start left behind. The kernel lets go of the claim of a process that is killed.

    Args:
        path: the folder.

    Raises:
        Timeout: somebody else holds it.
    """

    def __init__(self, path: Path) -> None:
        self._file = path / ".claim"
        self._lock = FileLock(str(self._file), timeout=0, thread_local=False)
        self._lock.acquire()

    def release(self) -> None:
        self._file.unlink(missing_ok=True)
        self._lock.release()


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
    try:
        run, claim = _made(base, name, default_name)
    except OSError as error:
        raise not_writable(f"logging.run_dir ({base})", error) from error
    try:
        yield run
    finally:
        claim.release()


def _made(base: Path, name: str | None, default_name: str) -> tuple[RunDir, Claim]:
    base.mkdir(parents=True, exist_ok=True)
    path = base / (default_name if name is None else name)
    number = 1
    while (claim := _claimed(path, may_be_there=name is not None)) is None:
        if name is not None:
            raise UnsupportedConfiguration(
                f"the run folder {path} exists already; choose another logging.name, or --resume it"
            )
        number += 1
        path = base / f"{default_name}-{number}"
    run = RunDir(path)
    run.logs_dir.mkdir(exist_ok=True)
    run.checkpoints_dir.mkdir(exist_ok=True)
    return run, claim


def _claimed(path: Path, may_be_there: bool) -> Claim | None:
    """Take ``path`` by making it, or where one that never began is there; None where it is somebody else's."""
    try:
        path.mkdir()
    except FileExistsError:
        if not may_be_there or not _never_began(path):
            return None
    try:
        claim = Claim(path)
    except Timeout:
        return None
    if not _never_began(path):  # somebody was there between the look and the claim
        claim.release()
        return None
    _tidy(path)
    return claim


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
_KEPT = ("checkpoints", "logs", ".claim", ".lock", ".lock.json")
_REMAINS = re.compile(r"summary\.json|\.launch-\d+\.yaml|\..+\.\d+\.tmp")


def _tidy(path: Path) -> None:
    for entry in path.iterdir():
        if _REMAINS.fullmatch(entry.name):
            entry.unlink()

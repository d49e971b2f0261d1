"""Starting and resuming a run as a transaction on its folder.

A new run reserves a folder, which is removed again where the start is refused before the first step. A resumed run
copies what it is about to change into ``.attempt`` in its folder; where it fails before its first step, the folder is
rolled back, at once or, after a kill, by the next start.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from paramserver.checkpoint import find_checkpoint, read_checkpoint
from paramserver.checkpoint.format import BEST, LATEST, read_pointer, remove, step_of
from paramserver.checkpoint.memory import move_to_disk, newer_in_memory
from paramserver.config import Config
from paramserver.errors import CheckpointError, FolderInUse, UnsupportedConfiguration
from paramserver.fileio import explain_not_writable
from paramserver.importing import PICKLED_TASK
from paramserver.metrics.sinks import head_of, read_lines
from paramserver.runs.losses import LossLog
from paramserver.runs.resume import check_writable
from paramserver.runs.rundir import RunDir, read_mapping, write_text

# A new run.

# What a start makes before rank 0 stores the config.
_BEFORE_START = ("checkpoints", "logs", ".reserved", ".reserved.json", ".lock", ".lock.json")
# What a failed start may leave and another one has no use for, such as half a file.
_REMAINS = re.compile(rf"summary\.json|{re.escape(PICKLED_TASK)}|\..+\.\d+\.tmp")


@contextmanager
def reserve_run(config: Config) -> Iterator[RunDir]:
    """Make the folder of a new run, and reserve it. Of several processes that want one name, one gets it.

    Without ``logging.name`` it is ``<task>-<mode>-<time>``, with ``-2``, ``-3``, ... where that exists. Where the input
    is refused before the first step, the folder is removed, so that its name is free for the next start. A run that
    made a step keeps it.

    Raises:
        UnsupportedConfiguration: ``logging.name`` exists already, or is not the name of a folder, or
            ``logging.run_dir`` cannot be written to, or the folder not reserved.
    """
    assert config.task is not None
    base, name = Path(config.logging.run_dir), config.logging.name
    default_name = f"{config.task.rpartition(':')[2].lower()}-{config.mode}-{time.strftime('%Y%m%d-%H%M%S')}"
    wanted = default_name if name is None else name
    if wanted in ("", ".", "..") or Path(wanted).name != wanted:
        raise UnsupportedConfiguration(f"logging.name ({wanted}) must be the name of one folder; leave out / and ..")
    with ExitStack() as reservation:
        with explain_not_writable(f"logging.run_dir ({base})"):
            base.mkdir(parents=True, exist_ok=True)
            path, number = base / wanted, 1
            while not _reserve(path, reservation, may_exist=name is not None):
                if name is not None:
                    raise UnsupportedConfiguration(
                        f"the run folder {path} exists already; choose another logging.name{_cure_of(path)}"
                    )
                number += 1
                path = base / f"{default_name}-{number}"
        run = RunDir(path)
        try:
            yield run
        except UnsupportedConfiguration:
            # Still reserved: no other start may take the folder while it is removed.
            if not (any(run.checkpoints_dir.glob("step-*")) or furthest_step(run.metrics_file) > 0):
                _unless_in_use(run, lambda: shutil.rmtree(run.path))
            raise


def _reserve(path: Path, reservation: ExitStack, may_exist: bool) -> bool:
    """Reserve ``path``: a new folder, or one in which no run ever began. False where another process has it.

    What a new run has is in it then; of one that is refused nothing stays.
    """
    exists = False
    try:
        # The test and the reservation in one call: of several processes, one makes the folder.
        path.mkdir()
    except FileExistsError:
        exists = True
    if exists and not (may_exist and _never_began(path)):
        return False
    run = RunDir(path)
    try:
        # Entered in the caller's stack: the reservation lasts as long as the attempt.
        reservation.enter_context(run.reserve())
        if not _never_began(path):  # another process used it between the check above and the reservation
            reservation.close()
            return False
        for entry in path.iterdir():
            if _REMAINS.fullmatch(entry.name):
                entry.unlink()
        run.logs_dir.mkdir(exist_ok=True)
        run.checkpoints_dir.mkdir(exist_ok=True)
    except FolderInUse:
        return False
    except (UnsupportedConfiguration, OSError):
        reservation.close()
        if not exists:
            with suppress(OSError):  # another process uses it meanwhile
                # A lock that was refused leaves its file.
                if {entry.name for entry in path.iterdir()} <= {".reserved", ".lock", "logs", "checkpoints"}:
                    shutil.rmtree(path)
        raise
    return True


def _cure_of(path: Path) -> str:
    if not RunDir(path).config_file.is_file():
        return ""  # it is no run's
    try:
        if newer_in_memory(path) is None:
            find_checkpoint(path)
    except CheckpointError:
        return ", or remove the folder, which has no checkpoint to resume from, if no process uses it"
    return ", or --resume it"


def _never_began(path: Path) -> bool:
    """Whether the folder holds only what exists before a run begins, and no process uses it."""
    run = RunDir(path)
    if not path.is_dir() or any(e.name not in _BEFORE_START and not _REMAINS.fullmatch(e.name) for e in path.iterdir()):
        return False
    if run.checkpoints_dir.is_dir() and any(step_of(e.name) is not None for e in run.checkpoints_dir.iterdir()):
        return False
    try:
        with run.lock():
            return True
    except FolderInUse:
        return False


# A resumed run.


@contextmanager
def resume_transaction(run: RunDir) -> Iterator[None]:
    """Resume a run, from ``run.chosen`` where a checkpoint was chosen: ``latest`` then names that one.

    Where this is refused, fails or is interrupted before the first step, or is killed there, config, environment,
    summary, records, ``latest`` and ``best`` are what they were: at once, or at the next start. So they are after a
    resume that found nothing to do in a completed run.

    Raises:
        CheckpointError: there is no complete checkpoint, or the chosen one is damaged.
        FolderInUse: another process uses the folder; nothing in it was changed.
        UnsupportedConfiguration: the folder cannot be written to.
    """
    journal = ResumeJournal(run)
    with run.reserve(resuming=True):
        check_writable(run)
        LossLog(run.losses_file)  # rank 0 reads it, which may be another process: a damaged one is refused here
        with run.lock(resuming=True):
            journal.roll_back()  # of an attempt that was killed
            if run.chosen is not None:
                read_checkpoint(run.chosen)  # a damaged one, or none, is refused before anything changes
            # Before the copy: what was in memory is on the disk, also if this attempt is refused, or chose another one.
            move_to_disk(run.path)
            first_step = step_of((run.chosen or find_checkpoint(run.path)).name) or 0
            for pointer in (LATEST, BEST):
                read_pointer(run.checkpoints_dir, pointer)  # raises where it is not a file
            # The copy is complete before the first change, so that a kill between the two loses nothing.
            journal.record(first_step)
            if run.chosen is not None:
                write_text(run.checkpoints_dir / LATEST, f"{run.chosen.name}\n")
        # The lock is free here, as rank 0, which may be another process, takes it; the reservation is held.
        try:
            yield
        except BaseException:
            _unless_in_use(run, journal.roll_back)
            raise
        _unless_in_use(run, journal.close)


def continue_attempt(run: RunDir) -> AbstractContextManager[None]:
    """Take part in the run of an earlier attempt again: resume it, or begin again where it has no checkpoint."""
    return resume_transaction(run) if run.has_checkpoint() else run.reserve(resuming=True)


def recover(run: RunDir) -> None:
    """Roll back an attempt that was killed before its first step. To be called before the run's config is read."""
    journal = ResumeJournal(run)
    if not journal.exists:
        return
    try:
        with run.reserve(), run.lock():
            journal.roll_back()
    except FolderInUse:
        return  # the attempt is alive: another process resumes the run, and ``resume_transaction`` reports that


def _unless_in_use(run: RunDir, change: Callable[[], None]) -> None:
    try:
        with run.lock():
            change()
    except UnsupportedConfiguration:
        return  # a process of this or another start still uses the folder, or it became read-only


_NOTE = "note.json"


class ResumeJournal:
    """A copy, in ``.attempt``, of what a resume changes before its first step. Call it under the run's lock only."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._folder = run.path / ".attempt"
        latest, best = run.checkpoints_dir / LATEST, run.checkpoints_dir / BEST
        # Their order is part of the names of the copies.
        files = [run.config_file, run.environment_file, run.summary_file, latest]
        files += [run.metrics_file, run.superseded_file, best, run.losses_file, run.csv_file]
        self._copies = {path: self._folder / f"{number}-{path.name}" for number, path in enumerate(files)}

    @property
    def exists(self) -> bool:
        """Whether an attempt was recorded and not yet rolled back or discarded."""
        return self._folder.is_dir()

    def record(self, first_step: int) -> None:
        """Copy what an attempt changes before its first step, which is the one after ``first_step``."""
        # Copied under another name: ``exists`` must be true of a complete copy only.
        fresh = self._folder.with_name(".attempt.new")
        known = {"first_step": first_step, "checkpoints": self._checkpoints(), "events": self._events()}
        with explain_not_writable(f"run folder {self._run.path}"):
            remove(fresh)
            try:
                fresh.mkdir()
                for path, copy in self._copies.items():
                    if path.is_file():
                        shutil.copy2(path, fresh / copy.name)
                (fresh / _NOTE).write_text(json.dumps(known), encoding="utf-8")
            except OSError:
                shutil.rmtree(fresh, ignore_errors=True)  # half a copy takes room on a full disk
                raise
            remove(self._folder)
            fresh.rename(self._folder)  # only a complete copy gets this name

    def close(self) -> None:
        """Discard the copy after an attempt that succeeded; roll back one that had nothing to do.

        It would replace the figures of a completed run by those of no step.
        """
        before = self._copies[self._run.summary_file]
        summary, own = (read_mapping(file, json.loads) for file in (before, self._run.summary_file))
        if summary.get("status") == "completed" and summary.get("validation") == own.get("validation"):
            self.roll_back()
        remove(self._folder)

    def roll_back(self) -> None:
        """Restore the folder where the recorded attempt made no step, and discard the copy. Nothing without one."""
        known = read_mapping(self._folder / _NOTE, json.loads)
        kinds = {"first_step": int, "checkpoints": list, "events": list}
        # A note that is damaged proves nothing about the folder, so nothing is restored from it.
        is_complete = all(isinstance(known.get(name), kind) for name, kind in kinds.items())
        with explain_not_writable(f"run folder {self._run.path}"):
            if is_complete and not self._made_step(known):
                self._restore(known)
            remove(self._folder)

    def _made_step(self, known: dict[str, Any]) -> bool:
        """Whether checkpoints or records show a step. A file of records that did not change shows none."""
        if self._checkpoints() != known["checkpoints"]:
            return True
        if _content(self._copies[self._run.metrics_file]) == _content(self._run.metrics_file):
            return False
        return furthest_step(self._run.metrics_file) > int(known["first_step"])

    def _restore(self, known: dict[str, Any]) -> None:
        for path, before in self._copies.items():
            if not before.is_file():
                path.unlink(missing_ok=True)
            elif _content(before) != _content(path):
                # Copied and renamed, not moved: the journal stays complete until everything is restored.
                restored = path.with_name(f".{path.name}.undo")
                shutil.copy2(before, restored)
                restored.replace(path)
        # Last: these files are not in the copy, and without them the rest is consistent already.
        for event in set(self._events()) - set(map(str, known["events"])):
            (self._run.tensorboard_dir / event).unlink()

    def _checkpoints(self) -> list[str]:
        return sorted(path.parent.name for path in self._run.checkpoints_dir.glob("step-*/manifest.json"))

    def _events(self) -> list[str]:
        return sorted(path.name for path in self._run.tensorboard_dir.glob("events.*"))


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


# What rank 0 records of steps that were made; a trainer also records during a step.
_KINDS_OF_MADE_STEPS = ("train", "validation", "checkpoint", "end")


def furthest_step(metrics_file: Path) -> int:
    """Return the largest step that was made, by the records; 0 where there is none."""
    heads = map(head_of, read_lines(metrics_file))
    return max((step for kind, step in heads if kind in _KINDS_OF_MADE_STEPS and isinstance(step, int)), default=0)

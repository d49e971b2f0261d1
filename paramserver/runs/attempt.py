"""What a run's folder held before an attempt to go on with it, so that an attempt that came to nothing can be undone.

The note lies in the folder itself, so that it also serves the next start after an attempt that was killed.

A new run's folder: its name, and the claim on it of the process that starts the run.

An attempt to start or to resume a run, and how its folder is left where the attempt is refused.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from paramserver.checkpoint import find_checkpoint, read_checkpoint
from paramserver.checkpoint.format import BEST, LATEST, read_pointer, remove, step_of
from paramserver.config import Config
from paramserver.errors import UnsupportedConfiguration
from paramserver.runs.resume import check_writable
from paramserver.runs.rundir import RunDir, not_writable, read_mapping, write_text


@contextmanager
def reserve_run(config: Config) -> Iterator[RunDir]:
    """``reserve_folder`` by what the config says; ``<task>-<mode>-<time>`` where it names no run."""
    with reserve_folder(Path(config.logging.run_dir), config.logging.name, _default_name(config)) as run:
        yield run


def _default_name(config: Config) -> str:
    assert config.task is not None
    task = config.task.rpartition(":")[2].lower()
    return f"{task}-{config.mode}-{time.strftime('%Y%m%d-%H%M%S')}"


@contextmanager
def reserve_folder(base: Path, name: str | None, default_name: str) -> Iterator[RunDir]:
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
        claim.enter_context(RunDir(path).reserve())
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


_NOTE = "note.json"


class ResumeJournal:
    """The note of one attempt at most. All calls are made under the run's lock.

    Args:
        run: the folder.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._folder = run.path / ".attempt"
        latest, best = run.checkpoints_dir / LATEST, run.checkpoints_dir / BEST
        records = (run.metrics_file, run.superseded_file)
        files = (run.config_file, run.environment_file, run.summary_file, latest, *records, best)
        self._files = {f"{number}-{path.name}": path for number, path in enumerate(files)}

    @property
    def exists(self) -> bool:
        return self._folder.is_dir()

    def record(self, first_step: int) -> None:
        """Copy what an attempt changes before it makes a step, which will be the one after ``first_step``."""
        fresh = self._folder.with_name(".attempt.new")
        remove(fresh)
        fresh.mkdir()
        for name, path in self._files.items():
            if path.is_file():
                shutil.copy2(path, fresh / name)
        known = {"first_step": first_step, "checkpoints": self._checkpoints(), "events": self._events()}
        (fresh / _NOTE).write_text(json.dumps(known), encoding="utf-8")
        self.discard()
        fresh.rename(self._folder)

    def discard(self) -> None:
        """The attempt came to something, or was undone."""
        remove(self._folder)

    def roll_back(self) -> None:
        """Undo what an attempt left that made no step; forget one that did. Nothing where there is no note."""
        known = self._known()
        if known and not self._went_on(known):
            self._undo(known)
        self.discard()

    def _known(self) -> dict[str, Any]:
        """The note; empty where there is none that was written to its end."""
        known = read_mapping(self._folder / _NOTE, json.loads)
        kinds = {"first_step": int, "checkpoints": list, "events": list}
        return known if all(isinstance(known.get(name), kind) for name, kind in kinds.items()) else {}

    def _went_on(self, known: dict[str, Any]) -> bool:
        """Whether records or checkpoints tell of a step. A file of records that is as it was tells of nothing."""
        if self._checkpoints() != known["checkpoints"]:
            return True
        name = next(name for name, path in self._files.items() if path == self._run.metrics_file)
        if _content(self._folder / name) == _content(self._run.metrics_file):
            return False
        return furthest_step(self._run.metrics_file) > int(known["first_step"])

    def _undo(self, known: dict[str, Any]) -> None:
        for name, path in self._files.items():
            before = self._folder / name
            if not before.is_file():
                path.unlink(missing_ok=True)
            elif _content(before) != _content(path):
                # By a copy and a rename: the note is whole until all is done.
                beside = path.with_name(f".{path.name}.undo")
                shutil.copy2(before, beside)
                beside.replace(path)
        for event in set(self._events()) - set(map(str, known["events"])):
            (self._run.tensorboard_dir / event).unlink()

    def _checkpoints(self) -> list[str]:
        return sorted(path.parent.name for path in self._run.checkpoints_dir.glob("step-*/manifest.json"))

    def _events(self) -> list[str]:
        return sorted(path.name for path in self._run.tensorboard_dir.glob("events.*"))


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


# What rank 0 records of steps that were made; a trainer also records while it makes one.
_ACCOUNT = ("train", "validation", "checkpoint", "end")


def furthest_step(metrics_file: Path) -> int:
    """The largest step that was made, by the records; 0 where there is none."""
    if not metrics_file.is_file():
        return 0
    with metrics_file.open(encoding="utf-8", errors="replace") as lines:
        return max((_step_in(line) for line in lines), default=0)


def _step_in(line: str) -> int:
    try:
        record: Any = json.loads(line)
    except ValueError:  # torn by a crash
        return 0
    step = record.get("step") if isinstance(record, dict) and record.get("kind") in _ACCOUNT else None
    return step if isinstance(step, int) else 0


@contextmanager
def start_transaction(run: RunDir) -> Iterator[None]:
    """Start a run in a folder made for it; where the input is refused before a step was made, the folder goes.

    So the name is free for the next try. A run that made a step keeps all it has.
    """
    try:
        yield
    except UnsupportedConfiguration:
        if not (any(run.checkpoints_dir.glob("step-*")) or furthest_step(run.metrics_file) > 0):
            _remove_unless_in_use(run)
        raise


@contextmanager
def resume_transaction(run: RunDir) -> Iterator[None]:
    """Go on with a run, from ``run.chosen`` where one checkpoint was chosen: ``latest`` then names that one.

    Where this is refused, fails or is interrupted before a step was made, or was killed there, config, environment,
    summary, records, ``latest`` and ``best`` are what they were: at once, or for the next who goes on.

    Raises:
        CheckpointError: there is no complete checkpoint, or the chosen one is not whole.
        UnsupportedConfiguration: another process holds the folder; nothing in it was touched.
    """
    undo = ResumeJournal(run)
    with run.reserve(resuming=True):
        check_writable(run)
        with run.lock(resuming=True):
            undo.roll_back()
            first_step = step_of((run.chosen or find_checkpoint(run.path)).name) or 0
            if run.chosen is not None:
                read_checkpoint(run.chosen)
            for pointer in (LATEST, BEST):
                read_pointer(run.checkpoints_dir, pointer)  # refuses one that is no file
            undo.record(first_step)
            if run.chosen is not None:
                write_text(run.checkpoints_dir / LATEST, f"{run.chosen.name}\n")
        try:
            yield
        except BaseException:
            _unless_in_use(run, undo.roll_back)
            raise
        _unless_in_use(run, undo.discard)


def recover(run: RunDir) -> None:
    """Undo what an attempt left that was killed before it made a step: before the settings of the run are read."""
    undo = ResumeJournal(run)
    if not undo.exists:
        return
    try:
        with run.reserve(), run.lock():
            undo.roll_back()
    except UnsupportedConfiguration:
        return  # it is no earlier one: another process goes on with the run, which whoever asks next is told


def _unless_in_use(run: RunDir, settle: Callable[[], None]) -> None:
    try:
        with run.lock():
            settle()
    except UnsupportedConfiguration:
        return  # another run holds the folder by now, or nobody may write there: what is in it is not ours to change


def _remove_unless_in_use(run: RunDir) -> None:
    try:
        with run.lock():
            shutil.rmtree(run.path)
    except UnsupportedConfiguration:
        return  # by a rank of an earlier start, which its supervisor has left alone

"""An attempt to start or to resume a run, and how its folder is left where the attempt is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paramserver.checkpoint import find_checkpoint, read_checkpoint
from paramserver.checkpoint.layout import LATEST, pointed, step_of
from paramserver.errors import UnsupportedConfiguration
from paramserver.rundir import RunDir, read_mapping, write_text

__all__ = ["new_attempt", "resumed_attempt"]


@contextmanager
def new_attempt(run: RunDir) -> Iterator[None]:
    """Start a run in a folder made for it; where the input is refused before a step was made, the folder goes.

    So the name is free for the next try. A run that made a step keeps all it has.
    """
    try:
        yield
    except UnsupportedConfiguration:
        if not (any(run.checkpoints_dir.glob("step-*")) or _furthest_step(run.metrics_file) > 0):
            _remove_unless_in_use(run)
        raise


@contextmanager
def resumed_attempt(run: RunDir) -> Iterator[None]:
    """Go on with a run, from ``run.chosen`` where one checkpoint was chosen: ``latest`` then names that one.

    Where this is refused before a step was made, config, environment, summary and ``latest`` are what they were.

    Raises:
        CheckpointError: there is no complete checkpoint, or the chosen one is not whole.
        UnsupportedConfiguration: another process holds the folder; nothing in it was touched.
    """
    with run.claim():
        with run.lock():
            first_step = step_of((run.chosen or find_checkpoint(run.path)).name) or 0
            latest = run.checkpoints_dir / LATEST
            files = (run.config_file, run.environment_file, run.summary_file, latest)
            before = {path: _content(path) for path in files}
            if run.chosen is not None:
                read_checkpoint(run.chosen)
                pointed(run.checkpoints_dir, LATEST)  # refuses one that is no file
                write_text(latest, f"{run.chosen.name}\n")
        try:
            yield
        except (UnsupportedConfiguration, OSError):
            if not _went_on(run, first_step, before[run.summary_file]):
                _restore_unless_in_use(run, before)
            raise


def _content(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def _went_on(run: RunDir, first_step: int, summary: str | None) -> bool:
    """Whether a summary of this attempt tells of a step."""
    steps = read_mapping(run.summary_file, json.loads).get("steps")
    return _content(run.summary_file) != summary and isinstance(steps, int) and steps > first_step


def _remove_unless_in_use(run: RunDir) -> None:
    try:
        with run.lock():
            shutil.rmtree(run.path)
    except UnsupportedConfiguration:
        return  # by a rank of an earlier start, which its supervisor has left alone


def _restore_unless_in_use(run: RunDir, before: dict[Path, str | None]) -> None:
    try:
        with run.lock():
            _restore(before)
    except UnsupportedConfiguration:
        return  # another run holds the folder by now, or nobody may write there: what is in it is not ours to change


def _restore(before: dict[Path, str | None]) -> None:
    for path, text in before.items():
        if text is None:
            path.unlink(missing_ok=True)
        elif _content(path) != text:
            write_text(path, text)


def _furthest_step(metrics_file: Path) -> int:
    """The largest step that was made, by the records; 0 where there is none."""
    if not metrics_file.is_file():
        return 0
    with metrics_file.open(encoding="utf-8", errors="replace") as lines:
        return max((_step_in(line) for line in lines), default=0)


# What rank 0 records of steps that were made; a trainer also records while it makes one.
_ACCOUNT = ("train", "validation", "checkpoint", "end")


def _step_in(line: str) -> int:
    try:
        record: Any = json.loads(line)
    except ValueError:  # torn by a crash
        return 0
    step = record.get("step") if isinstance(record, dict) and record.get("kind") in _ACCOUNT else None
    return step if isinstance(step, int) else 0

"""An attempt to start or to resume a run, and how its folder is left where the attempt is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paramserver.checkpoint import find_checkpoint, read_checkpoint
from paramserver.checkpoint.layout import BEST, LATEST, pointed, step_of
from paramserver.errors import UnsupportedConfiguration
from paramserver.opening import refuse_unwritable
from paramserver.rundir import RunDir, write_text
from paramserver.undo import Undo, furthest_step

__all__ = ["new_attempt", "resumed_attempt", "settle_attempt"]


@contextmanager
def new_attempt(run: RunDir) -> Iterator[None]:
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
def resumed_attempt(run: RunDir) -> Iterator[None]:
    """Go on with a run, from ``run.chosen`` where one checkpoint was chosen: ``latest`` then names that one.

    Where this is refused, fails or is interrupted before a step was made, or was killed there, config, environment,
    summary, records, ``latest`` and ``best`` are what they were: at once, or for the next who goes on.

    Raises:
        CheckpointError: there is no complete checkpoint, or the chosen one is not whole.
        UnsupportedConfiguration: another process holds the folder; nothing in it was touched.
    """
    undo = Undo(run)
    with run.claim(resuming=True):
        refuse_unwritable(run)
        with run.lock(resuming=True):
            undo.settle()
            first_step = step_of((run.chosen or find_checkpoint(run.path)).name) or 0
            if run.chosen is not None:
                read_checkpoint(run.chosen)
            for pointer in (LATEST, BEST):
                pointed(run.checkpoints_dir, pointer)  # refuses one that is no file
            undo.note(first_step)
            if run.chosen is not None:
                write_text(run.checkpoints_dir / LATEST, f"{run.chosen.name}\n")
        try:
            yield
        except BaseException:
            _unless_in_use(run, undo.settle)
            raise
        _unless_in_use(run, undo.forget)


def settle_attempt(run: RunDir) -> None:
    """Undo what an attempt left that was killed before it made a step: before the settings of the run are read."""
    undo = Undo(run)
    if not undo.is_noted:
        return
    try:
        with run.claim(), run.lock():
            undo.settle()
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

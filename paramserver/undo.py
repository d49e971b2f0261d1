"""What a run's folder held before an attempt to go on with it, so that an attempt that came to nothing can be undone.

The note lies in the folder itself, so that it also serves the next start after an attempt that was killed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from paramserver.checkpoint.layout import BEST, LATEST, remove
from paramserver.rundir import RunDir, read_mapping

__all__ = ["Undo"]

_NOTE = "note.json"


class Undo:
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
    def is_noted(self) -> bool:
        return self._folder.is_dir()

    def note(self, first_step: int) -> None:
        """Copy what an attempt changes before it makes a step, which will be the one after ``first_step``."""
        fresh = self._folder.with_name(".attempt.new")
        remove(fresh)
        fresh.mkdir()
        for name, path in self._files.items():
            if path.is_file():
                shutil.copy2(path, fresh / name)
        known = {"first_step": first_step, "checkpoints": self._checkpoints(), "events": self._events()}
        (fresh / _NOTE).write_text(json.dumps(known), encoding="utf-8")
        self.forget()
        fresh.rename(self._folder)

    def forget(self) -> None:
        """The attempt came to something, or was undone."""
        remove(self._folder)

    def settle(self) -> None:
        """Undo what an attempt left that made no step; forget one that did. Nothing where there is no note."""
        known = self._known()
        if known and not self._went_on(known):
            self._undo(known)
        self.forget()

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

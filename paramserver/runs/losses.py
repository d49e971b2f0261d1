"""What a run lost on its way: the processes, and the updates that were made again. Kept in ``losses.json``."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paramserver.fileio import atomic_write_text


class LossLog:
    """The losses of one start of a run, which the restarts of rank 0 survive. Written at every change; these are rare.

    Args:
        file: ``losses.json`` of the run.

    Attributes:
        view: how often rank 0 has started in this folder; see ``consistency/ledger.py``.
        trainer_ranks: global ranks of the trainers of that view, in the order of their indices; empty before the first.
        faults: one entry for each lost process.
        restarts: how often a process took the place of a lost one.
        updates_redone: updates that were made again, after a return to a checkpoint, as far as records show them.

    Example::

        >>> log = LossLog(getfixture("tmp_path") / "losses.json")
        >>> log.begin(view=1, trainer_ranks=[1, 2])
        >>> log.add_fault(step=40, text="trainer 1 is lost")
        >>> log.return_to(30, furthest_step=45, view=2, trainer_ranks=[1, 2])
        >>> log.add_fault(step=50, text="trainer 0 is lost", returns=True)
        >>> log.return_to(50, furthest_step=50, view=3, trainer_ranks=[1, 2])
        >>> same = LossLog(log.file)
        >>> same.view, same.updates_redone, same.restarts
        (3, 15, 2)
        >>> [(fault["step"], fault["text"]) for fault in same.faults]  # doctest: +NORMALIZE_WHITESPACE
        [(40, 'trainer 1 is lost'), (45, 'all processes return to step 30'),
         (50, 'trainer 0 is lost; all processes return to step 50')]
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        stored: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        self.view: int = stored.get("view", 0)
        self.trainer_ranks: list[int] = stored.get("trainer_ranks", [])
        self.faults: list[dict[str, Any]] = stored.get("faults", [])
        self.restarts: int = stored.get("restarts", 0)
        self.updates_redone: int = stored.get("updates_redone", 0)

    def begin(self, view: int, trainer_ranks: Sequence[int]) -> None:
        """A run starts or is resumed: it has lost nothing yet."""
        self.faults, self.restarts, self.updates_redone = [], 0, 0
        self.resize(view, trainer_ranks)

    def resize(self, view: int, trainer_ranks: Sequence[int]) -> None:
        """The run continues with other trainers, in a later view; nothing was lost."""
        self.view, self.trainer_ranks = view, list(trainer_ranks)
        self._write()

    def return_to(self, step: int, furthest_step: int, view: int, trainer_ranks: Sequence[int]) -> None:
        """Rank 0 starts again from the checkpoint of ``step``, after ``furthest_step`` updates."""
        self.view, self.trainer_ranks = view, list(trainer_ranks)
        self.updates_redone += max(furthest_step - step, 0)
        self.restarts += 1
        text = f"all processes return to step {step}"
        if self.faults and self.faults[-1].pop("returns", False):
            self.faults[-1]["text"] += f"; {text}"
            self._write()
        else:
            self.add_fault(furthest_step, text)

    def add_fault(self, step: int, text: str, returns: bool = False) -> None:
        """A process is lost; ``returns``: rank 0 returns to a checkpoint for it, which is not another fault."""
        self.faults.append({"time": time.time(), "step": step, "text": text, **({"returns": True} if returns else {})})
        self._write()

    def add_restart(self) -> None:
        """A process took the place of a lost one."""
        self.restarts += 1
        self._write()

    def _write(self) -> None:
        entries: dict[str, Any] = {"view": self.view, "trainer_ranks": self.trainer_ranks}
        entries |= {"restarts": self.restarts, "updates_redone": self.updates_redone}
        atomic_write_text(self.file, json.dumps({**entries, "faults": self.faults}, indent=1) + "\n")

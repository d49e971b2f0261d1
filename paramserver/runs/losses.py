"""What a run lost on its way: the processes, and the updates that were made again. Kept in ``losses.json``."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from paramserver.errors import CheckpointError, StorageError
from paramserver.fileio import atomic_write_text, then_resume

_SECONDS_AND_TIME = struct.Struct("<dd")


class SessionClock:
    """The training time of the present session and when it was reached, in a file that outlives a killed process.

    The file exists from the first update of a session to its end, or to the next one if rank 0 was killed.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._descriptor = -1

    def set(self, seconds: float, now: float) -> None:
        """Store both; at every update, so this is one system call into the page cache."""
        if self._descriptor < 0:
            self._descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.pwrite(self._descriptor, _SECONDS_AND_TIME.pack(seconds, now), 0)

    def take(self) -> tuple[float, float] | None:
        """Return what was stored last, and remove the file; None if there is none."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        try:
            stored = self.file.read_bytes()
            self.file.unlink()
        except FileNotFoundError:
            return None
        return _SECONDS_AND_TIME.unpack(stored) if len(stored) == _SECONDS_AND_TIME.size else None


_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("view", "restarts", "updates_redone"), int),
    **dict.fromkeys(("trainer_ranks", "faults"), list),
    **dict.fromkeys(("seconds", "recovery_s"), (int, float)),
    **dict.fromkeys(("first_step", "first_samples"), (int, type(None))),
    "ended": (int, float, type(None)),
}


def _read(file: Path) -> dict[str, Any]:
    """Return what ``LossLog`` wrote.

    Raises:
        CheckpointError: the file holds something else.
    """
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        wrong = "no mapping" if not isinstance(stored, dict) else ""
        wrong = wrong or next((n for n, kind in _KINDS.items() if n in stored and not isinstance(stored[n], kind)), "")
    except (OSError, ValueError, RecursionError) as error:
        wrong = "it is empty" if not file.stat().st_size else str(error).split("\n")[0]
    if wrong:
        raise CheckpointError(
            f"{file} must be what the run wrote there ({wrong}); restore it, or remove it: the run resumes without, "
            "and counts its losses from 0"
        )
    return cast(dict[str, Any], stored)


class LossLog:
    """The losses of one start of a run, which restarts of rank 0 survive. Written at every change, which is rare."""

    def __init__(self, file: Path) -> None:
        self.file = file
        stored = _read(file) if file.exists() else {}
        # How often rank 0 has started in this folder; see ``consistency/ledger.py``.
        self.generation: int = stored.get("view", 0)
        # Global ranks of the trainers of that generation, in the order of their indices; empty before the first.
        self.trainer_ranks: list[int] = stored.get("trainer_ranks", [])
        self.faults: list[dict[str, Any]] = stored.get("faults", [])
        self.restarts: int = stored.get("restarts", 0)
        # Updates that were made again, after a return to a checkpoint, as far as records show them.
        self.updates_redone: int = stored.get("updates_redone", 0)
        # With which this start began, before any loss.
        self.first_step: int | None = stored.get("first_step")
        self.first_samples: int | None = stored.get("first_samples")
        # Training time of the earlier sessions of this start: those that a return to a checkpoint ended.
        self.seconds: float = stored.get("seconds", 0.0)
        # Time from the last update of a session to the first step of the next one, summed.
        self.recovery_s: float = stored.get("recovery_s", 0.0)
        self._ended: float | None = stored.get("ended")  # time of the last update of the session before this one
        self._session = SessionClock(file.with_name(".session"))

    def begin(self, generation: int, trainer_ranks: Sequence[int]) -> None:
        """A run starts or is resumed: it has lost nothing yet."""
        self.faults, self.restarts, self.updates_redone = [], 0, 0
        self._session.take()
        self.first_step = self.first_samples = self._ended = None
        self.seconds = self.recovery_s = 0.0
        self.resize(generation, trainer_ranks)

    def resize(self, generation: int, trainer_ranks: Sequence[int]) -> None:
        """The run continues with other trainers, in a later generation; nothing was lost."""
        self.generation, self.trainer_ranks = generation, list(trainer_ranks)
        self._add_session()
        self._write()

    def return_to(
        self, step: int, furthest_step: int, generation: int, trainer_ranks: Sequence[int], lost: str = ""
    ) -> None:
        """Rank 0 starts again from the checkpoint of ``step``, after ``furthest_step`` updates.

        ``lost`` names what this is for, if no loss was recorded.
        """
        self.generation, self.trainer_ranks = generation, list(trainer_ranks)
        self._add_session()
        self.updates_redone += max(furthest_step - step, 0)
        self.restarts += 1
        text = f"all processes return to step {step}"
        if self.faults and self.faults[-1].pop("returns", False):
            self.faults[-1]["text"] += f"; {text}"
            self._write()
        else:
            self.add_fault(furthest_step, f"{lost}; {text}" if lost else text)

    def add_fault(self, step: int, text: str, returns: bool = False) -> None:
        """A process is lost; ``returns``: rank 0 returns to a checkpoint for it, which is not another fault."""
        self.faults.append({"time": time.time(), "step": step, "text": text, **({"returns": True} if returns else {})})
        self._write()

    def add_restart(self) -> None:
        """A process took the place of a lost one."""
        self.restarts += 1
        self._write()

    # Training time.

    def session_began(self, step: int, samples: int) -> None:
        """Rank 0 is at ``step``, before the first update of a session."""
        if self.first_step is None:
            self.first_step, self.first_samples = step, samples
            self._write()

    def update_made(self, seconds: float) -> None:
        """An update was applied, after ``seconds`` of training in this session."""
        now = time.time()
        try:
            self._session.set(seconds, now)
            if self._ended is not None:
                self.recovery_s += max(now - seconds - self._ended, 0.0)
                self._ended = None
                self._write()
        except OSError as error:
            raise self._write_error(error) from error

    def end_session(self) -> None:
        """This process makes no more updates."""
        try:
            if self._add_session():
                self._write()
        except OSError as error:
            raise self._write_error(error) from error

    def _add_session(self) -> bool:
        """Add the training time of the session that ended, also of a process that was killed."""
        if (last := self._session.take()) is None:
            return False
        seconds, self._ended = last
        self.seconds += seconds
        return True

    def _write_error(self, error: OSError) -> StorageError:
        return StorageError(
            f"the run folder {self.file.parent} must be writable ({error}); free space there or choose another "
            f"logging.run_dir, {then_resume(self.file)}"
        )

    def _write(self) -> None:
        entries: dict[str, Any] = {"view": self.generation, "trainer_ranks": self.trainer_ranks}
        entries |= {"restarts": self.restarts, "updates_redone": self.updates_redone}
        entries |= {"first_step": self.first_step, "first_samples": self.first_samples}
        entries |= {"seconds": self.seconds, "recovery_s": self.recovery_s, "ended": self._ended}
        try:
            atomic_write_text(self.file, json.dumps({**entries, "faults": self.faults}, indent=1) + "\n")
        except OSError as error:
            raise self._write_error(error) from error

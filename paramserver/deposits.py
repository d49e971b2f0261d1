"""The checkpoint that is being put together: what the server cut, and the trainers' parts as they come in."""

from __future__ import annotations

import threading

from torch import Tensor

from paramserver.checkpoint import Pieces
from paramserver.errors import TrainingError
from paramserver.keeper import Cut, Keeper


class Deposits:
    """Takes the parts of one checkpoint after the other and gives it to the keeper when all are there. Thread-safe.

    A trainer takes part in the next cut only when its part of the last one has arrived, so there is one at a time.
    Until then the cut and what came of the parts are in memory, beside what the writer holds. Where a trainer dies
    before, nothing is written, and the checkpoint before stays the newest.

    Args:
        keeper: writes.
        trainers: how many parts a checkpoint has.
    """

    def __init__(self, keeper: Keeper, trainers: int) -> None:
        self._keeper = keeper
        self._trainers = trainers
        self._lock = threading.Lock()
        self._cut: Cut | None = None
        self._parts: dict[int, Pieces] = {}
        self._pauses_s: dict[int, float] = {}

    def begin(self, cut: Cut) -> None:
        """The next parts are of ``cut``."""
        with self._lock:
            assert self._cut is None, "a trainer waits for its last part before it takes part in a cut"
            self._cut, self._pauses_s = cut, {}
            self._parts = {index: Pieces() for index in range(self._trainers)}

    def add(self, trainer_index: int, step: int, piece: Tensor) -> None:
        """The next piece of a trainer's file.

        Raises:
            TrainingError: no cut of that step waits for parts.
        """
        with self._lock:
            self._expected(trainer_index, step)
            self._parts[trainer_index].append(piece.numpy())

    def complete(self, trainer_index: int, step: int, pause_s: float) -> None:
        """A trainer's part is here. With the last one the checkpoint is submitted; without background, written.

        Raises:
            TrainingError: no cut of that step waits for parts, or an earlier one could not be written.
        """
        with self._lock:
            cut = self._expected(trainer_index, step)
            self._pauses_s[trainer_index] = pause_s
            if len(self._pauses_s) < self._trainers:
                return
            parts, pauses_s = self._parts, self._pauses_s
            self._cut, self._parts = None, {}
        self._keeper.write(cut, parts, max(pauses_s.values()))

    def _expected(self, trainer_index: int, step: int) -> Cut:
        if self._cut is None or self._cut.step != step or trainer_index in self._pauses_s:
            raise TrainingError(f"trainer {trainer_index}: a part of step {step} must follow a cut of that step")
        return self._cut

"""How many local steps each trainer takes in its next round, so that slow trainers are not late. No clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

_ROUNDS = 4
_PERCENTILE = 0.9


class DynamicSteps:
    """Gives a trainer fewer local steps if it is slower than the others: in proportion to its speed.

    Liu et al., "Asynchronous local-SGD training for language modeling", arXiv:2401.09135, section 5 ("dynamic local
    updates"). With v for the local steps per second of a trainer in its last rounds, and v_ref for the 90th percentile
    of these over the trainers, it takes ``min(most, max(1, floor(v / v_ref * most)))``, and ``most`` until each trainer
    has been timed in two rounds.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._rounds: dict[int, deque[tuple[int, float]]] = {}

    def add(self, trainer_index: int, steps: int, seconds: float) -> None:
        """Count a round of a trainer, and how long its local steps took."""
        self._rounds.setdefault(trainer_index, deque(maxlen=_ROUNDS)).append((steps, seconds))

    def remove(self, trainer_index: int) -> None:
        """Forget the speed of a trainer: another process takes its place, perhaps on another machine."""
        self._rounds.pop(trainer_index, None)

    def next_steps(self, trainer_index: int, trainers: Collection[int]) -> int:
        """Return how many local steps a trainer takes next; ``trainers`` are those that take part."""
        if any(len(self._rounds.get(index, ())) < 2 for index in {trainer_index, *trainers}):
            return self.most
        speeds = sorted(map(self._speed, trainers))
        reference = speeds[math.ceil(_PERCENTILE * len(speeds)) - 1]
        return min(self.most, max(1, math.floor(self._speed(trainer_index) / reference * self.most)))

    def _speed(self, trainer_index: int) -> float:
        rounds = self._rounds[trainer_index]
        return sum(steps for steps, _ in rounds) / max(sum(seconds for _, seconds in rounds), 1e-9)

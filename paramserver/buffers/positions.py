"""Which samples of a trainer were applied: with it a replacement continues where a lost trainer stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class AppliedPositions:
    """How often the samples of one trainer were applied, by position. Not thread-safe.

    The n-th sample that a source gives has position n, from 0 on and over all passes. Every position below ``low`` was
    applied as often as it is due, so the size is that of the dictionary, which the buffer's capacity keeps small.

    Args:
        low: all positions below it are complete.
        above: {position: times applied} of positions from ``low`` on.
        count: servings that were applied, of all positions.

    Attributes:
        low, above, count: as above, now.

    Example::

        >>> applied = AppliedPositions()
        >>> applied.add([0, 1, 3], times_due=1)
        >>> applied.low, applied.above, applied.count
        (2, {3: 1}, 3)
        >>> [applied.times(position) for position in range(5)]
        [None, None, 0, 1, 0]
        >>> applied.add([2], times_due=1)
        >>> applied
        AppliedPositions(low=4, above={}, count=4)
    """

    def __init__(self, low: int = 0, above: Mapping[int, int] | None = None, count: int = 0) -> None:
        self.low = low
        self.above = dict(above or {})
        self.count = count

    def __repr__(self) -> str:
        return f"AppliedPositions(low={self.low}, above={self.above}, count={self.count})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AppliedPositions) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def add(self, positions: Sequence[int] | npt.NDArray[np.int64], times_due: int | None) -> None:
        """Count one more serving of each of these positions; a position may occur more than once.

        Args:
            positions: of samples that were applied.
            times_due: how often each sample is served (``Buffer.times_due``). None, as in a reservoir, which repeats
                samples as it likes: a position is complete with the first time, and more are counted only.

        Raises:
            ValueError: a position was applied more than ``times_due`` times.
        """
        if isinstance(positions, np.ndarray):
            positions = positions.tolist()  # Python's numbers, which a dictionary finds faster
        above, low, due = self.above, self.low, times_due or 1
        for position in positions:
            times = above.get(position, 0) if position >= low else due
            if times < due:
                above[position] = times + 1
            elif times_due is not None:
                raise ValueError(
                    f"position ({position}) must be applied at most {due} times, it is applied once more; "
                    "a sample was served twice"
                )
        while above.get(low) == due:
            del above[low]
            low += 1
        self.low = low
        self.count += len(positions)

    def times(self, position: int) -> int | None:
        """Return how often this position was applied; None if it is below ``low``, so complete."""
        return None if position < self.low else self.above.get(position, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the account as numbers and lists of numbers, for a message, JSON or a checkpoint."""
        return {
            "low": self.low,
            "count": self.count,
            "positions": list(self.above.keys()),
            "times": list(self.above.values()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``."""
        self.low, self.count = state["low"], state["count"]
        self.above = dict(zip(state["positions"], state["times"], strict=True))

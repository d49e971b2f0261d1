"""Which validation was the best so far, and for how long none was better."""

import math
from collections.abc import Mapping
from typing import Any

from paramserver.errors import UnsupportedConfiguration

__all__ = ["Best"]


class Best:
    """The best value of one metric, its step, and the validations since then (for ``training.patience``).

    Args:
        metric: the name in the dictionary that ``validation_step`` returns.
        mode: ``min`` (a smaller value is better) or ``max``.
    """

    def __init__(self, metric: str, mode: str) -> None:
        if mode not in ("min", "max"):
            raise UnsupportedConfiguration(f"checkpoint.best.mode ({mode}) must be min or max; write one of these")
        self.metric = metric
        self.mode = mode
        self.value: float | None = None
        self.step: int | None = None
        self.without_improvement = 0

    def improved(self, value: float, step: int | None = None) -> bool:
        """Take in the next validation's value; True if it is strictly better than all before. NaN never is."""
        if not self._better(float(value)):
            self.without_improvement += 1
            return False
        self.value, self.step, self.without_improvement = float(value), step, 0
        return True

    def _better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.value is None:
            return True
        return value < self.value if self.mode == "min" else value > self.value

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``; a state of another metric or mode says nothing about this one and is left alone."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            self.value, self.step = state["value"], state["step"]
            self.without_improvement = state["without_improvement"]

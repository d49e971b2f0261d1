"""Which validation was the best so far, and for how long none was better."""

import math
from collections.abc import Mapping
from typing import Any

from paramserver.errors import UnsupportedConfiguration


class BestMetric:
    """The best value of one metric, its step, and the scheduled validations since then (for ``training.patience``).

    A validation that comes only because the run ends may be the best, but patience leaves it out, so that a run that
    goes on later ends where it would have ended without the stop.

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
        self.scheduled_value: float | None = None
        self.without_improvement = 0

    def update(self, value: float, step: int | None = None, scheduled: bool = True) -> bool:
        """Take in the next validation's value; True if it is strictly better than all before. NaN never is."""
        value = float(value)
        if scheduled and self._better(value, self.scheduled_value):
            self.scheduled_value, self.without_improvement = value, 0
        elif scheduled:
            self.without_improvement += 1
        better = self._better(value, self.value)
        if better:
            self.value, self.step = value, step
        return better

    def _better(self, value: float, than: float | None) -> bool:
        if math.isnan(value):
            return False
        if than is None:
            return True
        return value < than if self.mode == "min" else value > than

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Go on from ``state``; a state of another metric or mode says nothing about this one and is left alone.

        Returns:
            What somebody should know: that the count begins anew; None where it goes on.
        """
        if (state["metric"], state["mode"]) != (self.metric, self.mode):
            return (
                f"checkpoint.best was {state['metric']} ({state['mode']}) and is {self.metric} ({self.mode}): "
                "the best value and training.patience count anew from here"
            )
        self.value, self.step = state["value"], state["step"]
        self.scheduled_value = state.get("scheduled_value", state["value"])
        self.without_improvement = state["without_improvement"]
        return None

"""The best validation of a run, and how many validations ago it was."""

import math
from collections.abc import Mapping
from typing import Any

from paramserver.errors import UnsupportedConfiguration


class BestMetric:
    """The best value of one metric, its step, and the scheduled validations since then (for ``training.patience``).

    A validation that takes place only because the run ends may be the best, but it does not count for patience: a run
    that is resumed later ends where it would have ended without the interruption.

    Raises:
        UnsupportedConfiguration: there is no such mode.
    """

    def __init__(self, metric: str, mode: str, min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise UnsupportedConfiguration(f"checkpoint.best.mode ({mode}) must be min or max; write one of these")
        # The names of these attributes are the stored keys: see ``state_dict``.
        self.metric = metric  # the name in the dictionary that ``validation_step`` returns
        self.mode = mode
        self.min_delta = min_delta  # for patience, a value counts as better only if it is by more than this
        self.value: float | None = None
        self.step: int | None = None
        self.scheduled_value: float | None = None
        self.without_improvement = 0

    def update(self, value: float, step: int | None = None, scheduled: bool = True) -> bool:
        """Count the next validation; return whether it is strictly better than all before. NaN never is.

        With ``scheduled`` it is one by ``training.validate_every``, so it counts for patience.
        """
        value = float(value)
        # Compared with scheduled values only: a better value at the end of an interrupted run must not make the resumed
        # run stop earlier than one that was not interrupted.
        if scheduled and self._better(value, self.scheduled_value, self.min_delta):
            self.scheduled_value, self.without_improvement = value, 0
        elif scheduled:
            self.without_improvement += 1
        better = self._better(value, self.value)
        if better:
            self.value, self.step = value, step
        return better

    def _better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        # As the first value NaN would become the best, and no later value compares as better than NaN.
        if math.isnan(value):
            return False
        if than is None:
            return True
        return value < than - by if self.mode == "min" else value > than + by

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Restore ``state``, unless it is of another metric or mode: values of these cannot be compared.

        Return a note for the user that the count starts anew; None where it continues.
        """
        if (state["metric"], state["mode"]) != (self.metric, self.mode):
            return (
                f"checkpoint.best was {state['metric']} ({state['mode']}) and is {self.metric} ({self.mode}): "
                "the best value and training.patience count anew from here"
            )
        self.value, self.step = state["value"], state["step"]
        self.scheduled_value = state["scheduled_value"]
        self.without_improvement = state["without_improvement"]
        return None

"""The validation value that the runs of a benchmark are to reach: what the config and the task must have for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paramserver.config import Config
from paramserver.errors import TrainingError, UnsupportedConfiguration
from paramserver.report.results import Numbers
from paramserver.report.target import Target, parse_target, reached


def goal_of(text: str, config: Config) -> Target:
    """Read ``accuracy=0.95``. Where ``checkpoint.best`` is of that metric, it says whether less is better.

    Raises:
        UnsupportedConfiguration: it is not name=number, or nothing is validated on the way.
    """
    target = parse_target(text)
    if not config.training.validate_every:
        raise UnsupportedConfiguration(
            f"--target {text}: training.validate_every (0) must be above 0, so that the target can be seen; set it"
        )
    best = config.checkpoint.best
    if best is None or best.metric != target.name:
        return target
    return replace(target, at_most=best.mode == "min")


def when_reached(validation: Sequence[tuple[float, float, Numbers]], goal: Target) -> tuple[float, float] | None:
    """Samples and seconds of the first validation that meets it; None where none does.

    Raises:
        TrainingError: no validation has that value.
    """
    known = sorted({name for _, _, values in validation for name in values})
    if goal.name not in known:
        raise TrainingError(
            f"--target {goal.name}: validation_step gives {', '.join(known) or 'nothing'}; name one of them"
        )
    return reached(validation, goal)

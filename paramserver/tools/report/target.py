"""The value that a validation metric is to reach, ``accuracy=0.95``, and when a run reached it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.report.results import CaseResult, Numbers

# A metric whose name contains one of these is better when it is smaller.
_SMALLER = ("loss", "error", "perplexity", "mse", "mae")


@dataclass(frozen=True)
class Target:
    """A value that a validation metric is to reach: at least, or with ``at_most`` at most."""

    name: str
    value: float
    at_most: bool

    def is_met(self, values: Numbers) -> bool:
        found = values.get(self.name)
        if found is None:
            return False
        return found <= self.value if self.at_most else found >= self.value


def parse_target(text: str) -> Target:
    """Parse ``name=value``: at most for a loss or an error, judged by its name, at least otherwise.

    Example::

        >>> target = parse_target("accuracy=0.95")
        >>> first_reached([(320.0, 1.0, {"accuracy": 0.9}), (640.0, 2.0, {"accuracy": 0.96})], target)
        (640.0, 2.0)

        >>> parse_target("valid/loss=0.1") == parse_target("Loss/valid=0.1") == parse_target("loss=0.1")
        True

    Raises:
        UnsupportedConfiguration: ``text`` is not of this form.
    """
    name, _, word = (part.strip() for part in text.partition("="))
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not name or not math.isfinite(value):
        raise UnsupportedConfiguration(
            f"--target ({text}) must be the name of a validation metric and a number; write for example accuracy=0.95"
        )
    # As in TensorBoard, and as it was there in earlier versions.
    name = {"Loss/valid": "loss"}.get(name, name.removeprefix("valid/"))
    return Target(name, value, any(part in name.lower() for part in _SMALLER))


def first_reached(validation: Sequence[tuple[float, float, Numbers]], target: Target) -> tuple[float, float] | None:
    """Samples and seconds of the first validation that meets ``target``; None where none does."""
    return next(((samples, seconds) for samples, seconds, values in validation if target.is_met(values)), None)


def with_target(result: CaseResult, target: Target) -> CaseResult:
    samples, seconds = first_reached(result.validation, target) or (None, None)
    return dataclasses.replace(
        result, target={target.name: target.value}, time_to_target_s=seconds, samples_to_target=samples
    )

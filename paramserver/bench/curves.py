"""What a run's records tell a benchmark: loss and validation against samples and time, and when a target was met."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramserver.config import Config
from paramserver.errors import TrainingError, UnsupportedConfiguration
from paramserver.records import Record

LossPoint = tuple[float, float, float | None]
ValidationPoint = tuple[float, float, Mapping[str, float | None]]

# Of a name with one of these in it, smaller is better, where checkpoint.best does not say otherwise.
_SMALLER = ("loss", "error")


@dataclass(frozen=True)
class Target:
    """A validation value that a run is to reach: at least, or at most."""

    name: str
    value: float
    at_most: bool

    def is_met(self, value: float) -> bool:
        return value <= self.value if self.at_most else value >= self.value


def parse_target(text: str, config: Config) -> Target:
    """Read ``accuracy=0.95``. At most where ``checkpoint.best`` minimizes that name, or where it is a loss or error.

    Raises:
        UnsupportedConfiguration: it is not name=number, or nothing is validated on the way.
    """
    name, _, word = (part.strip() for part in text.partition("="))
    try:
        value = float(word)
    except ValueError:
        value = float("nan")
    if not name or value != value:
        raise UnsupportedConfiguration(f"--target {text}: must be name=number; write for example accuracy=0.95")
    if not config.training.validate_every:
        raise UnsupportedConfiguration(
            f"--target {text}: training.validate_every (0) must be above 0, so that the target can be seen; set it"
        )
    best = config.checkpoint.best
    told = best.mode if best is not None and best.metric == name else None
    return Target(name, value, told == "min" if told else any(part in name.lower() for part in _SMALLER))


def read_records(file: Path) -> list[Record]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def loss_points(records: Sequence[Record]) -> tuple[LossPoint, ...]:
    """(samples, seconds, loss) of each ``train`` record, from the beginning of the run."""
    return tuple((r["samples"], r["seconds"], r["loss"]) for r in records if r["kind"] == "train")


def validation_points(records: Sequence[Record], summary: Mapping[str, Any]) -> tuple[ValidationPoint, ...]:
    """(samples applied, seconds, means) of each validation.

    A ``validation`` record has a step; its samples are that many times the mean samples of an update.
    """
    per_step = summary["samples"] / summary["steps"] if summary["steps"] else 0.0
    return tuple((r["step"] * per_step, r["seconds"], r["values"]) for r in records if r["kind"] == "validation")


def reached(points: Sequence[ValidationPoint], target: Target) -> tuple[float, float] | None:
    """(samples, seconds) of the first validation that meets the target; None where none does.

    Raises:
        TrainingError: no validation has that value.
    """
    if not any(target.name in values for _, _, values in points):
        known = sorted({name for _, _, values in points for name in values})
        raise TrainingError(
            f"--target {target.name}: validation_step gives {', '.join(known) or 'nothing'}; name one of them"
        )
    for samples, seconds, values in points:
        value = values.get(target.name)
        if value is not None and target.is_met(value):
            return samples, seconds
    return None

"""The quantities that trainers measure of each step: each is declared here, for all that send, combine and show it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

_OVER_TRAINERS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "max": max,
}
# Of the total so far and the next value; a mean is the total divided by the number of updates.
_OVER_UPDATES: dict[str, Callable[[float, float], float]] = {
    "mean": operator.add,
    "sum": operator.add,
    "max": max,
    "last": lambda total, value: value,
}


@dataclass(frozen=True)
class Quantity:
    """A number that each trainer measures of each of its steps.

    Attributes:
        name: its field in ``StepTotals``, ``StepReport`` and ``StepResult``.
        title, unit: in reports, where ``better`` is 1 if more is better, -1 if less is, 0 otherwise.
        tag: on TensorBoard, in csv and for Prometheus.
        record: its name in ``train`` records and results.jsonl; empty: ``name``.
        summary: its name in summary.json, which has it of the last ``train`` record; empty if it has not.
        progress: how the progress shows it, as a format; empty if it does not.
        section: the section of a report whose table has it, and with a ``caption`` a plot of it.
        over_trainers: how the values of the trainers of an update are combined: mean, sum or max.
        over_updates: how those of the updates since the last ``train`` record are: mean, sum, max or last.
        needs: the name of a quantity; where that is 0, ``train`` records lack this one.
        stored: the name of its total in a checkpoint; empty: ``name``.
    """

    name: str
    title: str
    tag: str
    record: str = ""
    unit: str = ""
    better: int = 0
    summary: str = ""
    progress: str = ""
    section: str = "learning"
    caption: str = ""
    over_trainers: str = "mean"
    over_updates: str = "mean"
    needs: str = ""
    stored: str = ""

    def __post_init__(self) -> None:
        for name in ("record", "stored"):
            object.__setattr__(self, name, getattr(self, name) or self.name)

    @property
    def label(self) -> str:
        """The title with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def add(self, total: float, value: float) -> float:
        """Return the total over some updates and one more."""
        return _OVER_UPDATES[self.over_updates](total, value)

    def over(self, updates: int, total: float) -> float:
        """Return the value over so many updates, of their total."""
        return total / updates if self.over_updates == "mean" else total


def _measured(title: str, tag: str, **shown: Any) -> Any:
    """Declare a quantity, as a field; ``shown`` are the further attributes of ``Quantity``."""
    return field(default=0.0, metadata={"title": title, "tag": tag, **shown})


_OF_TABLES = {"unit": "per step", "section": "tables", "over_trainers": "sum", "needs": "table_ids"}


@dataclass(frozen=True, kw_only=True)
class StepQuantities:
    """What trainers measure of each step in addition to its loss; 0 where it is not measured.

    A new quantity is a field here, and its value is set where the step is made (``trainers/base.py``).

    Attributes:
        inner_steps: local steps of a round.
        drift: how far a round moved the parameters, relative to their norm.
        table_ids, table_rows: the ids that the gradients of embedding tables have, and their different rows, of all
            tables and trainers; in ``rpc``.
    """

    inner_steps: float = _measured(
        "local steps per round",
        "rounds/local_steps",
        record="local_steps",
        progress="{:.4g} local steps",
        section="rounds",
        needs="inner_steps",
    )
    drift: float = _measured(
        "drift",
        "rounds/drift",
        section="rounds",
        caption="How far the local steps of a round move the parameters, relative to their norm: mean and range of "
        "repeats.",
        needs="inner_steps",
    )
    table_ids: float = _measured("ids of embedding tables", "tables/ids", **_OF_TABLES)
    table_rows: float = _measured("rows of embedding tables", "tables/rows", **_OF_TABLES)


LOSS = Quantity("loss", "train loss", "train/loss", better=-1, summary="train_loss", stored="losses")
MEASURED = tuple(Quantity(one.name, **one.metadata) for one in fields(StepQuantities))
"""All but the loss, which every step has."""

QUANTITIES = (LOSS, *MEASURED)


def combine(steps: Sequence[StepQuantities], quantities: Iterable[Quantity] = QUANTITIES) -> dict[str, Any]:
    """Return the quantities of an update, by name: from the ``StepReport``, or the like, of each of its trainers."""
    return {
        one.name: _OVER_TRAINERS[one.over_trainers]([getattr(step, one.name) for step in steps]) for one in quantities
    }

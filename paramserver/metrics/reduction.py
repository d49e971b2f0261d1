"""What several trainers log in the same step, combined into one value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from paramserver.metrics.records import Record, make_record

Reduction = Literal["mean", "sum", "max", "none"]

_OPERATIONS: dict[str, Callable[[list[tuple[float, float]]], float]] = {
    "mean": lambda pairs: math.fsum(v * w for v, w in pairs) / (math.fsum(w for _, w in pairs) or math.nan),
    "sum": lambda pairs: math.fsum(value for value, _ in pairs),
    "max": lambda pairs: max(value for value, _ in pairs),
}
REDUCTIONS = (*_OPERATIONS, "none")


@dataclass
class _Logged:
    """The values of one name in one step, each with its weight."""

    operation: str
    values: dict[int, list[tuple[float, float]]] = field(default_factory=dict)


class LogReducer:
    """Combines the records ``log`` of trainers that take their steps together.

    A value is complete once each trainer has recorded something of a later step. Trainers that log nothing in a step
    have no part in its value.
    """

    def __init__(self, trainers: Iterable[int]) -> None:
        self._reached = dict.fromkeys(trainers, -1)  # the step of each trainer's newest record
        self._pending: dict[tuple[int, str], _Logged] = {}

    def add(self, record: Mapping[str, object]) -> list[Record]:
        """Take a record of any kind, in the order in which its trainer made it; return what is complete now."""
        trainer, step = record.get("trainer"), record.get("step")
        if not isinstance(trainer, int) or not isinstance(step, int) or trainer not in self._reached:
            return []
        self._reached[trainer] = max(self._reached[trainer], step)
        operation = record.get("reduce")
        if record["kind"] == "log" and operation in _OPERATIONS:
            key = step, str(record["name"])
            logged = self._pending.setdefault(key, _Logged(str(operation)))
            pair = float(record["value"]), float(record.get("weight", 1))  # type: ignore[arg-type]
            logged.values.setdefault(trainer, []).append(pair)
        return self.flush(min(self._reached.values()))

    def flush(self, before: float = math.inf) -> list[Record]:
        """Return the values of all steps below ``before``, in their order, also those that lack trainers."""
        done = sorted(key for key in self._pending if key[0] < before)
        return [self._to_record(*key, self._pending.pop(key)) for key in done]

    def remove(self, trainer: int) -> None:
        """No longer wait for a trainer: it is lost."""
        if len(self._reached) > 1:
            self._reached.pop(trainer, None)

    def restore(self, trainer: int) -> None:
        """Wait for a trainer again, from the steps on that the others make now."""
        self._reached.setdefault(trainer, max(self._reached.values()))

    @staticmethod
    def _to_record(step: int, name: str, logged: _Logged) -> Record:
        # In the order of trainers, not of arrival: the same numbers are added in every run.
        pairs = [pair for trainer in sorted(logged.values) for pair in logged.values[trainer]]
        value = _OPERATIONS[logged.operation](pairs)
        fields = {"name": name, "value": value, "reduce": logged.operation, "trainers": len(logged.values)}
        return make_record("reduced", step, rank=0, **fields)

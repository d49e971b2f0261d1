"""How stale the applied gradients were: exact counts for records and summaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

_P95 = Fraction(95, 100)  # exact, so that rounding never moves the rank, however many gradients there are


class StalenessHistogram:
    """How often gradients of each trainer were applied at each staleness (versions)."""

    def __init__(self) -> None:
        self._counts: dict[int, Counter[int]] = {}
        self._window: Counter[int] = Counter()

    def add(self, trainer_index: int, staleness: int) -> None:
        """Count an applied gradient."""
        self._counts.setdefault(trainer_index, Counter())[staleness] += 1
        self._window[staleness] += 1

    def summary(self) -> dict[str, Any]:
        """Return ``mean``, ``p95`` (the smallest value that 95 % do not exceed), ``max`` and ``histogram``.

        ``histogram`` maps the staleness, as a string, to the number of gradients, in ascending order. Without any
        gradient the figures are 0 and it is empty.
        """
        return _summarize(sum(self._counts.values(), Counter()))

    def for_trainer(self, trainer_index: int) -> dict[str, Any]:
        """Return the summary of one trainer."""
        return _summarize(self._counts.get(trainer_index, Counter()))

    def by_trainer(self) -> list[dict[str, Any]]:
        """Return the summary of each trainer that has pushed a gradient, with its index as ``trainer``."""
        return [{"trainer": index, **self.for_trainer(index)} for index in sorted(self._counts)]

    def pop_window(self) -> dict[str, Any]:
        """Return the summary of what was added since the last call."""
        window, self._window = self._window, Counter()
        return _summarize(window)

    def state_dict(self) -> dict[str, Any]:
        """Return all counts, as JSON values."""
        counts = {str(index): _to_json(counts) for index, counts in sorted(self._counts.items())}
        return {"counts": counts, "window": _to_json(self._window)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all counts by those of ``state_dict()``."""
        self._counts = {int(index): _from_json(histogram) for index, histogram in state["counts"].items()}
        self._window = _from_json(state.get("window", {}))


def _to_json(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(value): counts[value] for value in sorted(counts)}


def _from_json(histogram: Mapping[str, int]) -> Counter[int]:
    return Counter({int(value): count for value, count in histogram.items()})


def _summarize(counts: Mapping[int, int]) -> dict[str, Any]:
    total = sum(counts.values())
    if not total:
        return {"mean": 0.0, "p95": 0, "max": 0, "histogram": {}}
    mean = sum(value * count for value, count in counts.items()) / total
    not_above, p95 = 0, 0
    for p95 in sorted(counts):
        not_above += counts[p95]
        if not_above >= _P95 * total:
            break
    return {"mean": mean, "p95": p95, "max": max(counts), "histogram": _to_json(counts)}

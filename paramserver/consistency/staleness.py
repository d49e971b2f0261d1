"""How stale the gradients were that were applied, and what that takes off them. Pure counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

_P95 = Fraction(95, 100)  # exact, so that no count of gradients moves the rank by rounding


class StalenessHistogram:
    """How often each trainer's gradients were applied at which staleness (versions). Exact, of any number of them."""

    def __init__(self) -> None:
        self._counts: dict[int, Counter[int]] = {}
        self._window: Counter[int] = Counter()

    def add(self, trainer_index: int, staleness: int) -> None:
        """One gradient was applied."""
        self._counts.setdefault(trainer_index, Counter())[staleness] += 1
        self._window[staleness] += 1

    def summary(self) -> dict[str, Any]:
        """Of all trainers: ``mean``, ``p95`` (the smallest that 95 % do not exceed), ``max``, ``histogram``.

        ``histogram`` is {staleness as a string: number of gradients}, from the smallest on. Without a gradient all are
        0 and it is empty.
        """
        return _figures(sum(self._counts.values(), Counter()))

    def for_trainer(self, trainer_index: int) -> dict[str, Any]:
        """The figures of one trainer."""
        return _figures(self._counts.get(trainer_index, Counter()))

    def by_trainer(self) -> list[dict[str, Any]]:
        """The figures of each trainer that has given a gradient, with its index as ``trainer``."""
        return [{"trainer": index, **self.for_trainer(index)} for index in sorted(self._counts)]

    def pop_window(self) -> dict[str, Any]:
        """The figures of what was added since the last call."""
        window, self._window = self._window, Counter()
        return _figures(window)

    def state_dict(self) -> dict[str, Any]:
        """The counts, and those of the window, as plain values that JSON keeps as well."""
        counts = {str(index): _histogram(counts) for index, counts in sorted(self._counts.items())}
        return {"counts": counts, "window": _histogram(self._window)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back ``state_dict()`` in place of what was counted."""
        self._counts = {int(index): _counter(histogram) for index, histogram in state["counts"].items()}
        self._window = _counter(state.get("window", {}))


def _histogram(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(value): counts[value] for value in sorted(counts)}


def _counter(histogram: Mapping[str, int]) -> Counter[int]:
    return Counter({int(value): count for value, count in histogram.items()})


def _figures(counts: Mapping[int, int]) -> dict[str, Any]:
    total = sum(counts.values())
    if not total:
        return {"mean": 0.0, "p95": 0, "max": 0, "histogram": {}}
    mean = sum(value * count for value, count in counts.items()) / total
    below, p95 = 0, 0
    for p95 in sorted(counts):
        below += counts[p95]
        if below >= _P95 * total:
            break
    return {"mean": mean, "p95": p95, "max": max(counts), "histogram": _histogram(counts)}

"""Mean and deviation of the fields of what arrives."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# Of how many samples one is looked at. A prime: simulations that take turns would else be looked at in a part only.
_EVERY = 7


class Moments:
    """Count, mean and deviation of numbers that come in arrays, whose values are not kept.

    Arrays are merged by T. Chan, G. Golub and R. LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", Stanford 1979. Numbers that are not finite are counted and left out.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.not_finite = 0
        self._squares = 0.0

    def add(self, array: npt.NDArray[Any]) -> None:
        values = array.astype(np.float64).ravel()
        with np.errstate(all="ignore"):
            mean = _mean(values)
            if not math.isfinite(mean):
                finite = values[np.isfinite(values)]
                self.not_finite += values.size - finite.size
                values, mean = finite, _mean(finite)
            values -= mean
            squares = float(values.dot(values))
        self._merge(values.size, mean, squares)

    def _merge(self, count: int, mean: float, squares: float) -> None:
        if not count:
            return
        total = self.count + count
        apart = mean - self.mean
        self.mean += apart * count / total
        self._squares += squares + apart * apart * self.count * count / total
        self.count = total

    @property
    def deviation(self) -> float:
        """Of the numbers seen, as numpy's ``std``."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0

    def row(self) -> dict[str, float]:
        return {"mean": self.mean, "deviation": self.deviation, "count": self.count, "not_finite": self.not_finite}


def _mean(values: npt.NDArray[np.float64]) -> float:
    return float(np.add.reduce(values)) / values.size if values.size else 0.0


class FieldMoments:
    """The moments of every field from one reading to the next. For any thread.

    One sample in seven is looked at, and of those that came together no more than one.

    Args:
        names: of the fields.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._passed_over = _EVERY
        self._moments = {name: Moments() for name in self._names}

    def see(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Samples that came together."""
        with self._lock:
            self._passed_over += len(samples)
            if self._passed_over >= _EVERY:
                for name, moments in self._moments.items():
                    moments.add(samples[-1][name])
                self._passed_over = 0

    def read(self) -> dict[str, dict[str, float]]:
        """``{field: {mean, deviation, count, not_finite}}`` of what was looked at since it was read last."""
        with self._lock:
            rows = {name: moments.row() for name, moments in self._moments.items()}
            self._begin()
        return rows

"""Curves of several repeats as one: their mean and the band in which they lie."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paramserver.report.results import Result

__all__ = ["Band", "Curve", "band", "loss_against", "metric_names", "validation_against"]

Curve: TypeAlias = list[tuple[float, float]]
SAMPLES, SECONDS = 0, 1
_POINTS = 60


@dataclass(frozen=True)
class Band:
    """At each place ``x``: the mean of the repeats, the least and the greatest."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def loss_against(axis: int) -> Callable[[Result], Curve]:
    """Takes the loss of a record against its samples (0) or seconds (1)."""
    return lambda result: [(point[:2][axis], point[2]) for point in result.loss if point[2] is not None]


def validation_against(axis: int, name: str) -> Callable[[Result], Curve]:
    """Takes a validation metric of a record against its samples (0) or seconds (1)."""

    def get(result: Result) -> Curve:
        pairs = [(point[:2][axis], point[2].get(name)) for point in result.validation]
        return [(x, value) for x, value in pairs if value is not None]

    return get


def metric_names(results: Iterable[Result]) -> list[str]:
    """The validation metrics of all records."""
    return sorted({name for one in results for point in one.validation for name in point[2]})


def band(curves: Iterable[Curve], points: int = _POINTS) -> Band | None:
    """The band over what all curves cover. A curve with more points is smoothed to so many; None without any point."""
    thinned = [_thinned(sorted(curve), points) for curve in curves if curve]
    if not thinned:
        return None
    start, end = max(curve[0][0] for curve in thinned), min(curve[-1][0] for curve in thinned)
    if start > end:  # no place that all cover
        thinned = thinned[:1]
        start, end = thinned[0][0][0], thinned[0][-1][0]
    places = _places(thinned, start, end, points)
    columns = [[_at(curve, x) for curve in thinned] for x in places]
    return Band(places, [statistics.fmean(c) for c in columns], list(map(min, columns)), list(map(max, columns)))


def _thinned(curve: Curve, points: int) -> Curve:
    """Neighbours averaged, so that at most so many points are left."""
    if len(curve) <= points:
        return curve
    edges = [i * len(curve) // points for i in range(points + 1)]
    parts = [curve[a:b] for a, b in itertools.pairwise(edges)]
    return [(statistics.fmean(x for x, _ in part), statistics.fmean(y for _, y in part)) for part in parts]


def _places(curves: Sequence[Curve], start: float, end: float, points: int) -> list[float]:
    """Where the band is computed: at the points of a lone curve, evenly otherwise."""
    if len(curves) == 1:
        return [x for x, _ in curves[0]]
    count = min(points, max(len(curve) for curve in curves))
    return [start + (end - start) * i / (count - 1) for i in range(count)] if count > 1 and end > start else [start]


def _at(curve: Curve, x: float) -> float:
    """Linear interpolation."""
    right = bisect.bisect_left(curve, x, key=lambda point: point[0])
    if right == 0:
        return curve[0][1]
    if right == len(curve):
        return curve[-1][1]
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)

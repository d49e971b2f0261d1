"""Means and ratios with 95 % intervals, and merged histograms."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from paramserver.metrics.records import DurationHistogram
from paramserver.tools.report.results import CaseResult

CONFIDENCE = 0.95
FEWEST_REPEATS = 3
"""That have an interval."""
# Upper bounds of two very different repeats exceed the range of a float; they are cut off here.
_LARGEST_LOG = 600.0
_PANELS = 400  # of Simpson's rule; even
_HALVINGS = 60


@dataclass(frozen=True)
class Estimate:
    """A figure over repeats.

    ``low`` and ``high`` are the bounds of the 95 % interval; both are None for fewer than three repeats: one has no
    spread, and with one degree of freedom the interval is 13 standard errors wide on each side.
    """

    value: float
    low: float | None
    high: float | None
    repeats: int
    median: float

    @property
    def has_interval(self) -> bool:
        return self.low is not None

    @property
    def relative_width(self) -> float | None:
        """The width of the interval as a share of the value."""
        if self.low is None or self.high is None or not self.value:
            return None
        return (self.high - self.low) / abs(self.value)

    def excludes(self, number: float) -> bool:
        """Whether the interval is known and lies on one side of ``number``."""
        if self.low is None or self.high is None:
            return False
        return number < self.low or number > self.high

    def mapped(self, change: Callable[[float], float]) -> Estimate:
        """The estimate of what ``change``, which keeps the order of numbers, makes of the figure."""
        low, high = (None if bound is None else change(bound) for bound in (self.low, self.high))
        return Estimate(change(self.value), low, high, self.repeats, change(self.median))


@lru_cache(maxsize=1024)
def t_quantile(probability: float, degrees: float) -> float:
    """Quantile of Student's t distribution.

    With t = sqrt(n) tan(a) the density becomes cos(a)**(n - 1), up to its constant (Abramowitz and Stegun, Handbook of
    Mathematical Functions, 26.7.1); that is integrated by Simpson's rule and a found by bisection. ``probability`` is
    0.5 or more, less than 1, and ``degrees`` are of freedom, at least 1, not necessarily whole.
    """
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        angle = (low + high) / 2
        if 0.5 + constant * _cosine_integral(angle, degrees - 1) < probability:
            low = angle
        else:
            high = angle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _cosine_integral(angle: float, power: float) -> float:
    """Of cos(x)**power from 0 to ``angle``."""
    # Beyond this angle the integrand is below e**-50; integrating to it keeps the panels where the function is large.
    end = min(angle, math.sqrt(100 / power)) if power else angle
    width = end / _PANELS
    total: float = 1.0 + max(math.cos(end), 0.0) ** power
    for i in range(1, _PANELS):
        total += (4 if i % 2 else 2) * math.cos(i * width) ** power
    return total * width / 3


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """The mean of the known values with its interval; None without a known value.

    If every value is above 0, as speeds and durations are, this is the geometric mean with the t-interval of the
    logarithm: no bound is below 0, and the quotient of two such means is what ``ratio`` returns. Otherwise it is the
    arithmetic mean with the t-interval of the values.
    """
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    if min(known) <= 0:
        return _around(known)
    unit = known[0]  # whose logarithm is 0, so that equal values come out as they are
    logs = _around([math.log(value) - math.log(unit) for value in known])
    return replace(_of_logarithms(logs, unit), median=statistics.median(known))


def _around(values: Sequence[float]) -> Estimate:
    mean = statistics.fmean(values)
    if len(values) < FEWEST_REPEATS:
        return Estimate(mean, None, None, len(values), mean)
    half = t_quantile((1 + CONFIDENCE) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, len(values), statistics.median(values))


def ratio(
    ours: Mapping[int, float | None], theirs: Mapping[int, float | None], are_interleaved: bool = True
) -> Estimate | None:
    """The geometric mean of ``ours`` over ``theirs``, with the t-interval of its logarithm; see ``difference``.

    Returns:
        None where one has no value above 0.
    """
    logs = difference(_logarithms(ours), _logarithms(theirs), are_interleaved)
    return None if logs is None else _of_logarithms(logs)


def difference(
    ours: Mapping[int, float | None], theirs: Mapping[int, float | None], are_interleaved: bool = True
) -> Estimate | None:
    """The mean of ``ours`` less that of ``theirs``, with its t-interval.

    Args:
        ours, theirs: values by repeat.
        are_interleaved: the repeats of both were measured in turns. If both have the same repeats, each is then
            compared with its counterpart, which removes what slowed both. Otherwise they are compared as independent
            samples (Welch, "The generalization of Student's problem when several different population variances are
            involved", Biometrika 34, 1947).

    Returns:
        None where one has no value.
    """
    a, b = ({repeat: value for repeat, value in one.items() if value is not None} for one in (ours, theirs))
    if not a or not b:
        return None
    if are_interleaved and a.keys() == b.keys():
        return _around([a[repeat] - b[repeat] for repeat in a])
    return _welch(list(a.values()), list(b.values()))


def _of_logarithms(logs: Estimate, unit: float = 1.0) -> Estimate:
    def value_of(log: float) -> float:
        return unit * math.exp(log) if log < _LARGEST_LOG else math.exp(_LARGEST_LOG)

    return logs.mapped(value_of)


def _logarithms(values: Mapping[int, float | None]) -> dict[int, float | None]:
    return {repeat: math.log(value) for repeat, value in values.items() if value is not None and value > 0}


def _welch(a: Sequence[float], b: Sequence[float]) -> Estimate:
    difference = statistics.fmean(a) - statistics.fmean(b)
    median = statistics.median(a) - statistics.median(b)
    repeats = min(len(a), len(b))
    if repeats < FEWEST_REPEATS:
        return Estimate(difference, None, None, repeats, median)
    errors = [statistics.variance(one) / len(one) for one in (a, b)]
    spread = math.fsum(errors)
    if not spread:  # the degrees of freedom would be 0 / 0
        return Estimate(difference, difference, difference, repeats, median)
    degrees = spread**2 / sum(e**2 / (len(one) - 1) for e, one in zip(errors, (a, b), strict=True))
    half = t_quantile((1 + CONFIDENCE) / 2, degrees) * math.sqrt(spread)
    return Estimate(difference, difference - half, difference + half, repeats, median)


def efficiency(times_as_fast: Estimate, trainers: int, trainers_before: int) -> Estimate:
    """The ratio of two speeds over the ratio of their numbers of trainers: 1 is linear scaling."""
    return times_as_fast.mapped(lambda ratio: ratio * (trainers_before / trainers))


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at ``x`` by linear interpolation of points in ascending order; beyond them the first or last value."""
    right = bisect.bisect_left(points, x, key=lambda point: point[0])
    if right in (0, len(points)):
        return points[max(right - 1, 0)][1]
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def merged_steps(results: Iterable[CaseResult]) -> DurationHistogram:
    """The steps of all records in one histogram, without records that lack bins, mean or maximum."""
    merged = DurationHistogram()
    for one in results:
        if None in (one.step_ms.get("mean"), one.step_ms.get("max")):
            continue
        part = DurationHistogram()
        part.bins = dict(one.step_bins)
        part.count = sum(one.step_bins.values())
        part.total_s = (one.step_ms.get("mean") or 0.0) / 1e3 * part.count
        part.max_s = (one.step_ms.get("max") or 0.0) / 1e3
        merged.merge(part)
    return merged


def merged_counts(histograms: Iterable[Mapping[str, int]]) -> dict[int, int]:
    """The sum of several histograms, in ascending order of values."""
    merged = Counter[int]()
    for histogram in histograms:
        merged.update({int(value): count for value, count in histogram.items()})
    return dict(sorted(merged.items()))

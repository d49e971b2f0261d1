"""Intervals hold what they promise, and ratios see through a machine that drifts."""

import math
import random
import statistics

import pytest
from fake_results import result
from scipy import stats

from paramserver.metrics.records import DurationHistogram
from paramserver.tools.report.statistics import efficiency, estimate, merged_counts, merged_steps, ratio, t_quantile


@pytest.mark.parametrize("degrees", [1, 1.3, 2, 2.7, 3, 4, 5, 9.5, 14, 29, 60, 200, 5000])
@pytest.mark.parametrize("probability", [0.6, 0.9, 0.975, 0.995])
def test_quantiles_are_those_of_scipy(probability, degrees):
    assert t_quantile(probability, degrees) == pytest.approx(stats.t.ppf(probability, degrees), rel=1e-6)


@pytest.mark.parametrize("values", [[1e-45, 10.0, 1.0], [1e300, 1e-300, 1.0], [5e-324, 5e-324, 1.0]])
def test_an_interval_beyond_all_floats_has_an_end(values):
    found = estimate(values)
    assert 0 <= found.low <= found.value <= found.high < math.inf
    apart = ratio(dict(enumerate(values)), dict(enumerate(reversed(values))))
    assert 0 <= apart.low <= apart.value <= apart.high < math.inf


@pytest.mark.parametrize("count", [3, 5, 12])
def test_an_interval_is_that_of_scipy(count):
    generator = random.Random(count)
    values = [generator.gauss(1000, 20) for _ in range(count)]
    found = estimate(values)
    logs = [math.log(value) for value in values]
    low, high = map(math.exp, stats.t.interval(0.95, count - 1, statistics.fmean(logs), stats.sem(logs)))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.value == pytest.approx(statistics.geometric_mean(values))
    assert found.median == statistics.median(values)
    assert found.repeats == count
    assert found.relative_width == pytest.approx((high - low) / found.value)


def test_no_bound_of_what_is_above_0_is_below_it():
    """Student's t of three repeats reaches 4.3 standard errors: a bound of the values themselves would be -1600."""
    found = estimate([5398.0, 1420.0, 1520.0])
    assert 0 < found.low < 1420 < found.value < 5398 < found.high
    assert found.high / found.value == pytest.approx(found.value / found.low)
    other = estimate([2505.0, 2988.0, 2700.0])
    both = ratio({0: 5398.0, 1: 1420.0, 2: 1520.0}, {0: 2505.0, 1: 2988.0, 2: 2700.0})
    assert both.value == pytest.approx(found.value / other.value)


def test_of_what_may_be_0_the_interval_is_of_the_values():
    found = estimate([0.0, 1.0, 5.0])
    low, high = stats.t.interval(0.95, 2, 2.0, stats.sem([0.0, 1.0, 5.0]))
    assert (found.value, found.low, found.high) == pytest.approx((2.0, low, high))


def test_what_is_unknown_is_left_out_and_one_value_has_no_interval():
    assert estimate([]) is None
    assert estimate([None, None]) is None
    lone = estimate([None, 7.0])
    assert (lone.value, lone.low, lone.high, lone.repeats) == (7.0, None, None, 1)
    assert not lone.has_interval
    assert not lone.excludes(1000.0)
    assert lone.relative_width is None
    two = estimate([222.0, 102447.0])
    assert (two.low, two.high, two.repeats) == (None, None, 2), "it would reach from 0 to 10**20"


def test_an_interval_excludes_what_is_outside():
    found = estimate([9.0, 10.0, 11.0])
    assert found.excludes(found.low - 0.01)
    assert found.excludes(found.high + 0.01)
    assert not found.excludes(10.0)
    same = estimate([3.0, 3.0, 3.0])
    assert (same.low, same.high) == (3.0, 3.0)
    assert not same.excludes(3.0)


def test_intervals_hold_the_truth_nineteen_times_of_twenty():
    generator = random.Random(11)
    held = sum(not estimate([generator.gauss(50, 5) for _ in range(3)]).excludes(50) for _ in range(2000))
    assert 0.935 < held / 2000 < 0.965


def test_repeats_that_took_turns_are_compared_one_by_one():
    """The machine is three times as slow at one repeat: the cases differ by 2 % in each all the same."""
    drift = {0: 1.0, 1: 3.0, 2: 1.5, 3: 0.7}
    ours = {i: 102.0 * f * (1 + 0.001 * (-1) ** i) for i, f in drift.items()}
    theirs = {i: 100.0 * f for i, f in drift.items()}
    paired, apart = ratio(ours, theirs), ratio(ours, theirs, are_interleaved=False)
    assert paired.value == pytest.approx(1.02, rel=1e-3)
    assert paired.excludes(1)
    assert not apart.excludes(1)
    assert apart.value == pytest.approx(paired.value)


def test_a_ratio_is_the_same_read_from_either_side():
    a, b = {0: 3.0, 1: 4.0, 2: 5.0}, {0: 2.0, 1: 2.5, 2: 2.2}
    for interleaved in (True, False):
        over, under = ratio(a, b, interleaved), ratio(b, a, interleaved)
        assert over.value == pytest.approx(1 / under.value)
        assert over.low == pytest.approx(1 / under.high)


def test_independent_repeats_are_compared_as_by_welch():
    a, b = [100.0, 104.0, 99.0, 101.0], [90.0, 97.0, 85.0]
    found = ratio(dict(enumerate(a)), dict(enumerate(b)))  # not the same repeats
    welch = stats.ttest_ind([math.log(x) for x in a], [math.log(x) for x in b], equal_var=False)
    low, high = welch.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert found.repeats == 3


@pytest.mark.parametrize(
    ("a", "b", "has_value"),
    [
        ({0: 2.0}, {0: 1.0}, True),
        ({0: 2.0, 1: 2.0}, {0: 1.0}, True),
        ({0: 2.0, 1: 2.0}, {0: 1.0, 1: 1.0}, True),
        ({0: 0.0}, {0: 1.0}, False),
        ({}, {0: 1.0}, False),
        ({0: None}, {0: 1.0}, False),
    ],
)
def test_a_ratio_of_too_little_has_no_interval_or_no_value(a, b, has_value):
    found = ratio(a, b)
    assert (found is not None) == has_value
    if found is not None:
        assert found.value == pytest.approx(2.0)
        assert not found.has_interval


def test_repeats_without_any_spread():
    found = ratio({0: 2.0, 1: 2.0, 2: 2.0}, {1: 1.0, 2: 1.0, 3: 1.0})
    assert (found.low, found.high) == pytest.approx((2.0, 2.0))
    assert found.excludes(1)


def test_efficiency_is_growth_over_what_was_added():
    growth = ratio({0: 300.0, 1: 330.0, 2: 310.0}, {0: 100.0, 1: 100.0, 2: 100.0})
    share = efficiency(growth, 4, 1)
    assert share.value == pytest.approx(growth.value / 4)
    assert (share.low, share.high) == pytest.approx((growth.low / 4, growth.high / 4))
    assert efficiency(growth, 8, 4).value == pytest.approx(growth.value / 2)
    assert efficiency(ratio({0: 3.0}, {0: 1.0}), 4, 2).low is None


def test_steps_of_repeats_merge_to_the_quantiles_of_all():
    generator = random.Random(5)
    durations = [[generator.expovariate(1 / 0.01 / (i + 1)) for _ in range(300)] for i in range(3)]
    results = []
    for i, part in enumerate(durations):
        histogram = DurationHistogram()
        for duration in part:
            histogram.add(duration)
        results.append(result(repeat=i, step_bins=histogram.bins, step_ms=histogram.summary_ms()))
    merged = merged_steps(results)
    together = sorted(duration for part in durations for duration in part)
    assert merged.count == 900
    assert merged.total_s == pytest.approx(sum(together), rel=1e-3)
    assert merged.max_s == pytest.approx(together[-1], rel=1e-3)
    for q in (0.5, 0.9, 0.99):
        assert merged.quantile_s(q) == pytest.approx(together[int(q * 900)], rel=0.05)
    unknown = result(repeat=9, step_bins={100: 5}, step_ms={"mean": 1.0})
    assert merged_steps([*results, unknown]).count == 900


def test_counts_merge_in_the_order_of_their_values():
    assert list(merged_counts([{"10": 1, "2": 3}, {"2": 1, "0": 5}]).items()) == [(0, 5), (2, 4), (10, 1)]
    assert merged_counts([]) == {}

"""The staleness histogram against plain lists of all added values."""

import json
import math

import pytest
from hypothesis import given, settings, strategies as st

from paramserver.metrics.records import StalenessHistogram

ADDED = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=120)
NOTHING = {"mean": 0.0, "p95": 0, "max": 0, "histogram": {}}


def counted(added) -> StalenessHistogram:
    staleness = StalenessHistogram()
    for trainer_index, value in added:
        staleness.add(trainer_index, value)
    return staleness


def figures_of(values: list[int]) -> dict:
    """The same figures from the list of all values."""
    if not values:
        return NOTHING
    ranked = sorted(values)
    histogram = {str(value): ranked.count(value) for value in dict.fromkeys(ranked)}
    p95 = ranked[math.ceil(95 * len(ranked) / 100) - 1]
    return {"mean": sum(values) / len(values), "p95": p95, "max": ranked[-1], "histogram": histogram}


def figures_by_trainer(added):
    """Of each trainer that pushed."""
    pushed = {index: [value for i, value in added if i == index] for index in sorted({i for i, _ in added})}
    return [{"trainer": index, **figures_of(values)} for index, values in pushed.items()]


@settings(deadline=None, derandomize=True)
@given(ADDED)
def test_the_figures_are_those_of_the_list(added):
    staleness = counted(added)
    assert staleness.summary() == figures_of([value for _, value in added])
    assert list(staleness.summary()["histogram"]) == [str(v) for v in sorted({value for _, value in added})]
    assert staleness.by_trainer() == figures_by_trainer(added)


@pytest.mark.parametrize(("stale", "p95"), [(0, 0), (5, 0), (6, 9), (95, 9), (100, 9)])
def test_the_p95_is_the_smallest_that_95_percent_do_not_exceed(stale, p95):
    assert counted([(0, 0)] * (100 - stale) + [(1, 9)] * stale).summary()["p95"] == p95


@settings(deadline=None, derandomize=True)
@given(ADDED, ADDED)
def test_a_window_holds_what_was_added_since_the_last(one, two):
    staleness = counted(one)
    assert staleness.pop_window() == figures_of([value for _, value in one])
    for trainer_index, value in two:
        staleness.add(trainer_index, value)
    assert staleness.pop_window() == figures_of([value for _, value in two])
    assert staleness.pop_window() == NOTHING
    assert staleness.summary() == figures_of([value for _, value in one + two])


@settings(deadline=None, derandomize=True)
@given(ADDED, ADDED, ADDED)
def test_the_state_goes_on_after_json(before, replaced, after):
    staleness = counted(replaced)
    staleness.load_state_dict(json.loads(json.dumps(counted(before).state_dict())))
    for trainer_index, value in after:
        staleness.add(trainer_index, value)
    assert staleness.state_dict() == counted(before + after).state_dict()
    assert staleness.pop_window() == figures_of([value for _, value in before + after])
    assert staleness.by_trainer() == figures_by_trainer(before + after)

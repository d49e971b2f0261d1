"""A slow trainer takes fewer local steps, once each has been timed."""

import pytest

from paramserver.consistency import DynamicSteps


def timed(speeds, most=100, rounds=2):
    steps = DynamicSteps(most)
    for _ in range(rounds):
        for index, speed in enumerate(speeds):
            steps.add(index, most, most / speed)
    return steps


def test_all_steps_are_taken_until_each_trainer_has_two_rounds():
    steps = timed([10, 1], rounds=1)
    assert [steps.next_steps(index, {0, 1}) for index in (0, 1)] == [100, 100]
    steps.add(1, 100, 100)
    assert steps.next_steps(1, {0, 1}) == 100
    steps.add(0, 100, 10)
    assert [steps.next_steps(index, {0, 1}) for index in (0, 1)] == [100, 10]


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([1.0, 0.25], [100, 25]),
        ([1.0, 1e-6], [100, 1]),
        # The 90th percentile of ten speeds is the ninth: one fast trainer makes no other one slow.
        ([1.0] * 8 + [2.0, 50.0], [50] * 8 + [100, 100]),
    ],
)
def test_steps_are_in_proportion_to_the_speed(speeds, expected):
    steps = timed(speeds)
    assert [steps.next_steps(index, range(len(speeds))) for index in range(len(speeds))] == expected


def test_only_recent_rounds_count_and_a_lost_trainer_begins_anew():
    steps = timed([1.0, 0.1])
    for _ in range(4):
        steps.add(1, 100, 100)
    assert steps.next_steps(1, {0, 1}) == 100
    for _ in range(4):
        steps.add(1, 10, 100)
    assert steps.next_steps(1, {0, 1}) == 10
    steps.remove(1)
    assert steps.next_steps(1, {0, 1}) == 100
    assert steps.next_steps(0, {0}) == 100, "of those that take part"

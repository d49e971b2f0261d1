"""How often, and how soon, a rank starts again."""

import pytest

from paramserver.runtime.restarts import RestartPolicy

LONG_S, SHORT_S = 1000.0, 2.0


def delays(lives, max_restarts=100, rank=1):
    policy = RestartPolicy(max_restarts)
    return [policy.next_delay(rank, lived_s) for lived_s in lives]


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_a_rank_starts_again_as_often_as_is_allowed(allowed):
    policy = RestartPolicy(allowed)
    restarts = 0
    while policy.allows(1):
        assert policy.next_delay(1, LONG_S) == (0.0, restarts + 1)
        restarts += 1
        assert restarts <= allowed
    assert restarts == allowed


def test_each_rank_counts_for_itself():
    policy = RestartPolicy(1)
    policy.next_delay(1, LONG_S)
    assert not policy.allows(1)
    assert policy.allows(2)
    assert policy.next_delay(2, SHORT_S) == (0.0, 1)


def test_a_rank_that_lived_long_starts_again_at_once():
    assert delays([LONG_S] * 4) == [(0.0, number) for number in (1, 2, 3, 4)]


def test_the_first_restart_is_at_once_and_the_delay_doubles_with_each_early_death_up_to_a_limit():
    found = [delay for delay, _ in delays([SHORT_S] * 9)]
    assert found == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_long_life_ends_a_row_of_early_deaths():
    found = [delay for delay, _ in delays([SHORT_S, SHORT_S, SHORT_S, LONG_S, SHORT_S, SHORT_S])]
    assert found == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]

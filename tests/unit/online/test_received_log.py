"""Which samples were received: the log, what was seen, and both after a checkpoint."""

import threading
import time

import numpy as np
import pytest
import torch

from paramserver.errors import CheckpointError
from paramserver.online.received_log import ReceivedLog


def logged(keys):
    made = ReceivedLog()
    for key in keys:
        made.mark_received(*key)
    made.extend(keys)
    return made


def drawn(seed, count):
    """Different keys in a random order, of far steps too."""
    rng = np.random.default_rng(seed)
    keys = {(int(a), int(b)) for a, b in rng.integers(0, [20, 300], (count, 2))}
    keys |= {(int(a), int(b)) for a, b in rng.integers(0, [2**62, 2**62], (count // 4, 2))}
    keys = sorted(keys)
    rng.shuffle(keys)
    return [tuple(int(n) for n in key) for key in keys]


@pytest.mark.parametrize("seed", range(5))
def test_it_contains_what_was_received_and_nothing_else(seed):
    known, keys, others = ReceivedLog(), drawn(seed, 400), drawn(seed + 100, 400)
    for key in keys:
        assert not known.contains(*key)
        known.mark_received(*key)
        assert known.contains(*key)
    assert [known.contains(*key) for key in others] == [key in set(keys) for key in others]
    assert len(known) == 0
    assert known.counts() == {}


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_the_first_step_that_is_missing(stride):
    known, rng = ReceivedLog(), np.random.default_rng(stride)
    first = stride - 1
    steps = [int(step) for step in rng.permutation(200)]
    for number, step in enumerate(steps):
        known.mark_received(5, step)
        if number % 7 == 0:
            received = steps[: number + 1]
            expected = next(step for step in range(first, 1000, stride) if step not in received)
            assert known.first_missing(5, first, stride) == expected
    assert known.first_missing(5, first, stride) >= 200
    assert known.first_missing(6, first, stride) == first


def test_neighbours_are_not_mistaken_for_each_other():
    known = ReceivedLog()
    for step in (0, 63, 64, 127, 2**40):
        known.mark_received(3, step)
    assert [step for step in (0, 1, 62, 63, 64, 65, 126, 127, 128, 2**40, 2**40 + 1) if known.contains(3, step)] == [
        0,
        63,
        64,
        127,
        2**40,
    ]
    assert not known.contains(4, 0)


def test_the_log_has_the_order_of_the_samples():
    keys = drawn(7, 200)
    made = logged(keys)
    assert [tuple(row) for row in made.keys().tolist()] == keys
    assert [tuple(row) for row in made.keys(10).tolist()] == keys[:10]
    assert sum(made.counts().values()) == len(made) == len(keys)
    assert made.counts(3) == {key[0]: sum(other[0] == key[0] for other in keys[:3]) for key in keys[:3]}


@pytest.mark.parametrize("position", [0, 1, 57, 200])
def test_truncate_drops_what_is_not_in_the_buffer(position):
    keys = drawn(8, 250)
    made = logged(keys)
    made.mark_received(77, 5)
    fresh = ReceivedLog()
    fresh.load_state_dict(made.state_dict())
    fresh.truncate(position)
    assert [key for key in [*keys, (77, 5)] if fresh.contains(*key)] == keys[:position]
    assert len(fresh) == position


def test_a_state_up_to_a_position_is_the_state_at_that_time():
    keys = drawn(9, 100)
    whole, early = logged(keys), logged(keys[:40])
    one, other = whole.state_dict(40), early.state_dict()
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_state_is_a_copy():
    keys = drawn(1, 100)
    made, fresh = logged(keys), ReceivedLog()
    state = made.state_dict()
    made.extend([(1, 1)])
    # As it comes out of a checkpoint.
    fresh.load_state_dict({name: torch.as_tensor(value) for name, value in state.items()})
    assert [tuple(row) for row in fresh.keys().tolist()] == keys


def test_a_position_beyond_the_log_is_refused():
    made = logged([(0, 0), (0, 1)])
    with pytest.raises(CheckpointError, match=r"position \(3\) must be at most the 2 samples"):
        made.truncate(3)


def test_all_trainers_inherit_what_any_trainer_had_put():
    old = [logged([(0, 0), (1, 1), (0, 2)]), logged([(0, 1), (1, 0), (5, 5)])]
    states, held = [one.state_dict() for one in old], [(1, 1), (0, 1)]
    made = ReceivedLog()
    made.reshard(states, [3, 2], held, [*held, (1, 0)])
    assert made.inherited_counts() == {0: 2}
    assert not made.contains(5, 5)  # handed over, and not put
    assert all(made.contains(*key) for key in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)])
    # What is held counts as the first positions, and what another buffer holds there.
    assert (len(made), made.num_held, made.counts()) == (2, 2, {1: 1, 0: 1})
    made.truncate(2)
    made.extend([(1, 2)])
    assert made.counts() == {1: 2, 0: 1}
    assert (made.num_inherited_for(0, 2), made.num_inherited_for(1, 2)) == (2, 0)
    # Of the five that trainer i of two would receive, it has two, and receives no other again.
    assert (made.num_unplanned(0, 2), made.num_unplanned(1, 2)) == (2 - 3, 2 - 2)
    # Its trainer dies after (1, 1) and (1, 2) were applied: the other one that it was given is lost.
    after = ReceivedLog()
    after.load_state_dict(made.state_dict(2))
    after.restart([(1, 2), (1, 1)])
    assert (after.keys().tolist(), after.num_held, after.lost_counts()) == ([[1, 1], [1, 2]], 1, {0: 1})
    assert [after.contains(*key) for key in [(0, 1), (1, 0)]] == [False, True]
    assert (after.num_unplanned(0, 2), after.num_unplanned(1, 2)) == (1 - 3, 1 - 1)
    again = ReceivedLog()
    again.load_state_dict(after.state_dict())
    assert again.lost_counts() == {0: 1}
    again.mark_received(0, 1)
    assert again.lost_counts() == {0: 0}


def test_a_state_that_counts_what_buffers_hold_as_inherited_is_refused():
    state = {"inherited": [[0, 0], [0, 1]], "log": [[0, 1]], "held": 1}
    with pytest.raises(CheckpointError, match=r"the 2 samples .* resume it with another number of trainers"):
        ReceivedLog().load_state_dict(state)
    made = ReceivedLog()
    made.reshard([state], [1], [], [])
    assert made.inherited_counts() == {0: 2}
    made.load_state_dict({"inherited": [], "log": [[0, 1]], "held": 0})
    assert made.counts() == {0: 1}


def test_inherited_samples_are_inherited_again():
    first, second = ReceivedLog(), ReceivedLog()
    first.reshard([logged([(0, 0), (0, 1)]).state_dict()], [2], [(0, 1)], [(0, 1)])
    first.extend([(0, 2)])
    restored = ReceivedLog()
    restored.load_state_dict(first.state_dict())
    restored.truncate(2)
    assert (restored.counts(), restored.inherited_counts(), restored.num_held) == ({0: 2}, {0: 1}, 1)
    second.reshard([restored.state_dict(), ReceivedLog().state_dict()], [2, 0], [], [])
    assert second.inherited_counts() == {0: 3}
    assert second.counts() == {}


def test_states_are_consistent_while_samples_are_added():
    made, steps = ReceivedLog(), 50_000

    def feed():
        # No more than these: the lock is not fair, so the other thread might read few states while the log grows.
        for step in range(steps):
            made.extend([(step, -step), (step, -step)])

    thread = threading.Thread(target=feed)
    thread.start()
    log = made.state_dict()["log"]
    while len(log) < 2 * steps:
        assert len(log) % 2 == 0
        assert np.array_equal(log[:, 0], -log[:, 1])
        log = made.state_dict()["log"]
    thread.join(10)
    assert np.array_equal(log[:, 0], np.repeat(np.arange(steps), 2))


def test_a_sample_costs_the_same_however_many_there_are():
    """A hundred times as many take far less than a thousand times as long: no copy of all for each."""

    def seconds(count):
        made, began = ReceivedLog(), time.perf_counter()
        for step in range(count):
            made.mark_received(0, step)
            made.extend([(0, step)])
        return time.perf_counter() - began

    assert seconds(100_000) < 1000 * max(seconds(1000), 1e-4)

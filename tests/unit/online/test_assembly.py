"""Parts of samples become whole ones."""

import random

import numpy as np
import pytest

from paramserver.online.validator import PartOutcome, SampleAssembly, SamplePart, concatenate_parts


def part(value, rows=2, session=None):
    return SamplePart((np.full((rows, 3), value, np.float32), np.full((rows,), value, np.int64)), session)


def test_the_last_part_returns_all_parts_ordered_by_member():
    assembly = SampleAssembly(3, 4)
    assembly.start_attempt(7, 0)
    assert assembly.add((7, 0), 0, 2, part(2, session="c")) is PartOutcome.WAITING
    assert assembly.add((7, 0), 0, 0, part(0, session="a")) is PartOutcome.WAITING
    assert len(assembly) == 1
    parts = assembly.add((7, 0), 0, 1, part(1, rows=4, session="b"))
    assert [one.session for one in parts] == ["a", "b", "c"]
    first, second = concatenate_parts(parts)
    assert first.shape == (8, 3)
    assert second.tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert first[:, 0].tolist() == second.tolist()
    assert len(assembly) == 0


def test_a_part_that_came_before_is_a_duplicate():
    assembly = SampleAssembly(2, 4)
    assembly.start_attempt(0, 0)
    assembly.add((0, 3), 0, 0, part(1, session="first"))
    assert assembly.add((0, 3), 0, 0, part(2, session="second")) is PartOutcome.DUPLICATE
    assert [one.session for one in assembly.add((0, 3), 0, 1, part(3))] == ["first", None]


def test_a_new_attempt_drops_what_the_older_left():
    assembly = SampleAssembly(2, 4)
    assembly.start_attempt(0, 0)
    assembly.start_attempt(1, 0)
    assembly.add((0, 0), 0, 0, part(1, session="old"))
    assembly.add((0, 1), 0, 1, part(1, session="old too"))
    assembly.add((1, 0), 0, 0, part(1, session="another's"))
    assert assembly.start_attempt(0, 0) == []  # the other member of the same attempt
    assert sorted(one.session for one in assembly.start_attempt(0, 1)) == ["old", "old too"]
    assert len(assembly) == 1
    assert assembly.add((0, 0), 0, 1, part(1)) is PartOutcome.STALE
    assert assembly.start_attempt(0, 0) == []
    assert assembly.add((0, 0), 0, 1, part(1)) is PartOutcome.STALE  # an old one that opens late changes nothing
    assert assembly.add((0, 0), 1, 1, part(5, session="new")) is PartOutcome.WAITING
    assert [one.session for one in assembly.add((0, 0), 1, 0, part(6, session="newer"))] == ["newer", "new"]


def test_parts_of_a_sample_that_was_given_up_are_dropped_in_that_attempt():
    assembly = SampleAssembly(2, 4)
    assembly.start_attempt(0, 0)
    assembly.add((0, 3), 0, 0, part(1, session="waits"))
    assert assembly.num_parts() == {0: 1}
    assert [one.session for one in assembly.give_up(0, 0, [3, 5])] == ["waits"]
    assert (len(assembly), assembly.num_parts()) == (0, {})
    assert [assembly.add((0, step), 0, 1, part(1)) for step in (3, 5)] == [PartOutcome.GIVEN_UP] * 2
    assert assembly.give_up(0, 7, [4]) == []  # of another attempt
    assert assembly.add((0, 4), 0, 0, part(1)) is PartOutcome.WAITING
    assembly.start_attempt(0, 1)
    assert assembly.add((0, 3), 1, 0, part(1)) is PartOutcome.WAITING


def test_unfinished_samples_are_limited():
    assembly = SampleAssembly(2, 3)
    for simulation in (0, 1):
        assembly.start_attempt(simulation, 0)
        assert [assembly.add((simulation, step), 0, 0, part(step)) for step in range(3)] == [PartOutcome.WAITING] * 3
        assert assembly.add((simulation, 3), 0, 0, part(3)) is PartOutcome.FULL
    assert len(assembly) == 6
    assert isinstance(assembly.add((0, 1), 0, 1, part(1)), list)
    assert assembly.add((0, 3), 0, 0, part(3)) is PartOutcome.WAITING


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_parts_gives_each_sample_once(seed):
    draw = random.Random(seed)
    members, steps, simulations = draw.randint(2, 5), 12, 3
    assembly, latest = SampleAssembly(members, steps), [0] * simulations
    for simulation in range(simulations):
        assembly.start_attempt(simulation, 0)
    missing = [(s, t, m, 0) for s in range(simulations) for t in range(steps) for m in range(members)]
    draw.shuffle(missing)
    whole = set()
    while missing:
        if draw.random() < 0.02:
            simulation = draw.randrange(simulations)
            latest[simulation] += 1
            dropped = assembly.start_attempt(simulation, latest[simulation])
            assert all(one.session[0] == simulation for one in dropped)
            again = [(simulation, t, m, latest[simulation]) for t in range(steps) for m in range(members)]
            missing = [one for one in missing if one[0] != simulation] + again
            draw.shuffle(missing)
            whole = {key for key in whole if key[0] != simulation}
        s, t, m, attempt = missing.pop()
        result = assembly.add((s, t), attempt, m, part(m, session=(s, t, m, attempt)))
        if isinstance(result, list):
            assert [one.session for one in result] == [(s, t, i, attempt) for i in range(members)]
            assert (s, t) not in whole
            whole.add((s, t))
    assert whole == {(s, t) for s in range(simulations) for t in range(steps)}
    assert len(assembly) == 0

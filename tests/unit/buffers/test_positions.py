"""AppliedPositions against a plain Counter of what was applied."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from paramserver.buffers.positions import AppliedPositions


def expected(applied: Counter, due: int) -> tuple[int, dict[int, int]]:
    """Low-water mark and the dictionary above it."""
    low = next(position for position in range(len(applied) + 1) if applied[position] < due)
    return low, {position: times for position, times in applied.items() if times and position >= low}


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("due", [1, 2, 3])
def test_it_agrees_with_a_counter(due, seed):
    rng = random.Random(f"{seed} {due}")
    servings = [position for position in range(200) for _ in range(due)]
    # Served out of order, as from a buffer of 20.
    servings.sort(key=lambda position: position + rng.randrange(20))
    positions, model = AppliedPositions(), Counter()
    while servings:
        batch, servings = servings[: (n := rng.randrange(1, 10))], servings[n:]
        model.update(batch)
        positions.add(np.array(batch) if rng.random() < 0.5 else batch, due)
        assert (positions.low, positions.above) == expected(model, due)
        assert positions.count == model.total()
        for position in range(200):
            assert positions.times(position) == (None if position < positions.low else model[position])
        if rng.random() < 0.1:
            other = AppliedPositions(5, {7: 1})
            other.load_state_dict(json.loads(json.dumps(positions.state_dict())))
            assert other == positions
            positions = other
    assert (positions.low, positions.above) == (200, {})


@pytest.mark.parametrize("due", [1, 2])
@pytest.mark.parametrize("position", [1, 4])
def test_one_serving_too_many_is_refused_by_position(due, position):
    positions = AppliedPositions()
    positions.add([*range(3), 4] * due, due)
    assert positions.low == 3
    with pytest.raises(ValueError, match=rf"^position \({position}\) must be applied at most {due} times"):
        positions.add([position], due)


def test_a_reservoir_completes_a_position_with_the_first_serving():
    positions = AppliedPositions()
    positions.add([2, 0, 2, 2], None)
    assert (positions.low, positions.above, positions.count) == (1, {2: 1}, 4)
    positions.add([0, 1, 2], None)
    assert (positions.low, positions.above, positions.count) == (3, {}, 7)


def test_an_account_does_not_share_its_dictionary():
    above = {3: 1}
    positions = AppliedPositions(1, above)
    positions.add([1, 2], 1)
    assert above == {3: 1}
    assert positions.low == 4

"""AppliedPositions against a plain Counter of what was applied, and the positions that buffers keep."""

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch

from paramserver.buffers import Buffer, make_buffer
from paramserver.buffers.positions import AppliedPositions
from paramserver.buffers.reshard import reshard_buffers
from paramserver.errors import BufferClosed, BufferTimeout

KINDS = {"fifo": {"pseudo_epochs": 3}, "firo": {"pseudo_epochs": 2}, "reservoir": {}}


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
            for state in (positions.packed_state_dict(), json.loads(json.dumps(positions.state_dict()))):
                other.load_state_dict(state)
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


# The positions of a buffer. Keys are positions here, so that both can be compared.


def make(kind: str, **options) -> Buffer:
    return make_buffer(kind, capacity=12, seed=3, **{**KINDS[kind], **options})


def play(buffer: Buffer, start: int, stop: int, expected: AppliedPositions) -> None:
    """Put keys ``start`` to ``stop`` and get batches in between; check the positions of each."""
    rng = random.Random(start)
    for key in range(start, stop):
        while True:
            try:
                buffer.put(float(key), key, timeout=0)
                break
            except BufferTimeout:
                get(buffer, 5, expected)
        if len(buffer) >= 4 and rng.random() < 0.4:
            get(buffer, 4, expected)


def get(buffer: Buffer, n: int, expected: AppliedPositions) -> None:
    batch = buffer.get_batch(n, timeout=0)
    assert batch.positions.dtype == np.int64
    assert batch.positions.tolist() == batch.keys
    expected.add(batch.positions, buffer.times_due)
    assert buffer.applied() == expected


@pytest.mark.parametrize("options", [{}, {"max_bytes": 80}], ids=["rows", "bytes"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_names_the_positions_of_its_samples(kind, options):
    buffer, expected = make(kind, **options), AppliedPositions()
    play(buffer, 0, 100, expected)
    other = make(kind, **options)
    other.load_state_dict(buffer.state_dict())
    assert other.applied() == expected
    play(other, 100, 150, expected)
    other.finish()
    while not other.exhausted:
        get(other, 5, expected)
    assert (expected.low, expected.above) == (150, {})


@pytest.mark.parametrize("kind", KINDS)
def test_samples_that_another_process_served_are_counted(kind):
    served = [0, None, 1, 2, 3, 0]
    due = make(kind).times_due or 1
    held = [i for i, times in enumerate(served) if times is not None and times < due]
    buffer = make(kind, max_bytes=64)
    buffer.skip(4)
    assert buffer.put_many([float(i) for i in range(4, 10)], range(4, 10), last=True, mark="m", served=served) == 6
    info = buffer.info()
    assert (info.puts, info.population) == (10, len(held))
    assert info.unseen == served.count(0)
    assert info.gets == 4 * due + sum(min(due if times is None else times, due) for times in served)
    assert sum(info.seen_histogram.values()) == 10
    assert info.evicted == (10 - len(held) if kind == "reservoir" else 0)
    drained = Counter()
    while not buffer.exhausted:
        drained.update(buffer.get_batch(3, timeout=0).positions.tolist())
    assert drained == {4 + i: due - served[i] for i in held}
    assert buffer.applied().low == 10
    assert buffer.info().bytes == 0
    assert buffer.info().seen_histogram == {due: 10}


def test_skipped_samples_need_no_room_and_an_open_buffer():
    buffer = make("fifo")
    buffer.put_many(range(12))
    buffer.put_many(range(30), served=[None] * 30, timeout=0)
    assert buffer.info().puts == 42
    buffer.finish()
    with pytest.raises(BufferClosed, match="must not be finished"):
        buffer.skip(1)
    buffer.close()
    with pytest.raises(BufferClosed, match="0 of 1 samples were put"):
        buffer.put_many([1], served=[None])


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_sample_finishes_the_buffer_also_if_it_is_skipped(kind):
    buffer = make(kind)
    buffer.put_many([1.0, 2.0], "ab", served=[0, None], last=True)
    assert buffer.finished
    assert buffer.get_batch(1, timeout=0).keys == ["a"]


def test_held_samples_count_as_the_first_positions_of_other_trainers():
    buffers = [make("firo") for _ in range(3)]
    for buffer in buffers:
        play(buffer, 0, 50, AppliedPositions())
    states, *_ = reshard_buffers([buffer.state_dict() for buffer in buffers], 4, capacity=12, entropy=(0, 1))
    assert sum(len(state["keys"]) for state in states) >= 8
    for state in states:
        other = make("firo")
        other.load_state_dict(state)
        held = len(other)
        assert other.applied().low == 0
        assert all(position < held for position in other.applied().above)
        other.put(1.0, "next")
        other.finish()
        positions = {}
        while not other.exhausted:
            batch = other.get_batch(4)
            positions.update(zip(batch.keys, batch.positions.tolist(), strict=True))
        assert positions.pop("next") == held
        assert set(positions.values()) == set(range(held))


@pytest.mark.parametrize("seed", range(5))
def test_keys_are_a_set_that_a_message_and_a_checkpoint_hold(seed, tmp_path):
    rng = random.Random(seed)
    applied, model = AppliedPositions(), set()
    for _ in range(50):
        batch = [(rng.randrange(3), rng.randrange(200)) for _ in range(8)]
        applied.add_keys(batch)
        model.update(batch)
    assert list(applied.keys) == sorted(model)
    assert all(((i, step) in applied.keys) == ((i, step) in model) for i in range(4) for step in range(210))
    applied.add_keys([(7, step) for step in range(64)])
    torch.save(applied.packed_state_dict(), tmp_path / "state.pt")
    for state in (
        json.loads(json.dumps(applied.state_dict())),
        torch.load(tmp_path / "state.pt", weights_only=True),
    ):
        other = AppliedPositions()
        other.load_state_dict(state)
        assert other == applied

"""Checkpoints of buffers: a loaded buffer continues with the same draws."""

import io
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import Tensor

from paramserver.buffers import Buffer, make_buffer
from paramserver.buffers.sample_tree import pack_keys, unpack_keys
from paramserver.errors import BufferTimeout, CheckpointError, UnsupportedConfiguration

KINDS = ("fifo", "firo", "reservoir")
OPTIONS = {
    "fifo": {"pseudo_epochs": 2, "watermark": 5},
    "firo": {"pseudo_epochs": 3, "watermark": 5},
    "reservoir": {"min_new_per_batch": 1, "watermark": 5},
}
Point = namedtuple("Point", ["x", "y"])


def make(kind: str, seed: int = 0) -> Buffer:
    return make_buffer(kind, capacity=20, seed=seed, **OPTIONS[kind])


def columns(key: int):
    return {
        "x": np.full(3, key, np.float32),
        "y": (torch.tensor(key), key),
        "point": Point(np.float32(key), bool(key % 2)),
    }


def objects(key: int):
    return {
        "x": np.full(key % 4, key),
        "name": f"sample {key}",
        "rest": [None, b"b", Point(np.int8(3), 1 + 2j), {1: 2.5}],
    }


def moved(key: int):
    return columns(key) if key < 10 else objects(key)


def play(buffer: Buffer, sample, start: int, stop: int, seed: int) -> list:
    """Put and get in a random order; return what was served and which puts found no room."""
    rng = np.random.default_rng(seed)
    seen = []
    for key in range(start, stop):
        try:
            buffer.put(sample(key), (0, key), timeout=0)
        except BufferTimeout:
            seen.append(("full", key))
        if rng.random() < 0.6:
            n = int(rng.integers(1, 6))
            if buffer.wait_ready(n, timeout=0):
                batch = buffer.get_batch(n, timeout=0)
                seen.append((batch.keys, batch.new, [str(s) for s in batch.samples], str(batch.stacked)))
    return seen


def drain(buffer: Buffer) -> list:
    buffer.finish()
    seen = []
    while not buffer.exhausted:
        seen.append(buffer.get_batch(4, timeout=0).keys)
    return seen


def through_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def counts(buffer: Buffer) -> dict:
    return {name: value for name, value in vars(buffer.info()).items() if not name.endswith("_s")}


@pytest.mark.parametrize("kept", [True, False], ids=["samples", "keys"])
@pytest.mark.parametrize("sample", [columns, objects, moved], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_draws_are_the_same(kind, sample, kept):
    buffer = make(kind, seed=7)
    play(buffer, sample, 0, 40, seed=1)
    state = through_file(buffer.state_dict(samples=kept))
    other = make(kind, seed=8)
    other.load_state_dict(state, fetch=None if kept else lambda key: sample(key[1]))
    assert counts(other) == counts(buffer)
    assert play(other, sample, 40, 80, seed=2) == play(buffer, sample, 40, 80, seed=2)
    assert drain(other) == drain(buffer)
    assert counts(other) == counts(buffer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_does_not_change_with_the_buffer(kind):
    buffer = make(kind)
    play(buffer, columns, 0, 12, seed=1)
    state = buffer.state_dict()
    before = str(state)
    play(buffer, columns, 12, 40, seed=2)
    assert str(state) == before
    first, second = make(kind), make(kind)
    first.load_state_dict(state)
    second.load_state_dict(through_file(state))
    assert play(first, columns, 12, 40, seed=3) == play(second, columns, 12, 40, seed=3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_buffer_is_restored_as_finished(kind):
    buffer = make(kind, seed=2)
    play(buffer, columns, 0, 12, seed=1)
    buffer.finish()
    buffer.get_batch(3, timeout=0)
    state = through_file(buffer.state_dict())
    other = make(kind)
    other.load_state_dict(state)
    assert other.finished
    assert drain(other) == drain(buffer)
    state["finished"] = False
    more = make(kind)
    more.load_state_dict(state)
    more.put(columns(50), 50, timeout=0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_and_an_unused_buffer_are_restored(kind):
    buffer, other = make(kind, seed=3), make(kind, seed=4)
    other.load_state_dict(through_file(buffer.state_dict()))
    assert play(other, columns, 0, 30, seed=5) == play(buffer, columns, 0, 30, seed=5)
    drain(buffer)
    other.load_state_dict(through_file(buffer.state_dict()))
    assert other.exhausted
    assert counts(other) == counts(buffer)


def test_a_restored_fifo_waits_for_the_watermark_only_before_its_first_get():
    buffer, other = make("fifo"), make("fifo")
    buffer.put_many([0.0] * 5, keys=range(5))
    other.load_state_dict(buffer.state_dict())
    assert other.wait_ready(1, timeout=0)
    for _ in range(2):
        buffer.get_batch(4)
    other.load_state_dict(buffer.state_dict())
    assert len(other) == 2
    assert other.wait_ready(2, timeout=0)


def test_the_number_of_puts_agrees_with_the_content():
    buffer = make("fifo")
    for key in range(15):
        buffer.put(columns(key), key, timeout=0)
        state = buffer.state_dict(samples=False)
        assert state["counters"]["puts"] == key + 1 == len(state["keys"])
        assert state["samples"] is None


def test_a_state_owns_its_memory_and_stores_no_more_than_the_samples():
    big = torch.zeros(10**6)
    buffer = make_buffer("fifo", capacity=2)
    array = np.zeros(3)
    buffer.put(("text", big[:2], array))
    state = buffer.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    assert len(file.getvalue()) < 20_000
    big += 1
    array += 1
    other = make_buffer("fifo", capacity=2)
    other.load_state_dict(state)
    text, tensor, values = other.get()
    assert (text, tensor.tolist(), values.tolist()) == ("text", [0, 0], [0, 0, 0])


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_samples_are_copied_to_allocated_memory(shape, dtype):
    blocks = []

    def allocate(size: int) -> np.ndarray:
        blocks.append(np.empty(size, np.uint8))
        return blocks[-1]

    buffer, other = (make_buffer("fifo", capacity=4) for _ in range(2))
    samples = [(torch.full(shape, i).to(dtype), i) for i in range(3)]
    buffer.put_many(samples)
    other.load_state_dict(buffer.state_dict(allocate=allocate))
    assert [block.nbytes for block in blocks] == [3 * samples[0][0].nbytes, 24]
    assert str(other.get_batch(3).samples) == str(samples)


def test_every_kind_of_leaf_is_restored():
    samples = [
        (np.array(["a", "bc"]), np.arange(3, dtype=">i4"), np.datetime64("2020-01-02"), np.array([], "f4")),
        [np.longdouble(1.5), np.array(2.0), True, 3, 2**70, -1.5, None, b"x", "y", ()],
        {"a": {2: torch.ones(1, dtype=torch.bfloat16)}, (1, "b"): np.uint64(2**63)},
    ]
    buffer, other = (make_buffer("fifo", capacity=3) for _ in range(2))
    buffer.put_many(samples)
    other.load_state_dict(through_file(buffer.state_dict()))
    for sample, loaded in zip(samples, other.get_batch(3).samples, strict=True):
        assert repr(loaded) == repr(sample)
        assert [type(part) for part in loaded] == [type(part) for part in sample]


def test_a_named_tuple_is_restored_as_its_class_or_one_with_its_fields():
    local = namedtuple("local", ["a", "b"])
    for kind in (Point, local):
        buffer, other = (make_buffer("fifo", capacity=2) for _ in range(2))
        buffer.put(kind(1, "x"))
        other.load_state_dict(through_file(buffer.state_dict()))
        loaded = other.get()
        assert loaded == kind(1, "x")
        assert loaded._fields == kind._fields
        assert (type(loaded) is kind) == (kind is Point)


def test_numpy_keys_become_plain_numbers():
    buffer = make_buffer("fifo", capacity=4)
    buffer.put_many([1.0, 2.0], keys=[np.int64(5), (np.int32(1), "a")])
    assert through_file(buffer.state_dict())["keys"] == [5, (1, "a")]


# refusals


class Thing:
    pass


@pytest.mark.parametrize(
    ("sample", "name"),
    [
        ((Thing(), 1), "Thing"),
        ({3}, "set"),
        ([np.array([Thing()])], "ndarray"),
        (np.zeros(2, [("a", "f4")]), "ndarray"),
        (np.ma.masked_array([1.0]), "MaskedArray"),
    ],
    ids=["object", "set", "object array", "structured", "masked"],
)
def test_the_type_that_cannot_be_stored_is_named(sample, name):
    buffer = make_buffer("fifo", capacity=2)
    buffer.put(sample, 0)
    with pytest.raises(UnsupportedConfiguration, match=rf"part of a sample \(type \S*{name}\) must"):
        buffer.state_dict()
    assert buffer.state_dict(samples=False)["keys"] == [0]


def test_a_key_that_cannot_be_stored_is_named():
    buffer = make_buffer("fifo", capacity=2)
    buffer.put(1.0, Thing())
    with pytest.raises(UnsupportedConfiguration, match=r"a key \(type \S*Thing\) must"):
        buffer.state_dict()


def test_keys_only_needs_keys():
    buffer = make_buffer("fifo", capacity=2)
    buffer.put(1.0)
    with pytest.raises(UnsupportedConfiguration, match=r"key \(None\) must"):
        buffer.state_dict(samples=False)


def test_a_refused_checkpoint_changes_nothing():
    buffer = make_buffer("firo", capacity=8, pseudo_epochs=2)
    buffer.put_many([np.zeros(4)] * 6, keys=range(6))
    state, keys = buffer.state_dict(), buffer.state_dict(samples=False)
    cases = [
        (make_buffer("fifo", capacity=8), state, r"kind \(fifo\) must be the checkpoint's, firo"),
        (make_buffer("firo", capacity=5, pseudo_epochs=2), state, r"capacity \(5\) must hold the 6 samples"),
        (make_buffer("firo", capacity=8), state, r"pseudo_epochs \(1\) must be 2"),
        (make_buffer("firo", capacity=8, pseudo_epochs=2, max_bytes=191), state, r"max_bytes \(191\) must hold the 6"),
        (make_buffer("firo", capacity=8, pseudo_epochs=2), keys, r"fetch \(None\) must be given"),
    ]
    for other, given, message in cases:
        with pytest.raises(CheckpointError, match=message):
            other.load_state_dict(given)
        assert len(other) == 0
    tight = make_buffer("firo", capacity=8, pseudo_epochs=2, max_bytes=191)
    with pytest.raises(CheckpointError, match=r"max_bytes \(191\) must hold the 6"):
        tight.load_state_dict(keys, fetch=lambda key: np.zeros(4))


@pytest.mark.parametrize(
    ("keys", "packed"),
    [
        ([3, 2**62, -1], Tensor),
        ([(0, 1), (5, 2)], Tensor),
        ([(7,), (8,)], Tensor),
        ([(0, 1), (5, 2**64)], list),
        ([(0, 1), (5,)], list),
        ([(0, True), (5, 2)], list),
        ([True, 2], list),
        ([2, (0, 1)], list),
        ([(), ()], list),
        (["a", "b"], list),
        ([], list),
    ],
    ids=str,
)
def test_packed_keys_return_with_their_types(keys, packed):
    stored = through_file(pack_keys(keys))
    assert isinstance(stored, packed)
    assert repr(unpack_keys(stored)) == repr(keys)

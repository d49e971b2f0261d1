"""Storage of samples: columns or objects, the move from one to the other, copies, sizes, and batches."""

from collections import namedtuple
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import default_collate

from paramserver.buffers import Fifo, make_buffer
from paramserver.buffers.storage import StackedSamples, join_states, stack_samples, stored_samples
from paramserver.errors import BufferTimeout

Pair = namedtuple("Pair", ["left", "right"])


class Typed(NamedTuple):
    image: torch.Tensor
    label: int


def same(one, other) -> bool:
    """Equal in structure, types, dtypes, shapes and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def batch_of(samples, kind="fifo", **options):
    """Put these samples into a new buffer and get them as one batch."""
    buffer = make_buffer(kind, capacity=len(samples), **options)
    buffer.put_many(samples, keys=range(len(samples)), timeout=0)
    return buffer.get_batch(len(samples), timeout=0)


# columns

TENSOR_DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.uint16]
TENSOR_DTYPES += [torch.bool, torch.complex64, torch.float8_e4m3fn]
NUMPY_DTYPES = ["f4", "f8", "f2", "i8", "i2", "u1", "u2", "?", "c8"]
SCALARS = ["f4", "f8", "f2", "i8", "i4", "u1", "?"]
SHAPES = st.sampled_from([(), (1,), (3,), (2, 3), (0,), (2, 0, 1)])

leaves = st.one_of(
    st.tuples(st.just("tensor"), st.sampled_from(TENSOR_DTYPES), SHAPES),
    st.tuples(st.just("array"), st.sampled_from(NUMPY_DTYPES), SHAPES),
    st.tuples(st.just("scalar"), st.sampled_from(SCALARS)),
    st.sampled_from([("int",), ("float",), ("bool",)]),
)
nests = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.just("tuple"), st.lists(inner, max_size=3)),
        st.tuples(st.just("list"), st.lists(inner, max_size=3)),
        st.tuples(st.just("dict"), st.lists(inner, max_size=3)),
        st.tuples(st.just("pair"), st.lists(inner, min_size=2, max_size=2)),
    ),
    max_leaves=6,
)


def make(template, rng):
    """A random sample of this template."""
    kind, *rest = template
    if kind in ("tuple", "list", "dict", "pair"):
        parts = [make(part, rng) for part in rest[0]]
        named = {f"name{i}": part for i, part in enumerate(parts)}
        return {
            "tuple": lambda: tuple(parts),
            "list": lambda: parts,
            "dict": lambda: named,
            "pair": lambda: Pair(*parts),
        }[kind]()
    value = int(rng.integers(0, 2)) if "bool" in str(template) or "?" in template else int(rng.integers(0, 200))
    if kind == "tensor":
        return torch.from_numpy(rng.integers(0, 200, rest[1])).reshape(rest[1]).to(rest[0])
    if kind == "array":
        return np.asarray(rng.integers(0, 200, rest[1])).astype(rest[0])
    if kind == "scalar":
        return np.dtype(rest[0]).type(value)
    return {"int": int, "float": float, "bool": bool}[kind](value)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(template=nests, count=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_a_batch_equals_default_collate_of_its_samples(template, count, seed):
    rng = np.random.default_rng(seed)
    samples = [make(template, rng) for _ in range(count)]
    batch = batch_of(samples)
    assert same(batch.stacked, default_collate(samples))
    assert same(batch.samples, samples)


@pytest.mark.parametrize("kind", ["fifo", "firo", "reservoir"])
def test_rows_match_their_keys_in_every_kind(kind):
    samples = [(torch.full((4,), float(i)), i, np.float32(i)) for i in range(50)]
    batch = batch_of(samples, kind, seed=4)
    assert batch.stacked[1].tolist() == batch.keys
    assert same(batch.samples, [samples[key] for key in batch.keys])
    assert same(batch.stacked, default_collate([samples[key] for key in batch.keys]))


def test_a_put_copies_and_a_batch_owns_its_memory():
    buffer = make_buffer("reservoir", capacity=2)
    array, tensor = np.zeros(3), torch.zeros(3)
    buffer.put((array, tensor))
    array += 1
    tensor += 1
    batch = buffer.get_batch(1)
    assert same(batch.samples, [(np.zeros(3), torch.zeros(3))])
    batch.stacked[1].fill_(7)
    assert same(buffer.get_batch(1).samples, [(np.zeros(3), torch.zeros(3))])


def test_strided_and_read_only_arrays_are_stored_in_columns():
    strided = np.arange(12.0).reshape(3, 4)[::-1, ::2]
    read_only = np.arange(6.0).reshape(3, 2)
    read_only.flags.writeable = False
    assert same(batch_of([strided, read_only]).samples, [strided.copy(), read_only.copy()])
    turned = torch.arange(6.0).reshape(2, 3).T
    assert batch_of([turned, turned.conj()]).stacked.tolist() == [turned.tolist()] * 2


def test_columns_may_be_made_in_inference_mode_and_on_another_default_device():
    buffer = make_buffer("reservoir", capacity=4)
    with torch.inference_mode(), torch.device("meta"):
        buffer.put((torch.ones(2, device="cpu"), torch.ones(0, device="cpu")))
    buffer.put((torch.ones(2), torch.ones(0)))
    stacked, empty = buffer.get_batch(2).stacked
    assert not stacked.is_inference()
    assert stacked.tolist() == [[1, 1], [1, 1]]
    assert empty.device.type == "cpu"


@pytest.mark.parametrize("kind", ["fifo", "firo", "reservoir"])
def test_many_samples(kind):
    batch = batch_of([np.array([i]) for i in range(5000)], kind, seed=1)
    assert batch.stacked[:, 0].tolist() == batch.keys
    assert sorted(batch.keys) == list(range(5000))


def test_capacity_beyond_memory_is_refused_with_its_size():
    with pytest.raises(ValueError, match=r"capacity \(1000000000\) must fit into memory, .* of 8000000000 bytes"):
        make_buffer("fifo", capacity=10**9).put(np.broadcast_to(0.0, (10**9,)))


# objects


@pytest.mark.parametrize(
    "samples",
    [
        ["a", "bc"],
        [("x", 1), ("y", 2)],
        [{"text": "a", "values": np.ones(2)}],
        [None, None],
        [np.array(["a", "b"]), np.array(["c", "d"])],
        [np.arange(3, dtype=">f4")],
        [2**63, 1],
        [{1, 2}, {3}],
        [np.datetime64("2020-01-01"), np.datetime64("2020-01-02")],
        [np.longdouble(1), np.longdouble(2)],
        [1 + 2j],
        [b"ab"],
    ],
    ids=str,
)
def test_samples_that_torch_cannot_stack_are_kept_as_objects(samples):
    batch = batch_of(samples)
    assert batch.stacked is None
    assert all(one is other for one, other in zip(batch.samples, samples, strict=True))


FIRST = {"x": np.zeros(2, np.float32), "y": 1}
OTHERS = [
    {"x": np.zeros(3, np.float32), "y": 1},
    {"x": np.zeros(2, np.float64), "y": 1},
    {"x": torch.zeros(2), "y": 1},
    {"x": np.zeros(2, np.float32), "y": 1.0},
    {"x": np.zeros(2, np.float32), "y": True},
    {"x": np.zeros(2, np.float32), "y": 2**63},
    {"x": np.zeros(2, np.float32), "z": 1},
    {"x": np.zeros(2, np.float32)},
    [np.zeros(2, np.float32), 1],
    "text",
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
@pytest.mark.parametrize("kind", ["fifo", "firo", "reservoir"])
def test_a_sample_of_another_layout_moves_all_to_objects(kind, other):
    samples = [{"x": np.full(2, i, np.float32), "y": i} for i in range(6)]
    buffer = make_buffer(kind, capacity=6, **({} if kind == "reservoir" else {"pseudo_epochs": 2}))
    buffer.put_many(samples[:5], keys=range(5))
    first = buffer.get_batch(3)
    assert first.stacked is not None
    samples[5] = other
    buffer.put(other, 5)
    batch = buffer.get_batch(6)
    assert batch.stacked is None
    assert same(batch.samples, [samples[key] for key in batch.keys])
    assert same(first.samples, [samples[key] for key in first.keys])
    assert batch.new == 3
    if kind == "fifo":
        assert batch.keys == [3, 4, 0, 1, 2, 5]


@pytest.mark.parametrize(
    "sample", [torch.ones(2, requires_grad=True), ("a", [torch.ones(2, requires_grad=True)])], ids=str
)
@pytest.mark.parametrize("before", [[], [torch.ones(2)]], ids=["first", "later"])
def test_a_tensor_that_requires_gradients_is_refused(sample, before):
    buffer = make_buffer("fifo", capacity=4)
    buffer.put_many(before)
    with pytest.raises(ValueError, match=r"shape \(2,\)\) must not require gradients.*detach\(\)"):
        buffer.put(sample)
    buffer.put_many([torch.zeros(2), torch.zeros(2)])
    assert buffer.get_batch(2).stacked is not None


def test_an_object_is_released_when_it_is_removed():
    class Thing:
        alive = 0

        def __init__(self):
            Thing.alive += 1

        def __del__(self):
            Thing.alive -= 1

    buffer = make_buffer("fifo", capacity=2)
    buffer.put_many([Thing(), Thing()], keys=[Thing(), Thing()])
    buffer.get()
    assert Thing.alive == 2
    buffer.get()
    assert Thing.alive == 0


# bytes


def test_bytes_of_columns_are_exact():
    buffer = make_buffer("fifo", capacity=4)
    buffer.put_many([(np.zeros(3, np.float32), 1, True, torch.zeros(2, dtype=torch.bfloat16))] * 3)
    assert buffer.info().bytes == 3 * (12 + 8 + 1 + 4)
    buffer.get_batch(2)
    assert buffer.info().bytes == 25


def test_bytes_of_objects_are_those_of_their_data():
    buffer = make_buffer("fifo", capacity=4)
    buffer.put({"text": "abc", "values": [np.zeros(100), torch.zeros(10)]})
    assert buffer.info().bytes == 840 + "abc".__sizeof__()
    buffer.get()
    assert buffer.info().bytes == 0


@pytest.mark.parametrize("kind", ["fifo", "firo", "reservoir"])
@pytest.mark.parametrize("text", [False, True], ids=["columns", "objects"])
def test_max_bytes_is_a_second_capacity(kind, text):
    sample = (np.zeros(100), "a") if text else np.zeros(100)
    size = 800 + ("a".__sizeof__() if text else 0)
    buffer = make_buffer(kind, capacity=100, max_bytes=3 * size + 5, batch_size=3)
    buffer.put_many([sample] * 3, timeout=0)
    with pytest.raises(BufferTimeout):
        buffer.put(sample, timeout=0)
    buffer.get_batch(3)
    assert buffer.put_many([sample] * 3, timeout=0) == 3
    assert buffer.info().bytes == 3 * size


def test_a_reservoir_evicts_as_many_seen_samples_as_a_larger_one_needs():
    buffer = make_buffer("reservoir", capacity=100, max_bytes=1000)
    buffer.put_many([np.zeros(25)] * 5, keys=range(5), timeout=0)
    seen = set(buffer.get_batch(4, timeout=0).keys)
    buffer.put(np.zeros(75), 5, timeout=0)
    kept = set(buffer.state_dict()["keys"])
    assert kept >= {0, 1, 2, 3, 4, 5} - seen
    assert (buffer.info().evicted, buffer.info().bytes) == (3, 1000)
    with pytest.raises(ValueError, match=r"max_bytes \(1000\) must hold at least 1 samples"):
        buffer.put(np.zeros(126), timeout=0)
    assert buffer.wait_ready(1, timeout=0)
    with pytest.raises(BufferTimeout):
        buffer.put(np.zeros(75), timeout=0)
    assert set(buffer.state_dict()["keys"]) == kept


@pytest.mark.parametrize("options", [{"watermark": 4}, {"batch_size": 4}])
@pytest.mark.parametrize("kind", ["fifo", "firo", "reservoir"])
def test_max_bytes_below_what_a_get_waits_for_is_refused_at_the_first_put(kind, options):
    buffer = make_buffer(kind, capacity=10, max_bytes=799, **options)
    with pytest.raises(ValueError, match=r"max_bytes \(799\) must hold at least 4 samples.*raise max_bytes to 800"):
        buffer.put(np.zeros(25), timeout=0)
    make_buffer(kind, capacity=10, max_bytes=800, **options).put(np.zeros(25), timeout=0)


@pytest.mark.parametrize("kind", ["fifo", "firo", "reservoir"])
def test_a_put_for_which_no_get_can_make_room_is_refused(kind):
    buffer = make_buffer(kind, capacity=10, max_bytes=1000, batch_size=3)
    buffer.put_many([np.zeros(25), np.zeros(75)], timeout=0)
    with pytest.raises(
        ValueError, match=r"max_bytes \(1000\) must hold what a get waits for, 3 samples; 2 take 800 bytes"
    ):
        buffer.put(np.zeros(75), timeout=None)


def test_named_tuples_and_typed_ones():
    samples = [Typed(torch.full((2,), float(i)), i) for i in range(3)]
    batch = batch_of(samples)
    assert type(batch.stacked) is Typed
    assert same(batch.samples, samples)
    assert same(batch.stacked, default_collate(samples))


@pytest.mark.parametrize("count", [1, 7, 63, 64, 65, 200])
@pytest.mark.parametrize(
    "sample",
    [
        lambda i: (torch.full((3, 2), float(i)), i),
        lambda i: {"a": np.full(4, i, np.int16), "b": np.float32(i), "c": float(i)},
        lambda i: torch.full((2,), i, dtype=torch.bfloat16),
        lambda i: torch.complex(torch.tensor([float(i)]), torch.tensor([1.0])).conj(),
        lambda i: (torch.empty(0), np.array(i)),
    ],
)
@pytest.mark.parametrize("form", [list, stack_samples])
def test_samples_put_together_are_those_put_one_by_one(count, sample, form):
    together, single = (Fifo(256) for _ in range(2))
    together.put_many(form([sample(i) for i in range(count)]))
    for i in range(count):
        single.put(sample(i))
    a, b = together.get_batch(count), single.get_batch(count)
    assert repr(a.stacked) == repr(b.stacked)
    assert repr(a.samples) == repr(b.samples)


def test_a_producer_may_reuse_its_memory_after_put_many():
    buffer, memory = Fifo(8), [np.full(3, i) for i in range(4)]
    buffer.put_many(memory)
    for array in memory:
        array[:] = -1
    assert buffer.get_batch(4).stacked[:, 0].tolist() == [0, 1, 2, 3]


def test_put_many_keeps_all_samples_when_the_layout_changes_midway():
    buffer = Fifo(8)
    buffer.put_many([torch.zeros(2), torch.ones(2), torch.ones(3), torch.ones(2)])
    assert [tuple(sample.shape) for sample in buffer.get_batch(4).samples] == [(2,), (2,), (3,), (2,)]


def test_stacked_samples_of_another_layout_are_kept_as_they_are():
    buffer = Fifo(8)
    buffer.put_many([torch.zeros(2)])
    stacked = stack_samples([torch.ones(3), torch.ones(3)])
    assert isinstance(stacked, StackedSamples)
    buffer.put_many(stacked)
    assert [tuple(sample.shape) for sample in buffer.get_batch(3).samples] == [(2,), (3,), (3,)]


def test_samples_before_one_that_is_refused_are_put():
    buffer = Fifo(8)
    with pytest.raises(ValueError, match="must not require gradients"):
        buffer.put_many([torch.zeros(2), torch.ones(2), torch.ones(2, requires_grad=True)])
    assert buffer.info().puts == 2
    assert buffer.get_batch(2).stacked.tolist() == [[0, 0], [1, 1]]


def test_batches_of_groups_are_copies_in_order():
    """A FIFO that is refilled in groups, around the end of its slots too."""
    buffer, served = Fifo(12), []
    for start in range(0, 60, 6):
        samples = [(torch.full((2,), float(i)), i) for i in range(start, start + 6)]
        buffer.put_many(stack_samples(samples), timeout=0)
        batch = buffer.get_batch(4 if start < 18 else 6, timeout=0)
        batch.stacked[0].neg_()  # memory that only the batch uses
        assert batch.stacked[0][:, 0].tolist() == [-i for i in batch.stacked[1].tolist()]
        served += batch.stacked[1].tolist()
    assert served == list(range(len(served)))
    assert [label for _, label in buffer.get_batch(4, timeout=0).samples] == list(range(len(served), len(served) + 4))


@pytest.mark.parametrize("shape", [(), (2, 3)])
@pytest.mark.parametrize("dtype", [*TENSOR_DTYPES, torch.uint32, torch.uint64, torch.int16], ids=str)
def test_states_of_all_types_are_joined(dtype, shape):
    """As for another number of trainers."""
    states, samples = [], [[torch.ones(shape).mul(n + 10 * which).to(dtype) for n in range(3)] for which in range(2)]
    for own in samples:
        buffer = make_buffer("fifo", capacity=3)
        buffer.put_many(own, keys=range(3), timeout=0)
        states.append(buffer.state_dict()["samples"])
    places = [(1, 2), (0, 0), (1, 0)]
    joined = stored_samples(join_states(states, places), len(places))
    for one, (which, index) in zip(joined, places, strict=True):
        assert one.dtype == dtype
        assert one.shape == shape
        assert torch.equal(one.reshape(-1).view(torch.uint8), samples[which][index].reshape(-1).view(torch.uint8))


def test_a_buffer_that_is_empty_takes_another_layout():
    buffer = Fifo(4)
    buffer.put_many([torch.zeros(2)])
    buffer.get_batch(1)
    buffer.put_many([torch.ones(3)])
    assert buffer.get_batch(1).samples[0].tolist() == [1.0, 1.0, 1.0]

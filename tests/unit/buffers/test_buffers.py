"""The three buffers, by the rows of the table in docs/interface.md, and refusals. In one thread, with timeouts of 0."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paramserver.buffers import Buffer, Fifo, Firo, Reservoir, make_buffer
from paramserver.buffers.kinds import REGISTRY
from paramserver.buffers.storage import stack_samples
from paramserver.config.schema import BUFFERS
from paramserver.errors import BufferClosed, BufferExhausted, BufferTimeout

KINDS = ("fifo", "firo", "reservoir")
COUNTED = ("fifo", "firo")


def filled(kind: str, count: int, capacity: int = 8, **options) -> Buffer:
    buffer = make_buffer(kind, capacity=capacity, **options)
    buffer.put_many([float(i) for i in range(count)], keys=range(count), timeout=0)
    return buffer


def drain(buffer: Buffer, n: int) -> list[list[int]]:
    batches = []
    while not buffer.exhausted:
        batches.append(buffer.get_batch(n, timeout=0).keys)
    return batches


def full(buffer: Buffer) -> bool:
    try:
        buffer.put(0.0, "probe", timeout=0)
    except BufferTimeout:
        return True
    return False


def test_samples_that_a_full_buffer_does_not_take_are_in_memory_no_longer_than_the_caller_has_them():
    buffer = filled("fifo", 8)
    gc.collect()
    gc.disable()
    try:
        samples = [np.zeros(4)]
        sample = weakref.ref(samples[0])
        assert buffer.offer(samples, ["next"]) == 0
        del samples
        assert sample() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", KINDS)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=30), stacked=st.booleans())
@settings(max_examples=60, deadline=None)
def test_samples_put_in_groups_are_drawn_like_those_put_one_by_one(kind, steps, stacked):
    """Also where a group fills the buffer, and where it evicts."""
    options = {"watermark": 2, **({"pseudo_epochs": 2} if kind != "reservoir" else {})}
    groups, single = (make_buffer(kind, capacity=12, seed=5, **options) for _ in range(2))
    key = 0
    for puts, count in steps:
        if puts:
            samples = [(float(i), i) for i in range(key, key + count)]
            done = groups.offer(stack_samples(samples) if stacked else samples, range(key, key + count))
            for sample in samples[:done]:
                single.put(sample, sample[1], timeout=0)
            if done < count:
                with pytest.raises(BufferTimeout):
                    single.put(samples[done], key + done, timeout=0)
            key += done
        elif groups.wait_ready(count, 0):
            one, other = (buffer.get_batch(count, timeout=0) for buffer in (groups, single))
            assert (one.keys, one.new, one.positions.tolist()) == (other.keys, other.new, other.positions.tolist())
            assert repr(one.stacked) == repr(other.stacked)
    states = [buffer.state_dict() for buffer in (groups, single)]
    for state in states:
        state["counters"].update(put_wait_s=0, get_wait_s=0)
    assert repr(states[0]) == repr(states[1])


# get


def test_fifo_serves_the_oldest_first():
    buffer = filled("fifo", 8)
    assert [buffer.get(0) for _ in range(3)] == [0.0, 1.0, 2.0]
    buffer.put_many([8.0, 9.0], keys=[8, 9], timeout=0)
    assert buffer.get_batch(7, timeout=0).keys == [3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("kind", ["firo", "reservoir"])
def test_firo_and_reservoir_draw_by_seed(kind):
    orders = {tuple(filled(kind, 8, seed=seed).get_batch(8, timeout=0).keys) for seed in range(20)}
    assert len(orders) == 20
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert filled(kind, 8, seed=3).get_batch(8).keys == filled(kind, 8, seed=3).get_batch(8).keys


@pytest.mark.parametrize("kind", ["firo", "reservoir"])
def test_a_seed_may_be_a_sequence(kind):
    one, other, again = (filled(kind, 8, seed=s).get_batch(8).keys for s in ((0, 1, 2), (0, 1, 3), (0, 1, 2)))
    assert one == again != other


# servings of a sample


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_counted_buffers_serve_exactly_pseudo_epochs_times(kind, times):
    buffer = filled(kind, 5, pseudo_epochs=times)
    buffer.finish()
    keys = [key for batch in drain(buffer, 2) for key in batch]
    assert sorted(keys) == sorted(list(range(5)) * times)
    assert buffer.info().seen_histogram == {times: 5}


def test_fifo_requeues_a_served_sample_at_the_tail():
    buffer = filled("fifo", 3, pseudo_epochs=2)
    assert buffer.get_batch(2, timeout=0).keys == [0, 1]
    buffer.put(3.0, 3, timeout=0)
    assert buffer.get_batch(4, timeout=0).keys == [2, 0, 1, 3]
    assert buffer.get_batch(2, timeout=0).keys == [2, 3]


@pytest.mark.parametrize("kind", COUNTED)
def test_a_sample_keeps_its_slot_until_its_last_serving(kind):
    buffer = filled(kind, 4, capacity=4, pseudo_epochs=2)
    buffer.get_batch(4, timeout=0)
    assert full(buffer)
    buffer.get_batch(4, timeout=0)
    assert len(buffer) == 0
    assert not full(buffer)


def test_reservoir_serves_again_and_keeps_its_samples():
    buffer = filled("reservoir", 8)
    for _ in range(5):
        assert sorted(buffer.get_batch(8, timeout=0).keys) == list(range(8))
    assert len(buffer) == 8
    assert buffer.info().seen_histogram == {5: 8}


# when a get waits


def test_fifo_waits_for_the_watermark_once():
    buffer = filled("fifo", 2, watermark=3)
    assert not buffer.wait_ready(1, timeout=0)
    with pytest.raises(BufferTimeout, match=r"get_batch\(1\).* 3 needed"):
        buffer.get(0)
    buffer.put(2.0, timeout=0)
    assert [buffer.get(0) for _ in range(3)] == [0.0, 1.0, 2.0]
    assert not buffer.wait_ready(1, timeout=0)


@pytest.mark.parametrize("kind", ["firo", "reservoir"])
def test_firo_and_reservoir_wait_below_the_watermark(kind):
    buffer = filled(kind, 4, watermark=4)
    assert buffer.wait_ready(1, timeout=0)
    buffer.get(0)
    assert buffer.wait_ready(1, timeout=0) == (kind == "reservoir")
    assert filled(kind, 3, watermark=4).wait_ready(1, timeout=0) is False


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_waits_for_as_many_different_samples(kind):
    buffer = filled(kind, 3, **({} if kind == "reservoir" else {"pseudo_epochs": 5}))
    with pytest.raises(BufferTimeout, match=r"get_batch\(4\)"):
        buffer.get_batch(4, timeout=0)
    assert buffer.info().gets == 0
    buffer.put(3.0, 3, timeout=0)
    assert sorted(buffer.get_batch(4, timeout=0).keys) == [0, 1, 2, 3]


# when a put waits


@pytest.mark.parametrize("kind", COUNTED)
def test_a_put_waits_while_full(kind):
    buffer = filled(kind, 4, capacity=4)
    with pytest.raises(BufferTimeout, match="4 of 4 samples are held"):
        buffer.put(4.0, timeout=0)
    buffer.get(0)
    buffer.put(4.0, timeout=0)
    assert len(buffer) == 4


def test_reservoir_put_waits_only_while_all_are_unseen():
    buffer = filled("reservoir", 4, capacity=4, seed=1)
    assert full(buffer)
    seen = set(buffer.get_batch(2, timeout=0).keys)
    buffer.put(4.0, 4, timeout=0)
    buffer.put(5.0, 5, timeout=0)
    assert set(buffer.state_dict()["keys"]) == {0, 1, 2, 3, 4, 5} - seen
    assert full(buffer)
    assert (buffer.info().evicted, buffer.info().unseen) == (2, 4)


def test_the_error_of_put_many_states_how_many_were_put():
    buffer = make_buffer("fifo", capacity=3)
    with pytest.raises(BufferTimeout, match="3 of 5 samples were put"):
        buffer.put_many([1.0, 2.0, 3.0, 4.0, 5.0], timeout=0)
    assert buffer.put_many([]) == 0
    with pytest.raises(ValueError, match=r"keys \(1\) must be as many as samples \(2\)"):
        buffer.put_many([1.0, 2.0], keys=[1])
    assert buffer.get_batch(3, timeout=0).samples == [1.0, 2.0, 3.0]


# after finish()


def test_fifo_drains_in_order_and_ends_with_a_smaller_batch():
    buffer = filled("fifo", 7, watermark=8)
    buffer.finish()
    assert drain(buffer, 3) == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("kind", ["firo", "reservoir"])
def test_finish_lifts_the_watermark_and_drains_at_random(kind):
    buffer = filled(kind, 7, watermark=8, seed=1)
    buffer.finish()
    assert buffer.wait_ready(8, timeout=0)
    batches = drain(buffer, 3)
    assert [len(batch) for batch in batches] == [3, 3, 1]
    keys = [key for batch in batches for key in batch]
    assert sorted(keys) == list(range(7)) != keys


def test_reservoir_get_evicts_after_finish():
    buffer = filled("reservoir", 8, min_new_per_batch=2)
    buffer.get_batch(4, timeout=0)
    buffer.finish()
    assert sorted(key for batch in drain(buffer, 3) for key in batch) == list(range(8))
    info = buffer.info()
    assert (info.evicted, info.population, info.seen_histogram) == (8, 0, {1: 4, 2: 4})


# number of batches


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize(("samples", "times", "n"), [(7, 1, 3), (7, 3, 4), (1, 5, 3), (4, 3, 8), (8, 2, 5), (2, 7, 4)])
def test_the_expected_number_of_batches_is_served(kind, samples, times, n):
    buffer = filled(kind, samples, pseudo_epochs=times)
    first = [buffer.get_batch(n, timeout=0).keys] if samples >= n else []
    buffer.finish()
    batches = first + drain(buffer, n)
    assert len(batches) == buffer.expected_batches(samples, n) == -(-samples * times // n)
    assert all(len(batch) == n for batch in batches[:-1])
    assert sorted(key for batch in batches for key in batch) == sorted(list(range(samples)) * times)


@pytest.mark.parametrize("kind", KINDS)
def test_remaining_servings_are_known_after_finish(kind):
    buffer = filled(kind, 5, **({} if kind == "reservoir" else {"pseudo_epochs": 3}))
    buffer.get_batch(4, timeout=0)
    assert buffer.remaining_servings() is None
    buffer.finish()
    left = 5 if kind == "reservoir" else 5 * 3 - 4
    assert buffer.remaining_servings() == left == sum(map(len, drain(buffer, 2)))
    assert buffer.remaining_servings() == 0


def test_a_drain_repeats_a_sample_in_a_batch_only_where_it_must():
    buffer = filled("firo", 3, pseudo_epochs=2)
    buffer.finish()
    batches = drain(buffer, 5)
    assert sorted(batches[0][:3]) == [0, 1, 2]
    assert [len(batch) for batch in batches] == [5, 1]


def test_the_number_of_batches_of_a_reservoir_is_unknown():
    assert make_buffer("reservoir", capacity=4).expected_batches(100, 10) is None


# min_new_per_batch


def test_a_reservoir_batch_waits_for_its_new_samples():
    buffer = filled("reservoir", 4, min_new_per_batch=2, batch_size=3)
    assert buffer.get_batch(3, timeout=0).new >= 2
    buffer.get_batch(1, timeout=0)
    assert not buffer.wait_ready(3, timeout=0)
    buffer.put_many([4.0, 5.0], keys=[4, 5], timeout=0)
    batch = buffer.get_batch(3, timeout=0)
    assert batch.new >= 2
    assert len(set(batch.keys)) == 3
    buffer.finish()
    assert buffer.wait_ready(3, timeout=0)


# finish and close


@pytest.mark.parametrize("kind", KINDS)
def test_finished_and_empty_is_exhausted(kind):
    buffer = filled(kind, 2)
    buffer.finish()
    buffer.finish()
    assert buffer.finished
    assert not buffer.exhausted
    with pytest.raises(BufferClosed, match="finished"):
        buffer.put(1.0)
    buffer.get_batch(2)
    assert buffer.exhausted
    with pytest.raises(BufferExhausted):
        buffer.get()
    with pytest.raises(BufferExhausted):
        buffer.wait_ready(1, timeout=0)


@pytest.mark.parametrize("kind", KINDS)
def test_after_close_every_call_raises(kind):
    buffer = filled(kind, 2)
    state = buffer.state_dict()
    buffer.close()
    buffer.close()
    buffer.finish()
    assert buffer.closed
    calls = [
        lambda: buffer.put(1.0),
        lambda: buffer.put_many([1.0]),
        buffer.get,
        lambda: buffer.get_batch(1),
        lambda: buffer.wait_ready(1, 0),
        buffer.state_dict,
        lambda: buffer.load_state_dict(state),
    ]
    for call in calls:
        with pytest.raises(BufferClosed, match="closed"):
            call()
    assert buffer.info().population == len(buffer) == 2


# info


def test_info_counts():
    buffer = filled("reservoir", 4, capacity=4)
    batch = buffer.get_batch(3, timeout=0)
    assert (batch.size, len(batch), batch.new) == (3, 3, 3)
    buffer.put(4.0, 4, timeout=0)
    info = buffer.info()
    assert (info.kind, info.population, info.unseen, info.capacity) == ("reservoir", 4, 2, 4)
    assert (info.puts, info.gets, info.batches, info.evicted, info.bytes) == (5, 3, 1, 1, 32)
    assert info.seen_histogram == {0: 2, 1: 3}
    assert info.put_wait_s == info.get_wait_s == 0.0


# refusals


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("resevoir", {}, r'kind \(resevoir\) must be one of fifo, firo, reservoir; did you mean "reservoir"'),
        ("zzz", {}, r"kind \(zzz\) must be one of .*; choose one"),
        ("fifo", {"capacity": 0}, r"capacity \(0\) must be at least 1"),
        ("firo", {"watermark": 9}, r"watermark \(9\) must be at most capacity \(8\)"),
        ("firo", {"watermark": -1}, r"watermark \(-1\) must be at least 0"),
        ("fifo", {"batch_size": 9}, r"batch_size \(9\) must be at most capacity \(8\)"),
        ("fifo", {"batch_size": 0}, r"batch_size \(0\) must be at least 1"),
        ("fifo", {"pseudo_epochs": 0}, r"pseudo_epochs \(0\) must be at least 1"),
        ("reservoir", {"pseudo_epochs": 0}, r"pseudo_epochs \(0\) must be at least 1"),
        ("reservoir", {"pseudo_epochs": 2}, r"pseudo_epochs \(2\) must be 1 with reservoir"),
        ("fifo", {"min_new_per_batch": 1}, r"min_new_per_batch \(1\) must be 0 with fifo"),
        ("firo", {"min_new_per_batch": 1}, r"min_new_per_batch \(1\) must be 0 with firo"),
        ("reservoir", {"min_new_per_batch": -1}, r"min_new_per_batch \(-1\) must be at least 0"),
        ("reservoir", {"min_new_per_batch": 5, "batch_size": 4}, r"min_new_per_batch \(5\) must be at most batch_size"),
        ("reservoir", {"min_new_per_batch": 9}, r"min_new_per_batch \(9\) must be at most capacity \(8\)"),
        ("fifo", {"max_bytes": 0}, r"max_bytes \(0\) must be at least 1"),
    ],
)
def test_arguments_that_can_never_work_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        make_buffer(kind, **{"capacity": 8, **options})


@pytest.mark.parametrize("n", [0, -1, 9])
def test_a_batch_that_can_never_be_held_is_refused(n):
    buffer = filled("firo", 8)
    with pytest.raises(ValueError, match=rf"n \({n}\) must be from 1 to the capacity \(8\)"):
        buffer.get_batch(n, timeout=0)
    with pytest.raises(ValueError, match=rf"n \({n}\)"):
        buffer.wait_ready(n, timeout=0)


def test_the_kinds_are_public_classes():
    assert [type(make_buffer(kind, capacity=1)) for kind in KINDS] == [Fifo, Firo, Reservoir]
    assert Firo(4, pseudo_epochs=2, watermark=1).expected_batches(4, 3) == 3
    with pytest.raises(ValueError, match="capacity"):
        Reservoir(0)


def test_the_registry_and_the_config_have_the_same_kinds():
    assert {kind: buffer.options for kind, buffer in REGISTRY.items()} == BUFFERS
    assert all(kind == buffer.kind for kind, buffer in REGISTRY.items())

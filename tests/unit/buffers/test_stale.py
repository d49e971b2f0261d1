"""Samples that are too old are not served, and counted, however they and the limit arrive."""

import threading
from collections import Counter

import numpy as np
import pytest
import torch

from paramserver.buffers import make_buffer
from paramserver.buffers.reshard import reshard_parts
from paramserver.errors import BufferExhausted, BufferTimeout

KINDS = ["fifo", "firo", "reservoir"]


def sample(key, step):
    return {"key": key, "version": np.array([1, step])}


def limited(kind, capacity=16, seed=3, as_objects=False, **options):
    buffer = make_buffer(kind, capacity=capacity, seed=seed, **options)
    buffer.limit_age(lambda one: int(one["version"][1]))
    if as_objects:
        buffer.put({"version": np.array([1, -1]), "other": None}, key=-1)
        buffer.expire(0)
    return buffer


def put(buffer, *steps, first=0):
    buffer.put_many([sample(first + i, step) for i, step in enumerate(steps)], range(first, first + len(steps)))


def accounts(buffer):
    """What was put, and where it is: served at least once, held and not served, or removed before."""
    info = buffer.info()
    never = info.seen_histogram.get(0, 0)
    assert sum(info.seen_histogram.values()) == info.puts
    assert never == info.unseen + info.stale
    return {"applied": info.puts - never, "held": info.unseen, "stale": info.stale}


@pytest.mark.parametrize("kind", KINDS)
def test_no_sample_that_is_too_old_is_served(kind):
    buffer = limited(kind)
    put(buffer, 1, 5, 2, 6, 3, 7)
    buffer.expire(4)
    buffer.finish()
    assert sorted(buffer.get_batch(6).keys) == [1, 3, 5]
    assert accounts(buffer) == {"applied": 3, "held": 0, "stale": 3}
    with pytest.raises(BufferExhausted):
        buffer.get_batch(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_never_goes_back(kind):
    buffer = limited(kind)
    buffer.expire(4)
    buffer.expire(2)
    put(buffer, 3, 4)
    assert buffer.get_batch(1, timeout=0).keys == [1]


@pytest.mark.parametrize("kind", ["fifo", "firo"])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_served_does_not_depend_on_when_samples_are_removed(kind, times, seed):
    """One buffer has the new limit before the puts, another after them, and one removes as soon as it can."""
    rng = np.random.default_rng(seed)
    buffers = [limited(kind, capacity=200, pseudo_epochs=times) for _ in range(3)]
    served, key, oldest = [[], [], []], 0, 0
    for _ in range(30):
        steps = [int(step) for step in rng.integers(oldest - 2, oldest + 6, rng.integers(1, 5))]
        oldest += int(rng.integers(0, 3))
        for number, (buffer, kept) in enumerate(zip(buffers, served, strict=True)):
            if number == 0:
                buffer.expire(oldest)
            for i, step in enumerate(steps):
                put(buffer, step, first=key + i)
                if number == 2:
                    buffer.wait_ready(200, timeout=0)
            buffer.expire(oldest)
            if buffer.wait_ready(3, timeout=0):
                kept.append(buffer.get_batch(3).keys)
        key += len(steps)
    assert served[0]
    assert served[0] == served[1] == served[2]
    assert accounts(buffers[0]) == accounts(buffers[1]) == accounts(buffers[2])
    assert buffers[0].info().stale > 0


@pytest.mark.parametrize("as_objects", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_accounts_agree_over_random_sequences(kind, seed, as_objects):
    rng = np.random.default_rng(seed)
    buffer = limited(kind, capacity=int(rng.integers(4, 20)), as_objects=as_objects)
    step_of, times, oldest = {}, Counter(), 0
    for key in range(400):
        step_of[key] = oldest + int(rng.integers(-3, 8))
        try:
            buffer.put(sample(key, step_of[key]), key, timeout=0)
        except BufferTimeout:
            del step_of[key]
        if rng.random() < 0.4:
            oldest += int(rng.integers(0, 2))
            buffer.expire(oldest)
            try:
                keys = buffer.get_batch(int(rng.integers(1, 4)), timeout=0).keys
            except BufferTimeout:
                continue
            assert all(step_of[one] >= oldest for one in keys)
            times.update(keys)
        found = accounts(buffer)
        assert found["applied"] == len(times)
        assert sum(found.values()) == len(step_of) + as_objects
    assert buffer.info().stale > 0


@pytest.mark.parametrize("kind", KINDS)
def test_room_is_made_for_a_producer_that_waits(kind):
    """The buffer is full of samples that become too old."""
    buffer = limited(kind, capacity=4)
    put(buffer, 1, 1, 1, 1)
    producer = threading.Thread(target=put, args=(buffer, 9, 9, 9, 9), kwargs={"first": 4})
    producer.start()
    buffer.expire(5)
    assert sorted(buffer.get_batch(4, timeout=20).keys) == [4, 5, 6, 7]
    producer.join(20)
    assert accounts(buffer)["stale"] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_get_that_waits_does_not_end_with_samples_that_are_too_old(kind):
    buffer, found = limited(kind), []
    buffer.expire(5)
    consumer = threading.Thread(target=lambda: found.extend(buffer.get_batch(2, timeout=20).keys))
    consumer.start()
    put(buffer, 1, 2, 6)
    buffer.put(sample(3, 7), 3, last=True)
    consumer.join(20)
    assert sorted(found) == [2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_get_that_waits_ends_where_all_that_comes_is_too_old(kind):
    buffer, ends = limited(kind), []
    buffer.expire(5)

    def get():
        try:
            buffer.get_batch(2, timeout=20)
        except BufferExhausted as end:
            ends.append(end)

    consumer = threading.Thread(target=get)
    consumer.start()
    put(buffer, 1)
    buffer.put(sample(1, 1), 1, last=True)
    consumer.join(20)
    assert len(ends) == 1


def test_nothing_is_evicted_for_a_sample_that_is_too_old():
    buffer = limited("reservoir", capacity=4)
    put(buffer, 8, 8, 8, 8)
    buffer.expire(5)
    buffer.get_batch(4)
    put(buffer, 1, 2, 3, first=4)
    assert (len(buffer), buffer.info().evicted, buffer.info().stale) == (4, 0, 3)
    assert buffer.info().puts == 7


def test_what_was_served_and_becomes_too_old_is_evicted():
    buffer = limited("reservoir", capacity=4)
    put(buffer, 1, 1, 8, 8)
    buffer.get_batch(4)
    buffer.expire(5)
    info = buffer.info()
    assert (info.population, info.evicted, info.stale) == (2, 2, 0)
    assert (info.bytes, info.seen_histogram) == (2 * info.bytes // 2, {1: 4})


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_of_bytes_counts_what_is_removed(kind):
    one = limited(kind)
    put(one, 1)
    size = one.info().bytes
    buffer = limited(kind, max_bytes=4 * size)
    put(buffer, 1, 1, 8, 8)
    buffer.get_batch(2)
    buffer.expire(5)
    assert buffer.info().bytes == size * len(buffer)
    put(buffer, *[9] * (4 - len(buffer)), first=4)
    assert len(buffer) == 4


@pytest.mark.parametrize("as_objects", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_that_is_saved_continues_as_if_it_was_not(kind, as_objects):
    straight = limited(kind, as_objects=as_objects)
    put(straight, 1, 5, 2, 6, 3, 7, 7, 8)
    straight.expire(2)
    straight.get_batch(2)
    restored = limited(kind)
    restored.load_state_dict(straight.state_dict())
    for buffer in (straight, restored):
        buffer.expire(6)
    assert straight.info() == restored.info()
    assert straight.info().stale > 0
    assert straight.get_batch(3, timeout=0).keys == restored.get_batch(3, timeout=0).keys


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 2)])
def test_counts_stay_when_the_number_of_trainers_changes(kind, before, after):
    parts = []
    for index in range(before):
        buffer = limited(kind)
        put(buffer, 1, 2, 8, 9, first=10 * index)
        buffer.expire(2)
        counters = {"batch_idx": 0, "samples_served": 0, "seconds": 0.0}
        parts.append(
            {
                "buffer": buffer.state_dict(),
                "source": {},
                "counters": counters,
                "random": None,
                "task": {},
                "applied": {},
            }
        )
    stale, held = 0, 0
    for part in reshard_parts(parts, after, capacity=16, entropy=(1, 1)):
        buffer = limited(kind)
        buffer.load_state_dict(part["buffer"])
        buffer.expire(9)
        stale, held = stale + buffer.info().stale, held + len(buffer)
    # One of each was removed before; then, of those that were held, two.
    assert (stale, held) == (3 * before, before)


def test_a_buffer_that_knows_no_steps_has_no_limit():
    buffer = make_buffer("fifo", capacity=8)
    buffer.put(torch.tensor(1.0), key=0)
    with pytest.raises(ValueError, match="call limit_age first"):
        buffer.expire(100)
    assert buffer.get_batch(1, timeout=0).keys == [0]

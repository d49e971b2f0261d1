"""Buffers with several threads: which calls wake which, and no sample is lost under load."""

import runpy
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from paramserver.buffers import Buffer, make_buffer
from paramserver.errors import BufferClosed, BufferExhausted, BufferTimeout

KINDS = ("fifo", "firo", "reservoir")
WAIT_S = 20.0
stress = runpy.run_path(str(Path(__file__).parents[2] / "measure" / "buffer_stress.py"))["stress"]


@pytest.fixture(autouse=True)
def no_leaked_threads():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


class WatchedCondition(threading.Condition):
    """Counts waits and notifications. The count is released under the lock: a thread that gets the lock then finds the
    other one waiting."""

    def __init__(self, lock):
        super().__init__(lock)
        self.waiting = threading.Semaphore(0)
        self.notified = 0

    def wait(self, timeout=None):
        self.waiting.release()
        return super().wait(timeout)

    def notify(self, n=1):
        self.notified += n
        super().notify(n)


class Call:
    """A call in a thread, with its result or exception."""

    def __init__(self, function, *args, **kwargs):
        self.result = None

        def run():
            try:
                self.result = function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - examined by the test
                self.result = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def end(self):
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        return self.result


def watched(kind: str, **options) -> Buffer:
    buffer = make_buffer(kind, **options)
    buffer._can_put, buffer._can_get = WatchedCondition(buffer._lock), WatchedCondition(buffer._lock)
    return buffer


def await_blocked(condition: WatchedCondition, count: int = 1) -> None:
    for _ in range(count):
        assert condition.waiting.acquire(timeout=WAIT_S)


@pytest.mark.parametrize("max_bytes", [None, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_producers_blocked_at_full_wake_on_get(kind, max_bytes):
    buffer = watched(kind, capacity=4, max_bytes=max_bytes, batch_size=3)
    buffer.put_many([0.0] * 4)
    calls = [Call(buffer.put, float(i)) for i in range(3)]
    await_blocked(buffer._can_put, 3)
    buffer.get_batch(3)
    assert [call.end() for call in calls] == [None] * 3
    info = buffer.info()
    assert (info.puts, info.population) == (7, 4)
    assert info.put_wait_s > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["close", "finish"])
def test_producers_blocked_at_full_wake_on_close_and_on_finish(kind, end):
    buffer = watched(kind, capacity=2)
    buffer.put_many([0.0] * 2)
    calls = [Call(buffer.put, 1.0), Call(buffer.put_many, [1.0, 2.0])]
    await_blocked(buffer._can_put, 2)
    getattr(buffer, end)()
    one, many = [call.end() for call in calls]
    assert type(one) is type(many) is BufferClosed
    assert ("closed" if end == "close" else "finished") in str(one)
    assert "0 of 2 samples were put" in str(many)
    assert buffer.info().puts == 2


def test_put_many_waits_for_room_in_between():
    buffer = watched("fifo", capacity=2)
    call = Call(buffer.put_many, [float(i) for i in range(6)])
    got = []
    for _ in range(2):
        await_blocked(buffer._can_put)
        got += buffer.get_batch(2).samples
    assert call.end() == 6
    assert got + buffer.get_batch(2).samples == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_a_consumer_wakes_when_its_batch_is_complete_and_not_before(kind):
    buffer = watched(kind, capacity=8, watermark=2)
    call = Call(buffer.get_batch, 3)
    await_blocked(buffer._can_get)
    buffer.put_many([0.0, 1.0])
    assert buffer._can_get.notified == 0
    buffer.put(2.0)
    assert len(call.end()) == 3
    assert buffer.info().get_wait_s > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_consumer_wakes_on_finish(kind):
    buffer = watched(kind, capacity=8, watermark=4)
    buffer.put(0.0, "only")
    call = Call(buffer.get_batch, 3)
    await_blocked(buffer._can_get)
    buffer.finish()
    assert call.end().keys == ["only"]
    empty = watched(kind, capacity=8)
    calls = Call(empty.wait_ready, 3, None)
    await_blocked(empty._can_get)
    empty.finish()
    assert type(calls.end()) is BufferExhausted


@pytest.mark.parametrize("kind", KINDS)
def test_a_consumer_wakes_on_close(kind):
    buffer = watched(kind, capacity=8)
    call = Call(buffer.get_batch, 1)
    await_blocked(buffer._can_get)
    buffer.close()
    assert type(call.end()) is BufferClosed


def test_timeouts_expire():
    buffer = make_buffer("fifo", capacity=1)
    started = time.monotonic()
    assert not buffer.wait_ready(1, timeout=0.05)
    with pytest.raises(BufferTimeout, match=r"within 0\.05 s, 0 samples"):
        buffer.get_batch(1, timeout=0.05)
    buffer.put(0.0, timeout=0.05)
    with pytest.raises(BufferTimeout):
        buffer.put(0.0, timeout=0.05)
    elapsed = time.monotonic() - started
    assert 0.15 <= elapsed < 5
    info = buffer.info()
    assert info.get_wait_s >= 0.09
    assert info.put_wait_s >= 0.04
    assert info.get_wait_s + info.put_wait_s <= elapsed


def test_a_larger_batch_than_max_bytes_admits_fails_the_blocked_producer():
    buffer = watched("firo", capacity=10, max_bytes=240)
    producer = Call(buffer.put_many, [np.zeros(10)] * 5)
    await_blocked(buffer._can_put)
    assert not buffer.wait_ready(4, timeout=0)
    error = producer.end()
    assert type(error) is ValueError
    assert "must hold what a get waits for, 4 samples" in str(error)


def test_a_waiting_put_follows_the_move_from_columns_to_objects():
    buffer = watched("fifo", capacity=2)
    buffer.put_many([np.zeros(2), np.ones(2)])
    fits = Call(buffer.put, np.full(2, 2.0))
    await_blocked(buffer._can_put)
    moves = Call(buffer.put, "text")
    await_blocked(buffer._can_put)
    samples = [buffer.get(), buffer.get()]
    assert fits.end() is moves.end() is None
    samples += buffer.get_batch(2).samples
    assert sorted(map(str, samples)) == ["[0. 0.]", "[1. 1.]", "[2. 2.]", "text"]


def test_state_and_info_are_consistent_between_puts_and_gets():
    buffer = make_buffer("reservoir", capacity=16, seed=1)
    samples = [np.full(4, i) for i in range(3000)]
    call = Call(lambda: (buffer.put_many(samples, keys=range(3000), timeout=WAIT_S), buffer.finish()))
    while not buffer.exhausted:
        state = buffer.state_dict()
        held = len(state["keys"])
        assert state["counters"]["puts"] - state["counters"]["evicted"] == held == len(state["served"])
        if held:
            assert state["samples"]["columns"][0][:, 0].tolist() == state["keys"]
        info = buffer.info()
        assert sum(info.seen_histogram.values()) == info.puts
        assert sum(times * count for times, count in info.seen_histogram.items()) == info.gets
        if not buffer.exhausted:
            buffer.get_batch(4, timeout=WAIT_S)
    assert call.end() == (3000, None)


@pytest.mark.parametrize("storage", ["columns", "moved"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_and_nothing_is_repeated(kind, storage):
    report = stress(kind, seconds=0.5, producers=8, seed=5, storage=storage, capacity=64)
    assert report.violations == []
    assert report.puts > 3 * 64, "each slot was used several times, also on a busy machine"
    assert report.gets >= report.puts * (1 if kind == "reservoir" else 2)

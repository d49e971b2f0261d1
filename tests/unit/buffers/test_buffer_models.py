"""Random sequences of puts and gets against plain Python models, and the uniformity of draws."""

from collections import Counter, deque

import numpy as np
import pytest

from paramserver.buffers import Buffer, Fifo, Firo, Reservoir
from paramserver.errors import BufferTimeout


def try_put(buffer: Buffer, key: int) -> bool:
    try:
        buffer.put(np.array([key, -key]), key, timeout=0)
    except BufferTimeout:
        return False
    return True


def try_get(buffer: Buffer, n: int):
    try:
        batch = buffer.get_batch(n, timeout=0)
    except BufferTimeout:
        return None
    assert batch.stacked.tolist() == [[key, -key] for key in batch.keys]
    return batch


class FifoModel:
    def __init__(self, capacity: int, watermark: int, times: int):
        self.capacity, self.watermark, self.times = capacity, watermark, times
        self.queue: deque[tuple[int, int]] = deque()
        self.started = self.finished = False

    def put(self, key: int) -> bool:
        if len(self.queue) == self.capacity:
            return False
        self.queue.append((key, 0))
        return True

    def get(self, n: int):
        if not self.finished and len(self.queue) < (n if self.started else max(n, self.watermark)):
            return None
        self.started = True
        keys, new = [], 0
        while self.queue and len(keys) < n:
            key, served = self.queue.popleft()
            keys.append(key)
            new += served == 0
            if served + 1 < self.times:
                self.queue.append((key, served + 1))
        return keys, new


@pytest.mark.parametrize("seed", range(25))
def test_fifo_matches_its_model(seed):
    rng = np.random.default_rng(seed)
    capacity, times = int(rng.integers(1, 12)), int(rng.integers(1, 4))
    watermark = int(rng.integers(0, capacity + 1))
    buffer, model = Fifo(capacity, watermark=watermark, pseudo_epochs=times), FifoModel(capacity, watermark, times)
    for key in range(300):
        if rng.random() < 0.6:
            assert try_put(buffer, key) == model.put(key)
        else:
            compare(buffer, model, int(rng.integers(1, capacity + 1)))
    buffer.finish()
    model.finished = True
    while model.queue:
        compare(buffer, model, int(rng.integers(1, capacity + 1)))
    assert buffer.exhausted


def compare(buffer: Fifo, model: FifoModel, n: int) -> None:
    batch = try_get(buffer, n)
    assert (batch and (batch.keys, batch.new)) == model.get(n)
    assert len(buffer) == len(model.queue)


@pytest.mark.parametrize("seed", range(25))
def test_firo_keeps_its_invariants(seed):
    rng = np.random.default_rng([1, seed])
    capacity, times = int(rng.integers(1, 12)), int(rng.integers(1, 4))
    watermark = int(rng.integers(0, capacity + 1))
    buffer = Firo(capacity, watermark=watermark, pseudo_epochs=times, seed=seed)
    held: dict[int, int] = {}
    total: Counter[int] = Counter()
    for key in range(300):
        n = int(rng.integers(1, capacity + 1))
        if rng.random() < 0.6:
            room = len(held) < capacity
            assert try_put(buffer, key) == room
            held.update({key: 0} if room else {})
        elif (batch := try_get(buffer, n)) is None:
            assert len(held) < max(n, watermark)
        else:
            assert len(held) >= max(n, watermark)
            assert len(set(batch.keys)) == n
            serve(batch, held, total, times)
        assert set(buffer.state_dict(samples=False)["keys"]) == held.keys()
    buffer.finish()
    while held:
        left = sum(times - served for served in held.values())
        n = int(rng.integers(1, capacity + 1))
        batch = try_get(buffer, n)
        assert len(batch) == min(n, left)
        assert len(set(batch.keys)) == min(n, len(held))
        serve(batch, held, total, times)
    assert set(total.values()) <= {times}
    assert sum(total.values()) == times * buffer.info().puts


def serve(batch, held: dict[int, int], total: Counter, times: int) -> None:
    assert batch.new == sum(held[key] == 0 for key in set(batch.keys))
    for key in batch.keys:
        held[key] += 1
        total[key] += 1
        if held[key] == times:
            del held[key]


@pytest.mark.parametrize("seed", range(25))
def test_reservoir_keeps_its_invariants(seed):
    rng = np.random.default_rng([2, seed])
    capacity = int(rng.integers(1, 12))
    watermark, must = int(rng.integers(0, capacity + 1)), int(rng.integers(0, min(capacity, 3) + 1))
    buffer = Reservoir(capacity, watermark=watermark, min_new_per_batch=must, seed=seed)
    held: dict[int, int] = {}
    served: Counter[int] = Counter()
    for key in range(300):
        n = int(rng.integers(1, capacity + 1))
        unseen = sum(times == 0 for times in held.values())
        if rng.random() < 0.5:
            assert try_put(buffer, key) == (unseen < capacity)
            check_eviction(buffer, held, key, unseen < capacity, capacity)
        elif (batch := try_get(buffer, n)) is None:
            assert len(held) < max(n, watermark) or unseen < min(must, n)
        else:
            assert len(held) >= max(n, watermark)
            assert len(set(batch.keys)) == n
            assert batch.new == sum(held[key] == 0 for key in batch.keys) >= min(must, n)
            held.update({key: held[key] + 1 for key in batch.keys})
            served.update(batch.keys)
        assert set(buffer.state_dict(samples=False)["keys"]) == held.keys()
        assert buffer.info().unseen == sum(times == 0 for times in held.values())
    buffer.finish()
    drained = [buffer.get_batch(1).keys[0] for _ in range(len(held))]
    assert buffer.exhausted
    assert sorted(drained) == sorted(held)
    served.update(drained)
    assert len(served) == buffer.info().puts


def check_eviction(buffer: Reservoir, held: dict[int, int], key: int, taken: bool, capacity: int) -> None:
    """Assert that a put evicts a sample that was seen, and only if the buffer was full; update ``held``."""
    gone = held.keys() - set(buffer.state_dict(samples=False)["keys"])
    assert len(gone) == (taken and len(held) == capacity)
    assert all(held.pop(k) > 0 for k in gone)
    held.update({key: 0} if taken else {})


# uniformity; limits are 99.9 % quantiles of chi-square


def chi_square(counts: list[int], drawn: int = 1) -> float:
    """Pearson's statistic of counts over len(counts) cells, corrected for ``drawn`` different cells per draw."""
    cells, mean = len(counts), sum(counts) / len(counts)
    return sum((count - mean) ** 2 for count in counts) / mean * (cells - 1) / (cells - drawn)


@pytest.mark.parametrize(
    "buffer", [Firo(20, pseudo_epochs=10**6, seed=1), Reservoir(20, seed=2)], ids=["firo", "reservoir"]
)
def test_draws_are_uniform_over_samples_and_positions(buffer):
    buffer.put_many([float(i) for i in range(20)], keys=range(20))
    batches = [buffer.get_batch(5).keys for _ in range(4000)]
    counts = Counter(key for batch in batches for key in batch)
    assert chi_square([counts[key] for key in range(20)], drawn=5) < 43.8
    for position in (0, 4):
        at_position = Counter(batch[position] for batch in batches)
        assert chi_square([at_position[key] for key in range(20)]) < 43.8


def test_a_drain_at_random_is_a_uniform_permutation():
    orders = Counter()
    for seed in range(2400):
        buffer = Firo(3, seed=seed)
        buffer.put_many([0.0, 1.0, 2.0], keys="abc")
        buffer.finish()
        orders["".join(buffer.get_batch(1).keys[0] for _ in range(3))] += 1
    assert len(orders) == 6
    assert chi_square(list(orders.values())) < 20.5


def test_eviction_is_uniform_over_seen_samples_only():
    evicted = Counter()
    for seed in range(2000):
        buffer = Reservoir(6, seed=seed)
        buffer.put_many([0.0] * 4, keys=range(4))
        buffer.get_batch(4)
        buffer.put_many([0.0] * 3, keys=range(4, 7))
        evicted.update(set(range(7)) - set(buffer.state_dict()["keys"]))
    assert evicted.keys() == {0, 1, 2, 3}
    assert chi_square(list(evicted.values())) < 16.3


def test_the_rest_of_a_batch_is_uniform_next_to_the_new_samples():
    drawn, rounds = Counter(), 3000
    for seed in range(rounds):
        buffer = Reservoir(8, seed=seed, min_new_per_batch=1)
        buffer.put_many([0.0] * 4, keys=range(4))
        buffer.get_batch(4)
        buffer.put_many([0.0] * 4, keys=range(4, 8))
        drawn.update(buffer.get_batch(3).keys)
    for key in range(8):
        expected = 2 / 7 if key < 4 else 1 / 4 + 3 / 4 * 2 / 7
        deviation = (expected * (1 - expected) / rounds) ** 0.5
        assert abs(drawn[key] / rounds - expected) < 4 * deviation

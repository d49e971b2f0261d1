"""The all-reduce in shared memory: ranks are threads here, over plain memory."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from paramserver.errors import PeerLost
from paramserver.transport.all_reduce import Barrier, SharedAllReduce, area_layout

TIMEOUT_S = 20.0


def make_barriers(ranks, timeout_s=TIMEOUT_S):
    to, of = ([[] for _ in range(ranks)] for _ in range(2))
    for distance in Barrier.distances(ranks):
        for rank in range(ranks):
            one, other = socket.socketpair()
            to[rank].append(one)
            of[(rank + distance) % ranks].append(other)
    return [Barrier(to[rank], of[rank], timeout_s) for rank in range(ranks)]


def in_threads(ranks, work):
    with ThreadPoolExecutor(ranks) as pool:
        return [future.result(TIMEOUT_S) for future in [pool.submit(work, rank) for rank in range(ranks)]]


@pytest.fixture
def barriers_of():
    made = []

    def make(ranks, timeout_s=TIMEOUT_S):
        made.extend(make_barriers(ranks, timeout_s))
        return made[-ranks:]

    yield make
    for barrier in made:
        barrier.close()


def mean_in_order(tensors):
    """Complex numbers are divided by their parts, as DistributedDataParallel has them."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    parts = torch.view_as_real(total) if total.is_complex() else total
    parts /= len(tensors)
    return total


SIZES = {
    "one bucket": [(torch.float32, 1_000)],
    "tiny and empty": [(torch.float32, 1), (torch.float64, 0), (torch.float32, 17)],
    "dtypes": [
        *((torch.float32, 333), (torch.float64, 5), (torch.bfloat16, 71)),
        *((torch.complex64, 40), (torch.float16, 129), (torch.complex128, 3)),
    ],
}


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_mean_has_the_bits_of_a_sum_in_the_order_of_the_ranks(ranks, sizes, seed, barriers_of):
    """Over several calls, with other buckets and other active ranks each time, as a run has them."""
    generator = torch.Generator().manual_seed(seed)
    calls = []
    for number in range(6):
        order = SIZES[sizes] if number % 3 else SIZES[sizes][::-1]
        active = torch.randperm(ranks, generator=generator)[: 1 + number % ranks].tolist()
        given = [[torch.randn(n, dtype=dtype, generator=generator) for dtype, n in order] for _ in range(ranks)]
        calls.append((given, active if number else list(range(ranks))))
    expected = [
        [mean_in_order([given[rank][i] for rank in sorted(active)]) for i in range(len(given[0]))]
        for given, active in calls
    ]
    layout = area_layout(ranks, calls[0][0][0])
    areas = list(layout.views(layout.allocate()).values())
    barriers = barriers_of(ranks)

    def work(rank):
        all_reduce = SharedAllReduce(areas, rank, barriers[rank])
        for given, active in calls:
            all_reduce.average(given[rank], active)

    in_threads(ranks, work)
    for (given, _), means in zip(calls, expected, strict=True):
        for of_rank in given:
            for tensor, mean in zip(of_rank, means, strict=True):
                assert torch.equal(tensor, mean)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_no_rank_leaves_a_barrier_before_all_have_entered(ranks, barriers_of):
    entered, barriers = [0] * ranks, barriers_of(ranks)
    ahead = []

    def work(rank):
        for number in range(1, 100):
            entered[rank] = number
            barriers[rank].wait()
            ahead.append(min(entered) - number)

    in_threads(ranks, work)
    assert set(ahead) <= {0, 1}


def test_a_rank_that_does_not_take_part_is_an_error_after_the_deadline(barriers_of):
    first, _ = barriers_of(2, timeout_s=0.2)
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"within 0.2 s \(cluster.timeout_s\)"):
        first.wait()
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_all_ranks_learn_at_once_of_one_that_ends(ranks, barriers_of):
    """A rank that gets the error closes its connections too, as its process ends, and so the next one gets it."""
    barriers, waiting = barriers_of(ranks), threading.Semaphore(0)

    def work(rank):
        barriers[rank].wait()
        if rank == 0:
            for _ in range(ranks - 1):
                waiting.acquire()
            barriers[rank].close()
            return
        waiting.release()
        began = time.monotonic()
        with pytest.raises(PeerLost, match="ended its connections"):
            barriers[rank].wait()
        barriers[rank].close()
        assert time.monotonic() - began < TIMEOUT_S / 2

    in_threads(ranks, work)

"""The order of a user's sampler: drawn again in any process, dealt without overlap, resumed at any position."""

import pickle
import random
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sampler_tasks import Buckets, Curriculum, Keeps
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paramserver.errors import TaskError
from paramserver.rng import seed_all
from paramserver.sources import DatasetSource, Partition, deal
from paramserver.sources.base import ResumePosition
from paramserver.sources.sampler import SamplerOrder


def seeded(seed=7):
    return torch.Generator().manual_seed(seed)


class Shuffles(Sampler):
    """Draws from each default generator."""

    def __iter__(self):
        return iter([*np.random.permutation(20), *random.sample(range(20), 20), *torch.randperm(20)])


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, 21), 20),
    "weighted with a generator": lambda: WeightedRandomSampler(torch.ones(20), 20, generator=seeded()),
    "subset": lambda: SubsetRandomSampler(range(3, 17), generator=seeded()),
    "replacement": lambda: RandomSampler(range(20), replacement=True, num_samples=50),
    "default generators": Shuffles,
    "own numpy generator": lambda: Keeps(20),
    "set_epoch": lambda: Buckets(20),
    "set_epoch and a generator": lambda: Curriculum(range(20), generator=seeded()),
    "batches with a generator": lambda: BatchSampler(RandomSampler(range(20), generator=seeded()), 8, drop_last=False),
    "batches of a user's sampler": lambda: BatchSampler(Keeps(20), 8, drop_last=True),
    "batches of one with set_epoch": lambda: BatchSampler(DistributedSampler(range(20), 1, 0), 8, drop_last=False),
    "list": lambda: [3, 1, 2],
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_a_pass_is_the_same_wherever_and_in_whatever_order_it_is_drawn(make):
    order = SamplerOrder(make(), range(20), seed=3)
    passes = [order.indices(epoch) for epoch in range(4)]
    assert [order.indices(epoch) for epoch in (3, 0, 2, 1)] == [passes[epoch] for epoch in (3, 0, 2, 1)]
    assert SamplerOrder(make(), range(20), seed=3).indices(3) == passes[3]
    assert pickle.loads(pickle.dumps(order)).indices(2) == passes[2]
    if not isinstance(order.sampler, list):
        assert len({tuple(one) for one in passes}) == 4


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_drawing_leaves_the_generators_and_the_sampler_of_the_user_as_they_were(make):
    sampler = make()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    SamplerOrder(sampler, range(20), seed=3).indices(1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    passes = []
    for one in (sampler, make()):
        seed_all(0)
        passes.append([tuple(item) if isinstance(item, list) else int(item) for item in one])
    assert passes[0] == passes[1]


def test_the_seed_of_the_run_decides_unless_the_sampler_has_its_own():
    for name, same in (("weighted", False), ("weighted with a generator", True), ("own numpy generator", True)):
        one, two = (SamplerOrder(SAMPLERS[name](), range(20), seed).indices(0) for seed in (1, 2))
        assert (one == two) is same


def test_the_state_of_a_generator_is_that_of_the_run_that_is_resumed():
    first = SamplerOrder(WeightedRandomSampler(torch.ones(20), 20, generator=seeded(1)), range(20), seed=0)
    resumed = SamplerOrder(WeightedRandomSampler(torch.ones(20), 20, generator=seeded(2)), range(20), seed=0)
    assert resumed.indices(3) != first.indices(3)
    resumed.load_state_dict(first.state_dict())
    assert resumed.indices(3) == first.indices(3)


def test_a_copy_does_not_copy_the_data_set():
    class Holds(list):
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

    data = Holds(range(10))
    assert len(SamplerOrder(RandomSampler(data, replacement=True), data, 0).indices(0)) == 10


def endless():
    while True:
        yield 1


class Endless:
    def __iter__(self):
        return endless()


class Changes(Keeps):
    def __iter__(self):
        self.length += 1
        return super().__iter__()


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (["a"], r"list\) gave 'a'; it must give whole numbers"),
        ([0.5], r"gave 0.5; it must"),
        ([[1], []], r"gave \[\]; it must"),
        ([1, [2]], r"gave both indices and batches"),
        ([[3], [10]], r"gave 10; it must give indices from 0 to 9"),
        ([-1], r"gave -1; it must give indices from 0 to 9"),
        (
            Changes(5),
            r"Changes\) gave 7 indices in pass 1; it must give as many in each pass as in the first one \(6\)",
        ),
        (endless(), r"generator\) must be an object that can be copied, .*; return a list of its indices"),
    ],
)
def test_what_is_no_order_is_refused(sampler, message):
    order = SamplerOrder(sampler, range(10), seed=0)
    with pytest.raises(TaskError, match=message):
        [order.indices(epoch) for epoch in range(2)]


def test_a_sampler_without_end_is_refused():
    order = SamplerOrder(Endless(), range(10), seed=0)
    order._most = 1000
    with pytest.raises(TaskError, match=r"Endless\) has no end in pass 0"):
        order.indices(0)


def test_a_sample_that_a_pass_has_several_times_is_augmented_anew_each_time():
    class Noise(list):
        def __getitem__(self, index):
            return super().__getitem__(index), float(torch.rand(()))

    data = Noise("abc")
    for order in ([1, 1, 2, 1], [[1, 1], [2, 1]]):
        options = {"sampler": SamplerOrder(order, data, 0)}
        made = DatasetSource(data, Partition(0, 1), seed=0, passes=1, sampler_kwargs=options)
        read = list(made.samples(0))
        flat = [one for _, one in read] if order[0] == 1 else [one for _, batch in read for one in batch]
        assert [letter for letter, _ in flat] == ["b", "b", "c", "b"]
        assert len({number for _, number in flat}) == 4
        assert made.fetch_all([key for key, _ in read], range(len(read))) == [sample for _, sample in read]


def test_totals_of_a_resumed_source_draw_no_pass():
    """The feeder thread asks for them, while the training thread draws from the default generators."""
    options = {"sampler": SamplerOrder(SAMPLERS["weighted"](), range(20), 0)}
    made = DatasetSource(range(20), Partition(0, 1), seed=0, passes=8, sampler_kwargs=options)
    made.fetch_all(*zip(*[(key, 100 + n) for n, (key, _) in enumerate(list(made.samples(100))[:3])], strict=True))
    made.load_state_dict(made.state_dict())
    options["sampler"]._draw = None
    assert made.total == 160


# Dealing.

orders = st.one_of(
    st.lists(st.integers(0, 9), min_size=7, max_size=40),
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=7, max_size=20),
)


def sources(order, count, **options):
    return [
        DatasetSource(
            range(10), Partition(i, count), seed=0, passes=3,
            sampler_kwargs={"sampler": SamplerOrder(order, range(10), 0), **options},
        )
        for i in range(count)
    ]  # fmt: skip


def keys(source, position=0):
    return [key for key, _ in source.samples(position)]


@settings(max_examples=60, deadline=None)
@given(order=orders, count=st.integers(1, 7))
def test_each_pass_is_dealt_once_and_in_turn(order, count):
    drawn = SamplerOrder(order, range(10), 0).indices(0)
    shares = [
        list(deal(10, Partition(i, count), seed=0, epoch=0, sampler=SamplerOrder(order, range(10), 0)))
        for i in range(count)
    ]
    assert Counter(chain(*shares)) == Counter(drawn)
    assert all(share == drawn[i::count] for i, share in enumerate(shares))
    made = sources(order, count)
    assert [keys(source) for source in made] == [share * 3 for share in shares]
    flat = list(chain(*drawn)) if isinstance(drawn[0], tuple) else drawn
    assert {source.samples_per_pass for source in made} == {len(flat)}
    for source in made:
        for key, sample in source.samples(0):
            assert sample == ([one % 10 for one in key] if isinstance(key, tuple) else key % 10)


@settings(max_examples=40, deadline=None)
@given(order=orders, count=st.integers(1, 4), later=st.integers(1, 7), data=st.data())
def test_what_is_left_is_dealt_once_to_another_number_of_trainers(order, count, later, data):
    before = sources(order, count)
    positions = [data.draw(st.integers(0, source.total)) for source in before]
    served = [key for source, position in zip(before, positions, strict=True) for key in keys(source)[:position]]
    left = [ResumePosition(s.state_dict(), position) for s, position in zip(before, positions, strict=True)]
    after = sources(order, later)
    for source in after:
        source.reshard(left, held=[])
    rest = list(chain.from_iterable(keys(source) for source in after))
    assert Counter(served + rest) == Counter(SamplerOrder(order, range(10), 0).indices(0) * 3)
    for source in after:  # and their checkpoints hold it
        again = DatasetSource(range(10), source.partition, seed=0, passes=3, sampler_kwargs=source.options)
        again.load_state_dict(source.state_dict())
        assert keys(again) == keys(source)


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_reading_resumes_at_every_position(make):
    def made():
        return DatasetSource(
            range(20), Partition(1, 2), seed=3, passes=3, sampler_kwargs={"sampler": SamplerOrder(make(), range(20), 3)}
        )

    whole = list(made().samples(0))
    for position in range(0, len(whole) + 1, 5):
        assert list(made().samples(position)) == whole[position:]


def test_the_tail_of_a_share_may_be_dropped():
    shares = [deal(11, Partition(i, 2), seed=0, epoch=0, shuffle=False, multiple=4).tolist() for i in range(2)]
    assert shares == [[0, 2, 4, 6], [1, 3, 5, 7]]

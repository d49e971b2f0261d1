"""Sources: the order of a data set, positions, resuming, and the thread that feeds a buffer."""

import itertools
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, TensorDataset

from paramserver.buffers import make_buffer
from paramserver.config import Config, TrainingConfig
from paramserver.errors import BufferClosed, BufferExhausted, SourceError, TaskError, UnsupportedConfiguration
from paramserver.sources import (
    DatasetSource,
    Feeder,
    IterableSource,
    Partition,
    ResumePosition,
    Source,
    deal,
    make_source,
)
from paramserver.sources.sampler import SamplerOrder

LENGTHS = (1, 2, 5, 12, 13, 101)
COUNTS = (1, 2, 3, 7)


def shares(length: int, count: int, **options) -> list[list[int]]:
    return [deal(length, Partition(i, count), **{"seed": 3, "epoch": 0, **options}).tolist() for i in range(count)]


def torch_shares(length: int, count: int, seed: int, epoch: int, **options) -> list[list[int]]:
    samplers = [DistributedSampler(range(length), count, i, seed=seed, **options) for i in range(count)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 4), (11, 0), (11, 2)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_is_that_of_the_distributed_sampler(seed, epoch, shuffle):
    for length, count in itertools.product(LENGTHS, COUNTS):
        common = {"length": length, "count": count, "seed": seed, "epoch": epoch, "shuffle": shuffle}
        padded, cut = torch_shares(**common), torch_shares(**common, drop_last=True)
        assert shares(**common, pad=True) == padded
        assert shares(**common, drop_last=True) == cut
        dealt = shares(**common)
        full, tail = divmod(length, count)
        assert [len(share) for share in dealt] == [full + (i < tail) for i in range(count)]
        assert all(share == padded[i][: len(share)] for i, share in enumerate(dealt))


def test_each_sample_is_dealt_exactly_once():
    for length, count in itertools.product(LENGTHS, COUNTS):
        assert sorted(index for share in shares(length, count) for index in share) == list(range(length))


def test_epochs_and_seeds_differ():
    orders = {tuple(deal(50, Partition(0, 2), seed=seed, epoch=epoch)) for seed in (0, 100) for epoch in range(5)}
    assert len(orders) == 10


# A data set as a source.


class Squares(Dataset):
    """Sample i is i * i; ``requested`` records the indices, or with ``__getitems__`` the lists of indices."""

    def __init__(self, length: int, bad: int | None = None) -> None:
        self.length = length
        self.bad = bad
        self.requested = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.requested.append(index)
        if index == self.bad:
            raise ValueError(f"sample file {index} is damaged")
        return index * index


class Grouped(Squares):
    def __getitems__(self, indices: list[int]) -> list[int]:
        self.requested.append(list(indices))
        return [index * index for index in indices]


def source(length: int = 10, index: int = 0, count: int = 1, **options) -> DatasetSource:
    return DatasetSource(Squares(length), Partition(index, count), **{"seed": 3, "passes": 2, **options})


def test_passes_follow_each_other_in_the_order_that_is_dealt():
    read = list(source(10, 1, 3).samples(0))
    expected = [i for epoch in (0, 1) for i in deal(10, Partition(1, 3), seed=3, epoch=epoch)]
    assert [key for key, _ in read] == expected
    assert all(sample == key * key for key, sample in read)


@pytest.mark.parametrize("options", [{}, {"sampler_kwargs": {"pad": True}}, {"sampler_kwargs": {"drop_last": True}}])
def test_reading_resumes_at_every_position(options):
    made = source(71, 1, 2, **options)
    whole = list(made.samples(0))
    assert len(whole) == made.total
    for position in range(len(whole) + 1):
        assert list(made.samples(position)) == whole[position:]


def test_the_end_of_a_pass_is_the_start_of_the_next():
    made = source(10, passes=None)
    assert next(made.samples(10)) == next(made.samples(9 + 1))
    assert next(made.samples(20))[0] == deal(10, Partition(0, 1), seed=3, epoch=2)[0]


def test_totals_of_a_source():
    made = source(10, 0, 3, passes=4)
    assert (made.order.per_pass, made.total, made.samples_per_pass, made.endless) == (4, 16, 10, False)
    endless = source(10, 1, 3, passes=None)
    assert (endless.order.per_pass, endless.total, endless.samples_per_pass, endless.endless) == (3, None, 10, True)
    assert source(10, 0, 3, sampler_kwargs={"pad": True}).samples_per_pass == 12
    assert source(10, 0, 3, sampler_kwargs={"drop_last": True}).samples_per_pass == 9


def test_no_index_is_made_for_the_totals_of_a_source():
    made = source(10**12, 1, 3, passes=4)
    assert (made.order.per_pass, made.total, made.samples_per_pass) == (333333333333, 1333333333332, 10**12)


def test_the_order_of_a_pass_is_an_array():
    made = source(10, 0, 2, passes=1)
    assert made.order.rest == ()
    left = [ResumePosition(source(10, i, 3).state_dict(), 2) for i in range(3)]
    made.reshard(left, held=[])
    for block in made.order.blocks(0, 2):
        assert isinstance(block, np.ndarray)
        assert block.dtype == np.int64
    assert {type(key) for key, _ in made.samples(0)} == {int}


def test_samples_can_be_fetched_again():
    made = source(10)
    assert made.refetchable
    assert all(made.fetch(key) == sample for key, sample in made.samples(0))


def test_a_data_set_with_getitems_is_read_in_groups():
    data = Grouped(70)
    read = list(DatasetSource(data, Partition(0, 1), seed=3, passes=1).samples(0))
    assert [len(group) for group in data.requested] == [32, 32, 6]
    assert all(sample == key * key for key, sample in read)


def test_no_group_is_read_ahead():
    data = Squares(70)
    reading = DatasetSource(data, Partition(0, 1), seed=3, group=4).samples(0)
    keys = [next(reading)[0] for _ in range(6)]
    assert data.requested[:6] == keys
    assert len(data.requested) == 8


@pytest.mark.parametrize("change", [lambda data: data.append(4.0), lambda data: data.pop()])
def test_a_data_set_that_grows_or_shrinks_is_refused_by_name(change):
    data = [1.0, 2.0, 3.0]
    reading = DatasetSource(data, Partition(0, 1), seed=3).samples(0)
    assert sorted(next(reading)[1] for _ in range(3)) == data
    change(data)
    with pytest.raises(SourceError, match=rf"has {len(data)} samples in pass 1, and must have .* at the start \(3\)"):
        next(reading)


def test_the_samples_read_before_a_failure_are_served():
    class Broken(Squares):
        def __getitem__(self, index):
            if len(self.requested) == 6:
                raise OSError("no such file")
            return super().__getitem__(index)

    reading = DatasetSource(Broken(70), Partition(0, 1), seed=3, group=4).samples(0)
    assert len([next(reading) for _ in range(6)]) == 6
    with pytest.raises(OSError, match="no such file"):
        next(reading)


@pytest.mark.parametrize(
    ("length", "count", "options", "message"),
    [
        (0, 1, {}, "the training data set is empty"),
        (2, 4, {}, "trainer 3 gets none of the 2 training samples; use at most 2 trainers"),
        (2, 4, {"sampler_kwargs": {"drop_last": True}}, "trainer 3 gets none"),
        (
            9,
            1,
            {"sampler_kwargs": {"sampler": SamplerOrder([], range(9), 0)}},
            r"\(list\) gives; give at least 1",
        ),
        (
            9,
            2,
            {"sampler_kwargs": {"sampler": SamplerOrder([5], range(9), 0)}},
            "the 1 entries .*; use at most 1 train",
        ),
        (9, 2, {"sampler_kwargs": {"multiple": 16}}, "the 9 training samples; give at least 16"),
        (9, 2, {"sampler_kwargs": {"shufle": True}}, "must be among seed, shuffle, pad, drop_last"),
    ],
)
def test_an_empty_share_is_refused(length, count, options, message):
    with pytest.raises(UnsupportedConfiguration, match=message):
        source(length, count - 1, count, **options)


# From an object to a source.


def config(**training) -> Config:
    return Config(training=TrainingConfig(**training))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


HERE = Partition(0, 2)


def test_a_map_style_data_set_is_dealt():
    for data in (TensorDataset(torch.arange(6)), [1, 2, 3, 4, 5, 6], Squares(6)):
        made = make_source(data, HERE, config(max_epochs=3), {"drop_last": True})
        assert isinstance(made, DatasetSource)
        assert (made.passes, made.order.per_pass) == (3, 3)


def test_an_iterable_is_this_trainers_own_share():
    for data in (Stream(), iter(range(5)), (i for i in range(5))):
        made = make_source(data, HERE, config())
        assert isinstance(made, IterableSource)
        assert [sample for _, sample in made.samples(0)] == list(range(5))


def test_a_source_is_returned_unchanged():
    own = source(4, passes=1)
    assert make_source(own, HERE, config()) is own


@pytest.mark.parametrize(
    ("data", "training", "message"),
    [
        (7, {}, "train_source returned int; it must return"),
        (None, {}, "train_source returned NoneType"),
        (iter([1]), {"max_epochs": 2}, r"training\.max_epochs \(2\) counts passes"),
        ([1, 2], {}, "the run has no end"),
    ],
)
def test_an_object_that_is_no_source_is_refused(data, training, message):
    with pytest.raises(UnsupportedConfiguration, match=message):
        make_source(data, HERE, config(**training))


@pytest.mark.parametrize("limit", ["max_epochs", "max_steps", "max_samples", "max_seconds", "patience"])
def test_any_limit_ends_a_data_set(limit):
    assert isinstance(make_source([1, 2], HERE, config(**{limit: 1})), DatasetSource)


def test_an_iterable_resumes_by_skipping():
    made = IterableSource([10, 11, 12, 13], HERE)
    assert list(made.samples(2)) == [(2, 12), (3, 13)]
    assert (made.total, made.endless, made.samples_per_pass) == (4, False, None)
    assert IterableSource(iter([1]), HERE).total is None
    with pytest.raises(LookupError, match="IterableSource cannot give sample 2 a second time"):
        made.fetch(2)


# The feeder.


def feeder(made: Source, capacity: int = 100) -> Feeder:
    return Feeder(made, make_buffer("fifo", capacity=capacity), 5)


def drained(fed: Feeder) -> list:
    samples = []
    try:
        while True:
            samples.append(fed.buffer.get(10))
    except BufferExhausted:
        return samples


def test_a_feeder_puts_all_samples_and_finishes():
    fed = feeder(source(10), capacity=3)
    fed.start()
    assert drained(fed) == [sample for _, sample in source(10).samples(0)]
    fed.raise_error()
    fed.close()


def test_a_feeder_starts_at_the_position_of_the_buffer():
    fed = feeder(source(10))
    for key, sample in list(source(10).samples(0))[:7]:
        fed.buffer.put(sample, key)
    fed.start()
    assert drained(fed) == [sample for _, sample in source(10).samples(0)]
    fed.close()


@pytest.mark.parametrize("error", [ValueError, KeyError, RuntimeError, SystemExit, BufferExhausted])
def test_an_error_of_a_source_names_the_sample_and_has_the_traceback(error):
    def numbers():
        yield from range(3)
        raise error("no such file")

    fed = feeder(IterableSource(numbers(), HERE))
    fed.start()
    with pytest.raises(BufferClosed):
        drained(fed)
    with pytest.raises(SourceError, match=r"^trainer 5: the source raised at sample 3: .*no such file") as caught:
        fed.raise_error()
    assert "in numbers" in str(caught.value)
    assert isinstance(caught.value.__cause__, error)
    fed.close()


def test_the_sample_is_counted_from_the_start_of_the_run():
    data = Squares(10, bad=deal(10, Partition(0, 1), seed=3, epoch=0)[6])
    fed = feeder(DatasetSource(data, Partition(0, 1), seed=3, passes=1))
    for key, sample in list(source(10).samples(0))[:4]:
        fed.buffer.put(sample, key)
    fed.start()
    with pytest.raises(BufferClosed):
        drained(fed)
    with pytest.raises(SourceError, match=r"at sample 6, index \d of the data set: ValueError: sample file"):
        fed.raise_error()
    fed.close()


def test_a_refusal_of_the_buffer_is_not_an_error_of_the_source():
    fed = feeder(IterableSource([torch.ones(1, requires_grad=True)], HERE))
    fed.start()
    with pytest.raises(BufferClosed):
        drained(fed)
    with pytest.raises(ValueError, match="must not require gradients"):
        fed.raise_error()
    fed.close()


def test_closing_ends_a_feeder_that_waits_for_room():
    class Watched(IterableSource):
        def samples(self, position):
            for pair in super().samples(position):
                if pair[0] == 2:
                    reading.set()
                yield pair

    reading = threading.Event()
    fed = feeder(Watched(range(1000), HERE), capacity=2)
    fed.start()
    assert reading.wait(10)
    fed.close()
    assert not any(thread.name == "feeder-5" for thread in threading.enumerate())
    fed.raise_error()  # being closed is no error
    with pytest.raises(BufferClosed):
        fed.buffer.get(0)


def test_a_feeder_that_was_not_started_can_be_closed():
    fed = feeder(source(4))
    fed.close()
    fed.raise_error()


def test_an_empty_data_set_is_an_error_of_the_task():
    with pytest.raises(TaskError):
        source(0)

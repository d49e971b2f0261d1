"""What a DataLoader is taken for, and what of it is refused."""

import re

import pytest
import torch
from sampler_tasks import Buckets, Streamed, brighter
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paramserver import Partition, Task
from paramserver.config import Config, TrainingConfig, config_from_mapping
from paramserver.config.checks import RELATIONS
from paramserver.config.schema import BufferConfig
from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.sources import DatasetSource, Stream, make_source
from paramserver.sources.factory import resolve_reading
from paramserver.sources.sampler import SamplerOrder
from paramserver.trainers.data import DataStream

DATA = [float(i) for i in range(10)]
ONE, TWO = Partition(0, 1), Partition(1, 2)


def taken(loader, partition=ONE, hook="train_source", sampler=None, buffer=None, **training):
    return resolve_reading(
        loader, partition, Config(training=TrainingConfig(**training), buffer=buffer or BufferConfig()), hook, sampler
    )


def stream_of(loader, partition=ONE, **training):
    class Own(Task):
        def train_source(self, partition):
            return loader

    config = Config(training=TrainingConfig(max_epochs=1, **training))
    with DataStream(Own(), partition, config, {}) as data:
        data.start()
        while data.available().readiness.name == "READY":
            yield data.next_batch()


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({}, {"shuffle": False}),
        ({"shuffle": True}, {"shuffle": True}),
        ({"shuffle": True, "generator": torch.Generator().manual_seed(9)}, {"shuffle": True, "seed": 9}),
        ({"sampler": RandomSampler(DATA)}, {"shuffle": True}),
        ({"sampler": SequentialSampler(DATA)}, {"shuffle": False}),
        ({"drop_last": True}, {"shuffle": False, "multiple": 4}),
        (
            {"sampler": DistributedSampler(DATA, 2, 1, seed=6)},
            {"shuffle": True, "seed": 6, "pad": True, "drop_last": False},
        ),
        (
            {"sampler": DistributedSampler(DATA, 2, 1, shuffle=False, drop_last=True)},
            {"shuffle": False, "seed": 0, "pad": False, "drop_last": True},
        ),
    ],
)
def test_an_order_that_the_package_has_is_its_own(arguments, options):
    reading = taken(DataLoader(DATA, 4, **arguments), TWO)
    assert reading.data is DATA
    assert reading.options == options
    assert (reading.config.training.batch_size, reading.config.training.loader_workers) == (4, 0)


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler(DATA, 10),
        SubsetRandomSampler(range(5)),
        RandomSampler(DATA, replacement=True),
        RandomSampler(DATA, num_samples=4),
        SequentialSampler(range(5)),
        DistributedSampler(DATA, 1, 0),
    ],
)
def test_any_other_order_is_drawn_from_the_sampler(sampler):
    for reading in (taken(DataLoader(DATA, 4, sampler=sampler), TWO), taken(DATA, TWO, sampler=sampler)):
        order = reading.options["sampler"]
        assert isinstance(order, SamplerOrder)
        assert order.sampler is sampler
        assert reading.largest_batch is None


def test_the_distributed_sampler_gives_its_own_shares():
    for epoch in range(2):
        for drop_last in (False, True):
            samplers = [DistributedSampler(range(11), 2, i, seed=4, drop_last=drop_last) for i in range(2)]
            for i, sampler in enumerate(samplers):
                sampler.set_epoch(epoch)
                config = Config(seed=8, training=TrainingConfig(max_epochs=2))
                loader = DataLoader(list(range(11)), 3, sampler=sampler)
                source = make_source(loader, Partition(i, 2), config)
                assert isinstance(source, DatasetSource)
                share = list(sampler)
                assert [key for key, _ in source.samples(epoch * len(share))][: len(share)] == share


def test_workers_and_functions_are_those_of_the_data_loader():
    reading = taken(DataLoader(DATA, 4, num_workers=2, collate_fn=brighter, worker_init_fn=print))
    assert (reading.config.training.loader_workers, reading.collate, reading.init_fn) == (2, brighter, print)


def test_batches_of_a_data_loader_are_collated_by_it_and_processed_by_the_task():
    assert [batch for batch, _ in stream_of(DataLoader(DATA, 4, collate_fn=tuple))] == [
        (0.0, 1.0, 2.0, 3.0), (4.0, 5.0, 6.0, 7.0), (8.0, 9.0),
    ]  # fmt: skip
    default = list(stream_of(DataLoader(DATA, 4)))
    assert [batch.tolist() for batch, _ in default] == [DATA[:4], DATA[4:8], DATA[8:]]


@pytest.mark.parametrize("partition", [ONE, Partition(0, 2), TWO])
def test_batches_of_a_batch_sampler_are_dealt_whole_in_their_order(partition):
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]]
    found = list(stream_of(DataLoader(DATA, batch_sampler=batches, collate_fn=list), partition))
    assert found == [([DATA[i] for i in batch], len(batch)) for batch in batches[partition.index :: partition.count]]


def test_an_iterable_data_set_gives_the_batches_of_its_data_loader():
    loader = DataLoader(Streamed(DATA, 1, 2), 3, collate_fn=list)

    class Own(Task):
        def train_source(self, partition):
            return loader

    with DataStream(Own(), TWO, Config(), {}) as data:
        data.start()
        found = []
        while data.available().readiness.name == "READY":
            found.append(data.next_batch())
    assert found == [([1.0, 3.0, 5.0], 3), ([7.0, 9.0], 2)]


class OwnIteration(DataLoader):
    def __iter__(self):
        return iter([])


class Foreign:
    dataset, batch_size, collate_fn = DATA, 4, None

    def __iter__(self):
        return iter([])


class NoLength(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (DataLoader(DATA, None), {}, "train_source returned DataLoader with batch_size None; give"),
        (OwnIteration(DATA, 4), {}, "train_source returned OwnIteration, whose own __iter__ would not be called"),
        (Foreign(), {}, "train_source returned Foreign, a loader of another library"),
        ({"a": 1.0}, {}, "train_source returned dict, whose samples would be its keys; return the data set that"),
        (DataLoader({0: 1.0}, 4), {}, "train_source returned DataLoader over dict, whose samples would be its keys"),
        (SequentialSampler(DATA), {}, "train_source returned SequentialSampler, a sampler; return the data set"),
        (
            DataLoader(NoLength(), 4, sampler=[1]),
            {},
            "train_source returned DataLoader over NoLength, which must have __len__",
        ),
        (DataLoader(Stream(), 4), {}, "train_source returned DataLoader over Stream, which needs none; return Stream"),
        (DataLoader(Streamed(DATA, 0, 1), 4), {"sampler": [1]}, ".* over an iterable data set, of which no sampler"),
        (
            iter(DATA),
            {"sampler": [1]},
            "the method sampler returned list, but train_source gives no map-style data set",
        ),
        (
            DataLoader(DATA, 4, sampler=[1]),
            {"sampler": [1]},
            "train_source returned DataLoader with list, and the method",
        ),
        (DataLoader(DATA, 4, sampler=[[1], [2]]), {}, "list of train_source gives lists of indices; give it as batch_"),
        (
            DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 3, 2)),
            {},
            "DistributedSampler of train_source takes the share of rank 2 of 3, but .* 0 of 1; remove it",
        ),
        (
            DataLoader(DATA, batch_sampler=BatchSampler(DistributedSampler(DATA, 2, 1), 4, drop_last=False)),
            {},
            "DistributedSampler of train_source takes the share of rank 1 of 2",
        ),
        (DataLoader(DATA, 4, drop_last=True), {"hook": "validation_source"}, ".* with drop_last, but validation is"),
        (
            DataLoader(DATA, batch_sampler=Buckets(10)),
            {"buffer": BufferConfig(kind="firo")},
            r"buffer.kind \(firo\) must be fifo, as train_source gives whole batches",
        ),
        (
            DataLoader(DATA, batch_sampler=Buckets(10)),
            {"batch_size": 16},
            r"training.batch_size \(16\) must not be given, as Buckets of train_source gives whole batches",
        ),
        (DataLoader(DATA, 4), {"batch_size": 16}, r"training.batch_size \(16\) must be what the DataLoader .* \(4\)"),
        (DataLoader(DATA, 4), {"loader_workers": 1}, r"training.loader_workers \(1\) must be what the DataLoader"),
        (
            DataLoader(DATA, 4),
            {"hook": "validation_source", "validation_batch_size": 5},
            r"training.validation_batch_size \(5\) must be what the DataLoader of validation_source has \(4\)",
        ),
        (DataLoader(DATA, 5000), {}, "a batch of 5000 can never be gathered from a buffer of 4096"),
    ],
)
def test_what_cannot_be_done_is_refused(data, options, message):
    with pytest.raises((TaskError, UnsupportedConfiguration), match=f"^{message}"):
        taken(data, **options)


def test_validation_may_have_another_batch_size_than_training():
    assert taken(DataLoader(DATA, 4), hook="validation_source", batch_size=16).config.training.batch_size == 4
    assert taken(DATA, hook="validation_source", validation_batch_size=5).config.training.batch_size == 5


def test_a_key_counts_as_given_where_the_user_gave_it_even_its_default():
    base = {"task": "a:B", "training": {"max_steps": 1}}
    for given, contradicts in (({}, False), ({"batch_size": 32}, True), ({"batch_size": 4}, False)):
        config = config_from_mapping({**base, "training": {**base["training"], **given}})
        for one in (config, config_from_mapping(config.given_mapping())):  # as for a rank, and after a resume
            if contradicts:
                with pytest.raises(UnsupportedConfiguration, match=r"training.batch_size \(32\)"):
                    resolve_reading(DataLoader(DATA, 4), ONE, one)
            else:
                assert resolve_reading(DataLoader(DATA, 4), ONE, one).config.training.batch_size == 4


# Sections without the keys that a DataLoader may replace, whose defaults contradict them; a batch size that fits them,
# one that does not, and why.
DEFERRED = [
    (
        {"buffer": {"capacity": 16}},
        16,
        17,
        "a batch of {size} can never be gathered from a buffer of 16; raise buffer.capacity or lower",
    ),
    (
        {"buffer": {"capacity": 64}, "training": {"accumulate_batches": 4}},
        16,
        17,
        "4 batches of {size} for a step can never be held in a buffer of 64; raise buffer.capacity or lower",
    ),
    (
        {"buffer": {"min_new_per_batch": 40, "kind": "reservoir"}},
        40,
        39,
        "buffer.min_new_per_batch (40) must be at most training.batch_size ({size}); lower the former",
    ),
]


def read_with(data, sections, **training):
    """How data is read in a run with these sections."""
    training = {**sections.get("training", {}), **training}
    return resolve_reading(data, ONE, config_from_mapping({"task": "a:B", **sections, "training": training}))


@pytest.mark.parametrize(("sections", "fits", "breaks", "message"), DEFERRED)
def test_keys_that_are_not_given_are_checked_once_it_is_known_how_data_is_read(sections, fits, breaks, message):
    in_order = "kind" not in sections["buffer"]
    for data in (DATA, Streamed(DATA, 0, 1)) if in_order else (DATA,):
        assert read_with(DataLoader(data, fits), sections)
        with pytest.raises(UnsupportedConfiguration, match=f"^{re.escape(message.format(size=breaks))}"):
            read_with(DataLoader(data, breaks), sections)
        assert read_with(data, sections, batch_size=fits)
        with pytest.raises(UnsupportedConfiguration, match=f"^{re.escape(message.format(size=32))}"):
            read_with(data, sections)


@pytest.mark.parametrize(("sections", "fits", "breaks", "message"), DEFERRED)
def test_keys_that_are_given_are_checked_before_there_is_data(sections, fits, breaks, message):
    training = {**sections.get("training", {}), "batch_size": breaks}
    with pytest.raises(UnsupportedConfiguration, match=f"^{re.escape(message.format(size=breaks))}"):
        config_from_mapping({"task": "a:B", **sections, "training": training})


def test_each_relation_on_a_key_that_a_data_loader_may_replace_is_among_them():
    keys = [{f"{section}.{name}" for section in case[0] for name in case[0][section]} for case in DEFERRED]
    relations = [set(relation.keys) for relation in RELATIONS if relation.loader_keys]
    assert all(any(relation <= given | {"training.batch_size"} for given in keys) for relation in relations)
    assert len(relations) == len(DEFERRED)


@pytest.mark.parametrize("sections", [{"buffer": {"capacity": 16}}, {"training": {"accumulate_batches": 200}}])
def test_whole_batches_need_no_room_for_a_batch_of_the_default_size(sections):
    assert read_with(DataLoader(DATA, batch_sampler=Buckets(10)), sections).largest_batch == 5
    config = config_from_mapping({"task": "a:B", **sections})
    assert resolve_reading(DATA, ONE, config, sampler=Buckets(10)).largest_batch == 5


class Collates(Task):
    def train_source(self, partition):
        return DataLoader(DATA, 4, collate_fn=tuple, worker_init_fn=print, num_workers=1)

    def collate(self, samples):
        return samples


class KeepsCollate(Collates):
    collate = Task.collate

    def __init__(self):
        self.collate = tuple


class Keeps(Task):
    def __init__(self):
        self.sampler = WeightedRandomSampler(DATA, 10)

    def train_source(self, partition):
        return DATA


class Inits(Collates):
    worker_init_fn = staticmethod(print)
    collate = Task.collate


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Collates(), "Collates has a collate, and the DataLoader of train_source a collate_fn"),
        (KeepsCollate(), "KeepsCollate has a collate, and the DataLoader of train_source a collate_fn"),
        (Keeps(), r"Keeps has an attribute sampler \(WeightedRandomSampler\), the name of a method of Task; return it"),
        (Inits(), "Inits and the DataLoader of train_source have a worker_init_fn"),
    ],
)
def test_what_the_task_says_otherwise_is_refused(task, message):
    with pytest.raises(TaskError, match=message):
        DataStream(task, ONE, Config(training=TrainingConfig(max_epochs=1)), {})

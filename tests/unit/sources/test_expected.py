"""The number of steps of a schedule, before the run."""

import random
import time
from contextlib import ExitStack

import pytest
import torch
from sampler_tasks import Buckets
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from paramserver import Partition, Task
from paramserver.buffers.positions import AppliedPositions
from paramserver.buffers.reshard import reshard_parts
from paramserver.config import config_from_mapping
from paramserver.consistency import Verdict, decide
from paramserver.errors import SourceError
from paramserver.limits import Limits
from paramserver.sources.expected import Origin
from paramserver.trainers.data import DataStream


class Numbers(Task):
    def __init__(self, data):
        self.data = data
        self.calls = 0

    def train_source(self, partition):
        self.calls += 1
        torch.rand(1)
        return self.data(partition) if callable(self.data) else self.data


def task_with(data, mode="rpc", trainers=2, **sections):
    task = Numbers(data)
    cluster = {} if mode == "local" else {"cluster": {"num_trainers": trainers}}
    sections["training"] = {"batch_size": 4, **sections.get("training", {})}
    task.config = config_from_mapping({"task": "t.py:T", "mode": mode, **cluster, **sections})
    return task


JOIN = {"uneven_inputs": "join"}
ASYNC, BACKUP = {"server": {"consistency": "async"}}, {"server": {"backup_trainers": 1}}


@pytest.mark.parametrize(
    ("expected", "mode", "training", "sections"),
    [
        # 45 samples in two epochs: 90 of one trainer; 46 and 44 of two.
        (23, "local", {"max_epochs": 2}, {}),
        (11, "ddp", {"max_epochs": 2}, {}),
        (11, "rpc", {"max_epochs": 2}, {}),
        (12, "rpc", {"max_epochs": 2, **JOIN}, {}),
        (23, "rpc", {"max_epochs": 2, **JOIN}, ASYNC),
        (12, "rpc", {"max_epochs": 2, **JOIN}, {"server": {"consistency": "async", "arrivals": 2}}),
        (23, "rpc", {"max_epochs": 2, **JOIN}, BACKUP),
        (5, "rpc", {"max_epochs": 2, "accumulate_batches": 3, **JOIN}, {}),
        (7, "rpc", {"max_epochs": 2, "max_steps": 7}, {}),
        (11, "rpc", {"max_epochs": 2, "max_steps": 70}, {}),
        (5, "ddp", {"max_samples": 33}, {}),
        (9, "rpc", {"max_samples": 33}, ASYNC),
        (21, "rpc", {"max_steps": 7, "local_steps": 3}, {}),
        (11, "rpc", {"max_epochs": 2, "local_steps": 3}, {}),
        (11, "rpc", {"max_steps": 7, "local_steps": 3}, ASYNC),  # of each of two trainers
        (None, "rpc", {"max_seconds": 7}, {}),
        (7, "rpc", {"max_seconds": 7, "max_steps": 7}, {}),
        (None, "local", {"max_epochs": 2}, {"buffer": {"kind": "reservoir", "capacity": 8}}),
    ],
)
def test_it_is_the_number_of_updates_or_local_steps(expected, mode, training, sections):
    assert task_with(range(45), mode, training=training, **sections).total_steps == expected


def test_a_data_loader_is_read_as_in_the_run():
    assert task_with(lambda _: DataLoader(range(40), batch_size=4), training={"max_epochs": 1}).total_steps == 5


@pytest.mark.parametrize("limit", [None, 9])
def test_an_iterable_has_no_length(limit):
    assert task_with(lambda _: iter(range(40)), training={"max_steps": limit}).total_steps == limit


def test_simulations_have_the_length_that_is_planned():
    from paramserver.sources import Simulations

    simulations = {"function": "f.py:f", "count": 4, "steps": 10, "fields": {"a": {"shape": [1]}}}
    simulations |= {"parameters": {"t": [0, 1]}}
    assert task_with(lambda _: Simulations(), simulations=simulations).total_steps == 5


def test_the_data_is_read_once_and_leaves_no_trace_in_random_numbers():
    task = task_with(range(40), training={"max_epochs": 1})
    states = torch.get_rng_state()
    assert [task.total_steps, task.total_steps, task.calls] == [5, 5, 1]
    assert torch.equal(states, torch.get_rng_state())
    task.config = task_with(range(40), training={"max_epochs": 3}).config
    assert task.total_steps == 15


def test_an_error_of_the_data_is_named():
    def broken(partition):
        raise AttributeError("no such column")

    with pytest.raises(SourceError, match=r"total_steps: train_source, or what it returned, .*no such column"):
        _ = task_with(broken, training={"max_epochs": 1}).total_steps


class Grows(BatchSampler):
    """Each pass has three batches, which are larger than those of the pass before, up to a limit."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 3

    def __iter__(self):
        size = min(1 + self.epoch, 4)
        return iter([list(range(size + n)) for n in range(3)])

    def set_epoch(self, epoch):
        self.epoch = epoch


def take(stream, batches, training):
    """Take the batches of a step, as the training loop does; return their samples."""
    samples, at_once = 0, training.accumulate_batches if training.has_rounds else batches
    for done in range(batches):
        if done and done % at_once == 0:
            stream.wait_batches()
        samples += stream.next_batch()[1]
    return samples


def steps_of(task, resumed=None, stop_at=None):
    """The updates, or local steps, that the trainers decide on with the data of a run, or with what a checkpoint left.

    With ``stop_at``, a limit of updates, return the checkpoint that a run has which is stopped then.
    """
    config, training = task.config, task.config.training
    trainers = config.cluster.num_trainers
    with ExitStack() as stack:
        streams = [DataStream(task, Partition(i, trainers), config, {}) for i in range(trainers)]
        run, parts = resumed or ({"step": 0, "samples": 0, "gradients": 0}, [])
        counters = [dict(part["counters"]) for part in parts]
        counters = counters or [dict.fromkeys(("batch_idx", "samples_served", "seconds"), 0) for _ in streams]
        for stream, part in zip(streams, parts, strict=False):
            stream.load_state_dict(part)
        for stream in streams:
            stack.enter_context(stream).start()
        run = dict(run)
        while True:
            announced = {i: stream.available() for i, stream in enumerate(streams)}
            limits = Limits.of(training)
            decision = decide(announced, run["step"], run["samples"], limits, training.uneven_inputs)
            if decision.verdict is Verdict.END or run["step"] == stop_at:
                states = [stream.state_dict() for stream in streams]
                empty = {"random": None, "task": {}}
                parts = [{**state, **empty, "counters": own} for state, own in zip(states, counters, strict=True)]
                return run["gradients"] if stop_at is None else (run, parts)
            assert decision.verdict is Verdict.GO
            for i in decision.active:
                run["samples"] += take(streams[i], decision.batches, training)
                counters[i]["batch_idx"] += decision.batches
            run["step"] += 1
            run["gradients"] += -(-decision.batches // training.accumulate_batches)


def drawn_run(rng):
    """A DataLoader, and a config with limits of all kinds whose steps are full or not."""
    length, batch, times = rng.randint(30, 60), rng.randint(1, 7), rng.choice((1, 1, 2, 3))
    data = list(range(length))
    limits = {"max_epochs": rng.randint(1, 4), "max_samples": rng.randint(1, 300), "max_steps": rng.randint(1, 30)}
    training = {name: limits[name] for name in rng.sample(sorted(limits), rng.randint(1, 3))}
    training |= {"accumulate_batches": rng.randint(1, 4), "local_steps": rng.choice((1, 1, 2, 3))}
    sampler = rng.choice(
        (
            None,
            BatchSampler(SequentialSampler(data), batch, rng.random() < 0.5),
            BatchSampler(RandomSampler(data), batch, False),
            Buckets(length, batch),
            Grows(),
            [data[:1], data[1:3], data[3:4], data[1:4]],
        )
    )
    if sampler is None:
        loader = DataLoader(data, batch, drop_last=rng.random() < 0.5)
    else:
        loader = DataLoader(data, batch_sampler=sampler)
        times = 1 if "max_samples" in training else times  # in which order batches repeat is not known
    return loader, {
        "mode": "ddp",
        "cluster": {"num_trainers": rng.randint(1, 3)},
        "training": {**training, "uneven_inputs": rng.choice(("join", "stop"))},
        "buffer": {"pseudo_epochs": times},
    }


@pytest.mark.parametrize("seed", range(8))
def test_in_lockstep_it_is_what_the_trainers_decide(seed):
    rng = random.Random(seed)
    for _ in range(25):
        loader, sections = drawn_run(rng)
        task = Numbers(loader)
        task.config = config_from_mapping({"task": "t.py:T", **sections})
        assert task.total_steps == steps_of(task), sections


@pytest.mark.parametrize("seed", range(3))
def test_after_a_resume_with_other_trainers_or_batches_it_is_what_they_decide(seed):
    rng = random.Random(seed)
    for _ in range(6):
        loader, sections = drawn_run(rng)
        if rng.random() < 0.4:
            loader, sections["training"]["batch_size"] = range(rng.randint(30, 60)), rng.randint(1, 7)
        elif loader.batch_size is None:
            sections["training"].pop("max_samples", None)  # the sizes of batches that are left are not known
        task, resumed = Numbers(loader), None
        for number in range(3):
            training = dict(sections["training"])
            trainers = rng.randint(1, 3)
            training["accumulate_batches"] = rng.choice((1, 2, 3))
            if "batch_size" in training:
                training["batch_size"] = rng.randint(1, 7)
            if (training.get("max_epochs") or training.get("max_samples") or training.get("max_steps")) is None:
                training["max_epochs"] = 4
            values = {**sections, "training": training, "cluster": {"num_trainers": trainers}}
            task.config = config_from_mapping({"task": "t.py:T", **values})
            if resumed is None:
                task.steps_origin = Origin.of_start(task.config)
            else:
                run, before = resumed
                parts = before
                if len(before) != trainers:
                    capacity = task.config.buffer.capacity
                    parts = reshard_parts(before, trainers, capacity=capacity, entropy=(0, number))
                task.steps_origin = task.steps_origin.at_resume(run, before, parts, task.config)
                resumed = run, parts
            assert task.total_steps == steps_of(task, resumed), (number, values)
            resumed = steps_of(task, resumed, stop_at=(resumed[0]["step"] if resumed else 0) + rng.randint(0, 6))


def test_a_trainer_that_was_lost_has_served_what_was_applied():
    """Its part of a checkpoint has no buffer. It has read 7 of the 10 samples of the first pass, and 4 are due."""
    config = config_from_mapping({"task": "t.py:T", "training": {"max_epochs": 4}})
    applied, source = AppliedPositions(), {"length": 10, "rest": [], "epoch": 0, "order": {"per_pass": 10}}
    applied.add([0, 1, 2, 3, 5, 6], 1)
    part = {"buffer": None, "applied": applied.packed_state_dict(), "source": source, "counters": {"batch_idx": 3}}
    run = {"step": 3, "samples": 6}
    origin = Origin.of_start(config).at_resume(run, [part], [part], config)
    assert (origin.epoch, list(origin.due)) == (1, [4])


@pytest.mark.parametrize("whole_batches", [False, True])
def test_a_long_run_is_counted_at_once(whole_batches):
    data = range(10_001)
    loader = DataLoader(data, 4)
    if whole_batches:
        loader = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False))
    task = Numbers(loader)
    training = {"max_samples": 8 * 10**6, "uneven_inputs": "join"}
    task.config = config_from_mapping({"task": "t.py:T", "cluster": {"num_trainers": 2}, "training": training})
    began = time.process_time()
    assert task.total_steps == pytest.approx(10**6, rel=1e-3)
    assert time.process_time() - began < 5

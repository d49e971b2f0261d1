"""Resharding to another number of trainers: no sample is lost or served once too often."""

import itertools
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import RandomSampler

from paramserver.buffers import Fifo, make_buffer
from paramserver.buffers.positions import AppliedPositions
from paramserver.buffers.reshard import reshard_buffers, reshard_parts
from paramserver.errors import CheckpointError
from paramserver.sources import DatasetSource, IterableSource, Partition, ResumePosition
from paramserver.sources.sampler import SamplerOrder

COUNTERS = {"batch_idx": 3, "samples_served": 5, "epoch": 1, "epoch_open": True, "seconds": 0.5}


class Trainer:
    """Source and buffer of one trainer, without threads: tests call ``put`` and ``serve``."""

    def __init__(self, data, index, count, passes, *, kind="fifo", capacity=1000, pseudo_epochs=1):
        self.source = DatasetSource(data, Partition(index, count), seed=4, passes=passes)
        options = {"capacity": capacity, "seed": index, "watermark": 0, "max_bytes": None, "min_new_per_batch": 0}
        self.buffer = make_buffer(kind, pseudo_epochs=pseudo_epochs, batch_size=1, **options)
        self.index = index
        self.served = []

    def put(self, most):
        start = self.buffer.info().puts
        room = self.buffer.capacity - len(self.buffer)
        for n, (key, sample) in enumerate(self.source.samples(start)):
            if n == min(most, room):
                return
            self.buffer.put(sample, key, last=start + n + 1 == self.source.total)

    def serve(self, most):
        for _ in range(min(most, len(self.buffer))):
            self.served += self.buffer.get_batch(1, 1.0).keys

    def drain(self):
        while self.buffer.info().puts < self.source.total:
            self.put(7)
            self.serve(3)
        self.buffer.finish()
        while len(self.buffer):
            self.served += self.buffer.get_batch(1, 1.0).keys

    def part(self):
        buffer = self.buffer.state_dict(samples=False)
        return {
            "buffer": buffer,
            "source": self.source.state_dict(),
            "counters": {**COUNTERS, "samples_served": len(self.served)},
            "random": {"of": self.index},
            "task": {"of": self.index},
            "validation": {"loss": self.index},
        }

    def resume(self, part):
        if "leftovers" in part:
            self.source.reshard([ResumePosition(**one) for one in part["leftovers"]], part["buffer"]["keys"])
        else:
            self.source.load_state_dict(part["source"])
        self.buffer.load_state_dict({**part["buffer"], "finished": False}, self.source.fetch)


def resumed(trainers, count, passes, **options):
    parts = reshard_parts(
        [one.part() for one in trainers], count, capacity=options.get("capacity", 1000), entropy=(4, 1)
    )
    new = [Trainer(trainers[0].source.dataset, i, count, passes, **options) for i in range(count)]
    for one, part in zip(new, parts, strict=True):
        one.resume(part)
    return new


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(7, 40),
    counts=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    passes=st.integers(1, 4),
    kind=st.sampled_from(["fifo", "firo"]),
    pseudo_epochs=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_every_pass_serves_every_sample_once_for_any_numbers_of_trainers(
    length, counts, passes, kind, pseudo_epochs, seed
):
    """Stopped again and again, each time with another number; trainers are at different places, even passes."""
    draw = random.Random(seed)
    options = {"kind": kind, "pseudo_epochs": pseudo_epochs}
    trainers = [Trainer(range(length), i, counts[0], passes, **options) for i in range(counts[0])]
    served = []
    for count in counts[1:]:
        for one in trainers:
            one.put(draw.randrange(length * 2))
            one.serve(draw.randrange(length))
        served += [key for one in trainers for key in one.served]
        trainers = resumed(trainers, count, passes, **options)
    for one in trainers:
        one.drain()
    served += [key for one in trainers for key in one.served]
    assert Counter(served) == Counter(dict.fromkeys(range(length), passes * pseudo_epochs))


def test_started_passes_come_first_and_are_dealt_evenly():
    trainers = [Trainer(range(100), i, 2, 2) for i in range(2)]
    for one in trainers:
        one.put(30)
        one.serve(10)
    before = {key for one in trainers for key in one.served}
    new = resumed(trainers, 4, 2)
    left = [[key for key, _ in itertools.islice(one.source.samples(0), 20)] for one in new]
    assert [len(one) for one in left] == [20] * 4
    assert sorted(key for one in left for key in one) == sorted(set(range(100)) - before)
    assert all(one.source.total == 20 + 25 for one in new)
    # In the order without a resume: the first trainer gets the first sample.
    assert left[0][0] == trainers[0].buffer.get_batch(1, 1.0).keys[0]


def test_pass_numbers_continue_after_the_last_started_pass():
    trainers = [Trainer(range(10), i, 2, None) for i in range(2)]
    trainers[0].put(8)
    trainers[0].serve(6)  # the sixth is of its second pass
    trainers[1].put(1)
    (one,) = resumed(trainers, 1, None)
    keys = trainers[0].served + [key for key, _ in itertools.islice(one.source.samples(0), 34)]
    assert Counter(keys[:20]) == Counter(dict.fromkeys(range(10), 2))
    assert keys[20:30] != keys[30:40]
    assert sorted(keys[20:30]) == sorted(keys[30:40]) == list(range(10))


@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_the_time_of_the_run_does_not_go_back(trainers):
    parts = [Trainer([1.0, 2.0], i, 2, 1).part() for i in range(2)]
    parts[1]["counters"]["seconds"] = 2.5
    resharded = reshard_parts(parts, trainers, capacity=10, entropy=(4, 1))
    assert [part["counters"]["seconds"] for part in resharded] == [2.5] * trainers


def test_another_data_set_is_refused():
    (old,) = [Trainer(range(10), 0, 1, None)]
    with pytest.raises(CheckpointError, match=r"has 12 samples, it must have 10.*init_from"):
        DatasetSource(range(12), Partition(0, 1), seed=4).load_state_dict(old.source.state_dict())


def ordered(seed=0, sampler=None, index=0, count=1, **options):
    if sampler is not None:
        options["sampler"] = SamplerOrder(sampler, range(10), seed)
    return DatasetSource(range(10), Partition(index, count), seed=seed, sampler_kwargs=options)


ORDERS = {
    "seed": ({}, {"seed": 1}, r"shuffled with seed 1, .*shuffled with seed 0"),
    "shuffle": ({}, {"shuffle": False}, r"\(not shuffled, .*shuffled with seed 0"),
    "drop_last": ({"multiple": 2}, {"multiple": 3}, r"3 entries .* 4 entries"),
    "pad": ({"sampler": range(9)}, {"sampler": range(9), "pad": True}, r"5 entries .* 4 entries"),
    "sampler": ({"sampler": range(10)}, {"sampler": range(9, -1, -1)}, r"checksum \w+, 5 .* checksum \w+, 5"),
    "batches": ({"sampler": [[0, 1, 2], [3, 4]]}, {"sampler": [[0, 1], [2, 3], [4]]}, r"checksum .* checksum"),
    "none": ({"sampler": range(10)}, {}, r"shuffled with seed 0, .*\(of a sampler with checksum"),
}


@pytest.mark.parametrize(("before", "after", "message"), ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("trainers", [2, 3])
def test_another_order_of_the_data_is_refused(before, after, message, trainers):
    """Positions of one order are others in another: samples of the pass would be served twice, and others never."""
    states = [ordered(**before, index=i, count=2).state_dict() for i in range(2)]

    def resume(options):
        made = ordered(**options, index=1, count=trainers)
        if trainers == 2:
            made.load_state_dict(states[1])
        else:
            made.reshard([ResumePosition(state, 1) for state in states], [])

    with pytest.raises(CheckpointError, match=f"order of the training data.*{message}.*init_from"):
        resume(after)
    resume(before)
    for state in states:
        del state["order"]  # of an earlier release
    resume(before)


def test_what_changes_no_order_is_no_other_one():
    state = ordered(shuffle=False, multiple=5).state_dict()
    ordered(seed=1, shuffle=False, drop_last=True).load_state_dict(state)
    ordered(seed=1, sampler=range(10)).load_state_dict(ordered(sampler=[*range(10)]).state_dict())
    seeded = (torch.Generator().manual_seed(seed) for seed in range(2))
    first, second = (ordered(sampler=RandomSampler(range(10), True, generator=one)) for one in seeded)
    assert second.state_dict()["order"] != first.state_dict()["order"]
    second.load_state_dict(first.state_dict())  # which has the state of the generator
    assert second.state_dict()["order"] == first.state_dict()["order"]


def state_of(kind, samples, served=0, capacity=16, **options):
    buffer = make_buffer(
        kind, **{"capacity": capacity, "seed": 0, "watermark": 0, "max_bytes": None, "min_new_per_batch": 0, **options}
    )
    for i, sample in enumerate(samples):
        buffer.put(sample, i)
    for _ in range(served):
        buffer.get_batch(1, 1.0)
    return buffer.state_dict()


def restored(states, kind="fifo", capacity=16, **options):
    buffers = []
    for state in states:
        buffer = make_buffer(
            kind,
            **{"capacity": capacity, "seed": 9, "watermark": 0, "max_bytes": None, "min_new_per_batch": 0, **options},
        )
        buffer.load_state_dict(state)
        buffers.append(buffer)
    return buffers


@pytest.mark.parametrize("sample", [lambda n: torch.tensor([float(n), 1.0]), lambda n: torch.ones(n % 3 + 1) * n])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_held_samples_are_dealt_in_turn_in_columns_and_as_objects(sample, count):
    states = [state_of("fifo", [sample(n) for n in range(3)]), state_of("fifo", [sample(n) for n in range(10, 15)])]
    new, divided = reshard_buffers(states, count, capacity=16, entropy=(0, 1))
    assert [(one["unserved"], one["kept"]) for one in divided] == [([], [0, 1, 2]), ([], [0, 1, 2, 3, 4])]
    buffers = restored(new)
    values = [[float(x[0]) for x in b.get_batch(len(b), 1.0).samples] if len(b) else [] for b in buffers]
    in_turn = [0, 10, 1, 11, 2, 12, 13, 14]
    assert values == [in_turn[i::count] for i in range(count)]


def test_states_of_different_layouts_become_objects():
    states = [state_of("fifo", [torch.zeros(2)] * 2), state_of("fifo", [torch.zeros(3)] * 2)]
    (buffer,) = restored(reshard_buffers(states, 1, capacity=8, entropy=(0, 1))[0])
    assert [len(x) for x in buffer.get_batch(4, 1.0).samples] == [2, 3, 2, 3]


def test_a_sample_that_was_served_once_of_twice_is_served_once_more():
    states = [state_of("fifo", [1, 2, 3, 4], served=2, pseudo_epochs=2), state_of("fifo", [5, 6], pseudo_epochs=2)]
    (buffer,) = restored(reshard_buffers(states, 1, capacity=8, entropy=(0, 1))[0], pseudo_epochs=2)
    buffer.finish()
    assert buffer.remaining_servings() == 10
    assert buffer.info().gets == 2
    assert buffer.info().puts == 6


def test_samples_that_do_not_fit_are_refused_with_the_number_that_would():
    states = [state_of("fifo", range(16)), state_of("fifo", range(16))]
    with pytest.raises(CheckpointError, match=r"hold 32 samples that must stay.*room for 16.*2 times"):
        reshard_buffers(states, 1, capacity=16, entropy=(0, 1))


def test_a_reservoir_keeps_unseen_samples_and_evicts_seen_ones():
    states = [state_of("reservoir", range(8), served=6, capacity=8), state_of("reservoir", range(8, 16), capacity=8)]
    unseen = int((states[0]["served"] == 0).sum()) + 8
    (state,), *_ = reshard_buffers(states, 1, capacity=12, entropy=(0, 1))
    (buffer,) = restored([state], "reservoir", capacity=12)
    assert (len(buffer), buffer.info().unseen) == (12, unseen)
    again = reshard_buffers(states, 1, capacity=12, entropy=(0, 1))[0][0]
    assert again["keys"] == state["keys"]
    with pytest.raises(CheckpointError, match="must stay"):
        reshard_buffers(states, 1, capacity=unseen - 1, entropy=(0, 1))


def test_old_trainers_keep_their_random_state_and_new_ones_get_their_own():
    trainers = [Trainer(range(20), i, 2, 1) for i in range(2)]
    parts = reshard_parts([one.part() for one in trainers], 4, capacity=16, entropy=(4, 1))
    assert [part["random"] for part in parts] == [{"of": 0}, {"of": 1}, None, None]
    assert [part["task"] for part in parts] == [{"of": 0}, {"of": 1}, {}, {}]
    assert [part["validation"]["loss"] for part in parts] == [0, 1, 0, 0]
    draws = [str(part["buffer"]["rng"]) for part in parts]
    assert len(set(draws)) == 4
    other = reshard_parts([one.part() for one in trainers], 4, capacity=16, entropy=(4, 2))
    assert [str(part["buffer"]["rng"]) == draw for part, draw in zip(other, draws, strict=True)] == [
        True,
        True,
        False,
        False,
    ]


def test_the_sum_of_served_samples_is_kept():
    trainers = [Trainer(range(20), i, 3, 1) for i in range(3)]
    for one in trainers:
        one.put(4 + one.index)
        one.serve(2 + one.index)
    for count in (1, 2, 5):
        parts = reshard_parts([one.part() for one in trainers], count, capacity=16, entropy=(4, 1))
        assert sum(part["counters"]["samples_served"] for part in parts) == 9


class Lines:
    """A stateful iterable: numbers of several files, which are dealt by file."""

    def __init__(self, files):
        self.left = [list(file) for file in files]

    def __iter__(self):
        while self.left:
            while self.left[0]:
                yield self.left[0].pop(0)
            self.left.pop(0)

    def state_dict(self):
        return {"left": [list(file) for file in self.left]}

    def load_state_dict(self, state):
        self.left = [list(file) for file in state["left"]]

    def reshard(self, states, index, count):
        files = [file for state in states for file in state["left"] if file]
        self.left = [list(file) for file in files[index::count]]


def test_a_stateful_iterable_is_resumed_and_resharded():
    old = []
    for index in range(2):
        source = IterableSource(Lines([range(10 * f, 10 * f + 5) for f in range(index * 3, index * 3 + 3)]), None)
        buffer = Fifo(100)
        for group in itertools.islice(source.groups(0), 7):
            ((key, sample),) = group
            buffer.put_many([sample], [key], mark=source.mark())
        buffer.get_batch(4, 1.0)
        old.append((source, buffer))
    same = IterableSource(Lines([]), Partition(0, 2))
    same.load_state_dict({}, old[0][1].state_dict()["mark"])
    assert next(iter(same.samples(7))) == (7, 12)
    leftovers = [ResumePosition({}, 7, (), buffer.state_dict()["mark"]) for _, buffer in old]
    new = [IterableSource(Lines([]), Partition(i, 3)) for i in range(3)]
    for one in new:
        one.reshard(leftovers, [])
    rest = sorted(sample for one in new for _, sample in one.samples(0))
    assert rest == [12, 13, 14, *range(20, 25), 42, 43, 44, *range(50, 55)]


def test_a_plain_iterable_has_a_share_for_the_same_number_only():
    with pytest.raises(CheckpointError, match=r"a checkpoint of 2 trainers.*IterableSource.*resumed with 2"):
        IterableSource(iter([1]), Partition(0, 1)).reshard([ResumePosition({}, 0)] * 2, [])


@pytest.mark.parametrize("ahead", [0, 3, 17, 60])
def test_how_far_a_fifo_had_read_ahead_does_not_matter(ahead):
    trainers = [Trainer(range(20), i, 2, None) for i in range(2)]
    for one in trainers:
        one.put(7 + ahead * (one.index + 1))
        one.serve(7)
    new = resumed(trainers, 3, None)
    plain = resumed([*map(without_reading_ahead, trainers)], 3, None)
    for one, other in zip(new, plain, strict=True):
        assert one.source.order.epoch == other.source.order.epoch
        assert one.source.order.rest.tolist() == other.source.order.rest.tolist()


def without_reading_ahead(trainer):
    exact = Trainer(trainer.source.dataset, trainer.index, trainer.source.partition.count, None)
    exact.put(len(trainer.served))
    exact.serve(len(trainer.served))
    return exact


def mark_of(left):
    return {"position": 5, "state": {"left": left}}


def test_a_resharded_iterable_has_a_mark_before_anything_is_read():
    """Stopped again before anything was put: the mark is the place of the share, not the start."""
    source = IterableSource(Lines([]), Partition(0, 1))
    source.reshard([ResumePosition({}, 5, (), mark_of([[7, 8]])), ResumePosition({}, 5, (), mark_of([]))], ["held"] * 2)
    mark = source.mark()
    assert mark == {"position": 2, "state": {"left": [[7, 8]]}, "ended": False}
    assert list(source.samples(2)) == [(2, 7), (3, 8)]
    assert mark["state"] == {"left": [[7, 8]]}  # a copy: reading on does not change it


@pytest.mark.parametrize("new_trainers", [1, 2, 3, 5])
def test_a_checkpoint_made_while_a_trainer_was_lost_serves_each_sample_once(new_trainers: int) -> None:
    length, passes, options = 23, 2, {"seed": 7}
    sources = [DatasetSource(range(length), Partition(i, 3), seed=7, passes=passes) for i in range(3)]
    applied = Counter[int]()
    parts = []
    for index, source in enumerate(sources):
        order = [key for key, _ in source.samples(0)]
        if index == 1:  # lost: 4 applied in order, and two further ahead
            account = AppliedPositions()
            account.add([0, 1, 2, 3, 6, 8], times_due=1)
            applied.update(order[i] for i in (0, 1, 2, 3, 6, 8))
            parts.append({"buffer": None, "applied": account.state_dict(), "source": source.state_dict()})
        else:
            buffer = Fifo(capacity=8)
            buffer.put_many([None] * 8, order[:8])
            applied.update(buffer.get_batch(5, timeout=5.0).keys)
            state = buffer.state_dict(samples=False)
            parts.append({"buffer": state, "source": source.state_dict()})
        parts[-1] |= {"random": None, "task": {}, "counters": {**COUNTERS, "batch_idx": 1}}
    resharded = reshard_parts(parts, new_trainers, capacity=8, entropy=(7, 1))
    for index, part in enumerate(resharded):
        source = DatasetSource(range(length), Partition(index, new_trainers), passes=passes, **options)
        source.reshard([ResumePosition(**one) for one in part["leftovers"]], part["buffer"]["keys"])
        applied.update(key for key, _ in source.samples(0))
    assert applied == Counter(dict.fromkeys(range(length), passes))


def test_a_lower_limit_leaves_out_the_rest_of_a_later_pass_and_a_higher_one_serves_it():
    """One trainer has served one and a half passes of 8 samples; two trainers continue."""
    state = DatasetSource(range(8), Partition(0, 1), seed=0, passes=3).state_dict()
    for passes, expected in ((1, 0), (2, 2), (3, 6)):
        source = DatasetSource(range(8), Partition(0, 2), seed=0, passes=1)
        source.reshard([ResumePosition(state, 12)], [])
        resumed = DatasetSource(range(8), Partition(0, 2), seed=0, passes=passes)
        resumed.load_state_dict(source.state_dict())
        assert source.total == len(list(source.samples(0))) == 0
        assert resumed.total == len(list(resumed.samples(0))) == expected

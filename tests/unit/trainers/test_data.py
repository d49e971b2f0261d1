"""The data of a trainer whose process is lost and replaced again and again: what was applied, and what is served."""

import random
from collections import Counter
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset

from paramserver import Partition, Task
from paramserver.buffers.positions import AppliedPositions
from paramserver.buffers.reshard import reshard_parts
from paramserver.config import Config, PublishConfig, SimulationsConfig, TrainingConfig
from paramserver.config.schema import BufferConfig
from paramserver.consistency import Readiness
from paramserver.errors import CheckpointError, SourceError
from paramserver.online.spec import IngestSpec, ReceiverSpec
from paramserver.online.weights import Version
from paramserver.sources import Source, Stream
from paramserver.trainers.data import DataStream

SAMPLES, PASSES, BATCH = 47, 3, 5
WAIT_S = 20.0


class Numbers(Task):
    """Serves what it is given."""

    def __init__(self, make):
        self.make = make

    def train_source(self, partition):
        return self.make()


class Shuffled:
    """A stateful iterable: it can continue at a place, and be dealt anew."""

    def __init__(self, values):
        self.values, self.at = list(values), 0

    def __iter__(self):
        while self.at < len(self.values):
            self.at += 1
            yield self.values[self.at - 1]

    def state_dict(self):
        return {"values": self.values, "at": self.at}

    def load_state_dict(self, state):
        self.values, self.at = state["values"], state["at"]

    def reshard(self, states, index, count):
        left = [value for state in states for value in state["values"][state["at"] :]]
        self.values, self.at = left[index::count], 0


class Arriving(Source):
    """Samples that arrive once, like those of a stream."""

    repeatable = False

    def samples(self, position):
        yield from ((n, float(n)) for n in range(position, 20))


def config(kind: str, times: int = 1, passes: int | None = PASSES, **buffer) -> Config:
    return Config(
        training=TrainingConfig(batch_size=BATCH, max_epochs=passes),
        buffer=BufferConfig(kind=kind, capacity=16, pseudo_epochs=times, **buffer),
    )


def stream(make, settings: Config, partition: Partition | None = None) -> DataStream:
    return DataStream(Numbers(make), partition or Partition(0, 1), settings, {})


def serve(data: DataStream) -> tuple[list, list[int]] | None:
    """Values and positions of the next batch; None at the end."""
    if (readiness := data.available(WAIT_S).readiness) is Readiness.DRAINED:
        return None
    assert readiness is Readiness.READY
    values, _ = data.next_batch()
    positions = data.pop_served()[0].tolist()
    assert len(positions) == len(values)
    return [int(value) for value in values], positions


class Lives:
    """One trainer's data over many processes, each of which is lost with the batches that were not applied."""

    def __init__(self, make, settings: Config, seed: int, state: dict | None = None):
        self.rng = random.Random(seed)
        self.make, self.settings = make, settings
        self.applied: Counter[int] = Counter()
        self.account = AppliedPositions()
        self.lost = self.losses = 0
        with stream(make, settings) as data:
            if state is not None:
                data.load_state_dict(state)
            self.times_due, self.source = data.buffer.times_due, data.source.state_dict()
            self.account = data.positions()
            ended = self.live(data)
        while not ended:
            self.losses += 1
            with stream(make, settings) as data:
                data.load_after_loss({"source": self.source}, deepcopy(self.account))
                assert data.positions() == self.account
                ended = self.live(data)

    def live(self, data: DataStream) -> bool:
        """Apply batches until the process is lost, or the data ends; return whether it has."""
        data.start()
        complete = True
        while self.rng.random() < 0.9:
            data.enter_epoch(self.rng.randrange(-1, PASSES))  # what is read ahead changes nothing of what is served
            if (served := serve(data)) is None:
                # The buffer counts what it served as applied until the process is lost.
                assert data.samples_left == 0
                return complete
            values, positions = served
            if self.rng.random() < 0.2:
                self.lost += len(positions)
                complete = False
            else:
                self.applied.update(values)
                self.account.add(positions, self.times_due)
        return False


@pytest.mark.parametrize(("kind", "times"), [("fifo", 1), ("fifo", 3), ("firo", 1), ("firo", 3), ("reservoir", 1)])
def test_each_sample_is_applied_as_often_as_is_due_over_hundreds_of_losses(kind, times):
    losses = 0
    for seed in range(30):
        lives = Lives(lambda: list(range(SAMPLES)), config(kind, times, watermark=7), seed)
        losses += lives.losses
        assert lives.lost  # what was served and not applied
        if kind == "reservoir":
            assert lives.applied.keys() == set(range(SAMPLES))
            assert all(lives.applied[i] >= PASSES for i in range(SAMPLES))
        else:
            assert lives.applied == dict.fromkeys(range(SAMPLES), PASSES * times)
            assert lives.account.count == SAMPLES * PASSES * times
        assert lives.account.low == SAMPLES * PASSES
    assert losses >= 150


@pytest.mark.parametrize("make", [lambda: iter(range(60)), lambda: Shuffled(range(60))], ids=["plain", "stateful"])
@pytest.mark.parametrize("kind", ["fifo", "firo"])
def test_an_iterable_is_read_again_and_what_was_applied_is_left_out(kind, make):
    losses = 0
    for seed in range(5):
        lives = Lives(make, config(kind, 2, passes=None), seed)
        losses += lives.losses
        assert lives.applied == dict.fromkeys(range(60), 2)
    assert losses >= 5


@pytest.mark.parametrize(("kind", "times"), [("fifo", 1), ("fifo", 3), ("firo", 3)])
def test_a_resumed_run_loses_a_process(kind, times):
    """The buffer of the checkpoint holds samples that were served in part; a replacement has an empty buffer."""
    settings, losses = config(kind, times), 0
    for seed in range(5):
        first: Counter[int] = Counter()
        with stream(lambda: list(range(SAMPLES)), settings) as data:
            data.start()
            for _ in range(9):
                values, _ = serve(data)
                first.update(values)
            state = data.state_dict()
        lives = Lives(lambda: list(range(SAMPLES)), settings, seed, state)
        losses += lives.losses
        assert lives.applied + first == dict.fromkeys(range(SAMPLES), PASSES * times)
    assert losses >= 5


def test_a_restored_stream_states_what_was_served():
    # The buffer is full before each batch, so samples are drawn in a random order.
    settings = config("firo", 2, watermark=16)
    with stream(lambda: list(range(SAMPLES)), settings) as data:
        data.start()
        expected = AppliedPositions()
        for _ in range(12):
            expected.add(serve(data)[1], 2)
        state = data.state_dict()
    with stream(lambda: list(range(SAMPLES)), settings) as data:
        assert data.positions() == AppliedPositions()
        data.load_state_dict(state)
        assert data.positions() == expected
        assert expected.above  # some were served once


@pytest.mark.parametrize("batches", [0, 4, 10, 20])
def test_passes_that_are_not_begun_may_have_another_order(batches):
    settings = Config(training=TrainingConfig(batch_size=BATCH, max_epochs=2))
    with stream(lambda: list(range(50)), settings) as data:
        for _ in range(batches):
            serve(data)
        state = data.state_dict()
    holds_samples = len(state["buffer"]["keys"]) > 0
    assert holds_samples is (batches in (4, 10))
    with stream(lambda: list(range(50)), replace(settings, seed=1)) as data:
        if holds_samples:
            with pytest.raises(CheckpointError, match=r"seed 1.*seed 0"):
                data.load_state_dict(state)
        else:
            data.load_state_dict(state)
            assert data.samples_left == 100 - batches * BATCH


@pytest.mark.parametrize(("kind", "times"), [("fifo", 1), ("fifo", 2), ("firo", 1), ("reservoir", 1)])
@pytest.mark.parametrize("batches", [17, 19, 22, 24])
def test_a_resume_with_fewer_passes_serves_none_beyond_them(kind, times, batches):
    def part(settings, state, most):
        positions = []
        with stream(lambda: list(range(SAMPLES)), settings) as data:
            if state is not None:
                data.load_state_dict(state)
            while most and (served := serve(data)) is not None:
                positions += served[1]
                most -= 1
            assert not most or data.samples_left == 0
            return positions, data.state_dict()

    first, state = part(config(kind, times), None, batches * times)
    second, state = part(config(kind, times, passes=2), state, 1000)
    assert max(second, default=0) < 2 * SAMPLES
    if kind != "reservoir":
        most = Counter(dict.fromkeys(range(2 * SAMPLES), times))
        assert Counter(n for n in first + second if n < 2 * SAMPLES) == most
    if (kind, times) == ("fifo", 1):
        third, _ = part(config(kind, times), state, 1000)
        assert first + second + third == list(range(3 * SAMPLES))


NUMBERED = {
    "a map-style data set": lambda: list(range(20)),
    "an iterable": lambda: Plain(range(20)),
    "a Source of its own": Arriving,
}


@pytest.mark.parametrize(
    ("before", "after", "trainers"),
    [
        ("a map-style data set", "an iterable", 1),
        ("a map-style data set", "an iterable", 2),
        ("a map-style data set", "a Source of its own", 1),
        ("an iterable", "a map-style data set", 1),
        ("an iterable", "a map-style data set", 2),
        ("a Source of its own", "a map-style data set", 1),
        ("a Source of its own", "an iterable", 1),
    ],
)
def test_another_kind_of_source_is_refused(before, after, trainers):
    def settings(kind):
        return config("fifo", passes=1 if "data set" in kind else None)

    with stream(NUMBERED[before], settings(before)) as data:
        data.start()
        assert data.available(WAIT_S).readiness is Readiness.READY
        data.next_batch()
        counters = {"batch_idx": 0, "samples_served": 0, "seconds": 0.0}
        part = {**data.state_dict(), "random": None, "task": {}, "counters": counters}
    if trainers > 1:
        part = reshard_parts([part], trainers, capacity=16, entropy=(0, 1))[0]
    message = rf"^train_source gives {after}, it must give {before}.*init_from"
    made = stream(NUMBERED[after], settings(after), Partition(0, trainers))
    with made as data, pytest.raises(CheckpointError, match=message):
        data.load_state_dict(part)


def test_samples_of_simulations_are_another_kind():
    part = OfActors().put(0, 4, 4, 4).train(6).part()
    with stream(lambda: Plain(range(9)), config("fifo", passes=None)) as data:
        other = data.state_dict()
        with pytest.raises(CheckpointError, match="gives an iterable, it must give samples of simulations"):
            data.load_state_dict(part)
    with pytest.raises(CheckpointError, match="gives samples of simulations, it must give an iterable"):
        OfActors().resumed(other)


def whole_batches(size, kind=Shuffled):
    class Lines(kind, IterableDataset):
        pass

    return lambda: DataLoader(Lines(range(40)), batch_size=size)


class Plain:
    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (whole_batches(4, Plain), whole_batches(5, Plain), "gives batches of 5, it must give batches of 4"),
        (whole_batches(4), lambda: Shuffled(range(40)), "gives samples, it must give batches of 4"),
        (whole_batches(4), whole_batches(5), None),  # it continues after what was read
        (lambda: Plain(range(40)), lambda: Plain(range(40)), None),
    ],
)
def test_another_number_of_samples_of_each_entry_is_refused_where_entries_are_counted(before, after, message):
    settings = Config(training=TrainingConfig())
    with stream(before, settings) as data:
        data.start()
        data.available(WAIT_S)
        data.next_batch()
        state = data.state_dict()
    with stream(after, settings) as data:
        if message is not None:
            with pytest.raises(CheckpointError, match=message):
                data.load_state_dict(state)
        else:
            data.load_state_dict(state)


def test_positions_of_a_step_are_those_of_all_its_batches():
    with stream(lambda: list(range(SAMPLES)), config("fifo")) as data:
        data.start()
        assert data.pop_served()[0].tolist() == []
        for _ in range(2):
            assert data.available(WAIT_S).readiness is Readiness.READY
            data.next_batch()
        assert data.pop_served()[0].tolist() == list(range(2 * BATCH))
        assert data.pop_served()[0].tolist() == []


def test_a_replacement_does_not_repeat_the_draws():
    def first_batch(count: int) -> list[int]:
        with stream(lambda: list(range(SAMPLES)), config("firo", watermark=16)) as data:
            data.load_after_loss(None, AppliedPositions(count=count))
            data.start()
            return serve(data)[0]

    assert first_batch(5) == first_batch(5) != first_batch(6)


def test_nothing_is_read_of_what_is_complete():
    read = []

    class Recorded(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    numbers = Recorded(range(SAMPLES))
    with DataStream(Numbers(lambda: numbers), Partition(0, 1), config("fifo", passes=1), {"shuffle": False}) as data:
        data.load_after_loss(None, AppliedPositions(low=40, above={41: 1, 46: 1}, count=42))
        data.start()
        assert serve(data) == ([40, 42, 43, 44, 45], [40, 42, 43, 44, 45])
        assert serve(data) is None
        assert data.samples_left == 0
        assert data.buffer.info().puts == SAMPLES
    assert read == list(range(40, SAMPLES))


@pytest.mark.parametrize("kind", ["fifo", "firo", "reservoir"])
def test_the_data_ends_if_all_of_it_was_applied(kind):
    for applied in (AppliedPositions(low=SAMPLES), AppliedPositions(0, dict.fromkeys(range(SAMPLES), 1))):
        with stream(lambda: list(range(SAMPLES)), config(kind, passes=1)) as data:
            data.load_after_loss(None, applied)
            data.start()
            data.enter_epoch(-1)  # as before the hooks of the first epoch
            assert serve(data) is None
            assert data.samples_left in (0, None)
            info = data.buffer.info()
            assert (info.puts, info.gets, info.population, info.seen_histogram) == (SAMPLES, SAMPLES, 0, {1: SAMPLES})


def test_samples_that_arrive_once_are_not_waited_for():
    with stream(Arriving, config("fifo", passes=None)) as data:
        data.load_after_loss({"source": {}}, AppliedPositions(low=10))
        assert data.positions() == AppliedPositions(low=10)
        data.start()
        assert data.available(WAIT_S).readiness is Readiness.READY
        assert data.next_batch()[0].tolist() == [10, 11, 12, 13, 14]
        assert data.pop_served()[0].tolist() == []  # no process can give these positions again


def test_a_dealt_iterable_refuses_to_go_back_before_its_start():
    settings = config("fifo", passes=None)
    with stream(lambda: Shuffled(range(40)), settings) as data:
        data.start()
        serve(data)
        left = {
            "state": data.source.state_dict(),
            "position": BATCH,
            "mark": {"position": 5, "state": {"values": list(range(40)), "at": 5}},
        }
        part = data.state_dict()
    held = {**part["buffer"], "counters": {"puts": 0, "gets": 0}}  # as if nothing was held
    held |= {"keys": [], "served": held["served"][:0], "positions": held["positions"][:0], "samples": None}
    with stream(lambda: Shuffled([]), settings) as data:
        data.load_state_dict({"buffer": held, "leftovers": [left], "source": {}})
        source = data.source.state_dict()
    # The replacement continues with the same share.
    with stream(lambda: Shuffled([]), settings) as data:
        data.load_after_loss({"source": source}, AppliedPositions(low=3))
        data.start()
        assert serve(data)[0] == [8, 9, 10, 11, 12]
    later = {"origin": {**source["origin"], "position": 4}}
    with stream(lambda: Shuffled([]), settings) as data:
        data.load_after_loss({"source": later}, AppliedPositions(low=3))
        data.start()
        with pytest.raises(SourceError, match=r"position \(3\) must be at least 4"):
            data.available(WAIT_S)


def test_positions_are_numbers_of_numpy():
    with stream(lambda: list(range(SAMPLES)), config("reservoir")) as data:
        assert data.pop_served()[0].dtype == np.int64


@pytest.mark.parametrize("kind", ["fifo", "firo"])
def test_a_replacement_that_is_saved_and_resumed_serves_nothing_twice(kind):
    """Also what the lost process had applied further ahead than the feeder of the new one has read."""
    numbers, settings = list(range(SAMPLES)), config(kind, passes=1)
    ahead = {20: 1, 30: 1, 31: 1}
    with stream(lambda: numbers, settings) as data:
        source = data.source.state_dict()
        data.load_after_loss({"source": source}, AppliedPositions(above=ahead, count=3))
        data.start()
        served = Counter(serve(data)[1]) + Counter(ahead)
        saved = data.state_dict()
    assert saved["buffer"] is None
    account = AppliedPositions()
    account.load_state_dict(saved["applied"])
    with stream(lambda: numbers, settings) as data:
        data.load_after_loss(saved, account)
        data.start()
        while (batch := serve(data)) is not None:
            served.update(batch[1])
        assert data.state_dict()["buffer"] is not None
    assert served == Counter(dict.fromkeys(range(SAMPLES), 1))


@pytest.mark.parametrize("kind", ["fifo", "firo"])
@pytest.mark.parametrize(("lost", "trainers"), [((), 1), ((2,), 2), ((0, 2), 1), ((0, 1, 2), 2), ((1,), 4)])
def test_what_was_served_once_of_two_times_is_served_once_more_by_other_trainers(kind, lost, trainers):
    """Also of lost trainers, none of which has a buffer, and where the buffers have no room for all of it."""
    numbers, settings, capacity = list(range(SAMPLES)), config(kind, 2, watermark=7), 12
    applied: Counter[int] = Counter()

    def serve_some(index: int, count: int, part: dict | None, batches: int) -> dict:
        with stream(lambda: numbers, settings, Partition(index, count)) as data:
            if part is not None and part["buffer"] is None:
                account = AppliedPositions()
                account.load_state_dict(part["applied"])
                data.load_after_loss(part, account)
            elif part is not None:
                data.load_state_dict(part)
            account, source = data.positions(), data.source.state_dict()
            data.start()
            while batches and (served := serve(data)) is not None:
                batches -= 1
                applied.update(served[0])
                account.add(served[1], 2)
            state = data.state_dict()
        assert batches >= 0 or account.low == data.source.total
        if index in lost and part is None:
            # Of a fifo, all that was read may have been served equally often by then.
            assert kind == "fifo" or 1 in account.above.values()
            state = {"buffer": None, "applied": account.state_dict(), "source": source}
        counters = {"batch_idx": 0, "samples_served": 0, "seconds": 0.0}
        return {**state, "random": None, "task": {}, "counters": counters}

    parts = [serve_some(index, 3, None, 6 + index) for index in range(3)]
    if not lost:
        assert sum(int((part["buffer"]["served"] > 0).sum()) for part in parts) > capacity
    parts = reshard_parts(parts, trainers, capacity=capacity, entropy=(0, 1))
    # Saved once more before the feeders have reached all of it.
    parts = [{**part, **serve_some(index, trainers, part, 1)} for index, part in enumerate(parts)]
    for index, part in enumerate(parts):
        part.pop("leftovers")
        serve_some(index, trainers, part, -1)
    assert applied == Counter(dict.fromkeys(numbers, PASSES * 2))


class OfActors:
    """The data of trainers whose samples have versions; no sample arrives but those that ``put`` stores."""

    config = Config(
        training=TrainingConfig(batch_size=2, max_epochs=None),
        buffer=BufferConfig(capacity=16, max_staleness=2),
        simulations=SimulationsConfig(fields={"u": [1]}),
        publish=PublishConfig(),
    )

    def __init__(self, index: int = 0, count: int = 1) -> None:
        ingest = IngestSpec.of_run(self.config)
        spec = ReceiverSpec("tcp://127.0.0.1:1", b"", ingest, index, count, starts=(Version(1, 0), Version(2, 6)))
        self.index, self.count = index, count
        self.data = DataStream(Numbers(Stream), Partition(index, count), self.config, {}, spec)
        self.applied = self.data.positions()

    def put(self, simulation: int, *versions: int) -> "OfActors":
        keys = [(simulation, step) for step in range(len(versions))]
        self.data.source.received_log.extend(keys)
        rows = [
            {"simulation": s, "step": t, "version": np.array([1, v]), "u": np.zeros(1, np.float32)}
            for (s, t), v in zip(keys, versions, strict=True)
        ]
        self.data.buffer.put_many(rows, keys)
        return self

    def train(self, step: int) -> "OfActors":
        self.data.set_version(step)
        self.data.available(0.0)
        self.data.next_batch()
        self.applied.add_keys(self.data.pop_served()[1])
        return self

    def part(self) -> dict:
        counters = {"batch_idx": 0, "samples_served": 0, "seconds": 0.0}
        return {**self.data.state_dict(), "random": None, "task": {}, "counters": counters}

    def resumed(self, part: dict) -> "OfActors":
        self.data.load_state_dict(part)
        self.applied = self.data.positions()
        return self

    def replaced(self) -> "OfActors":
        """The process that takes the place of this one, which dies."""
        account, other = AppliedPositions(), OfActors(self.index, self.count)
        account.load_state_dict(self.applied.state_dict())
        other.data.load_after_loss({"source": self.data.source.state_dict()}, account)
        other.applied = other.data.positions()
        return other

    @property
    def received(self) -> int:
        log = self.data.source.received_log
        return len(log) - log.num_held + log.num_inherited_for(self.index, self.count)

    def assert_accounts_agree(self, applied: int, stale: int, held: int = 0) -> "OfActors":
        info = self.data.buffer.info()
        assert (self.applied.count, info.stale, info.unseen) == (applied, stale, held)
        assert self.received == applied + stale + held
        return self


def test_samples_that_were_stale_before_a_resume_are_stale_after_the_death_of_their_trainer():
    first = OfActors().put(0, 0, 0, 4, 4, 4, 0).train(6).assert_accounts_agree(applied=2, stale=3, held=1)
    resumed = OfActors().resumed(first.part()).assert_accounts_agree(applied=2, stale=3, held=1)
    for _ in range(2):
        replaced = resumed.replaced().assert_accounts_agree(applied=2, stale=3)
        info = replaced.data.buffer.info()
        assert (info.puts, info.gets, info.seen_histogram) == (5, 2, {0: 3, 1: 2})
        assert replaced.data.buffer.num_expired == 0, "of this process; starvation is reported by it"
        # The death comes after another resume, and what was stale since is lost.
        resumed = OfActors().resumed(replaced.part())
    resumed.put(1, 1, 6, 6).train(6).assert_accounts_agree(applied=4, stale=4)
    resumed.replaced().assert_accounts_agree(applied=4, stale=3)


@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_stale_samples_are_counted_once_with_another_number_of_trainers_of_which_one_dies(trainers):
    old = [OfActors(index, 2).put(index, 0, 0, 4, 4, 4, 0).train(6) for index in range(2)]
    parts = reshard_parts([one.part() for one in old], trainers, capacity=16, entropy=(0, 1))
    new = [OfActors(index, trainers).resumed(part) for index, part in enumerate(parts)]
    for lost in range(trainers):
        new[lost] = new[lost].replaced()
        assert sum(one.data.buffer.info().stale for one in new) == 6


@pytest.mark.parametrize("keeps", [True, False])
def test_what_was_served_is_kept_only_where_it_is_asked_for(keeps):
    """In local and ddp no push names samples, and the list would grow for as long as the run lasts."""
    task = Numbers(lambda: [float(n) for n in range(12)])
    with DataStream(task, Partition(0, 1), config("fifo", passes=1), {}, keeps_served=keeps) as data:
        data.start()
        while data.available(WAIT_S).readiness is Readiness.READY:
            data.next_batch()
        assert len(data.pop_served()[0]) == (12 if keeps else 0)

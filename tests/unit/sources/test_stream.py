"""Streams: received samples in buffers, through checkpoints, and resharded to another number of trainers."""

import io
import random
import sys
import threading
from contextlib import ExitStack, contextmanager
from itertools import count

import numpy as np
import pytest
import torch
from online_fixtures import PATIENCE_S, FakeCoordinator, field, ingest_spec, receiver_spec, senders

from paramserver.buffers import make_buffer
from paramserver.buffers.reshard import reshard_parts
from paramserver.checkpoint.serialization import load_archive
from paramserver.config import Config, SimulationsConfig
from paramserver.errors import BufferClosed, BufferExhausted, CheckpointError, SourceError, UnsupportedConfiguration
from paramserver.online.protocol import Header, MessageKind
from paramserver.online.spec import ReceiverSpec
from paramserver.sources import Feeder, Partition, ResumePosition, Simulations, Stream, make_source

KINDS = ("fifo", "firo", "reservoir")
STEPS, SIMULATIONS = 30, 4
ALL = {(simulation, step) for simulation in range(SIMULATIONS) for step in range(STEPS)}


class Trainer:
    """A source, a buffer, a feeder, and the keys that were served."""

    def __init__(self, coordinator, kind="fifo", capacity=1000, state=None, **keys):
        self.index, self.trainers = keys.get("index", 0), keys.get("trainers", 1)
        self.source = Stream()
        self.source.connect(receiver_spec(coordinator, **keys))
        self.buffer = make_buffer(kind, capacity=capacity, seed=3, batch_size=4)
        self.feeder = Feeder(self.source, self.buffer, self.index)
        self.served = []
        if state is not None:
            self.load(state)

    def load(self, state):
        """Restore like ``DataStream.load_state_dict``."""
        if (left := state.get("leftovers")) is not None:
            self.source.reshard([ResumePosition(**one) for one in left], state["buffer"]["keys"])
        else:
            self.source.load_state_dict(state["source"], state["buffer"]["mark"])
        self.buffer.load_state_dict({**state["buffer"], "finished": False})

    def state(self):
        """Return the state as read back from a file."""
        file = io.BytesIO()
        torch.save({"buffer": self.buffer.state_dict(), "source": self.source.state_dict()}, file)
        file.seek(0)
        return load_archive(file)

    def get(self, n=4, timeout=PATIENCE_S):
        """Serve a batch; return False if the buffer is exhausted."""
        try:
            batch = self.buffer.get_batch(n, timeout)
        except BufferExhausted:
            return False
        for key, sample in zip(batch.keys, batch.samples, strict=True):
            assert (int(sample["simulation"]), int(sample["step"])) == key
            assert np.array_equal(sample["u"], field(*key))
        self.served += batch.keys
        return True

    def drain(self):
        while self.get():
            pass


@contextmanager
def running(*trainers):
    with ExitStack() as stack:
        for one in trainers:
            stack.callback(one.feeder.close)
            one.feeder.start()
        yield


class Producer:
    """Sends simulations to trainers in turn within the window. A context manager that owns a thread."""

    def __init__(self, addresses, keys, attempt=0, window=64):
        self.addresses, self.keys, self.attempt, self.window = addresses, keys, attempt, window
        self.sent = 0
        self.stop = threading.Event()
        self.error = None
        self.thread = threading.Thread(target=self._run, name="producer")

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exception):
        self.stop.set()
        self.thread.join(PATIENCE_S)
        if not any(exception) and self.error is not None:
            raise self.error

    def join(self):
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def _run(self):
        try:
            with senders() as new:
                self._send(new)
        except BaseException as error:  # noqa: BLE001 - raised in __exit__
            self.error = error

    def _send(self, new):
        lines, sent = {}, {}
        for simulation, step in self.keys:
            place = (simulation, (simulation + step) % len(self.addresses))
            if place not in lines:
                lines[place] = new(self.addresses[place[1]]).open(simulation, attempt=self.attempt)
                sent[place] = 0
            if not self._room(lines[place], sent[place] + 1 - self.window):
                return
            lines[place].sample(simulation, step, attempt=self.attempt)
            sent[place] += 1
            self.sent += 1
        for place, line in lines.items():
            if not self._room(line, sent[place]):
                return

    def _room(self, line, taken):
        """Wait until ``taken`` samples were acknowledged; return False if stopped before."""
        while line.acked < taken:
            if self.stop.is_set():
                return False
            if line.socket.poll(20):
                line.receive()
        return True


def in_turn(seed=0):
    """Return all keys: each simulation in order, simulations interleaved at random."""
    draw = random.Random(seed)
    order = [simulation for simulation in range(SIMULATIONS) for _ in range(STEPS)]
    draw.shuffle(order)
    steps = [iter(range(STEPS)) for _ in range(SIMULATIONS)]
    return [(simulation, next(steps[simulation])) for simulation in order]


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_served(kind):
    with FakeCoordinator() as coordinator:
        trainer = Trainer(coordinator, kind)
        with running(trainer), Producer([coordinator.trainer()], in_turn()) as producer:
            producer.join()
            coordinator.finish()
            trainer.drain()
            coordinator.wait(lambda: sum(coordinator.counts.values()) == len(ALL))
        assert set(trainer.served) == ALL
        assert kind == "reservoir" or len(trainer.served) == len(ALL)
        assert trainer.buffer.info().puts == len(ALL)


@pytest.mark.parametrize("capacity", [4, 10])
def test_a_full_buffer_limits_what_producers_send(capacity):
    """All that was sent is served, held by the buffer, or within the windows of receiver and client."""
    with FakeCoordinator() as coordinator:
        trainer = Trainer(coordinator, capacity=capacity, window=8)
        with running(trainer), Producer([coordinator.trainer()], in_turn(), window=8) as producer:
            assert trainer.buffer.wait_ready(4, PATIENCE_S)
            most = capacity + SIMULATIONS * 2 * 8
            for _ in range(10):
                assert producer.sent <= len(trainer.served) + most
                assert trainer.get()
            # A waiting client receives a sign of life from the trainer, without room for more.
            with senders() as new:
                line = new(coordinator.trainer()).open(9)
                for step in range(8):
                    line.sample(9, step)
                assert line.heartbeat(9).receive()[0] is MessageKind.ACK
                assert trainer.get()
            received = threading.Thread(target=trainer.drain)
            received.start()
            producer.join()
            coordinator.finish()
            received.join(PATIENCE_S)
            assert set(trainer.served) >= ALL
            assert len(trainer.served) == len(set(trainer.served))


def test_closing_ends_a_feeder_that_waits_for_samples():
    with FakeCoordinator() as coordinator:
        trainer = Trainer(coordinator)
        with running(trainer):
            coordinator.trainer()
        trainer.feeder.raise_error()
        assert not any(thread.name.startswith(("feeder", "receiver")) for thread in threading.enumerate())
        with pytest.raises(BufferClosed):
            trainer.buffer.get(0)


def test_closing_ends_a_feeder_that_waits_for_room():
    with FakeCoordinator() as coordinator:
        trainer = Trainer(coordinator, capacity=4)
        with running(trainer), Producer([coordinator.trainer()], in_turn()):
            assert trainer.buffer.wait_ready(4, PATIENCE_S)
        trainer.feeder.raise_error()


def test_an_error_of_the_receiver_thread_reaches_the_trainer():
    with FakeCoordinator(refuses="the token must be this run's") as coordinator:
        trainer = Trainer(coordinator, timeout_s=2.0)
        with running(trainer):
            with pytest.raises(BufferClosed):
                trainer.get()
            with pytest.raises(SourceError, match=r"^trainer 0 was refused .*the token must be this run's$"):
                trainer.feeder.raise_error()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_run_stopped_anywhere_resumes_with_each_sample_once(kind, seed):
    """The unfinished simulations are sent again from their start; samples received before are dropped."""
    draw = random.Random(seed)
    state, served = None, []
    for attempt in range(4):
        stop_at, capacity = draw.randrange(10, 60), draw.choice([8, 20, 1000])
        with FakeCoordinator() as coordinator:
            trainer = Trainer(coordinator, kind, max(capacity, len(state["buffer"]["keys"]) if state else 0), state)
            trainer.served = list(served)
            order = in_turn(seed + attempt)
            with running(trainer), Producer([coordinator.trainer()], order, attempt, window=16) as producer:
                if attempt == 3:
                    received = threading.Thread(target=trainer.drain)
                    received.start()
                    producer.join()
                    coordinator.finish()
                    received.join(PATIENCE_S)
                    info = trainer.buffer.info()
                else:
                    while len(trainer.served) < len(served) + stop_at and trainer.source.figures()["received"] < len(
                        ALL
                    ):
                        if trainer.buffer.wait_ready(4, 0.2):
                            trainer.get()
                    state = trainer.state()
                    served = list(trainer.served)
    assert info.puts == len(ALL)
    assert set(trainer.served) == ALL
    assert kind == "reservoir" or len(trainer.served) == len(ALL)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_resume_with_another_number_of_trainers(before, after, kind):
    """Each sample is put once over all trainers; samples that buffers held are served by their new trainers."""
    keys = in_turn(before)
    with ExitStack() as stack:
        coordinator = stack.enter_context(FakeCoordinator())
        trainers = [Trainer(coordinator, kind, index=i, trainers=before) for i in range(before)]
        stack.enter_context(running(*trainers))
        addresses = [coordinator.trainer(i) for i in range(before)]
        with Producer(addresses, keys[: len(keys) // 2]) as producer:
            producer.join()
            for one in trainers:
                for _ in range(3):
                    one.get()
        parts = [
            {
                **one.state(),
                "random": None,
                "task": {},
                "counters": {"samples_served": 0, "batch_idx": 0, "seconds": 0.0},
            }
            for one in trainers
        ]
    served = [key for one in trainers for key in one.served]
    parts = reshard_parts(parts, after, capacity=1000, entropy=(1, 1))
    with ExitStack() as stack:
        coordinator = stack.enter_context(FakeCoordinator())
        trainers = [Trainer(coordinator, kind, state=parts[i], index=i, trainers=after) for i in range(after)]
        stack.enter_context(running(*trainers))
        addresses = [coordinator.trainer(i) for i in range(after)]
        inherited = [coordinator.joined[i].inherited for i in range(after)]
        assert all(one == inherited[0] for one in inherited)
        held = sum(sum(coordinator.joined[i].received.values()) for i in range(after))
        assert held == sum(len(part["buffer"]["keys"]) for part in parts) > 0
        assert sum(inherited[0].values()) + held == len(keys) // 2
        known = set(keys[: len(keys) // 2])
        for i in range(after):
            dealt = {simulation: count((i - simulation) % after, after) for simulation, _ in known}
            assert coordinator.joined[i].first_missing == {
                simulation: next(step for step in steps if (simulation, step) not in known)
                for simulation, steps in dealt.items()
            }
        with Producer(addresses, keys, attempt=1) as producer:
            producer.join()
            coordinator.finish()
            for one in trainers:
                one.drain()
        duplicated = sum(one.source.figures()["duplicated"] for one in trainers)
        received, inherited = (
            sum(one.source.figures()[name] for one in trainers) for name in ("received", "inherited")
        )
        state = trainers[0].state()
    served += [key for one in trainers for key in one.served]
    assert set(served) == ALL
    assert (duplicated, inherited, received) == (len(keys) // 2, len(keys) // 2, len(keys))
    assert kind == "reservoir" or len(served) == len(ALL)
    # Resharded again, to one trainer: it knows all samples.
    again = Stream()
    again.reshard([ResumePosition(state["source"], state["buffer"]["counters"]["puts"])], [])
    assert sum(again.received_log.inherited_counts().values()) >= len(keys) // 2 - held


def test_a_position_that_was_never_reached_is_refused():
    with FakeCoordinator() as coordinator:
        stream = Stream()
        stream.connect(receiver_spec(coordinator))
        with pytest.raises(CheckpointError, match=r"position \(3\)"):
            next(stream.groups(3))
        stream.close()


def test_samples_and_groups_are_the_same_sequence():
    with FakeCoordinator() as coordinator, senders() as new:
        stream = Stream()
        stream.connect(receiver_spec(coordinator))
        found = []
        reading = threading.Thread(target=lambda: found.extend(stream.samples(0)))
        reading.start()
        line = new(coordinator.trainer()).open()
        for step in range(5):
            line.sample(0, step)
        line.receive_acks(5)
        coordinator.finish()
        reading.join(PATIENCE_S)
        assert [key for key, _ in found] == [(0, step) for step in range(5)]
        stream.close()


def test_a_closed_source_has_no_samples():
    with FakeCoordinator() as coordinator:
        stream = Stream()
        stream.connect(receiver_spec(coordinator))
        stream.close()
        assert list(stream.groups(0)) == []
        assert (stream.figures(), stream.statistics()) == ({}, {})


# Expected samples, and refusals.


def test_expected_samples_are_those_the_plan_deals_to_a_trainer():
    with FakeCoordinator() as coordinator:
        streams = [Stream() for _ in range(3)]
        assert streams[0].expected is None
        for i, one in enumerate(streams):
            one.connect(receiver_spec(coordinator, index=i, trainers=3, count=5, steps=7))
        dealt = [sum((simulation + step) % 3 == i for simulation in range(5) for step in range(7)) for i in range(3)]
        assert [one.expected for one in streams] == dealt
        assert [one.total for one in streams] == [None] * 3
        # Of what was received before, only what the buffer begins with counts.
        old = {"inherited": [], "log": [[0, 0], [0, 1], [1, 0], [1, 1]], "held": 0}
        streams[1].reshard([ResumePosition(old, 3)], [(0, 0)])
        assert streams[1].expected == dealt[1] - 2 + 1
        streams[0].connect(receiver_spec(coordinator, count=5, steps=7, deal="simulation", trainers=2))
        assert streams[0].expected is None


def online(**keys):
    return Config(simulations=SimulationsConfig(**{"fields": {"u": [2]}, **keys}))


@pytest.mark.parametrize(
    ("source", "config", "message"),
    [
        (Stream, Config(), "train_source gives Stream, so the config must have the section simulations"),
        (Simulations, Config(), "train_source gives Simulations, so the config must have the section"),
        (Stream, online(command="solve", count=1), "give paramserver.sources.Simulations, or leave it out"),
        (Simulations, online(), "simulations.command or function must say how one is started"),
    ],
)
def test_a_source_that_does_not_suit_the_config_is_refused(source, config, message):
    with pytest.raises(UnsupportedConfiguration, match=message):
        make_source(source(), Partition(0, 1), config)


@pytest.mark.parametrize(("source", "config"), [(Stream, online()), (Simulations, online(function="a:b", count=2))])
def test_a_source_that_suits_the_config_is_returned_unchanged(source, config):
    made = source()
    assert make_source(made, Partition(0, 1), config) is made


def test_a_source_must_be_connected_before_it_is_read():
    with pytest.raises(UnsupportedConfiguration, match="Stream must be connected before it is read"):
        next(Stream().groups(0))


def test_without_pyzmq_the_error_names_the_package(monkeypatch):
    for name in ("connections", "security", "receiver"):
        monkeypatch.delitem(sys.modules, f"paramserver.online.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(UnsupportedConfiguration, match=r"need pyzmq; install pyzmq, or the extra online"):
        Stream().connect(ReceiverSpec("tcp://127.0.0.1:1", b"", ingest_spec(), 0, 1))


def test_a_client_that_is_alive_after_the_end_is_notified():
    with FakeCoordinator() as coordinator, senders() as new:
        trainer = Trainer(coordinator)
        with running(trainer):
            line = new(coordinator.trainer()).open()
            coordinator.finish()
            trainer.drain()
            line.send([Header(MessageKind.HEARTBEAT).pack()])
            assert line.receive()[0] is MessageKind.OVER

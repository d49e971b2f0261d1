"""What becomes of each sample of a run with simulations, through a random sequence of events that a seed decides.

Samples arrive and are served, clients die and start again, checkpoints are made, also while a trainer is lost and while
simulations go on, trainers die and are replaced, all return to a checkpoint, and the run resumes with another number of
trainers. The buffers, the logs, the parts of checkpoints and the tracker are those of a run; processes, sockets and
clocks are not.
"""

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from paramserver import Partition, Task
from paramserver.buffers.positions import AppliedPositions, Key
from paramserver.buffers.reshard import reshard_parts
from paramserver.checkpoint.serialization import pack, unpack
from paramserver.config import Config, PublishConfig, SimulationsConfig, TrainingConfig
from paramserver.config.schema import BufferConfig
from paramserver.consistency import Readiness
from paramserver.errors import CheckpointError
from paramserver.online.protocol import Header, MessageKind, TrainerJoined
from paramserver.online.receiver import ReceiveStats
from paramserver.online.spec import IngestSpec, ReceiverSpec
from paramserver.online.tracker import ExternalSimulations
from paramserver.online.weights import Version
from paramserver.sources import Stream
from paramserver.trainers.data import DataStream

SIMULATIONS, STEPS, WINDOW, MAX_STALENESS = 5, 14, 3, 3
FIELDS = {"u": np.zeros(1, np.float32)}
COUNTERS = {"batch_idx": 0, "samples_served": 0, "seconds": 0.0}


class Streamed(Task):
    def train_source(self, partition):
        return Stream()


class Trainer:
    """One process of a trainer, and what server and coordinator know of it."""

    def __init__(self, world: "World", index: int, part: bytes | None = None) -> None:
        self.world, self.index = world, index
        spec = ReceiverSpec("tcp://127.0.0.1:1", b"", world.ingest, index, world.count, starts=tuple(world.starts))
        self.data = DataStream(Streamed(), Partition(index, world.count), world.config, {}, spec)
        self.arrived: list[tuple[Key, tuple[int, int]]] = []
        self.logged: list[tuple[Key, tuple[int, int]]] = []  # of these, what waits for room in the buffer
        if part is not None:
            stored = unpack(part)
            if stored["buffer"] is None:
                applied = AppliedPositions()
                applied.load_state_dict(stored["applied"])
                self.data.load_after_loss(stored, applied)
            else:
                self.data.load_state_dict(stored)
        self.source = pack(self.data.source.state_dict())  # as it is reported to the server
        self.begin(self.data.positions())

    def begin(self, account: AppliedPositions) -> None:
        self.account = account
        self.log = self.data.source.received_log
        self.log.truncate(self.data.buffer.info().puts)
        self.stats = ReceiveStats(self.log.counts(), 1, self.index)

    def replaced(self) -> "Trainer":
        """The process that takes the place of this one, which is lost."""
        made = Trainer(self.world, self.index)
        made.source = self.source
        made.data.load_after_loss({"source": unpack(self.source), "buffer": None}, copy_of(self.account))
        made.begin(made.data.positions())
        return made

    def joined(self) -> TrainerJoined:
        return TrainerJoined.unpack(
            TrainerJoined(
                "tcp://127.0.0.1:1", dict(self.stats.stored), self.log.inherited_counts(), self.log.lost_counts()
            ).pack()
        )

    def report(self) -> None:
        self.stats.lost = self.log.lost_counts()
        pending = sorted({key[0] for key, _ in (*self.logged, *self.arrived)})
        self.world.tracker.on_report(self.index, self.stats.make_report(pending), self.world.now)

    def receive(self, key: Key, version: tuple[int, int]) -> bool:
        """Whether the sample is new."""
        if new := self.log.mark_received(*key):
            self.arrived.append((key, version))
        return new

    def store(self) -> None:
        """Put a group of what has arrived into the buffer, as long as there is room, as the feeder does."""
        if not self.logged:
            self.logged, self.arrived = self.arrived, []
            self.log.extend([key for key, _ in self.logged])
        while self.logged and self.has_room:
            key, version = self.logged.pop(0)
            sample = {"simulation": key[0], "step": key[1], "version": np.array(version), **FIELDS}
            self.data.buffer.put_many([sample], [key])
            self.stats.record_stored([SimpleNamespace(key=key)])
            self.world.stored(key)

    @property
    def has_room(self) -> bool:
        info = self.data.buffer.info()
        return (info.unseen if self.data.buffer.repeats else info.population) < info.capacity

    def train(self) -> list[Key]:
        """Serve a batch, if there is one."""
        self.data.set_version(self.world.step)
        if self.data.available(0.0).readiness is not Readiness.READY:
            return []
        self.data.next_batch()
        return self.data.pop_served()[1]

    def part(self) -> bytes:
        return pack({**self.data.state_dict(), "random": None, "task": {}, "counters": COUNTERS})

    def substitute_part(self) -> bytes:
        """What stands for the part of a trainer that is lost while the checkpoint is made."""
        source, applied = unpack(self.source), self.account.state_dict()
        return pack(
            {"buffer": None, "source": source, "applied": applied, "random": None, "task": {}, "counters": COUNTERS}
        )

    def held(self) -> list[Key]:
        """What is in the buffer and was not served."""
        state = self.data.buffer.state_dict(samples=False)
        served = state["served"].tolist()
        return [key for key, times in zip(state["keys"], served, strict=True) if not times]


def copy_of(account: AppliedPositions) -> AppliedPositions:
    made = AppliedPositions()
    made.load_state_dict(account.state_dict())
    return made


class Client:
    """One simulation: it hears of ACKs some time after they are sent, and closes once it has heard of all."""

    def __init__(self, world: "World", number: int, attempt: int = 0) -> None:
        self.world, self.number, self.attempt = world, number, attempt
        self.next, self.closed = 0, False
        self.waiting: dict[Key, int] = {}  # sent and not heard of, with the trainer
        self.stored: list[Key] = []  # of these, acknowledged
        self.heard: list[Key] = []
        self.hello()

    def header(self, kind: MessageKind, step: int = 0) -> Header:
        return Header(kind, self.number, step, attempt=self.attempt)

    def hello(self) -> None:
        header, tracker = self.header(MessageKind.HELLO), self.world.tracker
        assert tracker.check_hello(header) is None
        tracker.on_hello(header, [], self.world.now)
        self.single = tracker.trainer_for(self.number)
        self.world.journal.received.append(header)
        if self.single is not None:
            self.world.journal.trainers[self.number] = self.single

    def trainer_of(self, key: Key) -> int:
        return sum(key) % self.world.count if self.single is None else self.single

    def move(self) -> None:
        if self.closed:
            return
        if self.stored and self.world.rng.random() < 0.5:
            self.heard.append(self.stored.pop(0))
            self.waiting.pop(self.heard[-1])
        elif self.next < STEPS:
            key = (self.number, self.next)
            index = self.trainer_of(key)
            if Counter(self.waiting.values())[index] < WINDOW:
                self.next += 1
                self.send(key, index)
        elif not self.waiting:
            self.closed = True
            bye = self.header(MessageKind.BYE, STEPS)
            self.world.tracker.on_bye(bye, self.world.now)
            self.world.journal.received.append(bye)

    def send(self, key: Key, index: int) -> None:
        self.waiting[key] = index
        if self.world.trainers[index].receive(key, self.world.version()):
            self.world.known[self.number].discard(key)  # until it is stored
        else:
            self.acknowledged(key)

    def acknowledged(self, key: Key) -> None:
        if key in self.waiting and key not in self.stored:
            self.stored.append(key)

    def reconnect(self, index: int) -> None:
        """To the replacement of a trainer: HAD, then what it has not heard of again."""
        if self.closed:
            return
        trainer = self.world.trainers[index]
        for key in self.heard:
            if self.trainer_of(key) == index:
                trainer.log.mark_lost(*key)
                self.world.known[self.number].add(key)
        again = [key for key, to in self.waiting.items() if to == index]
        self.stored = [key for key in self.stored if key not in again]
        for key in again:
            self.send(key, index)


@dataclass
class Journal:
    """What ``CoordinatorJournal`` has."""

    received: list[Header] = field(default_factory=list)
    trainers: dict[int, int] = field(default_factory=dict)


class World:
    """A run: its trainers, the tracker of rank 0, its clients, and what is true of each sample."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.stale = rng.random() < 0.4
        self.config = Config(
            training=TrainingConfig(batch_size=2, max_epochs=None),
            buffer=BufferConfig(
                kind=rng.choice(("fifo", "fifo", "firo", "reservoir")),
                capacity=rng.choice((5, 8, 12)),
                max_staleness=MAX_STALENESS if self.stale else None,
            ),
            simulations=SimulationsConfig(
                fields={"u": [1]},
                count=SIMULATIONS,
                steps=rng.choice((STEPS, None)),
                deal=rng.choice(("round_robin", "round_robin", "simulation")),
            ),
            publish=PublishConfig(),
        )
        self.ingest = IngestSpec.of_run(self.config)
        self.once = self.config.buffer.kind != "reservoir"
        self.starts = [Version(1, 0)]
        self.now, self.step, self.resumes = 0.0, 0, 0
        self.applied: Counter[Key] = Counter()
        # Samples that a buffer has stored and no client sends again: they are received or lost.
        self.known: dict[int, set[Key]] = {number: set() for number in range(SIMULATIONS)}
        self.events: Counter[str] = Counter()
        self.clients: dict[int, Client] = {}
        self.start(rng.randint(1, 3), [], Journal())
        self.clients[0] = Client(self, 0)
        self.save()

    def start(self, count: int, parts: list[bytes], journal: Journal, state: str | None = None) -> None:
        """Begin a generation, from the parts of a checkpoint."""
        self.count = count
        self.trainers = [Trainer(self, index, parts[index] if parts else None) for index in range(count)]
        self.tracker = ExternalSimulations(self.config.simulations, count, 1e9)
        if state is not None:
            self.tracker.load_state_dict(json.loads(state))
        self.journal = journal
        self.tracker.replay(journal.received, journal.trainers)
        self.tracker.on_trainers_joined([one.joined() for one in self.trainers], self.now)

    def version(self) -> tuple[int, int]:
        return self.starts[-1].generation, max(self.starts[-1].step, self.step - self.rng.randrange(3))

    def stored(self, key: Key) -> None:
        self.known[key[0]].add(key)
        if key[0] in self.clients:
            self.clients[key[0]].acknowledged(key)

    # Events.

    def move(self) -> None:
        event = self.rng.choices(
            ("client", "store", "train", "report", "open", "die", "restart", "save", "roll_back", "resume"),
            (40, 30, 12, 12, 0.5, 1.2, 0.6, 1.5, 0.5, 0.8),
        )[0]
        self.events[event] += 1
        self.now += 0.01
        getattr(self, event)()

    def open(self) -> None:
        if number := self.rng.choice([None, *(set(range(SIMULATIONS)) - self.clients.keys())]):
            self.clients[number] = Client(self, number)

    def client(self) -> None:
        self.rng.choice(list(self.clients.values())).move()

    def store(self) -> None:
        self.rng.choice(self.trainers).store()

    def train(self) -> None:
        trainer = self.rng.choice(self.trainers)
        keys = trainer.train()
        if keys and self.rng.random() < 0.05:
            self.replace(trainer.index)  # before its push
        elif keys:
            trainer.account.add_keys(keys)
            self.applied.update(keys)
            self.step += 1

    def report(self) -> None:
        self.rng.choice(self.trainers).report()
        self.tracker.poll(self.now)

    def die(self) -> None:
        self.replace(self.rng.randrange(self.count))

    def replace(self, index: int) -> None:
        self.trainers[index] = self.trainers[index].replaced()
        self.tracker.on_trainer_replaced(index, self.trainers[index].joined())
        self.forget_unsent()
        for client in self.clients.values():
            client.reconnect(index)

    def forget_unsent(self) -> None:
        """What clients that have started again will send again is neither received nor lost, if its trainer died.

        What was lost before, and sent again and not stored by then, is lost again.
        """
        lost = self.lost()
        gone = self.received() | lost
        for client in self.clients.values():
            unsent = {(client.number, step) for step in range(client.next, STEPS)}
            self.known[client.number] -= unsent - gone
            self.known[client.number] |= {key for key in lost if key[0] == client.number}

    def restart(self) -> None:
        """A client dies, and its user starts it again: it sends everything again."""
        client = self.rng.choice(list(self.clients.values()))
        self.clients[client.number] = Client(self, client.number, client.attempt + 1)

    def save(self) -> None:
        # The coordinator's part first. Samples arrive until the trainers' parts are made, which train no more.
        state = json.dumps(self.tracker.state_dict())
        for _ in range(self.rng.choice((0, 0, 10, 40))):
            self.events["gap"] += 1
            getattr(self, self.rng.choice(("client", "client", "store", "report", "open")))()
        lost = self.rng.randrange(self.count) if self.rng.random() < 0.2 else None
        parts = [one.substitute_part() if one.index == lost else one.part() for one in self.trainers]
        self.saved = {
            "parts": parts,
            "lost": lost,
            "state": state,
            "applied": self.applied.copy(),
            "step": self.step,
        }
        if lost is not None:
            self.replace(lost)

    def load(self, count: int, journal: Journal) -> None:
        saved = self.saved
        self.applied, self.step = saved["applied"].copy(), saved["step"]
        self.resumes += 1
        self.starts.append(Version(self.starts[-1].generation + 1, self.step))
        parts = saved["parts"]
        if count != len(parts):
            stored, capacity = [unpack(part) for part in parts], self.config.buffer.capacity
            made = reshard_parts(stored, count, capacity=capacity, entropy=(0, self.resumes))
            parts = [pack(part) for part in made]
        self.start(count, parts, journal, saved["state"])
        found = self.received() | self.lost()
        self.known = {number: {key for key in found if key[0] == number} for number in range(SIMULATIONS)}

    def roll_back(self) -> None:
        """Rank 0 starts again from the checkpoint, and the clients that are open find it again."""
        self.load(len(self.saved["parts"]), self.journal)
        for client in self.clients.values():
            if not client.closed:
                client.hello()
        for index in range(self.count):
            for client in self.clients.values():
                client.reconnect(index)

    def resume(self) -> None:
        """The run ends, and is resumed from its last checkpoint; what is not complete then is started again."""
        if self.rng.random() < 0.7:
            self.save()
        count = self.rng.randint(1, 3)
        before = vars(self).copy()
        try:
            self.load(count, Journal())
        except CheckpointError:  # there is no room, or the part of a lost trainer has no samples
            vars(self).update(before)
            self.load(len(self.saved["parts"]), Journal())
        self.events["reshard"] += self.count != len(self.saved["parts"])
        self.tracker.poll(self.now)
        for number, client in self.rng.sample([*self.clients.items()], len(self.clients)):
            if number not in self.tracker.simulations or not self.tracker.simulations[number].ended:
                self.clients[number] = Client(self, number)
            else:
                client.closed = True
        self.save()

    # What must be so.

    def places(self) -> Counter[Key]:
        """Where each sample is: in a buffer, or applied."""
        return Counter([*(key for one in self.trainers for key in one.held()), *self.applied])

    def received(self) -> set[Key]:
        """What counts as received: it is applied, in a buffer, or was too old."""
        states = [one.log.state_dict(one.data.buffer.info().puts) for one in self.trainers]
        return {key for state in states for name in ("inherited", "log") for key in map(tuple, state[name].tolist())}

    def lost(self) -> set[Key]:
        return {key for one in self.trainers for key in map(tuple, one.log.state_dict()["lost"].tolist())}

    def check(self) -> None:
        places = self.places()
        places.update(key for one in self.trainers for key, _ in (*one.logged, *one.arrived))
        assert max(places.values(), default=1) == 1, f"in two places: {places.most_common(3)}"
        if self.once:
            assert max(self.applied.values(), default=1) == 1, "applied twice"
        logs = Counter(key for one in self.trainers for key in map(tuple, one.log.keys().tolist()))
        assert max(logs.values(), default=1) == 1, f"in two logs: {logs.most_common(3)}"

    def settle(self) -> None:
        """Every trainer reports, twice as one report may have been in flight: then the accounts agree."""
        for one in (*self.trainers, *self.trainers):
            one.report()
        stale = sum(one.data.buffer.info().stale for one in self.trainers)
        held = Counter(key[0] for one in self.trainers for key in one.held())
        applied = Counter(key[0] for key in self.applied)
        arrived = Counter(key[0] for one in self.trainers for key, _ in (*one.logged, *one.arrived))
        received = Counter({number: self.tracker.num_received(number) for number in range(SIMULATIONS)})
        assert received.total() == applied.total() + held.total() + stale
        assert received.total() == sum(
            one.stats.received + one.log.num_inherited_for(one.index, self.count) for one in self.trainers
        )
        for number in range(SIMULATIONS):
            both = received[number] + self.tracker.num_lost(number)
            assert both <= STEPS, f"simulation {number}: {received[number]} received and {both} with the lost ones"
            assert received[number] >= applied[number] + held[number]
            if not stale:
                assert received[number] == applied[number] + held[number]
            if number not in self.clients:
                assert both == 0
            elif self.tracker.simulations[number].ended:  # what was lost may be sent again
                assert both >= STEPS - arrived[number], f"simulation {number}"
            elif not self.clients[number].closed:  # what a closed one had sent is counted at its end
                assert both == len(self.known[number]), f"simulation {number}"

    def run(self, events: int) -> None:
        for _ in range(events):
            self.move()
            self.check()
            if self.rng.random() < 0.1:
                self.settle()
        while len(self.clients) < SIMULATIONS:
            self.open()
        while not self.tracker.done:
            self.now += 0.01
            for one in (*self.clients.values(), *self.clients.values()):
                one.move()
            for trainer in self.trainers:
                trainer.store()
                keys = trainer.train()
                trainer.account.add_keys(keys)
                self.applied.update(keys)
                self.step += bool(keys)
                trainer.report()
            self.tracker.poll(self.now)
            assert self.now < 0.01 * (events + 2000), "the run does not end"
        for trainer in self.trainers:
            trainer.store()
            assert (trainer.logged, trainer.arrived) == ([], [])
        self.settle()
        self.check()
        received = [self.tracker.num_received(number) for number in range(SIMULATIONS)]
        lost = [self.tracker.num_lost(number) for number in range(SIMULATIONS)]
        assert [sum(pair) for pair in zip(received, lost, strict=True)] == [STEPS] * SIMULATIONS


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(120))
def test_each_sample_is_applied_held_stale_or_lost_whatever_happens(seed):
    World(seed).run(600)

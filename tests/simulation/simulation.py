"""A run on a virtual clock: the real protocol classes of the server, and trainers, network, disk and faults that a
seed decides.

``ParameterServer`` with its aggregator, consistency, ledger, members and part collector is the code of the package. The
trainers are a model of trainers/rpc.py and server/client.py: generators that yield calls. One ``random.Random(seed)``
decides everything, so a seed replays exactly.
"""

from __future__ import annotations

import heapq
import pickle
import random
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from paramserver.buffers.positions import AppliedPositions
from paramserver.checkpoint.save import ChunkedFile
from paramserver.config import (
    BestConfig,
    BufferConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    LoggingConfig,
    ServerConfig,
    TrainingConfig,
)
from paramserver.consistency import Announcement, Decision, Readiness, TrainerId, Verdict
from paramserver.context import StopRequest
from paramserver.devices import CPU
from paramserver.distributed.membership import Member, Members
from paramserver.distributed.rpc_calls import RemoteError
from paramserver.errors import ParamserverError, PeerFailed, PeerLost, RunEnded, ViewChanged
from paramserver.metrics.records import StepReport, TrainerTotals, WeightedSums
from paramserver.runs.checkpoint_manager import CheckpointManager, StagedCheckpoint
from paramserver.runs.monitor import RunMonitor
from paramserver.server import client, parameter_server
from paramserver.server.parameter_server import ParameterServer
from paramserver.transport.base import ServerTransport
from paramserver.transport.messages import DataPosition, JoinReply, StepGrant

HEARTBEAT_S, LOST_AFTER_S, TIMEOUT_S = 0.5, 1.6, 20.0
# Faults happen in the first events and seconds of a run; after the last one it has so long to end.
FAULTY_EVENTS, FAULTY_S, GRACE_S = 400, 8.0, 120.0
_REJOIN_S = 0.2

# What a trainer sends again if it or its reply was lost; a pull in another autograd context.
_REPEATABLE = {handler.__name__ for handler in client._REPEATABLE} | {"pull"}

PushKey = tuple[int, int, int, int]
"""View, trainer, incarnation and sequence of a push."""


class Violation(Exception):  # noqa: N818 - not an error of the program
    """An invariant does not hold."""


@dataclass(frozen=True)
class Scenario:
    """What the seed chooses before the run.

    Attributes:
        config: of the run.
        samples: of each trainer, in one pass.
        faults: kind of each fault, by the number of the event at which it happens.
        loss: probability that a message is lost, while faults happen; ``duplicates``, that a push arrives twice.
        waits: probability that a trainer has no samples when it announces.
        supervised: processes that the server lost are killed and started again; else they come back by themselves.
        gives_up: the first trainer that dies is not started again.
    """

    config: Config
    samples: tuple[int, ...]
    faults: Mapping[int, str]
    loss: float
    duplicates: float
    waits: float
    supervised: bool
    gives_up: bool

    @classmethod
    def draw(cls, rng: random.Random) -> Scenario:
        trainers, kind = rng.randint(2, 5), rng.choice(("sync", "sync", "bounded", "async", "backup"))
        config = Config(
            mode="rpc",
            cluster=ClusterConfig(num_trainers=trainers, timeout_s=TIMEOUT_S),
            server=ServerConfig(
                consistency="sync" if kind == "backup" else kind,
                backup_trainers=rng.randint(1, trainers - 1) if kind == "backup" else 0,
                staleness_bound=rng.randint(0, 3),
                heartbeat_s=HEARTBEAT_S,
                lost_after_s=LOST_AFTER_S,
                on_loss=rng.choice(("continue", "continue", "rollback")),
                transport="rpc",
            ),
            training=TrainingConfig(
                max_epochs=rng.randint(1, 2),
                max_steps=rng.choice((None, None, rng.randint(1, 14))),
                batch_size=rng.randint(1, 3),
                accumulate_batches=rng.choice((1, 1, 2)),
                validate_every=rng.choice((0, 0, 2, 3)),
                uneven_inputs=rng.choice(("join", "join", "stop")),
            ),
            buffer=BufferConfig(
                kind=rng.choice(("fifo", "firo")),
                capacity=rng.randint(1, 6),
                pseudo_epochs=rng.choice((1, 1, 2)),
            ),
            checkpoint=CheckpointConfig(
                every=rng.choice((0, 2, 3, 4)),
                best=rng.choice((None, None, BestConfig(metric="loss"))),
            ),
            logging=LoggingConfig(log_every=1_000_000),
        )
        kinds = ("crash trainer", "freeze trainer", "replace trainer", "partition", "crash server", "pause server")
        chosen = rng.choice((kinds, kinds, kinds[:1], kinds[1:4], kinds[2:3], kinds[4:5]))
        faults = {rng.randint(1, FAULTY_EVENTS): rng.choice(chosen) for _ in range(rng.choice((0, 1, 2, 3, 6)))}
        return cls(
            config,
            tuple(rng.randint(1, 9) for _ in range(trainers)),
            faults,
            loss=rng.choice((0.0, 0.0, 0.01, 0.03)),
            duplicates=rng.choice((0.0, 0.05, 0.2)),
            waits=rng.choice((0.0, 0.0, 0.1)),
            supervised=rng.random() < 0.6,
            gives_up=rng.random() < 0.05,
        )


@dataclass
class SimulatedRun:
    """How a run ended. ``violation`` is None if all invariants held; ``digest`` is equal if two runs were."""

    seed: int
    violation: str | None
    digest: int
    events: int
    seconds: float
    redone: int
    views: int
    incarnations: int
    trace: list[str]


# Rank 0: what ParameterServer stands on.


class Store:
    """In the place of ``ParameterStore``: the parameters are the list of pushes that were applied."""

    def __init__(self, task: Any, config: Config, allocate: Any = None) -> None:
        self.node = _current.starting
        self.version = self.node.checkpoints.first_step
        self.model, self.device = None, CPU.device
        layout = SimpleNamespace(total_bytes=0)
        self.parameters = SimpleNamespace(layout=layout, flats=[], tensors={})
        self.buffers = self.shard = self.parameters
        self.leaves: list[Any] = []
        self.pipeline = None
        self.updater = SimpleNamespace(
            lr=(0.1,),
            on_epoch_end=lambda: None,
            on_validation_end=lambda version, means, since: None,
            state_dict=dict,
            parameters_of={},
        )
        self.held: set[int] = set()

    def apply(self, version: int, update: Any, pushes: Sequence[Any]) -> None:
        self.version += 1
        _current.applied(self.node, self.version, version, pushes)

    def snapshot_of_buffers(self) -> list[Any]:
        return []

    def shard_snapshot(self) -> list[Any]:
        return []

    def retain(self, version: int) -> None:
        self.held.add(version)

    def retained(self, version: int) -> tuple[list[Any], list[Any]]:
        if version not in self.held:
            raise KeyError(version)
        return [], []

    @property
    def retained_versions(self) -> frozenset[int]:
        return frozenset(self.held)

    def drop(self, version: int) -> None:
        self.held.discard(version)


class Transport(ServerTransport):
    """A version is its number, and a gradient the key of its push."""

    def __init__(self, leaves: Any, wire: Any, shard: Any) -> None:
        self.store = _current.server.store
        self.pinned: int | None = None

    def pin_version(self) -> int:
        self.pinned = self.store.version
        return 0

    def pull(self, held: Collection[int] = ()) -> Any:
        return self.pinned

    def view_version(self) -> tuple[None, Sequence[Any]]:
        return None, ()

    def collect_gradients(self, held: Any) -> Any:
        return held

    def unpin(self) -> None:
        self.pinned = None


class Checkpoints(CheckpointManager):
    """Checkpoints of a simulated disk: what rank 0 stages is pickled, and is in ``World.manifest`` some time later."""

    def __init__(self, node: Node, config: Config, manifest: bytes | None) -> None:
        self.node = node
        self.config = config
        self.view = node.view
        self.simulations = None
        self.monitor = RunMonitor(config, SimpleNamespace(write=node.record), Path())
        self.writer: Any = SimpleNamespace(raise_error=lambda: None)
        self.resumed: dict[str, Any] | None = None if manifest is None else pickle.loads(manifest)
        self.newest = self._resume = self.resumed  # type: ignore[assignment]
        self.writing: list[bytes] = []
        self.first_step = 0
        self.consistency_state: Mapping[str, Any] = {}
        self.ledger_state: Mapping[str, Any] = {"rows": {}}
        if self.resumed is not None:
            self.first_step = self.resumed["step"]
            self.monitor.load_state_dict(self.resumed["monitor"])
            self.consistency_state, self.ledger_state = self.resumed["consistency"], self.resumed["ledger"]

    def restore_model(self, model: Any) -> None:
        pass

    def restore_optimizer(self, updater: Any) -> None:
        pass

    def trainer_part(self, trainer_index: int, newest: bool = False) -> Any:
        held = self.newest if newest else self.resumed
        return None if held is None else held["parts"][trainer_index]

    def stage(self, step, model, updater, reason, since, consistency=None, ledger=None):  # type: ignore[no-untyped-def]
        _current.check(step == self.node.server.store.version, f"a checkpoint of {step} is staged at another version")
        state = {
            "step": step,
            "monitor": self.monitor.state_dict(),
            "consistency": consistency,
            "ledger": ledger,
            "applied": self.node.history,
        }
        return StagedCheckpoint(step, {"state": pickle.dumps(state)}, False, reason, since)

    def commit(self, staged: StagedCheckpoint, parts: Mapping[int, Any], pause_s: float) -> None:
        state = pickle.loads(staged.objects["state"])
        state["parts"] = {
            i: pickle.loads(b"".join(part)) if isinstance(part, ChunkedFile) else part for i, part in parts.items()
        }
        _current.check_manifest(state)
        written = pickle.dumps(state)
        self.writing.append(written)
        _current.after(_current.rng.uniform(0.0, 0.3), self._write)

    def _write(self) -> None:
        if not self.node.alive or not self.writing:
            return
        manifest = self.writing.pop(0)
        self.newest = pickle.loads(manifest)
        _current.note("written", self.newest["step"])
        _current.manifest = manifest

    def finish_writing(self) -> None:
        while self.writing:
            self._write()


class Node:
    """A session of rank 0: a server and what it has applied."""

    def __init__(self, world: World, view: int) -> None:
        self.view = view
        self.alive = True
        self.paused_until = 0.0
        self.watched: list[tuple[str, Callable[[str | None], None]]] = []
        self.checkpoints = Checkpoints(self, world.scenario.config, world.manifest)
        world.starting = self
        manifest = self.checkpoints.resumed
        self.history: list[tuple[PushKey, tuple[int, ...]]] = [] if manifest is None else manifest["applied"]
        self.keys = {key for key, _ in self.history}
        self.last_sequence: dict[tuple[int, int, int], int] = {}
        self.times: Counter[tuple[int, int]] = Counter()
        for (_, trainer, _, _), positions in self.history:
            self.times.update((trainer, position) for position in positions)
        self.stop = StopRequest()
        self.stop.event = threading.Event()
        self.started = world.now
        self.server = ParameterServer(
            None,  # type: ignore[arg-type]
            world.scenario.config,
            len(world.scenario.samples),
            self.checkpoints,
            self.stop,
        )

    def record(self, record: dict[str, Any]) -> None:
        _current.note(record["kind"], record.get("trainer"), record.get("text", ""))
        if record["kind"] == "lost":
            _current.lost(record["trainer"])


# Trainers.


@dataclass
class Call:
    """A call of a handler of the server. A push has the same key each time it is sent."""

    method: str
    args: tuple[Any, ...]

    @property
    def is_repeatable(self) -> bool:
        return self.method in _REPEATABLE


Steps = Generator[Any, Any, Any]


class Data:
    """The samples of a trainer as trainers/data.py serves them: a source in order, and a small buffer."""

    def __init__(self, world: World, index: int) -> None:
        config = world.scenario.config
        self.rng = world.rng
        self.once = world.scenario.samples[index]
        self.total = self.once * (config.training.max_epochs or 1)
        self.times, self.capacity = config.buffer.pseudo_epochs, config.buffer.capacity
        self.random_order = config.buffer.kind == "firo"
        self.batch, self.accumulate = config.training.batch_size, config.training.accumulate_batches
        self.items: list[list[int]] = []  # position, and how often it is still to be served
        self.next = 0
        self.loaded = AppliedPositions()

    def load(self, part: Mapping[str, Any]) -> None:
        if part["buffer"] is None:
            self.load_after_loss(part["applied"])
            return
        self.items, self.next = [list(item) for item in part["buffer"]], part["next"]
        self.loaded.load_state_dict(part["applied"])

    def load_after_loss(self, applied: Mapping[str, Any]) -> None:
        self.loaded.load_state_dict(applied)
        self.items, self.next = [], self.loaded.low

    def part(self) -> dict[str, Any]:
        return {"buffer": [tuple(item) for item in self.items], "next": self.next, "applied": self.applied()}

    def applied(self) -> dict[str, Any]:
        left = dict(self.items)
        applied = AppliedPositions()
        for position in range(self.total):
            if position < self.next:
                times = self.times - left.get(position, 0)
            else:
                known = self.loaded.times(position)
                times = self.times if known is None else known
            applied.add([position] * times, self.times)
        return applied.state_dict()

    def left(self) -> int:
        self._fill()
        ahead = 0
        for position in range(self.next, self.total):
            known = self.loaded.times(position)
            ahead += 0 if known is None else self.times - known
        return sum(times for _, times in self.items) + ahead

    def _fill(self) -> None:
        while self.next < self.total and len(self.items) < self.capacity:
            known = self.loaded.times(self.next)
            if known is not None and known < self.times:
                self.items.append([self.next, self.times - known])
            self.next += 1

    def take(self, batches: int) -> list[int]:
        taken: list[int] = []
        for _ in range(batches * self.batch):
            self._fill()
            if not self.items:
                break
            n = self.rng.randrange(len(self.items)) if self.random_order else 0
            item = self.items[n]
            taken.append(item[0])
            item[1] -= 1
            if not item[1]:
                del self.items[n]
        return taken

    def announcement(self) -> Announcement:
        left = self.left()
        if not left:
            return Announcement(Readiness.DRAINED)
        return Announcement(Readiness.READY, min(self.accumulate, -(-left // self.batch)))


class Task:
    """A thread of a trainer: it waits for a reply, sleeps, or waits for another task."""

    def __init__(self, session: Session, steps: Steps) -> None:
        self.session, self.steps = session, steps
        self.request: int | None = None
        self.done = False
        self.waiter: Task | None = None


class Session:
    """One time that a process joins the run and trains, as ``Session`` in runtime/rank.py and ``RpcTrainer`` do."""

    def __init__(self, world: World, process: Process, node: Node) -> None:
        self.world, self.process, self.index = world, process, process.index
        self.node = node
        self.config = world.scenario.config
        self.ended = False
        self.lost: PeerLost | None = None
        self.last_delivery = 0.0
        self.silent_since: float | None = None
        self.worker_id = world.draw()
        self.member = Member(
            self.index, f"trainer{self.index}_{self.worker_id}", self.worker_id, f"pid {process.pid}", view=node.view
        )
        self.view = self.incarnation = self.sequence = self.announced = self.step = 0
        self.validated: int | None = None
        self.saved: int | None = None
        self.sender: Task | None = None
        self.data = Data(world, self.index)
        self.main = Task(self, self.run())

    # The model of the training loop; see trainers/base.py and trainers/rpc.py.

    def run(self) -> Steps:
        world, index = self.world, self.index
        epoch_samples = sum(world.scenario.samples) * self.data.times
        reply: JoinReply = yield Call("join", (self.member, epoch_samples))
        world.joined(self, reply)
        self.id = TrainerId(index, reply.view, reply.incarnation)
        self.view, self.incarnation, self.step = reply.view, reply.incarnation, reply.step
        yield Call("view_version", (self.id, None))
        if reply.data_position is None:
            if reply.stored_part is not None:
                self.data.load(reply.stored_part)  # type: ignore[arg-type]
                self.saved = self.step
            yield Call("report_source", (self.id, DataPosition({}, self.data.applied())))
        else:
            self.data.load_after_loss(reply.data_position.applied)
        decision = yield from self.fit(reply.lockstep)
        if not decision.interrupted and (yield from self.validate(decision)):
            self.saved = None
        yield from self.save("end")
        yield Call("leave", (self.id, TrainerTotals(index), decision))

    def fit(self, lockstep: bool) -> Generator[Any, Any, Decision]:
        index, next_grant = self.index, None
        while True:
            grant: StepGrant | None
            grant, next_grant = next_grant, None
            if grant is None:
                announcement = self.data.announcement()
                if announcement.readiness is Readiness.READY and self.world.chance(self.world.scenario.waits):
                    yield 0.5
                    announcement = Announcement(Readiness.WAITING)
                self.announced += 1
                grant = yield Call("announce", (self.id, announcement, self.announced))
            decision = grant.decision
            assert decision is not None
            self.world.decided(self, decision)
            if decision.verdict is Verdict.WAIT:
                continue
            if decision.verdict is Verdict.END:
                self.step = decision.step
                return decision
            if decision.verdict is Verdict.VALIDATE:
                self.step = decision.step
                yield from self.validate(decision)
                continue
            if decision.verdict is Verdict.BARRIER:
                self.step = decision.step
                yield from self.validate_and_save(decision)
                continue
            if index in decision.active:
                next_grant = yield from self.train(decision, lockstep)
            else:
                self.step = yield Call("wait_version", (self.id, decision.step + 1))
                if self.step == decision.step:
                    continue
            if lockstep and self.is_due(self.step):
                yield from self.validate_and_save(decision)

    def train(self, decision: Decision, lockstep: bool) -> Steps:
        pulled = yield Call("pull", (self.id,))
        self.world.check(pulled == decision.step, f"trainer {self.index} was granted {decision.step}, pulled {pulled}")
        positions = self.data.take(decision.batches)
        yield self.process.compute_s * self.world.rng.uniform(0.5, 1.5)
        self.sequence += 1
        report = StepReport(
            self.index,
            decision.step,
            len(positions),
            0.5,
            0.0,
            positions=positions,
            view=self.view,
            incarnation=self.incarnation,
            sequence=self.sequence,
        )
        announcement = None
        if not (lockstep and self.is_due(decision.step + 1)) and not self.world.chance(self.world.scenario.waits):
            announcement = self.data.announcement()
        grant: StepGrant = yield Call("push", (_key(report), report, (), announcement))
        result = grant.result
        assert result is not None
        self.world.acknowledged(self, _key(report), result)
        self.step = result.step
        return grant if grant.decision is not None and grant.decision.verdict is not Verdict.WAIT else None

    def is_due(self, step: int) -> bool:
        return _due(step, self.config.training.validate_every) or _due(step, self.save_every)

    @property
    def save_every(self) -> int:
        every = self.config.checkpoint.every
        return self.config.training.validate_every if every is None else every

    def validate_and_save(self, decision: Decision) -> Steps:
        improved = False
        if _due(self.step, self.config.training.validate_every):
            improved = yield from self.validate(decision)
        if improved or _due(self.step, self.save_every):
            yield from self.save("best" if improved else "periodic")

    def validate(self, decision: Decision) -> Generator[Any, Any, bool]:
        if self.validated == self.step:
            return False
        self.validated = self.step
        yield Call("view_version", (self.id, self.step))
        yield 0.05
        sums = WeightedSums()
        sums.add({"loss": float(zlib.crc32(b"%d" % self.step) % 5)}, 1)
        if decision.verdict is Verdict.VALIDATE:
            yield Call("report_validation_share", (self.id, self.step, sums))
            return False
        _, improved = yield Call("report_validation", (self.id, self.step, sums))
        return bool(improved)

    def save(self, reason: str) -> Steps:
        if self.saved != self.step:
            self.saved = self.step
            yield from self.wait_saved()
            part, step = self.data.part(), self.step
            if not (yield Call("stage_checkpoint", (self.id, reason))):
                return
            self.sender = Task(self, self.send_part(step, part))
            self.world.resume(self.sender)
        if reason == "end":
            yield from self.wait_saved()

    def wait_saved(self) -> Steps:
        if self.sender is not None and not self.sender.done:
            yield self.sender

    def send_part(self, step: int, part: dict[str, Any]) -> Steps:
        content = torch.from_numpy(np.frombuffer(bytearray(pickle.dumps(part)), np.uint8))
        yield Call("receive_part_chunk", (self.id, step, content[:40]))
        yield Call("receive_part_chunk", (self.id, step, content[40:]))
        yield Call("finish_part", (self.id, step, 0.001))

    # The connection.

    def start(self) -> None:
        self.world.after(HEARTBEAT_S, self.beat)
        self.world.resume(self.main)

    def beat(self) -> None:
        """Send a heartbeat; it takes no time where nothing is in its way."""
        world, process = self.world, self.process
        if self.ended or not process.alive or self.lost is not None:
            return
        if process.frozen_until > world.now:
            world.at(process.frozen_until + world.rng.uniform(0.0, HEARTBEAT_S), self.beat)
            return
        world.after(HEARTBEAT_S, self.beat)
        if not self.node.alive:
            self.mark_lost(PeerLost("the server is lost: its connection was closed"))
        elif process.cut_until > world.now or self.node.paused_until > world.now:
            self.silent_since = world.now if self.silent_since is None else self.silent_since
            if world.now - self.silent_since > LOST_AFTER_S:
                self.mark_lost(PeerLost("the server is lost: it did not answer"))
        else:
            self.silent_since = None
            try:
                self.node.server.heartbeat(self.index, self.worker_id)
            except PeerLost as error:
                self.mark_lost(error)

    def mark_lost(self, error: PeerLost) -> None:
        """End every wait of this session."""
        if self.ended or self.lost is not None:
            return
        self.lost = error
        for task in (self.main, self.sender):
            if task is not None and task.request is not None and not self.ended:
                task.request = None
                self.world.resume(task, error=error)


class Process:
    """A process of a trainer; its sessions follow each other."""

    def __init__(self, world: World, index: int) -> None:
        self.index, self.pid = index, world.draw()
        self.alive = True
        self.left = False
        self.frozen_until = self.cut_until = 0.0
        self.compute_s = world.rng.choice((0.05, 0.1, 0.1, 0.4))
        self.session: Session | None = None
        self.min_view = 1


# The world.


class World:
    """Clock, events, network, disk, supervisor, faults and invariants of one run."""

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.tracing = tracing
        self.trace: list[str] = []
        self.now, self.events, self.drawn = 0.0, 0, 0
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.scenario = Scenario.draw(self.rng)
        self.violation: str | None = None
        self.manifest: bytes | None = None
        self.node: Node | None = None
        self.starting: Any = None
        self.view = 0
        self.processes: list[Process] = []
        self.complete = False
        self.given_up: int | None = None  # the trainer that is not started again
        self.redone: set[PushKey] = set()
        self.acks: set[PushKey] = set()
        self.versions: dict[tuple[int, int], int] = {}
        self.views_seen: Counter[int] = Counter()
        self.incarnations = 0
        self.late: set[int] = set()  # requests that were held back in the network

    @property
    def server(self) -> ParameterServer:
        assert self.node is not None
        return self.node.server

    # Events.

    def draw(self) -> int:
        self.drawn += 1
        return self.drawn

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.queue, (time, self.draw(), action, args))

    def after(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, action, *args)

    def note(self, *words: Any) -> None:
        if self.tracing:
            self.trace.append(f"{self.now:8.3f} {' '.join(str(word) for word in words)}")

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    @property
    def is_faulty(self) -> bool:
        return self.now < FAULTY_S and self.events < FAULTY_EVENTS

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            self.violation = self.violation or text
            raise Violation(text)

    def run(self) -> SimulatedRun:
        self.note("scenario", self.scenario)
        self.start_server()
        for index in range(len(self.scenario.samples)):
            self.processes.append(Process(self, index))
            self.after(self.rng.uniform(0.0, 0.5), self.join, self.processes[index])
        try:
            self._loop()
            if self.violation is None:
                self._check_end()
        except Violation as violation:
            self.violation = self.violation or str(violation)
        summary = (self.events, self.now, sorted(self.redone), self.incarnations, self.node and self.node.history)
        return SimulatedRun(
            self.seed,
            self.violation,
            zlib.crc32(repr((summary, self.violation)).encode()),
            self.events,
            self.now,
            len(self.redone),
            self.view,
            self.incarnations,
            self.trace,
        )

    def _loop(self) -> None:
        faults = self.scenario.faults
        while self.queue and self.violation is None and not self.complete:
            self.now, _, action, args = heapq.heappop(self.queue)
            self.events += 1
            if self.now > FAULTY_S + GRACE_S:
                raise Violation(f"the run has not ended {GRACE_S:g} s after the last fault")
            if self.events in faults:
                self.inject(faults[self.events])
            action(*args)
            self._look_at_server()
        if self.violation is None and not self.complete:
            raise Violation("nothing happens any more, and the run has not ended")

    # Rank 0.

    def start_server(self) -> None:
        self.view += 1
        manifest = None if self.manifest is None else pickle.loads(self.manifest)
        kept = set() if manifest is None else {key for key, _ in manifest["applied"]}
        if self.node is not None:
            self.check(not self.node.alive, "two servers live at once")
            self.redone |= self.node.keys - kept
        self.node = node = Node(self, self.view)
        self.views_seen[node.server.view] += 1
        self.check(self.views_seen[node.server.view] == 1, f"two servers have had view {node.server.view}")
        self.note("server starts, view", self.view, "step", node.checkpoints.first_step)
        self.after(HEARTBEAT_S, self.tick, node)
        for process in self.processes:  # those that had left are needed again
            if process.left:
                self._start_again(process)

    def _start_again(self, process: Process) -> None:
        """A trainer that left in good order is needed again: the servers returned to a checkpoint."""
        process.left = False
        self.after(self.rng.uniform(0.1, 1.0), self.join, process)

    def tick(self, node: Node) -> None:
        """As ``_wait_until_finished`` in runtime/rank.py."""
        if not node.alive:
            return
        if node.paused_until > self.now:
            self.at(node.paused_until, self.tick, node)
            return
        node.server.check_heartbeats()
        if node.server.started:
            node.server.check_absences()
        else:
            missing = node.server.missing()
            if missing and self.now >= node.started + TIMEOUT_S:
                self.check(f"trainer {self.given_up}" in missing, f"{missing} did not join in time")
                self.complete = True  # the run fails, and names the trainer
                return
        self.after(HEARTBEAT_S, self.tick, node)

    def _look_at_server(self) -> None:
        """End or restart the server's session once it has finished."""
        node = self.node
        if node is None or not node.alive or not node.server.finished.is_set():
            return
        error = node.server.error
        if error is not None and not isinstance(error, ViewChanged):
            raise Violation(f"the run failed: {error}")
        node.checkpoints.finish_writing()
        node.alive = False
        if error is None:
            self.complete = True
            return
        self.note("view changes:", error)
        self.after(_REJOIN_S, self.start_server)

    # Processes, and who starts them again.

    def join(self, process: Process) -> None:
        """Begin a session as soon as there is a server of a view that the process accepts."""
        node = self.node
        if not process.alive or self.complete or self.processes[process.index] is not process:
            return
        if process.frozen_until > self.now:
            self.at(process.frozen_until, self.join, process)
        elif node is None or not node.alive or node.view < process.min_view or process.cut_until > self.now:
            self.after(0.25, self.join, process)
        else:
            process.session = Session(self, process, node)
            process.session.start()

    def session_ended(self, session: Session, error: ParamserverError | None) -> None:
        """As ``Session.after`` in runtime/rank.py."""
        process = session.process
        session.ended = True
        process.session = None
        self.note("session of trainer", session.index, "ends:", repr(error))
        self.disconnect(session, None)
        if error is None:
            process.left = True
            if self.view > session.node.view:
                self._start_again(process)
            return
        if isinstance(error, PeerFailed) or not isinstance(error, PeerLost):
            raise Violation(f"trainer {session.index} fails: {error}")
        if isinstance(error, ViewChanged):
            process.min_view = session.node.view + 1
        elif isinstance(error, RunEnded):
            process.left = True
            return
        else:
            process.min_view = session.node.view
        self.after(_REJOIN_S, self.join, process)

    def disconnect(self, session: Session, reason: str | None) -> None:
        """Let the server know that the connection of a session was closed."""
        delay = self.rng.uniform(0.01, 0.3)
        self.at(max(self.now, session.process.cut_until) + delay, self._gone, session.node, session.member.name, reason)

    def _gone(self, node: Node, name: str, reason: str | None) -> None:
        if node.alive:
            for watched, on_gone in node.watched:
                if watched == name:
                    on_gone(reason)

    def watch(self, name: str, on_gone: Callable[[str | None], None]) -> None:
        assert self.node is not None
        self.node.watched.append((name, on_gone))

    def kill(self, process: Process) -> None:
        """End a process; another one takes its place."""
        if not process.alive:
            return
        process.alive = False
        if process.session is not None:
            process.session.ended = True
            self.disconnect(process.session, "its connection was closed")
        if self.scenario.gives_up and self.given_up is None and self.processes[process.index] is process:
            self.given_up = process.index
        self.after(self.rng.uniform(0.1, 1.5), self._replace, process)

    def _replace(self, process: Process) -> None:
        if self.processes[process.index] is process and self.given_up != process.index:
            successor = self.processes[process.index] = Process(self, process.index)
            self.join(successor)

    def lost(self, trainer_index: int) -> None:
        """The server has lost a trainer: the supervisor kills its process, which may be frozen."""
        process = self.processes[trainer_index]
        if self.scenario.supervised:
            delay = self.rng.uniform(0.01, 0.2)
            if self.chance(0.4):
                self.after(delay, self.kill, process)
            else:  # the signal does not reach it: it finds out by itself that it has a successor
                self.after(delay, self._replace, process)

    def inject(self, fault: str) -> None:
        node, rng = self.node, self.rng
        self.note("FAULT", fault)
        process = rng.choice(self.processes)
        if fault == "crash trainer":
            self.note("  of trainer", process.index)
            self.kill(process)
        elif fault == "freeze trainer":
            process.frozen_until = self.now + rng.choice((0.5, 2.0, 3.0, 5.0))
            self.note("  trainer", process.index, "until", process.frozen_until)
        elif fault == "replace trainer":  # it lives, and continues after its successor has joined
            process.frozen_until = self.now + rng.choice((0.0, rng.uniform(0.1, 1.0)))
            self.note("  trainer", process.index, "until", process.frozen_until)
            if process.session is not None:
                self._gone(process.session.node, process.session.member.name, "its connection was closed")
            self._replace(process)
        elif fault == "partition":
            process.cut_until = self.now + rng.choice((0.3, 1.0, 3.0, 5.0))
            self.note("  trainer", process.index, "until", process.cut_until)
        elif node is not None and node.alive and not self.complete:
            if fault == "pause server":
                node.paused_until = self.now + rng.uniform(0.2, 1.2)
            else:
                node.alive = False
                for task in [t for p in self.processes if p.session for t in (p.session.main, p.session.sender) if t]:
                    if task.request is not None:
                        self.after(rng.uniform(0.01, 0.3), self._closed, task.session)
                self.after(rng.uniform(0.3, 1.5), self.start_server)

    def _closed(self, session: Session) -> None:
        session.mark_lost(PeerLost("the server is lost: its connection was closed"))

    # Tasks of trainers.

    def resume(self, task: Task, value: Any = None, error: ParamserverError | None = None) -> None:
        """Run a task until it waits again."""
        session = task.session
        process = session.process
        if session.ended or not process.alive:
            return
        if process.frozen_until > self.now:
            self.at(process.frozen_until, partial(self.resume, task, value, error))
            return
        try:
            item = task.steps.send(value) if error is None else task.steps.throw(error)
        except StopIteration:
            task.done = True
            if task is session.main:
                self.session_ended(session, None)
            elif task.waiter is not None:
                self.resume(task.waiter)
            return
        except ParamserverError as raised:
            self.session_ended(session, raised)
            return
        if isinstance(item, Call):
            task.request = self.draw()
            self.send(task, item, task.request)
            if session.lost is not None:
                task.request = None
                self.resume(task, error=session.lost)
        elif isinstance(item, Task):
            item.waiter = task
        else:
            self.after(item, self.resume, task)

    # The network.

    def send(self, task: Task, call: Call, request: int, again: bool = False) -> None:
        """Send a request to whatever server there is when it arrives. In order, but for one that is sent again."""
        rng, session = self.rng, task.session
        arrival = max(self.now, session.process.cut_until) + rng.uniform(0.005, 0.05)
        reply_is_lost = False
        if self.is_faulty:
            loses = self.chance(self.scenario.loss)
            if loses and call.is_repeatable:
                self.after(rng.uniform(0.2, 0.8), self.send_again, task, call, request)
            elif loses:  # the connection breaks, and both ends notice
                self.after(rng.uniform(0.05, 0.5), self._closed, session)
                self.disconnect(session, "its connection was closed")
            if loses and rng.random() < 0.5:
                self.note("loses", session.index, call.method)
                return
            reply_is_lost = loses
            if call.is_repeatable and not again and self.chance(self.scenario.duplicates):
                self.at(arrival + rng.uniform(0.0, 0.6), self.deliver, task, call, request, False)
            if self.chance(0.05):
                arrival += rng.uniform(0.0, 1.0)
        if not again:
            arrival = session.last_delivery = max(session.last_delivery, arrival)
        self.at(arrival, self.deliver, task, call, request, reply_is_lost)

    def send_again(self, task: Task, call: Call, request: int) -> None:
        if task.request == request and not task.session.ended and task.session.process.alive:
            self.send(task, call, request, again=True)

    def deliver(self, task: Task, call: Call, request: int, reply_is_lost: bool) -> None:
        node, session = self.node, task.session
        if node is None or not node.alive or session.ended or node is not session.node:
            # What is sent to a server that is gone, or by a process that is, may arrive much later, or never.
            if task.request == request:
                self.after(0.05, self._closed, session)
            if request not in self.late and self.rng.random() < 0.8:
                self.late.add(request)
                self.after(self.rng.uniform(0.0, 3.0), self.deliver, task, call, request, True)
                return
            if node is None or not node.alive:
                return
        if node.paused_until > self.now:
            self.at(node.paused_until, self.deliver, task, call, request, reply_is_lost)
            return
        self.note(
            session.index, f"pid {session.process.pid}", call.method, *call.args[1 : 2 * (call.method != "leave")]
        )
        try:
            result = getattr(node.server, call.method)(*call.args)
        except Exception as error:  # noqa: BLE001 - as returns_errors
            result = RemoteError.of(error)
        if isinstance(result, torch.futures.Future):
            result.add_done_callback(lambda done: self.reply(node, task, request, done.value(), reply_is_lost))
        else:
            self.reply(node, task, request, result, reply_is_lost)

    def reply(self, node: Node, task: Task, request: int, value: Any, is_lost: bool) -> None:
        if not is_lost:
            latency = self.rng.uniform(0.005, 0.05) + (self.rng.random() < 0.03) * self.rng.uniform(0.0, 0.5)
            self.at(max(self.now, task.session.process.cut_until) + latency, self.receive, node, task, request, value)

    def receive(self, node: Node, task: Task, request: int, value: Any) -> None:
        session = task.session
        if task.request != request or session.ended or not session.process.alive:
            return
        self.note(session.index, f"pid {session.process.pid}", "gets", value if isinstance(value, RemoteError) else "")
        task.request = None
        self.resume(task, value, value.error() if isinstance(value, RemoteError) else None)

    # Invariants.

    def joined(self, session: Session, reply: JoinReply) -> None:
        self.incarnations = max(self.incarnations, reply.incarnation)
        self.check(
            reply.view >= session.process.min_view, f"trainer {session.index} joins the earlier view {reply.view}"
        )

    def decided(self, session: Session, decision: Decision) -> None:
        if decision.verdict is Verdict.VALIDATE:
            return
        before = self.versions.get((session.view, session.process.pid), 0)
        self.check(
            decision.step >= before, f"trainer {session.index} goes back from version {before} to {decision.step}"
        )
        self.versions[session.view, session.process.pid] = decision.step

    def acknowledged(self, session: Session, key: PushKey, result: Any) -> None:
        if not result.dropped:
            self.acks.add(key)

    def applied(self, node: Node, version: int, counted: int, pushes: Sequence[Any]) -> None:
        """Check an update before it is part of the history."""
        config = self.scenario.config
        self.check(version == counted, f"update {counted} makes version {version}")
        self.check(node is self.node and node.alive, "a server that is dead applies an update")
        limit = config.training.max_steps
        self.check(limit is None or version <= limit, f"version {version} exceeds max_steps ({limit})")
        for push in pushes:
            key, gradient = _key(push.report), push.gradients
            view, trainer, _, sequence = key
            self.note("  applies", key, "in version", version, "positions", push.report.positions)
            self.check(gradient == key, f"the gradient of push {gradient} is applied as that of {key}")
            self.check(key not in node.keys, f"push {key} is applied twice")
            self.check(view == node.view, f"push {key} of view {view} is applied in view {node.view}")
            last = node.last_sequence.get(key[:3], 0)
            if config.server.backup_trainers:
                self.check(sequence > last, f"push {key} is applied after {last}")
            else:
                self.check(sequence == last + 1, f"push {key} is applied after {last}: one is missing")
            node.last_sequence[key[:3]] = sequence
            positions = tuple(push.report.positions)
            for position in positions:
                node.times[trainer, position] += 1
                times = node.times[trainer, position]
                self.check(
                    times <= config.buffer.pseudo_epochs,
                    f"sample {position} of trainer {trainer} is applied {times} times",
                )
            node.keys.add(key)
            node.history.append((key, positions))

    def check_manifest(self, state: Mapping[str, Any]) -> None:
        """A checkpoint has a part of each trainer, and each part agrees with the ledger and with what was applied."""
        applied: Counter[int] = Counter()
        for (_, trainer, _, _), positions in state["applied"]:
            applied[trainer] += len(positions)
        for index in range(len(self.scenario.samples)):
            self.check(
                index in state["parts"], f"the checkpoint of step {state['step']} has no part of trainer {index}"
            )
            row = state["ledger"]["rows"][str(index)]["positions"]
            served, counted = AppliedPositions(), AppliedPositions()
            served.load_state_dict(state["parts"][index]["applied"])
            counted.load_state_dict(row)
            self.check(
                served == counted,
                f"in the checkpoint of step {state['step']}, trainer {index} served {served}, the ledger has {counted}",
            )
            if not self.scenario.config.server.backup_trainers:
                self.check(row["count"] == applied[index], f"the ledger counts {row}, applied are {applied[index]}")

    def _check_end(self) -> None:
        node, config = self.node, self.scenario.config
        assert node is not None
        server = node.server
        rules, ledger = server.aggregator.rules, server.aggregator.ledger
        decision = server.last_decision
        if decision is None:
            self.check(self.given_up is not None, "the run ended without a decision")
            return
        self.note("end:", decision)
        self.check(rules.step == node.server.store.version == decision.step, "the last decision is of another version")
        self.check(rules.samples == sum(node.times.values()), "the number of samples is not that of those applied")
        missing = self.acks - node.keys - self.redone
        self.check(not missing, f"acknowledged pushes are neither applied nor redone: {sorted(missing)}")
        self.check(self.manifest is not None, "the run ended without a checkpoint")
        assert self.manifest is not None
        manifest = pickle.loads(self.manifest)
        self.check(manifest["step"] == decision.step, f"the last checkpoint is of step {manifest['step']}")
        dropped = 0
        for index, once in enumerate(self.scenario.samples):
            due = once * (config.training.max_epochs or 1) * config.buffer.pseudo_epochs
            counted = ledger[index].positions.count
            applied = sum(times for (trainer, _), times in node.times.items() if trainer == index)
            left = due - counted
            dropped += counted - applied
            self.check(
                left >= 0 and counted >= applied, f"trainer {index}: {applied} applied, {counted} of {due} counted"
            )
            if decision.reason == "all data was served" and index != self.given_up:
                self.check(left == 0, f"trainer {index}: {left} samples are left although all data was served")
        if not config.server.backup_trainers:
            self.check(dropped == 0, f"{dropped} samples were counted and not applied")
        limit = config.training.max_steps
        if limit is not None and "max_steps" in decision.reason:
            self.check(decision.step == limit, f"the run ended at step {decision.step}, max_steps is {limit}")
        elif config.training.uneven_inputs == "join":
            self.check(decision.reason == "all data was served", f"the run ended: {decision.reason}")


def _key(report: StepReport) -> PushKey:
    return report.view, report.trainer_index, report.incarnation, report.sequence


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# The world that the stand-ins below belong to.
_current: World


@contextmanager
def environment() -> Iterator[None]:
    """Replace what ``ParameterServer`` takes from its environment: tensors, RPC, and the clock of its members."""
    stand_ins = {
        "ParameterStore": Store,
        "RpcServerTransport": Transport,
        "WireVersion": lambda *args: None,
        "make_codec": lambda config, device: None,
        "plan_buckets": lambda *args: ((), ""),
        "Members": lambda: Members(lambda: _current.now),
        "time": SimpleNamespace(monotonic=lambda: _current.now),
        "watch_peer": lambda name, on_gone: _current.watch(name, on_gone),
        "current_context_id": lambda: 0,
        "release_context": lambda context_id: None,
        "dist_autograd": SimpleNamespace(get_gradients=lambda key: key),
        "untrained_state_dict": lambda model: {},
        "stage_copy": lambda state: state,
    }
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(parameter_server, name, stand_in))
        yield


def simulate(seed: int, tracing: bool = False) -> SimulatedRun:
    """Run the world of a seed, inside ``environment``."""
    global _current
    _current = World(seed, tracing)
    return _current.run()

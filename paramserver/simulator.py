"""A run on a virtual clock: the server's own classes, and trainers and a network that a subclass of ``World`` defines.

``ParameterServer`` with its aggregator, shard, roster, consistency, ledger and part collector is the code of the
package; it stands on parameters, checkpoints, connections and a clock that are simulated. The
trainers are a model of trainers/rpc.py and server/client.py: generators that yield calls. A ``World`` has the clock,
the events, and who starts processes again; a subclass decides how long a message and a batch take and what fails. The
tests of the protocol under random faults have one (tests/simulation), the prediction of throughput another
(simulator/network.py). One ``random.Random`` draws everything, so a run replays exactly.
"""

from __future__ import annotations

import heapq
import pickle
import random
import threading
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from paramserver.checkpoint.save import ChunkedFile
from paramserver.config import Config
from paramserver.consistency import Announcement, Decision, PushId, Readiness, TrainerId, Verdict
from paramserver.context import StopRequest
from paramserver.devices import CPU
from paramserver.distributed.membership import Member
from paramserver.distributed.rpc_calls import RemoteError, is_numbered, is_repeatable
from paramserver.errors import GenerationChanged, ParamserverError, PeerFailed, PeerLost, RunEnded
from paramserver.metrics.records import StepReport, TrainerTotals, WeightedSums
from paramserver.optim.updater import Skipping
from paramserver.parameters.flat import FlatLayout, gradient_leaf
from paramserver.parameters.sharding import full_shard
from paramserver.runs.checkpoint_manager import CheckpointManager, StagedCheckpoint
from paramserver.runs.monitor import RunMonitor
from paramserver.server.aggregator import Aggregator
from paramserver.server.build import assemble, build_rules
from paramserver.server.coordinator import ShardCoordinator
from paramserver.server.parameter_server import ParameterServer
from paramserver.server.server_run import Network, ServerRun
from paramserver.server.shard import ParameterShard
from paramserver.server.updates import Updates
from paramserver.transport.autograd import push_root
from paramserver.transport.base import ServerTransport
from paramserver.transport.messages import DataPosition, JoinReply, PendingPush, Push, StepGrant, push_id
from paramserver.transport.rpc import RpcServerTransport
from paramserver.transport.shared_memory import ServerSharedMemory

if TYPE_CHECKING:
    from paramserver.optim.shard_updater import ShardUpdater
    from paramserver.server.parameter_store import ParameterStore
    from paramserver.transport.compression import WireCodec

_REJOIN_S = 0.2

BACKWARD = "backward"
"""The call in which distributed autograd sends the first gradient of a push."""

PushKey = tuple[int, int, int, int]
"""View, trainer, incarnation and sequence of a push."""


class Violation(Exception):  # noqa: N818 - not an error of the program
    """An invariant does not hold."""


# Rank 0: what ParameterServer stands on.

# Of two parameters, each in a flat tensor of its own: the first gradient, and a bucket.
_SHARD = full_shard(FlatLayout.of([(name, torch.zeros(8, dtype=torch.float64)) for name in ("first", "bucket")], 64))


def make_gradient(key: PushKey) -> Tensor:
    """Return the gradient of a push: it names the push."""
    return torch.tensor((*key, 0, 0, 0, 0), dtype=torch.float64)


class Store:
    """In the place of ``ParameterStore``: the parameters are the list of pushes that were applied."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.version = node.checkpoints.first_step
        self.model, self.device, self.buffers = None, CPU.device, None
        self.updater = SimpleNamespace(
            on_epoch_end=lambda: None,
            on_validation_end=lambda version, means, since: None,
            state_dict=dict,
            applied_lr=(0.1,),
            skipping=Skipping(node.world.config.training),
        )
        self.held: set[int] = set()
        self.update: tuple[int, Sequence[PendingPush]] = 0, ()  # that is in progress
        self.gradients: list[PushKey] = []  # of which it was made

    def drop_snapshot(self) -> None:
        """Do nothing: there is none."""

    def take_buffers(self, buffers: Any) -> None:
        """Do nothing: there are none."""

    def finish_update(self, buffers: Any, optimizer: str) -> None:
        self.version += 1
        counted, pushes = self.update
        self.node.world.applied(self.node, self.version, counted, pushes, self.gradients)

    def retain(self, version: int) -> None:
        self.held.add(version)

    def retained(self, version: int) -> tuple[list[Any], None]:
        if version not in self.held:
            raise KeyError(version)
        return [], None

    @property
    def retained_versions(self) -> frozenset[int]:
        return frozenset(self.held)

    def drop(self, version: int) -> None:
        self.held.discard(version)


class ShardContent:
    """In the place of ``ShardUpdater``: every element of a version is its number."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.shard = _SHARD
        self.layout = _SHARD.layout
        self.tables: dict[int, int] = {}
        self.ranges = _SHARD.layout.allocate()
        self.leaves = [gradient_leaf(flat) for flat in self.ranges]
        self._accumulated: list[Sequence[Tensor]] = []

    def average(self, gradients: Sequence[Sequence[Tensor]], factors: Sequence[float]) -> Sequence[Tensor]:
        keys = [[tuple(map(int, flat[:4].tolist())) for flat in own] for own in gradients]
        for own in keys:
            self.node.world.check(own[0] == own[1], f"gradients of pushes {own} are applied as those of one")
        self.node.store.gradients = [own[0] for own in keys]  # type: ignore[misc]
        return gradients[0] if gradients else ()

    def accumulate(self, gradients: Sequence[Sequence[Tensor]], factors: Sequence[float]) -> None:
        self._accumulated += gradients

    def pop_average(self) -> Sequence[Tensor]:
        accumulated, self._accumulated = self._accumulated, []
        return self.average(accumulated, ())

    def assign_gradients(self, mean: Sequence[Tensor], used: Any) -> None:
        """Do nothing: a gradient names its push only."""

    def generators(self, seed: int, version: int, server_index: int) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, groups: Any, version: int) -> None:
        """Do nothing: the shard counts its versions."""

    def clone(self) -> list[Tensor]:
        return [torch.full_like(flat, self.node.shard.version) for flat in self.ranges]


class PlainCodec:
    """In the place of ``WireCodec``: tensors are sent as they are."""

    def encode(self, layout: FlatLayout, flats: list[Tensor]) -> list[Tensor]:
        return flats

    def decode(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        return gradient


class RecordedUpdates(Updates):
    """Lets the store know which update is in progress."""

    _store: Any

    def apply(
        self,
        version: int,
        update: Any,
        pushes: Sequence[PendingPush],
        pulled: Set[int],
        validated: Set[int],
        on_applied: Callable[[], None],
        held: Sequence[PendingPush] = (),
    ) -> None:
        self._store.update = version, [*held, *pushes]
        super().apply(version, update, pushes, pulled, validated, on_applied, held)


class ReportedTransport(RpcServerTransport):
    """Of trainers whose gradients are not simulated: a push is complete with its report."""

    segment_key = "gradients"


class SimulatedNetwork(Network):
    """The connections of a node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def watch(self, name: str, on_gone: Callable[[str | None], None]) -> None:
        self._node.watched.append((name, on_gone))

    def context_id(self) -> int:
        return 0

    def release_context(self, context_id: int) -> None:
        """Do nothing: there are no contexts."""


class Checkpoints(CheckpointManager):
    """Checkpoints of a simulated disk: what rank 0 stages is pickled, and is in ``World.manifest`` some time later."""

    def __init__(self, node: Node, config: Config, manifest: bytes | None) -> None:
        self.node = node
        self.config = config
        self.generation = node.generation
        self.simulations = None
        sink: Any = SimpleNamespace(write=node.record)
        self.monitor = RunMonitor(config, sink, Path())
        self.writer: Any = SimpleNamespace(raise_error=lambda: None)
        self.resumed: dict[str, Any] | None = None if manifest is None else pickle.loads(manifest)
        self.newest = self._resume = self.resumed
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

    def stage(
        self,
        step: int,
        model: Any,
        updater: Any,
        reason: str,
        since: float,
        consistency: Mapping[str, Any] | None = None,
        ledger: Mapping[str, Any] | None = None,
    ) -> StagedCheckpoint:
        self.node.world.check(step == self.node.store.version, f"a checkpoint of {step} is staged at another version")
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
        world = self.node.world
        world.check_manifest(state)
        self.writing.append(pickle.dumps(state))
        world.after(world.rng.uniform(0.0, 0.3), self._write)

    def _write(self) -> None:
        if not self.node.alive or not self.writing:
            return
        manifest = self.writing.pop(0)
        self.newest = pickle.loads(manifest)
        self.node.world.note("written", self.newest["step"])
        self.node.world.manifest = manifest

    def finish_writing(self) -> None:
        while self.writing:
            self._write()


class Node:
    """A session of rank 0: a server and what it has applied."""

    def __init__(self, world: World, generation: int) -> None:
        self.world = world
        self.generation = generation
        self.alive = True
        self.paused_until = 0.0
        self.watched: list[tuple[str, Callable[[str | None], None]]] = []
        self.checkpoints = Checkpoints(self, world.config, world.manifest)
        manifest = self.checkpoints.resumed
        self.history: list[tuple[PushKey, tuple[int, ...]]] = [] if manifest is None else manifest["applied"]
        """Each applied push and its positions, where a world records them (``World.applied``)."""
        world.node_starts(self)
        self.stop = StopRequest()
        self.stop.event = threading.Event()
        self.started = world.now
        self.store = Store(self)
        self.server = self._make_server(world.config)

    def _make_server(self, config: Config) -> ParameterServer:
        world, checkpoints, store = self.world, self.checkpoints, cast("ParameterStore", self.store)
        run = ServerRun(partial(world.submit, self))
        self.shard = ParameterShard(
            cast("ShardUpdater", ShardContent(self)),
            cast("WireCodec", PlainCodec()),
            run.lock,
            checkpoints.first_step,
            submit=run.submit,
            generation=self.generation,
            attach=lambda key: _SHARD.layout.allocate(),
        )
        network, monitor = SimulatedNetwork(self), checkpoints.monitor
        coordinator = ShardCoordinator(config, run, network, self.stop, store, (_SHARD,), (), (), 0, lambda: (None, ""))
        updates = RecordedUpdates(config, store, self.shard, (_SHARD,), (), run, lambda: True, coordinator.unreachable)
        rules, ledger = build_rules(config, world.num_trainers, checkpoints)
        aggregator = Aggregator(rules, ledger, store, self.shard, updates, monitor, self.stop, run.fail_with)
        return assemble(
            config,
            world.num_trainers,
            checkpoints,
            run,
            self.shard,
            aggregator,
            coordinator,
            ServerSharedMemory(None, config.server, rules.lockstep, monitor.note),
            lambda: JoinReply({}, _SHARD.layout, rules.step, rules.lockstep, None, None),
            self._new_transport,
            network,
            clock=lambda: world.now,
        )

    def _new_transport(self) -> ServerTransport:
        kind = RpcServerTransport if self.world.sends_gradients else ReportedTransport
        return kind(self.shard.sent_version)

    def record(self, record: dict[str, Any]) -> None:
        self.world.note(record["kind"], record.get("trainer"), record.get("text", ""))
        if record["kind"] == "lost":
            self.world.lost(record["trainer"])
        elif record["kind"] == "validation":
            self.world.validated(record["step"], record["samples"])


# Trainers.


@dataclass
class Call:
    """A call of a handler of the server, or a part of distributed autograd (``BACKWARD``)."""

    method: str
    args: tuple[Any, ...]

    @property
    def is_repeatable(self) -> bool:
        if self.method == BACKWARD:
            return False
        handler = getattr(ParameterServer, self.method)
        # A pull is sent again in another autograd context.
        return self.method == "pull" or (is_repeatable(handler) and not is_numbered(handler))

    def run(self, server: ParameterServer) -> Any:
        """Call the handler as distributed/rpc_calls.py does; an error is returned."""
        try:
            if self.method == BACKWARD:
                pulled, gradient = self.args
                torch.autograd.backward([push_root([gradient], pulled[:1])])
                return None
            return getattr(server, self.method)(*self.args)
        except Exception as error:  # noqa: BLE001 - as returns_errors
            return RemoteError.of(error)


Steps = Generator[Any, Any, Any]


class TrainerData(Protocol):
    """The samples of a trainer, as trainers/data.py serves them."""

    def load(self, part: Mapping[str, Any]) -> None: ...

    def load_after_loss(self, applied: Mapping[str, Any]) -> None: ...

    def part(self) -> dict[str, Any]: ...

    def applied(self) -> dict[str, Any]: ...

    def take(self, batches: int) -> list[int]: ...

    def announcement(self) -> Announcement: ...


class Task:
    """A thread of a trainer, or a call whose reply it awaits later: waits for a reply, sleeps, or waits for a task."""

    def __init__(self, session: Session, steps: Steps) -> None:
        self.session, self.steps = session, steps
        self.request: int | None = None
        self.done = False
        self.value: Any = None
        self.waiter: Task | None = None


class Session:
    """One time that a process joins the run and trains, as ``Session`` in runtime/rank.py and ``RpcTrainer`` do."""

    def __init__(self, world: World, process: Process, node: Node) -> None:
        self.world, self.process, self.index = world, process, process.index
        self.node = node
        self.config = world.config
        self.ended = False
        self.lost: PeerLost | None = None
        self.last_delivery = 0.0
        self.silent_since: float | None = None
        self.worker_id = world.draw()
        self.member = Member(
            self.index,
            f"trainer{self.index}_{self.worker_id}",
            self.worker_id,
            f"pid {process.pid}",
            generation=node.generation,
        )
        self.generation = self.incarnation = self.sequence = self.announced = self.step = 0
        self.validated: int | None = None
        self.saved: int | None = None
        self.sender: Task | None = None
        self.data = world.make_data(self.index)
        self.main = Task(self, self.run())
        self.tasks = [self.main]

    # The model of the training loop; see trainers/base.py and trainers/rpc.py.

    def run(self) -> Steps:
        world, index = self.world, self.index
        reply: JoinReply = yield Call("join", (self.member, world.epoch_samples))
        world.joined(self, reply)
        self.id = TrainerId(index, reply.generation, reply.incarnation)
        self.generation, self.incarnation, self.step = reply.generation, reply.incarnation, reply.step
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
                if announcement.readiness is Readiness.READY and self.world.chance(self.world.waits):
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
            if lockstep and self.step != decision.step and self.is_due(self.step):
                yield from self.validate_and_save(decision)

    def train(self, decision: Decision, lockstep: bool) -> Steps:
        push = PushId(self.index, self.generation, self.incarnation, self.sequence + 1)
        pulled = yield Call("pull", (push, decision.step))
        versions = {int(flat[0]) for flat in pulled}
        self.world.check(
            versions == {decision.step}, f"trainer {self.index} was granted {decision.step}, pulled {versions}"
        )
        positions = self.data.take(decision.batches)
        yield self.world.compute_s(self)
        self.sequence += 1
        report = StepReport(
            self.index,
            decision.step,
            self.world.samples_of(positions),
            0.5,
            0.0,
            positions=positions,
            generation=self.generation,
            incarnation=self.incarnation,
            sequence=self.sequence,
        )
        report = replace(report, nonfinite=self.world.nonfinite_of(report))
        announcement = None
        if not (lockstep and self.is_due(decision.step + 1)) and not self.world.chance(self.world.waits):
            announcement = self.data.announcement()
        grant: StepGrant = yield from self.push(Push(report, None, announcement), pulled)
        result = grant.result
        assert result is not None
        self.world.acknowledged(self, push_key(report), result)
        self.step = result.step
        return grant if grant.decision is not None and grant.decision.verdict is not Verdict.WAIT else None

    def push(self, push: Push, pulled: Sequence[Tensor]) -> Steps:
        """Report a push, and send its gradients in two parts; the report may come first or last."""
        if not self.world.sends_gradients:
            return (yield Call("push", (push,)))
        report, gradient = push.report, make_gradient(push_key(push.report))
        bucket = Call("receive_bucket", (push_id(report), report.version, 1, gradient))
        calls = [self.begin(call) for call in self.world.in_any_order([bucket, Call("push", (push,))])]
        yield Call(BACKWARD, (pulled, gradient))
        grant = None
        for call in calls:
            reply = yield call
            grant = reply if isinstance(reply, StepGrant) else grant
        return grant

    def begin(self, call: Call) -> Task:
        """Make a call whose reply is awaited later."""

        def wait() -> Steps:
            return (yield call)

        task = Task(self, wait())
        self.tasks = [known for known in self.tasks if not known.done] + [task]
        self.world.resume(task)
        return task

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
        own = decision.verdict is not Verdict.VALIDATE or decision.share == self.index
        if own and self.validated == self.step:
            return False
        self.validated = self.step if own else self.validated
        yield Call("view_version", (self.id, self.step))
        yield 0.05
        sums = WeightedSums()
        sums.add({"loss": float(zlib.crc32(b"%d" % self.step) % 5)}, 1)
        if decision.verdict is Verdict.VALIDATE:
            yield Call("report_validation_share", (self.id, self.step, decision.share, sums))
            return False
        shares = [self.index]
        while True:
            reply = yield Call("report_validation", (self.id, self.step, dict.fromkeys(shares, sums)))
            if not (shares := reply.missing):
                return bool(reply.improved)
            yield 0.05

    def save(self, reason: str) -> Steps:
        if self.saved != self.step:
            self.saved = self.step
            yield from self.wait_saved()
            part, step = self.data.part(), self.step
            if not (yield Call("stage_checkpoint", (self.id, reason))):
                return
            self.sender = Task(self, self.send_part(step, part))
            self.tasks.append(self.sender)
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
        self.world.after(self.config.server.heartbeat_s, self.beat)
        self.world.resume(self.main)

    def beat(self) -> None:
        """Send a heartbeat; it takes no time where nothing is in its way."""
        world, process = self.world, self.process
        if self.ended or not process.alive or self.lost is not None:
            return
        if process.frozen_until > world.now:
            world.at(process.frozen_until + world.rng.uniform(0.0, self.config.server.heartbeat_s), self.beat)
            return
        world.after(self.config.server.heartbeat_s, self.beat)
        if not self.node.alive:
            self.mark_lost(PeerLost("the server is lost: its connection was closed"))
        elif process.cut_until > world.now or self.node.paused_until > world.now:
            self.silent_since = world.now if self.silent_since is None else self.silent_since
            if world.now - self.silent_since > self.config.server.lost_after_s:
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
        for task in self.tasks:
            if task.request is not None and not self.ended:
                task.request = None
                self.world.resume(task, error=error)


class Process:
    """A process of a trainer; its sessions follow each other."""

    def __init__(self, world: World, index: int) -> None:
        self.index, self.pid = index, world.draw()
        self.alive = True
        self.left = False
        self.frozen_until = self.cut_until = 0.0
        self.session: Session | None = None
        self.min_generation = 1


# The world.


class World(ABC):
    """Clock, events, supervisor and disk of one run; ``rng`` draws everything that is random.

    With ``tracing`` the events are kept as text in ``trace``.
    """

    waits = 0.0
    """Probability that a trainer has no samples when it announces."""

    sends_gradients = False
    """Whether gradients are sent in messages of their own; otherwise a push is complete with its report."""

    def __init__(self, rng: random.Random, tracing: bool = False) -> None:
        self.rng = rng
        self.tracing = tracing
        self.trace: list[str] = []
        self.now, self.events, self.drawn = 0.0, 0, 0
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.violation: str | None = None
        self.manifest: bytes | None = None
        self.node: Node | None = None
        self.generation = 0
        self.processes: list[Process] = []
        self.complete = False
        self.given_up: int | None = None  # the trainer that is not started again
        self.generations_seen: Counter[int] = Counter()

    # What a subclass defines.

    @property
    @abstractmethod
    def config(self) -> Config:
        """The configuration of the run."""

    @property
    @abstractmethod
    def num_trainers(self) -> int:
        """Number of trainers."""

    @property
    def epoch_samples(self) -> int:
        """Samples of all trainers in one pass; 0 without epochs."""
        return 0

    @abstractmethod
    def make_data(self, trainer_index: int) -> TrainerData:
        """Return the data of a trainer, at its beginning."""

    @abstractmethod
    def compute_s(self, session: Session) -> float:
        """Return how long the forward and the backward of the next step take."""

    @abstractmethod
    def send(self, task: Task, call: Call, request: int) -> None:
        """Send a call to the server; ``deliver`` runs it there, and ``receive`` ends its wait with the reply."""

    @abstractmethod
    def disconnect(self, session: Session, reason: str | None) -> None:
        """Let the server know, by ``_gone``, that the connection of a session was closed."""

    @abstractmethod
    def kill(self, process: Process) -> None:
        """End a process; another one takes its place."""

    def samples_of(self, positions: Sequence[int]) -> int:
        """Return the number of samples of a push."""
        return len(positions)

    def nonfinite_of(self, report: StepReport) -> str:
        """Return what of a push is NaN or infinite, as in ``StepReport.nonfinite``."""
        return ""

    def submit(self, node: Node, job: Callable[[], None]) -> None:
        """Run what the update thread of a server computes; an update takes no time here."""
        job()

    # What a subclass may check or count.

    def before_event(self) -> None:
        """Called before each event."""

    def node_starts(self, node: Node) -> None:
        """Called when a session of rank 0 begins."""

    def joined(self, session: Session, reply: JoinReply) -> None:
        """Called when a trainer has joined."""

    def decided(self, session: Session, decision: Decision) -> None:
        """Called when a trainer has received a decision."""

    def acknowledged(self, session: Session, key: PushKey, result: Any) -> None:
        """Called when a trainer has received the result of a push."""

    def applied(
        self, node: Node, version: int, counted: int, pushes: Sequence[PendingPush], gradients: Sequence[PushKey]
    ) -> None:
        """Called when an update of ``pushes`` has made ``version``; ``gradients`` name those that it was made of."""

    def in_any_order(self, calls: list[Call]) -> list[Call]:
        """Return calls in the order in which a trainer makes them."""
        return calls

    def check_manifest(self, state: Mapping[str, Any]) -> None:
        """Called with a checkpoint that is complete."""

    def lost(self, trainer_index: int) -> None:
        """Called when the server has lost a trainer."""

    def validated(self, step: int, samples: int) -> None:
        """Called with each validation that is recorded."""

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

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            self.violation = self.violation or text
            raise Violation(text)

    def start(self) -> None:
        """Start the server and all trainers."""
        self.start_server()
        for index in range(self.num_trainers):
            self.processes.append(self.make_process(index))
            self.after(self.rng.uniform(0.0, 0.5), self.join, self.processes[index])

    def make_process(self, index: int) -> Process:
        """Return a process of a trainer."""
        return Process(self, index)

    def run_events(self) -> None:
        """Run until the run has ended.

        Raises:
            Violation: it cannot end, or it fails.
        """
        while self.queue and self.violation is None and not self.complete:
            self.now, _, action, args = heapq.heappop(self.queue)
            self.events += 1
            self.before_event()
            action(*args)
            self._look_at_server()
        if self.violation is None and not self.complete:
            raise Violation("nothing happens any more, and the run has not ended")

    # Rank 0.

    def start_server(self) -> None:
        self.generation += 1
        if self.node is not None:
            self.check(not self.node.alive, "two servers live at once")
        self.node = node = Node(self, self.generation)
        self.generations_seen[node.generation] += 1
        self.check(self.generations_seen[node.generation] == 1, f"two servers have had generation {node.generation}")
        self.note("server starts, generation", self.generation, "step", node.checkpoints.first_step)
        self.after(self.config.server.heartbeat_s, self.tick, node)
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
        roster = node.server.roster
        roster.check_heartbeats()
        if roster.started:
            roster.check_absences()
        else:
            missing = roster.missing()
            if missing and self.now >= node.started + self.config.cluster.timeout_s:
                self.check(f"trainer {self.given_up}" in missing, f"{missing} did not join in time")
                self.complete = True  # the run fails, and names the trainer
                return
        self.after(self.config.server.heartbeat_s, self.tick, node)

    def _look_at_server(self) -> None:
        """End or restart the server's session once it has finished."""
        node = self.node
        if node is None or not node.alive or not node.server.run.finished.is_set():
            return
        error = node.server.run.error
        if error is not None and not isinstance(error, GenerationChanged):
            raise Violation(f"the run failed: {error}")
        node.checkpoints.finish_writing()
        node.alive = False
        if error is None:
            self.complete = True
            return
        self.note("generation changes:", error)
        self.after(_REJOIN_S, self.start_server)

    # Processes, and who starts them again.

    def join(self, process: Process) -> None:
        """Begin a session as soon as there is a server of a generation that the process accepts."""
        node = self.node
        if not process.alive or self.complete or self.processes[process.index] is not process:
            return
        if process.frozen_until > self.now:
            self.at(process.frozen_until, self.join, process)
        elif node is None or not node.alive or node.generation < process.min_generation or process.cut_until > self.now:
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
        if error is None or isinstance(error, RunEnded):
            process.left = True
            if self.generation > session.node.generation:
                self._start_again(process)
            return
        if isinstance(error, PeerFailed) or not isinstance(error, PeerLost):
            raise Violation(f"trainer {session.index} fails: {error}")
        if isinstance(error, GenerationChanged):
            process.min_generation = session.node.generation + 1
        else:
            process.min_generation = session.node.generation
        self.after(_REJOIN_S, self.join, process)

    def _gone(self, node: Node, name: str, reason: str | None) -> None:
        if node.alive:
            for watched, on_gone in node.watched:
                if watched == name:
                    on_gone(reason)

    def _replace(self, process: Process) -> None:
        if self.processes[process.index] is process and self.given_up != process.index:
            successor = self.processes[process.index] = self.make_process(process.index)
            self.join(successor)

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
        except StopIteration as ended:
            task.done, task.value = True, ended.value
            if task is session.main:
                self.session_ended(session, None)
            elif task.waiter is not None:
                self.resume(task.waiter, task.value)
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
        elif isinstance(item, Task) and item.done:
            self.resume(task, item.value)
        elif isinstance(item, Task):
            item.waiter = task
        else:
            self.after(item, self.resume, task)

    def receive(self, node: Node, task: Task, request: int, value: Any) -> None:
        session = task.session
        if task.request != request or session.ended or not session.process.alive:
            return
        self.note(session.index, f"pid {session.process.pid}", "gets", value if isinstance(value, RemoteError) else "")
        task.request = None
        self.resume(task, value, value.error() if isinstance(value, RemoteError) else None)


def push_key(report: StepReport) -> PushKey:
    return report.generation, report.trainer_index, report.incarnation, report.sequence


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0

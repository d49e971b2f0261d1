"""A run on a virtual clock: the server's own classes, and trainers and a network that a subclass of ``World`` defines.

``ParameterServer`` with its aggregator, shard, roster, consistency, ledger and part collector is the code of the
package; it stands on parameters, checkpoints, connections and a clock that are simulated. The
trainers are a model of trainers/rpc.py and server/client.py: generators that yield calls. A ``World`` has the clock,
the events, and who starts processes again; a subclass decides how long a message and a batch take and what fails. The
prediction of throughput has one (tools/bench/simulation.py), the tests of the protocol under random faults another: it
adds gradients, validations, checkpoints and what a fault does to a process (tests/simulation). One ``random.Random``
draws everything, so a run replays exactly.
"""

from __future__ import annotations

import heapq
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from paramserver.config import Config
from paramserver.consistency import Announcement, Decision, PushId, Readiness, TrainerId, Verdict
from paramserver.context import StopRequest
from paramserver.distributed.membership import HeartbeatReport, Member
from paramserver.distributed.rpc_calls import RemoteError
from paramserver.errors import GenerationChanged, ParamserverError, PeerFailed, PeerLost, RunEnded
from paramserver.metrics.records import StepReport
from paramserver.optim.updater import Skipping
from paramserver.parameters.flat import FlatLayout, gradient_leaf
from paramserver.parameters.sharding import full_shard
from paramserver.runs.checkpoint_manager import CheckpointManager
from paramserver.runs.monitor import RunMonitor
from paramserver.server.aggregator import Aggregator
from paramserver.server.build import assemble, build_rules
from paramserver.server.coordinator import ShardCoordinator
from paramserver.server.parameter_server import ParameterServer
from paramserver.server.server_run import Network, ServerRun
from paramserver.server.shard import ParameterShard
from paramserver.server.updates import Updates
from paramserver.transport.compression import CastCodec
from paramserver.transport.messages import DataPosition, JoinReply, PendingPush, Push, StepGrant
from paramserver.transport.rpc import RpcServerTransport
from paramserver.transport.shared_memory import ServerSharedMemory

if TYPE_CHECKING:
    from paramserver.optim.shard_updater import ShardUpdater
    from paramserver.server.parameter_store import ParameterStore

_REJOIN_S = 0.2


class Violation(Exception):  # noqa: N818 - not an error of the program
    """An invariant does not hold."""


# Rank 0: what ParameterServer stands on.

# Of two parameters, each in a flat tensor of its own: the first gradient, and a bucket.
_SHARD = full_shard(FlatLayout.of([(name, torch.zeros(8, dtype=torch.float64)) for name in ("first", "bucket")], 64))


def _nothing(*arguments: object) -> None:
    """In the place of a method that would change what a node does not have."""


class Store:
    """In the place of ``ParameterStore``: the parameters are the number of their version."""

    model = buffers = None
    drop_snapshot = take_buffers = _nothing
    retained: Mapping[int, Any] = {}

    def __init__(self, node: Node) -> None:
        self.node = node
        self.version = node.checkpoints.first_step
        self.updater = SimpleNamespace(
            on_epoch_end=lambda: None, applied_lr=(0.1,), skipping=Skipping(node.world.config.training)
        )
        self.update: tuple[int, Sequence[PendingPush]] = 0, ()  # that is in progress

    def finish_update(self, buffers: Any, optimizer: str) -> None:
        self.version += 1
        self.node.world.applied(self.node, self.version, self.update[1])


class ShardContent:
    """In the place of ``ShardUpdater``: every element of a version is its number, which the shard counts."""

    accumulate = assign_gradients = step = _nothing

    def __init__(self, node: Node) -> None:
        self.node = node
        self.shard = _SHARD
        self.layout = _SHARD.layout
        self.tables: dict[int, int] = {}
        self.ranges = _SHARD.layout.allocate()
        self.leaves = [gradient_leaf(flat) for flat in self.ranges]

    def average(self, gradients: Sequence[Sequence[Tensor]], factors: Sequence[float]) -> Sequence[Tensor]:
        return gradients[0] if gradients else ()

    def pop_average(self) -> Sequence[Tensor]:
        return ()

    def generators(self, seed: int, version: int, server_index: int) -> AbstractContextManager[None]:
        return nullcontext()

    def clone(self) -> list[Tensor]:
        return [torch.full_like(flat, self.node.shard.version) for flat in self.ranges]


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
    """Of a run that neither resumes nor saves."""

    def __init__(self, node: Node, config: Config) -> None:
        self.generation = node.generation
        self.monitor = RunMonitor(config, cast("Any", SimpleNamespace(write=node.record)), Path())
        self._resume = self.simulations = None
        self.first_step = 0
        self.consistency_state: Mapping[str, Any] = {}
        self.ledger_state: Mapping[str, Any] = {"rows": {}}

    def trainer_part(self, trainer_index: int, newest: bool = False) -> Any:
        return None


class Node:
    """A session of rank 0."""

    store_type = Store
    content_type = ShardContent
    checkpoints_type = Checkpoints
    transport_type: type[RpcServerTransport] = ReportedTransport

    def __init__(self, world: World, generation: int) -> None:
        self.world = world
        self.generation = generation
        self.alive = True
        self.watched: list[tuple[str, Callable[[str | None], None]]] = []
        self.checkpoints = self.checkpoints_type(self, world.config)
        self.stop = StopRequest()
        self.stop.event = threading.Event()
        self.store = self.store_type(self)
        self.server = self._make_server(world.config)

    def _make_server(self, config: Config) -> ParameterServer:
        world, checkpoints, store = self.world, self.checkpoints, cast("ParameterStore", self.store)
        run = ServerRun(partial(world.submit, self))
        self.shard = ParameterShard(
            cast("ShardUpdater", self.content_type(self)),
            CastCodec(None),
            run.lock,
            checkpoints.first_step,
            submit=run.submit,
            generation=self.generation,
            attach=lambda key: _SHARD.layout.allocate(),
        )
        network, monitor = SimulatedNetwork(self), checkpoints.monitor
        coordinator = ShardCoordinator(config, run, network, self.stop, store, (_SHARD,), (), (), 0, lambda: (None, ""))
        updates = RecordedUpdates(
            config, store, self.shard, (_SHARD,), (), network, run, lambda: True, coordinator.unreachable
        )
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
            lambda: self.transport_type(self.shard.sent_version),
            network,
            clock=lambda: world.now,
        )

    def record(self, record: dict[str, Any]) -> None:
        if record["kind"] == "lost":
            self.world.lost(record["trainer"])

    def close(self) -> None:
        """End, with the session of the server."""
        self.alive = False


# Trainers.


@dataclass
class Call:
    """A call of a handler of the server."""

    method: str
    args: tuple[Any, ...]
    number: int = 0  # of a handler that is ``executed_once``; 0 if the call is not sent again

    def run(self, server: ParameterServer) -> Any:
        """Call the handler as distributed/rpc_calls.py does; an error is returned."""
        try:
            return self.handle(server)
        except Exception as error:  # noqa: BLE001 - as RpcHandler
            return RemoteError.of(error)

    def handle(self, server: ParameterServer) -> Any:
        numbered = {"number": self.number} if self.number else {}
        return getattr(server, self.method)(*self.args, **numbered)


Steps = Generator[Any, Any, Any]


class TrainerData(Protocol):
    """The samples of a trainer, as trainers/data.py serves them."""

    def load_after_loss(self, applied: Mapping[str, Any]) -> None: ...

    def applied(self) -> dict[str, Any]: ...

    def take(self, batches: int) -> list[int]: ...

    def announcement(self) -> Announcement: ...


class SimulatedTask:
    """A thread of a trainer, or a call whose reply it awaits later: waits for a reply, sleeps, or waits for a task."""

    def __init__(self, session: Session, steps: Steps) -> None:
        self.session, self.steps = session, steps
        self.request: int | None = None
        self.done = False
        self.value: Any = None
        self.waiter: SimulatedTask | None = None


class Session:
    """One time that a process joins the run and trains, as ``Session`` in runtime/rank.py and ``RpcTrainer`` do."""

    def __init__(self, world: World, process: Process, node: Node) -> None:
        self.world, self.process, self.index = world, process, process.index
        self.node = node
        self.config = world.config
        self.ended = False
        self.lost: PeerLost | None = None
        self.worker_id = world.draw()
        self.member = Member(
            self.index,
            f"trainer{self.index}_{self.worker_id}",
            self.worker_id,
            f"pid {process.pid}",
            generation=node.generation,
        )
        self.generation = self.incarnation = self.sequence = self.announced = self.step = 0
        self.data = world.make_data(self.index)
        self.main = SimulatedTask(self, self.run())
        self.tasks = [self.main]

    # The model of the training loop; see trainers/base.py and trainers/rpc.py.

    def run(self) -> Steps:
        reply = yield from self.join()
        yield from self.fit(reply.lockstep)

    def join(self) -> Generator[Any, Any, JoinReply]:
        reply: JoinReply = yield Call("join", (self.member, self.world.epoch_samples))
        self.world.joined(self, reply)
        self.id = TrainerId(self.index, reply.generation, reply.incarnation)
        self.generation, self.incarnation, self.step = reply.generation, reply.incarnation, reply.step
        yield Call("view_version", (self.id, None))
        if reply.data_position is None:
            yield Call("report_source", (self.id, DataPosition({}, self.data.applied())))
        else:
            self.data.load_after_loss(reply.data_position.applied)
        return reply

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
                grant = yield Call("announce", (self.id, announcement), self.announced)
            decision = grant.decision
            assert decision is not None
            self.world.decided(self, decision)
            if decision.verdict is Verdict.WAIT:
                continue
            if decision.verdict is not Verdict.GO:
                self.step = decision.step
                if decision.verdict is Verdict.END:
                    return decision
                yield from self.meet(decision)
                continue
            if index in decision.active:
                next_grant = yield from self.train(decision, lockstep)
            else:
                self.step = yield Call("wait_version", (self.id, decision.step + 1))
                if self.step == decision.step:
                    continue
            if lockstep and self.step != decision.step and self.is_due(self.step):
                yield from self.meet(decision)

    def is_due(self, step: int) -> bool:
        """Return whether the trainers meet at a version."""
        return False

    def meet(self, decision: Decision) -> Iterable[Any]:
        """Do what is due; nothing is."""
        return ()

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
        )
        announcement = None
        if not (lockstep and self.is_due(decision.step + 1)) and not self.world.chance(self.world.waits):
            announcement = self.data.announcement()
        grant: StepGrant = yield from self.push(Push(push, report, None, announcement), pulled)
        assert grant.result is not None
        self.step = grant.result.step
        return grant if grant.decision is not None and grant.decision.verdict is not Verdict.WAIT else None

    def push(self, push: Push, pulled: Sequence[Tensor]) -> Steps:
        return (yield Call("push", (push,)))

    # The connection.

    def start(self) -> None:
        self.world.after(self.config.server.heartbeat_s, self.beat)
        self.world.resume(self.main)

    def beat(self) -> None:
        """Send a heartbeat, unless this session has ended."""
        if self.ended or not self.process.alive or self.lost is not None:
            return
        self.world.after(self.config.server.heartbeat_s, self.beat)
        if self.node.alive:
            self.send_heartbeat()
        else:
            self.mark_lost(PeerLost("the server is lost: its connection was closed"))

    def send_heartbeat(self) -> None:
        """Send one; it takes no time."""
        try:
            self.node.server.heartbeat(self.index, self.worker_id, HeartbeatReport())
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
        self.session: Session | None = None
        self.min_generation = 1


# The world.


class World(ABC):
    """Clock, events and supervisor of one run; ``rng`` draws everything that is random."""

    node_type = Node
    session_type = Session

    config: Config
    num_trainers: int
    epoch_samples = 0
    """Samples of all trainers in one pass; 0 without epochs."""
    waits = 0.0
    """Probability that a trainer has no samples when it announces."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now, self.events, self.drawn = 0.0, 0, 0
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.violation: str | None = None
        self.node: Node | None = None
        self.generation = 0
        self.processes: list[Process] = []
        self.complete = False

    # What a subclass defines, in addition to ``config`` and ``num_trainers``.

    @abstractmethod
    def make_data(self, trainer_index: int) -> TrainerData:
        """Return the data of a trainer, at its beginning."""

    @abstractmethod
    def compute_s(self, session: Session) -> float:
        """Return how long the forward and the backward of the next step take."""

    @abstractmethod
    def send(self, task: SimulatedTask, call: Call, request: int) -> None:
        """Send a call to the server; ``deliver`` runs it there, and ``receive`` ends its wait with the reply."""

    @abstractmethod
    def disconnect(self, session: Session, reason: str | None) -> None:
        """Let the server know, by ``_gone``, that the connection of a session was closed."""

    def samples_of(self, positions: Sequence[int]) -> int:
        """Return the number of samples of a push."""
        return len(positions)

    def submit(self, node: Node, job: Callable[[], None]) -> None:
        """Run what the update thread of a server computes; an update takes no time here."""
        job()

    # What a subclass may check or count.

    def before_event(self) -> None:
        """Called before each event."""

    def joined(self, session: Session, reply: JoinReply) -> None:
        """Called when a trainer has joined."""

    def decided(self, session: Session, decision: Decision) -> None:
        """Called when a trainer has received a decision."""

    def applied(self, node: Node, version: int, pushes: Sequence[PendingPush]) -> None:
        """Called when an update of ``pushes`` has made ``version``."""

    def lost(self, trainer_index: int) -> None:
        """Called when the server has lost a trainer."""

    # Events.

    def draw(self) -> int:
        self.drawn += 1
        return self.drawn

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.queue, (time, self.draw(), action, args))

    def after(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, action, *args)

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
        self.node = self.node_type(self, self.generation)
        self.after(self.config.server.heartbeat_s, self.tick, self.node)

    def tick(self, node: Node) -> None:
        """As ``_wait_until_finished`` in runtime/rank.py."""
        if not node.alive:
            return
        roster = node.server.roster
        roster.check_heartbeats()
        if roster.started:
            roster.check_absences()
        self.after(self.config.server.heartbeat_s, self.tick, node)

    def _look_at_server(self) -> None:
        """End or restart the server's session once it has finished."""
        node = self.node
        if node is None or not node.alive or not node.server.run.finished.is_set():
            return
        error = node.server.run.error
        if error is not None and not isinstance(error, GenerationChanged):
            raise Violation(f"the run failed: {error}")
        node.close()
        if error is None:
            self.complete = True
        else:
            self.after(_REJOIN_S, self.start_server)

    # Processes, and who starts them again.

    def join(self, process: Process) -> None:
        """Begin a session as soon as there is a server of a generation that the process accepts."""
        node = self.node
        if not process.alive or self.complete or self.processes[process.index] is not process:
            return
        if node is None or not node.alive or node.generation < process.min_generation:
            self.after(0.25, self.join, process)
        else:
            process.session = self.session_type(self, process, node)
            process.session.start()

    def session_ended(self, session: Session, error: ParamserverError | None) -> None:
        """As ``Session.after`` in runtime/rank.py."""
        process = session.process
        session.ended = True
        process.session = None
        self.disconnect(session, None)
        if error is None or isinstance(error, RunEnded):
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
        if self.processes[process.index] is process:
            successor = self.processes[process.index] = self.make_process(process.index)
            self.join(successor)

    # Tasks of trainers.

    def resume(self, task: SimulatedTask, value: Any = None, error: ParamserverError | None = None) -> None:
        """Run a task until it waits again."""
        session = task.session
        process = session.process
        if session.ended or not process.alive:
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
        elif isinstance(item, SimulatedTask) and item.done:
            self.resume(task, item.value)
        elif isinstance(item, SimulatedTask):
            item.waiter = task
        else:
            self.after(item, self.resume, task)

    def receive(self, node: Node, task: SimulatedTask, request: int, value: Any) -> None:
        session = task.session
        if task.request != request or session.ended or not session.process.alive:
            return
        task.request = None
        self.resume(task, value, value.error() if isinstance(value, RemoteError) else None)

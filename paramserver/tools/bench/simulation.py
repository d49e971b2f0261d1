"""How long a run takes: trainers, servers and their network on the virtual clock.

The server's own classes decide what each trainer does next (simulator.py); this module decides when their
messages arrive. A message occupies, one after the other,

- a core of the sender's host and the interpreter of its process, for ``message_s`` and ``byte_s`` for each byte;
- the sender's interface, for its bytes over the bandwidth; and from ``latency`` later on that of the receiver, for as
  long, so that it enters there while it still leaves here;
- a core of the receiver's host and the interpreter of its process, as at the sender.

Each of these serves messages in the order in which they come, and one at a time (a host as many as it has cores). So
gradients of n trainers need n times as long at the interface of a server as those of one, and what no resource limits
needs no time. In the limit of no cost but bandwidth and latency, a step lasts as ``communication_s`` computes.

Every server averages and applies its shard for ``update_byte_s`` for each byte of each gradient and of the parameters.
In ``sync`` it does so bucket by bucket, and sends each bucket of the next version as soon as the gradients of all
trainers are there; otherwise a trainer pulls the version after the reply to its push. Server 0 decides; with several
servers an update ends when all of them have applied it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from paramserver.buffers.positions import AppliedPositions
from paramserver.config import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    LoggingConfig,
    TrainingConfig,
    is_colocated,
    num_servers_of,
)
from paramserver.consistency import Announcement, Decision, Readiness
from paramserver.consistency.factory import consistency_class, why_never_by_bucket
from paramserver.errors import PeerLost
from paramserver.server.update_pipeline import FIRST_BUCKET_BYTES, pipelined_bucket_bytes
from paramserver.simulator import Call, Node, Process, Session, SimulatedTask, World
from paramserver.tools.bench.link_probe import LinkSpeed
from paramserver.tools.bench.slowdown import SlowdownSpec
from paramserver.transport.messages import PendingPush

# Of a report, a request or a reply without tensors.
_SMALL_BYTES = 1000
# Chunks of messages take turns on an interface, as the packets of connections do.
_QUEUE_S = 0.1
_LEAST_CHUNK_BYTES, _MOST_CHUNKS = 2**16, 16


@dataclass(frozen=True)
class Costs:
    """The parameters of the model that are fitted; all in seconds but ``link_share`` and ``two_way``.

    Attributes:
        link_share: share of an interface's bandwidth that carries tensors: without headers and gaps.
        message_s: CPU of a message at each of its ends.
        byte_s: CPU of a byte of a message at each of its ends.
        update_byte_s: CPU of a byte of a gradient, or of the parameters, in an update.
        step_s: CPU of a trainer's step in addition to what its phases measure.
        two_way: how much longer a transfer takes, as a share, for each connection that transfers in the other direction
            of the same interface; both directions take turns at worst.
    """

    link_share: float = 0.94
    message_s: float = 3e-4
    byte_s: float = 1e-9
    update_byte_s: float = 3e-10
    step_s: float = 2e-3
    two_way: float = 0.1


@dataclass(frozen=True)
class Deployment:
    """What is simulated.

    Attributes:
        message_bytes: of all parameters, or of all gradients, as they are sent.
        forward_s, backward_s: a trainer's compute in a step, and its wait for data.
        samples: of a trainer in a step.
        cores: of each host; of all together with ``one_machine``, where hosts are network namespaces.
        by_bucket: whether the optimizer allows that ``sync`` updates bucket by bucket.
        jitter: standard deviation of a trainer's compute, as a share of it; independent draws of a log-normal.
        transfer_jitter: the same of the time that the tensors of a message take at interfaces.
        seed: of ``slow``, of both jitters and of failures.
        failure_every_s: mean time from the start of a trainer to its failure; None without failures. None fails before
            the first update.
        restart_s: from a failure to the join of the replacement.
    """

    config: Config
    message_bytes: float
    forward_s: float
    link: LinkSpeed
    backward_s: float = 0.0
    samples: int = 1
    costs: Costs = Costs()
    cores: int = 8
    one_machine: bool = False
    by_bucket: bool = True
    slow: SlowdownSpec | None = None
    jitter: float = 0.0
    transfer_jitter: float = 0.0
    seed: int = 0
    failure_every_s: float | None = None
    restart_s: float = 10.0

    @property
    def trainers(self) -> int:
        return self.config.cluster.num_trainers

    @property
    def servers(self) -> int:
        return num_servers_of(self.config)

    @property
    def updates_by_bucket(self) -> bool:
        return self.by_bucket and not (why_never_by_bucket(self.config) or self.config.training.clips)


@dataclass(frozen=True)
class Throughput:
    """What a simulated run did after its warm-up.

    ``step_s`` is the mean time between two steps of a trainer, ``samples_per_second`` are those applied, of all
    trainers, and ``failures`` those of trainers in the whole run.
    """

    step_s: float
    samples_per_second: float
    failures: int


class Resource:
    """Serves requests in the order in which they are made, ``count`` at the same time."""

    def __init__(self, count: int = 1) -> None:
        self._free = [0.0] * count

    def take(self, now: float, seconds: float) -> float:
        """Return when a request that is made now ends."""
        end = max(now, self._free[0]) + seconds
        heapq.heapreplace(self._free, end)
        return end


class Interface:
    """One direction of a host's interface; the connections that have chunks waiting take turns by chance.

    A strict order would keep trainers in step for ever that once began to send at the same time.
    """

    opposite: Interface

    def __init__(self, world: World, two_way: float) -> None:
        self._world, self._two_way = world, two_way
        self._waiting: dict[Connection, deque[tuple[float, Callable[[float], None]]]] = {}
        self._backlog_s = 0.0
        self.busy = False
        self._serves_last = False  # the chunk that is served is the last of its connection

    @property
    def connections(self) -> int:
        return len(self._waiting) + self._serves_last

    def offer(self, connection: Connection, seconds: float, serve: Callable[[float], None]) -> None:
        """Let ``serve`` be called with its duration when it is the turn of a chunk, which takes ``seconds`` alone."""
        _, _, has_tensors = connection
        if not has_tensors:
            # Packets are queued in the order in which they come: a small message waits for what is queued already.
            self._world.after(min(self._backlog_s, _QUEUE_S), serve, seconds)
            return
        self._backlog_s += seconds
        self._waiting.setdefault(connection, deque()).append((seconds, serve))
        if not self.busy:
            self._next()

    def _next(self) -> None:
        self.busy, self._serves_last = bool(self._waiting), False
        if self.busy:
            connections = list(self._waiting)
            connection = connections[int(self._world.rng.random() * len(connections))]
            chunks = self._waiting[connection]
            seconds, serve = chunks.popleft()
            self._backlog_s -= seconds
            # Acknowledgements wait behind a chunk of each connection of the other direction; at worst both take turns.
            seconds *= min(1 + self._two_way * self.opposite.connections, 2.0)
            serve(seconds)
            self._serves_last = not chunks
            if not chunks:
                del self._waiting[connection]
            self._world.after(seconds, self._next)


class SimulatedHost:
    """Cores and both directions of an interface."""

    def __init__(self, world: World, cores: Resource, two_way: float) -> None:
        self.cores, self.sends, self.receives = cores, Interface(world, two_way), Interface(world, two_way)
        self.sends.opposite, self.receives.opposite = self.receives, self.sends


class Endpoint:
    """A process on a host; one thread of it at a time runs Python."""

    def __init__(self, host: SimulatedHost) -> None:
        self.host, self.interpreter = host, Resource()

    def compute(self, now: float, message_s: float, bytes_s: float) -> float:
        """Return when a message that is there now has been handled."""
        return max(self.host.cores.take(now, message_s + bytes_s), self.interpreter.take(now, message_s))


Connection = tuple[Endpoint, Endpoint, bool]
"""From, to, and whether it is that of tensors; small messages have one of their own."""


class EndlessData:
    """Samples that do not end."""

    def load_after_loss(self, applied: Mapping[str, Any]) -> None:
        pass

    def applied(self) -> dict[str, Any]:
        return AppliedPositions().state_dict()

    def take(self, batches: int) -> list[int]:
        return []

    def announcement(self) -> Announcement:
        return Announcement(Readiness.READY)


class ModelledRun(World):
    """A run of a deployment on the virtual clock."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(random.Random(deployment.seed))
        self.deployment = deployment
        self.config, self.num_trainers = _simulated_config(deployment), deployment.trainers
        costs, link = deployment.costs, deployment.link
        self._latency_s, self._bandwidth = link.latency, link.bandwidth * costs.link_share
        # Where many share an interface, a whole message is small enough a turn.
        self._most_chunks = max(1, min(_MOST_CHUNKS, 256 // deployment.trainers))
        machine = Resource(deployment.cores)
        hosts = [
            SimulatedHost(self, machine if deployment.one_machine else Resource(deployment.cores), costs.two_way)
            for _ in range(deployment.trainers + deployment.servers)
        ]
        first = 0 if is_colocated(deployment.config) else deployment.trainers
        self.trainers = [Endpoint(host) for host in hosts[: deployment.trainers]]
        self.servers = [Endpoint(host) for host in hosts[first : first + deployment.servers]]
        self.pieces = _pieces(deployment)
        self._batches = [0] * deployment.trainers
        self.buckets: _Buckets | None = None  # of the step, where updates are made bucket by bucket
        self._unsent: dict[int, _Gradients] = {}
        self.early: set[int] = set()  # trainers that have received the next version bucket by bucket
        self._busy = False  # an update is applied by several servers
        self._waiting: deque[Callable[[], None]] = deque()
        self._outbox: list[Callable[[], None]] | None = None
        self._updated: int | None = None  # gradients of the update that a call has made
        self._lasts: tuple[int, int, float | None] = 0, 0, None  # updates before and until the end, or seconds
        self._lost_at: dict[int, int] = {}  # by trainer: updates until it was lost
        self.failures = 0
        self.updates: list[tuple[float, int]] = []
        """When each update was applied, and the number of its gradients."""

    def measure(self, updates: int, warm: int, seconds: float | None = None) -> Throughput:
        """Run, and return the throughput; see ``simulate``."""
        trainers = self.deployment.trainers
        per_step = consistency_class(self.config.server).gradients_per_update(self.config.server, trainers)
        first = warm * trainers // per_step
        self._lasts = first, first + updates * trainers // per_step, seconds
        self.start()
        self.run_events()
        measured = self.updates[first:]
        lasted_s = measured[-1][0] - measured[0][0]
        gradients = sum(count for _, count in measured[1:])
        return Throughput(
            trainers * lasted_s / gradients,
            gradients * self.deployment.samples / lasted_s,
            self.failures,
        )

    # What the engine needs.

    def make_data(self, trainer_index: int) -> EndlessData:
        return EndlessData()

    def samples_of(self, positions: Sequence[int]) -> int:
        return self.deployment.samples

    def make_process(self, index: int) -> Process:
        process = Process(self, index)
        if self.updates:
            self._let_fail(process)
        return process

    def _let_fail(self, process: Process) -> None:
        every_s = self.deployment.failure_every_s
        if every_s is not None:
            self.after(self.rng.expovariate(1 / every_s), self.kill, process)

    def kill(self, process: Process) -> None:
        if not process.alive:
            return
        self.failures += 1
        process.alive = False
        if process.session is not None:
            process.session.ended = True
            self.disconnect(process.session, "its connection was closed")
        self.after(self.deployment.restart_s, self._replace, process)

    def disconnect(self, session: Session, reason: str | None) -> None:
        self.early.discard(session.index)
        self.after(self._latency_s, self._gone, session.node, session.member.name, reason)

    def lost(self, trainer_index: int) -> None:
        self._lost_at[trainer_index] = len(self.updates)
        if self.buckets is not None:
            self.buckets.leave(trainer_index)

    def decided(self, session: Session, decision: Decision) -> None:
        known = self.buckets and (self.buckets.step, self.buckets.decided)
        if decision.active and self.deployment.updates_by_bucket and known != (decision.step, decision.active):
            self.buckets = _Buckets(self, decision)
            for index, updates in self._lost_at.items():
                if updates == len(self.updates):  # after this decision was made
                    self.buckets.leave(index)

    def applied(self, node: Node, version: int, pushes: Sequence[PendingPush]) -> None:
        self._updated = len(pushes)
        # A run starts once all trainers are there at once, which may never be where many of them fail often.
        for process in () if self.updates else self.processes:
            self._let_fail(process)
        self.updates.append((self.now, len(pushes)))
        first, last, seconds = self._lasts
        count = len(self.updates)
        if seconds is None:
            self.complete = count > last
        else:
            self.complete = count > first + 1 and self.now >= self.updates[first][0] + seconds

    # A step.

    def compute_s(self, session: Session) -> float:
        """Return how long a trainer computes; its buckets leave during the backward."""
        deployment, index = self.deployment, session.index
        factor = 1.0
        if deployment.slow is not None and deployment.slow.slows(deployment.seed, index, self._batches[index]):
            factor = deployment.slow.factor
        self._batches[index] += 1
        factor *= self._varied(deployment.jitter)
        busy_s = self.trainers[index].compute(self.now, deployment.costs.step_s, 0.0) - self.now
        forward_s, backward_s = deployment.forward_s * factor, deployment.backward_s * factor
        gradients = self._unsent[index] = _Gradients(self, session)
        rounds = max(len(pieces) for pieces in self.pieces) if backward_s else 0
        for number in range(1, rounds):
            self.after(busy_s + forward_s + backward_s * number / rounds, gradients.send_until, number)
        return busy_s + forward_s + backward_s

    def _varied(self, sigma: float) -> float:
        """Return a draw with the mean 1."""
        return self.rng.lognormvariate(-(sigma**2) / 2, sigma) if sigma else 1.0

    def send(self, task: SimulatedTask, call: Call, request: int) -> None:
        if call.method == "pull":
            self._pull(task, call, request)
        elif call.method == "push":
            self._unsent.pop(task.session.index).finish(task, call, request)
        else:
            trainer = self.trainers[task.session.index]
            self.transfer(trainer, self.servers[0], 0, partial(self.deliver, task, call, request))

    def _pull(self, task: SimulatedTask, call: Call, request: int) -> None:
        node, index = task.session.node, task.session.index
        has_early = index in self.early
        self.early.discard(index)
        pulled: list[Any] = []

        def requested(number: int) -> None:
            if task.session.ended:
                return
            if number == 0:
                pulled.append(call.run(node.server))
            size = self.pieces[number][0] if has_early else sum(self.pieces[number])
            self.transfer(self.servers[number], self.trainers[index], size, replied)

        left = self.deployment.servers

        def replied() -> None:
            nonlocal left
            left -= 1
            if not left:
                self.receive(node, task, request, pulled[0])

        for number, server in enumerate(self.servers):
            self.transfer(self.trainers[index], server, 0, partial(requested, number))

    # The network.

    def transfer(self, sender: Endpoint, receiver: Endpoint, size: float, then: Callable[[], None]) -> None:
        """Send a message with ``size`` bytes of tensors; ``then`` is called when the receiver has handled it."""
        costs = self.deployment.costs
        size += _SMALL_BYTES
        sent = sender.compute(self.now, costs.message_s, size * costs.byte_s)
        handle = partial(self._handle, receiver, size, then)
        if sender.host is receiver.host:
            self.at(sent, handle)
        else:
            self.at(sent, self._offer, (sender, receiver, size > _SMALL_BYTES), size, handle)

    def _offer(self, connection: Connection, size: float, received: Callable[[], None]) -> None:
        """Offer a message to the interface that it leaves, in chunks; the messages of a connection keep their order."""
        sender, _, has_tensors = connection
        chunks = min(self._most_chunks, math.ceil(size / _LEAST_CHUNK_BYTES))
        seconds = size / chunks / self._bandwidth
        if has_tensors:
            seconds *= self._varied(self.deployment.transfer_jitter)
        for number in range(chunks):
            then = received if number == chunks - 1 else _nothing
            sender.host.sends.offer(connection, seconds, partial(self._leave, connection, then, seconds))

    def _leave(self, connection: Connection, then: Callable[[], None], alone_s: float, seconds: float) -> None:
        """A chunk begins to leave; ``latency`` later it begins to arrive."""
        arrival = partial(self._arrive, self.now + seconds + self._latency_s, then)
        self.after(self._latency_s, connection[1].host.receives.offer, connection, alone_s, arrival)

    def _arrive(self, last_byte: float, then: Callable[[], None], seconds: float) -> None:
        self.at(max(self.now + seconds, last_byte), then)

    def _handle(self, receiver: Endpoint, size: float, then: Callable[[], None]) -> None:
        costs = self.deployment.costs
        self.at(receiver.compute(self.now, costs.message_s, size * costs.byte_s), then)

    # Server 0.

    def deliver(self, task: SimulatedTask, call: Call, request: int) -> None:
        """Run the handler of a call, once no update is being applied by several servers."""
        node, session = self.node, task.session
        if session.ended:
            return
        if node is None or not node.alive or node is not session.node:
            session.mark_lost(PeerLost("the server is lost: its connection was closed"))
            return
        if self._busy:
            self._waiting.append(partial(self.deliver, task, call, request))
            return

        def handle() -> None:
            result = call.run(node.server)
            if isinstance(result, torch.futures.Future):
                result.add_done_callback(lambda done: self._reply(node, task, request, done.value()))
            else:
                self._reply(node, task, request, result)

        self._run_handler(handle)

    def _gone(self, node: Node, name: str, reason: str | None) -> None:
        if self._busy:
            self._waiting.append(partial(self._gone, node, name, reason))
        else:
            self._run_handler(partial(super()._gone, node, name, reason))  # it may make the update without this trainer

    def _run_handler(self, handle: Callable[[], None]) -> None:
        """Run a handler of server 0; its replies leave once the update that it makes is applied on every server."""
        replies: list[Callable[[], None]] = []
        self._outbox, self._updated = replies, None
        handle()
        self._outbox = None
        updated: int | None = self._updated  # by the handler
        if updated is None:
            _run_all(replies)
        elif self.buckets is not None:
            self.buckets.when_ready(partial(_run_all, replies))
        else:
            self._busy = True
            self._apply(updated, replies)

    def _reply(self, node: Node, task: SimulatedTask, request: int, value: Any) -> None:
        def send() -> None:
            trainer = self.trainers[task.session.index]
            self.transfer(self.servers[0], trainer, 0, lambda: self.receive(node, task, request, value))

        if self._outbox is None:
            send()
        else:
            self._outbox.append(send)

    def _apply(self, gradients: int, replies: list[Callable[[], None]]) -> None:
        """Apply an update on every server, then reply."""
        left = self.deployment.servers

        def applied() -> None:
            nonlocal left
            left -= 1
            if left:
                return
            self._busy = False
            _run_all(replies)
            while self._waiting and not self._busy:
                self._waiting.popleft()()

        def apply(number: int) -> None:
            server = self.servers[number]
            then = partial(self.transfer, server, self.servers[0], 0, applied) if number else applied
            self.update(number, sum(self.pieces[number]), gradients, then)

        for number in range(1, self.deployment.servers):
            self.transfer(self.servers[0], self.servers[number], 0, partial(apply, number))
        apply(0)

    def update(self, number: int, size: float, gradients: int, then: Callable[[], None]) -> None:
        """Average ``gradients`` and step ``size`` bytes of a server's shard."""
        seconds = size * (gradients + 1) * self.deployment.costs.update_byte_s
        self.at(self.servers[number].compute(self.now, seconds, 0.0), then)


class _Gradients:
    """The push of one step of a trainer: pieces to every server, and a report to server 0."""

    def __init__(self, world: ModelledRun, session: Session) -> None:
        self._world, self._session = world, session
        self._trainer = world.trainers[session.index]
        self._buckets = world.buckets
        self._sent = 0  # rounds, from 1 on
        self._unacknowledged = sum(len(pieces) for pieces in world.pieces)
        self._missing_at_0 = len(world.pieces[0]) + 1  # pieces, and the report
        self._push: tuple[SimulatedTask, Call, int] | None = None

    def send_until(self, number: int) -> None:
        """Send buckets to every server, all up to this number but the first, which is sent with the report."""
        while self._sent < number and not self._session.ended:
            self._sent += 1
            self._send_round(self._sent)

    def _send_round(self, number: int) -> None:
        world = self._world
        for server, pieces in enumerate(world.pieces):
            if number < len(pieces):
                arrived = partial(self._arrived, server, number)
                world.transfer(self._trainer, world.servers[server], pieces[number], arrived)

    def finish(self, *push: Any) -> None:
        """Send the rest, and the report."""
        self._push = push
        self.send_until(max(len(pieces) for pieces in self._world.pieces) - 1)
        if self._buckets is not None:
            self._world.transfer(self._trainer, self._world.servers[0], 0, self._arrived_at_0)
        self._send_round(0)

    def _arrived(self, server: int, number: int) -> None:
        """A piece is at its server."""
        if self._buckets is None:
            self._world.transfer(self._world.servers[server], self._trainer, 0, self._acknowledged)
            return
        self._buckets.arrived(server, number, self._session.index)
        if server == 0:
            self._arrived_at_0()

    def _acknowledged(self) -> None:
        """Without updates by bucket, the push is reported once all servers have all gradients."""
        self._unacknowledged -= 1
        if not self._unacknowledged and not self._session.ended:
            assert self._push is not None
            world = self._world
            world.transfer(self._trainer, world.servers[0], 0, partial(world.deliver, *self._push))

    def _arrived_at_0(self) -> None:
        self._missing_at_0 -= 1
        if not self._missing_at_0 and not self._session.ended:
            assert self._push is not None
            self._world.deliver(*self._push)


class _Buckets:
    """An update that is made bucket by bucket, as ``UpdatePipeline`` makes it on every server."""

    def __init__(self, world: ModelledRun, decision: Decision) -> None:
        self.step, self.decided = decision.step, decision.active
        self._world = world
        self._active = set(decision.active)
        self._missing = {
            (server, number): set(decision.active)
            for server, pieces in enumerate(world.pieces)
            for number in range(len(pieces))
        }
        self.pieces_left = [len(pieces) for pieces in world.pieces]
        self.servers_left = len(world.pieces)
        self._then: Callable[[], None] | None = None

    def leave(self, trainer_index: int) -> None:
        """Do not wait for a trainer that is lost."""
        self._active.discard(trainer_index)
        for piece in list(self._missing):
            self.arrived(*piece, trainer_index)

    def arrived(self, server: int, number: int, trainer_index: int) -> None:
        """A server has a piece of a trainer; it updates it with the last trainer's."""
        missing = self._missing.get((server, number))
        if missing is None:
            return
        missing.discard(trainer_index)
        if not missing:
            del self._missing[server, number]
            size = self._world.pieces[server][number]
            then = partial(self._updated, server, number, size)
            self._world.update(server, size, len(self._active), then)

    def _updated(self, server: int, number: int, size: float) -> None:
        world = self._world
        if number:
            for index in sorted(self._active):
                world.early.add(index)
                world.transfer(world.servers[server], world.trainers[index], size, _nothing)
        self.pieces_left[server] -= 1
        if not self.pieces_left[server]:
            if server:
                world.transfer(world.servers[server], world.servers[0], 0, self._server_is_ready)
            else:
                self._server_is_ready()

    def _server_is_ready(self) -> None:
        self.servers_left -= 1
        if not self.servers_left and self._then is not None:
            self._then()

    def when_ready(self, then: Callable[[], None]) -> None:
        """Call ``then`` once all servers have the version."""
        self._then = then
        if not self.servers_left:
            then()


def _nothing() -> None:
    """What follows from a message of which only the time counts."""


def _run_all(actions: Sequence[Callable[[], None]]) -> None:
    for action in actions:
        action()


def _pieces(deployment: Deployment) -> list[list[float]]:
    """Bytes of each bucket of each server; the first is sent when the backward has ended."""
    shard = deployment.message_bytes / deployment.servers
    if not deployment.updates_by_bucket:
        count = max(1, math.ceil(shard / deployment.config.server.bucket_bytes))
        return [[shard / count] * count for _ in range(deployment.servers)]
    most = pipelined_bucket_bytes(deployment.config, shard)
    first = min(most, FIRST_BUCKET_BYTES, shard)
    count = math.ceil((shard - first) / most)
    return [[first, *[(shard - first) / max(count, 1)] * count] for _ in range(deployment.servers)]


def _simulated_config(deployment: Deployment) -> Config:
    """The config of the server on the virtual clock: the shards of several servers are part of the network model."""
    config = deployment.config
    return Config(
        mode="rpc",
        cluster=ClusterConfig(num_trainers=deployment.trainers, timeout_s=1e9),
        server=replace(config.server, transport="rpc", compute="trainer", on_loss="continue"),
        training=TrainingConfig(validate_every=0, uneven_inputs="join"),
        checkpoint=CheckpointConfig(every=0),
        logging=LoggingConfig(log_every=1_000_000_000),
    )


def simulate(deployment: Deployment, updates: int = 30, warm: int = 10, seconds: float | None = None) -> Throughput:
    """Run a deployment on the virtual clock.

    Each trainer makes ``warm`` steps, which are not measured, and then ``updates`` on average, which are; or it is
    measured for ``seconds``, as with failures.

    Raises:
        Violation: the run cannot continue.
    """
    return ModelledRun(deployment).measure(updates, warm, seconds)

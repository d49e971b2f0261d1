"""A run on a virtual clock with network, disk and faults that a seed decides, for tests of the protocol.

``World`` extends that of simulator.py by faults and by invariants, which it checks at every event. One
``random.Random(seed)`` decides everything, so a seed replays exactly.
"""

from __future__ import annotations

import pickle
import random
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paramserver import simulator
from paramserver.buffers.positions import AppliedPositions
from paramserver.config import CheckpointConfig, ClusterConfig, Config, LoggingConfig, ServerConfig, TrainingConfig
from paramserver.config.schema import BestConfig, BufferConfig
from paramserver.consistency import Announcement, Decision, PushId, Readiness, Verdict
from paramserver.consistency.factory import consistency_class
from paramserver.distributed.rpc_calls import RemoteError
from paramserver.errors import ParamserverError, PeerLost, RunEnded
from paramserver.server.parameter_server import ParameterServer
from paramserver.simulator import Call, Process, SimulatedTask, Violation
from paramserver.transport.messages import JoinReply, PendingPush
from tests.simulation.node import FaultyNode, PushKey, push_key
from tests.simulation.session import Backward, FaultyProcess, FaultySession, may_repeat

LOST_AFTER_S, TIMEOUT_S = 1.6, 20.0
# Faults happen in the first events and seconds of a run; after the last one it has so long to end.
FAULTY_EVENTS, FAULTY_S, GRACE_S = 400, 8.0, 120.0


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
        update_s: how long the server computes an update, or stages a checkpoint, at most.
    """

    config: Config
    samples: tuple[int, ...]
    faults: Mapping[int, str]
    loss: float
    duplicates: float
    waits: float
    supervised: bool
    gives_up: bool
    update_s: float

    @classmethod
    def draw(cls, rng: random.Random) -> Scenario:
        trainers, kind = rng.randint(2, 5), rng.choice(("sync", "sync", "bounded", "async", "backup", "buffered"))
        config = Config(
            mode="rpc",
            cluster=ClusterConfig(num_trainers=trainers, timeout_s=TIMEOUT_S),
            server=ServerConfig(
                consistency={"backup": "sync", "buffered": "async"}.get(kind, kind),
                arrivals=rng.randint(2, trainers + 1) if kind == "buffered" else 1,
                backup_trainers=rng.randint(1, trainers - 1) if kind == "backup" else 0,
                staleness_bound=rng.randint(0, 3),
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
            update_s=rng.choice((0.0, 0.0, 0.1, 2 * LOST_AFTER_S)),
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
    generations: int
    incarnations: int
    trace: list[str]


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


class World(simulator.World):
    """Network, disk, faults and invariants of one run. With ``tracing`` the events are kept as text in ``trace``."""

    node_type = FaultyNode
    session_type = FaultySession
    node: FaultyNode | None

    def __init__(self, seed: int, tracing: bool = False, nonfinite: int = 0) -> None:
        super().__init__(random.Random(seed))
        self.tracing = tracing
        self.trace: list[str] = []
        self.manifest: bytes | None = None
        self.given_up: int | None = None  # the trainer that is not started again
        self.generations_seen: Counter[int] = Counter()
        self.nonfinite = nonfinite  # per cent of the pushes, which are skipped
        self.seed = seed
        self.scenario = Scenario.draw(self.rng)
        self.redone: set[PushKey] = set()
        self.acks: set[PushKey] = set()
        self.versions: dict[tuple[int, int], int] = {}
        self.incarnations = 0
        self.validations: set[int] = set()  # versions, of all generations
        self.last_validation: dict[int, int] = {}  # in each generation
        self.updating_until: dict[FaultyNode, float] = {}
        self.late: set[int] = set()  # requests that were held back in the network
        # Of the server that lives.
        self.keys: set[PushKey] = set()
        self.last_sequence: dict[tuple[int, int, int], int] = {}
        self.times: Counter[tuple[int, int]] = Counter()

    @property
    def config(self) -> Config:
        return self.scenario.config

    @property
    def server(self) -> ParameterServer:
        assert self.node is not None
        return self.node.server

    @property
    def drops_pushes(self) -> bool:
        return consistency_class(self.config.server).drops_pushes

    @property
    def num_trainers(self) -> int:
        return len(self.scenario.samples)

    @property
    def epoch_samples(self) -> int:
        return sum(self.scenario.samples) * self.config.buffer.pseudo_epochs

    @property
    def waits(self) -> float:  # type: ignore[override]
        return self.scenario.waits

    @property
    def is_faulty(self) -> bool:
        return self.now < FAULTY_S and self.events < FAULTY_EVENTS

    def make_process(self, index: int) -> Process:
        return FaultyProcess(self, index)

    def make_data(self, trainer_index: int) -> Data:
        return Data(self, trainer_index)

    def compute_s(self, session: FaultySession) -> float:
        return float(session.process.compute_s * self.rng.uniform(0.5, 1.5))

    def nonfinite_of(self, push: PushId) -> str:
        # Without a random number, so that the faults of a seed stay.
        return "loss" if zlib.crc32(repr(push_key(push)).encode()) % 100 < self.nonfinite else ""

    def note(self, *words: Any) -> None:
        if self.tracing:
            self.trace.append(f"{self.now:8.3f} {' '.join(str(word) for word in words)}")

    def submit(self, node: FaultyNode, job: Callable[[], None]) -> None:
        """Run a job after those before it. Messages, losses and joins happen meanwhile."""
        began = max(self.now, self.updating_until.get(node, 0.0))
        most_s = self.scenario.update_s * (1.0 if self.chance(0.2) else 0.05)
        self.updating_until[node] = began + self.rng.uniform(0.0, most_s)
        self.at(self.updating_until[node], self._run_job, node, job)

    def _run_job(self, node: FaultyNode, job: Callable[[], None]) -> None:
        if not node.alive:
            return
        if node.paused_until > self.now:
            self.at(node.paused_until, self._run_job, node, job)
        else:
            job()

    def run(self) -> SimulatedRun:
        self.note("scenario", self.scenario)
        try:
            self.start()
            self.run_events()
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
            self.generation,
            self.incarnations,
            self.trace,
        )

    def before_event(self) -> None:
        # Each update may take its time, and in the slowest case has one batch.
        grace_s = GRACE_S + self.scenario.update_s * self.epoch_samples * (self.config.training.max_epochs or 1)
        if self.now > FAULTY_S + grace_s:
            raise Violation(f"the run has not ended {grace_s:g} s after the last fault")
        if self.events in self.scenario.faults:
            self.inject(self.scenario.faults[self.events])

    def start_server(self) -> None:
        self.check(self.node is None or not self.node.alive, "two servers live at once")
        super().start_server()
        node = self.node
        assert node is not None
        self.generations_seen[node.generation] += 1
        self.check(self.generations_seen[node.generation] == 1, f"two servers have had generation {node.generation}")
        self.note("server starts, generation", self.generation, "step", node.checkpoints.first_step)
        kept = {key for key, _ in node.history}
        self.redone |= self.keys - kept
        self.keys, self.last_sequence, self.times = kept, {}, Counter()
        for (_, trainer, _, _), positions in node.history:
            self.times.update((trainer, position) for position in positions)
        for process in self.processes:  # those that had left are needed again
            if process.left:
                self._start_again(process)

    def tick(self, node: FaultyNode) -> None:
        if node.alive and node.paused_until > self.now:
            self.at(node.paused_until, self.tick, node)
            return
        super().tick(node)
        roster = node.server.roster
        if node.alive and not roster.started and self.now >= node.started + self.config.cluster.timeout_s:
            missing = roster.missing()
            if missing:
                self.check(f"trainer {self.given_up}" in missing, f"{missing} did not join in time")
                self.complete = True  # the run fails, and names the trainer

    # Processes that are frozen, cut off, or have left.

    def join(self, process: FaultyProcess) -> None:
        joins = process.alive and not self.complete and self.processes[process.index] is process
        if joins and process.frozen_until > self.now:
            self.at(process.frozen_until, self.join, process)
        elif joins and process.cut_until > self.now:
            self.after(0.25, self.join, process)
        else:
            super().join(process)

    def session_ended(self, session: FaultySession, error: ParamserverError | None) -> None:
        self.note("session of trainer", session.index, "ends:", repr(error))
        super().session_ended(session, error)
        if error is None or isinstance(error, RunEnded):
            session.process.left = True
            if self.generation > session.node.generation:
                self._start_again(session.process)

    def _start_again(self, process: FaultyProcess) -> None:
        """A trainer that left in good order is needed again: the servers returned to a checkpoint."""
        process.left = False
        self.after(self.rng.uniform(0.1, 1.0), self.join, process)

    def _replace(self, process: Process) -> None:
        if self.given_up != process.index:
            super()._replace(process)

    def _closed(self, session: FaultySession) -> None:
        session.mark_lost(PeerLost("the server is lost: its connection was closed"))

    def resume(self, task: SimulatedTask, value: Any = None, error: ParamserverError | None = None) -> None:
        session = task.session
        process = session.process
        if not session.ended and process.alive and process.frozen_until > self.now:
            self.at(process.frozen_until, self.resume, task, value, error)
        else:
            super().resume(task, value, error)

    def receive(self, node: FaultyNode, task: SimulatedTask, request: int, value: Any) -> None:
        session = task.session
        if task.request == request:
            error = value if isinstance(value, RemoteError) else ""
            self.note(session.index, f"pid {session.process.pid}", "gets", error)
        super().receive(node, task, request, value)

    # Processes that end, and faults.

    def disconnect(self, session: FaultySession, reason: str | None) -> None:
        """Let the server know that the connection of a session was closed."""
        delay = self.rng.uniform(0.01, 0.3)
        self.at(max(self.now, session.process.cut_until) + delay, self._gone, session.node, session.member.name, reason)

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
                for task in [t for p in self.processes if p.session for t in p.session.tasks]:
                    if task.request is not None:
                        self.after(rng.uniform(0.01, 0.3), self._closed, task.session)
                self.after(rng.uniform(0.3, 1.5), self.start_server)

    # The network.

    def send(self, task: SimulatedTask, call: Call, request: int, again: bool = False) -> None:
        """Send a request to whatever server there is when it arrives.

        In order, but for one that is sent again, and for gradients.
        """
        rng, session = self.rng, task.session
        arrival = max(self.now, session.process.cut_until) + rng.uniform(0.005, 0.05)
        reply_is_lost = False
        if self.is_faulty:
            loses = self.chance(self.scenario.loss)
            if loses and may_repeat(call):
                self.after(rng.uniform(0.2, 0.8), self.send_again, task, call, request)
            elif loses:  # the connection breaks, and both ends notice
                self.after(rng.uniform(0.05, 0.5), self._closed, session)
                self.disconnect(session, "its connection was closed")
            if loses and rng.random() < 0.5:
                self.note("loses", session.index, call.method)
                return
            reply_is_lost = loses
            if may_repeat(call) and not again and self.chance(self.scenario.duplicates):
                self.at(arrival + rng.uniform(0.0, 0.6), self.deliver, task, call, request, False)
            if self.chance(0.05):
                arrival += rng.uniform(0.0, 1.0)
        if not again and call.method != "receive_bucket" and not isinstance(call, Backward):
            arrival = session.last_delivery = max(session.last_delivery, arrival)
        self.at(arrival, self.deliver, task, call, request, reply_is_lost)

    def send_again(self, task: SimulatedTask, call: Call, request: int) -> None:
        if task.request == request and not task.session.ended and task.session.process.alive:
            self.send(task, call, request, again=True)

    def deliver(self, task: SimulatedTask, call: Call, request: int, reply_is_lost: bool) -> None:
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
        result = call.run(node.server)
        if isinstance(result, torch.futures.Future):
            result.add_done_callback(lambda done: self.reply(node, task, request, done.value(), reply_is_lost))
        else:
            self.reply(node, task, request, result, reply_is_lost)

    def reply(self, node: FaultyNode, task: SimulatedTask, request: int, value: Any, is_lost: bool) -> None:
        if not is_lost:
            latency = self.rng.uniform(0.005, 0.05) + (self.rng.random() < 0.03) * self.rng.uniform(0.0, 0.5)
            self.at(max(self.now, task.session.process.cut_until) + latency, self.receive, node, task, request, value)

    # Invariants.

    def joined(self, session: FaultySession, reply: JoinReply) -> None:
        self.incarnations = max(self.incarnations, reply.incarnation)
        self.check(
            reply.generation >= session.process.min_generation,
            f"trainer {session.index} joins the earlier {reply.generation}",
        )
        session.restore(reply)

    def decided(self, session: FaultySession, decision: Decision) -> None:
        if decision.verdict is Verdict.VALIDATE:
            return
        before = self.versions.get((session.generation, session.process.pid), 0)
        self.check(
            decision.step >= before, f"trainer {session.index} goes back from version {before} to {decision.step}"
        )
        self.versions[session.generation, session.process.pid] = decision.step

    def acknowledged(self, key: PushKey, result: Any) -> None:
        if not result.dropped:
            self.acks.add(key)

    def validated(self, step: int, samples: int) -> None:
        self.check(
            samples == self.num_trainers, f"the validation of {step} has {samples} of {self.num_trainers} shares"
        )
        assert self.node is not None
        last = self.last_validation.get(self.node.generation, -1)
        self.check(step > last, f"the validation of {step} is recorded after that of {last}")
        self.last_validation[self.node.generation] = step
        self.validations.add(step)

    def applied(self, node: FaultyNode, version: int, pushes: Sequence[PendingPush]) -> None:
        """Check an update before it is part of the history."""
        config, (counted, _) = self.scenario.config, node.store.update
        self.check(version == counted, f"update {counted} makes version {version}")
        self.check(node is self.node and node.alive, "a server that is dead applies an update")
        limit = config.training.max_steps
        self.check(limit is None or version <= limit, f"version {version} exceeds max_steps ({limit})")
        for push, gradient in zip(pushes, node.store.gradients, strict=True):
            key = push_key(push.id)
            self.check(not push.report.nonfinite, f"push {key} is not finite, and is applied")
            generation, trainer, _, sequence = key
            self.note("  applies", key, "in version", version, "positions", push.report.positions)
            self.check(gradient == key, f"the gradient of push {gradient} is applied as that of {key}")
            self.check(key not in self.keys, f"push {key} is applied twice")
            self.check(
                generation == node.generation,
                f"push {key} is applied in generation {node.generation}",
            )
            last = self.last_sequence.get(key[:3], 0)
            if self.drops_pushes or self.nonfinite:
                self.check(sequence > last, f"push {key} is applied after {last}")
            else:
                self.check(sequence == last + 1, f"push {key} is applied after {last}: one is missing")
            self.last_sequence[key[:3]] = sequence
            positions = tuple(push.report.positions)
            for position in positions:
                self.times[trainer, position] += 1
                times = self.times[trainer, position]
                self.check(
                    times <= config.buffer.pseudo_epochs,
                    f"sample {position} of trainer {trainer} is applied {times} times",
                )
            self.keys.add(key)
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
            if not (self.drops_pushes or self.nonfinite):
                self.check(row["count"] == applied[index], f"the ledger counts {row}, applied are {applied[index]}")

    def _check_end(self) -> None:
        node, config = self.node, self.scenario.config
        assert node is not None
        server = node.server
        rules, ledger = server.aggregator.rules, server.aggregator.ledger
        decision = server.run.last_decision
        if decision is None:
            self.check(self.given_up is not None, "the run ended without a decision")
            return
        self.note("end:", decision)
        self.check(rules.step == node.store.version == decision.step, "the last decision is of another version")
        self.check(rules.samples == sum(self.times.values()), "the number of samples is not that of those applied")
        acks = self.acks
        if config.server.arrivals > 1:  # acknowledged before the update, which a server that crashed did not make
            acks = {key for key in acks if key[0] == node.generation}
        missing = acks - self.keys - self.redone
        self.check(not missing, f"acknowledged pushes are neither applied nor redone: {sorted(missing)}")
        self.check(self.manifest is not None, "the run ended without a checkpoint")
        assert self.manifest is not None
        manifest = pickle.loads(self.manifest)
        self.check(manifest["step"] == decision.step, f"the last checkpoint is of step {manifest['step']}")
        every = config.training.validate_every
        due = {decision.step, *(range(every, decision.step + 1, every) if every else ())}
        self.check(due <= self.validations, f"versions {sorted(due - self.validations)} were never validated")
        dropped = 0
        for index, once in enumerate(self.scenario.samples):
            to_serve = once * (config.training.max_epochs or 1) * config.buffer.pseudo_epochs
            counted = ledger[index].positions.count
            applied = sum(times for (trainer, _), times in self.times.items() if trainer == index)
            left = to_serve - counted
            dropped += counted - applied
            self.check(
                left >= 0 and counted >= applied, f"trainer {index}: {applied} applied, {counted} of {to_serve} counted"
            )
            if decision.reason == "all data was served" and index != self.given_up:
                self.check(left == 0, f"trainer {index}: {left} samples are left although all data was served")
        if not self.drops_pushes:
            skipped = server.aggregator.monitor.skipped
            self.check(dropped == skipped, f"{dropped} samples were counted and not applied, {skipped} skipped")
        limit = config.training.max_steps
        if limit is not None and "max_steps" in decision.reason:
            self.check(decision.step == limit, f"the run ended at step {decision.step}, max_steps is {limit}")
        elif config.training.uneven_inputs == "join":
            self.check(decision.reason == "all data was served", f"the run ended: {decision.reason}")


def simulate(seed: int, tracing: bool = False, nonfinite: int = 0) -> SimulatedRun:
    """Run the world of a seed; ``nonfinite`` per cent of the pushes are skipped."""
    return World(seed, tracing, nonfinite).run()

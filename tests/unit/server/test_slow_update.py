"""No handler waits while an update is computed, or a checkpoint staged, however long that takes.

The servers are real, and so are the threads that call them: as many as the RPC agent has. What computes is held by an
event, not by time: every handler that waited for it would wait for ever.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from servers import NoNetwork, SumOfOutputs, no_checkpoints, send_gradients

from paramserver.buffers.positions import AppliedPositions
from paramserver.config import ClusterConfig, Config, ServerConfig, TrainingConfig
from paramserver.consistency import Announcement, PushId, Readiness, TrainerId
from paramserver.context import StopLimit, StopRequest
from paramserver.distributed.membership import HeartbeatReply, HeartbeatReport, Member
from paramserver.distributed.rpc_calls import WORKER_THREADS, RemoteError
from paramserver.errors import PeerFailed, TaskError
from paramserver.metrics.records import StepReport
from paramserver.parameters.flat import FlatLayout, trainable_parameters
from paramserver.parameters.sharding import full_shard, get_hyperparameters
from paramserver.runs.monitor import RunMonitor
from paramserver.runtime.rank import _end_without
from paramserver.server.build import build_server
from paramserver.server.server_run import UpdateExecutor
from paramserver.server.shard_server import ShardServer
from paramserver.transport.messages import ApplyRequest, DataPosition, Push, ShardAssignment

READY = Announcement(Readiness.READY)
TIMEOUT_S = 20.0
TRAINERS = 16

pytestmark = pytest.mark.claim("slow-update")


class Gate:
    """Holds the thread that passes it until ``opened`` is set."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self):
        self.reached.set()
        assert self.opened.wait(TIMEOUT_S)


class SlowSGD(torch.optim.SGD):
    """Its step waits at a gate."""

    gate = None

    def step(self, closure=None):
        self.gate.wait()
        return super().step(closure)


class SlowTask(SumOfOutputs):
    """Two layers, whose optimizers wait at the gate; ``kind`` says how the optimizer is built."""

    def __init__(self, gate, kind="one"):
        super().__init__(4, 4, 1)
        self.gate, self.kind = gate, kind

    def build_optimizer(self, model):
        if self.kind == "by bucket":
            # Only torch's own class is stepped bucket by bucket; see ``slow_buckets``.
            return torch.optim.SGD(model.parameters(), lr=1.0)
        optimizers = []
        for layer in model if self.kind == "several" else [model]:
            optimizers.append(SlowSGD(layer.parameters(), lr=1.0))
            optimizers[-1].gate = self.gate
        return {"first": optimizers[0], "second": optimizers[1]} if self.kind == "several" else optimizers[0]


@pytest.fixture
def workers():
    with ThreadPoolExecutor(WORKER_THREADS) as pool:
        yield pool


@pytest.fixture
def updates():
    with closing(UpdateExecutor(TIMEOUT_S)) as thread:
        yield thread


def answers(workers, *calls):
    """Make all calls at once, in the threads of the agent; return what they return or raise, if all of them do."""

    def made(call):
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - it is looked at by the caller
            return error

    return [future.result(TIMEOUT_S) for future in [workers.submit(made, call) for call in calls]]


class Run:
    """Server 0 with 16 trainers, which push over RPC."""

    def __init__(self, monkeypatch, updates, consistency="async", kind="one", **training):
        self.gate, self.staging, self.senders, self.worker_id, self.saved = Gate(), Gate(), {}, 0, []
        config = Config(
            mode="rpc",
            cluster=ClusterConfig(num_trainers=TRAINERS, timeout_s=TIMEOUT_S),
            server=ServerConfig(consistency=consistency, transport="rpc", lost_after_s=5.0),
            training=TrainingConfig(max_steps=100, **training),
        )
        self.monitor = RunMonitor(config, SimpleNamespace(write=lambda record: None), Path())
        checkpoints = no_checkpoints(self.monitor)
        checkpoints.stage = self._stage
        checkpoints.commit = lambda staged, parts, pause_s: self.saved.append(sorted(parts))
        self.server = build_server(
            SlowTask(self.gate, kind),
            config,
            TRAINERS,
            checkpoints,
            StopRequest(),
            submit=updates.submit,
            network=NoNetwork(),
        )
        self.leaves = self.server.shard.leaves
        if (pipeline := self.server.shard.pipeline) is not None:
            self._slow_buckets(monkeypatch, pipeline.updates)
        self.members = [self.join(index) for index in range(TRAINERS)]
        for member in self.members:
            self.connect(member)

    def _slow_buckets(self, monkeypatch, updates):
        compute = updates.compute

        def slow(*args):
            self.gate.wait()
            return compute(*args)

        monkeypatch.setattr(updates, "compute", slow)

    def _stage(self, step, model, updater, reason, since, *states):
        self.staging.wait()
        return SimpleNamespace(step=step)

    def join(self, index):
        self.worker_id += 1
        member = Member(index, f"trainer{index}_{self.worker_id}", self.worker_id, f"process {self.worker_id}")
        self.server.join(member, None)
        return member

    def connect(self, member):
        sender = self.senders[member.index] = TrainerId(member.index, 1, member.incarnation)
        self.server.report_source(sender, DataPosition({}, AppliedPositions().state_dict()))

    def rejoin(self, index):
        """Lose a trainer, and let another process take its place."""
        self.server.roster.on_disconnect(self.members[index], "its connection was closed")
        self.members[index] = self.join(index)
        self.connect(self.members[index])
        self.server.view_version(self.senders[index], None)
        return self.server.announce(self.senders[index], READY, number=1)

    def announce_all(self):
        return [self.server.announce(self.senders[index], READY, number=1) for index in range(TRAINERS)]

    def push(self, index, optimizer=""):
        server, sender = self.server, self.senders[index]
        report = StepReport(index, 0, 1, 0.5, 0.0, None, [0], optimizer=optimizer)
        reply = server.push(Push(PushId(index, 1, sender.incarnation, 1), report, None, READY))
        send_gradients(server, self.leaves, sender, 0)
        return reply

    def beat(self, index, blocks=False):
        return self.server.heartbeat(index, self.members[index].worker_id, HeartbeatReport(blocks=blocks))

    def request_stop(self):
        with self.server.run.lock:
            self.server.aggregator.request_stop()

    def others(self, *lost):
        return [index for index in range(TRAINERS) if index not in lost]


KINDS = {
    "async": {"consistency": "async"},
    "bounded": {"consistency": "bounded"},
    "clipped": {"consistency": "async", "clip_grad_norm": 1.0},
    "sync": {"consistency": "sync"},
    "sync-clipped": {"consistency": "sync", "clip_grad_norm": 1.0},
    "several-optimizers": {"consistency": "sync", "kind": "several"},
    "by-bucket": {"consistency": "sync", "kind": "by bucket"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_handler_waits_for_an_update(monkeypatch, updates, workers, kind):
    """All trainers live, and one more joins in the place of one that dies, before the first update is done."""
    run = Run(monkeypatch, updates, **KINDS[kind])
    server, waits_for_all = run.server, KINDS[kind]["consistency"] == "sync"
    granted = run.announce_all()
    assert all(grant.value().decision.active for grant in granted)
    optimizer = "first" if kind == "several-optimizers" else ""
    first = run.others() if waits_for_all else [0]
    pushed = dict(zip(first, answers(workers, *(partial(run.push, i, optimizer) for i in first)), strict=True))
    assert run.gate.reached.wait(TIMEOUT_S)
    # The update is held. More calls than the agent has threads, of every kind that a step makes.
    later = [i for i in run.others(3) if i not in pushed]
    answers(workers, *(partial(run.server.pull, run.senders[i], 0) for i in later))
    pushed |= dict(zip(later, answers(workers, *(partial(run.push, i) for i in later)), strict=True))
    beats = answers(workers, *(partial(run.beat, i, blocks) for i in run.others() for blocks in (True, False)))
    assert beats == [HeartbeatReply("")] * len(beats)
    again = answers(workers, *(partial(server.announce, run.senders[i], READY, number=1) for i in run.others()))
    assert [reply is grant for reply, grant in zip(again, granted, strict=True)] == [True] * TRAINERS
    answers(workers, *(partial(server.receive_records, run.senders[i], []) for i in run.others()))
    (rejoined,) = answers(workers, partial(run.rejoin, 3))
    roster = server.roster
    answers(workers, run.request_stop, roster.check_heartbeats, roster.check_absences, *map_averages(run))
    assert [member.index for member in server.roster.members.present()].count(3) == 1
    assert len(server.roster.members.present()) == TRAINERS
    assert not any(reply.done() for i, reply in pushed.items() if i != 3)
    # It goes on: every push is applied once, and the trainer that joined takes part.
    run.gate.opened.set()
    results = [reply.wait() for i, reply in sorted(pushed.items()) if i != 3]
    assert server.run.error is None, server.run.error
    assert {result.result.dropped for result in results} == {False}
    assert rejoined.wait().decision is not None
    assert server.aggregator.monitor.step == (1 if waits_for_all else len(pushed))


def map_averages(run):
    """Return calls that need the state of the optimizer; their replies come after the update."""
    return [partial(run.server.averages, run.senders[i]) for i in (1, 2)] + [run.server.optimizer_state]


def test_no_handler_waits_for_the_staging_of_a_checkpoint(monkeypatch, updates, workers):
    """A trainer that is lost meanwhile sends no part, also if another process has its place by then."""
    run = Run(monkeypatch, updates, "sync")
    server = run.server
    run.gate.opened.set()
    run.announce_all()
    for index in run.others():
        run.push(index)
    server.aggregator.rules.participants = set(run.others())
    staged = [server.stage_checkpoint(run.senders[i], "periodic", number=1) for i in run.others()]
    assert run.staging.reached.wait(TIMEOUT_S)
    beats = answers(workers, *(partial(run.beat, i, True) for i in run.others()))
    assert beats == [HeartbeatReply("")] * TRAINERS
    repeated = answers(
        workers, *(partial(server.stage_checkpoint, run.senders[i], "periodic", number=1) for i in run.others())
    )
    assert [reply is first for reply, first in zip(repeated, staged, strict=True)] == [True] * TRAINERS
    answers(workers, partial(run.rejoin, 3), server.roster.check_heartbeats)
    assert not any(reply.done() for reply in staged)
    run.staging.opened.set()
    assert [reply.wait() for reply in staged] == [True] * TRAINERS
    for index in run.others(3):
        server.finish_part(run.senders[index], server.aggregator.monitor.step, 0.0, number=2)
    assert run.saved == [run.others()]
    assert server.run.error is None


def test_no_trainer_is_left_behind_while_a_checkpoint_is_staged(monkeypatch, updates):
    """The time from a signal to the end of a run does not limit checkpoints; trainers send their parts afterwards."""
    run = Run(monkeypatch, updates, "sync")
    server, ranks = run.server, range(1, TRAINERS + 1)
    run.announce_all()
    server.aggregator.rules.participants = set(run.others())
    staged = [server.stage_checkpoint(run.senders[i], "interrupted", number=1) for i in run.others()]
    assert run.staging.reached.wait(TIMEOUT_S)
    server.roster.end_without("the limit", ranks, also_waiting=False)
    server.roster.end_without("the limit", ranks, also_waiting=True)
    run.staging.opened.set()
    assert [reply.wait() for reply in staged] == [True] * TRAINERS
    server.roster.end_without("the limit", ranks, also_waiting=True)
    assert (len(server.roster.members.present()), server.roster.left_behind) == (TRAINERS, [])


def test_the_last_checkpoint_of_a_server_without_trainers_has_no_limit(monkeypatch, updates):
    run = Run(monkeypatch, updates, "sync")
    server, ranks = run.server, range(1, TRAINERS + 1)
    run.announce_all()
    server.aggregator.stop.request("signal SIGTERM")
    server.roster.end_without("the limit", ranks, also_waiting=True)
    assert run.staging.reached.wait(TIMEOUT_S)
    assert server.roster.members.present() == []
    with StopLimit(server.aggregator.stop, 15.0) as limit:
        _end_without(server, limit, ranks, over_s=1000.0)
    run.staging.opened.set()
    assert server.run.finished.wait(TIMEOUT_S)
    assert server.run.error is None
    assert server.run.last_decision.interrupted


def test_a_forward_of_the_user_ends_with_the_run_and_does_not_wait_for_its_update(monkeypatch, updates, workers):
    run = Run(monkeypatch, updates)
    run.announce_all()
    run.push(0)
    assert run.gate.reached.wait(TIMEOUT_S)
    asked = threading.Event()
    waits = run.server.aggregator.run_exclusively
    monkeypatch.setattr(run.server.aggregator, "run_exclusively", lambda task: (waits(task), asked.set()))
    forward = workers.submit(run.server.forward, torch.ones(1, 4))
    assert asked.wait(TIMEOUT_S)
    began = time.monotonic()
    run.server.run.fail(TaskError("the loss is NaN"))
    with pytest.raises(PeerFailed, match="the loss is NaN"):
        forward.result(TIMEOUT_S)
    assert time.monotonic() - began < TIMEOUT_S / 2
    run.gate.opened.set()
    updates.close()  # after the update, whose read has its reply already


def test_a_forward_of_the_user_reads_after_the_update(monkeypatch, updates, workers):
    run = Run(monkeypatch, updates)
    run.gate.opened.set()
    run.announce_all()
    run.push(0).wait()
    (output,) = answers(workers, partial(run.server.forward, torch.ones(1, 4)))
    with torch.no_grad():
        assert torch.equal(output, run.server.aggregator.store.model(torch.ones(1, 4)))


def test_a_run_that_fails_while_an_update_is_computed_drops_the_result(monkeypatch, updates, workers):
    run = Run(monkeypatch, updates)
    run.announce_all()
    reply = run.push(0)
    assert run.gate.reached.wait(TIMEOUT_S)
    answers(workers, *(partial(run.server.roster.on_disconnect, member, "gone") for member in run.members))
    run.server.run.fail(RemoteError("PeerLost", "all are lost").error())
    assert isinstance(reply.wait(), RemoteError)
    run.gate.opened.set()
    updates.close()
    assert run.server.aggregator.monitor.step == 0


def test_an_error_of_an_update_ends_the_run_whatever_it_is(monkeypatch, updates):
    run = Run(monkeypatch, updates)

    def leave(*args):
        raise SystemExit(5)

    monkeypatch.setattr(run.server.shard.updater, "step", leave)
    run.announce_all()
    reply = run.push(0).wait()
    assert isinstance(reply, RemoteError)
    assert "SystemExit: 5" in str(run.server.run.error)


# A shard server.


class ShardRun:
    """A shard server with all parameters."""

    def __init__(self, monkeypatch, updates, by_bucket=False, clipped=False):
        self.gate = Gate()
        task = SlowTask(self.gate, "by bucket" if by_bucket else "one")
        layout = FlatLayout.of(trainable_parameters(task.build_model()).items())
        shard = full_shard(layout)
        weights = [torch.zeros(size) for size in layout.sizes]
        assignment = ShardAssignment(shard, layout, weights, {}, 0, None, "", shard if by_bucket else None)
        config = Config(training=TrainingConfig(clip_grad_norm=1.0 if clipped else None))
        self.server = ShardServer(task, config, 1, assignment, 1, updates.submit)
        self.groups = get_hyperparameters(self.server.shard.updater.optimizer)
        if by_bucket:
            compute = self.server.shard.pipeline.updates.compute
            monkeypatch.setattr(
                self.server.shard.pipeline.updates, "compute", lambda *args: (self.gate.wait(), compute(*args))[1]
            )

    def push(self, index, version=0, sequence=1):
        push = PushId(index, 1, 1, sequence)
        self.server.report_push(push, version)
        send_gradients(self.server, self.server.shard.leaves, push, version)
        return push

    def request(self, version, *pushes, retained=()):
        named = tuple((push, None) for push in pushes)
        return ApplyRequest(version, named, (1.0,) * len(named), None, self.groups, frozenset(retained))


@pytest.mark.parametrize("clipped", [False, True])
def test_no_handler_of_a_shard_server_waits_for_an_update(monkeypatch, updates, workers, clipped):
    run = ShardRun(monkeypatch, updates, clipped=clipped)
    server = run.server
    reply = server.apply(run.request(1, run.push(0), retained=(0,)))
    if clipped:
        norm = reply.wait()
        assert float(norm) > 0
        reply = server.apply_clipped(norm)
    assert run.gate.reached.wait(TIMEOUT_S)
    senders = [TrainerId(index, 1, 1) for index in range(1, TRAINERS)]
    views = answers(workers, *(partial(server.view_version, sender, 0) for sender in senders))
    assert all(torch.equal(flats[0], torch.zeros_like(flats[0])) for flats in views)
    pulled = answers(workers, *(partial(server.pull, sender, 0) for sender in senders))
    assert all(torch.equal(flats[0].detach(), torch.zeros_like(flats[0])) for flats in pulled)
    pushes = answers(workers, *(partial(run.push, sender.trainer_index) for sender in senders))
    assert not reply.done()
    run.gate.opened.set()
    assert reply.wait() is None
    assert server.shard.version == 1
    following = server.apply(run.request(2, pushes[0]))
    if clipped:
        following = server.apply_clipped(following.wait())
    assert following.wait() is None


def test_no_handler_of_a_shard_server_waits_while_buckets_are_computed_in_advance(monkeypatch, updates, workers):
    run = ShardRun(monkeypatch, updates, by_bucket=True)
    server = run.server
    prepared = server.begin_update(0, (0, 1), run.groups)
    pushes = answers(workers, partial(run.push, 0), partial(run.push, 1))
    assert run.gate.reached.wait(TIMEOUT_S)
    senders = [TrainerId(index, 1, 1) for index in range(2, TRAINERS)]
    answers(workers, *(partial(server.pull, sender, 0) for sender in senders))
    assert not prepared.done()
    run.gate.opened.set()
    assert set(prepared.wait()) == set(pushes)
    # Server 0 may have granted the version by then; a message for it is enough.
    server.view_version(senders[0], 1)
    assert server.shard.version == 1
    assert server.apply(run.request(1, *pushes)).wait() is None


def test_a_request_that_overtakes_what_is_computed_in_advance_makes_the_same_version(monkeypatch, updates):
    run = ShardRun(monkeypatch, updates, by_bucket=True)
    server = run.server
    prepared = server.begin_update(0, (0,), run.groups)
    push = run.push(0)
    assert run.gate.reached.wait(TIMEOUT_S)
    reply = server.apply(run.request(1, push))
    assert prepared.wait() is None
    assert not reply.done()
    run.gate.opened.set()
    assert reply.wait() is None
    assert server.shard.version == 1
    assert float(server.shard.updater.ranges[0][0]) == -1.0


def test_an_error_of_an_update_of_a_shard_server_is_its_reply(monkeypatch, updates):
    run = ShardRun(monkeypatch, updates)

    def leave(*args):
        raise SystemExit(5)

    monkeypatch.setattr(run.server.shard.updater, "step", leave)
    reply = run.server.apply(run.request(1, run.push(0))).wait()
    assert isinstance(reply, RemoteError)
    assert "server 1 raised SystemExit: 5" in reply.message

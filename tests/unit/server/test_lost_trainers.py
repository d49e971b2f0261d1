"""What servers do when trainers are lost: the real server 0 and one shard server, with calls in this process."""

import gc
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from servers import NoNetwork, SumOfOutputs, no_checkpoints, send_gradients

from paramserver.buffers.positions import AppliedPositions
from paramserver.config import CheckpointConfig, ClusterConfig, Config, ServerConfig, TrainingConfig
from paramserver.config.schema import BestConfig
from paramserver.consistency import Announcement, Decision, PushId, Readiness, TrainerId, Verdict
from paramserver.context import StopRequest
from paramserver.distributed.membership import Member
from paramserver.distributed.rpc_calls import RemoteError, completed_future
from paramserver.errors import Evicted, GenerationChanged, RunEnded
from paramserver.metrics.records import DurationHistogram, StepReport, TrainerTotals, WeightedSums
from paramserver.metrics.summary import totals_of
from paramserver.runs.losses import LossLog
from paramserver.runs.monitor import RunMonitor
from paramserver.server.build import build_server
from paramserver.server.shard_server import ShardServer
from paramserver.transport.messages import DataPosition, Push
from paramserver.transport.segments import SegmentHost, attach
from paramserver.transport.shared_memory import gradients_key, parameters_key

READY = Announcement(Readiness.READY)
TIMEOUT_S = 20.0


def reply_of(handler, *arguments):
    """Call a handler as RPC does: what it raises is the value of the future."""
    try:
        return handler(*arguments)
    except Exception as error:  # noqa: BLE001 - as there
        return completed_future(RemoteError.of(error))


class ToShard(NoNetwork):
    """Server 0 reaches server 1 when the test delivers its calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def send(self, name, timeout_s, handler, *arguments):
        self.released.append((name, *arguments))

    def send_deferred(self, name, handler, *arguments):
        future = torch.futures.Future()
        self.calls.append((future, handler, arguments))
        return future


class TwoServers:
    """Server 0 and server 1 for two trainers. Calls of server 0 to the other one are made by ``deliver``."""

    def __init__(self, segments, consistency="sync", transport="shared_memory", best=None):
        self.lost, self.records, self.network = [], [], ToShard()
        self.on_lost = self.lost.append
        config = Config(
            mode="rpc",
            cluster=ClusterConfig(num_trainers=2, num_servers=2, timeout_s=TIMEOUT_S),
            server=ServerConfig(consistency=consistency, transport=transport, lost_after_s=5.0),
            training=TrainingConfig(max_steps=10),
            checkpoint=CheckpointConfig(best=best),
        )
        monitor = RunMonitor(config, SimpleNamespace(write=self.records.append), Path())
        task, checkpoints = SumOfOutputs(4, 4, 4), no_checkpoints(monitor)
        self.server = build_server(
            task,
            config,
            2,
            checkpoints,
            StopRequest(),
            segments,
            lambda member: self.on_lost(member),
            network=self.network,
        )
        self.coordinator = self.server.roster.coordinator
        assignment = self.coordinator.join(Member(1, "server1", 1, "here", kind="server"))
        self.shard = ShardServer(task, config, 1, assignment)
        self.coordinator.shard_ready(1, self.shard.shares_memory)
        self.workers = 0

    def deliver(self):
        """Make the calls of server 0 to server 1."""
        calls, self.network.calls = self.network.calls, []
        for future, handler, arguments in calls:
            future.set_result(reply_of(handler, self.shard, *arguments).value())

    def join(self, index):
        self.workers += 1
        member = Member(index, f"trainer{index}_{self.workers}", self.workers, f"here, process {self.workers}")
        self.server.join(member, 8)
        return member

    def start(self, shares=(True, True)):
        """Let both trainers join; return them and their ids."""
        members = [self.join(index) for index in (0, 1)]
        return members, [self.connect(*one) for one in zip(members, shares, strict=True)]

    def connect(self, member, shares=True, **counters):
        """Do what a trainer does between joining and its first announcement."""
        sender = TrainerId(member.index, 1, member.incarnation)
        if shares:
            assert self.server.share_segments(sender)
        self.server.report_source(sender, DataPosition({}, AppliedPositions().state_dict(), counters))
        return sender

    def lose(self, member):
        self.server.roster.on_disconnect(member, "its connection was closed")

    def push(self, sender, gradient, version=0, sequence=1):
        """Push in shared memory."""
        address, layout = self.server.shared_memory.address, self.server.aggregator.store.parameters.layout
        key = gradients_key(sender.trainer_index, sender.incarnation)
        for flat in attach(address, key, layout, TIMEOUT_S):
            flat.fill_(gradient)
        report = StepReport(sender.trainer_index, version, 1, 0.5, 0.0, None, [0])
        return self.server.push(Push(PushId(sender.trainer_index, 1, sender.incarnation, sequence), report))


@pytest.fixture(autouse=True)
def _no_memory_left():
    """The memory of a server ends with its cycles of references, and other tests count what is mapped."""
    yield
    gc.collect()


@pytest.fixture
def segments():
    with SegmentHost("test", TIMEOUT_S) as host:
        yield host


def test_a_shard_server_can_attach_the_gradients_of_a_trainer_that_was_replaced_since(segments):
    """Its push is complete, but the update waits for the other trainer; until then nothing had to be attached."""
    run = TwoServers(segments)
    members, senders = run.start()
    before = [flat.clone() for flat in run.server.aggregator.store.parameters.flats]
    for sender in senders:
        run.server.announce(sender, READY)
    run.push(senders[1], gradient=4.0)
    run.lose(members[1])
    replacement = run.join(1)
    run.connect(replacement)
    run.push(senders[0], gradient=2.0)
    run.deliver()
    assert run.server.run.error is None
    assert run.server.aggregator.monitor.step == 1
    for flat, old in zip(run.server.aggregator.store.parameters.flats, before, strict=True):
        assert torch.allclose(flat, old - 3.0)
    # The segment is released when a later process joins, so that there are at most two of a trainer.
    run.lose(replacement)
    run.connect(run.join(1))
    assert sorted(key for key in segments._segments if key.startswith("gradients/1")) == [gradients_key(1, 3)]


def test_a_snapshot_for_a_trainer_that_joins_during_an_update_is_not_that_of_the_next_version(segments):
    """Server 0 has applied its shard and the other one has not."""
    run = TwoServers(segments, consistency="async")
    (_, member), (first, _) = run.start()
    run.server.announce(first, READY)
    run.push(first, gradient=1.0)
    run.lose(member)
    joining = run.connect(run.join(1))
    assert run.network.calls, "the update is in progress"
    run.server.view_version(joining, None)
    run.deliver()
    assert run.server.aggregator.monitor.step == 1
    slot = run.server.announce(joining, READY).value().slot
    address, parameters = run.server.shared_memory.address, run.server.aggregator.store.parameters
    snapshots = attach(address, parameters_key(slot), parameters.layout, TIMEOUT_S)
    for snapshot, flat in zip(snapshots, parameters.flats, strict=True):
        assert torch.equal(snapshot, flat)


def test_a_trainer_whose_gradients_were_sent_is_not_continued_without_while_others_share_memory(segments):
    """They may have reached server 0 alone; the update would wait for them on the other one."""
    run = TwoServers(segments, transport="auto")
    (_, member), senders = run.start(shares=(True, False))
    for sender in senders:
        run.server.announce(sender, READY)
    report = StepReport(1, 0, 1, 0.5, 0.0, None, [0])
    run.server.push(Push(PushId(1, 1, member.incarnation, 1), report))
    send_gradients(run.server, run.server.shard.leaves, senders[1], 0)
    assert run.server.aggregator.ledger[1].accepted == 1
    run.lose(member)
    assert isinstance(run.server.run.error, GenerationChanged)


def test_the_last_trainer_is_not_continued_without_either(segments):
    """The one in its place was granted nothing: an update in progress waited for gradients that nobody sends."""
    run = TwoServers(segments, transport="auto")
    (other, member), senders = run.start(shares=(True, False))
    for sender in senders:
        run.server.announce(sender, READY)
    run.server.push(Push(PushId(1, 1, member.incarnation, 1), StepReport(1, 0, 1, 0.5, 0.0, None, [0])))
    send_gradients(run.server, run.server.shard.leaves, senders[1], 0)
    run.lose(other)
    assert run.server.run.error is None
    assert run.server.aggregator.ledger[1].accepted == 1
    run.lose(member)
    assert isinstance(run.server.run.error, GenerationChanged)
    for future, *_ in run.network.calls:  # one that never ends would keep the server
        future.set_exception(RuntimeError("the session has ended"))


def test_a_process_takes_the_place_of_a_lost_trainer_after_the_loss_was_reported(segments):
    """Otherwise its claim of the rank, and what it told the simulations, would be undone."""
    run = TwoServers(segments)
    (_, member), _ = run.start()
    reporting, finish = threading.Event(), threading.Event()

    def report(lost):
        reporting.set()
        assert finish.wait(TIMEOUT_S)
        run.lost.append(lost)

    run.on_lost = report
    losing = threading.Thread(target=run.lose, args=(member,))
    joined = []
    joining = threading.Thread(target=lambda: joined.append((run.join(1), list(run.lost))))
    losing.start()
    assert reporting.wait(TIMEOUT_S)
    joining.start()
    joining.join(0.2)
    assert joining.is_alive()
    finish.set()
    for thread in (losing, joining):
        thread.join(TIMEOUT_S)
    assert [lost for _, lost in joined] == [[member]]
    kinds = [record["kind"] for record in run.records if record["kind"] in ("lost", "joined")]
    assert kinds == ["lost", "joined"]


@pytest.mark.parametrize("is_best", [True, False])
def test_those_that_take_the_places_of_all_trainers_save_the_version_whose_validation_was_the_best(segments, is_best):
    """All were lost after the validation, and before its checkpoint; no later validation may be better."""
    run = TwoServers(segments, best=BestConfig(metric="loss", mode="min"))
    members, senders = run.start()

    def validate(version, loss):
        shares = {sender: WeightedSums({"loss": loss}, {"loss": 1}, 1) for sender in senders}
        replies = [run.server.report_validation(s, version, {s.trainer_index: own}) for s, own in shares.items()]
        return [reply.wait().improved for reply in replies]

    for sender in senders:
        run.server.announce(sender, READY)
    assert validate(3, 0.5) == [True, True]
    assert validate(6, 0.1 if is_best else 0.9) == [is_best, is_best]
    for member in members:
        run.lose(member)
    senders = [run.connect(run.join(index)) for index in (0, 1)]
    assert validate(6, 0.1 if is_best else 0.9) == [is_best, is_best]
    assert run.server.aggregator.monitor.best.step == (6 if is_best else 3)


def test_the_context_of_a_process_is_released_on_all_servers_when_it_is_dead_and_not_when_it_is_silent(
    segments,
):
    run = TwoServers(segments, transport="auto")
    released = run.network.released
    (_, member), senders = run.start(shares=(True, False))  # in shared memory there is no pull
    for sender in senders:
        run.server.announce(sender, READY)
    run.server.pull(senders[1], 0)
    run.server.roster.lose(member, "no heartbeat")
    run.connect(run.join(1))
    assert released == []
    run.lose(member)
    assert released == [("server 0", 7), ("server1", 7)]


def test_a_trainer_that_joined_too_late_to_take_part_is_not_waited_for(segments):
    run = TwoServers(segments)
    (_, lost), (first, _) = run.start()
    run.lose(lost)
    late = run.join(1)
    run.server.aggregator.ended = True
    run.server.aggregator.rules.participants = {0}
    with pytest.raises(RunEnded):
        run.server.announce(run.connect(late), READY)
    run.server.roster.on_disconnect(late, None)
    assert [member.index for member in run.server.roster.members.present()] == [0]
    assert not run.server.run.finished.is_set()
    run.server.leave(first, TrainerTotals(0), Decision(Verdict.END, (), 0, 0))
    assert run.server.run.finished.is_set()


def test_a_process_in_the_place_of_a_lost_trainer_counts_on_from_what_that_one_reported(segments):
    """Where a run resumes from a checkpoint of another mode, the ledger has no pushes of before."""
    run = TwoServers(segments)
    members = [run.join(index) for index in (0, 1)]
    counters = {"batch_idx": 20, "samples_served": 80, "inner_steps": 5}
    senders = [run.connect(member, **counters) for member in members]
    for sender in senders:
        run.server.announce(sender, READY)
    run.push(senders[1], gradient=4.0)
    run.lose(members[1])
    counted = {"batch_idx": 21, "samples_served": 81, "inner_steps": 5}
    roster = run.server.roster
    for counters in (roster.sources.position_of(1).counters, roster.sources.substitute_parts()[1]["counters"]):
        assert counters.items() >= counted.items()
    totals = roster.all_totals()[1]
    assert (totals.samples, totals.inner_steps) == (81, 5)


def test_of_a_trainer_that_is_lost_at_the_end_the_summary_has_what_the_ledger_knows_and_no_other_figure(segments):
    run = TwoServers(segments)
    (_, lost), (first, _) = run.start()
    steps = DurationHistogram()
    steps.add(0.5)
    reported = TrainerTotals(
        0, samples=40, samples_before=8, inner_steps=5, steps=steps, peak_rss_mb=9.0, wire_bytes=512, threads=2
    )
    row = run.server.aggregator.ledger[lost.index]
    row.samples, row.inner_steps = 24, 3
    run.lose(lost)
    run.server.leave(first, reported, Decision(Verdict.END, (), 0, 0))
    summary = totals_of(run.server.roster.all_totals())
    assert (summary["samples_served"], summary["inner_steps"]) == (64, 8)
    assert (summary["wire_bytes_per_step"], summary["wire_bytes_per_sample"]) == (512, 16)
    ours, its = summary["trainers"]
    assert None not in (ours["threads"], ours["peak_rss_mb"])
    assert {name: value for name, value in its.items() if value is not None} == {
        "trainer": 1,
        "samples": 24,
        "inner_steps": 3,
    }


def test_the_loss_of_a_server_is_named_once_with_what_follows(segments, tmp_path):
    """Two threads may find out: one by the reply to a call, and one by the connection."""
    run = TwoServers(segments)
    run.start()
    log = LossLog(tmp_path / "losses.json")
    log.begin(1, [2, 3])
    run.server.aggregator.monitor.losses = log
    for _ in range(2):
        run.coordinator.unreachable(1, RuntimeError("reset by peer"))
    run.server.roster.reconnect("rank 2 could not connect")
    assert isinstance(run.server.run.error, GenerationChanged)
    LossLog(tmp_path / "losses.json").return_to(step=0, furthest_step=3, generation=2, trainer_ranks=[2, 3])
    (fault,) = LossLog(tmp_path / "losses.json").faults
    lost = "server 1 (here) is lost: its connection was closed (reset by peer)"
    assert fault["text"] == f"{lost}; all processes return to step 0"


# Processes that join as one trainer.


class MeetingLock:
    """A lock whose first two users wait for each other before they take it; the thread named ``first`` is first."""

    def __init__(self, lock, first):
        self._lock, self._first = lock, first
        self._meeting, self._left, self._met = threading.Barrier(2), threading.Event(), threading.local()

    def __enter__(self):
        if not hasattr(self._met, "once"):
            self._met.once = True
            self._meeting.wait(TIMEOUT_S)
            if threading.current_thread().name != self._first:
                assert self._left.wait(TIMEOUT_S)
        return self._lock.__enter__()

    def __exit__(self, *exception):
        self._lock.__exit__(*exception)
        self._left.set()


@pytest.mark.claim("one-join")
@pytest.mark.parametrize("first", ["older", "newer"])
def test_of_two_processes_that_join_as_one_trainer_at_once_the_newer_one_trains(segments, first):
    """Both have found the place free when the first of them takes it. The other one gets an error at once."""
    run = TwoServers(segments)
    server, replies = run.server, {}
    members = {name: Member(0, f"trainer0_{n}", n, f"here, {n}") for n, name in enumerate(("older", "newer"), 10)}
    lock, server.roster._loss_lock = server.roster._loss_lock, MeetingLock(server.roster._loss_lock, first)
    threads = [
        threading.Thread(target=lambda own=own: replies.update({own: reply_of(server.join, members[own], 8)}), name=own)
        for own in members
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    server.roster._loss_lock = lock
    assert [member for member in server.roster.members.present() if member.index == 0] == [members["newer"]]
    refused = replies["older"].value()
    assert isinstance(refused, RemoteError)
    assert isinstance(refused.error(), Evicted)
    assert not replies["newer"].done()
    senders = [run.connect(member) for member in (run.join(1), members["newer"])]
    assert replies["newer"].value().incarnation == members["newer"].incarnation
    granted = [server.announce(sender, READY) for sender in senders]
    assert [grant.value().decision.verdict for grant in granted] == [Verdict.GO, Verdict.GO]
    assert server.run.error is None

"""When rank 0 carries out that trainers join or leave: with the real server 0, and without other processes."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from servers import NoNetwork, SumOfOutputs, no_checkpoints
from torch._C._distributed_c10d import HashStore

from paramserver.buffers.positions import AppliedPositions
from paramserver.config import ClusterConfig, Config, ServerConfig, TrainingConfig
from paramserver.config.schema import BufferConfig
from paramserver.consistency import Announcement, Readiness, TrainerId, Verdict
from paramserver.context import StopRequest
from paramserver.distributed.membership import Member
from paramserver.distributed.resize import ResizeRequest, pending_requests, refusal, send_request
from paramserver.runs.monitor import RunMonitor
from paramserver.runtime.rank import _resize
from paramserver.server.build import build_server
from paramserver.transport.messages import DataPosition

JOIN, LEAVE = ResizeRequest("join", 3), ResizeRequest("leave", 1)


class Run:
    """Server 0 and its two trainers, ranks 1 and 2, with sources that can be divided."""

    def __init__(self, refetchable, backup_trainers=0, **buffer):
        config = Config(
            mode="rpc",
            cluster=ClusterConfig(num_trainers=2, elastic=True),
            server=ServerConfig(consistency="sync", backup_trainers=backup_trainers),
            training=TrainingConfig(max_steps=10),
            buffer=BufferConfig(**buffer),
        )
        self.records = []
        monitor = RunMonitor(config, SimpleNamespace(write=self.records.append), Path())
        task, checkpoints = SumOfOutputs(4, 4), no_checkpoints(monitor)
        self.later_s = 0.0
        self.server = build_server(
            task,
            config,
            2,
            checkpoints,
            StopRequest(),
            network=NoNetwork(),
            clock=lambda: time.monotonic() + self.later_s,
        )
        self.refetchable, self.workers = refetchable, 0
        self.process = SimpleNamespace(config=config, stop=StopRequest())
        self.rendezvous = SimpleNamespace(root=HashStore(), trainer_ranks=(1, 2))
        self.session = SimpleNamespace(next_resize=None)
        self.members = [self.join(index) for index in (0, 1)]
        for member in self.members:
            self.report_source(member)

    def join(self, index):
        self.workers += 1
        member = Member(index, f"trainer{index}_{self.workers}", self.workers, f"here, process {self.workers}")
        self.server.join(member, 8)
        return member

    def report_source(self, member):
        applied = AppliedPositions().state_dict()
        self.server.report_source(
            TrainerId(member.index, 1, member.incarnation),
            DataPosition({}, applied, can_reshard=True, refetchable=self.refetchable),
        )

    def ask(self, *requests):
        """Send requests and let rank 0 look at them; return the answers."""
        keys = [send_request(self.rendezvous.root, request) for request in requests]
        self.look()
        return [refusal(self.rendezvous.root, key) for key in keys]

    def look(self):
        _resize(self.server, self.process, self.rendezvous, self.session, set())

    @property
    def wanted(self):
        return None if self.session.next_resize is None else self.session.next_resize.trainer_ranks


@pytest.mark.parametrize(
    ("refetchable", "buffer", "leaves"),
    [
        (True, {}, True),
        (True, {"kind": "reservoir"}, True),
        (True, {"kind": "firo", "pseudo_epochs": 2}, True),
        (True, {"max_bytes": 1000}, True),
        (True, {"kind": "firo", "pseudo_epochs": 2, "max_bytes": 1000}, False),
        (True, {"kind": "reservoir", "max_bytes": 1000}, False),
        (False, {}, False),
        (False, {"kind": "reservoir"}, False),
    ],
)
def test_a_trainer_leaves_only_if_the_buffers_of_the_others_have_room(refetchable, buffer, leaves):
    run = Run(refetchable, **buffer)
    (answer,) = run.ask(LEAVE)
    if leaves:
        assert (answer, run.wanted) == (None, (2,))
    else:
        assert "may have no room for the samples that must stay" in answer
        assert run.wanted is None


def test_a_trainer_leaves_while_another_joins():
    run = Run(refetchable=False)
    assert run.ask(LEAVE, JOIN) == [None, None]
    assert run.wanted == (2, 3)


def test_a_trainer_joins_though_another_may_not_leave():
    run = Run(refetchable=False)
    leaves = [LEAVE, ResizeRequest("leave", 2)]
    answers = run.ask(JOIN, *leaves)
    assert answers[0] is None
    assert all("no room" in answer for answer in answers[1:])
    assert run.wanted == (1, 2, 3)


def test_more_trainers_than_backups_remain():
    run = Run(True, backup_trainers=1)
    (refused,) = run.ask(ResizeRequest("leave", 1))
    assert refused == (
        "server.backup_trainers (1) must be less than the trainers that remain (1); let as many join as leave"
    )
    assert run.wanted is None
    assert run.ask(ResizeRequest("leave", 1), ResizeRequest("join", 3)) == [None, None]
    assert run.wanted == (2, 3)


def test_all_trainers_may_leave():
    run = Run(refetchable=False)
    run.ask(LEAVE, ResizeRequest("leave", 2))
    assert run.process.stop.event.is_set()


@pytest.mark.parametrize("refetchable", [False, True])
def test_a_join_waits_until_the_replacement_of_a_lost_trainer_has_caught_up(refetchable):
    """Its samples are in its buffer only, unless they can be fetched again."""
    run = Run(refetchable)
    row = run.server.aggregator.ledger[1]
    row.positions.add([0, 5], 1)
    run.server.roster.on_disconnect(run.members[1], "its connection was closed")
    assert run.server.roster.missing_trainers() == [1]
    assert run.ask(JOIN) == [None]
    assert run.wanted == ((1, 2, 3) if refetchable else None)
    if refetchable:
        return
    run.join(1)
    run.look()
    assert run.wanted is None  # it has read nothing yet
    row.positions.add([1, 2, 3, 4], 1)
    run.look()
    assert run.wanted == (1, 2, 3)
    assert len(pending_requests(run.rendezvous.root)) == 1  # until the generation begins


def test_a_join_is_refused_after_a_lost_trainer_was_given_up():
    run = Run(refetchable=False)
    run.server.roster.on_disconnect(run.members[1], "its connection was closed")
    run.server.roster.check_absences()
    run.later_s = 1e6
    assert run.server.roster.check_absences() == set()
    assert "cannot be divided" in run.ask(JOIN)[0]
    assert run.wanted is None


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_whose_simulations_would_wait_for_a_trainer_that_is_given_up_ends(finished):
    run = Run(refetchable=False)
    aggregator, roster = run.server.aggregator, run.server.roster
    roster._checkpoints.simulations = SimpleNamespace(finished=finished)
    roster.on_disconnect(run.members[1], "its connection was closed")
    roster.check_absences()
    run.later_s = 1e6
    roster.check_absences()
    text = "no process took the place of trainer 1 within cluster.timeout_s"
    assert aggregator.stop.event.is_set() is not finished
    if finished:
        assert any(text in record.get("text", "") for record in run.records)
        return
    sender = TrainerId(0, 1, run.members[0].incarnation)
    decision = run.server.announce(sender, Announcement(Readiness.WAITING)).value().decision
    assert (decision.verdict, decision.interrupted) == (Verdict.END, True)
    assert decision.reason.startswith(text)

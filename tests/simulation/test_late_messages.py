"""What the simulation found, as short cases: messages that are late, and trainers that join when others are done."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from paramserver.buffers.positions import AppliedPositions
from paramserver.consistency import Announcement, PushId, Readiness, Sync, TrainerId, Verdict
from paramserver.distributed.membership import HeartbeatReport, Member
from paramserver.distributed.rpc_calls import RemoteError
from paramserver.errors import Evicted, GenerationChanged, PeerLost, RunEnded, TrainingError
from paramserver.metrics.records import StepReport, TrainerTotals, WeightedSums
from paramserver.transport.autograd import push_root
from paramserver.transport.messages import DataPosition, Push, ValidationReply
from tests.simulation import simulation
from tests.simulation.node import make_gradient, push_key
from tests.simulation.simulation import Scenario, World

READY = Announcement(Readiness.READY)
AT_START = DataPosition({}, AppliedPositions().state_dict())


class Two:
    """A server for two trainers, and the calls of one trainer in a row."""

    def __init__(self, on_loss="continue", max_steps=1, consistency="sync", validate_every=0):
        self.world = World(0)
        config = self.world.scenario.config
        config = replace(
            config,
            cluster=replace(config.cluster, num_trainers=2),
            server=replace(config.server, consistency=consistency, backup_trainers=0, on_loss=on_loss),
            training=replace(
                config.training,
                max_steps=max_steps,
                validate_every=validate_every,
                max_epochs=1,
                uneven_inputs="join",
            ),
            checkpoint=replace(config.checkpoint, every=0, best=None),
            buffer=replace(config.buffer, pseudo_epochs=1),
        )
        self.world.scenario = Scenario(config, (4, 4), {}, 0.0, 0.0, 0.0, False, False, update_s=0.0)
        self.world.submit = lambda node, job: job()  # updates take no time, so replies are there at once
        self.world.processes = [self.world.make_process(index) for index in range(2)]
        self.world.start_server()
        self.server = self.world.server
        self.workers = 0

    def join(self, index, generation=1):
        self.workers += 1
        member = Member(index, f"trainer{index}_{self.workers}", self.workers, "here", generation=generation)
        return member, self.server.join(member, 8)

    def start(self):
        members = [self.join(0)[0], self.join(1)[0]]
        ids = [TrainerId(index, 1, member.incarnation) for index, member in enumerate(members)]
        for sender in ids:
            self.server.report_source(sender, AT_START)
        return members, ids

    def push(self, sender, positions, announcement=None, version=0, sequence=1):
        report = StepReport(sender.trainer_index, version, len(positions), 0.5, 0.0, None, positions)
        push = PushId(sender.trainer_index, 1, sender.incarnation, sequence)
        reply = self.server.push(Push(push, report, None, announcement))
        gradient, pulled = make_gradient(push_key(push)), self.server.pull(push, version)
        self.server.receive_bucket(push, version, 1, gradient)
        push_root([gradient], pulled[:1]).backward()
        return reply

    def lose(self, member):
        self.server.roster.on_disconnect(member, "its connection was closed")

    def step(self, ids):
        granted = [self.server.announce(sender, READY) for sender in ids]
        assert all(future.value().decision.verdict is Verdict.GO for future in granted)
        pushed = [self.push(sender, [0]) for sender in ids]
        assert all(future.value().result.step == 1 for future in pushed)

    def end(self, ids):
        """Announce the next step, validate and stage as far as it goes; return the replies."""
        ends = [self.server.announce(sender, READY) for sender in ids]
        assert all(future.value().decision.verdict is Verdict.END for future in ends)
        return ends[0].value().decision


def chunk():
    return torch.from_numpy(np.zeros(4, np.uint8))


def test_calls_of_a_process_that_was_replaced_are_refused():
    run = Two()
    (lost, _), _ = run.start()
    run.lose(lost)
    late = TrainerId(0, 1, lost.incarnation)
    calls = {
        "announce": (READY,),
        "pull": (0,),
        "wait_version": (1,),
        "view_version": (None,),
        "report_validation": (0, {0: WeightedSums()}),
        "stage_checkpoint": ("periodic",),
        "receive_part_chunk": (0, chunk()),
        "finish_part": (0, 0.1),
        "leave": (TrainerTotals(0), None),
        "report_source": (AT_START,),
    }
    for joined_again in (False, True):
        for name, arguments in calls.items():
            with pytest.raises(Evicted, match="trainer 0 was taken for lost"):
                getattr(run.server, name)(late, *arguments)
        if not joined_again:
            member, reply = run.join(0)
            assert reply.value().incarnation == 2
            assert member.incarnation == 2
    assert run.server.run.error is None
    assert run.server.announce(TrainerId(0, 1, 2), READY).done() is False


def test_a_request_to_join_that_is_late_does_not_evict_the_process_that_has_joined():
    run = Two()
    late = Member(0, "trainer0_0", 0, "here")
    (member, _), _ = run.start()
    for stale in (late, Member(0, "trainer0_9", 9, "here", generation=7)):
        with pytest.raises(Evicted, match="too late"):
            run.server.join(stale, 8)
    assert run.server.roster.members.get(0) is member


def test_a_report_of_the_source_that_arrives_twice_changes_nothing():
    run = Two(max_steps=None)
    _, ids = run.start()
    run.step(ids)
    run.server.report_source(ids[0], AT_START)
    assert run.server.aggregator.ledger[0].positions.low == 1


def test_an_announcement_that_was_overtaken_is_not_a_new_one():
    run = Two(max_steps=None)
    _, ids = run.start()
    for number in (1, 2):
        replies = [run.server.announce(sender, READY, number=number) for sender in ids]
        [run.push(sender, [number], version=number - 1, sequence=number) for sender in ids]
    run.server.announce(ids[0], READY, number=1)
    assert replies[0].value().decision.step == 1
    third = run.server.announce(ids[1], READY, number=3)
    assert not third.done()  # trainer 0 has not announced its third step


def test_an_announcement_that_is_sent_again_gets_the_same_grant_also_after_the_end():
    """Its reply was lost: the second message neither counts as another announcement nor finds that the run is over."""
    run = Two()
    _, ids = run.start()
    run.step(ids)
    ends = [run.server.announce(sender, READY, number=2) for sender in ids]
    assert ends[0].value().decision.verdict is Verdict.END
    assert run.server.announce(ids[0], READY, number=2) is ends[0]
    with pytest.raises(RunEnded):
        run.server.announce(ids[0], READY, number=3)
    assert run.server.run.error is None


def test_an_announcement_of_a_process_that_was_lost_is_not_the_reply_to_its_replacement():
    run = Two()
    members, ids = run.start()
    first = run.server.announce(ids[0], READY, number=1)
    assert run.server.announce(ids[0], READY, number=1) is first
    run.lose(members[0])
    assert isinstance(first.value(), RemoteError)
    member, _ = run.join(0)
    joined = TrainerId(0, 1, member.incarnation)
    run.server.report_source(joined, AT_START)
    assert not run.server.announce(joined, READY, number=1).done()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_call_that_is_sent_again_by_a_process_that_was_lost_is_refused(is_replaced):
    """Its first reply did not arrive: a grant, which holds no more."""
    run = Two(max_steps=None)
    members, ids = run.start()
    granted = [run.server.announce(sender, READY, number=1) for sender in ids]
    assert granted[0].value().decision.verdict is Verdict.GO
    run.lose(members[0])
    if is_replaced:
        run.join(0)
    with pytest.raises(Evicted):
        run.server.announce(ids[0], READY, number=1)


def test_a_view_that_was_overtaken_does_not_replace_the_version_that_was_granted():
    run = Two(max_steps=None)
    _, ids = run.start()
    for sender in ids:
        run.server.announce(sender, READY)
    with pytest.raises(TrainingError, match="trainer 0 was granted version 0 already"):
        run.server.view_version(ids[0], None)
    run.push(ids[0], [0])
    run.server.view_version(ids[0], None)


def test_a_wait_for_a_version_that_is_repeated_gets_the_reply_of_the_first():
    run = Two(max_steps=None)
    _, ids = run.start()
    replies = [run.server.announce(ids[0], READY), run.server.announce(ids[1], Announcement(Readiness.DRAINED))]
    assert all(future.value().decision.active == (0,) for future in replies)
    waiting, again = run.server.wait_version(ids[1], 1), run.server.wait_version(ids[1], 1)
    run.push(ids[0], [0])
    assert (waiting.value(), again.value()) == (1, 1)


def absent(run, seconds):
    run.world.now += seconds
    for member in run.server.roster.members.present():
        run.server.heartbeat(member.index, member.worker_id, HeartbeatReport())
    run.server.roster.check_absences()


def test_the_last_trainer_may_be_replaced_after_another_was_given_up():
    run = Two(max_steps=None)
    (gone, last), _ = run.start()
    run.lose(gone)
    absent(run, 0.0)
    absent(run, simulation.TIMEOUT_S + 1)
    assert run.server.roster._given_up == {0}
    run.lose(last)
    absent(run, 1.0)
    assert run.server.run.error is None
    member, _ = run.join(0)  # also the one that was given up, which is waited for again
    absent(run, 1.0)
    run.lose(member)
    absent(run, 1.0)
    assert run.server.roster._given_up == set()
    absent(run, simulation.TIMEOUT_S + 1)
    assert isinstance(run.server.run.error, PeerLost)


def test_a_run_whose_trainers_have_left_does_not_fail_for_one_that_was_given_up():
    run = Two()
    (gone, _), ids = run.start()
    run.step(ids)
    run.lose(gone)
    absent(run, 0.0)
    decision = run.end(ids[1:])
    run.server.report_validation(ids[1], 1, dict.fromkeys((0, 1), WeightedSums()))  # also that of the one that is gone
    run.server.stage_checkpoint(ids[1], "end")
    run.server.leave(ids[1], TrainerTotals(1), decision)
    absent(run, simulation.TIMEOUT_S + 1)
    assert run.server.run.finished.is_set()
    assert run.server.run.error is None


def test_a_trainer_that_joins_at_the_end_does_not_wait_for_those_that_have_validated_and_saved():
    run = Two()
    (_, lost), ids = run.start()
    run.step(ids)
    run.end(ids)
    validated = [run.server.report_validation(sender, 1, {sender.trainer_index: WeightedSums()}) for sender in ids]
    assert all(future.value() == ValidationReply() for future in validated)
    staged = [run.server.stage_checkpoint(sender, "end") for sender in ids]
    assert [future.value() for future in staged] == [True, True]
    run.lose(lost)
    joined, _ = run.join(1)
    sender = TrainerId(1, 1, joined.incarnation)
    with pytest.raises(RunEnded):
        run.server.announce(sender, READY)
    assert run.server.report_validation(sender, 1, {1: WeightedSums()}).value() == ValidationReply()
    assert run.server.stage_checkpoint(sender, "end").value() is False


def test_the_run_returns_to_its_checkpoint_if_it_is_not_known_where_the_data_of_a_lost_trainer_starts():
    run = Two()
    _, (lost, _) = run.join(0), run.join(1)
    run.lose(lost)
    assert isinstance(run.server.run.error, GenerationChanged)


def test_the_first_step_waits_for_a_trainer_that_was_lost_before_the_start():
    run = Two()
    lost, _ = run.join(0)
    run.lose(lost)
    _, waiting = run.join(1)
    assert not waiting.done()
    member, reply = run.join(0)
    assert reply.value().incarnation == member.incarnation == 2
    first = run.server.announce(TrainerId(1, 1, 1), READY)
    assert not first.done()
    run.server.announce(TrainerId(0, 1, 2), READY)
    assert first.value().decision.active == (0, 1)


@pytest.mark.parametrize("on_loss", ["continue", "rollback"])
def test_a_loss_after_the_first_trainer_has_left_makes_nothing_again(on_loss):
    run = Two(on_loss)
    (_, lost), ids = run.start()
    run.step(ids)
    decision = run.end(ids)
    for sender in ids:
        run.server.report_validation(sender, 1, {sender.trainer_index: WeightedSums()})
    for sender in ids:
        run.server.stage_checkpoint(sender, "end")
    run.server.leave(ids[0], TrainerTotals(0), decision)
    run.lose(lost)
    assert run.server.run.error is None
    assert run.server.run.finished.is_set()


def share(loss):
    sums = WeightedSums()
    sums.add({"loss": loss}, 1)
    return sums


def test_the_share_of_a_trainer_that_is_lost_in_the_last_validation_is_evaluated_by_another():
    run = Two()
    (_, lost), ids = run.start()
    run.step(ids)
    run.end(ids)
    reply = run.server.report_validation(ids[0], 1, {0: share(1.0)})
    assert not reply.done()
    run.lose(lost)
    assert reply.value() == ValidationReply(missing=(1,))
    assert run.server.aggregator.monitor.validation == {}
    assert run.server.report_validation(ids[0], 1, {1: share(4.0)}).value() == ValidationReply({"loss": 2.5})


def test_what_a_lost_trainer_has_reported_counts():
    run = Two()
    (_, lost), ids = run.start()
    run.step(ids)
    run.end(ids)
    run.server.report_validation(ids[1], 1, {1: share(4.0)})
    run.lose(lost)
    assert run.server.report_validation(ids[0], 1, {0: share(1.0)}).value() == ValidationReply({"loss": 2.5})


@pytest.mark.parametrize("remembers", [True, False])
def test_a_validation_that_the_last_trainer_leaves_undone_is_made_by_those_that_join(monkeypatch, remembers):
    """And a consistency model that does not remember it is noticed."""
    if not remembers:
        monkeypatch.setattr(Sync, "_is_due", property(lambda rules: False, lambda rules, value: None), raising=False)
    run = Two(max_steps=None, validate_every=1)
    members, ids = run.start()
    run.step(ids)
    for member in members:
        run.lose(member)
    joined = [run.join(index)[0] for index in (0, 1)]
    first = run.server.announce(TrainerId(0, 1, joined[0].incarnation), READY)
    assert first.value().decision.verdict is (Verdict.BARRIER if remembers else Verdict.GO)

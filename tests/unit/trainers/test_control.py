"""What trainers without servers agree on: shares of a validation, records, parts of a checkpoint, the end."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from paramserver.checkpoint import unpack
from paramserver.consistency import Announcement, Decision, Readiness, Stop, Verdict
from paramserver.context import StopRequest
from paramserver.distributed.control_channel import ControlMessage
from paramserver.errors import PeerLost, TaskError, TrainingError
from paramserver.metrics.records import WeightedSums
from paramserver.runs.checkpoint_manager import PartCollector, StagedCheckpoint
from paramserver.trainers.base import Step
from paramserver.trainers.control import ReplicaControl, sendable
from paramserver.trainers.ddp_control import PartGather

READY = Announcement(Readiness.READY)
WAIT_S = 20.0


class Monitor:
    """Keeps what rank 0 would record."""

    stop = Stop.LIMIT

    def __init__(self):
        self.records, self.validations, self.limit = [], [], None

    def record(self, record):
        self.records.append(record)

    def record_validation(self, step, sums, since):
        self.validations.append((step, sums.means(), since))
        return True

    def stop_reason(self, seconds):
        return self.limit if seconds >= 1.0 else None


class Checkpoints:
    """Keeps what rank 0 would write."""

    def __init__(self):
        self.monitor, self.written = Monitor(), []

    def stage(self, step, model, updater, reason, since):
        return StagedCheckpoint(step, {"model": model}, False, reason, since)

    def commit(self, staged, parts, pause_s):
        parts = {i: part if isinstance(part, dict) else unpack(b"".join(part)) for i, part in parts.items()}
        self.written.append((staged.step, staged.reason, parts, pause_s))


class Store:
    """The part of a rendezvous that is used here."""

    def __init__(self, store):
        self._store = store

    def set_first(self, key, value):
        return self._store.compare_set(key, "", value).decode()


class Ranks:
    """Exchanges values between controls that are called in threads, one for each rank."""

    def __init__(self, count):
        ranks, store = self, Store(HashStore())
        self.values, self.barrier = [None] * count, threading.Barrier(count, timeout=WAIT_S)

        class Exchanging(ReplicaControl):
            def exchange(self, value):
                ranks.values[self.trainer_index] = value
                ranks.barrier.wait()
                found = list(ranks.values)
                ranks.barrier.wait()
                return found

        self.controls = [Exchanging(process(i, count), None if i else Checkpoints(), store) for i in range(count)]

    def call(self, act):
        """Return what ``act(control)`` returned or raised on each rank."""
        results = [None] * len(self.controls)

        def run(control):
            try:
                results[control.trainer_index] = act(control)
            except TaskError as error:
                results[control.trainer_index] = error

        threads = [threading.Thread(target=run, args=(control,), name="peer-") for control in self.controls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        return results


def process(index, count):
    identity = SimpleNamespace(global_rank=index)
    names = {"role": f"trainer {index}", "trainer_index": index, "trainers": count}
    return SimpleNamespace(config=None, identity=identity, stop=StopRequest(), **names)


def sums_of(value, samples):
    sums = WeightedSums()
    sums.add({"loss": value}, samples)
    return sums


def alone():
    return ReplicaControl(process(0, 1), Checkpoints(), None)


def test_a_validation_is_the_mean_over_all_shares_and_all_learn_whether_it_is_the_best():
    ranks = Ranks(3)
    shares = [sums_of(1.0, 4), sums_of(2.0, 2), WeightedSums()]
    replies = ranks.call(lambda c: c.report_validation(7, {c.trainer_index: shares[c.trainer_index]}, 5))
    assert [(reply.means, reply.improved, reply.missing) for reply in replies] == [({"loss": 8 / 6}, True, ())] * 3
    assert ranks.controls[0].monitor.validations == [(7, {"loss": 8 / 6}, 5)]


def test_records_are_with_rank_0_in_the_order_of_ranks_once_they_are_collected():
    ranks = Ranks(2)
    for control in reversed(ranks.controls):
        control.record({"of": control.trainer_index})
    written = ranks.controls[0].monitor.records
    assert written == [{"of": 0}]  # the other one has kept its own
    ranks.call(lambda c: c.collect_records())
    assert written == [{"of": 0}, {"of": 1}]
    ranks.call(lambda c: c.collect_records())
    assert len(written) == 2


def test_the_last_records_and_the_totals_of_all_are_with_rank_0_at_the_end():
    ranks = Ranks(2)
    ranks.controls[1].record({"of": 1})
    ranks.call(lambda c: c.leave(f"totals of {c.trainer_index}", None))
    assert ranks.controls[0].monitor.records == [{"of": 1}]
    assert ranks.controls[0].all_totals == ["totals of 0", "totals of 1"]


def test_values_are_gathered_where_all_make_the_same_call():
    ranks = Ranks(2)
    assert ranks.call(lambda c: c.all_gather(c.trainer_index, (3, 1, 0, 0), None)) == [[0, 1]] * 2
    errors = ranks.call(lambda c: c.all_gather(0, (3, 1, 0, c.trainer_index), None))
    assert all("must be called at the same places by all trainers" in str(error) for error in errors)
    with pytest.raises(TaskError, match="a step in which a trainer has no data"):
        ranks.controls[0].all_gather(0, (3, 1, 1, 0), (0,))


def test_what_must_be_equal_is_compared_with_the_first_that_has_it():
    ranks = Ranks(2)
    for control in ranks.controls:
        control.check_equal("build_model", ["w"], "must be equal", "make it so")
    ranks.controls[0].check_equal("data", ["4 samples"], "must be equal", "make it so")
    sentence = r"^data must be equal: rank 0 \(trainer 0\) has 4 samples, and rank 1 \(trainer 1\) has 5; make it so$"
    with pytest.raises(TaskError, match=sentence):
        ranks.controls[1].check_equal("data", ["5"], "must be equal", "make it so")


def test_the_first_reason_to_stop_is_that_of_all():
    ranks = Ranks(2)
    first, second = ranks.controls
    assert first.with_stop(READY, 0.0) is READY
    first.request_stop("the accuracy is reached")
    second.request_stop("another one")
    for control in ranks.controls:
        stopping = control.with_stop(READY, 0.0)
        assert (stopping.readiness, stopping.stop) == (Readiness.READY, Stop.LIMIT)
        assert stopping.reason == "the accuracy is reached"
    first.process.stop.request("signal SIGTERM")
    assert first.with_stop(READY, 0.0).stop is Stop.SIGNAL


def test_a_limit_of_the_run_is_a_request_to_stop_of_rank_0():
    control = alone()
    control.monitor.limit = "training.max_seconds (1) reached"
    assert control.with_stop(READY, 0.9) is READY
    assert control.with_stop(READY, 1.0).reason == "training.max_seconds (1) reached"


def test_one_trainer_saves_its_own_part_at_once():
    control = alone()
    control.save(3, "model", "updater", "periodic", 0.0, {"task": {}, "own": 1})
    ((step, reason, parts, pause_s),) = control.checkpoints.written
    assert (step, reason, parts) == (3, "periodic", {0: {"task": {}, "own": 1}})
    assert pause_s > 0.0
    control.wait_saved()


def test_what_cannot_be_sent_is_refused_by_name():
    value = torch.ones(2, requires_grad=True)
    assert not sendable([value])[0].requires_grad
    with pytest.raises(TaskError, match=r"trainer.all_gather"):
        sendable(lambda: None)


def test_each_call_of_a_step_has_another_name():
    step = Step(Decision(Verdict.GO, (0, 1), 4, 0))
    calls = [step.next_gather()]  # before the batch, in which a trainer without data calls nothing
    step.in_batches = True
    calls += [step.next_gather(), step.next_gather()]
    step.in_batches = False
    calls.append(step.next_gather())
    assert calls == [(4, 1, 0, 0), (4, 1, 1, 0), (4, 1, 1, 1), (4, 1, 0, 1)]


# The parts of a checkpoint of several ranks.


class Channel:
    """One end of a channel in memory: what is sent is in ``sent``, and ``inbox`` is received."""

    def __init__(self, peers, inbox=()):
        self.peers, self.inbox, self.sent = peers, list(inbox), []

    def send(self, peer, kind, body=b""):
        self.sent.append((peer, kind, bytes(body)))

    def receive(self):
        if not self.inbox:
            raise PeerLost("rank 1 is lost")
        return self.inbox.pop(0)


def sent_part(rank, part, pause_s):
    """What a rank sends of its part, as rank 0 receives it."""
    answer = ControlMessage(0, 4, torch.empty(0, dtype=torch.uint8).numpy())
    channel = Channel((0,), [answer])
    PartGather(channel).send(part, pause_s)
    return [message_of(rank, kind, body) for _, kind, body in channel.sent]


def message_of(rank, kind, body=b""):
    return ControlMessage(rank, kind, torch.tensor(list(body), dtype=torch.uint8).numpy())


@pytest.fixture
def collecting():
    """Rank 0 of three that has staged step 6 and waits for the parts of the others."""
    checkpoints = Checkpoints()
    parts = PartCollector(checkpoints)
    parts.start(StagedCheckpoint(6, {}, False, "periodic", 0.0), {1, 2}, {0: {"task": {}, "of": 0}}, 0.25)
    return checkpoints, parts


def test_the_parts_of_all_ranks_make_a_checkpoint_and_each_rank_is_answered(collecting):
    checkpoints, parts = collecting
    inbox = [*sent_part(2, {"task": {}, "of": 2}, 0.5), *sent_part(1, {"task": {}, "of": 1}, 0.125)]
    channel = Channel((1, 2), inbox)
    PartGather(channel).receive(parts, 6)
    ((step, _, written, pause_s),) = checkpoints.written
    assert (step, pause_s) == (6, 0.5)
    assert {i: part["of"] for i, part in written.items()} == {0: 0, 1: 1, 2: 2}
    assert [(peer, kind) for peer, kind, _ in channel.sent] == [(1, 4), (2, 4)]


@pytest.mark.parametrize("end", [[], [message_of(1, 3)]], ids=["lost", "failed"])
def test_without_all_parts_nothing_is_written_and_each_rank_is_answered(collecting, end):
    checkpoints, parts = collecting
    channel = Channel((1, 2), [*sent_part(2, {"task": {}, "of": 2}, 0.5), *end])
    with pytest.raises(TrainingError):
        PartGather(channel).receive(parts, 6)
    assert checkpoints.written == []
    assert [(peer, kind) for peer, kind, _ in channel.sent] == [(1, 3), (2, 3)]


def test_a_rank_fails_if_rank_0_could_not_take_the_checkpoint():
    with pytest.raises(PeerLost, match="rank 0 could not take a checkpoint"):
        PartGather(Channel((0,), [message_of(0, 3)])).send({"task": {}}, 0.5)

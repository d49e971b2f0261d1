"""The aggregator: its loop, repeated messages, and what becomes of the calls of a trainer that is lost."""

import threading
from types import SimpleNamespace

import pytest
import torch

from paramserver.config import TrainingConfig
from paramserver.consistency import Announcement, Ledger, PushId, Readiness, Stop, Sync, Verdict
from paramserver.consistency.base import RunTerms
from paramserver.context import StopRequest
from paramserver.distributed.rpc_calls import RemoteError
from paramserver.errors import Evicted, RunEnded, TrainingError
from paramserver.limits import Limits
from paramserver.metrics import records
from paramserver.metrics.records import StepReport
from paramserver.optim.updater import Skipping
from paramserver.parameters.flat import FlatLayout
from paramserver.parameters.sharding import full_shard
from paramserver.server.aggregator import Aggregator
from paramserver.server.shard import ParameterShard
from paramserver.trainers import rpc
from paramserver.transport.autograd import push_root
from paramserver.transport.base import ServerTransport
from paramserver.transport.compression import CastCodec
from paramserver.transport.messages import ApplyRequest, Push
from paramserver.transport.rpc import RpcServerTransport

TWO_LEAVES = (2, 3)  # elements of the flat tensors that a trainer sends
READY = Announcement(Readiness.DRAINED)
WAITING = Announcement(Readiness.WAITING)


class Monitor:
    """The part of ``RunMonitor`` that the loop calls."""

    epoch_samples = None
    stop = Stop.LIMIT
    seconds = 0.0
    skipped = 0

    def stop_reason(self, seconds):
        return None


class Updates:
    """Makes updates at once, or when ``compute`` does."""

    def __init__(self, store, compute=lambda work, then: then(work())):
        self.store, self.compute = store, compute

    def apply(self, version, update, pushes, pulled, validated, on_applied, held):
        self.compute(lambda: self.store.apply(pushes), lambda _: on_applied())

    def begin(self, decision):
        pass


class OneFlat:
    """In the place of ``ShardUpdater``: parameters that nothing reads."""

    def __init__(self, *sizes):
        layout = FlatLayout.of([(str(size), torch.zeros(size)) for size in sizes], 1)
        self.shard, self.ranges = full_shard(layout), [torch.zeros(size) for size in sizes]
        self.leaves = [flat.clone().requires_grad_() for flat in self.ranges]

    def clone(self):
        return self.ranges


def make_shard(*sizes):
    return ParameterShard(OneFlat(*sizes), CastCodec(torch.float32), threading.RLock(), 0)


def make_aggregator():
    errors = []
    rules = Sync(RunTerms(1, Limits()))
    shard, updates = make_shard(1), Updates(None)
    return Aggregator(rules, Ledger(), None, shard, updates, Monitor(), StopRequest(), errors.append), errors


def test_an_announcement_made_while_grants_are_handed_out_is_processed():
    aggregator, errors = make_aggregator()
    nested = []
    future = torch.futures.Future()
    future.add_done_callback(lambda _: nested.append(aggregator.announce(0, WAITING)))
    aggregator._enqueue(0, WAITING, future)
    aggregator._process()
    assert future.done()
    assert [one.done() for one in nested] == [True]
    assert errors == []


def test_what_a_trainer_waits_for_its_data_before_it_announces_is_training_time(monkeypatch):
    now = SimpleNamespace(seconds=100.0, perf_counter=lambda: now.seconds)
    monkeypatch.setattr(records, "time", now)
    monkeypatch.setattr(rpc, "time", now)
    aggregator, _ = make_aggregator()

    def wait_for_data():
        now.seconds += 0.75
        return READY

    class AnnouncedError(Exception):
        """Ends the call: a step is not made."""

    def announce(announcement, buffers):
        aggregator.announce(0, announcement)
        raise AnnouncedError

    trainer = SimpleNamespace(
        _next_grant=None,
        announcement=wait_for_data,
        server=SimpleNamespace(announce=announce),
        model_copy=SimpleNamespace(changed_buffers=lambda: None),
    )
    with pytest.raises(AnnouncedError):
        rpc.RpcTrainer.agree(trainer)
    assert aggregator._clock.seconds == 0.75


def test_tasks_run_one_after_the_other_and_nothing_else_meanwhile():
    aggregator, errors = make_aggregator()
    order, releases = [], []
    aggregator.run_exclusively(lambda release: (order.append("first"), releases.append(release)))
    aggregator.run_exclusively(lambda release: (order.append("second"), release()))
    waiting = aggregator.announce(0, READY)
    assert order == ["first"]
    assert not waiting.done()
    releases.pop()()
    assert order == ["first", "second"]
    assert waiting.done()
    assert errors == []


def test_a_task_that_fails_ends_the_run_and_leaves_the_loop_usable():
    aggregator, errors = make_aggregator()

    def fail(release):
        raise ValueError("no")

    aggregator.run_exclusively(fail)
    assert [str(error) for error in errors] == ["no"]
    aggregator._release()
    assert aggregator.announce(0, READY).done()


# Pushes and lost trainers. All of it under Sync, in which the end of a step needs every live trainer.

GO = Announcement(Readiness.READY)


class StepMonitor(Monitor):
    """Records the updates that the loop reports."""

    def __init__(self):
        self.updates = []

    def gradients_applied(self, staleness):
        self.gradients = tuple(trainer for trainer, _ in staleness)

    def update_applied(self, result):
        self.updates.append((result.step, self.gradients))


class Store:
    """The parameters, of which only the pushes that were applied are kept."""

    retained = {}  # noqa: RUF012

    class updater:  # noqa: N801
        applied_lr = (0.1,)
        skipping = Skipping(TrainingConfig(nonfinite="skip"))

    def __init__(self):
        self.applied = []

    def apply(self, pushes):
        self.applied.append([(push.id.trainer_index, push.id.incarnation) for push in pushes])


class Transport(ServerTransport):
    """Gradients are complete with the report of their push if ``arrived`` is set, or when the shard accepts them."""

    sends_buffers = False

    def __init__(self, arrived=True):
        self.arrived, self.pinned = arrived, False

    def pin_version(self):
        self.pinned = True
        return 0

    def view_version(self):
        return 0, ()

    def collect_gradients(self):
        return [torch.ones(1)] if self.arrived else None

    def unpin(self):
        self.pinned = False


class Run:
    """An aggregator and its trainers, each with its first step granted."""

    def __init__(self, trainers=2, arrived=True, terms=None):
        self.errors, self.store, self.monitor, self.ledger = [], Store(), StepMonitor(), Ledger()
        self.shard, self.updates = make_shard(*TWO_LEAVES), Updates(self.store)
        self.aggregator = Aggregator(
            Sync(terms or RunTerms(trainers, Limits(), "join")),
            self.ledger,
            self.store,
            self.shard,
            self.updates,
            self.monitor,
            StopRequest(),
            self.errors.append,
        )
        for trainer in range(trainers):
            self.admit(trainer, arrived)
        granted = [self.announce(trainer) for trainer in range(trainers)]
        assert [verdict(future) for future in granted] == [Verdict.GO] * trainers

    def admit(self, trainer, arrived=True):
        self.aggregator.transports[trainer] = Transport(arrived)
        return self.ledger.admit(trainer)

    def announce(self, trainer):
        return self.aggregator.announce(trainer, GO)

    def push(
        self, trainer, sequence=1, incarnation=1, version=None, announcement=None, has_gradients=False, generation=1
    ):
        version = self.aggregator.rules.step if version is None else version
        positions = [self.ledger[trainer].positions.low]
        report = StepReport(trainer, version, 1, 0.5, 0.0, None, positions)
        push = PushId(trainer, generation, incarnation, sequence)
        return self.aggregator.push(Push(push, report, None, announcement), has_gradients)

    def send(self, trainer, incarnation=1, sequence=1, version=0):
        """Let the gradients of a push arrive."""
        self.shard.accept(PushId(trainer, 1, incarnation, sequence), version, [torch.ones(1)])


def verdict(future):
    return future.value().decision.verdict


def eviction(future):
    error = future.value()
    assert isinstance(error, RemoteError)
    assert isinstance(error.error(), Evicted)
    return str(error.error())


def test_a_push_that_is_repeated_gets_the_same_reply_in_every_state_and_counts_once():
    run = Run(arrived=False)
    future = run.push(0)
    assert run.push(0) is future  # while its gradients are on their way
    assert run.ledger[0].pushes == 0
    run.send(0)
    assert run.push(0) is future  # pending: the other trainer has not pushed
    assert not future.done()
    run.aggregator.transports[1].arrived = True
    other = run.push(1)
    assert future.done()
    assert other.done()
    assert run.push(0, version=0) is future  # applied
    assert future.value().result.step == 1
    assert run.store.applied == [[(0, 1), (1, 1)]]
    assert run.monitor.updates == [(1, (0, 1))]
    assert [run.ledger[i].pushes for i in (0, 1)] == [1, 1]
    assert run.errors == []


def test_a_push_that_is_repeated_after_it_was_applied_gets_the_grant_that_came_with_its_reply():
    run = Run()
    first = run.push(0, announcement=GO)
    run.push(1)
    assert run.push(0, version=0, announcement=GO) is first
    assert not first.done()  # applied; the grant waits for the announcement of trainer 1
    run.announce(1)
    assert verdict(first) is Verdict.GO
    assert first.value().result.step == 1
    assert run.push(0, version=0, announcement=GO) is first
    assert len(run.store.applied) == 1


@pytest.mark.parametrize("pushed", [False, True])
def test_a_push_of_an_earlier_process_or_generation_is_refused_and_changes_nothing(pushed):
    run = Run()
    assert run.admit(0) == 2
    if pushed:
        run.push(0, incarnation=2)
    before = repr(run.ledger.state_dict())
    for about in ({"incarnation": 1}, {"incarnation": 2, "generation": 2}, {"sequence": 2, "incarnation": 1}):
        with pytest.raises(Evicted, match="trainer 0 takes no part in the run any more, or joined it anew"):
            run.push(0, **about)
    assert repr(run.ledger.state_dict()) == before
    run.push(1)
    assert run.store.applied == ([[(0, 2), (1, 1)]] if pushed else [])


def test_a_push_after_one_that_is_missing_is_an_error():
    run = Run()
    with pytest.raises(TrainingError, match="trainer 0 sent push 3 after push 0"):
        run.push(0, sequence=3)
    assert run.ledger[0].pushes == 0


# The training time of the run.


@pytest.fixture
def now(monkeypatch):
    """The time, set by hand."""
    now = SimpleNamespace(perf_counter=lambda: now.seconds, seconds=0.0)
    monkeypatch.setattr(records, "time", now)
    return now


def test_training_time_passes_between_all_updates_and_not_while_trainers_validate(now):
    run = Run(terms=RunTerms(2, Limits(), "join", barrier_every=(2,)))
    pushes = [run.push(0, announcement=GO), run.push(1, announcement=GO)]
    assert pushes[1].value().result.seconds == 0.0
    now.seconds += 1.0
    run.push(0, sequence=2)
    now.seconds += 1.0
    assert run.push(1, sequence=2).value().result.seconds == 2.0
    now.seconds += 10.0  # both validate
    granted = [run.announce(0), run.announce(1)]
    now.seconds += 4.0
    run.push(0, sequence=3)
    assert [verdict(future) for future in granted] == [Verdict.GO] * 2
    assert run.push(1, sequence=3).value().result.seconds == 6.0


def test_training_time_passes_after_a_step_that_is_due_inside_a_batch_of_several_optimizers(now):
    run = Run(1, terms=RunTerms(1, Limits(), "join", barrier_every=(1,)))
    run.aggregator.rules.several_updates = True
    run.push(0)
    now.seconds += 1.0
    assert run.push(0, sequence=2).value().result.seconds == 1.0
    now.seconds += 10.0  # it validates
    run.announce(0)
    now.seconds += 2.0
    assert run.push(0, sequence=3).value().result.seconds == 3.0


def test_the_limit_of_time_is_reached_also_while_trainers_wait_for_samples(now):
    run = Run(1)
    run.monitor.stop_reason = lambda seconds: "enough" if seconds >= 3.0 else None
    run.push(0)
    for passed, expected in ((2.0, Verdict.WAIT), (1.0, Verdict.END)):
        now.seconds += passed
        assert verdict(run.aggregator.announce(0, WAITING)) is expected


# A trainer is lost.


def test_a_trainer_that_is_lost_before_its_push_is_not_waited_for():
    run = Run()
    transport = run.aggregator.transports[0]
    assert transport.pinned
    run.aggregator.remove(0)
    assert not transport.pinned
    survivor = run.push(1)
    assert survivor.value().result.step == 1
    assert run.store.applied == [[(1, 1)]]
    with pytest.raises(Evicted):
        run.push(0, version=0)
    assert run.errors == []


def test_a_push_that_is_not_complete_is_discarded_with_its_trainer():
    run = Run(arrived=False)
    future = run.push(0)
    run.aggregator.transports[1].arrived = True
    survivor = run.push(1)
    assert not survivor.done()
    run.aggregator.remove(0)
    assert eviction(future) == "trainer 0 takes no part in the run any more"
    assert survivor.value().result.step == 1
    assert run.store.applied == [[(1, 1)]]
    assert (run.ledger[0].pushes, run.ledger[0].positions.low) == (0, 0)


def test_a_push_that_is_pending_is_applied_although_its_trainer_is_lost():
    run = Run()
    future = run.push(0, announcement=GO)
    run.aggregator.remove(0)
    assert not future.done()
    survivor = run.push(1, announcement=GO)
    assert run.store.applied == [[(0, 1), (1, 1)]]
    assert future.value().result.step == 1
    assert future.value().decision is None  # its announcement does not count
    assert verdict(survivor) is Verdict.GO
    assert survivor.value().decision.active == (1,)
    assert run.ledger[0].positions.low == 1


def test_an_announcement_of_a_lost_trainer_ends_and_the_others_continue():
    run = Run()
    future = run.push(0, announcement=GO)
    run.push(1)
    assert not future.done()  # applied; the next step waits for the announcement of trainer 1
    run.aggregator.remove(0)
    assert eviction(future) == "trainer 0 takes no part in the run any more"
    alone = run.announce(1)
    assert alone.value().decision.active == (1,)


def test_a_wait_for_a_version_ends_with_its_trainer():
    run = Run()
    waiting = [run.aggregator.wait_version(trainer, 1) for trainer in (0, 1)]
    run.aggregator.remove(0)
    assert eviction(waiting[0]) == "trainer 0 takes no part in the run any more"
    assert not waiting[1].done()
    run.push(1)
    assert waiting[1].value() == 1


def test_a_wait_for_a_version_that_no_trainer_is_left_to_make_is_answered():
    run = Run(trainers=1)
    run.admit(1)
    run.aggregator.rules.join(1)
    waiting = run.aggregator.wait_version(1, 1)
    assert not waiting.done()
    run.aggregator.remove(0)
    assert waiting.value() == 0


@pytest.mark.parametrize("pending", [False, True])
def test_a_replacement_takes_part_from_its_first_announcement_on(pending):
    """Also while a push of the process before it is pending, which decides nothing about its own."""
    run = Run()
    earlier = run.push(0) if pending else None
    run.aggregator.remove(0)
    assert run.admit(0) == 2
    joining = run.announce(0)
    assert not joining.done()  # the step in progress does not include it
    survivor = run.push(1, announcement=GO)
    assert run.store.applied == [[(0, 1), (1, 1)] if pending else [(1, 1)]]
    assert earlier is None or earlier.value().result.step == 1
    for future in (joining, survivor):
        assert future.value().decision.active == (0, 1)
    with pytest.raises(Evicted):
        run.push(0, sequence=1 + pending)
    run.push(0, incarnation=2)
    run.push(1, sequence=2)
    assert run.store.applied[1:] == [[(0, 2), (1, 1)]]
    assert run.ledger[0].decided == 1
    assert run.errors == []


def test_a_trainer_that_is_forgotten_does_not_keep_the_run_from_its_end():
    run = Run()
    run.aggregator.remove(0)
    run.push(1)
    ending = run.aggregator.announce(1, READY)
    assert not ending.done()  # the data of trainer 0 has not been served
    run.aggregator.give_up(0)
    assert verdict(ending) is Verdict.END
    with pytest.raises(RunEnded, match="the run ended before trainer 0 took part in it"):
        run.announce(0)


# Gradients that arrive in parts, over RPC, and what becomes of them.


class SentRun(Run):
    """A run whose gradients are sent: a first one, with the backward, and a bucket, which may come in any order."""

    def __init__(self, trainers=2):
        self.pulled = {}
        super().__init__(trainers)
        self.store.apply = self.apply

    @property
    def applied(self):
        return self.store.applied

    def admit(self, trainer, arrived=True):
        self.store.buffers = None
        self.aggregator.transports[trainer] = RpcServerTransport(self.shard.sent_version)
        incarnation = self.ledger.admit(trainer)
        self.pulled.pop(trainer, None)
        return incarnation

    def apply(self, pushes):
        ids = [push.id for push in pushes]
        request = ApplyRequest(self.shard.version + 1, tuple((one, None) for one in ids), (), None, None, frozenset())
        taken = self.shard.take_gradients(request)
        self.store.applied.append({one.trainer_index: [flat.tolist() for flat in taken[one]] for one in ids})
        self.shard.version += 1

    def sender(self, trainer):
        """The push to come."""
        row = self.ledger[trainer]
        return PushId(trainer, 1, row.incarnation, row.accepted + 1)

    def pull(self, trainer):
        """Pull once for each version: a step has one edge over which its first gradient returns."""
        version = self.aggregator.rules.step
        known = self.pulled.get(trainer)
        if known is None or known[0] != version:
            self.aggregator.check_granted(self.sender(trainer), version, "pulled it")
            known = self.pulled[trainer] = version, self.shard.pull(self.sender(trainer), version)
        return known[1]

    def send_first(self, trainer, value):
        push_root([torch.full(TWO_LEAVES[:1], value)], self.pull(trainer)[:1]).backward()

    def send_bucket(self, trainer, value, version=None):
        version = self.aggregator.rules.step if version is None else version
        return self.shard.receive_bucket(self.sender(trainer), version, 1, torch.full(TWO_LEAVES[1:], value))


def gradients(value):
    return [[value] * size for size in TWO_LEAVES]


@pytest.mark.claim("push-all-buckets")
@pytest.mark.parametrize("last", ["report", "first", "bucket"])
def test_a_push_completes_with_the_last_of_its_gradients_and_its_report_and_not_before(last):
    run = SentRun()
    sent = {
        "report": lambda: run.push(0),
        "first": lambda: run.send_first(0, 3.0),
        "bucket": lambda: run.send_bucket(0, 3.0),
    }
    for name in sent.keys() - {last}:
        sent[name]()
        assert run.ledger[0].accepted == 0
    run.send_first(1, 5.0)
    run.send_bucket(1, 5.0)
    other = run.push(1)
    assert not other.done()
    assert run.applied == []
    sent[last]()
    assert other.done()
    assert run.applied == [{0: gradients(3.0), 1: gradients(5.0)}]


@pytest.mark.claim("push-all-buckets")
def test_a_push_that_the_context_completes_is_refused_without_its_bucket():
    run = SentRun()
    run.send_first(0, 1.0)
    with pytest.raises(TrainingError, match="stepped a context without gradients"):
        run.push(0, has_gradients=True)
    assert run.ledger[0].accepted == 0
    assert run.aggregator.pop_waiters() == []


@pytest.mark.claim("inbox-cleared")
def test_each_step_uses_its_own_gradients():
    """Those of the step before it are gone, also where a message of the next one is missing."""
    run = SentRun(trainers=1)
    for step, value in enumerate((1.0, 2.0, 3.0), 1):
        run.send_first(0, value)
        reply = run.push(0, sequence=step, announcement=GO)
        assert not reply.done()
        run.send_bucket(0, value)
        assert verdict(reply) is Verdict.GO
    assert run.applied == [{0: gradients(value)} for value in (1.0, 2.0, 3.0)]


@pytest.mark.claim("inbox-cleared")
def test_the_gradients_of_a_trainer_that_goes_are_not_those_of_the_one_in_its_place():
    run = SentRun()
    run.send_first(0, 100.0)
    run.send_bucket(0, 100.0)
    run.aggregator.remove(0)
    assert run.admit(0) == 2
    run.send_first(1, 1.0)
    run.send_bucket(1, 1.0)
    run.push(1)
    assert run.applied == [{1: gradients(1.0)}]
    granted = [run.announce(trainer) for trainer in (0, 1)]
    assert [verdict(grant) for grant in granted] == [Verdict.GO] * 2
    replacement = run.push(0, incarnation=2)
    run.send_first(0, 2.0)
    run.send_first(1, 2.0)
    run.send_bucket(1, 2.0)
    run.push(1, sequence=2)
    assert not replacement.done()
    run.send_bucket(0, 2.0)
    assert run.applied[1:] == [{0: gradients(2.0), 1: gradients(2.0)}]


@pytest.mark.claim("remove-incomplete")
@pytest.mark.parametrize("missing", ["first", "bucket"])
def test_a_trainer_that_is_removed_leaves_no_incomplete_push(missing):
    """Another process in its place has no push in progress, and its gradients complete its own one only."""
    run = SentRun()
    old = run.push(0)
    run.send_bucket(0, 100.0) if missing == "first" else run.send_first(0, 100.0)
    run.aggregator.remove(0)
    assert eviction(old) == "trainer 0 takes no part in the run any more"
    assert run.aggregator.pop_waiters() == []
    assert run.admit(0) == 2
    run.announce(0)
    with pytest.raises(TrainingError, match="trainer 0 has no part in version 0 and pulled it"):
        run.send_first(0, 2.0)
    assert run.ledger[0].accepted == 0
    run.send_first(1, 1.0)
    run.send_bucket(1, 1.0)
    run.push(1)
    assert run.applied == [{1: gradients(1.0)}]
    assert run.errors == []


@pytest.mark.claim("apply-before-reply")
@pytest.mark.parametrize("announces", [False, True])
def test_an_update_is_applied_and_recorded_before_any_reply(announces):
    """A trainer that has its reply may pull, and may die: the update must neither be missing nor half recorded."""
    run = Run()
    announcement, seen = GO if announces else None, []

    def look(_):
        rows = [run.ledger[trainer].pushes for trainer in (0, 1)]
        seen.append((len(run.store.applied), len(run.monitor.updates), rows))

    replies = [run.push(0, announcement=announcement)]
    replies[0].add_done_callback(look)
    apply = run.store.apply

    def checked(pushes):
        assert not any(reply.done() for reply in replies)
        apply(pushes)

    run.store.apply = checked
    replies.append(run.push(1, announcement=announcement))
    assert [reply.done() for reply in replies] == [True, True]
    assert run.errors == []
    assert len(seen) == 1
    assert seen[0][:2] == (1, 1)
    assert seen[0][2][0] == 1


@pytest.mark.claim("apply-before-reply")
def test_no_reply_is_sent_while_an_update_is_computed_elsewhere():
    """In the thread of updates, or on another server."""
    run, computing = Run(), []
    run.updates.compute = lambda work, then: computing.append((work, then))
    replies = [run.push(trainer, announcement=GO) for trainer in (0, 1)]
    ((work, then),) = computing
    waits = run.aggregator.wait_version(0, 1)
    assert not any(reply.done() for reply in (*replies, waits))
    result = work()
    assert run.aggregator.version == 0
    assert not any(reply.done() for reply in (*replies, waits))
    then(result)
    assert [verdict(reply) for reply in replies] == [Verdict.GO] * 2
    assert waits.value() == 1
    assert run.aggregator.version == 1

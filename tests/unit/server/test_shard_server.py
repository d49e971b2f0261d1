"""A shard server: whose messages count, and messages that arrive twice."""

import pytest
import torch
from servers import SumOfOutputs
from torch import nn

from paramserver.config import Config
from paramserver.consistency import PushId, TrainerId
from paramserver.errors import Evicted, TrainingError
from paramserver.parameters.flat import FlatLayout, trainable_parameters
from paramserver.parameters.sharding import full_shard, get_hyperparameters
from paramserver.parameters.tables import sparse_gradient
from paramserver.server.shard_server import ShardServer
from paramserver.transport.autograd import push_root
from paramserver.transport.messages import ApplyRequest, ShardAssignment

GENERATION = 2


class Served:
    """A shard server with all parameters, which are zero."""

    def __init__(self, by_bucket=False):
        self.pulled = {}
        task = SumOfOutputs(2, 1)
        layout = FlatLayout.of(trainable_parameters(task.build_model()).items())
        shard = full_shard(layout)
        weights = [torch.zeros(size) for size in layout.sizes]
        assignment = ShardAssignment(shard, layout, weights, {}, 0, None, "", shard if by_bucket else None)
        self.server = ShardServer(task, Config(), 1, assignment, GENERATION)

    def push(self, incarnation, gradient, sequence=1, version=0, trainer=0, generation=GENERATION):
        push = PushId(trainer, generation, incarnation, sequence)
        self.server.report_push(push, version)
        known = trainer, incarnation, version
        if known not in self.pulled:
            self.pulled[known] = self.server.pull(push, version)
        self.backward(self.pulled[known], gradient)
        return push

    def backward(self, pulled, gradient):
        push_root([torch.full_like(self.server.shard.leaves[0], gradient)], pulled[:1]).backward()

    def apply(self, version, *pushes):
        groups = GROUPS if self.server.shard.pipeline else [{"lr": 1.0}]
        request = ApplyRequest(
            version, tuple((p, None) for p in pushes), (1.0,) * len(pushes), None, groups, frozenset()
        )
        return self.server.apply(request)

    @property
    def weight(self):
        return float(self.server.shard.updater.ranges[0][0])


@pytest.fixture
def served():
    return Served()


def test_a_push_of_a_process_that_was_lost_is_not_taken_for_that_of_the_one_in_its_place(served):
    """It reached this server alone. The replacement is granted the same version, and pushes for it."""
    served.push(incarnation=1, gradient=100.0)
    reply = served.apply(1, PushId(0, GENERATION, 2, 1))
    assert not reply.done()
    served.push(incarnation=2, gradient=3.0)
    assert reply.done()
    assert reply.value() is None
    assert served.weight == -3.0


def test_messages_of_a_process_that_was_replaced_are_refused(served):
    late, gradient = PushId(0, GENERATION, 1, 1), torch.ones(2)
    served.server.view_version(late, None)
    pushed = served.push(incarnation=2, gradient=3.0)
    calls = {
        "pull": lambda: served.server.pull(late, 0),
        "view_version": lambda: served.server.view_version(late, None),
        "receive_bucket": lambda: served.server.receive_bucket(late, 0, 1, gradient),
        "push": lambda: served.push(incarnation=1, gradient=100.0),
    }
    for call in calls.values():
        with pytest.raises(Evicted, match="another process has taken the place of trainer 0"):
            call()
    assert served.apply(1, pushed).done()
    assert served.weight == -3.0


def test_messages_of_another_view_are_refused(served):
    with pytest.raises(Evicted):
        served.push(incarnation=1, gradient=100.0, generation=GENERATION - 1)


def test_a_push_that_is_sent_again_counts_once_before_and_after_it_is_applied(served):
    pushed = served.push(incarnation=1, gradient=3.0)
    served.push(incarnation=1, gradient=100.0)
    assert served.apply(1, pushed).done()
    served.push(incarnation=1, gradient=100.0)
    assert served.weight == -3.0
    following = served.push(incarnation=1, gradient=1.0, sequence=2, version=1)
    assert served.apply(2, following).done()
    assert served.weight == -4.0


# An update that is computed before server 0 requests it.

GROUPS = get_hyperparameters(SumOfOutputs(2, 1).build_optimizer(SumOfOutputs(2, 1).build_model()))


@pytest.fixture
def by_bucket():
    return Served(by_bucket=True)


def names(reply):
    assert reply.done()
    return reply.value()


def test_an_update_whose_pushes_are_here_is_reported_and_made_by_a_message_for_its_version(by_bucket):
    """That message, of a trainer, overtook the request for the update, which then changes nothing."""
    reply = by_bucket.server.begin_update(0, [0, 1], GROUPS)
    first = by_bucket.push(incarnation=1, gradient=1.0, trainer=1)
    assert not reply.done()
    second = by_bucket.push(incarnation=1, gradient=3.0, trainer=0)
    assert names(reply) == (second, first)
    assert by_bucket.weight == 0.0
    pulled = by_bucket.server.pull(PushId(0, GENERATION, 1, 2), 1)
    assert pulled[0].detach()[:2].tolist() == [-2.0, -2.0]
    assert by_bucket.weight == -2.0
    assert names(by_bucket.apply(1, second, first)) is None
    assert by_bucket.weight == -2.0
    with pytest.raises(TrainingError, match="holds version 1 and cannot make 1"):
        by_bucket.apply(1, second)


def test_the_next_step_of_server_0_makes_the_version_too(by_bucket):
    by_bucket.server.begin_update(0, [0], GROUPS)
    by_bucket.push(incarnation=1, gradient=3.0)
    assert not by_bucket.server.begin_update(1, [0], GROUPS).done()
    assert (by_bucket.server.shard.version, by_bucket.weight) == (1, -3.0)


def test_an_update_that_was_computed_and_is_not_the_decision_is_dropped(by_bucket):
    reply = by_bucket.server.begin_update(0, [0, 1], GROUPS)
    lost = by_bucket.push(incarnation=1, gradient=100.0, trainer=1)
    kept = by_bucket.push(incarnation=1, gradient=3.0, trainer=0)
    assert names(reply) == (kept, lost)
    assert names(by_bucket.apply(1, kept)) is None
    assert by_bucket.weight == -3.0


@pytest.mark.claim("optimizer-exits")
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, ValueError])
def test_what_an_update_in_advance_raises_is_the_reply_to_the_request(by_bucket, monkeypatch, kind):
    def raises(*args):
        raise kind("from a step")

    monkeypatch.setattr(by_bucket.server.shard.pipeline.updates, "compute", raises)
    by_bucket.server.begin_update(0, [0], GROUPS)
    pushed = by_bucket.push(incarnation=1, gradient=3.0)
    reply = names(by_bucket.apply(1, pushed))
    assert reply.message.startswith(f"server 1 raised {kind.__name__}: from a step")


def test_a_request_that_comes_before_all_pushes_ends_the_wait_for_them(by_bucket):
    reply = by_bucket.server.begin_update(0, [0, 1], GROUPS)
    kept = by_bucket.push(incarnation=1, gradient=3.0, trainer=0)
    assert not reply.done()
    assert names(by_bucket.apply(1, kept)) is None
    assert names(reply) is None
    assert by_bucket.weight == -3.0


def test_a_version_that_was_not_computed_is_not_made_by_a_message_for_it(by_bucket):
    by_bucket.server.begin_update(0, [0, 1], GROUPS)
    by_bucket.push(incarnation=1, gradient=3.0, trainer=0)
    with pytest.raises(TrainingError, match="holds version 0, and 1 no more"):
        by_bucket.server.pull(PushId(0, GENERATION, 1, 2), 1)
    assert by_bucket.weight == 0.0


# Messages that the network held back.


@pytest.mark.claim("late-bucket")
@pytest.mark.parametrize("pushed", [False, True])
def test_a_late_message_of_an_earlier_version_does_not_change_the_present_push(pushed):
    """The trainer's step after it is in progress, or has been pushed."""
    served = Served()
    server, repeated = served.server, served.server.pull(PushId(0, GENERATION, 1, 1), 0)
    first = served.push(incarnation=1, gradient=1.0)
    assert served.apply(1, first).done()
    present = PushId(0, GENERATION, 1, 2)
    served.backward(server.pull(present, 1), 3.0)
    if pushed:
        server.report_push(present, 1)
    # Each of them was sent before, and arrives now.
    assert server.receive_bucket(first, 0, 1, torch.full((1,), 100.0)).value() is None
    served.backward(repeated, 100.0)
    server.report_push(first, 0)
    if not pushed:
        server.report_push(present, 1)
    reply = served.apply(2, present)
    assert reply.done()
    assert reply.value() is None
    assert served.weight == -4.0


@pytest.mark.claim("slow-update")
def test_a_version_that_is_pulled_while_its_successor_is_written_is_not_half_of_each(served):
    """Another trainer was granted it before, and is slow."""
    pulled, slow = [], PushId(1, GENERATION, 1, 1)
    optimizer = served.server.shard.updater.optimizer
    optimizer.register_step_post_hook(lambda *_: pulled.append(served.server.pull(slow, 0)))
    named = ((served.push(incarnation=1, gradient=3.0), None),)
    request = ApplyRequest(1, named, (1.0,), None, [{"lr": 1.0}], frozenset({0}))
    assert served.server.apply(request).done()
    assert served.weight == -3.0
    assert pulled[0][0].detach().tolist() == [0.0] * pulled[0][0].numel()


def test_the_report_of_a_push_that_server_0_dropped_does_not_name_the_gradients_of_the_next_one(served):
    """Its gradients did not arrive here; those of the next push come before the report of that."""
    server, dropped, present = served.server, PushId(0, GENERATION, 1, 1), PushId(0, GENERATION, 1, 2)
    server.report_push(dropped, 0)
    other = served.push(incarnation=1, gradient=1.0, trainer=1)
    assert served.apply(1, other).done()
    served.backward(server.pull(present, 1), 3.0)
    reply = served.apply(2, present)
    assert not reply.done()
    server.report_push(present, 1)
    assert reply.done()
    assert served.weight == -4.0


class RowsTask(SumOfOutputs):
    """A table and a dense layer."""

    def build_model(self):
        return nn.ModuleDict({"table": nn.Embedding(20, 2, sparse=True), "dense": nn.Linear(2, 1)})


@pytest.mark.claim("tables")
def test_rows_are_those_of_one_version_and_wait_for_an_update():
    """A row that is looked up while an update is computed is read after it; a handler never waits."""
    jobs = []
    task = RowsTask(2, 1)
    parameters = trainable_parameters(task.build_model())
    layout = FlatLayout.of(parameters.items(), tables=["table.weight"])
    weights = [torch.arange(size).float() for size in layout.sizes]
    assignment = ShardAssignment(full_shard(layout), layout, weights, {}, 3, None, "", None)
    server = ShardServer(task, Config(), 1, assignment, GENERATION, submit=jobs.append)
    sender, rows = TrainerId(0, GENERATION, 1), {1: torch.tensor([0, 7])}
    before = torch.tensor([[0.0, 1.0], [14.0, 15.0]])

    def found(reply):
        return server.shard.version, reply.value()[1].tolist()

    assert found(server.look_up(sender, None, rows)) == found(server.look_up(sender, 3, rows)) == (3, before.tolist())
    with pytest.raises(TrainingError, match="server 1 holds version 3, and rows of 2 no more"):
        server.look_up(sender, 2, rows)
    push = PushId(0, GENERATION, 1, 1)
    server.report_push(push, 3)
    gradient = sparse_gradient(torch.tensor([7]), torch.ones(1, 2), (20, 2))
    server.receive_bucket(push, 3, 1, gradient)
    pulled = server.pull(push, 3)
    assert pulled[1].numel() == 0
    push_root([torch.zeros_like(pulled[0])], pulled[:1]).backward()
    applied = server.apply(ApplyRequest(4, ((push, None),), (1.0,), None, [{"lr": 1.0}], frozenset()))
    waiting = server.look_up(sender, None, rows)
    assert not waiting.done()
    jobs.pop(0)()
    assert applied.value() is None
    assert not waiting.done()  # an update may be computed next, and this is in its place
    second = server.look_up(sender, 4, rows)
    for job in jobs:
        job()
    after = before - torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert found(waiting) == found(second) == (4, after.tolist())
    with pytest.raises(Evicted):
        server.look_up(TrainerId(0, GENERATION, 0), None, rows)

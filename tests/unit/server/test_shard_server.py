"""A shard server: whose messages count, and messages that arrive twice."""

import pytest
import torch
from servers import SumOfOutputs

from paramserver.config import Config
from paramserver.consistency import PushId, TrainerId
from paramserver.errors import Evicted
from paramserver.parameters.flat import FlatLayout, trainable_parameters
from paramserver.parameters.sharding import full_shard
from paramserver.server import shard_server
from paramserver.server.shard_server import ShardServer
from paramserver.transport.messages import ApplyRequest, ShardAssignment

VIEW = 2


class Served:
    """A shard server with all parameters, which are zero, and the contexts of distributed autograd that it knows."""

    def __init__(self, monkeypatch):
        self.contexts = {}
        task = SumOfOutputs(2, 1)
        layout = FlatLayout.of(trainable_parameters(task.build_model()).items())
        shard = full_shard(layout)
        weights = [torch.zeros(size) for size in layout.sizes]
        assignment = ShardAssignment(shard, layout, weights, {}, 0, None, "")
        self.server = ShardServer(task, Config(), 1, assignment, VIEW)
        monkeypatch.setattr(shard_server.dist_autograd, "get_gradients", lambda context_id: self.contexts[context_id])

    def push(self, incarnation, gradient, sequence=1, version=0, trainer=0, view=VIEW):
        push = PushId(trainer, view, incarnation, sequence)
        leaf = self.server.shard_updater.leaves[0]
        self.contexts[1] = {leaf: torch.full_like(leaf, gradient)}
        self.server.push(1, push, version)
        return push

    def apply(self, version, *pushes):
        groups = [{"lr": 1.0}]
        request = ApplyRequest(
            version, tuple((p, None) for p in pushes), (1.0,) * len(pushes), None, groups, frozenset()
        )
        return self.server.apply(request)

    @property
    def weight(self):
        return float(self.server.shard_updater.ranges[0][0])


@pytest.fixture
def served(monkeypatch):
    return Served(monkeypatch)


def test_a_push_of_a_process_that_was_lost_is_not_taken_for_that_of_the_one_in_its_place(served):
    """It reached this server alone. The replacement is granted the same version, and pushes for it."""
    served.push(incarnation=1, gradient=100.0)
    reply = served.apply(1, PushId(0, VIEW, 2, 1))
    assert not reply.done()
    served.push(incarnation=2, gradient=3.0)
    assert reply.done()
    assert reply.value() is None
    assert served.weight == -3.0


def test_messages_of_a_process_that_was_replaced_are_refused(served):
    late, gradient = TrainerId(0, VIEW, 1), torch.ones(2)
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
        served.push(incarnation=1, gradient=100.0, view=VIEW - 1)


def test_a_push_that_is_sent_again_counts_once_before_and_after_it_is_applied(served):
    pushed = served.push(incarnation=1, gradient=3.0)
    served.push(incarnation=1, gradient=100.0)
    assert served.apply(1, pushed).done()
    served.push(incarnation=1, gradient=100.0)
    assert served.weight == -3.0
    following = served.push(incarnation=1, gradient=1.0, sequence=2, version=1)
    assert served.apply(2, following).done()
    assert served.weight == -4.0

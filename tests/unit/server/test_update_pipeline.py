"""The next version made in advance: it counts only if it was made of the gradients that the decision names."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paramserver.config import config_from_mapping
from paramserver.optim.clipping import clipping_of
from paramserver.optim.shard_updater import ShardUpdater
from paramserver.parameters.flat import FlatTensors
from paramserver.parameters.sharding import full_shard, split_ranges
from paramserver.server.update_pipeline import BucketUpdates, UpdatePipeline, plan_buckets
from paramserver.transport.compression import CastCodec

BUCKETS = 3


class Run:
    """A pipeline of a server with three buckets of 4,096 elements, which are zero; SGD with a momentum."""

    def __init__(self, dtype=torch.float32):
        self.flat = FlatTensors({"w": nn.Parameter(torch.zeros(BUCKETS * 4096))})
        self.sgd = torch.optim.SGD(self.flat.tensors.values(), lr=1.0, momentum=0.5)
        layout, shard = self.flat.layout, full_shard(self.flat.layout)
        updater = ShardUpdater(layout, shard, self.flat.flats, list(self.flat.tensors.values()), self.sgd)
        self.pipeline = UpdatePipeline(BucketUpdates(updater, split_ranges(shard, layout, 4 * 4096)), CastCodec(dtype))
        self.gradients = {}

    def begin(self, *trainers):
        self.gradients = {}
        self.pipeline.begin(trainers)

    def add(self, trainer, bucket, value=1.0, **options):
        gradient = self.gradients[trainer, bucket] = torch.full((4096,), value)
        return self.pipeline.add(trainer, bucket, gradient, **options)

    def commit(self, *trainers, used=None):
        for trainer in trainers:
            for bucket in range(BUCKETS):
                if (trainer, bucket) not in self.gradients:
                    self.gradients[trainer, bucket] = torch.ones(4096)
        self.pipeline.commit([[self.gradients[t, b] for b in range(BUCKETS)] for t in trainers], used)

    @property
    def weights(self):
        return [float(self.flat.flats[0][4096 * bucket]) for bucket in range(BUCKETS)]

    @property
    def momenta(self):
        return [float(self.sgd.state[self.flat.tensors["w"]]["momentum_buffer"][4096 * b]) for b in range(BUCKETS)]


@pytest.fixture
def run():
    return Run()


def value(future):
    assert future.done()
    return None if future.value() is None else float(future.value()[0])


def test_a_bucket_is_sent_back_as_soon_as_all_gradients_of_it_are_there_and_changes_nothing_before_the_commit(run):
    run.begin(0, 1)
    first = run.add(1, 2, 3.0)
    assert not first.done()
    second = run.add(0, 2, 1.0)
    assert [value(first), value(second)] == [-2.0, -2.0]
    assert run.weights == [0.0] * BUCKETS
    assert not run.sgd.state
    run.commit(0, 1)
    assert run.weights == [-1.0, -1.0, -2.0]
    assert run.momenta == [1.0, 1.0, 2.0]
    assert run.pipeline.sent_early == {2}
    kept = [flat.clone() for flat in run.pipeline.snapshot()]
    sent = run.pipeline.leave_out(run.pipeline.snapshot(), [1, 2])
    assert [flat.numel() for flat in sent] == [4096, 4096, 0]
    run.begin(0, 1)
    run.commit(0, 1)
    assert run.weights == [-2.5, -2.5, -4.0]
    assert [float(flat[0]) for flat in kept] == [-1.0, -1.0, -2.0]


def test_a_bucket_of_an_update_that_lacks_a_trainer_is_made_anew(run):
    """The trainer was killed after it had sent some buckets. What the other one received of them does not count."""
    run.begin(0, 1)
    run.add(1, 2, 100.0)
    early = run.add(0, 2, 1.0)
    waiting = run.add(0, 1, 1.0)
    assert value(early) == -50.5
    run.pipeline.abandon_update()
    assert value(waiting) is None
    late = run.add(0, 0, 1.0)
    run.commit(0)
    assert value(late) is None
    assert run.weights == [-1.0] * BUCKETS
    assert run.momenta == [1.0] * BUCKETS
    assert run.pipeline.sent_early == frozenset()
    assert [flat.numel() for flat in run.pipeline.leave_out(run.pipeline.snapshot(), [2])] == [4096] * BUCKETS


def test_also_where_its_loss_is_known_with_the_decision_only(run):
    """As on a shard server."""
    run.begin(0, 1)
    run.add(1, 2, 100.0)
    assert value(run.add(0, 2, 1.0)) == -50.5
    waiting = run.add(0, 1, 1.0)
    run.commit(0)
    assert value(waiting) is None
    assert run.weights == [-1.0] * BUCKETS
    assert run.pipeline.sent_early == frozenset()


@pytest.mark.claim("optimizer-exits")
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, ValueError])
def test_what_a_bucket_raises_is_raised_by_the_commit_which_ends_the_run(run, monkeypatch, kind):
    def raises(*args):
        raise kind("from a step")

    monkeypatch.setattr(run.pipeline.updates, "compute", raises)
    run.begin(0)
    assert [value(run.add(0, bucket)) for bucket in range(BUCKETS)] == [None] * BUCKETS
    with pytest.raises(kind, match="from a step"):
        run.commit(0)


def test_buckets_may_arrive_before_the_step_is_known(run):
    futures = [run.add(trainer, 1, 2.0) for trainer in (0, 1)]
    assert not any(future.done() for future in futures)
    run.pipeline.begin((0, 1))
    assert [value(future) for future in futures] == [-2.0, -2.0]


def test_a_gradient_that_changed_after_it_was_sent_replaces_the_first_one(run):
    run.begin(0, 1)
    run.add(1, 1, 1.0)
    assert value(run.add(0, 1, 1.0)) == -1.0
    assert value(run.add(1, 1, 5.0)) is None
    run.commit(0, 1)
    assert run.weights == [-1.0, -3.0, -1.0]
    assert run.pipeline.sent_early == frozenset()


def test_a_parameter_without_a_gradient_is_not_stepped(run):
    run.begin(0, 1)
    waiting = run.add(0, 1, 0.0)
    assert value(run.add(1, 1, 0.0, has_all=False)) is None
    assert value(waiting) is None
    run.commit(0, 1, used=(False,))
    assert run.weights == [0.0] * BUCKETS
    assert not run.sgd.state


def test_a_message_that_is_repeated_gets_the_same_reply(run):
    run.begin(0, 1)
    first = run.add(0, 1, 1.0)
    assert run.pipeline.add(0, 1, run.gradients[0, 1]) is first
    run.add(1, 1, 3.0)
    assert value(first) == -2.0
    assert value(run.pipeline.add(0, 1, run.gradients[0, 1])) == -2.0
    assert value(run.pipeline.add(0, 1, None)) == -2.0  # its push is complete
    run.commit(0, 1)
    assert run.pipeline.sent_early == {1}


def test_another_learning_rate_counts(run):
    run.begin(0)
    assert value(run.add(0, 1, 1.0)) == -1.0
    run.sgd.param_groups[0]["lr"] = 0.5
    run.commit(0)
    assert run.weights == [-0.5] * BUCKETS
    assert run.pipeline.sent_early == frozenset()


def test_a_hook_that_is_added_later_sees_one_step_over_all_parameters(run):
    run.begin(0)
    assert value(run.add(0, 1, 1.0)) == -1.0
    seen = []
    run.sgd.register_step_pre_hook(lambda *_: seen.append(float(run.flat.tensors["w"].grad.sum())))
    run.commit(0)
    assert seen == [4096.0 * BUCKETS]
    assert run.weights == [-1.0] * BUCKETS
    assert run.pipeline.sent_early == frozenset()
    run.begin(0)
    assert not run.add(0, 1, 1.0).done()


def test_what_is_sent_early_is_rounded_as_what_is_pulled():
    run = Run(torch.bfloat16)
    run.begin(0)
    reply = run.add(0, 1, 1 / 3).value()
    assert reply.dtype is torch.bfloat16
    run.commit(0)
    assert torch.equal(reply, run.pipeline.snapshot()[1].to(torch.bfloat16))
    assert run.weights[1] == pytest.approx(-1 / 3, abs=1e-7)


def updater_of(config):
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    return SimpleNamespace(optimizer=sgd, clipping=clipping_of(config.training))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"server": {"consistency": "async"}}, "trainers do not wait for each other"),
        ({"server": {"backup_trainers": 1}}, "trainers do not wait for each other"),
        ({"server": {"compute": "server"}}, "the forward runs on the server"),
        ({"training": {"nonfinite": "skip"}}, "a step whose gradients are not finite is skipped"),
        ({"training": {"clip_grad_norm": 1.0}}, "training.clip_grad_norm needs the norm of all gradients"),
        (
            {"training": {"local_steps": 2, "outer": {"weighting": "samples"}}},
            "the mean over the trainers is weighted by samples",
        ),
    ],
)
def test_why_there_are_no_buckets(given, reason):
    mapping = {"task": "t:T", "mode": "rpc", "cluster": {"num_trainers": 2}, **given}
    layout = Run().flat.layout
    config = config_from_mapping(mapping)
    assert plan_buckets(config, updater_of(config), layout, [full_shard(layout)]) == ((), reason)


def test_the_size_of_buckets_is_that_of_the_configuration_or_follows_from_the_model():
    layout = FlatTensors({"w": nn.Parameter(torch.zeros(2**22))}).layout

    def sizes(**server):
        config = config_from_mapping({"task": "t:T", "mode": "rpc", "server": server})
        return plan_buckets(config, updater_of(config), layout, [full_shard(layout)])[0][0].layout.sizes

    assert sizes(bucket_mb=8) == (2**14, 2**21, 2**21 - 2**14)
    assert sum(sizes()) == 2**22
    assert len(sizes()) == 11

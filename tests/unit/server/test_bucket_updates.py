"""Updates bucket by bucket: every bit is that of a step over whole tensors, and nothing changes before all are made."""

import copy

import pytest
import torch
from mixed_model import MixedModel
from torch import nn

from paramserver.optim.clipping import NormClipping
from paramserver.optim.parallel_step import ELEMENTWISE
from paramserver.optim.shard_updater import ShardUpdater
from paramserver.parameters.flat import FlatTensors, trainable_parameters
from paramserver.parameters.sharding import full_shard, plan_shards, split_ranges
from paramserver.server.update_pipeline import BucketUpdates, why_not_by_bucket

OPTIONS = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"amsgrad": True},
    "RMSprop": {"centered": True, "momentum": 0.9},
}


class Half:
    """One of two equal models, with an updater of one shard of it."""

    def __init__(self, model, servers, number, make_optimizer):
        self.flat = FlatTensors(trainable_parameters(model))
        self.layout = self.flat.layout
        self.optimizer = make_optimizer(list(model.parameters()))
        self.shard = plan_shards(self.layout, servers, splittable=True)[number]
        flats = self.shard.slice_flats(self.flat.flats)
        self.updater = ShardUpdater(self.layout, self.shard, flats, list(self.flat.tensors.values()), self.optimizer)


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_same_state(whole, parts):
    states, others = whole.updater.states, parts.updater.states
    assert list(states) == list(others)
    for number, state in states.items():
        assert list(state) == list(others[number])
        for name, value in state.items():
            other = others[number][name]
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other)
                assert (value.shape, value.stride(), value.dtype) == (other.shape, other.stride(), other.dtype)
            else:
                assert value == other


@pytest.mark.parametrize("bucket_bytes", [512, 20_000, 1e9])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
@pytest.mark.usefixtures("one_thread")
def test_every_bit_is_that_of_a_step_over_whole_tensors(kind, servers, bucket_bytes):
    """Also in a step in which some parameters have no gradient, and of the optimizer's state."""
    torch.manual_seed(0)
    model = MixedModel(has_complex=True)
    models = model, copy.deepcopy(model)
    for number in range(servers):
        whole, parts = (
            Half(one, servers, number, lambda ps: kind(ps, lr=0.1, **OPTIONS.get(kind.__name__, {}))) for one in models
        )
        buckets = split_ranges(parts.shard, parts.layout, bucket_bytes)
        updates = BucketUpdates(parts.updater, buckets)
        for step in range(3):
            used = None if step != 1 else tuple(i % 2 == 0 for i in range(len(parts.layout.slots)))
            drawn = [[torch.randn(n).to(d) for n, d in zip(parts.layout.sizes, parts.layout.dtypes, strict=True)]]
            drawn += [[-0.3 * flat for flat in drawn[0]], [flat.roll(1) for flat in drawn[0]]]
            mean = whole.updater.average([whole.shard.copy_flats(flats) for flats in drawn], [1.0] * 3)
            whole.updater.assign_gradients(mean, used)
            whole.updater.step()
            gradients = [buckets.copy_flats(flats) for flats in drawn]
            groups = updates.hyperparameters()
            if step == 2:
                updates.step_whole(gradients, used, groups)
            else:
                before = copy.deepcopy((gradients, parts.updater.ranges, parts.updater.states))
                updated = [
                    updates.compute(n, [own[n] for own in gradients], used, groups) for n in range(len(buckets.ranges))
                ]
                assert_equal(before, (gradients, parts.updater.ranges, parts.updater.states))
                updates.write(updated)
            assert all(map(torch.equal, whole.updater.ranges, parts.updater.ranges))
            assert_same_state(whole, parts)


def assert_equal(before, now):
    """Nested lists and dictionaries of tensors."""
    if isinstance(before, torch.Tensor):
        assert torch.equal(before, now)
    elif isinstance(before, dict):
        assert before.keys() == now.keys()
        for key, value in before.items():
            assert_equal(value, now[key])
    elif isinstance(before, (list, tuple)):
        for one, other in zip(before, now, strict=True):
            assert_equal(one, other)


def test_a_parameter_that_is_in_no_group_is_not_stepped():
    flat = FlatTensors({"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))})
    sgd, shard = torch.optim.SGD([flat.tensors["b"]], lr=1.0), full_shard(flat.layout)
    updates = BucketUpdates(ShardUpdater(flat.layout, shard, flat.flats, list(flat.tensors.values()), sgd), shard)
    updates.write([updates.compute(0, [torch.ones(flat.layout.sizes[0])], None, updates.hyperparameters())])
    assert [t.tolist() for t in flat.tensors.values()] == [[0.0, 0.0], [-1.0, -1.0]]


class Own(torch.optim.SGD):
    updates_each = "element"


def hooked(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "clipping", "reason"),
    [
        (
            lambda ps: torch.optim.SGD(ps, lr=0.1),
            NormClipping(1.0),
            "training.clip_grad_norm needs the norm of all gradients",
        ),
        (lambda ps: Own(ps, lr=0.1), None, "Own is not known to update each element by itself"),
        (lambda ps: torch.optim.Adafactor(ps), None, "Adafactor is not known to update each element by itself"),
        (hooked, None, "hooks of SGD may read all gradients"),
        (
            lambda ps: torch.optim.SGD(ps, lr=torch.tensor(0.1)),
            None,
            "hyper-parameters of SGD are tensors, which may change in place",
        ),
    ],
)
def test_an_update_that_needs_all_gradients_is_not_made_by_bucket(make, clipping, reason):
    assert why_not_by_bucket(make([nn.Parameter(torch.zeros(1))]), clipping) == reason

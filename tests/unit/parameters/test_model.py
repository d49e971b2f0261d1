"""Models that cannot be trained."""

import pytest
import torch
from torch import nn

from paramserver import Task
from paramserver.checkpoint import stage_copy
from paramserver.devices import CPU
from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.optim.averaging import averaged_state_dict
from paramserver.parameters.model import (
    build_model,
    detached_state_dict,
    extra_state_dict,
    load_part_of_state,
    load_weights,
    refuse_synced_batch_norm,
)
from paramserver.parameters.numerics import check_parameters_finite


class Builds(Task):
    def __init__(self, module):
        self.module = module

    def build_model(self):
        return self.module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, "build_model returned NoneType; it must return a torch.nn.Module"),
        (nn.ReLU(), "a model without a parameter that requires a gradient"),
        (nn.Sequential(nn.Linear(1, 2), nn.LazyLinear(3)), r"a model whose 1\.weight has no shape yet; call the model"),
        (
            nn.Sequential(nn.Linear(1, 2), nn.LazyBatchNorm1d(affine=False)),
            r"a model whose 1\.running_mean has no shape yet; call the model",
        ),
    ],
)
@pytest.mark.parametrize("owns_tables", [True, False])
def test_a_model_that_cannot_be_trained_is_refused(module, message, owns_tables):
    with pytest.raises(TaskError, match=f"^Builds.*{message}"):
        build_model(Builds(module), 0, CPU, owns_tables=owns_tables)


class Counts(nn.Module):
    count = 0

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


@pytest.mark.parametrize("name", ["", "0."])
def test_extra_state_is_given_to_the_modules_that_have_it(name):
    """A trainer of a model on the server has a stand-in in the place of the outermost module."""
    model, stand_in = nn.Sequential(Counts()) if name else Counts(), nn.Sequential(nn.ReLU())
    for one in (model, stand_in):
        load_part_of_state(one, {f"{name}_extra_state": 7})
    assert extra_state_dict(model) == {f"{name}_extra_state": 7}
    assert extra_state_dict(stand_in) == {}


def test_an_expanded_module_buffer_can_be_loaded():
    module = nn.Linear(1, 1)
    module.register_buffer("scale", torch.ones(1).expand(3))
    model = build_model(Builds(module), 0, CPU)
    load_weights(model, {**model.state_dict(), "scale": torch.tensor([1.0, 2.0, 3.0])}, "model.pt")
    assert model.scale.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.claim("strided-parameters", "buffer-types")
@pytest.mark.parametrize("kind", ["conjugated", "negated"])
def test_tensors_whose_memory_has_other_values_get_memory_of_their_own(kind):
    """A conjugated view of complex numbers, and its imaginary part."""
    value = torch.tensor([1 + 2j, 3 - 4j]).conj()
    value = value if kind == "conjugated" else value.imag
    module = nn.ParameterDict({"one": nn.Parameter(value)})
    module.register_buffer("other", value)
    model = build_model(Builds(module), 0, CPU)
    for tensor in (model["one"], model.other):
        assert torch.equal(tensor, value)
        assert not tensor.is_conj()
        assert not tensor.is_neg()
    check_parameters_finite({"one": model["one"]}, 1, None)


def test_a_model_without_modes_is_trained_as_it_was_built():
    class TrainsItself(nn.Linear):
        def train(self, samples, epochs):
            raise AssertionError("it is not called")

    class Fails(nn.Linear):
        def train(self, mode=True):
            raise TypeError("of the user")

    exported = torch.export.export(nn.Sequential(nn.Linear(1, 1)), (torch.ones(2, 1),)).module()
    for model in (exported, nn.Sequential(exported), TrainsItself(1, 1)):
        assert all(module.training for module in build_model(Builds(model), 0, CPU).modules())
    with pytest.raises(TypeError, match="of the user"):
        build_model(Builds(Fails(1, 1)), 0, CPU)


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_model_that_is_in_eval_as_a_whole_is_trained(on_meta):
    whole = build_model(Builds(nn.Sequential(nn.Linear(1, 1), nn.Dropout()).eval()), 0, CPU, owns_tables=not on_meta)
    assert all(module.training for module in whole.modules())
    part = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1).eval())
    root = nn.Sequential(nn.Linear(1, 1), nn.Dropout()).eval()
    root[0].train()
    for model in (part, root):
        before = [module.training for module in model.modules()]
        assert [module.training for module in build_model(Builds(model), 0, CPU).modules()] == before


def test_a_layer_that_would_not_take_statistics_over_the_trainers_is_named():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    refuse_synced_batch_norm(model, "here")
    with pytest.raises(UnsupportedConfiguration, match=r"layer 1 \(SyncBatchNorm\) must be a BatchNorm here, as it"):
        refuse_synced_batch_norm(nn.SyncBatchNorm.convert_sync_batchnorm(model), "here")


class Distills(nn.Sequential):
    """Its first part stays in ``eval()``."""

    def train(self, mode=True):
        super().train(mode)
        self[0].eval()
        return self


@pytest.mark.parametrize("builds_in_eval", [False, True])
def test_a_model_may_keep_a_part_in_eval(builds_in_eval):
    module = Distills(nn.BatchNorm1d(2), nn.Linear(2, 1))
    model = build_model(Builds(module.eval() if builds_in_eval else module), 0, CPU)
    assert [one.training for one in model.modules()] == [True, False, True]


def test_modes_that_differ_when_the_model_is_built_stay():
    model = build_model(Builds(nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Linear(2, 1))), 0, CPU)
    assert [one.training for one in model.modules()] == [True, False, True]


class Versioned(nn.Linear):
    """Refuses a state without its version, as MNASNet of torchvision does."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version") != 2:
            raise ValueError(f"version {local_metadata.get('version')}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@pytest.mark.parametrize("state_of", [detached_state_dict, lambda model: averaged_state_dict(model, {})])
def test_weights_keep_the_versions_of_modules(tmp_path, state_of):
    model, loaded = Versioned(1, 1), Versioned(1, 1)
    torch.save(stage_copy(state_of(model)), tmp_path / "model.pt")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert not any(tensor.requires_grad for tensor in weights.values())
    load_weights(loaded, weights, "model.pt")
    assert torch.equal(loaded.weight, model.weight)

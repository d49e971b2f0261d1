"""Layers and parameters that change in mid-run are refused by name; module buffers move between models by name."""

import pytest
import torch
from torch import nn

from paramserver.errors import CheckpointError, TaskError, UnsupportedConfiguration
from paramserver.parameters.model import load_weights
from paramserver.parameters.model_tree import ModelTree, buffer_kinds, changed_kinds, mean_buffers


def build():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model.tied = model[3]
    model[0].requires_grad_(False)
    model.register_buffer("late", None)
    model.register_buffer("passing", torch.zeros(2), persistent=False)
    return model


def assign(model, name, value):
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, value)


def test_a_buffer_that_cannot_be_packed_is_refused_each_time():
    model = nn.Linear(1, 1)
    model.register_buffer("a", torch.eye(2).to_sparse())
    tree = ModelTree(model)
    for _ in range(2):
        with pytest.raises(UnsupportedConfiguration, match="a is a sparse tensor; parameters"):
            tree.pack_buffers()


class Mean(nn.Module):
    """Assigns its buffer in each forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


PARAMETER = nn.Parameter(torch.zeros(1))
CHANGES = {
    "replaced": (lambda m: assign(m, "3", nn.Linear(3, 3)), "layer 3 was replaced"),
    "replaced where it is tied": (lambda m: assign(m, "tied", nn.Linear(3, 3)), "layer tied was replaced"),
    "frozen": (lambda m: assign(m, "0", nn.Linear(2, 3)), "layer 0 was replaced"),
    "added": (lambda m: m.add_module("head", nn.Linear(3, 1)), "layer head was added"),
    "added deep": (
        lambda m: m.add_module("head", nn.Sequential(nn.Sequential(nn.Linear(3, 1)))),
        "layer head was added",
    ),
    "removed": (lambda m: delattr(m, "tied"), "layer tied was removed"),
    "without parameters in its place": (lambda m: assign(m, "3", nn.Identity()), "layer 3 was replaced"),
    "with buffers only": (lambda m: m.add_module("norm", nn.BatchNorm1d(3, affine=False)), "layer norm was added"),
    "a parameter": (lambda m: assign(m, "0.bias", PARAMETER), "parameter 0.bias was replaced"),
    "a parameter that is equal": (
        lambda m: assign(m, "3.weight", nn.Parameter(m[3].weight.detach().clone())),
        "parameter (3|tied).weight was replaced",
    ),
    "a new parameter": (lambda m: assign(m, "2.scale", PARAMETER), "parameter 2.scale was added"),
    "one parameter less": (lambda m: m[3].register_parameter("bias", None), "parameter (3|tied).bias was removed"),
    "another name": (lambda m: m[2].register_parameter("other", m[2]._parameters.pop("weight")), "parameter 2"),
}


@pytest.mark.claim("replaced-modules")
@pytest.mark.parametrize("what", CHANGES)
def test_a_layer_or_parameter_that_is_not_that_of_the_start_is_refused_by_name(what):
    change, message = CHANGES[what]
    tree = ModelTree(model := build())
    tree.check_parameters()
    change(model)
    with pytest.raises(TaskError, match=rf"^{message}.* after the start of the run, and would not be trained: "):
        tree.check_parameters()


@pytest.mark.claim("replaced-modules")
def test_what_holds_no_parameter_may_change():
    model = build()
    tree = ModelTree(model)
    torch.func.functional_call(model, {"2.bias": torch.zeros(3)}, torch.ones(2, 2))
    tree.check_parameters()
    model[1] = nn.Tanh()
    model.loss = nn.CrossEntropyLoss()
    model.note = "any attribute"
    model[2].running_mean = torch.ones(3)
    model.register_buffer("more", torch.ones(1))
    model[0].weight.data = torch.ones(3, 2)
    model[3].weight.requires_grad_(False)
    tree.check_parameters()
    weight = model[3].weight  # removed and given back, as by a reparametrization
    del model[3].weight
    model[3].weight = weight
    tree.check_parameters()


BUFFERS = {
    "assigned": torch.full((3,), 2.0),
    "other shape": torch.ones(2, 5),
    "other dtype": torch.ones(3, dtype=torch.float64),
    "bool": torch.tensor([True, False, True]),
    "small integers": torch.ones(3, dtype=torch.int16),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "complex": torch.ones(3, dtype=torch.complex64),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "expanded": torch.ones(1).expand(3),
    "transposed": torch.randn(4, 3).t(),
    "with gaps": torch.randn(6)[::2],
    "none": None,
}


@pytest.mark.claim("assigned-buffers", "late-buffers")
@pytest.mark.parametrize("name", ["2.running_mean", "late", "passing", "registered"])
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_moves_to_another_model_whatever_it_was_there(name, kind):
    one, other = build(), build()
    source, target = ModelTree(one), ModelTree(other)
    first = source.pack_buffers()
    if name == "registered":
        one.register_buffer(name, None)
    assign(one, name, BUFFERS[kind])
    changed = source.pack_changed_buffers(first)
    target.load_buffers(source.pack_buffers())
    third = ModelTree(build())
    third.load_buffers(first)
    if changed is not None:
        third.load_buffers(changed, partial=True)
    for tree in (target, third):
        found = tree.buffers()
        for key, value in source.buffers().items():
            assert (found.get(key) is None) == (value is None)
            assert value is None or (found[key].dtype == value.dtype and torch.equal(found[key], value))
    assert one.state_dict().keys() == other.state_dict().keys()
    assert target.pack_changed_buffers(source.pack_buffers()) is None


@pytest.mark.claim("assigned-buffers")
def test_a_load_writes_in_place_only_to_tensors_that_no_forward_has_assigned():
    tree = ModelTree(model := build())
    kept, before = model[2].running_mean, tree.pack_buffers()
    aliased = model[3].weight.detach()[0]
    model[2].running_var = aliased  # memory of a parameter
    weight = model[3].weight.detach().clone()
    kept += 1
    tree.load_buffers(before)
    assert model[2].running_mean is kept
    assert kept.tolist() == [0.0] * 3
    assert model[2].running_var is not aliased
    assert torch.equal(model[3].weight, weight)


def test_buffers_that_are_one_tensor_are_sent_once_and_stay_one():
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    for model in (one, other):
        model.register_buffer("a", torch.zeros(1000))
        model.register_buffer("b", model.a)
    tree, target = ModelTree(one), ModelTree(other)
    one.a = one.b = torch.ones(1000)
    assert tree.pack_buffers().nbytes < 5000
    target.load_buffers(tree.pack_buffers())
    assert other.a is other.b
    assert other.a.sum() == 1000


def test_a_removed_buffer_is_removed_elsewhere_and_one_that_has_no_place_is_refused():
    one, other = build(), build()
    tree, target = ModelTree(one), ModelTree(other)
    del one.passing
    target.load_buffers(tree.pack_buffers())
    assert other.passing is None
    other.extra = "an attribute"
    one.register_buffer("extra", torch.zeros(1))
    with pytest.raises(TaskError, match="module buffer extra was registered in mid-run"):
        target.load_buffers(tree.pack_buffers())


@pytest.mark.claim("late-buffers")
def test_a_checkpoint_has_buffers_with_the_shape_that_they_got_later():
    as_built, model = buffer_kinds(build()), build()
    model.late = torch.ones(2, 2)
    model[2].running_mean = torch.ones(5)
    model.register_buffer("new", torch.tensor(1.0))
    late = changed_kinds(as_built, buffer_kinds(model))
    assert late == ["2.running_mean", "late", "new"]
    resumed = build()
    with pytest.raises(CheckpointError, match="late is not in this model"):
        load_weights(build(), model.state_dict(), "model.pt")
    load_weights(resumed, model.state_dict(), "model.pt", late)
    assert resumed.late.shape == (2, 2)
    assert resumed[2].running_mean.shape == (5,)
    assert resumed.new == 1.0
    assert resumed.late.data_ptr() != model.late.data_ptr()


@pytest.mark.claim("replaced-modules", "assigned-buffers")
def test_a_model_of_torchscript():
    """Its parameters, modules and buffers are in containers that are no dictionaries."""
    norm = nn.BatchNorm1d(3)
    nn.init.ones_(norm.bias)  # else the mean of what it normalises may be 0 exactly, and the last buffer stays
    tree = ModelTree(model := torch.jit.script(nn.Sequential(nn.Linear(2, 3), norm, Mean())))
    before = tree.pack_buffers()
    model(torch.randn(4, 2))
    assert set(tree.pack_changed_buffers(before).values()) == {name for name, _ in model.named_buffers()}
    tree.load_buffers(before)
    assert tree.pack_changed_buffers(before) is None
    tree.check_parameters()
    model._modules["0"].weight = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(TaskError, match=r"parameter 0.weight was replaced"):
        tree.check_parameters()


def test_the_mean_of_buffers_is_of_those_of_floating_point():
    def packed(value, count):
        model = nn.BatchNorm1d(2)
        model.register_buffer("flags", torch.tensor([value > 1]))
        model.running_mean.fill_(value)
        model.num_batches_tracked.fill_(count)
        return ModelTree(model).pack_buffers()

    mean = mean_buffers([packed(1.0, 5), None, packed(2.0, 9), packed(6.0, 7)])
    values = mean.values()
    assert values["running_mean"].tolist() == [3.0, 3.0]
    assert values["num_batches_tracked"].item() == 5
    assert values["flags"].tolist() == [False]
    assert mean_buffers([None]) is None
    other = ModelTree(nn.BatchNorm1d(3)).pack_buffers()
    assert mean_buffers([other, packed(1.0, 5)]) is other

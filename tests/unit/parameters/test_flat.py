"""Parameters as views of flat tensors: nothing is lost by it, and no optimizer sees a difference."""

import copy
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import nn

from paramserver.errors import UnsupportedConfiguration
from paramserver.parameters.flat import ALIGNMENT_BYTES, FlatLayout, FlatTensors, other_tensors, trainable_parameters


class Zoo(nn.Module):
    """Every kind of tensor that a model may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.linear = nn.Linear(7, 3)
        self.wide = nn.Linear(3, 3).double()
        self.narrow = nn.Linear(3, 5).bfloat16()
        self.tied = nn.Linear(7, 3, bias=False)
        self.tied.weight = self.linear.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("mask", torch.tensor([True, False, True]))


@pytest.fixture
def zoo() -> Zoo:
    torch.manual_seed(1)
    return Zoo()


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and one[n].shape == other[n].shape and torch.equal(one[n], other[n]) for n in one
    )


def test_flattening_changes_no_bit(zoo):
    before = bits(zoo)
    FlatTensors(trainable_parameters(zoo))
    FlatTensors(dict(zoo.named_buffers()))
    assert same(bits(zoo), before)


def test_special_values_survive():
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    model = nn.ParameterDict({"odd": nn.Parameter(odd.clone())})
    FlatTensors(trainable_parameters(model))
    assert torch.equal(model["odd"].view(torch.int32), odd.view(torch.int32))


def test_each_tensor_is_a_view_of_the_flat_one_of_its_type(zoo):
    store = FlatTensors(trainable_parameters(zoo))
    assert [flat.dtype for flat in store.flats] == [torch.float32, torch.float64, torch.bfloat16]
    for slot in store.layout.slots:
        tensor, flat = store.tensors[slot.name], store.flats[slot.group]
        assert tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert tensor.dtype == flat.dtype
    for flat in store.flats:
        flat.zero_()
    assert not any(p.any() for p in zoo.parameters() if p.requires_grad)


def test_views_do_not_overlap_and_begin_at_cache_lines(zoo):
    for tensors in (trainable_parameters(zoo), dict(zoo.named_buffers())):
        store = FlatTensors(tensors)
        spans = []
        for slot in store.layout.slots:
            view = store.views[slot.name]
            assert slot.offset * view.element_size() % ALIGNMENT_BYTES == 0
            assert view.data_ptr() % ALIGNMENT_BYTES == 0
            spans.append((slot.group, slot.offset, slot.offset + view.numel()))
        spans.sort()
        for (group, _, end), (next_group, start, _) in pairwise(spans):
            assert end <= start or next_group > group
        assert all(end <= store.layout.sizes[group] for group, _, end in spans)


def test_dense_strides_are_kept(zoo):
    FlatTensors(trainable_parameters(zoo))
    assert zoo.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert zoo.turned.stride() == (1, 6)
    assert zoo.linear.weight.is_contiguous()


@pytest.mark.parametrize(
    "sparse_memory", [torch.randn(4, 8)[:, ::2], torch.randn(3, 1).expand(3, 5), torch.randn(2, 5, 5)[:, 1:3]]
)
def test_a_tensor_with_gaps_becomes_contiguous(sparse_memory):
    store = FlatTensors({"x": sparse_memory.clone(memory_format=torch.preserve_format)})
    gappy = {"x": sparse_memory.detach()}
    layout = FlatLayout.of(gappy.items())
    assert layout.slots[0].stride == sparse_memory.contiguous().stride()
    assert torch.equal(store.views["x"], sparse_memory)


def test_ties_survive(zoo):
    parameters = trainable_parameters(zoo)
    assert "tied.weight" not in parameters
    FlatTensors(parameters)
    assert zoo.tied.weight is zoo.linear.weight
    with torch.no_grad():
        zoo.linear.weight.fill_(3.0)
    assert bool((zoo.tied.weight == 3.0).all())


def test_frozen_parameters_are_left_alone(zoo):
    before = zoo.frozen.weight.data_ptr()
    store = FlatTensors(trainable_parameters(zoo))
    assert not any(name.startswith("frozen") for name in store.tensors)
    assert zoo.frozen.weight.data_ptr() == before


def test_module_buffers_of_any_type_are_held(zoo):
    store = FlatTensors(dict(zoo.named_buffers()))
    assert {"norm.running_mean", "norm.num_batches_tracked", "mask"} == set(store.tensors) - {"norm.running_var"}
    zoo.norm(torch.randn(2, 5, 3, 3))
    assert store.views["norm.num_batches_tracked"].item() == 1
    store.check_views()


@pytest.mark.parametrize("tensors", [{}, {"nothing": torch.empty(0)}, {"one": torch.tensor(2.0)}])
def test_few_tensors_are_no_special_case(tensors):
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    store = FlatTensors(tensors)
    store.check_views()
    assert same(store.views, before)


def test_the_layout_counts_its_bytes():
    layout = FlatLayout.of(
        {"a": torch.zeros(17), "b": torch.zeros(1, dtype=torch.float64), "c": torch.zeros(1)}.items()
    )
    assert (layout.dtypes, layout.sizes) == ((torch.float32, torch.float64), (48, 8))
    assert layout.total_bytes == 48 * 4 + 8 * 8 == sum(f.numel() * f.element_size() for f in layout.allocate())
    assert not any(flat.any() for flat in layout.allocate())


def test_one_layout_reads_what_another_process_wrote(zoo):
    store = FlatTensors(trainable_parameters(zoo))
    received = [flat.clone() for flat in store.flats]
    assert same(store.layout.views(received), {name: t.detach() for name, t in store.tensors.items()})


def test_a_replaced_tensor_is_found_by_name(zoo):
    store = FlatTensors(trainable_parameters(zoo))
    store.check_views()
    zoo.conv.bias.data.add_(1)
    store.check_views()
    zoo.narrow.bias.data = zoo.narrow.bias.data.clone()
    with pytest.raises(UnsupportedConfiguration, match=r"narrow\.bias was replaced .* p\.copy_\(new\)"):
        store.check_views()


def test_a_clone_is_not_touched_by_what_follows(zoo):
    store = FlatTensors(trainable_parameters(zoo))
    snapshot = store.clone()
    kept = [flat.clone() for flat in snapshot]
    for flat in store.flats:
        flat.add_(1)
    assert all(map(torch.equal, snapshot, kept))
    assert not any(flat.requires_grad for flat in snapshot)


def test_sparse_tensors_are_refused():
    with pytest.raises(UnsupportedConfiguration, match=r"rows is a sparse tensor; .* must be dense"):
        FlatLayout.of([("rows", torch.eye(3).to_sparse())])


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_over_views_equals_one_over_a_plain_copy(zoo, name):
    plain = copy.deepcopy(zoo)
    store = FlatTensors(trainable_parameters(zoo))
    gradients = store.layout.allocate()
    gradient_views = store.layout.views(gradients)
    optimizers = [OPTIMIZERS[name]([p for p in m.parameters() if p.requires_grad]) for m in (zoo, plain)]
    plain_parameters = trainable_parameters(plain)
    generator = torch.Generator().manual_seed(2)
    for step in range(20):
        for place, (key, parameter) in enumerate(store.tensors.items()):
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            gradient_views[key].copy_(drawn)
            absent = (step + place) % 5 == 0  # took no part in this step
            parameter.grad = None if absent else gradient_views[key]
            plain_parameters[key].grad = None if absent else drawn
        for optimizer in optimizers:
            optimizer.step()
        store.check_views()
    assert same(bits(zoo), bits(plain))
    states = [o.state_dict()["state"] for o in optimizers]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(t, states[1][i][k]) for i, s in states[0].items() for k, t in s.items() if t is not None)


BASE = torch.arange(24.0)
# Of each pair: the memory of a trained parameter, and that of a second tensor; and whether these overlap.
PLACES = {
    "the same": (BASE, BASE, True),
    "another view": (BASE.view(4, 6), BASE.view(4, 6).t(), True),
    "in part": (BASE[:8], BASE[7:12], True),
    "a row of a transposed matrix": (BASE.view(4, 6)[:3], BASE.view(4, 6).t()[1:3], True),
    "real numbers": (torch.view_as_complex(BASE.view(12, 2)), BASE[4:6], True),
    "one after the other": (BASE[:8], BASE[8:12], False),
    "every second one": (BASE[::2], BASE[1::2], False),
    "columns": (BASE.view(4, 6)[:, :3], BASE.view(4, 6)[:, 3:], False),
    "no elements": (BASE, BASE[:0], False),
    "a copy": (BASE, BASE.clone(), False),
}


@pytest.mark.claim("shared-memory-of-tensors")
@pytest.mark.parametrize("kind", ["trained", "frozen", "buffer"])
@pytest.mark.parametrize("place", PLACES)
def test_two_tensors_in_one_place_are_refused_by_name(place, kind):
    one, other, overlap = PLACES[place]
    model = nn.ParameterDict({"one": nn.Parameter(one)})
    if kind == "buffer":
        model.register_buffer("other", other)
    else:
        model["other"] = nn.Parameter(other, requires_grad=kind == "trained")
    message = r"one and other share memory but are two tensors; .*" + ("Parameter$" if kind == "trained" else "clone")
    with pytest.raises(UnsupportedConfiguration, match=message) if overlap else nullcontext():
        FlatTensors(trainable_parameters(model), others=other_tensors(model))


def test_tensors_that_are_not_trained_may_share_memory():
    model = nn.Linear(4, 4)
    model.register_buffer("one", BASE[:8])
    model.register_buffer("other", BASE[4:])
    FlatTensors(trainable_parameters(model), others=other_tensors(model))

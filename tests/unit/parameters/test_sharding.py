"""Which server owns what, and optimizers over parts of parameters: together they are the optimizer over all."""

import copy
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from paramserver.errors import UnsupportedConfiguration
from paramserver.optim import RowWiseAdagrad
from paramserver.optim.clipping import NormClipping
from paramserver.optim.parallel_step import ELEMENTWISE, is_elementwise
from paramserver.optim.shard_updater import ShardUpdater
from paramserver.parameters.flat import ALIGNMENT_BYTES, FlatLayout, FlatTensors, trainable_parameters
from paramserver.parameters.sharding import (
    full_shard,
    get_hyperparameters,
    merge_state,
    optimizer_indices,
    plan_shards,
    split_ranges,
    split_state,
)
from paramserver.parameters.tables import slice_gradient, sparse_gradient, table_ranges

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
LAYOUTS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=9).map(
    lambda kinds: FlatLayout.of((f"t{i}", torch.empty(shape, dtype=dtype)) for i, (shape, dtype) in enumerate(kinds))
)


def bytes_of(shard):
    return sum((end - first) * t.itemsize for (_, first, end), t in zip(shard.ranges, shard.layout.dtypes, strict=True))


@pytest.mark.claim("empty-parameters")
@settings(max_examples=300, derandomize=True, deadline=None)
@given(LAYOUTS, st.integers(1, 7), st.booleans())
def test_every_element_has_one_owner_and_shares_are_even(layout, servers, splittable):
    try:
        shards = plan_shards(layout, servers, splittable)
    except UnsupportedConfiguration:
        tensors = sum(slot.numel > 0 for slot in layout.slots)
        assert servers > max(tensors, 1)
        return
    assert len(shards) == servers
    flats = [torch.zeros(n, dtype=torch.int64) for n in layout.sizes]
    marks = [torch.zeros(n, dtype=torch.int64) for n in layout.sizes]
    for shard in shards:
        for mine in shard.slice_flats(flats):
            mine += 1
        views = shard.layout.views(shard.slice_flats(marks))
        for piece, slot in zip(shard.slices, shard.layout.slots, strict=True):
            assert views[slot.name].numel() == piece.length
            views[slot.name].add_(1)
            assert splittable or shard.is_whole(piece, layout)
            item = layout.dtypes[layout.slots[piece.slot].group].itemsize
            assert piece.start * item % ALIGNMENT_BYTES == 0
            assert piece.length or not layout.slots[piece.slot].numel
    assert all(bool((flat == 1).all()) for flat in flats)
    owned = [piece.slot for shard in shards for piece in shard.slices]
    assert {n for n, slot in enumerate(layout.slots) if not slot.numel} <= {n for n in owned if owned.count(n) == 1}
    assert all(bool((view == 1).all()) for view in layout.views(marks).values())
    biggest = max(-(-s.numel * layout.dtypes[s.group].itemsize // 64) * 64 for s in layout.slots)
    if servers == 1:
        assert shards == (full_shard(layout),)
    elif sum(s.numel > 0 for s in layout.slots) >= 2 * servers:  # or each must get one, however small
        assert max(map(bytes_of, shards)) <= layout.total_bytes / servers + 2 * biggest


@pytest.mark.parametrize("servers", [2, 3, 5])
def test_one_large_tensor_is_cut_into_equal_parts(servers):
    layout = FlatLayout.of([("small", torch.empty(3)), ("large", torch.empty(1000, 100)), ("last", torch.empty(7, 7))])
    shards = plan_shards(layout, servers, True)
    sizes = [bytes_of(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 2 * ALIGNMENT_BYTES
    assert [shard.slices[0].slot for shard in shards[1:]] == [1] * (servers - 1)
    for one, other in pairwise(shards):
        assert one.slices[-1 if one is not shards[0] else 1].slot == 1
        assert other.slices[0].start > 0


@pytest.mark.parametrize("servers", [2, 3, 5])
def test_each_server_has_a_part_of_each_section_of_a_large_model(servers):
    layers = [
        (f"{kind}{i}", torch.empty(*shape)) for i in range(8) for kind, shape in (("w", (600, 600)), ("b", (600,)))
    ]
    layout = FlatLayout.of(layers)
    shards = plan_shards(layout, servers, True)
    assert [len(shard.ranges) for shard in shards] == [4] * servers
    last = {max(piece.slot for piece in shard.slices) for shard in shards}
    assert last <= {12, 13, 14, 15}  # of the last two layers, whose gradients come first
    sizes = [bytes_of(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 0.01 * layout.total_bytes
    for shard in shards:  # what a server steps is one tensor for each parameter
        assert len({piece.slot for piece in shard.slices}) == len(shard.slices)
    assert all(len(shard.ranges) == 1 for shard in plan_shards(layout, servers, False))


def test_more_servers_than_parts_are_refused():
    layout = FlatLayout.of([("weight", torch.empty(4, 4)), ("bias", torch.empty(4)), ("none", torch.empty(0))])
    assert [len(shard.slices) for shard in plan_shards(layout, 2, False)] == [1, 2]  # what is empty is last
    with pytest.raises(UnsupportedConfiguration, match=r"cluster.num_servers \(3\) must be at most 2"):
        plan_shards(layout, 3, False)


TABLES = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 20), st.sampled_from(DTYPES)), min_size=1, max_size=4)


@pytest.mark.claim("tables")
@settings(max_examples=200, derandomize=True, deadline=None)
@given(TABLES, st.lists(SHAPES, max_size=3), st.integers(1, 5), st.booleans())
def test_every_row_of_a_table_has_one_owner(tables, dense, servers, splittable):
    tensors = [(f"t{n}", torch.empty(rows, width, dtype=dtype)) for n, (rows, width, dtype) in enumerate(tables)]
    tensors += [(f"d{n}", torch.empty(shape)) for n, shape in enumerate(dense)]
    layout = FlatLayout.of(tensors, tables=[f"t{n}" for n in range(len(tables))])
    try:
        shards = plan_shards(layout, servers, splittable)
    except UnsupportedConfiguration:
        return
    owned = {number: [] for number in layout.tables}
    for place in table_ranges(layout, shards):
        owned[place.slot] += place.rows
        shard = shards[place.server_index]
        assert place.flat_index > 0  # the first range is sent in another way
        assert shard.slots_of_range(place.flat_index) == [place.slot]
        (own,) = [shard.layout.slots[n] for n in shard.layout.tables if shard.layout.slots[n].group == place.flat_index]
        assert own.shape == (len(place.rows), tables[place.slot][1])
    assert all(owned[number] == list(range(tables[number][0])) for number in owned)


@pytest.mark.claim("tables")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("servers", [2, 3, 4])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam, RowWiseAdagrad])
def test_optimizers_over_some_rows_make_the_updates_of_one(kind, servers):
    """Also when the state is joined and divided again in the middle."""
    torch.manual_seed(0)
    first = nn.ParameterList([nn.Parameter(torch.randn(rows, width)) for rows, width in ((900, 7), (2000, 3))])
    models = [first, copy.deepcopy(first)]
    names = [name for name, _ in first.named_parameters()]
    flats = [FlatTensors(dict(model.named_parameters()), tables=names) for model in models]
    layout, states = flats[0].layout, {}
    generator = torch.Generator().manual_seed(1)
    one = kind(models[0].parameters(), lr=0.1)
    for number in (servers, servers + 1, 1):
        shards = plan_shards(layout, number, False)
        parameters = list(flats[1].tensors.values())
        optimizers = [kind(models[1].parameters(), lr=0.1) for _ in shards]
        indices = optimizer_indices(optimizers[0], parameters)
        updaters = []
        for shard, optimizer in zip(shards, optimizers, strict=True):
            updater = ShardUpdater(layout, shard, shard.slice_flats(flats[1].flats), parameters, optimizer)
            updater.load_states(split_state(states or dict(enumerate_states(one)), indices, layout, shard))
            updaters.append(updater)
        for _ in range(3):
            gradients = []
            for parameter in models[0].parameters():
                ids = torch.randperm(len(parameter), generator=generator)[:50].sort().values
                values = torch.randn(50, parameter.shape[1], generator=generator)
                gradients.append(sparse_gradient(ids, values, parameter.shape))
                parameter.grad = gradients[-1].clone()
            one.step()
            for updater in updaters:
                own = [flat.new_zeros(0) for flat in updater.ranges]
                for flat_index, place in updater.tables.items():
                    own[flat_index] = slice_gradient(gradients[place.slot], place.rows)
                updater.assign_gradients(updater.average([own], [1.0]), None)
                updater.step()
        states = merge_state([(u.shard, u.owned_states) for u in updaters], indices, layout)
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))
    expected = dict(enumerate_states(one))
    assert states.keys() == expected.keys()
    for number, state in expected.items():
        assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(states[number][key])) for key in state)


# Optimizers.


class Zoo(nn.Module):
    """Tied, frozen, channels_last, two dtypes, a scalar, one without elements and one without gradients."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 12, 3).to(memory_format=torch.channels_last)
        self.first = nn.Linear(40, 24)
        self.narrow = nn.Linear(64, 33).bfloat16()
        self.tied = nn.Linear(40, 24, bias=False)
        self.tied.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(30, 20).t())
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(50))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(30, 30)


def made(kind, model):
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3], "lr": 0.02}, {"params": parameters[3:]}]
    return kind(groups, lr=0.01, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))


def give_gradients(model, generator):
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name != "unused":
            gradient = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
            parameter.grad = gradient.copy_(torch.randn(parameter.shape, generator=generator))


class Split:
    """A model whose parameters are updated by several optimizers, each over a part of them."""

    def __init__(self, model, kind, servers, state=None):
        self.model = model
        self.flat = FlatTensors(trainable_parameters(model))
        self.layout = self.flat.layout
        self.whole = made(kind, model)
        if state is not None:
            self.whole.load_state_dict(state)
        parameters = list(self.flat.tensors.values())
        numbers = optimizer_indices(self.whole, parameters)
        self.shards = plan_shards(self.layout, servers, is_elementwise(self.whole, servers))
        self.updaters = []
        states = dict(enumerate_states(self.whole))
        for shard in self.shards:
            optimizer = made(kind, model)
            updater = ShardUpdater(self.layout, shard, shard.slice_flats(self.flat.flats), parameters, optimizer)
            updater.load_states(split_state(states, numbers, self.layout, shard))
            self.updaters.append(updater)
        self.numbers = numbers

    def step(self, generator):
        give_gradients(self.model, generator)
        flats = self.layout.allocate()
        views = self.layout.views(flats)
        used = []
        for name, parameter in self.flat.tensors.items():
            used.append(parameter.grad is not None)
            if parameter.grad is not None:
                views[name].copy_(parameter.grad)
            parameter.grad = None
        for updater in self.updaters:
            updater.assign_gradients(updater.average([updater.shard.slice_flats(flats)], [1.0]), tuple(used))
            updater.step(get_hyperparameters(updater.optimizer))

    def state_dict(self):
        parts = [(updater.shard, updater.owned_states) for updater in self.updaters]
        states = merge_state(parts, self.numbers, self.layout)
        return {"state": states, "param_groups": self.whole.state_dict()["param_groups"]}


def enumerate_states(optimizer):
    return optimizer.state_dict()["state"].items()


def assert_same(one, other, exact=True):
    """Nested states that are equal, or differ by rounding."""
    if isinstance(one, torch.Tensor):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        if exact:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name], exact)
    else:
        assert one == other


KINDS = [*ELEMENTWISE, torch.optim.Adafactor]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("servers", [2, 3])
def test_optimizers_over_parts_are_the_optimizer_over_all(kind, servers):
    torch.manual_seed(3)
    model = Zoo()
    plain, split = copy.deepcopy(model), Split(copy.deepcopy(model), kind, servers)
    cut = [p for shard in split.shards for p in shard.slices if not shard.is_whole(p, split.layout)]
    assert bool(cut) is (kind in ELEMENTWISE)
    optimizer = made(kind, plain)
    one, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    for _ in range(4):
        give_gradients(plain, one)
        optimizer.step()
        split.step(other)
    assert_same(plain.state_dict(), split.model.state_dict(), exact=False)
    expected = optimizer.state_dict()["state"]
    trained = {number for number in expected if number in split.state_dict()["state"]}
    assert len(trained) >= 9
    assert_same({n: expected[n] for n in sorted(trained)}, split.state_dict()["state"], exact=False)
    # The merged state continues in torch.optim itself, and over another number of servers.
    state = copy.deepcopy(split.state_dict())
    after = Split(copy.deepcopy(split.model), kind, 5 - servers, state)
    joined = made(kind, plain)
    joined.load_state_dict(state)
    assert_same(after.state_dict()["state"], joined.state_dict()["state"])
    plain.load_state_dict(split.model.state_dict())
    give_gradients(plain, one)
    joined.step()
    after.step(other)
    assert_same(plain.state_dict(), after.model.state_dict(), exact=False)


def test_the_norm_of_all_parts_is_the_norm_of_all():
    torch.manual_seed(1)
    split = Split(Zoo(), torch.optim.SGD, 3)
    give_gradients(split.model, torch.Generator().manual_seed(2))
    gradients = [p.grad.clone() for p in split.flat.tensors.values() if p.grad is not None]
    flats = split.layout.allocate()
    for name, parameter in split.flat.tensors.items():
        if parameter.grad is not None:
            split.layout.views(flats)[name].copy_(parameter.grad)
        parameter.grad = None
    for updater in split.updaters:
        updater.assign_gradients([flat.clone() for flat in updater.shard.slice_flats(flats)], None)
    clipping = NormClipping(1.0)
    norm = clipping.merge([updater.measure(clipping) for updater in split.updaters], 1)
    assert float(norm) == pytest.approx(float(nn.utils.get_total_norm([g.double() for g in gradients])), rel=1e-3)
    for updater in split.updaters:
        updater.clip(NormClipping(float(norm) / 2), norm)
    clipped = clipping.merge([updater.measure(clipping) for updater in split.updaters], 1)
    assert float(clipped) == pytest.approx(float(norm) / 2, rel=1e-3)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(LAYOUTS, st.integers(1, 4), st.sampled_from([1, 3, 64, 300]), st.sampled_from([100, 2000, 1e9]))
def test_parameters_are_divided_at_multiples_of_the_block_and_lengths_cover_each_range(layout, servers, block, most):
    try:
        shards = plan_shards(layout, servers, True, block)
    except UnsupportedConfiguration:
        return
    for shard in shards:
        ranges = split_ranges(shard, layout, most, most, block)
        for number, size in enumerate(ranges.layout.sizes):
            pieces, lengths = ranges.pieces_of_range(number), ranges.lengths_of_range(number)
            assert sum(lengths) == (size if pieces else 0)
            assert len(lengths) == len(pieces)
            starts = [0, *accumulate(lengths)]
            for (piece, slot), start, length in zip(pieces, starts, lengths, strict=False):
                assert piece.start % block == 0
                assert start == slot.offset or not start
                assert length >= piece.length


def test_large_tensors_are_cut_at_multiples_of_the_block():
    layout = FlatLayout.of([("one", torch.empty(300_001)), ("two", torch.empty(5))])
    shards = plan_shards(layout, 3, True, 3)
    cuts = [piece.start for shard in shards for piece in shard.slices if piece.slot == 0]
    assert len(cuts) == 3
    assert all(start % 3 == 0 for start in cuts)
    parts = split_ranges(shards[0], layout, 50_000, 10_000, 3)
    starts = [piece.start for piece in parts.slices if piece.slot == 0]
    assert len(starts) > 1
    assert all(start % 3 == 0 for start in starts)

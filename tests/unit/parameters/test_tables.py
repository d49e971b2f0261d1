"""Gradients of embedding tables by rows: which parameters are tables, how rows are shared, and their mean."""

import os

import pytest
import torch
from torch import nn

from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.optim.clipping import NormClipping
from paramserver.parameters.flat import FlatLayout, FlatTensors
from paramserver.parameters.numerics import explain_errors
from paramserver.parameters.tables import (
    RowSegment,
    coalesce_gradients,
    describe_large,
    find_tables,
    mean_of_rows,
    merge_rows,
    refuse_max_norm,
    with_values,
)
from paramserver.transport.segments import SegmentHost, attach, create_memfd, segment_bytes

ROWS, WIDTH = 50, 3


def gradient(seed, count, rows=ROWS):
    """A sparse gradient with some rows twice."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, rows, (1, count), generator=generator)
    values = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    return torch.sparse_coo_tensor(ids, values, (rows, WIDTH), check_invariants=True)


def model(**settings):
    layers = {"dense": nn.Linear(4, 4), "table": nn.Embedding(ROWS, WIDTH, sparse=True, **settings)}
    return nn.ModuleDict(layers).double()


def layout_of(model):
    return FlatLayout.of(model.named_parameters(), tables=find_tables(model))


def test_the_tables_of_a_model_are_its_trained_sparse_embeddings():
    both = model()
    both["bag"] = nn.EmbeddingBag(5, 2, sparse=True)
    both["again"] = nn.Embedding(5, 2, sparse=True)
    both["again"].weight = both["bag"].weight
    both["frozen"] = nn.Embedding.from_pretrained(torch.zeros(5, 2), freeze=True, sparse=True)
    both["not_sparse"] = nn.Embedding(5, 2)
    assert find_tables(both) == ["table.weight", "bag.weight"]
    assert find_tables(nn.Embedding(3, 2, sparse=True)) == ["weight"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_norm": 2.0}, r"max_norm \(2.0\) of table table.weight"),
        ({"scale_grad_by_freq": True}, r"scale_grad_by_freq of table table.weight \(Embedding\) must be False"),
    ],
)
def test_settings_without_a_sparse_gradient_are_refused(settings, message):
    with pytest.raises(UnsupportedConfiguration, match=message):
        find_tables(model(**settings))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_dense_rows_that_a_forward_changes_are_refused(kind):
    trained = nn.ModuleDict({"words": kind(5, 2, max_norm=0.5)})
    with pytest.raises(UnsupportedConfiguration, match=r"max_norm \(0.5\) of words.weight \(Embedding(Bag)?\) must be"):
        refuse_max_norm(trained)
    refuse_max_norm(trained.requires_grad_(False))  # all trainers change such rows alike
    refuse_max_norm(nn.ModuleDict({"words": kind(5, 2)}))


def test_a_table_that_another_layer_uses_is_refused():
    tied = model()
    tied["head"] = nn.Linear(WIDTH, ROWS)
    tied["head"].weight = tied["table"].weight
    with pytest.raises(UnsupportedConfiguration, match=r"head.weight \(Linear\) must not be the table table.weight"):
        find_tables(tied)


def test_tables_have_flat_tensors_of_their_own_behind_all_others():
    first = nn.ModuleDict({"table": nn.Embedding(ROWS, WIDTH, sparse=True), "dense": nn.Linear(4, 4)}).double()
    layout = layout_of(first)
    assert [slot.name for slot in layout.slots] == ["table.weight", "dense.weight", "dense.bias"]
    assert [slot.group for slot in layout.slots] == [1, 0, 0]
    assert layout.tables == (0,)
    values = {name: p.detach().clone() for name, p in first.named_parameters()}
    flat = FlatTensors(dict(first.named_parameters()), tables=["table.weight"])
    assert flat.layout == layout
    assert all(torch.equal(flat.views[name], values[name]) for name in values)


def test_a_server_reads_the_rows_that_a_trainer_wrote():
    layout = layout_of(model())
    with SegmentHost("test", 5.0) as host:
        server = RowSegment(layout, host.allocate("rows", layout.of_gradients()))
        trainer = RowSegment(layout, attach(host.address, "rows", layout.of_gradients(), 5.0))
        (number,) = layout.tables
        for seed, count in enumerate([7, 0, 200, 1]):
            written = gradient(seed, count).coalesce()
            trainer.write(number, written)
            read = server.read(number)
            assert read.is_coalesced()
            assert torch.equal(read._indices(), written._indices())
            assert torch.equal(read._values(), written._values())
        trainer.write(number, None)
        assert server.read(number)._nnz() == 0


def test_memory_of_rows_is_taken_when_they_are_written():
    table = nn.Embedding(200_000, 16, sparse=True)
    layout = FlatLayout.of(table.named_parameters(), tables=["weight"])
    descriptor = create_memfd("rows", layout.of_gradients())
    try:
        assert segment_bytes(layout.of_gradients()) > 12e6
        assert os.fstat(descriptor).st_blocks * 512 <= 8192
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("sizes", [(0, 0), (0, 3), (1, 1), (5, 4, 6), (300, 200)])
def test_rows_are_merged_as_unique_merges_them(sizes):
    generator = torch.Generator().manual_seed(len(sizes))
    rows = [torch.randperm(400, generator=generator)[:size].sort().values for size in sizes]
    expected = torch.unique(torch.cat(rows), return_inverse=True)
    assert all(torch.equal(own, other) for own, other in zip(merge_rows(rows), expected, strict=True))


def test_the_mean_is_that_of_dense_gradients_in_order():
    parts = [gradient(seed, count).coalesce() for seed, count in ((1, 30), (2, 0), (3, 60))]
    total = parts[0].to_dense()
    for part in parts[1:]:
        total = total + part.to_dense()
    mean = mean_of_rows(parts, [1.0] * 3)
    assert mean.is_coalesced()
    assert torch.equal(mean.to_dense(), total / 3)
    used = {int(row) for part in parts for row in part._indices()[0]}
    assert mean._indices()[0].tolist() == sorted(used)
    expected = (0.5 * parts[0].to_dense() + parts[2].to_dense()) / 3
    assert torch.equal(mean_of_rows([part.clone() for part in parts], [0.5, 1.0, 1.0]).to_dense(), expected)
    assert mean_of_rows(parts[:1], [1.0]) is parts[0]


def test_rows_are_clipped_with_the_norm_of_all_gradients():
    generator = torch.Generator().manual_seed(0)
    norms = []
    for sparse in (True, False):
        parameters = [nn.Parameter(torch.zeros(ROWS, WIDTH).double()), nn.Parameter(torch.zeros(4).double())]
        rows = gradient(5, 90)
        parameters[0].grad = rows if sparse else rows.to_dense()
        parameters[1].grad = torch.randn(4, generator=generator.manual_seed(0), dtype=torch.float64)
        coalesce_gradients(parameters)
        NormClipping(0.1).clip(parameters, 1)
        norms.append([parameters[0].grad.to_dense(), parameters[1].grad])
        measured = NormClipping(0.1).measure(parameters, False)
        assert float(measured) == pytest.approx(0.1, rel=1e-5)
    for own, dense in zip(*norms, strict=True):
        torch.testing.assert_close(own, dense, rtol=1e-12, atol=0)


def test_a_dense_gradient_is_that_of_the_parameter_itself():
    parameter = nn.Parameter(torch.zeros(3))
    assert with_values(parameter) is parameter


@pytest.mark.parametrize(("kind", "ids"), [(nn.Embedding, [[1, 2], [3, 50]]), (nn.EmbeddingBag, [[1, 2], [-1, 4]])])
def test_an_id_without_a_row_is_named(kind, ids):
    module = nn.ModuleDict({"table": kind(ROWS, WIDTH)})
    expected = rf"training_step: id {ids[1][0] if ids[1][0] < 0 else 50} at .* rows of {kind.__name__} table;"
    with pytest.raises(TaskError, match=expected), explain_errors("training_step", None, module):
        module["table"](torch.tensor(ids))


def test_another_error_in_an_embedding_stays_as_it_is():
    module = nn.ModuleDict({"table": nn.Embedding(ROWS, WIDTH)})
    with pytest.raises(RuntimeError, match="indices"), explain_errors("training_step", None, module):
        module["table"](torch.zeros(2, 2))


def test_a_large_embedding_with_dense_gradients_is_described():
    with torch.device("meta"):
        large = nn.ModuleDict({"small": nn.Embedding(10, 4), "users": nn.Embedding(2_000_000, 16)})
        sparse = nn.Embedding(2_000_000, 16, sparse=True)
    assert "Embedding users is dense, and each step computes and applies all of its 122 MiB" in describe_large(large)
    assert describe_large(sparse) is None
    large.requires_grad_(False)
    assert describe_large(large) is None

"""Tables without memory: modules that look up rows give what those of a model that holds the table give."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paramserver.errors import TaskError
from paramserver.parameters.numerics import explain_errors
from paramserver.parameters.remote_tables import RemoteTable, exclude_from_compile, make_remote

ROWS, WIDTH = 40, 3
CASES = {
    "embedding": (nn.Embedding, {}),
    "padding": (nn.Embedding, {"padding_idx": 5}),
    "last_is_padding": (nn.Embedding, {"padding_idx": -1}),
    "mean": (nn.EmbeddingBag, {"mode": "mean"}),
    "sum": (nn.EmbeddingBag, {"mode": "sum", "padding_idx": 5}),
    "weighted": (nn.EmbeddingBag, {"mode": "sum"}),
    "offsets": (nn.EmbeddingBag, {"mode": "mean"}),
    "last_offset": (nn.EmbeddingBag, {"mode": "sum", "include_last_offset": True, "padding_idx": ROWS - 1}),
}


def pair(case):
    """A module with its table, and the same without; and the ids of each lookup of the second."""
    kind, settings = CASES[case]
    own = kind(ROWS, WIDTH, sparse=True, dtype=torch.float64, **settings)
    values, asked = own.weight.detach().clone(), []

    def look_up(ids, rows):
        asked.append(rows)
        return values[rows]

    remote = copy.deepcopy(own)
    make_remote(remote.weight, "table", look_up)
    return own, remote, asked


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_a_table_in_memory(case, dtype):
    generator = torch.Generator().manual_seed(0)
    own, remote, asked = pair(case)
    losses = []
    for module in (own, remote):
        generator.manual_seed(1)
        outputs = []
        for _ in range(2):  # the gradients of two uses are added
            ids = torch.randint(0, ROWS, (6, 4), generator=generator, dtype=dtype)
            ids[0, 0], ids[1, 1] = 5, ROWS - 1
            arguments = {"input": ids}
            if "offset" in case:
                ends = torch.tensor([0, 3, 3, 10, 24], dtype=dtype)
                arguments = {"input": ids.flatten(), "offsets": ends if case == "last_offset" else ends[:-1]}
            elif case == "weighted":
                arguments["per_sample_weights"] = torch.rand(6, 4, generator=generator, dtype=torch.float64)
            outputs.append(module(**arguments))
        loss = sum(output.square().sum() for output in outputs)
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    gradients = [module.weight.grad.coalesce() for module in (own, remote)]
    assert torch.equal(*(g._indices() for g in gradients))
    assert torch.equal(*(g._values() for g in gradients))
    assert gradients[1].shape == own.weight.shape
    for rows in asked:
        assert rows.dtype == torch.int64
        assert rows.tolist() == sorted(set(rows.tolist()))


def test_a_table_takes_no_memory_and_stays_the_parameter_of_its_module():
    module = nn.Embedding(1000, 8, sparse=True)
    parameter = module.weight
    make_remote(parameter, "weight", lambda ids, rows: torch.zeros(len(rows), 8))
    assert module.weight is parameter
    with torch._C.DisableTorchFunctionSubclass():
        assert parameter.untyped_storage().nbytes() == 4
    assert parameter.shape == (1000, 8)
    assert list(module.parameters()) == [parameter]
    assert repr(parameter) == "RemoteTable(weight, shape=(1000, 8), dtype=torch.float32)"
    assert module(torch.zeros(0, dtype=torch.int64)).shape == (0, 8)
    with torch.no_grad():
        assert not module(torch.tensor([1])).requires_grad


def test_a_table_is_used_inside_of_checkpoints_and_without_gradients():
    own, remote, _ = pair("embedding")
    ids = torch.tensor([3, 3, 7])
    for module in (own, remote):
        output = torch.utils.checkpoint.checkpoint(module, ids, use_reentrant=False)
        output.square().sum().backward()
    assert torch.equal(own.weight.grad.to_dense(), remote.weight.grad.to_dense())


def test_gradients_with_respect_to_a_table_can_be_asked_for():
    own, remote, _ = pair("embedding")
    ids, gradients = torch.tensor([3, 3, 7]), []
    for module in (own, remote):
        module(ids).square().sum().backward(inputs=[module.weight])
        (gradient,) = torch.autograd.grad(module(ids).square().sum(), [module.weight])
        gradients.append(gradient.to_dense())
        assert torch.equal(module.weight.grad.to_dense(), gradients[-1])
    assert torch.equal(*gradients)


def test_a_compiled_model_looks_rows_up():
    own, remote, _ = pair("embedding")
    exclude_from_compile(remote)
    outputs = []
    for module in (own, remote):
        compiled = torch.compile(nn.Sequential(module, nn.ReLU()), backend="eager")
        outputs.append([compiled(torch.tensor(ids)) for ids in ([3, 3, 7], [1, 2, 5])])
        sum(output.sum() for output in outputs[-1]).backward()
    assert all(torch.equal(*both) for both in zip(*outputs, strict=True))
    assert torch.equal(own.weight.grad.to_dense(), remote.weight.grad.to_dense())


def test_tensors_like_a_table_can_be_made():
    _, remote, _ = pair("embedding")
    assert remote.weight.new_zeros(3).tolist() == [0.0] * 3
    assert torch.zeros_like(remote.weight).shape == (ROWS, WIDTH)


READS = {
    "clone": lambda table: table.clone(),
    "data": lambda table: table.data,
    "detach": lambda table: table.detach(),
    "norm": lambda table: table.norm(),
    "mul": lambda table: table * 2,
    "__getitem__": lambda table: table[torch.tensor([1])],
    "linear": lambda table: F.linear(torch.ones(WIDTH, dtype=torch.float64), table),
    "fill_": lambda table: table.fill_(0.0),
    "T": lambda table: table.T,
}


@pytest.mark.parametrize("read", READS)
def test_other_uses_of_its_values_are_refused_by_name(read):
    _, remote, _ = pair("embedding")
    with torch.no_grad(), pytest.raises(TaskError, match="of table table must not be used in a trainer, as its rows"):
        READS[read](remote.weight)


def test_functions_with_dense_gradients_are_refused():
    _, remote, _ = pair("embedding")
    with pytest.raises(TaskError, match="table table must be used with sparse=True"):
        F.embedding(torch.tensor([1]), remote.weight)
    rows = F.embedding(torch.tensor([1]), remote.weight, sparse=True)
    assert isinstance(remote.weight, RemoteTable)
    assert not isinstance(rows, RemoteTable)


@pytest.mark.parametrize("ids", [[1, ROWS], [-1, 4]])
def test_an_id_without_a_row_is_named(ids):
    _, remote, asked = pair("embedding")
    model = nn.ModuleDict({"table": remote})
    with (
        pytest.raises(
            TaskError, match=rf"id {next(i for i in ids if not 0 <= i < ROWS)} at .* rows of Embedding table;"
        ),
        explain_errors("training_step", None, model),
    ):
        remote(torch.tensor(ids))
    assert asked == []

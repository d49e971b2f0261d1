"""Row-wise Adagrad: its formula, and that dense and sparse gradients give the same bits."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paramserver.errors import TaskError
from paramserver.optim import RowWiseAdagrad

ROWS = 50


def sparse_gradient(columns, dtype, seed, count=17, coalesced=False, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(rows, (1, count), generator=generator)
    if coalesced:
        indices = indices.unique(dim=1)
    # Multiples of a power of two, so that the sum of a row that occurs twice is exact in any order.
    values = torch.randint(-8, 9, (indices.shape[1], columns), generator=generator).to(dtype) / 16
    gradient = torch.sparse_coo_tensor(indices, values, (rows, columns), check_invariants=True)
    return gradient.coalesce() if coalesced else gradient


@pytest.mark.parametrize("maximize", [False, True])
def test_each_row_is_that_of_the_formula(maximize):
    weight = nn.Parameter(torch.randn(7, 3, dtype=torch.float64))
    optimizer = RowWiseAdagrad([weight], lr=0.25, eps=0.5, initial_accumulator_value=0.125, maximize=maximize)
    expected, sums = weight.detach().clone(), torch.full((7,), 0.125, dtype=torch.float64)
    for _ in range(4):
        weight.grad = torch.randn(7, 3, dtype=torch.float64)
        sign = 1 if maximize else -1
        for row in range(7):
            sums[row] += (weight.grad[row] ** 2).mean()
            expected[row] += sign * 0.25 * weight.grad[row] / (sums[row].sqrt() + 0.5)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(optimizer.state[weight]["sum"], sums, rtol=1e-12, atol=0)


@pytest.mark.parametrize("columns", [1, 3, 8, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_and_dense_gradients_give_the_same_bits(columns, dtype, coalesced):
    initial = torch.randn(ROWS, columns).to(dtype)
    dense, sparse = nn.Parameter(initial.clone()), nn.Parameter(initial.clone())
    optimizers = [RowWiseAdagrad([parameter], lr=0.1) for parameter in (dense, sparse)]
    touched = torch.zeros(ROWS, dtype=torch.bool)
    for number in range(5):
        sparse.grad = sparse_gradient(columns, dtype, number, coalesced=coalesced)
        dense.grad = sparse.grad.to_dense()
        touched[sparse.grad.coalesce().indices()[0]] = True
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(dense, sparse)
    sums = [optimizer.state[p]["sum"] for optimizer, p in zip(optimizers, (dense, sparse), strict=True)]
    assert torch.equal(*sums)
    assert sums[0].shape == (ROWS,)
    assert sums[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(sparse[~touched], initial[~touched])
    assert not torch.equal(sparse, initial)


def test_gradients_of_an_embedding():
    tables = [nn.Embedding(ROWS, 6, sparse=sparse) for sparse in (False, True)]
    tables[1].load_state_dict(tables[0].state_dict())
    optimizers = [RowWiseAdagrad(table.parameters(), lr=0.1) for table in tables]
    for number in range(4):
        indices = torch.randint(ROWS, (9,), generator=torch.Generator().manual_seed(number)).unique()
        for table, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            F.mse_loss(table(indices), torch.ones(len(indices), 6)).backward()
            optimizer.step()
    assert torch.equal(tables[0].weight, tables[1].weight)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1)])
def test_parameters_without_elements(shape):
    weight = nn.Parameter(torch.ones(shape))
    weight.grad = torch.ones(shape)
    optimizer = RowWiseAdagrad([weight])
    optimizer.step()
    assert optimizer.state[weight]["sum"].isfinite().all()


def test_a_gradient_without_rows_changes_nothing():
    weight = nn.Parameter(torch.ones(4, 2))
    weight.grad = sparse_gradient(2, torch.float32, seed=0, count=0, rows=4)
    RowWiseAdagrad([weight]).step()
    assert torch.equal(weight, torch.ones(4, 2))


def test_it_is_stopped_and_resumed():
    tables = [nn.Parameter(torch.ones(4, 2, dtype=torch.float64)) for _ in range(2)]
    first, second = (RowWiseAdagrad([table], lr=0.1) for table in tables)
    for _ in range(2):
        tables[0].grad = torch.rand(4, 2, dtype=torch.float64)
        first.step()
    tables[1].data.copy_(tables[0].data)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    tables[0].grad = torch.rand(4, 2, dtype=torch.float64)
    tables[1].grad = tables[0].grad.clone()
    first.step()
    second.step()
    assert torch.equal(*tables)


def test_the_loss_of_a_closure_is_returned():
    weight = nn.Parameter(torch.ones(2, 2))

    def closure():
        loss = weight.sum()
        loss.backward()
        return loss

    assert RowWiseAdagrad([weight]).step(closure).item() == 4.0
    assert weight.sum().item() < 4.0


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "message"),
    [
        ((3,), torch.float32, {}, r"a parameter of shape \(3,\) and torch\.float32 must have two dimensions"),
        ((3, 2), torch.complex64, {}, r"must have two dimensions and be of floating point for RowWiseAdagrad"),
        ((3, 2), torch.float32, {"lr": -1.0}, r"lr \(-1\.0\) must be at least 0"),
        ((3, 2), torch.float32, {"eps": 0.0}, r"eps \(0\.0\) must be above 0"),
        ((3, 2), torch.float32, {"initial_accumulator_value": -1}, r"initial_accumulator_value \(-1\) must be"),
    ],
)
def test_what_it_cannot_step_is_refused(shape, dtype, options, message):
    with pytest.raises(TaskError, match=message):
        RowWiseAdagrad([nn.Parameter(torch.zeros(shape, dtype=dtype))], **options)


def test_a_gradient_with_two_sparse_dimensions_is_refused():
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.eye(2).to_sparse()
    with pytest.raises(TaskError, match=r"has 2 sparse dimensions; it must have one"):
        RowWiseAdagrad([weight]).step()

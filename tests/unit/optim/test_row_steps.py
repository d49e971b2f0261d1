"""Steps over copies of rows change no bit of what the optimizer's own step does."""

from contextlib import ExitStack, closing

import pytest
import torch
from torch import nn

from paramserver.optim import RowWiseAdagrad, row_steps
from paramserver.optim.parallel_step import ThreadTeam
from paramserver.optim.row_steps import RowStep
from paramserver.parameters.tables import sparse_gradient

ROWS = 900

pytestmark = [
    pytest.mark.claim("tables"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]


@pytest.fixture(autouse=True)
def every_table_is_large(monkeypatch):
    monkeypatch.setattr(row_steps, "LARGE_BYTES", 1)


def parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, 7), (40, 3), (ROWS, 16)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(own, generator, count):
    for parameter in own:
        rows = torch.randperm(len(parameter), generator=generator)[:count].sort().values
        values = torch.randn(len(rows), parameter.shape[1], generator=generator)
        parameter.grad = sparse_gradient(rows, values, parameter.shape)
    own[1].grad = None if count == 5 else own[1].grad


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam, RowWiseAdagrad])
def test_a_step_over_copies_of_rows_is_the_step_of_the_optimizer(kind, threads):
    one, other = parameters(), parameters()
    places = [parameter.data_ptr() for parameter in other]
    optimizers = [kind(own, lr=0.1) for own in (one, other)]
    step = RowStep(optimizers[1])
    with ExitStack() as stack:
        step.team = stack.enter_context(closing(ThreadTeam(threads - 1))) if threads > 1 else None
        for number, count in enumerate((30, 5, 1, 200, 0)):
            for own in (one, other):
                give_gradients(own, torch.Generator().manual_seed(number), count)
            optimizers[0].step()
            step()
    assert [parameter.data_ptr() for parameter in other] == places
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][number][name])), name


def test_a_step_that_fails_leaves_the_parameters_in_place():
    class Failing(torch.optim.Adagrad):
        steps_rows = True
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise RuntimeError("of the optimizer")
            return super().step(closure)

    own = parameters()
    optimizer = Failing(own, lr=0.1)
    step = RowStep(optimizer)
    give_gradients(own, torch.Generator().manual_seed(0), 30)
    step()
    before = [parameter.detach().clone() for parameter in own]
    optimizer.fails = True
    give_gradients(own, torch.Generator().manual_seed(1), 30)
    with pytest.raises(RuntimeError, match="of the optimizer"):
        step()
    assert all(torch.equal(*pair) for pair in zip(own, before, strict=True))
    assert optimizer.state[own[0]]["sum"].shape == (ROWS, 7)

"""The version that changed each row of a table last."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paramserver.optim.named_optimizers import JointOptimizer, by_position
from paramserver.optim.row_steps import ROW_VERSION, record_rows
from paramserver.parameters.tables import opt_out_of_checks, sparse_gradient


def give_gradient(parameter, rows):
    parameter.grad = sparse_gradient(torch.tensor(rows), torch.ones(len(rows), 2), parameter.shape)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_rows_have_the_version_of_their_last_step_also_after_a_state_is_loaded(kind):
    embedding = nn.Embedding(5, 2, sparse=True)
    opt_out_of_checks(embedding)
    dense, table = nn.Parameter(torch.ones(3)), embedding.weight

    def build():
        return JointOptimizer(by_position([torch.optim.SGD([dense], lr=0.1), kind([table], lr=0.1)]))

    optimizer = build()
    for version, rows in enumerate(([0, 1], [1, 4], [0]), start=1):
        dense.grad = torch.ones(3)
        give_gradient(table, rows)
        optimizer.step()
        record_rows(optimizer, version)
        if version == 2:
            stored, optimizer = optimizer.state_dict(), build()
            for own, state in zip(optimizer.by_name.values(), stored["optimizers"], strict=True):
                own.load_state_dict(state)
    states = [own.state for own in optimizer.by_name.values()]
    assert states[1][table][ROW_VERSION].tolist() == [3, 2, 0, 0, 2]
    assert ROW_VERSION not in states[0][dense]


def test_an_optimizer_may_have_a_plain_dictionary_as_its_state_or_none():
    table = nn.Parameter(torch.ones(5, 2))
    give_gradient(table, [3])
    plain, without = (SimpleNamespace(param_groups=[{"params": [table]}]) for _ in range(2))
    plain.state = {}
    for optimizer in (plain, without):
        record_rows(optimizer, 7)
    assert plain.state[table][ROW_VERSION].tolist() == [0, 0, 0, 7, 0]
    assert not hasattr(without, "state")

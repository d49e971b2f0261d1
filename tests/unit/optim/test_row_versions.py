"""The version that changed each row of a table last."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paramserver import Task
from paramserver.config import TrainingConfig
from paramserver.optim.named_optimizers import JointOptimizer, by_position
from paramserver.optim.row_steps import ROW_VERSION, record_rows
from paramserver.optim.updater import Updater
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
    # Which rows it changes is not known.
    assert plain.state[table][ROW_VERSION].tolist() == [7] * 5
    assert not hasattr(without, "state")


class Decays(torch.optim.SGD):
    """Changes all rows in each step, also without a gradient."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(0.9)


class WithHook(torch.optim.SGD):
    """Has a hook that changes all rows after each step."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.register_step_post_hook(lambda own, *_: own.param_groups[0]["params"][0].data.mul_(0.9))


class OneTable(Task):
    def __init__(self, kind=torch.optim.SGD, **arguments):
        self.kind, self.arguments = kind, arguments

    def build_optimizer(self, model):
        return self.kind(model.parameters(), lr=0.1, **self.arguments)


def updater_of(task, **settings):
    torch.manual_seed(0)
    table = nn.Embedding(5, 2, sparse=settings.pop("sparse", True), **settings)
    return Updater(task, table, TrainingConfig()), table


def update(updater, table, version, rows, dense=False):
    if rows:
        table(torch.tensor(rows)).sum().backward()
    if dense:  # as that of a table that another layer uses in this step
        table.weight.grad = table.weight.grad.to_dense() + 1.0
    updater.apply(version)
    updater.clear_gradients()


def versions_of(updater, table):
    return updater.optimizer.state[table.weight][ROW_VERSION]


@pytest.mark.parametrize(
    ("task", "settings", "dense", "expected"),
    [
        (OneTable(), {}, (), [4, 2, 0, 3, 0]),
        (OneTable(momentum=0.9), {}, (), None),
        (OneTable(Decays), {}, (), [5] * 5),
        (OneTable(WithHook), {}, (), [5] * 5),
        (OneTable(torch.optim.Adagrad), {}, (2, 3), [4, 3, 3, 3, 3]),
        (OneTable(), {"max_norm": 0.1}, (), None),
    ],
)
def test_no_row_that_has_changed_since_a_version_is_left_out(task, settings, dense, expected):
    updater, table = updater_of(task, **settings)
    weights = [table.weight.detach().clone()]
    for version, rows in enumerate(([0, 1], [1], [3], [0], []), start=1):
        table(torch.tensor([4]))  # a validation
        update(updater, table, version, rows, version in dense)
        weights.append(table.weight.detach().clone())
    for since, before in enumerate(weights):
        changed = (before != weights[-1]).any(1)
        assert not bool((changed & (versions_of(updater, table) <= since)).any()), since
    if expected is not None:
        assert versions_of(updater, table).tolist() == expected


def test_versions_of_rows_do_not_outlive_the_table():
    """A run that resumes with dense gradients exports the whole parameter, and all rows if it is a table again."""
    updaters = [updater_of(OneTable(), sparse=sparse) for sparse in (True, False, True)]
    for number, (updater, table) in enumerate(updaters):
        if number:
            updater.load_state_dict(updaters[number - 1][0].state_dict())
        update(updater, table, number + 1, [number])
    assert ROW_VERSION not in updaters[1][0].optimizer.state[updaters[1][1].weight]
    assert versions_of(*updaters[2]).tolist() == [2, 2, 3, 2, 2]

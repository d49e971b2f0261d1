"""A list of optimizers as one: groups, states, schedules, clipping, threads, and what is refused."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, lr_scheduler

from paramserver import Task
from paramserver.config import TrainingConfig
from paramserver.errors import CheckpointError, TaskError
from paramserver.optim import RowWiseAdagrad
from paramserver.optim.named_optimizers import states_by_position, stored_groups, with_states
from paramserver.optim.parallel_step import ParallelStep, ThreadTeam, is_elementwise
from paramserver.optim.updater import Updater
from paramserver.server.update_pipeline import why_not_by_bucket


class Listed(Task):
    """The optimizers and schedulers are made by functions of the model, and of the optimizers."""

    def __init__(self, optimizers=None, schedulers=None):
        self.optimizers = optimizers or adam_and_sgd
        self.schedulers = schedulers or (lambda optimizers: None)

    def build_optimizer(self, model):
        return self.optimizers(model)

    def build_scheduler(self, optimizer):
        return self.schedulers(optimizer)


def adam_and_sgd(model):
    groups = [{"params": [model["dense"].weight], "lr": 0.25}, {"params": [model["dense"].bias]}]
    return [Adam(groups, lr=0.125), SGD(model["table"].parameters(), lr=0.5, momentum=0.9)]


def adam_and_rows(model):
    return [Adam(model["dense"].parameters()), RowWiseAdagrad(model["table"].parameters())]


def build_model():
    torch.manual_seed(3)
    return nn.ModuleDict({"dense": nn.Linear(3, 2), "table": nn.Embedding(5, 3)})


def made(optimizers=None, schedulers=None, **training):
    model = build_model()
    return model, Updater(Listed(optimizers, schedulers), model, TrainingConfig(**training))


def set_gradients(model, number, factor=1.0):
    for position, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(10 * number + position)
        parameter.grad = factor * torch.randn(parameter.shape, generator=generator)


def step(model, updater, number, factor=1.0):
    set_gradients(model, number, factor)
    updater.apply(number)
    updater.clear_gradients()


def test_a_step_is_that_of_each_in_order():
    model, updater = made()
    plain = copy.deepcopy(model)
    optimizers = adam_and_sgd(plain)
    for number in range(1, 4):
        step(model, updater, number)
        set_gradients(plain, number)
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert str(updater.optimizer.state_dict()) == str(
        {"optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    )
    assert updater.lr == (0.25, 0.125, 0.5)
    assert updater.parameters_of == {}


def test_it_is_one_optimizer_for_other_code():
    model, updater = made(accumulate_batches=2)
    joint = updater.optimizer
    assert why_not_by_bucket(joint, None) == "there are several optimizers"
    assert is_elementwise(joint, servers=2)
    assert not is_elementwise(
        made(lambda m: [adam_and_sgd(m)[0], RowWiseAdagrad(m["table"].parameters())])[1].optimizer, 2
    )
    joint.param_groups[2]["lr"] = 0.75
    assert joint.by_name["1"].param_groups[0]["lr"] == 0.75
    step(model, updater, 1)
    states = states_by_position(joint.state_dict())
    assert sorted(states) == [0, 1, 2]
    assert str(with_states(joint, states)) == str(joint.state_dict())
    assert [group["lr"] for group in stored_groups(joint.state_dict())] == [0.25, 0.125, 0.75]
    model["dense"].weight.grad = torch.ones(2, 3)
    joint.zero_grad()
    assert model["dense"].weight.grad is None


def test_threads_step_each_of_them():
    models = [build_model(), build_model()]
    optimizers = [Updater(Listed(), model, TrainingConfig()).optimizer for model in models]
    team = ThreadTeam(2)
    try:
        parallel = ParallelStep(optimizers[1], team)
        assert parallel.supports(optimizers[1])
        for parameter, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            parameter.grad = torch.randn(parameter.shape)
            other.grad = parameter.grad.clone()
        optimizers[0].step()
        parallel()
    finally:
        team.close()
    assert str(optimizers[0].state_dict()) == str(optimizers[1].state_dict())
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_the_norm_is_of_all_gradients():
    model, updater = made(lambda m: [SGD(part.parameters(), lr=1.0) for part in m.values()], clip_grad_norm=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    step(model, updater, 1, factor=100.0)
    moved = torch.cat([(old - p.detach()).flatten() for old, p in zip(before, model.parameters(), strict=True)])
    assert moved.norm().item() == pytest.approx(1.0, rel=1e-5)


# Schedules.


def halve(optimizer):
    return lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize(
    ("schedulers", "rates"),
    [
        (lambda optimizers: None, (0.25, 0.125, 0.5)),
        (lambda optimizers: halve(optimizers[1]), (0.25, 0.125, 0.125)),
        (lambda optimizers: {"scheduler": halve(optimizers[0]), "every": "step"}, (0.0625, 0.03125, 0.5)),
        (lambda optimizers: [None, halve(optimizers[1])], (0.25, 0.125, 0.125)),
        (lambda optimizers: tuple(map(halve, optimizers)), (0.0625, 0.03125, 0.125)),
        (lambda optimizers: [{"scheduler": halve(optimizers[0]), "every": "epoch"}, None], (0.125, 0.0625, 0.5)),
    ],
)
def test_schedules_of_one_and_of_each(schedulers, rates):
    model, updater = made(schedulers=schedulers)
    step(model, updater, 1)
    updater.on_epoch_end()
    step(model, updater, 2)
    assert updater.lr == rates
    state = copy.deepcopy(updater.state_dict())
    again, resumed = made(schedulers=schedulers)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(state)
    assert resumed.lr == rates
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for own, of in ((model, updater), (again, resumed)):
            step(own, of, 3)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    assert str(updater.state_dict()) == str(resumed.state_dict())


def test_schedulers_are_as_many_as_optimizers():
    with pytest.raises(TaskError, match="returned a list of 1; it must have one entry for each of the 2 optimizers"):
        made(schedulers=lambda optimizers: [halve(optimizers[0])])


# What is refused.


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        (lambda m: [], r"returned no optimizer; it must return at least one$"),
        (
            lambda m: [*adam_and_sgd(m), m],
            r"returned ModuleDict at position 2 of a list; it must return a torch\.optim",
        ),
        (lambda m: [adam_and_sgd(m)[0], {"b": adam_and_sgd(m)[1]}], r"returned dict at position 1 of a list; it must"),
        (
            lambda m: [*adam_and_sgd(m), SGD([m["table"].weight], lr=1.0)],
            r"gives table\.weight to two optimizers \(1, 2\); give each parameter to one of them$",
        ),
        (lambda m: [Adam(m["dense"].parameters()), torch.optim.LBFGS(m["table"].parameters())], "needs a closure"),
    ],
)
def test_what_is_no_list_of_optimizers_is_refused(optimizers, message):
    with pytest.raises(TaskError, match=message):
        made(optimizers)


def one(model):
    return Adam(model.parameters())


def named(model):
    return dict(zip("ab", adam_and_sgd(model), strict=True))


def with_bias_apart(model):
    return [Adam([model["dense"].weight]), SGD([model["dense"].bias], lr=1.0), SGD(model["table"].parameters(), lr=1.0)]


def other_classes(model):
    return [Adagrad(model["dense"].parameters()), SGD(model["table"].parameters(), lr=1.0)]


@pytest.mark.parametrize(
    ("stored", "built", "message"),
    [
        (adam_and_sgd, one, r"not one of this Adam \(KeyError: 'param_groups'\)"),
        (adam_and_sgd, named, r"has optimizers 0, 1, and build_optimizer returns a, b"),
        (adam_and_sgd, with_bias_apart, r"has optimizers 0, 1, and build_optimizer returns 0, 1, 2"),
        (adam_and_sgd, other_classes, r"not one of this Adagrad"),
        (one, adam_and_sgd, r"has one optimizer, and build_optimizer returns 0, 1"),
        (named, adam_and_sgd, r"has optimizers a, b, and build_optimizer returns 0, 1"),
    ],
)
def test_the_states_of_other_optimizers_are_refused(stored, built, message):
    model, updater = made(stored)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    updater.optimizer.step()
    with pytest.raises(CheckpointError, match=message):
        made(built)[1].load_state_dict(updater.state_dict())

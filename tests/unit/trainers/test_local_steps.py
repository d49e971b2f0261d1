"""Local steps: the version stays as it is during a round, and what the round changed are its gradients."""

import pytest
import torch
from torch import nn

from paramserver import Task
from paramserver.config import Config, TrainingConfig
from paramserver.errors import NotFinite, TaskError
from paramserver.trainers.local_steps import LocalSteps


class Descent(Task):
    def __init__(self, leaves_out=False):
        self.leaves_out = leaves_out

    def build_optimizer(self, model):
        parameters = [model.weight] if self.leaves_out else model.parameters()
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)


def local_steps(model, task=None, **training):
    return LocalSteps(task or Descent(), model, Config(training=TrainingConfig(local_steps=3, **training)))


def take_round(local, model, numbers=(1, 2, 3), scale=1.0):
    local.updater.clear_gradients()
    local.begin()
    for number in numbers:
        (model(torch.ones(1, 2)).sum() * scale).backward()
        local.step(number)
    return local.end()


def test_the_version_keeps_its_memory_and_its_values():
    model = nn.Linear(2, 1)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    version = [parameter.detach().clone() for parameter in model.parameters()]
    local = local_steps(model)
    for _ in range(2):
        local.begin()
        assert all(p.data_ptr() != place for p, place in zip(model.parameters(), places, strict=True))
        model(torch.ones(1, 2)).sum().backward()
        local.step(1)
        changed = [parameter.detach().clone() for parameter in model.parameters()]
        local.end()
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        for parameter, before, after in zip(model.parameters(), version, changed, strict=True):
            assert torch.equal(parameter, before)
            assert torch.equal(parameter.grad, before - after)
        local.updater.clear_gradients()


def test_the_drift_is_the_norm_of_the_change_relative_to_that_of_the_version():
    model = nn.Linear(2, 1)
    drift = take_round(local_steps(model), model)
    change = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    version = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert drift == pytest.approx(float(change.norm() / version.norm()), rel=1e-5)


def test_a_parameter_that_the_optimizer_does_not_have_gets_no_gradient():
    model = nn.Linear(2, 1)
    local = local_steps(model, Descent(leaves_out=True))
    take_round(local, model)
    assert model.weight.grad is not None
    assert model.bias.grad is None


def test_an_optimizer_may_give_a_parameter_other_memory():
    model = nn.Linear(2, 1)
    local, version = local_steps(model), model.weight.detach().clone()
    local.begin()
    model.weight.data = model.weight.data + 1
    local.end()
    assert torch.equal(model.weight, version)
    assert torch.allclose(model.weight.grad, torch.full((1, 2), -1.0))


def test_schedule_and_state_continue_from_round_to_round_and_in_another_process():
    def trained(rounds, state=None):
        torch.manual_seed(1)
        model = nn.Linear(2, 1)
        local = local_steps(model)
        if state is not None:
            local.updater.load_state_dict(state)
        for _ in range(rounds):
            take_round(local, model)
        return local, [parameter.grad.clone() for parameter in model.parameters()]

    local, _ = trained(1)
    assert local.updater.lr == pytest.approx((0.05,))
    assert local.updater.optimizer.state_dict()["state"][0]["momentum_buffer"].abs().sum() > 0
    _, whole = trained(2)
    _, continued = trained(1, local.updater.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(whole, continued, strict=True))


def test_gradients_of_local_steps_are_clipped():
    model = nn.Linear(2, 1)
    local = local_steps(model, clip_grad_norm=1e-3)
    assert take_round(local, model, numbers=[1], scale=1e6) < 1e-2
    with pytest.raises(NotFinite, match="step 2"):
        take_round(local, model, numbers=[2], scale=float("inf"))


def test_another_thread_can_read_the_version_in_mid_round():
    model = nn.Linear(2, 1)
    local, version = local_steps(model), model.weight.detach().clone()
    local.begin()
    model(torch.ones(1, 2)).sum().backward()
    local.step(1)
    changed = model.weight.detach().clone()
    with local.version():
        assert torch.equal(model.weight, version)
    assert torch.equal(model.weight, changed)
    local.end()
    with local.version():
        assert torch.equal(model.weight, version)


def test_a_change_of_a_parameter_that_the_optimizer_does_not_have_is_refused():
    model = nn.Linear(2, 1)
    local = local_steps(model, Descent(leaves_out=True))
    local.begin()
    with torch.no_grad():
        model.bias.add_(1)
    with pytest.raises(TaskError, match="parameter bias was changed in a round"):
        local.end()

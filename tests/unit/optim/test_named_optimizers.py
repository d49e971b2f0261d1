"""Several optimizers as one: numbering, states and schedules."""

import pytest
import torch
from torch import nn

from paramserver import Task
from paramserver.config import TrainingConfig
from paramserver.errors import CheckpointError, TaskError, UnsupportedConfiguration
from paramserver.optim.parallel_step import is_elementwise
from paramserver.optim.updater import Updater
from paramserver.server.update_pipeline import why_not_by_bucket


class Two(Task):
    def __init__(self, names=("a", "b"), schedule=None):
        self.names, self.schedule = names, schedule

    def build_model(self):
        return nn.ModuleDict({"first": nn.Linear(2, 1), "second": nn.Linear(1, 1)})

    def build_optimizer(self, model):
        parts = zip(self.names, model.values(), strict=True)
        return {name: torch.optim.SGD(part.parameters(), lr=0.5, momentum=0.9) for name, part in parts}

    def build_scheduler(self, optimizers):
        return self.schedule(optimizers) if self.schedule else None

    def train_source(self, partition):
        return None

    def training_step(self, model, batch, batch_idx):
        return None


def made(task=None, **training):
    task = task or Two()
    model = task.build_model()
    return model, Updater(task, model, TrainingConfig(**training))


def step(updater, part, name, number):
    for parameter in part.parameters():
        parameter.grad = torch.ones_like(parameter)
    updater.apply(number, name)
    updater.optimizer.zero_grad()


def test_only_the_optimizer_whose_parameters_have_gradients_is_stepped():
    model, updater = made()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step(updater, model["second"], "b", 1)
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert changed == ["second.weight", "second.bias"]
    assert updater.state_dict()["optimizer"]["a"]["state"] == {}
    assert updater.parameters_of == {"a": ("first.weight", "first.bias"), "b": ("second.weight", "second.bias")}
    assert updater.lr == (0.5, 0.5)


def test_schedules_by_step_follow_the_updates_of_their_own_optimizer():
    def halve(optimizers):
        return {name: torch.optim.lr_scheduler.StepLR(own, 1, 0.5) for name, own in optimizers.items()}

    model, updater = made(Two(schedule=halve))
    step(updater, model["second"], "b", 1)
    step(updater, model["second"], "b", 2)
    step(updater, model["first"], "a", 3)
    assert updater.lr == (0.25, 0.125)
    _, other = made(Two(schedule=halve))
    other.load_state_dict(updater.state_dict())
    assert other.lr == (0.25, 0.125)


def test_the_states_of_other_optimizers_are_refused():
    model, updater = made()
    step(updater, model["first"], "a", 1)
    _, other = made(Two(names=("a", "c")))
    with pytest.raises(CheckpointError, match=r"has optimizers a, b, and build_optimizer returns a, c"):
        other.load_state_dict(updater.state_dict())
    with pytest.raises(CheckpointError, match=r"has one optimizer, and build_optimizer returns a, c"):
        other.load_state_dict({"optimizer": torch.optim.SGD(model.parameters(), lr=0.1).state_dict()})


def test_what_several_optimizers_mean_elsewhere():
    _, updater = made()
    assert why_not_by_bucket(updater.optimizer, None) == "there are several optimizers"
    assert is_elementwise(updater.optimizer, servers=2)
    with pytest.raises(UnsupportedConfiguration, match=r"accumulate_batches \(2\) must be 1 with several"):
        made(accumulate_batches=2)
    with pytest.raises(TaskError, match="at least one"):
        Updater(Two(names=()), nn.ModuleDict(), TrainingConfig())

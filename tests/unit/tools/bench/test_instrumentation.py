"""The user's task in a benchmark: what it sees of the limits of its run, and what becomes of its schedules."""

from types import SimpleNamespace

import pytest
import torch
from launching import write_config
from torch import nn

from paramserver.task import construct_task
from paramserver.tools.bench.cases import RequestedCases, make_cases
from paramserver.tools.bench.instrumentation import InstrumentedTask, ending
from paramserver.tools.bench.measure import run_config

SCHEDULED = """
import torch
from paramserver import Task

class Scheduled(Task):
    def build_model(self):
        return torch.nn.Linear(1, 1)
    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=self.total_steps)
    def train_source(self, partition):
        return torch.utils.data.TensorDataset(torch.zeros(64, 1))
    def training_step(self, model, batch, batch_idx):
        return model(batch[0]).sum()
"""


@pytest.fixture
def optimizer():
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)


def step(optimizer, scheduler, times):
    for _ in range(times):
        optimizer.step()
        scheduler.step()
    return scheduler.get_last_lr()


def test_a_schedule_has_the_length_of_the_users_run_and_ends_there(tmp_path, optimizer):
    (tmp_path / "scheduled.py").write_text(SCHEDULED)
    training = {"max_steps": None, "max_epochs": 5, "batch_size": 8, "validate_every": 7}
    file = write_config(tmp_path, task=f"{tmp_path}/scheduled.py:Scheduled", task_args={}, training=training)
    (case, *_) = make_cases(RequestedCases(file, modes="rpc", trainers="2"))
    method = SimpleNamespace(folders=(tmp_path,), warm_s=1.0, seconds=2.0, target=None)
    config = run_config(case, 0, method, tmp_path, 0)
    task = construct_task(InstrumentedTask, None, config.task_args)
    task.config = config
    assert (config.training.max_epochs, config.training.validate_every) == (None, 0)
    assert (task.config.training.max_epochs, task.config.training.validate_every) == (5, 7)
    assert task.config.logging == config.logging
    assert task.total_steps == 5 * 64 // 8
    scheduler = task.build_scheduler(optimizer)
    assert step(optimizer, scheduler, 39) == [pytest.approx(4e-6)]
    assert step(optimizer, scheduler, 1) == step(optimizer, scheduler, 100)


def test_each_interval_has_its_end_and_an_unknown_one_has_none(optimizer):
    def falling():
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 10 - steps)

    ends = {"step": 4, "epoch": 2}
    built = ending({"a": falling(), "b": {"scheduler": falling(), "every": "epoch"}}, ends)
    assert step(optimizer, built["a"], 9) == [6]
    assert step(optimizer, built["b"]["scheduler"], 9) == [8]
    plateau = {"scheduler": falling(), "every": "validation", "metric": "loss"}
    assert ending([plateau, None], ends) == [plateau, None]
    assert step(optimizer, ending(falling(), {"step": None}), 9) == [1]
    assert ending(falling(), ends).state_dict().keys() == falling().state_dict().keys()

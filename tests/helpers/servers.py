"""What unit tests of servers share: a task of linear layers without data, and the checkpoints of a run that starts."""

from types import SimpleNamespace

import torch
from torch import nn

from paramserver import Task


class SumOfOutputs(Task):
    """The loss is the sum of what linear layers of these sizes, without biases, make of a batch."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def build_model(self):
        pairs = zip(self.sizes, self.sizes[1:], strict=False)
        return nn.Sequential(*(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in pairs))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def train_source(self, partition):
        return None

    def training_step(self, model, batch, batch_idx):
        return model(batch).sum()


def no_checkpoints(monitor):
    """The CheckpointManager of a run that starts, as far as a ParameterServer asks it."""
    return SimpleNamespace(
        monitor=monitor,
        view=1,
        resumes=False,
        consistency_state={},
        ledger_state={"rows": {}},
        restore_model=lambda model: None,
        restore_optimizer=lambda updater: None,
        trainer_part=lambda index, newest: None,
    )

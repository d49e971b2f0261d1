"""Tasks of runs whose trainers join and leave: what was applied can be counted."""

import logging
import os
import select
import signal
from pathlib import Path

import torch
from torch import nn

from paramserver import Task

SAMPLES = 600


class Weights(nn.Module):
    """One weight for each sample; its gradient for a batch is -1 at the samples of the batch."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, indices):
        return self.weights[indices]


class CountsSamples(Task):
    """With SGD, where each push is one update, a weight is the number of times that its sample was applied.

    Each process also writes the indices of its batches to a file of its own.

    Args:
        folder: for these files. Steps are slow until it has a file ``fast``.
        step_s: duration of a slow step.
    """

    def __init__(self, folder, step_s=0.05):
        self.folder, self.step_s = Path(folder), step_s

    def build_model(self):
        if os.environ.get("FAILURE") == "raise":
            raise RuntimeError("the model cannot be built")
        if os.environ.get("FAILURE") == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return Weights()

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def train_source(self, partition):
        return torch.utils.data.TensorDataset(torch.arange(SAMPLES))

    def training_step(self, model, batch, batch_idx):
        if not (self.folder / "fast").exists():
            select.select([], [], [], self.step_s)
        with (self.folder / f"indices-{os.getpid()}").open("a") as file:
            file.write("".join(f"{index}\n" for index in batch[0].tolist()))
        return -model(batch[0]).sum()


class CountsUpdates(CountsSamples):
    """Each update adds 1 to all weights, and they are published."""

    def training_step(self, model, batch, batch_idx):
        super().training_step(model, batch, batch_idx)
        return -model.weights.sum()


class DiesBetweenGenerations(CountsSamples):
    """The first process of trainer 1 dies after it has left a generation, before it joins another one."""

    def on_train_start(self):
        if self.trainer.trainer_index == 1:
            logging.getLogger("paramserver").addFilter(self._die_before_another)

    def _die_before_another(self, record):
        if "this process joins again" in record.getMessage() and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return True


class Opaque(CountsSamples):
    """Its samples come from an iterable that cannot be divided."""

    def train_source(self, partition):
        return iter([(torch.tensor(index),) for index in range(SAMPLES)])

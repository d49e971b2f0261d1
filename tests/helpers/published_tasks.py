"""A model that shows its version: each update adds 1 to every parameter, and each step counts in a module buffer."""

import time

import numpy as np
import torch
from injected_faults import Injected
from tasks import ReferenceTask
from torch import nn
from torch.utils.data import TensorDataset


class Counting(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size, 1 + number) for number in range(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        if self.training:
            self.steps += 1
        return inputs.sum() * 0 - sum(weight.sum() for weight in self.weights)


class Counted(ReferenceTask):
    def __init__(self, size=500, **options):
        super().__init__(validation=0, **options)
        self.size = size

    def build_model(self):
        return Counting(self.size)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def train_source(self, partition):
        return TensorDataset(torch.zeros(4096, 1))

    def training_step(self, model, batch, batch_idx):
        return model(batch[0])


class CountedUnevenly(Counted):
    """Trainer 0 has 10 batches of eight, and trainer 1 has 40."""

    def train_source(self, partition):
        return iter([{"x": torch.zeros(1)}] * (80 if partition.index == 0 else 320))

    def training_step(self, model, batch, batch_idx):
        time.sleep(0.02)
        return model(batch["x"])


class CountedWithTarget(Counted):
    """Has a frozen parameter, which the task sets to the number of batches."""

    def build_model(self):
        model = super().build_model()
        model.target = nn.Parameter(torch.zeros(3), requires_grad=False)
        return model

    def on_batch_end(self, batch_idx):
        super().on_batch_end(batch_idx)
        self.trainer.unwrapped_model.target.data.fill_(batch_idx + 1)
        time.sleep(0.02)


class CountedWithFault(Injected, Counted):
    def build_scheduler(self, optimizer):
        return None


class Simulated(Counted):
    """Trains on what simulations send, each of which has read a version first."""

    def train_source(self, partition):
        from paramserver.sources import Simulations

        return Simulations()

    def training_step(self, model, batch, batch_idx):
        return model(batch["u"])


def act(parameters, client):
    """Sends the step of the newest version with each sample."""
    from paramserver.subscriber import Subscriber

    with Subscriber() as model:
        for step in range(client.steps):
            client.send(step, {"u": np.full(3, model.latest(timeout_s=20).step, "float32")})

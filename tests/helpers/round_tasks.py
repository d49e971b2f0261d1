"""Tasks for rounds of local steps (docs/rounds.md)."""

import os
import signal
import time
from pathlib import Path

import torch
from supervised_tasks import ranks_of
from tasks import ReferenceTask
from torch import nn
from torch.utils.data import TensorDataset

from paramserver import Task

FEATURES = 3


class Rows(Task):
    """Least squares of one row each step, which depends on the trainer and its local step alone, as in plain numpy."""

    def __init__(self, lr=0.1):
        self.lr = lr

    @staticmethod
    def row(trainer, step):
        """The features and the target of a local step, from 0."""
        draws = torch.randn(FEATURES + 1, generator=torch.Generator().manual_seed(1000 * trainer + step))
        return draws[:FEATURES].double(), draws[FEATURES].double()

    def build_model(self):
        model = nn.Linear(FEATURES, 1, bias=False).double()
        with torch.no_grad():
            model.weight.zero_()
        return model

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def train_source(self, partition):
        return TensorDataset(torch.zeros(512, 1))

    def training_step(self, model, batch, batch_idx):
        features, target = self.row(self.trainer.trainer_index, batch_idx)
        return (model(features) - target).square().sum() / 2

    def on_epoch_start(self, epoch):
        self.log("epoch", epoch)

    def on_batch_end(self, batch_idx):
        if batch_idx % 4 == 0:
            self.log("weight", float(self.trainer.unwrapped_model.weight.sum()), reduce="none")


class Mixed(ReferenceTask):
    """The reference task; a process may die once, in mid-round.

    Args:
        die: the file that shows that it has; None for no death.
        victim: whose process dies: that of a trainer, or -1 for rank 0.
        at: the batch at which it does.
    """

    def __init__(self, die=None, victim=0, at=13, **options):
        super().__init__(**options)
        self.die, self.victim, self.at = die, victim, at

    def training_step(self, model, batch, batch_idx):
        loss = super().training_step(model, batch, batch_idx)
        if self.die and batch_idx == self.at and self.trainer.trainer_index == max(self.victim, 0):
            mark = Path(self.die)
            if not mark.exists():
                mark.touch()
                os.kill(ranks_of(os.getppid())[0].pid if self.victim < 0 else os.getpid(), signal.SIGKILL)
        return loss


class OneIsSlow(Rows):
    """The last trainer takes so many seconds for each batch."""

    def __init__(self, batch_s):
        super().__init__()
        self.batch_s = batch_s

    def training_step(self, model, batch, batch_idx):
        if self.trainer.trainer_index == self.trainer.process.trainers - 1:
            time.sleep(self.batch_s)
        return super().training_step(model, batch, batch_idx)


class FollowsLoss(Rows):
    """One validation sample, which is in the share of the first trainer, and a schedule that follows its loss of 1."""

    def build_scheduler(self, optimizer):
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"scheduler": plateau, "every": "validation", "metric": "loss"}

    def validation_source(self, partition):
        return TensorDataset(torch.zeros(1, 1))

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        return {"loss": 1.0}


class EveryOther(Task):
    """The gradient of each parameter is 0.3, 0.6, 0.9, 1.2; one has it in every other step only. SGD of 1."""

    def build_model(self):
        return nn.ParameterDict({name: torch.zeros(4) for name in ("always", "rarely")})

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def train_source(self, partition):
        return TensorDataset(torch.zeros(64, 1))

    def training_step(self, model, batch, batch_idx):
        names = ("always", "rarely") if batch_idx % 2 else ("always",)
        return sum((model[name] * torch.arange(1.0, 5.0) * 0.3).sum() for name in names)


class Complex(Task):
    """A complex parameter, which no compressor represents."""

    def build_model(self):
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        return model

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_source(self, partition):
        return TensorDataset(torch.zeros(64, 1))

    def training_step(self, model, batch, batch_idx):
        return model.weight.abs().sum()


class Tables(Task):
    """A model with an embedding table, which rounds do not support."""

    def build_model(self):
        return nn.Sequential(nn.EmbeddingBag(50, 2, sparse=True), nn.Linear(2, 1))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_source(self, partition):
        return TensorDataset(torch.arange(64).reshape(32, 2) % 50)

    def training_step(self, model, batch, batch_idx):
        return model(batch[0]).square().mean()

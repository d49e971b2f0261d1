"""Tasks that change trained parameters themselves, in the ways that steps and hooks can."""

import copy
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paramserver import Task
from paramserver.distributed.timeouts import poll_until


def _clamp(model, bound=0.05):
    for parameter in model.parameters():
        parameter.data.clamp_(-bound, bound)


def _copy(model, *_):
    with torch.no_grad():
        model[2].weight.copy_(torch.full_like(model[2].weight, 0.1))


def _assign(model, *_):
    model[2].weight.data = model[2].weight.data * 0.5


def _load(model, *_):
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


CHANGES = {"clamp": _clamp, "copy": _copy, "assign": _assign, "load": _load}


class Changing(Task):
    """Changes parameters in the ``at``-th call of ``where``.

    Args:
        where: training_step or a hook.
        how: one of ``CHANGES``.
        at: the call, from 0; from then on all if ``again``.
        optimizers: how many there are.
    """

    def __init__(self, where=None, how="clamp", at=0, again=False, optimizers=1):
        self.how, self.at, self.again, self.calls, self.optimizers = how, at, again, 0, optimizers
        if where not in (None, "training_step"):
            setattr(self, where, lambda *_: self._change())
        self.in_step = where == "training_step"

    def _change(self):
        model = self.trainer.unwrapped_model
        if self.calls == self.at or (self.again and self.calls > self.at):
            CHANGES[self.how](model)
        self.calls += 1

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def build_optimizer(self, model):
        if self.optimizers == 1:
            return torch.optim.SGD(model.parameters(), lr=0.1)
        return {"first": torch.optim.SGD(model[0].parameters()), "second": torch.optim.SGD(model[2].parameters())}

    def train_source(self, partition):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(64, 4, generator=generator)
        return TensorDataset(x, x.sum(1, keepdim=True))

    def validation_source(self, partition):
        return self.train_source(partition)

    def training_step(self, model, batch, batch_idx):
        if self.in_step:
            self._change()
        if self.optimizers == 1:
            return nn.functional.mse_loss(model(batch[0]), batch[1])
        for name in ("first", "second"):
            self.trainer.optimize(name, nn.functional.mse_loss(model(batch[0]), batch[1]))
        return None

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        return {"loss": nn.functional.mse_loss(model(batch[0]), batch[1])}


class ClippedSGD(torch.optim.SGD):
    """SGD that limits each weight after its update, as the critic of a Wasserstein GAN needs it."""

    updates_each = "element"

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.1, 0.1)
        return loss


class Clipped(Changing):
    """Limits its weights in the step of its optimizer."""

    def build_optimizer(self, model):
        return ClippedSGD(model.parameters(), lr=0.1)


class Idle(Changing):
    """Trainer 1 has one of three samples, so it has no more while trainer 0 trains; it looks at its model meanwhile.

    Both begin the fifth epoch, which is of trainer 0 alone; it updates the model once trainer 1 has read it.

    Args:
        mark: a file that is written once the parameters changed during a hook of trainer 1.
        has_read: a named pipe to which trainer 1 writes when it has read its model, and from which trainer 0 reads.
    """

    def __init__(self, mark, has_read):
        super().__init__()
        self.mark, self.has_read = Path(mark), Path(has_read)

    def train_source(self, partition):
        return TensorDataset(*super().train_source(partition)[:3])

    def on_epoch_start(self, epoch):
        if epoch == 4 and self.trainer.trainer_index == 0:
            assert self.has_read.read_text() == "read"
        elif epoch == 4:
            weight = self.trainer.unwrapped_model[0].weight
            before = weight.detach().clone()
            self.has_read.write_text("read")
            if poll_until(time.monotonic() + 20, lambda: not torch.equal(weight, before) or None, threading.Event()):
                self.mark.touch()


class Sharpness(Changing):
    """Takes the gradient at a neighbouring point, and restores the parameters."""

    def training_step(self, model, batch, batch_idx):
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        before = copy.deepcopy([parameter.data for parameter in model.parameters()])
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.add_(gradient, alpha=0.05)
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        self.before = before
        return loss

    def on_batch_end(self, batch_idx):
        with torch.no_grad():
            for parameter, value in zip(self.trainer.unwrapped_model.parameters(), self.before, strict=True):
                parameter.copy_(value)

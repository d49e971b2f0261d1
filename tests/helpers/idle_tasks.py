"""Trainers that take no part in some steps, in every mode in the same ones, and tasks that call the model often."""

import os
import signal
import time
from pathlib import Path
from typing import ClassVar

import torch
from tasks import ReferenceModel, ReferenceTask
from torch import nn
from torch.distributed import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F

from paramserver.consistency import Announcement, Readiness, Verdict
from paramserver.trainers import DdpTrainer, RpcTrainer

# By trainer: the steps, skipped ones too, for which it has no data.
PAUSES = {0: {0, 1, 4, 7, 8}, 1: {2, 5, 6}, 2: {1, 2, 5, 8}}


class Pauses:
    """Announces in these steps that it has no data, and has some again in the next one."""

    pauses = PAUSES

    _steps: int | None = None  # so far, skipped ones too

    def agree(self):
        self._steps = self.progress.steps if self._steps is None else self._steps
        decision = super().agree()
        self._steps += decision.verdict is Verdict.GO
        return decision

    def data_available(self):
        if self._steps in self.pauses.get(self.trainer_index, ()):
            return Announcement(Readiness.DRAINED)
        return super().data_available()


class PausingDdp(Pauses, DdpTrainer):
    pass


class PausesSecondStep(PausingDdp):
    """Only rank 0, and only then."""

    pauses: ClassVar = {0: {1}}


class PausingWithHook(PausingDdp):
    """Registers a hook of torch, which divides by the number of all ranks."""

    def configure_ddp(self, model, device_ids):
        wrapped = super().configure_ddp(model, device_ids)
        wrapped.register_comm_hook(None, allreduce_hook)
        return wrapped


class PausingWithBuiltinHook(PausingDdp):
    """Registers a hook that only the reducer knows, and which divides by the number of all ranks."""

    def configure_ddp(self, model, device_ids):
        wrapped = super().configure_ddp(model, device_ids)
        wrapped._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)
        return wrapped


class PausingRpc(Pauses, RpcTrainer):
    pass


def pausing(mode):
    """The value of the key ``trainer``."""
    return f"idle_tasks:{'PausingDdp' if mode == 'ddp' else 'PausingRpc'}"


class Partly(ReferenceModel):
    """Leaves out a layer where it is asked to."""

    def forward(self, x, leaves_out=False):
        x = self.bn(self.conv(x)).relu().flatten(1)
        x = self.drop(self.norm(self.first(x)))
        return self.last((x if leaves_out else self.square(x)) * self.scale)


class Calls(ReferenceTask):
    """Calls the model several times for each batch.

    Args:
        how: the name of the method that computes the outputs.
        nonfinite: the batches of each trainer whose loss is infinite.
    """

    def __init__(self, how="once", nonfinite=((), (), ()), **options):
        super().__init__(**options)
        self.how, self.nonfinite = how, nonfinite

    def build_model(self):
        model = Partly(**self.options) if self.how == "partly" else super().build_model()
        if self.how == "partly":
            del model.frozen
        model.scale = nn.Parameter(torch.ones(1))  # as powersgd needs it
        return model

    def train_source(self, partition):
        data = self._data(400, 1)
        return iter([data[i] for i in range(100 * partition.index, 100 * partition.index + 96)])

    def training_step(self, model, batch, batch_idx):
        images, labels = batch
        losses = [F.cross_entropy(output, labels) for output in getattr(self, self.how)(model, images, batch_idx)]
        loss = torch.stack(losses).mean()
        return loss * float("inf") if batch_idx in self.nonfinite[self.trainer.trainer_index] else loss

    def once(self, model, images, batch_idx):
        return [model(images)]

    def without_gradients(self, model, images, batch_idx):
        """As many times as this trainer and batch want, before the call with gradients and after it."""
        with torch.no_grad():
            for _ in range((batch_idx + self.trainer.trainer_index) % 3):
                images = images + 0.1 * model(images).mean()
        output = model(images)
        with torch.no_grad():
            model(images)
        return [output]

    def twice(self, model, images, batch_idx):
        return [model(images), model(-images)]

    def in_a_loop(self, model, images, batch_idx):
        """As many times as this trainer and batch want."""
        return [model(images * scale) for scale in range(1, 2 + (batch_idx + self.trainer.trainer_index) % 3)]

    def partly(self, model, images, batch_idx):
        """Without a layer in two of three batches, and first without gradients."""
        with torch.no_grad():
            model(images)
        return [model(images, batch_idx % 3 > 0)]


class CallsInHook(Calls):
    """Calls the model once more in a hook of each batch."""

    def __init__(self, hook, **options):
        super().__init__(**options)
        self.images = torch.ones(8, 1, 6, 6)
        setattr(self, hook, self.call_model)

    def training_step(self, model, batch, batch_idx):
        self.images = batch[0]
        return super().training_step(model, batch, batch_idx)

    def call_model(self, batch_idx):
        with torch.no_grad():
            self.trainer.model(self.images)


class SparseGradients(Calls):
    """Adds rows of a table, whose gradients are sparse."""

    def build_model(self):
        model = super().build_model()
        model.table = nn.Embedding(5, 5, sparse=True)
        model.register_forward_hook(lambda model, inputs, output: output + model.table(output.argmax(1)))
        return model


class LongLastBatch(ReferenceTask):
    """Trainer 1 has a batch more than trainer 0.

    Args:
        mark: a file, which that batch creates.
        does: what it does.
        seconds: that it takes.
        optimizers: how many take turns; one if they do not.
    """

    def __init__(self, mark, does="compute", seconds=8.0, optimizers=1, **options):
        super().__init__(**options)
        self.mark, self.does, self.seconds, self.optimizers = Path(mark), does, seconds, optimizers

    def train_source(self, partition):
        data = self._data(24, 1)
        return iter([data[i] for i in range(8 + 8 * partition.index)])

    def build_optimizer(self, model):
        if self.optimizers == 1:
            return super().build_optimizer(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        return {name: torch.optim.SGD(parameters[number::2], 0.05) for number, name in enumerate("ab")}

    def training_step(self, model, batch, batch_idx):
        if batch_idx == 1:
            self.mark.touch()
            getattr(self, self.does)()
        loss = super().training_step(model, batch, batch_idx)
        if self.optimizers == 1:
            return loss
        self.trainer.optimize("a", loss)
        self.trainer.optimize("b", super().training_step(model, batch, batch_idx))
        return None

    def compute(self):
        time.sleep(self.seconds)  # stands for the work of a batch

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def freeze(self):
        os.kill(os.getpid(), signal.SIGSTOP)

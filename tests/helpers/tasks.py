"""Tasks that the tests train. ``ReferenceModel`` has every kind of layer that has made modes differ."""

import gc
import json
import os
import signal
import time
from pathlib import Path
from types import MethodType

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paramserver import Task
from paramserver.transport import segments

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1),
}


class ReferenceModel(nn.Module):
    """conv, BatchNorm, LayerNorm, dropout, a frozen and a tied weight, and a parameter that no loss depends on."""

    def __init__(self, dropout, unused, batch_norm=True):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4) if batch_norm else nn.Identity()
        self.first = nn.Linear(4 * 36, 16)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(dropout)
        self.square = nn.Linear(16, 16, bias=False)
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.square.weight
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        if unused:
            self.unused = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(16, 5)

    def forward(self, x):
        x = self.bn(self.conv(x)).relu().flatten(1)
        x = self.drop(self.norm(self.first(x)))
        x = self.frozen(self.tied(self.square(x).tanh())) * self.scale
        return self.last(x)


class ReferenceTask(Task):
    """Random images of six by six pixels in five classes; every option is an argument."""

    def __init__(
        self,
        optimizer="sgd",
        dtype="float32",
        samples=256,
        dropout=0.2,
        groups=False,
        schedule=None,
        unused=False,
        batch_norm=True,
        validation=37,
    ):
        self.optimizer = optimizer
        self.dtype = getattr(torch, dtype)
        self.samples = samples
        self.options = {"dropout": dropout, "unused": unused, "batch_norm": batch_norm}
        self.groups = groups
        self.schedule = schedule
        self.validation = validation

    def build_model(self):
        return ReferenceModel(**self.options).to(self.dtype)

    def build_optimizer(self, model):
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.groups:
            parameters = [{"params": parameters[:3], "lr": 0.02}, {"params": parameters[3:]}]
        return OPTIMIZERS[self.optimizer](parameters)

    def build_scheduler(self, optimizer):
        if self.schedule == "step":
            return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        if self.schedule == "epoch":
            return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "every": "epoch"}
        if self.schedule == "validation":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"scheduler": scheduler, "every": "validation", "metric": "loss"}
        return None

    def train_source(self, partition):
        return self._data(self.samples, 1)

    def validation_source(self, partition):
        return self._data(self.validation, 2) if self.validation else None

    def _data(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(samples, 1, 6, 6, generator=generator).to(self.dtype)
        return TensorDataset(images, torch.randint(0, 5, (samples,), generator=generator))

    def training_step(self, model, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        images, labels = batch
        output = model(images)
        return {"loss": F.cross_entropy(output, labels), "accuracy": (output.argmax(1) == labels).float().mean()}


class OneCycle(ReferenceTask):
    """Its schedule raises after its last step, and a checkpoint has its number of steps."""

    def build_scheduler(self, optimizer):
        if self.schedule == "decay":  # to zero at the end, also of a run that is extended
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / self.total_steps)
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.total_steps)


class ClampsGradients(ReferenceTask):
    """Changes gradients through ``.data`` after backward."""

    def on_batch_end(self, batch_idx):
        for parameter in self.trainer.unwrapped_model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.clamp_(-0.01, 0.01)


class ClampsFromTheStart(ReferenceTask):
    """Sets the hook that changes gradients only when training starts."""

    def on_train_start(self):
        self.on_batch_end = MethodType(ClampsGradients.on_batch_end, self)


class LittleSharedMemory(ReferenceTask):
    """Trains where less memory is left than gradients need, once the ranks are connected."""

    def build_model(self):
        segments.available_bytes = lambda: 1000
        return super().build_model()


class CountsForwards(nn.Module):
    """Scales by a factor that depends on how often it was called in training, which is its extra state."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return x * (1 + self.calls / 64)

    def get_extra_state(self):
        return {"calls": torch.tensor(self.calls)}

    def set_extra_state(self, state):
        self.calls = int(state["calls"])


class HasExtraState(ReferenceTask):
    """A model with a module whose forward changes its extra state."""

    def build_model(self):
        return nn.Sequential(super().build_model(), CountsForwards())


class KeepsMean(nn.Module):
    """Subtracts a running mean of what this process has seen, which is its extra state."""

    def __init__(self):
        super().__init__()
        self.mean = 0.0

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x - self.mean

    def get_extra_state(self):
        return {"mean": torch.as_tensor(self.mean)}

    def set_extra_state(self, state):
        self.mean = state["mean"]


class HasOwnExtraState(ReferenceTask):
    """A model with a module whose extra state differs between trainers."""

    def build_model(self):
        keeps = KeepsMean()
        return nn.Sequential(keeps, super().build_model(), keeps)


class LeavesGradOff(ReferenceTask):
    """Switches gradients off at the end of each step, and on at the beginning."""

    def training_step(self, model, batch, batch_idx):
        torch.set_grad_enabled(True)
        loss = super().training_step(model, batch, batch_idx)
        torch.set_grad_enabled(False)
        return loss


class LoadsWholeStates(nn.Module):
    """A model with a target network, and a ``load_state_dict`` that takes whole states only."""

    def __init__(self, options):
        super().__init__()
        self.online, self.target = ReferenceModel(**options), ReferenceModel(**options).requires_grad_(False)

    def load_state_dict(self, state):
        return super().load_state_dict(state)

    def forward(self, x):
        with torch.no_grad():
            for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
                target.lerp_(online, 0.5)
        return self.online(x) + self.target(x)


class WholeStates(ReferenceTask):
    """Its frozen parameters change, and its model cannot load a part of a state."""

    def build_model(self):
        return LoadsWholeStates(self.options)


class InferenceBuffer(ReferenceTask):
    """A validation in inference mode assigns a module buffer, which no collective can write to."""

    def build_model(self):
        model = super().build_model()
        model.register_buffer("seen", torch.zeros(3))
        return model

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        with torch.inference_mode():
            self.trainer.unwrapped_model.seen = torch.full((3,), float(len(batch[0])))
        return super().validation_step(model, batch, valid_batch_idx, batch_idx)


class UnevenLengths(ReferenceTask):
    """An iterable whose length depends on the trainer: 40 samples more for each index."""

    def train_source(self, partition):
        data = self._data(400, 1)
        return [data[i] for i in range(40 + 40 * partition.index)].__iter__()


class UnevenCalls(UnevenLengths):
    """Calls its model up to three times for each batch, of which the first times are without gradients."""

    def training_step(self, model, batch, batch_idx):
        with torch.no_grad():
            for _ in range(batch_idx % 3):
                model(batch[0])
        return super().training_step(model, batch, batch_idx)


class ShortestLast(ReferenceTask):
    """An iterable of 80 samples, 40 fewer for each index, so that the last trainer has no more data first."""

    def train_source(self, partition):
        data = self._data(400, 1)
        first = 100 * partition.index
        return iter([data[i] for i in range(first, first + 80 - 40 * partition.index)])


class HookRecorder(ReferenceTask):
    """Records every hook, in order, in one file per trainer."""

    def __init__(self, folder, **options):
        super().__init__(**options)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def _note(self, *words):
        with (self.folder / f"trainer-{self.trainer.trainer_index}").open("a") as file:
            file.write(" ".join(str(w) for w in words) + "\n")

    def on_train_start(self):
        self._note("train_start")

    def on_epoch_start(self, epoch):
        self._note("epoch_start", epoch)

    def on_batch_start(self, batch_idx):
        self._note("batch_start", batch_idx)

    def training_step(self, model, batch, batch_idx):
        self._note("training_step", batch_idx)
        self.log("double", 2 * batch_idx)
        return super().training_step(model, batch, batch_idx)

    def on_batch_end(self, batch_idx):
        self._note("batch_end", batch_idx)

    def on_validation_start(self, batch_idx):
        self._note("validation_start", batch_idx)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        self._note("validation_step", "train" if model.training else "eval", len(batch[0]))
        return super().validation_step(model, batch, valid_batch_idx, batch_idx)

    def on_validation_end(self, batch_idx):
        self._note("validation_end", batch_idx)

    def on_epoch_end(self, epoch):
        self._note("epoch_end", epoch)

    def on_checkpoint(self, state):
        self._note("checkpoint")
        state["seen"] = 7

    def on_resume(self, state):
        self._note("resume", state["seen"])

    def on_train_end(self):
        self._note("train_end")


class FaultyTask(ReferenceTask):
    """Fails in one way in one trainer at one batch, and creates the file ``mark`` before."""

    def __init__(self, what, mark, trainer=0, batch=5, **options):
        super().__init__(**options)
        self.what, self.mark, self.at = what, Path(mark), (trainer, batch)

    def training_step(self, model, batch, batch_idx):
        if (self.trainer.trainer_index, batch_idx) == self.at:
            self.mark.write_text(json.dumps({"what": self.what, "pid": os.getpid()}))
            getattr(self, self.what)()
        loss = super().training_step(model, batch, batch_idx)
        bad = self.what == "nan" and (self.trainer.trainer_index, batch_idx) == self.at
        return loss * float("nan") if bad else loss

    def nan(self):
        pass

    def error(self):
        raise RuntimeError("the task raised on purpose")

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def freeze(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def terminate(self):
        os.kill(os.getpid(), signal.SIGTERM)


class BadSource(ReferenceTask):
    """A source that raises at sample 50."""

    def train_source(self, partition):
        data = self._data(400, 1)

        def samples():
            for i in range(400):
                if i == 50:
                    raise OSError("the disk is gone")
                yield data[i]

        return samples()


class Starved(ReferenceTask):
    """A stream that yields one batch and then blocks until a file appears."""

    def __init__(self, gate, **options):
        super().__init__(**options)
        self.gate = Path(gate)

    def train_source(self, partition):
        data = self._data(64, 1)

        def samples():
            yield from (data[i] for i in range(32))
            if partition.index:
                self.gate.with_suffix(".awaited").touch()
            while partition.index and not self.gate.exists():
                time.sleep(0.05)  # stands for a slow producer, not for synchronisation
            yield from (data[i] for i in range(32, 64))

        return samples()


class KillsItsServer(ReferenceTask):
    """The schedule runs in the process of the optimizer, and kills that process at the sixth step."""

    def __init__(self, mark, number=signal.SIGKILL, **options):
        super().__init__(**options)
        self.mark, self.number = Path(mark), number

    def build_scheduler(self, optimizer):
        def rate(step):
            if step == 6:
                self.mark.touch()
                os.kill(os.getpid(), self.number)
            return 1.0

        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


class Slow(ReferenceTask):
    """Every batch takes a second, or as long as is given."""

    def __init__(self, seconds=1.0, **options):
        super().__init__(**options)
        self.seconds = seconds

    def training_step(self, model, batch, batch_idx):
        time.sleep(self.seconds)  # stands for the work of a batch
        return super().training_step(model, batch, batch_idx)


class CountsGarbage(Slow):
    """Logs how many tensors its steps left to the garbage collector, in reference cycles."""

    def on_batch_start(self, batch_idx):
        if batch_idx == 3:  # what is built at the start, and in the first steps, may have cycles
            gc.collect()
            gc.disable()

    def on_train_end(self):
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        self.log("garbage", sum(isinstance(found, torch.Tensor) for found in gc.garbage))
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


class UnfreezesLayer(ReferenceTask):
    """Trains a frozen layer from the fourth batch on."""

    def on_batch_start(self, batch_idx):
        if batch_idx == 3:
            self.trainer.unwrapped_model.frozen.requires_grad_(True)


class FreezesLayer(ReferenceTask):
    """Trains a layer for three batches of six."""

    def on_batch_start(self, batch_idx):
        self.trainer.unwrapped_model.first.requires_grad_(batch_idx % 6 < 3)


class FreezesOnce(ReferenceTask):
    """Freezes a layer, and the statistics of another one, in its third batch."""

    def on_batch_start(self, batch_idx):
        if batch_idx == 2:
            self.trainer.unwrapped_model.first.requires_grad_(False)
            self.trainer.unwrapped_model.tied.requires_grad_(False)
            self.trainer.unwrapped_model.bn.eval()


class ChangesFrozen(ReferenceTask):
    """A frozen layer follows a trained one, as a target network does: under ``no_grad``, and through ``.data``."""

    def on_batch_end(self, batch_idx):
        model = self.trainer.unwrapped_model
        with torch.no_grad():
            model.frozen.weight.lerp_(model.square.weight, 0.1)
        model.frozen.bias.data = model.norm.bias.data.clone()


class StopsRun(ReferenceTask):
    """Trainer 1, or the only one, ends the run in its sixth batch, and gives another reason right after."""

    def on_batch_end(self, batch_idx):
        trainer = self.trainer
        if batch_idx == 5 and trainer.trainer_index == trainer.process.trainers - 1:
            trainer.stop("it is good enough")
            trainer.stop("another reason")


class BypassesWrapper(ReferenceTask):
    """Trains the module inside the wrapper of DDP; with ``no_grad`` the wrapper only predicts."""

    def __init__(self, how, **options):
        super().__init__(**options)
        self.how = how

    def training_step(self, model, batch, batch_idx):
        if self.how == "no_grad":
            with torch.no_grad():
                model(batch[0])
        return super().training_step(self.trainer.unwrapped_model, batch, batch_idx)


class RaisesErrorOfTorch(ReferenceTask):
    """Causes errors whose texts are like those that DDP raises for other causes."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def training_step(self, model, batch, batch_idx):
        if self.where == "forward":
            batch[0].to_sparse().untyped_storage()
        loss = super().training_step(model, batch, batch_idx)
        loss.register_hook(self._raise)
        return loss

    def _raise(self, gradient):
        # As DDP does, for a parameter that is used outside the model and that it took for unused.
        raise RuntimeError("ready only once; disable it by passing the keyword argument `find_unused_parameters=False`")


class UsesPartsOfModel(ReferenceTask):
    """Takes a submodule of what it is given."""

    def __init__(self, how, **options):
        super().__init__(**options)
        self.how = how

    def training_step(self, model, batch, batch_idx):
        return (model[0] if self.how == "index" else model.conv)(batch[0]).sum()


class KeepsOptimizer(ReferenceTask):
    """Looks at its optimizer in a hook."""

    def build_optimizer(self, model):
        self.opt = super().build_optimizer(model)
        return self.opt

    def on_batch_end(self, batch_idx):
        self.log("lr", self.opt.param_groups[0]["lr"])


class ChangesParameters(ReferenceTask):
    """Trainer 1 writes to a parameter.

    Args:
        pace_s: what a batch takes longer.
        collect_every_s: how often the ranks collect records in ddp; None: as they do.
    """

    def __init__(self, pace_s=0.0, collect_every_s=None, **options):
        super().__init__(**options)
        self.pace_s, self.collect_every_s = pace_s, collect_every_s

    def on_train_start(self):
        if self.collect_every_s is not None:
            from paramserver.trainers import ddp_control  # most runs have no use for it

            ddp_control._COLLECT_EVERY_S = self.collect_every_s

    def on_batch_end(self, batch_idx):
        time.sleep(self.pace_s)
        if batch_idx == 2 and self.trainer.trainer_index == 1:
            with torch.no_grad():
                self.trainer.unwrapped_model.last.bias += 1e-6


class StoresTooMuch(ReferenceTask):
    """Puts an object into its checkpoint that ``torch.load(weights_only=True)`` refuses."""

    def on_checkpoint(self, state):
        state["where"] = Path("here")


class ValidatesOnOne(UnevenLengths):
    """Only trainer 0 has validation data, as an iterator."""

    def validation_source(self, partition):
        data = self._data(20, 2)
        return (data[i] for i in range(20)) if partition.index == 0 else None


class MarksState(ReferenceTask):
    """Its optimizer marks the states that it gives, and loads marked ones only."""

    def build_optimizer(self, model):
        optimizer = super().build_optimizer(model)
        optimizer.register_state_dict_post_hook(self._add)
        optimizer.register_load_state_dict_pre_hook(self._check)
        return optimizer

    def _add(self, optimizer, state):
        state["param_groups"][0]["saved_by"] = "hook"

    def _check(self, optimizer, state):
        assert state["param_groups"][0]["saved_by"] == "hook"

"""Callbacks that record, count, change gradients and stop."""

import os
from pathlib import Path

import torch
from supervised_tasks import ranks_of
from tasks import HookRecorder, ReferenceTask

from paramserver import Callback


class Recorder(Callback):
    """Notes each of its hooks in the file of the task, with its own name."""

    def __init__(self, name):
        self.name = name

    def note(self, *words):
        self.task._note(self.name, *words)

    def on_train_start(self):
        self.note("train_start")

    def on_epoch_start(self, epoch):
        self.note("epoch_start", epoch)

    def on_batch_start(self, batch_idx):
        self.note("batch_start", batch_idx)

    def on_batch_end(self, batch_idx):
        self.note("batch_end", batch_idx)

    def on_validation_start(self, batch_idx):
        self.note("validation_start", batch_idx)

    def on_validation_end(self, batch_idx):
        self.note("validation_end", batch_idx)

    def on_epoch_end(self, epoch):
        self.note("epoch_end", epoch)

    def on_train_end(self):
        self.note("train_end")


class Counter(Callback):
    """Counts batches and the validations that it saw, over all starts of the run."""

    def __init__(self):
        self.batches, self.seen = 0, []

    def on_batch_start(self, batch_idx):
        self.batches += 1
        self.task.log("batches", self.batches, reduce="max")

    def on_validation_end(self, batch_idx):
        self.seen.append(self.task.trainer.validation["loss"])

    def state_dict(self):
        return {"batches": self.batches, "seen": list(self.seen)}

    def load_state_dict(self, state):
        self.batches, self.seen = state["batches"], list(state["seen"])


class Clamp(Callback):
    """Changes gradients through ``.data`` after backward."""

    def on_batch_end(self, batch_idx):
        for parameter in self.task.trainer.unwrapped_model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.clamp_(-0.01, 0.01)


class Recorded(HookRecorder):
    def callbacks(self):
        return [Recorder("a"), Recorder("b")]


class SeesParameters(HookRecorder):
    """Notes the parameters that each hook between two steps sees, as their sum. A batch is half of an epoch.

    The hooks in a step are left out: in ddp they come before DistributedDataParallel has sent module buffers.
    """

    def __init__(self, folder, **options):
        super().__init__(folder, batch_norm=False, samples=32, **options)

    def _note(self, *words):
        if "batch" not in words[0] and "step" not in words[0]:
            with torch.no_grad():
                total = sum(p.double().sum() for p in self.trainer.unwrapped_model.parameters() if p.requires_grad)
            super()._note(*words, self.trainer.step, float(total))

    def on_checkpoint(self, state):
        super().on_checkpoint(state)
        state["seen"] = float(self.trainer.unwrapped_model.last.weight.detach().double().sum())


class CallbackSees(Callback):
    def __init__(self):
        self.restored = None

    def state_dict(self):
        return {"sum": float(self.task.trainer.unwrapped_model.last.weight.detach().double().sum())}

    def load_state_dict(self, state):
        self.restored = state


class StoresInCallback(ReferenceTask):
    """What its callback stores depends on the parameters."""

    def callbacks(self):
        return [CallbackSees()]


class CountsEpochs(ReferenceTask):
    """Counts the epochs that ended, in a module buffer and in its state."""

    ended = 0

    def build_model(self):
        model = super().build_model()
        model.register_buffer("epochs", torch.zeros((), dtype=torch.int64))
        return model

    def on_epoch_end(self, epoch):
        self.trainer.unwrapped_model.epochs += 1
        self.ended += 1

    def on_checkpoint(self, state):
        state["ended"] = self.ended

    def on_resume(self, state):
        self.ended = state["ended"]


class Counted(ReferenceTask):
    def callbacks(self):
        return [Counter(), Counter(), Clamp()]

    def on_checkpoint(self, state):
        state["own"] = 7

    def on_resume(self, state):
        assert state == {"own": 7}


class LosesARank(Counted):
    """Kills a rank once, in the sixth step of trainer 0, whose loss depends on how many the task has seen."""

    def __init__(self, mark, rank, **options):
        super().__init__(**options)
        self.mark, self.rank, self.trained = Path(mark), rank, 0

    def training_step(self, model, batch, batch_idx):
        self.trained += 1
        if self.trained == 6 and self.trainer.trainer_index == 0 and not self.mark.exists():
            self.mark.touch()
            ranks_of(os.getppid())[self.rank].kill()
        return super().training_step(model, batch, batch_idx) * (1 + self.trained)


class Freezes(Callback):
    """Keeps a layer as it is, by a hook on the model of ``on_train_start``."""

    def on_train_start(self):
        self.model = self.task.trainer.unwrapped_model
        self.model.conv.weight.register_hook(torch.zeros_like)

    def on_batch_start(self, batch_idx):
        assert self.model is self.task.trainer.unwrapped_model


class KeepsALayer(LosesARank):
    def callbacks(self):
        return [Freezes()]


class Unclamped(ReferenceTask):
    pass


class Returned(ReferenceTask):
    """Returns what is no list of callbacks."""

    def __init__(self, what, **options):
        super().__init__(**options)
        self.what = what

    def callbacks(self):
        return {"callback": Counter(), "none": None, "other": [object()], "signature": [WrongSignature()]}[self.what]


class WrongSignature(Callback):
    def on_batch_end(self):
        pass

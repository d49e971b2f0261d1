"""Tasks in which one call of the user's code raises, or gives what cannot be used."""

import torch
from tasks import ReferenceTask
from torch import nn
from torch.utils.data import Dataset

from paramserver import Callback

INDEX = 17
"""Of the sample that cannot be read, collated or processed."""


class Numbers(Dataset):
    """Samples of one number each, of which ``what`` fails for index 17."""

    def __init__(self, what, length=64):
        self.what, self.length = what, length

    def __len__(self):
        if self.what == "length":
            raise KeyError("no index file")
        return self.length

    def __getitem__(self, index):
        if self.what == "item" and index == INDEX:
            raise OSError("the image is damaged")
        return torch.tensor([float(index)])


class GroupsOfNumbers(Numbers):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class RaisingSampler(torch.utils.data.Sampler):
    def __init__(self, passes=0):
        self.passes = passes

    def __len__(self):
        return 64

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from range(63)
        if self.epoch >= self.passes:
            raise LookupError("no order")
        yield 63


class Raises(ReferenceTask):
    """``where``: train, validation, source; ``what``: length, item, items, process, collate, sampler, hook."""

    def __init__(self, what="item", where="train"):
        super().__init__()
        self.what, self.where = what, where

    def build_model(self):
        return nn.Linear(1, 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1e-6)

    def _numbers(self, where):
        if self.where == where and self.what == "hook":
            raise ZeroDivisionError("no data today")
        what = self.what if self.where == where else ""
        return GroupsOfNumbers("item") if what == "items" else Numbers(what)

    def train_source(self, partition):
        return self._numbers("train")

    def validation_source(self, partition):
        return self._numbers("validation") if self.where == "validation" else None

    def sampler(self, partition):
        return RaisingSampler(passes=1) if self.what == "sampler" else None

    def _fails(self, samples):
        validates = self.trainer is not None and self.trainer.step > 0
        return validates == (self.where == "validation") and any(sample.item() == INDEX for sample in samples)

    def process_sample(self, sample):
        if self.what == "process" and self._fails([sample]):
            raise KeyError("label")
        return sample

    def collate(self, samples):
        if self.what == "collate" and self._fails(samples):
            raise KeyError("label")
        return super().collate(samples)

    def training_step(self, model, batch, batch_idx):
        return model(batch).square().mean()

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        return {"loss": model(batch).square().mean()}


class Keeps(Callback):
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state


class StoresItself(ReferenceTask):
    """The state of a checkpoint contains itself: of the task, deep in it, or of a callback."""

    def __init__(self, what="task"):
        super().__init__()
        self.what = what

    def callbacks(self):
        state = {"mean": 1.0}
        state["again"] = [state]
        return [Keeps(state)] if self.what == "callback" else []

    def on_checkpoint(self, state):
        if self.what == "task":
            state["x"] = state
        if self.what == "list":
            values = [torch.zeros(2)]
            values.append({"inner": values})
            state["values"] = values
        if self.what == "deep":
            for _ in range(3000):
                state["x"] = dict(state)

    def training_step(self, model, batch, batch_idx):
        if self.what == "gather":
            values = [1.0]
            values.append(values)
            self.trainer.all_gather(values)
        return super().training_step(model, batch, batch_idx)


VALUES = {
    "vector": lambda: torch.ones(3),
    "empty": lambda: torch.empty(0),
    "array": lambda: torch.ones(2, 2).numpy(),
    "list": lambda: [1.0],
    "dictionary": lambda: {"mean": 1.0},
    "none": lambda: None,
    "text": lambda: "0.5",
    "complex": lambda: torch.tensor(1j),
    "number": lambda: 1j,
    "huge": lambda: 10**400,
    "meta": lambda: torch.ones((), device="meta"),
}


class Logs(ReferenceTask):
    def __init__(self, value, validation=False):
        super().__init__()
        self.value, self.validates = value, validation

    def training_step(self, model, batch, batch_idx):
        if not self.validates:
            self.log("gradient", VALUES[self.value]())
        return super().training_step(model, batch, batch_idx)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        return (
            {"gradient": VALUES[self.value]()}
            if self.validates
            else super().validation_step(model, batch, valid_batch_idx, batch_idx)
        )


class UnreadableError(Exception):
    """Its message cannot be read, as where ``__init__`` was given other arguments than ``__str__`` needs."""

    def __str__(self):
        return self.missing

    __repr__ = __str__


class RaisesUnreadable(ReferenceTask):
    """Raises it where ``what`` says: in a hook of the task, or in the data set."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def build_model(self):
        self._raise("build_model")
        return super().build_model()

    def train_source(self, partition):
        self._raise("train_source")
        return UnreadableItem() if self.what == "item" else super().train_source(partition)

    def training_step(self, model, batch, batch_idx):
        self._raise("training_step")
        return super().training_step(model, batch, batch_idx)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        self._raise("validation_step")
        return super().validation_step(model, batch, valid_batch_idx, batch_idx)

    def on_checkpoint(self, state):
        self._raise("on_checkpoint")

    def collate(self, samples):
        self._raise("collate")
        return super().collate(samples)

    def _raise(self, what):
        if what == self.what:
            raise UnreadableError


class UnreadableItem(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        raise UnreadableError


class ComplexLoss(ReferenceTask):
    def training_step(self, model, batch, batch_idx):
        return super().training_step(model, batch, batch_idx) * (1 + 1j)

"""A task whose validation draws random numbers wherever it can, and whose training depends on every generator."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from tasks import ReferenceTask
from torch.utils.data import Dataset

from paramserver import Callback


def draw():
    """One number of all three default generators; an odd count of normal deviates each, of which one stays cached."""
    return float(torch.randn(()) + np.random.standard_normal() + random.gauss(0, 1))


class Noisy(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, label = self.data[index]
        return image + 0.1 * draw(), label


class Draws(Callback):
    def on_validation_start(self, batch_idx):
        draw()

    def on_validation_end(self, batch_idx):
        draw()


class DrawsInValidation(ReferenceTask):
    """Trainer ``dies`` is killed in the validation of step 4, once.

    Args:
        source: what is validated: a data set, an iterable, or nothing.
        hooks: the hooks of task and callback draw too.
    """

    def __init__(self, source="dataset", hooks=True, dies=None, mark="", **options):
        super().__init__(**options)
        self.source, self.hooks, self.dies, self.mark = source, hooks, dies, Path(mark)

    def callbacks(self):
        return [Draws()] if self.hooks else []

    def validation_source(self, partition):
        if self.source == "nothing":
            return None
        data = self._data(self.validation, 2)
        if self.source == "iterable":
            draw()
            return (data[i] for i in range(partition.index, self.validation, partition.count))
        return Noisy(data)

    def training_step(self, model, batch, batch_idx):
        images, labels = batch
        return super().training_step(model, (images + 0.1 * draw(), labels), batch_idx)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        trainer = self.trainer
        if self.dies == trainer.trainer_index and trainer.step == 4 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {**super().validation_step(model, batch, valid_batch_idx, batch_idx), "draw": draw()}

    def on_validation_start(self, batch_idx):
        if self.hooks:
            draw()

    def on_validation_end(self, batch_idx):
        if self.hooks:
            draw()

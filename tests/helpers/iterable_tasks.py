"""IterableDatasets that divide themselves among worker processes, and tasks that train on them."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from tasks import ReferenceTask
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def own_part(samples):
    info = get_worker_info()
    return samples if info is None else samples[info.id :: info.num_workers]


class Plain(IterableDataset):
    """Has no place: it is read again after a resume."""

    def __init__(self, samples):
        self.samples = list(samples)

    def __iter__(self):
        yield from own_part(self.samples)


class Placed(Plain):
    """Has a place, which its last sample resets, as in the documentation of torchdata."""

    at = 0

    def __iter__(self):
        own = own_part(self.samples)
        while self.at < len(own):
            self.at += 1
            yield own[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Dealt(Placed):
    """Can be dealt to other workers and trainers."""

    left = None

    def __iter__(self):
        if self.left is None:
            self.left = own_part(self.samples)
        while self.at < len(self.left):
            self.at += 1
            yield self.left[self.at - 1]

    def state_dict(self):
        return {"at": self.at, "left": self.left}

    def load_state_dict(self, state):
        self.at, self.left = state["at"], state["left"]

    def reshard(self, states, index, count):
        first = [self.samples[part :: len(states)] for part in range(len(states))]
        left = [sample for s, all_ in zip(states, first, strict=True) for sample in rest(s, all_)]
        self.at, self.left = 0, left[index::count]


def rest(state, whole):
    return whole if state is None else state["left"][state["at"] :]


class Noisy(Placed):
    """Draws from each default generator."""

    def __iter__(self):
        for sample in super().__iter__():
            yield sample, float(torch.rand(1)), np.random.standard_normal(), random.random()


class NoisyPlain(Plain):
    def __iter__(self):
        for sample in super().__iter__():
            yield sample, float(torch.rand(1)), np.random.standard_normal(), random.random()


class FailsAt(Plain):
    def __iter__(self):
        for sample in super().__iter__():
            if sample == 17:
                raise ValueError("record 17 is damaged")
            yield sample


class KillsItself(Plain):
    def __iter__(self):
        for sample in super().__iter__():
            if sample == 17:
                os.kill(os.getpid(), signal.SIGKILL)
            yield sample


class Undivided(Plain):
    def __iter__(self):
        yield from self.samples

    def __len__(self):
        return len(self.samples)


class Images(Placed):
    """Images with noise of the default generator of torch."""

    def __iter__(self):
        for image, label in super().__iter__():
            yield image + 0.1 * torch.randn_like(image), label


class PlainImages(Plain):
    def __iter__(self):
        for image, label in super().__iter__():
            yield image + 0.1 * torch.randn_like(image), label


KINDS = {"placed": Images, "plain": PlainImages, "dealt": Dealt}


class Streamed(ReferenceTask):
    """Samples ``partition.index`` of ``partition.count`` from an ``IterableDataset``.

    Args:
        kind: of the data set.
        workers: of a DataLoader; None = the data set itself, read as ``training.loader_workers`` says.
        mark: trainer 1 kills itself in its third batch, once, and writes this file before.
    """

    def __init__(self, kind="placed", workers=None, mark="", **options):
        super().__init__(**{"validation": 0, **options})
        self.kind, self.workers, self.mark = kind, workers, Path(mark)

    def train_source(self, partition):
        data = self._data(self.samples, 1)
        own = KINDS[self.kind](data[i] for i in range(partition.index, len(data), partition.count))
        return own if self.workers is None else DataLoader(own, 8, num_workers=self.workers)

    def on_batch_start(self, batch_idx):
        if batch_idx == 2 and self.mark.name and self.trainer.trainer_index == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

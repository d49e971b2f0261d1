"""Handwritten digits (8x8 pixels, 1797 samples) from scikit-learn: real data that needs no download."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from paramserver import Task


@cache
def read_digits():
    """Return 64 pixels, from 0 to 16, and the label of each sample.

    As ``sklearn.datasets.load_digits``, whose file this is, but without the two seconds of importing scikit-learn.
    """
    package = find_spec("sklearn")
    if package is None:
        raise ImportError("this example needs scikit-learn: python -m pip install scikit-learn")
    file = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    return torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))


class Digits(Task):
    """A small convolutional network that recognises digits. Every fifth sample is used for validation."""

    def __init__(self, width: int = 32, lr: float = 0.05) -> None:
        self.width = width
        self.lr = lr

    def build_model(self):
        return nn.Sequential(
            nn.Conv2d(1, self.width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(self.width, 2 * self.width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(2 * self.width * 16, 10),
        )

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def train_source(self, partition):
        return self._samples(validation=False)

    def validation_source(self, partition):
        return self._samples(validation=True)

    def _samples(self, validation):
        table = read_digits()
        data = TensorDataset((table[:, :64] / 16).view(-1, 1, 8, 8), table[:, 64].long())
        return Subset(data, [i for i in range(len(data)) if (i % 5 == 0) == validation])

    def training_step(self, model, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        images, labels = batch
        output = model(images)
        return {"loss": F.cross_entropy(output, labels), "accuracy": (output.argmax(1) == labels).float().mean()}

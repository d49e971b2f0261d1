"""Handwritten digits (8x8 pixels, 1797 samples) from scikit-learn: real data that needs no download."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from paramserver import Task


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
        from sklearn.datasets import load_digits  # imported here because the server needs no data

        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(
            torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels, dtype=torch.int64)
        )
        return Subset(data, [i for i in range(len(data)) if (i % 5 == 0) == validation])

    def training_step(self, model, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        images, labels = batch
        output = model(images)
        return {"loss": F.cross_entropy(output, labels), "accuracy": (output.argmax(1) == labels).float().mean()}

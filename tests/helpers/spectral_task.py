"""A task with a complex parameter."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paramserver import Task

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


class SpectralFilter(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        return self.last(torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=16))


class Spectral(Task):
    def __init__(self, optimizer="sgd"):
        self.optimizer = optimizer

    def build_model(self):
        return SpectralFilter()

    def build_optimizer(self, model):
        return OPTIMIZERS[self.optimizer](model.parameters())

    def train_source(self, partition):
        inputs = torch.randn(128, 16, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def training_step(self, model, batch, batch_idx):
        inputs, targets = batch
        return ((model(inputs) - targets) ** 2).mean()

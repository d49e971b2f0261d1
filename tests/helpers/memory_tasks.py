"""A task whose parameters have unusual memory: with gaps, transposed, without elements, large enough to be split."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paramserver import Task


class UnusualModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 23)
        self.last = nn.Linear(7, 1)
        u = torch.linalg.svd(torch.randn(37, 37))[0]
        self.rows = nn.Parameter(u[:5, :23])  # transposed, with gaps
        self.columns = nn.Parameter(u.contiguous()[:7, :5])
        self.every_other = nn.Parameter(torch.randn(7, 7, 2)[..., 0])
        self.large = nn.Parameter(torch.randn(240, 96).t()[:, :144])  # of which each server owns a part
        self.expanded = nn.Parameter(torch.ones(7, 1).expand(7, 7))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.none_double = nn.Parameter(torch.empty(0, dtype=torch.float64))

    def forward(self, x):
        hidden = torch.tanh(self.first(x)) @ self.rows.t() @ self.columns.t() @ self.every_other @ self.expanded
        wide = (hidden.repeat(1, 14)[:, :96] @ self.large).mean(1, keepdim=True)
        return self.last(hidden) + wide + self.none.sum() + self.none_double.sum().float()


class UnusualMemory(Task):
    def build_model(self):
        return UnusualModel()

    def build_optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.003)

    def train_source(self, partition):
        inputs = torch.randn(128, 16, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def training_step(self, model, batch, batch_idx):
        inputs, targets = batch
        return ((model(inputs) - targets) ** 2).mean()

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paramserver import Task


class Sine(Task):
    def build_model(self):
        return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def build_optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def train_source(self, partition):
        x = torch.linspace(-3, 3, 1024).unsqueeze(1)
        return TensorDataset(x, torch.sin(2 * x))

    def training_step(self, model, batch, batch_idx):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

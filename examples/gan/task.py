"""A generative adversarial network (GAN) with two optimizers, on points of a ring that the example draws itself.

What it shows:

- ``build_optimizer`` returns a dictionary: "d" steps the discriminator, "g" the generator.
- ``training_step`` calls ``self.trainer.optimize(name, loss)`` for each update and returns nothing. Every call is one
  global step: gradients of that optimizer's parameters, their mean over the trainers, the update. After it the model
  has the new parameters, so the generator is trained against the discriminator that this batch has improved.
- The fake points are computed once and used in both losses. The discriminator gets them detached.
- With ``critic_steps: 3`` the generator is stepped in every third batch. ``self.trainer.step`` decides about it, which
  all trainers have alike at all times; ``batch_idx`` of a trainer that takes the place of a lost one may be another.
- Schedules are given by the names of the optimizers too.

The same file runs with ``--mode rpc``, ``--mode ddp`` and ``--mode local``.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paramserver import Task

RADIUS = 2.0


class Networks(nn.Module):
    """Generator and discriminator in one module, which is what is built, sent and saved."""

    def __init__(self, noise, width):
        super().__init__()
        self.noise = noise
        self.generator = nn.Sequential(
            nn.Linear(noise, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 2),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )


class Gan(Task):
    """The non-saturating GAN of Goodfellow et al., "Generative adversarial nets", NeurIPS 2014.

    Args:
        samples: points of the training data.
        noise: inputs of the generator.
        width: of both networks.
        lr: of both optimizers.
        critic_steps: steps of the discriminator for each step of the generator.
    """

    def __init__(
        self, samples: int = 4096, noise: int = 8, width: int = 32, lr: float = 2e-3, critic_steps: int = 1
    ) -> None:
        self.samples, self.noise, self.width = samples, noise, width
        self.lr, self.critic_steps = lr, critic_steps

    def build_model(self):
        return Networks(self.noise, self.width)

    def build_optimizer(self, model):
        parts = {"d": model.discriminator, "g": model.generator}
        return {name: torch.optim.Adam(part.parameters(), self.lr, betas=(0.5, 0.99)) for name, part in parts.items()}

    def build_scheduler(self, optimizers):
        return {name: torch.optim.lr_scheduler.ExponentialLR(own, 0.9995) for name, own in optimizers.items()}

    def train_source(self, partition):
        generator = torch.Generator().manual_seed(0)
        angle = 2 * math.pi * torch.rand(self.samples, generator=generator)
        radius = RADIUS + 0.1 * torch.randn(self.samples, generator=generator)
        return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1))

    def validation_source(self, partition):
        return TensorDataset(torch.randn(512, self.noise, generator=torch.Generator().manual_seed(1)))

    def training_step(self, model, batch, batch_idx):
        (real,) = batch
        fake = model.generator(torch.randn(len(real), self.noise, device=real.device))

        scores = model.discriminator(torch.cat([real, fake.detach()])).squeeze(1)
        truth = torch.cat([torch.ones(len(real)), torch.zeros(len(real))]).to(real.device)
        self.trainer.optimize("d", F.binary_cross_entropy_with_logits(scores, truth))

        if self.trainer.step % (self.critic_steps + 1) == self.critic_steps:
            scores = model.discriminator(fake).squeeze(1)
            self.trainer.optimize("g", F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores)))

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        points = model.generator(batch[0])
        centre = points.mean(0).norm()
        return {"distance": (points.norm(dim=1) - RADIUS).abs().mean(), "off_centre": centre}

    def predict_step(self, model, batch, batch_idx):
        return model.generator(batch[0])

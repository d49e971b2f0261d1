"""A factorisation machine of users and items, on clicks that a hidden model of factors generates.

What it shows:

- ``sparse=True`` makes a table of an ``nn.Embedding``: a step reads the rows of its batch in the memory of the server
  and pushes gradients of these rows. What a step costs hardly depends on the number of rows.
- The data are generated: users and items follow a Zipf distribution, and the probability of a click is known.
  So the best AUC that any model can reach is known too: it is that of the true probabilities.
- ``Auc`` is a metric over all samples of a validation, whichever trainer evaluated them.

The same file runs with ``--mode rpc``, ``--mode ddp`` and ``--mode local``.
"""

import torch
from factorisation import FactorisationMachine
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paramserver import Task


class Auc:
    """The probability that a click has a higher score than no click, over all samples."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.scores, self.clicks = [], []

    def update(self, scores, clicks):
        self.scores.append(scores.detach().cpu())
        self.clicks.append(clicks.cpu())

    def merge_state(self, other):
        self.scores += other.scores
        self.clicks += other.clicks

    def compute(self):
        return auc(torch.cat(self.scores), torch.cat(self.clicks))


def auc(scores, clicks):
    """Return the area under the ROC curve, from the ranks of the clicks; equal scores count one half."""
    _, ranks, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    rank = (last - (counts - 1) / 2)[ranks]
    clicked = clicks > 0
    positive, negative = int(clicked.sum()), int((~clicked).sum())
    return float((rank[clicked].sum() - positive * (positive + 1) / 2) / (positive * negative))


def zipf(count, samples, generator, exponent=0.8):
    """Return ids below ``count``; the probability of the k-th is proportional to k ** -exponent."""
    weights = torch.arange(1, count + 1, dtype=torch.float64) ** -exponent
    uniform = torch.rand(samples, generator=generator, dtype=torch.float64)
    return torch.searchsorted((weights.cumsum(0) / weights.sum()).contiguous(), uniform).clamp_(max=count - 1)


class Clicks(Task):
    """Predicts clicks.

    Args:
        users, items: rows of the tables.
        samples: of the training data.
        width: factors of the model.
        lr: of Adagrad, which has one learning rate for each element, so that rare rows take larger steps.
    """

    hidden_width = 4

    def __init__(
        self, users: int = 20_000, items: int = 2_000, samples: int = 400_000, width: int = 8, lr: float = 0.1
    ) -> None:
        self.users, self.items, self.samples = users, items, samples
        self.width, self.lr = width, lr
        self.auc, self.best_auc = Auc(), Auc()

    def build_model(self):
        return FactorisationMachine(self.users, self.items, self.width)

    def build_optimizer(self, model):
        return torch.optim.Adagrad(model.parameters(), self.lr)

    def _clicks(self, samples, seed):
        """Users, items, clicks, and the logits of their true probabilities."""
        hidden = torch.Generator().manual_seed(0)
        user_factors = torch.randn(self.users, self.hidden_width, generator=hidden)
        item_factors = torch.randn(self.items, self.hidden_width, generator=hidden)
        popularity = 0.5 * torch.randn(self.items, generator=hidden)
        generator = torch.Generator().manual_seed(seed)
        users, items = zipf(self.users, samples, generator), zipf(self.items, samples, generator)
        logits = (user_factors[users] * item_factors[items]).sum(1) + popularity[items] - 1
        clicks = (torch.rand(samples, generator=generator) < logits.sigmoid()).float()
        return TensorDataset(users, items, clicks, logits)

    def train_source(self, partition):
        return self._clicks(self.samples, 1)

    def validation_source(self, partition):
        return self._clicks(20_000, 2)

    def training_step(self, model, batch, batch_idx):
        users, items, clicks, _ = batch
        return F.binary_cross_entropy_with_logits(model(users, items), clicks)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        users, items, clicks, logits = batch
        scores = model(users, items)
        self.auc.update(scores, clicks)
        self.best_auc.update(logits, clicks)
        loss = F.binary_cross_entropy_with_logits(scores, clicks)
        return {"loss": loss, "auc": self.auc, "best_possible_auc": self.best_auc}

"""A task whose simulations are drawn by the loss of its samples."""

import json

import torch
from stream_tasks import Fed
from torch import nn


class Steered(Fed):
    """Gives the loss of each sample, and writes down with which parameters and ratio it came.

    Args:
        gives: ``returned`` or ``logged`` losses, or else what is wrong with them.
    """

    def __init__(self, ledger, gives="returned", **options):
        super().__init__(ledger, **options)
        self.gives = gives

    def training_step(self, model, batch, batch_idx):
        mean = super().training_step(model, batch, batch_idx)
        columns = [batch[name].tolist() for name in ("simulation", "parameters", "density_ratio") if name in batch]
        with (self.ledger.parent / f"drawn-{self.trainer.trainer_index}").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in zip(*columns, strict=True))
        target = batch["parameters"].float().sum(dim=1, keepdim=True)
        losses = nn.functional.mse_loss(model(batch["u"].flatten(1)), target, reduction="none")[:, 0]
        match self.gives:
            case "returned" | "outside":
                return losses
            case "logged":
                self.log_sample_loss(losses)
            case "shape":
                self.log_sample_loss(losses[1:])
            case "negative":
                self.log_sample_loss(-losses - 1.0)
            case "nan":
                self.log_sample_loss(losses * torch.nan)
        return mean

    def on_batch_end(self, batch_idx):
        super().on_batch_end(batch_idx)
        if self.gives == "outside":
            self.log_sample_loss(torch.ones(1))


def drawn(ledger):
    """(simulation, parameters, density ratio) of each sample that was served."""
    files = sorted(ledger.parent.glob("drawn-*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


class Steers:
    """Draws the number of its observations; raises at one of them."""

    def __init__(self, ranges, seed, count, fails=None):
        self.observed, self.fails = 0, fails

    def draw(self, index):
        return [float(self.observed), float(index)]

    def observe(self, simulation, loss):
        self.observed += 1
        if self.observed == self.fails:
            raise RuntimeError("the sampler fails on purpose")

    def state_dict(self):
        return {"observed": self.observed}

    def load_state_dict(self, state):
        self.observed = state["observed"]

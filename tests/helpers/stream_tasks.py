"""A task that is fed by simulations, and a ledger of every sample that was served."""

import json
import os
import signal
import time
from pathlib import Path
from threading import Event

import torch
from simulations import SHAPE
from torch import nn

from paramserver import Task
from paramserver.distributed.timeouts import poll_until
from paramserver.sources import Simulations, Stream
from paramserver.trainers import DdpTrainer


class Fed(Task):
    """Learns a field's mean; writes down what it is served, one line a sample.

    Args:
        ledger: a folder; each trainer appends to its own file.
        outside: samples come from clients outside.
        pace_s: what a batch takes longer, by trainer.
        held: validations wait in this folder, where they leave ``validating``, until ``go`` is there.
        stop: trainer 0 sends its process SIGTERM at this batch.
        kill: (trainer, batch): that trainer kills its process before the push of this batch, or of a later one, once.
    """

    def __init__(self, ledger, outside=False, pace_s=(0.0,), held=None, stop=None, kill=None):
        self.ledger = Path(ledger)
        self.outside = outside
        self.pace_s = pace_s
        self.held = None if held is None else Path(held)
        self.stop = stop
        self.kill = kill

    def build_model(self):
        torch.manual_seed(5)
        return nn.Linear(SHAPE[0] * SHAPE[1], 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_source(self, partition):
        # One line each time that it joins: how many samples were served before it, and its process.
        name = f"trainer-{partition.index}"
        before = len((self.ledger / name).read_text().splitlines()) if (self.ledger / name).exists() else 0
        with (self.ledger.parent / f"starts-{name}").open("a") as file:
            file.write(json.dumps([before, os.getpid()]) + "\n")
        return Stream() if self.outside else Simulations()

    def validation_source(self, partition):
        return torch.ones(2, *SHAPE) if self.held else None

    def training_step(self, model, batch, batch_idx):
        index = self.trainer.trainer_index
        time.sleep(self.pace_s[index % len(self.pace_s)])
        with (self.ledger / f"trainer-{index}").open("a") as file:
            for simulation, step in zip(batch["simulation"].tolist(), batch["step"].tolist(), strict=True):
                file.write(json.dumps([simulation, step]) + "\n")
        target = batch["parameters"].float().sum(dim=1, keepdim=True)
        return nn.functional.mse_loss(model(batch["u"].flatten(1)), target)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        (self.held / "validating").touch()
        assert poll_until(time.monotonic() + 30, lambda: (self.held / "go").exists() or None, Event()), "held too long"
        return {"loss": model(batch.flatten(1)).mean()}

    def on_batch_start(self, batch_idx):
        if self.stop is not None and batch_idx == self.stop and self.trainer.trainer_index == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_batch_end(self, batch_idx):
        if self.kill is None:
            return
        index, batch = self.kill
        if index == self.trainer.trainer_index and batch_idx >= batch and len(starts(self.ledger, index)) == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def starts(ledger, index):
    """(samples served before it, pid) of each process of a trainer, which may have joined the run several times."""
    lines = (Path(ledger).parent / f"starts-trainer-{index}").read_text().splitlines()
    first = {}
    for before, pid in map(json.loads, lines):
        first.setdefault(pid, before)
    return [(before, pid) for pid, before in first.items()]


def served(ledger):
    """Every sample that was served, by all trainers."""
    lines = [line for file in sorted(Path(ledger).iterdir()) for line in file.read_text().splitlines()]
    return [tuple(json.loads(line)) for line in lines]


class FedWithDigests(Fed):
    """Writes down, in ``digests``, the sum over all parameters of the model at each of its steps."""

    def training_step(self, model, batch, batch_idx):
        digests = self.ledger.parent / "digests"
        digests.mkdir(exist_ok=True)
        total = sum(parameter.detach().double().sum() for parameter in model.parameters())
        with (digests / f"trainer-{self.trainer.trainer_index}").open("a") as file:
            file.write(json.dumps([self.trainer.current_step.decision.step, float(total)]) + "\n")
        return super().training_step(model, batch, batch_idx)


class FedWithCalls(FedWithDigests):
    """Calls its model up to three times for each batch, as often as the trainer and step want; it has module buffers.

    In every second step all calls but the last are without gradients.
    """

    def build_model(self):
        size = SHAPE[0] * SHAPE[1]
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size), nn.Linear(size, 1))

    def training_step(self, model, batch, batch_idx):
        step = self.trainer.current_step.decision.step
        with torch.set_grad_enabled(step % 2 == 0):
            for _ in range((step + self.trainer.trainer_index) % 3):
                model(batch["u"].flatten(1))
        return super().training_step(model, batch, batch_idx)


class Unwrapped(DdpTrainer):
    """Trains a model that is not wrapped in DistributedDataParallel."""

    def configure_ddp(self, model, device_ids):
        return model


class FedWithVersions(Fed):
    """Writes down the version of each sample too, and the step that it is served in: one line a sample in ``ages``."""

    def training_step(self, model, batch, batch_idx):
        ages = self.ledger.parent / "ages"
        ages.mkdir(exist_ok=True)
        step = self.trainer.current_step.decision.step
        with (ages / f"trainer-{self.trainer.trainer_index}").open("a") as file:
            for key in zip(
                batch["simulation"].tolist(), batch["step"].tolist(), batch["version"].tolist(), strict=True
            ):
                file.write(json.dumps([*key, step]) + "\n")
        return super().training_step(model, batch, batch_idx)

"""A task that is fed by simulations, the simulations, and a ledger of every sample that was served."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from paramserver import Task
from paramserver.sources import Simulations, Stream

SHAPE = (4, 3)


def field(simulation, step, parameters):
    """What simulation ``simulation`` gives at this step: nobody else gives the same."""
    rng = np.random.default_rng([simulation, step])
    return (rng.standard_normal(SHAPE) + parameters.sum()).astype("float32")


def simulate(parameters, client):
    """As many steps as there are."""
    for step in range(client.steps):
        client.send(step, {"u": field(client.simulation, step, parameters)})


def simulate_group(parameters, client):
    """Each member sends its rows."""
    rows = np.array_split(np.arange(SHAPE[0]), client.members)[client.member]
    for step in range(client.steps):
        client.send(step, {"u": field(client.simulation, step, parameters)[rows]})


def simulate_killed_once(parameters, client):
    """Simulation 1 is killed in its middle, the first time."""
    for step in range(client.steps):
        if client.simulation == 1 and client.attempt == 0 and step == client.steps // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        client.send(step, {"u": field(client.simulation, step, parameters)})


def simulate_hopeless(parameters, client):
    """Fails at its first step."""
    raise RuntimeError("the solver diverged on purpose")


def simulate_silent(parameters, client):
    """Lives and sends nothing."""
    time.sleep(600)


def simulate_wrong(parameters, client):
    """Simulation 0 sends a NaN at step 2 before the right one at its end."""
    order = list(range(client.steps))
    for step in order:
        values = field(client.simulation, step, parameters)
        if client.simulation == 0 and step == 2:
            spoilt = values.copy()
            spoilt[0, 0] = np.nan
            client.send(step, {"u": spoilt})
            continue
        client.send(step, {"u": values})


class Fed(Task):
    """Learns a field's mean; writes down what it is served, one line a sample.

    Args:
        ledger: a folder; each trainer appends to its own file.
        outside: samples come from clients outside.
        pace_s: what a batch takes longer, by trainer.
        validate_s: how long a validation batch takes.
        stop: trainer 0 sends its process SIGTERM at this batch.
    """

    def __init__(self, ledger, outside=False, pace_s=(0.0,), validate_s=0.0, stop=None):
        self.ledger = Path(ledger)
        self.outside = outside
        self.pace_s = pace_s
        self.validate_s = validate_s
        self.stop = stop

    def build_model(self):
        torch.manual_seed(5)
        return nn.Linear(SHAPE[0] * SHAPE[1], 1)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_source(self, partition):
        return Stream() if self.outside else Simulations()

    def validation_source(self, partition):
        return torch.ones(2, *SHAPE) if self.validate_s else None

    def training_step(self, model, batch, batch_idx):
        index = self.trainer.trainer_index
        time.sleep(self.pace_s[index % len(self.pace_s)])
        with (self.ledger / f"trainer-{index}").open("a") as file:
            for simulation, step in zip(batch["simulation"].tolist(), batch["step"].tolist(), strict=True):
                file.write(json.dumps([simulation, step]) + "\n")
        target = batch["parameters"].float().sum(dim=1, keepdim=True)
        return nn.functional.mse_loss(model(batch["u"].flatten(1)), target)

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        time.sleep(self.validate_s)
        return {"loss": model(batch.flatten(1)).mean()}

    def on_batch_start(self, batch_idx):
        if self.stop is not None and batch_idx == self.stop and self.trainer.trainer_index == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def served(ledger):
    """Every sample that was served, by all trainers."""
    lines = [line for file in sorted(Path(ledger).iterdir()) for line in file.read_text().splitlines()]
    return [tuple(json.loads(line)) for line in lines]

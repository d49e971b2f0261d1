"""A surrogate of the heat equation: the field of temperatures at a time, from the five parameters of a simulation.

The network and the comparison follow Meyer et al., "Training Deep Surrogate Models with Large Scale Online Learning",
ICML 2023 (https://proceedings.mlr.press/v202/meyer23b.html), and "High Throughput Training of Deep Surrogates from
Large Ensemble Runs", SC 2023 (https://arxiv.org/abs/2309.16743).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from solver import DT, HIGH, LOW, MEAN, PARAMETERS, SPREAD, VALIDATION_SEED, solve
from stored import StoredSimulations
from torch import Tensor, nn

from paramserver import Task
from paramserver.errors import TaskError
from paramserver.online.spec import parse_fields

TEMPERATURES = ((LOW, HIGH),) * len(PARAMETERS)


class Surrogate(nn.Module):
    """A fully connected network from and to physical quantities, which it normalises.

    Args:
        n: points of the field in each direction.
        steps: of a simulation; the unit of time.
        width: of the two hidden layers.
        ranges: (low, high) of each parameter.
    """

    def __init__(self, n: int, steps: int, width: int, ranges: Sequence[tuple[float, float]] = TEMPERATURES) -> None:
        super().__init__()
        self.n, self.steps = n, steps
        self.means = [(low + high) / 2 for low, high in ranges]
        self.spreads = [(high - low) / 12**0.5 for low, high in ranges]
        self.layers = nn.Sequential(
            nn.Linear(len(ranges) + 1, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, n * n),
        )

    def forward(self, parameters: Tensor, step: Tensor) -> Tensor:
        """Map parameters [batch, 5 or 6] and steps [batch] to temperatures [batch, n, n]."""
        given = parameters.float()
        given = (given - given.new_tensor(self.means)) / given.new_tensor(self.spreads)
        time = ((step.float() + 1) / self.steps - 0.5) * 12**0.5
        out: Tensor = self.layers(torch.cat([given, time[:, None]], dim=1))
        return out.view(-1, self.n, self.n) * SPREAD + MEAN


class Heat(Task):
    """Trains on simulations while they run, or on stored ones.

    Args:
        offline: read stored simulations; False = receive those of the config's section ``simulations``.
        folder: of the stored simulations, see store.py.
        n: points of the field in each direction, offline; online the config's section determines it.
        steps: of a simulation, likewise.
        dt: length of a step.
        width: of the hidden layers.
        lr: learning rate of Adam.
        anneal: let it fall to 0 by a cosine over the run.
        validation_simulations: number of simulations for validation, with parameters that training does not use.
        weighted: weight each loss by ``density_ratio``, which the sampler ``importance`` gives.
    """

    def __init__(
        self,
        offline: bool = False,
        folder: str = "data/heat",
        n: int = 32,
        steps: int = 100,
        dt: float = DT,
        width: int = 256,
        lr: float = 1e-3,
        anneal: bool = False,
        validation_simulations: int = 10,
        weighted: bool = False,
    ) -> None:
        self.offline = offline
        self.folder = Path(folder).expanduser()
        self.n, self.steps, self.dt = n, steps, dt
        self.width, self.lr, self.anneal = width, lr, anneal
        self.validation_simulations = validation_simulations
        self.weighted = weighted

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Points in each direction, and steps."""
        simulations = None if self.offline else self.config.simulations
        if simulations is None:
            return self.n, self.steps
        match [(field.name, field.shape) for field in parse_fields(simulations.fields)]:
            case [("temperature", (n, width))] if n == width:
                return n, simulations.steps or self.steps
        raise TaskError("simulations.fields must be what simulate.py sends; for example {temperature: [32, 32]}")

    @property
    def ranges(self) -> Sequence[tuple[float, float]]:
        """(low, high) of each parameter of a simulation."""
        simulations = None if self.offline else self.config.simulations
        return TEMPERATURES if simulations is None else [tuple(map(float, r)) for r in simulations.parameters.values()]

    def build_model(self) -> nn.Module:
        return Surrogate(*self.sizes, self.width, self.ranges)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.lr)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        if not self.anneal:
            return None
        if self.total_steps is None:
            raise TaskError("task_args.anneal (true) must have a number of steps; set training.max_steps")
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.total_steps)

    def train_source(self, partition: Any) -> Any:
        if not self.offline:
            from paramserver.sources import Simulations

            return Simulations()
        try:
            stored = StoredSimulations(self.folder)
        except (OSError, ValueError) as error:
            raise TaskError(f"task_args.folder: {error}") from error
        n, steps = self.sizes
        if stored.shape != (steps, n, n):
            raise TaskError(
                f"task_args.n ({n}) and task_args.steps ({steps}) must be those of the stored simulations, which have "
                f"{stored.shape[0]} steps of {stored.shape[1]} x {stored.shape[2]}; give those"
            )
        return stored

    def validation_source(self, partition: Any) -> Any:
        return self._validation

    @cached_property
    def _validation(self) -> list[dict[str, Any]]:
        """The same samples in every run and trainer, so that their errors are comparable."""
        n, steps = self.sizes
        low, high = np.array(self.ranges).T
        count = self.validation_simulations
        parameters_of_all = np.random.default_rng(VALIDATION_SEED).uniform(low, high, (count, len(low)))
        return [
            {"simulation": simulation, "step": step, "parameters": parameters, "temperature": temperature}
            for simulation, parameters in enumerate(parameters_of_all)
            for step, temperature in enumerate(solve(parameters, n, steps, self.dt))
        ]

    def training_step(self, model: nn.Module, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of each sample, or the mean of the weighted losses; a sampler may learn from each."""
        losses = (self._error(model, batch) / SPREAD).square().mean(dim=(1, 2))
        if not self.weighted:
            return losses
        self.log_sample_loss(losses)
        return (losses * batch["density_ratio"].float()).mean()

    def validation_step(
        self, model: nn.Module, batch: dict[str, Tensor], valid_batch_idx: int, batch_idx: int
    ) -> dict[str, Tensor]:
        """Return the loss, and the mean absolute error in kelvin."""
        error = self._error(model, batch)
        return {"loss": (error / SPREAD).square().mean(), "kelvin": error.abs().mean()}

    def _error(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        error: Tensor = model(batch["parameters"], batch["step"]) - batch["temperature"]
        return error

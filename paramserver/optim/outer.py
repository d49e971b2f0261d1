"""Rounds of local steps: the outer optimizer, which all trainers share, and the inner one, which each trainer has.

Each trainer takes H steps with an optimizer of its own, from the parameters ``theta`` of the version to ``theta_i``.
The difference ``D_i = theta - theta_i`` is what it pushes in the place of a gradient, and the mean of these is what the
outer optimizer steps ``theta`` with. So the mean, the consistency, checkpoints and records are those of every other
update.

Local SGD: Stich, "Local SGD converges fast and communicates little", ICLR 2019. FedAvg: McMahan et al., AISTATS 2017.
FedOpt, where the outer optimizer is adaptive: Reddi et al., "Adaptive federated optimization", ICLR 2021. DiLoCo, whose
outer optimizer is Nesterov's: Douillard et al., arXiv:2311.08105.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from paramserver.config import Config, OuterConfig, TrainingConfig, mode_of, num_trainers_of
from paramserver.consistency.factory import consistency_class
from paramserver.optim.row_wise_adagrad import PerParameterOptimizer
from paramserver.parameters.flat import trainable_parameters
from paramserver.task import Task

MANY_LOCAL_STEPS = 64
"""From so many local steps on, momentum is the default: those of fewer are close to steps of the inner optimizer."""

OptimizerBuilder: TypeAlias = "Task | OuterBuilder"
"""Builds an optimizer and its schedule."""


def shared_optimizer(task: OptimizerBuilder, config: Config) -> OptimizerBuilder:
    """Return who builds the optimizer that all trainers share: the task, or with rounds the config."""
    return OuterBuilder(config) if config.training.has_rounds else task


class OuterBuilder:
    """Builds the outer optimizer of a config, over all trainable parameters and without a schedule.

    Its hyper-parameters are keys of the config, and not part of what a checkpoint restores.
    """

    def __init__(self, config: Config) -> None:
        outer = config.training.outer or OuterConfig()
        many = config.training.local_steps >= MANY_LOCAL_STEPS
        self.name = outer.optimizer or ("nesterov" if many else "sgd")
        self.kind, lr, momentum = _OPTIMIZERS[self.name]
        momentum = momentum if outer.momentum is None else outer.momentum
        updates = updates_per_round(config)
        lr = lr if outer.lr is None else outer.lr
        if outer.lr is None and self.name != "delayed_nesterov":  # which divides by the delay
            lr /= max(updates, 1.0)  # successive rounds of a trainer in one update begin from the same version
        self.hyperparameters: dict[str, Any] = {"lr": lr}
        if self.name == "adam":
            self.hyperparameters |= {"betas": (momentum, outer.beta2), "eps": outer.eps}
        elif self.name == "delayed_nesterov":
            self.hyperparameters |= {"momentum": momentum, "delay": outer.delay or max(1, round(updates))}
        else:
            self.hyperparameters |= {"momentum": momentum, "nesterov": self.name == "nesterov" and momentum > 0}

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of ``trainable_parameters`` of a model."""
        parameters = list(trainable_parameters(model).values())
        optimizer: torch.optim.Optimizer = self.kind(parameters, **self.hyperparameters)
        optimizer.register_load_state_dict_post_hook(self._restore_hyperparameters)
        return optimizer

    def build_scheduler(self, optimizer: Any) -> None:
        """Return None: the schedule of the task is of the inner optimizers."""

    def _restore_hyperparameters(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group.update({name: value for name, value in self.hyperparameters.items() if name in group})


def outer_class(config: Config) -> str | None:
    """Return the class of the outer optimizer, whose state a checkpoint has; None without rounds."""
    return OuterBuilder(config).kind.__name__ if config.training.has_rounds else None


def outer_names(class_name: str) -> list[str]:
    """Return the values of ``training.outer.optimizer`` that are of a class: each may continue another's state."""
    return [name for name, (kind, *_) in _OPTIMIZERS.items() if kind.__name__ == class_name]


def updates_per_round(config: Config) -> float:
    """Return how many updates there are while each trainer takes one round: 1 in lockstep, K in ``async``."""
    if not mode_of(config).has_servers:
        return 1.0
    return consistency_class(config.server).updates_per_round(config.server, num_trainers_of(config))


def round_weights(training: TrainingConfig, samples: Sequence[int]) -> list[float]:
    """Return the weight of each trainer in the mean of a round; the mean of the weights is 1."""
    total = sum(samples)
    if not training.weights_samples or not total:
        return [1.0] * len(samples)
    return [own * len(samples) / total for own in samples]


class DelayedNesterov(PerParameterOptimizer):
    """Nesterov's momentum for gradients that arrive one by one: the momentum changes with every ``delay``-th only.

    Liu et al., "Asynchronous local-SGD training for language modeling", arXiv:2401.09135, algorithm 3 with ``c = 0``.
    With N for the delay, step t of gradient g is::

        sum += g
        if t is a multiple of N:
            m = momentum * m + sum / N;  sum = 0
            parameter -= lr * (momentum * m + g / N)
        else:
            parameter -= lr * g / N

    With a delay of 1 it is ``torch.optim.SGD(nesterov=True)``. State of each parameter: ``step``, ``sum`` and
    ``momentum_buffer``, both of its shape.
    """

    updates_each: ClassVar[str] = "element"

    def __init__(self, params: Iterable[Any], lr: float, momentum: float, delay: int) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "delay": delay})

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, lr, delay = self.state[parameter], group["lr"], group["delay"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["sum"], state["momentum_buffer"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        state["sum"].add_(gradient)
        parameter.add_(gradient, alpha=-lr / delay)
        if int(state["step"]) % delay == 0:
            momentum: Tensor = state["momentum_buffer"]
            momentum.mul_(group["momentum"]).add_(state["sum"], alpha=1 / delay)
            state["sum"].zero_()
            parameter.add_(momentum, alpha=-lr * group["momentum"])


# By name: the class, and the default learning rate and momentum. Douillard et al. for Nesterov; for Adam, Reddi et al.
# (figure 1) found learning rates from 0.01 to 0.1 on most tasks.
_OPTIMIZERS: dict[str, tuple[type[Any], float, float]] = {
    "sgd": (torch.optim.SGD, 1.0, 0.0),
    "nesterov": (torch.optim.SGD, 0.7, 0.9),
    "adam": (torch.optim.Adam, 0.01, 0.9),
    "delayed_nesterov": (DelayedNesterov, 0.7, 0.9),
}

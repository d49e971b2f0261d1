"""The local steps of a round: an optimizer of the trainer's own steps its copy of the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paramserver.config import Config
from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.optim.updater import Updater, parameters_of
from paramserver.parameters.flat import trainable_parameters
from paramserver.parameters.numerics import find_nonfinite
from paramserver.parameters.tables import find_tables
from paramserver.task import Task


class LocalSteps:
    """Takes the local steps of one trainer; see ``optim/outer.py`` for what a round is.

    A round is ``begin``, a ``step`` for each gradient, and ``end``. In between the parameters of the model are in
    memory of this object, so that the version stays as it is, also where other processes read it. ``updater`` has the
    optimizer and the schedule of the task, and clips the gradient of each step. ``parameters`` are those that it steps.
    The training loop holds ``lock`` during each of these calls.

    Raises:
        UnsupportedConfiguration: the optimizer or the model of the task does not go with rounds.

    Example::

        >>> from paramserver.config import TrainingConfig
        >>> class Descent(Task):
        ...     def build_optimizer(self, model):
        ...         return torch.optim.SGD(model.parameters(), lr=0.5)
        >>> model = nn.Linear(1, 1, bias=False)
        >>> local = LocalSteps(Descent(), model, Config(training=TrainingConfig(local_steps=2)))
        >>> version = model.weight.item()
        >>> local.begin()
        >>> for number in (1, 2):
        ...     model(torch.ones(1, 1)).sum().backward()
        ...     _ = local.step(number)
        >>> _ = local.end()
        >>> model.weight.grad.item(), model.weight.item() == version
        (1.0, True)
    """

    @classmethod
    def of(cls, task: Task, model: nn.Module, config: Config, trainer_index: int) -> LocalSteps | None:
        """Return the local steps of a trainer; None without rounds."""
        return cls(task, model, config, trainer_index) if config.training.has_rounds else None

    def __init__(self, task: Task, model: nn.Module, config: Config, trainer_index: int = 0) -> None:
        # Without the keys of rounds: its gradients are clipped, and its parameters are not averaged.
        training = replace(config.training, local_steps=1, outer=None, ema_decay=None)
        # Each trainer has random numbers of its own, and the first those of a run without rounds.
        self.updater = Updater(task, model, training, config.seed + trainer_index)
        self.lock: AbstractContextManager[Any] = nullcontext()
        self._trainer_index = trainer_index
        self._check(model)
        stepped = {id(parameter) for parameter in parameters_of(self.updater.optimizer)}
        trained = trainable_parameters(model)
        self.parameters = [p for p in trained.values() if id(p) in stepped]
        self._others = {name: p for name, p in trained.items() if id(p) not in stepped}
        self._versions_of_others: list[int] = []
        self._own: list[Tensor] = []
        self._version: list[Tensor] = []  # in a round: the memory of the parameters before it

    def _check(self, model: nn.Module) -> None:
        reason = None
        if self.updater.parameters_of:
            names = ", ".join(self.updater.parameters_of)
            reason = f"several optimizers that take turns ({names}), each call of which is an update of all"
        elif self.updater.with_modes is not None:
            reason = f"{self.updater.with_modes}, whose train() and eval() exchange all parameters"
        elif tables := find_tables(model):
            reason = f"embedding tables ({', '.join(tables)}), whose gradients are sparse and whose changes are not"
        if reason is not None:
            raise UnsupportedConfiguration(
                f"training.local_steps and training.outer must be left out with {reason}; leave them out"
            )

    def begin(self) -> None:
        """Begin a round at the version that the model has."""
        self._version = [parameter.data for parameter in self.parameters]
        if not self._own:
            self._own = [torch.empty_like(data) for data in self._version]
        torch._foreach_copy_(self._own, self._version)
        self._versions_of_others = [parameter._version for parameter in self._others.values()]
        self._assign(self._own)

    def step(self, number: int, loss: float = 0.0) -> str:
        """Make step ``number`` of this trainer, with the gradients that its parameters have.

        Return what of the step is NaN or infinite, as in ``StepReport.nonfinite``: it was skipped then. Where no step
        may be skipped, nothing is checked.

        Raises:
            NotFinite: gradients are clipped and their norm is NaN or infinite.
        """
        gradients = [parameter.grad for parameter in self.updater.parameters]
        cause = find_nonfinite(loss, gradients) if self.updater.skipping.is_possible else ""
        if not cause:
            self.updater.apply(number)
            self.updater.skipping.update_made([self._trainer_index], self.updater.skipping.scale)
        self.updater.clear_gradients()
        return cause

    def _check_others(self) -> None:
        for (name, parameter), version in zip(self._others.items(), self._versions_of_others, strict=True):
            if parameter._version != version:
                raise TaskError(
                    f"parameter {name} was changed in a round of local steps, and not by the optimizer, which does not "
                    "have it; the change would be lost. Give it to the optimizer, or freeze it in build_model"
                )

    @torch.no_grad()
    def end(self) -> float:
        """End the round: the parameters are the version again, and their gradients what the round changed, negated.

        Return the norm of the change, relative to that of the version.

        Raises:
            TaskError: a trainable parameter that the optimizer does not have was changed.
        """
        self._check_others()
        changes = self._own
        # An optimizer may have given a parameter other memory.
        torch._foreach_copy_(changes, [parameter.data for parameter in self.parameters])
        torch._foreach_neg_(changes)
        torch._foreach_add_(changes, self._version)
        of_version, of_changes = _norm(self._version), _norm(changes)
        self._assign(self._version)
        self._version = []
        for parameter, change in zip(self.parameters, changes, strict=True):
            parameter.grad = change
        return of_changes / of_version if of_version else 0.0

    @contextmanager
    def version(self) -> Iterator[None]:
        """Let the parameters be the version that the round in progress began with, if there is one, in this context."""
        own = [parameter.data for parameter in self.parameters]
        if self._version:
            self._assign(self._version)
        try:
            yield
        finally:
            self._assign(own)

    def _assign(self, memory: Sequence[Tensor]) -> None:
        for parameter, data in zip(self.parameters, memory, strict=True):
            parameter.data = data


def _norm(tensors: list[Tensor]) -> float:
    norms = torch._foreach_norm(tensors)
    return math.sqrt(sum(float(norm) ** 2 for norm in norms))

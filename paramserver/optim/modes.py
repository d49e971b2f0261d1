"""Optimizers with ``train()`` and ``eval()``, which move the parameters between what is trained and what is evaluated.

An example is schedule-free training (Defazio et al., "The Road Less Scheduled", 2024): gradients are computed at other
parameters than those that are validated and stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has ``train()`` and ``eval()``.

    Example::

        >>> has_modes(torch.optim.SGD([torch.zeros(1)], lr=1.0))
        False
    """
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def copied_parameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replace the memory of the parameters by copies; at the end they have their own again, with no bit changed.

    Other processes may read the parameters meanwhile, and the way from ``train()`` to ``eval()`` and back rounds.
    """
    parameters = parameters_of(optimizer)
    own = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.clone()
    try:
        yield
    finally:
        for parameter, data in zip(parameters, own, strict=True):
            parameter.data = data


class SwitchedOptimizer:
    """Switches an optimizer that has modes, and knows the present one, also where a task calls these methods.

    Example::

        >>> class Average(torch.optim.SGD):
        ...     def train(self): pass
        ...     def eval(self): pass
        >>> switched = SwitchedOptimizer(Average([torch.zeros(1)], lr=1.0))
        >>> switched.optimizer.train()
        >>> with switched.evaluation_mode():
        ...     switched.is_training
        False
        >>> switched.is_training
        True
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.is_training = False
        optimizer.train = self._recorded(optimizer.train, True)
        optimizer.eval = self._recorded(optimizer.eval, False)

    def _recorded(self, method: Callable[..., Any], is_training: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.is_training = is_training
            return result

        return call

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Let the optimizer be in ``eval()``, with its parameters in other memory (``copied_parameters``)."""
        was_training = self.is_training
        with copied_parameters(self.optimizer):
            self.optimizer.eval()
            try:
                yield
            finally:
                if was_training:
                    self.optimizer.train()

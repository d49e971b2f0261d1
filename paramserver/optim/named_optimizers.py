"""Several optimizers of one model, each of its own parameters: where ``Task.build_optimizer`` returns a dictionary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paramserver.errors import CheckpointError


class NamedOptimizers(torch.optim.Optimizer):
    """Optimizers by name, for code that handles one: their groups follow each other.

    A step is that of the optimizers whose parameters have gradients, which is the one whose turn it is. No parameter is
    in two of them.
    """

    def __init__(self, by_name: Mapping[str, torch.optim.Optimizer]) -> None:
        # The base class would collect groups and states of its own.
        self.by_name = dict(by_name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.by_name.values() for group in optimizer.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.by_name.values():
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.by_name.values():
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, optimizer in self.by_name.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ``CheckpointError``: each state is loaded into its own optimizer."""
        raise CheckpointError("the states of several optimizers are loaded one by one")


def optimizers_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that this one stands for, or itself."""
    return list(optimizer.by_name.values()) if isinstance(optimizer, NamedOptimizers) else [optimizer]


def count_parameters(optimizer: torch.optim.Optimizer) -> int:
    """Return how many parameters the groups of an optimizer have."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def joined_states(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[int, Any]:
    """Return the entries ``state`` of ``optimizer.state_dict()``, numbered over all parameters.

    Example::

        >>> weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        >>> both = NamedOptimizers({name: torch.optim.SGD([w], lr=1.0) for name, w in zip("ab", weights)})
        >>> states = {1: {"momentum_buffer": torch.ones(1)}}
        >>> joined_states(both, with_states(both, states)) == states
        True
    """
    if not isinstance(optimizer, NamedOptimizers):
        return dict(state["state"])
    joined: dict[int, Any] = {}
    first = 0
    for name, own in optimizer.by_name.items():
        # An entry that is of no parameter has a key that is no number.
        of_parameters = {number: v for number, v in state[name]["state"].items() if isinstance(number, int)}
        joined |= {first + number: value for number, value in of_parameters.items()}
        first += count_parameters(own)
    return joined


def with_states(optimizer: torch.optim.Optimizer, states: Mapping[int, Any]) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with these states of the parameters: undoes ``joined_states``."""
    if not isinstance(optimizer, NamedOptimizers):
        return {**optimizer.state_dict(), "state": dict(sorted(states.items()))}
    state: dict[str, Any] = {}
    first = 0
    for name, own in optimizer.by_name.items():
        end = first + count_parameters(own)
        part = {number - first: value for number, value in sorted(states.items()) if first <= number < end}
        state[name] = {**own.state_dict(), "state": part}
        first = end
    return state


def shared_parameters(by_name: Mapping[str, torch.optim.Optimizer]) -> Sequence[tuple[str, str]]:
    """Return the names of each two optimizers that have a parameter in common."""
    ids = {name: {id(p) for g in optimizer.param_groups for p in g["params"]} for name, optimizer in by_name.items()}
    names = list(ids)
    return [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if ids[a] & ids[b]]

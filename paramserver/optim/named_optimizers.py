"""Several optimizers of one model, each of its own parameters.

``Task.build_optimizer`` returns a dictionary of them, which take turns, or a list of them, which step together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from paramserver.errors import CheckpointError

# The entry of a stored state that has those of a list of optimizers, in order.
_LIST = "optimizers"


class SeveralOptimizers(torch.optim.Optimizer):
    """Optimizers for code that handles one: their groups follow each other. No parameter is in two of them.

    ``by_name`` has those of a list by their positions in it.
    """

    takes_turns: ClassVar[bool]
    """Whether an update is of one of them, which is called by its name; otherwise it is of all of them."""

    def __init__(self, by_name: Mapping[str, torch.optim.Optimizer]) -> None:
        # The base class would collect groups and states of its own.
        self.by_name = dict(by_name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.by_name.values() for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.by_name.values():
            optimizer.zero_grad(set_to_none)

    @abstractmethod
    def pack(self, by_name: Mapping[str, Any]) -> dict[str, Any]:
        """Return a value of each optimizer as the dictionary that a checkpoint stores; see ``unpacked``."""

    def state_dict(self) -> dict[str, Any]:
        return self.pack({name: optimizer.state_dict() for name, optimizer in self.by_name.items()})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ``CheckpointError``: each state is loaded into its own optimizer."""
        raise CheckpointError("the states of several optimizers are loaded one by one")


class NamedOptimizers(SeveralOptimizers):
    """Those of a dictionary. A step is of those whose parameters have gradients: of the one whose turn it is."""

    takes_turns = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.by_name.values():
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                optimizer.step()

    def pack(self, by_name: Mapping[str, Any]) -> dict[str, Any]:
        return dict(by_name)


class JointOptimizer(SeveralOptimizers):
    """Those of a list. A step is of all of them, in order, with the gradients of one loss."""

    takes_turns = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        # Also those without any gradient, as an optimizer by itself is stepped then: their schedules expect it.
        for optimizer in self.by_name.values():
            optimizer.step()

    def pack(self, by_name: Mapping[str, Any]) -> dict[str, Any]:
        return {_LIST: [by_name.get(name) for name in self.by_name]}


def by_position(values: Sequence[Any]) -> dict[str, Any]:
    """Return the values of a list of optimizers by their positions, which are names of a ``JointOptimizer``."""
    return {str(position): value for position, value in enumerate(values)}


def unpacked(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each optimizer by its name, or by its position in a list: undoes ``pack``."""
    values = packed.get(_LIST)
    return by_position(values) if isinstance(values, list) else dict(packed)


def optimizers_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that this one stands for, or itself."""
    return list(optimizer.by_name.values()) if isinstance(optimizer, SeveralOptimizers) else [optimizer]


def joined_states(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[int, Any]:
    """Return the entries ``state`` of ``optimizer.state_dict()``, numbered over all parameters.

    Of a single optimizer nothing else is read: one of the user may return no ``param_groups``.
    """
    return states_by_position(state) if isinstance(optimizer, SeveralOptimizers) else dict(state["state"])


def with_states(optimizer: torch.optim.Optimizer, states: Mapping[int, Any]) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with these states of the parameters: undoes ``joined_states``."""
    if not isinstance(optimizer, SeveralOptimizers):
        return {**optimizer.state_dict(), "state": dict(sorted(states.items()))}
    by_name: dict[str, Any] = {}
    first = 0
    for name, own in optimizer.by_name.items():
        end = first + sum(len(group["params"]) for group in own.param_groups)
        part = {number - first: value for number, value in sorted(states.items()) if first <= number < end}
        by_name[name] = {**own.state_dict(), "state": part}
        first = end
    return optimizer.pack(by_name)


def states_by_position(state: Mapping[str, Any]) -> dict[int, Any]:
    """Return the states of parameters in the ``state_dict()`` of one optimizer, or of several, numbered over all."""
    found: dict[int, Any] = {}
    first = 0
    for own in [state] if "param_groups" in state else unpacked(state).values():
        # An entry that is of no parameter has a key that is no number.
        found |= {first + number: value for number, value in own["state"].items() if isinstance(number, int)}
        first += sum(len(group["params"]) for group in own["param_groups"])
    return found


def stored_groups(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups in the ``state_dict()`` of one optimizer, or of several."""
    states = {"": state} if "param_groups" in state else unpacked(state)
    return [group for own in states.values() for group in own["param_groups"]]

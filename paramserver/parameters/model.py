"""Builds a task's model so that every process builds the same one, and puts stored weights into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paramserver.devices import Placement
from paramserver.errors import CheckpointError, TaskError
from paramserver.rng import seed_all
from paramserver.task import Task


def build_model(task: Task, seed: int, placement: Placement) -> nn.Module:
    """The task's model, with its initial weights drawn from ``seed``; the same in every process and mode.

    A process with one device moves the model there; a task that gets several (``self.devices``) places it itself.

    Raises:
        TaskError: it is not a module, or has nothing to train.
    """
    task.devices = placement.devices
    seed_all(seed)
    model = task.build_model()
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"{type(task).__name__}.build_model returned {type(model).__name__}; it must return a torch.nn.Module"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise TaskError(
            f"{type(task).__name__}.build_model returned a model without a parameter that requires a gradient"
        )
    return model.to(placement.device) if len(placement.devices) == 1 else model


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], origin: str) -> None:
    """Copy stored weights into the model: all of them, or none where they do not fit.

    Raises:
        CheckpointError: they are of another model; the first differences are named.
    """
    if not isinstance(weights, Mapping):
        raise CheckpointError(
            f"{origin} holds {type(weights).__name__}, and must hold a state_dict; give the model.pt of a checkpoint, "
            "or what torch.save(model.state_dict(), ...) wrote"
        )
    own = model.state_dict()
    problems = [f"{name} is missing there" for name in own if name not in weights]
    problems += [f"{name} is not in this model" for name in weights if name not in own]
    problems += [
        f"{name} has shape {_shape(weights[name])} there and {_shape(tensor)} here"
        for name, tensor in own.items()
        if isinstance(tensor, Tensor) and name in weights and _shape(weights[name]) != _shape(tensor)
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{origin} holds another model: {'; '.join(problems[:3])}{more}; use the task and the task_args that "
            "it was stored with"
        )
    model.load_state_dict(dict(weights))


def _shape(value: object) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else f"none ({type(value).__name__})"


def detached_state_dict(model: nn.Module) -> dict[str, Any]:
    """The model's ``state_dict()``, detached: what model.pt holds."""
    return {n: t.detach() if isinstance(t, Tensor) else t for n, t in model.state_dict().items()}


def untrained_state_dict(model: nn.Module) -> dict[str, Any]:
    """The part of it that no optimizer changes: module buffers, frozen parameters and what else a model stores."""
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    return {name: value for name, value in detached_state_dict(model).items() if name not in trained}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Mixed precision where ``precision`` asks for it; a context that does nothing otherwise."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")

"""Checks for NaN and infinity: of each loss, of gradients by the norm that clipping computes, of what is saved."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from paramserver.errors import NotFinite, TaskError


def check_gradient_norm(norm: float, step: int) -> None:
    """Check gradients by their norm, before any of them is applied.

    Raises:
        NotFinite: the norm is NaN or infinite.
    """
    if not math.isfinite(norm):
        raise NotFinite(
            f"step {step}: the norm of all gradients is {norm} and must be finite; nothing of this step was applied. "
            "Lower the learning rate, or look at the batches"
        )


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with an element that is NaN or infinite; None if there is none.

    The sum of such a tensor is not finite. The sum of a finite tensor may overflow; only then are its elements checked,
    which takes many times longer.
    """
    for name, tensor in tensors.items():
        values = _as_real(tensor)
        if not math.isfinite(float(values.sum())) and not bool(torch.isfinite(values).all()):
            return name
    return None


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sum of squares of each tensor's bit patterns, as integers modulo 2**64, so in any order of adding.

    Different tensors have equal sums only by chance, or if they differ in the order of their elements. (The plain sum
    would not do: what is added to a positive and a negative number cancels out.)
    """
    sums = []
    for tensor in tensors.values():
        values = _as_real(tensor)
        bits = values.reshape(-1).contiguous().view(_INTEGERS[values.element_size()]).long()
        sums.append((bits * bits).sum().cpu())
    return {name: int(total) for name, total in zip(tensors, sums, strict=True)}


def check_parameters_finite(parameters: Mapping[str, Tensor], step: int, resume_command: str | None) -> None:
    """Check parameters before they are saved: no training can continue from NaN or infinity.

    Args:
        parameters: the trained ones, by name.
        step: number of the step, for the message.
        resume_command: resumes from the last checkpoint; None if there is none.

    Raises:
        NotFinite: one is NaN or infinite.
    """
    name = first_nonfinite(parameters)
    if name is None:
        return
    again = "start anew" if resume_command is None else f"resume from the last checkpoint ({resume_command})"
    raise NotFinite(
        f"step {step}: parameter {name} is NaN or infinite and must be finite to be stored; a gradient was not, though "
        f"the loss was; no checkpoint of this step is written: {again} with a lower learning rate or "
        "training.clip_grad_norm, which stops at the first such gradient"
    )


def check_loss(loss: object, trainer_index: int, batch_idx: int, optimizer: str = "") -> float:
    """Return the loss of a batch as a number, before its backward.

    Args:
        loss: what ``training_step`` returned, or passed to ``trainer.optimize``.
        trainer_index: with ``batch_idx``, for messages.
        batch_idx: index of the batch.
        optimizer: the name that ``trainer.optimize`` was called with; empty if it was not.

    Raises:
        TaskError: it is not a scalar tensor with a gradient.
        NotFinite: it is NaN or infinite; nothing of this batch, or call, is applied.
    """
    where = f"training_step, trainer {trainer_index}, batch {batch_idx}"
    origin, unit = (f"gave optimize({optimizer!r}, loss)", "call") if optimizer else ("returned", "batch")
    if not isinstance(loss, torch.Tensor):
        raise TaskError(f"{where}: {origin} {type(loss).__name__}; the loss must be a scalar tensor")
    if loss.numel() != 1:
        raise TaskError(
            f"{where}: {origin} a tensor of shape {tuple(loss.shape)}; the loss must be one number: take .mean()"
        )
    if not loss.requires_grad:
        raise TaskError(
            f"{where}: the loss does not depend on a trained parameter; compute it from model(...) with gradients on"
        )
    value = float(loss.detach())
    if value != value or value in (float("inf"), float("-inf")):
        raise NotFinite(
            f"{where}: the loss is {value}; nothing of this {unit} was applied. "
            "Lower the learning rate, set training.clip_grad_norm, or look at the batch"
        )
    return value

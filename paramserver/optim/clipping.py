"""Clipping of the mean of the gradients before an update: where one process has all of them, and on several servers.

To add a kind: write a subclass of ``Clipping`` and add it to ``_KINDS``, and its key to ``CLIPPINGS`` in
config/schema.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paramserver.config import TrainingConfig
from paramserver.parameters.numerics import check_gradient_norm, largest_value
from paramserver.parameters.tables import with_values


class Clipping(ABC):
    """One kind of clipping. Gradients are those in ``.grad`` of parameters, which may be None or sparse and coalesced.

    A process with all gradients calls ``clip``. Of several servers each has a shard: it measures that, server 0 merges
    what they have measured, and each clips its shard with the result. So an update takes two rounds of calls.
    """

    why_not_by_bucket: ClassVar[str]
    """Why no bucket can be updated before all gradients are there."""

    def clip(self, parameters: Sequence[Tensor], version: int) -> None:
        """Clip all gradients, for the update that makes ``version``. Raises as ``merge``."""
        self.clip_shard(parameters, self.merge([self.measure(parameters, is_everything=True)], version))

    @abstractmethod
    def measure(self, parameters: Sequence[Tensor], is_everything: bool) -> Tensor:
        """Return what server 0 needs of a shard, which ``is_everything`` if there is one server."""

    @abstractmethod
    def merge(self, measured: Sequence[Tensor], version: int) -> Tensor:
        """Return what ``clip_shard`` needs from what each shard has measured, before the first parameter changes.

        Raises:
            NotFinite: the gradients must not be applied.
        """

    @abstractmethod
    def clip_shard(self, parameters: Sequence[Tensor], merged: Tensor) -> None:
        """Clip the gradients of a shard."""


class NormClipping(Clipping):
    """Scales all gradients so that their Euclidean norm is at most ``max_norm``, as ``clip_grad_norm_`` does."""

    why_not_by_bucket = "training.clip_grad_norm needs the norm of all gradients"

    def __init__(self, max_norm: float) -> None:
        self._max_norm = max_norm

    def measure(self, parameters: Sequence[Tensor], is_everything: bool) -> Tensor:
        """Return the norm of the gradients of a shard."""
        gradients = [p.grad for p in map(with_values, parameters) if p.grad is not None]
        if is_everything or not gradients:
            return nn.utils.get_total_norm(gradients)
        norms: Any = torch._foreach_norm(gradients)
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms]))
        return total

    def merge(self, measured: Sequence[Tensor], version: int) -> Tensor:
        """Return the norm of all gradients from those of the shards.

        That of one shard is what torch.nn.utils.clip_grad_norm_ computes, in the dtype of the parameters. Those of
        several are in float64: their sum must not depend on how tensors are divided among servers.
        """
        norm = measured[0]
        if len(measured) > 1:
            norm = torch.tensor(sum(float(part) ** 2 for part in measured) ** 0.5, dtype=torch.float64)
        check_gradient_norm(float(norm), version)
        return norm

    def clip_shard(self, parameters: Sequence[Tensor], merged: Tensor) -> None:
        nn.utils.clip_grads_with_norm_(map(with_values, parameters), self._max_norm, merged)


class ValueClipping(Clipping):
    """Limits each element of the gradients to at most ``max_value`` and at least its negative, as ``clip_grad_value_``.

    Complex gradients are limited by their real and imaginary parts.
    """

    why_not_by_bucket = "training.clip_grad_value first looks for NaN in all gradients"

    def __init__(self, max_value: float) -> None:
        self._max_value = max_value

    def measure(self, parameters: Sequence[Tensor], is_everything: bool) -> Tensor:
        """Return the largest absolute value of a shard, which NaN and infinity, that clipping would hide, change."""
        return largest_value(p.grad for p in map(with_values, parameters) if p.grad is not None)

    def merge(self, measured: Sequence[Tensor], version: int) -> Tensor:
        largest = torch.stack([value.to("cpu", torch.float64) for value in measured]).max()
        check_gradient_norm(float(largest), version, "the largest value")
        return largest

    def clip_shard(self, parameters: Sequence[Tensor], merged: Tensor) -> None:
        # A shard may have no gradient where another has the largest value; torch refuses an empty list.
        present = [p for p in map(with_values, parameters) if p.grad is not None]
        if present and merged > self._max_value:
            nn.utils.clip_grad_value_(map(_as_real, present), self._max_value)


def _as_real(parameter: Tensor) -> Tensor:
    """Return a tensor with the real view of a complex ``.grad`` as its ``.grad``; otherwise the parameter itself."""
    if parameter.grad is None or not parameter.grad.is_complex():
        return parameter
    stand_in = torch.view_as_real(parameter.detach())
    stand_in.grad = torch.view_as_real(parameter.grad)
    return stand_in


# By its key, whose value it takes.
_KINDS: dict[str, Callable[[float], Clipping]] = {"clip_grad_norm": NormClipping, "clip_grad_value": ValueClipping}


def clipping_of(training: TrainingConfig) -> Clipping | None:
    """Return how the gradients of an update are clipped; None if they are not.

    What a round of local steps has changed is not: each trainer clips the gradients of its own steps.
    """
    if training.has_rounds:
        return None
    values = ((kind, getattr(training, name)) for name, kind in _KINDS.items())
    return next((kind(value) for kind, value in values if value is not None), None)

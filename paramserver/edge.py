"""The distributed-autograd edge between a server and a trainer: what is pulled goes down, gradients come up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class PulledSnapshot(torch.autograd.Function):
    """Hands out an immutable snapshot; its gradient goes to the server's flat leaf.

    So pull and push are the two directions of one edge, and ``dist_autograd.backward`` is the push.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, snapshot: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # parameters that took no part get no gradient, and not zeros
        return snapshot.view_as(snapshot)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class GradientSeal(torch.autograd.Function):
    """A scalar whose gradient with respect to the pulled tensors is what a trainer has accumulated for them.

    The model's own backward ends at the trainer's copy of the parameters, so micro-batches, hooks and higher
    derivatives work as they do anywhere. ``dist_autograd.backward`` of the seal carries the result across: the chain
    rule, cut at the border between two processes.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *pulled: Tensor) -> Tensor:
        ctx.gradients = tuple(gradients)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return None, *ctx.gradients


def pulled(leaves: Sequence[Tensor], snapshot: Sequence[Tensor]) -> list[Tensor]:
    """The snapshot as tensors whose gradients arrive at ``leaves``."""
    apply: Any = PulledSnapshot.apply
    return [apply(leaf, flat) for leaf, flat in zip(leaves, snapshot, strict=True)]


def sealed(gradients: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """The root of the distributed backward that sends ``gradients`` to where ``tensors`` were pulled from."""
    apply: Any = GradientSeal.apply
    seal: Tensor = apply(list(gradients), *tensors)
    return seal

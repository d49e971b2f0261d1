"""The distributed-autograd edge between a server and a trainer: what is pulled goes down, gradients come up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class PullFunction(torch.autograd.Function):
    """Hands out an immutable snapshot; its gradient goes to the server's flat leaf.

    So pull and push are the two directions of one edge, and ``dist_autograd.backward`` is the push; ``arrived`` is
    called in the midst of it.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, snapshot: Tensor, arrived: Callable[[], None] | None) -> Tensor:
        ctx.set_materialize_grads(False)  # parameters that took no part get no gradient, and not zeros
        ctx.arrived = arrived
        return snapshot.view_as(snapshot)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.arrived is not None:
            ctx.arrived()
        return gradients[0], None, None


class PushFunction(torch.autograd.Function):
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


class SendOutputs(torch.autograd.Function):
    """Outputs of a forward on their way out, behind a ticket whose gradient says which of them took part in the loss.

    Distributed autograd fills in zeros for what took no part. Here such an output has no gradient again, as it has
    where nothing is distributed, so that a parameter which only it depends on is not stepped.
    """

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return torch.zeros(len(outputs)), *(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        took_part = gradients[0].tolist()
        return tuple(g if part else None for g, part in zip(gradients[1:], took_part, strict=True))


class RecvOutputs(torch.autograd.Function):
    """The other end of ``SendOutputs``: takes ticket and outputs, gives an anchor and the outputs.

    The anchor is a scalar and a root of the backward beside the loss. So every reply takes part in the backward, which
    would else wait for those that do not.
    """

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return torch.zeros(()), *(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.tensor([float(g is not None) for g in gradients[1:]]), *gradients[1:]


def send_outputs(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Ticket and outputs, as they leave the process that computed them; all of ``outputs`` have a gradient."""
    apply: Any = SendOutputs.apply
    return list(apply(*outputs))


def recv_outputs(departed: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Anchor and outputs, from what ``send_outputs`` gave elsewhere."""
    apply: Any = RecvOutputs.apply
    anchor, *outputs = apply(*departed)
    return anchor, outputs


def pull(
    leaves: Sequence[Tensor], snapshot: Sequence[Tensor], arrived: Callable[[], None] | None = None
) -> list[Tensor]:
    """The snapshot as tensors whose gradients arrive at ``leaves``; ``arrived`` is called for each that does."""
    apply: Any = PullFunction.apply
    return [apply(leaf, flat, arrived) for leaf, flat in zip(leaves, snapshot, strict=True)]


def push_root(gradients: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """The root of the distributed backward that sends ``gradients`` to where ``tensors`` were pulled from."""
    apply: Any = PushFunction.apply
    seal: Tensor = apply(list(gradients), *tensors)
    return seal

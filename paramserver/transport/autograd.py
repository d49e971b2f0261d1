"""Autograd functions at the border between a server and a trainer: a pull, and the push as its backward.

What a server sends has a distributed-autograd edge back to the server, so ``dist_autograd.backward`` on the trainer is
the push. Every function here is a view or a constant in forward; backward alone does something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class PullFunction(torch.autograd.Function):
    """Returns an immutable snapshot; its gradient goes to the server's flat leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, snapshot: Tensor, on_gradient: Callable[[Tensor], None] | None) -> Tensor:
        # Without this, a parameter that took no part gets a gradient of zeros, and optimizers with momentum step it.
        ctx.set_materialize_grads(False)
        ctx.on_gradient = on_gradient
        return snapshot.view_as(snapshot)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.on_gradient is not None:
            # In a thread of the RPC agent, inside the distributed backward, and without any lock of the server.
            ctx.on_gradient(gradients[0])
        return gradients[0], None, None


class PushFunction(torch.autograd.Function):
    """A scalar whose gradients with respect to the pulled tensors are the gradients that a trainer has accumulated.

    The model's own backward ends at the trainer's copy of the parameters, so micro-batches, hooks and higher
    derivatives work as in one process. The distributed backward of this scalar sends the result: the chain rule,
    divided at the border between two processes.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *pulled: Tensor) -> Tensor:
        # Inside a sequence they are no differentiable inputs, so autograd records nothing about them.
        ctx.gradients = tuple(gradients)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        # ``upstream`` is 1, as this scalar is a root of the backward.
        return None, *ctx.gradients


class SendOutputs(torch.autograd.Function):
    """Returns a token and the outputs of a forward; the token's gradient marks the outputs that are in the loss.

    Distributed autograd fills in zeros for outputs that are not in the loss. Here such an output has no gradient, as in
    one process, so that a parameter on which nothing else depends is not stepped.
    """

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return torch.zeros(len(outputs)), *(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # In the order of the outputs: ``RecvOutputs.backward`` writes this vector as the gradient of the token.
        is_in_loss = gradients[0].tolist()
        return tuple(g if used else None for g, used in zip(gradients[1:], is_in_loss, strict=True))


class RecvOutputs(torch.autograd.Function):
    """The counterpart of ``SendOutputs``: takes token and outputs, returns an anchor and the outputs.

    The anchor is a scalar root of the backward in addition to the loss. It makes every reply part of the backward, as
    dist_autograd requires (docs/torch-notes.md, "One backward, and every reply in it").
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return torch.zeros(()), *(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # The gradient of the anchor itself is not used. None arrives for an output that is not in the loss, because
        # gradients are not materialized; distributed autograd would make zeros of it, hence the vector.
        return torch.tensor([float(g is not None) for g in gradients[1:]]), *gradients[1:]


def pull(
    leaves: Sequence[Tensor], snapshot: Sequence[Tensor], on_gradient: Callable[[Tensor], None] | None = None
) -> list[Tensor]:
    """Return the tensors of a snapshot with edges to ``leaves``; called on a server inside a pull.

    Args:
        leaves: flat tensors that require gradients.
        snapshot: one tensor for each of them, in any dtype.
        on_gradient: called with each gradient that is received, during the backward and in its thread.
    """
    # Whole flat tensors and no slices: the backward of each slice would allocate a tensor of the full size.
    apply: Any = PullFunction.apply
    return [apply(leaf, flat, on_gradient) for leaf, flat in zip(leaves, snapshot, strict=True)]


@torch.enable_grad()  # a task may have left it switched off
def local_root() -> Tensor:
    """Return the root of the backward of any number of contexts in which no pull is recorded."""
    return torch.zeros((), requires_grad=True).clone()


def push_root(gradients: Sequence[Tensor], pulled: Sequence[Tensor]) -> Tensor:
    """Return the root of the distributed backward that sends ``gradients`` to where ``pulled`` came from."""
    apply: Any = PushFunction.apply
    root: Tensor = apply(list(gradients), *pulled)
    return root


def send_outputs(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return a token and ``outputs``, which all require gradients, for a reply of the process that computed them."""
    apply: Any = SendOutputs.apply
    return list(apply(*outputs))


def recv_outputs(sent: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return an anchor and the outputs, from what ``send_outputs`` returned in another process."""
    apply: Any = RecvOutputs.apply
    anchor, *outputs = apply(*sent)
    return anchor, outputs

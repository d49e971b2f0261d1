"""Parameters and gradients inside the messages of RPC: for trainers on any host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from paramserver.edge import pulled, sealed
from paramserver.flat import Layout
from paramserver.transport.ends import ServerEnd, TrainerEnd
from paramserver.transport.wire import tensor_bytes


class RpcServerEnd(ServerEnd):
    """Sends a snapshot and gets a gradient for each of its tensors.

    Args:
        leaves: the flat leaves that gradients arrive at.
        snapshot: gives the current version, immutable.
    """

    def __init__(self, leaves: Sequence[Tensor], snapshot: Callable[[], Sequence[Tensor]]) -> None:
        self._leaves = leaves
        self._snapshot = snapshot

    def pull(self) -> tuple[Tensor, ...]:
        return tuple(pulled(self._leaves, self._snapshot()))

    def look(self) -> tuple[Tensor, ...]:
        return tuple(self._snapshot())

    def gradients(self, held: Mapping[Tensor, Tensor]) -> list[Tensor] | None:
        return [held[leaf] for leaf in self._leaves] if all(leaf in held for leaf in self._leaves) else None

    def release(self) -> None:
        """A snapshot lives as long as somebody holds it."""


class RpcTrainerEnd(TrainerEnd):
    """Copies what comes into the model's own parameters; gradients leave from memory that is used again.

    Args:
        layout: how the parameters lie in the flat tensors.
        parameters: the model's, in the order of the layout.
    """

    name = "rpc"

    def __init__(self, layout: Layout, parameters: Sequence[Tensor]) -> None:
        self._layout = layout
        self._parameters = list(parameters)
        self._outgoing = layout.allocate()
        self.gradient_views = list(layout.views(self._outgoing).values())

    @torch.no_grad()
    def take(self, pulled: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self._parameters, list(self._layout.views(pulled).values()))

    def take_copy(self, flats: Sequence[Tensor]) -> None:
        self.take(flats)

    def seal(self, pulled: Sequence[Tensor]) -> Tensor:
        return sealed(self._outgoing, pulled)

    def bytes_of(self, pulled: Sequence[Tensor]) -> int:
        return tensor_bytes(pulled) + tensor_bytes(self._outgoing)

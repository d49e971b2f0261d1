"""Parameters read in place and gradients written in place: for trainers on the server's own host.

A one-element ticket still goes down and up the distributed-autograd edge: its gradient, which
``dist_autograd.backward`` brings, says that the gradients are in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from paramserver.edge import pulled, sealed
from paramserver.errors import TaskError
from paramserver.flat import Layout
from paramserver.transport.ends import ServerEnd, TrainerEnd
from paramserver.transport.segments import attach
from paramserver.transport.shelves import Shelf, gradients_key, parameters_key
from paramserver.transport.wire import tensor_bytes


class MemoryServerEnd(ServerEnd):
    """Hands out tickets, and finds gradients in the trainer's own segment.

    Args:
        shelf: of all trainers of this host.
        gradients: the flat tensors that the trainer writes to between a pull and the push that follows, or of several
            servers this one's ranges of them.
        arrived: called when a ticket has come back.
    """

    in_place = True

    def __init__(self, shelf: Shelf, gradients: list[Tensor], arrived: Callable[[], None]) -> None:
        self._shelf = shelf
        self._gradients = gradients
        self._arrived = arrived
        self._is_back = False
        self._leaf = torch.zeros(1, requires_grad=True)
        self._pinned: int | None = None

    def offer(self) -> int:
        self.release()
        self._pinned = self._shelf.pin()
        return self._pinned

    def pull(self) -> tuple[Tensor, ...]:
        return tuple(pulled([self._leaf], [torch.zeros(1)], self._ticket_came))

    def _ticket_came(self) -> None:
        self._is_back = True
        self._arrived()

    def look(self) -> tuple[int, Sequence[Tensor]]:
        return self.offer(), ()

    def gradients(self, held: Mapping[Tensor, Tensor]) -> list[Tensor] | None:
        return list(self._gradients) if self._is_back or self._leaf in held else None

    def release(self) -> None:
        self._is_back = False
        if self._pinned is not None:
            self._shelf.unpin(self._pinned)
            self._pinned = None


class MemoryTrainerEnd(TrainerEnd):
    """Makes the model's parameters views of the server's snapshots; on another device, copies of them.

    Args:
        layout: how the parameters lie in the flat tensors.
        parameters: the model's, in the order of the layout.
        address: of the server's segments.
        slots: how many snapshots there are.
        trainer_index: whose gradients are written.
        timeout_s: for each segment.
    """

    name = "shared_memory"
    in_place = True

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[Tensor],
        address: str,
        slots: int,
        trainer_index: int,
        timeout_s: float,
    ) -> None:
        self._names = [slot.name for slot in layout.slots]
        self._parameters = list(parameters)
        self._on_cpu = all(p.device.type == "cpu" for p in parameters)
        self._snapshots = [
            list(layout.views(attach(address, parameters_key(slot), layout, timeout_s)).values())
            for slot in range(slots)
        ]
        gradients = attach(address, gradients_key(trainer_index), layout, timeout_s)
        self.gradient_views = list(layout.views(gradients).values())
        self._layout = layout
        self._place: int | None = None
        self._counts: list[int] = []

    @torch.no_grad()
    def find(self, place: int) -> None:
        if not self._on_cpu:
            torch._foreach_copy_(self._parameters, self._snapshots[place])
        elif place != self._place:
            self._move(self._snapshots[place])
        self._place = place
        self._counts = [parameter._version for parameter in self._parameters]

    @torch.no_grad()
    def take(self, flats: Sequence[Tensor]) -> None:
        views = list(self._layout.views(flats).values())
        if self._on_cpu:
            self._move(views)
        else:
            torch._foreach_copy_(self._parameters, views)
        self._place = None

    def _move(self, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.data = view

    def seal(self, pulled: Sequence[Tensor]) -> Tensor:
        if self._on_cpu:
            self._check_unchanged()
        return sealed([torch.ones(1)], pulled)

    def _check_unchanged(self) -> None:
        for name, parameter, count in zip(self._names, self._parameters, self._counts, strict=True):
            if parameter._version != count:
                raise TaskError(
                    f"parameter {name} was changed in place on a trainer, and belongs to the server; change it in "
                    "build_model or through the optimizer, or use server.transport: rpc, where such a change is lost"
                )

    def bytes_of(self, pulled: Sequence[Tensor]) -> int:
        return 2 * tensor_bytes(pulled)

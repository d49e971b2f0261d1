"""Parameters and gradients inside the messages of RPC: for trainers on any host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from paramserver.edge import pulled, sealed
from paramserver.errors import NotFinite
from paramserver.flat import Layout
from paramserver.transport.ends import ServerEnd, TrainerEnd
from paramserver.transport.wire import tensor_bytes


class Outgoing:
    """The current version as it travels: rounded to the type of the wire where that is smaller, once for all.

    Args:
        layout: of the parameters.
        wire: how they lie on the wire.
        snapshot: gives the current version, immutable, the same object while it is current.
    """

    def __init__(self, layout: Layout, wire: Layout, snapshot: Callable[[], list[Tensor]]) -> None:
        self._layout = layout
        self._wire = wire
        self._snapshot = snapshot
        self._of: list[Tensor] | None = None
        self._rounded: list[Tensor] = []

    def version(self) -> list[Tensor]:
        """Immutable as well."""
        current = self._snapshot()
        if self._of is not current:
            self._rounded, self._of = self.rounded(current), current
        return self._rounded

    def rounded(self, flats: list[Tensor]) -> list[Tensor]:
        """The same of a version that is not the current one any more."""
        if self._wire == self._layout:
            return flats
        rounded = [flat.to(dtype) for flat, dtype in zip(flats, self._wire.dtypes, strict=True)]
        check_fits(self._layout, flats, rounded, "parameter")
        return rounded


class RpcServerEnd(ServerEnd):
    """Sends a version and gets a gradient for each of its flat tensors, which arrives in the parameters' own type.

    Args:
        leaves: the flat leaves that gradients arrive at.
        outgoing: of all trainers.
    """

    def __init__(self, leaves: Sequence[Tensor], outgoing: Outgoing) -> None:
        self._leaves = leaves
        self._outgoing = outgoing
        self._offered: list[Tensor] = []

    def offer(self) -> int:
        self._offered = self._outgoing.version()
        return 0

    def pull(self) -> tuple[Tensor, ...]:
        return tuple(pulled(self._leaves, self._offered))

    def look(self) -> tuple[None, Sequence[Tensor]]:
        return None, self._outgoing.version()

    def gradients(self, held: Mapping[Tensor, Tensor]) -> list[Tensor] | None:
        return [held[leaf] for leaf in self._leaves] if all(leaf in held for leaf in self._leaves) else None

    def release(self) -> None:
        self._offered = []


class RpcTrainerEnd(TrainerEnd):
    """Copies what comes into the model's own parameters; gradients leave from memory that is used again.

    Args:
        layout: how the parameters lie in the flat tensors.
        wire: how they lie on the wire.
        parameters: the model's, in the order of the layout.
    """

    name = "rpc"
    in_place = False

    def __init__(self, layout: Layout, wire: Layout, parameters: Sequence[Tensor]) -> None:
        self._layout = layout
        self._narrows = wire != layout
        self._parameters = list(parameters)
        self._outgoing = wire.allocate()
        self.gradient_views = list(layout.views(self._outgoing).values())

    def find(self, place: int) -> None:
        raise AssertionError("versions come with the answer to a pull")

    @torch.no_grad()
    def take(self, flats: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self._parameters, list(self._layout.views(flats).values()))

    def seal(self, pulled: Sequence[Tensor]) -> Tensor:
        if self._narrows:
            self._check_gradients_fit()
        return sealed(self._outgoing, pulled)

    def _check_gradients_fit(self) -> None:
        if all(bool(flat.isfinite().all()) for flat in self._outgoing):
            return
        for slot, view, parameter in zip(self._layout.slots, self.gradient_views, self._parameters, strict=True):
            if parameter.grad is not None:
                _check_one(slot.name, parameter.grad, view, "the gradient of parameter")

    def bytes_of(self, pulled: Sequence[Tensor]) -> int:
        return tensor_bytes(pulled) + tensor_bytes(self._outgoing)


def check_fits(layout: Layout, exact: Sequence[Tensor], rounded: Sequence[Tensor], what: str) -> None:
    """Refuse, by name, what became infinite when it was rounded.

    Raises:
        NotFinite: the first such tensor.
    """
    if all(bool(flat.isfinite().all()) for flat in rounded):
        return
    theirs = layout.views(rounded)
    for name, own in layout.views(exact).items():
        _check_one(name, own, theirs[name], what)


def _check_one(name: str, exact: Tensor, rounded: Tensor, what: str) -> None:
    overflowed = exact.isfinite() & ~rounded.isfinite()
    if bool(overflowed.any()):
        largest = float(exact[overflowed].abs().max())
        kind = str(rounded.dtype).removeprefix("torch.")
        raise NotFinite(
            f"{what} {name} has a value of {largest:.4g}, which is too large for server.wire_dtype ({kind}); "
            "use bfloat16 or float32, or a smaller learning rate"
        )

"""Parameters and gradients inside the messages of RPC: for trainers on any host.

Parameters and gradients inside the messages of RPC, where several servers own a shard each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from paramserver.distributed.rpc_calls import tensor_bytes
from paramserver.errors import NotFinite
from paramserver.parameters.flat import FlatLayout
from paramserver.parameters.sharding import Shard, slot_numel
from paramserver.transport.autograd import pull, push_root
from paramserver.transport.base import GradientBucket, ServerTransport, TrainerTransport
from paramserver.transport.messages import VersionView


class WireVersion:
    """The current version as it travels: rounded to the type of the wire where that is smaller, once for all.

    Args:
        layout: of the parameters.
        wire: how they lie on the wire.
        snapshot: gives the current version, immutable, the same object while it is current.
    """

    def __init__(self, layout: FlatLayout, wire: FlatLayout, snapshot: Callable[[], list[Tensor]]) -> None:
        self._layout = layout
        self._wire = wire
        self._snapshot = snapshot
        self._of: list[Tensor] | None = None
        self._rounded: list[Tensor] = []

    def current(self) -> list[Tensor]:
        """Immutable as well."""
        current = self._snapshot()
        if self._of is not current:
            self._rounded, self._of = self.encode(current), current
        return self._rounded

    def encode(self, flats: list[Tensor]) -> list[Tensor]:
        """The same of a version that is not the current one any more."""
        if self._wire == self._layout:
            return flats
        rounded = [flat.to(dtype) for flat, dtype in zip(flats, self._wire.dtypes, strict=True)]
        check_fits(self._layout, flats, rounded, "parameter")
        return rounded


class PushAssembly:
    """A push as it arrives: the gradient of the first flat tensor inside the context, those of the others before it.

    Distributed autograd sends gradients only when a trainer's backward is done. So the first flat tensor, whose
    gradient is the last to be ready, carries the context, and the others travel while backward goes on.

    Args:
        leaves: the flat leaves that gradients are for.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        self._early: dict[int, Tensor] = {}

    def pull(self, flats: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What is sent of a version."""
        return *pull(self._leaves[:1], flats[:1]), *flats[1:]

    def add_bucket(self, number: int, gradient: Tensor) -> None:
        self._early[number] = gradient

    def complete(self, held: Mapping[Tensor, Tensor]) -> list[Tensor] | None:
        """All gradients, in the parameters' own type; None where one is missing.

        Args:
            held: the gradients of the context, by leaf.
        """
        first, *others = self._leaves
        if first not in held or any(number not in self._early for number in range(1, len(self._leaves))):
            return None
        return [held[first], *(self._early[n].to(leaf.dtype) for n, leaf in enumerate(others, start=1))]

    def clear(self) -> None:
        self._early.clear()


class RpcServerTransport(ServerTransport):
    """Sends a version and gets a gradient for each of its flat tensors.

    Args:
        leaves: the flat leaves that gradients arrive at.
        outgoing: of all trainers.
    """

    def __init__(self, leaves: Sequence[Tensor], outgoing: WireVersion) -> None:
        self._outgoing = outgoing
        self._offered: list[Tensor] = []
        self._arrivals = PushAssembly(leaves)

    def pin_version(self) -> int:
        self.unpin()
        self._offered = self._outgoing.current()
        return 0

    def pull(self) -> tuple[Tensor, ...]:
        return self._arrivals.pull(self._offered)

    def view_version(self) -> tuple[None, Sequence[Tensor]]:
        return None, self._outgoing.current()

    def collect_gradients(self, held: Mapping[Tensor, Tensor]) -> list[Tensor] | None:
        return self._arrivals.complete(held)

    def receive_bucket(self, number: int, gradient: Tensor) -> None:
        self._arrivals.add_bucket(number, gradient)

    def unpin(self) -> None:
        self._offered = []
        self._arrivals.clear()


class RpcTrainerTransport(TrainerTransport):
    """Copies what comes into the model's own parameters; gradients leave from memory that is used again.

    Args:
        layout: how the parameters lie in the flat tensors.
        wire: how they lie on the wire.
        parameters: the model's, in the order of the layout.
    """

    name = "rpc"
    in_place = False

    def __init__(self, layout: FlatLayout, wire: FlatLayout, parameters: Sequence[Tensor]) -> None:
        self._layout = layout
        self._narrows = wire != layout
        self._parameters = list(parameters)
        self._outgoing = wire.allocate(pinned=on_gpu(parameters))
        self._by_context = [0]
        self.gradient_views = list(layout.views(self._outgoing).values())
        self.buckets = {
            GradientBucket(0, number): [n for n, slot in enumerate(layout.slots) if slot.group == number]
            for number in range(1, len(layout.sizes))
        }

    def map_version(self, place: int) -> None:
        raise AssertionError("versions come with the answer to a pull")

    @torch.no_grad()
    def load(self, flats: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self._parameters, list(self._layout.views(flats).values()))

    def bucket_tensor(self, early: GradientBucket) -> Tensor:
        return self._checked(early.flat_index)

    def backward_root(self, pulled: Sequence[Tensor]) -> Tensor:
        return push_root([self._checked(place) for place in self._by_context], [pulled[p] for p in self._by_context])

    def _checked(self, place: int) -> Tensor:
        """One of the tensors that leave.

        Raises:
            NotFinite: a gradient became infinite when it was rounded.
        """
        flat = self._outgoing[place]
        if self._narrows and not bool(flat.isfinite().all()):
            self._check_gradients_fit()
        return flat

    def _check_gradients_fit(self) -> None:
        for slot, view, parameter in zip(self._layout.slots, self.gradient_views, self._parameters, strict=True):
            if parameter.grad is not None:
                _check_one(slot.name, parameter.grad, view, "the gradient of parameter")

    def step_bytes(self, pulled: Sequence[Tensor]) -> int:
        return tensor_bytes(pulled) + tensor_bytes(self._outgoing)


def on_gpu(parameters: Sequence[Tensor]) -> bool:
    """Whether gradients leave from a GPU."""
    return any(parameter.is_cuda for parameter in parameters)


def check_fits(layout: FlatLayout, exact: Sequence[Tensor], rounded: Sequence[Tensor], what: str) -> None:
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


class ShardedServerTransport(RpcServerTransport):
    """The first server's end, which sends and gets its own shard only.

    Args:
        shard: of the first server.
        leaves, outgoing: of its ranges.
    """

    def __init__(self, shard: Shard, leaves: Sequence[Tensor], outgoing: WireVersion) -> None:
        super().__init__(leaves, outgoing)
        self._shard = shard

    def view_retained(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> VersionView:
        return VersionView(None, tuple(self._shard.copy_flats(parameters)), tuple(buffers))


class ShardedTrainerTransport(RpcTrainerTransport):
    """Takes the ranges of all shards, in the order of servers, and sends a gradient for each.

    What is split between servers is gathered in one piece first, as a gradient is computed.

    Args:
        layout: how the parameters lie in the flat tensors.
        shards: who owns what.
        wire_dtype: of what travels, where it is smaller.
        parameters: the model's, in the order of the layout.
    """

    def __init__(
        self, layout: FlatLayout, shards: Sequence[Shard], wire_dtype: torch.dtype, parameters: Sequence[Tensor]
    ) -> None:
        self._layout = layout
        self._shards = list(shards)
        wires = [shard.layout.narrowed(wire_dtype) for shard in shards]
        self._narrows = wires != [shard.layout for shard in shards]
        self._parameters = list(parameters)
        self._make_dense()
        parts = [wire.allocate(pinned=on_gpu(parameters)) for wire in wires]
        self._outgoing = [flat for flats in parts for flat in flats]
        self._first = list(accumulate((len(flats) for flats in parts[:-1]), initial=0))
        self._by_context = self._first
        self._split: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._lay_out(layout.narrowed(wire_dtype), parts)
        self.buckets = {
            GradientBucket(server, number): shard.slots_of_range(number)
            for server, shard in enumerate(shards)
            for number in range(1, len(shard.ranges))
        }

    def _make_dense(self) -> None:
        """Make the memory of each parameter that of its slot, so that a part of it is a part of that."""
        for parameter, slot in zip(self._parameters, self._layout.slots, strict=True):
            if tuple(parameter.stride()) != slot.stride:
                dense = torch.empty_strided(slot.shape, slot.stride, dtype=parameter.dtype, device=parameter.device)
                parameter.data = dense.copy_(parameter.detach())

    def _lay_out(self, wire: FlatLayout, parts: Sequence[Sequence[Tensor]]) -> None:
        """Where gradients are put: in what leaves, or beside it where that is in several parts."""
        found: dict[int, Tensor] = {}
        for first, shard, flats in zip(self._first, self._shards, parts, strict=True):
            views = shard.layout.views(flats)
            for piece, own in zip(shard.slices, shard.layout.slots, strict=True):
                if shard.is_whole(piece, self._layout):
                    found[piece.slot] = views[own.name]
                    continue
                slot = wire.slots[piece.slot]
                if piece.slot not in found:
                    found[piece.slot] = torch.empty_strided(slot.shape, slot.stride, dtype=wire.dtypes[slot.group])
                parted = views[own.name], _part(found[piece.slot], piece.start, piece.length)
                self._split.setdefault(first + own.group, []).append(parted)
        self.gradient_views = [
            found.get(number, torch.empty(slot.shape, dtype=wire.dtypes[slot.group]))
            for number, slot in enumerate(wire.slots)
        ]

    @torch.no_grad()
    def load(self, flats: Sequence[Tensor]) -> None:
        targets, sources, at = [], [], 0
        for shard in self._shards:
            views = shard.layout.views(flats[at : at + len(shard.ranges)])
            at += len(shard.ranges)
            sources += list(views.values())
            targets += [
                _part_of(self._parameters[p.slot], self._layout, p.slot, p.start, p.length) for p in shard.slices
            ]
        torch._foreach_copy_(targets, sources)

    def bucket_tensor(self, early: GradientBucket) -> Tensor:
        return self._checked(self._first[early.server_index] + early.flat_index)

    def _checked(self, place: int) -> Tensor:
        if place in self._split:
            owned, parts = zip(*self._split[place], strict=True)
            with torch.no_grad():
                torch._foreach_copy_(owned, parts)
        return super()._checked(place)


def _part(dense: Tensor, start: int, length: int) -> Tensor:
    """Elements of a tensor that fills its memory, in the order of that memory."""
    return dense.as_strided((length,), (1,), dense.storage_offset() + start)


def _part_of(parameter: Tensor, layout: FlatLayout, slot: int, start: int, length: int) -> Tensor:
    whole = length == slot_numel(layout.slots[slot])
    return parameter.detach() if whole else _part(parameter.detach(), start, length)

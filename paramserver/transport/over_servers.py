"""Parameters and gradients inside the messages of RPC, where several servers own a shard each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from paramserver.flat import Layout
from paramserver.protocol import Look
from paramserver.shards import Shard, size_of
from paramserver.transport.ends import Early
from paramserver.transport.over_rpc import Outgoing, RpcServerEnd, RpcTrainerEnd, on_gpu


class ShardServerEnd(RpcServerEnd):
    """The first server's end, which sends and gets its own shard only.

    Args:
        shard: of the first server.
        leaves, outgoing: of its ranges.
    """

    def __init__(self, shard: Shard, leaves: Sequence[Tensor], outgoing: Outgoing) -> None:
        super().__init__(leaves, outgoing)
        self._shard = shard

    def kept(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> Look:
        return Look(None, tuple(self._shard.copies_of(parameters)), tuple(buffers))


class SpreadTrainerEnd(RpcTrainerEnd):
    """Takes the ranges of all shards, in the order of servers, and sends a gradient for each.

    What is split between servers is gathered in one piece first, as a gradient is computed.

    Args:
        layout: how the parameters lie in the flat tensors.
        shards: who owns what.
        wire_dtype: of what travels, where it is smaller.
        parameters: the model's, in the order of the layout.
    """

    def __init__(
        self, layout: Layout, shards: Sequence[Shard], wire_dtype: torch.dtype, parameters: Sequence[Tensor]
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
        self.early = {
            Early(server, number): shard.slots_in(number)
            for server, shard in enumerate(shards)
            for number in range(1, len(shard.ranges))
        }

    def _make_dense(self) -> None:
        """Make the memory of each parameter that of its slot, so that a part of it is a part of that."""
        for parameter, slot in zip(self._parameters, self._layout.slots, strict=True):
            if tuple(parameter.stride()) != slot.stride:
                dense = torch.empty_strided(slot.shape, slot.stride, dtype=parameter.dtype, device=parameter.device)
                parameter.data = dense.copy_(parameter.detach())

    def _lay_out(self, wire: Layout, parts: Sequence[Sequence[Tensor]]) -> None:
        """Where gradients are put: in what leaves, or beside it where that is in several parts."""
        found: dict[int, Tensor] = {}
        for first, shard, flats in zip(self._first, self._shards, parts, strict=True):
            views = shard.layout.views(flats)
            for piece, own in zip(shard.pieces, shard.layout.slots, strict=True):
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
    def take(self, flats: Sequence[Tensor]) -> None:
        targets, sources, at = [], [], 0
        for shard in self._shards:
            views = shard.layout.views(flats[at : at + len(shard.ranges)])
            at += len(shard.ranges)
            sources += list(views.values())
            targets += [
                _part_of(self._parameters[p.slot], self._layout, p.slot, p.start, p.length) for p in shard.pieces
            ]
        torch._foreach_copy_(targets, sources)

    def departing(self, early: Early) -> Tensor:
        return self._checked(self._first[early.server] + early.number)

    def _checked(self, place: int) -> Tensor:
        if place in self._split:
            owned, parts = zip(*self._split[place], strict=True)
            with torch.no_grad():
                torch._foreach_copy_(owned, parts)
        return super()._checked(place)


def _part(dense: Tensor, start: int, length: int) -> Tensor:
    """Elements of a tensor that fills its memory, in the order of that memory."""
    return dense.as_strided((length,), (1,), dense.storage_offset() + start)


def _part_of(parameter: Tensor, layout: Layout, slot: int, start: int, length: int) -> Tensor:
    whole = length == size_of(layout.slots[slot])
    return parameter.detach() if whole else _part(parameter.detach(), start, length)

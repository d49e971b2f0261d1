"""Parameters and gradients inside the messages of RPC, where several servers own a shard each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paramserver.edge import sealed
from paramserver.flat import Layout
from paramserver.protocol import Look
from paramserver.shards import Shard, size_of
from paramserver.transport.over_rpc import Outgoing, RpcServerEnd, RpcTrainerEnd


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
        parts = [wire.allocate() for wire in wires]
        self._outgoing = [flat for flats in parts for flat in flats]
        self._split: list[tuple[Tensor, Tensor]] = []
        self._lay_out(layout.narrowed(wire_dtype), parts)

    def _make_dense(self) -> None:
        """Make the memory of each parameter that of its slot, so that a part of it is a part of that."""
        for parameter, slot in zip(self._parameters, self._layout.slots, strict=True):
            if tuple(parameter.stride()) != slot.stride:
                dense = torch.empty_strided(slot.shape, slot.stride, dtype=parameter.dtype, device=parameter.device)
                parameter.data = dense.copy_(parameter.detach())

    def _lay_out(self, wire: Layout, parts: Sequence[Sequence[Tensor]]) -> None:
        """Where gradients are put: in what leaves, or beside it where that is in several parts."""
        found: dict[int, Tensor] = {}
        for shard, flats in zip(self._shards, parts, strict=True):
            views = shard.layout.views(flats)
            for piece, own in zip(shard.pieces, shard.layout.slots, strict=True):
                if shard.is_whole(piece, self._layout):
                    found[piece.slot] = views[own.name]
                    continue
                slot = wire.slots[piece.slot]
                if piece.slot not in found:
                    found[piece.slot] = torch.empty_strided(slot.shape, slot.stride, dtype=wire.dtypes[slot.group])
                self._split.append((views[own.name], _part(found[piece.slot], piece.start, piece.length)))
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

    @torch.no_grad()
    def seal(self, pulled: Sequence[Tensor]) -> Tensor:
        if self._split:
            torch._foreach_copy_([own for own, _ in self._split], [part for _, part in self._split])
        if self._narrows:
            self._check_gradients_fit()
        with torch.enable_grad():
            return sealed(self._outgoing, pulled)


def _part(dense: Tensor, start: int, length: int) -> Tensor:
    """Elements of a tensor that fills its memory, in the order of that memory."""
    return dense.as_strided((length,), (1,), dense.storage_offset() + start)


def _part_of(parameter: Tensor, layout: Layout, slot: int, start: int, length: int) -> Tensor:
    whole = length == size_of(layout.slots[slot])
    return parameter.detach() if whole else _part(parameter.detach(), start, length)

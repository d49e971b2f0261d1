"""Which server owns which part of the parameters: contiguous ranges of the flat tensors, of about equal size.

An optimizer over a part of the parameters, and its state: taken apart for servers, and put together again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paramserver.errors import UnsupportedConfiguration
from paramserver.parameters.flat import ALIGNMENT_BYTES, FlatLayout, TensorSlot

# A tensor is split where it is larger than one of these.
_LARGE_BYTES = 64 * 1024
_LARGE_SHARE = 0.01


@dataclass(frozen=True)
class ShardSlice:
    """``length`` elements of the tensor in slot number ``slot``, from element ``start`` on, as they lie in memory."""

    slot: int
    start: int
    length: int


@dataclass(frozen=True)
class Shard:
    """What one server owns.

    ``ranges`` are the parts of the flat tensors, each ``(group, first element, end)`` and none empty; ``layout`` says
    how the pieces lie in them: a whole tensor in its own shape, a part of one in one dimension.
    """

    ranges: tuple[tuple[int, int, int], ...]
    slices: tuple[ShardSlice, ...]
    layout: FlatLayout

    def slice_flats(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """This shard's ranges as views of the flat tensors of everything."""
        return [flats[group][first:end] for group, first, end in self.ranges]

    def copy_flats(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """The same in memory of their own: of a view, all that lies around it may travel too."""
        return [part.detach().clone() for part in self.slice_flats(flats)]

    def slots_of_range(self, number: int) -> list[int]:
        """The slots of all tensors of which a piece is in range ``number``."""
        return [p.slot for p, own in zip(self.slices, self.layout.slots, strict=True) if own.group == number]

    def is_whole(self, piece: ShardSlice, whole: FlatLayout) -> bool:
        """Whether the piece is all of its tensor."""
        return piece.length == slot_numel(whole.slots[piece.slot])


def slot_numel(slot: TensorSlot) -> int:
    """Elements of the tensor in a slot."""
    size = 1
    for n in slot.shape:
        size *= n
    return size


def full_shard(layout: FlatLayout) -> Shard:
    """All of the parameters, for the only server."""
    ranges = tuple((group, 0, size) for group, size in enumerate(layout.sizes))
    pieces = tuple(ShardSlice(number, 0, slot_numel(slot)) for number, slot in enumerate(layout.slots))
    return Shard(ranges, pieces, layout)


def plan_shards(layout: FlatLayout, servers: int, splittable: bool) -> tuple[Shard, ...]:
    """Deal the parameters to servers, in order, so that each owns about as many bytes.

    Args:
        layout: of all parameters.
        servers: how many.
        splittable: tensors may be cut, as each element is updated by itself; at multiples of 64 bytes, large ones only.

    Returns:
        A shard for each server. No element is in two of them, and each has at most the mean and one largest part that
        is not cut. Of several shards none has tensors without elements, which are never stepped.

    Raises:
        UnsupportedConfiguration: there are more servers than parts.
    """
    if servers == 1:
        return (full_shard(layout),)
    targets = [layout.total_bytes * k / servers for k in range(1, servers)]
    cuts = sorted({*_between(layout), *(_inside(layout, targets) if splittable else ())})
    if len(cuts) < servers - 1:
        raise UnsupportedConfiguration(
            f"cluster.num_servers ({servers}) must be at most {len(cuts) + 1}, as the parameters of this model fall "
            "into so many parts; lower it"
        )
    chosen = [0, *_nearest(cuts, targets), layout.total_bytes]
    return tuple(_shard(layout, first, end) for first, end in pairwise(chosen))


def _ends(layout: FlatLayout) -> list[int]:
    """Where each flat tensor ends, in bytes, when they follow one another."""
    ends, end = [], 0
    for size, dtype in zip(layout.sizes, layout.dtypes, strict=True):
        end += size * dtype.itemsize
        ends.append(end)
    return ends


def _spans(layout: FlatLayout) -> Iterator[tuple[int, int]]:
    """First byte and end of each tensor that is not empty."""
    ends = _ends(layout)
    for slot in layout.slots:
        item_bytes = layout.dtypes[slot.group].itemsize
        before = ends[slot.group] - layout.sizes[slot.group] * item_bytes
        if slot_numel(slot):
            yield before + slot.offset * item_bytes, before + (slot.offset + slot_numel(slot)) * item_bytes


def _between(layout: FlatLayout) -> list[int]:
    """The bytes at which a tensor begins, but for the first."""
    return sorted(first for first, _ in _spans(layout))[1:]


def _inside(layout: FlatLayout, targets: Sequence[float]) -> Iterator[int]:
    """The aligned bytes nearest to the targets that lie inside of large tensors."""
    large = min(_LARGE_BYTES, layout.total_bytes * _LARGE_SHARE)
    for first, end in _spans(layout):
        for target in targets if end - first > large else ():
            cut = round(target / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            if first < cut < end:
                yield cut


def _nearest(cuts: Sequence[int], targets: Sequence[float]) -> list[int]:
    """The cut nearest to each target, rising, so that one is left for each target that follows."""
    chosen: list[int] = []
    low = 0
    for number, target in enumerate(targets):
        high = len(cuts) - (len(targets) - number)
        at = bisect_left(cuts, target, low, high + 1)
        candidates = [i for i in (at - 1, at) if low <= i <= high] or [high]
        best = min(candidates, key=lambda i: abs(cuts[i] - target))
        chosen.append(cuts[best])
        low = best + 1
    return chosen


def _shard(layout: FlatLayout, first_byte: int, end_byte: int) -> Shard:
    """What lies between two bytes."""
    ranges: list[tuple[int, int, int]] = []
    places: dict[int, int] = {}
    dtypes = []
    for group, (end, size) in enumerate(zip(_ends(layout), layout.sizes, strict=True)):
        item_bytes = layout.dtypes[group].itemsize
        before = end - size * item_bytes
        first, last = max(first_byte, before), min(end_byte, end)
        if first < last:
            places[group] = len(ranges)
            ranges.append((group, (first - before) // item_bytes, (last - before) // item_bytes))
            dtypes.append(layout.dtypes[group])
    pieces, slots = [], []
    for number, slot in enumerate(layout.slots):
        if slot.group not in places:
            continue
        _, first, end = ranges[places[slot.group]]
        begin, stop = max(slot.offset, first), min(slot.offset + slot_numel(slot), end)
        if begin < stop:
            pieces.append(ShardSlice(number, begin - slot.offset, stop - begin))
            whole = stop - begin == slot_numel(slot)
            shape, stride = (slot.shape, slot.stride) if whole else ((stop - begin,), (1,))
            slots.append(TensorSlot(slot.name, places[slot.group], begin - first, shape, stride))
    own = FlatLayout(tuple(dtypes), tuple(end - first for _, first, end in ranges), tuple(slots))
    return Shard(tuple(ranges), tuple(pieces), own)


# The state of one parameter by name, and of several by their number in the optimizer.
State: TypeAlias = dict[str, Any]
States: TypeAlias = dict[int, State]


def optimizer_indices(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[int | None]:
    """Of each parameter the number by which the optimizer's ``state_dict()`` knows it; None where it is not in it."""
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    known = {identity: number for number, identity in enumerate(ids)}
    return [known.get(id(parameter)) for parameter in parameters]


def get_hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each group says beside its parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def set_hyperparameters(optimizer: torch.optim.Optimizer, values: Sequence[Mapping[str, Any]]) -> None:
    for group, own in zip(optimizer.param_groups, values, strict=True):
        group.update(own)


def slice_state(state: Mapping[str, Any], slot: TensorSlot, piece: ShardSlice) -> State:
    """The state of a piece of a parameter.

    A tensor of the parameter's shape is sliced as the parameter is, in the order of its memory; all else counts for the
    whole parameter and is kept.
    """
    return {name: _sliced(value, slot, piece) for name, value in state.items()}


def _sliced(value: Any, slot: TensorSlot, piece: ShardSlice) -> Any:
    if not isinstance(value, Tensor):
        return value
    if piece.length == slot_numel(slot) or tuple(value.shape) != slot.shape:
        return value.detach().clone()
    ordered = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype).copy_(value.detach())
    return ordered.as_strided((piece.length,), (1,), piece.start).clone()


def join_state(parts: Sequence[tuple[ShardSlice, Mapping[str, Any]]], slot: TensorSlot) -> State:
    """The state of a parameter from those of its pieces."""
    first, state = parts[0]
    if first.length == slot_numel(slot):
        return dict(state)
    return {name: _joined(name, value, parts, slot) for name, value in state.items()}


def _joined(name: str, value: Any, parts: Sequence[tuple[ShardSlice, Mapping[str, Any]]], slot: TensorSlot) -> Any:
    if not isinstance(value, Tensor) or tuple(value.shape) != (parts[0][0].length,):
        return value
    memory = torch.empty(slot_numel(slot), dtype=value.dtype)
    for piece, state in parts:
        memory[piece.start : piece.start + piece.length] = state[name]
    return memory.as_strided(slot.shape, slot.stride)


def split_state(
    states: Mapping[int, Mapping[str, Any]], numbers: Sequence[int | None], layout: FlatLayout, shard: Shard
) -> States:
    """What a server needs of the states of all parameters.

    Args:
        states: by the optimizer's number of the parameter.
        numbers: of the parameter in each slot.
        layout: of all parameters.
        shard: the server's.
    """
    parts: States = {}
    for piece in shard.slices:
        number = numbers[piece.slot]
        if number is not None and number in states:
            parts[number] = slice_state(states[number], layout.slots[piece.slot], piece)
    return parts


def merge_state(
    parts: Sequence[tuple[Shard, Mapping[int, Mapping[str, Any]]]], numbers: Sequence[int | None], layout: FlatLayout
) -> States:
    """The states of all parameters from what each server has, in the order of servers: ``split_state`` undone."""
    found: dict[int, list[tuple[ShardSlice, Mapping[str, Any]]]] = {}
    for shard, states in parts:
        for piece in shard.slices:
            number = numbers[piece.slot]
            if number is not None and number in states:
                found.setdefault(piece.slot, []).append((piece, states[number]))
    joined = {numbers[slot]: join_state(pieces, layout.slots[slot]) for slot, pieces in found.items()}
    return {number: state for number, state in sorted(joined.items()) if number is not None}

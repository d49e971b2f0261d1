"""Shards: contiguous ranges of the flat tensors, about equally large, one for each server.

``plan_shards`` decides who owns what. ``split_state`` and ``merge_state`` divide the state of an optimizer accordingly,
and join it again in the form that ``torch.optim`` saves.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paramserver.checkpoint.staging import RowStream, concatenate
from paramserver.errors import UnsupportedConfiguration
from paramserver.parameters.flat import ALIGNMENT_BYTES, FlatLayout, TensorSlot

# A tensor may be split if it is larger than the smaller of these.
_LARGE_BYTES = 64 * 1024
_LARGE_SHARE = 0.01


@dataclass(frozen=True)
class ShardSlice:
    """``length`` elements of the tensor of slot ``slot``, starting at element ``start``, in the order of its memory."""

    slot: int
    start: int
    length: int


@dataclass(frozen=True)
class Shard:
    """What one server owns."""

    # ``(group, first element, end)`` of each range of a flat tensor. The first has no embedding table, and is empty if
    # the server owns nothing else.
    ranges: tuple[tuple[int, int, int], ...]
    slices: tuple[ShardSlice, ...]  # of tensors, one after the other in the ranges
    # Of the slices in the ranges: a whole tensor has its own shape, a part of one has one dimension, and one of a table
    # some of its rows.
    layout: FlatLayout

    def slice_flats(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return this shard's ranges as views of the flat tensors of all parameters."""
        return [flats[group][first:end] for group, first, end in self.ranges]

    def copy_flats(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the ranges, to be sent: with a view, RPC may send its whole storage."""
        return [part.detach().clone() for part in self.slice_flats(flats)]

    def slots_of_range(self, number: int) -> list[int]:
        """Return the slots of all tensors with a slice in range ``number``."""
        return [p.slot for p, own in zip(self.slices, self.layout.slots, strict=True) if own.group == number]

    def pieces_of_range(self, number: int) -> list[tuple[ShardSlice, TensorSlot]]:
        """Return the slices in range ``number`` with their places there, in the order of its memory."""
        pairs = zip(self.slices, self.layout.slots, strict=True)
        return sorted((pair for pair in pairs if pair[1].group == number), key=lambda pair: pair[1].offset)

    def lengths_of_range(self, number: int) -> tuple[int, ...]:
        """Return the elements of range ``number`` from each slice to the next one or the end; none for a table.

        What is between two slices has no values.
        """
        pieces = self.pieces_of_range(number)
        if not pieces or number in {self.layout.slots[table].group for table in self.layout.tables}:
            return ()
        starts = [0, *(slot.offset for _, slot in pieces[1:])]
        return tuple(end - start for start, end in pairwise([*starts, self.layout.sizes[number]]))

    def is_whole(self, piece: ShardSlice, whole: FlatLayout) -> bool:
        """Return whether the slice is all of its tensor."""
        return piece.length == whole.slots[piece.slot].numel


def full_shard(layout: FlatLayout) -> Shard:
    """Return the shard of the only server: all parameters."""
    ranges = tuple((group, 0, size) for group, size in enumerate(layout.sizes))
    slices = tuple(ShardSlice(number, 0, slot.numel) for number, slot in enumerate(layout.slots))
    return Shard(ranges, slices, layout)


def plan_shards(layout: FlatLayout, servers: int, splittable: bool, block: int = 1) -> tuple[Shard, ...]:
    """Assign the parameters to servers, so that each owns about the same number of bytes; each element is in one shard.

    Tensors are ``splittable`` if the optimizer updates each element independently; only large ones are, at multiples of
    64 bytes and of ``block`` elements. Embedding tables are divided between rows, which their optimizers update
    independently. A shard is at most as large as the mean and one largest unsplit part.

    Raises:
        UnsupportedConfiguration: there are more servers than parts.
    """
    if servers == 1:
        return (full_shard(layout),)
    parts: list[list[tuple[int, int]]] = [[] for _ in range(servers)]
    starts = sorted(start for _, start, _ in _spans(layout))[1:]
    for first, end in _sections(layout, servers) if splittable or layout.tables else [(0, layout.total_bytes)]:
        targets = [first + (end - first) * k / servers for k in range(1, servers)]
        between = [start for start in starts if first < start < end]
        boundaries = sorted({*between, *_inside(layout, targets, splittable, block)})
        if len(boundaries) < servers - 1:
            blocks = f", of whole blocks of {block} elements (server.compression_block)" if block > 1 else ""
            raise UnsupportedConfiguration(
                f"cluster.num_servers ({servers}) must be at most {len(boundaries) + 1}, as the parameters of this "
                f"model fall into so many parts{blocks}; lower it"
            )
        for own, part in zip(parts, pairwise([first, *_nearest(boundaries, targets), end]), strict=True):
            own.append(part)
    return _with_empty_tensors(layout, [_shard(layout, own) for own in parts])


# In elements; a multiple of every kernel's vector width, so that a cut within a tensor changes no rounding.
_CUT_ELEMENTS = 4096


def split_ranges(
    shard: Shard, layout: FlatLayout, range_bytes: float, first_bytes: float | None = None, block: int = 1
) -> Shard:
    """Return the same shard in ranges of about ``range_bytes``; large tensors are cut, and their slices named anew.

    A range has ``range_bytes`` (the first one ``first_bytes``) at most, unless 4,096 elements of a tensor, or the next
    multiple of them and of ``block``, are larger.
    """
    ranges: list[tuple[int, int, int]] = []
    slices, slots = [], []
    for number, (group, first, end) in enumerate(shard.ranges):
        item_bytes = layout.dtypes[group].itemsize
        held = [(p, s) for p, s in zip(shard.slices, shard.layout.slots, strict=True) if s.group == number]
        most = int(range_bytes // item_bytes)
        most_first = most if first_bytes is None or ranges else int(first_bytes // item_bytes)
        for begin, stop in pairwise(_cuts(held, end - first, most, most_first, math.lcm(_CUT_ELEMENTS, block))):
            for piece, slot in held:
                start, last = max(slot.offset, begin), min(slot.offset + piece.length, stop)
                is_empty = (
                    not piece.length and begin <= slot.offset <= stop and not (slot.offset == stop != end - first)
                )
                if start < last or is_empty:
                    cut = ShardSlice(piece.slot, piece.start + start - slot.offset, last - start)
                    slices.append(cut)
                    slots.append(_slot_of_slice(slot, cut, piece, len(ranges), start - begin))
            ranges.append((group, first + begin, first + stop))
    return _shard_of(layout, ranges, slices, slots)


def _cuts(held: Sequence[tuple[ShardSlice, TensorSlot]], size: int, most: int, most_first: int, unit: int) -> list[int]:
    """Return where the ranges of one range begin, and its end. Tensors are cut at multiples of ``unit`` elements."""
    cuts = [0]
    ends = [slot.offset for _, slot in held[1:]] + [size]
    for (_, slot), end in zip(held, ends, strict=True):
        while end > slot.offset and end - cuts[-1] > (limit := most if len(cuts) > 1 else most_first):
            inside = (cuts[-1] + limit - slot.offset) // unit * unit
            if inside <= cuts[-1] - slot.offset:  # not even so many elements fit
                inside = 0 if slot.offset > cuts[-1] else cuts[-1] - slot.offset + unit
            if slot.offset + inside >= end:
                break
            cuts.append(slot.offset + inside)
    return [*cuts, size] if cuts[-1] < size or size == 0 else cuts


def _slot_of_slice(slot: TensorSlot, cut: ShardSlice, piece: ShardSlice, group: int, offset: int) -> TensorSlot:
    if cut.length == piece.length:
        return TensorSlot(slot.name, group, offset, slot.shape, slot.stride)
    name = f"{slot.name}[{cut.start}:{cut.start + cut.length}]"
    return TensorSlot(name, group, offset, (cut.length,), (1,))


def _ends(layout: FlatLayout) -> list[int]:
    """Return the end of each flat tensor, in bytes, if they follow one another."""
    return list(accumulate(size * dtype.itemsize for size, dtype in zip(layout.sizes, layout.dtypes, strict=True)))


def _spans(layout: FlatLayout) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each slot whose tensor has elements, with its first byte and its end."""
    ends = _ends(layout)
    for number, slot in enumerate(layout.slots):
        item_bytes = layout.dtypes[slot.group].itemsize
        before = ends[slot.group] - layout.sizes[slot.group] * item_bytes
        if slot.numel:
            yield number, before + slot.offset * item_bytes, before + (slot.offset + slot.numel) * item_bytes


# More sections are smaller messages, and gain nothing once each server has gradients early in backward.
_SECTIONS = 4


def _sections(layout: FlatLayout, servers: int) -> list[tuple[int, int]]:
    """Return the first byte and the end of each section: whole tensors, of which one at least is large."""
    large = min(_LARGE_BYTES, layout.total_bytes * _LARGE_SHARE)
    # A server's part of a section is at least as large as a tensor that is not split.
    least = max(layout.total_bytes / _SECTIONS, servers * _LARGE_BYTES)
    cuts, has_large = [0], False
    if not (spans := sorted((first, end) for _, first, end in _spans(layout))):
        return [(0, 0)]
    for (first, end), following in zip(spans, [*(start for start, _ in spans[1:]), layout.total_bytes], strict=True):
        has_large = has_large or end - first > large
        if has_large and following - cuts[-1] >= least:
            cuts.append(following)
            has_large = False
    return [*pairwise([*cuts[:-1], layout.total_bytes])] if len(cuts) > 1 else [(0, layout.total_bytes)]


def _inside(layout: FlatLayout, targets: Sequence[float], splittable: bool, block: int) -> Iterator[int]:
    """Yield the aligned bytes nearest to the targets, if they are inside a large tensor or between rows of a table."""
    large = min(_LARGE_BYTES, layout.total_bytes * _LARGE_SHARE)
    for number, first, end in _spans(layout):
        unit = math.lcm(ALIGNMENT_BYTES, block * layout.dtypes[layout.slots[number].group].itemsize)
        if number in layout.tables:
            slot = layout.slots[number]
            unit = math.lcm(ALIGNMENT_BYTES, max(math.prod(slot.shape[1:]), 1) * layout.dtypes[slot.group].itemsize)
        elif not splittable or end - first <= large:
            continue
        for target in targets:
            boundary = first + round((target - first) / unit) * unit
            if first < boundary < end:
                yield boundary


def _nearest(boundaries: Sequence[int], targets: Sequence[float]) -> list[int]:
    """Return the boundary nearest to each target, ascending; each target leaves one for every target after it."""
    chosen: list[int] = []
    low = 0
    for number, target in enumerate(targets):
        high = len(boundaries) - (len(targets) - number)
        at = bisect_left(boundaries, target, low, high + 1)
        candidates = [i for i in (at - 1, at) if low <= i <= high] or [high]
        best = min(candidates, key=lambda i: abs(boundaries[i] - target))
        chosen.append(boundaries[best])
        low = best + 1
    return chosen


def _shard(layout: FlatLayout, parts: Sequence[tuple[int, int]]) -> Shard:
    """Return the shard of some parts, given by first byte and end; a tensor is in at most one of them."""
    ranges: list[tuple[int, int, int]] = []
    table_groups = {layout.slots[number].group for number in layout.tables}
    for first_byte, end_byte in parts:
        for group, (end, size) in enumerate(zip(_ends(layout), layout.sizes, strict=True)):
            item_bytes = layout.dtypes[group].itemsize
            before = end - size * item_bytes
            first, last = max(first_byte, before), min(end_byte, end)
            if first < last:
                if not ranges and group in table_groups:
                    ranges.append((0, 0, 0))
                ranges.append((group, (first - before) // item_bytes, (last - before) // item_bytes))
    slices, slots = [], []
    for number, slot in enumerate(layout.slots):
        for own_number, (group, first, end) in enumerate(ranges):
            begin, stop = max(slot.offset, first), min(slot.offset + slot.numel, end)
            if group == slot.group and begin < stop:
                slices.append(ShardSlice(number, begin - slot.offset, stop - begin))
                whole = stop - begin == slot.numel
                shape, stride = (slot.shape, slot.stride) if whole else ((stop - begin,), (1,))
                if number in layout.tables:
                    shape, stride = (len(rows_of(slices[-1], slot)), *slot.shape[1:]), slot.stride
                slots.append(TensorSlot(slot.name, own_number, begin - first, shape, stride))
    return _shard_of(layout, ranges, slices, slots)


def _shard_of(
    layout: FlatLayout,
    ranges: Sequence[tuple[int, int, int]],
    slices: Sequence[ShardSlice],
    slots: Sequence[TensorSlot],
) -> Shard:
    dtypes = tuple(layout.dtypes[group] for group, _, _ in ranges)
    sizes = tuple(end - first for _, first, end in ranges)
    tables = tuple(number for number, piece in enumerate(slices) if piece.slot in layout.tables)
    return Shard(tuple(ranges), tuple(slices), FlatLayout(dtypes, sizes, tuple(slots), tables))


def rows_of(piece: ShardSlice, table: TensorSlot) -> range:
    """Return the rows of an embedding table that a slice of it has."""
    if piece.length == table.numel:
        return range(table.shape[0])
    width = math.prod(table.shape[1:])
    return range(piece.start // width, (piece.start + piece.length) // width)


def _with_empty_tensors(layout: FlatLayout, shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """Add each tensor without elements to a shard with a range at its place: an optimizer has a state of it too."""
    ranges = [list(shard.ranges) for shard in shards]
    owned = [list(zip(shard.slices, shard.layout.slots, strict=True)) for shard in shards]
    for number, slot in enumerate(layout.slots):
        if slot.numel:
            continue
        at = (
            (server, own_number, slot.offset - first)
            for server, own in enumerate(ranges)
            for own_number, (group, first, end) in enumerate(own)
            if group == slot.group and first <= slot.offset <= end
        )
        if (place := next(at, None)) is None:  # no tensor of its dtype has elements
            place = 0, len(ranges[0]), 0
            ranges[0].append((slot.group, 0, 0))
        server, own_number, offset = place
        piece = ShardSlice(number, 0, 0)
        owned[server].append((piece, TensorSlot(slot.name, own_number, offset, slot.shape, slot.stride)))
    made = []
    for own_ranges, own in zip(ranges, owned, strict=True):
        own.sort(key=lambda entry: entry[0].slot)
        made.append(_shard_of(layout, own_ranges, [piece for piece, _ in own], [slot for _, slot in own]))
    return tuple(made)


# The state of an optimizer.

# ``State`` is that of one parameter, by name; ``States`` are those of several, by their index in the optimizer.
State: TypeAlias = dict[str, Any]
States: TypeAlias = dict[int, State]


def optimizer_indices(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[int | None]:
    """Return the index of each parameter in the optimizer's ``state_dict()``; None if it is not in the optimizer."""
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    known = {identity: index for index, identity in enumerate(ids)}
    return [known.get(id(parameter)) for parameter in parameters]


def get_hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the entries of each parameter group other than its parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _sliced(value: Any, slot: TensorSlot, piece: ShardSlice, is_table: bool) -> Any:
    """Return what a slice of a parameter has of the state of the whole.

    A tensor of the parameter's shape, also in a container, is sliced like the parameter, in the order of its memory;
    of an embedding table also one that has an entry for each row. Everything else is for the whole parameter, and is
    kept.
    """
    if isinstance(value, dict):
        return {name: _sliced(item, slot, piece, is_table) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_sliced(item, slot, piece, is_table) for item in value])
    if not isinstance(value, Tensor):
        return value
    if is_table and value.shape[:1] == slot.shape[:1]:
        rows = rows_of(piece, slot)
        return value.detach()[rows.start : rows.stop].clone()
    if piece.length == slot.numel or tuple(value.shape) != slot.shape:
        return value.detach().clone()
    ordered = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype).copy_(value.detach())
    return ordered.as_strided((piece.length,), (1,), piece.start).clone()


def _join_state(parts: Sequence[tuple[ShardSlice, Mapping[str, Any]]], layout: FlatLayout) -> State:
    """Return the state of a parameter from those of its slices."""
    first, state = parts[0]
    slot, is_table = layout.slots[first.slot], first.slot in layout.tables
    if first.length == slot.numel:
        return dict(state)
    pieces = [piece for piece, _ in parts]
    return {name: _joined([own[name] for _, own in parts], pieces, slot, is_table) for name in state}


def _joined(values: Sequence[Any], pieces: Sequence[ShardSlice], slot: TensorSlot, is_table: bool) -> Any:
    """Return a value of the whole parameter from those of its slices: undoes ``_sliced``."""
    value = values[0]
    if isinstance(value, dict):
        return {name: _joined([own[name] for own in values], pieces, slot, is_table) for name in value}
    if isinstance(value, (list, tuple)):
        return type(value)([_joined(items, pieces, slot, is_table) for items in zip(*values, strict=True)])
    if isinstance(value, RowStream):
        return concatenate(values)
    if is_table and isinstance(value, Tensor) and value.shape[:1] == (len(rows_of(pieces[0], slot)),):
        return torch.cat(list(values))
    if not isinstance(value, Tensor) or tuple(value.shape) != (pieces[0].length,):
        return value
    memory = torch.empty(slot.numel, dtype=value.dtype)
    for piece, own in zip(pieces, values, strict=True):
        memory[piece.start : piece.start + piece.length] = own
    return memory.as_strided(slot.shape, slot.stride)


def split_state(
    states: Mapping[int, Mapping[str, Any]], indices: Sequence[int | None], layout: FlatLayout, shard: Shard
) -> States:
    """Return a shard's part of an optimizer's state.

    The indices are those of the parameter of each slot, see ``optimizer_indices``.
    """
    parts: States = {}
    for piece in shard.slices:
        index = indices[piece.slot]
        if index is not None and index in states:
            slot = layout.slots[piece.slot]
            is_table = piece.slot in layout.tables
            parts[index] = {name: _sliced(value, slot, piece, is_table) for name, value in states[index].items()}
    return parts


def merge_state(
    parts: Sequence[tuple[Shard, Mapping[int, Mapping[str, Any]]]], indices: Sequence[int | None], layout: FlatLayout
) -> States:
    """Return the states of all parameters from the parts of all servers, in their order: undoes ``split_state``."""
    found: dict[int, list[tuple[ShardSlice, Mapping[str, Any]]]] = {}
    for shard, states in parts:
        for piece in shard.slices:
            index = indices[piece.slot]
            if index is not None and index in states:
                found.setdefault(index, []).append((piece, states[index]))
    return {index: _join_state(pieces, layout) for index, pieces in sorted(found.items())}

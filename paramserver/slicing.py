"""An optimizer over a part of the parameters, and its state: taken apart for servers, and put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paramserver.flat import Layout, Slot
from paramserver.shards import Piece, Shard, size_of

# The state of one parameter by name, and of several by their number in the optimizer.
State: TypeAlias = dict[str, Any]
States: TypeAlias = dict[int, State]


def numbers_of(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[int | None]:
    """Of each parameter the number by which the optimizer's ``state_dict()`` knows it; None where it is not in it."""
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    known = {identity: number for number, identity in enumerate(ids)}
    return [known.get(id(parameter)) for parameter in parameters]


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each group says beside its parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def set_hyperparameters(optimizer: torch.optim.Optimizer, values: Sequence[Mapping[str, Any]]) -> None:
    for group, own in zip(optimizer.param_groups, values, strict=True):
        group.update(own)


def slice_state(state: Mapping[str, Any], slot: Slot, piece: Piece) -> State:
    """The state of a piece of a parameter.

    A tensor of the parameter's shape is sliced as the parameter is, in the order of its memory; all else counts for the
    whole parameter and is kept.
    """
    return {name: _sliced(value, slot, piece) for name, value in state.items()}


def _sliced(value: Any, slot: Slot, piece: Piece) -> Any:
    if not isinstance(value, Tensor):
        return value
    if piece.length == size_of(slot) or tuple(value.shape) != slot.shape:
        return value.detach().clone()
    ordered = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype).copy_(value.detach())
    return ordered.as_strided((piece.length,), (1,), piece.start).clone()


def join_state(parts: Sequence[tuple[Piece, Mapping[str, Any]]], slot: Slot) -> State:
    """The state of a parameter from those of its pieces."""
    first, state = parts[0]
    if first.length == size_of(slot):
        return dict(state)
    return {name: _joined(name, value, parts, slot) for name, value in state.items()}


def _joined(name: str, value: Any, parts: Sequence[tuple[Piece, Mapping[str, Any]]], slot: Slot) -> Any:
    if not isinstance(value, Tensor) or tuple(value.shape) != (parts[0][0].length,):
        return value
    memory = torch.empty(size_of(slot), dtype=value.dtype)
    for piece, state in parts:
        memory[piece.start : piece.start + piece.length] = state[name]
    return memory.as_strided(slot.shape, slot.stride)


def take_apart(
    states: Mapping[int, Mapping[str, Any]], numbers: Sequence[int | None], layout: Layout, shard: Shard
) -> States:
    """What a server needs of the states of all parameters.

    Args:
        states: by the optimizer's number of the parameter.
        numbers: of the parameter in each slot.
        layout: of all parameters.
        shard: the server's.
    """
    parts: States = {}
    for piece in shard.pieces:
        number = numbers[piece.slot]
        if number is not None and number in states:
            parts[number] = slice_state(states[number], layout.slots[piece.slot], piece)
    return parts


def put_together(
    parts: Sequence[tuple[Shard, Mapping[int, Mapping[str, Any]]]], numbers: Sequence[int | None], layout: Layout
) -> States:
    """The states of all parameters from what each server has, in the order of servers: ``take_apart`` undone."""
    found: dict[int, list[tuple[Piece, Mapping[str, Any]]]] = {}
    for shard, states in parts:
        for piece in shard.pieces:
            number = numbers[piece.slot]
            if number is not None and number in states:
                found.setdefault(piece.slot, []).append((piece, states[number]))
    joined = {numbers[slot]: join_state(pieces, layout.slots[slot]) for slot, pieces in found.items()}
    return {number: state for number, state in sorted(joined.items()) if number is not None}

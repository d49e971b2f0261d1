"""An update made bucket by bucket: each is computed when its gradients are complete, and written with all others.

Nothing of a version changes before ``BucketUpdates.write``: what is computed before that is in tensors of its own, and
is dropped if the update is abandoned.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paramserver.optim.clipping import Clipping
from paramserver.optim.named_optimizers import optimizers_of
from paramserver.optim.parallel_step import ELEMENTWISE, ParallelStep, copy_optimizer
from paramserver.optim.shard_updater import ShardUpdater
from paramserver.parameters.flat import TensorSlot, gradient_leaf
from paramserver.parameters.numerics import divide_
from paramserver.parameters.sharding import Shard, State, get_hyperparameters


def why_not_by_bucket(optimizer: torch.optim.Optimizer, clipping: Clipping | None) -> str | None:
    """Return why an update must wait for the gradients of all buckets; None if each can be updated by itself."""
    if clipping is not None:
        return clipping.why_not_by_bucket
    if optimizers_of(optimizer) != [optimizer]:
        return "there are several optimizers"
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        return f"{name} is not known to update each element by itself"
    if not ParallelStep.supports(optimizer):
        return f"hooks of {name} may read all gradients"
    if any(isinstance(value, Tensor) for group in optimizer.param_groups for value in group.values()):
        return f"hyper-parameters of {name} are tensors, which may change in place"
    return None


@dataclass(frozen=True)
class _Piece:
    """Elements of one optimizer parameter in a bucket: ``length`` from ``offset`` on, in the order of its memory."""

    place: TensorSlot
    parameter: Tensor
    group: int | None  # of the optimizer; None if the parameter is in none
    slot: int
    offset: int
    length: int

    @property
    def is_whole(self) -> bool:
        return self.length == self.parameter.numel()

    def view(self, flat: Tensor) -> Tensor:
        """Return these elements of a bucket."""
        return flat.as_strided(self.place.shape, self.place.stride, flat.storage_offset() + self.place.offset)


@dataclass(frozen=True, eq=False)
class UpdatedBucket:
    """The next version of a bucket: its parameters, immutable, and the optimizer's state of each piece.

    ``gradients`` are those of the trainers that it was computed from.
    """

    gradients: tuple[Tensor, ...]
    parameters: Tensor
    states: list[tuple[_Piece, State]]

    def is_from(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether it was computed from these very tensors."""
        pairs = zip(self.gradients, gradients, strict=False)
        return len(self.gradients) == len(gradients) and all(own is other for own, other in pairs)


class BucketUpdates:
    """Computes and writes the next version of a shard, bucket by bucket. Not thread-safe.

    The optimizer must be one for which ``why_not_by_bucket`` returns None. Buckets begin at multiples of every kernel's
    vector width within a tensor, so no bit differs from a step over whole tensors. Each range of ``buckets``, the same
    shard, is a bucket (``sharding.split_ranges``).
    """

    def __init__(self, updater: ShardUpdater, buckets: Shard) -> None:
        self._updater = updater
        self._optimizer = updater.optimizer
        self.buckets = buckets
        self._shard = updater.shard
        self._flats = self.cut(updater.ranges)
        self.leaves = [gradient_leaf(flat) for flat in self._flats]
        groups = {id(p): n for n, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        owned = {slot: parameter for slot, _, parameter in updater.owned}
        starts = {piece.slot: piece.start for piece in updater.shard.slices}
        self._pieces: list[list[_Piece]] = [[] for _ in buckets.ranges]
        for piece, own in zip(buckets.slices, buckets.layout.slots, strict=True):
            parameter = owned[piece.slot]
            self._pieces[own.group].append(
                _Piece(
                    own,
                    parameter,
                    groups.get(id(parameter)),
                    piece.slot,
                    piece.start - starts[piece.slot],
                    piece.length,
                )
            )

    def clone(self) -> list[Tensor]:
        """Return a copy of the parameters of each bucket, immutable by convention."""
        return [flat.detach().clone() for flat in self._flats]

    def cut(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the buckets as views of the flat tensors of the shard."""
        found = []
        for where in self.buckets.ranges:
            number, start, stop = self._range_of(*where)
            found.append(flats[number][start:stop])
        return found

    def _range_of(self, group: int, first: int, end: int) -> tuple[int, int, int]:
        """Return the range of the shard that a bucket is in, and its first and last element there."""
        for number, (own_group, own_first, own_end) in enumerate(self._shard.ranges):
            if own_group == group and own_first <= first <= end <= own_end:
                return number, first - own_first, end - own_first
        raise AssertionError("buckets are ranges of the same shard")

    @property
    def possible(self) -> bool:
        """Whether the optimizer may still be stepped bucket by bucket: a hook may have been added to it."""
        return why_not_by_bucket(self._optimizer, None) is None

    def step_whole(
        self, gradients: Sequence[Sequence[Tensor]], used: tuple[bool, ...] | None, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Make the next version in one step of the optimizer; ``gradients`` are those of all buckets, by trainer."""
        numbers = [self._range_of(*where)[0] for where in self.buckets.ranges]
        count = len(self._shard.ranges)
        joined = [
            [torch.cat([part for part, n in zip(own, numbers, strict=True) if n == k]) for k in range(count)]
            for own in gradients
        ]
        self._updater.assign_gradients(self._updater.average(joined, [1.0] * len(joined)), used)
        self._updater.step(groups)

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return those of the optimizer's groups, as ``compute`` takes them."""
        return get_hyperparameters(self._optimizer)

    @torch.no_grad()
    def compute(
        self,
        bucket: int,
        gradients: Sequence[Tensor],
        used: tuple[bool, ...] | None,
        groups: Sequence[Mapping[str, Any]],
    ) -> UpdatedBucket:
        """Return the next version of a bucket. Nothing of the current one changes, and no gradient.

        The gradients are in the order of trainers: the sum of float32 depends on it. ``used`` is, for each slot of the
        layout, whether any trainer has a gradient; None for all.
        """
        mean = gradients[0]
        if len(gradients) > 1:
            mean = mean + gradients[1]
            for other in gradients[2:]:
                mean += other
            divide_([mean], len(gradients))
        updated = self._flats[bucket].clone()
        stepped: list[tuple[_Piece, nn.Parameter]] = []
        by_group: list[list[nn.Parameter]] = [[] for _ in groups]
        state: dict[Any, State] = {}
        for piece in self._pieces[bucket]:
            if piece.group is None or not (used is None or used[piece.slot]):
                continue
            parameter = nn.Parameter(piece.view(updated))
            parameter.grad = piece.view(mean)
            if piece.parameter in self._optimizer.state:
                state[parameter] = _slice_state(self._optimizer.state[piece.parameter], piece)
            by_group[piece.group].append(parameter)
            stepped.append((piece, parameter))
        if stepped:
            part = copy_optimizer(self._optimizer)
            part.param_groups = [{**group, "params": own} for group, own in zip(groups, by_group, strict=True) if own]
            part.state = defaultdict(dict, state)
            part.step()
            state = part.state
        return UpdatedBucket(tuple(gradients), updated, [(piece, state[p]) for piece, p in stepped if p in state])

    @torch.no_grad()
    def write(self, updated: Sequence[UpdatedBucket]) -> None:
        """Make the next version, of which every bucket is given."""
        state = self._optimizer.state
        fresh = False
        for flat, bucket in zip(self._flats, updated, strict=True):
            flat.copy_(bucket.parameters)
            for piece, values in bucket.states:
                fresh = fresh or piece.parameter not in state
                _write_state(state[piece.parameter], piece, values)
        if fresh:  # in the order of a step over all parameters
            for parameter in [p for group in self._optimizer.param_groups for p in group["params"] if p in state]:
                state[parameter] = state.pop(parameter)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # a schedule checks it


def _slice_state(state: State, piece: _Piece) -> State:
    """Return a copy of the state of a piece. What does not have the parameter's shape is of the whole parameter."""
    found: State = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            of_elements = not piece.is_whole and value.shape == piece.parameter.shape
            found[name] = (_elements(state, name, piece) if of_elements else value).clone()
        else:
            found[name] = copy.deepcopy(value)
    return found


def _write_state(state: State, piece: _Piece, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if piece.is_whole or not isinstance(value, Tensor) or value.shape != (piece.length,):
            state[name] = value
            continue
        if name not in state:
            state[name] = torch.empty_like(piece.parameter, dtype=value.dtype)
        _elements(state, name, piece).copy_(value)


def _elements(state: State, name: str, piece: _Piece) -> Tensor:
    """Return the elements of a piece in a state that has one for each element of the parameter."""
    value: Tensor = state[name]
    if value.stride() != piece.parameter.stride():
        value = torch.empty_like(piece.parameter, dtype=value.dtype).copy_(value)
        state[name] = value
    return value.as_strided((piece.length,), (1,), value.storage_offset() + piece.offset)

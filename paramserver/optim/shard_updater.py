"""The optimizer step over the parameters that one server owns, and the mean of the gradients for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.optim.clipping import Clipping
from paramserver.optim.named_optimizers import optimizers_of
from paramserver.optim.parallel_step import ParallelStep, ThreadTeam, generators_of_update
from paramserver.optim.row_steps import RowSnapshot, RowStep, record_rows
from paramserver.parameters.flat import FlatLayout, gradient_leaf
from paramserver.parameters.numerics import divide_
from paramserver.parameters.sharding import Shard, States, optimizer_indices
from paramserver.parameters.tables import large_tables, mean_of_rows, table_ranges

WEIGHT = ""
"""The name of the weights of a table in its snapshot, which no entry of an optimizer's state has."""


class ShardUpdater:
    """Averages the gradients of one shard and steps the optimizer over it. Not thread-safe.

    A tensor that is owned whole stays the model's parameter. For one that is owned in part, a one-dimensional parameter
    replaces it in the optimizer. All others stay in the optimizer and get no gradient, so they are never stepped.
    ``ranges`` are flat tensors, the memory of the shard. The parameters of the model are in the order of the layout;
    those that the shard owns whole are views of ``ranges``.
    """

    def __init__(
        self,
        layout: FlatLayout,
        shard: Shard,
        ranges: Sequence[Tensor],
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.layout = layout
        self.shard = shard
        self.ranges = list(ranges)
        self.optimizer = optimizer
        self._is_everything = shard.layout is layout
        self._team: ThreadTeam | None = None
        self._parallel_step: ParallelStep | None = None
        self._accumulated: list[Tensor] = []
        self._num_accumulated = 0
        self._row_step = RowStep(optimizer) if layout.tables else None
        # Of checkpoints that are being written, by their numbers: that of each large table, by its slot.
        self.snapshots: dict[int, dict[int, RowSnapshot]] = {}
        self.optimizer_indices = optimizer_indices(optimizer, parameters)
        # A pull needs them as targets of gradients only, never a copy.
        self.leaves = [gradient_leaf(flat) for flat in self.ranges]
        views = shard.layout.views(self.ranges)
        # The ranges that have rows of embedding tables. Their gradients are sparse.
        self.tables = {own.flat_index: own for own in table_ranges(layout, [shard])}
        slots = [shard.layout.slots[number] for number in shard.layout.tables]
        self._rows = {slot.group: views[slot.name].detach() for slot in slots}
        # Slot, name and optimizer parameter of each owned slice.
        self.owned: list[tuple[int, str, Tensor]] = []
        split: dict[int, Tensor] = {}
        for piece, slot in zip(shard.slices, shard.layout.slots, strict=True):
            owned = parameters[piece.slot]
            if not shard.is_whole(piece, layout):
                owned = nn.Parameter(views[slot.name])
                split[id(parameters[piece.slot])] = owned
            self.owned.append((piece.slot, slot.name, owned))
        for group in optimizer.param_groups if split else ():
            # In place and in order: ``optimizer_indices`` and stored states number the parameters by their position in
            # the groups.
            group["params"] = [split.get(id(p), p) for p in group["params"]]

    def use_threads(self, team: ThreadTeam) -> None:
        """Add gradients with all threads of ``team`` from now on, and step parameters if the optimizer allows it."""
        self._team = team
        if self._row_step is not None:
            self._row_step.team = team
        if not self.tables and ParallelStep.supports(self.optimizer):
            self._parallel_step = ParallelStep(self.optimizer, team)

    # An update.

    def average(self, gradients: Sequence[Sequence[Tensor]], factors: Sequence[float]) -> list[Tensor]:
        """Return the mean of the scaled gradients; it overwrites the first.

        They are added in the order given, not of arrival: in float32 the sum depends on the order. The gradient of a
        range that is a table is sparse.
        """
        mean = list(gradients[0])
        for number in self.tables:
            mean[number] = mean_of_rows([flats[number] for flats in gradients], factors)
        gradients = [self._dense(flats) for flats in gradients]
        if not gradients[0]:
            return mean
        if self._team is None:
            _average(gradients, factors)
        else:
            # Each thread adds all gradients within its own range, in the same order: the bits do not depend on the
            # number of threads.
            slices = self._team.slices(self._dense(self.ranges))
            parts = [[_cut(flats, cuts) for flats in gradients] for cuts in slices]
            self._team.run([partial(_average, part, factors) for part in parts])
        return mean

    def accumulate(self, gradients: Sequence[Sequence[Tensor]], factors: Sequence[float]) -> None:
        """Add the scaled gradients to a sum, of which ``pop_average`` returns the mean; it changes the gradients."""
        for own, factor in zip(gradients, factors, strict=True):
            own = self.average([own], [factor])
            if self._num_accumulated:
                torch._foreach_add_(self._accumulated, own)
            else:  # copied, as the memory of a push is the trainer's
                self._accumulated = [flat.clone() for flat in own]
            self._num_accumulated += 1

    def pop_average(self) -> list[Tensor]:
        """Return the mean of the gradients that were accumulated since the last call; there is at least one."""
        mean, self._accumulated = self._accumulated, []
        if self._num_accumulated > 1:
            divide_(mean, self._num_accumulated)
        self._num_accumulated = 0
        return mean

    def _dense(self, flats: Sequence[Tensor]) -> list[Tensor]:
        return [flat for number, flat in enumerate(flats) if number not in self.tables]

    def assign_gradients(self, mean: Sequence[Tensor], used: tuple[bool, ...] | None) -> None:
        """Set ``.grad`` of each parameter; None if no trainer had one, so that torch.optim does not step it."""
        tables = {own.slot: mean[number] for number, own in self.tables.items()}
        # In the place of a table's gradient, which has no views, that of its parameter; it is not used.
        flats = [own if n in self.tables else flat for n, (flat, own) in enumerate(zip(mean, self.ranges, strict=True))]
        views = self.shard.layout.views(flats)
        for slot, name, parameter in self.owned:
            # Views of the mean: clipping scales the mean itself, so no copy is needed.
            parameter.grad = tables.get(slot, views[name]) if used is None or used[slot] else None

    def measure(self, clipping: Clipping) -> Tensor:
        """Return what server 0 needs of the gradients to clip them; see ``Clipping``."""
        return clipping.measure([p for _, _, p in self.owned], self._is_everything)

    def clip(self, clipping: Clipping, merged: Tensor) -> None:
        """Clip the gradients, given what was measured on all servers."""
        clipping.clip_shard([p for _, _, p in self.owned], merged)

    def step(self, groups: Sequence[Mapping[str, Any]] | None = None, version: int | None = None) -> None:
        """Step the optimizer, after setting the hyper-parameters ``groups`` if given.

        ``version`` is the one that it makes, which is recorded for the rows of tables that change, if it is given.
        """
        if groups is not None:
            if len(groups) != len(self.optimizer.param_groups):
                raise TaskError(
                    f"the optimizer of server 0 has {len(groups)} parameter groups, and build_optimizer gave it "
                    f"{len(self.optimizer.param_groups)}; give it all parameters in build_optimizer"
                )
            for group, own in zip(self.optimizer.param_groups, groups, strict=True):
                group.update(own)
        for by_slot in list(self.snapshots.values()):
            for slot, _, parameter in self.owned:
                if slot in by_slot and parameter.grad is not None:
                    by_slot[slot].copy_before_update(parameter.grad._indices()[0])
        step = self._row_step or self._parallel_step or self.optimizer.step
        step()
        if self.tables and version is not None:
            record_rows(self.optimizer, version)
        # Otherwise the next update would apply these to a parameter for which no trainer has a gradient.
        for _, _, parameter in self.owned:
            parameter.grad = None

    def generators(self, seed: int, version: int, server_index: int) -> AbstractContextManager[None]:
        """Return a context for a step of the optimizer that makes ``version``; see ``generators_of_update``."""
        return generators_of_update(self.optimizer, seed, version, server_index)

    def clone(self) -> list[Tensor]:
        """Return a copy of the parameters of the shard without embedding tables, immutable by convention."""
        return self.shard.layout.clone_dense(self.ranges)

    def look_up(self, number: int, rows: Tensor) -> Tensor:
        """Return a copy of rows of the embedding table in range ``number``, which are numbered from the first there."""
        return self._rows[number].index_select(0, rows)

    # The state.

    def snapshot_tables(self) -> dict[int, RowSnapshot]:
        """Return a snapshot of each large table by its slot: of ``WEIGHT``, and of the state that has its rows."""
        found, large = {}, large_tables(self.layout)
        states = {id(p): optimizer.state.get(p, {}) for optimizer, p in self._numbered()}
        for slot, _, parameter in self.owned:
            if slot in large:
                by_rows = {
                    name: value
                    for name, value in states.get(id(parameter), {}).items()
                    if isinstance(value, Tensor) and value.shape[:1] == parameter.shape[:1] and value.is_contiguous()
                }
                found[slot] = RowSnapshot({WEIGHT: parameter, **by_rows})
        return found

    @property
    def states(self) -> States:
        """The optimizer's state of each parameter that it has stepped, by index."""
        for optimizer in optimizers_of(self.optimizer):
            if not all(isinstance(key, Tensor) for key in optimizer.state):
                raise TaskError(
                    f"the state of {type(optimizer).__name__} must belong to parameters, with more than one server, as "
                    "each has those of its own; set cluster.num_servers: 1"
                )
        return self._states_of_parameters()

    def _states_of_parameters(self) -> States:
        # The numbers are those of a full optimizer, so the states of all servers together are one ``state_dict``.
        return {
            number: optimizer.state[parameter]
            for number, (optimizer, parameter) in enumerate(self._numbered())
            if parameter in optimizer.state
        }

    def _numbered(self) -> list[tuple[torch.optim.Optimizer, Tensor]]:
        """Return every parameter with its optimizer, in the order of the groups."""
        return [(o, p) for o in optimizers_of(self.optimizer) for group in o.param_groups for p in group["params"]]

    @property
    def owned_states(self) -> States:
        """The optimizer's state of each owned parameter, by index."""
        owned = {self.optimizer_indices[piece.slot] for piece in self.shard.slices}
        states = self._states_of_parameters() if self._is_everything else self.states
        return {number: state for number, state in states.items() if number in owned}

    def load_states(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        for optimizer in optimizers_of(self.optimizer):
            optimizer.state.clear()
        numbered = self._numbered()
        for number, state in states.items():
            optimizer, parameter = numbered[number]
            optimizer.state[parameter] = dict(state)


def staleness_factor(staleness: int, rule: str) -> float:
    """Return the factor of a gradient that is ``staleness`` versions old (``server.stale_scaling``).

    ``inverse`` is after Zhang, Gupta, Lian and Liu, "Staleness-aware Async-SGD for distributed deep learning", IJCAI
    2016, who divide the learning rate by the staleness; here by one more, so that a fresh gradient counts in full. The
    rule is "none" (1) or "inverse" (1 / (1 + ``staleness``)).

    Raises:
        UnsupportedConfiguration: there is no such rule.
    """
    if rule == "none":
        return 1.0
    if rule == "inverse":
        return 1.0 / (1 + staleness)
    raise UnsupportedConfiguration(f"server.stale_scaling ({rule}) must be none or inverse; use one of them")


def _average(gradients: Sequence[Sequence[Tensor]], factors: Sequence[float]) -> None:
    for scaled, factor in zip(gradients, factors, strict=True):
        if factor != 1.0:
            # In place: a push belongs to this update alone, and nothing reads it afterwards.
            torch._foreach_mul_(list(scaled), factor)
    total = list(gradients[0])
    for others in gradients[1:]:
        torch._foreach_add_(total, list(others))
    if len(gradients) > 1:
        # Divided by the number of gradients and not by the sum of factors, so that a stale gradient has less weight in
        # the update.
        divide_(total, len(gradients))


def _cut(flats: Sequence[Tensor], cuts: Sequence[slice]) -> list[Tensor]:
    return [flat[cut] for flat, cut in zip(flats, cuts, strict=True)]

"""What a server owns of the parameters, and the step of the optimizer over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paramserver.errors import UnsupportedConfiguration
from paramserver.optim.parallel_step import ThreadTeam
from paramserver.parameters.flat import FlatLayout
from paramserver.parameters.sharding import Shard, States, get_hyperparameters, optimizer_indices, set_hyperparameters


class ShardUpdater:
    """Averages gradients of one shard and steps the optimizer over it. Not thread-safe.

    A tensor that is owned whole stays the model's parameter. Of one that is owned in part, a parameter in one dimension
    takes the place in the optimizer. All others stay in the optimizer and get no gradient, so they are never stepped.

    Args:
        layout: of all parameters.
        shard: what is owned.
        ranges: the memory of the shard's ranges.
        parameters: the model's, in the order of the layout; those of the shard are views of ``ranges``, where whole.
        optimizer: over the model's parameters.
    """

    def __init__(
        self,
        layout: FlatLayout,
        shard: Shard,
        ranges: Sequence[Tensor],
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.shard = shard
        self.ranges = list(ranges)
        self.optimizer = optimizer
        self._crew: ThreadTeam | None = None
        self.optimizer_indices = optimizer_indices(optimizer, parameters)
        self.leaves = [flat.detach().requires_grad_() for flat in self.ranges]
        views = shard.layout.views(self.ranges)
        self._owned: list[tuple[int, str, Tensor]] = []
        split: dict[int, Tensor] = {}
        for piece, slot in zip(shard.slices, shard.layout.slots, strict=True):
            owned = parameters[piece.slot]
            if not shard.is_whole(piece, layout):
                owned = nn.Parameter(views[slot.name])
                split[id(parameters[piece.slot])] = owned
            self._owned.append((piece.slot, slot.name, owned))
        for group in optimizer.param_groups if split else ():
            group["params"] = [split.get(id(p), p) for p in group["params"]]

    def use_threads(self, crew: ThreadTeam) -> None:
        """Sums are made by all of the crew from now on."""
        self._crew = crew

    # An update.

    def average(self, gradients: Sequence[Sequence[Tensor]], factors: Sequence[float]) -> list[Tensor]:
        """The mean of the scaled gradients of the ranges, in the order given, into the first.

        So the result does not depend on who came first.
        """
        if self._crew is None:
            _average(gradients, factors)
        else:
            parts = [[_cut(flats, cuts) for flats in gradients] for cuts in self._crew.slices(self.ranges)]
            self._crew.run([partial(_average, part, factors) for part in parts])
        return list(gradients[0])

    def assign_gradients(self, mean: Sequence[Tensor], used: tuple[bool, ...] | None) -> None:
        """Give each parameter its gradient, or none where no trainer had one: torch.optim then leaves it as it is."""
        views = self.shard.layout.views(mean)
        for slot, name, parameter in self._owned:
            parameter.grad = views[name] if used is None or used[slot] else None

    def clear_gradients(self) -> None:
        """The memory of a push is not held any longer."""
        for _, _, parameter in self._owned:
            parameter.grad = None

    def norm(self) -> float:
        """The Euclidean norm of all gradients, as the norm of the norms of the tensors."""
        gradients = [p.grad for _, _, p in self._owned if p.grad is not None]
        if not gradients:
            return 0.0
        norms: Any = torch._foreach_norm(gradients)
        return float(torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms])))

    def scale(self, factor: float) -> None:
        gradients = [p.grad for _, _, p in self._owned if p.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)

    def step(self, groups: Sequence[Mapping[str, Any]] | None = None) -> None:
        """One step of the optimizer, with the hyper-parameters ``groups`` where they are given."""
        if groups is not None:
            set_hyperparameters(self.optimizer, groups)
        self.optimizer.step()
        self.clear_gradients()

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's hyper-parameters, for other servers."""
        return get_hyperparameters(self.optimizer)

    def clone(self) -> list[Tensor]:
        """Immutable by convention: a snapshot that nobody writes to."""
        return [flat.detach().clone() for flat in self.ranges]

    # The state.

    @property
    def states(self) -> States:
        """What the optimizer knows of each parameter that it has stepped, by number."""
        found: States = {}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            if parameter in self.optimizer.state:
                found[number] = self.optimizer.state[parameter]
        return found

    @property
    def owned_states(self) -> States:
        """The same for what is owned."""
        owned = {self.optimizer_indices[piece.slot] for piece in self.shard.slices}
        return {number: state for number, state in self.states.items() if number in owned}

    def load_states(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Take these states for those of the parameters, and forget all the others."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.optimizer.state.clear()
        for number, state in states.items():
            self.optimizer.state[parameters[number]] = dict(state)


def staleness_factor(staleness: int, rule: str) -> float:
    """What a gradient is multiplied with that is ``staleness`` versions old (``server.stale_scaling``).

    ``inverse`` is after Zhang, Gupta, Lian and Liu, "Staleness-aware Async-SGD for distributed deep learning", IJCAI
    2016, who divide the learning rate by the staleness; here by one more, so that a fresh gradient counts in full.

    Args:
        staleness: versions, at least 0.
        rule: "none" (1) or "inverse" (1 / (1 + ``staleness``)).

    Raises:
        UnsupportedConfiguration: there is no such rule.
    """
    if rule == "none":
        return 1.0
    if rule == "inverse":
        return 1.0 / (1 + staleness)
    raise UnsupportedConfiguration(f"server.stale_scaling ({rule}) must be none or inverse; use one of them")


def _average(gradients: Sequence[Sequence[Tensor]], factors: Sequence[float]) -> None:
    """The mean of the scaled gradients, into the first."""
    for scaled, factor in zip(gradients, factors, strict=True):
        if factor != 1.0:
            torch._foreach_mul_(list(scaled), factor)
    total = list(gradients[0])
    for others in gradients[1:]:
        torch._foreach_add_(total, list(others))
    if len(gradients) > 1:
        torch._foreach_div_(total, float(len(gradients)))


def _cut(flats: Sequence[Tensor], cuts: Sequence[slice]) -> list[Tensor]:
    return [flat[cut] for flat, cut in zip(flats, cuts, strict=True)]

"""The parameters of a server and how they change: a version after each update, snapshots, versions that are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paramserver.config import Config
from paramserver.consistency import Update, scale
from paramserver.devices import CPU
from paramserver.flat import FlatTensors, Layout, module_buffers, trainable
from paramserver.modelling import build_model
from paramserver.protocol import Push, union
from paramserver.task import Task
from paramserver.updater import Updater

Flats = list[Tensor]


class Versions:
    """One model in a few flat tensors, one optimizer over views of them. Not thread-safe.

    Args:
        task: builds the model and the optimizer.
        config: the run's.
        allocate: makes the flat tensors of the parameters, where others are to read them in place.
    """

    def __init__(self, task: Task, config: Config, allocate: Callable[[Layout], list[Tensor]] | None = None) -> None:
        self.model = build_model(task, config.seed, CPU)
        self.parameters = FlatTensors(trainable(self.model), allocate)
        self.buffers = FlatTensors(module_buffers(self.model))
        self.updater = Updater(task, self.model, config.training)
        self.leaves = [flat.detach().requires_grad_() for flat in self.parameters.flats]
        self._stale_scaling = config.server.stale_scaling
        self._snapshot: Flats | None = None
        self._buffer_snapshot: Flats | None = None
        self._kept: dict[int, tuple[Flats, Flats]] = {}

    # What others read.

    def snapshot(self) -> tuple[Flats, Flats]:
        """Parameters and module buffers of the current version; nobody writes to them, whatever happens to it."""
        if self._snapshot is None:
            self._snapshot = self.parameters.clone()
        return self._snapshot, self.snapshot_of_buffers()

    def snapshot_of_buffers(self) -> Flats:
        """The module buffers alone."""
        if self._buffer_snapshot is None:
            self._buffer_snapshot = self.buffers.clone()
        return self._buffer_snapshot

    def keep(self, version: int) -> None:
        """Hold on to the current version under this number, for ``kept``."""
        self._kept[version] = self.snapshot()

    def kept(self, version: int) -> tuple[Flats, Flats]:
        return self._kept[version]

    def forget(self, version: int) -> None:
        self._kept.pop(version, None)

    def forward(self, flats: Sequence[Tensor], inputs: Sequence[Any]) -> Any:
        """The model's output with the parameters in ``flats``."""
        views = self.parameters.layout.views(flats)
        memo = {id(t): t for t in [*self.model.parameters(), *self.model.buffers()]}
        # One skeleton per call: functional_call on a shared module is not thread-safe.
        return torch.func.functional_call(copy.deepcopy(self.model, memo), views, tuple(inputs))

    # An update.

    def apply(self, update: Update, pushes: Sequence[Push]) -> None:
        """Make the next version: the mean of the pushes, one step of the optimizer, the module buffers of one of them.

        Args:
            update: whose gradients, and how stale each is.
            pushes: in the order of ``update.trainers``; their gradients are changed.
        """
        self._snapshot = self._buffer_snapshot = None
        mean = self._mean([self._scaled(p, s) for p, s in zip(pushes, update.staleness, strict=True)])
        self._hand_out(mean, union([push.report.used for push in pushes]))
        self.updater.update()
        self._hand_out(mean, (False,) * len(self.parameters.tensors))  # a push's memory is not held any longer
        self.parameters.check_in_place()
        buffers = pushes[update.trainers.index(update.buffers_from)].buffers
        if buffers:
            self.buffers.copy_from(buffers)

    def _scaled(self, push: Push, staleness: int) -> Sequence[Tensor]:
        factor = scale(staleness, self._stale_scaling)
        if factor != 1.0:
            torch._foreach_mul_(push.gradients, factor)
        return push.gradients

    @staticmethod
    def _mean(gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """In the order given, into the first; so that the result does not depend on who came first."""
        total = list(gradients[0])
        for others in gradients[1:]:
            torch._foreach_add_(total, list(others))
        if len(gradients) > 1:
            torch._foreach_div_(total, float(len(gradients)))
        return total

    def _hand_out(self, flats: Sequence[Tensor], used: tuple[bool, ...] | None) -> None:
        """Give each parameter its gradient, or none where no trainer had one: torch.optim then leaves it as it is."""
        views = self.parameters.layout.views(flats)
        for place, (name, parameter) in enumerate(self.parameters.tensors.items()):
            parameter.grad = views[name] if used is None or used[place] else None

    def gradients_by_name(self, held: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
        """The gradients of a context, zero where it holds none."""
        flats = [held[leaf] if leaf in held else torch.zeros_like(leaf) for leaf in self.leaves]
        return self.parameters.layout.views(flats)

    def optimizer_state(self) -> dict[str, Any]:
        return copy.deepcopy(self.updater.optimizer.state_dict())

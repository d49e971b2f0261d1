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
from paramserver.errors import TaskError
from paramserver.optim.parallel_step import WORTHWHILE_BYTES, ThreadTeam
from paramserver.optim.shard_updater import ShardUpdater
from paramserver.optim.updater import Updater
from paramserver.parameters.flat import FlatLayout, FlatTensors, module_buffers, trainable
from paramserver.parameters.model import build_model
from paramserver.parameters.sharding import Shard, full_shard
from paramserver.task import Task
from paramserver.transport.messages import Push, union

Flats = list[Tensor]


class ParameterStore:
    """One model in a few flat tensors, one optimizer over views of them. Not thread-safe.

    Args:
        task: builds the model and the optimizer.
        config: the run's.
        allocate: makes the flat tensors of the parameters, where others are to read them in place.
    """

    def __init__(
        self, task: Task, config: Config, allocate: Callable[[FlatLayout], list[Tensor]] | None = None
    ) -> None:
        self.model = build_model(task, config.seed, CPU)
        self.parameters = FlatTensors(trainable(self.model), allocate, config.server.bucket_bytes)
        self.buffers = FlatTensors(module_buffers(self.model))
        self.updater = Updater(task, self.model, config.training)
        if isinstance(self.updater.optimizer, torch.optim.SparseAdam):
            raise TaskError("SparseAdam needs sparse gradients, which cannot be averaged on a server; use Adam")
        self.own(full_shard(self.parameters.layout))
        self._stale_scaling = config.server.stale_scaling
        self._snapshot: Flats | None = None
        self._own_snapshot: Flats | None = None
        self._buffer_snapshot: Flats | None = None
        self._kept: dict[int, tuple[Flats, Flats]] = {}

    def own(self, shard: Shard) -> None:
        """Only this shard is updated here from now on; before that, everything is."""
        ranges = shard.ranges_of(self.parameters.flats)
        parameters = list(self.parameters.tensors.values())
        self.shard = shard
        self.portion = ShardUpdater(self.parameters.layout, shard, ranges, parameters, self.updater.optimizer)
        self.leaves = self.portion.leaves

    def work_with(self, crew: ThreadTeam) -> None:
        """Updates of large models are made by all of the crew from now on."""
        if self.parameters.layout.bytes >= WORTHWHILE_BYTES:
            self.portion.work_with(crew)
            self.updater.work_with(crew)

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

    def own_snapshot(self) -> Flats:
        """The same of what is owned here; all of the parameters, where there is one server."""
        if self.shard.layout is self.parameters.layout:
            return self.snapshot()[0]
        if self._own_snapshot is None:
            self._own_snapshot = self.portion.clone()
        return self._own_snapshot

    def keep(self, version: int) -> None:
        """Hold on to the current version under this number, for ``kept``."""
        self._kept[version] = self.snapshot()

    def kept(self, version: int) -> tuple[Flats, Flats]:
        return self._kept[version]

    @property
    def kept_versions(self) -> frozenset[int]:
        return frozenset(self._kept)

    def forget(self, version: int) -> None:
        self._kept.pop(version, None)

    def forward(self, flats: Sequence[Tensor], inputs: Sequence[Any]) -> Any:
        """The model's output with the parameters in ``flats``."""
        views = self.parameters.layout.views(flats)
        memo = {id(t): t for t in [*self.model.parameters(), *self.model.buffers()]}
        # One skeleton per call: functional_call on a shared module is not thread-safe.
        return torch.func.functional_call(copy.deepcopy(self.model, memo), views, tuple(inputs))

    # An update.

    def apply(self, version: int, update: Update, pushes: Sequence[Push]) -> None:
        """Make the next version: the mean of the pushes, one step of the optimizer, the module buffers of one of them.

        Args:
            version: its number.
            update: whose gradients, and how stale each is.
            pushes: in the order of ``update.trainers``; their gradients are changed.
        """
        self.prepare(update, pushes)
        self.updater.update(version)
        self.conclude(update, pushes)

    def prepare(self, update: Update, pushes: Sequence[Push]) -> None:
        """The first part of it, up to the gradients that the optimizer is given."""
        self._snapshot = self._own_snapshot = self._buffer_snapshot = None
        mean = self.portion.average([push.gradients for push in pushes], self.factors(update))
        self.portion.hand_out(mean, union([push.report.used for push in pushes]))

    def conclude(self, update: Update, pushes: Sequence[Push]) -> None:
        """The last part, after the step of the optimizer."""
        self._snapshot = self._own_snapshot = None
        self.portion.forget_gradients()
        self.parameters.check_in_place()
        buffers = pushes[update.trainers.index(update.buffers_from)].buffers
        if buffers:
            self.buffers.copy_from(buffers)

    def factors(self, update: Update) -> list[float]:
        """By what each gradient is multiplied before the mean is taken."""
        return [scale(staleness, self._stale_scaling) for staleness in update.staleness]

    def gradients_by_name(self, held: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
        """The gradients of a context, zero where it holds none."""
        flats = [held[leaf] if leaf in held else torch.zeros_like(leaf) for leaf in self.leaves]
        return self.parameters.layout.views(flats)

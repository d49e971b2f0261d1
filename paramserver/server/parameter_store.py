"""The parameters of a server and their versions: one more after each update, with snapshots and retained versions."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paramserver.config import Config, num_servers_of
from paramserver.consistency import Update
from paramserver.devices import CPU, move_to_device, place_parameters
from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.optim.named_optimizers import optimizers_of
from paramserver.optim.parallel_step import WORTHWHILE_BYTES, ThreadTeam
from paramserver.optim.shard_updater import ShardUpdater, staleness_factor
from paramserver.optim.updater import Updater
from paramserver.parameters.flat import FlatLayout, FlatTensors, other_tensors, trainable_parameters
from paramserver.parameters.model import build_model
from paramserver.parameters.model_tree import ModelTree, PackedBuffers
from paramserver.parameters.sharding import Shard, full_shard
from paramserver.server.update_pipeline import UpdatePipeline
from paramserver.task import Task
from paramserver.transport.messages import Push, merge_used

Flats = list[Tensor]


def check_optimizers(config: Config, store: ParameterStore) -> None:
    """Refuse the keys with which several optimizers do not work, or one that has ``train()`` and ``eval()``.

    Raises:
        UnsupportedConfiguration: one of them has such a value.
    """
    server, updater = config.server, store.updater
    compute = ("server.compute", server.compute, "trainer")
    consistency = ("server.consistency", server.consistency, "sync")
    several: list[tuple[str, object, object]] = [
        compute,
        consistency,
        ("server.backup_trainers", server.backup_trainers, 0),
        ("device.server", store.device.type, "cpu"),
    ]
    modes: list[tuple[str, object, object]] = [
        compute,
        consistency,
        ("cluster.num_servers", num_servers_of(config), 1),
        ("device.server", store.device.type, "cpu"),
    ]
    for key, value, must in several if updater.parameters_of else ():
        if value != must:
            raise UnsupportedConfiguration(
                f"{key} ({value}) must be {must} with several optimizers ({', '.join(updater.parameters_of)}), "
                f"as all trainers make each update together, from the same parameters; set {key}: {must}"
            )
    for key, value, must in modes if updater.with_modes else ():
        if value != must:
            raise UnsupportedConfiguration(
                f"{key} ({value}) must be {must} with {updater.with_modes}, whose train() and eval() exchange all "
                f"parameters at once; set {key}: {must}"
            )


class ParameterStore:
    """One model in a few flat tensors, and one optimizer over views of them, on one device. Not thread-safe.

    Every snapshot is immutable: an update replaces it and never writes to it. So a gradient is exact for the version it
    was computed at, whatever is applied meanwhile.

    Args:
        task: builds the model and the optimizer.
        config: of the run.
        allocate: allocates the flat tensors of the parameters, if other processes read them in place; on the CPU only.

    Attributes:
        device: of the model and the optimizer. What a trainer sends is moved there when it arrives.
    """

    def __init__(
        self, task: Task, config: Config, allocate: Callable[[FlatLayout], list[Tensor]] | None = None
    ) -> None:
        placement = place_parameters(config)
        self.device = placement.device
        self.model = build_model(task, config.seed, placement)
        self.parameters = FlatTensors(
            trainable_parameters(self.model), allocate, config.server.bucket_bytes, other_tensors(self.model)
        )
        self.updater = Updater(task, self.model, config.training, config.seed)
        self._tree = ModelTree(self.model)
        if any(isinstance(optimizer, torch.optim.SparseAdam) for optimizer in optimizers_of(self.updater.optimizer)):
            raise TaskError("SparseAdam needs sparse gradients, which cannot be averaged on a server; use Adam")
        self.assign_shard(full_shard(self.parameters.layout))
        self.pipeline: UpdatePipeline | None = None  # set where updates are made bucket by bucket
        self._stale_scaling = config.server.stale_scaling
        # Covers the snapshots and the module buffers: a copy that is made while the optimizer writes, for a
        # trainer that joins meanwhile, must not be kept for the version after it. Taken after the lock of the server.
        self._snapshot_lock = threading.RLock()
        self._snapshot: Flats | None = None
        self._shard_snapshot: Flats | None = None
        self._buffers: PackedBuffers | None = None
        self._retained: dict[int, tuple[Flats, PackedBuffers]] = {}

    def assign_shard(self, shard: Shard) -> None:
        """Update only this shard from now on; initially the shard is everything."""
        flats = shard.slice_flats(self.parameters.flats)
        parameters = list(self.parameters.tensors.values())
        self.shard = shard
        self.shard_updater = ShardUpdater(self.parameters.layout, shard, flats, parameters, self.updater.optimizer)
        self.leaves = self.shard_updater.leaves

    def use_threads(self, team: ThreadTeam) -> None:
        """Apply updates with all threads of ``team``, unless the model is too small for that, or on a GPU."""
        if self.device.type == "cpu" and self.parameters.layout.total_bytes >= WORTHWHILE_BYTES:
            self.shard_updater.use_threads(team)
            self.updater.use_threads(team)

    # Reading.

    def snapshot(self) -> tuple[Flats, PackedBuffers]:
        """Return parameters and module buffers of the current version, immutable; the buffers on the CPU."""
        with self._snapshot_lock:
            if self._snapshot is None:
                self._snapshot = self.parameters.clone()
            return self._snapshot, self.buffers

    @property
    def buffers(self) -> PackedBuffers:
        """The module buffers of the current version, on the CPU."""
        with self._snapshot_lock:
            if self._buffers is None:  # of the start, or of the checkpoint
                self._buffers = self._tree.pack_buffers()
            return self._buffers

    def merge_buffers(self, changed: PackedBuffers) -> None:
        """Replace some module buffers, which a trainer changed between two steps."""
        with self._snapshot_lock:
            self._tree.load_buffers(changed, partial=True)
            self._buffers = None

    def shard_snapshot(self) -> Flats:
        """Return the parameters of this server's shard: with one server, all of them."""
        if self.shard.layout is self.parameters.layout:
            return self.snapshot()[0]
        with self._snapshot_lock:
            if self._shard_snapshot is None:
                self._shard_snapshot = self.shard_updater.clone()
            return self._shard_snapshot

    def retain(self, version: int) -> None:
        """Retain the current version under this number until ``drop``."""
        self._retained[version] = self.snapshot()

    def retained(self, version: int) -> tuple[Flats, PackedBuffers]:
        """Return parameters and module buffers of a retained version."""
        return self._retained[version]

    @property
    def retained_versions(self) -> frozenset[int]:
        return frozenset(self._retained)

    def drop(self, version: int) -> None:
        """Release a retained version; nothing if it is not retained."""
        self._retained.pop(version, None)

    def forward(self, flats: Sequence[Tensor], inputs: Sequence[Any]) -> Any:
        """Return the model's output with the parameters in ``flats``, on the CPU as these are. Thread-safe."""
        views = self.parameters.layout.views([flat.to(self.device) for flat in flats])
        memo = {id(t): t for t in [*self.model.parameters(), *self.model.buffers()]}
        # A copy of the modules for each call: functional_call on a shared module is not thread-safe.
        replica = copy.deepcopy(self.model, memo)
        output = torch.func.functional_call(replica, views, move_to_device(tuple(inputs), self.device))
        return move_to_device(output, CPU.device)

    # Updating.

    def apply(self, version: int, update: Update, pushes: Sequence[Push]) -> None:
        """Apply an update: mean of the gradients, clipping, optimizer step, schedule, module buffers.

        Without the lock of the server, while nothing else writes parameters, optimizer or schedule.

        Args:
            version: the version that results.
            update: whose gradients, and how stale each is.
            pushes: in the order of ``update.trainers``; their gradients are overwritten.
        """
        if self.apply_by_bucket(version, pushes):
            self.updater.on_update()
        else:
            self.begin_update(update, pushes)
            self.updater.apply(version, pushes[0].report.optimizer)
        self.finish_update(update, pushes)

    def apply_by_bucket(self, version: int, pushes: Sequence[Push]) -> bool:
        """Step the optimizer over the shard bucket by bucket; False, and nothing, where that is not how it is done."""
        if self.pipeline is None or _are_shared(pushes):
            return False
        cut, used = self.pipeline.updates.cut, merge_used([push.report.used for push in pushes])
        self._drop_snapshots()
        with self.updater.generators(version):  # a hook may have been added, so that it is stepped once
            self.pipeline.commit([p.gradients if p.segment_key is None else cut(p.gradients) for p in pushes], used)
        return True

    def begin_update(self, update: Update, pushes: Sequence[Push]) -> None:
        """Average the gradients and assign them to the parameters."""
        # Before the optimizer writes, so that its temporary tensors take their memory.
        self._drop_snapshots()
        mean = self.shard_updater.average([push.gradients for push in pushes], self.gradient_factors(update))
        self.shard_updater.assign_gradients(mean, merge_used([push.report.used for push in pushes]))

    def finish_update(self, update: Update, pushes: Sequence[Push]) -> None:
        """Release the gradients and store the module buffers, after the optimizer's step."""
        self.shard_updater.clear_gradients()
        self.parameters.check_views()
        buffers = pushes[update.trainers.index(update.buffers_from)].buffers
        with self._snapshot_lock:
            if buffers is not None:
                self._tree.load_buffers(buffers)
                self._buffers = buffers
            # Again: a trainer that joined may have read meanwhile. Its copy is of no version.
            self._drop_snapshots()
        if self.pipeline is not None and _are_shared(pushes):
            self.pipeline.version_changed()

    def _drop_snapshots(self) -> None:
        with self._snapshot_lock:
            self._snapshot = self._shard_snapshot = None

    def gradient_factors(self, update: Update) -> list[float]:
        """Return the factor of each gradient of an update (``server.stale_scaling``)."""
        if self._stale_scaling == "none":
            return [1.0] * len(update.staleness)
        return [staleness_factor(staleness, self._stale_scaling) for staleness in update.staleness]

    def gradients_by_name(self, held: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the gradients that a context holds by parameter name, zero for those it does not hold."""
        flats = [held[leaf] if leaf in held else torch.zeros_like(leaf) for leaf in self.leaves]
        return self.parameters.layout.views(flats)


def _are_shared(pushes: Sequence[Push]) -> bool:
    """Return whether all gradients are in shared memory, which holds them in one piece and not in buckets."""
    return all(push.segment_key is not None for push in pushes)

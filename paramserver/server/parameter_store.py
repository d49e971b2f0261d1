"""The whole model on server 0: its parameters with snapshots and retained versions, module buffers and schedule."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from paramserver.config import Config, num_servers_of
from paramserver.config.schema import format_value
from paramserver.consistency.factory import key_of_choice
from paramserver.devices import CPU, move_to_device, place_parameters
from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.optim.outer import shared_optimizer
from paramserver.optim.parallel_step import ParallelStep
from paramserver.optim.row_steps import check_steps_rows
from paramserver.optim.updater import Updater
from paramserver.parameters.flat import FlatLayout, FlatTensors, other_tensors, trainable_parameters
from paramserver.parameters.model import LoadedParameters, build_model
from paramserver.parameters.model_tree import ModelTree, PackedBuffers
from paramserver.parameters.remote_tables import adagrad_without_memory
from paramserver.parameters.tables import find_tables
from paramserver.task import Task

Flats = list[Tensor]


_Rule = tuple[str, object, Sequence[object]]
"""A key, its value and those that are allowed."""


def check_optimizers(config: Config, store: ParameterStore) -> None:
    """Refuse the keys with which embedding tables or several optimizers do not work, or one that has ``train()``.

    Raises:
        UnsupportedConfiguration: one of them has such a value.
        TaskError: an optimizer cannot step a table.
    """
    server, updater = config.server, store.updater
    compute: _Rule = ("server.compute", server.compute, ["trainer"])
    num_servers: _Rule = ("cluster.num_servers", num_servers_of(config), [1])
    device: _Rule = ("device.server", store.device.type, ["cpu"])
    if complex_names := [name for name, p in store.parameters.tensors.items() if p.is_complex()]:
        compression: _Rule = ("server.compression", server.compression, ["none"])
        _require(f"complex parameters ({', '.join(complex_names)})", "which no compressor represents", compression)
    if store.tables:
        average: _Rule = ("training.ema_decay", config.training.ema_decay, [None])
        reason = "as trainers look up single rows of the newest version, and an update writes few of them"
        what = f"embedding tables ({', '.join(store.tables)})"
        consistency = key_of_choice(server, lambda rules: rules.allows_tables)
        rounds: _Rule = ("training.local_steps", config.training.local_steps, [1])
        outer: _Rule = ("training.outer", "given" if config.training.outer else None, [None])
        _require(what, reason, consistency, device, compute, average)
        _require(what, "whose gradients are sparse and whose changes are not", rounds, outer)
    # After the checks of rounds, whose optimizer here is not that of the task.
    check_steps_rows(updater.optimizer, {name: store.parameters.tensors[name] for name in store.tables})
    if updater.parameters_of:
        names = ", ".join(updater.parameters_of)
        reason = "as all trainers make each update together, from the same parameters"
        consistency = key_of_choice(server, lambda rules: rules.waits_for_all)
        _require(f"several optimizers ({names})", reason, compute, consistency, device)
    if updater.with_modes:
        reason = "whose train() and eval() exchange all parameters at once"
        consistency = key_of_choice(server, lambda rules: rules.validates_together)
        _require(updater.with_modes, reason, compute, consistency, num_servers, device)


def _require(what: str, reason: str, *rules: _Rule) -> None:
    for key, value, allowed in rules:
        if value not in allowed:
            choices = [format_value(choice) for choice in allowed]
            raise UnsupportedConfiguration(
                f"{key} ({format_value(value)}) must be {' or '.join(choices)} with {what}, {reason}; set {key}: "
                f"{choices[0]}"
            )


class ParameterStore:
    """The whole model on server 0: parameters in a few flat tensors, module buffers, optimizer and schedule.

    The optimizer is stepped by the shards of all servers (``ParameterShard``). Where that of server 0 is not all, the
    parameters of the others are here if memory is shared, and for a checkpoint. Every snapshot is immutable: an update
    replaces it and never writes to it. So a gradient is exact for the version it was computed at, whatever is applied
    meanwhile. What reads snapshots and module buffers is thread-safe, and nothing else. With ``allocate`` other
    processes read the parameters in place, on the CPU only. What a trainer sends is moved to ``device`` when it
    arrives. With ``is_restored`` the state of a checkpoint will be loaded.
    """

    def __init__(
        self,
        task: Task,
        config: Config,
        allocate: Callable[[FlatLayout], list[Tensor]] | None = None,
        is_restored: bool = False,
    ) -> None:
        placement = place_parameters(config)
        self.device = placement.device
        self.model = build_model(task, config.seed, placement)
        self.tables = find_tables(self.model)
        trained, others = trainable_parameters(self.model), other_tensors(self.model)
        self.parameters = FlatTensors(trained, allocate, config.server.bucket_bytes, others, self.tables)
        # The state that an optimizer has from the beginning is replaced by that of a checkpoint, or each of several
        # servers gets a copy of its part.
        is_replaced = is_restored or num_servers_of(config) > 1
        with adagrad_without_memory(self.parameters.tensors[name] for name in (self.tables if is_replaced else ())):
            self.updater = Updater(shared_optimizer(task, config), self.model, config.training, config.seed)
        self._tree = ModelTree(self.model)
        # Covers the snapshots and the module buffers: a copy that is made while the optimizer writes, for a
        # trainer that joins meanwhile, must not be kept for the version after it. Taken after the lock of the server.
        self._snapshot_lock = threading.RLock()
        self._snapshot: Flats | None = None
        self._buffers: PackedBuffers | None = None
        # Snapshots of earlier versions that are validated; every use holds the lock of the server.
        self.retained: dict[int, tuple[Flats, PackedBuffers]] = {}
        # What trainers have copies of, which no update reaches. No step changes it; see ``refuse_changes``.
        frozen = {n: p for n, p in self.model.named_parameters() if not p.requires_grad}
        self._known_frozen = LoadedParameters(frozen, owned=False)
        self._num_buffer_loads = 0

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

    def forward(self, flats: Sequence[Tensor], inputs: Sequence[Any]) -> Any:
        """Return the model's output with the parameters in ``flats``, on the CPU as these are. Thread-safe."""
        views = self.parameters.layout.views([flat.to(self.device) for flat in flats])
        memo = {id(t): t for t in [*self.model.parameters(), *self.model.buffers()]}
        # A copy of the modules for each call: functional_call on a shared module is not thread-safe.
        replica = copy.deepcopy(self.model, memo)
        output = torch.func.functional_call(replica, views, move_to_device(tuple(inputs), self.device))
        return move_to_device(output, CPU.device)

    # Writing.

    def merge_buffers(self, changed: PackedBuffers) -> None:
        """Replace some module buffers, which a trainer changed between two steps."""
        with self._snapshot_lock:
            self._tree.load_buffers(changed, partial=True)
            self._buffers = None
            self._num_buffer_loads += 1

    @contextmanager
    def refuse_changes(self) -> Iterator[None]:
        """Refuse that an optimizer's step, made in this context, changes frozen parameters or module buffers.

        Values that it changes through ``data`` are compared in the first steps, and in each 64th. The classes of torch
        change nothing else than their parameters, unless they have hooks.

        Raises:
            TaskError: it changed one; the message names it.
        """
        if ParallelStep.supports(self.updater.optimizer):
            yield
            return
        self._known_frozen.note()
        before = self._read_buffers()
        yield
        changed, _ = self._known_frozen.find_changed()
        what = f"parameter {changed}, which is frozen,"
        after = self._read_buffers()
        if changed is None and before[0] == after[0]:  # a trainer sent none meanwhile
            changed = next((name for name in after[1] if after[1][name] != before[1].get(name)), None)
            what = f"module buffer {changed}"
        if changed is not None:
            raise TaskError(
                f"{what} must not be changed by the step of the optimizer in mode rpc, which is made on the server, as "
                "each trainer has its own; change it in a hook of the task, such as on_batch_start"
            )

    def _read_buffers(self) -> tuple[int, dict[str, tuple[int, int]]]:
        """Return how often buffers were loaded, and of each by name its version and place."""
        with self._snapshot_lock:
            return self._num_buffer_loads, {n: (b._version, b.data_ptr()) for n, b in self.model.named_buffers()}

    def keep_buffers(self) -> AbstractContextManager[Any]:
        """Return a context in which no module buffer changes; no other thread waits for long."""
        return self._snapshot_lock

    def drop_snapshot(self) -> None:
        """Release the snapshot of the current version, before its parameters change.

        Before the optimizer writes, so that its temporary tensors take that memory.
        """
        with self._snapshot_lock:
            self._snapshot = None

    def take_buffers(self, buffers: PackedBuffers | None) -> None:
        """Take over module buffers, if there are any."""
        with self._snapshot_lock:
            if buffers is not None:
                self._tree.load_buffers(buffers)
                self._buffers = buffers
                self._num_buffer_loads += 1

    def finish_update(self, buffers: PackedBuffers | None, optimizer: str) -> None:
        """Take over module buffers and step the schedule, after the parameters have changed on all servers.

        The buffers are those of the trainer whose buffers the version has, or None if it has none.
        """
        self.parameters.check_views()
        self.take_buffers(buffers)
        with self._snapshot_lock:
            # Again: a trainer that joined may have read meanwhile. Its copy is of no version.
            self._snapshot = None
        # After the optimizer: torch warns, and skips the first learning rate, in the other order.
        self.updater.on_update(optimizer)

    def gradients_by_name(self, by_leaf: Mapping[Tensor, Tensor], leaves: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the gradients that a context holds at ``leaves`` by parameter name, zero for those it lacks."""
        flats = [by_leaf[leaf] if leaf in by_leaf else torch.zeros_like(leaf) for leaf in leaves]
        return self.parameters.layout.views(flats)

"""The handlers of a server that trainers call for its parameters, and those that server 0 calls on another server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from paramserver.config import Config
from paramserver.consistency import Decision, PushId, TrainerId
from paramserver.devices import CPU
from paramserver.distributed.rpc_agent import release_context
from paramserver.distributed.rpc_calls import RemoteError, repeatable
from paramserver.errors import TrainingError, UnsupportedConfiguration
from paramserver.optim.clipping import clipping_of
from paramserver.optim.outer import shared_optimizer
from paramserver.optim.shard_updater import ShardUpdater
from paramserver.optim.updater import build_optimizer
from paramserver.parameters.flat import FlatLayout, trainable_parameters
from paramserver.parameters.model import build_model
from paramserver.parameters.remote_tables import adagrad_without_memory
from paramserver.parameters.tables import find_tables
from paramserver.server.server_run import SubmitFn, run_now
from paramserver.server.shard import ParameterShard, ShardHandlers
from paramserver.task import Task
from paramserver.transport.compression import make_codec, make_compressor
from paramserver.transport.messages import ApplyRequest, Future, ShardAssignment, ShardState, SnapshotTensor
from paramserver.transport.segments import attach, can_attach


class ShardServer(ShardHandlers):
    """A server other than server 0: it owns a shard, and applies the updates that server 0 requests.

    Its handlers never block; errors are returned as values. Consistency, schedule and module buffers are on server 0.
    ``fetch_weights`` returns what ``assignment.weights`` lacks if the memory of server 0 cannot be reached.

    Raises:
        UnsupportedConfiguration: the memory of server 0 must be shared and cannot be reached.
    """

    def __init__(
        self,
        task: Task,
        config: Config,
        server_index: int,
        assignment: ShardAssignment,
        generation: int = 1,
        submit: SubmitFn = run_now,
        fetch_weights: Callable[[], list[Tensor]] = list,
    ) -> None:
        self.config = config
        self.server_index = server_index
        self.finished = threading.Event()
        self.outcome: Decision | RemoteError | None = None
        # Held by every handler, and never while an update is computed: RPC worker threads call them concurrently.
        self._lock = threading.RLock()
        self._layout = assignment.parameter_layout
        self._segments_address = self._check_segments(assignment.segments_address)
        self.shard = ParameterShard(
            self._build(task, assignment, fetch_weights),
            make_codec(config.server),
            self._lock,
            assignment.step,
            assignment.buckets,
            submit,
            server_index,
            generation,
            config.seed,
            clipping_of(config.training),
            lambda key: self._attach(key, self._layout.of_gradients()),
            compressor=make_compressor(config.server),
        )

    @property
    def shares_memory(self) -> bool:
        """Whether the shard lies in the memory of server 0."""
        return self._segments_address is not None

    def _check_segments(self, address: str | None) -> str | None:
        if address is None or can_attach(address, self.config.cluster.timeout_s):
            return address
        if self.config.server.must_share_memory:
            raise UnsupportedConfiguration(
                f"server.transport (shared_memory) must have all ranks on one host; server {self.server_index} cannot "
                "reach the memory of server 0; use auto, tcp or rpc"
            )
        return None

    def _build(
        self, task: Task, assignment: ShardAssignment, fetch_weights: Callable[[], list[Tensor]]
    ) -> ShardUpdater:
        """Build model and optimizer, with memory for the owned parameters only."""
        model = build_model(task, self.config.seed, CPU, owns_tables=False)
        parameters = trainable_parameters(model)
        tables = find_tables(model)
        if FlatLayout.of(parameters.items(), self.config.server.bucket_bytes, tables) != self._layout:
            raise TrainingError(
                f"server {self.server_index} built another model than server 0; build_model must give the same one in "
                "every process"
            )
        with adagrad_without_memory(parameters[name] for name in tables):
            optimizer = build_optimizer(shared_optimizer(task, self.config), model, self.config.training)
        shard = assignment.shard
        if self.shares_memory:
            flats = shard.slice_flats(self._attach(assignment.segments_key, self._layout))
        else:
            flats = shard.layout.allocate()
            for own, initial in zip(flats, assignment.weights or fetch_weights(), strict=True):
                own.copy_(initial)
        updater = ShardUpdater(self._layout, shard, flats, list(parameters.values()), optimizer)
        views = shard.layout.views(flats)
        owned_whole = {
            slot.name
            for piece, slot in zip(shard.slices, shard.layout.slots, strict=True)
            if shard.is_whole(piece, self._layout)
        }
        # By ``data``, which keeps the Parameter objects that the optimizer holds.
        for name, parameter in parameters.items():
            parameter.data = views[name] if name in owned_whole else torch.empty(0, dtype=parameter.dtype)
        updater.load_states(assignment.states)
        return updater

    def _attach(self, key: str, layout: FlatLayout) -> list[Tensor]:
        assert self._segments_address is not None
        return attach(self._segments_address, key, layout, self.config.cluster.timeout_s)

    # Handlers that trainers call, in addition to ``ShardHandlers``.

    @repeatable
    def view_version(self, sender: TrainerId, version: int | None, without: Collection[int] = ()) -> tuple[Tensor, ...]:
        """Return this shard of a version without gradients; None for the current one, and that without ``without``."""
        with self._lock:
            self.shard.admit(sender)
            return self.shard.view_version(version, without)

    @repeatable
    def report_push(self, push: PushId, version: int) -> None:
        """Accept a push whose gradients may still be incomplete; they wait for the request that names them."""
        with self._lock:
            self.shard.report_push(push, version)

    # Handlers that server 0 calls: see ``ParameterShard``.

    def begin_update(self, version: int, trainers: Sequence[int], groups: list[dict[str, Any]]) -> Future:
        with self._lock:
            return self.shard.begin_update(version, trainers, groups)

    def apply(self, request: ApplyRequest) -> Future:
        with self._lock:
            return self.shard.apply(request)

    def apply_clipped(self, norm: Tensor) -> Future:
        with self._lock:
            return self.shard.apply_clipped(norm)

    def collect_state(self, weights: bool, snapshot: int | None, states: bool) -> ShardState:
        with self._lock:
            return self.shard.collect_state(weights, snapshot, states)

    def read_rows(self, snapshot: int, rows: SnapshotTensor, first: int, end: int) -> Tensor:
        return self.shard.read_rows(snapshot, rows, first, end)

    def delete_snapshot(self, snapshot: int) -> None:
        self.shard.delete_snapshot(snapshot)

    def release_context(self, context_id: int) -> None:
        """Release a context of distributed autograd whose process is dead."""
        release_context(context_id)

    def finish(self, outcome: Decision | RemoteError) -> None:
        """The run has ended."""
        self.outcome = outcome
        with self._lock:
            waiting = self.shard.pop_waiters()
        for future in waiting:
            future.set_result(None)  # server 0 replies to the push
        self.finished.set()

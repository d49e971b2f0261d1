"""Each update on the shards of all servers: that of server 0, and those of the others, if there are any."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from paramserver.checkpoint.staging import RowStream, concatenate, replace_tensors
from paramserver.config import Config
from paramserver.consistency import Decision, Update
from paramserver.distributed.rpc_calls import NO_TIMEOUT_S, RemoteError
from paramserver.errors import ParamserverError
from paramserver.optim.clipping import clipping_of
from paramserver.optim.named_optimizers import joined_states, with_states
from paramserver.optim.outer import round_weights
from paramserver.optim.shard_updater import staleness_factor
from paramserver.optim.updater import Updater, UpdaterState
from paramserver.parameters.model_tree import mean_buffers
from paramserver.parameters.sharding import Shard, get_hyperparameters, merge_state
from paramserver.parameters.tables import large_tables
from paramserver.server.parameter_store import ParameterStore
from paramserver.server.server_run import Network, ServerRun
from paramserver.server.shard import ParameterShard
from paramserver.server.shard_server import ShardServer
from paramserver.transport.messages import (
    ApplyRequest,
    Future,
    PendingPush,
    ShardState,
    SnapshotTensor,
    merge_used,
)

P = ParamSpec("P")

log = logging.getLogger("paramserver")

# No update has this version.
_NOTHING_BEGUN: tuple[int, list[dict[str, Any]], list[Future]] = (-1, [], [])


class _CollectedState(UpdaterState):
    """The state of all servers."""

    def __init__(
        self,
        state: dict[str, Any],
        updater: Updater,
        tables: Mapping[int, tuple[str, RowStream]],
        release: Callable[[], None],
    ) -> None:
        self.parameter_names, self.validates_averages = updater.parameter_names, updater.validates_averages
        self.tables = tables
        self._state, self._updater, self._release = state, updater, release

    def release(self) -> None:
        self._release()

    def averages(self) -> dict[str, Tensor]:
        return self._updater.averages(joined_states(self._updater.optimizer, self._state["optimizer"]))

    def state_dict(self) -> dict[str, Any]:
        return self._state


@dataclass(eq=False)
class Updates:
    """Keeps the shards of all servers at one version. With one server all replies are there once its own is.

    No method blocks: what depends on replies is a callback, which runs in the update thread or in one of the RPC agent,
    and takes the lock of the server. The other servers are known by their names. ``shares_memory`` returns whether the
    parameters of all servers are in the memory of server 0.
    """

    _config: Config
    _store: ParameterStore
    _shard: ParameterShard
    _shards: Sequence[Shard]
    _others: Sequence[str]
    _network: Network
    _run: ServerRun
    _shares_memory: Callable[[], bool]
    _on_unreachable: Callable[[int, RuntimeError], ParamserverError]

    def __post_init__(self) -> None:
        self._clipping = clipping_of(self._config.training)
        self._has_factors = self._config.training.weights_samples or self._config.server.stale_scaling != "none"
        self._num_snapshots = 0
        self._begun = _NOTHING_BEGUN
        self._unconfirmed: list[Future] = []  # of the last update, if the other servers had prepared it

    def apply(
        self,
        version: int,
        update: Update,
        pushes: Sequence[PendingPush],
        pulled: Set[int],
        validated: Set[int],
        on_applied: Callable[[], None],
        held: Sequence[PendingPush] = (),
    ) -> None:
        """Apply an update on every server: mean of the gradients, clipping, optimizer step, schedule, module buffers.

        Clipping takes a second round of calls, for the norm of all gradients. The pushes are in the order of
        ``update.trainers``; their gradients are overwritten. Trainers may still pull the versions ``pulled``, and
        validate those in ``validated``, which they view on every server. ``on_applied`` is called with the lock when
        all servers have applied it. An update that does not complete a version only adds up gradients; those of the
        pushes ``held`` were added before.
        """
        named = tuple((push.id, push.segment_key) for push in pushes)
        factors = (1.0,) * len(pushes)
        if self._has_factors:
            weights = round_weights(self._config.training, [push.report.samples for push in pushes])
            scaling = self._config.server.stale_scaling
            factors = tuple(w * staleness_factor(s, scaling) for w, s in zip(weights, update.staleness, strict=True))
        of_version = [*held, *pushes]
        used = merge_used([push.report.used for push in of_version])
        request = ApplyRequest(version, named, factors, used, None, frozenset(pulled), update.completes)
        to_others = request
        if self._others:
            groups = get_hyperparameters(self._shard.updater.optimizer)
            # Of server 0, the store retains the latter.
            to_others = replace(request, groups=groups, retained_versions=frozenset({*pulled, *validated}))
        if update.completes:
            self._store.drop_snapshot()
        # The others start before this server, so that all work at the same time.
        others = self._call_others(ShardServer.apply, to_others)
        own = self._shard.apply(request)
        if update.averages_buffers:
            buffers = mean_buffers([push.buffers for push in pushes])
        else:
            owners = {push.report.trainer_index: push.buffers for push in pushes}
            buffers = owners.get(update.buffers_from)  # without pushes there are those of the last that was held
        finish = partial(self._store.finish_update, buffers, of_version[0].report.optimizer)
        if not update.completes:
            finish = partial(self._store.take_buffers, buffers)

        def applied(_: Sequence[Any]) -> None:
            # Without the lock: a schedule is code of the user.
            self._run.compute(finish, lambda _: on_applied())

        if (clipping := self._clipping) is not None and update.completes:

            def apply_clipped(measured: Sequence[Tensor]) -> None:
                # Refused before the first parameter changes, so that the version stays as it was.
                merged = clipping.merge(measured, version)
                clipped = self._call_others(ShardServer.apply_clipped, merged)
                self._when_all([self._shard.apply_clipped(merged), *clipped], applied)

            self._when_all([own, *others], apply_clipped)
        elif self._begun[0] == version:
            self._when_made(to_others, own, others, applied)
        else:
            self._when_all([own, *others], applied)

    # Updates that other servers prepare.

    def begin(self, decision: Decision) -> None:
        """Let all servers update buckets as soon as they have the gradients of the trainers of this step."""
        if (pipeline := self._shard.pipeline) is None:
            return
        groups = get_hyperparameters(self._shard.updater.optimizer)
        pipeline.begin(decision.active, groups)
        try:
            replies = self._call_others(ShardServer.begin_update, decision.step, decision.active, groups)
        except RuntimeError as unreachable:  # the update itself shows whether a server is lost
            log.warning("a server did not receive begin_update: %s", unreachable)
            replies = []
        self._begun = (decision.step + 1, groups, replies) if replies else _NOTHING_BEGUN

    def _when_made(
        self, request: ApplyRequest, own: Future, others: list[Future], then: Callable[[Sequence[Any]], None]
    ) -> None:
        """Call ``then`` when the own shard has applied the update, and the others have or have prepared it."""
        self._unconfirmed = others
        called = False

        def call_once(_: Sequence[Any]) -> None:
            nonlocal called
            if not called:
                called = True
                then(())

        def call_if_prepared() -> None:
            if not called and own.done() and self._is_prepared(request):
                call_once(())

        # Whichever comes first. An error in a reply ends the run also later.
        self._when_all([own, *others], call_once)
        for reply in (own, *self._begun[2]):
            reply.add_done_callback(partial(self._with_lock, call_if_prepared))

    def _is_prepared(self, request: ApplyRequest) -> bool:
        """Return whether all other servers have computed this very update, so that its version is made already."""
        version, groups, replies = self._begun
        if version != request.version or groups != request.groups or request.retained_versions:
            return False
        if request.used is not None or any(factor != 1.0 for factor in request.factors):
            return False
        named = tuple(push for push, key in request.pushes if key is None)
        # A call that failed is no reason to fail here: the request that was sent now shows whether its server is lost.
        return len(named) == len(request.pushes) and all(
            reply.done() and not _failed(reply) and reply.value() == named for reply in replies
        )

    # The state.

    def with_state(
        self,
        then: Callable[[UpdaterState], None],
        done: Callable[[], None],
        streams_tables: bool = False,
        states: bool = True,
    ) -> None:
        """Call ``then`` with the state of optimizer and schedule, once the model holds all parameters, then ``done``.

        ``then`` is a job of the update thread, without the lock. No update may be applied before ``done``. With
        ``streams_tables`` the state has streams in the place of large tables, which may be read afterwards. Without
        ``states`` those of optimizers on other servers are missing, and what is there already is not sent.
        """
        snapshot: int | None = None
        # Optimizers that have modes are stored in another one than that in which they make updates.
        has_large = streams_tables and large_tables(self._shard.updater.layout)
        if has_large and self._store.updater.with_modes is None:
            snapshot = self._num_snapshots = self._num_snapshots + 1

        def collect(_: Sequence[Any]) -> None:
            weights = not self._shares_memory()
            others = self._others if weights or states else ()
            # Without a limit, as a reply is as large as the shard.
            replies = [
                self._network.send(name, NO_TIMEOUT_S, ShardServer.collect_state, weights, snapshot, states)
                for name in others
            ]
            # In the order of calls: what server 0 has to write for the others comes before it is read.
            self._when_all(
                replies,
                lambda parts: self._run.compute(lambda: then(self._merge(parts, snapshot, states)), lambda _: done()),
            )

        unconfirmed, self._unconfirmed = self._unconfirmed, []
        self._when_all(unconfirmed, collect)  # a request for the state must not overtake the last update

    def _merge(self, others: Sequence[ShardState], snapshot: int | None, states: bool) -> UpdaterState:
        store, updater = self._store, self._shard.updater
        if not others and snapshot is None:
            return store.updater
        layout, tensors = store.parameters.layout, store.parameters.tensors
        for shard, part in zip(self._shards[1:], others, strict=True):
            for own, collected in zip(shard.slice_flats(store.parameters.flats), part.weights or (), strict=False):
                if collected is not None:
                    own.copy_(collected)
        if not states:
            return store.updater
        parts = [self._shard.collect_state(False, snapshot), *others]
        by_shard = []
        tables: dict[str, list[RowStream]] = {}
        for number, (shard, part) in enumerate(zip(self._shards, parts, strict=True)):
            streamed = partial(self._with_streams, number, snapshot)
            by_shard.append((shard, {index: streamed(state) for index, state in part.states.items()}))
            for slot, stream in streamed(part.tables).items():
                tables.setdefault(layout.slots[slot].name, []).append(stream)
        merged = merge_state(by_shard, updater.optimizer_indices, layout)
        state = store.updater.state_dict()
        if others:
            state["optimizer"] = with_states(updater.optimizer, {**updater.states, **merged})
        else:
            owned = updater.owned_states
            streams = {
                owned[index][name].data_ptr(): value
                for index, values in merged.items()
                for name, value in values.items()
                if isinstance(value, RowStream)
            }
            state["optimizer"] = replace_tensors(state["optimizer"], streams)
        joined = {tensors[name].data_ptr(): (name, concatenate(streams)) for name, streams in tables.items()}
        return _CollectedState(state, store.updater, joined, partial(self._delete_snapshot, snapshot))

    def _with_streams(self, server_index: int, snapshot: int | None, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return values with streams in the place of what is in a snapshot of a server."""

        def read(rows: SnapshotTensor, first: int, end: int) -> Tensor:
            assert snapshot is not None
            if server_index == 0:
                return self._shard.read_rows(snapshot, rows, first, end)
            # With a limit, as the writer of checkpoints waits for it.
            name, timeout_s = self._others[server_index - 1], self._config.cluster.timeout_s
            reply = self._network.send(name, timeout_s, ShardServer.read_rows, snapshot, rows, first, end)
            value: Tensor = self._value(server_index, reply)
            return value

        found = dict(values)
        for key, value in values.items():
            if isinstance(value, SnapshotTensor):
                found[key] = RowStream(value.shape, value.dtype, partial(read, value))
        return found

    def _delete_snapshot(self, snapshot: int | None) -> None:
        """Let all servers delete a snapshot."""
        if snapshot is not None:
            self._shard.delete_snapshot(snapshot)
            for name in self._others:
                try:
                    self._network.send(name, self._config.cluster.timeout_s, ShardServer.delete_snapshot, snapshot)
                except RuntimeError as unreachable:  # it ended before
                    log.debug("%s has no snapshot any more: %s", name, unreachable)

    # Calls and replies.

    def _call_others(
        self, handler: Callable[Concatenate[Any, P], Future], *args: P.args, **kwargs: P.kwargs
    ) -> list[Future]:
        """Call a handler of each other server, without a limit: heartbeats show one that is lost meanwhile."""
        return [self._network.send_deferred(name, handler, *args, **kwargs) for name in self._others]

    def _when_all(self, replies: Sequence[Future], then: Callable[[list[Any]], None]) -> None:
        """Call ``then`` with all replies and the lock; the first error among them ends the run instead.

        They are those of the other servers, in order, after that of the own shard if it is among them.
        """

        def use() -> None:
            # collect_all completes at the first error, when other replies may still be missing.
            first = len(self._shards) - len(replies)
            values = [self._value(index, future) for index, future in enumerate(replies, first) if future.done()]
            assert len(values) == len(replies), "a missing reply follows an error, which was raised"
            then(values)

        torch.futures.collect_all(list(replies)).add_done_callback(partial(self._with_lock, use))

    def _with_lock(self, action: Callable[[], None], _: Future) -> None:
        """Do what follows from a reply; an error ends the run, as torch only prints it."""
        try:
            with self._run.lock:
                if self._run.error is None:
                    action()
        except Exception as error:  # noqa: BLE001 - ends the run and is sent to every trainer
            self._run.fail_with(error)

    def _value(self, server_index: int, future: Future) -> Any:
        try:
            value = future.wait()
        except RuntimeError as error:
            raise self._on_unreachable(server_index, error) from error
        if isinstance(value, RemoteError):
            raise value.error()
        return value


def _failed(future: Future) -> bool:
    try:
        future.value()
    except RuntimeError:
        return True
    return False

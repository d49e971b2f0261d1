"""Server 0's control of the other servers: it assigns shards and drives each update on all of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from paramserver.config import Config, num_servers_of
from paramserver.consistency import Decision, Update
from paramserver.context import StopRequest
from paramserver.distributed.membership import Member, Members, watch_peer
from paramserver.distributed.rpc_calls import RemoteError, send, send_deferred
from paramserver.errors import ParamserverError, PeerLost, ViewChanged
from paramserver.optim.named_optimizers import joined_states, with_states
from paramserver.optim.parallel_step import is_elementwise
from paramserver.optim.updater import Updater
from paramserver.parameters.numerics import check_gradient_norm
from paramserver.parameters.sharding import Shard, States, get_hyperparameters, merge_state, plan_shards, split_state
from paramserver.server.parameter_store import ParameterStore
from paramserver.server.shard_server import ShardServer
from paramserver.server.update_executor import ComputeFn, compute_now
from paramserver.transport.messages import ApplyRequest, Future, Push, ShardAssignment, merge_used, push_id

_log = logging.getLogger("paramserver")

# No update has this version.
_NOTHING_BEGUN: tuple[int, list[dict[str, Any]], list[Future]] = (-1, [], [])

# As in torch.nn.utils.clip_grad_norm_.
_TINY = 1e-6


class CollectedState:
    """The state of optimizer and schedule, collected from all servers."""

    def __init__(self, state: dict[str, Any], updater: Updater) -> None:
        self._state = state
        self._updater = updater

    def averages(self) -> dict[str, torch.Tensor]:
        return self._updater.averages(joined_states(self._updater.optimizer, self._state["optimizer"]))

    def state_dict(self) -> dict[str, Any]:
        return self._state


class ShardCoordinator:
    """Assigns a shard of the parameters to each server and keeps all servers at one version. Server 0 owns shard 0.

    No method blocks: what depends on replies of other servers is a callback, which runs in a thread of the RPC agent
    and takes the lock of the ``ParameterServer`` that owns this object. Server 0's own part of an update is computed
    without the lock, and its result is one reply more.

    Args:
        config: of the run.
        store: of all parameters; afterwards its optimizer updates shard 0 only.
        lock: of the owner, re-entrant.
        stop: a signal to another server is passed on to it.
        step: the version that the run begins with.
        segments: returns the address of server 0's shared memory and its key; None if nothing is shared.
        fail: ends the run with an error.
        on_lost: called with a shard server that is lost, and the reason.
        all_ready: called when the last server is ready.
        compute: computes without the lock.
    """

    def __init__(
        self,
        config: Config,
        store: ParameterStore,
        lock: threading.RLock,
        stop: StopRequest,
        step: int,
        segments: Callable[[], tuple[str | None, str]],
        fail: Callable[[ParamserverError], None],
        on_lost: Callable[[Member, str], None],
        all_ready: Callable[[], None],
        compute: ComputeFn = compute_now,
    ) -> None:
        self.config = config
        self.num_servers = num_servers_of(config)
        self.shares_memory = True
        self.buckets: Sequence[Shard] = ()  # of each server's shard, if updates are made bucket by bucket
        self._begun: tuple[int, list[dict[str, Any]], list[Future]] = _NOTHING_BEGUN
        self._unconfirmed: list[Future] = []  # of the last update, if the other servers had prepared it
        self._store = store
        self._lock = lock
        self._stop = stop
        self._step = step
        self._segments = segments
        self._fail = fail
        self._on_lost = on_lost
        self._all_ready = all_ready
        self._compute = compute
        self._members = Members()
        self._ready: set[int] = set()
        self._ended = False
        self._assign_shards()

    def _assign_shards(self) -> None:
        store, layout = self._store, self._store.parameters.layout
        updater, optimizer = store.shard_updater, store.updater.optimizer
        states, self._optimizer_indices = updater.states, updater.optimizer_indices
        self.shards = plan_shards(layout, self.num_servers, is_elementwise(optimizer, self.num_servers))
        parts = [split_state(states, self._optimizer_indices, layout, shard) for shard in self.shards]
        self._states = dict(enumerate(parts[1:], 1))
        store.assign_shard(self.shards[0])
        # Server 0 keeps the states of parameters that no shard holds, such as frozen ones in the optimizer.
        assigned = {number for part in parts for number in part}
        store.shard_updater.load_states(parts[0] | {n: s for n, s in states.items() if n not in assigned})

    # Handlers that a shard server calls.

    def join(self, member: Member) -> ShardAssignment:
        """Add a server, and return the shard that it owns.

        Raises:
            ViewChanged: it joined this view before; it has lost server 0 since.
        """
        index = member.index
        with self._lock:
            if index not in self._states:
                # The end of its first connection is, or will be, noticed as its loss, and another view begins.
                raise ViewChanged(f"{member} joins again; the run returns to its last checkpoint")
            self._members.join(member)
            layout, shard = self._store.parameters.layout, self.shards[index]
            weights = shard.copy_flats(self._store.parameters.flats)
            buckets = self.buckets[index] if self.buckets else None
            states = self._states.pop(index)
            reply = ShardAssignment(shard, layout, weights, states, self._step, *self._segments(), buckets)
        # Without the lock: the callback takes it, in a thread of the RPC agent.
        watch_peer(member.name, lambda reason: self._on_disconnect(member, reason))
        return reply

    def shard_ready(self, server_index: int, shares_memory: bool) -> None:
        """A server holds its shard, in the memory of server 0 (``shares_memory``) or in its own."""
        with self._lock:
            self._ready.add(server_index)
            self.shares_memory = self.shares_memory and shares_memory
        if self.complete:
            self._all_ready()

    def heartbeat(self, server_index: int, stuck_place: str = "") -> None:
        """Record a sign of life, and where in the code of the user an update of the server does not end."""
        self._members.record_heartbeat(server_index, server_index, stuck_place)

    def request_stop(self, reason: str) -> None:
        """A server received a signal."""
        self._stop.request(reason)

    def report_failure(self, server_index: int, error: RemoteError) -> None:
        """A server failed; the run fails with it."""
        self._members.leave(server_index)
        self._fail(error.error())

    # Membership.

    @property
    def complete(self) -> bool:
        """Whether all servers are ready."""
        return len(self._ready) == self.num_servers - 1

    def missing(self) -> list[int]:
        """Return the servers that are not ready yet."""
        return [index for index in range(1, self.num_servers) if index not in self._ready]

    def stuck_places(self) -> dict[int, str]:
        """Return where in the code of the user an update of another server does not end, by its index."""
        return {member.index: member.place for member in self._members.present() if member.place}

    def check_heartbeats(self) -> None:
        """Fail the run if a server has been silent for ``server.lost_after_s``."""
        silence_s = self.config.server.lost_after_s
        for member in self._members.overdue(silence_s):
            self._lose(member, f"no heartbeat for server.lost_after_s ({silence_s:g} s)")

    def _on_disconnect(self, member: Member, reason: str | None) -> None:
        self._members.mark_disconnected(member)
        self._lose(member, reason or "it ended before this one did")

    def _lose(self, member: Member, reason: str) -> None:
        if self._members.lose(member):
            self._on_lost(member, reason)

    def shut_down(self, outcome: Decision | ParamserverError | None, timeout_s: float) -> None:
        """Report the end of the run to all servers, and wait until they have disconnected."""
        error = outcome if isinstance(outcome, ParamserverError) else PeerLost("server 0 ended the run")
        report = outcome if isinstance(outcome, Decision) else RemoteError.of(error)
        for member in self._members.present():
            self._members.leave(member.index)
            self._notify(member, timeout_s, ShardServer.finish, report)
        self._ended = True
        self._members.wait_for_disconnects(timeout_s)

    def release_context(self, context_id: int) -> None:
        """Let all servers release a context of distributed autograd whose process is dead."""
        for member in self._members.present():
            self._notify(member, self.config.cluster.timeout_s, ShardServer.release_context, context_id)

    def _notify(self, member: Member, timeout_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        try:
            send(member.name, timeout_s, handler, *arguments)
        except RuntimeError as unreachable:  # it ended before
            _log.warning("%s did not receive %s: %s", member, handler.__name__, unreachable)

    def abort(self) -> None:
        """Ignore replies that are still on their way: the run has failed."""
        self._ended = True

    # Updates.

    def apply(
        self,
        version: int,
        update: Update,
        pushes: Sequence[Push],
        versions_in_use: Iterable[int],
        on_applied: Callable[[], None],
    ) -> None:
        """Apply an update on every server; clipping takes a second round trip, for the norm of all gradients.

        Args:
            version: the version that results.
            update, pushes: as for ``ParameterStore.apply``.
            versions_in_use: versions that may still be pulled from servers.
            on_applied: called when all servers have applied it.
        """
        updater, clip = self._store.shard_updater, self.config.training.clip_grad_norm
        named = tuple((push_id(push.report), push.segment_key) for push in pushes)
        groups = get_hyperparameters(updater.optimizer) if clip is None else None
        used = merge_used([push.report.used for push in pushes])
        factors = tuple(self._store.gradient_factors(update))
        request = ApplyRequest(version, named, factors, used, groups, frozenset(versions_in_use))
        # The others start before this server averages its own shard, so that all work at the same time.
        replies = [send_deferred(name, ShardServer.apply, request) for name in self._names]

        def compute_own() -> float | None:
            if self._store.apply_by_bucket(version, pushes):
                return None
            self._store.begin_update(update, pushes)
            if clip is not None:
                return updater.norm()
            with self._store.updater.generators(version):
                updater.step()
            return None

        own = self._compute_own(compute_own)

        def finish(_: Sequence[Any]) -> None:
            self._store.updater.on_update(pushes[0].report.optimizer)
            self._store.finish_update(update, pushes)
            on_applied()

        if clip is not None:
            self._when_all([own, *replies], lambda norms: self._apply_clipped(version, clip, norms, finish))
            return
        self._unconfirmed = replies
        finished = False

        def finish_once(_: Sequence[Any]) -> None:
            nonlocal finished
            if not finished:
                finished = True
                finish(())

        def finish_if_prepared() -> None:
            if not finished and own.done() and self._is_prepared(request):
                finish_once(())

        # Whichever comes first. An error in a reply ends the run also later.
        self._when_all([own, *replies], finish_once)
        if self._begun[0] == version:
            for reply in (own, *self._begun[2]):
                reply.add_done_callback(lambda _: self._run(finish_if_prepared))

    def _compute_own(self, work: Callable[[], Any]) -> Future:
        """Compute this server's part; an error ends the run, and the future that is returned gets no value."""
        own: Future = torch.futures.Future()
        self._compute(work, own.set_result)
        return own

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

    def begin_update(self, decision: Decision) -> None:
        """Let the other servers update buckets as soon as they have the gradients of the trainers of this step."""
        groups = get_hyperparameters(self._store.shard_updater.optimizer)
        begun = decision.step, decision.active, groups
        try:
            replies = [send_deferred(name, ShardServer.begin_update, *begun) for name in self._names]
        except RuntimeError as unreachable:  # the update itself shows whether a server is lost
            _log.warning("a server did not receive begin_update: %s", unreachable)
            replies = []
        self._begun = (decision.step + 1, groups, replies) if replies else _NOTHING_BEGUN

    def _apply_clipped(
        self, version: int, max_norm: float, norms: Sequence[float], then: Callable[[Sequence[Any]], None]
    ) -> None:
        updater = self._store.shard_updater
        total = sum(norm**2 for norm in norms) ** 0.5
        check_gradient_norm(total, version)
        factor = min(max_norm / (total + _TINY), 1.0)
        groups = get_hyperparameters(updater.optimizer)
        replies = [send_deferred(name, ShardServer.apply_clipped, factor, groups) for name in self._names]

        def compute_own() -> None:
            updater.scale(factor)
            with self._store.updater.generators(version):
                updater.step()

        self._when_all([self._compute_own(compute_own), *replies], then)

    def collect_state(self, then: Callable[[Callable[[], dict[str, Any]]], None]) -> None:
        """Collect what a checkpoint stores from all servers.

        ``then`` gets a function that writes the weights into the model and returns the states. No update may be applied
        before it has been called.
        """
        timeout_s, weights = self.config.cluster.timeout_s, not self.shares_memory

        def collect(_: Sequence[Any]) -> None:
            replies = [send(name, timeout_s, ShardServer.collect_state, weights) for name in self._names]
            self._when_all(replies, lambda parts: then(partial(self._merge, parts)))

        unconfirmed, self._unconfirmed = self._unconfirmed, []
        if unconfirmed:
            self._when_all(unconfirmed, collect)  # a request for the state must not overtake the last update
        else:
            collect(())

    def _merge(self, parts: Sequence[tuple[list[torch.Tensor] | None, States]]) -> dict[str, Any]:
        store = self._store
        for shard, (weights, _) in zip(self.shards[1:], parts, strict=True):
            if weights is not None:
                for own, collected in zip(shard.slice_flats(store.parameters.flats), weights, strict=True):
                    own.copy_(collected)
        own_states = store.shard_updater.states
        by_shard: list[tuple[Any, Mapping[int, Mapping[str, Any]]]] = [(self.shards[0], own_states)]
        by_shard += [(shard, states) for shard, (_, states) in zip(self.shards[1:], parts, strict=True)]
        merged = merge_state(by_shard, self._optimizer_indices, store.parameters.layout)
        state = store.updater.state_dict()
        state["optimizer"] = with_states(store.updater.optimizer, {**own_states, **merged})
        return state

    @property
    def _names(self) -> list[str]:
        return [self._members.get(index).name for index in range(1, self.num_servers)]

    def _when_all(self, replies: Sequence[torch.futures.Future[Any]], then: Callable[[list[Any]], None]) -> None:
        """Call ``then`` with all replies; the first error among them ends the run instead.

        They are those of the other servers, in order, after this server's own part if that is among them.
        """
        torch.futures.collect_all(list(replies)).add_done_callback(lambda _: self._on_replies(replies, then))

    def _on_replies(self, replies: Sequence[Future], then: Callable[[list[Any]], None]) -> None:
        def use() -> None:
            # collect_all completes at the first error, when other replies may still be missing.
            first = self.num_servers - len(replies)
            values = [self._value(index, future) for index, future in enumerate(replies, first) if future.done()]
            assert len(values) == len(replies), "a missing reply follows an error, which was raised"
            then(values)

        self._run(use)

    def _run(self, action: Callable[[], None]) -> None:
        """Do what follows from a reply, with the lock; an error ends the run, as torch only prints it."""
        try:
            with self._lock:
                if not self._ended:
                    action()
        except ParamserverError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - ends the run and is sent to every trainer
            self._fail(RemoteError.of(error).error())

    def _value(self, server_index: int, future: Future) -> Any:
        try:
            value = future.value()
        except RuntimeError as error:
            member = self._members.get(server_index)
            reason = f"its connection was closed ({str(error).splitlines()[0]})"
            self._members.lose(member)
            # Also where another thread has noticed it and is about to report it: the error below is no reason to fail.
            self._on_lost(member, reason)
            raise PeerLost(f"{member} is lost: {reason}") from error
        if isinstance(value, RemoteError):
            raise value.error()
        return value


def _failed(future: Future) -> bool:
    try:
        future.value()
    except RuntimeError:
        return True
    return False

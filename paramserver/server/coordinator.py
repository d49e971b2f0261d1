"""Server 0's connection to the other servers: it assigns shards to them, and notices a loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

from torch import Tensor

from paramserver.config import Config, num_servers_of
from paramserver.consistency import Decision
from paramserver.context import StopRequest
from paramserver.distributed.membership import HeartbeatReport, Member, Members
from paramserver.distributed.rpc_calls import RemoteError, repeatable
from paramserver.errors import GenerationChanged, ParamserverError, PeerLost
from paramserver.optim.parallel_step import is_elementwise
from paramserver.optim.shard_updater import ShardUpdater
from paramserver.parameters.sharding import Shard, States, full_shard, plan_shards, split_state
from paramserver.server.parameter_store import ParameterStore
from paramserver.server.server_run import Network, ServerRun
from paramserver.server.shard_server import ShardServer
from paramserver.transport.messages import ShardAssignment

_log = logging.getLogger("paramserver")


def split_over_servers(
    store: ParameterStore, servers: int, block: int = 1
) -> tuple[tuple[Shard, ...], ShardUpdater, list[Callable[[], States]]]:
    """Return what each server owns, the updater of server 0, and functions that copy the states of the other servers.

    Parameters are divided at multiples of ``block`` elements.

    Afterwards the optimizer of the store steps shard 0 only. Call it when the checkpoint has been loaded.
    """
    layout, flats, optimizer = store.parameters.layout, store.parameters.flats, store.updater.optimizer
    parameters = list(store.parameters.tensors.values())
    whole = ShardUpdater(layout, full_shard(layout), flats, parameters, optimizer)
    if servers == 1:
        return (whole.shard,), whole, []
    states, indices = whole.states, whole.optimizer_indices
    shards = plan_shards(layout, servers, is_elementwise(optimizer, servers), block)
    parts: list[Callable[[], States]]
    parts = [partial(split_state, states, indices, layout, shard) for shard in shards]
    updater = ShardUpdater(layout, shards[0], shards[0].slice_flats(flats), parameters, optimizer)
    # Server 0 keeps the states of parameters that no shard holds, such as frozen ones in the optimizer.
    assigned = {indices[piece.slot] for shard in shards for piece in shard.slices}
    updater.load_states(parts[0]() | {n: s for n, s in states.items() if n not in assigned})
    return shards, updater, parts[1:]


@dataclass(eq=False)
class ShardCoordinator:
    """The other servers as server 0 knows them; with one server there are none.

    No method blocks. Handlers that a shard server calls take the lock of server 0.

    Args:
        stop: a signal to another server is passed on to it.
        buckets: each shard in ranges, if updates are made bucket by bucket.
        segments: returns the address of server 0's shared memory and its key; None if nothing is shared.
    """

    config: Config
    _run: ServerRun
    _network: Network
    _stop: StopRequest
    _store: ParameterStore
    _shards: Sequence[Shard]
    states: InitVar[Sequence[Callable[[], States]]]
    _buckets: Sequence[Shard]
    _step: int
    _segments: Callable[[], tuple[str | None, str]]

    def __post_init__(self, states: Sequence[Callable[[], States]]) -> None:
        self.num_servers = num_servers_of(self.config)
        self.shares_memory = True  # the parameters of all servers that are ready are in the memory of server 0
        # Called with a shard server that is lost, and the reason.
        self.on_lost: Callable[[Member, str], None] = lambda member, reason: None
        self.on_ready: Callable[[], None] = lambda: None  # called when the last server is ready
        self._states = dict(enumerate(states, 1))  # of the servers that have not joined
        self._members = Members()
        self._ready: set[int] = set()

    # Handlers that a shard server calls.

    def join(self, member: Member) -> ShardAssignment:
        """Add a server, and return the shard that it owns.

        Raises:
            GenerationChanged: it joined this generation before; it has lost server 0 since.
        """
        index = member.index
        with self._run.lock:
            if index not in self._states:
                # The end of its first connection is, or will be, noticed as its loss, and another generation begins.
                raise GenerationChanged(f"{member} joins again; the run returns to its last checkpoint")
            self._members.join(member)
            layout, shard = self._store.parameters.layout, self._shards[index]
            segments = self._segments()
            weights = shard.copy_flats(self._store.parameters.flats) if segments[0] is None else []
            buckets = self._buckets[index] if self._buckets else None
            states = self._states.pop(index)()  # copied now, so that few copies exist at a time
            reply = ShardAssignment(shard, layout, weights, states, self._step, *segments, buckets)
        # Without the lock: the callback takes it, in a thread of the RPC agent.
        self._network.watch(member.name, lambda reason: self._on_disconnect(member, reason))
        return reply

    @repeatable
    def weights(self, server_index: int) -> list[Tensor]:
        """Return the ranges of a server that cannot reach their memory. No update is made before it is ready."""
        return self._shards[server_index].copy_flats(self._store.parameters.flats)

    def shard_ready(self, server_index: int, shares_memory: bool) -> None:
        """A server holds its shard, in the memory of server 0 (``shares_memory``) or in its own."""
        with self._run.lock:
            self._ready.add(server_index)
            self.shares_memory = self.shares_memory and shares_memory
        if self.complete:
            self.on_ready()

    def heartbeat(self, server_index: int, report: HeartbeatReport) -> None:
        """Record a sign of life, and what the server reports about itself."""
        self._members.record_heartbeat(server_index, server_index, report)

    def request_stop(self, reason: str) -> None:
        """A server received a signal."""
        self._stop.request(reason)

    def report_failure(self, server_index: int, error: RemoteError) -> None:
        """A server failed; the run fails with it."""
        self._members.leave(server_index)
        self._run.fail(error.error())

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
        return {one.index: one.report.place for one in self._members.present() if one.report.place}

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
            self.on_lost(member, reason)

    def unreachable(self, server_index: int, error: RuntimeError) -> PeerLost:
        """Report the loss of a server whose reply is an error of the connection, and return it."""
        member = self._members.get(server_index)
        reason = f"its connection was closed ({str(error).splitlines()[0]})"
        self._members.lose(member)
        # Also where another thread has noticed it and is about to report it: the error that is returned is no reason
        # to fail.
        self.on_lost(member, reason)
        return PeerLost(f"{member} is lost: {reason}")

    def shut_down(self, outcome: Decision | ParamserverError | None, timeout_s: float) -> None:
        """Report the end of the run to all servers, and wait until they have disconnected."""
        error = outcome if isinstance(outcome, ParamserverError) else PeerLost("server 0 ended the run")
        report = outcome if isinstance(outcome, Decision) else RemoteError.of(error)
        for member in self._members.present():
            self._members.leave(member.index)
            self._notify(member, timeout_s, ShardServer.finish, report)
        self._members.wait_for_disconnects(timeout_s)

    def release_context(self, context_id: int) -> None:
        """Let all servers release a context of distributed autograd whose process is dead."""
        for member in self._members.present():
            self._notify(member, self.config.cluster.timeout_s, ShardServer.release_context, context_id)

    def _notify(self, member: Member, timeout_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        try:
            self._network.send(member.name, timeout_s, handler, *arguments)
        except RuntimeError as unreachable:  # it ended before
            _log.warning("%s did not receive %s: %s", member, handler.__name__, unreachable)

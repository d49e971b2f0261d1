"""Clients of the servers: one typed method for each handler that a trainer or a shard server calls."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from paramserver.config import Config, Deadlines, num_servers_of
from paramserver.consistency import Announcement, Decision, PushId, TrainerId
from paramserver.context import StopLimit
from paramserver.distributed.abort_sockets import abort_connections
from paramserver.distributed.local_calls import LocalConnection
from paramserver.distributed.membership import Heartbeat, HeartbeatReply, HeartbeatReport, Member, watch_peer
from paramserver.distributed.rpc_agent import distributed_backward
from paramserver.distributed.rpc_calls import (
    NO_TIMEOUT_S,
    RemoteError,
    SocketConnection,
    is_numbered,
    is_repeatable,
    note_repeated,
    send,
    send_call,
    server_rref,
)
from paramserver.distributed.session import SERVER_NAME, server_name
from paramserver.errors import DeadlineExceeded, PeerLost
from paramserver.metrics.records import Record, TrainerTotals, WeightedSums
from paramserver.parameters.model_tree import PackedBuffers
from paramserver.server.coordinator import ShardCoordinator
from paramserver.server.parameter_server import ParameterServer
from paramserver.server.shard import ShardHandlers
from paramserver.server.shard_server import ShardServer
from paramserver.transport.base import GradientBucket
from paramserver.transport.messages import (
    DataPosition,
    JoinReply,
    ModelCall,
    ModelReply,
    Push,
    ShardAssignment,
    StepGrant,
    ValidationReply,
    VersionView,
)

P = ParamSpec("P")
T = TypeVar("T")


# A call that failed is sent again after this time, unless the server turns out to be lost meanwhile.
_REPEAT_AFTER_S = 0.05


class CallFailed(Exception):  # noqa: N818 - as the other errors of calls
    """A call or its reply did not arrive. The server may live, and may have received the call."""


class InFlightCall(Generic[T]):
    """A call whose reply is awaited later, while this process computes.

    Args:
        call: sends it, over a socket if it is given one.
        timeout_s: of ``wait``; None for a reply that waits for other trainers, or that takes long to send.
        repeatable: the server replies to the same call again as before, so it is sent again if it fails.
        over_socket: over which it is sent the first time, and its reply.
    """

    def __init__(
        self,
        connection: ServerConnection,
        call: Callable[[SocketConnection | None], torch.futures.Future[T]],
        name: str,
        timeout_s: float | None,
        repeatable: bool,
        over_socket: SocketConnection | None,
    ) -> None:
        self._call = call
        self._connection = connection
        self._name = name
        self._timeout_s = timeout_s
        self._repeatable = repeatable
        self._give_up_at: float | None = None
        self._sent = time.perf_counter()
        self._replied: float | None = None
        self._over_socket = over_socket
        # Calls that ``wait`` waits for too: one that is lost may have to be sent again before this one's reply.
        self.others: Sequence[InFlightCall[Any]] = ()
        self._send()

    def _send(self) -> None:
        # The next time over RPC: the socket may be what failed.
        over_socket, self._over_socket = self._over_socket, None
        self._is_over_socket = over_socket is not None
        self.future = self._call(over_socket)
        # Runs in the thread that receives the reply, or here if it is there already.
        self.future.add_done_callback(self._note_reply)

    def _note_reply(self, _: torch.futures.Future[T]) -> None:
        self._replied = time.perf_counter()
        self._connection.wake()

    def in_flight_s(self) -> float:
        """Return the seconds from sending to the reply, or until now."""
        return (self._replied or time.perf_counter()) - self._sent

    def wait(self) -> T:
        """Return the reply.

        Raises:
            PeerLost: the server is lost.
            DeadlineExceeded: there was no reply in time.
            ParamserverError: the handler raised it.
        """
        if self.others:
            self._connection.wait_all([*self.others, self])
        while True:
            try:
                return self.wait_once()
            except CallFailed as failure:
                self._repeat(failure)

    def succeeded(self) -> bool:
        """Return whether the call that has ended has its reply; if it failed, send it again, but do not wait.

        Raises:
            PeerLost, ParamserverError: as ``wait``.
        """
        try:
            self.wait_once()
        except CallFailed as failure:
            self._repeat(failure)
            return False
        return True

    def _repeat(self, failure: CallFailed) -> None:
        self._give_up_at = self._give_up_at or time.monotonic() + self._connection.timeout_s
        self._connection.wait_before_repeat(failure, self._give_up_at if self._repeatable else 0.0)
        note_repeated(self._name)
        self._send()

    def wait_once(self) -> T:
        """Return the reply as ``wait`` does, but do not send the call again.

        Raises:
            CallFailed: the call or its reply did not arrive.
        """
        # Ends when the server is lost, too. Replies over other sockets are received by a thread of their own.
        if self._is_over_socket and (local := self._connection.local) is not None:
            local.receive_until(self.future)
        return self._connection.wait(self.future, self._name, self._timeout_s)


class ServerConnection(ABC):
    """A connection to server 0: calls that end when the server is lost, and a heartbeat.

    A call that waits for other trainers has no timeout, because a slow trainer is not a failure. It ends with the
    reply, with the server's death (its liveness call fails) or with its silence (the heartbeat fails).
    """

    def __init__(self, config: Config, index: int, addresses: Sequence[str] = ()) -> None:
        self._addresses = addresses
        self.config = config
        self.index = index
        self.timeout_s = config.cluster.timeout_s
        self._name = "the server" if num_servers_of(config) == 1 else "server 0"
        self._numbers = count(1)
        self._changed = threading.Condition()
        self._lost: PeerLost | None = None
        self._stop_limit: StopLimit | None = None
        self._heartbeat: Heartbeat | None = None
        # By server, of those that have one: calls that a step waits for are sent over it.
        self._sockets: dict[str, SocketConnection] = {}
        self.local: LocalConnection | None = None  # one of them; used by the training thread only
        watch_peer(SERVER_NAME, lambda reason: self._mark_lost(reason or "it ended before this process did"))

    @abstractmethod
    def _send_heartbeat(self) -> torch.futures.Future[Any]:
        """Call the handler that records this process as alive, within ``server.lost_after_s``."""

    def _on_heartbeat(self, reply: Any) -> None:
        """Called with each reply to a heartbeat, in its thread."""

    def start_heartbeat(self) -> None:
        """Start the thread that reports this process as alive and notices a server that does not reply."""

        def beat() -> None:
            reply = self._send_heartbeat().wait()
            if isinstance(reply, RemoteError):
                raise reply.error()
            self._on_heartbeat(reply)

        def on_lost(error: PeerLost) -> None:
            # Its class shows whether the server refused the heartbeat.
            self._mark_lost(error if type(error) is not PeerLost else str(error))
            # A distributed backward waits in C++ for as long as the server is silent; only the end of its connections
            # ends it (docs/torch-notes.md).
            abort_connections(self._addresses)

        server = self.config.server
        self._heartbeat = Heartbeat(beat, server.heartbeat_s, on_lost, server.lost_after_s)

    def use_local(self, connection: LocalConnection) -> None:
        """Make the calls that a step waits for over a socket from now on."""
        with self._changed:
            self._sockets[SERVER_NAME] = self.local = connection
            lost = self._lost
        if lost is not None:  # noticed before: nothing would end a wait for a reply
            connection.shut_down()

    def use_tcp(self, connections: Mapping[str, SocketConnection]) -> None:
        """Make the calls that a step waits for over these connections to servers from now on."""
        self._sockets.update(connections)

    def wait(self, future: torch.futures.Future[T], name: str, timeout_s: float | None) -> T:
        """Wait for a reply; see ``InFlightCall.wait_once``. The future must ``wake`` this object when it is done."""
        # A condition, not ``future.wait``: torch's wait cannot be interrupted when the server is lost.
        with self._changed:
            self._changed.wait_for(lambda: future.done() or self._lost is not None, timeout_s)
        if not future.done():
            self.raise_if_lost()
            raise DeadlineExceeded(f"{self._name} did not answer {name} within cluster.timeout_s ({timeout_s:g} s)")
        try:
            value = future.value()
        except RuntimeError as error:  # of the agent: handlers return their errors
            raise CallFailed(str(error).splitlines()[0]) from error
        if isinstance(value, RemoteError):
            raise value.error()
        return value

    def wait_before_repeat(self, failure: CallFailed, give_up_at: float) -> None:
        """Wait a moment after a call failed, in which a server that is dead is noticed.

        Raises:
            PeerLost: the server is lost, or ``give_up_at`` (``time.monotonic()``) has passed.
        """
        if time.monotonic() > give_up_at:
            raise PeerLost(f"{self._name} is lost: {failure}") from failure
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, _REPEAT_AFTER_S)
        self.raise_if_lost()

    def begin(
        self, to: str, handler: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> InFlightCall[T]:
        """Call a handler that replies immediately."""
        return self._begin(to, handler, args, kwargs, self.timeout_s)

    def begin_transfer(
        self, to: str, handler: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> InFlightCall[T]:
        """Call a handler whose reply has parameters: it takes as long as the network needs, as a push does."""
        return self._begin(to, handler, args, kwargs, None)

    def begin_deferred(
        self,
        to: str,
        handler: Callable[Concatenate[Any, P], torch.futures.Future[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> InFlightCall[T]:
        """Call a handler that replies later: once other trainers have taken part, or an update is computed."""
        return self._begin(to, handler, args, kwargs, None, is_deferred=True)

    def _begin(
        self,
        to: str,
        handler: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None,
        is_deferred: bool = False,
    ) -> InFlightCall[Any]:
        """Send a call, with a number if its handler knows calls by these, and over a socket if there is one for it."""
        if is_numbered(handler):
            kwargs["number"] = next(self._numbers)
        limit_s = NO_TIMEOUT_S if is_deferred or timeout_s is None else timeout_s
        call = partial(send_call, to, handler, args, kwargs, limit_s, is_deferred)
        over_socket = self._sockets.get(to) if handler in _OVER_SOCKETS else None
        return InFlightCall(self, call, handler.__name__, timeout_s, is_repeatable(handler), over_socket)

    def call(self, handler: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a handler of server 0 that replies immediately, and wait."""
        return self.begin(SERVER_NAME, handler, *args, **kwargs).wait()

    def call_deferred(
        self, handler: Callable[Concatenate[Any, P], torch.futures.Future[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a handler of server 0 that replies once other trainers have taken part, and wait."""
        return self.begin_deferred(SERVER_NAME, handler, *args, **kwargs).wait()

    def wake(self) -> None:
        """Let ``wait`` look again. Called by threads that receive replies."""
        with self._changed:
            self._changed.notify_all()

    def wait_all(self, calls: Sequence[InFlightCall[Any]]) -> None:
        """Wait until all calls have their replies; send those again that fail."""
        pending = list(calls)

        def may_continue() -> bool:
            return self._lost is not None or any(call.future.done() for call in pending)

        while pending:
            with self._changed:
                self._changed.wait_for(may_continue)
            self.raise_if_lost()
            pending = [call for call in pending if not (call.future.done() and call.succeeded())]

    def _mark_lost(self, reason: str | PeerLost) -> None:
        error = PeerLost(f"{self._name} is lost: {reason}") if isinstance(reason, str) else reason
        with self._changed:
            self._lost = self._lost or error
            self._changed.notify_all()
            local = self.local
        if local is not None:
            local.shut_down()
        if self._stop_limit is not None:
            self._stop_limit.hurry()

    def raise_if_lost(self) -> None:
        """Raise ``PeerLost`` if the server is lost."""
        with self._changed:
            if self._lost is not None:
                raise self._lost

    def close(self) -> None:
        """Stop the heartbeat and close the socket."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        with self._changed:
            local, self.local, self._sockets = self.local, None, {}
        if local is not None:
            local.close()


# Handlers that a step waits for. They are called over the socket where there is one, and again over RPC if that fails.
_OVER_SOCKETS = frozenset(
    {
        ParameterServer.announce,
        ParameterServer.push,
        ParameterServer.wait_version,
        ShardHandlers.look_up,
        ShardHandlers.pull,
        ShardHandlers.receive_bucket,
        ShardServer.report_push,
    }
)


class ShardCoordinatorClient(ServerConnection):
    """What a shard server calls on server 0."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__(config, index)
        self.stuck_place: Callable[[], str] = lambda: ""  # that of its update thread, once there is one

    def _send_heartbeat(self) -> torch.futures.Future[None]:
        report, timeout_s = HeartbeatReport(self.stuck_place()), self.config.server.lost_after_s
        return send(SERVER_NAME, timeout_s, ShardCoordinator.heartbeat, self.index, report)

    def join(self, member: Member) -> ShardAssignment:
        """Join the run and return the shard that this server owns."""
        return self.call(ShardCoordinator.join, member)

    def weights(self) -> list[Tensor]:
        """Return the shard's ranges, which are in memory that this process cannot reach."""
        return self.begin_transfer(SERVER_NAME, ShardCoordinator.weights, self.index).wait()

    def report_ready(self, shares_memory: bool) -> None:
        """Report that the shard is in place, in the memory of server 0 or in that of this process."""
        self.call(ShardCoordinator.shard_ready, self.index, shares_memory)

    def request_stop(self, reason: str) -> None:
        """Pass a signal to server 0."""
        self.call(ShardCoordinator.request_stop, reason)

    def report_failure(self, error: RemoteError) -> None:
        """Report why this server fails; the run fails with it."""
        self.call(ShardCoordinator.report_failure, self.index, error)


class ServerClient(ServerConnection):
    """What a trainer calls on the servers.

    With several servers, server 0 takes the decisions, and each call that concerns parameters goes to every server.
    Server 0 watches the others: if one is lost, it ends the run. ``blocks`` returns whether this trainer's full buffer
    blocks simulations; the heartbeat's thread calls it, and passes on requests to stop in both directions, unless
    ``stop_limit`` is None.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        worker_id: int,
        addresses: Sequence[str],
        blocks: Callable[[], bool] = lambda: False,
        stop_limit: StopLimit | None = None,
    ) -> None:
        super().__init__(config, index, addresses)
        self._worker_id = worker_id
        self._blocks = blocks
        self._stop_limit = stop_limit
        self._id = TrainerId(index, 0, 0)  # until it has joined
        self._sequence = 0
        self._shard_servers: list[str] = []
        # For the task and custom trainers. Steps address the server by name; see distributed/rpc_calls.py.
        self.rref = server_rref(SERVER_NAME)

    def _send_heartbeat(self) -> torch.futures.Future[HeartbeatReply]:
        timeout_s, limit = self.config.server.lost_after_s, self._stop_limit
        place, stop = ("", "") if limit is None else (limit.place(), limit.stop.state()[1])
        report = HeartbeatReport(place, self._blocks(), stop)
        return send(SERVER_NAME, timeout_s, ParameterServer.heartbeat, self.index, self._worker_id, report)

    def _on_heartbeat(self, reply: HeartbeatReply) -> None:
        if self._stop_limit is not None and reply.stop:
            self._stop_limit.stop.request(reply.stop)

    def close(self) -> None:
        super().close()
        # The agent's shutdown reports references that are still held as leaks.
        del self.rref

    # Joining and leaving.

    def join(self, member: Member, epoch_samples: int | None) -> JoinReply:
        """Join the run; returns once all trainers and servers have joined."""
        # Longer than server 0 waits before it continues without a trainer that does not join.
        limit_s, args = Deadlines.of(self.config).join_s, (member, epoch_samples)
        reply: JoinReply = self._begin(SERVER_NAME, ParameterServer.join, args, {}, limit_s, is_deferred=True).wait()
        self._id, self._sequence = TrainerId(self.index, reply.generation, reply.incarnation), 0
        return reply

    def report_source(self, position: DataPosition) -> None:
        """Report where the data of this trainer starts; another process continues there if this one is lost."""
        self.call(ParameterServer.report_source, self._id, position)

    def number_push(self) -> PushId:
        """Return what names a new push."""
        push = self._next_push
        self._sequence = push.sequence
        return push

    @property
    def _next_push(self) -> PushId:
        own = self._id
        return PushId(own.trainer_index, own.generation, own.incarnation, self._sequence + 1)

    def share_segments(self) -> int:
        """Ask the server to exchange tensors in shared memory; see ``ParameterServer.share_segments``."""
        return self.call(ParameterServer.share_segments, self._id)

    def use_shards(self, servers: int) -> None:
        """Pull from and push to that many servers from now on."""
        self._shard_servers = [server_name(i) for i in range(1, servers)]

    def leave(self, totals: TrainerTotals, decision: Decision) -> None:
        """Leave the run in good order."""
        self.call(ParameterServer.leave, self._id, totals, decision)

    def report_failure(self, error: RemoteError) -> None:
        """Report why this trainer fails; the run fails with it."""
        self.call(ParameterServer.report_failure, self._id, error)

    # A step.

    def announce(self, announcement: Announcement, buffers: PackedBuffers | None = None) -> StepGrant:
        """Announce the next step; returns once the consistency model lets this trainer continue."""
        return self.call_deferred(ParameterServer.announce, self._id, announcement, buffers)

    def pull(
        self, version: int, received: Iterable[GradientBucket] = (), recorded: bool = True
    ) -> list[InFlightCall[tuple[Tensor, ...]]]:
        """Pull a version, with ``recorded`` inside this thread's distributed-autograd context: a call for each server.

        Of the buckets ``received``, which were received early, empty tensors are sent where the version has these.
        """
        servers = zip((SERVER_NAME, *self._shard_servers), self._by_server(received), strict=True)
        args = self._next_push, version
        return [self.begin_transfer(name, ShardHandlers.pull, *args, own, recorded) for name, own in servers]

    def send_bucket(
        self, version: int, bucket: GradientBucket, gradient: Tensor, revision: int = 0, has_all: bool = True
    ) -> InFlightCall[Tensor | None]:
        """Send a part of a push while backward continues; the reply may be the next version of the bucket.

        Like the push it takes as long as the network needs. See ``ParameterShard.receive_bucket``.
        """
        to, part = server_name(bucket.server_index), (version, bucket.flat_index, gradient, revision, has_all)
        return self.begin_deferred(to, ShardHandlers.receive_bucket, self._next_push, *part)

    def look_up(
        self, version: int | None, rows: Mapping[int, Mapping[int, Tensor]]
    ) -> dict[int, InFlightCall[dict[int, Tensor]]]:
        """Request rows of embedding tables, by server and range; see ``ParameterShard.look_up``."""
        return {
            index: self.begin_deferred(server_name(index), ShardHandlers.look_up, self._id, version, own)
            for index, own in rows.items()
        }

    def backward(self, context_id: int, root: Tensor) -> None:
        """Push by the distributed backward of ``root``.

        Raises:
            PeerLost: the gradients did not reach all servers.
        """
        try:
            distributed_backward(context_id, [root])
        except RuntimeError as error:
            self.raise_if_lost()  # a loss that was noticed before is the cause; this error is its consequence
            who = "a server" if self._shard_servers else self._name
            reason = str(error).splitlines()[0]
            raise PeerLost(f"{who} is lost: the gradients did not reach it ({reason})") from error

    def push(
        self, push: Push, buckets: Sequence[InFlightCall[Any]] = (), has_gradients: bool = False
    ) -> InFlightCall[StepGrant]:
        """Report a push whose gradients are in shared memory, at the servers, or on their way.

        The calls of ``buckets``, in which they are sent, are waited for with the reply. Without ``has_gradients`` this
        may be called before they are complete.
        """
        version = push.report.version
        on_shards = [self.begin(name, ShardServer.report_push, push.id, version) for name in self._shard_servers]
        grant = self.begin_deferred(SERVER_NAME, ParameterServer.push, push, has_gradients)
        # Server 0 may wait for one of them that has to be sent again.
        grant.others = [*on_shards, *buckets]
        return grant

    def wait_version(self, version: int) -> int:
        """Return the current version once that is ``version``, or an earlier one if no trainer is left to make it."""
        return self.call_deferred(ParameterServer.wait_version, self._id, version)

    def all_gather(
        self, value: Any, call: tuple[int, ...], active: tuple[int, ...] | None, has_limit: bool
    ) -> list[Any]:
        """Return the values that all trainers give with the same ``call``, or those of ``active``."""
        return self.call_deferred(ParameterServer.all_gather, self._id, value, call, active, has_limit)

    def averages(self) -> dict[str, Tensor]:
        """Return the average of each parameter, by name (``training.ema_decay``)."""
        return self.call_deferred(ParameterServer.averages, self._id)

    def optimizer_state(self) -> dict[str, Any]:
        """Return the state of the optimizer in the form of ``torch.optim.Optimizer.state_dict``."""
        return self.call_deferred(ParameterServer.optimizer_state)

    # The model on the server (server.compute: server).

    def model_as_built(self) -> tuple[dict[str, Any], bool]:
        """Return the random states after the model was built, and its ``training`` flag."""
        return self.call(ParameterServer.model_as_built)

    def compute(self, call: ModelCall) -> ModelReply:
        """Run a forward on the server; it may take long."""
        return self.begin_transfer(SERVER_NAME, ParameterServer.compute, self._id, call).wait()

    # Validation, checkpoints, records.

    def view_version(self, version: int | None, without: Iterable[GradientBucket] = ()) -> VersionView:
        """Return a version without gradients, of all servers; see ``ParameterServer.view_version``."""
        numbers = self._by_server(without)
        others = zip(self._shard_servers, numbers[1:], strict=True)
        args = self._id, version
        on_shards = [self.begin_transfer(name, ShardServer.view_version, *args, own) for name, own in others]
        view = self.begin_transfer(SERVER_NAME, ParameterServer.view_version, *args, numbers[0]).wait()
        of_shards = [flat for call in on_shards for flat in call.wait()]
        return replace(view, parameters=(*view.parameters, *of_shards)) if of_shards else view

    def _by_server(self, ranges: Iterable[GradientBucket]) -> list[list[int]]:
        numbers: list[list[int]] = [[] for _ in (SERVER_NAME, *self._shard_servers)]
        for one in ranges:
            numbers[one.server_index].append(one.flat_index)
        return numbers

    def report_validation(self, version: int, shares: Mapping[int, WeightedSums]) -> ValidationReply:
        """Report shares of a validation; wait for the means over all of them."""
        return self.call_deferred(ParameterServer.report_validation, self._id, version, shares)

    def report_validation_share(self, version: int, share: int, sums: WeightedSums) -> None:
        """Report the share of a validation that a decision named, without waiting for the other trainers."""
        self.call(ParameterServer.report_validation_share, self._id, version, share, sums)

    def stage_checkpoint(
        self,
        reason: str,
        extra_state: Mapping[str, Any],
        buffers: PackedBuffers | None = None,
        ends_epoch: bool = False,
    ) -> InFlightCall[bool]:
        """Take part in a checkpoint; see ``ParameterServer.stage_checkpoint``."""
        return self.begin_deferred(
            SERVER_NAME, ParameterServer.stage_checkpoint, self._id, reason, extra_state, buffers, ends_epoch
        )

    def send_part_chunk(self, step: int, chunk: Tensor) -> None:
        """Send the next chunk of this trainer's part of a checkpoint."""
        self.call(ParameterServer.receive_part_chunk, self._id, step, chunk)

    def finish_part(self, step: int, pause_s: float) -> None:
        """Report that the part is complete; returns once the server has accepted it."""
        self.call_deferred(ParameterServer.finish_part, self._id, step, pause_s)

    def send_records(self, records: Sequence[Record]) -> InFlightCall[None]:
        """Send records to rank 0; wait for the reply before the next ones are sent."""
        return self.begin(SERVER_NAME, ParameterServer.receive_records, self._id, records)

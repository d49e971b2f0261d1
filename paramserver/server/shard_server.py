"""A server beside the first: it owns a shard of the parameters, and does what the first one orders.

A rank that is a server beside the first, from its connection to its end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor

from paramserver.config import Config
from paramserver.consistency import Decision
from paramserver.context import ProcessContext
from paramserver.devices import CPU
from paramserver.distributed import rpc_calls
from paramserver.distributed.membership import Member, release_liveness_calls
from paramserver.distributed.rendezvous import Rendezvous
from paramserver.distributed.rpc_calls import RemoteError
from paramserver.distributed.session import rpc_shard_server
from paramserver.errors import PeerLost, PeerRefused, TrainingError, UnsupportedConfiguration
from paramserver.optim.shard_updater import ShardUpdater
from paramserver.optim.updater import build_optimizer
from paramserver.parameters.flat import FlatLayout, trainable
from paramserver.parameters.model import build_model
from paramserver.parameters.sharding import States
from paramserver.server.client import ServerClient
from paramserver.task import Task
from paramserver.transport.messages import ApplyRequest, Future, ShardAssignment
from paramserver.transport.rpc import PushAssembly, WireVersion
from paramserver.transport.segments import attach, can_attach
from paramserver.transport.shared_memory import gradients_key


class ShardServer:
    """The handlers that the first server and the trainers call. They never block; errors travel back as values.

    It knows no rules, no schedule and no module buffers: those are with the first server.

    Args:
        task: builds the same model and optimizer as there.
        config: the run's.
        server_index: for messages.
        enrollment: what the first server gave.

    Raises:
        UnsupportedConfiguration: memory must be shared with the first server and cannot be.
    """

    def __init__(self, task: Task, config: Config, server_index: int, enrollment: ShardAssignment) -> None:
        self.config = config
        self.server_index = server_index
        self.version = enrollment.step
        self.finished = threading.Event()
        self.outcome: Decision | RemoteError | None = None
        self._lock = threading.RLock()
        self._whole = enrollment.parameters
        self._segments = self._reachable(enrollment.segments)
        self._segments_key = enrollment.segments_key
        self._shared: dict[int, list[Tensor]] = {}
        self._pushes: dict[int, tuple[int, list[Tensor]]] = {}
        self._arrivals: dict[int, tuple[int, PushAssembly]] = {}
        self._kept: dict[int, list[Tensor]] = {}
        self._snapshot: list[Tensor] | None = None
        self._order: ApplyRequest | None = None
        self._answer: Future | None = None
        self.portion = self._build(task, enrollment)
        own = enrollment.shard.layout
        wire = own.narrowed(getattr(torch, config.server.wire_dtype))
        self._outgoing = WireVersion(own, wire, self._current)

    @property
    def shares_memory(self) -> bool:
        """Whether its ranges are the first server's memory."""
        return self._segments is not None

    def _reachable(self, address: str | None) -> str | None:
        if address is None or can_attach(address, self.config.cluster.timeout_s):
            return address
        if self.config.server.transport == "shared_memory":
            raise UnsupportedConfiguration(
                f"server.transport (shared_memory) must have all ranks on one host; server {self.server_index} cannot "
                "reach the memory of server 0; use auto or rpc"
            )
        return None

    def _build(self, task: Task, enrollment: ShardAssignment) -> ShardUpdater:
        """The model and the optimizer, with the memory of what is owned and without that of all else."""
        model = build_model(task, self.config.seed, CPU)
        parameters = trainable(model)
        if FlatLayout.of(parameters.items(), self.config.server.bucket_bytes) != self._whole:
            raise TrainingError(
                f"server {self.server_index} built another model than server 0; build_model must give the same one in "
                "every process"
            )
        optimizer = build_optimizer(task, model)
        shard = enrollment.shard
        ranges = self._ranges(enrollment)
        portion = ShardUpdater(self._whole, shard, ranges, list(parameters.values()), optimizer)
        views = shard.layout.views(ranges)
        whole = {
            slot.name
            for p, slot in zip(shard.pieces, shard.layout.slots, strict=True)
            if shard.is_whole(p, self._whole)
        }
        for name, parameter in parameters.items():
            parameter.data = views[name] if name in whole else torch.empty(0, dtype=parameter.dtype)
        portion.adopt(enrollment.states)
        return portion

    def _ranges(self, enrollment: ShardAssignment) -> list[Tensor]:
        if self._segments is not None:
            return enrollment.shard.ranges_of(self._attach(self._segments_key))
        ranges = enrollment.shard.layout.allocate()
        for mine, theirs in zip(ranges, enrollment.weights, strict=True):
            mine.copy_(theirs)
        return ranges

    def _attach(self, key: str) -> list[Tensor]:
        assert self._segments is not None
        return attach(self._segments, key, self._whole, self.config.cluster.timeout_s)

    # What trainers call.

    def pull(self, version: int) -> tuple[Tensor, ...]:
        """This shard of a version, inside a trainer's distributed-autograd context."""
        with self._lock:
            current = version == self.version
            flats = self._outgoing.version() if current else self._outgoing.rounded(self._find(version))
        return PushAssembly(self.portion.leaves).edge(flats)

    def look(self, version: int | None) -> tuple[Tensor, ...]:
        """The same without a way back, for validation; None = whatever is current."""
        with self._lock:
            if version is None or version == self.version:
                return tuple(self._outgoing.version())
            return tuple(self._find(version))

    def take_early(self, trainer_index: int, version: int, number: int, gradient: Tensor) -> None:
        """The gradient of flat tensor ``number``, which comes beside the context, before it."""
        with self._lock:
            self._arrivals_of(trainer_index, version).take(number, gradient)

    def _arrivals_of(self, trainer_index: int, version: int) -> PushAssembly:
        """Those of a push; what came for an earlier one of this trainer is let go."""
        known = self._arrivals.get(trainer_index)
        if known is None or known[0] != version:
            known = self._arrivals[trainer_index] = version, PushAssembly(self.portion.leaves)
        return known[1]

    def take_push(self, context_id: int, trainer_index: int, version: int) -> None:
        """The gradients that a context holds are complete; they wait for the order that names them."""
        held = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        with self._lock:
            gradients = self._arrivals_of(trainer_index, version).complete(held)
            if gradients is None:
                raise TrainingError(f"trainer {trainer_index} stepped a context without gradients; call backward first")
            del self._arrivals[trainer_index]
            self._pushes[trainer_index] = version, gradients
            self._go_on()

    def _current(self) -> list[Tensor]:
        if self._snapshot is None:
            self._snapshot = self.portion.clone()
        return self._snapshot

    def _find(self, version: int) -> list[Tensor]:
        if version not in self._kept:
            raise TrainingError(f"server {self.server_index} holds version {self.version}, and {version} no more")
        return self._kept[version]

    # What the first server calls.

    def apply(self, order: ApplyRequest) -> Future:
        """Answered with None when the order's version is made, or with the norm of the gradients before that."""
        with self._lock:
            if order.version != self.version + 1:
                raise TrainingError(
                    f"server {self.server_index} holds version {self.version} and cannot make {order.version}"
                )
            future: Future = torch.futures.Future()
            self._order, self._answer = order, future
            self._go_on()
            return future

    def commit(self, factor: float, groups: list[dict[str, Any]]) -> None:
        """Make the version whose gradients' norm was answered, with the gradients multiplied by ``factor``."""
        with self._lock:
            self.portion.scale(factor)
            self._step(groups)

    def gather(self, weights: bool) -> tuple[list[Tensor] | None, States]:
        """What belongs to a checkpoint, of the current version. Nobody orders the next one meanwhile."""
        with self._lock:
            return self._current() if weights else None, self.portion.owned_states

    def finish(self, outcome: Decision | RemoteError) -> None:
        """The run is over."""
        self.outcome = outcome
        self.finished.set()

    def _go_on(self) -> None:
        """Carry out the order, once all that it names is here."""
        order, future = self._order, self._answer
        if order is None or future is None or any(not self._is_here(*push) for push in order.pushes):
            return
        self._order = self._answer = None
        try:
            answer: Any = self._carry_out(order)
        except Exception as error:  # noqa: BLE001 - it travels to the first server, who ends the run with it
            answer = RemoteError.of(error, f"server {self.server_index}")
        future.set_result(answer)

    def _is_here(self, trainer_index: int, version: int, shared: bool) -> bool:
        return shared or self._pushes.get(trainer_index, (None,))[0] == version

    def _carry_out(self, order: ApplyRequest) -> float | None:
        kept = {self.version: self._current()} if self.version in order.needed else {}
        self._kept = {v: flats for v, flats in self._kept.items() if v in order.needed} | kept
        gradients = [self._gradients(trainer, shared) for trainer, _, shared in order.pushes]
        self.portion.hand_out(self.portion.average(gradients, order.factors), order.used)
        if order.groups is None:
            return self.portion.norm()
        self._step(order.groups)
        return None

    def _gradients(self, trainer_index: int, shared: bool) -> list[Tensor]:
        if not shared:
            return self._pushes.pop(trainer_index)[1]
        if trainer_index not in self._shared:
            self._shared[trainer_index] = self.portion.shard.ranges_of(self._attach(gradients_key(trainer_index)))
        return self._shared[trainer_index]

    def _step(self, groups: list[dict[str, Any]]) -> None:
        self.portion.step(groups)
        self.version += 1
        self._snapshot = None


# A signal to this process is passed on so soon, however seldom its heart beats.
_LOOK_S = 0.2


def serve_shard(process: ProcessContext, task: Task, meeting: Rendezvous) -> Decision:
    """Own a shard until the first server says that the run is over; what ended it.

    Raises:
        ParamserverError: the run failed, here or elsewhere.
    """
    config, index = process.config, process.role.server_index
    assert index is not None
    with ExitStack() as stack:
        name = stack.enter_context(rpc_shard_server(meeting, index))
        remote = stack.enter_context(_first_server(config, index))
        try:
            enrollment: ShardAssignment = remote.call(
                "conductor.enroll", Member(index, name, index, meeting.place, kind="server")
            )
            remote.start_heartbeat()
            server = ShardServer(task, config, index, enrollment)
            rpc_calls.register_server(server)
            stack.callback(rpc_calls.register_server, None)
            remote.call("conductor.ready", index, server.shares_memory)
            return _await_end(server, remote, process)
        except Exception as error:
            _give_up(remote, index, error)
            raise


@contextmanager
def _first_server(config: Config, server_index: int) -> Iterator[ServerClient]:
    remote = ServerClient(config, server_index, "conductor.beat")
    try:
        yield remote
    finally:
        remote.close()
        release_liveness_calls()


def _await_end(server: ShardServer, remote: ServerClient, process: ProcessContext) -> Decision:
    told = False
    while not server.finished.wait(min(process.config.server.heartbeat_s, _LOOK_S)):
        remote.check()
        if process.stop.event.is_set() and not told:
            told = True
            remote.call("conductor.ask_to_stop", process.stop.state()[1])
    outcome: Any = server.outcome
    if isinstance(outcome, RemoteError):
        raise outcome.error()
    assert isinstance(outcome, Decision)
    return outcome


def _give_up(remote: ServerClient, server_index: int, error: Exception) -> None:
    """Tell the first server why this one ends, unless that is how it knows."""
    if isinstance(error, (PeerLost, PeerRefused)):
        return
    remote.call("conductor.give_up", server_index, RemoteError.told_by(f"server {server_index}", error))

"""A shard server: owns a shard of the parameters and applies the updates that server 0 requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor

from paramserver.config import Config
from paramserver.consistency import Decision, PushId, TrainerId
from paramserver.devices import CPU
from paramserver.distributed.rpc_agent import release_context
from paramserver.distributed.rpc_calls import RemoteError, completed_future
from paramserver.errors import Evicted, TrainingError, UnsupportedConfiguration
from paramserver.optim.bucket_updates import BucketUpdates
from paramserver.optim.parallel_step import generators_of_update
from paramserver.optim.shard_updater import ShardUpdater
from paramserver.optim.updater import build_optimizer
from paramserver.parameters.flat import FlatLayout, trainable_parameters
from paramserver.parameters.model import build_model
from paramserver.parameters.sharding import States
from paramserver.server.repeated_calls import repeatable
from paramserver.server.update_executor import SubmitFn, run_now
from paramserver.server.update_pipeline import UpdatePipeline
from paramserver.task import Task
from paramserver.transport.compression import make_codec
from paramserver.transport.messages import ApplyRequest, Future, ShardAssignment
from paramserver.transport.rpc import PushAssembly, WireVersion, without_values
from paramserver.transport.segments import attach, can_attach

log = logging.getLogger("paramserver")

T = TypeVar("T")


@dataclass
class _Preparation:
    """An update that server 0 has begun: ``reply`` gets the names of its pushes once it is computed, or None."""

    trainers: Sequence[int]
    groups: list[dict[str, Any]]
    reply: Future = field(default_factory=torch.futures.Future)
    pushes: tuple[PushId, ...] | None = None
    is_submitted: bool = False

    def request(self, version: int) -> ApplyRequest | None:
        """Return the request for the update, if it is computed and server 0 requests what it has begun."""
        if self.pushes is None:
            return None
        named = tuple((push, None) for push in self.pushes)
        return ApplyRequest(version, named, (1.0,) * len(named), None, self.groups, frozenset())


class ShardServer:
    """The handlers that server 0 and the trainers call. They never block; errors are returned as values.

    Consistency, schedule and module buffers are on server 0. A trainer pushes to every server; an update is applied
    here once both server 0's request and all pushes that it names have arrived, in either order. A message of a process
    in whose place another one has called is refused.

    Where updates are made bucket by bucket, server 0 names the trainers of a step when that begins. Once all of their
    pushes are here and the next version is computed, this server replies with the names of the pushes. If these are the
    update, server 0 makes the version without waiting for another reply. A message for that version may then arrive
    here before the request for the update does; it proves that the version was made, so it is written first.

    The lock covers the tables, and an update is computed without it, in the update thread. Server 0 requests nothing
    else before it has the reply, and grants the version after that, so whatever arrives meanwhile is recorded for later
    or concerns earlier versions, of which a snapshot was retained. The one exception is a version that was prepared: it
    only has to be written, at once and under the lock, as server 0 may have granted it already.

    Args:
        task: builds the same model and optimizer as on server 0.
        config: of the run.
        server_index: at least 1.
        assignment: the reply of server 0 to ``join``.
        view: of server 0.
        submit: runs a job after those that were submitted before: ``UpdateExecutor.submit``. Without it updates are
            computed under the lock, by the handlers.

    Raises:
        UnsupportedConfiguration: the memory of server 0 must be shared and cannot be reached.
    """

    def __init__(
        self,
        task: Task,
        config: Config,
        server_index: int,
        assignment: ShardAssignment,
        view: int = 1,
        submit: SubmitFn = run_now,
    ) -> None:
        self.config = config
        self.server_index = server_index
        self.view = view
        self.version = assignment.step
        self.finished = threading.Event()
        self.outcome: Decision | RemoteError | None = None
        # Held by every handler, and never while an update is computed: RPC worker threads call them concurrently.
        self._lock = threading.RLock()
        self._submit = submit
        self._layout = assignment.parameter_layout
        self._segments_address = self._check_segments(assignment.segments_address)
        self._segments_key = assignment.segments_key
        self._shared_gradients: dict[int, tuple[str, list[Tensor]]] = {}  # by trainer: key of its segment, tensors
        self._incarnations: dict[int, int] = {}  # by trainer: the newest that has called
        self._assemblies: dict[int, tuple[int, PushAssembly]] = {}  # by trainer: version, gradients so far
        self._pushes: dict[int, tuple[PushId, list[Tensor]]] = {}  # by trainer: its last one, gradients until applied
        self._reported: dict[int, PushId] = {}  # by trainer: its last push, if buckets of it are still on their way
        self._pushed: dict[int, int] = {}  # by trainer: the version of its last complete push
        self._retained: dict[int, list[Tensor]] = {}
        self._snapshot: list[Tensor] | None = None
        self._request: ApplyRequest | None = None
        self._reply: torch.futures.Future[float | None] | None = None
        self._preparation: _Preparation | None = None
        self._made_of: set[PushId] = set()  # the pushes of the current version, if it was made bucket by bucket
        self.shard_updater = self._build(task, assignment)
        codec, self._pipeline = make_codec(config.server), None
        if assignment.buckets is not None:
            self._pipeline = UpdatePipeline(BucketUpdates(self.shard_updater, assignment.buckets), codec, submit)
        self._wire = WireVersion((assignment.buckets or assignment.shard).layout, codec, self._current)

    @property
    def shares_memory(self) -> bool:
        """Whether the shard lies in the memory of server 0."""
        return self._segments_address is not None

    def _check_segments(self, address: str | None) -> str | None:
        if address is None or can_attach(address, self.config.cluster.timeout_s):
            return address
        if self.config.server.transport == "shared_memory":
            raise UnsupportedConfiguration(
                f"server.transport (shared_memory) must have all ranks on one host; server {self.server_index} cannot "
                "reach the memory of server 0; use auto or rpc"
            )
        return None

    def _build(self, task: Task, assignment: ShardAssignment) -> ShardUpdater:
        """Build model and optimizer, with memory for the owned parameters only."""
        model = build_model(task, self.config.seed, CPU)
        parameters = trainable_parameters(model)
        if FlatLayout.of(parameters.items(), self.config.server.bucket_bytes) != self._layout:
            raise TrainingError(
                f"server {self.server_index} built another model than server 0; build_model must give the same one in "
                "every process"
            )
        optimizer = build_optimizer(task, model, self.config.training.ema_decay)
        shard = assignment.shard
        if self.shares_memory:
            flats = shard.slice_flats(self._attach(self._segments_key))
        else:
            flats = shard.layout.allocate()
            for own, initial in zip(flats, assignment.weights, strict=True):
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

    def _attach(self, key: str) -> list[Tensor]:
        assert self._segments_address is not None
        return attach(self._segments_address, key, self._layout, self.config.cluster.timeout_s)

    # Handlers that trainers call.

    def pull(self, sender: TrainerId, version: int, held: Collection[int] = ()) -> tuple[Tensor, ...]:
        """Return this shard of a version, recorded in the trainer's distributed-autograd context.

        Those of the buckets ``held``, which the trainer has received already, are empty.
        """
        with self._lock:
            self._admit(sender)
            self._reach(version)
            flats = self._wire.current() if version == self.version else self._wire.encode(self._find(version))
            left_out = held if self._pipeline is not None and version == self.version else ()
        assembly = PushAssembly(self._leaves, self._wire.codec)
        if self._pipeline is None:
            return assembly.pull(without_values(flats, held))
        on_first = partial(self._first_arrived, sender, version)
        return self._pipeline.leave_out(assembly.pull(flats, on_first), left_out)

    @repeatable
    def view_version(self, sender: TrainerId, version: int | None, held: Collection[int] = ()) -> tuple[Tensor, ...]:
        """Return this shard of a version without gradients; None for the current one, and that without ``held``."""
        with self._lock:
            self._admit(sender)
            if version is not None:
                self._reach(version)
            if version is None or version == self.version:
                return tuple(without_values(self._wire.current(), held))
            return tuple(self._find(version))

    @repeatable
    def receive_bucket(
        self, sender: TrainerId, version: int, number: int, gradient: Tensor, revision: int = 0, has_all: bool = True
    ) -> Future:
        """Accept the gradient of range ``number``; see ``ParameterServer.receive_bucket``."""
        with self._lock:
            trainer_index, pipeline = self._admit(sender), self._pipeline
            self._reach(version)
            if pipeline is not None and version < self.version:
                return completed_future(None)  # a repeated message, of an update that has been made since
            if pipeline is not None and self._pushed.get(trainer_index) == version:
                return pipeline.add(trainer_index, number, None)  # a repeated message, of a push that is complete
            if self._is_late(trainer_index, version):
                return completed_future(None)
            kept = self._assembly_of(trainer_index, version).add_bucket(number, gradient, revision)
            if pipeline is None:
                return completed_future(None)
            future = pipeline.add(trainer_index, number, kept, has_all)
            self._accept_if_complete(trainer_index)
            return future

    def _first_arrived(self, sender: TrainerId, version: int, gradient: Tensor) -> None:
        # In a thread of distributed autograd, inside the trainer's backward, which fails with an error from here.
        with self._lock:
            trainer_index = self._admit(sender)
            if self._is_late(trainer_index, version):
                return
            self._assembly_of(trainer_index, version).add_first(gradient)
            self._accept_if_complete(trainer_index)

    @repeatable
    def push_in_place(self, push: PushId, version: int) -> None:
        """Accept a push whose gradients may still be incomplete; they wait for the request that names them."""
        with self._lock:
            trainer_index = self._admit(push)
            if trainer_index in self._pushes and self._pushes[trainer_index][0] == push:
                return  # it was sent again
            if self._is_late(trainer_index, version):
                return
            self._assembly_of(trainer_index, version)
            self._reported[trainer_index] = push
            self._accept_if_complete(trainer_index)

    @repeatable
    def push(self, context_id: int, push: PushId, version: int) -> None:
        """Accept the gradients that a context holds; they wait for the request that names them."""
        with self._lock:
            trainer_index = self._admit(push)
            if trainer_index in self._pushes and self._pushes[trainer_index][0] == push:
                return  # it was sent again
            if self._is_late(trainer_index, version):
                return
            # Handed over before the trainer's context ends, which would release them.
            held = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
            if self._assembly_of(trainer_index, version).complete(held) is None:
                raise TrainingError(f"trainer {trainer_index} stepped a context without gradients; call backward first")
            self._reported[trainer_index] = push
            self._accept_if_complete(trainer_index)

    def _accept_if_complete(self, trainer_index: int) -> None:
        """Accept a push that was reported once its buckets are here; some may still be on their way."""
        push = self._reported.get(trainer_index)
        version, assembly = self._assemblies[trainer_index]
        gradients = None if push is None else assembly.complete({})
        if push is None or gradients is None:
            return
        del self._assemblies[trainer_index], self._reported[trainer_index]
        self._pushes[trainer_index] = push, gradients
        self._pushed[trainer_index] = version
        if self._request is None:
            self._prepare()
        else:
            self._process()

    def _admit(self, sender: TrainerId) -> int:
        """Return the index of a trainer that calls. The first call of a new incarnation replaces the earlier one.

        Raises:
            Evicted: another process has taken its place, or it joined an earlier server 0.
        """
        index, known = sender.trainer_index, self._incarnations.get(sender.trainer_index, 0)
        if sender.view != self.view or sender.incarnation < known:
            raise Evicted(f"another process has taken the place of trainer {index}")
        if sender.incarnation > known:
            self._incarnations[index] = sender.incarnation
            for table in (self._assemblies, self._reported, self._pushed):
                table.pop(index, None)
        return index

    def _is_late(self, trainer_index: int, version: int) -> bool:
        """Return whether a message is of an earlier push than the trainer's present one; no caller waits for its reply.

        The versions of a trainer's pushes grow, and the network may hold a repeated message back.
        """
        present = self._assemblies.get(trainer_index)
        return version < max(self._pushed.get(trainer_index, 0), 0 if present is None else present[0])

    def _assembly_of(self, trainer_index: int, version: int) -> PushAssembly:
        """Return the assembly of a push that is not late; one for an earlier version of the trainer is discarded."""
        known = self._assemblies.get(trainer_index)
        if known is None or known[0] < version:
            known = self._assemblies[trainer_index] = version, PushAssembly(self._leaves, self._wire.codec)
        return known[1]

    @property
    def _leaves(self) -> list[Tensor]:
        return self.shard_updater.leaves if self._pipeline is None else self._pipeline.updates.leaves

    def _current(self) -> list[Tensor]:
        if self._pipeline is not None:
            return self._pipeline.snapshot()
        if self._snapshot is None:
            self._snapshot = self.shard_updater.clone()
        return self._snapshot

    def _find(self, version: int) -> list[Tensor]:
        if version not in self._retained:
            raise TrainingError(f"server {self.server_index} holds version {self.version}, and {version} no more")
        return self._retained[version]

    # Handlers that server 0 calls.

    def begin_update(self, version: int, trainers: Sequence[int], groups: list[dict[str, Any]]) -> Future:
        """Update the buckets of ``version`` from now on as soon as the gradients of these trainers are here.

        Reply with the names of their pushes once the next version is computed; with None if it is made otherwise.
        """
        with self._lock:
            self._reach(version)
            if self._pipeline is None or version != self.version:
                return completed_future(None)
            self._end_preparation()
            self._pipeline.begin(trainers, groups)
            preparation = self._preparation = _Preparation(trainers, groups)
            self._prepare()
            return preparation.reply

    def _prepare(self) -> None:
        """Compute the next version, and report it, if the pushes of all its trainers are here."""
        preparation, pipeline = self._preparation, self._pipeline
        if preparation is None or preparation.is_submitted:
            return
        if any(self._pushed.get(index) != self.version for index in preparation.trainers):
            return
        assert pipeline is not None
        if not pipeline.updates.possible:
            return  # the optimizer is stepped once, when server 0 requests it
        preparation.is_submitted = True
        pushes = [self._pushes[index] for index in preparation.trainers]

        def prepare() -> None:
            try:
                pipeline.prepare([gradients for _, gradients in pushes])
            except BaseException as error:  # noqa: BLE001 - the update computes it again, and its error is the reply
                log.debug("server %d computes the version with its update: %s", self.server_index, error)
                return
            with self._lock:
                # The request may have been here first, and the version been made by it.
                if preparation is self._preparation:
                    preparation.pushes = tuple(push for push, _ in pushes)
                    preparation.reply.set_result(preparation.pushes)

        self._submit(prepare)

    def _reach(self, version: int) -> None:
        """Make the version that was prepared if this one is called for: server 0 has made it."""
        request = None if self._preparation is None else self._preparation.request(version)
        if request is not None and version == self.version + 1:
            # Every bucket is computed, so this only writes, and no job is left that reads.
            self._prepare_memory(request)
            self._make(request, self._take_gradients(request))
            self._made(request)

    def _end_preparation(self) -> None:
        if self._preparation is not None and self._preparation.pushes is None:
            self._preparation.reply.set_result(None)
        self._preparation = None

    def apply(self, request: ApplyRequest) -> torch.futures.Future[float | None]:
        """Reply with None once the version is made; with clipping, with the norm of the gradients before that."""
        with self._lock:
            if request.version == self.version and {push for push, _ in request.pushes} == self._made_of:
                return completed_future(None)  # a message for this version arrived before its request
            if self._preparation is not None and self._preparation.request(request.version) == request:
                self._reach(request.version)  # at once: server 0 may have granted the version already
                return completed_future(None)
            if request.version != self.version + 1:
                raise TrainingError(
                    f"server {self.server_index} holds version {self.version} and cannot make {request.version}"
                )
            future: torch.futures.Future[float | None] = torch.futures.Future()
            self._request, self._reply = request, future
            self._process()
            return future

    def apply_clipped(self, factor: float, groups: Sequence[Mapping[str, Any]]) -> torch.futures.Future[None]:
        """Make the version whose norm was the reply of ``apply``, with the gradients multiplied by ``factor``."""
        future: torch.futures.Future[None] = torch.futures.Future()

        def step() -> None:
            self.shard_updater.scale(factor)
            with self._generators(self.version + 1):
                self.shard_updater.step(groups)

        def made(_: None) -> None:
            self.version += 1
            self._snapshot = None
            future.set_result(None)

        self._compute(step, made, future)
        return future

    def collect_state(self, weights: bool) -> tuple[list[Tensor] | None, States]:
        """Return what a checkpoint stores of this shard. Server 0 requests no update meanwhile."""
        with self._lock:
            return self.shard_updater.clone() if weights else None, self.shard_updater.owned_states

    def release_context(self, context_id: int) -> None:
        """Release a context of distributed autograd whose process is dead."""
        release_context(context_id)

    def finish(self, outcome: Decision | RemoteError) -> None:
        """The run has ended."""
        self.outcome = outcome
        with self._lock:
            self._end_preparation()
            waiting = [] if self._pipeline is None else self._pipeline.pop_waiters()
        for future in waiting:
            future.set_result(None)  # server 0 replies to the push
        self.finished.set()

    def _process(self) -> None:
        """Apply the requested update once all pushes that it names have arrived."""
        request, future = self._request, self._reply
        if request is None or future is None:
            return
        arrived = {push for push, _ in self._pushes.values()}
        if any(key is None and push not in arrived for push, key in request.pushes):
            return
        self._request = self._reply = None
        self._end_preparation()
        self._prepare_memory(request)
        taken = self._take_gradients(request)

        def made(reply: float | None) -> None:
            if request.groups is not None:
                self._made(request)
            future.set_result(reply)

        self._compute(partial(self._make, request, taken), made, future)

    def _compute(self, work: Callable[[], T], then: Callable[[T], None], reply: Future) -> None:
        """Run ``work`` without the lock, after what was submitted before, and then ``then`` with it.

        An error is the value of ``reply``, with which server 0 ends the run.
        """

        def job() -> None:
            try:
                result = work()
                with self._lock:
                    then(result)
            except BaseException as error:  # noqa: BLE001 - returned to server 0; the thread must continue
                reply.set_result(RemoteError.of(error, f"server {self.server_index}"))

        self._submit(job)

    def _prepare_memory(self, request: ApplyRequest) -> None:
        """Retain the versions that trainers may still pull. Called with the lock held."""
        in_use = request.retained_versions
        # Before the optimizer writes: trainers that were granted the current version may still pull it.
        current = {self.version: self._current()} if self.version in in_use else {}
        self._retained = {v: flats for v, flats in self._retained.items() if v in in_use} | current

    def _take_gradients(self, request: ApplyRequest) -> dict[PushId, list[Tensor]]:
        """Return the gradients of the pushes that were sent. Called with the lock held: other pushes replace them."""
        taken = {}
        for push, segment_key in request.pushes:
            if segment_key is None:
                taken[push] = self._pushes[push.trainer_index][1]
                self._pushes[push.trainer_index] = push, []
        return taken

    def _make(self, request: ApplyRequest, taken: Mapping[PushId, list[Tensor]]) -> float | None:
        """Make the version, or return the norm of the gradients if it is clipped by that."""
        gradients = [self._shared(push, key) if key is not None else taken[push] for push, key in request.pushes]
        if self._is_by_bucket(request):
            assert self._pipeline is not None
            cut, keys = self._pipeline.updates.cut, [key for _, key in request.pushes]
            in_buckets = [own if key is None else cut(own) for key, own in zip(keys, gradients, strict=True)]
            with self._generators(request.version):
                self._pipeline.commit(in_buckets, request.used, request.groups)
            return None
        self.shard_updater.assign_gradients(self.shard_updater.average(gradients, request.factors), request.used)
        if request.groups is None:
            return self.shard_updater.norm()
        with self._generators(request.version):
            self.shard_updater.step(request.groups)
        if self._pipeline is not None:
            self._pipeline.version_changed()
        return None

    def _generators(self, version: int) -> AbstractContextManager[None]:
        return generators_of_update(self.shard_updater.optimizer, self.config.seed, version, self.server_index)

    def _made(self, request: ApplyRequest) -> None:
        """The version that was requested is made. Called with the lock held."""
        if self._is_by_bucket(request):
            self._made_of = {push for push, _ in request.pushes}
        self._end_preparation()
        self._snapshot = None
        self.version += 1

    def _is_by_bucket(self, request: ApplyRequest) -> bool:
        return self._pipeline is not None and any(key is None for _, key in request.pushes)

    def _shared(self, push: PushId, segment_key: str) -> list[Tensor]:
        """Return the gradients of a push that are in shared memory."""
        # Attached at the first push: a segment exists only once its trainer shares memory. A process that takes the
        # place of a trainer has a segment of its own.
        trainer_index = push.trainer_index
        known = self._shared_gradients.get(trainer_index)
        if known is None or known[0] != segment_key:
            flats = self.shard_updater.shard.slice_flats(self._attach(segment_key))
            known = self._shared_gradients[trainer_index] = segment_key, flats
        return known[1]

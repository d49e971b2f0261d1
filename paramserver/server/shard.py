"""The parameters that one server owns: their versions, the gradients for them, and the updates that they make."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from paramserver.consistency import PushId, TrainerId
from paramserver.distributed.rpc_calls import RemoteError, completed_future, repeatable
from paramserver.errors import Evicted, TrainingError
from paramserver.metrics.profile import spanned
from paramserver.optim.clipping import Clipping
from paramserver.optim.parallel_step import WORTHWHILE_BYTES, ThreadTeam
from paramserver.optim.shard_updater import WEIGHT, ShardUpdater
from paramserver.parameters.sharding import Shard
from paramserver.parameters.tables import RowSegment, slice_gradient
from paramserver.server.server_run import SubmitFn, run_now
from paramserver.server.update_pipeline import BucketUpdates, UpdatePipeline
from paramserver.transport.autograd import pull
from paramserver.transport.compression import CastCodec, Compressor
from paramserver.transport.messages import ApplyRequest, Future, ShardState, SnapshotTensor
from paramserver.transport.rpc import PushAssembly, WireVersion, leave_out

log = logging.getLogger("paramserver")

T = TypeVar("T")

_Place = tuple[int, int]
"""Of a push among those of its trainer: the version that it is for, and its number."""


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


class ShardHandlers:
    """The handlers that every server has for its shard; server 0, whose trainers take part in more, overrides them."""

    shard: ParameterShard
    _lock: threading.RLock

    def pull(
        self, sender: PushId, version: int, received: Collection[int] = (), recorded: bool = True
    ) -> tuple[Tensor, ...]:
        """Return the server's shard of a version, with ``recorded`` in the trainer's distributed-autograd context.

        See ``ParameterShard.pull``.
        """
        with self._lock:
            return self.shard.pull(sender, version, received, recorded)

    @repeatable
    def receive_bucket(
        self, sender: PushId, version: int, number: int, gradient: Tensor, revision: int = 0, has_all: bool = True
    ) -> Future:
        """Accept a part of a push while the trainer's backward continues; see ``ParameterShard.receive_bucket``."""
        with self._lock:
            return self.shard.receive_bucket(sender, version, number, gradient, revision, has_all)

    @repeatable
    def look_up(self, sender: TrainerId, version: int | None, rows: Mapping[int, Tensor]) -> Future:
        """Reply with rows of embedding tables, outside of the trainer's context; see ``ParameterShard.look_up``."""
        with self._lock:
            return self.shard.look_up(sender, version, rows)


class ParameterShard:
    """Owns the parameters of one server. Server 0 has one too, and drives all of them; see ``Updates``.

    A trainer sends its gradients to every server, in parts that arrive in any order, and reports the push. It is
    complete with the last of these, and waits for the request that names it: ``apply`` makes the next version. A
    message of a process in whose place another one has called is refused.

    Where updates are made bucket by bucket, server 0 names the trainers of a step when that begins. Once all of their
    pushes are here and the next version is computed, another server replies with the names of the pushes. If these are
    the update, server 0 makes the version without waiting for another reply. A message for that version may then arrive
    here before the request for the update does; it proves that the version was made, so it is written first.

    Every method is called with the lock of the server that owns it. An update is computed without it, by jobs: server 0
    requests nothing else before it has the reply, and grants the version after that, so whatever arrives meanwhile is
    recorded for later or concerns earlier versions, of which a snapshot was retained. The one exception is a version
    that was prepared: it only has to be written, at once and under the lock, as server 0 may have granted it already.

    Args:
        updater: steps the optimizer over the parameters, and holds their memory.
        buckets: the same parameters in ranges that are updated as their gradients arrive; None if all are updated
            together.
        attach: returns the flat tensors of all parameters in a segment of gradients, by its key.
        snapshot: returns a copy of the parameters, if the owner keeps one that is the same; ``updater.clone``.
        compressor: of the gradients that trainers send; None if they are sent as they are.
        step_scope: returns a context for each step of the optimizer.
    """

    def __init__(
        self,
        updater: ShardUpdater,
        codec: CastCodec,
        lock: threading.RLock,
        version: int,
        buckets: Shard | None = None,
        submit: SubmitFn = run_now,
        server_index: int = 0,
        generation: int = 1,
        seed: int = 0,
        clipping: Clipping | None = None,
        attach: Callable[[str], list[Tensor]] | None = None,
        snapshot: Callable[[], list[Tensor]] | None = None,
        compressor: Compressor | None = None,
        step_scope: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.updater = updater
        self.version = version
        self.server_index = server_index
        self.on_push: Callable[[PushId], None] = lambda push: None  # called with each push that is complete
        self._lock = lock
        self._submit = submit
        self._generation = generation
        self._seed = seed
        self._clipping = clipping
        self._attach = attach
        self._step_scope = step_scope
        self._copy = snapshot or updater.clone
        # Of each trainer, by its index.
        self._incarnations: dict[int, int] = {}  # the newest that has called
        self._assemblies: dict[int, tuple[_Place, PushAssembly]] = {}  # place and gradients of its present push
        self._reported: dict[int, PushId] = {}  # its present push, if parts of it are still on their way
        self._pushes: dict[int, tuple[PushId, list[Tensor]]] = {}  # its last complete one, gradients until applied
        self._pushed: dict[int, _Place] = {}  # the place of that
        # Key and ranges of its shared gradients, and those of tables.
        self._segments: dict[int, tuple[str, list[Tensor], RowSegment]] = {}
        # Versions.
        self._retained: dict[int, list[Tensor]] = {}
        self._snapshot: list[Tensor] | None = None
        # The update in progress.
        self._request: ApplyRequest | None = None
        self._reply: Future | None = None
        self._measured: ApplyRequest | None = None  # that is clipped next
        self._is_partial = False  # gradients of the next version were added to its sum; of the jobs only
        self._num_computing = 0  # jobs without the lock that have not ended
        self._preparation: _Preparation | None = None
        self._made_of: set[PushId] = set()  # the pushes of the current version, if it was made bucket by bucket
        self.pipeline = None
        if buckets is not None:
            self.pipeline = UpdatePipeline(BucketUpdates(updater, buckets), codec, submit)
        self._decompress = None
        if compressor is not None:
            sent = buckets or updater.shard
            lengths = [sent.lengths_of_range(number) for number in range(len(sent.ranges))]
            self._decompress = lambda number, encoded, dtype: compressor.decode(encoded, lengths[number], dtype)
        self._wire = WireVersion((buckets or updater.shard).layout, codec, self._current)

    @property
    def leaves(self) -> list[Tensor]:
        """The leaves of distributed autograd that the gradients of what ``pull`` returns are for."""
        return self.updater.leaves if self.pipeline is None else self.pipeline.updates.leaves

    # Versions.

    def sent_version(self) -> list[Tensor]:
        """Return the current version in the form in which it is sent, immutable."""
        return self._wire.current()

    @spanned("pull")
    def pull(
        self, sender: PushId, version: int, received: Collection[int] = (), recorded: bool = True
    ) -> tuple[Tensor, ...]:
        """Return a version for the push ``sender``.

        With ``recorded`` the gradient of the first tensor returns by distributed autograd; else it is sent as a bucket.

        The version is the current one, or one that is retained. In the place of what the trainer has ``received``
        already of the current one are empty tensors for buckets that were sent early, and where there are no such
        updates tensors without values.
        """
        self.admit(sender)
        self._reach(version)
        flats = self.sent_version() if version == self.version else self._wire.encode(self._find(version))
        if self.pipeline is None:
            flats = leave_out(flats, received)
        if recorded:
            # The gradient of the first tensor is complete last. The others are sent in messages, during the backward.
            flats = [*pull(self.leaves[:1], flats[:1], partial(self._first_arrived, sender, version)), *flats[1:]]
        if self.pipeline is None or version != self.version:
            return tuple(flats)
        return self.pipeline.leave_out(flats, received)

    def view_version(self, version: int | None, without: Collection[int] = ()) -> tuple[Tensor, ...]:
        """Return a version without gradients; None for the current one, and that without the values of ``without``."""
        if version is not None:
            self._reach(version)
        if version is None or version == self.version:
            return tuple(leave_out(self.sent_version(), without))
        return tuple(self._find(version))

    def look_up(self, sender: TrainerId, version: int | None, rows: Mapping[int, Tensor]) -> Future:
        """Reply with rows of embedding tables.

        They are given and returned by range, in each of which rows are numbered from its start. ``version``
        is the only one that the server may have while trainers take steps together. None is for the current one: the
        next version if that is being computed.

        Raises:
            TrainingError: the version is not ``version``.
        """
        self.admit(sender)
        if version not in (None, self.version):
            raise TrainingError(
                f"server {self.server_index} holds version {self.version}, and rows of {version} no more"
            )

        def read() -> dict[int, Tensor]:
            return {number: self.updater.look_up(number, own) for number, own in rows.items()}

        # A row is never read while the optimizer may write it, and no handler waits for that.
        reply: Future = torch.futures.Future()
        if self._num_computing:
            self._compute(read, reply.set_result, reply)
        else:
            reply.set_result(read())
        return reply

    def _current(self) -> list[Tensor]:
        if self.pipeline is not None:
            return self.pipeline.snapshot()
        if self._snapshot is None:
            self._snapshot = self._copy()
        return self._snapshot

    def _find(self, version: int) -> list[Tensor]:
        if version not in self._retained:
            raise TrainingError(f"server {self.server_index} holds version {self.version}, and {version} no more")
        return self._retained[version]

    # Gradients.

    @spanned("push")
    def receive_bucket(
        self, sender: PushId, version: int, number: int, gradient: Tensor, revision: int = 0, has_all: bool = True
    ) -> Future:
        """Accept the gradient of range ``number``, which may arrive before the report of its push and after it.

        Reply with the next version of the bucket, or with None, at once where updates are not made bucket by bucket.
        The gradient is zero for parameters that have none; ``has_all`` is whether all have one. The revision is 0, and
        one more if the gradient has changed after it was sent.
        """
        trainer_index, pipeline = self.admit(sender), self.pipeline
        self._reach(version)
        if pipeline is not None and version == self.version and self._has_pushed(trainer_index):
            return pipeline.add(trainer_index, number, None)  # a repeated message, of a push that is complete
        if self.is_late(sender, version) or (pipeline is not None and version < self.version):
            return completed_future(None)  # a repeated message, of an update that has been made since
        kept = self._assembly_of(sender, version).add_bucket(number, gradient, revision)
        # The next pull returns a first bucket that is compressed.
        if pipeline is None or (not number and self._decompress is not None):
            self._accept_if_complete(trainer_index)
            return completed_future(None)
        future = pipeline.add(trainer_index, number, kept, has_all)
        self._accept_if_complete(trainer_index)
        return future

    def _first_arrived(self, sender: PushId, version: int, gradient: Tensor) -> None:
        # In a thread of distributed autograd, inside the trainer's backward, which fails with an error from here.
        with self._lock:
            trainer_index = self.admit(sender)
            if not self.is_late(sender, version):
                assembly = self._assembly_of(sender, version)
                if self._decompress is None:  # otherwise it has no values, and is sent in a bucket too
                    kept = assembly.add_bucket(0, gradient)
                    if self.pipeline is not None and version == self.version:
                        # Whether each parameter has a gradient is not known, so it is computed with the commit.
                        self.pipeline.add(trainer_index, 0, kept, has_all=False)
                self._accept_if_complete(trainer_index)

    @spanned("push")
    def report_push(self, push: PushId, version: int) -> None:
        """Accept the report of a push; it is complete once its gradients are here, now or later."""
        trainer_index = self.admit(push)
        if self.is_late(push, version):
            return  # it was sent again
        self._assembly_of(push, version)
        self._reported[trainer_index] = push
        self._accept_if_complete(trainer_index)

    def accept(self, push: PushId, version: int, gradients: list[Tensor]) -> None:
        """Accept a push together with all of its gradients."""
        self._pushes[push.trainer_index] = push, gradients
        self._pushed[push.trainer_index] = version, push.sequence
        self.on_push(push)
        if self._request is None:
            self._prepare()
        else:
            self._process()

    def _accept_if_complete(self, trainer_index: int) -> None:
        push = self._reported.get(trainer_index)
        (version, _), assembly = self._assemblies[trainer_index]
        gradients = None if push is None else assembly.complete()
        if push is None or gradients is None:
            return
        del self._assemblies[trainer_index], self._reported[trainer_index]
        self.accept(push, version, gradients)

    def admit(self, sender: TrainerId) -> int:
        """Return the index of a trainer that calls. The first call of a new incarnation replaces the earlier one.

        Raises:
            Evicted: another process has taken its place, or it joined an earlier server 0.
        """
        index, known = sender.trainer_index, self._incarnations.get(sender.trainer_index, 0)
        if sender.generation != self._generation or sender.incarnation < known:
            raise Evicted(f"another process has taken the place of trainer {index}")
        if sender.incarnation > known:
            self._incarnations[index] = sender.incarnation
            self.discard_incomplete(index)
            self._pushed.pop(index, None)
        return index

    def discard_incomplete(self, trainer_index: int) -> None:
        """Discard the push of a trainer that is not complete; one that is complete stays."""
        self._assemblies.pop(trainer_index, None)
        self._reported.pop(trainer_index, None)

    def is_late(self, sender: PushId, version: int) -> bool:
        """Return whether a message is of a push that is complete, or of an earlier one; no caller waits for its reply.

        The versions of a trainer's pushes never shrink, nor do the numbers of those for one version, and the network
        may hold a repeated message back.
        """
        place, index = (version, sender.sequence), sender.trainer_index
        present = self._assemblies.get(index)
        return place <= self._pushed.get(index, (-1, 0)) or (present is not None and place < present[0])

    def _assembly_of(self, sender: PushId, version: int) -> PushAssembly:
        """Return the assembly of a push that is not late; one for an earlier push of the trainer is discarded."""
        place, index = (version, sender.sequence), sender.trainer_index
        known = self._assemblies.get(index)
        if known is None or known[0] < place:
            self._reported.pop(index, None)  # server 0 has dropped it without the gradients of this server
            known = self._assemblies[index] = place, PushAssembly(self.leaves, self._wire.codec, self._decompress)
        return known[1]

    def _has_pushed(self, trainer_index: int) -> bool:
        """Whether a push of a trainer for the current version is complete."""
        return self._pushed.get(trainer_index, (-1, 0))[0] == self.version

    # Updates in advance.

    def begin_update(self, version: int, trainers: Sequence[int], groups: list[dict[str, Any]]) -> Future:
        """Begin, and compute the next version when all pushes are here.

        Reply with the names of the pushes once it is computed; with None if it is made otherwise.
        """
        self._reach(version)
        if self.pipeline is None or version != self.version:
            return completed_future(None)
        self._end_preparation()
        self.pipeline.begin(trainers, groups)
        preparation = self._preparation = _Preparation(trainers, groups)
        self._prepare()
        return preparation.reply

    def abandon_update(self) -> None:
        """Compute nothing in advance any more, as a trainer is lost; callers that wait for buckets get None."""
        if self.pipeline is not None:
            self.pipeline.abandon_update()

    def _prepare(self) -> None:
        """Compute the next version, and report it, if the pushes of all its trainers are here."""
        preparation, pipeline = self._preparation, self.pipeline
        if preparation is None or preparation.is_submitted:
            return
        if not all(map(self._has_pushed, preparation.trainers)):
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
            self._retain(request)
            self._make(request, self.take_gradients(request))
            self._made(request)

    def _end_preparation(self) -> None:
        if self._preparation is not None and self._preparation.pushes is None:
            self._preparation.reply.set_result(None)
        self._preparation = None

    # Updates.

    def apply(self, request: ApplyRequest) -> Future:
        """Reply with None once the version is made; with clipping, with the norm of the gradients before that."""
        if request.version == self.version and {push for push, _ in request.pushes} == self._made_of:
            return completed_future(None)  # a message for this version arrived before its request
        if self._preparation is not None and self._preparation.request(request.version) == request:
            self._reach(request.version)  # at once: server 0 may have granted the version already
            return completed_future(None)
        if request.version != self.version + 1:
            raise TrainingError(
                f"server {self.server_index} holds version {self.version} and cannot make {request.version}"
            )
        reply = self._reply = torch.futures.Future()
        self._request = request
        self._process()
        return reply

    def apply_clipped(self, norm: Tensor) -> Future:
        """Make the version whose request was replied to, with the gradients clipped by their norm on all servers."""
        reply: Future = torch.futures.Future()
        request, clipping = self._measured, self._clipping
        assert request is not None
        assert clipping is not None

        @spanned("apply")
        def step() -> None:
            self.updater.clip(clipping, norm)
            self._step(request.version, request.groups)

        def made(_: None) -> None:
            self._made(request)
            reply.set_result(None)

        self._compute(step, made, reply)
        return reply

    def _process(self) -> None:
        """Apply the requested update once all pushes that it names have arrived."""
        request, reply = self._request, self._reply
        if request is None or reply is None:
            return
        arrived = {push for push, _ in self._pushes.values()}
        if any(key is None and push not in arrived for push, key in request.pushes):
            return
        self._request = self._reply = None
        self._measured = request
        self._end_preparation()
        self._retain(request)
        taken = self.take_gradients(request)

        def made(norm: Tensor | None) -> None:
            if norm is None and request.completes:
                self._made(request)
            reply.set_result(norm)

        self._compute(partial(self._make, request, taken), made, reply)

    def _compute(self, work: Callable[[], T], then: Callable[[T], None], reply: Future) -> None:
        """Run ``work`` without the lock, after what was submitted before, and then ``then`` with it.

        An error is the value of ``reply``, with which server 0 ends the run.
        """

        def job() -> None:
            try:
                result = work()
                with self._lock:
                    self._num_computing -= 1
                    then(result)
            except BaseException as error:  # noqa: BLE001 - returned to server 0; the thread must continue
                # No row is looked up any more: the run fails.
                who = f"server {self.server_index}" if self.server_index else "the server"
                reply.set_result(RemoteError.of(error, who))

        self._num_computing += 1
        self._submit(job)

    def _retain(self, request: ApplyRequest) -> None:
        """Retain the versions that trainers may still pull, before the optimizer writes. Release every other one."""
        in_use = request.retained_versions
        current = {self.version: self._current()} if self.version in in_use else {}
        self._retained = {v: flats for v, flats in self._retained.items() if v in in_use} | current
        # Also what is pulled while the optimizer writes: the version is current until it is done.
        self._snapshot = current.get(self.version)

    def take_gradients(self, request: ApplyRequest) -> dict[PushId, list[Tensor]]:
        """Return the gradients of the pushes that were sent. Called with the lock held: other pushes replace them."""
        taken = {}
        for push, segment_key in request.pushes:
            if segment_key is None:
                taken[push] = self._pushes[push.trainer_index][1]
                self._pushes[push.trainer_index] = push, []
        return taken

    @spanned("apply")
    def _make(self, request: ApplyRequest, taken: Mapping[PushId, list[Tensor]]) -> Tensor | None:
        """Make the version, or return the norm of the gradients if they are to be clipped."""
        gradients = [self._shared(push, key) if key is not None else taken[push] for push, key in request.pushes]
        if self._is_by_bucket(request):
            assert self.pipeline is not None
            cut, keys = self.pipeline.updates.cut, [key for _, key in request.pushes]
            in_buckets = [own if key is None else cut(own) for key, own in zip(keys, gradients, strict=True)]
            with self.updater.generators(self._seed, request.version, self.server_index):
                self.pipeline.commit(in_buckets, request.used, request.groups)
            return None
        if self._is_partial or not request.completes:
            self.updater.accumulate(gradients, request.factors)
            self._is_partial = not request.completes
            if self._is_partial:
                return None
            mean = self.updater.pop_average()
        else:
            mean = self.updater.average(gradients, request.factors)
        self.updater.assign_gradients(mean, request.used)
        if self._clipping is not None:
            return self.updater.measure(self._clipping)
        self._step(request.version, request.groups)
        if self.pipeline is not None:
            self.pipeline.version_changed()
        return None

    def _step(self, version: int, groups: Sequence[Mapping[str, Any]] | None) -> None:
        with self.updater.generators(self._seed, version, self.server_index), self._step_scope():
            self.updater.step(groups, version)

    def _made(self, request: ApplyRequest) -> None:
        """The version that was requested is made. Called with the lock held."""
        if self._is_by_bucket(request):
            self._made_of = {push for push, _ in request.pushes}
        self._end_preparation()
        # What was read while the optimizer wrote is of no version.
        self._snapshot = None
        self.version += 1

    def _is_by_bucket(self, request: ApplyRequest) -> bool:
        # Shared memory holds gradients in one piece, and not in buckets.
        return self.pipeline is not None and any(key is None for _, key in request.pushes)

    def _shared(self, push: PushId, segment_key: str) -> list[Tensor]:
        """Return the gradients of a push that are in shared memory."""
        # Attached at the first push: a segment exists only once its trainer shares memory. A process that takes the
        # place of a trainer has a segment of its own.
        trainer_index = push.trainer_index
        known = self._segments.get(trainer_index)
        if known is None or known[0] != segment_key:
            assert self._attach is not None
            flats = self._attach(segment_key)
            rows = RowSegment(self.updater.layout, flats)
            known = self._segments[trainer_index] = segment_key, self.updater.shard.slice_flats(flats), rows
        _, own, rows = known
        tables = {number: slice_gradient(rows.read(own.slot), own.rows) for number, own in self.updater.tables.items()}
        # Without a copy, unless the parameters are on a GPU.
        pairs = enumerate(zip(own, self.updater.ranges, strict=True))
        return [tables.get(number, flat).to(parameters.device) for number, (flat, parameters) in pairs]

    def use_threads(self, team: ThreadTeam) -> None:
        """Make updates with all threads of ``team``, unless the shard is too small for that, or on a GPU."""
        ranges = self.updater.ranges
        if ranges and ranges[0].device.type == "cpu" and self.updater.shard.layout.total_bytes >= WORTHWHILE_BYTES:
            self.updater.use_threads(team)

    # The end.

    def collect_state(self, weights: bool, snapshot: int | None = None, states: bool = True) -> ShardState:
        """Return what a checkpoint stores of this shard, or no ``states``. Server 0 requests no update meanwhile.

        With the number of a ``snapshot`` large tables are not copied: ``read_rows`` reads their rows from it until
        ``delete_snapshot``, while updates continue.
        """
        owned, tables = self.updater.owned_states if states else {}, {}
        if snapshot is not None:
            self.updater.snapshots[snapshot] = self.updater.snapshot_tables()
            for slot, taken in self.updater.snapshots[snapshot].items():
                described = {n: SnapshotTensor(slot, n, tuple(t.shape), t.dtype) for n, t in taken.tensors.items()}
                tables[slot] = described.pop(WEIGHT)
                if (index := self.updater.optimizer_indices[slot]) in owned:
                    owned[index] = {**owned[index], **described}
        copies: list[Tensor | None] | None = None
        if weights:
            kept = {number for number, own in self.updater.tables.items() if own.slot in tables}
            copies = [None if n in kept else flat.detach().clone() for n, flat in enumerate(self.updater.ranges)]
        return ShardState(copies, owned, tables)

    def read_rows(self, snapshot: int, rows: SnapshotTensor, first: int, end: int) -> Tensor:
        """Return rows of a snapshot; the next ones are read next. The lock need not be held.

        Raises:
            TrainingError: the snapshot is released.
        """
        tables = self.updater.snapshots.get(snapshot)
        if tables is None:
            raise TrainingError(f"server {self.server_index} has no snapshot {snapshot} of its tables any more")
        return tables[rows.slot].read(rows.name, first, end)

    def delete_snapshot(self, snapshot: int) -> None:
        """Delete a snapshot: the checkpoint is written, or will not be."""
        self.updater.snapshots.pop(snapshot, None)

    def pop_waiters(self) -> list[Future]:
        """Remove and return the futures of all calls that wait, as the run ends; the caller replies to them."""
        self._end_preparation()
        return [] if self.pipeline is None else self.pipeline.pop_waiters()

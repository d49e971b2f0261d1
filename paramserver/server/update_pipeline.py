"""The next version of a server's shard, made bucket by bucket while gradients still arrive.

Nothing of a version changes before ``BucketUpdates.write``: what is computed before that is in tensors of its own, and
is dropped if the update is abandoned.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paramserver.config import Config, is_colocated
from paramserver.consistency.factory import why_never_by_bucket
from paramserver.metrics.profile import spanned
from paramserver.optim.clipping import Clipping
from paramserver.optim.named_optimizers import optimizers_of
from paramserver.optim.parallel_step import ELEMENTWISE, ParallelStep, copy_optimizer
from paramserver.optim.shard_updater import ShardUpdater
from paramserver.optim.updater import Updater
from paramserver.parameters.flat import FlatLayout, TensorSlot, gradient_leaf
from paramserver.parameters.numerics import mean_in_order
from paramserver.parameters.sharding import Shard, State, get_hyperparameters, split_ranges
from paramserver.server.server_run import SubmitFn, run_now
from paramserver.transport.compression import CastCodec, block_of
from paramserver.transport.messages import Future

log = logging.getLogger("paramserver")

# Of a shard, without ``server.bucket_mb``. More buckets overlap more of the update with its transfer, and cost more
# messages; larger ones than these gain nothing.
_BUCKETS, _LEAST_BYTES, _MOST_BYTES = 10, 128 * 2**10, 4 * 2**20
# Where servers share the hosts of trainers, less is sent over the network, and messages take the CPU of trainers.
_COLOCATED_BUCKETS = 5
# The first bucket of a server is sent when the backward has ended; over RPC its update is received with the next pull.
FIRST_BUCKET_BYTES = 64 * 2**10


def plan_buckets(
    config: Config, updater: Updater, layout: FlatLayout, shards: Sequence[Shard]
) -> tuple[tuple[Shard, ...], str]:
    """Return each server's shard in buckets that are updated as their gradients arrive, or none and the reason."""
    reason = why_never_by_bucket(config)
    if layout.tables and not reason:
        reason = "embedding tables are updated by rows"
    reason = reason or why_not_by_bucket(updater.optimizer, updater.clipping) or ""
    if reason:
        return (), reason
    most = pipelined_bucket_bytes(config, layout.total_bytes / len(shards))
    block = block_of(config.server)
    return tuple(split_ranges(shard, layout, most, min(most, FIRST_BUCKET_BYTES), block) for shard in shards), ""


def pipelined_bucket_bytes(config: Config, shard_bytes: float) -> float:
    """Return the size of the buckets of a shard, all but the first of which have ``FIRST_BUCKET_BYTES`` at most."""
    if config.server.bucket_mb is not None:
        return config.server.bucket_mb * 2**20
    most = shard_bytes / (_COLOCATED_BUCKETS if is_colocated(config) else _BUCKETS)
    return min(max(most, _LEAST_BYTES), _MOST_BYTES)


def why_not_by_bucket(optimizer: torch.optim.Optimizer, clipping: Clipping | None) -> str | None:
    """Return why an update must wait for the gradients of all buckets; None if each can be updated by itself."""
    if clipping is not None:
        return clipping.why_not_by_bucket
    if optimizers_of(optimizer) != [optimizer]:
        return "there are several optimizers"
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        return f"{name} is not known to update each element by itself"
    if not ParallelStep.supports(optimizer):
        return f"hooks of {name} may read all gradients"
    if any(isinstance(value, Tensor) for group in optimizer.param_groups for value in group.values()):
        return f"hyper-parameters of {name} are tensors, which may change in place"
    return None


@dataclass(frozen=True)
class _Piece:
    """Elements of one optimizer parameter in a bucket: ``length`` from ``offset`` on, in the order of its memory."""

    place: TensorSlot
    parameter: Tensor
    group: int | None  # of the optimizer; None if the parameter is in none
    slot: int
    offset: int
    length: int

    @property
    def is_whole(self) -> bool:
        return self.length == self.parameter.numel()

    def view(self, flat: Tensor) -> Tensor:
        """Return these elements of a bucket."""
        return flat.as_strided(self.place.shape, self.place.stride, flat.storage_offset() + self.place.offset)


@dataclass(frozen=True, eq=False)
class UpdatedBucket:
    """The next version of a bucket: its parameters, immutable, and the optimizer's state of each piece.

    ``gradients`` are those of the trainers that it was computed from.
    """

    gradients: tuple[Tensor, ...]
    parameters: Tensor
    states: list[tuple[_Piece, State]]

    def is_from(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether it was computed from these very tensors."""
        pairs = zip(self.gradients, gradients, strict=False)
        return len(self.gradients) == len(gradients) and all(own is other for own, other in pairs)


class BucketUpdates:
    """Computes and writes the next version of a shard, bucket by bucket. Not thread-safe.

    The optimizer must be one for which ``why_not_by_bucket`` returns None. Buckets begin at multiples of every kernel's
    vector width within a tensor, so no bit differs from a step over whole tensors. Each range of ``buckets``, the same
    shard, is a bucket (``sharding.split_ranges``).
    """

    def __init__(self, updater: ShardUpdater, buckets: Shard) -> None:
        self._updater = updater
        self._optimizer = updater.optimizer
        self.buckets = buckets
        self._shard = updater.shard
        self._flats = self.cut(updater.ranges)
        self.leaves = [gradient_leaf(flat) for flat in self._flats]
        groups = {id(p): n for n, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        owned = {slot: parameter for slot, _, parameter in updater.owned}
        starts = {piece.slot: piece.start for piece in updater.shard.slices}
        self._pieces: list[list[_Piece]] = [[] for _ in buckets.ranges]
        for piece, own in zip(buckets.slices, buckets.layout.slots, strict=True):
            parameter = owned[piece.slot]
            self._pieces[own.group].append(
                _Piece(
                    own,
                    parameter,
                    groups.get(id(parameter)),
                    piece.slot,
                    piece.start - starts[piece.slot],
                    piece.length,
                )
            )

    def clone(self) -> list[Tensor]:
        """Return a copy of the parameters of each bucket, immutable by convention."""
        return [flat.detach().clone() for flat in self._flats]

    def cut(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the buckets as views of the flat tensors of the shard."""
        found = []
        for where in self.buckets.ranges:
            number, start, stop = self._range_of(*where)
            found.append(flats[number][start:stop])
        return found

    def _range_of(self, group: int, first: int, end: int) -> tuple[int, int, int]:
        """Return the range of the shard that a bucket is in, and its first and last element there."""
        for number, (own_group, own_first, own_end) in enumerate(self._shard.ranges):
            if own_group == group and own_first <= first <= end <= own_end:
                return number, first - own_first, end - own_first
        raise AssertionError("buckets are ranges of the same shard")

    @property
    def possible(self) -> bool:
        """Whether the optimizer may still be stepped bucket by bucket: a hook may have been added to it."""
        return why_not_by_bucket(self._optimizer, None) is None

    def step_whole(
        self, gradients: Sequence[Sequence[Tensor]], used: tuple[bool, ...] | None, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Make the next version in one step of the optimizer; ``gradients`` are those of all buckets, by trainer."""
        numbers = [self._range_of(*where)[0] for where in self.buckets.ranges]
        count = len(self._shard.ranges)
        joined = [
            [torch.cat([part for part, n in zip(own, numbers, strict=True) if n == k]) for k in range(count)]
            for own in gradients
        ]
        self._updater.assign_gradients(self._updater.average(joined, [1.0] * len(joined)), used)
        self._updater.step(groups)

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return those of the optimizer's groups, as ``compute`` takes them."""
        return get_hyperparameters(self._optimizer)

    @torch.no_grad()
    def compute(
        self,
        bucket: int,
        gradients: Sequence[Tensor],
        used: tuple[bool, ...] | None,
        groups: Sequence[Mapping[str, Any]],
    ) -> UpdatedBucket:
        """Return the next version of a bucket. Nothing of the current one changes, and no gradient.

        The gradients are in the order of trainers: the sum of float32 depends on it. ``used`` is, for each slot of the
        layout, whether any trainer has a gradient; None for all.
        """
        mean = mean_in_order(gradients)
        updated = self._flats[bucket].clone()
        stepped: list[tuple[_Piece, nn.Parameter]] = []
        by_group: list[list[nn.Parameter]] = [[] for _ in groups]
        state: dict[Any, State] = {}
        for piece in self._pieces[bucket]:
            if piece.group is None or not (used is None or used[piece.slot]):
                continue
            parameter = nn.Parameter(piece.view(updated))
            parameter.grad = piece.view(mean)
            if piece.parameter in self._optimizer.state:
                state[parameter] = _slice_state(self._optimizer.state[piece.parameter], piece)
            by_group[piece.group].append(parameter)
            stepped.append((piece, parameter))
        if stepped:
            part = copy_optimizer(self._optimizer)
            part.param_groups = [{**group, "params": own} for group, own in zip(groups, by_group, strict=True) if own]
            part.state = defaultdict(dict, state)
            part.step()
            state = part.state
        return UpdatedBucket(tuple(gradients), updated, [(piece, state[p]) for piece, p in stepped if p in state])

    @torch.no_grad()
    def write(self, updated: Sequence[UpdatedBucket]) -> None:
        """Make the next version, of which every bucket is given."""
        state = self._optimizer.state
        fresh = False
        for flat, bucket in zip(self._flats, updated, strict=True):
            flat.copy_(bucket.parameters)
            for piece, values in bucket.states:
                fresh = fresh or piece.parameter not in state
                _write_state(state[piece.parameter], piece, values)
        if fresh:  # in the order of a step over all parameters
            for parameter in [p for group in self._optimizer.param_groups for p in group["params"] if p in state]:
                state[parameter] = state.pop(parameter)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # a schedule checks it


def _slice_state(state: State, piece: _Piece) -> State:
    """Return a copy of the state of a piece. What does not have the parameter's shape is of the whole parameter."""
    found: State = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            of_elements = not piece.is_whole and value.shape == piece.parameter.shape
            found[name] = (_elements(state, name, piece) if of_elements else value).clone()
        else:
            found[name] = copy.deepcopy(value)
    return found


def _write_state(state: State, piece: _Piece, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if piece.is_whole or not isinstance(value, Tensor) or value.shape != (piece.length,):
            state[name] = value
            continue
        if name not in state:
            state[name] = torch.empty_like(piece.parameter, dtype=value.dtype)
        _elements(state, name, piece).copy_(value)


def _elements(state: State, name: str, piece: _Piece) -> Tensor:
    """Return the elements of a piece in a state that has one for each element of the parameter."""
    value: Tensor = state[name]
    if value.stride() != piece.parameter.stride():
        value = torch.empty_like(piece.parameter, dtype=value.dtype).copy_(value)
        state[name] = value
    return value.as_strided((piece.length,), (1,), value.storage_offset() + piece.offset)


class UpdatePipeline:
    """Computes each bucket of the next version once all trainers' gradients of it are there, and replies with it.

    It is a computation in advance, of what the consistency model is expected to decide: ``begin`` names the trainers of
    the step. ``commit`` makes the version from the gradients that the decision names. A bucket that was computed in
    advance is used there only if it was computed from the same gradients; every other is computed anew. Until then no
    parameter and no state of the optimizer changes, so an update that is not decided needs no undoing. In memory are,
    in addition to the gradients, at most one more version and its optimizer state.

    Only a trainer's first gradient of a bucket counts: if another one follows it, or if it lacks that of a parameter,
    the bucket is computed with the commit.

    Thread-safe. Handlers of a server call ``begin``, ``add`` and ``abandon_update``, which only submit what is to be
    computed; jobs that were submitted call ``prepare`` and ``commit``. As jobs run one after the other, none computes
    from parameters that another one writes.
    """

    def __init__(self, updates: BucketUpdates, codec: CastCodec, submit: SubmitFn = run_now) -> None:
        self.updates = updates
        self.sent_early: frozenset[int] = frozenset()
        """Buckets of the current version that its trainers received before it was committed."""
        self._codec = codec
        self._submit = submit
        # Covers all tables. Taken after the lock of the server; not held while a bucket is computed, nor while futures
        # are completed. Re-entrant: ``submit`` may run a job at once.
        self._lock = threading.RLock()
        self._step = object()  # another one once what was submitted is of no use any more
        self._submitted: set[int] = set()  # buckets that are being computed, or wait for that
        self._snapshot: list[Tensor] | None = None
        self._trainers: tuple[int, ...] = ()
        self._groups: list[dict[str, Any]] = []
        self._arrived: dict[int, dict[int, Tensor]] = {}  # by bucket and trainer
        self._computed: dict[int, UpdatedBucket] = {}
        self._prepared: dict[int, UpdatedBucket] = {}  # as ``_computed``, but never sent early
        self._replies: dict[int, Tensor] = {}  # by bucket, in the form in which it is sent
        self._excluded: set[int] = set()
        self._waiting: dict[tuple[int, int], Future] = {}  # by bucket and trainer

    def begin(self, trainers: Iterable[int], groups: list[dict[str, Any]] | None = None) -> None:
        """Compute buckets in advance from now on, as the mean over ``trainers``.

        Their gradients are added in this order. The hyper-parameters ``groups`` are None for those of this process.
        """
        with self._lock:
            self._trainers = tuple(trainers) if self.updates.possible else ()
            self._groups = self.updates.hyperparameters() if groups is None else groups
            self._step, self._submitted = object(), set()  # an earlier one may have named other trainers
            for bucket in list(self._arrived):
                self._compute_if_complete(bucket)

    def add(self, trainer_index: int, bucket: int, gradient: Tensor | None, has_all: bool = True) -> Future:
        """Add a gradient; reply with the next version of the bucket, or None once there is no other way to get it.

        It is the same tensor as before, or None, if the message is repeated. ``has_all``: each parameter has a
        gradient.
        """
        with self._lock:
            # A repeated message gets the reply to the first.
            future: Future = self._waiting.setdefault((bucket, trainer_index), torch.futures.Future())
            if gradient is not None:
                arrived = self._arrived.setdefault(bucket, {})
                if not has_all or arrived.setdefault(trainer_index, gradient) is not gradient:
                    self._exclude(bucket)
            if not (is_decided := bucket in self._excluded or bucket in self._computed):
                self._compute_if_complete(bucket)
        if is_decided:
            self._reply(bucket)
        return future

    def _compute_if_complete(self, bucket: int) -> None:
        """Submit the computation of a bucket once all of its gradients are here. Called with the lock held."""
        arrived = self._arrived.get(bucket, {})
        if bucket in self._excluded or bucket in self._submitted:
            return
        if not self._trainers or not all(index in arrived for index in self._trainers):
            return
        self._submitted.add(bucket)
        gradients = [arrived[index] for index in self._trainers]
        self._submit(partial(self._compute, bucket, gradients, self._groups, self._step))

    @spanned("apply")
    def _compute(self, bucket: int, gradients: Sequence[Tensor], groups: list[dict[str, Any]], step: object) -> None:
        if step is not self._step:
            return  # the update was made, or abandoned
        updated = reply = None
        try:
            updated = self.updates.compute(bucket, gradients, None, groups)
            reply = self._codec.encode_one(self.updates.buckets.layout, bucket, updated.parameters)
        except BaseException as error:  # noqa: BLE001 - the commit computes the bucket again, and its error ends the run
            log.debug("bucket %d is computed with the commit: %s", bucket, error)
        with self._lock:
            if step is not self._step:
                return
            if updated is None or reply is None:
                self._exclude(bucket)
            elif bucket not in self._excluded:  # by another gradient, which arrived meanwhile
                self._computed[bucket], self._replies[bucket] = updated, reply
        self._reply(bucket)

    def _exclude(self, bucket: int) -> None:
        """Compute a bucket with the commit only. Called with the lock held; ``_reply`` follows."""
        self._excluded.add(bucket)
        self._computed.pop(bucket, None)
        self._replies.pop(bucket, None)

    def _reply(self, bucket: int) -> None:
        """Complete the futures of a bucket that was computed or excluded."""
        with self._lock:
            reply = self._replies.get(bucket)
            futures = [self._waiting.pop(key) for key in [key for key in self._waiting if key[0] == bucket]]
        for future in futures:
            future.set_result(reply)

    @spanned("apply")
    def prepare(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Compute what is left of the version, so that ``commit`` with the same gradients only writes it.

        Every parameter has a gradient of some trainer.
        """
        with self._lock:
            step, groups, computed = self._step, self._groups, set(self._computed)
        for bucket, of_trainers in enumerate(zip(*gradients, strict=True)):
            if bucket not in computed:
                updated = self.updates.compute(bucket, of_trainers, None, groups)
                with self._lock:
                    if step is not self._step:
                        return
                    self._prepared[bucket] = updated

    def commit(
        self,
        gradients: Sequence[Sequence[Tensor]],
        used: tuple[bool, ...] | None,
        groups: list[dict[str, Any]] | None = None,
    ) -> None:
        """Make the next version.

        The gradients of each trainer are in the order in which they are added. See also ``BucketUpdates.compute``.
        """
        groups = self.updates.hyperparameters() if groups is None else groups
        if not self.updates.possible:
            self.updates.step_whole(gradients, used, groups)
            self.version_changed()
            return
        with self._lock:
            sent = set(self._computed)
            known = dict(self._computed) if groups == self._groups else {}
            if groups == self._groups and used is None:
                known = self._prepared | self._computed
        updated, early = [], set()
        for bucket, of_trainers in enumerate(zip(*gradients, strict=True)):
            computed = known.get(bucket)
            if computed is not None and computed.is_from(of_trainers):
                early |= {bucket} & sent
            else:
                computed = self.updates.compute(bucket, of_trainers, used, groups)
            updated.append(computed)
        self.updates.write(updated)
        with self._lock:
            self._snapshot = [bucket.parameters for bucket in updated]
            self.sent_early = frozenset(early)
        self.abandon_update()

    def abandon_update(self) -> None:
        """Drop what was computed in advance, and compute nothing more before the next ``begin``."""
        with self._lock:
            self._trainers, self._step = (), object()
            for table in (
                self._arrived,
                self._computed,
                self._prepared,
                self._replies,
                self._excluded,
                self._submitted,
            ):
                table.clear()
            waiting = self.pop_waiters()
        for future in waiting:
            future.set_result(None)

    def version_changed(self) -> None:
        """The next version was made in another way than by ``commit``."""
        with self._lock:
            self._snapshot, self.sent_early = None, frozenset()
        self.abandon_update()

    def pop_waiters(self) -> list[Future]:
        """Remove and return the futures of all calls that wait; the caller replies to them."""
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        return waiting

    def snapshot(self) -> list[Tensor]:
        """Return the current version in buckets, immutable, and the same list for as long as it is current."""
        # With the lock: a copy that is made while ``commit`` writes must not be kept after it.
        with self._lock:
            if self._snapshot is None:
                self._snapshot = self.updates.clone()
            return self._snapshot

    def leave_out(self, version: Sequence[Tensor], received: Collection[int]) -> tuple[Tensor, ...]:
        """Return what is sent of the current version to a trainer that received the buckets ``received`` of it early.

        In the place of those is an empty tensor.
        """
        known = self.sent_early.intersection(received)
        return tuple(flat.new_empty(0) if n in known else flat for n, flat in enumerate(version))

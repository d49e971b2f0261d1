"""The next version of a server's shard, made bucket by bucket while gradients still arrive."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paramserver.config import Config, is_colocated
from paramserver.consistency.factory import why_never_by_bucket
from paramserver.metrics.profile import spanned
from paramserver.optim.bucket_updates import BucketUpdates, UpdatedBucket, why_not_by_bucket
from paramserver.optim.updater import Updater
from paramserver.parameters.flat import FlatLayout
from paramserver.parameters.sharding import Shard, split_ranges
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

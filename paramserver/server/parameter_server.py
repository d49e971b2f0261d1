"""The parameter server: the handlers that trainers call.

Handlers never block: a reply that depends on other trainers is a future, and what is computed from parameters or
optimizer is a job of the update thread, which does not hold the lock. Errors are returned as values.
"""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from paramserver.buffers.factory import buffer_class
from paramserver.checkpoint import stage_copy
from paramserver.config import Config, num_servers_of, server_computes
from paramserver.config.deadlines import GRACE_S
from paramserver.consistency import Announcement, Decision, Ledger, Sync, TrainerId, make_consistency
from paramserver.consistency.base import end
from paramserver.context import StopRequest
from paramserver.devices import place_parameters, to_cpu
from paramserver.distributed.local_calls import LocalCallServer
from paramserver.distributed.membership import Member, Members, watch_peer
from paramserver.distributed.rpc_agent import current_context_id, release_context
from paramserver.distributed.rpc_calls import RemoteError, completed_future
from paramserver.errors import (
    DeadlineExceeded,
    Evicted,
    ParamserverError,
    PeerLost,
    RunEnded,
    StorageError,
    TaskError,
    UnsupportedConfiguration,
    ViewChanged,
    as_peer_error,
)
from paramserver.metrics.records import Record, StepReport, TrainerTotals, WeightedSums
from paramserver.optim.bucket_updates import BucketUpdates
from paramserver.parameters.model import frozen_state_dict
from paramserver.parameters.model_tree import PackedBuffers
from paramserver.runs.checkpoint_manager import CheckpointManager, PartCollector, StagedCheckpoint, UpdaterState
from paramserver.server.aggregator import Aggregator
from paramserver.server.coordinator import CollectedState, ShardCoordinator
from paramserver.server.gathers import Gathers
from paramserver.server.model_service import ModelService, ServedTransport
from paramserver.server.parameter_store import ParameterStore, check_optimizers
from paramserver.server.repeated_calls import LastReplies, executed_once, repeatable
from paramserver.server.update_executor import SubmitFn, run_now
from paramserver.server.update_pipeline import UpdatePipeline, plan_buckets
from paramserver.server.validations import Validations
from paramserver.task import Task
from paramserver.transport.autograd import pull
from paramserver.transport.base import ServerTransport
from paramserver.transport.compression import make_codec
from paramserver.transport.messages import (
    DataPosition,
    Future,
    JoinReply,
    ModelCall,
    ModelReply,
    PendingReplies,
    StepGrant,
    ValidationReply,
    VersionView,
)
from paramserver.transport.rpc import RpcServerTransport, WireVersion
from paramserver.transport.segments import SegmentHost
from paramserver.transport.shared_memory import ServerSharedMemory

T = TypeVar("T")


class TutorialMethods(nn.Module):
    """The public methods of the server in PyTorch's RPC tutorial. Trainers of this package do not call them.

    ``is_whole`` states whether this process holds all parameters of the current version.
    """

    config: Config
    store: ParameterStore
    is_whole: bool
    _lock: threading.RLock

    def forward(self, *inputs: Any) -> Any:
        """Return the model's output at the current version, computed on the server, with its gradient recorded."""
        self._require_all_parameters()
        return self.store.forward(pull(self.store.leaves, to_cpu(self._current_parameters())), inputs)

    @abstractmethod
    def _current_parameters(self) -> list[Tensor]:
        """Return the parameters of the current version; the caller waits while an update is computed."""

    def get_dist_gradients(self, context_id: int) -> dict[str, Tensor]:
        """Return the gradients that a distributed-autograd context holds, by parameter name, on the CPU."""
        self._require_all_parameters()
        held = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        return {name: view.cpu() for name, view in self.store.gradients_by_name(held).items()}

    def get_param_rrefs(self) -> list[Any]:
        """Return an RRef for each trained parameter."""
        self._require_all_parameters()
        return [rpc.RRef(parameter) for parameter in self.store.parameters.tensors.values()]

    def _require_all_parameters(self) -> None:
        if not self.is_whole:
            raise UnsupportedConfiguration(
                f"cluster.num_servers ({num_servers_of(self.config)}) must be 1 for ParameterServer.forward, "
                "get_dist_gradients and get_param_rrefs, as no server holds the whole model; lower it"
            )


class ParameterServer(TutorialMethods):
    """Holds all parameters and the one optimizer, and replies to the calls of all trainers.

    Every update makes a new version. Trainers compute on immutable snapshots of one version, so gradients are exact
    under any concurrency. ``Aggregator`` carries out the steps; this class owns the lock, the membership, the
    validations and the checkpoints. ``server/client.py`` is the other end of every handler.

    Args:
        task: builds the model and the optimizer.
        config: of the run.
        trainers: number of trainers.
        checkpoints: saves and restores; its monitor writes records.
        stop: set by a signal to this process.
        segments: allocates memory that processes of this host share; None if all tensors are sent over RPC.
        on_trainer_lost: called with a trainer whose place another process may take.
        local_calls: serves the calls of trainers that share memory; None if these are made over RPC too.
        submit: runs a job after those that were submitted before: ``UpdateExecutor.submit``. Without it updates are
            computed under the lock, by the handlers.

    Example::

        >>> from paramserver import ParameterServer  # created by the launcher, on rank 0
        >>> sorted(name for name in vars(ParameterServer) if name in ("join", "announce", "pull", "push", "leave"))
        ['announce', 'join', 'leave', 'pull', 'push']
    """

    def __init__(
        self,
        task: Task,
        config: Config,
        trainers: int,
        checkpoints: CheckpointManager,
        stop: StopRequest,
        segments: SegmentHost | None = None,
        on_trainer_lost: Callable[[Member], None] = lambda member: None,
        local_calls: LocalCallServer | None = None,
        submit: SubmitFn = run_now,
    ) -> None:
        super().__init__()
        self.config = config
        self.checkpoints = checkpoints
        self.monitor = monitor = checkpoints.monitor
        self.trainers = trainers
        self.view = checkpoints.view
        self.members = Members()
        self.finished = threading.Event()
        self.error: ParamserverError | None = None
        self.totals: dict[int, TrainerTotals] = {}
        self.last_decision: Decision | None = None
        # Held by every handler that touches the store or the aggregator, and never while an update is computed or a
        # checkpoint staged: those are jobs of the update thread. They have parameters, optimizer and schedule to
        # themselves, because ``Aggregator`` begins nothing else before they are done. Re-entrant: an error inside a
        # handler calls ``fail``, which takes it again. Futures are completed outside of it where their callbacks could
        # take long.
        self._lock = threading.RLock()
        self._submit = submit
        # Held while the loss of a trainer is handled and reported, so that another process takes its place after that.
        # Taken before ``_lock``.
        self._loss_lock = threading.Lock()
        self.last_replies = LastReplies()

        # The order below matters: the rules decide how memory is shared, the memory where the parameters are allocated;
        # the checkpoint is loaded into the store before the coordinator splits parameters and states into shards.
        rules = make_consistency(config, trainers, monitor.step, monitor.samples)
        rules.load_state_dict(checkpoints.consistency_state)
        times_due = None if buffer_class(config.buffer.kind).repeats else config.buffer.pseudo_epochs
        ledger = Ledger(times_due, self.view)
        ledger.load_state_dict(checkpoints.ledger_state, trainers)
        several = num_servers_of(config) > 1
        device = place_parameters(config).device
        self._shared_memory = ServerSharedMemory(segments, config.server, rules.lockstep, monitor.note, device)
        # Other processes access the parameters themselves in lockstep, and whenever servers own them together; trainers
        # that run freely, or whose server has them on a GPU, read snapshots instead.
        in_place = (rules.lockstep or several) and segments is not None and device.type == "cpu"
        self.store = store = ParameterStore(task, config, self._shared_memory.allocate_parameters if in_place else None)
        check_optimizers(config, store)
        if store.updater.parameters_of:
            assert isinstance(rules, Sync)
            rules.several_updates = True
        self._model_service = ModelService(task, config, store) if server_computes(config) else None
        parameters = store.parameters
        # A trainer that joins may read while servers write. That is never the snapshot of the version that they make.
        self._shared_memory.open_snapshots(
            parameters.layout, trainers, lambda: (self.aggregator.version, parameters.flats)
        )
        checkpoints.restore_model(store.model)
        checkpoints.restore_optimizer(store.updater)

        self.coordinator = None
        if several:
            self.coordinator = ShardCoordinator(
                config,
                store,
                self._lock,
                stop,
                monitor.step,
                lambda: (self._shared_memory.address, self._shared_memory.parameters_key),
                self.fail,
                lambda member, reason: self._change_view(f"{member} is lost: {reason}"),
                self._start_if_complete,
                self._compute,
            )
        self.is_whole = self.coordinator is None
        codec = make_codec(config.server, store.device)
        self._wire = WireVersion(store.shard.layout, codec, store.shard_snapshot)
        shards = (store.shard,) if self.coordinator is None else self.coordinator.shards
        self._buckets, self._barrier = plan_buckets(config, store.updater, store.parameters.layout, shards)
        if self.coordinator is not None:
            self.coordinator.buckets = self._buckets
        if self._buckets:
            store.pipeline = UpdatePipeline(BucketUpdates(store.shard_updater, self._buckets[0]), codec, submit)
            self._wire = WireVersion(self._buckets[0].layout, codec, store.pipeline.snapshot)
        self.aggregator = Aggregator(
            rules,
            ledger,
            store,
            monitor,
            stop,
            lambda error: self.fail(RemoteError.of(error).error()),
            self.coordinator,
            compute=self._compute,
        )
        self.aggregator.pipeline = store.pipeline
        self._stop = stop
        self._on_trainer_lost = on_trainer_lost
        self._local_calls = local_calls
        self.started = False  # all trainers and servers have joined
        self._absent_since: dict[int, float] = {}
        self._given_up: set[int] = set()
        # Where the data of each trainer began in this view: what a process that takes its place needs of it.
        self._sources: dict[int, dict[str, Any]] = {}
        # Whether other trainers can continue it, and whether they can fetch samples again that were not applied.
        self._divisible: dict[int, tuple[bool, bool]] = {}
        # The last position that was applied before a process began with an empty buffer; it may have to read so far.
        self._read_before: dict[int, int] = {}
        # Contexts of distributed autograd that a process would leave behind if it died (docs/torch-notes.md).
        self._contexts: dict[TrainerId, int] = {}
        self._joins = PendingReplies()
        self._validations = Validations(trainers)
        # The versions that were validated and saved last. A trainer that joined afterwards does neither again.
        self._validated: tuple[int, dict[str, float]] = -1, {}
        self._staged = (monitor.step if checkpoints.resumes else -1, False)
        self._stagings = PendingReplies()
        self._gathers = Gathers()
        self._readers: list[concurrent.futures.Future[list[Tensor] | RemoteError]] = []  # of the current parameters
        self._staging_reason = ""
        self._parts = PartCollector(checkpoints)
        self.left_behind: list[str] = []  # the trainers that did not end in time after a request to stop
        self._ends_without = False  # that time is over: whatever ``server.on_loss`` is, the others end without the lost
        self.saves_alone = False  # no trainer is left, and what is applied is being saved
        # Of each trainer: when the last chunk of its part arrived, or could first be sent; infinite while it waits for
        # the copy of model and optimizer.
        self._chunk_at: dict[int, float] = {}

    # Joining and leaving.

    def join(self, member: Member, epoch_samples: int | None) -> torch.futures.Future[JoinReply]:
        """Add a trainer; reply once all trainers and servers have joined, or at once to one that joins later.

        A trainer that joins again, or another process that takes its place, is a new incarnation: the earlier one is
        evicted.

        Raises:
            RunEnded: the other trainers have finished.
            ViewChanged: they have finished this view of the run.
            Evicted: the message was sent to an earlier server, or another process has joined since it was sent.
        """
        index, future = member.index, None
        while future is None:
            # Not under ``_loss_lock``, which ``_lose`` takes.
            for present in self._find_earlier(member):
                self._lose(present, "another process joined in its place")
            with self._loss_lock, self._lock:
                # Again: of processes that join as one trainer at once, another one may have joined in between.
                if self._find_earlier(member):
                    continue
                # First: if it is refused, the one that is present keeps its incarnation.
                self.members.join(member)
                member.incarnation = self.aggregator.ledger.admit(index)
                self.aggregator.epoch_samples = epoch_samples
                self.aggregator.transports[index] = self._make_transport(
                    TrainerId(index, self.view, member.incarnation)
                )
                future = self._joins.add(index, None)
        # Without the lock: the liveness call is an RPC, and its callback runs in a thread of the agent.
        watch_peer(member.name, lambda reason: self._on_disconnect(member, reason))
        self._start_if_complete()
        return future

    def _find_earlier(self, member: Member) -> list[Member]:
        """Return the process that has the place of one that joins, if there is one; raise if it may not take it."""
        index = member.index
        with self._lock:
            self._check_running()
            if (last := self.last_decision) is not None:
                if last.resizes:
                    raise ViewChanged(last.reason)
                raise RunEnded(f"the run ended before trainer {index} joined")
            earlier = [present for present in self.members.present() if present.index == index]
            if member.view != self.view or any(present.worker_id > member.worker_id for present in earlier):
                raise Evicted(f"trainer {index} asked to join too late; the run continues without this process")
            return earlier

    @repeatable
    def report_source(self, sender: TrainerId, position: DataPosition) -> None:
        """Record where the data of a trainer starts in this view, before its first announcement."""
        with self._lock:
            trainer_index = self._index_of(sender)
            row = self.aggregator.ledger[trainer_index]
            if not row.accepted:  # otherwise this message was overtaken by a push
                self._sources[trainer_index] = position.source
                self._divisible[trainer_index] = position.can_reshard, position.refetchable
                row.positions.load_state_dict(position.applied)
                self._read_before[trainer_index] = max(row.positions.above, default=-1)

    def _make_transport(self, trainer: TrainerId) -> ServerTransport:
        if self._model_service is not None:
            return self._model_service.new_transport()
        if self.store.pipeline is not None:
            leaves, on_first = self.store.pipeline.updates.leaves, partial(self._first_arrived, trainer)
            return RpcServerTransport(leaves, self._wire, self._buckets[0], on_first)
        return RpcServerTransport(self.store.leaves, self._wire, None if self.is_whole else self.store.shard)

    def _start_if_complete(self) -> None:
        # Called by the last trainer or by the last server that is ready, whichever comes later; ``pop_all`` under the
        # lock makes sure that only one of them replies.
        with self._lock:
            if self.error is not None or not (self.started or len(self._joins.parts) == self.trainers):
                return
            if self.coordinator is not None and not self.coordinator.complete:
                return
            started, self.started = self.started, True
            futures = self._joins.pop_all()[1]
            for index in futures if not started else ():
                self.aggregator.add(index)  # also if a process was lost before the start: the first step needs it
        if not started:
            self.monitor.expect_samples(self.aggregator.epoch_samples)
        self._complete(futures, lambda: {i: self._join_reply(i) for i in futures})

    def _join_reply(self, trainer_index: int) -> JoinReply:
        coordinator = self.coordinator
        with self._lock:
            model = stage_copy(frozen_state_dict(self.store.model)) if self._model_service is None else {}
            layout = self.store.parameters.layout
            rules, row = self.aggregator.rules, self.aggregator.ledger[trainer_index]
            if coordinator is not None and not coordinator.shares_memory:
                self._shared_memory.disable()
            position = None
            if (source := self._sources.get(trainer_index)) is not None:
                position = DataPosition(source, row.positions.state_dict(), self._progress_of(trainer_index))
                self._read_before[trainer_index] = max(row.positions.above, default=-1)
        # Without the lock: these may read or write a file.
        if position is not None:
            self.monitor.trainer_replaced(trainer_index, row.incarnation)
        stored_part = self.checkpoints.trainer_part(trainer_index, newest=position is not None)
        return JoinReply(
            model,
            layout,
            rules.step,
            rules.lockstep,
            self._shared_memory.address,
            stored_part,
            self._buckets or (() if coordinator is None else coordinator.shards),
            self.view,
            row.incarnation,
            position,
            self._barrier,
            self.store.updater.parameters_of,
            self.store.updater.validates_averages,
        )

    @executed_once
    def share_segments(self, sender: TrainerId) -> int:
        """Exchange parameters and gradients with a trainer of this host in shared memory from now on.

        Returns:
            The number of snapshots there are for it; 0 if there was too little memory for its gradients.
        """
        with self._lock:
            trainer_index = self._index_of(sender)
            made = self._shared_memory.make_transport(
                trainer_index,
                sender.incarnation,
                self.store.parameters.layout,
                self.store.shard,
                self.aggregator.segments_in_use,
            )
            if made is None:
                return 0
            if self._local_calls is not None:
                connected = self._local_calls.connect(f"trainer {trainer_index}")
                self._shared_memory.offer_socket(trainer_index, sender.incarnation, connected)
            # Replaces the transport of ``join`` before the trainer's first announcement, so no version is pinned in it.
            self.aggregator.transports[trainer_index], snapshots = made
            return snapshots

    def heartbeat(
        self, trainer_index: int, worker_id: int, blocks: bool = False, place: str = "", stop: str = ""
    ) -> str:
        """Record a sign of life, and whether the trainer's full buffer blocks simulations.

        Args:
            trainer_index, worker_id, blocks: of the trainer.
            place: where in the code of the user its main thread is; see ``place_of_user_code``.
            stop: why a signal to it requests the end of the run.

        Returns:
            Why the run is to end; "" if it is not.

        Raises:
            Evicted: the process takes no part any more.
            PeerLost: the run has failed, or another view begins; the trainer may wait for something else meanwhile.
        """
        self._check_running()
        if not self.members.record_heartbeat(trainer_index, worker_id, place):
            raise Evicted(f"trainer {trainer_index} was taken for lost, and the run continues without this process")
        # Only a change takes the lock.
        if blocks is not self.aggregator.rules.blocks(trainer_index):
            with self._lock:
                self.aggregator.set_blocks(trainer_index, blocks)
        if stop and not self._stop.event.is_set():
            self._stop.request(stop)
        return self._stop.state()[1]

    @repeatable
    def leave(self, sender: TrainerId, totals: TrainerTotals, decision: Decision) -> None:
        """A trainer has finished; after the last one the server ends."""
        with self._lock:
            trainer_index = self._admit(sender)
            self.members.leave(trainer_index)
            self.totals[trainer_index] = totals
            self.last_decision = decision
            self._finish_if_all_left()

    def all_totals(self) -> list[TrainerTotals]:
        """Return the totals that trainers reported, and for those that are lost what the ledger knows."""
        totals, rows = dict(self.totals), self.aggregator.ledger.rows
        absent = sorted(rows.keys() - totals.keys()) if self.error is None else []
        per_pass, passes = self.aggregator.epoch_samples, self.config.training.max_epochs
        left: int | None = None
        if per_pass is not None and passes is not None:
            others_left = sum(t.samples_left or 0 for t in totals.values())
            left = max(per_pass * passes - sum(row.samples for row in rows.values()) - others_left, 0)
        for number, index in enumerate(absent):
            # What is left of all absent trainers is known together.
            own_left = left if number == 0 or left is None else 0
            totals[index] = TrainerTotals(index, samples=rows[index].samples, samples_left=own_left)
        return [totals[index] for index in sorted(totals)]

    def _finish_if_all_left(self) -> None:
        if self.last_decision is not None and not self.members.present():
            self.finished.set()

    def report_failure(self, sender: TrainerId, error: RemoteError) -> None:
        """A trainer failed; the run fails with it."""
        with self._lock:
            # Marked as left first: the process exits next, which must not count as a loss and hide this error.
            self.members.leave(self._index_of(sender))
            self.fail(error.error())

    def missing(self) -> list[str]:
        """Return the trainers and servers that have not joined yet."""
        servers = [] if self.coordinator is None else self.coordinator.missing()
        return [f"trainer {i}" for i in self.missing_trainers()] + [f"server {i}" for i in servers]

    def missing_trainers(self) -> list[int]:
        """Return the indices of the trainers that have not joined yet."""
        return self.members.missing(self.trainers)

    def check_heartbeats(self) -> None:
        """Count each trainer and server as lost that has been silent for ``server.lost_after_s``."""
        if self.coordinator is not None:
            self.coordinator.check_heartbeats()
        silence_s = self.config.server.lost_after_s
        for member in self.members.overdue(silence_s):
            self._lose(member, f"no heartbeat for server.lost_after_s ({silence_s:g} s)")
        self._check_gathers()

    def check_absences(self) -> set[int]:
        """Give up each lost trainer whose place no process took within ``cluster.timeout_s``.

        Returns:
            Those whose data the others can serve, once they have it: the run has to continue without them.
        """
        now, limit_s = time.monotonic(), self.config.cluster.timeout_s
        missing = self.members.missing(self.trainers)
        self._absent_since = {i: self._absent_since.get(i, now) for i in missing}
        late = {i for i, since in self._absent_since.items() if now - since > limit_s}
        self._given_up &= late  # one may have joined since
        if late and late == set(missing) and not self.members.present() and not self.finished.is_set():
            self.fail(
                PeerLost(f"all trainers are lost, and none joined again within cluster.timeout_s ({limit_s:g} s)")
            )
        divided = late if self.members.present() and self.can_divide_data(late) else set()
        for index in sorted(late - self._given_up - divided):
            self._given_up.add(index)
            with self._lock:
                self.aggregator.forget(index)
            self.monitor.note(
                f"no process took the place of trainer {index} within cluster.timeout_s ({limit_s:g} s); what is left "
                "of its data is not served"
            )
        return divided

    @property
    def knows_data(self) -> bool:
        """Whether the run has begun and every trainer has reported its data."""
        return self.started and self._divisible.keys() == set(range(self.trainers))

    def can_divide_data(self, lost: Collection[int] = ()) -> bool:
        """Whether other trainers than today's, and without those that are lost, can serve the rest of the data."""
        return (
            self.knows_data
            and all(can_reshard for can_reshard, _ in self._divisible.values())
            and all(self._divisible[index][1] for index in {*lost, *self._given_up})
        )

    def has_all_buffers(self) -> bool:
        """Whether a checkpoint of now has all that dividing needs, of each trainer.

        Samples that cannot be fetched again are in the buffers only. That of a trainer is missing while it is lost, and
        until the process that took its place has read what had been applied.
        """
        if all(refetchable for _, refetchable in self._divisible.values()):
            return True
        rows = self.aggregator.ledger.rows
        behind = any(rows[index].positions.low <= last for index, last in self._read_before.items() if last >= 0)
        return not behind and not self.missing_trainers()

    def has_room(self, trainers: int) -> bool:
        """Whether the buffers of so many trainers can hold what those of today's must keep, however full they are."""
        buffer = self.config.buffer
        keeps = not all(refetchable for _, refetchable in self._divisible.values())
        # What does not fit by number is read again; the size of samples is known to the buffers only.
        keeps |= buffer.max_bytes is not None and (buffer_class(buffer.kind).repeats or buffer.pseudo_epochs > 1)
        return not keeps or trainers >= len(self.members.present())

    def request_resize(self, reason: str) -> None:
        """End this view of the run at a checkpoint; it continues with other trainers."""
        with self._lock:
            self.aggregator.request_resize(reason)

    def request_stop(self) -> None:
        """Let a signal to this process end the run also where trainers wait and announce nothing."""
        with self._lock:
            self.aggregator.request_stop()

    def end_without(self, limit: str, ranks: Sequence[int], also_waiting: bool) -> None:
        """Lose the trainers that keep a run from ending, and save what is applied if none is left.

        Args:
            limit: that has passed, for the user: see ``StopLimit.limit_text``.
            ranks: of the trainers.
            also_waiting: lose also those that wait for a reply of this server.
        """
        self._ends_without = True
        with self._lock:
            waiting = set() if also_waiting else self._waiting()
        for member in self.members.present():
            if member.index not in waiting and not self._takes_part_in_checkpoint(member.index):
                place = f"did not return from {member.place}" if member.place else "did not end"
                self.left_behind.append(f"rank {ranks[member.index]} (trainer {member.index}) {place} {limit}")
                self._lose(member, f"it {place} {limit}")
        if not self.members.present() and not self.finished.is_set():
            self._save_alone()

    def _waiting(self) -> set[int]:
        """Return the trainers that wait for a reply."""
        tables = (self._joins, self._stagings, *self._validations.tables, *self._gathers.tables)
        return {index for table in tables for index in table.parts} | self.aggregator.waiting

    def _takes_part_in_checkpoint(self, trainer_index: int) -> bool:
        """Whether a trainer waits for a checkpoint to be staged, or chunks of its part have arrived lately."""
        return time.monotonic() - self._chunk_at.get(trainer_index, -math.inf) < GRACE_S

    def _save_alone(self) -> None:
        """Save what is applied, and end the run: no trainer is left."""

        def save(updater: UpdaterState) -> dict[int, None]:
            with self._lock:
                if self.finished.is_set() or self.last_decision is not None:
                    return {}
                self.saves_alone = True
                is_due = self._staged != self._checkpoint_due()
            if is_due:
                self._staging_reason = "interrupted"
                self._stage(updater, time.perf_counter(), ())
            with self._lock:
                rules = self.aggregator.rules
                self.last_decision = end(*self._stop.state(), rules.step, rules.samples)
            self._parts.commit_if_complete()
            self.finished.set()
            return {}

        self._with_updater_state(lambda updater: self._complete({}, lambda: save(updater)))

    def _on_disconnect(self, member: Member, reason: str | None) -> None:
        """A trainer's process disconnected, on purpose (None) or because it is lost."""
        self.members.mark_disconnected(member)
        with self._lock:
            context_id = self._contexts.pop(TrainerId(member.index, self.view, member.incarnation), None)
        if reason is None:
            self._release(member)
            return
        try:
            self._lose(member, reason)
            # Not as soon as it is silent: a process that lives would lose the context of its step too.
            if context_id is not None:
                release_context(context_id)
                if self.coordinator is not None:
                    self.coordinator.release_context(context_id)
        except Exception as error:  # noqa: BLE001 - torch only prints what a callback raises
            self.fail(RemoteError.of(error).error())

    def _release(self, member: Member) -> None:
        """Wait no longer for a trainer that ended because it had come too late to take part."""
        with self._lock:
            absent = member.index not in self.aggregator.rules.participants
            if self.aggregator.ended and absent and member in self.members.present():
                self.members.leave(member.index)
                self._finish_if_all_left()

    def _lose(self, member: Member, reason: str) -> None:
        """Continue without a trainer, or as ``server.on_loss`` requires; nothing if that was done before."""
        index, on_loss = member.index, self.config.server.on_loss
        with self._loss_lock:
            with self._lock:
                if self.error is not None or not self.members.lose(member):
                    return
                loss = f"{member} is lost: {reason}"
                if on_loss == "fail" and not self._ends_without:
                    self.fail(PeerLost(loss))
                elif self.started and not self._can_continue_without(index):
                    self._change_view(loss)
                else:
                    self._forget(index)
                # A run that ends at the loss may be started again: then it returns to a checkpoint for this loss.
                ends = on_loss == "fail" and not self._ends_without
                returns = ends or isinstance(self.error, ViewChanged)
            # Without the lock: it writes a file.
            self.monitor.trainer_lost(index, loss, returns)
            self._on_trainer_lost(member)

    def _can_continue_without(self, trainer_index: int) -> bool:
        """Whether no update needs what only the lost trainer could still send, and another process can replace it."""
        if self.last_decision is not None:
            return True  # one has left, so the last version is validated and staged
        if trainer_index not in self._sources or (self.config.server.on_loss == "rollback" and not self._ends_without):
            return False  # in the latter case it is not known where its data starts
        if self.aggregator.ended and not self._ends_without:
            # Another one has to validate and save; one that has joined since takes no part in that.
            return bool(self.aggregator.rules.participants - {trainer_index})
        # Its gradients may be on server 0 and not on the others, which would wait for them.
        row, transport = self.aggregator.ledger[trainer_index], self.aggregator.transports[trainer_index]
        return not self.members.present() or self.is_whole or transport.zero_copy or row.accepted == row.decided

    def _forget(self, trainer_index: int) -> None:
        if trainer_index in self._joins.parts:
            # It may live, and another process have its place: it has no heartbeat yet that would be refused.
            evicted = Evicted(f"another process joined as trainer {trainer_index}; the run continues without this one")
            self._joins.pop(trainer_index)[0].set_result(RemoteError.of(evicted))
        self.aggregator.remove(trainer_index)
        for table in (self._stagings, *self._validations.tables, *self._gathers.tables):
            if trainer_index in table.parts:
                table.pop(trainer_index)
        self._parts.replace(trainer_index)
        self._finish_validations()
        self._finish_staging()
        self._finish_gathers()
        self._finish_if_all_left()

    def reconnect(self, reason: str) -> None:
        """Return all processes to the last checkpoint, with new connections: another one could not connect."""
        with self._lock:
            if self.error is None and self.last_decision is None:
                self._change_view(reason)

    def _change_view(self, reason: str) -> None:
        """Return all processes to the last checkpoint, if lost ones start again: this server's session ends."""
        if self.config.cluster.max_restarts == 0:
            self.fail(PeerLost(reason))  # no process starts again, so the next session would wait for it in vain
        else:
            self.fail(ViewChanged(f"{reason}; the run returns to its last checkpoint"))

    def fail(self, error: ParamserverError) -> None:
        """End the run: every waiting trainer gets the error, and so does every later call."""
        with self._lock:
            if self.error is None:
                self.error = error
            if self.coordinator is not None:
                self.coordinator.abort()
            reply = RemoteError.of(as_peer_error(self.error))
            tables = [self._joins, self._stagings, *self._validations.tables, *self._gathers.tables]
            # Removed from the tables under the lock, so that each future is completed once.
            waiting = [f for table in tables for f in table.pop_all()[1].values()] + self.aggregator.pop_waiters()
            readers, self._readers = self._readers, []
        for future in waiting:
            future.set_result(reply)
        for reading in readers:
            reading.set_result(reply)
        self.finished.set()

    def _check_running(self) -> None:
        if self.error is not None:
            raise as_peer_error(self.error)

    def _admit(self, sender: TrainerId) -> int:
        """Return the index of a trainer that calls; raise if the run has failed, or takes place without it."""
        self._check_running()
        return self._index_of(sender)

    def _index_of(self, sender: TrainerId) -> int:
        """Return the index of a trainer that takes part.

        Raises:
            Evicted: it was lost, also if its message was sent before that, or another process has taken its place.
        """
        if not self._is_present(sender):
            raise Evicted(
                f"trainer {sender.trainer_index} was taken for lost, and the run continues without this process"
            )
        return sender.trainer_index

    def _is_present(self, sender: TrainerId) -> bool:
        return self.aggregator.ledger.is_current(sender) and sender.trainer_index in self.aggregator.transports

    def _compute(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Run ``work`` without the lock, after what was submitted before, and then ``then`` with it.

        An error ends the run, also one of a user that is no ``Exception``, as the thread must continue. If the
        run has failed meanwhile, every caller has its reply, and the result is dropped.
        """

        def job() -> None:
            try:
                result = work()
                with self._lock:
                    if self.error is None:
                        then(result)
            except BaseException as error:  # noqa: BLE001 - ends the run and is sent to every trainer
                self.fail(RemoteError.of(error).error())

        self._submit(job)

    def _current_parameters(self) -> list[Tensor]:
        reading: concurrent.futures.Future[list[Tensor] | RemoteError] = concurrent.futures.Future()
        timeout_s = self.config.cluster.timeout_s

        def read(release: Callable[[], None]) -> None:
            if reading in self._readers:  # otherwise ``fail`` has replied
                self._readers.remove(reading)
                reading.set_result(self.store.snapshot()[0])
            release()

        with self._lock:
            self._check_running()
            self._readers.append(reading)
            self.aggregator.run_exclusively(read)
        # No trainer of this package calls this, so only a call of the user waits here.
        try:
            found = reading.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise DeadlineExceeded(
                f"the server was not done with its update within cluster.timeout_s ({timeout_s:g} s), so it cannot run "
                "the forward; raise cluster.timeout_s"
            ) from None
        if isinstance(found, RemoteError):
            raise found.error()
        return found

    def _complete(self, futures: Mapping[int, Future], make_replies: Callable[[], Mapping[int, Any]]) -> None:
        """Reply to each trainer with its own value; an error ends the run and is the reply to all."""
        # The futures are out of their table already, so ``fail`` does not complete them.
        try:
            replies = make_replies()
        except Exception as error:  # noqa: BLE001 - ends the run and is sent to every trainer
            failure = RemoteError.of(error).error()
            self.fail(failure)
            # As everywhere: a trainer that raised the error itself would be reported as its cause.
            replies = dict.fromkeys(futures, RemoteError.of(as_peer_error(failure)))
        for trainer_index, future in futures.items():
            future.set_result(replies[trainer_index])

    # Steps: see ``Aggregator``.

    @repeatable
    def announce(
        self, sender: TrainerId, announcement: Announcement, number: int = 0, buffers: PackedBuffers | None = None
    ) -> torch.futures.Future[StepGrant]:
        """Reply once the consistency model lets the trainer continue; to the same ``number`` again as before.

        Args:
            sender, announcement: of the next step.
            number: of the announcement.
            buffers: the module buffers that the trainer has changed since its last push, and that are to be kept.
        """
        with self._lock:
            return self.aggregator.announce(self._admit(sender), announcement, number, buffers)

    def pull(self, sender: TrainerId, held: Collection[int] = ()) -> tuple[Tensor, ...]:
        """Return the version that the trainer was granted, recorded in its distributed-autograd context.

        Args:
            sender: the trainer.
            held: buckets of the version that it has received already, in whose place empty tensors are sent.
        """
        with self._lock:
            trainer_index = self._admit(sender)
            self._contexts[sender] = current_context_id()
            return self.aggregator.pull(trainer_index, held)

    @repeatable
    def receive_bucket(
        self, sender: TrainerId, version: int, number: int, gradient: Tensor, revision: int = 0, has_all: bool = True
    ) -> Future:
        """Accept a part of a push while the trainer's backward continues; see ``UpdatePipeline.add`` for the reply.

        Args:
            sender, version: as in the push.
            number: of the bucket.
            gradient: of its parameters, zero for those that have none.
            revision: 0, and one more if the gradient has changed after it was sent.
            has_all: all parameters of the bucket have a gradient.
        """
        with self._lock:
            return self.aggregator.receive_bucket(self._admit(sender), version, number, gradient, revision, has_all)

    @repeatable
    def push(
        self,
        context_id: int,
        report: StepReport,
        buffers: PackedBuffers | None,
        announcement: Announcement | None = None,
    ) -> torch.futures.Future[StepGrant]:
        """Accept the gradients that a context holds; reply once they are applied or dropped.

        The reply has a ``result``. If the push carried an announcement, it is also the grant of the next step.
        """
        held = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        with self._lock:
            self._check_running()
            return self.aggregator.push(held, report, buffers, announcement)

    @repeatable
    def push_in_place(
        self, report: StepReport, buffers: PackedBuffers | None, announcement: Announcement | None = None
    ) -> torch.futures.Future[StepGrant]:
        """Accept a push whose gradients may still be incomplete: in shared memory, or as buckets on their way."""
        with self._lock:
            self._check_running()
            return self.aggregator.push_in_place(report, buffers, announcement)

    def _first_arrived(self, sender: TrainerId, gradient: Tensor) -> None:
        # Called inside the distributed backward, in a thread of the RPC agent. A gradient that was sent to a transport
        # which another one has replaced is of no step that is in progress.
        with self._lock:
            if self.error is not None or not self.aggregator.ledger.is_current(sender):
                return
            transport = self.aggregator.transports.get(sender.trainer_index)
            if isinstance(transport, RpcServerTransport):
                transport.receive_first(gradient)
                self.aggregator.gradients_arrived(sender.trainer_index)

    @repeatable
    def wait_version(self, sender: TrainerId, version: int) -> torch.futures.Future[int]:
        """Reply with the current version once that is ``version``: for a trainer without data while others take steps.

        If all of the others are lost, the current version is an earlier one.
        """
        with self._lock:
            return self.aggregator.wait_version(self._admit(sender), version)

    @repeatable
    def view_version(self, sender: TrainerId, version: int | None, held: Collection[int] = ()) -> VersionView:
        """Return a retained version, or the current one, without gradients; None for whichever is current.

        Of the flat tensors ``held`` no values are sent.
        """
        # Also after a failure: a trainer in the middle of a validation learns of it with its next step.
        with self._lock:
            return self.aggregator.view_version(self._index_of(sender), version, held)

    # The model on the server: see ``ModelService``.

    @repeatable
    def model_as_built(self) -> tuple[dict[str, Any], bool]:
        """Return the random states after the model was built, and its ``training`` flag."""
        assert self._model_service is not None
        return self._model_service.as_built

    def compute(self, sender: TrainerId, call: ModelCall) -> ModelReply:
        """Run the model for one trainer at the version that it was granted.

        Without the lock, as trainers compute concurrently: a granted version is immutable.
        """
        with self._lock:
            transport = self.aggregator.transports[self._admit(sender)]
        assert isinstance(transport, ServedTransport)
        return transport.compute(call)

    # Validation, checkpoints, records.

    @executed_once
    def report_validation(
        self, sender: TrainerId, version: int, shares: Mapping[int, WeightedSums]
    ) -> torch.futures.Future[ValidationReply]:
        """Add shares of a validation, by the indices of their trainers; reply once there are all of them.

        A trainer that joined after the others had validated this version is not waited for, and its share is ignored.
        """
        with self._lock:
            trainer_index = self._admit(sender)
            if version == self._validated[0]:
                return completed_future(ValidationReply(self._validated[1]))
            self._validations.add(version, shares)
            future = self._validations.wait(version, trainer_index)
            self._finish_validations()
        return future

    @executed_once
    def report_validation_share(self, sender: TrainerId, version: int, share: int, sums: WeightedSums) -> None:
        """Add a share of the validation of a retained version, for which no trainer waits."""
        with self._lock:
            self.aggregator.rules.share_reported(self._admit(sender))
            self._validations.add(version, {share: sums})
            self._finish_validations()

    def _finish_validations(self) -> None:
        """Record the validations of which there are all shares, in the order of versions, and reply to those that wait.

        Where trainers wait for each other and none of them evaluates, they get the missing shares to evaluate.
        """

        def finish(release: Callable[[], None]) -> None:
            rules = self.aggregator.rules
            for version in self._validations.versions():
                if not rules.lockstep and version in self.store.retained_versions:
                    complete = rules.is_validated(version)
                else:
                    for future, missing in self._validations.pop_requests(version, rules.participants):
                        future.set_result(ValidationReply(missing=missing))
                    complete = not self._validations.missing(version)
                if complete:
                    sums, futures = self._validations.pop(version)
                    self._complete(futures, partial(self._record_validation, version, sums, futures))
            release()

        # With the lock until they are recorded: another handler could record a later version first. While no update is
        # computed: schedules follow a validation, and an update reads what they set.
        with self._lock:
            self.aggregator.run_exclusively(finish)

    def _record_validation(
        self, version: int, sums: WeightedSums, trainers: Collection[int]
    ) -> dict[int, ValidationReply]:
        """Record a validation and step the schedules that follow it; return the reply to each of ``trainers``."""
        self.store.drop(version)
        since = self.aggregator.batch_began
        means, improved = sums.means(), self.monitor.record_validation(version, sums, since)
        self.store.updater.on_validation_end(version, means, since)
        self._validated = version, means
        return dict.fromkeys(trainers, ValidationReply(means, improved))

    @executed_once
    def stage_checkpoint(
        self,
        sender: TrainerId,
        reason: str,
        extra_state: Mapping[str, Any] | None = None,
        buffers: PackedBuffers | None = None,
    ) -> torch.futures.Future[bool]:
        """Take part in a checkpoint of the current version; reply once model and optimizer are copied.

        No trainer steps again before that, so model, optimizer and all parts are of one version. The trainers send
        their parts while training continues.

        Args:
            sender: the trainer.
            reason: see ``StagedCheckpoint``.
            extra_state: see ``extra_state_dict``. That of the first trainer is saved, as in ddp.
            buffers: as in ``announce``.

        Returns:
            Whether the trainer is to send its part; not if it joined after the others had saved this version.
        """
        with self._lock:
            trainer_index = self._admit(sender)
            if self._staged == self._checkpoint_due():
                return completed_future(False)
            self._staging_reason = reason
            self.aggregator.keep_buffers(trainer_index, buffers)
            future = self._stagings.add(trainer_index, (sender, extra_state or {}))
        self._finish_staging()
        return future

    def _checkpoint_due(self) -> tuple[int, bool]:
        """Return the current version, and whether it is the best one; see ``CheckpointManager.stage``."""
        step = self.aggregator.rules.step
        return step, self.monitor.improved_step == step

    def _finish_staging(self) -> None:
        with self._lock:
            if not self._stagings.has_all(self.aggregator.rules.participants):
                return
            staged_by, futures, arrival_s = self._stagings.pop_all()
            self._chunk_at |= dict.fromkeys(futures, math.inf)

        def stage(updater: UpdaterState) -> dict[int, bool]:
            if extra_state := staged_by[min(staged_by)][1]:
                self.store.model.load_state_dict(extra_state, strict=False)  # its own modules make no forward
            self._stage(updater, min(arrival_s.values()), [sender for sender, _ in staged_by.values()])
            return dict.fromkeys(futures, True)

        def stage_and_reply(updater: UpdaterState) -> None:
            self._complete(futures, lambda: stage(updater))
            with self._lock:
                self._chunk_at |= dict.fromkeys(futures, time.monotonic())
            self._parts.commit_if_complete()  # at once if every trainer was lost meanwhile

        self._with_updater_state(stage_and_reply)

    def _stage(self, updater: UpdaterState, since: float, senders: Sequence[TrainerId]) -> None:
        """Stage a checkpoint of the current version, of which these trainers send their parts.

        No update is applied between the copies of model, optimizer and rules; the lock is held for the last only.
        """
        rules, ledger = self.aggregator.rules, self.aggregator.ledger
        with self._lock:
            self._staged = self._checkpoint_due()
            states, substitutes = (rules.state_dict(), ledger.state_dict()), self._substitute_parts()

        def collect(staged: StagedCheckpoint) -> None:
            # A trainer that was lost since, also if another process has its place, sends no part. With the lock:
            # ``_forget`` replaces the part of one that is lost from now on.
            with self._lock:
                present = {sender.trainer_index for sender in senders if self._is_present(sender)}
                self._parts.start(staged, present, substitutes)

        self.checkpoints.save(rules.step, self.store.model, updater, self._staging_reason, since, collect, *states)

    def _substitute_parts(self) -> dict[int, dict[str, Any]]:
        """Return, for each trainer, what its part of a checkpoint is replaced with if it is lost before that is sent.

        Such a part has no buffer: the trainer's data continues after what has been applied. Its task's state is added
        by ``CheckpointManager.commit``.
        """
        parts = {}
        for index, source in self._sources.items():
            parts[index] = {
                "trainer_index": index,
                "buffer": None,
                "applied": self.aggregator.ledger[index].positions.state_dict(),
                "source": source,
                "random": None,
                "resumes": self.monitor.resumes + 1,
                "counters": self._progress_of(index),
            }
        return parts

    def _progress_of(self, trainer_index: int) -> dict[str, Any]:
        """Return the counters with which another process continues as a lost trainer; see ``TrainerProgress``."""
        row = self.aggregator.ledger[trainer_index]
        return {
            "batch_idx": (row.pushes - row.further_pushes) * self.config.training.accumulate_batches,
            "samples_served": row.samples,
            "epoch": self.monitor.epoch,
            "seconds": self.monitor.seconds,
            "steps": self.aggregator.rules.step,
        }

    def _with_updater_state(self, then: Callable[[UpdaterState], None]) -> None:
        """Call ``then`` with the state of optimizer and schedule, once the model holds all parameters.

        Without the lock, in the update thread, while no update is applied.
        """
        coordinator, updater = self.coordinator, self.store.updater

        def begin(release: Callable[[], None]) -> None:
            if coordinator is None:
                self._compute(lambda: then(updater), lambda _: release())
            else:
                # In the order of calls: what server 0 has to write for the others comes before it is read.
                coordinator.collect_state(
                    lambda merge: self._compute(lambda: then(CollectedState(merge(), updater)), lambda _: release())
                )

        with self._lock:
            self.aggregator.run_exclusively(begin)

    @executed_once
    def receive_part_chunk(self, sender: TrainerId, step: int, chunk: Tensor) -> None:
        """Accept a chunk of a trainer's part of the checkpoint of ``step``, also from a run that has failed since."""
        # With the lock: its substitute must not replace the part of a trainer between the two calls.
        with self._lock:
            trainer_index = self._index_of(sender)
            self._parts.add_chunk(trainer_index, step, chunk)
            self._chunk_at[trainer_index] = time.monotonic()

    @executed_once
    def finish_part(self, sender: TrainerId, step: int, pause_s: float) -> torch.futures.Future[None]:
        """A trainer's part is complete; it stopped for ``pause_s`` seconds. The last part commits the checkpoint."""
        future: torch.futures.Future[None] = torch.futures.Future()
        with self._lock:
            trainer_index = self._index_of(sender)
            self._parts.finish_part(trainer_index, step, pause_s)

        # Without the lock: it may write to the disk.
        def commit() -> dict[int, None]:
            self._parts.commit_if_complete()
            return {trainer_index: None}

        self._complete({trainer_index: future}, commit)
        return future

    @executed_once
    def receive_records(self, sender: TrainerId, records: Sequence[Record]) -> None:
        """Write a trainer's records."""
        with self._lock:
            self._index_of(sender)
        try:
            for record in records:
                self.monitor.record(record)
        except StorageError as error:
            self.fail(error)
            raise as_peer_error(error) from error

    @executed_once
    def all_gather(
        self, sender: TrainerId, value: Any, call: tuple[int, ...], active: tuple[int, ...] | None
    ) -> torch.futures.Future[list[Any]]:
        """Reply with the values of all trainers, in their order, once each has made the same call; see ``Gathers``."""
        with self._lock:
            future = self._gathers.add(self._admit(sender), value, call, active)
        self._finish_gathers()
        return future

    def _finish_gathers(self) -> None:
        with self._lock:
            complete = self._gathers.pop_complete(self.aggregator.rules.participants)
        for future, values in complete:
            future.set_result(values)

    def _check_gathers(self) -> None:
        """Fail the run if a trainer has not made a call of ``all_gather`` that others wait for."""
        limit_s = self.config.cluster.timeout_s
        with self._lock:
            missing = self._gathers.overdue(self.aggregator.rules.participants, limit_s)
        if missing:
            self.fail(
                TaskError(
                    f"trainer.all_gather was not called by trainer {', '.join(map(str, missing))} within "
                    f"cluster.timeout_s ({limit_s:g} s) of the others; call it on all trainers, at the same places"
                )
            )

    @repeatable
    def averages(self, sender: TrainerId) -> torch.futures.Future[dict[str, Tensor]]:
        """Reply with the average of each parameter, by name, during a validation, in which no update is applied."""
        future: torch.futures.Future[dict[str, Tensor]] = torch.futures.Future()
        with self._lock:
            index = self._admit(sender)
            self._with_updater_state(
                lambda updater: self._complete({index: future}, lambda: {index: updater.averages()})
            )
        return future

    @repeatable
    def optimizer_state(self) -> torch.futures.Future[dict[str, Any]]:
        """Reply with the optimizer's ``state_dict`` when no update is in progress."""
        future: torch.futures.Future[dict[str, Any]] = torch.futures.Future()

        def copy(updater: UpdaterState) -> None:
            self._complete({0: future}, lambda: {0: stage_copy(updater.state_dict()["optimizer"])})

        with self._lock:
            self._with_updater_state(copy)
        return future

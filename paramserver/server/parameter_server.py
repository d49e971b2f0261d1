"""The parameter server: the handlers that trainers call.

Handlers never block: a reply that depends on other trainers is a future, and what is computed from parameters or
optimizer is a job of the update thread, which does not hold the lock. Errors are returned as values.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paramserver.checkpoint import stage_copy
from paramserver.config import Config, num_servers_of
from paramserver.consistency import Announcement, Decision, PushId, TrainerId
from paramserver.devices import to_cpu
from paramserver.distributed.membership import HeartbeatReply, HeartbeatReport, Member
from paramserver.distributed.rpc_agent import distributed_gradients
from paramserver.distributed.rpc_calls import (
    LastReplies,
    RemoteError,
    completed_future,
    executed_once,
    repeatable,
    rref_of,
)
from paramserver.errors import DeadlineExceeded, Evicted, StorageError, UnsupportedConfiguration, as_peer_error
from paramserver.metrics.records import Record, TrainerTotals, WeightedSums
from paramserver.optim.updater import UpdaterState
from paramserver.parameters.model_tree import PackedBuffers
from paramserver.server.aggregator import Aggregator
from paramserver.server.model_service import ModelService, ServedTransport
from paramserver.server.quorum import Gathers, Staging, Validations
from paramserver.server.roster import Roster
from paramserver.server.server_run import ServerRun
from paramserver.server.shard import ParameterShard, ShardHandlers
from paramserver.transport.autograd import pull
from paramserver.transport.messages import (
    DataPosition,
    Future,
    JoinReply,
    ModelCall,
    ModelReply,
    Push,
    StepGrant,
    ValidationReply,
    VersionView,
)
from paramserver.transport.shared_memory import ServerSharedMemory


class TutorialMethods(nn.Module):
    """The public methods of the server in PyTorch's RPC tutorial. Trainers of this package do not call them."""

    config: Config
    run: ServerRun
    aggregator: Aggregator
    shard: ParameterShard

    def forward(self, *inputs: Any) -> Any:
        """Return the model's output at the current version, computed on the server, with its gradient recorded."""
        self._require_all_parameters()
        parameters = to_cpu(self._current_parameters())
        return self.aggregator.store.forward(pull(self.shard.updater.leaves, parameters), inputs)

    def get_dist_gradients(self, context_id: int) -> dict[str, Tensor]:
        """Return the gradients that a distributed-autograd context holds, by parameter name, on the CPU."""
        self._require_all_parameters()
        gradients = distributed_gradients(context_id)
        by_name = self.aggregator.store.gradients_by_name(gradients, self.shard.updater.leaves)
        return {name: view.cpu() for name, view in by_name.items()}

    def get_param_rrefs(self) -> list[Any]:
        """Return an RRef for each trained parameter."""
        self._require_all_parameters()
        return [rref_of(parameter) for parameter in self.aggregator.store.parameters.tensors.values()]

    def _require_all_parameters(self) -> None:
        if num_servers_of(self.config) > 1:
            raise UnsupportedConfiguration(
                f"cluster.num_servers ({num_servers_of(self.config)}) must be 1 for ParameterServer.forward, "
                "get_dist_gradients and get_param_rrefs, as no server holds the whole model; lower it"
            )
        if tables := self.aggregator.store.tables:
            raise UnsupportedConfiguration(
                f"embedding tables ({', '.join(tables)}) must have sparse=False for ParameterServer.forward, "
                "get_dist_gradients and get_param_rrefs, which send all parameters"
            )

    def _current_parameters(self) -> list[Tensor]:
        """Return the parameters of the current version; the caller waits while an update is computed."""
        run, timeout_s = self.run, self.config.cluster.timeout_s
        reading: concurrent.futures.Future[list[Tensor] | RemoteError] = concurrent.futures.Future()

        def read(release: Callable[[], None]) -> None:
            if reading in run.readers:  # otherwise ``fail`` has replied
                run.readers.remove(reading)
                reading.set_result(self.aggregator.store.snapshot()[0])
            release()

        with run.lock:
            run.check()
            run.readers.append(reading)
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


class ParameterServer(TutorialMethods, ShardHandlers):
    """Holds all parameters and the one optimizer, and replies to the calls of all trainers.

    Every update makes a new version. Trainers compute on immutable snapshots of one version, so gradients are exact
    under any concurrency. This class has the handlers, which take the lock, find out who calls, and leave the rest to
    the parts of the server: ``Aggregator`` carries out the steps, ``Roster`` knows who takes part, ``Validations``,
    ``Staging`` and ``Gathers`` are what trainers do together. ``server/build.py`` makes these parts, and
    ``server/client.py`` is the other end of every handler.

    Args:
        config: of the run.
        run: the lock of the server, and the end of its run.
        shard: the parameters of this server.
        aggregator, roster, validations, staging, gathers: see above.
        shared_memory: what processes of this host share.
        model_service: of the model that trainers call on the server; None if they have it themselves.

    Example::

        >>> from paramserver import ParameterServer  # created by the launcher, on rank 0
        >>> sorted(name for name in vars(ParameterServer) if name in ("join", "announce", "pull", "push", "leave"))
        ['announce', 'join', 'leave', 'pull', 'push']
    """

    def __init__(
        self,
        config: Config,
        run: ServerRun,
        shard: ParameterShard,
        aggregator: Aggregator,
        roster: Roster,
        validations: Validations,
        staging: Staging,
        gathers: Gathers,
        shared_memory: ServerSharedMemory,
        model_service: ModelService | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.run = run
        self.shard = shard
        self.aggregator = aggregator
        self.roster = roster
        self.shared_memory = shared_memory
        self.last_replies = LastReplies()
        self._lock = run.lock
        self._validations = validations
        self._staging = staging
        self._gathers = gathers
        self._model_service = model_service

    # Joining and leaving: see ``Roster``.

    def join(self, member: Member, epoch_samples: int | None) -> torch.futures.Future[JoinReply]:
        """Add a trainer; reply once all trainers and servers have joined, or at once to one that joins later.

        A trainer that joins again, or another process that takes its place, is a new incarnation: the earlier one is
        evicted.

        Raises:
            RunEnded: the other trainers have finished.
            GenerationChanged: they have finished this generation of the run.
            Evicted: the message was sent to an earlier server, or another process has joined since it was sent.
        """
        return self.roster.join(member, epoch_samples)

    @repeatable
    def report_source(self, sender: TrainerId, position: DataPosition) -> None:
        """Record where the data of a trainer starts in this generation, before its first announcement."""
        with self._lock:
            self.roster.sources.report(self.roster.index_of(sender), position)

    @executed_once
    def share_segments(self, sender: TrainerId) -> int:
        """Exchange parameters and gradients with a trainer of this host in shared memory from now on.

        Return the number of snapshots there are for it; 0 if there was too little memory for its gradients.
        """
        with self._lock:
            trainer_index, layout = self.roster.index_of(sender), self.aggregator.store.parameters.layout
            made = self.shared_memory.make_transport(
                trainer_index, sender.incarnation, layout, self.aggregator.segments_in_use
            )
            if made is None:
                return 0
            # Replaces the transport of ``join`` before the trainer's first announcement, so no version is pinned in it.
            self.aggregator.transports[trainer_index], snapshots = made
            return snapshots

    def heartbeat(self, trainer_index: int, worker_id: int, report: HeartbeatReport) -> HeartbeatReply:
        """Record a sign of life, and what the trainer reports about itself.

        Raises:
            Evicted: the process takes no part any more.
            PeerLost: the run has failed, or another generation begins; the trainer may wait for something else
                meanwhile.
        """
        self.run.check()
        if not self.roster.members.record_heartbeat(trainer_index, worker_id, report):
            raise Evicted(f"trainer {trainer_index} was taken for lost, and the run continues without this process")
        # Only a change takes the lock.
        if report.blocks is not self.aggregator.rules.blocks(trainer_index):
            with self._lock:
                self.aggregator.set_blocks(trainer_index, report.blocks)
        requested = self.aggregator.stop
        if report.stop and not requested.event.is_set():
            requested.request(report.stop)
        return HeartbeatReply(requested.state()[1])

    @repeatable
    def leave(self, sender: TrainerId, totals: TrainerTotals, decision: Decision) -> None:
        """A trainer has finished; after the last one the server ends."""
        with self._lock:
            self.roster.leave(self.roster.admit(sender), totals, decision)

    def report_failure(self, sender: TrainerId, error: RemoteError) -> None:
        """A trainer failed; the run fails with it."""
        with self._lock:
            # Marked as left first: the process exits next, which must not count as a loss and hide this error.
            self.roster.members.leave(self.roster.index_of(sender))
            self.run.fail(error.error())

    # Steps: see ``Aggregator``.

    @executed_once
    def announce(
        self, sender: TrainerId, announcement: Announcement, buffers: PackedBuffers | None = None
    ) -> torch.futures.Future[StepGrant]:
        """Reply once the consistency model lets the trainer continue.

        ``buffers`` are the module buffers that the trainer has changed since its last push, and that are to be kept.
        """
        with self._lock:
            return self.aggregator.announce(self.roster.admit(sender), announcement, buffers)

    def pull(
        self, sender: PushId, version: int, received: Collection[int] = (), recorded: bool = True
    ) -> tuple[Tensor, ...]:
        with self._lock:
            self.roster.admit(sender)
            if recorded:
                self.roster.note_context(sender)
            self.aggregator.check_granted(sender, version, "pulled it")
            return self.shard.pull(sender, version, received, recorded)

    @repeatable
    def receive_bucket(
        self, sender: PushId, version: int, number: int, gradient: Tensor, revision: int = 0, has_all: bool = True
    ) -> Future:
        with self._lock:
            self.roster.admit(sender)
            self.shard.admit(sender)
            if not self.shard.is_late(sender, version):
                self.aggregator.check_granted(sender, version, "sent a gradient for it")
            return self.shard.receive_bucket(sender, version, number, gradient, revision, has_all)

    @repeatable
    def look_up(self, sender: TrainerId, version: int | None, rows: Mapping[int, Tensor]) -> Future:
        with self._lock:
            self.roster.admit(sender)
            return self.shard.look_up(sender, version, rows)

    @repeatable
    def push(self, push: Push, has_gradients: bool = False) -> torch.futures.Future[StepGrant]:
        """Accept a push; reply once its gradients, which may still be on their way, are applied or dropped.

        The reply has a ``result``. If the push carried an announcement, it is also the grant of the next step. The
        gradients are in shared memory, in messages, or in a context of this process; with ``has_gradients`` none of
        them is still on its way.
        """
        with self._lock:
            self.run.check()
            return self.aggregator.push(push, has_gradients)

    @repeatable
    def wait_version(self, sender: TrainerId, version: int) -> torch.futures.Future[int]:
        """Reply with the current version once that is ``version``: for a trainer without data while others take steps.

        If all of the others are lost, the current version is an earlier one.
        """
        with self._lock:
            return self.aggregator.wait_version(self.roster.admit(sender), version)

    @repeatable
    def view_version(self, sender: TrainerId, version: int | None, without: Collection[int] = ()) -> VersionView:
        """Return a retained version, or the current one, without gradients; None for whichever is current.

        Of the flat tensors ``without`` no values are sent.
        """
        # Also after a failure: a trainer in the middle of a validation learns of it with its next step.
        with self._lock:
            return self.aggregator.view_version(self.roster.index_of(sender), version, without)

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
            transport = self.aggregator.transports[self.roster.admit(sender)]
            assert isinstance(transport, ServedTransport)
            if call.wants_grad:
                transport.context_id = self.roster.note_context(sender)
        return transport.compute(call)

    # What trainers do together.

    @executed_once
    def report_validation(
        self, sender: TrainerId, version: int, shares: Mapping[int, WeightedSums]
    ) -> torch.futures.Future[ValidationReply]:
        """Add shares of a validation, by the indices of their trainers; reply once there are all of them.

        A trainer that joined after the others had validated this version is not waited for, and its share is ignored.
        """
        with self._lock:
            trainer_index, (last, means) = self.roster.admit(sender), self._validations.last
            if version == last:
                # Its best checkpoint may be missing yet: those that were to save it may be lost.
                improved = self.aggregator.monitor.improved_step == version
                return completed_future(ValidationReply(means, improved))
            return self._validations.report(trainer_index, version, shares)

    @executed_once
    def report_validation_share(self, sender: TrainerId, version: int, share: int, sums: WeightedSums) -> None:
        """Add a share of the validation of a retained version, for which no trainer waits."""
        with self._lock:
            self.aggregator.rules.share_reported(self.roster.admit(sender))
            self._validations.report_share(version, share, sums)

    @executed_once
    def stage_checkpoint(
        self,
        sender: TrainerId,
        reason: str,
        extra_state: Mapping[str, Any] | None = None,
        buffers: PackedBuffers | None = None,
        ends_epoch: bool = False,
    ) -> torch.futures.Future[bool]:
        """Take part in a checkpoint of the current version; reply once model and optimizer are copied.

        See ``Staging.call``. The reply is whether the trainer is to send its part; not if it joined after the others
        had saved this version.
        """
        with self._lock:
            self.roster.admit(sender)
            future = self._staging.call(sender, reason, extra_state or {}, buffers, ends_epoch)
        if future is None:
            return completed_future(False)
        self._staging.evaluate()
        return future

    @executed_once
    def receive_part_chunk(self, sender: TrainerId, step: int, chunk: Tensor) -> None:
        """Accept a chunk of a trainer's part of the checkpoint of ``step``, also from a run that has failed since."""
        # With the lock: its substitute must not replace the part of a trainer between the two calls.
        with self._lock:
            self._staging.add_chunk(self.roster.index_of(sender), step, chunk)

    @executed_once
    def finish_part(self, sender: TrainerId, step: int, pause_s: float) -> torch.futures.Future[None]:
        """A trainer's part is complete; it stopped for ``pause_s`` seconds. The last part commits the checkpoint."""
        future: torch.futures.Future[None] = torch.futures.Future()
        with self._lock:
            trainer_index = self.roster.index_of(sender)
            self._staging.finish_part(trainer_index, step, pause_s)
        self._staging.commit(trainer_index, future)
        return future

    @executed_once
    def all_gather(
        self, sender: TrainerId, value: Any, call: tuple[int, ...], active: tuple[int, ...] | None, has_limit: bool
    ) -> torch.futures.Future[list[Any]]:
        """Reply with the values of all trainers, in their order, once each has made the same call; see ``Gathers``."""
        with self._lock:
            future = self._gathers.add(self.roster.admit(sender), value, call, active, has_limit)
        self._gathers.evaluate()
        return future

    # Records and state.

    @executed_once
    def receive_records(self, sender: TrainerId, records: Sequence[Record]) -> None:
        """Write a trainer's records."""
        with self._lock:
            self.roster.index_of(sender)
        try:
            for record in records:
                self.aggregator.monitor.record(record)
        except StorageError as error:
            self.run.fail(error)
            raise as_peer_error(error) from error

    @repeatable
    def averages(self, sender: TrainerId) -> torch.futures.Future[dict[str, Tensor]]:
        """Reply with the average of each parameter, by name, during a validation, in which no update is applied."""
        with self._lock:
            self.roster.admit(sender)
            return _read_updater(self, lambda updater: updater.averages())

    @repeatable
    def optimizer_state(self) -> torch.futures.Future[dict[str, Any]]:
        """Reply with the optimizer's ``state_dict`` when no update is in progress."""
        with self._lock:
            return _read_updater(self, lambda updater: stage_copy(updater.state_dict()["optimizer"]))


def _read_updater(server: ParameterServer, read: Callable[[UpdaterState], Any]) -> Future:
    """Return the future of what ``read`` returns when no update is in progress. With the lock of the server."""
    future: Future = torch.futures.Future()
    server.aggregator.with_updater_state(
        lambda updater: server.run.complete({0: future}, lambda: {0: read(updater)}),
    )
    return future

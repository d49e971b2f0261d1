"""The parameter server: the handlers that trainers call, over versions of the parameters and rules of consistency.

Handlers never block: what has to wait for other trainers returns a future. Errors travel back as values.

What PyTorch's RPC tutorial calls on its parameter server, off the hot path.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from paramserver.checkpoint import ChunkedFile, stage_copy
from paramserver.config import Config, server_computes
from paramserver.consistency import Announcement, Decision, make_consistency
from paramserver.context import StopRequest
from paramserver.distributed.membership import Member, Members, watch_peer
from paramserver.distributed.rpc_calls import RemoteError
from paramserver.errors import ParamserverError, PeerLost, TrainingError, UnsupportedConfiguration, as_peer_error
from paramserver.metrics.records import Record, StepReport, TrainerTotals, WeightedSums, merge_sums
from paramserver.parameters.model import untrained_state_dict
from paramserver.runs.checkpoint_manager import CheckpointManager, PartCollector, Stateful
from paramserver.server.aggregator import Aggregator
from paramserver.server.coordinator import CollectedState, ShardCoordinator
from paramserver.server.model_service import ModelService, ServedTransport
from paramserver.server.parameter_store import ParameterStore
from paramserver.task import Task
from paramserver.transport.autograd import pull
from paramserver.transport.base import ServerTransport
from paramserver.transport.messages import Future, JoinReply, ModelReply, ModelCall, PendingReplies, VersionView
from paramserver.transport.rpc import RpcServerTransport, ShardedServerTransport, WireVersion
from paramserver.transport.segments import SegmentHost
from paramserver.transport.shared_memory import SharedMemory


class TutorialMethods(nn.Module):
    """The public methods of the tutorial's server; ``is_whole`` says that all parameters are up to date here."""

    config: Config
    versions: ParameterStore
    is_whole: bool
    _lock: threading.RLock

    def forward(self, *inputs: Any) -> Any:
        """The model's output at the current version, on the server; its gradient goes to the flat leaf."""
        self._require_all_parameters()
        with self._lock:
            flats = pull(self.versions.leaves, self.versions.snapshot()[0])
        return self.versions.forward(flats, inputs)

    def get_dist_gradients(self, context_id: int) -> dict[str, Tensor]:
        """The gradients that a distributed-autograd context holds for this server's parameters, by name, on the CPU."""
        self._require_all_parameters()
        held = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        return {name: view.cpu() for name, view in self.versions.gradients_by_name(held).items()}

    def get_param_rrefs(self) -> list[Any]:
        """An RRef for each trained parameter."""
        self._require_all_parameters()
        return [rpc.RRef(parameter) for parameter in self.versions.parameters.tensors.values()]

    def _require_all_parameters(self) -> None:
        if not self.is_whole:
            raise UnsupportedConfiguration(
                f"cluster.num_servers ({self.config.cluster.num_servers}) must be 1 for ParameterServer.forward, "
                "get_dist_gradients and get_param_rrefs, as no server holds the whole model; lower it"
            )


class ParameterServer(TutorialMethods):
    """All parameters in a few flat tensors, one optimizer over views of them, and a version that counts updates.

    What a trainer or a forward on the server uses is an immutable snapshot of one version, so gradients are exact
    whatever happens meanwhile.

    Args:
        task: builds the model and the optimizer.
        config: the run's.
        trainers: how many trainers the run has.
        checkpoints: saves and restores; its monitor writes records.
        stop: set by a signal to this process.
        segments: gives memory that trainers of this host share; None where all is to travel over RPC.
    """

    def __init__(
        self,
        task: Task,
        config: Config,
        trainers: int,
        checkpoints: CheckpointManager,
        stop: StopRequest,
        segments: SegmentHost | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.checkpoints = checkpoints
        self.monitor = monitor = checkpoints.monitor
        self.trainers = trainers
        self.members = Members()
        rules = make_consistency(config, trainers, monitor.step, monitor.samples)
        rules.load_state_dict(checkpoints.consistency_state)
        several = config.cluster.num_servers > 1
        self._sharing = SharedMemory(segments, config.server, rules.lockstep, monitor.note)
        in_place = (rules.lockstep or several) and segments is not None
        self.versions = ParameterStore(task, config, self._sharing.allocate_parameters if in_place else None)
        parameters = self.versions.parameters
        self._forwards = ModelService(task, config, self.versions) if server_computes(config) else None
        self._sharing.open_snapshots(parameters.layout, trainers, lambda: (rules.step, parameters.flats))
        wire_dtype = getattr(torch, config.server.wire_dtype)
        self._wire = parameters.layout.narrowed(wire_dtype)
        checkpoints.restore_model(self.versions.model)
        checkpoints.restore_optimizer(self.versions.updater)
        self._lock = threading.RLock()
        self.conductor = self._make_conductor(stop) if several else None
        self.is_whole = self.conductor is None
        own = self.versions.shard.layout
        self._outgoing = WireVersion(own, own.narrowed(wire_dtype), self.versions.own_snapshot)
        self.rounds = Aggregator(
            rules, self.versions, monitor, stop, lambda error: self.fail(RemoteError.of(error).error()), self.conductor
        )
        self.finished = threading.Event()
        self.error: ParamserverError | None = None
        self.totals: dict[int, TrainerTotals] = {}
        self.last_decision: Decision | None = None
        self._arrivals = PendingReplies()
        self._validations: dict[int, PendingReplies] = {}
        self._cuts = PendingReplies()
        self._deposits = PartCollector(checkpoints, trainers)

    def _make_conductor(self, stop: StopRequest) -> ShardCoordinator:
        where, begun = self._sharing.location, self._check_arrivals
        return ShardCoordinator(
            self.config, self.versions, self._lock, stop, self.monitor.step, where, self.fail, begun
        )

    def _make_end(self) -> ServerTransport:
        if self._forwards is not None:
            return self._forwards.new_transport()
        if self.conductor is not None:
            return ShardedServerTransport(self.versions.shard, self.versions.leaves, self._outgoing)
        return RpcServerTransport(self.versions.leaves, self._outgoing)

    # A trainer's life.

    def arrive(self, member: Member, epoch_samples: int | None) -> Future:
        """Take a trainer in; answered with a ``JoinReply`` when all trainers are here."""
        with self._lock:
            self._check_running()
            self.members.join(member)
            self.rounds.epoch_samples = epoch_samples
            self.rounds.ends[member.trainer_index] = self._make_end()
            future = self._arrivals.add(member.trainer_index, None)
        watch_peer(member.name, lambda reason: self._gone(member.trainer_index, reason))
        self._check_arrivals()
        return future

    def _check_arrivals(self) -> None:
        """Welcome all trainers once everybody is here."""
        with self._lock:
            if self.error is not None or len(self._arrivals.parts) < self.trainers:
                return
            if self.conductor is not None and not self.conductor.complete:
                return
            futures = self._arrivals.pop_all()[1]
        self._conclude(futures, self._welcomes)

    def _welcomes(self) -> dict[int, JoinReply]:
        self.monitor.expect_samples(self.rounds.epoch_samples)
        model = stage_copy(untrained_state_dict(self.versions.model)) if self._forwards is None else {}
        layouts = self.versions.parameters.layout, self._wire, self.versions.buffers.layout
        step, lockstep, stored = self.rounds.rules.step, self.rounds.rules.lockstep, self.checkpoints.trainer_part
        if self.conductor is not None and not self.conductor.shares_memory:
            self._sharing.disable()
        where, shards = self._sharing.address, () if self.conductor is None else self.conductor.shards
        return {i: JoinReply(model, *layouts, step, lockstep, where, stored(i), shards) for i in range(self.trainers)}

    def share_segments(self, trainer_index: int) -> int:
        """A trainer of this host reads and writes in place from now on.

        Returns:
            How many snapshots there are for it; 0 where there was too little memory for its gradients.
        """
        with self._lock:
            layout, shard = self.versions.parameters.layout, self.versions.shard
            made = self._sharing.make_transport(
                trainer_index, layout, shard, lambda: self._gradients_arrived(trainer_index)
            )
            if made is None:
                return 0
            self.rounds.ends[trainer_index], slots = made
            return slots

    def _conclude(self, futures: Mapping[int, Future], answers: Callable[[], Mapping[int, Any]]) -> None:
        """Answer all who wait, each with its own value; with the error, for all and for good, where there is none."""
        try:
            values = answers()
        except Exception as error:  # noqa: BLE001 - it ends the run and travels to every trainer
            failure = RemoteError.of(error)
            self.fail(failure.error())
            values = dict.fromkeys(futures, failure)
        for index, future in futures.items():
            future.set_result(values[index])

    def beat(self, trainer_index: int) -> None:
        self.members.record_heartbeat(trainer_index)

    def leave(self, totals: TrainerTotals, decision: Decision) -> None:
        """A trainer is done. After the last one the server ends."""
        with self._lock:
            self.members.leave(totals.trainer_index)
            self.totals[totals.trainer_index] = totals
            self.last_decision = decision
            if len(self.totals) == self.trainers:
                self.finished.set()

    def missing(self) -> list[str]:
        """Who has not arrived yet."""
        servers = [] if self.conductor is None else self.conductor.missing()
        return [f"trainer {i}" for i in self.members.missing(self.trainers)] + [f"server {i}" for i in servers]

    def wait_for_goodbyes(self, timeout_s: float) -> None:
        """Until every trainer that is alive has let go of this server, which it does when it needs it no more."""
        self.members.wait_for_disconnects(timeout_s)

    def give_up(self, trainer_index: int, told: RemoteError) -> None:
        """A trainer failed, and says why; so the run fails."""
        self.members.leave(trainer_index)
        self.fail(told.error())

    def _gone(self, trainer_index: int, reason: str | None) -> None:
        self.members.mark_disconnected(trainer_index)
        if reason is not None:
            self._lost(trainer_index, reason)

    def _lost(self, trainer_index: int, reason: str) -> None:
        member = self.members.get(trainer_index)
        if not member.left:
            self.fail(PeerLost(f"{member} is lost: {reason}"))

    def look_for_silent_peers(self) -> None:
        if self.conductor is not None:
            self.conductor.look_for_silent()
        for member in self.members.overdue(self.config.server.lost_after_s):
            silence_s = self.config.server.lost_after_s
            self._lost(member.trainer_index, f"no heartbeat for server.lost_after_s ({silence_s:g} s)")
            self.members.mark_disconnected(member.trainer_index)  # it will say none

    def fail(self, error: ParamserverError) -> None:
        """End the run: every trainer that waits, and every one that calls later, gets the error."""
        with self._lock:
            if self.error is None:
                self.error = error
            if self.conductor is not None:
                self.conductor.end()
            failure = RemoteError.of(as_peer_error(self.error))
            gatherings = [self._arrivals, self._cuts, *self._validations.values()]
            waiting = [f for g in gatherings for f in g.pop_all()[1].values()] + self.rounds.take_waiting()
        for future in waiting:
            future.set_result(failure)
        self.finished.set()

    def _check_running(self) -> None:
        if self.error is not None:
            raise as_peer_error(self.error)

    # A step: see ``Aggregator``.

    def begin(self, trainer_index: int, announcement: Announcement) -> Future:
        """A trainer announces itself; answered with a ``StepGrant`` when the consistency lets it go on."""
        with self._lock:
            self._check_running()
            return self.rounds.begin(trainer_index, announcement)

    def pull(self, trainer_index: int) -> tuple[Tensor, ...]:
        """The version of a trainer's round, inside its distributed-autograd context."""
        with self._lock:
            self._check_running()
            return self.rounds.pull(trainer_index)

    def take_early(self, trainer_index: int, version: int, number: int, gradient: Tensor) -> None:
        """A part of the gradients of a trainer's push, sent while its backward goes on."""
        with self._lock:
            self._check_running()
            self.rounds.take_early(trainer_index, version, number, gradient)

    def step(
        self, context_id: int, report: StepReport, buffers: Sequence[Tensor], announcement: Announcement | None = None
    ) -> Future:
        """Take the gradients that a context holds; answered when they were applied.

        The answer is a ``StepGrant`` with a ``result``: the trainer's next one where it has announced itself for it,
        and else one without a decision.
        """
        held = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        with self._lock:
            self._check_running()
            return self.rounds.push(held, report, buffers, announcement)

    def expect_step(
        self, report: StepReport, buffers: Sequence[Tensor], announcement: Announcement | None = None
    ) -> Future:
        """The same for gradients that are on their way, in memory that this server shares with the trainer."""
        with self._lock:
            self._check_running()
            return self.rounds.expect(report, buffers, announcement)

    def _gradients_arrived(self, trainer_index: int) -> None:
        with self._lock:
            if self.error is None:
                self.rounds.arrived(trainer_index)

    def follow(self, trainer_index: int, step: int) -> Future:
        """For a trainer that has no data while others go on; answered when version ``step`` is there."""
        with self._lock:
            self._check_running()
            return self.rounds.follow(trainer_index, step)

    def look(self, trainer_index: int, version: int | None) -> VersionView:
        """A version that is kept, or the current one: for validation. None = whatever is current."""
        with self._lock:
            return self.rounds.look(trainer_index, version)

    # The model on the server: see ``ModelService``.

    def model_as_built(self) -> tuple[dict[str, Any], bool]:
        """The random states after the model was built, and whether it was in ``train()``."""
        assert self._forwards is not None
        return self._forwards.as_built

    def compute(self, trainer_index: int, call: ModelCall) -> ModelReply:
        """The model's output for one trainer, at the version of its round. Without the lock: others compute too."""
        self._check_running()
        end = self.rounds.ends[trainer_index]
        assert isinstance(end, ServedTransport)
        return end.compute(call)

    # Validation, checkpoints, records.

    def report_validation(self, trainer_index: int, version: int, sums: WeightedSums) -> Future:
        """A trainer's share of the validation of a version; answered with ``(means, improved)`` over all shares."""
        with self._lock:
            self._check_running()
            gathering = self._validations.setdefault(version, PendingReplies())
            future = gathering.add(trainer_index, sums)
            if len(gathering.parts) < self.trainers:
                return future
            parts, futures, _ = self._validations.pop(version).pop_all()
        self._conclude(futures, lambda: dict.fromkeys(futures, self._validated(version, merge_sums(parts))))
        return future

    def take_share(self, trainer_index: int, version: int, sums: WeightedSums) -> None:
        """The same from a trainer that does not wait for the others."""
        self.report_validation(trainer_index, version, sums)

    def _validated(self, version: int, merged: WeightedSums) -> tuple[dict[str, float], bool]:
        with self._lock:
            self.versions.forget(version)
            means = merged.means()
            improved = self.monitor.validated(version, merged)
            self.versions.updater.validated(version, means)
            return means, improved

    def cut(self, trainer_index: int, reason: str) -> Future:
        """A trainer takes part in a checkpoint of the current version; answered when model and optimizer are copied.

        All trainers wait for that before any of them steps again, so model, optimizer and parts are of one version. The
        parts follow while training goes on.
        """
        with self._lock:
            self._check_running()
            future = self._cuts.add(trainer_index, None)
            if len(self._cuts.parts) < self.trainers:
                return future
            _, futures, arrived = self._cuts.pop_all()

        def cut(state: Stateful) -> None:
            self._conclude(futures, lambda: self._cut(list(futures), state, reason, min(arrived.values())))

        self._with_state(cut)
        return future

    def _with_state(self, then: Callable[[Stateful], None]) -> None:
        """Go on with the state of optimizer and schedule, and all weights in the model; now, where all are here."""
        conductor = self.conductor
        if conductor is None:
            then(self.versions.updater)
            return

        def gather(release: Callable[[], None]) -> None:
            def gathered(state: dict[str, Any]) -> None:
                then(CollectedState(state))
                release()

            conductor.gather(gathered)

        with self._lock:
            self.rounds.when_idle(gather)

    def _cut(self, trainers: Sequence[int], updater: Stateful, reason: str, since: float) -> dict[int, None]:
        with self._lock:
            rules = self.rounds.rules
            cut = self.checkpoints.stage(rules.step, self.versions.model, updater, reason, since, rules.state_dict())
            self._deposits.start(cut)
            return dict.fromkeys(trainers)

    def deposit(self, trainer_index: int, step: int, piece: Tensor) -> None:
        """A piece of a trainer's part of the checkpoint of ``step``; taken also from a run that has failed since."""
        self._deposits.add_chunk(trainer_index, step, piece)

    def complete_deposit(self, trainer_index: int, step: int, pause_s: float) -> Future:
        """A trainer's part is here; it had stopped for ``pause_s`` seconds. With the last part all is written."""
        future: Future = torch.futures.Future()

        def complete() -> dict[int, None]:
            self._deposits.finish_part(trainer_index, step, pause_s)
            return {trainer_index: None}

        self._conclude({trainer_index: future}, complete)
        return future

    def take_records(self, records: Sequence[Record]) -> None:
        for record in records:
            self.monitor.record(record)

    def optimizer_state(self) -> Future:
        """Answered with the state of the optimizer in the standard form, when no update is under way."""
        future: Future = torch.futures.Future()
        with self._lock:
            self._with_state(lambda state: future.set_result(copy.deepcopy(state.state_dict()["optimizer"])))
        return future

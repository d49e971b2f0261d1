"""The parameter server: the handlers that trainers call, over versions of the parameters and rules of consistency.

Handlers never block: what has to wait for other trainers returns a future. Errors travel back as values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn

from paramserver.checkpoint import private_copy
from paramserver.config import Config
from paramserver.consistency import Announcement, Decision, Stop, Update, Verdict, make_consistency
from paramserver.deposits import Deposits
from paramserver.edge import pulled
from paramserver.errors import ParamserverError, PeerLost, PeerRefused, TrainingError
from paramserver.flat import Layout
from paramserver.keeper import Keeper
from paramserver.limits import due, epoch_of
from paramserver.membership import Member, Members, watch
from paramserver.modelling import plain_weights
from paramserver.process import StopRequest
from paramserver.protocol import Future, Gathering, Look, Push, Round, Welcome
from paramserver.records import Record, StepReport, StepResult, TrainerTotals, WeightedSums, merge_all
from paramserver.task import Task
from paramserver.transport.ends import ServerEnd
from paramserver.transport.over_memory import MemoryServerEnd
from paramserver.transport.over_rpc import Outgoing, RpcServerEnd
from paramserver.transport.segments import SegmentHost
from paramserver.transport.shelves import LiveShelf, RingShelf, Shelf, gradients_key, parameters_key
from paramserver.transport.wire import Failure, settled
from paramserver.versions import Versions


class ParameterServer(nn.Module):
    """All parameters in a few flat tensors, one optimizer over views of them, and a version that counts updates.

    What a trainer or a forward on the server uses is an immutable snapshot of one version, so gradients are exact
    whatever happens meanwhile.

    Args:
        task: builds the model and the optimizer.
        config: the run's.
        trainers: how many trainers the run has.
        keeper: rank 0's account, which writes checkpoints and records.
        stop: set by a signal to this process.
        segments: gives memory that trainers of this host share; None where all is to travel over RPC.
    """

    def __init__(
        self,
        task: Task,
        config: Config,
        trainers: int,
        keeper: Keeper,
        stop: StopRequest,
        segments: SegmentHost | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.keeper = keeper
        self.stop = stop
        self.trainers = trainers
        self.members = Members()
        self.rules = make_consistency(config, trainers, keeper.step, keeper.samples)
        self.rules.load_state_dict(keeper.consistency_state)
        self._segments = segments
        in_place = self.rules.lockstep and segments is not None
        self.versions = Versions(task, config, self._allocate_shared if in_place else None)
        layout = self.versions.parameters.layout
        self._wire = layout.narrowed(getattr(torch, config.server.wire_dtype))
        self._outgoing = Outgoing(layout, self._wire, lambda: self.versions.snapshot()[0])
        self._shelf = self._make_shelf()
        keeper.restore_model(self.versions.model)
        keeper.restore_updater(self.versions.updater)
        self.epoch_samples: int | None = None
        self.finished = threading.Event()
        self.error: ParamserverError | None = None
        self.totals: dict[int, TrainerTotals] = {}
        self.last_decision: Decision | None = None
        self._lock = threading.RLock()
        self._epoch = keeper.epoch
        self._seconds = keeper.seconds
        self._ends: dict[int, ServerEnd] = {}
        self._arrivals = Gathering()
        self._announcements = Gathering()
        self._validations: dict[int, Gathering] = {}
        self._cuts = Gathering()
        self._deposits = Deposits(keeper, trainers)
        self._followers = Gathering()
        self._pushes: dict[int, Push] = {}

    def _allocate_shared(self, layout: Layout) -> list[Tensor]:
        assert self._segments is not None
        return self._segments.allocate(parameters_key(0), layout)

    def _make_shelf(self) -> Shelf | None:
        if self._segments is None:
            return None
        parameters = self.versions.parameters
        if self.rules.lockstep:
            return LiveShelf()
        return RingShelf(self._segments, parameters.layout, self.trainers, lambda: (self.rules.step, parameters.flats))

    # The tutorial's public methods, off the hot path.

    def forward(self, *inputs: Any) -> Any:
        """The model's output at the current version, on the server; its gradient goes to the flat leaf."""
        with self._lock:
            flats = pulled(self.versions.leaves, self.versions.snapshot()[0])
        return self.versions.forward(flats, inputs)

    def get_dist_gradients(self, context_id: int) -> dict[str, Tensor]:
        """The gradients that a distributed-autograd context holds for this server's parameters, by name, on the CPU."""
        held = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        return {name: view.cpu() for name, view in self.versions.gradients_by_name(held).items()}

    def get_param_rrefs(self) -> list[Any]:
        """An RRef for each trained parameter."""
        return [rpc.RRef(parameter) for parameter in self.versions.parameters.tensors.values()]

    # A trainer's life.

    def arrive(self, member: Member, epoch_samples: int | None) -> Future:
        """Take a trainer in; answered with a ``Welcome`` when all trainers are here."""
        with self._lock:
            self._check_running()
            self.members.join(member)
            self.epoch_samples = epoch_samples
            self._ends[member.trainer_index] = RpcServerEnd(self.versions.leaves, self._outgoing)
            future = self._arrivals.add(member.trainer_index, None)
            complete = len(self._arrivals.parts) == self.trainers
            futures = self._arrivals.take()[1] if complete else {}
        watch(member.name, lambda reason: self._gone(member.trainer_index, reason))
        if complete:
            self._conclude(futures, self._welcomes)
        return future

    def _welcomes(self) -> dict[int, Welcome]:
        self.keeper.expect(self.epoch_samples)
        model = private_copy(plain_weights(self.versions.model))
        layouts = self.versions.parameters.layout, self._wire, self.versions.buffers.layout
        step, lockstep, stored = self.rules.step, self.rules.lockstep, self.keeper.stored_part
        segments = None if self._segments is None else self._segments.address
        return {i: Welcome(model, *layouts, step, lockstep, segments, stored(i)) for i in range(self.trainers)}

    def share_segments(self, trainer_index: int) -> int:
        """A trainer of this host reads and writes in place from now on; how many snapshots there are for it."""
        with self._lock:
            assert self._segments is not None
            assert self._shelf is not None
            layout = self.versions.parameters.layout
            gradients = self._segments.allocate(gradients_key(trainer_index), layout)
            self._ends[trainer_index] = MemoryServerEnd(self._shelf, gradients)
            return self._shelf.slots

    def _conclude(self, futures: Mapping[int, Future], answers: Callable[[], Mapping[int, Any]]) -> None:
        """Answer all who wait, each with its own value; with the error, for all and for good, where there is none."""
        try:
            values = answers()
        except Exception as error:  # noqa: BLE001 - it ends the run and travels to every trainer
            failure = Failure.of(error)
            self.fail(failure.error())
            values = dict.fromkeys(futures, failure)
        for index, future in futures.items():
            future.set_result(values[index])

    def beat(self, trainer_index: int) -> None:
        self.members.beat(trainer_index)

    def leave(self, totals: TrainerTotals, decision: Decision) -> None:
        """A trainer is done. After the last one the server ends."""
        with self._lock:
            self.members.leave(totals.trainer_index)
            self.totals[totals.trainer_index] = totals
            self.last_decision = decision
            if len(self.totals) == self.trainers:
                self.finished.set()

    def missing_trainers(self) -> list[int]:
        """Trainers that have not arrived yet."""
        return self.members.missing(self.trainers)

    def wait_for_goodbyes(self, timeout_s: float) -> None:
        """Until every trainer that is alive has let go of this server, which it does when it needs it no more."""
        self.members.await_goodbyes(timeout_s)

    def give_up(self, trainer_index: int, told: Failure) -> None:
        """A trainer failed, and says why; so the run fails."""
        self.members.leave(trainer_index)
        self.fail(told.error())

    def _gone(self, trainer_index: int, reason: str | None) -> None:
        self.members.say_goodbye(trainer_index)
        if reason is not None:
            self._lost(trainer_index, reason)

    def _lost(self, trainer_index: int, reason: str) -> None:
        member = self.members.get(trainer_index)
        if not member.left:
            self.fail(PeerLost(f"{member} is lost: {reason}"))

    def look_for_silent_trainers(self) -> None:
        for member in self.members.silent(self.config.server.lost_after_s):
            self._lost(
                member.trainer_index, f"no heartbeat for server.lost_after_s ({self.config.server.lost_after_s:g} s)"
            )

    def fail(self, error: ParamserverError) -> None:
        """End the run: every trainer that waits, and every one that calls later, gets the error."""
        with self._lock:
            if self.error is None:
                self.error = error
            failure = Failure.of(self._failed_elsewhere(self.error))
            gatherings = [self._arrivals, self._announcements, self._cuts, self._followers, *self._validations.values()]
            waiting = [f for g in gatherings for f in g.take()[1].values()]
            waiting += [push.future for push in self._pushes.values()]
            self._pushes.clear()
        for future in waiting:
            future.set_result(failure)
        self.finished.set()

    @staticmethod
    def _failed_elsewhere(error: ParamserverError) -> ParamserverError:
        kind = PeerRefused if isinstance(error, PeerRefused) else PeerLost
        return kind(f"the run failed elsewhere: {error}")

    def _check_running(self) -> None:
        if self.error is not None:
            raise self._failed_elsewhere(self.error)

    # A step: announce and pull, push and apply.

    def begin(self, trainer_index: int, announcement: Announcement) -> Future:
        """A trainer announces itself; answered with a ``Round`` when the consistency lets it go on."""
        with self._lock:
            self._check_running()
            future = self._announcements.add(trainer_index, None)
            self.rules.announce(trainer_index, self._with_own_stop(announcement))
            self._go_on()
        return future

    def _with_own_stop(self, announcement: Announcement) -> Announcement:
        own, reason = self.stop.state()
        if own is Stop.NO and (wish := self.keeper.stop_reason()) is not None:
            own, reason = Stop.LIMIT, wish
        return replace(announcement, stop=own, reason=reason) if own > announcement.stop else announcement

    def step(self, context_id: int, report: StepReport, buffers: Sequence[Tensor]) -> Future:
        """Take the gradients that a context holds; answered with a ``StepResult`` when they were applied."""
        held = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        future: Future = torch.futures.Future()
        with self._lock:
            self._check_running()
            gradients = self._ends[report.trainer_index].gradients(held)
            if gradients is None:
                raise TrainingError(
                    f"trainer {report.trainer_index} stepped a context without gradients; call backward first"
                )
            refusal = self.rules.refusal(report.trainer_index, report.version)
            if refusal is not None:
                raise TrainingError(refusal)
            self._ends[report.trainer_index].release()
            push = Push(gradients, report, buffers, future, time.perf_counter())
            if self.rules.push(report.trainer_index, report.version, report.samples):
                self._pushes[report.trainer_index] = push
            else:
                future.set_result(self._result([push], dropped=True))
            self._go_on()
        return future

    def _go_on(self) -> None:
        """Make the updates that are due, and answer those who wait no longer. What fails ends the run."""
        try:
            while (update := self.rules.due()) is not None:
                self._advance(update)
            for index, decision in self.rules.answers().items():
                future, arrived = self._announcements.take_one(index)
                future.set_result(self._round(index, decision, time.perf_counter() - arrived))
        except Exception as error:  # noqa: BLE001 - it ends the run and travels to every trainer
            self.fail(Failure.of(error).error())

    def _round(self, trainer_index: int, decision: Decision, held_s: float) -> Round:
        if decision.verdict is Verdict.GO:
            self._enter_epoch(decision.samples)
        if trainer_index not in decision.active:
            return Round(decision, held_s=held_s)
        flats = self._ends[trainer_index].pull()
        buffers = tuple(self.versions.snapshot_of_buffers())
        return Round(decision, flats, buffers, self.rules.keeps_buffers_of(trainer_index), held_s)

    def _enter_epoch(self, samples: int) -> None:
        """The schedule of epochs, advanced before the first step of a new one."""
        epoch = epoch_of(samples, self.epoch_samples)
        while self._epoch < epoch:
            self._epoch += 1
            self.versions.updater.epoch_ended()
        self.keeper.entered_epoch(self._epoch)

    def _advance(self, update: Update) -> None:
        """One version more, and the answers to those whose gradients made it."""
        pushes = [self._pushes[i] for i in update.trainers]
        # Of trainers that run freely, this one may have been on its way when the last epoch ended.
        self._enter_epoch(self.rules.samples - sum(push.report.samples for push in pushes))
        started = time.perf_counter()
        self.versions.apply(update, pushes)
        apply_s = time.perf_counter() - started
        if due(self.rules.step, self.rules.terms.validate_every):
            self.versions.keep(self.rules.step)
        result = self._result(pushes, apply_s)
        self.keeper.stepped(result, dict(zip(update.trainers, update.staleness, strict=True)))
        for push in pushes:
            del self._pushes[push.report.trainer_index]
            push.future.set_result(replace(result, held_s=max(started - push.arrived, 0.0)))
        for follower in self._followers.take()[1].values():
            follower.set_result(None)

    def _result(self, pushes: Sequence[Push], apply_s: float = 0.0, dropped: bool = False) -> StepResult:
        loss = sum(push.report.loss for push in pushes) / len(pushes)
        self._seconds = max(self._seconds, *(push.report.seconds for push in pushes))
        lr = self.versions.updater.lr
        return StepResult(self.rules.step, self.rules.samples, loss, lr, self._seconds, apply_s, dropped=dropped)

    def follow(self, trainer_index: int, step: int) -> Future:
        """For a trainer that has no data while others go on; answered when version ``step`` is there."""
        with self._lock:
            self._check_running()
            return settled(None) if self.rules.step >= step else self._followers.add(trainer_index, None)

    def look(self, trainer_index: int, version: int) -> Look:
        """A version that is kept, or the current one: for validation."""
        with self._lock:
            if version != self.rules.step:
                parameters, buffers = self.versions.kept(version)
                return Look(tuple(parameters), tuple(buffers), is_copy=True)
            return Look(self._ends[trainer_index].look(), tuple(self.versions.snapshot_of_buffers()), is_copy=False)

    # Validation, checkpoints, records.

    def report_validation(self, trainer_index: int, version: int, sums: WeightedSums) -> Future:
        """A trainer's share of the validation of a version; answered with ``(means, improved)`` over all shares."""
        with self._lock:
            self._check_running()
            gathering = self._validations.setdefault(version, Gathering())
            future = gathering.add(trainer_index, sums)
            if len(gathering.parts) < self.trainers:
                return future
            parts, futures, _ = self._validations.pop(version).take()
        self._conclude(futures, lambda: dict.fromkeys(futures, self._validated(version, merge_all(parts))))
        return future

    def take_share(self, trainer_index: int, version: int, sums: WeightedSums) -> None:
        """The same from a trainer that does not wait for the others."""
        self.report_validation(trainer_index, version, sums)

    def _validated(self, version: int, merged: WeightedSums) -> tuple[dict[str, float], bool]:
        with self._lock:
            self.versions.forget(version)
            means = merged.means()
            improved = self.keeper.validated(version, merged)
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
            _, futures, arrived = self._cuts.take()
        self._conclude(futures, lambda: self._cut(list(futures), reason, min(arrived.values())))
        return future

    def _cut(self, trainers: Sequence[int], reason: str, since: float) -> dict[int, None]:
        with self._lock:
            versions, rules = self.versions, self.rules.state_dict()
            cut = self.keeper.cut(self.rules.step, versions.model, versions.updater, reason, since, rules)
            self._deposits.begin(cut)
            return dict.fromkeys(trainers)

    def deposit(self, trainer_index: int, step: int, piece: Tensor) -> None:
        """A piece of a trainer's part of the checkpoint of ``step``; taken also from a run that has failed since."""
        self._deposits.add(trainer_index, step, piece)

    def complete_deposit(self, trainer_index: int, step: int, pause_s: float) -> Future:
        """A trainer's part is here; it had stopped for ``pause_s`` seconds. With the last part all is written."""
        future: Future = torch.futures.Future()

        def complete() -> dict[int, None]:
            self._deposits.complete(trainer_index, step, pause_s)
            return {trainer_index: None}

        self._conclude({trainer_index: future}, complete)
        return future

    def take_records(self, records: Sequence[Record]) -> None:
        for record in records:
            self.keeper.record(record)

    def optimizer_state(self) -> Mapping[str, Any]:
        with self._lock:
            return self.versions.optimizer_state()

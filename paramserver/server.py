"""The parameter server: versions of the parameters, one optimizer, and the handlers that trainers call.

Handlers never block: what has to wait for other trainers returns a future. Errors travel back as values.
"""

from __future__ import annotations

import copy
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
from paramserver.consistency import Announcement, Decision, Stop, Sync
from paramserver.deposits import Deposits
from paramserver.devices import CPU
from paramserver.edge import pulled
from paramserver.errors import ParamserverError, PeerLost, PeerRefused, TrainingError
from paramserver.flat import FlatTensors, module_buffers, trainable
from paramserver.keeper import Keeper
from paramserver.limits import Limits, epoch_of
from paramserver.membership import Member, Members, watch
from paramserver.modelling import build_model, plain_weights
from paramserver.process import StopRequest
from paramserver.protocol import Future, Gathering, Push, Round, Welcome, union
from paramserver.records import Record, StepReport, StepResult, TrainerTotals, WeightedSums, merge_all
from paramserver.task import Task
from paramserver.transport.wire import Failure, settled
from paramserver.updater import Updater


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
        lost: called with a reason when the run cannot go on.
    """

    def __init__(self, task: Task, config: Config, trainers: int, keeper: Keeper, stop: StopRequest) -> None:
        super().__init__()
        self.task = task
        self.config = config
        self.keeper = keeper
        self.stop = stop
        self.trainers = trainers
        self.members = Members()
        self.model = build_model(task, config.seed, CPU)
        keeper.restore_model(self.model)
        self.parameter_store = FlatTensors(trainable(self.model))
        self.buffer_store = FlatTensors(module_buffers(self.model))
        self.updater = Updater(task, self.model, config.training)
        keeper.restore_updater(self.updater)
        self.rules = Sync(
            trainers, Limits.of(config.training), config.training.uneven_inputs, keeper.step, keeper.samples
        )
        self.epoch_samples: int | None = None
        self.finished = threading.Event()
        self.error: ParamserverError | None = None
        self.totals: dict[int, TrainerTotals] = {}
        self.last_decision: Decision | None = None
        self._lock = threading.RLock()
        self._leaves = [flat.detach().requires_grad_() for flat in self.parameter_store.flats]
        self._gradients = self.parameter_store.layout.allocate()
        self._gradient_views = self.parameter_store.layout.views(self._gradients)
        self._snapshot: list[Tensor] = []
        self._snapshot_step = -1
        self._epoch = keeper.epoch
        self._arrivals = Gathering()
        self._announcements = Gathering()
        self._validations = Gathering()
        self._cuts = Gathering()
        self._deposits = Deposits(keeper, trainers)
        self._followers = Gathering()
        self._pushes: dict[int, Push] = {}

    # The tutorial's public methods, off the hot path.

    def forward(self, *inputs: Any) -> Any:
        """The model's output at the current version, on the server; its gradient goes to the flat leaf."""
        with self._lock:
            flats = self._pull()
        views = self.parameter_store.layout.views(flats)
        memo = {id(t): t for t in [*self.model.parameters(), *self.model.buffers()]}
        skeleton = copy.deepcopy(
            self.model, memo
        )  # one per call: functional_call on a shared module is not thread-safe
        return torch.func.functional_call(skeleton, views, inputs)

    def get_dist_gradients(self, context_id: int) -> dict[str, Tensor]:
        """The gradients that a distributed-autograd context holds for this server's parameters, by name, on the CPU."""
        held = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        flats = [held[leaf] if leaf in held else torch.zeros_like(leaf) for leaf in self._leaves]
        return {name: view.cpu() for name, view in self.parameter_store.layout.views(flats).items()}

    def get_param_rrefs(self) -> list[Any]:
        """An RRef for each trained parameter."""
        return [rpc.RRef(parameter) for parameter in self.parameter_store.tensors.values()]

    # A trainer's life.

    def arrive(self, member: Member, epoch_samples: int | None) -> Future:
        """Take a trainer in; answered with a ``Welcome`` when all trainers are here."""
        with self._lock:
            self._check_running()
            self.members.join(member)
            self.epoch_samples = epoch_samples
            future = self._arrivals.add(member.trainer_index, None)
            complete = len(self._arrivals.parts) == self.trainers
            futures = self._arrivals.take()[1] if complete else {}
        watch(member.name, lambda reason: self._gone(member.trainer_index, reason))
        if complete:
            self._conclude(futures, self._welcomes)
        return future

    def _welcomes(self) -> dict[int, Welcome]:
        self.keeper.expect(self.epoch_samples)
        model = private_copy(plain_weights(self.model))
        layouts = self.parameter_store.layout, self.buffer_store.layout
        step, stored = self.rules.step, self.keeper.stored_part
        return {i: Welcome(model, *layouts, step, stored(i)) for i in range(self.trainers)}

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
            gatherings = (self._arrivals, self._announcements, self._validations, self._cuts, self._followers)
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
        """A trainer announces itself; answered with a ``Round`` when all have."""
        with self._lock:
            self._check_running()
            announcement = self._with_own_stop(announcement)
            future = self._announcements.add(trainer_index, None)
            decision = self.rules.announce(trainer_index, announcement)
            if decision is None:
                return future
            _, futures, arrived = self._announcements.take()
        self._conclude(futures, lambda: self._rounds(decision, arrived))
        return future

    def _with_own_stop(self, announcement: Announcement) -> Announcement:
        own, reason = self.stop.state()
        if own is Stop.NO and (wish := self.keeper.stop_reason()) is not None:
            own, reason = Stop.LIMIT, wish
        return replace(announcement, stop=own, reason=reason) if own > announcement.stop else announcement

    def _enter_epoch(self, samples: int) -> None:
        """The schedule of epochs, advanced before the first step of a new one."""
        epoch = epoch_of(samples, self.epoch_samples)
        while self._epoch < epoch:
            self._epoch += 1
            self.updater.epoch_ended()
        self.keeper.entered_epoch(self._epoch)

    def _rounds(self, decision: Decision, arrived: Mapping[int, float]) -> dict[int, Round]:
        """The answers to all announcements; nobody can push before it has its own, so the version stands still."""
        with self._lock:
            self._enter_epoch(decision.samples)
            buffers = tuple(self.buffer_store.clone())
            now = time.perf_counter()
            rounds = {i: Round(decision, held_s=now - arrived[i]) for i in arrived}
            for index in decision.active:
                source = self.rules.buffer_source
                flats = tuple(self._pull())
                rounds[index] = replace(rounds[index], parameters=flats, buffers=buffers, buffer_source=source)
            return rounds

    def _pull(self) -> list[Tensor]:
        """The current version, as tensors whose gradients come back to this server."""
        if self._snapshot_step != self.rules.step:
            self._snapshot, self._snapshot_step = self.parameter_store.clone(), self.rules.step
        return pulled(self._leaves, self._snapshot)

    def current(self) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters and module buffers of the current version, without a graph: for validation."""
        with self._lock:
            return self.parameter_store.clone(), self.buffer_store.clone()

    def step(self, context_id: int, report: StepReport, buffers: Sequence[Tensor]) -> Future:
        """Take the gradients that a context holds; answered with a ``StepResult`` when the update was made."""
        held = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        missing = [leaf for leaf in self._leaves if leaf not in held]
        if missing:
            raise TrainingError(
                f"trainer {report.trainer_index} stepped a context without gradients; call backward first"
            )
        future: Future = torch.futures.Future()
        push = Push([held[leaf] for leaf in self._leaves], report, buffers, future, time.perf_counter())
        with self._lock:
            self._check_running()
            refusal = self.rules.refusal(report.trainer_index, report.version)
            if refusal is not None:
                raise TrainingError(refusal)
            source = self.rules.buffer_source
            self._pushes[report.trainer_index] = push
            order = self.rules.push(report.trainer_index, report.samples)
            if order is None:
                return future
            pushes = [self._pushes[i] for i in order]
            self._pushes.clear()
            self._conclude(
                {i: push.future for i, push in zip(order, pushes, strict=True)}, lambda: self._advance(pushes, source)
            )
            _, followers, _ = self._followers.take()
        for waiting in followers.values():
            waiting.set_result(None)
        return future

    def follow(self, trainer_index: int, step: int) -> Future:
        """For a trainer that has no data while others go on; answered when version ``step`` is there."""
        with self._lock:
            self._check_running()
            return settled(None) if self.rules.step >= step else self._followers.add(trainer_index, None)

    def _advance(self, pushes: list[Push], buffer_source: int) -> dict[int, StepResult]:
        """One update: the mean of the pushes in the order of trainers, one step of the optimizer, one version more."""
        started = time.perf_counter()
        self._average(pushes)
        self.updater.update()
        self.parameter_store.check_in_place()
        for push in pushes:
            if push.report.trainer_index == buffer_source and push.buffers:
                self.buffer_store.copy_from(push.buffers)
        apply_s = time.perf_counter() - started
        loss = sum(p.report.loss for p in pushes) / len(pushes)
        seconds = max(p.report.seconds for p in pushes)
        result = StepResult(self.rules.step, self.rules.samples, loss, self.updater.lr, seconds, apply_s)
        self.keeper.stepped(result)
        return {p.report.trainer_index: replace(result, held_s=max(started - p.arrived, 0.0)) for p in pushes}

    def _average(self, pushes: list[Push]) -> None:
        for index, target in enumerate(self._gradients):
            target.copy_(pushes[0].gradients[index])
            for push in pushes[1:]:
                target.add_(push.gradients[index])
            if len(pushes) > 1:
                target.div_(len(pushes))
        used = union([push.report.used for push in pushes])
        for place, (name, parameter) in enumerate(self.parameter_store.tensors.items()):
            parameter.grad = self._gradient_views[name] if used is None or used[place] else None

    # Validation, checkpoints, records.

    def report_validation(self, trainer_index: int, sums: WeightedSums) -> Future:
        """A trainer's share of a validation; answered with ``(means, improved)`` over all shares."""
        with self._lock:
            self._check_running()
            future = self._validations.add(trainer_index, sums)
            if len(self._validations.parts) < self.trainers:
                return future
            parts, futures, _ = self._validations.take()
        self._conclude(futures, lambda: dict.fromkeys(futures, self._validated(merge_all(parts))))
        return future

    def _validated(self, merged: WeightedSums) -> tuple[dict[str, float], bool]:
        with self._lock:
            means = merged.means()
            improved = self.keeper.validated(self.rules.step, merged)
            self.updater.validated(self.rules.step, means)
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
            self._deposits.begin(self.keeper.cut(self.rules.step, self.model, self.updater, reason, since))
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
            return copy.deepcopy(self.updater.optimizer.state_dict())

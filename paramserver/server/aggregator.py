"""The steps of all trainers on the server: announcements come in and rounds go out, pushes come in, versions follow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from paramserver.consistency import Announcement, Consistency, Decision, Stop, Update, Verdict
from paramserver.context import StopRequest
from paramserver.distributed.rpc_calls import RemoteError, completed_future
from paramserver.errors import TrainingError
from paramserver.limits import due, epoch_of
from paramserver.metrics.records import StepReport, StepResult
from paramserver.runs.checkpoint_manager import CheckpointManager
from paramserver.server.coordinator import ShardCoordinator
from paramserver.server.parameter_store import ParameterStore
from paramserver.transport.base import ServerTransport
from paramserver.transport.messages import Future, PendingReplies, Push, StepGrant, VersionView


class Aggregator:
    """What the rules say is done here, and nothing else decides. Its owner's lock covers every call.

    Args:
        rules: who may go on, and which gradients make an update.
        versions: the parameters.
        keeper: rank 0's account.
        stop: set by a signal to this process.
        fail: ends the run with what was raised.
        conductor: of several servers.
    """

    def __init__(
        self,
        rules: Consistency,
        versions: ParameterStore,
        keeper: CheckpointManager,
        stop: StopRequest,
        fail: Callable[[Exception], None],
        conductor: ShardCoordinator | None = None,
    ) -> None:
        self.rules = rules
        self.versions = versions
        self.keeper = keeper
        self.stop = stop
        self.ends: dict[int, ServerTransport] = {}
        self.epoch_samples: int | None = None
        self._fail = fail
        self._epoch = keeper.epoch
        self._seconds = keeper.seconds
        self._announcements = PendingReplies()
        self._results: dict[int, StepResult] = {}
        self._followers = PendingReplies()
        self._pushes: dict[int, Push] = {}
        self._expected: dict[int, Push] = {}
        self._conductor = conductor
        self._offered: dict[int, int] = {}
        self._errands: deque[Callable[[Callable[[], None]], None]] = deque()
        self._busy = self._making = False

    def take_waiting(self) -> list[Future]:
        """Everybody who waits for an answer; they get it from the caller."""
        waiting = [f for g in (self._announcements, self._followers) for f in g.take()[1].values()]
        waiting += [push.future for push in (*self._pushes.values(), *self._expected.values())]
        self._pushes.clear()
        self._expected.clear()
        return waiting

    # Announcements.

    def begin(self, trainer_index: int, announcement: Announcement) -> Future:
        """Answered with a ``StepGrant`` when the consistency lets the trainer go on."""
        future = self._announce(trainer_index, announcement)
        self._go_on()
        return future

    def _announce(self, trainer_index: int, announcement: Announcement, future: Future | None = None) -> Future:
        self.rules.announce(trainer_index, self._with_own_stop(announcement))
        return self._announcements.add(trainer_index, None, future)

    def _with_own_stop(self, announcement: Announcement) -> Announcement:
        own, reason = self.stop.state()
        if own is Stop.NO and (wish := self.keeper.stop_reason()) is not None:
            own, reason = Stop.LIMIT, wish
        return replace(announcement, stop=own, reason=reason) if own > announcement.stop else announcement

    def _go_on(self) -> None:
        """Make the updates that are due, and answer those who wait no longer. What fails ends the run.

        While several servers are at work, neither is done.
        """
        try:
            while self._errands and not self._busy:
                self._busy = True
                self._errands.popleft()(self._released)
            while not self._busy and (update := self.rules.due()) is not None:
                self._advance(update)
            answers = {} if self._busy else self.rules.answers()
            for index, decision in answers.items():
                future, arrived = self._announcements.take_one(index)
                future.set_result(self._round(index, decision, time.perf_counter() - arrived))
        except Exception as error:  # noqa: BLE001 - it ends the run and travels to every trainer
            self._fail(error)

    def _round(self, trainer_index: int, decision: Decision, held_s: float) -> StepGrant:
        result = self._results.pop(trainer_index, None)
        if decision.verdict is Verdict.GO:
            self._enter_epoch(decision.samples)
        if trainer_index not in decision.active:
            return StepGrant(decision, result=result, held_s=held_s)
        end = self.ends[trainer_index]
        place, buffers = end.offer(), end.buffers(self.versions.snapshot_of_buffers())
        self._offered[trainer_index] = decision.step
        return StepGrant(decision, place, buffers, self.rules.keeps_buffers_of(trainer_index), result, held_s)

    def _enter_epoch(self, samples: int) -> None:
        """The schedule of epochs, advanced before the first step of a new one."""
        epoch = epoch_of(samples, self.epoch_samples)
        while self._epoch < epoch:
            self._epoch += 1
            self.versions.updater.epoch_ended()
        self.keeper.entered_epoch(self._epoch)

    def pull(self, trainer_index: int) -> tuple[Tensor, ...]:
        """The version that a trainer's round offered, as tensors whose gradients are its push."""
        return self.ends[trainer_index].pull()

    # Pushes.

    def take_early(self, trainer_index: int, version: int, number: int, gradient: Tensor) -> None:
        """A part of a push that comes before it.

        Raises:
            TrainingError: the trainer was not offered that version.
        """
        if self._offered.get(trainer_index) != version:
            raise TrainingError(f"trainer {trainer_index} has no part in version {version} and sent a gradient for it")
        self.ends[trainer_index].take_early(number, gradient)

    def push(
        self,
        held: Mapping[Tensor, Tensor],
        report: StepReport,
        buffers: Sequence[Tensor],
        announcement: Announcement | None,
    ) -> Future:
        """Take the gradients that a context holds.

        Raises:
            TrainingError: it holds none, or the rules refuse them.
        """
        gradients = self.ends[report.trainer_index].gradients(held)
        if gradients is None:
            raise TrainingError(
                f"trainer {report.trainer_index} stepped a context without gradients; call backward first"
            )
        future: Future = torch.futures.Future()
        self._take(Push(gradients, report, buffers, announcement, future, time.perf_counter()))
        return future

    def expect(self, report: StepReport, buffers: Sequence[Tensor], announcement: Announcement | None) -> Future:
        """The same of gradients that are on their way: they are taken when they have ``arrived``."""
        future: Future = torch.futures.Future()
        self._expected[report.trainer_index] = Push([], report, buffers, announcement, future, time.perf_counter())
        self.arrived(report.trainer_index)
        return future

    def arrived(self, trainer_index: int) -> None:
        """A trainer's gradients may be where they belong, and its word on them too; the later of both counts."""
        expected = self._expected.get(trainer_index)
        gradients = self.ends[trainer_index].gradients({}) if expected is not None else None
        if expected is None or gradients is None:
            return
        del self._expected[trainer_index]
        try:
            self._take(replace(expected, gradients=gradients, arrived=time.perf_counter()))
        except TrainingError as error:
            expected.future.set_result(RemoteError.of(error))

    def _take(self, push: Push) -> None:
        report, index = push.report, push.report.trainer_index
        refusal = self.rules.refusal(index, report.version)
        if refusal is not None:
            raise TrainingError(refusal)
        report, buffers = self.ends[index].completed(report, push.buffers)
        push = replace(push, report=report, buffers=buffers)
        self.ends[index].release()
        self._offered.pop(index, None)
        if self.rules.push(index, report.version, report.samples):
            self._pushes[index] = push
        else:
            self.keeper.drop()
            self._answer(push, self._result([push], dropped=True))
        self._go_on()

    def _advance(self, update: Update) -> None:
        """One version more, and the answers to those whose gradients made it."""
        pushes = [self._pushes[i] for i in update.trainers]
        # Of trainers that run freely, this one may have been on its way when the last epoch ended.
        self._enter_epoch(self.rules.samples - sum(push.report.samples for push in pushes))
        started = time.perf_counter()
        if self._conductor is None:
            self.versions.apply(self.rules.step, update, pushes)
            self._advanced(update, pushes, started)
            return
        self._busy = self._making = True
        shared = [self.ends[i].in_place for i in update.trainers]
        made = partial(self._made, update, pushes, started)
        self._conductor.update(self.rules.step, update, pushes, shared, self._needed(), made)

    def _needed(self) -> set[int]:
        """Versions that trainers may still pull from other servers, or look at there."""
        outside = [i for i, end in self.ends.items() if not end.in_place]
        pulled = {self._offered[i] for i in outside if i in self._offered}
        return pulled | self.versions.kept_versions if outside else set()

    def _made(self, update: Update, pushes: Sequence[Push], started: float) -> None:
        """All servers have made their parts."""
        self._making = False
        self._advanced(update, pushes, started)
        self._released()

    def _released(self) -> None:
        self._busy = False
        self._go_on()

    def when_idle(self, errand: Callable[[Callable[[], None]], None]) -> None:
        """Do what no update may go beside; the errand gets what it is to call when it is done."""
        self._errands.append(errand)
        self._go_on()

    def _advanced(self, update: Update, pushes: Sequence[Push], started: float) -> None:
        apply_s = time.perf_counter() - started
        if due(self.rules.step, self.rules.terms.validate_every):
            self.versions.keep(self.rules.step)
        result = self._result(pushes, apply_s)
        self.keeper.stepped(result, dict(zip(update.trainers, update.staleness, strict=True)))
        for push in pushes:
            del self._pushes[push.report.trainer_index]
            self._answer(push, replace(result, held_s=max(started - push.arrived, 0.0)))
        for follower in self._followers.take()[1].values():
            follower.set_result(None)

    def _answer(self, push: Push, result: StepResult) -> None:
        """Now, or together with the decision on the next step, where the trainer has asked for it."""
        if push.announcement is None:
            push.future.set_result(StepGrant(result=result))
            return
        self._results[push.report.trainer_index] = result
        self._announce(push.report.trainer_index, push.announcement, push.future)

    def _result(self, pushes: Sequence[Push], apply_s: float = 0.0, dropped: bool = False) -> StepResult:
        loss = sum(push.report.loss for push in pushes) / len(pushes)
        self._seconds = max(self._seconds, *(push.report.seconds for push in pushes))
        lr = self.versions.updater.lr
        return StepResult(self.rules.step, self.rules.samples, loss, lr, self._seconds, apply_s, dropped=dropped)

    # Those who only read.

    def follow(self, trainer_index: int, step: int) -> Future:
        """Answered when version ``step`` is there."""
        made = self.rules.step - self._making
        return completed_future(None) if made >= step else self._followers.add(trainer_index, None)

    def look(self, trainer_index: int, version: int | None) -> VersionView:
        """A version that is kept, or the current one; None = whatever is current."""
        end = self.ends[trainer_index]
        if version not in (None, self.rules.step):
            return end.kept(*self.versions.kept(version))
        place, flats = end.look()
        return VersionView(place, tuple(flats), end.buffers(self.versions.snapshot_of_buffers()))

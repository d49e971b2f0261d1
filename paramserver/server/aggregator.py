"""The server's part of every step: announcements become step grants, and pushes become updates."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from paramserver.consistency import (
    Announcement,
    Consistency,
    Decision,
    DynamicSteps,
    Ledger,
    PushId,
    PushState,
    Stop,
    TrainerId,
    Update,
    Verdict,
    module_buffer_owner,
)
from paramserver.context import StopRequest
from paramserver.distributed.rpc_calls import RemoteError, completed_future
from paramserver.errors import Evicted, GenerationChanged, NotFinite, RunEnded, TrainingError
from paramserver.metrics.profile import span, spanned
from paramserver.metrics.records import RunClock, StepResult, combine
from paramserver.optim.updater import UpdaterState
from paramserver.parameters.model_tree import PackedBuffers
from paramserver.runs.checkpoint_manager import CheckpointManager
from paramserver.runs.monitor import RunMonitor
from paramserver.server.parameter_store import ParameterStore
from paramserver.server.shard import ParameterShard
from paramserver.server.updates import Updates
from paramserver.transport.base import ServerTransport
from paramserver.transport.messages import Future, PendingPush, PendingReplies, Push, StepGrant, VersionView
from paramserver.transport.rpc import leave_out

ReleaseFn = Callable[[], None]


@dataclass(eq=False)
class Aggregator:
    """Carries out what the consistency model decides. Every call holds the lock of the ``ParameterServer``.

    That lock covers decisions and tables. An update is computed without it, by ``Updates``: from the decision on until
    its result is here, ``_busy`` keeps every other update, grant and exclusive task back, and so parameters, optimizer
    and schedule belong to the computation. Announcements, pushes, joins and losses are recorded meanwhile; a trainer
    that is lost then has its gradients in the update all the same. If the run fails meanwhile, the result is dropped.

    A trainer announces its next step (``announce``, or together with a push). Once the consistency model allows the
    step, the trainer gets a ``StepGrant`` with the version to pull. Its push waits here until the model names it in an
    ``Update``; then the update is applied, and the trainers whose gradients it holds get their replies.

    All of that happens in ``_process``, the only loop: whatever adds an announcement or a push, or removes a trainer,
    calls it afterwards. A trainer that joins takes part from its first announcement on.
    """

    rules: Consistency
    ledger: Ledger
    store: ParameterStore
    _shard: ParameterShard
    _updates: Updates
    monitor: RunMonitor
    stop: StopRequest
    _fail: Callable[[Exception], Any]
    _dynamic_steps: DynamicSteps | None = None
    _batches_per_local_step: int = 1

    def __post_init__(self) -> None:
        self.transports: dict[int, ServerTransport] = {}
        self._publishes: CheckpointManager | None = None
        self.batch_began: int | None = None  # the version that the last batch began with, if it may make several
        self._shard.on_push = self.gradients_arrived
        self._clock = RunClock(self.monitor.seconds)
        self._announcements = PendingReplies()  # with the result of the push that one came with, if it came with one
        self._version_waits = PendingReplies()
        self._pushes: dict[int, PendingPush] = {}  # complete, not applied yet
        self._incomplete: dict[int, PendingPush] = {}  # reported, with gradients still on their way
        self._buffer_owners: set[int] = set()  # whose module buffers were wanted with their last grants
        self._granted: dict[int, int] = {}  # the version that each trainer was granted and has not pushed for
        self._batches: dict[int, int] = {}  # of its present step, or its last one
        self._replies: dict[int, Future] = {}  # of the last push of each trainer, for a repeated message
        self.ended = False  # the trainers have been sent the end of the run, or of the generation
        self._resize = ""  # why this generation of the run ends
        self._exclusive: deque[Callable[[ReleaseFn], None]] = deque()
        self._processing = self._process_again = False
        self._completes_updates = False
        self._held: list[PendingPush] = []  # in the sum of the next update, and replied to
        self._busy = False  # an update or an exclusive task is in progress; nothing else may start
        self._applying = False  # it is an update, which ``rules.step`` counts already

    # Announcements.

    def announce(
        self, trainer_index: int, announcement: Announcement, buffers: PackedBuffers | None = None
    ) -> torch.futures.Future[StepGrant]:
        """Reply with a ``StepGrant`` once the consistency model lets the trainer continue.

        The module buffers are kept: see ``keep_buffers``.

        Raises:
            RunEnded: the other trainers have ended the run.
            GenerationChanged: they have ended the generation; the run continues in another one.
        """
        if self.ended:
            if self._resize:
                raise GenerationChanged(self._resize)
            raise RunEnded(f"the run ended before trainer {trainer_index} took part in it")
        self.add(trainer_index)
        self.keep_buffers(trainer_index, buffers)
        self._clock.start(announcement.waited_s)
        future: torch.futures.Future[StepGrant] = torch.futures.Future()
        self._enqueue(trainer_index, announcement, future)
        self._process()
        return future

    def add(self, trainer_index: int) -> None:
        """Let a trainer take part from now on; nothing if it does."""
        if trainer_index not in self.rules.trainers:
            self.rules.join(trainer_index)

    def remove(self, trainer_index: int) -> None:
        """Forget a lost trainer: the others do not wait for it, and a push that is not complete is discarded.

        A push that is complete stays, and is applied as if its trainer lived.
        """
        error = RemoteError.of(Evicted(f"trainer {trainer_index} takes no part in the run any more"))
        waiting = [
            table.pop(trainer_index)[0]
            for table in (self._announcements, self._version_waits)
            if trainer_index in table.parts
        ]
        if (incomplete := self._incomplete.pop(trainer_index, None)) is not None:
            waiting.append(incomplete.future)
        self._granted.pop(trainer_index, None)
        self._buffer_owners.discard(trainer_index)
        self._replies.pop(trainer_index, None)
        if (transport := self.transports.pop(trainer_index, None)) is not None:
            transport.unpin()
        if trainer_index in self.rules.trainers:
            self.rules.remove(trainer_index)
        if self._dynamic_steps is not None:
            self._dynamic_steps.remove(trainer_index)
        self._shard.discard_incomplete(trainer_index)
        self._shard.abandon_update()
        for future in waiting:
            future.set_result(error)
        self._process()
        if not (self.rules.in_step or self._applying):
            self._release_version_waits()  # of a step that had no other trainer; the next decision begins it again

    def give_up(self, trainer_index: int) -> None:
        """Do not wait for another process in the place of a lost trainer."""
        self.rules.give_up(trainer_index)
        self._process()

    def batches_in_progress(self, trainer_index: int) -> int:
        """Return the batches of the step that a trainer takes at present and has not pushed; 0 between steps."""
        return self._batches[trainer_index] if trainer_index in self._granted else 0

    def takes_part(self, sender: TrainerId) -> bool:
        """Return whether this process is a trainer of the run: it has joined, and neither was lost nor replaced."""
        return self.ledger.is_current(sender) and sender.trainer_index in self.transports

    @property
    def version(self) -> int:
        """The newest version that is complete; while an update is applied, the one before it."""
        return self.rules.step - self._applying

    @property
    def waiting(self) -> Set[int]:
        """Trainers that wait for a reply to an announcement, a push or ``wait_version``."""
        return {
            *self._announcements.parts.keys(),
            *self._version_waits.parts.keys(),
            *self._pushes.keys(),
            *self._incomplete.keys(),
        }

    @property
    def segments_in_use(self) -> set[str | None]:
        """Keys of the segments with gradients that are accepted and not applied yet."""
        return {push.segment_key for push in self._pushes.values()}

    def set_blocks(self, trainer_index: int, blocks: bool) -> None:
        """Record whether a trainer that takes part has a full buffer, which blocks simulations."""
        if trainer_index in self.rules.trainers and self.rules.blocks(trainer_index) is not blocks:
            self.rules.set_blocks(trainer_index, blocks)
            self._process()

    def request_stop(self) -> None:
        """Let a signal to this process end the run, also if no trainer announces a step."""
        self.rules.request_stop(*self.stop.state())
        self._process()

    def request_resize(self, reason: str) -> None:
        """End this generation of the run, at a checkpoint, so that it continues with other trainers."""
        self._resize = reason
        self.rules.request_stop(Stop.RESIZE, reason)
        self._process()

    @property
    def ends_run(self) -> bool:
        """Whether the trainers have been sent the end of the run, and not only of the generation."""
        return self.ended and not self._resize

    def keep_buffers(self, trainer_index: int, changed: PackedBuffers | None) -> None:
        """Keep the module buffers that a trainer changed between two steps: in a validation, or in hooks."""
        if trainer_index in self._buffer_owners:
            changed = changed or self.transports[trainer_index].changed_buffers()
        if changed is not None:
            self.store.merge_buffers(changed)

    def _enqueue(
        self, trainer_index: int, announcement: Announcement, future: Future, result: StepResult | None = None
    ) -> None:
        own, reason = Stop.NO, ""
        if self.stop.event.is_set():
            own, reason = self.stop.state()
        elif (limit := self.monitor.stop_reason(self._clock.seconds)) is not None:
            own, reason = self.monitor.stop, limit
        elif self._resize:
            own, reason = Stop.RESIZE, self._resize
        if own > announcement.stop:  # the stronger request to stop counts
            announcement = replace(announcement, stop=own, reason=reason)
        self.rules.announce(trainer_index, announcement)
        self._announcements.add(trainer_index, result, future)

    def _process(self) -> None:
        """Apply every update that is due, then grant every step that is allowed. An error ends the run.

        Not re-entrant: a call from within returns at once, and the loop picks up what was added. While an update is
        computed (``_busy``) nothing is done; ``_release`` continues.
        """
        if self._processing:
            self._process_again = True
            return
        self._processing = True
        try:
            while not self._busy:
                self._process_again = False
                if self._completes_updates and (update := self.rules.complete_update()) is not None:
                    self._apply_update(update)
                elif self._exclusive:
                    self._busy = True
                    self._exclusive.popleft()(self._release)
                elif (update := self.rules.next_update()) is not None:
                    self._apply_update(update)
                else:
                    self._carry_out(self.rules.pop_decisions())
                    if not self._process_again:
                        return
        except Exception as error:  # noqa: BLE001 - ends the run and is sent to every trainer
            self._fail(error)
        finally:
            self._processing = False
            if self.rules.is_paused and not self._applying:
                self._clock.stop()

    def _carry_out(self, decisions: Mapping[int, Decision]) -> None:
        skipped, began = self.monitor.skipped, self.batch_began
        if skipped or began is not None:
            decisions = {i: replace(own, skipped=skipped, batch_began=began) for i, own in decisions.items()}
        for trainer_index, decision in decisions.items():
            if decision.verdict is Verdict.END:
                self.ended = True
                self.monitor.seconds = max(self.monitor.seconds, self._clock.seconds)
                self._resize = decision.reason if decision.resizes else ""
            self._grant(trainer_index, decision)
        going = next((decision for decision in decisions.values() if decision.verdict is Verdict.GO), None)
        if going is not None and self.rules.several_updates:
            self.batch_began = going.step
        # After the grants, which may have begun an epoch with another learning rate. Where some gradients are in shared
        # memory, no bucket is complete before a push.
        if going and not any(self.transports[i].zero_copy for i in going.active):
            self._updates.begin(going)

    def _release(self) -> None:
        """Continue after an exclusive task or an update."""
        self._busy = False
        self._process()

    def run_exclusively(self, task: Callable[[ReleaseFn], None]) -> None:
        """Run ``task`` while no update is applied; it calls the function that it is given when it is done."""
        self._exclusive.append(task)
        self._process()

    def complete_updates(self) -> None:
        """From now on make an update of what was added to the next one so far. No trainer takes a step any more."""
        self._completes_updates = True

    def with_updater_state(
        self, then: Callable[[UpdaterState], None], streams_tables: bool = False, states: bool = True
    ) -> None:
        """Call ``then`` with the state of optimizer and schedule while no update is applied: ``Updates.with_state``."""
        self.run_exclusively(lambda release: self._updates.with_state(then, release, streams_tables, states))

    def publish_with(self, checkpoints: CheckpointManager, lock: AbstractContextManager[Any]) -> None:
        """Publish versions, if the run does: when they are made, and with the lock when a subscriber asks for one."""

        def publish() -> None:
            with lock:
                if not self._busy:  # otherwise after the update, or when the subscriber's wait is looked at again
                    self._publish_version()

        self._publishes = checkpoints
        if checkpoints.publisher is not None:
            checkpoints.publisher.on_request = publish

    def _publish_version(self) -> None:
        checkpoints = self._publishes
        # Of the version that is being made, the buffers of pushes that are held are here already.
        if checkpoints is None or self._held or not checkpoints.is_wanted(self.rules.step):
            return

        def publish(updater: UpdaterState) -> None:
            with self.store.keep_buffers():
                checkpoints.publish(self.rules.step, self.store.model, updater)

        self.with_updater_state(publish, states=checkpoints.publishes_averages)

    def _grant(self, trainer_index: int, decision: Decision) -> None:
        result: StepResult | None = self._announcements.parts[trainer_index]
        future, announced = self._announcements.pop(trainer_index)
        held_s = time.perf_counter() - announced
        if decision.verdict is Verdict.GO:
            self._enter_epoch(decision.position)
        if trainer_index not in decision.active:
            if decision.active:
                self._buffer_owners.discard(trainer_index)
            # Hooks that are called at the end change the means of a round, not what this trainer had before them.
            has_means = self.rules.lockstep and self.rules.terms.has_rounds and decision.verdict is Verdict.END
            buffers = self.store.buffers if has_means and self.transports[trainer_index].sends_buffers else None
            future.set_result(StepGrant(decision, buffers=buffers, result=result, held_s=held_s))
            return
        if self._dynamic_steps is not None:
            steps = self._dynamic_steps.next_steps(trainer_index, self.rules.trainers)
            decision = replace(decision, batches=min(decision.batches, steps * self._batches_per_local_step))
        transport = self.transports[trainer_index]
        with span("pull"):  # of memory that is shared
            slot = transport.pin_version()
        buffers = self.store.buffers if transport.sends_buffers else None
        self._granted[trainer_index], self._batches[trainer_index] = decision.step, decision.batches
        wants_buffers = self.rules.wants_buffers_from(trainer_index)
        # Of several whose buffers are averaged, one keeps what it changes between two steps.
        owner = module_buffer_owner(decision.active, self.rules.terms.uneven_inputs)
        keeps = wants_buffers and trainer_index == owner
        (self._buffer_owners.add if keeps else self._buffer_owners.discard)(trainer_index)
        scale = self.store.updater.skipping.scale
        future.set_result(StepGrant(decision, slot, buffers, wants_buffers, result, held_s, scale))

    def _enter_epoch(self, samples: int) -> None:
        """Step the schedule of epochs before the first step of a new epoch, after ``samples`` applied or skipped."""
        monitor = self.monitor
        while monitor.epoch_samples and samples >= monitor.epoch_end:
            self.store.updater.on_epoch_end()
            monitor.enter_epoch(monitor.epoch + 1, monitor.epoch_end + monitor.epoch_samples)

    def check_granted(self, sender: PushId, version: int, act: str) -> None:
        """Check that a trainer was granted a version, for which it has done ``act``.

        Raises:
            TrainingError: it was granted another one: the message was overtaken.
        """
        if self._granted.get(sender.trainer_index) != version:
            raise TrainingError(f"trainer {sender.trainer_index} has no part in version {version} and {act}")

    # Pushes.

    @spanned("push")
    def push(self, push: Push, has_gradients: bool = False) -> torch.futures.Future[StepGrant]:
        """Keep the report of a push until its gradients have arrived: see ``gradients_arrived``.

        With ``has_gradients`` they were sent before it, so that none is still on its way.

        Raises:
            TrainingError: it has no gradients although ``has_gradients``, or the push before it is missing.
            Evicted: the trainer takes no part any more.
        """
        report = push.report
        if (reply := self._find_reply(push.id)) is not None:
            return reply
        self._clock.undo_stop()  # with several optimizers a step that was due may be one inside a batch
        trainer_index, transport = report.trainer_index, self.transports[report.trainer_index]
        gradients = transport.collect_gradients()
        future: torch.futures.Future[StepGrant] = torch.futures.Future()
        key = transport.segment_key
        pending = PendingPush(**vars(push), future=future, arrival_s=time.perf_counter(), segment_key=key)
        self._incomplete[trainer_index] = pending
        if key is not None:
            self.gradients_arrived(push.id)  # the trainer writes them before it pushes
        elif gradients is not None:
            self._shard.accept(push.id, report.version, gradients)
        else:
            self._shard.report_push(push.id, report.version)
        if has_gradients and self._incomplete.get(trainer_index) is pending:
            del self._incomplete[trainer_index]
            self._shard.discard_incomplete(trainer_index)
            raise TrainingError(f"trainer {trainer_index} stepped a context without gradients; call backward first")
        return future

    def gradients_arrived(self, push: PushId) -> None:
        """Accept a push whose report and gradients have arrived; they come in either order."""
        pending = self._incomplete.get(push.trainer_index)
        if pending is None or pending.id != push:
            return
        del self._incomplete[push.trainer_index]
        try:
            self._accept(pending)
        except TrainingError as error:
            pending.future.set_result(RemoteError.of(error))  # raised by the caller

    def _find_reply(self, push: PushId) -> Future | None:
        """Return the reply to a push that was sent before; None for a new one.

        Raises:
            Evicted: it is of an earlier process of this trainer, or was sent to an earlier server.
            TrainingError: the push before it is missing.
        """
        trainer_index = push.trainer_index
        incomplete = self._incomplete.get(trainer_index)
        if incomplete is not None and incomplete.id == push:
            return incomplete.future
        state = self.ledger.state_of(push)
        if state is PushState.EVICTED or trainer_index not in self.transports:
            raise Evicted(f"trainer {trainer_index} takes no part in the run any more, or joined it anew")
        if state is PushState.GAP:
            last = self.ledger[trainer_index].decided
            raise TrainingError(f"trainer {trainer_index} sent push {push.sequence} after push {last}")
        return None if state is PushState.NEW else self._replies[trainer_index]

    def _accept(self, push: PendingPush) -> None:
        """Keep a complete push for the update that will hold it, or drop it."""
        trainer_index, version = push.report.trainer_index, push.report.version
        rejection = self.rules.rejection_reason(trainer_index, version)
        if rejection is not None:
            raise TrainingError(rejection)
        transport = self.transports[trainer_index]
        report, buffers = transport.complete_push(push.report, push.buffers)
        push = replace(push, report=report, buffers=buffers, arrival_s=time.perf_counter())
        transport.unpin()
        self._granted.pop(trainer_index, None)
        samples, inner_steps = report.samples + report.skipped, int(report.inner_steps)
        # With several optimizers, only the first push of a batch has samples.
        batches = self._batches[trainer_index] if samples else 0
        self.ledger.accept(push.id, version, samples, report.positions, report.keys, inner_steps, batches)
        self._replies[trainer_index] = push.future
        if self._dynamic_steps is not None:
            self._dynamic_steps.add(trainer_index, inner_steps, report.inner_s)
        if self.rules.push(trainer_index, version, report.samples, not report.nonfinite):
            self._pushes[trainer_index] = push
        elif report.nonfinite:
            self._skip([push])
        else:
            self.monitor.push_dropped()
            self._reply(push, self._result([push], dropped=True))
        self._process()

    # Updates.

    def _skip(self, pushes: Sequence[PendingPush]) -> None:
        """Make no update of these pushes, one of which is not finite; their samples are not served again."""
        reports, result = [push.report for push in pushes], self._result(pushes, dropped=True)
        trainers = [report.trainer_index for report in reports]
        cause, scale = next((report.nonfinite, report.scale) for report in reports if report.nonfinite)
        self.monitor.step_skipped(trainers, sum(report.samples for report in reports), cause, scale)
        try:
            self.store.updater.skipping.step_skipped(trainers, cause, scale)
        except NotFinite as error:
            self._pushes |= {push.report.trainer_index: push for push in pushes}  # their trainers get the error
            self._fail(error)
            return
        for push in pushes:
            self._continue_batch(push.report.trainer_index)
            self._reply(push, result)

    def _apply_update(self, update: Update) -> None:
        pushes = [self._pushes[i] for i in update.trainers]
        if update.is_skipped:
            for trainer_index in update.trainers:
                self._pushes.pop(trainer_index, None)
            self._skip(pushes)
            self._release_version_waits()
            return
        # With trainers that run freely, these gradients may have been in flight when the last epoch ended.
        if self.batch_began is None and update.completes:
            samples = sum(push.report.samples for push in (*self._held, *pushes))
            self._enter_epoch(self.rules.samples - samples + self.monitor.skipped)
        started = time.perf_counter()
        self._busy, self._applying = True, update.completes
        applied = partial(self._after_update, update, pushes, started)
        # Trainers may still pull what they were granted, and validate what is retained, where memory is not shared.
        remote = [i for i, transport in self.transports.items() if not transport.zero_copy]
        pulled = {self._granted[i] for i in remote if i in self._granted}
        validated = self.store.retained.keys() if remote else frozenset()
        version = self.rules.step if update.completes else self.rules.step + 1
        self._updates.apply(version, update, pushes, pulled, validated, applied, self._held)

    def _after_update(self, update: Update, pushes: Sequence[PendingPush], started: float) -> None:
        """Record the update, reply to the trainers whose gradients it holds, and continue."""
        self._applying = False
        apply_s = time.perf_counter() - started
        self._held += pushes
        result = self._result(self._held, apply_s)
        skipping = self.store.updater.skipping
        skipping.gradients_applied(update.trainers)
        self.monitor.skipped += sum(push.report.skipped for push in pushes)
        self.monitor.gradients_applied(zip(update.trainers, update.staleness, strict=True))
        if update.completes:
            skipping.update_made((), min(push.report.scale for push in self._held))
            self._held = []
            validate_every = self.rules.terms.validate_every
            if validate_every and self.rules.step % validate_every == 0:
                self.store.retained[self.rules.step] = self.store.snapshot()
            self.monitor.update_applied(result)
            self._publish_version()
        for push in pushes:
            del self._pushes[push.report.trainer_index]
            self._continue_batch(push.report.trainer_index)
            self._reply(push, replace(result, held_s=max(started - push.arrival_s, 0.0)))
        self._release_version_waits()
        self._release()

    def _continue_batch(self, trainer_index: int) -> None:
        """Grant the new version to a trainer that may push again in its batch, as there are several optimizers."""
        if self.rules.several_updates and self.rules.rejection_reason(trainer_index, self.rules.step) is None:
            self._granted[trainer_index] = self.rules.step
            self.transports[trainer_index].pin_version()

    def _release_version_waits(self) -> None:
        for future in self._version_waits.pop_all()[1].values():
            future.set_result(self.rules.step)

    def _reply(self, push: PendingPush, result: StepResult) -> None:
        """Reply now, or with the grant of the next step if the push carried its announcement."""
        self.ledger.decide(push.id)
        # The announcement of a trainer that was lost meanwhile does not count.
        lives = push.report.trainer_index in self.rules.trainers and self.ledger.is_current(push.id)
        if push.announcement is None or not lives:
            push.future.set_result(StepGrant(result=result, scale=self.store.updater.skipping.scale))
            return
        self._enqueue(push.report.trainer_index, push.announcement, push.future, result)

    def _result(self, pushes: Sequence[PendingPush], apply_s: float = 0.0, dropped: bool = False) -> StepResult:
        reports = [push.report for push in pushes]
        return StepResult(
            self.rules.step,
            self.rules.samples,
            lr=self.store.updater.applied_lr,
            seconds=self._clock.seconds,
            apply_s=apply_s,
            dropped=dropped,
            optimizer=reports[0].optimizer,
            **combine(reports),
        )

    # Reading.

    def wait_version(self, trainer_index: int, version: int) -> torch.futures.Future[int]:
        """Reply with the current version once that is ``version``, or no trainer is left to make it."""
        if self.version >= version or not (self.rules.in_step or self._applying):
            return completed_future(self.version)
        # A repeated call gets the reply of the first.
        return self._version_waits.futures.get(trainer_index) or self._version_waits.add(trainer_index, None)

    def view_version(self, trainer_index: int, version: int | None, without: Collection[int] = ()) -> VersionView:
        """Return a retained version, or the current one; None for whichever is current, and that without ``without``.

        Raises:
            TrainingError: the message was overtaken: the trainer computes with the version that it was granted since.
        """
        if trainer_index in self._granted and not self.rules.several_updates:
            # The transport may hold one version only, and what is viewed would take the place of that one.
            raise TrainingError(f"trainer {trainer_index} was granted version {self._granted[trainer_index]} already")
        transport = self.transports[trainer_index]
        if version not in (None, self.rules.step):
            return transport.view_retained(*self.store.retained[version])
        slot, flats = transport.view_version()
        buffers = self.store.buffers if transport.sends_buffers else None
        if buffers is not None and version in self.store.retained:
            # Those of pushes that are held for the next version are among the newest already.
            buffers = self.store.retained[version][1]
        return VersionView(slot, tuple(leave_out(flats, without)), buffers)

    def pop_waiters(self) -> list[Future]:
        """Remove and return the futures of all calls that wait; the caller replies to them."""
        waiting = [f for table in (self._announcements, self._version_waits) for f in table.pop_all()[1].values()]
        waiting += [push.future for push in (*self._pushes.values(), *self._incomplete.values())]
        self._pushes.clear()
        self._incomplete.clear()
        return waiting + self._shard.pop_waiters()

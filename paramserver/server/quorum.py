"""What trainers do together, checkpoints among it: a call waits until all that take part have made it."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from paramserver.config.deadlines import GRACE_S
from paramserver.consistency import TrainerId
from paramserver.consistency.base import end
from paramserver.context import StopRequest
from paramserver.errors import TaskError
from paramserver.metrics.records import WeightedSums, merge_sums
from paramserver.optim.updater import UpdaterState
from paramserver.parameters.model import load_part_of_state
from paramserver.parameters.model_tree import PackedBuffers
from paramserver.runs.checkpoint_manager import SAVE_REASONS, CheckpointManager, PartCollector
from paramserver.server.aggregator import Aggregator
from paramserver.server.server_run import ServerRun
from paramserver.server.trainer_sources import TrainerSources
from paramserver.transport.messages import Future, PendingReplies, ValidationReply


class JointCall(ABC):
    """One kind of call that all trainers make, such as that of a validation."""

    @property
    @abstractmethod
    def tables(self) -> Sequence[PendingReplies]:
        """The trainers that wait for others."""

    @abstractmethod
    def evaluate(self) -> None:
        """Reply to those whose calls are complete; called when one has arrived, and when a trainer is lost."""

    def check_overdue(self) -> None:
        """Fail the run if a trainer has not made a call in time that others wait for. Called without the lock."""


class Quorum:
    """All joint calls of a run. Every method is called with the lock of the server.

    If the run fails, all that wait get the error. ``calls`` are evaluated in their order when a trainer is lost.
    """

    def __init__(self, run: ServerRun, *calls: JointCall) -> None:
        self._calls = calls
        run.on_failure(self._pop_waiters)

    @property
    def _tables(self) -> list[PendingReplies]:
        return [table for call in self._calls for table in call.tables]

    @property
    def waiting(self) -> set[int]:
        """The trainers that wait for others."""
        return {index for table in self._tables for index in table.parts}

    def check_overdue(self) -> None:
        """Fail the run if a call is overdue. The lock need not be held."""
        for call in self._calls:
            call.check_overdue()

    def remove(self, trainer_index: int) -> None:
        """Wait no longer for a trainer that is lost."""
        for table in self._tables:
            if trainer_index in table.parts:
                table.pop(trainer_index)
        for call in self._calls:
            call.evaluate()

    def _pop_waiters(self) -> list[Future]:
        return [future for table in self._tables for future in table.pop_all()[1].values()]


class _Gather(NamedTuple):
    """One call of ``Gathers``, of all participants if ``active`` is None."""

    active: Collection[int] | None
    has_limit: bool
    replies: PendingReplies


class Gathers(JointCall):
    """The values of each call until all trainers that make it have sent theirs.

    A call that ``has_limit`` waits for ``limit_s`` at most. ``participants`` returns the trainers of the last decision
    that are not lost.
    """

    def __init__(self, run: ServerRun, participants: Callable[[], Collection[int]], limit_s: float) -> None:
        self._run = run
        self._participants = participants
        self._limit_s = limit_s
        self._calls: dict[tuple[int, ...], _Gather] = {}

    @property
    def tables(self) -> list[PendingReplies]:
        return [gather.replies for gather in self._calls.values()]

    def add(
        self, trainer_index: int, value: Any, call: tuple[int, ...], active: Collection[int] | None, has_limit: bool
    ) -> Future:
        """Add a trainer's value and return the future of its reply: all values, in the order of trainers."""
        gather = self._calls.setdefault(call, _Gather(active, has_limit, PendingReplies()))
        return gather.replies.add(trainer_index, value)

    def evaluate(self) -> None:
        """Reply to the calls that all have made."""
        with self._run.lock:
            participants = self._participants()
            complete = [
                call
                for call, gather in self._calls.items()
                if gather.replies.has_all(_made_by(gather.active, participants))
            ]
            popped = [self._calls.pop(call).replies.pop_all() for call in complete]
        for values, futures, _ in popped:
            in_order = [values[index] for index in sorted(values)]
            for future in futures.values():
                future.set_result(in_order)

    def check_overdue(self) -> None:
        """Fail the run if a trainer has not made a call that others wait for."""
        now = time.perf_counter()
        with self._run.lock:
            participants = self._participants()
            late = [
                _made_by(gather.active, participants) - gather.replies.parts.keys()
                for gather in self._calls.values()
                if gather.has_limit
                and any(now - arrival_s > self._limit_s for arrival_s in gather.replies.arrival_s.values())
            ]
        if missing := sorted(set().union(*late)):
            names = ", ".join(map(str, missing))
            self._run.fail(
                TaskError(
                    f"trainer.all_gather was not called by trainer {names} within cluster.timeout_s "
                    f"({self._limit_s:g} s) of the others; call it on all trainers, at the same places"
                )
            )


def _made_by(active: Collection[int] | None, participants: Collection[int]) -> set[int]:
    """Return the trainers that are expected to make a call; a lost one is not among them."""
    return set(participants) if active is None else set(active).intersection(participants)


class Validations(JointCall):
    """The shares of each version, and the trainers that wait for its result; every use holds the server's lock.

    A share is named by the index of its trainer. That of a lost trainer is evaluated by one of the others, which wait
    for each other in lockstep and at barriers: it gets the indices of such shares in reply to its own. ``last`` is the
    version that was validated last, and its means: a trainer that joined afterwards does not do it again.
    """

    def __init__(self, aggregator: Aggregator, run: ServerRun, trainers: int) -> None:
        self.last: tuple[int, dict[str, float]] = -1, {}
        self._aggregator = aggregator
        self._run = run
        self._trainers = trainers
        self._shares: dict[int, dict[int, WeightedSums]] = {}
        self._waiting: dict[int, PendingReplies] = {}

    @property
    def tables(self) -> list[PendingReplies]:
        """The trainers that wait for the result of each version."""
        return list(self._waiting.values())

    def report(self, trainer_index: int, version: int, shares: Mapping[int, WeightedSums]) -> Future:
        """Add shares, by the indices of their trainers; reply to the trainer once there are all of them.

        One that was evaluated twice counts once, as both are equal.
        """
        self._shares.setdefault(version, {}).update(shares)
        future = self._waiting.setdefault(version, PendingReplies()).add(trainer_index, None)
        self.evaluate()
        return future

    def report_share(self, version: int, share: int, sums: WeightedSums) -> None:
        """Add a share for which no trainer waits."""
        self._shares.setdefault(version, {})[share] = sums
        self.evaluate()

    def evaluate(self) -> None:
        """Record the validations of which there are all shares, in the order of versions, and reply to those that wait.

        Where trainers wait for each other and none of them evaluates, they get the missing shares to evaluate.
        """
        # With the lock until they are recorded: another handler could record a later version first. While no update is
        # computed: schedules follow a validation, and an update reads what they set.
        self._aggregator.run_exclusively(self._finish)

    def _finish(self, release: Callable[[], None]) -> None:
        rules, store = self._aggregator.rules, self._aggregator.store
        for version in sorted(self._shares):
            if not rules.lockstep and version in store.retained:
                complete = rules.is_validated(version)
            else:
                self._request_missing(version, rules.participants)
                complete = not self.missing(version)
            if complete:
                # In the order of trainers, not of arrival: floating-point sums depend on the order.
                sums = merge_sums(self._shares.pop(version))
                _, futures, _ = self._waiting.pop(version, PendingReplies()).pop_all()
                self._run.complete(futures, partial(self._record, version, sums, futures))
        release()

    def missing(self, version: int) -> tuple[int, ...]:
        """Return the indices of the shares that were not reported."""
        return tuple(i for i in range(self._trainers) if i not in self._shares.get(version, ()))

    def _request_missing(self, version: int, participants: Collection[int]) -> None:
        """Divide the missing shares over the trainers that wait, unless one of ``participants`` still evaluates."""
        waiting = self._waiting.get(version)
        if waiting is None or not waiting.has_all(set(participants)):
            return
        missing, trainers = self.missing(version), sorted(waiting.parts)
        for number, trainer_index in enumerate(trainers):
            if shares := missing[number :: len(trainers)]:
                waiting.pop(trainer_index)[0].set_result(ValidationReply(missing=shares))

    def _record(self, version: int, sums: WeightedSums, trainers: Collection[int]) -> dict[int, ValidationReply]:
        """Record a validation and step the schedules that follow it; return the reply to each of ``trainers``."""
        store, since = self._aggregator.store, self._aggregator.batch_began
        store.retained.pop(version, None)
        means, improved = sums.means(), self._aggregator.monitor.record_validation(version, sums, since)
        store.updater.on_validation_end(version, means, since)
        self.last = version, means
        return dict.fromkeys(trainers, ValidationReply(means, improved))


@dataclass(eq=False)
class Staging(JointCall):
    """Stages a checkpoint when all trainers have called for it, and collects their parts.

    Every call holds the lock of the server, except where noted. No trainer steps again before model and optimizer
    are copied, so these and all parts are of one version. Large embedding tables are not copied but read when they are
    written (``RowSnapshot``). The trainers send their parts while training continues. With ``saves_alone`` no trainer
    is left, and what is applied is being saved.
    """

    _checkpoints: CheckpointManager
    _aggregator: Aggregator
    _sources: TrainerSources
    _run: ServerRun
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.saves_alone = False
        self._calls = PendingReplies()
        self._reason, self._takes_end = "", False
        # What was saved last, to the disk and in memory. A trainer that joined afterwards does not do it again.
        step = self._checkpoints.monitor.step if self._checkpoints.resumes else -1
        self._staged = self._in_memory = step, False
        # Whether what was staged follows the end of its epoch; earlier versions stored no reason.
        resumed = SAVE_REASONS.get(self._checkpoints.monitor.resumed_reason or "")
        self._ends_epoch = resumed is None or resumed.ends_epoch
        self._parts = PartCollector(self._checkpoints)
        # Of each trainer: when the last chunk of its part arrived, or could first be sent; infinite while it waits for
        # the copy of model and optimizer.
        self._chunk_at: dict[int, float] = {}

    @property
    def tables(self) -> list[PendingReplies]:
        """The trainers that wait for others to take part."""
        return [self._calls]

    def call(
        self,
        sender: TrainerId,
        reason: str,
        extra_state: Mapping[str, Any],
        buffers: PackedBuffers | None,
        ends_epoch: bool,
    ) -> Future | None:
        """Let a trainer take part; ``evaluate`` follows.

        Return None if it joined after the others had saved this version. The ``extra_state`` of the first trainer is
        saved, as in ddp. ``buffers`` are the module buffers that the trainer changed since its last push. With
        ``ends_epoch``, of all trainers alike, one that was saved before hooks ended the epoch is saved again, as is
        one that ``reason`` renews.
        """
        why = SAVE_REASONS[reason]
        is_new = (ends_epoch and not self._ends_epoch) or why.renews(self._checkpoints.simulations is not None)
        staged = (self._staged, self._in_memory if why.in_memory else self._staged)
        if self._due() in staged and not is_new:
            return None
        self._reason, self._takes_end = reason, ends_epoch
        self._aggregator.keep_buffers(sender.trainer_index, buffers)
        return self._calls.add(sender.trainer_index, (sender, extra_state))

    def _due(self) -> tuple[int, bool]:
        """Return the current version, and whether it is the best one; see ``CheckpointManager.stage``."""
        step = self._aggregator.rules.step
        return step, self._checkpoints.monitor.improved_step == step

    def evaluate(self) -> None:
        """Stage the checkpoint if all trainers take part, and reply to them. The lock need not be held."""
        with self._run.lock:
            if not self._calls.has_all(self._aggregator.rules.participants):
                return
            staged_by, futures, arrival_s = self._calls.pop_all()
            self._chunk_at |= dict.fromkeys(futures, math.inf)

        def stage(updater: UpdaterState) -> dict[int, bool]:
            if extra_state := staged_by[min(staged_by)][1]:
                # Its own modules make no forward.
                load_part_of_state(self._aggregator.store.model, extra_state)
            self._stage(updater, min(arrival_s.values()), [sender for sender, _ in staged_by.values()])
            return dict.fromkeys(futures, True)

        def stage_and_reply(updater: UpdaterState) -> None:
            self._run.complete(futures, lambda: stage(updater))
            with self._run.lock:
                self._chunk_at |= dict.fromkeys(futures, self._clock())
            self._parts.commit_if_complete()  # at once if every trainer was lost meanwhile

        with self._run.lock:
            self._aggregator.with_updater_state(stage_and_reply, streams_tables=True)

    def _stage(self, updater: UpdaterState, since: float, senders: Sequence[TrainerId]) -> None:
        """Stage a checkpoint of the current version, of which these trainers send their parts.

        In the update thread. No update is applied between the copies of model, optimizer and rules; the lock is held
        for the last only.
        """
        rules, ledger = self._aggregator.rules, self._aggregator.ledger
        with self._run.lock:
            if SAVE_REASONS[self._reason].in_memory:
                self._in_memory = self._due()
            else:
                self._staged, self._ends_epoch = self._due(), self._takes_end
            states, substitutes = (rules.state_dict(), ledger.state_dict()), self._sources.substitute_parts()
        model = self._aggregator.store.model
        staged = self._checkpoints.stage(rules.step, model, updater, self._reason, since, *states)
        # A trainer that was lost since, also if another process has its place, sends no part. With the lock:
        # ``replace`` replaces the part of one that is lost from now on.
        with self._run.lock:
            present = {sender.trainer_index for sender in senders if self._aggregator.takes_part(sender)}
            self._parts.start(staged, present, substitutes)

    def save_alone(self, stop: StopRequest) -> None:
        """Save what is applied, and end the run as ``stop`` requests: no trainer is left. The lock need not be held."""

        def save(updater: UpdaterState) -> dict[int, None]:
            run, rules = self._run, self._aggregator.rules
            with run.lock:
                if run.finished.is_set() or run.last_decision is not None:
                    return {}
                self.saves_alone = True
                is_due = self._staged != self._due() and not self._checkpoints.monitor.lacks_validation(rules.step)
            if is_due:
                self._reason = "interrupted"
                self._stage(updater, time.perf_counter(), ())
            with run.lock:
                run.last_decision = end(*stop.state(), rules.step, rules.samples)
            self._parts.commit_if_complete()
            run.finished.set()
            return {}

        with self._run.lock:
            self._aggregator.complete_updates()
            self._aggregator.with_updater_state(
                lambda updater: self._run.complete({}, lambda: save(updater)), streams_tables=True
            )

    # Parts.

    def add_chunk(self, trainer_index: int, step: int, chunk: Tensor) -> None:
        """Accept a chunk of a trainer's part of the checkpoint of ``step``."""
        self._parts.add_chunk(trainer_index, step, chunk)
        self._chunk_at[trainer_index] = self._clock()

    def finish_part(self, trainer_index: int, step: int, pause_s: float) -> None:
        """A trainer's part is complete; ``commit`` follows."""
        self._parts.finish_part(trainer_index, step, pause_s)

    def commit(self, trainer_index: int, future: Future) -> None:
        """Write the checkpoint if all parts are here, then reply to a trainer. Without the lock, as it may write."""

        def commit() -> dict[int, None]:
            self._parts.commit_if_complete()
            return {trainer_index: None}

        self._run.complete({trainer_index: future}, commit)

    def replace(self, trainer_index: int) -> None:
        """Do not wait for the part of a lost trainer."""
        self._parts.replace(trainer_index)

    def is_in_progress(self, trainer_index: int) -> bool:
        """Whether a trainer waits for a checkpoint to be staged, or chunks of its part have arrived lately."""
        return self._clock() - self._chunk_at.get(trainer_index, -math.inf) < GRACE_S

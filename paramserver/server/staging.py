"""Checkpoints as server 0 makes them with its trainers: staged once all take part, written once all parts are here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paramserver.config.deadlines import GRACE_S
from paramserver.consistency import TrainerId
from paramserver.consistency.base import end
from paramserver.context import StopRequest
from paramserver.parameters.model import load_part_of_state
from paramserver.parameters.model_tree import PackedBuffers
from paramserver.runs.checkpoint_manager import (
    SAVE_REASONS,
    CheckpointManager,
    PartCollector,
    StagedCheckpoint,
    UpdaterState,
)
from paramserver.server.aggregator import Aggregator
from paramserver.server.quorum import JointCall
from paramserver.server.server_run import ServerRun
from paramserver.server.trainer_sources import TrainerSources
from paramserver.transport.messages import Future, PendingReplies


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
        self._ends_epoch = True  # what was staged follows the end of its epoch
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
        ``ends_epoch``, of all trainers alike, one that was saved before hooks ended the epoch is saved again.
        """
        is_new = ends_epoch and not self._ends_epoch
        staged = (self._staged, self._in_memory if SAVE_REASONS[reason].in_memory else self._staged)
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

        def collect(staged: StagedCheckpoint) -> None:
            # A trainer that was lost since, also if another process has its place, sends no part. With the lock:
            # ``replace`` replaces the part of one that is lost from now on.
            with self._run.lock:
                present = {sender.trainer_index for sender in senders if self._aggregator.takes_part(sender)}
                self._parts.start(staged, present, substitutes)

        model = self._aggregator.store.model
        self._checkpoints.save(rules.step, model, updater, self._reason, since, collect, *states)

    def save_alone(self, stop: StopRequest) -> None:
        """Save what is applied, and end the run as ``stop`` requests: no trainer is left. The lock need not be held."""

        def save(updater: UpdaterState) -> dict[int, None]:
            run, rules = self._run, self._aggregator.rules
            with run.lock:
                if run.finished.is_set() or run.last_decision is not None:
                    return {}
                self.saves_alone = True
                is_due = self._staged != self._due()
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

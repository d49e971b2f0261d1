"""Training in one process without communication: the baseline and the reference of the other modes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from paramserver.consistency import Decision, decide
from paramserver.limits import Limits
from paramserver.metrics.records import Record, StepReport, StepResult, TrainerTotals, WeightedSums
from paramserver.optim.updater import Updater
from paramserver.parameters.model import build_model
from paramserver.runs.checkpoint_manager import CheckpointManager, StagedCheckpoint
from paramserver.runs.monitor import RunMonitor
from trainers.base import Trainer


class LocalTrainer(Trainer):
    """The only trainer of a run in mode local.

    Example::

        >>> from trainers import LocalTrainer
        >>> class Printing(LocalTrainer):
        ...     def on_before_backward(self, loss):
        ...         print(f"step {self.step}: loss {loss.item():.3f}")
    """

    for_mode = "local"

    checkpoints: CheckpointManager
    monitor: RunMonitor

    def init_connection(self) -> None:
        self.limits = Limits.of(self.config.training)
        self.model = build_model(self.task, self.config.seed, self.process.placement)
        self.checkpoints.restore_model(self.model)
        self.updater = Updater(self.task, self.model, self.config.training)
        self.checkpoints.restore_optimizer(self.updater)
        self.set_optimizers(self.updater.parameters_of)
        self.on_after_setup_optimizers()
        self.step, self.samples = self.monitor.step, self.monitor.samples
        self.prepare_data()
        self.seed_or_restore(self.checkpoints.trainer_part(self.trainer_index))

    def agree(self) -> Decision:
        announcements = {self.trainer_index: self.announcement()}
        return decide(announcements, self.step, self.samples, self.limits, self.config.training.uneven_inputs)

    def step_optimizer(self, report: StepReport) -> StepResult:
        self.updater.apply(report.version + 1, report.optimizer)
        self.updater.optimizer.zero_grad()
        self.samples += report.samples
        self.clock.lap("apply")
        step, lr = report.version + 1, self.updater.lr
        return StepResult(step, self.samples, report.loss, lr, report.seconds, optimizer=report.optimizer)

    def on_epoch_ended(self, epoch: int) -> None:
        self.updater.on_epoch_end()

    def merge_validation(self, sums: WeightedSums) -> tuple[Mapping[str, float], bool]:
        improved = self.monitor.record_validation(self.step, sums, self.batch_began)
        self.updater.on_validation_end(self.step, sums.means(), self.batch_began)
        return sums.means(), improved

    def save_part(self, reason: str, since: float) -> None:
        part = self.state_dict()

        def collect(staged: StagedCheckpoint) -> None:
            self.checkpoints.commit(staged, {self.trainer_index: part}, time.perf_counter() - since)

        self.checkpoints.save(self.step, self.model, self.updater, reason, since, collect)

    def send_records(self, records: Sequence[Record]) -> None:
        for record in records:
            self.monitor.record(record)
        self.records.clear()

    def leave(self, totals: TrainerTotals, decision: Decision) -> None:
        self.all_totals = [totals]

    def averages(self) -> Mapping[str, Tensor]:
        return self.updater.averages()

    def optimizer_state(self) -> dict[str, Any]:
        return self.updater.optimizer.state_dict()

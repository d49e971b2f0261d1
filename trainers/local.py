"""Training without servers: what trainers with a replica of the model have in common, and that of mode local.

Mode local is one process without communication: the baseline and the reference of the other modes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from paramserver.checkpoint import stage_copy
from paramserver.consistency import Announcement, Decision, decide
from paramserver.distributed.timeouts import call_with_timeout
from paramserver.limits import Limits
from paramserver.metrics.records import StepQuantities, StepReport, StepResult, combine
from paramserver.optim.outer import shared_optimizer
from paramserver.optim.updater import Updater
from paramserver.parameters.model import build_model
from paramserver.parameters.model_tree import ModelTree
from paramserver.parameters.tables import describe_large
from paramserver.runs.checkpoint_manager import SAVE_REASONS, CheckpointManager
from paramserver.runs.monitor import RunMonitor
from paramserver.trainers.base import Trainer
from paramserver.trainers.control import ReplicaControl
from paramserver.trainers.local_steps import LocalSteps

log = logging.getLogger("paramserver")

# For a copy of model, optimizer and counters while the main thread is in a hook.
_STAGE_S = 10.0
# For a local step of a round, which holds the lock.
_STEP_S = 1.0


class ReplicaTrainer(Trainer):
    """Holds model, optimizer and schedule, and makes the same updates as every other trainer."""

    control_class = ReplicaControl

    control: ReplicaControl
    updater: Updater
    samples: int = 0  # of all trainers, applied
    skipped: int = 0  # samples of all trainers, of steps that were skipped

    def make_optimizer(self, model: nn.Module) -> None:
        """Make the optimizer of ``model``, which has the start's parameters."""
        if self.control.monitor is not None and (large := describe_large(model)) is not None:
            self.control.monitor.note(large)
        self.updater = Updater(shared_optimizer(self.task, self.config), model, self.config.training, self.config.seed)
        self._limits = Limits.of(self.config.training)
        self.local_steps = LocalSteps.of(self.task, model, self.config, self.trainer_index)
        self.tree = ModelTree(model)
        self.optimizer_calls.set_optimizers(self.updater.parameters_of, model)

    def decide(self, announcements: Mapping[int, Announcement], blocking: Set[int] = frozenset()) -> Decision:
        """Return the decision that every trainer derives from these announcements, and from whose buffers block."""
        uneven_inputs = self.config.training.uneven_inputs
        decision = decide(announcements, self.step, self.samples, self._limits, uneven_inputs, blocking=blocking)
        return replace(decision, skipped=self.skipped) if self.skipped else decision

    @property
    def loss_scale(self) -> float:
        return self.updater.skipping.scale if self.local_steps is None else self.local_steps.updater.skipping.scale

    def count_skipped(self, samples: int) -> None:
        """Count samples, of all trainers, of steps that were skipped."""
        self.skipped += samples
        if self.control.monitor is not None:
            self.control.monitor.skipped = self.skipped

    def make_result(
        self, step: int, measured: Sequence[StepQuantities], seconds: float, optimizer: str = ""
    ) -> StepResult:
        """Return the result of the update that made the version ``step``, from what its trainers measured."""
        return StepResult(
            step, self.samples, lr=self.updater.applied_lr, seconds=seconds, optimizer=optimizer, **combine(measured)
        )

    def skip_step(self, trainers: Sequence[int], samples: int, cause: str) -> StepResult:
        """Make no update of a step; ``samples`` are those of all ``trainers`` that had data.

        Raises:
            NotFinite: there were too many such steps in succession.
        """
        self.updater.clear_gradients()
        self.skipped += samples
        if self.control.monitor is not None:
            self.control.monitor.step_skipped(trainers, samples, cause, self.loss_scale)
        self.updater.skipping.step_skipped(trainers, cause, self.loss_scale)
        return StepResult(self.step, self.samples, 0.0, self.updater.applied_lr, self.seconds, dropped=True)

    def publish_version(self) -> None:
        checkpoints = self.control.checkpoints
        if checkpoints is not None and checkpoints.is_wanted(self.step):
            checkpoints.publish(self.step, self.unwrapped_model, self.updater)

    def save_part(self, reason: str, since: float) -> None:
        self.sync_model()
        part = self.state_dict()
        # A checkpoint holds the records of its steps, those of ``on_checkpoint`` too: rank 0 has them before it stages.
        self.control.collect_records()
        self.commit(self.step, part, reason, since)

    def commit(self, step: int, part: Mapping[str, Any], reason: str, since: float) -> None:
        """Save the checkpoint of a step with ``part``, the state of this trainer."""
        self.control.save(step, self.unwrapped_model, self.updater, reason, since, part)

    def averages(self) -> Mapping[str, Tensor]:
        return self.updater.averages() if self.updater.validates_averages else {}

    def optimizer_state(self) -> dict[str, Any]:
        return self.updater.optimizer.state_dict()


class LocalTrainer(ReplicaTrainer):
    """The only trainer of a run in mode local.

    Example::

        >>> from paramserver.trainers import LocalTrainer
        >>> class Printing(LocalTrainer):
        ...     def on_before_backward(self, loss):
        ...         print(f"step {self.step}: loss {loss.item():.3f}")
    """

    for_mode = "local"
    reports_served = True
    makes_all_updates = True

    checkpoints: CheckpointManager
    monitor: RunMonitor

    def init_connection(self) -> None:
        self.model = build_model(self.task, self.config.seed, self.process.placement)
        self.checkpoints.restore_model(self.model)
        self.make_optimizer(self.model)
        self.checkpoints.restore_optimizer(self.updater)
        self.on_after_setup_optimizers()
        self.step, self.samples, self.skipped = self.monitor.step, self.monitor.samples, self.monitor.skipped
        self.prepare_data()
        self.data.set_version(self.step, limit=self.step)
        self.seed_or_restore(self.checkpoints.trainer_part(self.trainer_index), self.monitor.validated_step)
        # What another thread can save while the main thread is in a hook: see ``_save_applied``. As the hook may return
        # meanwhile, the lock is held during an update, and while a checkpoint is staged.
        self._source_at_start = stage_copy(self.data.source.state_dict())
        self._lock = threading.RLock()
        if self.local_steps is not None:
            self.local_steps.lock = self._lock
        self._committed = self.step
        self._applied, self._applied_progress = self.step, replace(self.progress)
        limit = self.process.stop_limit
        self._before_limit, limit.at_limit = limit.at_limit, self._on_limit

    def agree(self) -> Decision:
        return self.decide({self.trainer_index: self.announcement()})

    def step_optimizer(self, report: StepReport) -> StepResult:
        with self._lock:
            if cause := self.find_nonfinite(report.loss):
                self.data.pop_served()
                self._applied_progress = replace(self.progress, steps=self.progress.steps + 1)
                return self.skip_step([self.trainer_index], report.samples, cause)
            self.updater.apply(report.version + 1, report.optimizer)
            self.updater.skipping.update_made([self.trainer_index], self.loss_scale)
            self.updater.clear_gradients()
            self.samples += report.samples
            self.count_skipped(report.skipped)
            self.data.pop_served()
            self._applied = report.version + 1
            self._applied_progress = replace(self.progress, steps=self.progress.steps + 1)
        self.clock.lap("apply")
        return self.make_result(report.version + 1, [report], report.seconds, report.optimizer)

    def commit(self, step: int, part: Mapping[str, Any], reason: str, since: float) -> None:
        # Paused, as the files may be written here.
        with self.process.stop_limit.paused(), self._lock:
            super().commit(step, part, reason, since)
            if not SAVE_REASONS[reason].in_memory:
                self._committed = step

    def _on_limit(self, place: str) -> None:
        """Called in the thread of ``StopLimit``: no other process can save."""
        self._before_limit(place)
        # A step of this trainer's own optimizer is short; otherwise an update is in progress, or a commit.
        if place and self._lock.acquire(timeout=_STEP_S):
            try:
                if self._applied != self._committed and not self.monitor.lacks_validation(self._applied):
                    version = nullcontext() if self.local_steps is None else self.local_steps.version()
                    with self.process.stop_limit.paused(), version:
                        self._save_applied()
            finally:
                self._lock.release()

    def _save_applied(self) -> None:
        """Save what is applied, while the main thread is in a hook, perhaps of the next step.

        The part of this trainer is what a server would know of it (``TrainerSources.substitute_parts``): the hook may
        hold locks of the task, and samples of a batch that is not applied are served again.
        """
        if not self.data.source.repeatable:
            log.warning("no checkpoint is made of a stream while a hook runs, as samples of its batch would be lost")
            return
        self.validator.restore_parameters()
        part = {
            "trainer_index": self.trainer_index,
            "buffer": None,
            "applied": self.data.applied().state_dict(),
            "source": self._source_at_start,
            "random": None,
            "resumes": self.monitor.resumes + 1,
            "counters": vars(self._applied_progress) | {"seconds": self.seconds},
        }
        since = time.perf_counter()
        # The state of a module or of the optimizer may wait for what the hook holds, and so may the records.
        staged = call_with_timeout(
            _STAGE_S,
            "the copy of what is applied",
            lambda: self.checkpoints.stage(self._applied, self.model, self.updater, "interrupted", since),
        )
        self.checkpoints.commit(staged, {self.trainer_index: part}, time.perf_counter() - since)
        self._committed = self._applied

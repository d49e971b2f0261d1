"""What the trainers of a run without servers have in common: each steps an optimizer of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from paramserver.consistency import Announcement, Decision, decide
from paramserver.limits import Limits
from paramserver.metrics.quantities import StepQuantities, combine
from paramserver.metrics.records import StepResult
from paramserver.optim.outer import shared_optimizer
from paramserver.optim.updater import Updater
from paramserver.parameters.model_tree import ModelTree
from paramserver.parameters.tables import describe_large
from paramserver.trainers.base import Trainer
from paramserver.trainers.control import ReplicaControl


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
        self.prepare_local_steps(model)
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
        # A checkpoint holds the records of its steps, so they are with rank 0 before it is staged.
        self.control.collect_records()
        self.commit(self.step, self.state_dict(), reason, since)

    def commit(self, step: int, part: Mapping[str, Any], reason: str, since: float) -> None:
        """Save the checkpoint of a step with ``part``, the state of this trainer."""
        self.control.save(step, self.unwrapped_model, self.updater, reason, since, part)

    def averages(self) -> Mapping[str, Tensor]:
        return self.updater.averages() if self.updater.validates_averages else {}

    def optimizer_state(self) -> dict[str, Any]:
        return self.updater.optimizer.state_dict()

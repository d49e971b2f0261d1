"""A trainer, and the training loop that calls it, the same in every mode."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paramserver.buffers.positions import AppliedPositions
from paramserver.checkpoint import check_storable, stage_copy, unpack
from paramserver.checkpoint.memory import MEMORY
from paramserver.consistency import Announcement, Decision, Readiness, Verdict
from paramserver.context import ProcessContext
from paramserver.devices import move_to_device, use_device
from paramserver.distributed.rendezvous import Rendezvous
from paramserver.errors import TaskError, message_of
from paramserver.importing import name_user_error
from paramserver.limits import is_due
from paramserver.metrics.profile import spanned
from paramserver.metrics.records import (
    REDUCTIONS,
    CoreWait,
    PhaseClock,
    Reduction,
    StepReport,
    StepResult,
    StepTotals,
    TrainerTotals,
    make_record,
    peak_rss_mb,
)
from paramserver.optim.updater import Updater
from paramserver.parameters.model import TrainingFlags, autocast, extra_state_dict, load_part_of_state
from paramserver.parameters.model_tree import ModelTree, PackedBuffers
from paramserver.parameters.numerics import LossScaling, check_loss, explain_errors, find_nonfinite, to_number
from paramserver.rng import random_states, restore_random_states, seed_all
from paramserver.runs.checkpoint_manager import SAVE_REASONS, CheckpointManager
from paramserver.runs.monitor import RunMonitor
from paramserver.sources import Partition
from paramserver.sources.dataset import DatasetSource
from paramserver.sources.factory import is_map_style
from paramserver.task import Hooks, Task, restore_task, task_state
from paramserver.trainers.control import Control, OptimizerCalls, sendable
from paramserver.trainers.data import DataStream
from paramserver.trainers.local_steps import LocalSteps
from paramserver.trainers.validation import ValidationShare, Validator, validation_batches
from paramserver.transport.base import TrainerTransport
from paramserver.transport.messages import OptimizerCall

log = logging.getLogger("paramserver")


@dataclass
class TrainerProgress:
    """How far a trainer is; part of what it stores in a checkpoint."""

    batch_idx: int = 0
    samples_served: int = 0  # samples of all batches so far
    epoch: int = 0  # the current one, and whether ``on_epoch_start`` was called for it (``epoch_open``)
    epoch_open: bool = False
    epoch_end: int = 0  # samples, applied or skipped by all trainers, with which it ends; 0 if that is not known
    seconds: float = 0.0  # of training before this process resumed the run
    steps: int = 0  # that this trainer took, or waited for
    inner_steps: int = 0  # of its own optimizer, with rounds of local steps, and those that were skipped
    loss: float = 0.0  # of its last step


@dataclass
class Step:
    """What a trainer does at present: a decision, and how far it is carried out."""

    decision: Decision
    is_open: bool = False  # a version is being made, to which records belong; otherwise they belong to the last one
    is_common: bool = False  # hooks are called that all trainers call, or all that have data
    in_batches: bool = False
    in_training_step: bool = False
    sample_losses: Tensor | None = None  # of the batch that is computed, once they are known
    batches: Sequence[Any] = ()  # while the version of the step is loaded
    batch_samples: int = 1  # of the batch that is computed; 1 between batches
    gathers: Counter[bool] = field(default_factory=Counter[bool])  # calls of ``all_gather``, by ``in_batches``

    def next_gather(self) -> tuple[int, ...]:
        """Return what names the next call of ``all_gather``, which is the same on all trainers that make it."""
        number, self.gathers[self.in_batches] = self.gathers[self.in_batches], self.gathers[self.in_batches] + 1
        return self.decision.step, int(self.decision.verdict is Verdict.GO), int(self.in_batches), number

    def set_sample_losses(self, losses: Tensor, batch_idx: int, may_be_nonfinite: bool) -> None:
        """Take over the loss of each sample of the batch that is computed; ``Task.log_sample_loss`` calls it."""
        if not self.in_training_step:
            raise TaskError("self.log_sample_loss(losses) must be called in training_step, where there is a batch")
        if not isinstance(losses, Tensor) or losses.shape != (self.batch_samples,):
            given = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise TaskError(
                f"self.log_sample_loss(losses) must get a tensor of shape ({self.batch_samples},), one loss for each "
                f"sample of the batch, not {given}; take the mean of each sample over its other dimensions"
            )
        losses = losses.detach()
        if not (may_be_nonfinite or bool(torch.isfinite(losses).all())):
            raise TaskError(
                f"self.log_sample_loss(losses): the losses of batch {batch_idx} must be finite; they have a NaN or an "
                "infinity. Look at the batch, or set training.nonfinite to skip"
            )
        self.sample_losses = losses


class Trainer(ABC):
    """One trainer of a run, which ``TrainingLoop`` calls. Subclasses implement a mode.

    To change how steps are made, subclass ``LocalTrainer``, ``DdpTrainer`` or ``RpcTrainer`` and name the class in the
    config (``trainer: module:Class``). The hooks have the names of Lightning's ``DDPPlugin``.

    Args:
        process: identity, devices and config of this process.
        task: of the user; its ``trainer`` attribute is set to this object.
        checkpoints: of the run, if this process is rank 0; None otherwise.
        rendezvous: where this process finds the others; None if there are none.

    Attributes:
        model: what ``Task.training_step`` receives.
        step: the version that this trainer's model has; the number of updates applied so far.
        local_steps: takes the local steps of a round; None without rounds.
        lockstep: whether all trainers take every step together.
        hooks: the task, and its callbacks after it.
        tree: the layers and module buffers of ``unwrapped_model``; empty if the model is on the server.
        optimizer_calls: of ``optimize``, in the present batch; with the parameters of each of several optimizers.
        current_step: that is made, or was made last.
        resources: contexts that are exited when this trainer ends, the last one first.
        control: what this trainer agrees with the others by.
        validation: the values of the newest validation in this process, by name: the means over all trainers; of a
            version that trainers who run freely validate without waiting, those of this trainer's share, if it has any.

    Example::

        >>> from paramserver.trainers import LocalTrainer
        >>> class Scaled(LocalTrainer):
        ...     def on_before_forward(self, batch):
        ...         return [tensor * 0.5 for tensor in super().on_before_forward(batch)]
    """

    # What a subclass declares.
    for_mode: str | None = None  # the mode that it implements; None for any
    computes: str | None = None  # the value of ``server.compute`` that it implements; None if the key does not apply
    reports_served = False  # pushes name the samples of a step
    counts_bytes = False  # ``wire_bytes`` has the tensors that are sent and received
    makes_all_updates = False  # no other process makes updates of the model
    control_class: type[Control]

    model: nn.Module
    data: DataStream
    validator: Validator
    updater: Updater | None = None  # with the optimizer and its schedule; None if the servers have them
    local_steps: LocalSteps | None = None
    ends_epoch = False  # the last checkpoint follows hooks that ended an epoch
    transport: TrainerTransport | None = None  # of versions and gradients; None if no server has the parameters

    def __init__(
        self,
        process: ProcessContext,
        task: Task,
        checkpoints: CheckpointManager | None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.process = process
        self.config = process.config
        self.task = task
        self.trainer_index = process.trainer_index
        self.checkpoints = checkpoints
        self.monitor: RunMonitor | None = None if checkpoints is None else checkpoints.monitor
        self.control = self.control_class(process, checkpoints, rendezvous)
        self._overrides_data_available = overrides(self, Trainer.data_available)
        training, checkpoint = self.config.training, self.config.checkpoint
        every = training.validate_every if checkpoint.every is None else checkpoint.every
        # Steps between two validations, two checkpoints, and two in memory.
        self.due_every = training.validate_every, every, checkpoint.memory_every or 0
        self.clock = PhaseClock()
        self.progress = TrainerProgress()
        self.step = 0
        self.lockstep = True
        self.wire_bytes = 0
        self.validation: Mapping[str, float] = {}
        self.current_step = Step(Decision(Verdict.WAIT, (), 0, 0))
        use_device(process.placement.device)
        # One object for all steps: it is entered by one thread, and never while it is entered already.
        self.autocast = autocast(process.placement.device, self.config.training.precision)
        self.loss_scaling = LossScaling((lambda: self.loss_scale) if self.config.training.scales_loss else None)
        self.resources = ExitStack()
        self.tree = ModelTree(nn.Module())
        self.optimizer_calls = OptimizerCalls(self.control)
        task.trainer = self
        self.hooks: Sequence[Hooks] = (task, *process.kept.callbacks.values())

    # Hooks that a user's trainer may override.

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model as ``Task.build_model`` returned it."""
        return self.model

    @property
    def is_single_process_per_device(self) -> bool:
        """Whether this process computes on one device; batches are then moved to it before the forward."""
        return len(self.process.placement.devices) == 1

    @property
    def inner_step(self) -> int:
        """Local steps that this trainer has taken so far; 0 without rounds."""
        return self.progress.inner_steps

    @property
    def sampler_kwargs(self) -> dict[str, Any]:
        """``shuffle``, ``pad``, ``drop_last`` or ``seed``, to partition a map-style data set differently."""
        return {}

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the trainers; None if there is none."""
        return None

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by for the backward (``training.precision: float16``); a power of two."""
        return 1.0

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """Return a context for all micro-batches of a step except the last: gradients are not synchronized in it."""
        return nullcontext()

    def data_available(self) -> Announcement:
        """Return whether this trainer has the batches of a step: ready, waiting or drained. Waits for a short time.

        Called once for each announcement, which may be made during the step before. An announcement with ``stop``
        requests the end of the run.
        """
        return self.data.available()

    def on_before_forward(self, batch: Any) -> Any:
        """Return the batch as the model receives it."""
        return move_to_device(batch, self.process.placement.device) if self.is_single_process_per_device else batch

    def on_after_setup_optimizers(self) -> None:
        """Called once the optimizer exists, before the first step."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called with the loss of each micro-batch before its backward."""

    def on_after_backward(self) -> None:
        """Called after the backward of each micro-batch."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state in the form of ``torch.optim.Optimizer.state_dict``; not used by checkpoints."""

    @abstractmethod
    def averages(self) -> Mapping[str, Tensor]:
        """Return what is validated in place of a parameter, by its name; see ``Updater.averages``."""

    # What a mode implements.

    @abstractmethod
    def init_connection(self) -> None:
        """Build the model and connect to the other processes. Sets ``model``, ``data`` and ``step``."""

    @abstractmethod
    def agree(self) -> Decision:
        """Announce the next step to the other trainers (see ``announcement``) and return what all do next."""

    @abstractmethod
    def step_optimizer(self, report: StepReport) -> StepResult | None:
        """Make an update of this step's gradients; return None if its result is known later."""

    @abstractmethod
    def save_part(self, reason: str, since: float) -> None:
        """Take part in a checkpoint of the current step: stage ``state_dict()``, in a pause that began at ``since``.

        With ``checkpoint.background`` serialization, sending and writing follow after this returns.
        """

    def on_hooks_called(self) -> None:
        """Called after hooks that are called between two steps: before the first one, and after a validation."""

    def hooks_between_steps(self) -> AbstractContextManager[Any]:
        """Return a context for the hooks of epochs, which see the version of the decision and may change the model.

        Where ``load_version`` comes too late for that, the version is loaded before this returns.
        """
        return nullcontext()

    def step_scope(self) -> AbstractContextManager[Any]:
        """Return a context for the announcement and the step."""
        return nullcontext()

    def explain_errors(self) -> AbstractContextManager[Any]:
        """Return a context for a forward, which explains the errors that the mode causes."""
        return nullcontext()

    def load_version(self) -> None:
        """Load the parameters of this step's version into the model, after its batches have been taken."""

    def on_last_loss(self, totals: StepTotals) -> None:
        """Called before the last backward of a step, with what is measured of its batches so far."""

    def follow_update(self) -> int:
        """Take part, without a gradient, in an update that others make with one of several optimizers.

        Return the version after it: that before it, if they skip the call.
        """
        # Those that have compared the call may be lost before they push.
        return self.step if self.optimizer_calls.nonfinite else self.wait_version(self.step + 1)

    def wait_version(self, version: int) -> int:
        """Wait for a version that others make, without a gradient of this trainer; return the version after that.

        It is the one before it, if all trainers are lost that had data.
        """
        return version

    def sync_model(self) -> None:
        """Bring ``unwrapped_model`` to the current version, before it is validated or saved."""

    def publish_version(self) -> None:
        """Publish the current version if subscribers wait for it. Called between steps, also while there is no data."""

    # The start.

    def prepare_data(self) -> None:
        """Create source, buffer and feeder. ``init_connection`` calls it once the model exists."""
        partition = Partition(self.trainer_index, self.process.trainers)
        # A process that joins again keeps its data sets. An iterable may be used up, so it is made anew.
        kept = self.process.kept
        if kept.partition != partition and isinstance(kept.train, DataLoader):
            kept.train = None  # the trainers are others now, and its sampler may be that of a share
        with name_user_error(f"trainer {self.trainer_index}: train_source, or what it returned,"):
            samples = self.task.train_source(partition) if kept.train is None else kept.train
            if is_map_style(samples.dataset if isinstance(samples, DataLoader) else samples):
                kept.train = samples
            self.data = self.resources.enter_context(
                DataStream(
                    self.task,
                    partition,
                    self.config,
                    self.sampler_kwargs,
                    self.process.receiver_spec,
                    samples,
                    self.reports_served,
                )
            )
        if kept.partition != partition:
            kept.partition, kept.validation = partition, validation_batches(self.task, partition, self.config)
        self.validator = Validator(
            self.task, self.process, self.hooks, self.on_before_forward, lambda: self.unwrapped_model, self.averages
        )
        # The library partitions one data set, and would leave samples of data sets of different lengths out.
        held = getattr(kept.validation, "dataset", None)
        for name, share in (("train_source", self.data.source), ("validation_source", held)):
            self.control.check_equal(
                name,
                [share.description if isinstance(share, (DatasetSource, ValidationShare)) else "no data set"],
                "must return the same data set on every trainer, as it is partitioned among them",
                "return an iterable, or a paramserver.sources.Source, for samples of each trainer's own, and seed a "
                "sampler alike on all of them",
            )
        if self.monitor is not None:
            self.monitor.expect_samples(self.data.epoch_samples)
        self.process.startup_timer.mark("model and data")

    # A step.

    def announcement(self) -> Announcement:
        """Return the announcement of this trainer's next step: its data, and whether it wants to stop.

        ``agree`` calls it at most once per step.
        """
        # A trainer that waits for data may take no part in updates meanwhile.
        step = max(self.step, self.current_step.decision.step)
        self.data.set_version(step, limit=step if self.makes_all_updates else None)
        announcement = self.data_available()
        self.clock.lap("data")
        return self.control.with_stop(announcement, self.seconds)

    def announcement_if_ready(self) -> Announcement | None:
        """Return the announcement of the next step without waiting; None if the data is not ready yet.

        What it states holds until the next batch is taken.
        """
        if self.data.limits_staleness:
            if not self.lockstep or self.config.training.may_skip:
                return None  # the version of the next step is not known yet, and so is which samples are too old
            following = self.current_step.decision.step + 1
            self.data.set_version(following, limit=following)
        announcement = self.data.available(timeout_s=0.0)
        if announcement.readiness is Readiness.WAITING:
            return None
        if self._overrides_data_available:
            announcement = self.data_available()
        return self.control.with_stop(announcement, self.seconds)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all trainers, in the order of their indices.

        All trainers must call it at the same places, in the same order: in ``training_step``, ``validation_step``, the
        hooks of batches and validations, and ``on_train_end``. In a step those take part that have data, and in a
        ``validation_step`` with the samples of a lost trainer only the one that evaluates them.

        Args:
            value: a tensor, a number, a string, or lists and dictionaries of them. Shapes may differ. Tensors come back
                on the CPU and without gradients.

        Raises:
            TaskError: trainers do not wait for each other, or did not all call it, or call another hook, or the value
                cannot be sent.

        Example::

            >>> class Centers(Task):
            ...     def on_validation_end(self, batch_idx):
            ...         self.center = torch.stack(self.trainer.all_gather(self.own_center)).mean(0)
        """
        if not self.lockstep:
            server = self.config.server
            raise TaskError(
                f"trainer.all_gather must have trainers that step together, and with server.consistency "
                f"({server.consistency}) and server.backup_trainers ({server.backup_trainers}) none waits for the "
                "others; use sync without backup trainers, or self.log with a reduction"
            )
        if not self.current_step.is_common:
            raise TaskError(
                "trainer.all_gather must be called where all trainers are at the same time: in training_step, "
                "validation_step, on_batch_start, on_batch_end, on_validation_start, on_validation_end, on_checkpoint "
                "or on_train_end"
            )
        value = sendable(value)
        if self.validator.is_alone:
            return [value]
        active = self.current_step.decision.active if self.current_step.in_batches else None
        return self.control.all_gather(value, self.current_step.next_gather(), active)

    def optimize(self, name: str, loss: Tensor, retain_graph: bool = False) -> None:
        """Step one of several optimizers with the gradients of ``loss``, averaged over the trainers.

        To be called in ``training_step``, where ``build_optimizer`` returns a dictionary. Each call is a global step:
        gradients of the optimizer's own parameters, the mean over all trainers, and the update. When it returns, the
        model has the updated parameters. All trainers must make the same calls in the same order.

        Args:
            name: of the optimizer.
            loss: a scalar, the mean over the batch.
            retain_graph: as in ``Tensor.backward``.

        Raises:
            TaskError: there is no such optimizer, another trainer made another call, a backward in ``training_step``
                has left a gradient of it, or the loss depends on none of its parameters, or on values of parameters
                that an update has replaced.

        Example::

            >>> class Gan(Task):
            ...     def build_optimizer(self, model):
            ...         parts = {"g": model.generator, "d": model.discriminator}
            ...         return {name: torch.optim.Adam(part.parameters()) for name, part in parts.items()}
            ...     def training_step(self, model, batch, batch_idx):
            ...         fake = model.generator(torch.randn(len(batch), 8))
            ...         self.trainer.optimize("d", self.loss_of_discriminator(model, batch, fake.detach()))
            ...         self.trainer.optimize("g", self.loss_of_generator(model, fake))
        """
        self.tree.check_parameters()
        parameters = self.optimizer_calls.parameters(name)
        may_be_nonfinite = self.config.training.nonfinite == "skip"
        value = check_loss(loss, self.trainer_index, self.progress.batch_idx, name, may_be_nonfinite)
        self.clock.lap("forward")
        with torch.autocast(self.process.placement.device.type, enabled=False):
            self.on_before_backward(loss)
            own = set(map(id, parameters))
            for left, parameter in self.unwrapped_model.named_parameters():
                if parameter.grad is not None and id(parameter) in own:
                    raise TaskError(
                        f"optimize({name!r}, loss): a backward() of the task has left a gradient of parameter {left}, "
                        "which would be in no update; give optimize the sum of the losses, or call zero_grad() after "
                        "a backward() for something else"
                    )
                parameter.grad = None
            with explain_replaced_values(name):
                inputs = [p for p in parameters if p.requires_grad]
                self.loss_scaling.backward(loss, inputs=inputs, retain_graph=retain_graph)
            self.on_after_backward()
        self.clock.lap("backward")
        used = tuple(parameter.grad is not None for parameter in parameters)
        if not any(used):
            raise TaskError(
                f"optimize({name!r}, loss): the loss depends on no parameter of this optimizer; check the name, and "
                "detach() in the computation of the loss"
            )
        samples = self.current_step.batch_samples if not self.optimizer_calls.made else 0
        grads = [parameter.grad for parameter in parameters]
        sparse = tuple(grad.sparse_dim() if grad is not None and grad.is_sparse else 0 for grad in grads)
        cause = self.find_nonfinite(value)
        self.optimizer_calls.exchange(OptimizerCall(name, value, samples, used, sparse, cause, self.step))
        fields = {"seconds": self.seconds, "scale": self.loss_scale, "optimizer": name}
        report = StepTotals(value, samples).to_report(self.trainer_index, self.step, **fields)
        result = self.step_optimizer(report)
        assert result is not None
        for parameter in parameters:
            parameter.grad = None  # a push leaves them
        if not result.dropped:
            self.control.update_applied(result)
        # Autocast would continue with copies of the parameters before the update.
        torch.clear_autocast_cache()
        self.step, self.current_step.is_open = result.step, False
        self.optimizer_calls.made += 1
        self.end_step()

    @spanned("backward")
    def backward_batch(self, loss: Tensor, batches: int) -> None:
        """Add the gradients of a loss, of so many batches of a step."""
        self.on_before_backward(loss)
        self.loss_scaling.backward(loss / batches if batches > 1 else loss)
        self.on_after_backward()
        self.clock.lap("backward")

    def find_nonfinite(self, loss: float) -> str:
        """Return what is NaN or infinite of a step that may be skipped, as in ``StepReport.nonfinite``."""
        if not self.config.training.may_skip:
            return ""
        return find_nonfinite(loss, (parameter.grad for parameter in self.unwrapped_model.parameters()))

    def end_step(self) -> None:
        """Count a step."""
        self.clock.end_step()
        self.progress.steps += 1

    # Validation and checkpoints.

    @property
    def seconds(self) -> float:
        """Seconds of training, without validation and checkpoints, including those before a resume."""
        return self.progress.seconds + self.clock.total_s

    def state_dict(self) -> dict[str, Any]:
        """Return this trainer's part of a checkpoint: one copy, which training does not change any more."""
        memory = self.control.memory
        what = f"the state of {type(self.task).__name__}.on_checkpoint, or of a callback,"
        own = stage_copy(task_state(self.task, self.process.kept.callbacks), memory, what)
        stream = self.data.state_dict(memory)
        local = None if self.local_steps is None else stage_copy(self.local_steps.updater.state_dict(), memory)
        # model.pt has that of one trainer, and modules make it of what this one has seen.
        extra = stage_copy(extra_state_dict(self.tree.model) if self.process.trainers > 1 else {}, memory)
        memory.trim()
        # Here, as the file of a part that is sent has what arrives. The buffer has checked its samples and their keys.
        mark = stream["buffer"] and stream["buffer"]["mark"]
        for where, state in (
            (f"{type(self.task).__name__}.on_checkpoint", own),
            ("the data set of train_source", {**stream, "buffer": mark}),
            ("the optimizer or scheduler of local steps", local),
            ("get_extra_state of a module", extra),
        ):
            if state:
                check_storable(state, where)
        residuals: dict[str, Any] = {}
        if self.transport is not None and self.transport.feedback is not None:
            residuals["residuals"] = stage_copy(self.transport.residuals(), memory)
        return {
            "trainer_index": self.trainer_index,
            **stream,
            "random": random_states(self.process.placement.devices),
            "counters": vars(self.progress) | {"seconds": self.seconds},
            "task": own,
            "local_steps": local,
            "extra_state": extra,
            "flags": self.flags.state_dict(),
            "validation": dict(self.validation),
            **residuals,
        }

    def seed_or_restore(self, packed: bytes | None, validated_step: int | None) -> None:
        """Seed this trainer's random numbers, or restore its part of a checkpoint. Last in ``init_connection``.

        ``validated_step`` is that of rank 0: a validation that the checkpoint has is not made again, by any trainer.
        """
        seed_all(self.config.seed, 1 + self.trainer_index)
        self.flags = TrainingFlags(self.tree.model)
        if packed is not None:
            self.load_state_dict(unpack(packed))
            self.control.saved_step, self.validator.validated_step = self.step, validated_step

    def load_state_dict(self, part: Mapping[str, Any]) -> None:
        """Restore a ``state_dict()``, what resharding made of those of others, or what is known of a lost trainer."""
        self.progress = TrainerProgress(**part["counters"])
        if self.monitor is not None:  # the time of the run, which another trainer may have reported
            self.progress.seconds = max(self.progress.seconds, self.monitor.seconds)
        if part["random"] is not None:
            restore_random_states(part["random"], self.process.placement.devices)
        else:  # the checkpoint is of fewer trainers, or this one was lost
            seed_all(self.config.seed, part["resumes"], 1 + self.trainer_index)
        self.validation = part.get("validation") or {}
        restore_task(self.task, part, self.process.kept.callbacks)
        # After ``on_resume``, as the samples of the buffer are read again of what it restores.
        devices = self.process.placement.devices
        states = random_states(devices)  # which a data set of the user may change
        if part["buffer"] is None:  # of a lost trainer
            positions = AppliedPositions()
            positions.load_state_dict(part["applied"])
            self.data.load_after_loss(part, positions)
        else:
            self.data.load_state_dict(part)
            if part["buffer"]["counters"]["puts"] and (note := self.data.source.resume_note):
                self.record("note", text=f"trainer {self.trainer_index}: {note}")
        restore_random_states(states, devices)
        if part.get("extra_state"):
            load_part_of_state(self.tree.model, part["extra_state"])
        self.flags.stored = part.get("flags") or {}
        if self.local_steps is not None:
            state = part.get("local_steps")
            if state is not None:
                self.local_steps.updater.load_state_dict(state)
            origin = "a new optimizer" if state is None else "the checkpoint"
            log.info("trainer %d: its local steps continue with the state of %s", self.trainer_index, origin)
            self.record("local_steps", restored=state is not None)
        residuals = part.get("residuals") or {}  # what compression has lost before the checkpoint
        if self.transport is not None and self.transport.feedback is not None:
            self.transport.load_residuals(residuals)
            self.record("residuals", restored=bool(residuals))
        elif residuals:
            self.record(
                "note",
                text=f"trainer {self.trainer_index}: what the compression of its gradients lost before the checkpoint "
                "is dropped, as they are not compressed now",
            )

    def stop(self, reason: str) -> None:
        """End the run in good order, from any step or hook: all trainers validate and save, and it is completed.

        They agree before their next steps, so one more step may be made. The first reason given is in the summary.

        Raises:
            TaskError: there is no reason.

        Example::

            >>> class StopsEarly(Task):
            ...     def on_validation_end(self, batch_idx):
            ...         if self.is_good_enough:
            ...             self.trainer.stop("the accuracy is reached")
        """
        if not reason or not isinstance(reason, str):
            raise TaskError(f"trainer.stop({reason!r}) must have a reason; give a sentence for the summary")
        self.control.request_stop(reason)

    # Records.

    def log(self, name: str, value: float | Tensor, reduce: Reduction = "mean") -> None:
        """Record a value; ``Task.log`` calls it."""
        if reduce not in REDUCTIONS:
            raise TaskError(f"self.log({name!r}, reduce={reduce!r}): reduce must be one of {', '.join(REDUCTIONS)}")
        if not name or not isinstance(name, str):
            raise TaskError(f"self.log({name!r}, value): the name must be text; give the tag that TensorBoard shows")
        cure = "it must be one number: log .mean() or .norm(), or each element by a name of its own"
        number = to_number(value, f"self.log({name!r}, value): the value", cure)
        fields: dict[str, Any] = {}
        reduce = reduce if self.lockstep else "none"
        has_several = reduce != "none" and self.config.training.batches_per_step > 1  # values of one trainer in a step
        if self.process.trainers > 1 or has_several:
            fields["reduce"] = reduce
            if reduce == "mean":
                fields["weight"] = self.current_step.batch_samples
            if self.current_step.decision.verdict is Verdict.END:
                fields["at_end"] = True
        self.record("log", name=name, value=number, **fields)

    def record(self, kind: str, **fields: Any) -> None:
        """Record something about this trainer, at the step that is being made, or between steps at the last one.

        A run that resumes from the checkpoint of a step makes the next step again, and so its records.
        """
        rank, step = self.process.identity.global_rank, self.step + self.current_step.is_open
        self.control.record(make_record(kind, step, rank=rank, trainer=self.trainer_index, **fields))

    def leave(self, totals: TrainerTotals, decision: Decision) -> None:
        """Leave the run in good order; rank 0 receives the totals."""
        self.control.leave(totals, decision)


class TrainingLoop:
    """Calls a trainer from its first connection to the end of the run: what is done when, and in which order."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._served_before = 0  # samples, before this process trained
        self._buffer_before: Mapping[str, Any] = {}  # as of ``figures`` of the data
        self._core_wait = CoreWait()
        self._epoch_end = 0.0  # the epoch that is open ends at this number of samples applied
        self._has_epoch_hooks = any(
            overrides(one, hook) for one in trainer.hooks for hook in (Hooks.on_epoch_start, Hooks.on_epoch_end)
        )

    def run(self) -> Decision:
        """Train from the first connection to the end, and return the decision that ended the run.

        Everything that was opened is closed, also if an error is raised.
        """
        trainer = self.trainer
        try:
            trainer.init_connection()
            for hook in trainer.loss_scaling.unscale_gradients(set(trainer.flags.trained.values())):
                trainer.resources.callback(hook.remove)
            trainer.process.kept.started = trainer.task
            devices = trainer.process.placement.devices
            states = None if trainer.control.saved_step is None else random_states(devices)
            for hooks in trainer.hooks:
                hooks.on_train_start()
            # Those of a checkpoint are of after this hook, which finds the flags as built, as in a run from its start.
            trainer.flags.begin()
            if states is not None:
                restore_random_states(states, devices)
            self._buffer_before = trainer.data.figures()
            trainer.data.start()
            if self._has_epoch_hooks:
                trainer.data.enter_epoch(trainer.progress.epoch - (not trainer.progress.epoch_open))
            decision = self._fit()
            trainer.data.stop_feeding()  # before the last validation and checkpoint, which may take long
            self._finish(decision)
        except BaseException as error:
            cause = trainer.control.report_failure(error)
            if cause is error:
                raise
            raise cause from error
        finally:
            trainer.resources.close()
        return decision

    def _fit(self) -> Decision:
        """Take the steps on which the trainers decide, until they decide to end; return that decision."""
        trainer = self.trainer
        trainer.on_hooks_called()
        self._served_before, self._core_wait = trainer.progress.samples_served, CoreWait()
        trainer.clock.skip()
        while True:
            trainer.publish_version()
            with trainer.step_scope():
                trainer.current_step.is_open = True
                decision = trainer.agree()
                trainer.current_step = Step(decision)
                if decision.verdict is Verdict.END:
                    if decision.completes:  # otherwise a resumed run ends the epoch, as one that was not stopped
                        with trainer.hooks_between_steps():
                            trainer.ends_epoch = self._close_epoch()
                    break
                takes_step = decision.verdict is Verdict.GO and self._take_step(decision)
            if takes_step:
                self._after_step(is_skipped=trainer.lockstep and trainer.step == decision.step)
            elif decision.verdict in (Verdict.BARRIER, Verdict.VALIDATE):
                self._between_steps(decision)
        trainer.current_step.is_common = True
        trainer.step = decision.step
        trainer.progress.seconds += trainer.clock.present_s  # of waiting for samples, which a limit of time has ended
        trainer.clock.skip()
        if trainer.monitor is not None:
            trainer.monitor.seconds = max(trainer.monitor.seconds, trainer.seconds)
        return decision

    def _finish(self, decision: Decision) -> None:
        """Validate and save for the last time; only save after a signal, and before other trainers continue."""
        trainer = self.trainer
        if decision.completes and self._validate(trainer.trainer_index):
            trainer.control.saved_step = None  # a checkpoint of this step was saved before it turned out to be the best
        trainer.publish_version()
        self._save("end" if decision.completes else "resize" if decision.resizes else "interrupted")
        if not decision.resizes:
            for hooks in trainer.hooks:
                hooks.on_train_end()
        if not self._is_record_due():
            trainer.record("buffer", **trainer.data.record(), end=True)
        trainer.leave(self._totals(), decision)

    # A step.

    def _take_step(self, decision: Decision) -> bool:
        """Train on this trainer's batches of a step, or follow the others; return whether there is a new version."""
        trainer = self.trainer
        trainer.process.profiler.enter_step(decision.step)
        trainer.current_step.is_open = True
        if decision.position >= self._epoch_end:
            with trainer.hooks_between_steps():
                self._enter_epoch(decision.position)
        trainer.current_step.is_common = True
        by_calls = bool(trainer.optimizer_calls.parameters_of)
        if by_calls:
            trainer.optimizer_calls.batch_began = trainer.step = decision.step
        has_data = trainer.current_step.in_batches = trainer.trainer_index in decision.active
        # The others wait for this trainer, so there is one more version at most until it announces another step.
        is_waited_for = trainer.lockstep and has_data and not by_calls
        trainer.data.set_version(decision.step, limit=decision.step + 1 if is_waited_for else None)
        if has_data:
            trainer.step = self._train_by_calls() if by_calls else self._train(decision)
        else:
            with trainer.control.waits_for_steps():
                trainer.step = self._follow_calls() if by_calls else trainer.wait_version(decision.step + 1)
        trainer.current_step.in_batches = trainer.current_step.is_open = False
        timer = trainer.process.startup_timer
        if has_data and "first step" not in timer.phases:
            timer.mark("first step")
            trainer.record("phase", phases=dict(timer.phases))
        return has_data or trainer.step != decision.step

    def _train(self, decision: Decision) -> int:
        """Train on the batches of a step; return the version that results."""
        trainer, local = self.trainer, self.trainer.local_steps
        # 1. The batches of each gradient: a round has one for each local step, any other step has one.
        at_once = decision.batches if local is None else trainer.config.training.accumulate_batches
        may_skip = trainer.config.training.may_skip if local is None else local.updater.skipping.is_possible
        done, samples, summed, counted, skipped, began = 0, 0, 0.0, 0, 0, time.perf_counter()
        buffers: PackedBuffers | None = None
        while done < decision.batches:
            if done:
                trainer.data.wait_batches()
            batches = [self._next_batch() for _ in range(min(at_once, decision.batches - done))]
            own = sum(batch_samples for _, batch_samples in batches)
            samples += own
            self._load([batch for batch, _ in batches], own, is_first=not done)
            if may_skip and (local is not None or not done):
                buffers = trainer.tree.pack_buffers()  # which a forward with NaN may change
            # Not before the first batches are loaded: until then the parameters are those of an earlier version.
            if local is not None and not done:
                began = time.perf_counter()  # after the pull, which does not get shorter with fewer local steps
                with local.lock:
                    local.begin()
            # 2. Their forward and backward. Before the last backward the loss of the step is known, and announced.
            before = summed
            for number, (batch, trainer.current_step.batch_samples) in enumerate(batches, start=1):
                last = number == len(batches)
                with (
                    explain_errors("training_step", batch, trainer.model),
                    nullcontext() if last else trainer.block_backward_sync(),
                ):
                    self._begin_batch(is_first=number == 1)
                    with trainer.explain_errors():
                        value, loss = self._forward(batch)
                    summed, done, counted = summed + value, done + 1, counted + 1
                    if done == decision.batches:
                        totals = StepTotals(summed / done, samples)
                        trainer.on_last_loss(totals)
                    trainer.backward_batch(loss, len(batches))
                    self._end_batch()
            # 3. The local step, which may be skipped; then its samples, and a loss that is not finite, do not count.
            if local is not None and not self._take_local_step(local, own, summed, buffers):
                skipped += own
                if not math.isfinite(summed):
                    summed, counted = before, counted - len(batches)
        # 4. What the step measured. With no local step that counts, the loss is that of the step before.
        trainer.tree.check_parameters()
        if counted:
            trainer.progress.loss = summed / counted
        totals, inner_s = StepTotals(trainer.progress.loss, samples - skipped, skipped), 0.0
        if local is not None:
            inner_s = time.perf_counter() - began
            with local.lock:
                totals = replace(totals, drift=local.end(), inner_steps=-(-done // at_once))
        return self._update(decision, totals, inner_s, buffers)

    def _update(self, decision: Decision, totals: StepTotals, inner_s: float, buffers: PackedBuffers | None) -> int:
        """Step the optimizer with the gradients of a step, and return the version that results.

        ``buffers`` are the module buffers of before, which return if the step is skipped; None if it may not be.
        """
        trainer = self.trainer
        fields = {"seconds": trainer.seconds, "scale": trainer.loss_scale, "inner_s": inner_s}
        report = totals.to_report(trainer.trainer_index, decision.step, **fields)
        trainer.current_step.batch_samples = 1
        result = trainer.step_optimizer(report)
        if result is None:  # it is known later
            return decision.step + 1
        if not result.dropped:
            trainer.control.update_applied(result)
        elif buffers is not None:
            trainer.tree.load_buffers(buffers)
        return result.step

    def _take_local_step(self, local: LocalSteps, samples: int, loss: float, buffers: PackedBuffers | None) -> bool:
        """Make a local step, or skip it; return whether it was made. ``buffers`` are those before it."""
        trainer = self.trainer
        scale, trainer.progress.inner_steps = trainer.loss_scale, trainer.progress.inner_steps + 1
        with local.lock:
            cause = local.step(trainer.progress.inner_steps, loss)
            if cause and buffers is not None:
                trainer.tree.load_buffers(buffers)
        trainer.clock.lap("apply")
        if cause:
            fields = {"scale": scale} if trainer.config.training.scales_loss else {}
            trainer.record("skipped", trainers=[trainer.trainer_index], samples=samples, cause=cause, **fields)
            local.updater.skipping.step_skipped([trainer.trainer_index], cause, scale)
        return not cause

    def _train_by_calls(self) -> int:
        """Train on a batch whose ``training_step`` calls ``optimize``; return the version that results."""
        trainer, calls, batch_idx = self.trainer, self.trainer.optimizer_calls, self.trainer.progress.batch_idx
        batch, samples = self._next_batch()
        trainer.current_step.batch_samples = samples
        self._load([batch], samples)
        buffers = trainer.tree.pack_buffers() if trainer.config.training.may_skip else None
        self._begin_batch()
        calls.made = 0
        with explain_errors("training_step", batch, trainer.model):
            returned = self._call_training_step(batch)
        trainer.data.report_losses(trainer.current_step.sample_losses)
        if returned is not None or not calls.made:
            what = "returned a value" if returned is not None else "did not call it"
            raise TaskError(
                f"training_step must call self.trainer.optimize(name, loss) and return None with several optimizers "
                f"({', '.join(calls.parameters_of)}); in batch {batch_idx} it {what}"
            )
        calls.exchange(OptimizerCall(version=trainer.step))
        if buffers is not None and trainer.step == calls.batch_began:  # all calls were skipped
            trainer.tree.load_buffers(buffers)
        calls.made, trainer.current_step.batch_samples = -1, 1
        trainer.clock.lap("forward")
        self._end_batch()
        return trainer.step

    def _follow_calls(self) -> int:
        """Follow the calls of the trainers that have data; return the version after their batch."""
        trainer, calls = self.trainer, self.trainer.optimizer_calls
        calls.made = 0
        while calls.exchange(None):
            trainer.step = trainer.follow_update()
            calls.made += 1
            trainer.clock.lap("wait")
            trainer.end_step()
        calls.made = -1
        # A trainer may be lost whose gradient was not finite, so that the others do not skip the call.
        return max([trainer.step, *(call.version for call in calls.present.values())])

    def _begin_batch(self, is_first: bool = True) -> None:
        """Call the hooks before a batch. The gradient that the first begins has nothing of a backward in hooks."""
        for hooks in self.trainer.hooks:
            hooks.on_batch_start(self.trainer.progress.batch_idx)
        if is_first:
            self.trainer.tree.clear_gradients()

    def _end_batch(self) -> None:
        """Call the hooks after the backward of a batch, and count it."""
        for hooks in self.trainer.hooks:
            hooks.on_batch_end(self.trainer.progress.batch_idx)
        self.trainer.progress.batch_idx += 1

    @spanned("forward")
    def _forward(self, batch: Any) -> tuple[float, Tensor]:
        """Call ``training_step``; return the value of the loss, and the loss."""
        trainer = self.trainer
        loss = self._call_training_step(batch)
        # Reading the value waits for the device; a loss that is not finite is never applied.
        may_be_nonfinite = trainer.config.training.nonfinite == "skip"
        value = check_loss(loss, trainer.trainer_index, trainer.progress.batch_idx, may_be_nonfinite=may_be_nonfinite)
        trainer.data.report_losses(trainer.current_step.sample_losses)
        trainer.clock.lap("forward")
        return value, loss

    def _call_training_step(self, batch: Any) -> Any:
        """Call ``training_step`` and return what it returned; the mean, if that is a vector with a loss per sample."""
        trainer, step = self.trainer, self.trainer.current_step
        step.sample_losses, step.in_training_step = None, True
        try:
            with trainer.autocast:
                loss: Any = trainer.task.training_step(trainer.model, batch, trainer.progress.batch_idx)
                if isinstance(loss, Tensor) and loss.shape == (step.batch_samples,):
                    step.sample_losses = loss.detach() if step.sample_losses is None else step.sample_losses
                    loss = loss.mean()
        finally:
            step.in_training_step = False
        return loss

    @spanned("data")
    def _next_batch(self) -> tuple[Any, int]:
        batch, samples = self.trainer.data.next_batch()
        batch = self.trainer.on_before_forward(batch)
        self.trainer.clock.lap("data")
        return batch, samples

    def _load(self, batches: Sequence[Any], samples: int, is_first: bool = True) -> None:
        """Load the version of a step, once its first batches are there, and count the samples of these batches."""
        trainer = self.trainer
        trainer.data.read_ahead()
        trainer.clock.lap("data")
        if is_first:
            trainer.current_step.batches = batches
            trainer.load_version()
            trainer.current_step.batches = ()
        trainer.progress.samples_served += samples

    def _enter_epoch(self, samples: int) -> None:
        """Enter the epoch of the next sample, after ``samples`` were applied or skipped."""
        progress, epoch_samples = self.trainer.progress, self.trainer.data.epoch_samples
        # Not by the samples of the whole run: passes of another number of trainers may have left out more of them.
        progress.epoch_end = progress.epoch_end or (progress.epoch + 1) * (epoch_samples or 0)
        while epoch_samples and samples >= progress.epoch_end:
            self._close_epoch()
            # After the last sample of an epoch and before the first of the next, also if a run was resumed in between.
            if self.trainer.updater is not None:
                self.trainer.updater.on_epoch_end()
            if self.trainer.local_steps is not None:
                self.trainer.local_steps.updater.on_epoch_end()
            progress.epoch, progress.epoch_end = progress.epoch + 1, progress.epoch_end + epoch_samples
        if not progress.epoch_open:
            progress.epoch_open = True
            if self.trainer.monitor is not None:
                self.trainer.monitor.enter_epoch(progress.epoch, progress.epoch_end)
            for hooks in self.trainer.hooks:
                hooks.on_epoch_start(progress.epoch)
            if self._has_epoch_hooks:
                self.trainer.data.enter_epoch(progress.epoch)
        self._epoch_end = progress.epoch_end if epoch_samples else float("inf")

    def _close_epoch(self) -> bool:
        """Call the hooks of the end of an epoch, if one has begun; return whether another checkpoint is due then.

        All trainers return the same. Where rank 0 knows which checkpoints exist, also those in which none has begun.
        """
        progress, hooks = self.trainer.progress, self.trainer.hooks
        ends = progress.epoch_open
        if ends:
            progress.epoch_open = False
            for one in hooks:
                one.on_epoch_end(progress.epoch)
        changes = any(overrides(one, Hooks.on_epoch_end) for one in hooks)
        return changes and (ends or self.trainer.control.knows_saved)

    # Between two steps.

    def _after_step(self, is_skipped: bool) -> None:
        """Record, validate and save what is due after a step; nothing after one that all trainers have skipped."""
        trainer = self.trainer
        if not trainer.optimizer_calls.parameters_of:  # otherwise each call of ``optimize`` was one
            trainer.end_step()
        if is_skipped:
            return
        if self._is_record_due():
            trainer.record("buffer", **trainer.data.record())
            if trainer.local_steps is not None:
                trainer.record("inner", inner_step=trainer.inner_step, lr=list(trainer.local_steps.updater.applied_lr))
        if trainer.lockstep and is_due(trainer.step, *trainer.due_every, since=trainer.optimizer_calls.batch_began):
            self._validate_and_save()

    def _between_steps(self, decision: Decision) -> None:
        """With trainers that run freely: validate a retained version, or do at a barrier all that is due."""
        trainer = self.trainer
        trainer.clock.skip()
        trainer.step = decision.step
        trainer.optimizer_calls.batch_began = decision.batch_began  # which was of another process, if all were lost
        if decision.verdict is not Verdict.VALIDATE:
            self._validate_and_save()
        else:
            self._validate(decision.share)

    def _validate_and_save(self) -> None:
        """Do what is due at the current step, which all trainers have reached."""
        trainer, since = self.trainer, self.trainer.optimizer_calls.batch_began
        validates, saves, saves_in_memory = (is_due(trainer.step, every, since=since) for every in trainer.due_every)
        improved = validates and self._validate(trainer.trainer_index)
        if improved or saves:
            self._save("best" if improved else "periodic")
        elif saves_in_memory:
            self._save(MEMORY)

    def _validate(self, share: int) -> bool:
        """Validate a trainer's share of the current version; return whether the result of all is the best so far.

        This trainer's own share is validated once.
        """
        trainer, validator, control = self.trainer, self.trainer.validator, self.trainer.control
        if share == trainer.trainer_index:
            if validator.validated_step == trainer.step:
                return False
            validator.validated_step = trainer.step
        trainer.sync_model()
        step, batch_idx, since = trainer.step, trainer.progress.batch_idx, trainer.optimizer_calls.batch_began
        with validator.generators(step, share):
            # Without data a trainer still takes part: the others wait for its share.
            shares = {share: validator.evaluate(share, batch_idx)}
            waits = trainer.current_step.decision.verdict is not Verdict.VALIDATE
            # Otherwise the values are those of this share alone, which may have no samples.
            has_values = waits or shares[share].samples or not overrides(trainer.task, Task.validation_source)
            reply = control.report_validation(step, shares, since, waits)
            while reply.missing:  # shares of lost trainers
                shares = {other: validator.evaluate_alone(step, other, batch_idx) for other in reply.missing}
                reply = control.report_validation(step, shares, since)
            trainer.validation = reply.means
            if trainer.updater is not None:
                trainer.updater.on_validation_end(step, reply.means, since)
            if trainer.local_steps is not None and share == trainer.trainer_index:
                trainer.local_steps.updater.on_validation_end(step, reply.means if has_values else None, since)
            validator.end(batch_idx)
        trainer.clock.skip()
        trainer.on_hooks_called()
        return reply.improved

    def _save(self, reason: str) -> None:
        """Take part in a checkpoint of the current step, unless it exists; for the last one, wait until it is sent.

        One that was made before hooks ended the last epoch is made again, as they may have changed what it has, or
        before the last samples of simulations arrived.
        """
        trainer, control = self.trainer, self.trainer.control
        is_changed = trainer.ends_epoch or SAVE_REASONS[reason].renews(trainer.config.simulations is not None)
        if is_changed or control.saved_step != trainer.step:
            control.saved_step = None if SAVE_REASONS[reason].in_memory else trainer.step
            began = time.perf_counter()
            control.wait_saved()  # all trainers wait for the same checkpoint, so none is more than one ahead
            trainer.save_part(reason, began)
            trainer.clock.skip()
        if SAVE_REASONS[reason].is_last:
            with trainer.process.stop_limit.paused():
                control.wait_saved()

    def _is_record_due(self) -> bool:
        """Whether the last step has a periodic record: of the run's steps, or of its own if trainers run freely."""
        trainer = self.trainer
        step = trainer.step if trainer.lockstep else trainer.progress.steps
        return is_due(step, trainer.config.logging.log_every, since=trainer.optimizer_calls.batch_began)

    def _totals(self) -> TrainerTotals:
        trainer, clock = self.trainer, self.trainer.clock
        return TrainerTotals(
            trainer_index=trainer.trainer_index,
            samples=trainer.progress.samples_served,
            samples_before=self._served_before,
            batches=trainer.progress.batch_idx,
            inner_steps=trainer.progress.inner_steps,
            samples_left=trainer.data.samples_left,
            seconds=clock.steps.total_s,
            phases_s={**clock.seconds, "hidden": clock.hidden_s},
            steps=clock.steps,
            buffer=trainer.data.figures_since(self._buffer_before),
            peak_rss_mb=peak_rss_mb(),
            wire_bytes=trainer.wire_bytes if trainer.counts_bytes else None,
            core_wait_share=self._core_wait.share(),
            threads=torch.get_num_threads(),
            tables=dict(trainer.tree.table_uses),
        )


@contextmanager
def explain_replaced_values(name: str) -> Iterator[None]:
    """Raise a ``TaskError`` where an update has replaced values that the loss of the optimizer ``name`` depends on."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in message_of(error):
            raise
        raise TaskError(
            f"optimize({name!r}, loss): the loss was computed before an update of parameters that its gradient "
            "depends on; compute it, or the part that uses these parameters, after the call that updates them"
        ) from error


def overrides(owner: object, method: Callable[..., Any]) -> bool:
    """Return whether ``owner`` has another ``method`` than the class that ``method`` was taken from."""
    return getattr(getattr(owner, method.__name__), "__func__", None) is not method

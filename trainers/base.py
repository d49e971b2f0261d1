"""The training loop, the same in every mode: announce, step, record, validate, save."""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paramserver.buffers.positions import AppliedPositions
from paramserver.checkpoint import StagingPool, check_storable, stage_copy, unpack, without_values
from paramserver.consistency import Announcement, Decision, Readiness, Stop, Verdict
from paramserver.context import ProcessContext
from paramserver.devices import move_to_device, use_device
from paramserver.distributed.rendezvous import Rendezvous
from paramserver.errors import TaskError, message_of
from paramserver.importing import name_user_error
from paramserver.limits import epoch_of, is_due
from paramserver.metrics.records import (
    CoreWait,
    PhaseClock,
    Record,
    StepReport,
    StepResult,
    TrainerTotals,
    WeightedSums,
    make_record,
    peak_rss_mb,
)
from paramserver.metrics.reduction import REDUCTIONS, Reduction
from paramserver.parameters.model import autocast
from paramserver.parameters.model_tree import ModelTree
from paramserver.parameters.numerics import check_loss, name_float64, to_number
from paramserver.rng import random_states, restore_random_states, seed_all, validation_generators
from paramserver.runs.checkpoint_manager import CheckpointManager
from paramserver.runs.monitor import RunMonitor
from paramserver.sources import Partition
from paramserver.sources.data_loader import is_map_style
from paramserver.sources.dataset import DatasetSource
from paramserver.task import Callback, Hooks, Task, restore_task, task_state
from paramserver.trainers.data import DataStream
from paramserver.trainers.validation import ValidationShare, evaluate, validation_batches
from paramserver.transport.messages import DataPosition, OptimizerCall

T = TypeVar("T")

_BETWEEN_STEPS = (Verdict.BARRIER, Verdict.VALIDATE)
# Reasons of a checkpoint after which there is none.
_LAST = ("end", "interrupted", "resize")


@dataclass
class TrainerProgress:
    """How far a trainer is; part of what it stores in a checkpoint.

    Attributes:
        batch_idx: of the next batch.
        samples_served: samples of all batches so far.
        epoch: the current one, and whether ``on_epoch_start`` was called for it (``epoch_open``).
        seconds: of training before this process resumed the run.
        steps: that this trainer took, or waited for.
    """

    batch_idx: int = 0
    samples_served: int = 0
    epoch: int = 0
    epoch_open: bool = False
    seconds: float = 0.0
    steps: int = 0


class Trainer(ABC):
    """One trainer of a run: the loop, its hooks, validation and checkpoints. Subclasses implement a mode.

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
        lockstep: whether all trainers take every step together.
        records: not sent to rank 0 yet.
        all_totals: of every trainer, on rank 0 after the run.
        hooks: the task, and its callbacks after it.
        parameters_of: the parameters of each optimizer, by its name; empty if there is one without a name.
        validates_averages: whether a validation is of ``averages()`` in place of the parameters.
        tree: finds module buffers of ``unwrapped_model``; None if the model is on the server.
        batch_began: the version that the last batch began with, where there are several optimizers.
        optimizer_calls: of ``optimize``, the present one on each trainer that has data.
        validation: the values of the newest validation in this process, by name: the means over all trainers; of a
            version that trainers who run freely validate without waiting, those of this trainer's share.

    Example::

        >>> from paramserver.trainers import LocalTrainer
        >>> class Scaled(LocalTrainer):
        ...     def on_before_forward(self, batch):
        ...         return [tensor * 0.5 for tensor in super().on_before_forward(batch)]
    """

    for_mode: str | None = None
    """The mode that this trainer implements; None for any."""

    computes: str | None = None
    """The value of ``server.compute`` that this trainer implements; None if the key does not apply."""

    reports_served = False
    """Whether pushes name the samples of a step."""

    model: nn.Module
    data: DataStream

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
        self.rendezvous = rendezvous
        self.monitor: RunMonitor | None = None if checkpoints is None else checkpoints.monitor
        self.clock = PhaseClock()
        self.progress = TrainerProgress()
        self.joined = False  # the servers have accepted this process
        self.step = 0
        self.lockstep = True
        self.records: list[Record] = []
        self.wire_bytes = 0
        self.all_totals: list[TrainerTotals] = []
        self.validation: Mapping[str, float] = {}
        self.validation_loader: Iterable[tuple[Any, int]] | None = None
        self._loaders_of_others: dict[int, Iterable[tuple[Any, int]] | None] = {}  # of trainers that were lost
        self._evaluates_alone = False  # the share of one of these
        self._is_validating = False  # between the hooks
        self._stop_reason = ""
        self._samples_before = 0  # served before this process trained
        self._batch_samples = 1  # of the batch whose step is computed
        self._step_offset = 0  # 1 while step ``step + 1`` is being made
        self._in_batches = False  # while those trainers call hooks that have data
        self._memory = StagingPool()
        self._kept_parameters: list[tuple[nn.Parameter, Tensor]] = []  # while the model has their averages
        self._validated_step: int | None = None
        self._saved_step: int | None = None
        self._validate_every = self.config.training.validate_every
        save_every = self.config.checkpoint.every
        self._save_every = self._validate_every if save_every is None else save_every
        # The epoch that is open ends at this number of samples applied.
        self._epoch_end = 0.0
        self._device = process.placement.device
        use_device(self._device)
        # One object for all steps: it is entered by one thread, and never while it is entered already.
        self._autocast = autocast(self._device, self.config.training.precision)
        self._overrides_data_available = overrides(self, Trainer.data_available)
        self._resources = ExitStack()
        self._decision: Decision | None = None  # that made the present step, or ended the run
        self._gathers: tuple[tuple[int, ...], int] = (), 0  # where all_gather was called last, and how often there
        # With several optimizers: the parameters of each.
        self.parameters_of: dict[str, list[nn.Parameter]] = {}
        self.validates_averages = False
        self.tree: ModelTree | None = None  # of the model as the optimizer has it; None if that is elsewhere
        self.batch_began: int | None = None  # the version that the last batch began with
        self.optimizer_calls: list[OptimizerCall] = []  # the last ones of ``optimize``, of all trainers that have data
        self._updates = -1  # made in the present batch; -1 outside of ``training_step``
        task.trainer = self
        self._callbacks: Mapping[str, Callback] = process.kept.callbacks
        self.hooks: Sequence[Hooks] = (task, *self._callbacks.values())

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
    def batch_samples(self) -> int:
        """Samples of the batch whose step is computed; 1 between steps."""
        return self._batch_samples

    @property
    def sampler_kwargs(self) -> dict[str, Any]:
        """``shuffle``, ``pad``, ``drop_last`` or ``seed``, to partition a map-style data set differently."""
        return {}

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the trainers; None if there is none."""
        return None

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
        return move_to_device(batch, self._device) if self.is_single_process_per_device else batch

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
    def merge_validation(self, sums: WeightedSums) -> tuple[Mapping[str, float], bool]:
        """Return the means over the shares of all trainers, and whether they are the best so far."""

    @abstractmethod
    def save_part(self, reason: str, since: float) -> None:
        """Take part in a checkpoint of the current step: stage ``state_dict()``, in a pause that began at ``since``.

        With ``checkpoint.background`` serialization, sending and writing follow after this returns.
        """

    @abstractmethod
    def send_records(self, records: Sequence[Record]) -> None:
        """Send records to rank 0, or keep them until it collects them."""

    @abstractmethod
    def leave(self, totals: TrainerTotals, decision: Decision) -> None:
        """Leave the run in good order; rank 0 receives the totals."""

    def step_scope(self) -> AbstractContextManager[Any]:
        """Return a context for the announcement and the step."""
        return nullcontext()

    def load_version(self) -> None:
        """Load the parameters of this step's version into the model, after its batches have been taken."""

    def on_last_loss(self, loss: float, samples: int) -> None:
        """Called before the last backward of a step with the mean loss and the samples of all its batches."""

    def set_optimizers(self, names: Mapping[str, Sequence[str]]) -> None:
        """Take over the names of the parameters of each optimizer. ``init_connection`` calls it."""
        own = dict(self.unwrapped_model.named_parameters())
        self.parameters_of = {optimizer: [own[name] for name in of] for optimizer, of in names.items()}

    def follow_update(self) -> None:
        """Take part, without a gradient, in an update that others make with one of several optimizers (``calls``)."""

    def idle(self, decision: Decision) -> int:
        """Wait for a step in which this trainer has no data; return the version after it.

        That is the version before it, if all trainers are lost that had data.
        """
        return decision.step + 1

    def on_epoch_ended(self, epoch: int) -> None:
        """Called once all samples of an epoch are applied; a trainer that owns a schedule steps it."""

    def sync_model(self) -> None:
        """Bring ``unwrapped_model`` to the current version, before it is validated or saved."""

    def wait_saved(self) -> None:
        """Wait until rank 0 has received this trainer's part of the last checkpoint."""

    def report_failure(self, error: BaseException) -> None:
        """Report to the other processes, where possible, that this trainer fails."""

    # The run.

    def run(self) -> Decision:
        """Train from the first connection to the end, and return the decision that ended the run.

        Everything that was opened is closed, also if an error is raised.
        """
        try:
            self.init_connection()
            if not self.process.kept.has_started:
                self.process.kept.has_started = True
                for hooks in self.hooks:
                    hooks.on_train_start()
            self.data.start()
            decision = self._fit()
            self.data.stop_feeding()  # before the last validation and checkpoint, which may take long
            self._finish(decision)
        except BaseException as error:
            self.report_failure(error)
            raise
        finally:
            self.close()
        return decision

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
            self.data = self.enter_context(
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
        self.validation_loader = kept.validation
        self._check_data()
        if self.monitor is not None:
            self.monitor.expect_samples(self.data.epoch_samples)
        self.process.startup_timer.mark("model and data")

    def replace_lost(self, part: bytes | None, position: DataPosition, incarnation: int) -> None:
        """Take the place of a trainer that was lost: continue its data after what was applied of it.

        Args:
            part: its part of the newest checkpoint, for the state of the task; None if there is none.
            position: where its data continues.
            incarnation: of this process, so that its random numbers are not those of the lost one.
        """
        seed_all(self.config.seed, incarnation, 1 + self.trainer_index)
        applied = AppliedPositions()
        applied.load_state_dict(position.applied)
        self.data.load_after_loss({"source": position.source, "buffer": None}, applied)
        self.progress = TrainerProgress(**position.counters)
        if part is not None and (stored := unpack(part))["task"]:
            restore_task(self.task, stored["task"], self._callbacks)

    def _check_data(self) -> None:
        """Refuse data sets of different lengths: the library partitions one data set, and would leave samples out."""
        held = getattr(self.validation_loader, "dataset", None)
        for name, share in (("train_source", self.data.source), ("validation_source", held)):
            self.check_equal(
                name,
                [share.description if isinstance(share, (DatasetSource, ValidationShare)) else "no data set"],
                "must return the same data set on every trainer, as it is partitioned among them",
                "return an iterable, or a paramserver.sources.Source, for samples of each trainer's own, and seed a "
                "sampler alike on all of them",
            )

    def check_equal(self, name: str, lines: Sequence[str], must: str, cure: str) -> None:
        """Refuse ``lines`` that describe ``name`` if they differ from those of another trainer.

        Raises:
            TaskError: they do; the message names both ranks and the first difference.
        """
        if self.process.trainers == 1:
            return
        label = f"rank {self.process.identity.global_rank} ({self.process.role})"
        first = self.set_first(f"equal/{name}", "\n".join([label, *lines])).split("\n")
        pairs = zip_longest(first[1:], lines, fillvalue="nothing more")
        for theirs, own in pairs:
            if theirs != own:
                raise TaskError(f"{name} {must}: {first[0]} has {theirs}, and {label} has {own}; {cure}")

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
        if self._decision is None:
            raise TaskError(
                "trainer.all_gather must be called where all trainers are at the same time: in training_step, "
                "validation_step, on_batch_start, on_batch_end, on_validation_start, on_validation_end or on_train_end"
            )
        value = stage_copy(value, what="the value of trainer.all_gather")
        try:
            pickle.dumps(without_values(value))
        except Exception as error:  # pickle raises many types for what it cannot store
            raise TaskError(
                f"trainer.all_gather was given what cannot be sent to another process ({error}); give tensors, "
                "numbers, strings, and lists or dictionaries of them"
            ) from error
        if self._evaluates_alone:
            return [value]
        place = self._decision.step, int(self._decision.verdict is Verdict.GO), int(self._in_batches)
        count = self._gathers[1] + 1 if self._gathers[0] == place else 0
        self._gathers = place, count
        return self.gather_from_all(value, (*place, count), self._decision.active if self._in_batches else None)

    def gather_from_all(self, value: Any, call: tuple[int, ...], active: tuple[int, ...] | None) -> list[Any]:
        """Return the values of all trainers, or of ``active``; ``call`` is the same for the same call of each."""
        return [value]

    def set_first(self, key: str, value: str) -> str:
        """Return the value of the trainer that calls this first with ``key``; a trainer of several asks the store."""
        return value if self.rendezvous is None else self.rendezvous.set_first(key, value)

    def seed_or_restore(self, part: bytes | None) -> None:
        """Seed this trainer's random numbers, or restore its part of a checkpoint. Last in ``init_connection``."""
        seed_all(self.config.seed, 1 + self.trainer_index)
        if part is not None:
            self.load_state_dict(unpack(part))

    def enter_context(self, context: AbstractContextManager[T]) -> T:
        """Enter a context that is exited when this trainer ends."""
        return self._resources.enter_context(context)

    def close(self) -> None:
        """Exit all contexts, the last one first."""
        self._resources.close()

    def _fit(self) -> Decision:
        self._samples_before = self.progress.samples_served
        self._core_wait = CoreWait()
        self.clock.skip()
        while True:
            self._step_offset = 1
            with self.step_scope():
                decision = self.agree()
                if decision.verdict is Verdict.WAIT:
                    continue
                self._decision = None  # until hooks are called that all trainers call
                self._step_offset = int(decision.verdict is Verdict.GO)
                if decision.verdict in _BETWEEN_STEPS:
                    self._between_steps(decision)
                    continue
                if decision.verdict is Verdict.END:
                    self._close_epoch()
                    self._decision = decision
                    self.step = decision.step
                    self.clock.skip()
                    return decision
                if decision.samples >= self._epoch_end:
                    self._enter_epoch(decision.samples)
                self._decision = decision
                if self.parameters_of:
                    self.batch_began = self.step = decision.step
                if self.trainer_index in decision.active:
                    train = self._train_by_calls if self.parameters_of else self._train
                    self._in_batches = True
                    self.step = train(decision)
                    self._in_batches = False
                else:
                    self.step = self._follow_calls() if self.parameters_of else self.idle(decision)
                    if self.step == decision.step:
                        continue
                self._step_offset = 0
            if not self.parameters_of:
                self._end_step()
            if self._is_record_due():
                self.record("buffer", **self.data.record())
            if self.lockstep and self.is_due(self.step):
                self._validate_and_save()

    def _end_step(self) -> None:
        self.clock.end_step()
        self.progress.steps += 1

    def announcement(self) -> Announcement:
        """Return the announcement of this trainer's next step: its data, and whether it wants to stop.

        ``agree`` calls it at most once per step.
        """
        announcement = self.data_available()
        self.clock.lap("data")
        return self.with_stop(announcement)

    def announcement_if_ready(self) -> Announcement | None:
        """Return the announcement of the next step without waiting; None if the data is not ready yet.

        What it states holds until the next batch is taken.
        """
        announcement = self.data.available(timeout_s=0.0)
        if announcement.readiness is Readiness.WAITING:
            return None
        return self.with_stop(self.data_available() if self._overrides_data_available else announcement)

    def with_stop(self, announcement: Announcement) -> Announcement:
        """Return the announcement with this process's request to stop, if there is one."""
        if self.process.stop.event.is_set():
            stop, reason = self.process.stop.state()
        elif self._stop_reason:
            stop, reason = Stop.LIMIT, self._stop_reason
        elif self.monitor is not None and (limit := self.monitor.stop_reason()) is not None:
            stop, reason = Stop.LIMIT, limit
        else:
            return announcement
        return replace(announcement, stop=stop, reason=reason)

    def _between_steps(self, decision: Decision) -> None:
        """With trainers that run freely: validate a retained version, or do at a barrier all that is due."""
        self.clock.skip()
        self.step = decision.step
        if decision.verdict is not Verdict.VALIDATE:
            self._validate_and_save()
        elif decision.share == self.trainer_index:
            self.validate()
        else:
            self._validate(decision.share)

    def _finish(self, decision: Decision) -> None:
        """Validate and save for the last time; only save after a signal, and before other trainers continue."""
        completes = not (decision.interrupted or decision.resizes)
        if completes and self.validate():
            self._saved_step = None  # a checkpoint of this step was saved before it turned out to be the best
        self.save("end" if completes else "resize" if decision.resizes else "interrupted")
        if not decision.resizes:
            for hooks in self.hooks:
                hooks.on_train_end()
        if not self._is_record_due():
            self.record("buffer", **self.data.record(), end=True)
        self.leave(self._totals(), decision)

    # A step.

    def _train(self, decision: Decision) -> int:
        """Train on the batches of a step; return the version that results."""
        batches, samples, summed = [], 0, 0.0
        for _ in range(decision.batches):
            batch, batch_samples = self._next_batch()
            batches.append((batch, batch_samples))
            samples += batch_samples
        self.data.read_ahead()
        self.clock.lap("data")
        self.load_version()
        self.progress.samples_served += samples
        for number, (batch, self._batch_samples) in enumerate(batches, start=1):
            last = number == len(batches)
            with (
                name_float64("training_step", batch, self.model),
                nullcontext() if last else self.block_backward_sync(),
            ):
                value, loss = self._forward(batch)
                summed += value
                if last:
                    self.on_last_loss(summed / number, samples)
                self._backward(loss, len(batches))
        self._check_layers()
        report = StepReport(self.trainer_index, decision.step, samples, summed / len(batches), self.seconds)
        self._batch_samples = 1
        result = self.step_optimizer(report)
        if result is not None and self.monitor is not None:
            self.monitor.update_applied(result)
        self._record_first_step()
        return decision.step + 1 if result is None else result.step

    def _record_first_step(self) -> None:
        if "first step" not in self.process.startup_timer.phases:
            self.process.startup_timer.mark("first step")
            self.record("phase", phases=dict(self.process.startup_timer.phases))

    # A batch with several optimizers.

    def _train_by_calls(self, decision: Decision) -> int:
        """Train on a batch whose ``training_step`` calls ``optimize``; return the version that results."""
        batch, self._batch_samples = self._next_batch()
        self.data.read_ahead()
        self.clock.lap("data")
        self.load_version()
        self.progress.samples_served += self._batch_samples
        for hooks in self.hooks:
            hooks.on_batch_start(self.progress.batch_idx)
        self._updates = 0
        with name_float64("training_step", batch, self.model), self._autocast:
            returned = self.task.training_step(self.model, batch, self.progress.batch_idx)
        if returned is not None or not self._updates:
            what = "returned a value" if returned is not None else "did not call it"
            raise TaskError(
                f"training_step must call self.trainer.optimize(name, loss) and return None with several optimizers "
                f"({', '.join(self.parameters_of)}); in batch {self.progress.batch_idx} it {what}"
            )
        self._exchange_call(OptimizerCall())
        self._updates, self._batch_samples = -1, 1
        self.clock.lap("forward")
        self.end_batch()
        self._record_first_step()
        return self.step

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
            TaskError: there is no such optimizer, another trainer made another call, or the loss depends on none of its
                parameters, or on values of parameters that an update has replaced.

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
        self._check_layers()
        parameters = self._parameters_to_step(name)
        value = check_loss(loss, self.trainer_index, self.progress.batch_idx, name)
        self.clock.lap("forward")
        with torch.autocast(self._device.type, enabled=False):
            self.on_before_backward(loss)
            for parameter in self.unwrapped_model.parameters():
                parameter.grad = None
            try:
                loss.backward(inputs=parameters, retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                if "modified by an inplace operation" not in message_of(error):
                    raise
                raise TaskError(
                    f"optimize({name!r}, loss): the loss was computed before an update of parameters that its gradient "
                    "depends on; compute it, or the part that uses these parameters, after the call that updates them"
                ) from error
            self.on_after_backward()
        self.clock.lap("backward")
        used = tuple(parameter.grad is not None for parameter in parameters)
        if not any(used):
            raise TaskError(
                f"optimize({name!r}, loss): the loss depends on no parameter of this optimizer; check the name, and "
                "detach() in the computation of the loss"
            )
        samples = self._batch_samples if not self._updates else 0
        grads = [parameter.grad for parameter in parameters]
        sparse = tuple(grad.sparse_dim() if grad is not None and grad.is_sparse else 0 for grad in grads)
        self._exchange_call(OptimizerCall(name, value, samples, used, sparse))
        report = StepReport(self.trainer_index, self.step, samples, value, self.seconds, optimizer=name)
        result = self.step_optimizer(report)
        assert result is not None
        if self.monitor is not None:
            self.monitor.update_applied(result)
        # Autocast would continue with copies of the parameters before the update.
        torch.clear_autocast_cache()
        self.step, self._step_offset = result.step, 0
        self._updates += 1
        self._end_step()

    def _parameters_to_step(self, name: str) -> list[nn.Parameter]:
        if not self.parameters_of:
            raise TaskError(
                f"trainer.optimize({name!r}) must have several optimizers, and build_optimizer returned one; return a "
                "dict of optimizers from it, or the loss from training_step"
            )
        if self._updates < 0:
            raise TaskError(f"trainer.optimize({name!r}) must be called in training_step, where there is a batch")
        if name not in self.parameters_of:
            known = ", ".join(self.parameters_of)
            raise TaskError(f"trainer.optimize({name!r}) must name an optimizer; build_optimizer returned {known}")
        return [parameter for parameter in self.parameters_of[name] if parameter.requires_grad]

    def _follow_calls(self) -> int:
        """Follow the calls of the trainers that have data; return the version after their batch."""
        self._updates = 0
        while self._exchange_call(None):
            self.step += 1
            self._updates += 1
            self.clock.lap("wait")
            self._end_step()
        self._updates = -1
        return self.step

    def _exchange_call(self, own: OptimizerCall | None) -> bool:
        """Compare a call of ``optimize`` with those of the other trainers; return whether it is not the end of a batch.

        Args:
            own: None for a trainer that has no data, which follows.
        """
        assert self._decision is not None
        # The third number is that of no call of ``all_gather``.
        place = self._decision.step, 1, 2, self._updates
        gathered = [(self.trainer_index, own)]
        if self.process.trainers > 1:
            gathered = self.gather_from_all(gathered[0], place, None)
        made = [(index, call) for index, call in gathered if call is not None]
        for index, call in made[1:]:
            if call.name != made[0][1].name:
                raise TaskError(
                    f"all trainers must make the same calls of trainer.optimize in the same order; call "
                    f"{self._updates + 1} of a batch is {made[0][1]} on trainer {made[0][0]}, and {call} on trainer "
                    f"{index}. Let self.trainer.step decide about it, which all trainers have alike, and not batch_idx"
                )
        self.optimizer_calls = [call for _, call in made]
        if own is None and self.optimizer_calls and self.optimizer_calls[0].name:
            self.follow_update()
        return bool(self.optimizer_calls and self.optimizer_calls[0].name)

    def _next_batch(self) -> tuple[Any, int]:
        batch, samples = self.data.next_batch()
        batch = self.on_before_forward(batch)
        self.clock.lap("data")
        return batch, samples

    def _forward(self, batch: Any) -> tuple[float, Tensor]:
        for hooks in self.hooks:
            hooks.on_batch_start(self.progress.batch_idx)
        with self._autocast:
            loss: Any = self.task.training_step(self.model, batch, self.progress.batch_idx)
        # Reading the value waits for the device; a loss that is not finite ends the run before it is applied.
        value = check_loss(loss, self.trainer_index, self.progress.batch_idx)
        self.clock.lap("forward")
        return value, loss

    def _backward(self, loss: Tensor, batches: int) -> None:
        self.on_before_backward(loss)
        (loss / batches if batches > 1 else loss).backward()  # type: ignore[no-untyped-call]
        self.on_after_backward()
        self.clock.lap("backward")
        self.end_batch()

    def end_batch(self) -> None:
        """Call the hooks after the backward of a batch, and count it."""
        for hooks in self.hooks:
            hooks.on_batch_end(self.progress.batch_idx)
        self.progress.batch_idx += 1

    def _check_layers(self) -> None:
        """Refuse layers and parameters that were replaced, added, removed or unfrozen since the optimizer was made."""
        if self.tree is not None:
            self.tree.check_parameters()

    def _enter_epoch(self, samples: int) -> None:
        """Enter the epoch of the next sample, after ``samples`` were applied."""
        progress, epoch_samples = self.progress, self.data.epoch_samples
        for epoch in range(progress.epoch, epoch_of(samples, epoch_samples)):
            self._close_epoch()
            # After the last sample of an epoch and before the first of the next, also if a run was resumed in between.
            self.on_epoch_ended(epoch)
            progress.epoch = epoch + 1
        if not progress.epoch_open:
            progress.epoch_open = True
            if self.monitor is not None:
                self.monitor.enter_epoch(progress.epoch)
            for hooks in self.hooks:
                hooks.on_epoch_start(progress.epoch)
        self._epoch_end = (progress.epoch + 1) * epoch_samples if epoch_samples else float("inf")

    def _close_epoch(self) -> None:
        if self.progress.epoch_open:
            self.progress.epoch_open = False
            for hooks in self.hooks:
                hooks.on_epoch_end(self.progress.epoch)

    # Validation and checkpoints.

    @property
    def seconds(self) -> float:
        """Seconds of training, without validation and checkpoints, including those before a resume."""
        return self.progress.seconds + self.clock.total_s

    def is_due(self, step: int) -> bool:
        """Whether a validation or a checkpoint is due at this step, or was due since the last batch began."""
        return any(is_due(step, every, self.batch_began) for every in (self._validate_every, self._save_every))

    def _validate_and_save(self) -> None:
        """Do what is due at the current step, which all trainers have reached."""
        improved = is_due(self.step, self._validate_every, self.batch_began) and self.validate()
        if improved or is_due(self.step, self._save_every, self.batch_began):
            self.save("best" if improved else "periodic")

    def validate(self) -> bool:
        """Validate this trainer's share of the current version; return whether the mean over all is the best so far."""
        if self._validated_step == self.step:
            return False
        self._validated_step = self.step
        return self._validate(self.trainer_index)

    def _validate(self, share: int) -> bool:
        self.sync_model()
        with self._generators_of(share):
            # Without data a trainer still takes part: the others wait for its share.
            self.validation, improved = self.merge_validation(self._evaluate(self._batches_of(share)))
            if self._is_validating:
                self._is_validating = False
                for hooks in self.hooks:
                    hooks.on_validation_end(self.progress.batch_idx)
        self.clock.skip()
        return improved

    def _generators_of(self, share: int) -> AbstractContextManager[None]:
        """Return a context for the random numbers of the hooks and of the evaluation of a share."""
        return validation_generators(self.config.seed, self.step, share, self.process.placement.devices)

    def evaluate_for_another(self, share: int) -> WeightedSums:
        """Evaluate the share of a lost trainer, of the version that ``unwrapped_model`` has, while the others wait."""
        self._evaluates_alone = True
        try:
            with self._generators_of(share):
                return self._evaluate(self._batches_of(share))
        finally:
            self._evaluates_alone = False

    def _batches_of(self, share: int) -> Iterable[tuple[Any, int]] | None:
        """Return the validation batches of a trainer."""
        if share == self.trainer_index:
            return self.validation_loader
        if share not in self._loaders_of_others:
            partition = Partition(share, self.process.trainers)
            self._loaders_of_others[share] = validation_batches(self.task, partition, self.config)
        return self._loaders_of_others[share]

    def _evaluate(self, batches: Iterable[tuple[Any, int]] | None) -> WeightedSums:
        if batches is None:
            return WeightedSums()
        if not self._is_validating:  # its own share comes first, then those of lost trainers
            self._is_validating = True
            for hooks in self.hooks:
                hooks.on_validation_start(self.progress.batch_idx)
        with self._averaged_parameters():
            return evaluate(
                self.task,
                self.unwrapped_model,
                batches,
                self.progress.batch_idx,
                self.on_before_forward,
                self.config.training.precision,
                self._device,
            )

    @contextmanager
    def _averaged_parameters(self) -> Iterator[None]:
        """Let the parameters of the model be their averages, where these are validated."""
        if not self.validates_averages:
            yield
            return
        averages = self.averages()
        own = {name: parameter for name, parameter in self.unwrapped_model.named_parameters() if name in averages}
        kept = {name: parameter.data for name, parameter in own.items()}
        # By ``data``, without a write: with shared memory the parameters of all processes are the same memory.
        for name, parameter in own.items():
            parameter.data = averages[name].to(parameter.device)
        self._kept_parameters = [(parameter, kept[name]) for name, parameter in own.items()]
        try:
            yield
        finally:
            self.restore_parameters()

    def restore_parameters(self) -> None:
        """Let the parameters of the model be its own again, after ``_averaged_parameters``."""
        for parameter, data in self._kept_parameters:
            parameter.data = data
        self._kept_parameters = []

    def save(self, reason: str) -> None:
        """Take part in a checkpoint of the current step, unless it exists; for the last one, wait until it is sent."""
        if self._saved_step != self.step:
            self._saved_step = self.step
            self.save_part(reason, time.perf_counter())
            self.clock.skip()
        if reason in _LAST:
            with self.process.stop_limit.paused():
                self.wait_saved()

    def state_dict(self) -> dict[str, Any]:
        """Return this trainer's part of a checkpoint: one copy, which training does not change any more."""
        what = f"the state of {type(self.task).__name__}.on_checkpoint, or of a callback,"
        own = stage_copy(task_state(self.task, self._callbacks), self._memory, what)
        check_storable(own, type(self.task).__name__)
        stream = self.data.state_dict(self._memory)
        self._memory.trim()
        return {
            "trainer_index": self.trainer_index,
            **stream,
            "random": random_states(self.process.placement.devices),
            "counters": vars(self.progress) | {"seconds": self.seconds},
            "task": own,
        }

    def load_state_dict(self, part: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``, or the part that resharding made for this trainer."""
        if part["buffer"] is None:  # it was lost when the checkpoint was made
            positions = AppliedPositions()
            positions.load_state_dict(part["applied"])
            self.data.load_after_loss(part, positions)
        else:
            self.data.load_state_dict(part)
        self.progress = TrainerProgress(**part["counters"])
        if self.monitor is not None:  # the time of the run, which another trainer may have reported
            self.progress.seconds = max(self.progress.seconds, self.monitor.seconds)
        self._saved_step = self.step
        if part["random"] is not None:
            restore_random_states(part["random"], self.process.placement.devices)
        else:  # the checkpoint is of fewer trainers, or this one was lost when it was made
            seed_all(self.config.seed, part["resumes"], 1 + self.trainer_index)
        if part["random"] is not None or part["task"]:
            restore_task(self.task, part["task"], self._callbacks)

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
        self._stop_reason = self._stop_reason or self.set_first("stop", reason)

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
        if self.process.trainers > 1:
            fields["reduce"] = reduce if self.lockstep else "none"
            if fields["reduce"] == "mean":
                fields["weight"] = self._batch_samples
        self.record("log", name=name, value=number, **fields)

    def record(self, kind: str, **fields: Any) -> None:
        """Record something about this trainer, at the step that is being made, or between steps at the last one.

        A run that resumes from the checkpoint of a step makes the next step again, and so its records.
        """
        rank, step = self.process.identity.global_rank, self.step + self._step_offset
        self.records.append(make_record(kind, step, rank=rank, trainer=self.trainer_index, **fields))
        self.send_records(self.records)

    def _is_record_due(self) -> bool:
        """Whether the last step has a periodic record: of the run's steps, or of its own if trainers run freely."""
        step = self.step if self.lockstep else self.progress.steps
        return is_due(step, self.config.logging.log_every, self.batch_began)

    def _totals(self) -> TrainerTotals:
        return TrainerTotals(
            trainer_index=self.trainer_index,
            samples=self.progress.samples_served,
            samples_before=self._samples_before,
            batches=self.progress.batch_idx,
            samples_left=self.data.samples_left,
            seconds=self.clock.steps.total_s,
            phases_s={**self.clock.seconds, "hidden": self.clock.hidden_s},
            steps=self.clock.steps,
            buffer=self.data.figures(),
            peak_rss_mb=peak_rss_mb(),
            wire_bytes=self.wire_bytes,
            core_wait_share=self._core_wait.share(),
            threads=torch.get_num_threads(),
        )


def overrides(owner: object, method: Callable[..., Any]) -> bool:
    """Return whether ``owner`` has another ``method`` than the class that ``method`` was taken from."""
    return getattr(getattr(owner, method.__name__), "__func__", None) is not method

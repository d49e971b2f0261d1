"""The one training loop, the same in every mode: announce, step, record, validate, save.

What a trainer of one's own may change.

How far a trainer has come: part of what it stores in a checkpoint.

What a trainer does while it stands at a step: validation and checkpoints.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from paramserver.checkpoint import StagingPool, check_storable, stage_copy, unpack
from paramserver.consistency import Announcement, Decision, Stop, Verdict
from paramserver.context import ProcessContext
from paramserver.devices import move_to_device
from paramserver.limits import epoch_of, is_due
from paramserver.metrics.records import (
    PhaseClock,
    Record,
    StepReport,
    StepResult,
    TrainerTotals,
    WeightedSums,
    make_record,
    peak_rss_mb,
)
from paramserver.parameters.model import autocast
from paramserver.parameters.numerics import check_loss
from paramserver.rng import random_states, restore_random_states, seed_all
from paramserver.runs.checkpoint_manager import CheckpointManager
from paramserver.runs.monitor import RunMonitor
from paramserver.sources import Partition
from paramserver.task import Task
from trainers.data import DataStream
from trainers.validation import evaluate, validation_batches


class Overridable(ABC):
    """Hooks and properties of a trainer, under the names of Lightning's DDPPlugin."""

    model: nn.Module
    """What ``training_step`` gets."""

    process: ProcessContext
    data: DataStream

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model as the task built it."""
        return self.model

    @property
    def is_single_process_per_device(self) -> bool:
        """Whether this process computes on one device alone, so that inputs are moved there beforehand."""
        return len(self.process.placement.devices) == 1

    @property
    def sampler_kwargs(self) -> dict[str, Any]:
        """``shuffle``, ``pad``, ``drop_last`` or ``seed``, where a map-style data set is to be dealt otherwise."""
        return {}

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the trainers; None where there is none."""
        return None

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """Around the micro-batches of a step but the last: gradients stay with this trainer."""
        return nullcontext()

    def on_before_forward(self, batch: Any) -> Any:
        """The batch as the model gets it."""
        return move_to_device(batch, self.process.placement.device) if self.is_single_process_per_device else batch

    def on_after_setup_optimizers(self) -> None:
        """The optimizer exists."""

    def on_before_backward(self, loss: Tensor) -> None:
        """The loss of a micro-batch is there."""

    def on_after_backward(self) -> None:
        """Its backward is done."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state, in the standard form of torch.optim."""

    def data_available(self) -> Announcement:
        """How far this trainer is with its data: enough for a step, waiting, or drained."""
        return self.data.available()


def overrides(owner: object, method: Callable[..., Any]) -> bool:
    """Whether ``owner``, or its class, has another ``method`` than the class that ``method`` was taken from."""
    return getattr(getattr(owner, method.__name__), "__func__", None) is not method


@dataclass
class TrainerProgress:
    """``batch_idx`` is the next batch's; ``seconds`` are those of training before this process resumed the run.

    ``steps`` are the steps that this trainer has made or waited for.
    """

    batch_idx: int = 0
    samples_served: int = 0
    epoch: int = 0
    epoch_open: bool = False
    seconds: float = 0.0
    steps: int = 0


# Why a checkpoint is taken after which there is none.
_LAST = ("end", "interrupted")


class Standing(Overridable):
    """Where a trainer is, and what is due there. How the trainers do it together is for the mode to say.

    Args:
        process: who this trainer is.
        task: the user's.
    """

    def __init__(self, process: ProcessContext, task: Task) -> None:
        self.process = process
        self.config = process.config
        self.task = task
        self.trainer_index = process.trainer_index
        self.clock = PhaseClock()
        self.counters = TrainerProgress()
        self.step = 0
        self.validation_loader: Iterable[tuple[Any, int]] | None = None
        self._memory = StagingPool()
        self._validated_step: int | None = None
        self._saved_step: int | None = None

    # What a mode says.

    @abstractmethod
    def merge_validation(self, sums: WeightedSums) -> tuple[Mapping[str, float], bool]:
        """The means over the shares of all trainers, and whether they are the best so far."""

    @abstractmethod
    def deposit(self, reason: str, since: float) -> None:
        """Take part in a checkpoint of the current step: copy now, in the pause that began at ``since``; see ``part``.

        What follows, serialisation, travel and writing, is not for the pause, unless ``checkpoint.background`` is off.
        """

    def settle(self) -> None:
        """Wait until rank 0 has all that this trainer has deposited."""

    def refresh(self) -> None:
        """Bring ``unwrapped_model`` to the current version before it is validated or saved."""

    # What is due.

    @property
    def seconds(self) -> float:
        """How long this trainer has trained, validation and checkpoints left out; also before it was resumed."""
        return self.counters.seconds + self.clock.steps.total_s

    def is_due(self, step: int) -> bool:
        """Whether something is done at this step, at which all trainers stand."""
        return is_due(step, self.config.training.validate_every) or is_due(step, self._save_every)

    @property
    def _save_every(self) -> int:
        every = self.config.checkpoint.every
        return self.config.training.validate_every if every is None else every

    def _validate_and_save(self) -> None:
        """What is due at this step, at which all trainers stand."""
        improved = is_due(self.step, self.config.training.validate_every) and self.validate()
        if improved or is_due(self.step, self._save_every):
            self.save("best" if improved else "periodic")

    def validate(self) -> bool:
        """Validate this trainer's share of the current version; True where the mean over all is the best so far."""
        if self._validated_step == self.step:
            return False
        self._validated_step = self.step
        self.refresh()
        loader = self.validation_loader
        if loader is None:
            sums = WeightedSums()  # without data of its own it still takes part: the others wait for its word
        else:
            self.task.on_validation_start(self.counters.batch_idx)
            sums = self._evaluate(loader)
        _, improved = self.merge_validation(sums)
        if loader is not None:
            self.task.on_validation_end(self.counters.batch_idx)
        self.clock.skip()
        return improved

    def _evaluate(self, batches: Iterable[tuple[Any, int]]) -> WeightedSums:
        return evaluate(
            self.task,
            self.unwrapped_model,
            batches,
            self.counters.batch_idx,
            self.on_before_forward,
            self.config.training.precision,
            self.process.placement.device,
        )

    def save(self, reason: str) -> None:
        """Take part in a checkpoint of the current step, unless there is one; the last of a run also arrives."""
        if self._saved_step != self.step:
            self._saved_step = self.step
            self.deposit(reason, time.perf_counter())
            self.clock.skip()
        if reason in _LAST:
            self.settle()

    def part(self) -> dict[str, Any]:
        """What this trainer stores, copied once: nothing of it changes when training goes on."""
        own: dict[str, Any] = {}
        self.task.on_checkpoint(own)
        own = stage_copy(own, self._memory)
        check_storable(own, type(self.task).__name__)
        stream = self.data.state_dict(self._memory)
        self._memory.trim()
        return {
            "trainer_index": self.trainer_index,
            **stream,
            "random": random_states(),
            "counters": vars(self.counters) | {"seconds": self.seconds},
            "task": own,
        }

    def _load_part(self, part: Mapping[str, Any]) -> None:
        self.data.load_state_dict(part)
        self.counters = TrainerProgress(**part["counters"])
        self._saved_step = self.step
        if part["random"] is None:  # a trainer that the checkpoint has not got
            seed_all(self.config.seed, part["resumes"], 1 + self.trainer_index)
            return
        restore_random_states(part["random"])
        self.task.on_resume(part["task"])


T = TypeVar("T")

_BESIDE_STEPS = (Verdict.BARRIER, Verdict.VALIDATE)


class Trainer(Standing):
    """One trainer of a run. A mode says how trainers agree, step and save together; the loop is here.

    Args:
        process: who this trainer is.
        task: the user's; its ``trainer`` is this object.
        checkpoints: saves and restores, on rank 0; None elsewhere.
    """

    computes: str | None = None
    """The word of the key server.compute that this trainer is for; None where that key means nothing."""

    def __init__(self, process: ProcessContext, task: Task, checkpoints: CheckpointManager | None) -> None:
        super().__init__(process, task)
        self.checkpoints = checkpoints
        self.monitor: RunMonitor | None = None if checkpoints is None else checkpoints.monitor
        self._ahead = 0  # 1 while the step after ``step`` is being made
        self.records: list[Record] = []
        self.wire_bytes = 0
        self.lockstep = True
        self.all_totals: list[TrainerTotals] = []
        self._opened = ExitStack()
        task.trainer = self

    # What a mode says.

    @abstractmethod
    def init_connection(self) -> None:
        """Build the model and meet the others; afterwards ``self.model`` and ``self.step`` are set."""

    @abstractmethod
    def agree(self, announcement: Announcement) -> Decision:
        """Tell all trainers how far this one is, and learn what all do next."""

    @abstractmethod
    def update(self, report: StepReport) -> StepResult | None:
        """Make the gradients of this step's batches part of the update; None where its figures come later."""

    @abstractmethod
    def deliver(self, records: Sequence[Record]) -> None:
        """Send records to rank 0, or keep them until it asks."""

    @abstractmethod
    def leave(self, totals: TrainerTotals, decision: Decision) -> None:
        """Say goodbye in good order: rank 0 gets the totals."""

    def idle(self, decision: Decision) -> None:
        """A step in which this trainer has no data while others go on."""

    def step_scope(self) -> AbstractContextManager[Any]:
        """Around the announcement and the step."""
        return nullcontext()

    # The run.

    def run(self) -> Decision:
        """From the first connection to the goodbye. What it opened is closed, also on the failing path.

        Returns:
            The decision that ended the run.
        """
        try:
            self.init_connection()
            self.task.on_train_start()
            self.data.start()
            decision = self._fit()
            self.data.stop_feeding()  # before the last validation and checkpoint, which may take long
            self._end(decision)
        except BaseException as error:
            self.give_up(error)
            raise
        finally:
            self.close()
        return decision

    def give_up(self, error: BaseException) -> None:
        """This trainer fails; tell the others where there is a way."""

    def open(self, context: AbstractContextManager[T]) -> T:
        """Enter a context that ends with this trainer."""
        return self._opened.enter_context(context)

    def close(self) -> None:
        """Stop what this trainer started."""
        self._opened.close()

    def prepare_data(self) -> None:
        """Make source, buffer and feeder. Called once the model is there."""
        partition = Partition(self.trainer_index, self.process.trainers)
        self.data = self.open(
            DataStream(self.task, partition, self.config, self.sampler_kwargs, self.process.receiver_spec)
        )
        self.validation_loader = validation_batches(self.task, partition, self.config)
        if self.monitor is not None:
            self.monitor.expect_samples(self.data.epoch_samples)
        self.process.startup_timer.mark("model and data")

    def begin_stream(self, part: bytes | None) -> None:
        """Start this trainer's own random numbers, or go on from what it stored. Called last in ``init_connection``."""
        seed_all(self.config.seed, 1 + self.trainer_index)
        if part is not None:
            self._load_part(unpack(part))

    def _fit(self) -> Decision:
        self.clock.skip()
        while True:
            self._ahead = 1
            available = self.data_available()
            self.clock.lap("data")
            with self.step_scope():
                decision = self.agree(self.with_stop(available))
                if decision.verdict is Verdict.WAIT:
                    continue
                self._ahead = int(decision.verdict is Verdict.GO)
                if decision.verdict in _BESIDE_STEPS:
                    self._stop_by(decision)
                    continue
                self._enter_epoch(decision)
                if decision.verdict is Verdict.END:
                    self.step = decision.step
                    self.clock.skip()
                    return decision
                self.step, self._ahead = self._take_part(decision), 0
            self.clock.end_step()
            self.counters.steps += 1
            self._after_step()

    def _take_part(self, decision: Decision) -> int:
        """A step, or the wait for one that the others make; the version that is there afterwards."""
        if self.trainer_index not in decision.active:
            self.idle(decision)
            return decision.step + 1
        result = self._train(decision)
        return decision.step + 1 if result is None else result.step

    def _stop_by(self, decision: Decision) -> None:
        """What trainers that run freely do between steps: a validation of a kept version, or all that is due."""
        self.clock.skip()
        self.step = decision.step
        if decision.verdict is Verdict.VALIDATE:
            self.validate()
        else:
            self._validate_and_save()

    def with_stop(self, announcement: Announcement) -> Announcement:
        """The announcement with this trainer's wish to stop, where it has one."""
        stop, reason = self.process.stop.state()
        if stop is Stop.NO and self.monitor is not None and (wish := self.monitor.stop_reason()) is not None:
            stop, reason = Stop.LIMIT, wish
        return Announcement(announcement.readiness, announcement.batches, stop, reason)

    def _train(self, decision: Decision) -> StepResult | None:
        batches = [self._next_batch() for _ in range(decision.batches)]
        self.before_batches()
        samples = sum(n for _, n in batches)
        self.counters.samples_served += samples
        summed = 0.0
        for place, (batch, _) in enumerate(batches, start=1):
            last = place == len(batches)
            with nullcontext() if last else self.block_backward_sync():
                value, loss = self._forward(batch)
                summed += value
                if last:
                    self.on_loss_known(summed / place, samples)
                self._backward(loss, len(batches))
        result = self.update(
            StepReport(self.trainer_index, decision.step, samples, summed / len(batches), self.seconds)
        )
        if result is not None and self.monitor is not None:
            self.monitor.update_applied(result)
        if "first step" not in self.process.startup_timer.phases:
            self._report_start()
        return result

    def before_batches(self) -> None:
        """The batches of a step are there; nothing was computed yet."""

    def _next_batch(self) -> tuple[Any, int]:
        batch, samples = self.data.next_batch()
        batch = self.on_before_forward(batch)
        self.clock.lap("data")
        return batch, samples

    def on_loss_known(self, loss: float, samples: int) -> None:
        """The mean loss of the step's batches is there; its last backward comes next."""

    def _forward(self, batch: Any) -> tuple[float, Tensor]:
        self.task.on_batch_start(self.counters.batch_idx)
        with autocast(self.process.placement.device, self.config.training.precision):
            loss = self.task.training_step(self.model, batch, self.counters.batch_idx)
        value = check_loss(loss, self.trainer_index, self.counters.batch_idx)
        self.clock.lap("forward")
        return value, loss

    def _backward(self, loss: Tensor, batches: int) -> None:
        self.on_before_backward(loss)
        (loss / batches if batches > 1 else loss).backward()  # type: ignore[no-untyped-call]
        self.on_after_backward()
        self.clock.lap("backward")
        self.task.on_batch_end(self.counters.batch_idx)
        self.counters.batch_idx += 1

    # Epochs.

    def _enter_epoch(self, decision: Decision) -> None:
        """Go on to the epoch that the next sample belongs to; an end only closes the one that is open."""
        counters = self.counters
        if decision.verdict is Verdict.END:
            self._close_epoch()
            return
        for epoch in range(counters.epoch, epoch_of(decision.samples, self.data.epoch_samples)):
            self._close_epoch()
            # After the last sample of an epoch, before the first of the next: also where a run was resumed in between.
            self.on_epoch_ended(epoch)
            counters.epoch = epoch + 1
        if not counters.epoch_open:
            counters.epoch_open = True
            if self.monitor is not None:
                self.monitor.enter_epoch(counters.epoch)
            self.task.on_epoch_start(counters.epoch)

    def _close_epoch(self) -> None:
        if self.counters.epoch_open:
            self.counters.epoch_open = False
            self.task.on_epoch_end(self.counters.epoch)

    def on_epoch_ended(self, epoch: int) -> None:
        """A pass over the data was applied; a trainer that owns a schedule steps it."""

    def _after_step(self) -> None:
        if self._records_now():
            self.emit("buffer", **self.data.record())
        if self.lockstep:
            self._validate_and_save()

    def _records_now(self) -> bool:
        """Whether the last step has a periodic record of the buffer: of all, or, where trainers run freely, of own."""
        return (self.step if self.lockstep else self.counters.steps) % self.config.logging.log_every == 0

    def _end(self, decision: Decision) -> None:
        """The last validation and checkpoint; after a signal the checkpoint alone."""
        if not decision.interrupted and self.validate():
            self._saved_step = None  # one of this step was saved before it turned out to be the best
        self.save("interrupted" if decision.interrupted else "end")
        self.task.on_train_end()
        if not self._records_now():
            self.emit("buffer", **self.data.record(), end=True)
        self.leave(self._totals(), decision)

    # Records.

    def log(self, name: str, value: float | Tensor) -> None:
        """``Task.log``."""
        self.emit("log", name=name, value=float(value.detach()) if isinstance(value, Tensor) else float(value))

    def emit(self, kind: str, **fields: Any) -> None:
        """Record something about this trainer, at the step that is being made, or else at the last one that was.

        A run that goes back to the checkpoint of a step makes the next one anew, and so the records of its making.
        """
        rank, step = self.process.identity.global_rank, self.step + self._ahead
        self.records.append(make_record(kind, step, rank=rank, trainer=self.trainer_index, **fields))
        self.deliver(self.records)

    def _report_start(self) -> None:
        clock = self.process.startup_timer
        clock.mark("first step")
        self.emit("phase", phases=dict(clock.phases))

    def _totals(self) -> TrainerTotals:
        return TrainerTotals(
            trainer_index=self.trainer_index,
            samples=self.counters.samples_served,
            batches=self.counters.batch_idx,
            samples_left=self.data.samples_left,
            seconds=self.clock.steps.total_s,
            phases_s={**self.clock.seconds, "hidden": self.clock.hidden_s},
            steps=self.clock.steps,
            buffer=self.data.figures(),
            peak_rss_mb=peak_rss_mb(),
            wire_bytes=self.wire_bytes,
        )

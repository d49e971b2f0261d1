"""The control plane of a trainer: what it agrees on with the other trainers, next to parameters and gradients."""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeVar

from torch import nn

from paramserver.checkpoint import StagingPool, stage_copy, without_values
from paramserver.checkpoint.writer import BackgroundSender
from paramserver.consistency import Announcement, Decision, Stop
from paramserver.context import ProcessContext
from paramserver.distributed.rendezvous import Rendezvous
from paramserver.errors import TaskError
from paramserver.metrics.records import Record, StepResult, TrainerTotals, WeightedSums, merge_sums
from paramserver.optim.updater import Updater
from paramserver.runs.checkpoint_manager import CheckpointManager, PartCollector
from paramserver.transport.messages import OptimizerCall, ValidationReply

T = TypeVar("T")


class Control(ABC):
    """What a trainer agrees on with the other trainers and with rank 0. Each mode has a subclass.

    Used by the training thread. All trainers make the same calls in the same order, except for ``record``,
    ``request_stop`` and ``report_failure``.
    """

    knows_saved = False  # rank 0 replies to a trainer that a checkpoint exists already
    sender: BackgroundSender | None = None  # of parts of checkpoints; None if the part of rank 0 is the only one

    def __init__(
        self, process: ProcessContext, checkpoints: CheckpointManager | None, rendezvous: Rendezvous | None
    ) -> None:
        self.process = process
        self.config = process.config
        self.trainer_index = process.trainer_index
        self.checkpoints = checkpoints
        self.monitor = None if checkpoints is None else checkpoints.monitor
        self.rendezvous = rendezvous
        self.joined = False  # the other processes wait for this one from now on
        self.records: list[Record] = []
        self.all_totals: list[TrainerTotals] = []  # of every trainer, on rank 0 after the run
        self.saved_step: int | None = None  # of the last checkpoint, or of the one that the run resumed from
        self.memory = StagingPool()
        self._stop_reason = ""

    # At the start, and about the end.

    def set_first(self, key: str, value: str) -> str:
        """Return the value of the trainer that calls this first with ``key``; a trainer of several asks the store."""
        return value if self.rendezvous is None else self.rendezvous.set_first(key, value)

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

    def request_stop(self, reason: str) -> None:
        """Request, with the next announcement, the end of the run. The first reason that a trainer gives is kept."""
        self._stop_reason = self._stop_reason or self.set_first("stop", reason)

    def with_stop(self, announcement: Announcement, seconds: float) -> Announcement:
        """Return the announcement with this process's request to stop, if it has one after ``seconds`` of training."""
        if self.process.stop.event.is_set() and self.signal_ends_run():
            stop, reason = self.process.stop.state()
        elif self._stop_reason:
            stop, reason = Stop.LIMIT, self._stop_reason
        elif self.monitor is not None and (limit := self.monitor.stop_reason(seconds)) is not None:
            stop, reason = self.monitor.stop, limit
        else:
            return announcement
        return replace(announcement, stop=stop, reason=reason)

    def signal_ends_run(self) -> bool:
        """Whether a signal that this process received ends the run. Called for each announcement after it."""
        return True

    def update_applied(self, result: StepResult) -> None:
        """Record an update of all trainers, on rank 0."""
        if self.monitor is not None:
            self.monitor.update_applied(result)

    def wait_saved(self) -> None:
        """Wait until rank 0 has received this trainer's part of the last checkpoint."""
        if self.sender is not None:
            self.sender.wait()

    # What a mode implements.

    def waits_for_steps(self) -> AbstractContextManager[Any]:
        """Return a context for a step in which this trainer has no data: it waits as long as the others compute."""
        return nullcontext()

    @abstractmethod
    def all_gather(
        self, value: Any, call: tuple[int, ...], active: tuple[int, ...] | None, has_limit: bool = True
    ) -> list[Any]:
        """Return the values of all trainers, or of ``active``; ``call`` is the same for the same call of each.

        Without ``has_limit`` those that live are waited for without a limit, where that is possible, as in a step.
        """

    @abstractmethod
    def report_validation(
        self, step: int, shares: Mapping[int, WeightedSums], since: int | None, waits: bool = True
    ) -> ValidationReply:
        """Report shares of a validation; return the means over all, or first the shares that are missing.

        With trainers that run freely ``waits`` is False: the means are those of ``shares``.
        """

    @abstractmethod
    def record(self, record: Record) -> None:
        """Send a record to rank 0, or keep it until it is sent with others."""

    @abstractmethod
    def leave(self, totals: TrainerTotals, decision: Decision) -> None:
        """Leave the run in good order; rank 0 receives the totals."""

    def report_failure(self, error: BaseException) -> BaseException:
        """Report to the other processes, where possible, that this trainer fails; return the error that ends it."""
        return error


class ReplicaControl(Control):
    """The control plane of a run without servers: each trainer has a replica of the model and makes every update.

    Rank 0 writes records and checkpoints. As it is, this class is for a run of one trainer. ``parts`` of checkpoints
    are on rank 0; None elsewhere.
    """

    def __init__(
        self, process: ProcessContext, checkpoints: CheckpointManager | None, rendezvous: Rendezvous | None
    ) -> None:
        super().__init__(process, checkpoints, rendezvous)
        self.parts = None if checkpoints is None else PartCollector(checkpoints)

    def exchange(self, value: T) -> list[T]:
        """Return the values of all trainers, in the order of their indices. Called by all of them."""
        return [value]

    def all_gather(
        self, value: Any, call: tuple[int, ...], active: tuple[int, ...] | None, has_limit: bool = True
    ) -> list[Any]:
        if active is not None and len(active) < self.process.trainers:
            raise TaskError(
                "trainer.all_gather cannot be called in a step in which a trainer has no data "
                "(training.uneven_inputs: join, or the full buffer of another one blocks simulations); call it in "
                "on_validation_end"
            )
        gathered = self.exchange((call, value))
        if any(other != call for other, _ in gathered):
            raise TaskError("trainer.all_gather must be called at the same places by all trainers; these differ")
        return [gathered_value for _, gathered_value in gathered]

    def report_validation(
        self, step: int, shares: Mapping[int, WeightedSums], since: int | None, waits: bool = True
    ) -> ValidationReply:
        gathered = self.exchange((shares, list(self.records)))
        self._write(records for _, records in gathered)
        merged = merge_sums({index: sums for own, _ in gathered for index, sums in own.items()})
        improved = self.monitor is not None and self.monitor.record_validation(step, merged, since)
        return ValidationReply(merged.means(), improved=self.exchange(improved)[0])

    def record(self, record: Record) -> None:
        self.records.append(record)
        if self.monitor is not None:
            self._write([self.records])

    def collect_records(self) -> None:
        """Let rank 0 write the records of all trainers."""
        self._write(self.exchange(list(self.records)))

    def _write(self, gathered: Iterable[Sequence[Record]]) -> None:
        """Write records of all trainers, on rank 0; elsewhere they are sent by now."""
        if self.monitor is not None:
            for records in gathered:
                for record in records:
                    self.monitor.record(record)
        self.records.clear()

    def save(
        self, step: int, model: nn.Module, updater: Updater, reason: str, since: float, part: Mapping[str, Any]
    ) -> None:
        """Save a checkpoint of ``step``: copy ``model`` and ``updater``, and write them with the parts of all trainers.

        With ``checkpoint.background`` parts are sent and files written after this returns. See ``StagedCheckpoint``.
        """
        assert self.checkpoints is not None
        assert self.parts is not None
        staged = self.checkpoints.stage(step, model, updater, reason, since)
        pause_s = time.perf_counter() - since
        others = frozenset(range(self.process.trainers)) - {self.trainer_index}
        self.parts.start(staged, others, {self.trainer_index: part}, pause_s)
        self._complete_parts(self.parts, step)

    def _complete_parts(self, parts: PartCollector, step: int) -> None:
        """Receive the parts of the other trainers, and commit the checkpoint."""
        parts.commit_if_complete()

    def leave(self, totals: TrainerTotals, decision: Decision) -> None:
        gathered = self.exchange((totals, list(self.records)))
        self._write(records for _, records in gathered)
        self.all_totals = [of_trainer for of_trainer, _ in gathered]


class OptimizerCalls:
    """Compares each call of a batch with those of the other trainers."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self.parameters_of: dict[str, list[nn.Parameter]] = {}  # by optimizer; empty if there is one without a name
        self.batch_began: int | None = None  # the version that the last batch began with; None before the first one
        self.made = -1  # updates in the present batch; -1 outside of ``training_step``
        self.present: dict[int, OptimizerCall] = {}  # the last call, of each trainer that has data

    def set_optimizers(self, names: Mapping[str, Sequence[str]], model: nn.Module) -> None:
        """Take over the names of the parameters of each optimizer."""
        own = dict(model.named_parameters())
        self.parameters_of = {optimizer: [own[name] for name in of] for optimizer, of in names.items()}

    def parameters(self, name: str) -> list[nn.Parameter]:
        """Return the parameters of the optimizer that a call names, also those that are frozen at present.

        Raises:
            TaskError: there is no such optimizer, or no batch.
        """
        if not self.parameters_of:
            raise TaskError(
                f"trainer.optimize({name!r}) must have a dict of optimizers, and build_optimizer returned none; "
                "return one from it, or the loss from training_step"
            )
        if self.made < 0:
            raise TaskError(f"trainer.optimize({name!r}) must be called in training_step, where there is a batch")
        if name not in self.parameters_of:
            known = ", ".join(self.parameters_of)
            raise TaskError(f"trainer.optimize({name!r}) must name an optimizer; build_optimizer returned {known}")
        return self.parameters_of[name]

    @property
    def nonfinite(self) -> str:
        """What is NaN or infinite in the last call of a trainer, so that all skip it; empty if nothing is."""
        return next(filter(None, (call.nonfinite for call in self.present.values())), "")

    def exchange(self, own: OptimizerCall | None) -> bool:
        """Compare a call with those of the other trainers; return whether it is not the end of a batch.

        A trainer that has no data has no call of its own, and follows.

        Raises:
            TaskError: the calls differ.
        """
        assert self.batch_began is not None
        # The third number is that of no call of ``all_gather``.
        place = self.batch_began, 1, 2, self.made
        control = self._control
        gathered = [(control.trainer_index, own)]
        if control.process.trainers > 1:
            gathered = control.all_gather(gathered[0], place, None, has_limit=False)
        made = [(index, call) for index, call in gathered if call is not None]
        for index, call in made[1:]:
            if call.name != made[0][1].name:
                raise TaskError(
                    f"all trainers must make the same calls of trainer.optimize in the same order; call "
                    f"{self.made + 1} of a batch is {made[0][1]} on trainer {made[0][0]}, and {call} on trainer "
                    f"{index}. Let self.trainer.step decide about it, which all trainers have alike, and not batch_idx"
                )
        self.present = dict(made)
        return bool(made and made[0][1].name)


def sendable(value: Any) -> Any:
    """Return a copy of a value of ``Trainer.all_gather`` that another process can receive.

    Raises:
        TaskError: there is none.
    """
    value = stage_copy(value, what="the value of trainer.all_gather")
    try:
        pickle.dumps(without_values(value))
    except Exception as error:  # pickle raises many types for what it cannot store
        raise TaskError(
            f"trainer.all_gather was given what cannot be sent to another process ({error}); give tensors, "
            "numbers, strings, and lists or dictionaries of them"
        ) from error
    return value

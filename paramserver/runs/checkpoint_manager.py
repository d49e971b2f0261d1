"""Rank 0's account of a run: records, checkpoints, the best validation, the summary."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from paramserver.checkpoint import (
    BestMetric,
    Checkpoint,
    CheckpointWriter,
    ChunkedFile,
    StagingPool,
    WrittenCheckpoint,
    pack,
    stage_copy,
)
from paramserver.checkpoint.save import point_best
from paramserver.config import Config, num_trainers_of, world_size_of
from paramserver.consistency import StalenessHistogram
from paramserver.errors import TaskError
from paramserver.limits import Limits, due
from paramserver.metrics import Sink
from paramserver.metrics.records import Record, RecordWindow, StepResult, TrainerTotals, WeightedSums, make_record
from paramserver.metrics.summary import summarize
from paramserver.optim.updater import Updater
from paramserver.parameters.model import load_weights, plain_weights
from paramserver.parameters.numerics import check_storable_weights
from paramserver.runs.reshard import reshard_parts
from paramserver.runs.rundir import RunDir, write_json

_LAST_WRITE_S = 600.0


@dataclass(frozen=True, eq=False)
class StagedCheckpoint:
    """Private copies of what belongs to rank 0 in a checkpoint; the trainers' parts are still to come.

    ``since`` is ``time.perf_counter()`` when the first trainer stopped for it, ``reason`` is for the record.
    """

    step: int
    objects: dict[str, Any]
    is_best: bool
    reason: str
    since: float


class Stateful(Protocol):
    """What has the state of an ``Updater``."""

    def state_dict(self) -> dict[str, Any]: ...


class SimulationsState(Stateful, Protocol):
    """Who produces the samples of an online run."""

    def summary(self) -> dict[str, Any]: ...


class CheckpointManager:
    """Owns the writer of checkpoints and the receivers of records; thread-safe.

    Args:
        config: the run's.
        run: its folder, locked by this process.
        sink: receives every record.
        checkpoint: what the run goes on from; None for a new one.
        initial_weights: of ``init_from``, where it is given.
    """

    def __init__(
        self,
        config: Config,
        run: RunDir,
        sink: Sink,
        checkpoint: Checkpoint | None = None,
        initial_weights: tuple[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.config = config
        self.run = run
        self.checkpoint = checkpoint
        self.initial_weights = initial_weights
        self.step = self.samples = 0
        self.seconds = 0.0
        self.first_samples = 0
        self.loss: float | None = None
        self.validation: dict[str, float] = {}
        self.resumes = 0
        self.checkpoint_pauses_s: list[float] = []
        self.staleness = StalenessHistogram()
        self.dropped = 0
        self.best = (
            None
            if config.checkpoint.best is None
            else BestMetric(config.checkpoint.best.metric, config.checkpoint.best.mode)
        )
        self._memory = StagingPool()
        self._sink = sink
        self._lock = threading.RLock()
        self._limits = Limits.of(config.training)
        self._window = RecordWindow()
        self._improved_step: int | None = None
        self._validated_step: int | None = None
        self._note: str | None = None
        self.epoch = 0
        self.consistency_state: Mapping[str, Any] = {}
        self.simulations: SimulationsState | None = None
        self.simulations_state: dict[str, Any] | None = None
        self.writer = CheckpointWriter(run.checkpoints_dir, config.checkpoint.keep, config.checkpoint.background)
        self._dealt: list[bytes] | None = None
        if checkpoint is not None:
            self._restore(checkpoint.load("run"))
            self._dealt = self._deal(checkpoint)

    # Where a run begins.

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.step, self.samples, self.seconds = state["step"], state["samples"], state["seconds"]
        self.validation = dict(state["validation"])
        self._validated_step = state.get("validated_step")
        self.epoch = state["epoch"]
        self.consistency_state = state.get("consistency", {})
        self.simulations_state = state.get("simulations")
        self.resumes = state["resumes"] + 1
        if "staleness" in state:
            self.staleness.load_state_dict(state["staleness"])
            self.dropped = state["dropped"]
        self.first_samples = self.samples
        self._window = (
            RecordWindow(**state["window"]) if "window" in state else RecordWindow(self.samples, self.seconds)
        )
        if self.best is not None and state["best"] is not None:
            self._note = self.best.load_state_dict(state["best"])
        if self.best is not None and self._note is None:
            # Another was the best in a future that is given up; or this one was not marked before a crash.
            point_best(self.run.checkpoints_dir, self.best.step)

    def restore_model(self, model: nn.Module) -> None:
        """Put the checkpoint's weights, or those of ``init_from``, into the model; nothing for a new run."""
        if self.checkpoint is not None:
            load_weights(model, self.checkpoint.load("model"), str(self.checkpoint.path))
        elif self.initial_weights is not None:
            origin, weights = self.initial_weights
            load_weights(model, weights, origin)

    def updater_state(self) -> dict[str, Any] | None:
        if self.checkpoint is None:
            return None
        return {"optimizer": self.checkpoint.load("optimizer"), "scheduler": self.checkpoint.load("run")["scheduler"]}

    def restore_updater(self, updater: Updater) -> None:
        state = self.updater_state()
        if state is not None:
            updater.load_state_dict(state)

    def stored_part(self, trainer_index: int) -> bytes | None:
        """What a trainer goes on from; None in a new run."""
        if self.checkpoint is None or self._dealt is not None:
            return None if self._dealt is None else self._dealt[trainer_index]
        return self.checkpoint.bytes(f"trainer-{trainer_index}.pt")

    def _deal(self, checkpoint: Checkpoint) -> list[bytes] | None:
        """The parts for this number of trainers, where the checkpoint is of another."""
        before, now = checkpoint.trainers, num_trainers_of(self.config)
        if before == now:
            return None
        parts = [checkpoint.load(f"trainer-{i}") for i in range(before)]
        capacity, entropy = self.config.buffer.capacity, (self.config.seed, self.resumes)
        return [pack(part) for part in reshard_parts(parts, now, capacity=capacity, entropy=entropy)]

    # While it runs.

    def record(self, record: Record) -> None:
        with self._lock:
            self._sink.write(record)

    def begun(self, record: Record) -> None:
        """The run starts, with this record; what somebody who resumes it should know comes next."""
        self.record(record)
        if self._note is not None:
            self.note(self._note)

    def note(self, text: str) -> None:
        """What a person should know, in one sentence."""
        self.record(make_record("note", self.step, rank=0, text=text))

    def expect(self, epoch_samples: int | None) -> None:
        """How many samples one pass serves to all trainers: what there is to be done, for those who show progress."""
        passes = self.config.training.max_epochs
        if epoch_samples is not None and passes is not None:
            self.record(make_record("expected", self.step, rank=0, total_samples=passes * epoch_samples))

    def stepped(self, result: StepResult, staleness: Mapping[int, int] | None = None) -> None:
        """An update was made.

        Args:
            result: what it came to.
            staleness: of each trainer's gradient in it, where there is a server.
        """
        with self._lock:
            for trainer_index, versions in (staleness or {}).items():
                self.staleness.add(trainer_index, versions)
            self.step, self.samples, self.loss = result.step, result.samples, result.loss
            self.seconds = result.seconds
            self._window.add(result)
            if result.step % self.config.logging.log_every == 0:
                self._close_window()

    def drop(self) -> None:
        """A gradient came too late to be applied."""
        with self._lock:
            self.dropped += 1

    def _close_window(self) -> None:
        self.record(self._window.record(self.epoch))
        window = self.staleness.take_window()
        if window["histogram"]:
            each = self.staleness.by_trainer()
            self.record(make_record("staleness", self.step, **window, dropped=self.dropped, trainers=each))
        self._window = self._window.following()

    @property
    def last_checkpoint(self) -> str | None:
        """The name of the newest checkpoint that is complete."""
        if self.writer.written:
            return self.writer.written[-1].path.name
        return self.checkpoint.path.name if self.checkpoint is not None else None

    def entered_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def validated(self, step: int, sums: WeightedSums) -> bool:
        """Take in a validation over all samples; True where it is the best so far.

        One of a step that was validated before, as at the end of a run that had ended already, counts for nothing.

        Raises:
            TaskError: it lacks the metric of ``checkpoint.best``.
        """
        with self._lock:
            values = sums.means()
            if step == self._validated_step:
                return False
            improved = self.best is not None and self._improves(self.best, values, step)
            if not sums.samples:
                return False
            self.validation = values
            self._validated_step = step
            self._improved_step = step if improved else self._improved_step
            self.record(
                make_record(
                    "validation", step, values=values, samples=sums.samples, seconds=self.seconds, best=improved
                )
            )
            return improved

    def _improves(self, best: BestMetric, values: Mapping[str, float], step: int) -> bool:
        if best.metric not in values:
            raise TaskError(
                f"checkpoint.best.metric ({best.metric}) must be among what validation_step returns; it returns "
                f"{', '.join(sorted(values)) or 'nothing: validation_source gave no samples'}"
            )
        return best.improved(values[best.metric], step, due(step, self.config.training.validate_every))

    def stop_reason(self) -> str | None:
        """Why the run should end now, apart from the limits that every rank counts for itself."""
        patience = self.config.training.patience
        if patience is not None and self.best is not None and self.best.without_improvement >= patience:
            return f"no improvement of {self.best.metric} in training.patience ({patience}) validations"
        return self._limits.out_of_time(self.seconds)

    def cut(
        self,
        step: int,
        model: nn.Module,
        updater: Stateful,
        reason: str,
        since: float,
        consistency: Mapping[str, Any] | None = None,
    ) -> StagedCheckpoint:
        """Copy, once, what rank 0 has of a checkpoint: model, optimizer, schedule and the account of the run.

        Args:
            step: the version that model and optimizer are of.
            model, updater: what is copied; nobody changes them during this call.
            reason, since: see ``StagedCheckpoint``.
            consistency: what its rules need to go on.

        Raises:
            Exception: the failure of an earlier write.
            NotFinite: a parameter that is trained is NaN or infinite.
        """
        self.writer.check()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        check_storable_weights(trained, step, self.run.resume_command if self.last_checkpoint else None)
        with self._lock:
            state = updater.state_dict()
            objects = {
                "model": stage_copy(plain_weights(model), self._memory),
                "optimizer": stage_copy(state["optimizer"], self._memory),
                "run": stage_copy(
                    {**self._state(step), "scheduler": state["scheduler"], "consistency": dict(consistency or {})}
                ),
            }
            self._memory.trim()
            return StagedCheckpoint(step, objects, self._improved_step == step, reason, since)

    def write(
        self, cut: StagedCheckpoint, parts: Mapping[int, Mapping[str, Any] | ChunkedFile], pause_s: float
    ) -> None:
        """Write a checkpoint: in the background, or before this returns, as the config says. Nothing is copied.

        Args:
            cut: of this keeper.
            parts: what each trainer stores: private, or the file that ``torch.save`` made of it.
            pause_s: how long training stopped for the copies, on the trainer where that took longest.

        Raises:
            Exception: the failure of an earlier write, or of this one without ``checkpoint.background``.
        """
        files = {
            f"trainer-{i}.pt" if isinstance(p, ChunkedFile) else f"trainer-{i}": p for i, p in sorted(parts.items())
        }
        future = self.writer.submit(cut.step, {**cut.objects, **files}, self._about(), cut.is_best)
        if not self.config.checkpoint.background:
            pause_s = time.perf_counter() - cut.since
        with self._lock:
            self.checkpoint_pauses_s.append(pause_s)
        reason = cut.reason  # all that is kept of the cut
        future.add_done_callback(lambda done: self._written(done, pause_s, reason))

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "samples": self.samples,
            "seconds": self.seconds,
            "epoch": self.epoch,
            "resumes": self.resumes,
            "validation": dict(self.validation),
            "validated_step": self._validated_step,
            "best": None if self.best is None else self.best.state_dict(),
            "window": dict(vars(self._window)),
            "staleness": self.staleness.state_dict(),
            "dropped": self.dropped,
            "simulations": None if self.simulations is None else self.simulations.state_dict(),
        }

    def _about(self) -> dict[str, Any]:
        config = self.config
        return {
            "mode": config.mode,
            "consistency": config.server.consistency,
            "trainers": num_trainers_of(config),
            "world_size": world_size_of(config),
            "task": config.task,
            "seed": config.seed,
        }

    def _written(self, done: Any, pause_s: float, reason: str) -> None:
        if done.cancelled() or done.exception() is not None:
            return  # a cancelled one gave way to a newer; the writer raises a failure at its next call
        written: WrittenCheckpoint = done.result()
        self.record(
            make_record(
                "checkpoint",
                written.step,
                path=str(written.path),
                seconds=written.seconds,
                bytes=written.bytes,
                pause_ms=pause_s * 1e3,
                reason=reason,
            )
        )

    # Where it ends.

    def close(
        self, status: str, totals: Sequence[TrainerTotals], reason: str = "", error: str | None = None
    ) -> dict[str, Any]:
        """Finish what is being written, then write and return the summary."""
        try:
            self.writer.close(_LAST_WRITE_S)
        except Exception as failure:  # noqa: BLE001 - it becomes the run's error, unless there is an earlier one
            status, error = "failed", error or f"{type(failure).__name__}: {failure}"
        if self._window.steps:
            self._close_window()
        summary = summarize(self, status, totals, reason, error)
        if self.simulations is not None:
            summary |= self.simulations.summary()
        write_json(self.run.summary_file, summary)
        self.record(make_record("end", self.step, status=status, summary=summary))
        self._sink.close()
        return summary


def unknown_kinds(state: Mapping[str, Any]) -> set[str]:
    """Of which kinds a checkpoint may lack records of its own step, as they came after it.

    Args:
        state: what ``run.pt`` holds.
    """
    kinds: set[str] = set()
    if state.get("window", {}).get("steps"):
        kinds.update(("train", "staleness"))  # of a window that only the end of the run closed
    if state.get("validated_step", state["step"]) != state["step"]:
        kinds.add("validation")  # the last one of a run, after a checkpoint that was due
    return kinds

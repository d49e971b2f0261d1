"""Rank 0's checkpoints: staging, collecting the trainers' parts, committing, and restoring."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from paramserver.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    ChunkedFile,
    StagingPool,
    WrittenCheckpoint,
    pack,
    stage_copy,
)
from paramserver.checkpoint.save import restore_best_pointer
from paramserver.config import Config, num_trainers_of, world_size_of
from paramserver.errors import TrainingError
from paramserver.metrics.records import TrainerTotals, make_record
from paramserver.optim.updater import Updater
from paramserver.parameters.model import load_weights, detached_state_dict
from paramserver.parameters.numerics import check_parameters_finite
from paramserver.runs.monitor import RunMonitor
from paramserver.runs.reshard import reshard_parts
from paramserver.runs.rundir import RunDir

_LAST_WRITE_S = 600.0


@dataclass(frozen=True, eq=False)
class StagedCheckpoint:
    """Private copies of what rank 0 stores in a checkpoint; the trainers' parts are not in it.

    Args:
        step: the version of model and optimizer.
        objects: by the name of their file, without ``.pt``.
        is_best: whether its validation is the best so far.
        reason: why it is made, for the record.
        since: ``time.perf_counter()`` when the first trainer stopped for it.
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
    """The producer of an online run's samples."""

    def summary(self) -> dict[str, Any]: ...


class CheckpointManager:
    """Saves and restores the checkpoints of a run. Lives on rank 0.

    Args:
        config: the run's.
        run: its folder, locked by this process.
        monitor: its state is part of every checkpoint.
        checkpoint: what the run resumes from; None for a new one.
        initial_weights: of ``init_from``, where it is given.
    """

    def __init__(
        self,
        config: Config,
        run: RunDir,
        monitor: RunMonitor,
        checkpoint: Checkpoint | None = None,
        initial_weights: tuple[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.config = config
        self.run = run
        self.monitor = monitor
        self.checkpoint = checkpoint
        self.initial_weights = initial_weights
        self.pauses_s: list[float] = []
        self.consistency_state: Mapping[str, Any] = {}
        self.simulations: SimulationsState | None = None
        self.simulations_state: dict[str, Any] | None = None
        self.writer = CheckpointWriter(run.checkpoints_dir, config.checkpoint.keep, config.checkpoint.background)
        self._memory = StagingPool()
        self._resharded: list[bytes] | None = None
        if checkpoint is not None:
            self._resume(checkpoint)

    # Resuming.

    def _resume(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.load("run")
        self.monitor.load_state_dict(state)
        self.consistency_state = state.get("consistency", {})
        self.simulations_state = state.get("simulations")
        if self.monitor.best is not None and self.monitor.resume_note is None:
            # Another was the best in a future that is given up; or this one was not marked before a crash.
            restore_best_pointer(self.run.checkpoints_dir, self.monitor.best.step)
        before, now = checkpoint.num_trainers, num_trainers_of(self.config)
        if before != now:
            parts = [checkpoint.load(f"trainer-{i}") for i in range(before)]
            capacity, entropy = self.config.buffer.capacity, (self.config.seed, self.monitor.resumes)
            self._resharded = [pack(part) for part in reshard_parts(parts, now, capacity=capacity, entropy=entropy)]

    def restore_model(self, model: nn.Module) -> None:
        """Load the checkpoint's weights, or those of ``init_from``, into the model; nothing for a new run."""
        if self.checkpoint is not None:
            load_weights(model, self.checkpoint.load("model"), str(self.checkpoint.path))
        elif self.initial_weights is not None:
            origin, weights = self.initial_weights
            load_weights(model, weights, origin)

    def updater_state(self) -> dict[str, Any] | None:
        """Return the state of optimizer and schedule to load; None in a new run."""
        if self.checkpoint is None:
            return None
        return {"optimizer": self.checkpoint.load("optimizer"), "scheduler": self.checkpoint.load("run")["scheduler"]}

    def restore_optimizer(self, updater: Updater) -> None:
        """Load the state of optimizer and schedule; nothing for a new run."""
        state = self.updater_state()
        if state is not None:
            updater.load_state_dict(state)

    def trainer_part(self, trainer_index: int) -> bytes | None:
        """Return the packed state that a trainer resumes from; None in a new run."""
        if self.checkpoint is None or self._resharded is not None:
            return None if self._resharded is None else self._resharded[trainer_index]
        return self.checkpoint.read_bytes(f"trainer-{trainer_index}.pt")

    # Saving.

    @property
    def last_checkpoint(self) -> str | None:
        """The name of the newest checkpoint that is complete."""
        if self.writer.written:
            return self.writer.written[-1].path.name
        return self.checkpoint.path.name if self.checkpoint is not None else None

    def stage(
        self,
        step: int,
        model: nn.Module,
        updater: Stateful,
        reason: str,
        since: float,
        consistency: Mapping[str, Any] | None = None,
    ) -> StagedCheckpoint:
        """Copy, once, what rank 0 stores: model, optimizer, schedule and the state of the run.

        Args:
            step: the version of model and optimizer.
            model, updater: what is copied; the caller makes sure that nothing changes them during this call.
            reason, since: see ``StagedCheckpoint``.
            consistency: the state of its rules.

        Raises:
            Exception: the failure of an earlier write.
            NotFinite: a parameter that is trained is NaN or infinite.
        """
        self.writer.raise_error()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        check_parameters_finite(trained, step, self.run.resume_command if self.last_checkpoint else None)
        state = updater.state_dict()
        run_state = {
            **self.monitor.state_dict(),
            "step": step,
            "simulations": None if self.simulations is None else self.simulations.state_dict(),
            "scheduler": state["scheduler"],
            "consistency": dict(consistency or {}),
        }
        objects = {
            "model": stage_copy(detached_state_dict(model), self._memory),
            "optimizer": stage_copy(state["optimizer"], self._memory),
            "run": stage_copy(run_state),
        }
        self._memory.trim()
        return StagedCheckpoint(step, objects, self.monitor.improved_step == step, reason, since)

    def commit(
        self, staged: StagedCheckpoint, parts: Mapping[int, Mapping[str, Any] | ChunkedFile], pause_s: float
    ) -> None:
        """Write a checkpoint: in the background, or before this returns, as the config says. Nothing is copied.

        Args:
            staged: made by ``stage``.
            parts: what each trainer stores: private, or the file that ``torch.save`` made of it.
            pause_s: how long training stopped for the copies, on the trainer where that took longest.

        Raises:
            Exception: the failure of an earlier write, or of this one without ``checkpoint.background``.
        """
        files = {
            f"trainer-{i}.pt" if isinstance(p, ChunkedFile) else f"trainer-{i}": p for i, p in sorted(parts.items())
        }
        future = self.writer.submit(staged.step, {**staged.objects, **files}, self._about(), staged.is_best)
        if not self.config.checkpoint.background:
            pause_s = time.perf_counter() - staged.since
        self.pauses_s.append(pause_s)
        reason = staged.reason  # all that is kept of the staged checkpoint
        future.add_done_callback(lambda done: self._written(done, pause_s, reason))

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
        self.monitor.record(
            make_record(
                "checkpoint",
                written.step,
                path=str(written.path),
                seconds=written.seconds,
                bytes=written.size_bytes,
                pause_ms=pause_s * 1e3,
                reason=reason,
            )
        )

    def close(
        self, status: str, totals: Sequence[TrainerTotals], reason: str = "", error: str | None = None
    ) -> dict[str, Any]:
        """Finish what is being written, then close the monitor and return its summary."""
        try:
            self.writer.close(_LAST_WRITE_S)
        except Exception as failure:  # noqa: BLE001 - it becomes the run's error, unless there is an earlier one
            status, error = "failed", error or f"{type(failure).__name__}: {failure}"
        return self.monitor.close(
            status,
            totals,
            reason,
            error,
            checkpoint=self.last_checkpoint,
            checkpoint_pauses_s=self.pauses_s,
            simulations=None if self.simulations is None else self.simulations.summary(),
        )


class PartCollector:
    """Receives the trainers' parts of one checkpoint after the other, and commits each when all have arrived.

    Thread-safe. A trainer takes part in the next checkpoint only when its part of the last one has arrived, so one is
    collected at a time. Until then what is staged and the chunks that arrived are in memory, in addition to what the
    writer holds. Where a trainer dies before, nothing is written, and the previous checkpoint remains the newest.

    Args:
        checkpoints: commits.
        trainers: how many parts a checkpoint has.
    """

    def __init__(self, checkpoints: CheckpointManager, trainers: int) -> None:
        self._checkpoints = checkpoints
        self._trainers = trainers
        self._lock = threading.Lock()
        self._staged: StagedCheckpoint | None = None
        self._parts: dict[int, ChunkedFile] = {}
        self._pauses_s: dict[int, float] = {}

    def start(self, staged: StagedCheckpoint) -> None:
        """Collect the parts of ``staged`` from now on."""
        with self._lock:
            assert self._staged is None, "a trainer waits for its last part before it takes part in a checkpoint"
            self._staged, self._pauses_s = staged, {}
            self._parts = {index: ChunkedFile() for index in range(self._trainers)}

    def add_chunk(self, trainer_index: int, step: int, chunk: Tensor) -> None:
        """Append a chunk, of bytes, to a trainer's file.

        Raises:
            TrainingError: no staged checkpoint of that step waits for it.
        """
        with self._lock:
            self._expected(trainer_index, step)
            self._parts[trainer_index].append(chunk.numpy())

    def finish_part(self, trainer_index: int, step: int, pause_s: float) -> None:
        """Complete a trainer's part. The last one commits the checkpoint.

        Raises:
            TrainingError: no staged checkpoint of that step waits for it.
            Exception: see ``CheckpointManager.commit``.
        """
        with self._lock:
            staged = self._expected(trainer_index, step)
            self._pauses_s[trainer_index] = pause_s
            if len(self._pauses_s) < self._trainers:
                return
            parts, pauses_s = self._parts, self._pauses_s
            self._staged, self._parts = None, {}
        # Without the lock: without ``checkpoint.background`` this writes to disk.
        self._checkpoints.commit(staged, parts, max(pauses_s.values()))

    def _expected(self, trainer_index: int, step: int) -> StagedCheckpoint:
        if self._staged is None or self._staged.step != step or trainer_index in self._pauses_s:
            raise TrainingError(f"trainer {trainer_index}: a part of step {step} must follow the staging of that step")
        return self._staged

"""Rank 0's checkpoints: ``CheckpointManager`` makes them, ``load_for_resume`` reads one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paramserver.buffers.reshard import reshard_parts
from paramserver.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    ChunkedFile,
    StagingPool,
    WrittenCheckpoint,
    find_checkpoint,
    pack,
    read_checkpoint,
    stage_copy,
    unpack,
)
from paramserver.checkpoint.format import LATEST, read_pointer, step_name
from paramserver.checkpoint.memory import MEMORY, follows, make_memory_folder, newer_in_memory, remove_memory
from paramserver.checkpoint.save import restore_best_pointer
from paramserver.checkpoint.serialization import check_mapping
from paramserver.checkpoint.staging import FilePool, RowStream, address_of, replace_tensors
from paramserver.config import Config, num_trainers_of, world_size_of
from paramserver.config.deadlines import LAST_WRITE_S
from paramserver.consistency.factory import consistency_class
from paramserver.errors import CheckpointError, StorageError, TrainingError, UnsupportedConfiguration
from paramserver.metrics.records import TrainerTotals, make_record
from paramserver.optim.averaging import averaged_state_dict
from paramserver.optim.outer import OuterBuilder, outer_class, outer_names
from paramserver.optim.updater import Updater, UpdaterState
from paramserver.parameters.model import detached_state_dict, load_weights
from paramserver.parameters.model_tree import buffer_kinds, changed_kinds
from paramserver.parameters.numerics import check_parameters_finite
from paramserver.runs.monitor import RunMonitor
from paramserver.runs.rundir import RunDir
from paramserver.sources.expected import Origin
from paramserver.task import has_state

if TYPE_CHECKING:
    from paramserver.online.coordinator import SimulationCoordinator
    from paramserver.online.publisher import ModelPublisher

# In a manifest: the trainers that were absent, and of whose task no checkpoint had a state.
_WITHOUT_STATE = "without_state"

# The parameters as they are trained, where those of ``model`` are what an optimizer's ``eval()`` makes of them.
_TRAINED = "trained"


@dataclass(frozen=True)
class SaveReason:
    """What a reason to save a checkpoint means.

    One ``in_memory`` is no checkpoint of the run, whose last one is still written to the disk. After one that
    ``is_last`` the trainers save no other. One that ``ends_epoch`` is saved after the hooks that end an open epoch.
    """

    in_memory: bool = False
    is_last: bool = False
    ends_epoch: bool = False

    def renews(self, is_online: bool) -> bool:
        """Return whether a checkpoint of the same step is saved again: simulations send samples between two steps.

        What a buffer has acknowledged since then is sent no more.
        """
        return self.is_last and is_online


SAVE_REASONS = {
    "periodic": SaveReason(),
    "best": SaveReason(),
    MEMORY: SaveReason(in_memory=True),
    "end": SaveReason(is_last=True, ends_epoch=True),
    "interrupted": SaveReason(is_last=True),
    "resize": SaveReason(is_last=True),
}


@dataclass(frozen=True, eq=False)
class StagedCheckpoint:
    """Private copies of what rank 0 stores in a checkpoint; the trainers' parts are not in it.

    The objects are by the name of their file, without ``.pt``; the first trainer stopped at ``since``
    (``time.perf_counter()``), for a ``reason`` of ``SAVE_REASONS``. Streams in them may be read until ``release`` is
    called.
    """

    step: int
    objects: dict[str, Any]
    is_best: bool
    reason: str
    since: float
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True, eq=False)
class ResumeState:
    """What a run resumes from: see ``load_for_resume``.

    The parts are packed, where they are not those of the checkpoint, as with another number of trainers; else None.
    """

    checkpoint: Checkpoint
    run: Mapping[str, Any]
    parts: Sequence[bytes] | None
    origin: Origin


def load_for_resume(config: Config, run: RunDir) -> ResumeState:
    """Find, verify and load the checkpoint that a run resumes from. Nothing in its folder is changed.

    What follows is up to each owner: ``CheckpointManager`` restores the figures of the run, the server (``rpc``) or
    every trainer loads model and optimizer, and a trainer restores its random states, its buffer and its position in
    the source from ``CheckpointManager.trainer_part``.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or its buffers do not fit the trainers of ``config``.
    """
    # Verified before it is used, and before anything in the folder changes: every SHA-256, and every object is there.
    checkpoint = read_checkpoint(find_checkpoint(run.path))
    for name in ("model", "optimizer", "run"):
        checkpoint.file_path(name)
    for index in range(checkpoint.num_trainers):  # a wrong number ends at the first part that is missing
        checkpoint.file_path(f"trainer-{index}")
    file = str(checkpoint.file_path("run"))
    state = check_mapping(checkpoint.load("run"), file, ("step", "resumes", "scheduler"))
    _check_rounds(checkpoint, state.get("outer"), config)
    origin = Origin.of_start(config) if (stored := state.get("origin")) is None else Origin(**stored)
    trainers, is_same = num_trainers_of(config), checkpoint.num_trainers == num_trainers_of(config)
    steps_are_same = is_same and origin.settings == Origin.of_start(config).settings
    scale = _residual_scale(state, checkpoint, config)
    if steps_are_same and scale == 1:
        return ResumeState(checkpoint, state, None, origin)
    before = parts = [checkpoint.load(f"trainer-{index}") for index in range(checkpoint.num_trainers)]
    if not is_same:
        # Samples and positions move to the new trainers, and one more than before gets new random states.
        entropy = config.seed, state["resumes"] + 1
        parts = reshard_parts(before, trainers, capacity=config.buffer.capacity, entropy=entropy)
    if not steps_are_same:
        origin = origin.at_resume(state, before, parts, config)
    if scale != 1:
        scaled = [{n: own * scale for n, own in (part.get("residuals") or {}).items()} for part in parts]
        parts = [{**part, "residuals": residuals} for part, residuals in zip(parts, scaled, strict=True)]
    return ResumeState(checkpoint, state, None if parts is before else [pack(part) for part in parts], origin)


def _residual_scale(state: Mapping[str, Any], checkpoint: Checkpoint, config: Config) -> float:
    """Return by what to multiply the residuals of a checkpoint, for an update to move as far by them as before.

    An update is the mean of as many gradients as its rule declares, of which one has the residual of a trainer.
    """
    if config.server.compression == "none":
        return 1.0
    # Earlier releases stored none.
    before = state.get("gradients_per_update") or _gradients_per_update(config, checkpoint.num_trainers)
    return float(_gradients_per_update(config, num_trainers_of(config)) / before)


def _gradients_per_update(config: Config, trainers: int) -> int:
    return consistency_class(config.server).gradients_per_update(config.server, trainers)


def _check_rounds(checkpoint: Checkpoint, outer: str | None, config: Config) -> None:
    """Refuse the state of another class of optimizer than that of the run that resumes."""
    training, own = config.training, outer_class(config)
    if own == outer:
        return
    if own is not None and outer is not None:
        names = " or ".join(outer_names(outer))
        raise CheckpointError(
            f"training.outer.optimizer ({OuterBuilder(config).name}) must be {names} to resume {checkpoint.path}, "
            f"whose optimizer.pt is of that; set it to {names}, or start a new run from the weights by init_from"
        )
    raise CheckpointError(
        f"{checkpoint.path} is of a run {'without' if outer is None else 'with'} rounds of local steps, and "
        f"training.local_steps ({training.local_steps}) and training.outer {'make none' if own is None else 'begin'}, "
        "which needs the state of another optimizer; resume with the keys that it was stored with, or start a new run "
        "from its weights by init_from"
    )


class CheckpointManager:
    """Saves and restores the checkpoints of a run. Lives on rank 0.

    ``initial_weights`` are those of ``init_from``, their origin and late buffers (see ``load_weights``). ``generation``
    is how often servers of this run have started, this one included; see ``consistency/ledger.py``.
    """

    def __init__(
        self,
        config: Config,
        run: RunDir,
        monitor: RunMonitor,
        resume: ResumeState | None = None,
        initial_weights: tuple[Mapping[str, Any], str, Sequence[str]] | None = None,
        generation: int = 1,
    ) -> None:
        self.config = config
        self.run = run
        self.monitor = monitor
        self.checkpoint = None if resume is None else resume.checkpoint
        self.origin = Origin.of_start(config) if resume is None else resume.origin
        self.initial_weights = initial_weights
        self.generation = generation
        self.pauses_s: list[float] = []
        self.is_closed = False
        # Of the checkpoint, for the consistency model and the ledger of pushes.
        self.consistency_state: Mapping[str, Any] = {}
        self.ledger_state: Mapping[str, Any] = {"rows": {}}
        # Of an online run; its state is saved and its figures are in the summary.
        self.simulations: SimulationCoordinator | None = None
        self.simulations_state: dict[str, Any] | None = None
        self.publisher: ModelPublisher | None = None
        self.writer = CheckpointWriter(run.checkpoints_dir, config.checkpoint.keep, config.checkpoint.background)
        self._memory: CheckpointWriter | None = None  # of those in memory, from the first one on
        self._memory_failed = False
        self._pool = StagingPool()
        # Of those in memory after the first, and the copies in it that the newest one consists of, by its name.
        self._memory_pool: FilePool | None = None
        self._in_memory: dict[str, Mapping[str, Any]] = {}
        self._resume = resume
        self._buffers_as_built: dict[str, tuple[object, ...]] | None = None
        if resume is not None:
            monitor.load_state_dict(resume.run)
            self.consistency_state = resume.run.get("consistency", {})
            self.ledger_state = resume.run.get("ledger", self.ledger_state)
            self.simulations_state = resume.run.get("simulations")
            if monitor.best is not None and monitor.resume_note is None:
                # The abandoned steps may have had a better one, or a crash came before this one was marked.
                restore_best_pointer(run.checkpoints_dir, monitor.best.step)

    # Restoring.

    def restore_model(self, model: nn.Module) -> None:
        """Load the checkpoint's weights, or those of ``init_from``, into the model; nothing for a new run."""
        self._buffers_as_built = buffer_kinds(model)
        if self._resume is not None:
            checkpoint, late = self._resume.checkpoint, self._resume.run.get("late_buffers", ())
            load_weights(model, checkpoint.load("model"), str(checkpoint.path), late, with_optimizer=True)
        elif self.initial_weights is not None:
            load_weights(model, *self.initial_weights)

    def late_buffers(self, model: nn.Module) -> list[str]:
        """Return the module buffers that have another shape or dtype than as built, or were registered since."""
        as_built = self._buffers_as_built
        return [] if as_built is None else changed_kinds(as_built, buffer_kinds(model))

    def updater_state(self) -> dict[str, Any] | None:
        """Return the state of optimizer and schedule to load; None in a new run."""
        if self._resume is None:
            return None
        checkpoint = self._resume.checkpoint
        run = self._resume.run
        state = {"optimizer": checkpoint.load("optimizer"), "scheduler": run["scheduler"]}
        state |= {"skipping": run["skipping"]} if "skipping" in run else {}
        if _TRAINED in checkpoint.names:
            state["parameters"] = {"train": checkpoint.load(_TRAINED)}
        return state

    def restore_optimizer(self, updater: Updater) -> None:
        """Load the state of optimizer and schedule; nothing for a new run."""
        state = self.updater_state()
        if state is not None:
            updater.load_state_dict(state)

    def trainer_part(self, trainer_index: int, newest: bool = False) -> bytes | None:
        """Return the packed state that a trainer resumes from; None in a new run.

        With ``newest`` it is its part of the newest checkpoint that this process has taken after the resume, written or
        not, on the disk or in memory.
        """
        saved: list[tuple[int, Mapping[str, Any] | Path]] = []
        for writer in [w for w in (self.writer, self._memory) if w is not None and newest]:
            # In this order: what is written meanwhile is among both.
            saved += [(objects["run"]["step"], objects) for objects in writer.pending()]
            saved += [(written.step, written.path) for written in writer.written]
        for _, objects in sorted(saved, key=lambda one: one[0], reverse=True):
            if isinstance(objects, Path):
                with suppress(FileNotFoundError):  # of an older one that was removed since
                    return (objects / f"trainer-{trainer_index}.pt").read_bytes()
            elif (file := objects.get(f"trainer-{trainer_index}.pt")) is not None:
                return b"".join(file)
            elif (part := objects.get(f"trainer-{trainer_index}")) is not None:
                return pack(part)
        if self._resume is None:
            return None
        if self._resume.parts is not None:
            return self._resume.parts[trainer_index]
        return self._resume.checkpoint.read_bytes(f"trainer-{trainer_index}.pt")

    # Publishing.

    def is_wanted(self, step: int) -> bool:
        """Return whether a subscriber waits for the version of ``step``, which is current; ``publish`` follows."""
        return self.publisher is not None and self.publisher.is_wanted(step)

    @property
    def publishes_averages(self) -> bool:
        return self.config.publish is not None and self.config.publish.averages

    def publish(self, step: int, model: nn.Module, updater: UpdaterState) -> None:
        """Send a copy of the model to subscribers. Nothing changes model and updater during this call.

        Raises:
            UnsupportedConfiguration: averages are to be published, and there are none.
            TaskError: a tensor of the model cannot be sent.
        """
        assert self.publisher is not None
        averages: Mapping[str, Tensor] = {}
        if self.publishes_averages:
            if not updater.validates_averages:
                raise UnsupportedConfiguration(
                    "publish.averages (True) must be false, as this run keeps no averages; set it to false, or set "
                    "training.ema_decay"
                )
            averages = updater.averages()
        entries = averaged_state_dict(model, averages)
        self.publisher.publish(step, {name: value for name, value in entries.items() if isinstance(value, Tensor)})

    # Saving.

    @property
    def resumes(self) -> bool:
        """Whether the run resumed from a checkpoint."""
        return self._resume is not None

    @property
    def trainers_with_state(self) -> list[int]:
        """The trainers whose task has a state in the checkpoint from which the run resumed; none in a new run."""
        if self._resume is None:
            return []
        checkpoint = self._resume.checkpoint
        without = checkpoint.manifest.metadata.get(_WITHOUT_STATE, ())
        return [index for index in range(checkpoint.num_trainers) if index not in without]

    @property
    def last_checkpoint(self) -> str | None:
        """The name of the newest checkpoint that is complete; one that the user removed is none."""
        paths = [written.path for written in self.writer.written] or [c.path for c in (self.checkpoint,) if c]
        return next((path.name for path in reversed(paths) if path.is_dir()), None)

    def stage(
        self,
        step: int,
        model: nn.Module,
        updater: UpdaterState,
        reason: str,
        since: float,
        consistency: Mapping[str, Any] | None = None,
        ledger: Mapping[str, Any] | None = None,
    ) -> StagedCheckpoint:
        """Copy, once, what rank 0 stores: model, optimizer, schedule and the state of the run.

        To be called while model, optimizer and every trainer are at ``step``. Training may continue when this returns,
        and changes nothing that is read after it; the caller makes sure that nothing changes model and updater during
        this call. Each trainer has staged its part of the same step. The caller collects the parts, and calls
        ``commit``, once, with those of all trainers; now or from any thread later. With ``checkpoint.background`` they
        arrive and the files are written while training continues. Without that call, as when a trainer dies, nothing is
        written.

        Raises:
            Exception: the failure of an earlier write.
            NotFinite: a parameter that is trained is NaN or infinite.
        """
        # A failed write ends the run at its next checkpoint, so that it does not train for long without a good one.
        self.writer.raise_error()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._check_finite({n: p for n, p in trained.items() if address_of(p) not in updater.tables}, step)
        state = updater.state_dict()
        run_state = {
            **self.monitor.state_dict(),
            "step": step,
            "reason": reason,
            "simulations": None if self.simulations is None else self.simulations.state_dict(),
            "scheduler": state["scheduler"],
            **({"skipping": state["skipping"]} if "skipping" in state else {}),
            "consistency": dict(consistency or {}),
            "ledger": dict(ledger or {"rows": {}}),
            "late_buffers": self.late_buffers(model),
            "parameters": list(updater.parameter_names),
            "outer": outer_class(self.config),
            "gradients_per_update": _gradients_per_update(self.config, num_trainers_of(self.config)),
            "origin": vars(self.origin),
        }
        parameters, weights = state.get("parameters"), detached_state_dict(model)
        if parameters is not None:
            weights = averaged_state_dict(model, parameters["eval"])
        if updater.tables:
            weights = self._with_streams(model, weights, updater.tables, step)
        pool = self._pool
        if SAVE_REASONS[reason].in_memory and self._memory_pool is not None:
            pool = self._memory_pool
            if not self._in_memory:
                self._pool.trim()  # the first one in memory was copied there
        objects = {
            "model": stage_copy(weights, pool),
            "optimizer": stage_copy(state["optimizer"], pool),
            "run": stage_copy(run_state),
        }
        if parameters is not None:
            objects[_TRAINED] = stage_copy(parameters["train"], pool)
        if self.config.training.ema_decay is not None:
            objects["ema"] = stage_copy(averaged_state_dict(model, updater.averages()), pool)
        pool.trim()
        return StagedCheckpoint(step, objects, self.monitor.improved_step == step, reason, since, updater.release)

    def _check_finite(self, parameters: Mapping[str, Tensor], step: int) -> None:
        check_parameters_finite(parameters, step, self.run.resume_command if self.last_checkpoint else None)

    def _with_streams(
        self, model: nn.Module, weights: dict[str, Any], tables: Mapping[int, tuple[str, RowStream]], step: int
    ) -> dict[str, Any]:
        """Return the weights with streams in the place of tables.

        A table that a hook of ``state_dict`` has copied or changed is read now.
        """
        stored = set(map(address_of, weights.values()))
        for name, table in (own for place, own in tables.items() if place not in stored):
            first = 0
            for rows in self._checked(name, table, step).ranges():
                model.get_parameter(name).data[first : first + len(rows)] = rows
                first += len(rows)
            weights = detached_state_dict(model)
        streams = {place: self._checked(*own, step) for place, own in tables.items() if place in stored}
        replaced: dict[str, Any] = replace_tensors(weights, streams)
        return replaced

    def _checked(self, name: str, table: RowStream, step: int) -> RowStream:
        """Return the stream of a table that checks each range of rows."""

        def read(first: int, end: int) -> Tensor:
            rows = table.read(first, end)
            self._check_finite({name: rows}, step)
            return rows

        return replace(table, read=read)

    def commit(
        self, staged: StagedCheckpoint, parts: Mapping[int, Mapping[str, Any] | ChunkedFile], pause_s: float
    ) -> None:
        """Write a staged checkpoint: in the background, or before this returns, as configured. Copies nothing.

        The writer brings every file to the disk, then the manifest, and renames the folder to its final name; then
        ``latest`` and ``best`` name it, and older ones are removed.

        The parts are private objects, or the file that ``torch.save`` made of them; that of a lost trainer, without
        ``task``, gets the states of its task and of its local steps in the newest checkpoint. Training stopped for
        ``pause_s`` for the copies, on the trainer where that took longest.

        Raises:
            Exception: the failure of an earlier write, or of this one without ``checkpoint.background``.
        """
        config = self.config
        # Each trainer has sent its records before its part. A run that resumes from here does not get them again.
        self.monitor.write_logged(staged.step)
        parts = {
            i: part if isinstance(part, ChunkedFile) or "task" in part else {**part, **self._kept_state(i)}
            for i, part in parts.items()
        }
        files = {
            f"trainer-{i}.pt" if isinstance(p, ChunkedFile) else f"trainer-{i}": p for i, p in sorted(parts.items())
        }
        metadata = {
            "mode": config.mode,
            "consistency": config.server.consistency,
            "trainers": num_trainers_of(config),
            "world_size": world_size_of(config),
            "task": config.task,
            "seed": config.seed,
        }
        if without := [i for i, part in parts.items() if not isinstance(part, ChunkedFile) and not has_state(part)]:
            metadata[_WITHOUT_STATE] = sorted(without)
        in_memory, objects = SAVE_REASONS[staged.reason].in_memory, {**staged.objects, **files}
        if self.simulations is not None and "sampler" in (objects["run"]["simulations"] or {}):
            # Draws depend on when they are made: a simulation of which a trainer's part has samples must keep its own.
            objects["run"] = {**objects["run"], "simulations": self.simulations.state_dict()}
        try:
            block_bytes = 0
            if in_memory:
                (writer, pool), blocks = self._memory_writer(objects), {}
                for name in staged.objects.keys() - {"run"}:
                    objects[name], blocks[name], size_bytes = pool.detach(objects[name])
                    block_bytes += size_bytes
                metadata |= follows([*self.writer.pending_names(), self.last_checkpoint], blocks)
                future = writer.submit(staged.step, objects, metadata)
                copies = {step_name(staged.step): staged.objects} if block_bytes else {}
                future.add_done_callback(partial(self._keep_in_memory, step_name(staged.step), copies))
            else:
                future = self.writer.submit(staged.step, objects, metadata, staged.is_best)
        except BaseException:
            staged.release()
            raise
        if not config.checkpoint.background:
            pause_s = time.perf_counter() - staged.since
        if not in_memory:
            self.pauses_s.append(pause_s)
        reason = staged.reason  # the callback must not keep ``staged``, and with it the copies, alive
        future.add_done_callback(lambda done: self._record_written(done, pause_s, reason, block_bytes))
        release = staged.release
        future.add_done_callback(lambda _: release())

    def _memory_writer(self, objects: Mapping[str, Any]) -> tuple[CheckpointWriter, FilePool]:
        """Return the writer of checkpoints in memory, and the pool for the next ones; made for the first one."""
        if self._memory is None or self._memory_pool is None:
            config = self.config.checkpoint
            folder = make_memory_folder(self.run.path, Path(config.memory_folder), objects)
            self._memory = CheckpointWriter(folder, keep=1, background=config.background, optional=True)
            self._memory_pool = FilePool(folder)
        return self._memory, self._memory_pool

    def _keep_in_memory(self, name: str, copies: dict[str, Any], done: Future[WrittenCheckpoint]) -> None:
        """Keep what is in the blocks of a checkpoint in memory until another one has replaced it."""
        if self._memory is None or done.cancelled():
            return
        kept, newest = {**self._in_memory, **copies}, name
        if done.exception() is not None:
            # It may have been named before the failure, as in the removal of the one before.
            try:
                found = read_pointer(self._memory.folder, LATEST)
            except CheckpointError:  # that is not known, as where no descriptor is left, until the next one is written
                self._in_memory = kept
                return
            newest = "" if found is None else found.name
        self._in_memory = {of: copy for of, copy in kept.items() if of == newest}

    def _kept_state(self, trainer_index: int) -> dict[str, Any]:
        """Return what the part of a lost trainer has of its newest one, such as of its task and local steps.

        No other process has these.
        """
        packed = self.trainer_part(trainer_index, newest=True)
        part = {} if packed is None else unpack(packed)
        return {
            "task": part.get("task", {}),
            **{name: part.get(name) for name in ("local_steps", "residuals", "extra_state", "flags", "validation")},
        }

    def _record_written(self, done: Future[WrittenCheckpoint], pause_s: float, reason: str, block_bytes: int) -> None:
        if done.cancelled():
            return  # replaced by a newer one
        if (error := done.exception()) is not None:  # raised by the writer's next call, unless it is optional
            in_memory = SAVE_REASONS[reason].in_memory
            if in_memory and isinstance(error, StorageError) and not self._memory_failed:
                self._memory_failed = True
                self.monitor.note(
                    f"training continues without a new checkpoint in memory: {str(error).partition(';')[0]}"
                )
            return
        written = done.result()
        self.monitor.record(
            make_record(
                "checkpoint",
                written.step,
                path=str(written.path),
                seconds=written.seconds,
                bytes=written.size_bytes + block_bytes,
                pause_ms=pause_s * 1e3,
                reason=reason,
            )
        )

    def wait_written(self, timeout_s: float) -> None:
        """Wait until what was submitted is written, replaced, or has failed, on the disk and in memory."""
        for writer in (self.writer, self._memory):
            if writer is not None:
                writer.wait(timeout_s)

    def suspend(self) -> None:
        """Finish what is being written, and close the records without a summary: another generation follows."""
        try:
            self._close_writers()
        finally:
            self.monitor.suspend()

    def _close_writers(self) -> None:
        try:
            if self._memory is not None:
                self._memory.close(LAST_WRITE_S)
        finally:
            self.writer.close(LAST_WRITE_S)

    def close(
        self, status: str, totals: Sequence[TrainerTotals], reason: str = "", error: str | None = None
    ) -> dict[str, Any]:
        """Finish what is being written, then close the monitor and return its summary.

        Raises:
            StorageError: as ``RunMonitor.close``.
        """
        self.is_closed = True
        folders = [self.run.logs_dir]
        if self.config.logging.tensorboard and find_spec("tensorboard") is not None:
            folders.append(self.run.tensorboard_dir)
        for folder in folders if self.run.path.is_dir() else ():
            if not folder.is_dir():
                self.monitor.note(f"{folder} was removed while the run wrote it; what it logged there is lost")
        refused: StorageError | None = None
        try:
            self._close_writers()
            if status == "completed" and self.simulations is not None:
                self.simulations.finish()
            if status == "completed" or newer_in_memory(self.run.path) is None:
                remove_memory(self.run.path)
        except Exception as failure:  # noqa: BLE001 - it becomes the run's error, unless there is an earlier one
            if isinstance(failure, StorageError) and status != "failed":
                refused = failure
            status, error = "failed", error or f"{type(failure).__name__}: {failure}"
        summary = self.monitor.close(
            status,
            totals,
            reason,
            error,
            checkpoint=self.last_checkpoint,
            checkpoint_pauses_s=self.pauses_s,
            simulations=None if self.simulations is None else self.simulations.summary(),
        )
        if refused is not None:
            raise refused
        return summary


class PartCollector:
    """Receives the trainers' parts of one checkpoint after the other, and commits each when all have arrived.

    Thread-safe. A trainer takes part in the next checkpoint only when its part of the last one has arrived, so one is
    collected at a time. Until then what is staged and the chunks that arrived are in memory, in addition to what the
    writer holds. The part of a trainer that is lost before it has arrived is replaced by its substitute.
    """

    def __init__(self, checkpoints: CheckpointManager) -> None:
        self._checkpoints = checkpoints
        self._lock = threading.Lock()
        self._staged: StagedCheckpoint | None = None
        self._parts: dict[int, ChunkedFile | Mapping[str, Any]] = {}
        self._substitutes: dict[int, Mapping[str, Any]] = {}
        self._arrived: set[int] = set()
        self._pause_s = 0.0

    def start(
        self,
        staged: StagedCheckpoint,
        taking_part: Set[int],
        substitutes: Mapping[int, Mapping[str, Any]],
        pause_s: float = 0.0,
    ) -> None:
        """Collect the parts of ``staged`` from now on, of the trainers ``taking_part``.

        The substitute of a trainer is the part of one that sends none, or is lost before it has. Training stopped in
        this process for ``pause_s``.
        """
        with self._lock:
            assert self._staged is None, "a trainer waits for its last part before it takes part in a checkpoint"
            self._staged, self._arrived, self._pause_s = staged, set(), pause_s
            self._substitutes = dict(substitutes)
            self._parts = {**self._substitutes, **{index: ChunkedFile() for index in taking_part}}

    def replace(self, trainer_index: int) -> None:
        """Do not wait for the part of a lost trainer."""
        with self._lock:
            if self._staged is None or trainer_index not in self._missing():
                return
            self._parts[trainer_index] = self._substitutes[trainer_index]
        self.commit_if_complete()

    def add_chunk(self, trainer_index: int, step: int, chunk: Tensor) -> None:
        """Append a chunk, of bytes, to a trainer's file.

        Raises:
            TrainingError: no staged checkpoint of that step waits for it.
        """
        with self._lock:
            self._expected(trainer_index, step).append(chunk.numpy())

    def finish_part(self, trainer_index: int, step: int, pause_s: float) -> None:
        """Complete a trainer's part; ``commit_if_complete`` follows.

        Raises:
            TrainingError: no staged checkpoint of that step waits for it.
        """
        with self._lock:
            self._expected(trainer_index, step)
            self._arrived.add(trainer_index)
            self._pause_s = max(self._pause_s, pause_s)

    def commit_if_complete(self) -> None:
        """Commit the checkpoint if the part was the last one.

        Raises:
            Exception: see ``CheckpointManager.commit``.
        """
        with self._lock:
            if self._staged is None or self._missing():
                return
            staged, parts, pause_s = self._staged, self._parts, self._pause_s
            self._staged, self._parts, self._substitutes = None, {}, {}
        # Without the lock: without ``checkpoint.background`` this writes to disk.
        self._checkpoints.commit(staged, parts, pause_s)

    def _missing(self) -> set[int]:
        """Return the trainers whose parts have not arrived. Called with the lock held."""
        return {i for i, part in self._parts.items() if isinstance(part, ChunkedFile)} - self._arrived

    def _expected(self, trainer_index: int, step: int) -> ChunkedFile:
        if self._staged is None or self._staged.step != step or trainer_index not in self._missing():
            raise TrainingError(f"trainer {trainer_index}: a part of step {step} must follow the staging of that step")
        part = self._parts[trainer_index]
        assert isinstance(part, ChunkedFile)
        return part

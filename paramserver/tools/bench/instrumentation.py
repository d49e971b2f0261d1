"""The user's task with instrumentation: benchmarks train it in place of the task itself."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]

from paramserver.importing import load_object
from paramserver.sources.base import Partition
from paramserver.task import Task, check_task_class, construct_task
from paramserver.tools.bench.slowdown import Slowdown, SlowdownSpec
from paramserver.tools.bench.step_stamps import StepStamps, register_process

BARRIER_TIMEOUT_S = 120.0
# One to warm up, and one at the end, which another trainer may have ended before.
LEAST_ROUNDS = 4


def file_barrier(file: Path, number: int, count: int) -> None:
    """Block until ``count`` processes have called this, for at most ``BARRIER_TIMEOUT_S``; they count from 0."""
    store = FileStore(str(file), count)
    store.set(f"here-{number}", "")
    store.wait([f"here-{i}" for i in range(count)], timedelta(seconds=BARRIER_TIMEOUT_S))


class StepObserver:
    """Records the steps of the trainer in this process.

    The steps are written to the ``folder`` of the run. ``slow`` has the fields of a ``SlowdownSpec``; None without a
    straggler. This run is number ``number`` among ``of`` runs of one trainer each, which start together; None for one
    run with all trainers. The run ends once this trainer has trained ``stop_after_s`` seconds and ``LEAST_ROUNDS``
    steps; None where a limit ends it.
    """

    def __init__(
        self,
        folder: Path,
        slow: Mapping[str, Any] | None,
        seed: int,
        number: int | None = None,
        of: int = 1,
        stop_after_s: float | None = None,
    ) -> None:
        self._folder, self._seed, self._number, self._of = folder, seed, number, of
        self._stop_after_s, self._trained_s = stop_after_s, 0.0
        self._slow = None if slow is None else SlowdownSpec(**slow)
        self.model_bytes = 0
        self.slowdown: Slowdown | None = None
        register_process(folder)

    def begin(self, trainer: Any) -> None:
        """Call when the trainer is connected, before its first step."""
        index = trainer.trainer_index if self._number is None else self._number
        if self._slow is not None:
            self.slowdown = Slowdown(self._slow, self._seed, index)
        self._trainer = trainer
        self._stamps = StepStamps(trainer.trainer_index, os.getpid(), self.model_bytes)
        # Both are not 0 where samples were served or bytes sent before the first step.
        self._samples, self._wire_bytes = trainer.progress.samples_served, trainer.wire_bytes
        trainer.clock.on_step = self._on_step
        if self._number is not None:
            file_barrier(self._folder.parent / "barrier", self._number, self._of)

    def _on_step(self, end: float, seconds: float, phases: Mapping[str, float]) -> None:
        samples, wire_bytes = self._trainer.progress.samples_served, self._trainer.wire_bytes
        self._stamps.add(end, seconds, samples - self._samples, wire_bytes - self._wire_bytes, phases)
        self._samples, self._wire_bytes = samples, wire_bytes
        self._trained_s += seconds
        if self._stop_after_s is None or self._trained_s < self._stop_after_s:
            return
        if len(self._stamps.steps) >= LEAST_ROUNDS:
            self._trainer.stop("enough rounds are measured")

    def end(self) -> None:
        self._trainer.clock.on_step = None
        self._stamps.write(self._folder)


class _EndingScheduler:
    """A scheduler that keeps its learning rates once it has been stepped ``steps`` times."""

    def __init__(self, scheduler: Any, steps: int) -> None:
        self._scheduler, self._left = scheduler, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def step(self, *metrics: Any) -> None:
        if self._left > 0:
            self._left -= 1
            self._scheduler.step(*metrics)


def ending(built: Any, ends: Mapping[str, int | None], every: str = "step") -> Any:
    """Return what ``build_scheduler`` has returned, with schedulers that are stepped until their end only.

    ``ends`` has the number of steps by interval, None where it is unknown.
    """
    if isinstance(built, Mapping):
        every = built.get("every", every)
        return {name: ending(one, ends, every) for name, one in built.items()}
    if isinstance(built, (list, tuple)):
        return [ending(one, ends) for one in built]
    # OneCycleLR refuses a step after its total_steps.
    known = [end for end in (ends.get(every), getattr(built, "total_steps", None)) if isinstance(end, int)]
    return _EndingScheduler(built, min(known)) if known and hasattr(built, "step") else built


class ObservedTask(Task):
    """First base of the instrumented class, before the user's class; extends its methods.

    The task sees the ``limits`` of the user's config, of which a schedule takes its length, and not those of the
    benchmark.
    """

    _observer: StepObserver
    _limits: Mapping[str, Any] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "config" and self._limits:
            value = replace(value, training=replace(value.training, **self._limits))
        super().__setattr__(name, value)

    def build_scheduler(self, optimizer: Any) -> Any:
        built, training = super().build_scheduler(optimizer), self.config.training
        # Not counted unless the task has asked: that calls train_source, which may need a trainer.
        steps = training.max_steps and training.max_steps * training.local_steps
        if self._total_steps is not None:
            steps = self._total_steps[1]
        return ending(built, {"step": steps, "epoch": training.max_epochs})

    def build_model(self) -> nn.Module:
        model = super().build_model()
        if isinstance(model, nn.Module):  # otherwise the caller refuses it
            trained = [p for p in model.parameters() if p.requires_grad]
            self._observer.model_bytes = sum(p.numel() * p.element_size() for p in trained)
        return model

    def on_train_start(self) -> None:
        super().on_train_start()
        self._observer.begin(self.trainer)

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor | None:
        slowdown = self._observer.slowdown
        if slowdown is None:
            return super().training_step(model, batch, batch_idx)
        began = time.perf_counter()
        loss = super().training_step(model, batch, batch_idx)
        slowdown.after_forward(model, loss, time.perf_counter() - began, batch_idx)
        return loss

    def on_train_end(self) -> None:
        self._observer.end()
        super().on_train_end()


class InstrumentedTask(ObservedTask):
    """Constructs the user's ``task`` (a file by its absolute path), with ``ObservedTask`` as the first base."""

    def __new__(
        cls, task: str, task_args: Mapping[str, Any], observer: Mapping[str, Any], limits: Mapping[str, Any]
    ) -> Any:
        user_class = check_task_class(load_object(task, "task"), task)
        names = {"__module__": user_class.__module__, "__doc__": user_class.__doc__}
        # ObservedTask comes first in the order of bases, so that its super() calls reach the user's class.
        made = construct_task(type(user_class.__name__, (ObservedTask, user_class), names), task, task_args)
        assert isinstance(made, ObservedTask)
        made._limits = limits
        made._observer = StepObserver(**{**observer, "folder": Path(observer["folder"])})
        return made  # not an InstrumentedTask, so Python does not call __init__ again

    # Never called; the check of a task's class requires them.

    def build_optimizer(self, model: nn.Module) -> Any:
        raise NotImplementedError

    def train_source(self, partition: Partition) -> Any:
        raise NotImplementedError

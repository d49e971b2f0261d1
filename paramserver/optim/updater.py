"""The optimizer with gradient clipping and the learning-rate schedule: applies an update in every mode."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paramserver.config import TrainingConfig
from paramserver.errors import CheckpointError, TaskError
from paramserver.limits import is_due
from paramserver.optim.averaging import AverageParameters, averages, drop_averages
from paramserver.optim.parallel_step import ParallelStep, ThreadTeam
from paramserver.parameters.numerics import check_gradient_norm
from paramserver.task import Task

_EVERY = ("step", "epoch", "validation")


class Updater:
    """Clips gradients, steps the optimizer and steps the schedule. Used by a trainer (local, ddp) or a server (rpc).

    Gradients are read from ``parameter.grad``; a parameter without one is not stepped, as in torch.optim.

    Args:
        task: builds the optimizer and the scheduler.
        model: whose parameters are optimized.
        training: ``clip_grad_norm``, ``ema_decay`` and ``validate_every`` are used.

    Raises:
        TaskError: the optimizer needs a closure, or the scheduler cannot be stepped.

    Example::

        >>> from paramserver import Task
        >>> class Line(Task):
        ...     def build_model(self): return nn.Linear(1, 1)
        ...     def build_optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.5)
        ...     def train_source(self, partition): return None
        ...     def training_step(self, model, batch, batch_idx): return model(batch).sum()
        >>> model = nn.Linear(1, 1)
        >>> updater = Updater(Line(), model, TrainingConfig())
        >>> updater.lr
        (0.5,)
    """

    def __init__(self, task: Task, model: nn.Module, training: TrainingConfig) -> None:
        # The optimizer first: a scheduler keeps a reference to it and sets its learning rates already when it is built.
        self.optimizer = build_optimizer(task, model, training.ema_decay)
        names = {id(p): name for name, p in model.named_parameters()}
        self._names = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        self._averages_parameters = training.ema_decay is not None
        self.scheduler, self.every, self.metric = _scheduler_of(task.build_scheduler(self.optimizer))
        self._parallel_step: ParallelStep | None = None
        self.clip_grad_norm = training.clip_grad_norm
        self.validate_every = training.validate_every
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def apply(self, step: int) -> None:
        """Apply the gradients in ``.grad`` as update number ``step``.

        Raises:
            NotFinite: gradients are clipped and their norm is NaN or infinite; nothing was applied.
        """
        if self.clip_grad_norm is not None:
            # The norm is checked before the first parameter changes: a refused update leaves the version as it was.
            check_gradient_norm(float(nn.utils.clip_grad_norm_(self.parameters, self.clip_grad_norm)), step)
        if self._parallel_step is None:
            self.optimizer.step()
        else:
            self._parallel_step()
        # After the optimizer: torch warns, and skips the first learning rate, in the other order.
        if self.every == "step" and self.scheduler is not None:
            self.scheduler.step()

    def use_threads(self, team: ThreadTeam) -> None:
        """Step parameters with all threads of ``team`` from now on, if the optimizer allows it."""
        if ParallelStep.supports(self.optimizer):
            self._parallel_step = ParallelStep(self.optimizer, team)

    def on_update(self) -> None:
        """Step the schedule after an update that several servers have applied."""
        if self.every == "step":
            self._step_scheduler()

    def on_epoch_end(self) -> None:
        """Step a schedule of epochs."""
        if self.every == "epoch":
            self._step_scheduler()

    def on_validation_end(self, step: int, values: Mapping[str, float]) -> None:
        """Step a schedule of validations; ReduceLROnPlateau receives its metric.

        A validation that is made only because the run ends does not count: a run that is resumed later must continue as
        if it had not ended.
        """
        if self.every != "validation" or not is_due(step, self.validate_every):
            return
        if self.metric is not None and self.metric not in values:
            raise TaskError(
                f"the scheduler follows metric ({self.metric}), which validation_step does not return; "
                f"it returns {', '.join(sorted(values)) or 'nothing'}"
            )
        self._step_scheduler(None if self.metric is None else values[self.metric])

    def _step_scheduler(self, metric: float | None = None) -> None:
        if self.scheduler is None:
            return
        if metric is None:
            self.scheduler.step()
        else:
            self.scheduler.step(metric)

    @property
    def lr(self) -> tuple[float, ...]:
        """The learning rate of each parameter group."""
        rates = []
        for group in self.optimizer.param_groups:
            # A user's optimizer may have no learning rate.
            if "lr" in group:
                rates.append(float(group["lr"]))
        return tuple(rates)

    def averages(self, states: Mapping[int, Mapping[str, Any]] | None = None) -> dict[str, Tensor]:
        """Return the average of each parameter that was stepped, by name; empty without ``training.ema_decay``.

        Args:
            states: of the optimizer, by parameter; None for those of this process.
        """
        return averages(self.optimizer.state_dict()["state"] if states is None else states, self._names)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of ``optimizer`` and ``scheduler`` (None without one)."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"optimizer": self.optimizer.state_dict(), "scheduler": scheduler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ``state_dict()``.

        Raises:
            CheckpointError: it is of another optimizer or scheduler.
        """
        _load(self.optimizer, state["optimizer"])
        if not self._averages_parameters:
            drop_averages(self.optimizer)
        if self.scheduler is not None and state.get("scheduler") is not None:
            _load(self.scheduler, state["scheduler"])
            # The steps before the stop count; otherwise a schedule that is stepped first warns that there were none.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]


def _load(owner: Any, state: dict[str, Any]) -> None:
    """Call ``owner.load_state_dict(state)``; refuse the state of another class, which torch notices late or never."""
    cause: Exception | None = None
    try:
        owner.load_state_dict(state)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        cause = error
    defaults = set(getattr(owner, "defaults", ()))
    # If torch accepted it, the groups are those of the owner now, and what another torch version lacked is filled in.
    groups = owner.param_groups if cause is None and defaults else state.get("param_groups", ())
    lacking = sorted({name for group in groups for name in defaults - set(group)})
    if lacking or cause is not None:
        reason = f"its groups lack {', '.join(lacking)}" if lacking else f"{type(cause).__name__}: {cause}"
        raise CheckpointError(
            f"the stored state is not one of this {type(owner).__name__} ({reason}); resume with the task and the "
            "task_args that it was stored with"
        ) from cause


def build_optimizer(task: Task, model: nn.Module, ema_decay: float | None = None) -> torch.optim.Optimizer:
    """Return the task's optimizer, which also averages the parameters if there is a decay.

    Raises:
        TaskError: it needs a closure, or is not an optimizer of this model.
    """
    optimizer = task.build_optimizer(model)
    _check_optimizer(optimizer, model, type(task).__name__)
    if ema_decay is not None:
        optimizer.register_step_post_hook(AverageParameters(ema_decay))
    return optimizer


def _check_optimizer(optimizer: object, model: nn.Module, task_name: str) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(
            f"{task_name}.build_optimizer returned {type(optimizer).__name__}; it must return a torch.optim.Optimizer"
        )
    # Refused now: gradients come from trainers, so a step on the server has no loss to evaluate.
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TaskError(
            f"{type(optimizer).__name__} needs a closure, which evaluates the loss again inside a step; "
            "use an optimizer whose step() takes none"
        )
    # By identity: ``==`` of tensors compares their elements.
    known = {id(p) for p in model.parameters()}
    unknown = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if unknown:
        raise TaskError(
            f"{task_name}.build_optimizer optimizes {unknown} tensor(s) that are not parameters of the model it was "
            "given; take them from model.parameters()"
        )


def _scheduler_of(built: Any) -> tuple[Any, str, str | None]:
    """Return the scheduler, when it is stepped, and its metric, from the result of ``Task.build_scheduler``."""
    if built is None:
        return None, "step", None
    spec = built if isinstance(built, dict) else {"scheduler": built}
    unknown = set(spec) - {"scheduler", "every", "metric"}
    scheduler, every, metric = spec.get("scheduler"), spec.get("every", "step"), spec.get("metric")
    if unknown or not callable(getattr(scheduler, "step", None)):
        raise TaskError(
            'build_scheduler must return None, a scheduler, or {"scheduler": ..., "every": ..., "metric": ...}; '
            f"got {built!r}"
        )
    if every not in _EVERY:
        raise TaskError(f"build_scheduler: every ({every!r}) must be one of {', '.join(_EVERY)}")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and metric is None:
        raise TaskError(
            'ReduceLROnPlateau needs a metric; return {"scheduler": s, "every": "validation", "metric": "loss"}'
        )
    if metric is not None and every != "validation":
        raise TaskError(f'build_scheduler: metric ({metric!r}) needs every="validation"')
    return scheduler, every, metric

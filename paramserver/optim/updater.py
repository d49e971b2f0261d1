"""The optimizer with gradient clipping and the learning-rate schedule: applies an update in every mode."""

from __future__ import annotations

import copy
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paramserver.checkpoint.staging import RowStream
from paramserver.config import TrainingConfig
from paramserver.errors import CheckpointError, NotFinite, TaskError, UnsupportedConfiguration
from paramserver.limits import is_due
from paramserver.metrics.profile import spanned
from paramserver.metrics.records import LOG_IN_VALIDATION
from paramserver.optim.averaging import AverageParameters, averages, restore_averages
from paramserver.optim.clipping import clipping_of
from paramserver.optim.named_optimizers import (
    JointOptimizer,
    NamedOptimizers,
    SeveralOptimizers,
    by_position,
    joined_states,
    optimizers_of,
    unpacked,
)
from paramserver.optim.outer import OptimizerBuilder, OuterBuilder
from paramserver.optim.parallel_step import generators_of_update
from paramserver.optim.row_steps import drop_row_versions, record_rows
from paramserver.parameters.tables import changed_by_gradients, coalesce_gradients, opt_out_of_checks

_log = logging.getLogger("paramserver")

_EVERY = ("step", "epoch", "validation")


class UpdaterState(ABC):
    """The state of optimizer and schedule, and the names of the parameters in the order of the optimizer.

    ``tables`` are large embedding tables on servers, by the addresses of their weights, with their names. These and
    optimizer state with their rows are streams that may be read until ``release``, which any thread may call.
    """

    parameter_names: Sequence[str]
    validates_averages: bool
    tables: Mapping[int, tuple[str, RowStream]] = {}

    def release(self) -> None:
        """Do nothing: a checkpoint has copies of everything."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def averages(self) -> dict[str, Tensor]: ...


class Updater(UpdaterState):
    """Clips gradients, steps the optimizer and steps the schedule: of a trainer (local, ddp).

    On a server (rpc) it has the schedule and the state, and the optimizer is stepped by ``ShardUpdater``.

    Gradients are read from ``parameter.grad``; a parameter without one is not stepped, as in torch.optim.

    Raises:
        TaskError: the optimizer needs a closure, or the scheduler cannot be stepped.
        UnsupportedConfiguration: there are several optimizers, and ``accumulate_batches`` is above 1.
    """

    def __init__(self, task: OptimizerBuilder, model: nn.Module, training: TrainingConfig, seed: int = 0) -> None:
        # The optimizer first: a scheduler keeps a reference to it and sets its learning rates already when it is built.
        self.optimizer = build_optimizer(task, model, training)
        names = {id(p): name for name, p in model.named_parameters()}
        # In the order in which their states are numbered.
        self.parameter_names = [names[id(p)] for p in parameters_of(self.optimizer)]
        self._group_sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        self._averages_parameters = training.ema_decay is not None
        # The names of the parameters of each optimizer, by its name; empty if all are stepped together.
        self.parameters_of: dict[str, tuple[str, ...]] = {}
        if isinstance(self.optimizer, SeveralOptimizers) and self.optimizer.takes_turns:
            if training.accumulate_batches > 1:
                raise UnsupportedConfiguration(
                    f"training.accumulate_batches ({training.accumulate_batches}) must be 1 with several optimizers "
                    f"({', '.join(self.optimizer.by_name)}), as each call of self.trainer.optimize is a step; set a "
                    "larger training.batch_size"
                )
            for name, own in self.optimizer.by_name.items():
                self.parameters_of[name] = tuple(names[id(p)] for p in parameters_of(own))
        self._with_modes = [SwitchedOptimizer(own) for own in optimizers_of(self.optimizer) if has_modes(own)]
        # The class of an optimizer that has ``train()`` and ``eval()``; None if there is none.
        self.with_modes = next((type(switched.optimizer).__name__ for switched in self._with_modes), None)
        # Whether validations are of ``averages()`` in place of the parameters.
        self.validates_averages = self._averages_parameters or bool(self._with_modes)
        for own in optimizers_of(self.optimizer) if training.ema_decay is not None else ():
            reason = "whose eval() gives the parameters that are validated" if has_modes(own) else None
            if "state" not in own.state_dict():
                reason = "whose state_dict() has no entry state, where averages are kept"
            if reason is not None:
                raise UnsupportedConfiguration(
                    f"training.ema_decay ({training.ema_decay}) must be null with {type(own).__name__}, {reason}; "
                    "leave it out"
                )
        for switched in self._with_modes:
            with copied_parameters(switched.optimizer):
                switched.optimizer.train()
        self._schedules = _schedules_of(task, self.optimizer)
        # The most steps of a schedule: known if the task has asked, and if all optimizers are stepped once for a batch.
        self._total_steps: int | None = None
        has_asked = getattr(task, "_total_steps", None) is not None
        if has_asked and not isinstance(task, OuterBuilder) and not self.parameters_of:
            self._total_steps = task.total_steps
        self._has_ended = False
        self._seed = seed
        self.clipping = clipping_of(training)
        self.skipping = Skipping(training)
        self.validate_every = training.validate_every
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._tables = changed_by_gradients(model)
        # Of the last update: a schedule that was stepped after it has changed those of the next one.
        self.applied_lr = self.lr

    @spanned("apply")
    def apply(self, step: int, optimizer: str = "") -> None:
        """Apply the gradients in ``.grad`` of the parameters of an optimizer as update number ``step``.

        Its name is empty if all are stepped together.

        Raises:
            NotFinite: gradients are clipped and their norm is NaN or infinite; nothing was applied.
            TaskError: the groups of the optimizer have other parameters than at the start; nothing was applied.
        """
        self._check_groups()
        coalesce_gradients(self.parameters)
        if self.clipping is not None:
            # Refused before the first parameter changes, so that the version stays as it was.
            self.clipping.clip(self.parameters, step)
        with generators_of_update(self.optimizer, self._seed, step):
            self.optimizer.step()
        record_rows(self.optimizer, step, self._tables)
        # After the optimizer: torch warns, and skips the first learning rate, in the other order.
        self.on_update(optimizer)

    def clear_gradients(self) -> None:
        """Release all gradients of the model, also those of parameters that are in no optimizer."""
        for parameter in self.parameters:
            parameter.grad = None

    def on_update(self, optimizer: str = "") -> None:
        """Step the schedule of an optimizer that has been stepped; of all of them if the name is empty."""
        self.applied_lr = self.lr
        for name, schedule in self._schedules.items():
            if optimizer in ("", name) and schedule.every == "step" and not self._is_over(schedule):
                schedule.scheduler.step()

    def _is_over(self, schedule: _Schedule) -> bool:
        """Return whether a schedule has reached its end: updates follow that were not to be expected."""
        steps, total = getattr(schedule.scheduler, "last_epoch", 0) - schedule.first, self._total_steps
        if total is None or steps < total:
            return False
        if not self._has_ended:
            self._has_ended = True
            _log.warning("more updates are made than self.total_steps (%d) of the task; its schedule has ended", total)
        return True

    def on_missed_update(self) -> None:
        """Step the schedules where another process has made an update, so that records have its learning rates."""
        for optimizer in optimizers_of(self.optimizer):
            optimizer._opt_called = True  # type: ignore[attr-defined]  # as in ``load_state_dict``
        self.on_update()

    def on_epoch_end(self) -> None:
        for schedule in self._schedules.values():
            if schedule.every == "epoch":
                schedule.scheduler.step()

    def on_validation_end(self, step: int, values: Mapping[str, float] | None, since: int | None = None) -> None:
        """Step schedules of validations; ReduceLROnPlateau receives its metric, unless there are no values (None).

        A validation that is made only because the run ends does not count: a run that is resumed later must continue as
        if it had not ended.
        """
        if not is_due(step, self.validate_every, since=since):
            return
        for schedule in self._schedules.values():
            if schedule.every != "validation":
                continue
            if schedule.metric is None:
                schedule.scheduler.step()
            elif values is not None and schedule.metric in values:
                schedule.scheduler.step(values[schedule.metric])
            elif values is not None:
                raise TaskError(
                    f"the scheduler follows metric ({schedule.metric}), which validation_step does not return; "
                    f"it returns {', '.join(sorted(values)) or 'nothing'}; {LOG_IN_VALIDATION}"
                )

    @property
    def lr(self) -> tuple[float, ...]:
        """The learning rate of each parameter group that has one, now: an optimizer may compute it in each step."""
        return tuple(float(g["lr"]) for g in self.optimizer.param_groups if g.get("lr") is not None)

    def averages(self, states: Mapping[int, Mapping[str, Any]] | None = None) -> dict[str, Tensor]:
        """Return what is validated in place of a parameter, by its name; empty if the parameters are.

        The states of the optimizer are those of this process, unless they are given.
        """
        if self._with_modes:
            with self._evaluation_mode() as evaluated:
                return evaluated
        if states is None:
            states = joined_states(self.optimizer, self.optimizer.state_dict())
        return averages(states, self.parameter_names)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of ``optimizer`` and ``scheduler`` (None without one); of several, by name or in a list.

        Optimizers that have modes are in ``eval()``. Their ``parameters`` are then given as they are in ``eval()``,
        which belong to that state, and as they are trained.
        """
        if not self._with_modes:
            return self._state_dict()
        named = zip(self.parameter_names, parameters_of(self.optimizer), strict=True)
        trained = {name: p.detach() for name, p in named}
        with self._evaluation_mode() as evaluated:
            state = copy.deepcopy(self._state_dict())  # ``train()`` may write to the state of an optimizer
        return {**state, "parameters": {"eval": evaluated, "train": trained}}

    @contextmanager
    def _evaluation_mode(self) -> Iterator[dict[str, Tensor]]:
        """Let the optimizers that have modes be in ``eval()``; yields copies of their parameters, by name."""
        names = dict(zip(map(id, parameters_of(self.optimizer)), self.parameter_names, strict=True))
        with ExitStack() as stack:
            for switched in self._with_modes:
                stack.enter_context(switched.evaluation_mode())
            parameters = [p for switched in self._with_modes for p in parameters_of(switched.optimizer)]
            yield {names[id(p)]: p.detach().clone() for p in parameters}

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in zip(self.parameter_names, parameters_of(self.optimizer), strict=True):
            if name in values:
                parameter.copy_(values[name])

    def _check_groups(self) -> None:
        """Refuse groups that were added or extended: a resume begins with those of ``build_optimizer``."""
        now, before = [len(group["params"]) for group in self.optimizer.param_groups], self._group_sizes
        if now != before:
            raise TaskError(
                f"the optimizer has {sum(now)} parameters in {len(now)} groups, and build_optimizer gave it "
                f"{sum(before)} in {len(before)}, so no checkpoint of it could be resumed; give it all parameters in "
                "build_optimizer, and let a hook freeze those of later groups until then"
            )

    def _state_dict(self) -> dict[str, Any]:
        self._check_groups()
        states = {name: schedule.scheduler.state_dict() for name, schedule in self._schedules.items()}
        scheduler = self.optimizer.pack(states) if isinstance(self.optimizer, SeveralOptimizers) else states.get("")
        state = {"optimizer": self.optimizer.state_dict(), "scheduler": scheduler}
        return {**state, "skipping": self.skipping.state_dict()} if self.skipping.is_possible else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ``state_dict()``. If it has no ``parameters`` of ``eval()``, the model has these.

        Raises:
            CheckpointError: it is of another optimizer or scheduler.
        """
        by_name, stored, schedules = {"": self.optimizer}, {"": state["optimizer"]}, {"": state.get("scheduler")}
        if isinstance(self.optimizer, SeveralOptimizers):
            by_name, stored = self.optimizer.by_name, unpacked(state["optimizer"])
            schedules = unpacked(state.get("scheduler") or {})
            if stored.keys() != by_name.keys():
                found = "one optimizer" if "param_groups" in stored else f"optimizers {', '.join(map(str, stored))}"
                raise CheckpointError(
                    f"the stored state has {found}, and build_optimizer returns {', '.join(by_name)}; resume with the "
                    "task and the task_args that it was stored with"
                )
        parameters = state.get("parameters", {})
        for switched in self._with_modes:
            # Before the state is loaded, as the mode of an optimizer may not be part of it.
            with copied_parameters(switched.optimizer):
                switched.optimizer.eval()
        self._write(parameters.get("eval", {}))
        for name, optimizer in by_name.items():
            _load(optimizer, stored[name])
            _check_loaded(optimizer, stored[name])
            if isinstance(getattr(optimizer, "state", None), Mapping):
                restore_averages(optimizer, self._averages_parameters)
                drop_row_versions(optimizer, self._tables)
            if name in self._schedules and (own := schedules.get(name)) is not None:
                _load(self._schedules[name].scheduler, own)
                # The steps before the stop count; otherwise a schedule that is stepped first warns of that.
                optimizer._opt_called = True  # type: ignore[attr-defined]
        for switched in self._with_modes:
            switched.optimizer.train()
        # What ``train()`` makes of the parameters of ``eval()`` is rounded.
        self._write(parameters.get("train", {}))
        if (skipping := state.get("skipping")) is not None:
            self.skipping.load_state_dict(skipping)
        self.applied_lr = self.lr


def _load(owner: Any, state: dict[str, Any]) -> None:
    """Call ``owner.load_state_dict(state)``; refuse the state of another class, which torch notices late or never."""
    cause: Exception | None = None
    # Not all of ``defaults``: torch adds some to it when a state is loaded, which no group has.
    needed = set(getattr(owner, "defaults", None) or ())
    needed = needed.intersection(*getattr(owner, "param_groups", ()))
    try:
        owner.load_state_dict(state)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        cause = error
    # If it was accepted, the groups are those of the owner now, and what another torch version lacked is filled in.
    groups: Sequence[Mapping[str, Any]] = ()
    if needed:
        groups = owner.param_groups if cause is None else state.get("param_groups", ())
    lacking = sorted({name for group in groups for name in needed - set(group)})
    if lacking or cause is not None:
        reason = f"its groups lack {', '.join(lacking)}" if lacking else f"{type(cause).__name__}: {cause}"
        raise CheckpointError(
            f"the stored state is not one of this {type(owner).__name__} ({reason}); resume with the task and the "
            "task_args that it was stored with"
        ) from cause


def _check_loaded(optimizer: torch.optim.Optimizer, stored: Mapping[str, Any]) -> None:
    """Give each entry of the state the type that it was stored with; refuse an optimizer that has taken over nothing.

    ``torch.optim.Optimizer.load_state_dict`` converts every tensor but a step to the type of its parameter, and makes
    another text of a text.
    """
    if not (stored.get("state") and "param_groups" in stored):
        return  # a layout of the optimizer's own
    states, own = stored["state"], getattr(optimizer, "state", {})
    if not optimizer.state_dict().get("state"):
        raise CheckpointError(
            f"{type(optimizer).__name__}.load_state_dict does not take over what its state_dict returns; define both, "
            "for what the optimizer wraps too"
        )
    numbers = [number for group in stored["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=True):
        if number in states and parameter in own:
            own[parameter] = _as_stored(own[parameter], states[number])


def _as_stored(own: Any, value: Any) -> Any:
    if isinstance(own, Tensor) and isinstance(value, Tensor):
        is_cast = own.dtype != value.dtype and own.shape == value.shape and torch.equal(own, value.to(own))
        return value.to(own.device, copy=True) if is_cast else own
    if isinstance(own, dict) and isinstance(value, dict):
        return type(own)((name, _as_stored(item, value[name]) if name in value else item) for name, item in own.items())
    if isinstance(own, (list, tuple)) and type(own) is type(value) and len(own) == len(value):
        return type(own)(map(_as_stored, own, value))
    return value if isinstance(value, (str, bytes)) else own


def build_optimizer(task: OptimizerBuilder, model: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """Return the task's optimizer, which also averages the parameters if there is a decay.

    Raises:
        TaskError: it needs a closure, or is not an optimizer of this model.
    """
    opt_out_of_checks(model)
    built: Any = task.build_optimizer(model)
    task_name, where = type(task).__name__, ""
    kind: type[SeveralOptimizers] | None = None
    by_name: dict[str, torch.optim.Optimizer] = {"": built}
    if isinstance(built, Mapping):
        kind, by_name = NamedOptimizers, dict(built)
    elif isinstance(built, (list, tuple)):
        kind, by_name, where = JointOptimizer, by_position(built), " at position {} of a list"
    for name, optimizer in by_name.items():
        _check_optimizer(optimizer, model, task_name, where.format(name))
        _initialize(optimizer)
        if training.ema_decay is not None:
            optimizer.register_step_post_hook(AverageParameters(training.ema_decay))
    if kind is None:
        return by_name[""]
    _check_names(by_name, model, task_name)
    return kind(by_name)


def _initialize(optimizer: torch.optim.Optimizer) -> None:
    """Give hooks to an optimizer that does not call ``Optimizer.__init__``, as torch does for one that is unpickled."""
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        if not hasattr(optimizer, "defaults"):
            optimizer.defaults = {}
        torch.optim.Optimizer.__setstate__(optimizer, {})
    if not isinstance(state := optimizer.state_dict(), dict):
        raise TaskError(
            f"{type(optimizer).__name__}.state_dict() returned {type(state).__name__}; it must return a dict, as "
            "that of torch.optim.Optimizer does"
        )


def _check_names(by_name: Mapping[str, torch.optim.Optimizer], model: nn.Module, task_name: str) -> None:
    if not by_name:
        raise TaskError(f"{task_name}.build_optimizer returned no optimizer; it must return at least one")
    if any(not isinstance(name, str) or not name for name in by_name):
        raise TaskError(
            f"{task_name}.build_optimizer returned a dict with the keys {list(by_name)}; they must be the names of the "
            "optimizers, as text that is not empty"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    owners: dict[int, str] = {}
    for name, optimizer in by_name.items():
        for parameter in parameters_of(optimizer):
            if (owner := owners.setdefault(id(parameter), name)) != name:
                raise TaskError(
                    f"{task_name}.build_optimizer gives {names[id(parameter)]} to two optimizers ({owner}, {name}); "
                    "give each parameter to one of them"
                )


def _check_optimizer(optimizer: object, model: nn.Module, task_name: str, where: str = "") -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(
            f"{task_name}.build_optimizer returned {type(optimizer).__name__}{where}; it must return a "
            "torch.optim.Optimizer, a list of them that step together, or a dict of them by name"
        )
    if hasattr(optimizer, "consolidate_state_dict"):
        raise TaskError(
            f"{type(optimizer).__name__} divides its state among ranks, which a checkpoint of rank 0 lacks; use the "
            "optimizer that it wraps"
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
    unknown = sum(id(p) not in known for p in parameters_of(optimizer))
    if unknown:
        raise TaskError(
            f"{task_name}.build_optimizer optimizes {unknown} tensor(s) that are not parameters of the model it was "
            "given; take them from model.parameters()"
        )


@dataclass(frozen=True)
class _Schedule:
    """A scheduler, when it is stepped, the metric that it is given, and its count of steps before the first one."""

    scheduler: Any
    every: str
    metric: str | None
    first: int


def _schedules_of(task: OptimizerBuilder, optimizer: torch.optim.Optimizer) -> dict[str, _Schedule]:
    """Return the schedule of each optimizer that has one, by its name; empty is that of a single one."""
    try:
        built = _built_schedulers(task, optimizer)
    except AttributeError as error:
        if error.name != "total_steps":
            raise
        raise TaskError(
            "build_scheduler: total_steps is an attribute of the task, not of its trainer; write self.total_steps"
        ) from error
    schedules = {name: _schedule_of(own) for name, own in built.items() if own is not None}
    by_name = optimizer.by_name if isinstance(optimizer, SeveralOptimizers) else {"": optimizer}
    for name, schedule in schedules.items():
        scheduled = getattr(schedule.scheduler, "optimizer", by_name[name])
        if not isinstance(scheduled, torch.optim.Optimizer):
            continue
        # One that wraps another has the same groups.
        if not {*map(id, scheduled.param_groups)} & {*map(id, by_name[name].param_groups)}:
            raise TaskError(
                f"build_scheduler returned a {type(schedule.scheduler).__name__} of another "
                f"{type(scheduled).__name__} than it was given, whose learning rate would not change; make it with the "
                "argument of build_scheduler"
            )
    return schedules


def _built_schedulers(task: OptimizerBuilder, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    if isinstance(optimizer, JointOptimizer):
        return _schedulers_of_list(task.build_scheduler(optimizers_of(optimizer)), optimizers_of(optimizer))
    if not isinstance(optimizer, NamedOptimizers):
        return {"": task.build_scheduler(optimizer)}
    built = task.build_scheduler(optimizer.by_name) or {}
    if not isinstance(built, Mapping) or built.keys() - optimizer.by_name.keys():
        raise TaskError(
            f"build_scheduler must return None or a dict of schedulers by the names of the optimizers "
            f"({', '.join(optimizer.by_name)}); got {built!r}"
        )
    return built


def _schedulers_of_list(built: Any, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the schedulers of a list of optimizers; a single one is that of the optimizer that it was built with."""
    if not isinstance(built, (list, tuple)):
        own = getattr(built.get("scheduler") if isinstance(built, dict) else built, "optimizer", None)
        return {str(next((n for n, optimizer in enumerate(optimizers) if optimizer is own), 0)): built}
    if len(built) != len(optimizers):
        raise TaskError(
            f"build_scheduler returned a list of {len(built)}; it must have one entry for each of the "
            f"{len(optimizers)} optimizers, None for one without a scheduler"
        )
    return by_position(built)


def _schedule_of(built: Any) -> _Schedule:
    spec = built if isinstance(built, dict) else {"scheduler": built}
    unknown = set(spec) - {"scheduler", "every", "metric"}
    scheduler, every, metric = spec.get("scheduler"), spec.get("every", "step"), spec.get("metric")
    step = getattr(scheduler, "step", None)
    if unknown or not callable(step):
        raise TaskError(
            'build_scheduler must return None, a scheduler, or {"scheduler": ..., "every": ..., "metric": ...}; '
            f"got {built!r}"
        )
    if not all(callable(getattr(scheduler, name, None)) for name in ("state_dict", "load_state_dict")):
        raise TaskError(
            f"build_scheduler returned a {type(scheduler).__name__}, which must have state_dict and load_state_dict "
            "for checkpoints; write both, or derive it from torch.optim.lr_scheduler.LRScheduler"
        )
    if every not in _EVERY:
        raise TaskError(f"build_scheduler: every ({every!r}) must be one of {', '.join(_EVERY)}")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and metric is None:
        raise TaskError(
            'ReduceLROnPlateau needs a metric; return {"scheduler": s, "every": "validation", "metric": "loss"}'
        )
    if metric is not None and every != "validation":
        raise TaskError(f'build_scheduler: metric ({metric!r}) needs every="validation"')
    given, arguments = ("no argument", []) if metric is None else ("the metric alone", [0.0])
    try:
        inspect.signature(step).bind(*arguments)
    except ValueError:  # its signature is not known
        pass
    except TypeError as error:
        raise TaskError(
            f"build_scheduler returned a {type(scheduler).__name__}, whose step() must take {given} ({error}); derive "
            "a class whose step() gives it what it needs, or use a scheduler of torch.optim.lr_scheduler"
        ) from error
    return _Schedule(scheduler, every, metric, getattr(scheduler, "last_epoch", 0))


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has ``train()`` and ``eval()``."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def copied_parameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replace the memory of the parameters by copies; at the end they have their own again, with no bit changed.

    Other processes may read the parameters meanwhile, and the way from ``train()`` to ``eval()`` and back rounds.
    """
    parameters = parameters_of(optimizer)
    own = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.clone()
    try:
        yield
    finally:
        for parameter, data in zip(parameters, own, strict=True):
            parameter.data = data


class SwitchedOptimizer:
    """Switches an optimizer that has modes, and knows the present one, also where a task calls these methods."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.is_training = False
        optimizer.train = self._recorded(optimizer.train, True)
        optimizer.eval = self._recorded(optimizer.eval, False)

    def _recorded(self, method: Callable[..., Any], is_training: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.is_training = is_training
            return result

        return call

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Let the optimizer be in ``eval()``, with its parameters in other memory (``copied_parameters``)."""
        was_training = self.is_training
        with copied_parameters(self.optimizer):
            self.optimizer.eval()
            try:
                yield
            finally:
                if was_training:
                    self.optimizer.train()


# Steps that are skipped, as their loss or gradient is NaN or infinite, and the scale of losses that follows from them.
# Gradients of float16 have a small range. So the loss is multiplied by a scale, and each gradient divided by it:
# Micikevicius et al., "Mixed precision training", ICLR 2018. The scale is chosen as by ``torch.amp.GradScaler``: it is
# halved where a gradient overflows, and doubled after so many updates without that.


MOST_IN_SUCCESSION = 100

# Those of ``torch.amp.GradScaler``, and what the type of its scale holds.
_INIT_SCALE, _GROWTH, _BACKOFF, _GROWTH_INTERVAL, _MOST = 2.0**16, 2.0, 0.5, 2000, 2.0**127


class Skipping:
    """Counts the steps of each trainer that were skipped in succession, and chooses the scale of the next losses.

    All ranks that make updates have equal ones.

    It is part of the state of the ``Updater``. ``is_possible``: steps may be skipped in this run, and are checked.
    """

    def __init__(self, training: TrainingConfig) -> None:
        self.is_possible = training.may_skip
        self.scale = _INIT_SCALE if training.scales_loss else 1.0
        self.in_succession: dict[int, int] = {}
        self._scales_loss = training.scales_loss
        self._updates = 0  # in succession, with this scale

    def gradients_applied(self, trainers: Iterable[int]) -> None:
        """Note gradients of these trainers in an update that is made once it has more; ``update_made`` follows."""
        for index in trainers if self.in_succession else ():
            self.in_succession.pop(index, None)

    def update_made(self, trainers: Iterable[int], scale: float) -> None:
        """Note an update with gradients of these trainers, whose losses had this scale."""
        self.gradients_applied(trainers)
        if self._scales_loss and scale == self.scale:
            self._updates += 1
            if self._updates == _GROWTH_INTERVAL:
                self.scale, self._updates = min(self.scale * _GROWTH, _MOST), 0

    def step_skipped(self, trainers: Iterable[int], cause: str, scale: float) -> None:
        """Note a step of these trainers that was skipped; ``cause`` and ``scale`` as in ``StepReport``.

        Raises:
            NotFinite: there were too many in succession.
        """
        for index in trainers:
            self.in_succession[index] = self.in_succession.get(index, 0) + 1
        # Not a second time for a step that was taken before the first halved it.
        if self._scales_loss and scale * _BACKOFF < self.scale:
            self.scale, self._updates = scale * _BACKOFF, 0
        if (most := max(self.in_succession.values(), default=0)) >= MOST_IN_SUCCESSION:
            key = "training.precision: float16" if self._scales_loss else "training.nonfinite: skip"
            raise NotFinite(
                f"{most} steps in succession were skipped ({key}), the last one as the {cause} was NaN or infinite; "
                "lower the learning rate, or look at the batches"
            )

    def state_dict(self) -> dict[str, Any]:
        scaling = {"scale": self.scale, "updates": self._updates} if self._scales_loss else {}
        return {"in_succession": dict(self.in_succession), **scaling}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ``state_dict()``; nothing if no step may be skipped now, and no scale if losses had none."""
        if self.is_possible:
            self.in_succession = dict(state["in_succession"])
        if self._scales_loss and "scale" in state:
            self.scale, self._updates = state["scale"], state["updates"]

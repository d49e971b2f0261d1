"""``LightningTask`` trains an unchanged ``LightningModule`` in every mode. docs/lightning.md is the guide.

Lightning itself is imported by the user, with the module: either ``lightning.pytorch`` or ``pytorch_lightning``.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paramserver.buffers import make_buffer
from paramserver.config import mode_of, num_servers_of, num_trainers_of, server_computes
from paramserver.consistency.factory import consistency_class
from paramserver.errors import NoSuchMember, TaskError
from paramserver.importing import source_file
from paramserver.metrics.records import Reduction
from paramserver.rng import LOADERS, random_states, restore_random_states, seed_all
from paramserver.sources import Partition, make_source
from paramserver.sources.data_loader import resolve_reading
from paramserver.task import Task
from paramserver.trainers.validation import eval_mode

# Methods of a LightningModule that are refused, as they would not be called, and what to do in their place. Those of
# test and predict are not called either.
_NOT_CALLED = {
    "backward": "the trainer calls loss.backward()",
    "configure_callbacks": "return callbacks of paramserver from the method callbacks of the task",
    "configure_gradient_clipping": "set training.clip_grad_norm",
    "configure_model": "create the layers in __init__ or setup",
    "configure_sharded_model": "create the layers in __init__ or setup",
    "lr_scheduler_step": "return a scheduler that has a step() of its own",
    "on_before_zero_grad": "use on_train_batch_start",
    "on_validation_model_eval": "validation is in eval() mode",
    "on_validation_model_train": "each layer returns to the mode it had",
    "on_validation_model_zero_grad": "there are no gradients then",
    "optimizer_step": 'return a scheduler with "interval": "step" from configure_optimizers',
    "optimizer_zero_grad": "gradients are set to None before each step",
}
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_REDUCTIONS = ("mean", "sum", "max")


class LightningTask(Task):
    """A task that consists of a ``LightningModule`` and, if it has no data itself, a ``LightningDataModule``.

    Each process trains a copy of the module that it was given; ``model.pt`` is its ``state_dict``.
    ``configure_optimizers`` is called where the parameters are: in mode rpc on the server. What is not supported is
    refused by name.

    Args:
        module: a ``LightningModule`` with automatic optimization.
        datamodule: provides the data that the module itself does not provide.

    Raises:
        TaskError: ``module`` is no ``LightningModule``, or it overrides a method that is not called here.

    Example::

        class Digits(LightningTask):  # named in the config as task: my_lit.py:Digits
            def __init__(self, width=64):
                super().__init__(LitDigits(width), DigitsData())
    """

    def __init__(self, module: Any, datamodule: Any = None) -> None:
        _check(module, datamodule)
        self.module: Any = None
        self.datamodule = datamodule
        self.values: dict[str, float] = {}  # the newest of each name that was logged or validated
        self.resumed: Mapping[str, Any] = {"epoch": 0, "global_step": 0}
        self.is_validating = False
        self._given = module
        self._takes_number = {
            name: _takes_number(getattr(module, name)) for name in ("training_step", "validation_step")
        }
        self._stand_in = TrainerStandIn(self)
        self._loaders: dict[str, Any] = {}
        self._schedules: list[Any] = []
        self._in_batch = False
        self._epoch = -1
        self._first_batch: int | None = None  # of the epoch
        self._sums: dict[str, tuple[str, float, float]] = {}  # of the epoch: reduction, value and weight by name
        self._validation_values: dict[str, Any] | None = None
        self._train_outputs: tuple[Any, Any, int] | None = None
        if _overrides(module, "on_after_backward") or _overrides(module, "on_train_batch_end"):
            # Only then: with this hook gradients are not sent during the backward.
            self.on_batch_end = self._end_batch  # type: ignore[method-assign]

    # Model, optimizer and data.

    def build_model(self) -> nn.Module:
        if server_computes(self.config):
            raise TaskError(
                "server.compute (server) must be trainer for a LightningTask, which trains where its module is; "
                "remove the key"
            )
        module: nn.Module = copy.deepcopy(self._given)
        self.module = module
        # A function, not a bound method: a copy of the module must not copy this task.
        vars(module)["log"] = lambda *args, **kwargs: self._log(*args, **kwargs)
        owners: list[Any] = [owner for owner in (self.datamodule, module) if owner is not None]
        for owner in owners:
            owner.trainer = self._stand_in
            self._prepare_data(owner)
        for owner in owners:
            owner.setup("fit")
        return module

    def _prepare_data(self, owner: Any) -> None:
        """Call ``prepare_data``, in one process of this host at a time: what the first one stored, the others find."""
        if not _overrides(owner, "prepare_data"):
            return
        name = hashlib.sha256(f"{source_file(type(owner))}:{type(owner).__name__}".encode()).hexdigest()[:16]
        lock = FileLock(Path(tempfile.gettempdir()) / f"paramserver-{os.getuid()}-{name}.lock")
        with ExitStack() as stack:
            try:
                stack.enter_context(lock.acquire(timeout=self.config.cluster.timeout_s))
            except Timeout as error:
                raise TaskError(
                    f"{type(owner).__name__}.prepare_data did not end in another process within cluster.timeout_s "
                    f"({self.config.cluster.timeout_s:g} s); increase it, or prepare the data before the run"
                ) from error
            owner.prepare_data()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        module, name = self.module, type(self.module).__name__
        configured = module.configure_optimizers()
        forms = import_module(_base_of(module).__module__.replace(".core.module", ".core.optimizer"))
        try:
            optimizers, schedulers, monitor = forms._configure_optimizers(configured)
            self._schedules = forms._configure_schedulers_automatic_opt(schedulers, monitor)
        except Exception as error:
            raise TaskError(f"{name}.configure_optimizers: {error}") from error
        if len(optimizers) != 1:
            raise TaskError(
                f"{name}.configure_optimizers returned {len(optimizers)} optimizers; a LightningTask needs one, with "
                "groups of parameters where they differ"
            )
        optimizer: torch.optim.Optimizer = optimizers[0]
        if _overrides(module, "on_before_optimizer_step"):
            optimizer.register_step_pre_hook(lambda optimizer, *_: module.on_before_optimizer_step(optimizer))
        return optimizer

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        if not self._schedules:
            return None
        intervals = {("validation", s.monitor) if s.reduce_on_plateau else (s.interval, None) for s in self._schedules}
        if len(intervals) > 1:
            raise TaskError(
                f"{type(self.module).__name__}.configure_optimizers returned schedulers of several intervals or "
                "monitors; all must have the same"
            )
        ((every, metric),) = intervals
        if every == "validation" and not self.config.training.validate_every:
            raise TaskError(
                "training.validate_every (0) must be above 0 for a scheduler that monitors a validation; set it to the "
                "steps of an epoch"
            )
        first = self._schedules[0]
        is_single = len(self._schedules) == 1 and first.frequency == 1
        scheduler = first.scheduler if is_single else _Schedules([(s.scheduler, s.frequency) for s in self._schedules])
        return {"scheduler": scheduler, "every": every, "metric": metric}

    def train_source(self, partition: Partition) -> Any:
        loader = self.loader("train_dataloader")
        if loader is None:
            raise TaskError(f"{type(self._given).__name__} has no train_dataloader; write one, or give a datamodule")
        return loader

    def validation_source(self, partition: Partition) -> Any:
        return self.loader("val_dataloader") if _overrides(self._given, "validation_step") else None

    def loader(self, name: str) -> Any:
        """Return the DataLoader that the method ``name`` of the datamodule or the module gives; None without one."""
        if self.module is None:
            self.build_model()
        if name not in self._loaders:
            states = random_states()
            seed_all(self.config.seed, LOADERS)
            self._loaders[name] = _single_loader(name, self._owner(name))
            restore_random_states(states)
        return self._loaders[name]

    def _owner(self, hook: str) -> Any:
        """Return the datamodule if it overrides ``hook``, as Lightning does, otherwise the module."""
        has = self.datamodule is not None and _overrides(self.datamodule, hook)
        return self.datamodule if has else self.module

    # Steps.

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor:
        module = self.module
        batch, self._in_batch = self._transfer(batch), True
        self._first_batch = batch_idx if self._first_batch is None else self._first_batch
        batch_idx -= self._first_batch
        if module.on_train_batch_start(batch, batch_idx) == -1:
            raise TaskError(
                "on_train_batch_start returned -1, and an epoch cannot end early; set self.trainer.should_stop, or "
                "leave out samples in the data set"
            )
        arguments = (batch, batch_idx) if self._takes_number["training_step"] else (batch,)
        is_wrapped = model is not self.module
        outputs = _redirect_forward(model, module, arguments) if is_wrapped else module.training_step(*arguments)
        outputs = dict(outputs) if isinstance(outputs, Mapping) else {"loss": outputs}
        loss = outputs.get("loss")
        if not isinstance(loss, Tensor):
            raise TaskError(
                f"{type(module).__name__}.training_step returned no loss; it must return a tensor, or a dict with the "
                'key "loss": a step cannot be skipped'
            )
        if "on_batch_end" in vars(self):
            self._train_outputs = {**outputs, "loss": loss.detach()}, batch, batch_idx
        module.on_before_backward(loss)
        return loss

    def _end_batch(self, batch_idx: int) -> None:
        assert self._train_outputs is not None
        self.module.on_after_backward()
        self.module.on_train_batch_end(*self._train_outputs)
        self._train_outputs = None

    def validation_step(self, model: Any, batch: Any, valid_batch_idx: int, batch_idx: int) -> dict[str, Any]:
        module = model if isinstance(model, _base_of(self._given)) else model.module  # averaged weights are wrapped
        module.trainer = self._stand_in  # also of a copy, which lacks it
        batch, self._validation_values = self._transfer(batch), {}
        module.on_validation_batch_start(batch, valid_batch_idx)
        arguments = (batch, valid_batch_idx) if self._takes_number["validation_step"] else (batch,)
        outputs = module.validation_step(*arguments)
        module.on_validation_batch_end(outputs, batch, valid_batch_idx)
        values, self._validation_values = self._validation_values, None
        return values

    def _transfer(self, batch: Any) -> Any:
        for hook in _TRANSFER:
            device = (self.devices[0],) if hook == "transfer_batch_to_device" else ()
            batch = getattr(self._owner(hook), hook)(batch, *device, 0)
        return batch

    # Hooks.

    def on_train_start(self) -> None:
        self._call("on_fit_start", "on_train_start")

    def on_epoch_start(self, epoch: int) -> None:
        if epoch != self._epoch:  # not where a run continues in an epoch
            self._epoch, self._first_batch, self._sums = epoch, None, {}
        self._call("on_train_epoch_start")

    def on_validation_start(self, batch_idx: int) -> None:
        self.is_validating = True
        with eval_mode(self.module):
            self._call("on_validation_start", "on_validation_epoch_start")

    def on_validation_end(self, batch_idx: int) -> None:
        self.values.update(getattr(self.trainer, "validation", {}))
        with eval_mode(self.module):
            self._call("on_validation_epoch_end", "on_validation_end")
        self.is_validating = False

    def on_epoch_end(self, epoch: int) -> None:
        for name, (reduction, value, weight) in self._sums.items():
            self.values[name] = value / weight if reduction == "mean" else value
            self.log(name, self.values[name], cast(Reduction, reduction))
        self._call("on_train_epoch_end")

    def on_checkpoint(self, state: dict[str, Any]) -> None:
        of_module = {"epoch": self._stand_in.current_epoch, "global_step": self._stand_in.global_step}
        self.module.on_save_checkpoint(of_module)
        state["module"] = of_module
        state["datamodule"] = {} if self.datamodule is None else self.datamodule.state_dict()
        state["values"], state["epoch"] = dict(self.values), (self._epoch, self._first_batch, dict(self._sums))

    def on_resume(self, state: dict[str, Any]) -> None:
        self.values, self.resumed = state["values"], state["module"]
        self._epoch, self._first_batch, self._sums = state["epoch"]
        self.module.on_load_checkpoint(state["module"])
        if self.datamodule is not None:
            self.datamodule.load_state_dict(state["datamodule"])

    def on_train_end(self) -> None:
        self._call("on_train_end", "on_fit_end")
        for owner in (self.datamodule, self.module):
            if owner is not None:
                owner.teardown("fit")

    def _call(self, *hooks: str) -> None:
        self._in_batch = False
        for hook in hooks:
            getattr(self.module, hook)()

    # Values.

    def _log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        **_: Any,
    ) -> None:
        """Take the place of ``LightningModule.log``: a record, a value of the epoch, or one of the validation."""
        reduction = getattr(reduce_fx, "__name__", reduce_fx)
        if reduction not in _REDUCTIONS or (reduction != "mean" and self._validation_values is not None):
            rule = f"one of {', '.join(_REDUCTIONS)}, and mean in validation_step"
            raise TaskError(f"self.log({name!r}, reduce_fx={reduction!r}): reduce_fx must be {rule}")
        if self._validation_values is not None:
            self._validation_values[name] = value
            return
        if hasattr(value, "compute"):
            raise TaskError(
                f"self.log({name!r}) was given a {type(value).__name__} outside of validation_step; log a number, for "
                "example what a call of it returns for the batch"
            )
        number = float(value.detach() if isinstance(value, Tensor) else value)
        self.values[name] = number
        if self._in_batch and on_epoch:
            weight = float(batch_size or self.trainer.batch_samples)
            key = f"{name}_epoch" if on_step is not False else name
            _, total, weights = self._sums.get(key, (reduction, -math.inf if reduction == "max" else 0.0, 0.0))
            if reduction == "max":
                total = max(total, number)
            else:
                total += number * weight if reduction == "mean" else number
            self._sums[key] = reduction, total, weights + weight
        if logger is not False and (on_step is not False or not self._in_batch):
            self.log(f"{name}_step" if self._in_batch and on_epoch else name, number, cast(Reduction, reduction))


class TrainerStandIn:
    """What ``self.trainer`` is in a module and a datamodule: the ``MEMBERS`` of Lightning's ``Trainer``, no others.

    Ranks count trainers only. Where no trainer runs, as on a server, there are no steps, ranks and values.
    """

    def __init__(self, task: LightningTask) -> None:
        vars(self)["_task"] = task

    def __getattr__(self, name: str) -> Any:
        if name not in MEMBERS:
            raise NoSuchMember(f"self.trainer has no {name} in a LightningTask; it has {', '.join(sorted(MEMBERS))}")
        return MEMBERS[name](self._task)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "should_stop":
            raise NoSuchMember(f"self.trainer.{name} cannot be set in a LightningTask; only should_stop can")
        vars(self)[name] = value
        if value:
            _trainer_of(self._task).stop("the module set trainer.should_stop")

    def __reduce__(self) -> Any:
        return type(None), ()  # a worker process that reads the data has no trainer


def _trainer_of(task: Task) -> Any:
    if task.trainer is None:
        raise TaskError(
            "self.trainer has no steps, ranks and values in a process that does not train; a server only calls "
            "prepare_data, setup, configure_optimizers and on_before_optimizer_step"
        )
    return task.trainer


def _local_rank(task: Task) -> int:
    identity = _trainer_of(task).process.identity
    servers_here = num_servers_of(task.config) - (identity.global_rank - identity.local_rank)
    return int(identity.local_rank - max(servers_here, 0))


def _estimate_updates(task: Task) -> float:
    """Return the number of updates until ``max_steps`` or ``max_epochs``; gradients that are dropped make it less."""
    config, trainers = task.config, num_trainers_of(task.config)
    limit, batches = config.training.max_steps or math.inf, 0
    for partition in (Partition(index, trainers) for index in range(trainers)):
        reading = resolve_reading(task.train_source(partition), partition, config)
        total = make_source(reading, partition, config).total
        if total is None:
            return limit
        buffer = make_buffer("fifo", capacity=config.buffer.capacity, pseudo_epochs=config.buffer.pseudo_epochs)
        batches = max(batches, buffer.expected_batches(total, reading.config.training.batch_size) or 0)
        buffer.close()
    taken = trainers
    if mode_of(config).has_servers:
        taken = consistency_class(config.server).gradients_per_update(config.server, trainers)
    return min(limit, math.ceil(math.ceil(batches / config.training.accumulate_batches) * trainers / taken))


# ``paramserver evaluate`` has the progress that the checkpoint stored.
MEMBERS: dict[str, Callable[[LightningTask], Any]] = {
    "global_step": lambda task: getattr(_trainer_of(task), "step", task.resumed["global_step"]),
    "current_epoch": lambda task: getattr(getattr(_trainer_of(task), "progress", None), "epoch", task.resumed["epoch"]),
    "callback_metrics": lambda task: {name: torch.tensor(value) for name, value in task.values.items()},
    "logged_metrics": lambda task: {name: torch.tensor(value) for name, value in task.values.items()},
    "training": lambda task: not task.is_validating,
    "validating": lambda task: task.is_validating,
    "max_epochs": lambda task: task.config.training.max_epochs or -1,
    "max_steps": lambda task: task.config.training.max_steps or -1,
    "estimated_stepping_batches": _estimate_updates,
    "accumulate_grad_batches": lambda task: task.config.training.accumulate_batches,
    "world_size": lambda task: num_trainers_of(task.config),
    "global_rank": lambda task: _trainer_of(task).trainer_index,
    "local_rank": _local_rank,
    "is_global_zero": lambda task: task.trainer is not None and task.trainer.trainer_index == 0,
    "datamodule": lambda task: task.datamodule,
    "lightning_module": lambda task: task.module,
    "should_stop": lambda task: False,  # until the module sets it
    **dict.fromkeys(("sanity_checking", "testing", "predicting", "fast_dev_run", "barebones"), lambda task: False),
    **dict.fromkeys(("logger", "progress_bar_callback"), lambda task: None),
    **dict.fromkeys(("loggers", "callbacks"), lambda task: []),
}


class _Schedules:
    """Several schedules, or one with a frequency, as one: each takes the last of so many calls of ``step``."""

    def __init__(self, schedules: list[tuple[Any, int]]) -> None:
        self._schedules = schedules
        self._calls = 0

    def step(self, *metric: float) -> None:
        self._calls += 1
        for scheduler, frequency in self._schedules:
            if self._calls % frequency == 0:
                scheduler.step(*metric)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls, "schedules": [scheduler.state_dict() for scheduler, _ in self._schedules]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._calls = state["calls"]
        for (scheduler, _), stored in zip(self._schedules, state["schedules"], strict=True):
            scheduler.load_state_dict(stored)


def _base_of(instance: Any) -> Any:
    """Return Lightning's class from which the class of a module or datamodule is derived; None if there is none."""
    names = ("LightningModule", "LightningDataModule")
    packages = ("lightning", "pytorch_lightning")
    return next(
        (k for k in type(instance).__mro__ if k.__name__ in names and k.__module__.split(".")[0] in packages), None
    )


def _overrides(instance: Any, method: str) -> bool:
    own = getattr(instance, method, None)
    return bool(getattr(own, "__func__", own) is not getattr(_base_of(instance), method, None))


def _check(module: Any, datamodule: Any) -> None:
    """Refuse, by name, what a ``LightningTask`` does not support."""
    name = type(module).__name__
    if _base_of(module) is None or not callable(module):
        raise TaskError(f"LightningTask was given {module!r}; give it an instance of a LightningModule")
    if datamodule is not None and _base_of(datamodule) is None:
        raise TaskError(
            f"LightningTask was given the datamodule {datamodule!r}; give it a LightningDataModule, or None"
        )
    if not module.automatic_optimization:
        raise TaskError(
            f"{name}.automatic_optimization (False) must be True for a LightningTask; let training_step return the "
            "loss, and remove the backward and the step"
        )
    for method in ("training_step", "configure_optimizers"):
        if not _overrides(module, method):
            raise TaskError(f"{name} lacks {method}, which a LightningTask needs; write it")
    for method, cure in _NOT_CALLED.items():
        if _overrides(module, method):
            raise TaskError(f"{name}.{method} would not be called by a LightningTask; remove it: {cure}")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise TaskError(f"{name}.training_step takes a dataloader_iter; a LightningTask gives it (batch, batch_idx)")


def _takes_number(step: Callable[..., Any]) -> bool:
    """Whether a step takes (batch, batch_idx), and not (batch) alone."""
    parameters = inspect.signature(step).parameters.values()
    return len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _redirect_forward(wrapper: nn.Module, module: Any, arguments: tuple[Any, ...]) -> Any:
    """Call ``training_step`` as the forward of the wrapper, which thus averages its gradients."""
    forward = module.forward

    def redirected(*inputs: Any) -> Any:
        module.forward = forward  # which training_step calls
        return module.training_step(*inputs)

    module.forward = redirected
    return wrapper(*arguments)


def _single_loader(name: str, owner: Any) -> Any:
    if not _overrides(owner, name):
        return None
    loader = getattr(owner, name)()
    if isinstance(loader, (list, tuple)) and len(loader) < 2:
        loader = next(iter(loader), None)
    if loader is not None and not isinstance(loader, DataLoader):
        raise TaskError(
            f"{type(owner).__name__}.{name} returned {type(loader).__name__}; a LightningTask takes one "
            "torch.utils.data.DataLoader, and not several"
        )
    return loader

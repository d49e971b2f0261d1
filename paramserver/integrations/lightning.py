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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paramserver.config import num_servers_of, num_trainers_of, server_computes
from paramserver.errors import NoSuchMember, TaskError
from paramserver.importing import source_file
from paramserver.metrics.records import Reduction, largest
from paramserver.parameters.remote_tables import RemoteTable
from paramserver.rng import LOADERS, random_states, restore_random_states, seed_all
from paramserver.sources import Partition
from paramserver.task import Task
from paramserver.trainers.validation import eval_mode

# Methods of a LightningModule that are refused, as they would not be called, and what to do in their place. Those of
# test and predict are not called either.
_NOT_CALLED = {
    "backward": "the trainer calls loss.backward()",
    "configure_gradient_clipping": "set training.clip_grad_norm or clip_grad_value",
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
# The same for the callbacks of ``configure_callbacks``; and what takes the place of Lightning's own callbacks.
_NOT_CALLED_IN_CALLBACKS = {
    "on_before_optimizer_step": "the optimizer may be in another process",
    "on_before_zero_grad": "use on_train_batch_start",
    "on_exception": "the error is in error-*.json of the run",
}
_IN_PLACE_OF = {
    "EarlyStopping": "set training.patience",
    "LearningRateMonitor": "the learning rate is in every record",
    "ModelCheckpoint": "set checkpoint.best",
    "WeightAveraging": "set training.ema_decay",
    "StochasticWeightAveraging": "set training.ema_decay",
}
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_REDUCTIONS = ("mean", "sum", "max")


class LightningTask(Task):
    """A task that consists of a ``LightningModule`` and, if it has no data itself, a ``LightningDataModule``.

    Each process trains a copy of the module that it was given; ``model.pt`` is its ``state_dict``.
    ``configure_optimizers`` is called where the parameters are: in mode rpc on the server. What is not supported is
    refused by name.

    Args:
        module: a ``LightningModule``, with automatic or manual optimization.
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
        self._callbacks: list[Any] = []
        self._manual: ManualOptimization | None = None
        self._in_batch = False
        self._epoch = -1
        self._first_batch: int | None = None  # of the epoch
        # Of the epoch: reduction, value and weight, by the name that was logged, its name here, and if it has a record.
        self._sums: dict[tuple[str, str, bool], tuple[str, float, float]] = {}
        self._validation_values: dict[str, Any] | None = None
        self._validation_metrics: dict[str, Any] = {}  # objects that the newest validation logged
        self._train_outputs: tuple[Any, Any, int] | None = None

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
        if not module.automatic_optimization:
            self._manual = ManualOptimization(self)
            vars(module).update((name, _manual_member(self, name)) for name in MANUAL)
        owners: list[Any] = [owner for owner in (self.datamodule, module) if owner is not None]
        for owner in owners:
            owner.trainer = self._stand_in
            self._prepare_data(owner)
        configured: Any = self.module.configure_callbacks()
        self._callbacks = list(configured) if isinstance(configured, (list, tuple)) else [configured]
        for callback in self._callbacks:
            _check_callback(type(module).__name__, callback, self._manual is not None)
        keys = [callback.state_key for callback in self._callbacks if _overrides(callback, "state_dict")]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise TaskError(
                f"{type(module).__name__}.configure_callbacks returned several callbacks with the state_key "
                f"{twice[0]!r}, of which a checkpoint would have one state; give each a state_key of its own"
            )
        if self.datamodule is not None:
            self.datamodule.setup("fit")
        self._hook("setup", stage="fit")
        of_step = ("on_after_backward", "on_train_batch_end")
        if any(_overrides(one, hook) for one in (module, *self._callbacks) for hook in of_step):
            # Only then: with this hook gradients are not sent during the backward.
            self.on_batch_end = self._end_batch  # type: ignore[method-assign]
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

    def build_optimizer(self, model: nn.Module) -> Any:
        module, name = self.module, type(self.module).__name__
        configured = module.configure_optimizers()
        forms = import_module(_base_of(module).__module__.replace(".core.module", ".core.optimizer"))
        try:
            optimizers, schedulers, monitor = forms._configure_optimizers(configured)
            by_kind = "automatic" if self._manual is None else "manual"
            schedules = (schedulers, monitor) if self._manual is None else (schedulers,)
            self._schedules = getattr(forms, f"_configure_schedulers_{by_kind}_opt")(*schedules)
        except Exception as error:
            raise TaskError(f"{name}.configure_optimizers: {error}") from error
        if _overrides(module, "on_before_optimizer_step"):
            for one in optimizers:
                one.register_step_pre_hook(lambda optimizer, *_: module.on_before_optimizer_step(optimizer))
        if self._manual is not None:
            return self._manual.set_optimizers(optimizers, self._schedules)
        if len(optimizers) != 1:
            raise TaskError(
                f"{name}.configure_optimizers returned {len(optimizers)} optimizers; with automatic optimization it "
                "must return one: set self.automatic_optimization = False, or give groups of parameters where they "
                "differ"
            )
        optimizer: torch.optim.Optimizer = optimizers[0]
        return optimizer

    def build_scheduler(self, optimizer: Any) -> Any:
        if not self._schedules:
            return None
        if self._manual is not None:
            return self._manual.schedules
        intervals = {("validation", s.monitor) if s.reduce_on_plateau else (s.interval, None) for s in self._schedules}
        if len(intervals) > 1:
            raise TaskError(
                f"{type(self.module).__name__}.configure_optimizers returned schedulers of several intervals or "
                "monitors; all must have the same"
            )
        ((every, metric),) = intervals
        if frequency := next((s.frequency for s in self._schedules if s.interval == "step" and s.frequency > 1), None):
            raise TaskError(
                f"{type(self.module).__name__}.configure_optimizers: frequency ({frequency}) must be 1 with interval "
                "step, where Lightning counts batches, anew in each epoch; remove it, and hold the rate in the "
                "scheduler, as LambdaLR can, or with a monitor set training.validate_every"
            )
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

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor | None:
        module = self.module
        batch, self._in_batch = self._transfer(batch), True
        if self._manual is not None:
            self._manual.mark_gradients()  # a version that was pulled since the last batch has none
        self._first_batch = batch_idx if self._first_batch is None else self._first_batch
        batch_idx -= self._first_batch
        if self._hook("on_train_batch_start", batch, batch_idx) == -1:
            raise TaskError(
                "on_train_batch_start returned -1, and an epoch cannot end early; set self.trainer.should_stop, or "
                "leave out samples in the data set"
            )
        arguments = (batch, batch_idx) if self._takes_number["training_step"] else (batch,)
        is_wrapped = model is not self.module
        outputs = _redirect_forward(model, module, arguments) if is_wrapped else module.training_step(*arguments)
        outputs = dict(outputs) if isinstance(outputs, Mapping) else {"loss": outputs}
        loss = outputs.get("loss")
        if self._manual is not None:
            self._manual.end_batch()
            if "on_batch_end" in vars(self):
                detached = {"loss": loss.detach()} if isinstance(loss, Tensor) else {}
                outputs = {**{k: v for k, v in outputs.items() if v is not None}, **detached}
                self._train_outputs = outputs, batch, batch_idx
            return None
        if not isinstance(loss, Tensor):
            raise TaskError(
                f"{type(module).__name__}.training_step returned no loss; it must return a tensor, or a dict with the "
                'key "loss": a step cannot be skipped'
            )
        batches = self.config.training.accumulate_batches
        part = loss / batches if batches > 1 else loss  # what Lightning calls the backward of
        if "on_batch_end" in vars(self):
            self._train_outputs = {**outputs, "loss": part.detach()}, batch, batch_idx
        self._hook("on_before_backward", part)
        return loss

    def _end_batch(self, batch_idx: int) -> None:
        assert self._train_outputs is not None
        if self._manual is None:
            self._hook("on_after_backward")
        self._hook("on_train_batch_end", *self._train_outputs)
        self._train_outputs = None

    def validation_step(self, model: Any, batch: Any, valid_batch_idx: int, batch_idx: int) -> dict[str, Any]:
        module = model if isinstance(model, _base_of(self._given)) else model.module  # averaged weights are wrapped
        module.trainer = self._stand_in  # also of a copy, which lacks it
        batch, self._validation_values = self._transfer(batch), {}
        self._hook("on_validation_batch_start", batch, valid_batch_idx, module=module)
        arguments = (batch, valid_batch_idx) if self._takes_number["validation_step"] else (batch,)
        outputs = module.validation_step(*arguments)
        self._hook("on_validation_batch_end", outputs, batch, valid_batch_idx, module=module)
        values, self._validation_values = self._validation_values, None
        self._validation_metrics.update((name, value) for name, value in values.items() if hasattr(value, "compute"))
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
        self.is_validating, self._validation_metrics = True, {}
        with eval_mode(self.module):
            self._call("on_validation_start", "on_validation_epoch_start")

    def on_validation_end(self, batch_idx: int) -> None:
        self.values.update(self.trainer.validation)
        with eval_mode(self.module), self._metrics_of_all_trainers():
            self._call("on_validation_epoch_end", "on_validation_end")
        self.is_validating = False

    @contextmanager
    def _metrics_of_all_trainers(self) -> Iterator[None]:
        """Let what a metric of torchmetrics computes be of the samples of all trainers.

        One that was logged has been reset since, and computes the value of the validation. Others gather their states
        over the default process group; in ``rpc`` there is none.
        """
        trainer = self.trainer
        # Nothing but a trainer takes steps: ``paramserver evaluate`` has all samples in one process.
        takes_steps_together = getattr(trainer, "lockstep", False) and trainer.process.trainers > 1
        gathers = takes_steps_together and not torch.distributed.is_initialized()
        metrics = {path: m for path, m in self.module.named_modules() if hasattr(m, "distributed_available_fn")}
        logged = {path: n for path, m in metrics.items() for n, one in self._validation_metrics.items() if one is m}
        if takes_steps_together and metrics:  # a trainer without validation samples has logged none
            logged = {path: n for part in trainer.all_gather(logged) for path, n in part.items()}

        def gather(state: Tensor, group: Any = None) -> list[Tensor]:
            return [value.to(state.device) for value in trainer.all_gather(state)]

        functions = ("compute", "distributed_available_fn", "dist_sync_fn")
        before = [(m, {name: vars(m)[name] for name in functions}) for m in metrics.values()]
        for path, metric in metrics.items():
            if logged.get(path) in trainer.validation:
                metric.compute = partial(torch.tensor, trainer.validation[logged[path]], device=metric.device)
            if gathers:
                metric.distributed_available_fn, metric.dist_sync_fn = (lambda: True), gather
        try:
            yield
        finally:
            for metric, own in before:
                vars(metric).update(own)

    def on_epoch_end(self, epoch: int) -> None:
        for (name, recorded, has_record), (reduction, value, weight) in self._sums.items():
            of_epoch = value / weight if reduction == "mean" else value
            self.values[name] = self.values[recorded] = of_epoch
            if has_record:
                self.log(recorded, of_epoch, cast(Reduction, reduction))
        self._call("on_train_epoch_end")

    def on_checkpoint(self, state: dict[str, Any]) -> None:
        of_module: dict[str, Any] = {"epoch": self._stand_in.current_epoch, "global_step": self._stand_in.global_step}
        state["callbacks"] = {
            callback.state_key: callback.state_dict()
            for callback in self._callbacks
            if _overrides(callback, "state_dict")
        }
        weights = self._weights_of_hook("on_save_checkpoint")
        of_module["state_dict"] = dict(weights)
        self._hook("on_save_checkpoint", of_module)
        # model.pt has the others, also what the hook left out.
        hooked = of_module.pop("state_dict", {})
        if added := {name: value for name, value in hooked.items() if value is not weights.get(name)}:
            of_module["state_dict"] = added
        state["module"] = of_module
        state["datamodule"] = {} if self.datamodule is None else self.datamodule.state_dict()
        state["values"], state["epoch"] = dict(self.values), (self._epoch, self._first_batch, dict(self._sums))

    def on_resume(self, state: dict[str, Any]) -> None:
        self.values, self.resumed = state["values"], state["module"]
        self._epoch, self._first_batch, sums = state["epoch"]
        # Earlier releases stored the second name alone, or both.
        keys = {k: (k.removesuffix("_epoch"), k) if isinstance(k, str) else k for k in sums}
        self._sums = {(*key, True)[:3]: sums[k] for k, key in keys.items()}
        for callback in self._callbacks:
            if stored := state.get("callbacks", {}).get(callback.state_key):
                callback.load_state_dict(stored)
        weights = {**self._weights_of_hook("on_load_checkpoint"), **state["module"].get("state_dict", {})}
        self._hook("on_load_checkpoint", {**state["module"], "state_dict": weights})
        if self.datamodule is not None:
            self.datamodule.load_state_dict(state["datamodule"])

    def _weights_of_hook(self, hook: str) -> dict[str, Any]:
        """Return the ``state_dict`` that a hook of checkpoints is given; empty if nothing overrides it.

        Tables whose rows are on the servers are in it without values, so that a hook may use all others.
        """
        if not any(_overrides(one, hook) for one in (self.module, *self._callbacks)):
            return {}
        if not any(isinstance(parameter, RemoteTable) for parameter in self.module.parameters()):
            return dict(self.module.state_dict())
        weights = self.module.state_dict(keep_vars=True)
        values = {n: w.detach() for n, w in weights.items() if isinstance(w, Tensor) and not isinstance(w, RemoteTable)}
        return {**weights, **values}

    def on_train_end(self) -> None:
        self._call("on_train_end", "on_fit_end")
        if self.datamodule is not None:
            self.datamodule.teardown("fit")
        self._hook("teardown", stage="fit")
        if self._manual is not None:
            self._manual.mark_gradients(kept=False)

    def _call(self, *hooks: str) -> None:
        self._in_batch = False
        for hook in hooks:
            self._hook(hook)

    def _hook(self, hook: str, *args: Any, module: Any = None, **options: Any) -> Any:
        """Call a hook of all callbacks, and then of the module, whose result is returned."""
        module = self.module if module is None else module
        for callback in self._callbacks:
            getattr(callback, hook)(self._stand_in, module, *args, **options)
        return getattr(module, hook)(*args, **options)

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
        is_of_epoch = bool(self._in_batch and on_epoch)
        is_of_step = not self._in_batch or on_step is not False
        if not (is_of_epoch or is_of_step):
            raise TaskError(
                f"self.log({name!r}, on_step=False) in a step must be given on_epoch=True; otherwise the value has no "
                "record"
            )
        if is_of_epoch:
            weight = float(batch_size or self.trainer.current_step.batch_samples)
            key = name, f"{name}_epoch" if is_of_step else name, logger is not False
            _, total, weights = self._sums.get(key, (reduction, -math.inf if reduction == "max" else 0.0, 0.0))
            if reduction == "max":
                total = largest((total, number))
            else:
                total += number * weight if reduction == "mean" else number
            self._sums[key] = reduction, total, weights + weight
        if is_of_step:
            recorded = f"{name}_step" if is_of_epoch else name
            self.values[name] = self.values[recorded] = number
            if logger is not False:
                self.log(recorded, number, cast(Reduction, reduction))


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
    servers_here = sum(rank < num_servers_of(task.config) for rank in identity.ranks_here)
    return int(identity.local_rank - servers_here)


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
    "estimated_stepping_batches": lambda task: math.inf if task.total_steps is None else task.total_steps,
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
    "loggers": lambda task: [],
    "callbacks": lambda task: list(task._callbacks),
}


class ManualOptimization:
    """Manual optimization of a module, as calls of ``Trainer.optimize``: one for each step of one of its optimizers.

    A loss is kept by ``manual_backward``, for each optimizer whose gradients it would be added to. Its gradients are
    computed when an optimizer is stepped. What then is not what Lightning does is refused: a step of several losses, or
    of gradients that were not set to zero.
    """

    def __init__(self, task: LightningTask) -> None:
        self.task = task
        self.schedules: dict[str, Any] = {}
        self._steppers: list[ManualOptimizer] = []
        self._owners: list[str] = []  # of each schedule the optimizer that it is stepped with
        self._toggled: ManualOptimizer | None = None
        self.has_stepped = False  # in this batch

    def set_optimizers(self, optimizers: list[Any], schedules: list[Any]) -> dict[str, Any]:
        """Return the optimizers by name, and keep the schedules that are stepped with them; others never are."""
        by_name = {f"optimizer_{number}": optimizer for number, optimizer in enumerate(optimizers)}
        self.schedules, self._owners = {}, []
        for one in schedules:
            own = getattr(one.scheduler, "optimizer", None)
            name = next((name for name, optimizer in by_name.items() if optimizer is own), "")
            if not name:
                raise TaskError(
                    f"{type(self.task.module).__name__}.configure_optimizers returned a {type(one.scheduler).__name__} "
                    "whose attribute optimizer is none of the optimizers that it returned; with manual optimization it "
                    "must be one of them: return that optimizer too"
                )
            is_stepped = one.interval == "step" and not one.reduce_on_plateau and name not in self.schedules
            self._owners.append(name if is_stepped else "")
            if is_stepped:
                self.schedules[name] = one.scheduler
        self._steppers = [ManualOptimizer(self, name, name in self.schedules) for name in by_name]
        return by_name

    @property
    def steppers(self) -> list[ManualOptimizer]:
        if not self._steppers:  # in mode rpc the optimizers are on the servers
            self.task.build_optimizer(self.task.module)
        return self._steppers

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return self.steppers[0] if len(self.steppers) == 1 else self.steppers

    def lr_schedulers(self) -> Any:
        by_name = {stepper.name: stepper for stepper in self.steppers}
        schedules = [ManualSchedule(by_name.get(owner)) for owner in self._owners]
        return schedules[0] if len(schedules) == 1 else schedules or None

    def manual_backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        self.task._hook("on_before_backward", loss)
        for stepper in self.steppers if self._toggled is None else [self._toggled]:
            stepper.losses.append((loss, retain_graph))
        self.mark_gradients()

    def toggle_optimizer(self, optimizer: ManualOptimizer) -> None:
        self._toggled = optimizer

    def untoggle_optimizer(self, optimizer: ManualOptimizer) -> None:
        self._toggled = None

    @contextmanager
    def toggled_optimizer(self, optimizer: ManualOptimizer) -> Iterator[None]:
        self.toggle_optimizer(optimizer)
        yield
        self.untoggle_optimizer(optimizer)

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        raise TaskError("self.clip_gradients is not supported by a LightningTask; set training.clip_grad_norm")

    def end_batch(self) -> None:
        """Release the graphs of the batch, and remember which gradients were not set to zero.

        Raises:
            TaskError: no optimizer was stepped in it.
        """
        if not self.has_stepped:
            raise TaskError(
                "training_step of a LightningTask with manual optimization must step an optimizer in each batch, and "
                "stepped none; in place of gradients of several batches take larger batches, or automatic optimization "
                "with training.accumulate_batches, and leave out samples in the data set"
            )
        self._toggled, self.has_stepped = None, False
        for stepper in self.steppers:
            stepper.losses = [None for one in stepper.losses if stepper.depends_on(one)]
        self.mark_gradients()

    def mark_gradients(self, kept: bool = True) -> None:
        """Let a use of gradients that there would be, until they are set to zero, be refused; not if not ``kept``."""
        for stepper in self.steppers:
            for parameter in stepper.parameters:
                if kept and stepper.losses and parameter.requires_grad:
                    parameter.grad = parameter.new_zeros(()).expand(parameter.shape).as_subclass(_NotKept)
                elif isinstance(parameter.grad, _NotKept):
                    parameter.grad = None

    def needs_graph(self, loss: Tensor) -> bool:
        """Whether another optimizer may be stepped with this loss."""
        return any(one is not None and one[0] is loss for stepper in self.steppers for one in stepper.losses)


# Members of a module that ``ManualOptimization`` takes the place of.
MANUAL = (
    "optimizers", "lr_schedulers", "manual_backward", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer",
    "clip_gradients",
)  # fmt: skip


def _manual_member(task: LightningTask, name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: getattr(task._manual, name)(*args, **kwargs)


class _NotKept(Tensor):
    """A gradient from ``manual_backward`` until ``zero_grad``."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # which reads the properties of the gradients that it finds
            return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        raise TaskError(
            "a gradient cannot be read or clipped between self.manual_backward(loss) and zero_grad() in a "
            "LightningTask, as step() computes and releases it; to clip gradients set training.clip_grad_norm or "
            "training.clip_grad_value, to read them call torch.autograd.grad(loss, parameters, retain_graph=True)"
        )


class ManualOptimizer(torch.optim.Optimizer):
    """What ``self.optimizers()`` gives with manual optimization; the optimizer itself may be in another process.

    ``losses`` are those since ``zero_grad``; None for one of an earlier step or batch.
    """

    def __init__(self, manual: ManualOptimization, name: str, has_schedule: bool) -> None:
        # The base class would collect groups and states of its own.
        self.name = name
        self.has_schedule = has_schedule
        self.is_schedule_due = False
        self.losses: list[tuple[Tensor, bool] | None] = []
        self._manual = manual

    def __getattr__(self, name: str) -> Any:
        raise NoSuchMember(
            f"an optimizer of self.optimizers() has no {name} in a LightningTask; it has step, zero_grad and "
            "toggle_model, as the optimizer may be in another process"
        )

    def __repr__(self) -> str:
        return f"ManualOptimizer({self.name})"

    @property
    def parameters(self) -> list[nn.Parameter]:
        return cast(list[nn.Parameter], self._manual.task.trainer.optimizer_calls.parameters_of[self.name])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.losses = []
        for parameter in self.parameters:
            parameter.grad = None
        self._manual.mark_gradients()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make an update with the gradients of the loss that ``manual_backward`` was given.

        Raises:
            TaskError: it would not be what Lightning does.
        """
        output = None if closure is None else closure()
        if len(self.losses) > 1:  # of others this optimizer has no gradients
            self.losses = [one for one in self.losses if self.depends_on(one)]
        if len(self.losses) != 1 or self.losses[0] is None:
            raise TaskError(
                f"step() of {self.name} must follow one self.manual_backward(loss) since its zero_grad(), and not "
                f"{len(self.losses)}, or one of an earlier step; call zero_grad() before each manual_backward, and add "
                "losses up before it"
            )
        if self.is_schedule_due:
            raise wrong_schedule()
        (loss, retain_graph), self.losses = self.losses[0], [None]
        self._manual.mark_gradients(kept=False)
        self._manual.task.trainer.optimize(self.name, loss, retain_graph or self._manual.needs_graph(loss))
        self._manual.mark_gradients()
        self._manual.has_stepped = True
        self.is_schedule_due = self.has_schedule
        return output

    def depends_on(self, one: tuple[Tensor, bool] | None) -> bool:
        """Whether a loss, or an earlier one, has given this optimizer gradients."""
        if one is None:
            return True
        own = set(map(id, self.parameters))
        seen: set[Any] = set()
        ahead: list[Any] = [one[0].grad_fn]
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if id(getattr(node, "variable", None)) in own:
                return True
            ahead += [function for function, _ in node.next_functions]
        return False

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        with self._manual.toggled_optimizer(self):
            yield


class ManualSchedule:
    """What ``self.lr_schedulers()`` gives: the schedule is stepped with its optimizer, and ``step`` has to follow."""

    def __init__(self, stepper: ManualOptimizer | None) -> None:
        self._stepper = stepper

    def step(self, *metric: Any) -> None:
        if self._stepper is None or not self._stepper.is_schedule_due:
            raise wrong_schedule()
        self._stepper.is_schedule_due = False


def wrong_schedule() -> TaskError:
    return TaskError(
        "a scheduler of manual optimization must be stepped once after each step of its optimizer; return it from "
        'configure_optimizers as {"scheduler": scheduler, "interval": "step"}, one for each optimizer, and call its '
        "step() there"
    )


class _Schedules:
    """Several schedules, or one with a frequency, as one: each takes the last of so many epochs or validations."""

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
    names = ("LightningModule", "LightningDataModule", "Callback")
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
    _check_after_backward(module, not module.automatic_optimization)
    for method in ("training_step", "configure_optimizers"):
        if not _overrides(module, method):
            raise TaskError(f"{name} lacks {method}, which a LightningTask needs; write it")
    for method, cure in _NOT_CALLED.items():
        if _overrides(module, method):
            raise TaskError(f"{name}.{method} would not be called by a LightningTask; remove it: {cure}")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise TaskError(f"{name}.training_step takes a dataloader_iter; a LightningTask gives it (batch, batch_idx)")


def _check_after_backward(instance: Any, is_manual: bool) -> None:
    if is_manual and _overrides(instance, "on_after_backward"):
        raise TaskError(
            f"{type(instance).__name__}.on_after_backward would not be called with manual optimization, where "
            "gradients are computed when an optimizer is stepped; remove it"
        )


def _check_callback(name: str, callback: Any, is_manual: bool) -> None:
    """Refuse, by name, a callback of ``configure_callbacks`` that does more than observe what is called here."""
    kind = type(callback).__name__
    if _base_of(callback) is None:
        raise TaskError(f"{name}.configure_callbacks returned {callback!r}; it must return Lightning's callbacks")
    for one in type(callback).__mro__:
        inside = one.__module__.partition(".callbacks.")[0] in ("lightning.pytorch", "pytorch_lightning")
        if inside and one.__name__ not in ("Callback", "LambdaCallback"):
            cure = _IN_PLACE_OF.get(one.__name__, "write what it observes as a Callback of your own")
            raise TaskError(f"{name}.configure_callbacks returned {kind}, which acts on Lightning's Trainer; {cure}")
    for method, cure in _NOT_CALLED_IN_CALLBACKS.items():
        if _overrides(callback, method):
            raise TaskError(f"{kind}.{method} would not be called by a LightningTask; remove it: {cure}")
    _check_after_backward(callback, is_manual)


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

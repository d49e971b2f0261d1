"""`Task`, the class that a user derives from: model, optimizer, data and the computation of one step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from paramserver.config import mode_of
from paramserver.config.parsing import is_plain
from paramserver.errors import ParamserverError, TaskError, message_of
from paramserver.importing import describe_user_error, keeps_process_state, load_object, name_user_error
from paramserver.rng import CONSTRUCTOR, random_states, restore_random_states, seed_all
from paramserver.sources.base import Partition
from paramserver.sources.expected import Origin, total_steps
from paramserver.sources.factory import is_map_style, resolve_reading

if TYPE_CHECKING:
    from paramserver.config import Config
    from paramserver.metrics.records import Reduction
    from paramserver.sources.factory import Reading

# Methods without a default, with the signature that a message shows.
REQUIRED = {
    "build_model": "build_model(self)",
    "build_optimizer": "build_optimizer(self, model)",
    "train_source": "train_source(self, partition)",
    "training_step": "training_step(self, model, batch, batch_idx)",
}


class Hooks:
    """What the training loop calls on a task and on callbacks, in this order. Only trainers call them."""

    def on_train_start(self) -> None:
        """Called for each model that a process builds, before the first step and after ``on_resume``.

        That is once in a process, and in ``rpc`` again whenever it joins again after a loss.
        """

    def on_epoch_start(self, epoch: int) -> None:
        """Called before the first batch of a pass over the data."""

    def on_batch_start(self, batch_idx: int) -> None:
        """Called before each ``training_step``."""

    def on_batch_end(self, batch_idx: int) -> None:
        """Called after the backward of each batch, before the update."""

    def on_validation_start(self, batch_idx: int) -> None:
        """Called before the validation that follows batch ``batch_idx``."""

    def on_validation_end(self, batch_idx: int) -> None:
        """Called after a validation."""

    def on_epoch_end(self, epoch: int) -> None:
        """Called after the last batch of a pass over the data."""

    def on_train_end(self) -> None:
        """Called once, after the last validation and checkpoint."""


class Callback(Hooks):
    """Hooks that several tasks can use. ``Task.callbacks`` returns objects of classes that are derived from it.

    Each trainer has its own objects. Their hooks are called after those of the task, in the order of the list.

    Attributes:
        task: of this process, set before any method is called; ``task.trainer`` is the trainer.

    Example::

        >>> class StopsWhenGoodEnough(Callback):
        ...     def on_validation_end(self, batch_idx):
        ...         if self.task.trainer.validation.get("accuracy", 0.0) > 0.97:
        ...             self.task.trainer.stop("the accuracy is reached")
    """

    task: Task

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores of this callback: tensors, numbers, strings, and lists or dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict()``. Called in a resumed run, if the checkpoint has a state of this callback."""


class Task(Hooks):
    """Base class of a training task. Every process of a run creates one instance.

    Override ``build_model``, ``build_optimizer``, ``train_source`` and ``training_step``; all other methods have
    defaults.

    Attributes:
        devices: the devices that this process may use. Inputs go to the first one. Set before any method is called.
        config: the effective configuration.
        trainer: the trainer of this process; None on a server.
        worker_init_fn: with ``training.loader_workers``, called in each worker process with its number, as that of
            ``torch.utils.data.DataLoader``: a function of a module, or a ``staticmethod`` of the class. None = nothing.

    Example::

        >>> class Sine(Task):
        ...     def build_model(self):
        ...         return nn.Linear(1, 1)
        ...     def build_optimizer(self, model):
        ...         return torch.optim.SGD(model.parameters(), lr=0.1)
        ...     def train_source(self, partition):
        ...         x = torch.linspace(-3, 3, 8).unsqueeze(1)
        ...         return torch.utils.data.TensorDataset(x, torch.sin(x))
        ...     def training_step(self, model, batch, batch_idx):
        ...         return nn.functional.mse_loss(model(batch[0]), batch[1])
        >>> task = Sine()
        >>> batch = task.collate(list(task.train_source(Partition(0, 1))))
        >>> task.training_step(task.build_model(), batch, 0).shape
        torch.Size([])
    """

    devices: Sequence[torch.device] = (torch.device("cpu"),)
    config: Config
    trainer: Any = None
    worker_init_fn: Callable[[int], None] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Task:
        """Keep the arguments, so that ``paramserver.run(task, ...)`` can create the same task in other processes."""
        if cls.__init__ is object.__init__ and (args or kwargs):
            # object.__new__ raises this only for classes that do not override __new__.
            raise TypeError(f"{cls.__name__}() takes no arguments")
        task = super().__new__(cls)
        given = tuple(map(_as_given, args)), {name: _as_given(value) for name, value in kwargs.items()}
        object.__setattr__(task, "_arguments", given)  # a frozen dataclass is refused later, by name
        return task

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Explain a missing attribute: what one process keeps in its task, the others do not have."""
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # a property again, whose own error Python has dropped
            message = f"{type(self).__name__} has no attribute {name!r}"
            if getattr(self.trainer, "is_evaluation", False):
                message += (
                    " where a stored model is loaded to be evaluated, exported or used: train_source, build_optimizer "
                    "and the hooks of training, such as on_train_start, are not called there; make it in __init__ or "
                    "build_model"
                )
            elif "config" in vars(self) and mode_of(self.config).has_servers and not self.config.training.has_rounds:
                message += (
                    " in this process: in mode rpc build_optimizer and build_scheduler are called on the server, "
                    "training_step and the hooks on the trainers"
                )
            raise AttributeError(message)

    def keyword_arguments(self) -> dict[str, Any]:
        """Return the arguments that this task was created with, by name.

        Raises:
            TaskError: an argument has no name, because the constructor takes ``*args`` or positional-only parameters.
        """
        args, kwargs = self._arguments
        signature = inspect.signature(type(self).__init__)
        _, *bound = signature.bind(self, *args, **kwargs).arguments.items()
        named: dict[str, Any] = {}
        for name, value in bound:
            kind = signature.parameters[name].kind
            if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
                raise TaskError(
                    f"{type(self).__name__}: argument {name} has no name to be passed on by; write it as a keyword"
                )
            named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        return named

    steps_origin: Origin = Origin()
    _total_steps: tuple[tuple[Config, Origin], int | None] | None = None

    @property
    def total_steps(self) -> int | None:
        """How often a schedule that is stepped per step will be stepped, from the start of the run to its end.

        For schedules that need it, such as ``OneCycleLR``. It is an attribute of the task, as ``build_optimizer`` and
        ``build_scheduler`` may be called in a process that has no trainer. It counts updates, or with rounds the local
        steps of a trainer, until ``training.max_epochs``, ``max_steps``, ``max_samples`` or the end of the data; None
        if none of these is known. A resumed run has the number of its present limits; with other trainers or batches it
        is what was stepped before and the steps of what is left. It is exact where all trainers step together, with
        four exceptions (docs/interface.md, section 3). Otherwise trainers are assumed to be equally fast, and dropped
        gradients make it less. With a dictionary of optimizers batches are counted, of which each may
        step an optimizer more than once.

        The first access reads the length of the data: it calls ``train_source``.

        Example::

            >>> from paramserver.config import Config, TrainingConfig
            >>> class Warms(Task):
            ...     def train_source(self, partition):
            ...         return range(100)
            ...     def build_scheduler(self, optimizer):
            ...         return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.total_steps)
            >>> task = Warms()
            >>> task.config = Config(mode="local", training=TrainingConfig(max_epochs=3, batch_size=50))
            >>> task.total_steps
            6
        """
        counted_for = self.config, self.steps_origin
        if self._total_steps is None or self._total_steps[0] != counted_for:
            states = random_states()  # which the data that is trained on must find as they are
            try:
                self._total_steps = counted_for, self._count_steps()
            finally:
                restore_random_states(states)
        return self._total_steps[1]

    def _count_steps(self) -> int | None:
        held: Any = None

        def read(partition: Partition) -> Reading:
            nonlocal held
            data = self.train_source(partition) if held is None else held
            if is_map_style(data):  # the same for all trainers
                held = data
            return resolve_reading(data, partition, self.config, sampler=sampler_of(self, partition))

        with name_user_error("total_steps: train_source, or what it returned,"):
            return total_steps(self.config, read, self.steps_origin)

    # Required methods.

    def build_model(self) -> nn.Module:
        """Return the model, on ``self.devices``.

        Called in every process with torch's seed set to the key ``seed``, so that all processes build equal models;
        with ``server.compute: server`` on the server only, perhaps more than once.
        """
        raise TaskError(_missing(self, "build_model"))

    def build_optimizer(
        self, model: nn.Module
    ) -> torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]:
        """Return the optimizer of the parameters. Called where they live: on the server in mode rpc.

        With rounds of local steps (``training.local_steps``) it is called in every trainer, of which each has its own.

        Several optimizers have parameters of their own each. Those of a list step together, from the loss that
        ``training_step`` returns: Adam for one part of the model, say, and another one for the rest. Those of a
        dictionary take turns, each with losses of its own; see ``self.trainer.optimize``.
        """
        raise TaskError(_missing(self, "build_optimizer"))

    def train_source(self, partition: Partition) -> Any:
        """Return the training samples. Called in every trainer.

        A map-style data set must be the same for all trainers: the library partitions and shuffles it. An iterable
        yields the samples of this trainer only. A ``torch.utils.data.DataLoader`` is taken for its data set, with its
        order, batch size (per trainer), ``collate_fn``, workers and ``drop_last``.
        """
        raise TaskError(_missing(self, "train_source"))

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor | None:
        """Return the loss of a batch: a scalar, the mean over its samples. Called for every batch of a trainer.

        Or a vector with the loss of each sample, of which the mean is taken; see ``log_sample_loss``.

        With a dictionary of optimizers it calls ``self.trainer.optimize(name, loss)`` instead, and returns None.
        """
        raise TaskError(_missing(self, "training_step"))

    # Optional methods.

    def build_scheduler(self, optimizer: Any) -> Any:
        """Return a learning-rate scheduler, which is stepped per global step, or per local step; None for none.

        A dictionary chooses another interval: ``{"scheduler": s, "every": "epoch"}`` or
        ``{"scheduler": s, "every": "validation", "metric": "loss"}``. Called after ``build_optimizer``. With a
        list of optimizers, ``optimizer`` is that list, and the result may be a list with one entry for each, None for
        one without a scheduler. With a dictionary of optimizers, ``optimizer`` and the result are dictionaries by their
        names; a scheduler that is not of another interval is stepped after each update with its optimizer.
        """
        return None

    def sampler(self, partition: Partition) -> Any:
        """Return the order of a pass over the map-style data set of ``train_source``; None = shuffled.

        A sampler of ``torch.utils.data``, or any iterable of indices, or of lists of indices that are whole batches. It
        must be the same on every trainer: the library draws each pass and deals it to the trainers.
        """
        return None

    def validation_source(self, partition: Partition) -> Any:
        """Return the validation samples, like ``train_source``; None for no validation."""
        return None

    def process_sample(self, sample: Any) -> Any:
        """Transform a sample. Called when a batch is formed, in the main thread of the trainer."""
        return sample

    def collate(self, samples: list[Any]) -> Any:
        """Combine samples into a batch, by default with ``torch.utils.data.default_collate``.

        Raises:
            TaskError: the samples cannot be stacked.
        """
        try:
            return default_collate(samples)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TaskError(_cannot_stack(samples, error)) from error

    def validation_step(self, model: nn.Module, batch: Any, valid_batch_idx: int, batch_idx: int) -> Mapping[str, Any]:
        """Return the metrics of a validation batch by name, each the mean over its samples.

        A metric that is no mean is an object with ``update``, ``compute`` (one number), ``reset`` and
        ``merge_state(other)``, such as one of torchmetrics: update it with the batch and return it. The states of all
        batches and trainers are merged before it is computed; then it is reset.

        Called with the model in ``eval()`` mode and without gradients. Required if there is a ``validation_source``.
        """
        raise TaskError(
            f"{type(self).__name__} has a validation_source but no validation_step; write "
            "validation_step(self, model, batch, valid_batch_idx, batch_idx), which returns a dict of means"
        )

    def predict_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Any:
        """Return the outputs for a batch, with one row per sample; ``paramserver predict`` writes them.

        Tensors, or dictionaries, lists and tuples of them. The default is ``model(batch)``, for a batch of one column,
        as of ``TensorDataset(x)``, with that column.

        Raises:
            TaskError: the default is called with a batch of several columns.
        """
        if not isinstance(batch, (list, tuple)):
            return model(batch)
        if len(batch) == 1:
            return model(batch[0])
        raise TaskError(
            f"a batch to predict has {len(batch)} columns, of which the model takes an unknown one; return samples of "
            "one column, or write predict_step(self, model, batch, batch_idx)"
        )

    def callbacks(self) -> Sequence[Callback]:
        """Return further objects whose hooks the loop calls. Called once in every trainer process."""
        return ()

    def on_checkpoint(self, state: dict[str, Any]) -> None:
        """Add state of the task to a checkpoint: tensors, numbers, strings, and lists or dicts of them."""

    def on_resume(self, state: dict[str, Any]) -> None:
        """Restore the state that ``on_checkpoint`` stored."""

    def log(self, name: str, value: float | Tensor, reduce: Reduction = "mean") -> None:
        """Record a number in metrics.jsonl and TensorBoard.

        Call it in a step or hook of a trainer. The record has the number of the step that is being computed; during
        validation, that of the last step.

        Args:
            name: in TensorBoard its tag.
            value: a number, or a tensor with one element.
            reduce: how the values of several trainers in one step become one: ``"mean"``, in a step weighted by the
                samples of their batches, ``"sum"`` or ``"max"``. ``"none"`` keeps one curve per trainer, as do trainers
                that run freely (``bounded``, ``async`` and backup trainers), who take no step together.

        Raises:
            TaskError: there is no trainer in this process, or no such reduction.
        """
        if self.trainer is None:
            raise TaskError(
                f"self.log({name!r}) was called where no trainer runs; log from a trainer's steps and hooks"
            )
        self.trainer.log(name, value, reduce)

    def log_sample_loss(self, losses: Tensor) -> None:
        """Report the loss of each sample of a batch to the sampler of the simulations, if that learns.

        Call it in ``training_step``; the last call counts. It is not needed where ``training_step`` returns a vector of
        losses. Without simulations that the run starts it has no effect.

        Args:
            losses: shape [samples of the batch]. Not weighted by ``density_ratio``.

        Raises:
            TaskError: it is called elsewhere, the shape is another, or a loss is not finite.
        """
        if self.trainer is None:
            raise TaskError("self.log_sample_loss(losses) must be called in training_step, where there is a batch")
        trainer = self.trainer
        may_be_nonfinite = trainer.config.training.nonfinite == "skip"
        trainer.current_step.set_sample_losses(losses, trainer.progress.batch_idx, may_be_nonfinite)


def _missing(task: Task, name: str) -> str:
    return f"{type(task).__name__} lacks {name}; write {REQUIRED[name]}"


def check_task_class(task_class: object, reference: str) -> type[Task]:
    """Return ``task_class`` if it is a complete task.

    Raises:
        TaskError: it is not a subclass of Task, a required method is not overridden, or one takes other arguments.
    """
    if not (isinstance(task_class, type) and issubclass(task_class, Task)):
        raise TaskError(f"task ({reference}) is {task_class!r}; it must be a class derived from paramserver.Task")
    for name, signature in REQUIRED.items():
        if getattr(task_class, name) is getattr(Task, name):
            raise TaskError(f"task ({reference}) lacks {name}; write {signature}")
    _check_signatures(task_class, Task, f"task ({reference})")
    return task_class


def _check_signatures(user_class: type, base: type, what: str) -> None:
    if getattr(getattr(user_class, "__dataclass_params__", None), "frozen", False):
        raise TaskError(f"{what} must be no frozen dataclass, as a run sets its attributes; leave frozen=True out")
    for name, method in {**vars(Hooks), **vars(base)}.items():
        if inspect.isfunction(method) and not name.startswith("_"):
            _check_signature(user_class, name, method, what)


def _check_signature(user_class: type, name: str, method: Callable[..., Any], what: str) -> None:
    """Refuse an override of ``method`` that cannot be called as it is: it would fail where it is called first."""
    own = inspect.getattr_static(user_class, name)
    given = list(inspect.signature(method).parameters)
    cure = f"write {name}({', '.join(given)})"
    if not (callable(own) or hasattr(own, "__get__")):  # a property may return a function
        raise TaskError(f"{what}: {name} ({type(own).__name__}) must be a method; {cure}, or leave it out")
    if own is method or not inspect.isfunction(own):
        return
    try:
        inspect.signature(own, follow_wrapped=False).bind(*given)  # a decorator may add arguments
    except TypeError:
        raise TaskError(
            f"{what}: {name}{inspect.signature(own)} cannot be called with the arguments that it is given; {cure}"
        ) from None


def make_callbacks(task: Task) -> dict[str, Callback]:
    """Return the callbacks of a task by name: that of the class, with a number from the second one on.

    Raises:
        TaskError: ``Task.callbacks`` is no method or returned something else, or a hook takes other arguments.
    """
    where = f"{type(task).__name__}.callbacks"
    method: object = task.callbacks
    if not callable(method):  # an attribute of the object, or what a property returned
        kind = type(method).__name__
        raise TaskError(f"{where} ({kind}) must be a method; write callbacks(self), which returns the list")
    made = method()
    if not isinstance(made, (list, tuple)):
        raise TaskError(
            f"{where} returned {type(made).__name__}; it must return a list of paramserver.Callback objects"
        )
    named: dict[str, Callback] = {}
    for callback in made:
        name = type(callback).__name__
        if not isinstance(callback, Callback):
            raise TaskError(f"{where} returned an object of {name}, which must be derived from paramserver.Callback")
        _check_signatures(type(callback), Callback, f"{where} ({name})")
        number = 1 + sum(type(other).__name__ == name for other in named.values())
        named[name if number == 1 else f"{name}-{number}"] = callback
        callback.task = task
    return named


# The entry of callbacks in the state of a task, which goes wherever that does.
_CALLBACKS = "paramserver.callbacks"


def task_state(task: Task, callbacks: Mapping[str, Callback]) -> dict[str, Any]:
    """Return what a checkpoint stores of a task and of its callbacks."""
    state: dict[str, Any] = {}
    task.on_checkpoint(state)
    stored = {}
    for name, callback in callbacks.items():
        own: dict[str, Any] | None = callback.state_dict()
        # An empty state is one too, to which a callback returns that outlives a loss.
        if own or (own is not None and type(callback).state_dict is not Callback.state_dict):
            stored[name] = own
    if stored:
        state[_CALLBACKS] = stored
    return state


def has_state(part: Mapping[str, Any]) -> bool:
    """Return whether a trainer's part of a checkpoint has a state of its task; it may be empty, unless it was lost."""
    return part["random"] is not None or bool(part["task"])


def restore_task(task: Task, part: Mapping[str, Any], callbacks: Mapping[str, Callback]) -> None:
    """Restore ``task_state``, if the part of a checkpoint has one; that of a callback which is no more is ignored."""
    if not has_state(part):
        return
    own = dict(part["task"])
    stored = own.pop(_CALLBACKS, {})
    task.on_resume(own)
    for name, callback in callbacks.items():
        if name in stored:
            callback.load_state_dict(stored[name])


_WRITE_COLLATE = "write collate(self, samples), or return a DataLoader with a collate_fn"


def _cannot_stack(samples: Sequence[Any], error: Exception) -> str:
    """Explain why ``default_collate`` failed: two samples of different types or shapes, or its own message."""
    kinds = list(dict.fromkeys(_describe_sample(sample) for sample in samples))
    if len(kinds) < 2:
        cause = message_of(error).partition("\n")[0]
        return f"samples ({kinds[0]}) cannot be stacked into a batch ({cause}); {_WRITE_COLLATE}"
    return (
        f"samples of a batch must be alike to be stacked, and these differ: {kinds[0]} and {kinds[1]}; make them alike "
        f"in process_sample(self, sample), or {_WRITE_COLLATE}"
    )


def _describe_sample(sample: Any) -> str:
    """Describe types and shapes of a sample, as ``(Tensor 3x4, int)``."""
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {_describe_sample(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, (tuple, list)):
        return "(" + ", ".join(map(_describe_sample, sample)) + ")"
    shape = "x".join(map(str, getattr(sample, "shape", ())))
    return f"{type(sample).__name__} {shape}".rstrip()


def uses_default_batching(task: Task) -> bool:
    """Whether batches are plain stacks of samples, so that a buffer may gather them without a call per sample."""
    own = task.process_sample, task.collate  # a task may have attributes in the place of these methods
    return [getattr(one, "__func__", None) for one in own] == [Task.process_sample, Task.collate]


def sampler_of(task: Task, partition: Partition) -> Any:
    """Return what ``Task.sampler`` returns.

    Raises:
        TaskError: the task has an attribute of this name instead.
    """
    if "sampler" in vars(task):
        raise TaskError(
            f"{type(task).__name__} has an attribute sampler ({type(task.sampler).__name__}), the name of a method of "
            "Task; return it from sampler(self, partition), or rename it"
        )
    return task.sampler(partition)


def make_task(config: Config, folders: Sequence[Path], create_task: Callable[..., Task] | None = None) -> Task:
    """Create the task of a process, with all random generators seeded, so that it is the same in every process.

    ``create_task`` creates it from ``task_args``; None = its class, loaded by its name.

    Raises:
        TaskError: the class cannot be loaded or is not complete, or its constructor raises or sets what the run sets.
    """
    if create_task is None:
        assert config.task is not None
        create_task = check_task_class(load_object(config.task, "task", folders), config.task)
    seed_all(config.seed, CONSTRUCTOR)
    task = construct_task(create_task, config.task, config.task_args)
    for name in ("config", "devices", "trainer"):
        # Statically: a ``__getattr__`` of the task has what nothing replaces.
        if inspect.getattr_static(task, name, None) is not inspect.getattr_static(Task, name, None):
            raise TaskError(
                f"{type(task).__name__} has an attribute {name} ({type(getattr(task, name)).__name__}), which the run "
                "sets before it calls a method; rename it"
            )
    return task


def _as_given(value: Any) -> Any:
    """Return a copy of a plain value: a constructor may change what it gets, and other processes get it as it was."""
    return copy.deepcopy(value) if is_plain(value) else value


def construct_task(create_task: Callable[..., Task], reference: str | None, task_args: Mapping[str, Any]) -> Task:
    """Call the constructor of a task.

    Raises:
        TaskError: the constructor raises; the message names ``reference``.
    """
    try:
        with keeps_process_state("task"):
            return create_task(**{name: _as_given(value) for name, value in task_args.items()})
    except ParamserverError:
        raise
    except (Exception, SystemExit) as error:  # the constructor is user code and may raise anything
        kind = "takes other arguments" if isinstance(error, TypeError) else "raised"
        name = getattr(create_task, "__name__", "the task")
        raise TaskError(f"task ({reference}): {name}(**task_args) {kind}: {describe_user_error(error)}") from error

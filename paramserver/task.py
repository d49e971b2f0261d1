"""What a user writes: the model, its optimizer, its data, and what one step computes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from paramserver.errors import ParamserverError, TaskError
from paramserver.importing import describe_user_error, load_object
from paramserver.sources.base import Partition

if TYPE_CHECKING:
    from paramserver.config import Config

REQUIRED = {
    "build_model": "build_model(self)",
    "build_optimizer": "build_optimizer(self, model)",
    "train_source": "train_source(self, partition)",
    "training_step": "training_step(self, model, batch, batch_idx)",
}


class Task:
    """Base of a user's task; one instance lives in every process of a run.

    Override ``build_model``, ``build_optimizer``, ``train_source`` and ``training_step``; the rest has defaults.

    Attributes:
        devices: the devices that this process may use, the first one for the inputs; set before any method is called.
        config: the effective configuration.
        trainer: the trainer of this process; None on a server.
    """

    devices: Sequence[torch.device] = (torch.device("cpu"),)
    config: Config
    trainer: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Task:
        """Remember the arguments, so that ``paramserver.run(task, ...)`` can make the same task in other processes."""
        if cls.__init__ is object.__init__ and (args or kwargs):
            # Python checks this by itself only where a class has no __new__ of its own.
            raise TypeError(f"{cls.__name__}() takes no arguments")
        task = super().__new__(cls)
        task._arguments = (args, kwargs)
        return task

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def keyword_arguments(self) -> dict[str, Any]:
        """The arguments that this task was made with, by name.

        Raises:
            TaskError: one of them has no name, because the constructor takes ``*args``.
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

    # What must be written.

    def build_model(self) -> nn.Module:
        """The model, on ``self.devices``. Called with torch's seed set to ``seed``, so that all processes agree."""
        raise TaskError(_missing(self, "build_model"))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of ``model``'s parameters. Called where the parameters live: on the server in rpc."""
        raise TaskError(_missing(self, "build_optimizer"))

    def train_source(self, partition: Partition) -> Any:
        """The samples: a map-style data set (the same for all trainers; it is dealt), or an iterable (this share)."""
        raise TaskError(_missing(self, "train_source"))

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor:
        """The scalar loss of a batch: the mean over its samples."""
        raise TaskError(_missing(self, "training_step"))

    # What may be written.

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """A scheduler, stepped per global step; or ``{"scheduler", "every": "epoch" | "validation", "metric"}``."""
        return None

    def validation_source(self, partition: Partition) -> Any:
        """The validation samples, like ``train_source``; None for no validation."""
        return None

    def process_sample(self, sample: Any) -> Any:
        """Turn a sample into what a batch is made of; called when a batch is formed, in the trainer's main thread."""
        return sample

    def collate(self, samples: list[Any]) -> Any:
        """A batch out of samples.

        Raises:
            TaskError: they cannot be stacked.
        """
        try:
            return default_collate(samples)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TaskError(_cannot_stack(samples, error)) from error

    def validation_step(
        self, model: nn.Module, batch: Any, valid_batch_idx: int, batch_idx: int
    ) -> Mapping[str, Tensor]:
        """Metrics of a validation batch, each the mean over its samples."""
        raise TaskError(
            f"{type(self).__name__} has a validation_source but no validation_step; write "
            "validation_step(self, model, batch, valid_batch_idx, batch_idx), which returns a dict of means"
        )

    # Hooks, in the order in which a run calls them.

    def on_train_start(self) -> None: ...

    def on_epoch_start(self, epoch: int) -> None: ...

    def on_batch_start(self, batch_idx: int) -> None: ...

    def on_batch_end(self, batch_idx: int) -> None: ...

    def on_validation_start(self, batch_idx: int) -> None: ...

    def on_validation_end(self, batch_idx: int) -> None: ...

    def on_epoch_end(self, epoch: int) -> None: ...

    def on_checkpoint(self, state: dict[str, Any]) -> None:
        """Put what must survive into ``state``: tensors, numbers, strings, and lists or dicts of them."""

    def on_resume(self, state: dict[str, Any]) -> None:
        """Take back what ``on_checkpoint`` stored."""

    def on_train_end(self) -> None: ...

    def log(self, name: str, value: float | Tensor) -> None:
        """Record a number in metrics.jsonl and TensorBoard, at the step that is made, in validation at the last one."""
        if self.trainer is None:
            raise TaskError(
                f"self.log({name!r}) was called where no trainer runs; log from a trainer's steps and hooks"
            )
        self.trainer.log(name, value)


def _missing(task: Task, name: str) -> str:
    return f"{type(task).__name__} lacks {name}; write {REQUIRED[name]}"


def check_task_class(task_class: object, reference: str) -> type[Task]:
    """The class, if it is a complete task.

    Raises:
        TaskError: it is not a subclass of Task, or a required method is not written.
    """
    if not (isinstance(task_class, type) and issubclass(task_class, Task)):
        raise TaskError(f"task ({reference}) is {task_class!r}; it must be a class derived from paramserver.Task")
    for name, signature in REQUIRED.items():
        if getattr(task_class, name) is getattr(Task, name):
            raise TaskError(f"task ({reference}) lacks {name}; write {signature}")
    return task_class


def _cannot_stack(samples: Sequence[Any], error: Exception) -> str:
    """Why ``default_collate`` failed: the first two kinds of samples where they differ, else its own words."""
    kinds = list(dict.fromkeys(_kind(sample) for sample in samples))
    if len(kinds) < 2:
        cause = str(error).partition("\n")[0]
        return f"samples ({kinds[0]}) cannot be stacked into a batch ({cause}); write collate(self, samples)"
    return (
        f"samples of a batch must be alike to be stacked, and these differ: {kinds[0]} and {kinds[1]}; make them alike "
        "in process_sample(self, sample), or write collate(self, samples)"
    )


def _kind(sample: Any) -> str:
    """Types and shapes in a sample, as ``(Tensor 3x4, int)``."""
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {_kind(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, (tuple, list)):
        return "(" + ", ".join(map(_kind, sample)) + ")"
    shape = "x".join(map(str, getattr(sample, "shape", ())))
    return f"{type(sample).__name__} {shape}".rstrip()


def uses_default_batching(task: Task) -> bool:
    """Whether batches are plain stacks of samples, so that a buffer may gather them without looking at each."""
    return type(task).process_sample is Task.process_sample and type(task).collate is Task.collate


def make_task(config: Config, folders: Sequence[Path], task_class: type[Task] | None = None) -> Task:
    """The task of a process.

    Args:
        config: names the task and its arguments.
        folders: where its file or module is looked for.
        task_class: the class, where the caller holds it.

    Raises:
        TaskError: it cannot be loaded, is not complete, or its constructor raises.
    """
    if task_class is None:
        assert config.task is not None
        task_class = check_task_class(load_object(config.task, "task", folders), config.task)
    return construct_task(task_class, config.task, config.task_args)


def construct_task(task_class: type[Task], reference: str | None, task_args: Mapping[str, Any]) -> Task:
    """Call the constructor of a task.

    Raises:
        TaskError: it raises; the message names ``reference``.
    """
    try:
        return task_class(**task_args)
    except ParamserverError:
        raise
    except Exception as error:  # a user's constructor may raise anything
        kind = "takes other arguments" if isinstance(error, TypeError) else "raised"
        raise TaskError(
            f"task ({reference}): {task_class.__name__}(**task_args) {kind}: {describe_user_error(error)}"
        ) from error

"""Distributed validation: each trainer evaluates its share, and the sums give the exact mean over all samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from paramserver.config import Config
from paramserver.context import ProcessContext
from paramserver.devices import Placement, move_to_device
from paramserver.errors import TaskError
from paramserver.importing import name_user_error
from paramserver.metrics.records import WeightedSums
from paramserver.parameters.model import autocast
from paramserver.parameters.numerics import explain_errors, to_number
from paramserver.rng import validation_generators
from paramserver.sources.base import Partition
from paramserver.sources.factory import is_map_style, resolve_reading
from paramserver.sources.sampler import SamplerOrder
from paramserver.task import Hooks, Task
from paramserver.trainers.data import collate_of


def _collate_sized(task: Task, collate: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[Any, int]:
    """Collate samples to (batch, number of samples)."""
    with name_user_error("process_sample or collate, for a batch of validation_source,"):
        processed = [task.process_sample(sample) for sample in samples]
        try:
            return collate(processed), len(samples)
        except TaskError as error:  # of samples that cannot be stacked
            raise TaskError(f"a batch of validation_source: {error}") from error


class ValidationShare(Subset[Any]):
    """One trainer's share of a data set."""

    def __init__(self, dataset: Any, indices: Sequence[int], description: str) -> None:
        super().__init__(dataset, indices)
        self.description = description  # what must be the same on every trainer

    def __getitem__(self, idx: int) -> Any:
        with name_user_error(f"validation_source, index {self.indices[idx]} of the data set, position {idx},"):
            return self.dataset[self.indices[idx]]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if not callable(getattr(self.dataset, "__getitems__", None)):
            return [self[idx] for idx in indices]
        own = [self.indices[idx] for idx in indices]
        with name_user_error(f"validation_source, one of the indices {', '.join(map(str, own))} of the data set,"):
            return list(self.dataset.__getitems__(own))  # type: ignore[attr-defined]


class _ReiterableDataset(IterableDataset[Any]):
    """Calls ``make`` for each iteration but the first: an iterator would be empty at the second validation."""

    def __init__(self, first: Iterable[Any], make: Callable[[], Iterable[Any]]) -> None:
        self._first: Iterable[Any] | None = first
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        data, self._first = self._first, None
        return iter(self._make() if data is None else data)


def validation_batches(task: Task, partition: Partition, config: Config) -> DataLoader[Any] | None:
    """Return the validation batches of one trainer, each as (batch, number of samples), for any number of passes.

    They have ``training.validation_batch_size`` samples, or else ``training.batch_size``. Return None if the task has
    no ``validation_source``.

    Raises:
        TaskError: the source is neither a data set nor an iterable, or there is no ``validation_step``.
    """
    with name_user_error("validation_source"):
        data = task.validation_source(partition)
    if data is None:
        return None
    if type(task).validation_step is Task.validation_step:
        raise TaskError(
            f"{type(task).__name__} has a validation_source but no validation_step; write "
            "validation_step(self, model, batch, valid_batch_idx, batch_idx), which returns a dict of means"
        )
    with name_user_error("what validation_source returned"):
        return _batches_of(data, task, partition, config)


def _batches_of(data: Any, task: Task, partition: Partition, config: Config) -> DataLoader[Any]:
    reading = resolve_reading(data, partition, config, "validation_source")
    collate = partial(_collate_sized, task, collate_of(task, reading, "validation_source"))
    size = None if reading.gives_batches else reading.config.training.batch_size
    share: Any
    whole: list[Any] | None = None
    if is_map_style(reading.data):
        sampler: SamplerOrder | None = reading.options.get("sampler")
        length = len(reading.data)
        text = f"a data set of {length} samples"
        order: Sequence[Any] = range(length)
        if sampler is not None:
            text = f"{text} {sampler.description}"
            # Of an index that is repeated it gives a key for each time.
            order = [
                tuple(k % length for k in key) if isinstance(key, tuple) else key % length for key in sampler.indices(0)
            ]
        if not len(order):
            raise TaskError(
                f"validation_source returned {type(data).__name__} without a sample; return None if there is no "
                "validation"
            )
        own = order[partition.index :: partition.count]
        share = ValidationShare(reading.data, range(length) if reading.gives_batches else own, text)
        whole = [list(batch) for batch in own] if reading.gives_batches else None
    elif isinstance(reading.data, Iterable):
        reads_again = isinstance(data, DataLoader)
        share = _ReiterableDataset(
            reading.data, lambda: reading.data if reads_again else task.validation_source(partition)
        )
    else:
        raise TaskError(
            f"validation_source returned {type(data).__name__}; "
            "it must return a map-style data set, an iterable or None"
        )
    # Each pass of a DataLoader draws a seed. A separate generator keeps the random numbers of the training unchanged.
    generator = torch.Generator()
    if whole is not None:
        return DataLoader(share, batch_sampler=whole, collate_fn=collate, generator=generator)
    return DataLoader(share, batch_size=size, collate_fn=collate, generator=generator)


class Validator:
    """Evaluates shares of a validation in one trainer, with the hooks, random numbers and parameters that belong to it.

    ``validated_step`` is the last version of which this trainer evaluated its own share. It ``is_alone`` while it
    evaluates the share of a lost trainer, and the others wait. ``process.kept`` has the batches of its own share.
    ``averages`` returns what takes the place of parameters meanwhile, by name.
    """

    def __init__(
        self,
        task: Task,
        process: ProcessContext,
        hooks: Sequence[Hooks],
        as_input: Callable[[Any], Any],
        model: Callable[[], nn.Module],
        averages: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self.validated_step: int | None = None
        self.is_alone = False
        self._task, self._config, self._placement, self._hooks = task, process.config, process.placement, hooks
        self._trainers = process.trainers
        # By trainer; those of others once these are lost.
        self._loaders: dict[int, Iterable[tuple[Any, int]] | None] = {process.trainer_index: process.kept.validation}
        self._as_input, self._model, self._averages = as_input, model, averages
        self._is_validating = False  # between the hooks
        self._kept: list[tuple[nn.Parameter, Tensor]] = []  # while the model has averages

    def generators(self, step: int, share: int) -> AbstractContextManager[None]:
        """Return a context for the random numbers of the hooks and of the evaluation of a share."""
        return validation_generators(self._config.seed, step, share, self._placement.devices)

    def evaluate(self, share: int, batch_idx: int) -> WeightedSums:
        """Evaluate the share of a trainer, inside of ``generators``; its own comes first, then those of lost ones."""
        if share not in self._loaders:
            self._loaders[share] = validation_batches(self._task, Partition(share, self._trainers), self._config)
        batches = self._loaders[share]
        if batches is None:
            return WeightedSums()
        if not self._is_validating:
            self._is_validating = True
            for hooks in self._hooks:
                hooks.on_validation_start(batch_idx)
        precision, device = self._config.training.precision, self._placement.device
        with self._averaged_parameters():
            return evaluate(self._task, self._model(), batches, batch_idx, self._as_input, precision, device)

    def evaluate_alone(self, step: int, share: int, batch_idx: int) -> WeightedSums:
        """Evaluate the share of a lost trainer, of the version ``step`` that the model has, while the others wait."""
        self.is_alone = True
        try:
            with self.generators(step, share):
                return self.evaluate(share, batch_idx)
        finally:
            self.is_alone = False

    def end(self, batch_idx: int) -> None:
        """Call the hooks after a validation that had batches."""
        if self._is_validating:
            self._is_validating = False
            for hooks in self._hooks:
                hooks.on_validation_end(batch_idx)

    @contextmanager
    def _averaged_parameters(self) -> Iterator[None]:
        """Let the parameters of the model be their averages, where these are validated."""
        averages = self._averages()
        if not averages:
            yield
            return
        own = {name: parameter for name, parameter in self._model().named_parameters() if name in averages}
        self._kept = [(parameter, parameter.data) for parameter in own.values()]
        # By ``data``, without a write: with shared memory the parameters of all processes are the same memory.
        for name, parameter in own.items():
            parameter.data = averages[name].to(parameter.device)
        try:
            yield
        finally:
            self.restore_parameters()

    def restore_parameters(self) -> None:
        """Let the parameters of the model be its own again, also from another thread during an evaluation."""
        for parameter, data in self._kept:
            parameter.data = data
        self._kept = []


def make_input_mover(placement: Placement) -> Callable[[Any], Any]:
    """Return a function that moves a batch to the model's device; a model on several devices moves its inputs."""
    if len(placement.devices) != 1:
        return lambda batch: batch
    return lambda batch: move_to_device(batch, placement.device)


def evaluate(
    task: Task,
    model: nn.Module,
    batches: Iterable[tuple[Any, int]],
    batch_idx: int,
    as_input: Callable[[Any], Any],
    precision: str,
    device: torch.device,
) -> WeightedSums:
    """Run ``validation_step`` over ``batches`` with the model in ``eval()`` and without gradients.

    Return the sums over these batches, weighted by samples. ``batch_idx`` is the number of training batches so far.

    Raises:
        TaskError: ``validation_step`` does not return a dictionary of numbers and metrics.
    """
    total = WeightedSums()
    with eval_mode(model), autocast(device, precision), ExitStack() as at_exit:
        # Also where the loss of a process ends the evaluation: the task, and metrics with it, outlive that.
        at_exit.callback(_reset, total.metrics)
        for valid_batch_idx, (batch, samples) in enumerate(batches):
            batch = as_input(batch)
            with explain_errors("validation_step", batch, model):
                values = task.validation_step(model, batch, valid_batch_idx, batch_idx)
            where = f"validation_step, batch {valid_batch_idx}"
            if not isinstance(values, Mapping):
                raise TaskError(
                    f"{where}: returned {type(values).__name__}; it must return a dict of name: mean over the batch"
                )
            numbers = {}
            for name, value in values.items():
                if not isinstance(name, str):
                    raise TaskError(f"{where}: the name {name!r} must be text; return str(name)")
                if all(callable(getattr(value, method, None)) for method in ("update", "compute")):
                    _add_metric(total.metrics, name, value, f"{where}: {name}")
                else:
                    numbers[name] = _number(value, f"{where}: {name}")
            total.add(numbers, samples)
        if both := sorted(total.metrics.keys() & total.sums.keys()):
            raise TaskError(
                f"validation_step: {both[0]} must be a mean in every batch, or a metric object in every one"
            )
        total.metrics = {name: _detach_metric(metric) for name, metric in total.metrics.items()}
    return total


def _reset(metrics: Mapping[str, Any]) -> None:
    for metric in metrics.values():  # only at the end, as one may have two names
        metric.reset()


def _add_metric(metrics: dict[str, Any], name: str, metric: Any, where: str) -> None:
    """Keep a metric that was returned: the same object with each batch, or one for each batch."""
    for method in ("merge_state", "reset"):
        if not callable(getattr(metric, method, None)):
            raise TaskError(
                f"{where}: {type(metric).__name__} has no {method}; a metric needs update, compute, reset and "
                "merge_state(other), as those of torchmetrics from 1.5 on have"
            )
    known = metrics.setdefault(name, metric)
    if known is not metric:
        known.merge_state(metric)


def _detach_metric(metric: Any) -> Any:
    """Return the state of a metric as an object of its own, on the CPU."""
    taken = copy.deepcopy(metric)
    if isinstance(taken, nn.Module):
        taken.cpu()
    # torchmetrics would add up the states of all ranks once more, which are merged here.
    for name in ("sync_on_compute", "_to_sync"):
        if hasattr(taken, name):
            setattr(taken, name, False)
    return taken


def _number(value: Any, what: str) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TaskError(f"{what} has shape {tuple(value.shape)}; each value must be one number, the mean")
    return to_number(value, what, "each value must be one number, the mean")


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in ``eval()`` without gradients; at the exit restore the mode of each module."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        # By train(), in which a layer may undo what it did in eval(): a module before those in it, of which some may be
        # frozen by the user. One that is in several modules may need it once more. The stub of a model on the server
        # has its flag as a property.
        for module, training in (*flags.items(), *flags.items()):
            if module.training != training and "training" in vars(module):
                module.train(training)
        for module, training in flags.items():
            module.training = training

"""Validation shared by all trainers: each takes its share, and the sums add up to the exact mean over all samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from paramserver.config import Config
from paramserver.devices import Placement, move
from paramserver.errors import TaskError
from paramserver.metrics.records import WeightedSums
from paramserver.parameters.model import autocast
from paramserver.sources.base import Partition
from paramserver.sources.factory import is_map_style
from paramserver.task import Task


class _CountedBatches:
    """Collates a batch and keeps its number of samples beside it."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, samples: list[Any]) -> tuple[Any, int]:
        processed = [self._task.process_sample(sample) for sample in samples]
        return self._task.collate(processed), len(samples)


class _IteratedBatches(IterableDataset[Any]):
    """An iterable that is asked for again each time: an iterator would be empty at the second validation."""

    def __init__(self, first: Iterable[Any], again: Callable[[], Iterable[Any]]) -> None:
        self._first: Iterable[Any] | None = first
        self._again = again

    def __iter__(self) -> Iterator[Any]:
        data, self._first = self._first, None
        return iter(self._again() if data is None else data)


def validation_batches(task: Task, partition: Partition, config: Config) -> DataLoader[Any] | None:
    """The batches of one trainer's share, each with its number of samples; None where the task validates nothing.

    A map-style data set is dealt (trainer i takes every ``count``-th sample from the i-th on: none is repeated or left
    out); an iterable is this trainer's own share, and the task is asked for it at each validation.
    """
    data = task.validation_source(partition)
    if data is None:
        return None
    if type(task).validation_step is Task.validation_step:
        raise TaskError(
            f"{type(task).__name__} has a validation_source but no validation_step; write "
            "validation_step(self, model, batch, valid_batch_idx, batch_idx), which returns a dict of means"
        )
    if is_map_style(data):
        share: Any = Subset(data, range(partition.index, len(data), partition.count))
    elif isinstance(data, Iterable):
        share = _IteratedBatches(data, lambda: task.validation_source(partition))
    else:
        raise TaskError(
            f"validation_source returned {type(data).__name__}; "
            "it must return a map-style data set, an iterable or None"
        )
    size = config.training.validation_batch_size or config.training.batch_size
    # Each pass of a DataLoader draws a seed; from a generator of its own, so that validating leaves training alone.
    return DataLoader(share, batch_size=size, collate_fn=_CountedBatches(task), generator=torch.Generator())


def input_on(placement: Placement) -> Callable[[Any], Any]:
    """Moves a batch to where the model computes, unless it spreads over several devices and takes care of it itself."""
    return (lambda batch: move(batch, placement.device)) if len(placement.devices) == 1 else (lambda batch: batch)


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

    Returns:
        The sums over this share, weighted by samples.

    Raises:
        TaskError: ``validation_step`` does not return a dictionary of numbers.
    """
    total = WeightedSums()
    with evaluating(model), autocast(device, precision):
        for valid_batch_idx, (batch, samples) in enumerate(batches):
            values = task.validation_step(model, as_input(batch), valid_batch_idx, batch_idx)
            total.add(_numbers(values, valid_batch_idx), samples)
    return total


def _numbers(values: Any, valid_batch_idx: int) -> dict[str, float]:
    where = f"validation_step, batch {valid_batch_idx}"
    if not isinstance(values, Mapping):
        raise TaskError(
            f"{where}: returned {type(values).__name__}; it must return a dict of name: mean over the batch"
        )
    return {name: _number(value, f"{where}: {name}") for name, value in values.items()}


def _number(value: Any, what: str) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TaskError(f"{what} has shape {tuple(value.shape)}; each value must be one number, the mean")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TaskError(f"{what} is {value!r}; each value must be one number, the mean") from error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in ``eval()`` without gradients; afterwards each of its modules is as it was."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags.items():
            module.training = training

"""From the object that a task returns to a source."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paramserver.buffers.kinds import buffer_class
from paramserver.config import Config
from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.sources.base import Partition, Source
from paramserver.sources.data_loader import Reading, is_map_style, resolve_reading
from paramserver.sources.dataset import DatasetSource
from paramserver.sources.iterable import IterableSource
from paramserver.sources.stream import Stream


def make_source(
    data: Any, partition: Partition, config: Config, sampler_kwargs: dict[str, Any] | None = None
) -> Source:
    """Return the source for what ``Task.train_source`` returned.

    Args:
        data: a Source, a map-style data set, an iterable or a DataLoader; or what ``resolve_reading`` made of one.
        partition: the trainer's.
        config: of the run.
        sampler_kwargs: of ``DatasetSource``.

    Raises:
        TaskError: ``data`` is neither a source, nor a map-style data set, nor an iterable.
        UnsupportedConfiguration: the run would have no end, or the section ``simulations`` does not suit the source.

    Example::

        >>> from paramserver.config import TrainingConfig
        >>> config = Config(training=TrainingConfig(max_epochs=2))
        >>> source = make_source([10.0, 11.0, 12.0], Partition(0, 1), config, {"shuffle": False})
        >>> [key for key, _ in source.samples(0)]
        [0, 1, 2, 0, 1, 2]
    """
    reading = data if isinstance(data, Reading) else resolve_reading(data, partition, config)
    data, config = reading.data, reading.config
    training = config.training
    if isinstance(data, Stream):
        data.check(config.simulations)
    if isinstance(data, Source):
        source: Source = data
    elif is_map_style(data):
        source = DatasetSource(
            data,
            partition,
            seed=config.seed,
            passes=training.max_epochs,
            sampler_kwargs={**reading.options, **(sampler_kwargs or {})},
            group=training.batch_size,
            groups_ahead=8 if buffer_class(config.buffer.kind).in_order and not training.loader_workers else 1,
        )
    elif isinstance(data, Iterable):
        source = IterableSource(data, partition, seed=config.seed, group=training.batch_size)
    else:
        raise TaskError(
            f"train_source returned {type(data).__name__}; it must return a map-style data set, an iterable, or one of "
            "paramserver.sources"
        )
    if training.max_epochs is not None and not isinstance(source, DatasetSource):
        raise UnsupportedConfiguration(
            f"training.max_epochs ({training.max_epochs}) counts passes over a map-style data set, but train_source "
            "gives one pass; remove it, or use max_steps, max_samples or max_seconds"
        )
    limits = (training.max_epochs, training.max_steps, training.max_samples, training.max_seconds, training.patience)
    if source.endless and all(limit is None for limit in limits):
        raise UnsupportedConfiguration(
            "the run has no end: a data set repeats until a limit; set training.max_epochs, max_steps, max_samples, "
            "max_seconds or patience"
        )
    return source


def check_watermark(watermark: int, total: int | None, partition: Partition) -> None:
    """Refuse a watermark that a trainer's buffer never reaches.

    Raises:
        UnsupportedConfiguration: the watermark is greater than the total.
    """
    if total is not None and watermark > total:
        raise UnsupportedConfiguration(
            f"buffer.watermark ({watermark}) must be at most the {total} samples that trainer {partition.index} of "
            f"{partition.count} will ever get, or it is never reached; lower it"
        )

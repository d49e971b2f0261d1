"""From the object that a task returns to a source. A DataLoader becomes data set, order, batch size and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from paramserver.buffers.kinds import buffer_class
from paramserver.config import Config
from paramserver.config.checks import check_reading
from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.sources.base import Partition, Source
from paramserver.sources.dataset import DatasetSource
from paramserver.sources.iterable import IterableBatches, IterableSource
from paramserver.sources.sampler import SamplerOrder
from paramserver.sources.stream import Stream


@dataclass(frozen=True)
class Reading:
    """Data and how it is read.

    Attributes:
        data: a Source, a map-style data set or an iterable.
        config: of the run, with the batch size and the workers that apply to this data.
        options: of ``deal``: the order that a sampler or a DataLoader gives.
        largest_batch: samples of a whole batch, at most; None = a batch is made of ``training.batch_size`` samples.
            Otherwise each sample of ``data``, or index of the order, is a whole batch.
    """

    data: Any
    config: Config
    options: dict[str, Any] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None
    init_fn: Callable[[int], None] | None = None
    largest_batch: int | None = None

    @property
    def gives_batches(self) -> bool:
        return self.largest_batch is not None


def is_map_style(data: Any) -> bool:
    """Return whether samples are read by index (a Dataset, a list), not only by iterating (an IterableDataset)."""
    return not isinstance(data, (IterableDataset, dict)) and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def resolve_reading(
    data: Any, partition: Partition, config: Config, hook: str = "train_source", sampler: Any = None
) -> Reading:
    """Return how the data is read that ``hook`` returned. ``sampler`` is what ``Task.sampler`` returned.

    Raises:
        TaskError: it is a sampler, or a DataLoader of which something is not supported.
        UnsupportedConfiguration: it contradicts a key that was given.
    """
    if isinstance(data, DataLoader):
        reading = _read_data_loader(data, partition, config, hook, sampler)
    else:
        _refuse_unsupported(data, hook)
        if hook == "validation_source":
            size = config.training.validation_batch_size or config.training.batch_size
            config = _with_training(config, batch_size=size)
        reading = Reading(data, config)
        if sampler is not None:
            if not is_map_style(data):
                raise TaskError(
                    f"the method sampler returned {type(sampler).__name__}, but {hook} gives no map-style data set to "
                    "draw from; return None, or a data set with __getitem__ and __len__"
                )
            reading = replace(reading, options=_order_of(sampler, data, partition, config, hook))
    return _with_whole_batches(reading, hook)


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


def _refuse_unsupported(data: Any, hook: str) -> None:
    _refuse_dict(data, f"{hook} returned {type(data).__name__}")
    if isinstance(data, Sampler):
        raise TaskError(
            f"{hook} returned {type(data).__name__}, a sampler; return the data set that it draws from, and it from "
            "sampler(self, partition)"
        )
    parts = ("batch_size", "batch_sampler", "sampler")
    known = isinstance(data, Source) or is_map_style(data)
    if not known and hasattr(data, "dataset") and any(hasattr(data, name) for name in parts):
        raise TaskError(
            f"{hook} returned {type(data).__name__}, a loader of another library, whose batches would be taken for "
            "samples; return its data set or a torch.utils.data.DataLoader"
        )


def _refuse_dict(data: Any, what: str) -> None:
    if isinstance(data, dict) and type(data).__iter__ is dict.__iter__:
        raise TaskError(
            f"{what}, whose samples would be its keys; return the data set that is one of its values, or a list of them"
        )


def _read_data_loader(
    loader: DataLoader[Any], partition: Partition, config: Config, hook: str, sampler: Any
) -> Reading:
    what = f"{hook} returned {type(loader).__name__}"
    _refuse_unsupported_loader(loader, hook, what)
    config = _with_values_of(loader, config, hook)
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    if isinstance(loader.dataset, IterableDataset):
        if sampler is not None:
            raise TaskError(f"{what} over an iterable data set, of which no sampler can draw; return None from sampler")
        batches = IterableBatches(loader.dataset, loader.batch_size, loader.drop_last)  # type: ignore[arg-type]
        return Reading(batches, config, {}, collate, loader.worker_init_fn, loader.batch_size)

    order: Any = loader.batch_sampler if loader.batch_size is None else loader.sampler
    if sampler is not None:
        if type(order) not in (SequentialSampler, RandomSampler):
            raise TaskError(
                f"{what} with {type(order).__name__}, and the method sampler returned {type(sampler).__name__}; give "
                "one of them"
            )
        order = sampler
    options = _order_of(order, loader.dataset, partition, config, hook)
    if loader.batch_size is not None and "sampler" in options and options["sampler"].gives_batches:
        raise TaskError(f"{options['sampler'].name} of {hook} gives lists of indices; give it as batch_sampler")
    if loader.drop_last:
        options["multiple"] = loader.batch_size
    return Reading(loader.dataset, config, options, collate, loader.worker_init_fn)


def _refuse_unsupported_loader(loader: DataLoader[Any], hook: str, what: str) -> None:
    data = loader.dataset
    _refuse_dict(data, f"{what} over {type(data).__name__}")
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise TaskError(f"{what}, whose own __iter__ would not be called; return a torch.utils.data.DataLoader")
    if loader.batch_sampler is None:
        raise TaskError(f"{what} with batch_size None; give a batch_size, or a batch_sampler for batches of your own")
    if loader.drop_last and hook == "validation_source":
        raise TaskError(f"{what} with drop_last, but validation is the mean over all samples; leave it out")
    if isinstance(data, Source):
        name = type(data).__name__
        raise TaskError(f"{what} over {name}, which needs none; return {name} itself, and set training.batch_size")
    if not isinstance(data, IterableDataset) and not is_map_style(data):
        raise TaskError(f"{what} over {type(data).__name__}, which must have __len__ and __getitem__; write them")


def _with_values_of(loader: DataLoader[Any], config: Config, hook: str) -> Config:
    """Return the config with batch size and workers of a DataLoader; a key that was given must not contradict them."""

    def check(name: str, value: int, is_given: bool) -> None:
        known = getattr(config.training, name)
        if is_given and known != value:
            raise UnsupportedConfiguration(
                f"training.{name} ({known}) must be what the DataLoader of {hook} has ({value}); remove the key"
            )

    size, workers = loader.batch_size, loader.num_workers
    if hook == "validation_source":
        if size is None:
            return config
        check("validation_batch_size", size, config.training.validation_batch_size is not None)
        return _with_training(config, batch_size=size)
    if size is not None:
        check("batch_size", size, config.has_given("batch_size"))
        config = _with_training(config, batch_size=size)
    check("loader_workers", workers, config.has_given("loader_workers"))
    return _with_training(config, loader_workers=workers)


def _order_of(sampler: Any, data: Any, partition: Partition, config: Config, hook: str) -> dict[str, Any]:
    """Return the order of a sampler as options of ``deal``; those of torch that the package has itself are its own."""
    kind, length = type(sampler), len(data)
    if kind is SequentialSampler and len(sampler) == length:
        return {"shuffle": False}
    if kind is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source) == length:
        seed = {} if sampler.generator is None else {"seed": sampler.generator.initial_seed() % 2**62}
        return {"shuffle": True, **seed}
    if kind is DistributedSampler and len(sampler.dataset) == length:
        options = {"shuffle": sampler.shuffle, "seed": sampler.seed}
        if (sampler.num_replicas, sampler.rank) == (partition.count, partition.index):
            return {**options, "drop_last": sampler.drop_last, "pad": not sampler.drop_last}
    inner = getattr(sampler, "sampler", sampler)
    for one in (sampler, inner):
        if getattr(one, "num_replicas", 1) != 1:
            raise TaskError(
                f"{type(one).__name__} of {hook} takes the share of rank {getattr(one, 'rank', '?')} of "
                f"{one.num_replicas}, but the order of a sampler is dealt to the trainers, of which this is "
                f"{partition.index} of {partition.count}; remove it (data is shuffled and dealt anyway), or give "
                "num_replicas=1 and rank=0"
            )
    return {"sampler": SamplerOrder(sampler, data, config.seed)}


def _with_whole_batches(reading: Reading, hook: str) -> Reading:
    """Count in batches, where a sampler or a DataLoader gives whole ones: a batch is then one sample of the buffer."""
    sampler: SamplerOrder | None = reading.options.get("sampler")
    largest = reading.largest_batch
    if sampler is not None and sampler.gives_batches:
        largest = max(map(len, sampler.indices(0)))  # type: ignore[arg-type]
    elif hook != "validation_source":
        check_reading(reading.config)
    if largest is None or hook == "validation_source":
        return replace(reading, largest_batch=largest)
    buffer, training = reading.config.buffer, reading.config.training
    if sampler is not None and reading.config.has_given("batch_size"):
        raise UnsupportedConfiguration(
            f"training.batch_size ({training.batch_size}) must not be given, as {sampler.name} of {hook} gives whole "
            "batches; remove the key"
        )
    if not buffer_class(buffer.kind).in_order:
        raise UnsupportedConfiguration(
            f"buffer.kind ({buffer.kind}) must be fifo, as {hook} gives whole batches, which are served in order; set "
            "it to fifo, or give samples"
        )
    capacity = max(2 * training.accumulate_batches, buffer.capacity // largest)
    config = replace(_with_training(reading.config, batch_size=1), buffer=replace(buffer, capacity=capacity))
    return replace(reading, config=config, largest_batch=largest)


def _with_training(config: Config, **values: Any) -> Config:
    return replace(config, training=replace(config.training, **values))

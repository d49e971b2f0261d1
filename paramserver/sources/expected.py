"""What a run reads of its data, and how many steps it takes with that: known before it starts, or not at all."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile, zip_longest

from paramserver.buffers import make_buffer
from paramserver.config import Config, TrainingConfig, mode_of, num_trainers_of
from paramserver.consistency.factory import consistency_class
from paramserver.online.spec import IngestSpec
from paramserver.sources.base import Partition, Source
from paramserver.sources.dataset import DatasetSource
from paramserver.sources.factory import Reading, make_source


def expected_samples(source: Source, partition: Partition, config: Config) -> int | None:
    """Return the samples that a trainer reads in the whole run; None if only a limit ends them."""
    if source.total is None and config.simulations is not None:
        return IngestSpec.of_run(config).expected_for(partition.index, partition.count)
    return source.total


def expected_batches(samples: int, config: Config) -> int | None:
    """Return the batches that a trainer makes of its samples; None if that depends on timing."""
    buffer = make_buffer(config.buffer.kind, capacity=config.buffer.capacity, pseudo_epochs=config.buffer.pseudo_epochs)
    batches = buffer.expected_batches(samples, config.training.batch_size)
    buffer.close()
    return batches


@dataclass(frozen=True)
class _Share:
    """What a trainer is served until its data ends.

    Attributes:
        batch_size: samples of a batch, at most.
        samples: None = only a limit ends them.
        batches: None = as ``samples``, or their number depends on timing.
        sizes: of whole batches that differ, in their order; None = all have ``batch_size``, except for the last one.
    """

    batch_size: int
    samples: int | None
    batches: int | None
    sizes: Iterator[int] | None


def total_steps(config: Config, read: Callable[[Partition], Reading]) -> int | None:
    """Return how often a schedule of steps is stepped in the whole run; see ``Task.total_steps``.

    ``read`` returns how a trainer reads its data.
    """
    shares = _shares(config, read)
    if mode_of(config).has_servers and not consistency_class(config.server).lockstep:
        return _free_running_steps(config, shares)
    return _lockstep_steps(config.training, shares)


def _shares(config: Config, read: Callable[[Partition], Reading]) -> list[_Share]:
    trainers, shares = num_trainers_of(config), []
    drawn: DatasetSource | None = None  # draws each pass of whole batches for all trainers, as it is the same
    for partition in (Partition(index, trainers) for index in range(trainers)):
        reading = read(partition)
        source, training = make_source(reading, partition, config), reading.config.training
        times = reading.config.buffer.pseudo_epochs
        samples = expected_samples(source, partition, config)
        batches = None if samples is None else expected_batches(samples, reading.config)
        served = None if samples is None or batches is None else samples * times
        sizes = None
        if isinstance(source, DatasetSource) and source.gives_batches:
            drawn = drawn or source
            sizes = (size for size in drawn.batch_sizes(partition) for _ in range(times))
        share = _Share(reading.largest_batch or training.batch_size, served, batches, sizes)
        if batches is None and sizes is None:
            return [share] * trainers  # no other changes when the run ends
        shares.append(share)
    return shares


def _lockstep_steps(training: TrainingConfig, shares: Sequence[_Share]) -> int | None:
    """Return the updates, or with rounds the local steps of the trainer with the most data, as ``decide`` makes them.

    Active trainers have taken the same number of batches. A step takes ``batches_per_step`` of each, or as many as the
    one with the fewest has left. So all steps are alike until the data of a trainer ends.
    """
    per_step, max_steps = training.batches_per_step, training.max_steps
    limits = [] if max_steps is None else [max_steps * per_step]
    if training.max_samples is not None:
        limits.append(_batches_until(training.max_samples, shares, *limits))
    ends = sorted({share.batches for share in shares if share.batches is not None})
    if any(share.batches is None for share in shares):
        ends = [_ceil_div(min(limits), per_step) * per_step] if limits else []  # whole steps
    elif training.uneven_inputs == "stop":
        ends = ends[:1]
    taken = steps = gradients = 0  # batches of a trainer, global steps, and gradients of a trainer
    for end in ends:
        more = max(_ceil_div(min([end, *limits]) - taken, per_step), 0)
        if max_steps is not None:
            more = min(more, max_steps - steps)
        batches = min(more * per_step, end - taken)
        taken, steps = taken + batches, steps + more
        gradients += _ceil_div(batches, training.accumulate_batches)
    return gradients if ends else None


def _ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def _batches_until(samples: int, shares: Sequence[_Share], limit: int | None = None) -> int:
    """Return after how many batches of each trainer all have taken so many samples together.

    If that is after the end of their data or after ``limit``, return any number that is not less.
    """
    sizes = [share.sizes for share in shares if share.sizes is not None]
    if sizes:
        sums = islice(accumulate(map(sum, zip_longest(*sizes, fillvalue=0))), limit)
        return 1 + sum(1 for _ in takewhile(lambda total: total < samples, sums))

    def after(batches: int) -> int:
        read = ((share.batch_size * batches, share.samples) for share in shares)
        return sum(most if total is None else min(most, total) for most, total in read)

    most = _ceil_div(samples, min(share.batch_size for share in shares))
    return bisect_left(range(most), samples, hi=most, key=after)


def _free_running_steps(config: Config, shares: Sequence[_Share]) -> int | None:
    """As of ``_lockstep_steps``, for trainers that are equally fast, whose updates have all batches."""
    training, trainers = config.training, len(shares)
    taken = consistency_class(config.server).gradients_per_update(config.server, trainers)  # gradients of an update
    per_update = training.local_steps * taken / trainers if training.has_rounds else 1
    ends = [] if training.max_steps is None else [training.max_steps * per_update]
    if training.max_samples is not None:
        samples_per_update = shares[-1].batch_size * training.batches_per_step * taken
        ends.append(_ceil_div(training.max_samples, samples_per_update) * per_update)
    batches = [share.batches for share in shares if share.batches is not None]
    if len(batches) == trainers:
        gradients = [_ceil_div(number, training.accumulate_batches) for number in batches]
        ends.append(max(gradients) if training.has_rounds else sum(gradients) / taken)
    return math.ceil(min(ends)) if ends else None

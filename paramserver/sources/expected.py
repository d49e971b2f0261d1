"""What a run reads of its data, and how many steps it takes with that: known before it starts, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable

from paramserver.buffers import make_buffer
from paramserver.config import Config, mode_of, num_trainers_of
from paramserver.consistency.factory import consistency_class
from paramserver.online.spec import IngestSpec
from paramserver.sources.base import Partition, Source
from paramserver.sources.data_loader import Reading
from paramserver.sources.factory import make_source


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


def total_steps(config: Config, read: Callable[[Partition], Reading]) -> int | None:
    """Return how often a schedule of steps is stepped in the whole run; see ``Task.total_steps``.

    ``read`` returns how a trainer reads its data.
    """
    training, trainers = config.training, num_trainers_of(config)
    lockstep, taken = True, trainers  # gradients of an update
    if mode_of(config).has_servers:
        rules = consistency_class(config.server)
        lockstep, taken = rules.lockstep, rules.gradients_per_update(config.server, trainers)
    gradients: list[int] = []  # of each trainer, until its data ends
    samples_per_batch, is_known = training.batch_size, True
    for partition in (Partition(index, trainers) for index in range(trainers) if is_known):
        reading = read(partition)
        samples_per_batch = reading.largest_batch or reading.config.training.batch_size
        samples = expected_samples(make_source(reading, partition, config), partition, config)
        batches = None if samples is None else expected_batches(samples, reading.config)
        is_known = batches is not None
        gradients.append(math.ceil((batches or 0) / training.accumulate_batches))
    # Updates until a limit; with rounds the local steps of a trainer that is as fast as the others.
    per_update = training.local_steps * taken / trainers if training.has_rounds else 1
    samples_per_update = samples_per_batch * training.batches_per_step * taken
    ends = [] if training.max_steps is None else [training.max_steps * per_update]
    if training.max_samples is not None:
        ends.append(math.ceil(training.max_samples / samples_per_update) * per_update)
    if is_known:
        first = min(gradients) if lockstep and training.uneven_inputs == "stop" else max(gradients)
        ends.append(first if lockstep or training.has_rounds else sum(gradients) / taken)
    return math.ceil(min(ends)) if ends else None

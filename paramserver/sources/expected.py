"""What a run reads of its data, and how many steps it takes with that: known before it starts, or not at all."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, repeat, takewhile, zip_longest
from typing import Any

from paramserver.buffers import make_buffer
from paramserver.buffers.positions import AppliedPositions
from paramserver.config import Config, mode_of, num_trainers_of
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
class Origin:
    """Where a run counts the steps of its schedules from: its start, or a resume with another size of its steps.

    Attributes:
        step, samples: the updates made before, and the samples that were applied.
        scheduled: how often a schedule of steps was stepped before.
        batch_idx: the batches that each trainer had made.
        epoch: the first pass over a data set of which no sample was served before.
        due: how often each trainer serves samples that come before that pass; less than 0 for samples of later ones.
        accumulate_batches, settings: of the config, from then on; of all settings that decide on the size of a step.
    """

    step: int = 0
    samples: int = 0
    scheduled: int = 0
    batch_idx: Sequence[int] = ()
    epoch: int = 0
    due: Sequence[int] = ()
    accumulate_batches: int = 1
    settings: str = ""

    @classmethod
    def of_start(cls, config: Config) -> Origin:
        training, buffer = config.training, config.buffer
        sizes = [training.batch_size, training.accumulate_batches, training.local_steps, buffer.pseudo_epochs]
        settings = repr([*sizes, num_trainers_of(config), config.task_args])
        return cls(accumulate_batches=training.accumulate_batches, settings=settings)

    def at_resume(
        self,
        run: Mapping[str, Any],
        before: Sequence[Mapping[str, Any]],
        parts: Sequence[Mapping[str, Any]],
        config: Config,
    ) -> Origin:
        """Return the origin from a checkpoint on.

        Args:
            run: the state of the run in the checkpoint.
            before: the parts of the trainers in it.
            parts: the parts with which the trainers continue.
            config: with which they do.
        """
        scheduled = self.scheduled + run["step"] - self.step
        if config.training.has_rounds or run.get("train_losses"):  # by the names of optimizers, of which each has calls
            batches = [part["counters"]["batch_idx"] for part in before]
            most = max(now - earlier for now, earlier in zip(batches, self.batch_idx or repeat(0), strict=False))
            scheduled = self.scheduled + _ceil_div(most, self.accumulate_batches)
        epoch, due = _servings_due(before, config.buffer.pseudo_epochs)
        if len(parts) != len(before):
            due = _divided(due, parts, config.buffer.pseudo_epochs)
        return replace(
            Origin.of_start(config),
            step=run["step"],
            samples=run["samples"],
            scheduled=scheduled,
            batch_idx=[part["counters"]["batch_idx"] for part in parts],
            epoch=epoch,
            due=due,
        )


def _servings_due(parts: Sequence[Mapping[str, Any]], times: int) -> tuple[int, list[int]]:
    """Return ``epoch`` and ``due`` of an ``Origin`` for the trainers whose parts these are."""
    reads = [_read_and_served(part) for part in parts]
    unknown: Mapping[str, Any] = {"epoch": 0, "rest": ()}
    states = [part["source"] if part["source"].keys() >= {"length", "rest"} else unknown for part in parts]
    known = [state.get("order", {}).get("per_pass", 0) for state in states]
    # That of a trainer which has read nothing may be unknown.
    orders = [(state["epoch"], len(state["rest"]), own or max(known)) for state, own in zip(states, known, strict=True)]
    epoch = 0
    for (first, rest, per_pass), (position, _) in zip(orders, reads, strict=True):
        epoch = max(epoch, first + (_ceil_div(max(position - rest, 0), per_pass) if per_pass else 0))
    due = [(rest + (epoch - first) * per_pass) * times for first, rest, per_pass in orders]
    return epoch, [number - served for number, (_, served) in zip(due, reads, strict=True)]


def _read_and_served(part: Mapping[str, Any]) -> tuple[int, int]:
    """Return the position up to which a trainer has served samples, and how often it has."""
    if part["buffer"] is None:  # it was lost
        applied = AppliedPositions()
        applied.load_state_dict(part["applied"])
        return max(applied.above, default=applied.low - 1) + 1, applied.count
    counters, position = part["buffer"]["counters"], part["buffer"]["counters"]["puts"]
    held = zip(part["buffer"]["positions"].tolist(), part["buffer"]["served"].tolist(), strict=True)
    unserved = {at for at, served in held if not served}
    while position - 1 in unserved:
        position -= 1
    return position, counters["gets"]


def _divided(due: Sequence[int], parts: Sequence[Mapping[str, Any]], times: int) -> list[int]:
    """Return how much of what is due other trainers serve: what their buffers hold, and the rest sample by sample."""
    buffers = [part["buffer"] for part in parts]
    held = [0 if b is None else len(b["served"]) * times - b["counters"]["gets"] for b in buffers]
    rest = _ceil_div(sum(due) - sum(held), times)
    return [own + (rest + len(parts) - 1 - i) // len(parts) * times for i, own in enumerate(held)]


@dataclass(frozen=True)
class _Share:
    """What a trainer is served from the origin on until its data ends.

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


def total_steps(config: Config, read: Callable[[Partition], Reading], origin: Origin) -> int | None:
    """Return how often a schedule of steps is stepped in the whole run; see ``Task.total_steps``.

    ``read`` returns how a trainer reads its data.
    """
    shares, training = _shares(config, read, origin), config.training
    limits = {"max_steps": origin.step, "max_samples": origin.samples}
    left = {name: max(limit - limits[name], 0) for name in limits if (limit := getattr(training, name)) is not None}
    config = replace(config, training=replace(training, **left))
    is_lockstep = not mode_of(config).has_servers or consistency_class(config.server).lockstep
    steps = (_lockstep_steps if is_lockstep else _free_running_steps)(config, shares)
    return None if steps is None else origin.scheduled + steps


def _shares(config: Config, read: Callable[[Partition], Reading], origin: Origin) -> list[_Share]:
    trainers, shares = num_trainers_of(config), []
    drawn: DatasetSource | None = None  # draws each pass of whole batches for all trainers, as it is the same
    for partition in (Partition(index, trainers) for index in range(trainers)):
        reading = read(partition)
        source, training = make_source(reading, partition, config), reading.config.training
        times, due = reading.config.buffer.pseudo_epochs, origin.due[partition.index] if origin.due else 0
        samples = expected_samples(source, partition, config)
        served = batches = None
        if samples is not None and expected_batches(samples, reading.config) is not None:
            passed = origin.epoch * source.order.per_pass if isinstance(source, DatasetSource) else 0
            served = max((samples - passed) * times + due, 0)
            batches = _ceil_div(served, training.batch_size)
        most, sizes = reading.largest_batch or training.batch_size, None
        if isinstance(source, DatasetSource) and source.gives_batches:
            drawn = drawn or source
            whole = (size for size in drawn.batch_sizes(partition, origin.epoch) for _ in range(times))
            sizes = chain(repeat(most, due), whole)  # those of batches that another number of trainers left are unknown
        share = _Share(most, served, batches, sizes)
        if batches is None and sizes is None:
            return [share] * trainers  # no other changes when the run ends
        shares.append(share)
    return shares


def _lockstep_steps(config: Config, shares: Sequence[_Share]) -> int | None:
    """Return the updates, or with rounds the local steps of the trainer with the most data, as ``decide`` makes them.

    Active trainers have taken the same number of batches. A step takes ``batches_per_step`` of each, or as many as the
    one with the fewest has left. So all steps are alike until the data of a trainer ends.
    """
    training = config.training
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
    if sizes and samples:
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

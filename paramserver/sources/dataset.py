"""A map-style data set, dealt to the trainers and shuffled for each pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from paramserver.errors import TaskError, UnsupportedConfiguration
from paramserver.sources.base import Partition, Source


def deal(
    length: int,
    partition: Partition,
    *,
    seed: int,
    epoch: int,
    shuffle: bool = True,
    drop_last: bool = False,
    pad: bool = False,
) -> list[int]:
    """The indices of one trainer's share of one pass.

    The order is that of ``torch.utils.data.DistributedSampler``: a permutation seeded with ``seed + epoch``, of which
    trainer i takes every ``count``-th index from the i-th on. The tail is neither padded nor dropped, so that every
    sample is dealt exactly once; ``pad`` repeats indices from the front and ``drop_last`` cuts the tail, as there.
    """
    if shuffle:
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(length, generator=generator).tolist()
    else:
        order = list(range(length))
    if drop_last:
        order = order[: length - length % partition.count]
    elif pad and length % partition.count:
        missing = partition.count - length % partition.count
        order += (order * (missing // max(length, 1) + 1))[:missing]
    return order[partition.index :: partition.count]


class DatasetSource(Source):
    """One trainer's share of a map-style data set, pass after pass. A sample's key is its index in the data set.

    Args:
        dataset: with ``__len__`` and ``__getitem__``.
        partition: whose share.
        seed: of the shuffling; the same for all trainers.
        passes: how many passes are served; None for no end.
        sampler_kwargs: ``shuffle``, ``pad``, ``drop_last`` and ``seed``, where a trainer wants them otherwise.
        group: how many samples are read together, as a DataLoader reads a batch; ``__getitems__`` is used if offered.
    """

    refetchable = True

    def __init__(
        self,
        dataset: Any,
        partition: Partition,
        *,
        seed: int,
        passes: int | None = None,
        sampler_kwargs: dict[str, Any] | None = None,
        group: int = 32,
    ) -> None:
        self.dataset = dataset
        self.length = len(dataset)
        self.partition = partition
        self.passes = passes
        self.group = group
        self.options = {"seed": seed, **(sampler_kwargs or {})}
        if self.length == 0:
            raise TaskError("the training data set is empty; train_source must return at least one sample")
        try:
            self.share = len(self._order(0))
        except TypeError as error:
            raise UnsupportedConfiguration(
                f"sampler_kwargs ({self.options}) must be among seed, shuffle, pad, drop_last"
            ) from error
        if self.share == 0:
            raise TaskError(
                f"trainer {partition.index} gets none of the {self.length} training samples; "
                f"use at most {self.length} trainers"
            )

    def _order(self, epoch: int) -> Sequence[int]:
        return deal(self.length, self.partition, epoch=epoch, **self.options)

    def samples(self, position: int) -> Iterator[tuple[int, Any]]:
        return chain.from_iterable(self.groups(position))

    def groups(self, position: int) -> Iterator[Sequence[tuple[int, Any]]]:
        epoch, offset = divmod(position, self.share)
        while self.passes is None or epoch < self.passes:
            order = self._order(epoch)
            for start in range(offset, len(order), self.group):
                indices = list(order[start : start + self.group])
                yield from self._group(indices)
            epoch, offset = epoch + 1, 0

    def _group(self, indices: list[int]) -> Iterator[Sequence[tuple[int, Any]]]:
        """The samples of these indices; where one cannot be read those before it, and then what was raised."""
        group: list[tuple[int, Any]] = []
        try:
            group.extend(zip(indices, self._fetch_all(indices), strict=True))
        except BaseException:
            if group:
                yield group
            raise
        yield group

    def _fetch_all(self, indices: list[int]) -> Iterator[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return iter(self.dataset.__getitems__(indices))
        return (self.dataset[i] for i in indices)

    def fetch(self, key: Any) -> Any:
        return self.dataset[key]

    @property
    def endless(self) -> bool:
        return self.passes is None

    @property
    def total(self) -> int | None:
        return None if self.passes is None else self.passes * self.share

    @cached_property  # it is asked for in every step, and costs a pass over the indices
    def pass_samples(self) -> int:
        count = self.partition.count
        return sum(
            len(deal(self.length, Partition(i, count), epoch=0, **{**self.options, "shuffle": False}))
            for i in range(count)
        )

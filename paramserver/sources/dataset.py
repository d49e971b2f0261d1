"""A map-style data set, dealt to the trainers and shuffled for each pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from paramserver.errors import CheckpointError, TaskError, UnsupportedConfiguration
from paramserver.sources.base import Leftover, Partition, Source
from paramserver.sources.share import Share


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
        self._take(Share(self.length, partition, self.options))
        try:
            mine = self.share.per_pass
        except TypeError as error:
            raise UnsupportedConfiguration(
                f"sampler_kwargs ({self.options}) must be among seed, shuffle, pad, drop_last"
            ) from error
        if mine == 0:
            raise TaskError(
                f"trainer {partition.index} gets none of the {self.length} training samples; "
                f"use at most {self.length} trainers"
            )

    def samples(self, position: int) -> Iterator[tuple[int, Any]]:
        return chain.from_iterable(self.groups(position))

    def groups(self, position: int) -> Iterator[Sequence[tuple[int, Any]]]:
        for block in self.share.blocks(position, self.passes):
            for start in range(0, len(block), self.group):
                yield from self._group(block[start : start + self.group])

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
        return None if self.passes is None else self.share.total(self.passes)

    @cached_property  # it is asked for in every step, and costs a pass over the indices
    def pass_samples(self) -> int:
        count = self.partition.count
        return sum(Share(self.length, Partition(i, count), self.options).per_pass for i in range(count))

    def state_dict(self) -> dict[str, Any]:
        return {"length": self.length, "rest": self._rest, "epoch": self.share.epoch}

    def load_state_dict(self, state: dict[str, Any], mark: Any = None) -> None:
        self._check_length(state)
        self._take(replace(self.share, rest=state["rest"].tolist(), epoch=state["epoch"]))

    def reshard(self, leftovers: Sequence[Leftover], held: Sequence[Any]) -> None:
        for leftover in leftovers:
            self._check_length(leftover.state)
        self._take(self.share.taking_over(leftovers, held))

    def _take(self, share: Share) -> None:
        # As a tensor, which is copied at once at every checkpoint, where a list would be copied number by number.
        self.share, self._rest = share, torch.tensor(share.rest, dtype=torch.int64)

    def _check_length(self, state: Mapping[str, Any]) -> None:
        if state["length"] != self.length:
            raise CheckpointError(
                f"the training data set has {self.length} samples, it must have {state['length']} as when the "
                "checkpoint was written; use init_from to go on from the weights with other data"
            )

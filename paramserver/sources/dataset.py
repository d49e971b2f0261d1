"""Which indices of a data set a trainer serves, and in which order.

A map-style data set, dealt to the trainers and shuffled for each pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, zip_longest
from typing import Any

import torch

from paramserver.errors import CheckpointError, TaskError, UnsupportedConfiguration
from paramserver.sources.base import Partition, ResumePosition, Source


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


@dataclass(frozen=True)
class PartitionOrder:
    """One trainer's sequence of indices; position n is its n-th index.

    Args:
        length: of the data set.
        partition: whose share.
        options: of ``deal``: seed, shuffle, drop_last, pad.
        rest: what comes before the first pass: a trainer's part of what an earlier number of trainers had begun.
        epoch: the first whole pass.
    """

    length: int
    partition: Partition
    options: Mapping[str, Any]
    rest: Sequence[int] = ()
    epoch: int = 0

    @cached_property
    def per_pass(self) -> int:
        """How many indices of one pass are this trainer's."""
        return len(deal(self.length, self.partition, epoch=0, **{**self.options, "shuffle": False}))

    def total(self, passes: int) -> int:
        """How many indices there are until ``passes`` passes over the data set are done."""
        return len(self.rest) + max(passes - self.epoch, 0) * self.per_pass

    def blocks(self, position: int, passes: int | None) -> Iterator[list[int]]:
        """The sequence from ``position`` on, in blocks of one pass; endless where ``passes`` is None."""
        if position < len(self.rest):
            yield list(self.rest[position:])
        epoch, offset = divmod(max(position - len(self.rest), 0), self.per_pass)
        epoch += self.epoch
        while passes is None or epoch < passes:
            yield deal(self.length, self.partition, epoch=epoch, **self.options)[offset:]
            epoch, offset = epoch + 1, 0

    def first_unserved_pass(self, position: int) -> int:
        """The first pass of which nothing lies before ``position``."""
        return self.epoch + -(-max(position - len(self.rest), 0) // self.per_pass)

    def rewind(self, position: int, unserved: Sequence[int]) -> tuple[int, list[int]]:
        """The position before the last indices that are all among ``unserved``, and those of them that lie earlier.

        A buffer reads ahead as fast as it can. What it did not serve is as if it had never been read, so that how far
        it had come does not matter: entirely so for a FIFO, which serves in order.
        """
        known = Counter(unserved)
        start = max(position - len(unserved), 0)
        ahead = islice(chain.from_iterable(self.blocks(start, None)), position - start)
        for index in reversed(list(ahead)):
            if not known[index]:
                break
            known[index] -= 1
            position -= 1
        earlier = []
        for index in unserved:
            if known[index]:
                known[index] -= 1
                earlier.append(index)
        return position, earlier

    def reshard(self, leftovers: Sequence[ResumePosition], held: Sequence[int]) -> PartitionOrder:
        """This trainer's share, where ``leftovers`` tell what another number of trainers had come to.

        What those had begun is dealt anew, in turn from each of them: the samples that they held and had not served,
        and the indices up to the end of the last pass of which one of them had served something. So each pass still
        serves each sample once.

        Args:
            leftovers: one for each of the earlier trainers, in their order.
            held: the keys that this trainer's buffer begins with; its positions count them.
        """
        begun = []
        for i, one in enumerate(leftovers):
            partition = Partition(i, len(leftovers))
            share = PartitionOrder(self.length, partition, self.options, one.state["rest"].tolist(), one.state["epoch"])
            begun.append((share, *share.rewind(one.position, one.unserved)))
        epoch = max(share.first_unserved_pass(position) for share, position, _ in begun)
        left = [[*earlier, *chain.from_iterable(share.blocks(at, epoch))] for share, at, earlier in begun]
        in_turn = [index for turn in zip_longest(*left) for index in turn if index is not None]
        return replace(self, rest=[*held, *in_turn[self.partition.index :: self.partition.count]], epoch=epoch)


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
        self._take(PartitionOrder(self.length, partition, self.options))
        try:
            mine = self.order.per_pass
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
        for block in self.order.blocks(position, self.passes):
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
        return None if self.passes is None else self.order.total(self.passes)

    @cached_property  # it is asked for in every step, and costs a pass over the indices
    def pass_samples(self) -> int:
        count = self.partition.count
        return sum(PartitionOrder(self.length, Partition(i, count), self.options).per_pass for i in range(count))

    def state_dict(self) -> dict[str, Any]:
        return {"length": self.length, "rest": self._rest, "epoch": self.order.epoch}

    def load_state_dict(self, state: dict[str, Any], mark: Any = None) -> None:
        self._check_length(state)
        self._take(replace(self.order, rest=state["rest"].tolist(), epoch=state["epoch"]))

    def reshard(self, leftovers: Sequence[ResumePosition], held: Sequence[Any]) -> None:
        for leftover in leftovers:
            self._check_length(leftover.state)
        self._take(self.order.reshard(leftovers, held))

    def _take(self, share: PartitionOrder) -> None:
        # As a tensor, which is copied at once at every checkpoint, where a list would be copied number by number.
        self.order, self._rest = share, torch.tensor(share.rest, dtype=torch.int64)

    def _check_length(self, state: Mapping[str, Any]) -> None:
        if state["length"] != self.length:
            raise CheckpointError(
                f"the training data set has {self.length} samples, it must have {state['length']} as when the "
                "checkpoint was written; use init_from to go on from the weights with other data"
            )

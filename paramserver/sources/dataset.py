"""A map-style data set as a source: partitioned among the trainers, shuffled for each pass, resharded on resume.

``deal`` is the order of one pass, ``PartitionOrder`` the sequence of indices of one trainer over all passes, and
``DatasetSource`` reads the samples of these indices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, repeat, zip_longest
from operator import getitem
from typing import Any

import torch

from paramserver.buffers.positions import AppliedPositions
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
    """Return the indices of one trainer's share of one pass.

    The order is that of ``torch.utils.data.DistributedSampler``: a permutation seeded with ``seed + epoch``, of which
    trainer i gets every ``count``-th index from the i-th on. By default the tail is neither padded nor dropped, so each
    sample is assigned exactly once; ``pad`` repeats indices from the front and ``drop_last`` drops the tail, as there.

    Args:
        length: of the data set.
        partition: the trainer's.
        seed, epoch: of the permutation.
        shuffle, drop_last, pad: as above.

    Example::

        >>> [deal(7, Partition(i, 2), seed=0, epoch=0, shuffle=False) for i in range(2)]
        [[0, 2, 4, 6], [1, 3, 5]]
        >>> deal(7, Partition(1, 2), seed=0, epoch=0, shuffle=False, pad=True)
        [1, 3, 5, 0]
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
    """The sequence of indices of one trainer; position n is its n-th index.

    Args:
        length: of the data set.
        partition: the trainer's.
        options: of ``deal``: seed, shuffle, drop_last, pad.
        rest: indices before the first pass: the trainer's share of the passes that another number of trainers began.
        epoch: the first whole pass.

    Example::

        >>> order = PartitionOrder(5, Partition(0, 1), {"seed": 0, "shuffle": False}, rest=[3, 4], epoch=1)
        >>> order.total(passes=2)
        7
        >>> list(order.blocks(1, passes=2))
        [[4], [0, 1, 2, 3, 4]]
    """

    length: int
    partition: Partition
    options: Mapping[str, Any]
    rest: Sequence[int] = ()
    epoch: int = 0

    @cached_property
    def per_pass(self) -> int:
        """How many indices of one pass belong to this trainer."""
        return len(deal(self.length, self.partition, epoch=0, **{**self.options, "shuffle": False}))

    def total(self, passes: int) -> int:
        """Return how many indices there are until the end of ``passes`` passes over the data set."""
        return len(self.rest) + max(passes - self.epoch, 0) * self.per_pass

    def blocks(self, position: int, passes: int | None) -> Iterator[list[int]]:
        """Return the sequence from ``position`` on, in blocks of one pass; endless if ``passes`` is None."""
        if position < len(self.rest):
            yield list(self.rest[position:])
        epoch, offset = divmod(max(position - len(self.rest), 0), self.per_pass)
        epoch += self.epoch
        while passes is None or epoch < passes:
            yield deal(self.length, self.partition, epoch=epoch, **self.options)[offset:]
            epoch, offset = epoch + 1, 0

    def first_unserved_pass(self, position: int) -> int:
        """Return the first pass of which no index is before ``position``."""
        return self.epoch + -(-max(position - len(self.rest), 0) // self.per_pass)

    def rewind(self, position: int, unserved: Sequence[int]) -> tuple[int, list[int]]:
        """Move ``position`` back over the indices that were read and never served.

        The feeder reads ahead as fast as the buffer has room. After the rewind, an unserved sample counts as not read,
        so the result does not depend on how far it read ahead: not at all for a FIFO, which serves in order.

        Returns:
            The position before the longest run of indices that are all in ``unserved``, and the unserved indices that
            are earlier than that.
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

    def unapplied(self, applied: Mapping[str, Any], times_due: int = 1) -> tuple[int, list[int], list[tuple[int, int]]]:
        """Find what is left before the last sample that was applied.

        Args:
            applied: ``AppliedPositions.state_dict()``.
            times_due: how often each sample is applied.

        Returns:
            The position after that sample, the indices before it that were not applied, and (index, times applied) of
            those that were applied fewer times than due.
        """
        account = AppliedPositions()
        account.load_state_dict(applied)
        position = max(account.above, default=account.low - 1) + 1
        unserved, partly = [], []
        block = islice(chain.from_iterable(self.blocks(account.low, None)), position - account.low)
        for n, index in enumerate(block, account.low):
            times = account.above.get(n, 0)
            if not times:
                unserved.append(index)
            elif times < times_due:
                partly.append((index, times))
        return position, unserved, partly

    def reshard(
        self, leftovers: Sequence[ResumePosition], held: Sequence[int]
    ) -> tuple[PartitionOrder, dict[int, int]]:
        """Return this trainer's order for what another number of trainers left.

        The passes that those began are distributed again, in turn from each of them: the samples that they held and had
        not served as often as due, and the indices up to the end of the last pass of which one of them had served a
        sample. So each pass still serves each sample as often as is due.

        Args:
            leftovers: one for each of the earlier trainers, in their order.
            held: the keys that this trainer's buffer starts with; they count as its first positions.

        Returns:
            The order, and {position: times} of samples that were applied already, but fewer times than due.
        """
        rewound, partly = [], []
        for i, one in enumerate(leftovers):
            partition = Partition(i, len(leftovers))
            order = PartitionOrder(self.length, partition, self.options, one.state["rest"].tolist(), one.state["epoch"])
            position, unserved, begun = one.position, one.unserved, one.partly
            if one.applied is not None:
                position, unserved, begun = order.unapplied(one.applied, one.times_due)
            rewound.append((order, *order.rewind(position, unserved)))
            partly.append(begun)
        epoch = max(order.first_unserved_pass(position) for order, position, _ in rewound)
        left = [[*earlier, *chain.from_iterable(order.blocks(at, epoch))] for order, at, earlier in rewound]
        own = self._share(partly)
        rest = [*held, *(index for index, _ in own), *self._share(left)]
        return replace(self, rest=rest, epoch=epoch), {len(held) + n: times for n, (_, times) in enumerate(own)}

    def _share(self, parts: Iterable[Iterable[Any]]) -> list[Any]:
        """Return this trainer's share of what is taken in turn from each of ``parts``."""
        in_turn = [one for turn in zip_longest(*parts) for one in turn if one is not None]
        return in_turn[self.partition.index :: self.partition.count]


class DatasetSource(Source):
    """One trainer's share of a map-style data set, pass after pass. A sample's key is its index in the data set.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        partition: the trainer's.
        seed: of the shuffling; the same for all trainers.
        passes: how many passes are served; None = no end.
        sampler_kwargs: ``shuffle``, ``pad``, ``drop_last`` and ``seed`` of ``deal``, if not the default.
        group: how many samples are read at once, like a batch of a DataLoader; with ``__getitems__`` if it exists.

    Example::

        >>> source = DatasetSource("abcd", Partition(1, 2), seed=0, passes=1, sampler_kwargs={"shuffle": False})
        >>> list(source.samples(0))
        [(1, 'b'), (3, 'd')]
        >>> source.total, source.samples_per_pass
        (2, 4)
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
        self._set_order(PartitionOrder(self.length, partition, self.options))
        try:
            per_pass = self.order.per_pass
        except TypeError as error:
            raise UnsupportedConfiguration(
                f"sampler_kwargs ({self.options}) must be among seed, shuffle, pad, drop_last"
            ) from error
        if per_pass == 0:
            raise TaskError(
                f"trainer {partition.index} gets none of the {self.length} training samples; "
                f"use at most {self.length} trainers"
            )

    def samples(self, position: int) -> Iterator[tuple[int, Any]]:
        return chain.from_iterable(self.groups(position))

    def groups(self, position: int) -> Iterator[Sequence[tuple[int, Any]]]:
        for block in self.order.blocks(position, self.passes):
            for start in range(0, len(block), self.group):
                yield from self._read_group(block[start : start + self.group])

    def _read_group(self, indices: list[int]) -> Iterator[Sequence[tuple[int, Any]]]:
        group: list[tuple[int, Any]] = []
        try:
            if hasattr(self.dataset, "__getitems__"):
                group.extend(zip(indices, self.dataset.__getitems__(indices), strict=True))
            else:
                group.extend(zip(indices, map(getitem, repeat(self.dataset), indices), strict=True))
        except BaseException:
            # The samples that were read before the failure are still put.
            if group:
                yield group
            raise
        yield group

    def fetch(self, key: Any) -> Any:
        return self.dataset[key]

    @property
    def endless(self) -> bool:
        return self.passes is None

    @property
    def total(self) -> int | None:
        return None if self.passes is None else self.order.total(self.passes)

    @cached_property  # read in every step, and it costs a pass over the indices
    def samples_per_pass(self) -> int:
        count = self.partition.count
        return sum(PartitionOrder(self.length, Partition(i, count), self.options).per_pass for i in range(count))

    def state_dict(self) -> dict[str, Any]:
        return {"length": self.length, "rest": self._rest, "epoch": self.order.epoch}

    def load_state_dict(self, state: dict[str, Any], mark: Any = None) -> None:
        self._check_length(state)
        self._set_order(replace(self.order, rest=state["rest"].tolist(), epoch=state["epoch"]))

    def reshard(self, leftovers: Sequence[ResumePosition], held: Sequence[Any]) -> dict[int, int]:
        for leftover in leftovers:
            self._check_length(leftover.state)
        order, partly = self.order.reshard(leftovers, held)
        self._set_order(order)
        return partly

    def _set_order(self, order: PartitionOrder) -> None:
        # A tensor is copied as one block at every checkpoint, a list number by number.
        self.order, self._rest = order, torch.tensor(order.rest, dtype=torch.int64)

    def _check_length(self, state: Mapping[str, Any]) -> None:
        if state["length"] != self.length:
            raise CheckpointError(
                f"the training data set has {self.length} samples, it must have {state['length']} as when the "
                "checkpoint was written; use init_from to continue from the weights with other data"
            )

"""A map-style data set as a source: partitioned among the trainers, shuffled for each pass, resharded on resume.

``deal`` is the order of one pass, ``PartitionOrder`` the sequence of indices of one trainer over all passes, and
``DatasetSource`` reads the samples of these indices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, repeat
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from paramserver.buffers.positions import AppliedPositions
from paramserver.errors import CheckpointError, SourceError, TaskError, UnsupportedConfiguration
from paramserver.sources.base import KeyedSamples, Partition, ResumePosition, Source
from paramserver.sources.loader import IndexedReads, WorkerOptions, Workers
from paramserver.sources.reader import SampleReader
from paramserver.sources.sampler import SamplerOrder

# Rows of tensors that are read together, at most, where a group has not as many bytes.
_GROUP_BYTES = 1 << 20

# So many indices at a time are made Python's numbers, where they are taken one by one.
_GROUP_INDICES = 1 << 14

Indices: TypeAlias = "npt.NDArray[np.int64] | list[Any]"
"""Indices of samples, or a list of whole batches, a tuple each.

A list of numbers would have five times the bytes, and no other thread runs while it is made.
"""


def deal(
    length: int,
    partition: Partition,
    *,
    seed: int,
    epoch: int,
    shuffle: bool = True,
    drop_last: bool = False,
    pad: bool = False,
    multiple: int = 1,
    sampler: SamplerOrder | None = None,
) -> Indices:
    """Return the indices of one trainer's share of one pass.

    The order is that of ``torch.utils.data.DistributedSampler``: a permutation seeded with ``seed + epoch``, of which
    trainer i gets every ``count``-th index from the i-th on. By default the tail is neither padded nor dropped, so each
    sample is assigned exactly once; ``pad`` repeats indices from the front and ``drop_last`` drops the tail, as there.

    Args:
        length: of the data set.
        partition: the trainer's.
        seed, epoch: of the permutation.
        shuffle, drop_last, pad: as above.
        multiple: the tail of each share is dropped, so that this divides its length.
        sampler: gives the order in place of a permutation: indices, or whole batches of them.

    Example::

        >>> [deal(7, Partition(i, 2), seed=0, epoch=0, shuffle=False).tolist() for i in range(2)]
        [[0, 2, 4, 6], [1, 3, 5]]
        >>> deal(7, Partition(1, 2), seed=0, epoch=0, shuffle=False, pad=True).tolist()
        [1, 3, 5, 0]
    """
    order: Any
    if sampler is not None:
        order = sampler.indices(epoch)
    elif shuffle:
        order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).numpy()
    else:
        order = np.arange(length)
    places = _places(len(order), partition, drop_last=drop_last, pad=pad, multiple=multiple)
    share = order[places.start : places.stop : places.step]
    return _joined([share, [order[place % len(order)] for place in places[len(share) :]]])


def _places(
    length: int, partition: Partition, *, drop_last: bool = False, pad: bool = False, multiple: int = 1
) -> range:
    """Return where in the order of a pass one trainer's share is; places after its end repeat it from the front."""
    if drop_last:
        length -= length % partition.count
    elif pad:
        length += -length % partition.count
    places = range(partition.index, length, partition.count)
    return places[: len(places) - len(places) % multiple]


def _joined(parts: Iterable[Sequence[Any] | npt.NDArray[np.int64]]) -> Indices:
    """Return all indices of ``parts``, in their order."""
    parts = [part for part in parts if len(part)]
    if parts and isinstance(parts[0][0], tuple):
        return list(chain.from_iterable(parts))
    return np.concatenate([np.empty(0, np.int64), *parts])


@dataclass(frozen=True)
class PartitionOrder:
    """The sequence of indices of one trainer; position n is its n-th index.

    Args:
        length: of the data set.
        partition: the trainer's.
        options: of ``deal``: seed, shuffle, drop_last, pad, multiple, sampler.
        rest: indices before the first pass: the trainer's share of the passes that another number of trainers began;
            none with a limit below that pass.
        epoch: the first whole pass.

    Example::

        >>> order = PartitionOrder(5, Partition(0, 1), {"seed": 0, "shuffle": False}, rest=[3, 4], epoch=1)
        >>> order.total(passes=2)
        7
        >>> list(order.indices(1, passes=2))
        [4, 0, 1, 2, 3, 4]
    """

    length: int
    partition: Partition
    options: Mapping[str, Any]
    rest: Sequence[Any] | npt.NDArray[np.int64] = ()
    epoch: int = 0

    @cached_property
    def per_pass(self) -> int:
        """How many indices of one pass belong to this trainer."""
        # Any thread may ask, so nothing is drawn from a sampler here.
        sampler = self.options.get("sampler")
        length = self.length if sampler is None else sampler.length
        options = {name: self.options[name] for name in self.options.keys() - {"seed", "shuffle", "sampler"}}
        return len(_places(length, self.partition, **options))

    @property
    def identity(self) -> dict[str, Any]:
        """What decides which indices each pass of this trainer has, and in which order; numbers and text."""
        sampler: SamplerOrder | None = self.options.get("sampler")
        shuffles = sampler is None and self.options.get("shuffle", True)
        return {
            "seed": int(self.options["seed"]) if shuffles else None,
            "sampler": None if sampler is None else sampler.checksum,
            "per_pass": self.per_pass,
        }

    def total(self, passes: int) -> int:
        """Return how many indices there are until the end of ``passes`` passes over the data set."""
        return 0 if passes < self.epoch else len(self.rest) + (passes - self.epoch) * self.per_pass

    def blocks(self, position: int, passes: int | None) -> Iterator[Indices]:
        """Return the sequence from ``position`` on, in blocks of one pass; endless if ``passes`` is None."""
        for _, indices, offset in self._passes(position, passes):
            yield indices[offset:]

    def indices(self, position: int, passes: int | None = None) -> Iterator[Any]:
        """Return the sequence from ``position`` on, index by index; endless if ``passes`` is None."""
        for _, indices, skip in self.groups(position, _GROUP_INDICES, passes):
            yield from indices[skip:]

    def groups(self, position: int, size: int, passes: int | None) -> Iterator[tuple[int, list[Any], int]]:
        """Return the sequence from ``position`` on in groups that are the same for each position.

        A pass begins with a new group. The first group may contain indices before ``position``.

        Returns:
            The epoch, up to ``size`` indices, and how many of these are before ``position``.
        """
        for epoch, indices, offset in self._passes(position, passes):
            for start in range(offset - offset % size, len(indices), size):
                group = indices[start : start + size]
                yield epoch, group.tolist() if isinstance(group, np.ndarray) else group, max(offset - start, 0)

    def _passes(self, position: int, passes: int | None) -> Iterator[tuple[int, Indices, int]]:
        """Yield the epoch and the indices of each pass from ``position`` on, and how many are before it.

        Indices before the first whole pass come first, as those of the pass before it.
        """
        if position < len(self.rest) and (passes is None or passes >= self.epoch):
            yield max(self.epoch - 1, 0), _joined([self.rest]), position
        epoch, offset = divmod(max(position - len(self.rest), 0), self.per_pass)
        epoch += self.epoch
        while passes is None or epoch < passes:
            yield epoch, deal(self.length, self.partition, epoch=epoch, **self.options), offset
            epoch, offset = epoch + 1, 0

    def pass_of(self, position: int) -> int:
        """Return the pass of the index at ``position``."""
        return self.epoch + (position - len(self.rest)) // self.per_pass

    def is_between_passes(self, position: int) -> bool:
        """Return whether no pass is begun and not ended at ``position``."""
        at = position - len(self.rest)
        return at >= 0 and at % self.per_pass == 0

    def first_unserved_pass(self, position: int) -> int:
        """Return the first pass of which no index is before ``position``."""
        return self.epoch + -(-max(position - len(self.rest), 0) // self.per_pass)

    def rewind(self, position: int, unserved: Sequence[int]) -> tuple[int, list[int]]:
        """Move ``position`` back over the indices that were read and never served.

        The feeder reads ahead as fast as the buffer has room. After the rewind, an unserved sample counts as not read,
        so the result does not depend on how far it read ahead: not at all for a FIFO, which serves in order. Return the
        position before the longest run of indices that are all in ``unserved``, and the unserved indices that are
        earlier than that.
        """
        known = Counter(unserved)
        start = max(position - len(unserved), 0)
        ahead = islice(self.indices(start), position - start)
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
        for n, index in enumerate(islice(self.indices(account.low), position - account.low), account.low):
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
            order = PartitionOrder(self.length, partition, self.options, _rest_of(one.state), one.state["epoch"])
            position, unserved, begun = one.position, one.unserved, one.partly
            if one.applied is not None:
                position, unserved, begun = order.unapplied(one.applied, one.times_due)
            rewound.append((order, *order.rewind(position, unserved)))
            partly.append(begun)
        epoch = max(order.first_unserved_pass(position) for order, position, _ in rewound)
        left = [_joined([earlier, *order.blocks(at, epoch)]) for order, at, earlier in rewound]
        own = self._share(partly)
        rest = _joined([held, [index for index, _ in own], self._share(left)])
        return replace(self, rest=rest, epoch=epoch), {len(held) + n: times for n, (_, times) in enumerate(own)}

    def _share(self, parts: Sequence[Sequence[Any] | Indices]) -> Indices:
        """Return this trainer's share of what is taken in turn from each of ``parts``."""
        turns = np.concatenate([np.arange(len(part)) for part in parts])
        own = np.argsort(turns, kind="stable")[self.partition.index :: self.partition.count]
        joined = _joined(parts)
        return joined[own] if isinstance(joined, np.ndarray) else [joined[n] for n in own]


def _describe_order(order: Mapping[str, Any]) -> str:
    how = f"shuffled with seed {order['seed']}" if order.get("seed") is not None else "not shuffled"
    if order.get("sampler") is not None:
        how = f"of a sampler with checksum {order['sampler']}"
    return f"{how}, {order['per_pass']} entries of each pass for a trainer"


def _rest_of(state: Mapping[str, Any]) -> Indices:
    rest = state["rest"]
    return rest.numpy() if isinstance(rest, torch.Tensor) else [tuple(batch) for batch in rest]


@dataclass(frozen=True)
class _Requests:
    """The groups of ``PartitionOrder.groups``, as an iterable that can be pickled."""

    order: PartitionOrder
    position: int
    size: int
    passes: int | None

    def __iter__(self) -> Iterator[tuple[int, list[Any], int]]:
        return self.order.groups(self.position, self.size, self.passes)

    def with_sampler(self, sampler: SamplerOrder | None) -> _Requests:
        """Return these requests with another sampler: it is pickled with the data set, which it may hold."""
        options = {**self.order.options, "sampler": sampler}
        return replace(self, order=replace(self.order, options=options))

    def items(self, dataset: Any, sampler: SamplerOrder | None, seed: int) -> tuple[IndexedReads, _Requests]:
        """Return what ``Workers`` read, and in which order."""
        return IndexedReads(dataset, seed, sampler is not None), self.with_sampler(sampler)


class DatasetSource(Source):
    """One trainer's share of a map-style data set, pass after pass. A sample's key is its index in the data set.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        partition: the trainer's.
        seed: of the shuffling and of the reads; the same for all trainers.
        passes: how many passes are served; None = no end.
        sampler_kwargs: ``shuffle``, ``pad``, ``drop_last``, ``seed``, ``multiple`` and ``sampler`` of ``deal``, if not
            the default. With a sampler that gives batches, a sample of this source is a whole batch, a list of samples.
        group: how many samples are read at once, like a batch of a DataLoader; with ``__getitems__`` if it exists.
        groups_ahead: so many groups, at most, are read at once where that is one gather of small rows (``TensorRows``).

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
        groups_ahead: int = 1,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.options = {"seed": seed, **(sampler_kwargs or {})}
        self.sampler: SamplerOrder | None = self.options.get("sampler")
        self._reader = SampleReader(dataset, seed, wraps=self.sampler is not None)
        self._workers: Workers | None = None
        self.length = len(dataset)
        self.partition = partition
        self.passes = passes
        self.group = group
        if (rows := self._reader.rows) is not None:  # the same cost for many samples as for few, up to some size
            self.group *= max(min(groups_ahead, _GROUP_BYTES // max(rows.sample_bytes * group, 1)), 1)
        self.gives_batches = self.sampler is not None and self.sampler.gives_batches
        if self.gives_batches:
            self.group = 1
        if self.length == 0:
            raise TaskError("the training data set is empty; train_source must return at least one sample")
        self.order = PartitionOrder(self.length, partition, self.options)
        try:
            per_pass = self.order.per_pass
        except TypeError as error:
            raise UnsupportedConfiguration(
                f"sampler_kwargs ({self.options}) must be among seed, shuffle, pad, drop_last"
            ) from error
        if per_pass == 0:
            what, number = "training samples", self.length
            if self.sampler is not None:
                what, number = f"entries that the sampler ({self.sampler.name}) gives", self.sampler.length
            least = self.options.get("multiple", 1)
            cure = f"use at most {number // least} trainers" if number >= least else f"give at least {least}"
            raise TaskError(f"trainer {partition.index} gets none of the {number} {what}; {cure}")

    def use_workers(self, options: WorkerOptions) -> None:
        self._workers = Workers(self.dataset, options, self.seed, self.sampler)

    def samples(self, position: int) -> Iterator[tuple[int, Any]]:
        return chain.from_iterable(self.groups(position))

    def groups(self, position: int) -> Iterator[Sequence[tuple[int, Any]]]:
        with closing(self._results(position)) as results:
            for keys, samples, failure in results:
                read = keys[: len(samples)] if failure is not None else keys
                if read:  # samples that were read before a failure are still put
                    yield KeyedSamples(read, samples)
                position += len(read)
                if isinstance(failure, BaseException):
                    raise failure
                if failure is not None:
                    where = f"trainer {self.partition.index}: the source raised at sample {position}"
                    raise SourceError(f"{where}{failure}")

    @property
    def failed_at(self) -> str:
        return self._reader.failed_at

    def _results(
        self, position: int
    ) -> Generator[tuple[list[int], Sequence[Any], BaseException | str | None], None, None]:
        """Return the keys of each group, its samples up to one that raises, and what that raised."""
        requests = _Requests(self.order, position, self.group, self.passes)
        if self._workers is None:
            last = None
            for epoch, indices, skip in requests:
                if epoch != last and (now := len(self.dataset)) != self.length:
                    raise SourceError(
                        f"trainer {self.partition.index}: the training data set has {now} samples in pass {epoch}, and "
                        f"must have as many in each pass as at the start ({self.length}); let train_source return it "
                        "with all of them, or start another run with init_from"
                    )
                last = epoch
                yield indices[skip:], *self._reader.read(epoch, indices, skip)
            return
        # Only the loader draws a sampler: here the default generators belong to the training thread.
        yield from self._workers.results(requests.with_sampler(None))

    def close(self) -> None:
        if self._workers is not None:
            self._workers.kill()

    def indices_of(self, keys: Sequence[int]) -> Sequence[int]:
        """Return the indices in the data set of these keys, which differ where a sampler repeats indices."""
        return self._reader.in_dataset(keys)

    def fetch(self, key: Any) -> Any:
        if isinstance(key, tuple):
            return [self.fetch(index) for index in key]
        return self.dataset[self._reader.in_dataset([key])[0]]

    def fetch_all(self, keys: Sequence[Any], positions: Sequence[int]) -> list[Any]:
        wanted = {position: place for place, position in enumerate(positions)}
        samples: list[Any] = [None] * len(keys)
        low = min(wanted, default=0)
        groups = self.order.groups(low, self.group, None)
        while wanted:
            epoch, indices, skip = next(groups)
            low -= skip
            here = [(n, wanted.pop(low + n)) for n in range(len(indices)) if low + n in wanted]
            low += len(indices)
            # By key where another index is at its position: the run that stored it had other options.
            as_read = self._reader.reads_groups and all(indices[n] == keys[place] for n, place in here)
            requests = [[keys[place]] for _, place in here]
            read: list[Any] = []
            for request in [indices] if as_read and here else requests:
                found, error = self._reader.read(epoch, request)
                if error is not None:
                    raise error
                read += found
            for i, (n, place) in enumerate(here):
                samples[place] = read[n if as_read else i]
        return samples

    @property
    def endless(self) -> bool:
        return self.passes is None

    @property
    def total(self) -> int | None:
        return None if self.passes is None else self.order.total(self.passes)

    @cached_property  # read in every step
    def samples_per_pass(self) -> int:
        count = self.partition.count
        orders = (PartitionOrder(self.length, Partition(i, count), self.options) for i in range(count))
        if self.gives_batches:
            return sum(len(batch) for order in orders for batch in next(order.blocks(0, 1)))
        return sum(order.per_pass for order in orders)

    def batch_sizes(self, partition: Partition, epoch: int = 0) -> Iterator[int]:
        """Yield the samples of each whole batch of a trainer from pass ``epoch`` on; see ``gives_batches``."""
        assert self.sampler is not None
        for block in replace(self.order, partition=partition, epoch=epoch).blocks(0, self.passes):
            sizes = list(map(len, block))
            if self.sampler.repeats_sizes:
                passes = repeat(sizes) if self.passes is None else repeat(sizes, self.passes - epoch)
                yield from chain.from_iterable(passes)
                return
            yield from sizes

    @property
    def description(self) -> str:
        """What must be the same on every trainer."""
        text = f"a data set of {self.length} samples"
        if self.sampler is not None:
            return f"{text} {self.sampler.description}"
        return text if self.options["seed"] == self.seed else f"{text} shuffled with seed {self.options['seed']}"

    def state_dict(self) -> dict[str, Any]:
        drawn = {} if self.sampler is None else self.sampler.state_dict()
        # A tensor is copied as one block at every checkpoint, a list number by number.
        rest = list(self.order.rest) if self.gives_batches else torch.as_tensor(self.order.rest, dtype=torch.int64)
        order = {"epoch": self.order.epoch, "order": self.order.identity}
        return {"length": self.length, "rest": rest, **order, **drawn}

    def release_order(self, state: dict[str, Any], position: int) -> None:
        if self.order.is_between_passes(position):
            state["order"] = {"per_pass": state["order"]["per_pass"]} if position else {}

    def load_state_dict(self, state: dict[str, Any], mark: Any = None) -> None:
        self._check_length(state)
        if self.sampler is not None:
            self.sampler.load_state_dict(state)
        self._check_order(state, self.partition)
        self.order = replace(self.order, rest=_rest_of(state), epoch=state["epoch"])

    def reshard(self, leftovers: Sequence[ResumePosition], held: Sequence[Any]) -> dict[int, int]:
        for leftover in leftovers:
            self._check_length(leftover.state)
        if self.sampler is not None:
            self.sampler.load_state_dict(leftovers[0].state)
        for i, leftover in enumerate(leftovers):
            self._check_order(leftover.state, Partition(i, len(leftovers)))
        self.order, partly = self.order.reshard(leftovers, held)
        return partly

    def _check_length(self, state: Mapping[str, Any]) -> None:
        if state["length"] != self.length:
            raise CheckpointError(
                f"the training data set has {self.length} samples, it must have {state['length']} as when the "
                "checkpoint was written; use init_from to continue from the weights with other data"
            )

    def _check_order(self, state: Mapping[str, Any], partition: Partition) -> None:
        """Refuse a state of the trainer with this partition whose position is one in passes of another order.

        Raises:
            CheckpointError: they had; what a state does not have is not compared.
        """
        order = PartitionOrder(self.length, partition, self.options).identity
        if (before := state.get("order", {})) != {name: order[name] for name in before}:
            raise CheckpointError(
                f"the order of the training data ({_describe_order(order)}) must be that of the checkpoint "
                f"({_describe_order(before)}), which was written within a pass; set seed, the sampler, and shuffle, "
                "batch_size and drop_last of the DataLoader as they were, or use init_from to continue from the weights"
            )

"""Any iterable as the share of one trainer, for one pass; an ``IterableDataset`` also in worker processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from paramserver.errors import CheckpointError, SourceError
from paramserver.rng import seed_group
from paramserver.sources.base import KeyedSamples, Partition, ResumePosition, Source
from paramserver.sources.loader import WorkerOptions, Workers, explain_read, pickle_result

# Where a worker begins: groups that it has read, what ``state_dict`` of its data set returned after them, and whether
# the last one ended its iteration.
_START: Mapping[str, Any] = {"groups": 0, "state": None, "ended": False}


@dataclass(frozen=True)
class IterableBatches:
    """The batches of a DataLoader over an ``IterableDataset``, each the list of its samples."""

    dataset: Any
    size: int
    drop_last: bool = False

    def __iter__(self) -> Iterator[list[Any]]:
        # Each pass of a DataLoader draws a seed: not from the generator of the training.
        generator = torch.Generator()
        options: dict[str, Any] = {"drop_last": self.drop_last, "collate_fn": list, "generator": generator}
        return iter(DataLoader(self.dataset, self.size, **options))


class IterableSource(Source):
    """One pass over an iterable. It resumes by reading again and skipping what was put before.

    A stateful iterable resumes without reading again. It has

    - ``state_dict()``, called after each sample in the feeder thread: the place after that sample;
    - ``load_state_dict(state)``, after which ``iter()`` continues from that place.

    With another number of trainers only an iterable resumes that also has

    - ``reshard(states, index, count)``, after which ``iter()`` returns share ``index`` of ``count`` of what iterables
      at these places had left.

    Worker processes have a copy of the data set each, and deliver groups of samples in turns.

    Args:
        iterable: the samples of this trainer; or ``IterableBatches``: a sample is a whole batch then.
        partition: the trainer's.
        seed: of the random numbers of workers.
        group: how many samples a worker reads at once.

    Example::

        >>> source = IterableSource("abcd", Partition(0, 1))
        >>> list(source.samples(2))
        [(2, 'c'), (3, 'd')]
        >>> source.total
        4
    """

    def __init__(self, iterable: Iterable[Any], partition: Partition, *, seed: int = 0, group: int = 32) -> None:
        self.iterable = iterable
        self.partition = partition
        self.seed = seed
        self.group = group
        self.dataset: Any = iterable.dataset if isinstance(iterable, IterableBatches) else iterable
        self.stateful = _has(self.dataset, "state_dict", "load_state_dict")
        # Positions of the sample that is read first, and of the one after the last that was read.
        self._start = self._position = 0
        self._ended = False  # with an incomplete batch
        # The mark before the first sample, after ``reshard``.
        self._origin: Any = None
        self._workers: Workers | None = None
        # With workers: the marks at which they start, and after the last sample.
        self._first_mark: Any = None
        self._mark: Any = None

    def use_workers(self, options: WorkerOptions) -> None:
        # Only an IterableDataset is written to be divided among workers; a data pipe is divided by DataLoader alone.
        if not isinstance(self.dataset, IterableDataset) or isinstance(self.dataset, IterDataPipe):
            super().use_workers(options)
        self._workers = Workers(self.dataset, options, self.seed)

    @property
    def _worker_count(self) -> int:
        return 0 if self._workers is None else self._workers.options.count

    def samples(self, position: int) -> Iterator[tuple[int, Any]]:
        if self._workers is not None:
            yield from (pair for group in self.groups(position) for pair in group)
            return
        self._check(position)
        if self._ended:
            return
        for i, sample in enumerate(islice(iter(self.iterable), position - self._start, None), start=position):
            self._position = i + 1
            self._ended = isinstance(self.iterable, IterableBatches) and len(sample) < self.iterable.size
            yield i, sample

    def _check(self, position: int) -> None:
        if position < self._start:
            raise SourceError(
                f"position ({position}) must be at least {self._start}, from which on the iterable continues; the "
                "samples before it are in the checkpoint that the run was resumed from: resume it again"
            )

    def groups(self, position: int) -> Iterator[Sequence[tuple[int, Any]]]:
        if self._workers is None:
            yield from super().groups(position)
            return
        self._check(position)
        at = self._start  # the position of the next group
        first = self._first_mark or {"workers": [_START] * self._worker_count, "next": 0}
        places, whole = list(first["workers"]), isinstance(self.iterable, IterableBatches)
        batches = replace(self.iterable, dataset=None) if isinstance(self.iterable, IterableBatches) else None
        requests = _Groups(batches, self.group, places[:], first["next"], self.partition.index)
        with closing(self._workers.results(requests)) as results:
            for worker, samples, after, failure in results:
                if self.total is not None and not whole and at + len(samples) > self.total:
                    raise SourceError(
                        f"trainer {self.partition.index}: {self._name} gave more than the {self.total} samples of its "
                        "length; divide them in __iter__ by torch.utils.data.get_worker_info()"
                    )
                before = {"position": at, "workers": places[:], "next": worker}
                # One place for the group, or one for each of its samples.
                each = len(after) == len(samples)
                step = 1 if each else len(samples)
                for number in range(step, len(samples) + 1, step):
                    if number == len(samples) and failure is None:
                        places[worker] = after[-1]
                        turn = (worker + 1) % self._worker_count
                        self._mark = {"position": at + number, "workers": places[:], "next": turn}
                    else:
                        self._mark = before | ({"ahead": [number, after[number - 1]]} if each else {})
                    keys = range(max(at + number - step, position), at + number)
                    if keys:
                        yield KeyedSamples(list(keys), samples[keys[0] - at : number])
                at += len(samples)
                if failure is not None:
                    raise SourceError(f"trainer {self.partition.index}: the source raised at sample {at}{failure}")

    @property
    def _name(self) -> str:
        return f"{type(self.dataset).__module__}.{type(self.dataset).__qualname__}"

    def close(self) -> None:
        if self._workers is not None:
            self._workers.kill()

    @property
    def total(self) -> int | None:
        if self.stateful:
            return None  # iterables differ in whether their length is that of all samples or of those that are left
        try:
            return len(self.iterable)  # type: ignore[arg-type]  # an iterable may know its length
        except TypeError:
            return None

    def mark(self) -> Any:
        if self._workers is not None:
            return self._mark
        if not self.stateful:
            return None
        # A copy: many iterables return an object that they change later.
        return {"position": self._position, "state": deepcopy(self.dataset.state_dict()), "ended": self._ended}

    def state_dict(self) -> dict[str, Any]:
        return {"origin": self._origin, "workers": self._worker_count, "batch": self._batch}

    @property
    def _batch(self) -> int | None:
        """How many samples an entry has that is a whole batch."""
        return self.iterable.size if isinstance(self.iterable, IterableBatches) else None

    def _check_batch(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that counted other entries, which the buffer holds, or by which the iterable is skipped."""
        before = state.get("batch", self._batch)  # earlier releases did not store it
        if before != self._batch and (not self.stateful or None in (before, self._batch)):
            now, then = ("samples" if one is None else f"batches of {one}" for one in (self._batch, before))
            raise CheckpointError(
                f"{self._name} of train_source gives {now}, it must give {then} as when the checkpoint was written; "
                "set batch_size of its DataLoader so, or use init_from to continue from the weights"
            )

    def load_state_dict(self, state: dict[str, Any], mark: Any = None) -> None:
        self._check_batch(state)
        self._origin = state.get("origin")
        mark, before = mark or self._origin, state.get("workers", 0)
        if before != self._worker_count:
            if not self.can_reshard and (mark is not None or not (before or self.stateful)):
                raise CheckpointError(
                    f"training.loader_workers ({self._worker_count}) must be {before} as before, because each worker "
                    f"reads its own part of {self._name}; set it to {before}, or give the data set state_dict, "
                    "load_state_dict and reshard"
                )
            if mark is not None:
                self._deal([(mark, before)], Partition(0, 1), mark["position"] + mark.get("ahead", [0])[0])
        elif mark is not None:
            self._start = self._position = mark["position"]
            if self._workers is not None:
                self._first_mark = self._mark = mark
            else:
                self.dataset.load_state_dict(mark["state"])
                self._ended = mark.get("ended", False)

    @property
    def resume_note(self) -> str:
        if self.stateful:
            return ""
        return (
            f"{self._name} has no state_dict and load_state_dict, so what was read of it before the checkpoint is read "
            "again and skipped"
        )

    @property
    def can_reshard(self) -> bool:
        return self.stateful and _has(self.dataset, "reshard")

    def reshard(self, leftovers: Sequence[ResumePosition], held: Sequence[Any]) -> None:
        if not self.can_reshard:
            super().reshard(leftovers, held)
        for leftover in leftovers:
            self._check_batch(leftover.state)
        marks = [(leftover.mark, leftover.state.get("workers", 0)) for leftover in leftovers]
        self._deal(marks, self.partition, len(held))

    def _deal(self, marks: Sequence[tuple[Any, int]], partition: Partition, position: int) -> None:
        """Continue at ``position`` with a share of what is left at marks; each is of so many workers."""
        places = [place for mark, workers in marks for place in _places_of(mark, workers)]
        states = [place["state"] for place in places]
        self._start = self._position = position
        if self._workers is None:
            self.dataset.reshard(states, partition.index, partition.count)
        else:
            dealt = []
            for share in range(partition.index * self._worker_count, (partition.index + 1) * self._worker_count):
                self.dataset.reshard(states, share, partition.count * self._worker_count)
                # Random numbers are not those of groups before.
                groups = max(place["groups"] for place in places)
                dealt.append({**_START, "groups": groups, "state": deepcopy(self.dataset.state_dict())})
            self._first_mark = self._mark = {"position": position, "workers": dealt, "next": 0}
        self._origin = self.mark()


def _has(dataset: Any, *methods: str) -> bool:
    return all(hasattr(dataset, name) for name in methods)


def _places_of(mark: Any, workers: int) -> list[Mapping[str, Any]]:
    """Return where each worker has to continue, or the trainer itself."""
    if mark is None:
        return [_START] * max(workers, 1)
    if not workers:
        return [{**_START, "state": mark["state"]}]
    places = list(mark["workers"])
    if "ahead" in mark:
        places[mark["next"]] = mark["ahead"][1]
    return places


# In the worker processes.


@dataclass(frozen=True)
class _Groups:
    """What workers read, as an object that can be pickled: each from its place; ``first`` delivers first."""

    batches: IterableBatches | None
    size: int
    places: Sequence[Mapping[str, Any]]
    first: int
    trainer_index: int

    def items(self, dataset: Any, sampler: None, seed: int) -> tuple[_GroupReads, None]:
        """Return what ``Workers`` read."""
        return _GroupReads(dataset, seed, self), sampler


class _GroupReads(IterableDataset[bytes]):
    """The groups of one worker: each its number, samples, places after them, and the failure that ended it."""

    def __init__(self, dataset: Any, seed: int, requests: _Groups) -> None:
        self.dataset = dataset
        self._seed = seed
        self._requests = requests
        self._stateful = _has(dataset, "state_dict", "load_state_dict")
        # A group of which a part is in the buffer can be divided only at the place after that part.
        self._each = requests.batches is None and self._stateful and _has(dataset, "reshard")

    def __iter__(self) -> Iterator[bytes]:
        info = get_worker_info()
        assert info is not None
        worker, requests = info.id, self._requests
        place = requests.places[worker]
        if worker < requests.first:
            yield pickle.dumps((worker, [], [], None))  # its turn; a DataLoader begins with worker 0
        if place["ended"]:
            return
        name, number = f"{type(self.dataset).__module__}.{type(self.dataset).__qualname__}", place["groups"]
        seed_group(self._seed, requests.trainer_index, worker, 0)
        try:
            if place["state"] is not None:
                self.dataset.load_state_dict(place["state"])
            whole = None if requests.batches is None else replace(requests.batches, dataset=self.dataset)
            stream: Iterator[Any] = iter(self.dataset if whole is None else whole)
        except BaseException as error:  # noqa: BLE001 - raised in the rank
            yield pickle.dumps((worker, [], [], explain_read(error, f"the start of {name}")))
            return
        for group in count(number if self._stateful else 0):
            seed_group(self._seed, requests.trainer_index, worker, group + 1)
            samples, after, ended, raised = self._read(stream, group + 1)
            failure: str | None = None
            if raised is not None:
                at = f"sample {group * requests.size + len(samples)}" if whole is None else f"batch {group}"
                failure = explain_read(raised, f"{at} of {name}")
            if (samples and group >= number) or failure is not None:
                yield pickle_result((worker, samples, after, failure), (worker, [], []))
            if ended or failure is not None:
                return

    def _read(
        self, stream: Iterator[Any], groups: int
    ) -> tuple[list[Any], list[Mapping[str, Any]], bool, BaseException | None]:
        """Return the samples of the next group, the places after them, whether it is the last, and what it raised."""
        whole = self._requests.batches
        size = self._requests.size if whole is None else 1
        samples: list[Any] = []
        after: list[Mapping[str, Any]] = []
        try:
            for sample in islice(stream, size):
                samples.append(sample)
                if self._each:
                    after.append(self._place(groups))
            if samples and not self._each:
                after.append(self._place(groups))
        except BaseException as error:  # noqa: BLE001 - returned with the samples before it
            return samples, after, False, error
        ended = len(samples) < size or (whole is not None and len(samples[0]) < whole.size)
        if ended and after:
            after[-1] = {**after[-1], "ended": True}
        return samples, after, ended, None

    def _place(self, groups: int) -> Mapping[str, Any]:
        state = deepcopy(self.dataset.state_dict()) if self._stateful else None
        return {"groups": groups, "state": state, "ended": False}

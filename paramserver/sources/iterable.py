"""Any iterable as the share of one trainer, for one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any

from paramserver.errors import SourceError
from paramserver.sources.base import Partition, ResumePosition, Source


class IterableSource(Source):
    """One pass over an iterable. It resumes by reading again and skipping what was put before.

    A stateful iterable resumes without reading again, and with another number of trainers too. It has

    - ``state_dict()``, called after each sample in the feeder thread: the place after that sample;
    - ``load_state_dict(state)``, after which ``iter()`` continues from that place;
    - ``reshard(states, index, count)``, after which ``iter()`` returns share ``index`` of ``count`` of what iterables
      at these places had left.

    Example::

        >>> source = IterableSource("abcd", Partition(0, 1))
        >>> list(source.samples(2))
        [(2, 'c'), (3, 'd')]
        >>> source.total
        4
    """

    def __init__(self, iterable: Iterable[Any], partition: Partition) -> None:
        self.iterable = iterable
        self.partition = partition
        self.stateful = all(hasattr(iterable, name) for name in ("state_dict", "load_state_dict", "reshard"))
        # Positions of the sample that ``iter`` returns first, and of the one after the last that was read.
        self._start = self._position = 0
        # The mark before the first sample, after ``reshard``.
        self._origin: Any = None

    def samples(self, position: int) -> Iterator[tuple[int, Any]]:
        if position < self._start:
            raise SourceError(
                f"position ({position}) must be at least {self._start}, from which on the iterable continues; the "
                "samples before it are in the checkpoint that the run was resumed from: resume it again"
            )
        for i, sample in enumerate(islice(iter(self.iterable), position - self._start, None), start=position):
            self._position = i + 1
            yield i, sample

    @property
    def total(self) -> int | None:
        if self.stateful:
            return None  # iterables differ in whether their length is that of all samples or of those that are left
        try:
            return len(self.iterable)  # type: ignore[arg-type]  # an iterable may know its length
        except TypeError:
            return None

    def mark(self) -> Any:
        # A copy: many iterables return an object that they change later.
        if not self.stateful:
            return None
        return {"position": self._position, "state": deepcopy(self.iterable.state_dict())}  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        return {"origin": self._origin}

    def load_state_dict(self, state: dict[str, Any], mark: Any = None) -> None:
        self._origin = state.get("origin")
        if (mark := mark or self._origin) is not None:
            self.iterable.load_state_dict(mark["state"])  # type: ignore[attr-defined]
            self._start = self._position = mark["position"]

    @property
    def can_reshard(self) -> bool:
        return self.stateful

    def reshard(self, leftovers: Sequence[ResumePosition], held: Sequence[Any]) -> None:
        if not self.stateful:
            super().reshard(leftovers, held)
        places = [None if leftover.mark is None else leftover.mark["state"] for leftover in leftovers]
        self.iterable.reshard(places, self.partition.index, self.partition.count)  # type: ignore[attr-defined]
        self._start = self._position = len(held)
        self._origin = self.mark()

"""Any iterable, taken as one trainer's own share: one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any

from paramserver.sources.base import Partition, ResumePosition, Source


class IterableSource(Source):
    """One pass over an iterable. It resumes by reading again, and leaving out, what was put before.

    An iterable that keeps its own place resumes without reading again, and with another number of trainers too. It has
    ``state_dict()``, called after each sample in the thread that reads, for the place after that sample;
    ``load_state_dict(state)``, after which ``iter()`` goes on from that place; and ``reshard(states, index, count)``,
    after which it goes on with share ``index`` of ``count`` of what iterables at these places had left.
    """

    def __init__(self, iterable: Iterable[Any], partition: Partition) -> None:
        self.iterable = iterable
        self.partition = partition
        self.keeps_place = all(hasattr(iterable, name) for name in ("state_dict", "load_state_dict", "reshard"))
        self._placed = False

    def samples(self, position: int) -> Iterator[tuple[int, Any]]:
        skipped = 0 if self._placed else position
        return enumerate(islice(iter(self.iterable), skipped, None), start=position)

    @property
    def total(self) -> int | None:
        if self.keeps_place:
            return None  # a length would be of what is left, or of all: each iterable has its own idea
        try:
            return len(self.iterable)  # type: ignore[arg-type]  # an iterable may know its length
        except TypeError:
            return None

    def mark(self) -> Any:
        # A copy: many an iterable hands out what it goes on to change.
        return deepcopy(self.iterable.state_dict()) if self.keeps_place else None  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any], mark: Any = None) -> None:
        if mark is not None:
            self.iterable.load_state_dict(mark)  # type: ignore[attr-defined]
            self._placed = True

    def reshard(self, leftovers: Sequence[ResumePosition], held: Sequence[Any]) -> None:
        if not self.keeps_place:
            super().reshard(leftovers, held)
        places = [leftover.mark for leftover in leftovers]
        self.iterable.reshard(places, self.partition.index, self.partition.count)  # type: ignore[attr-defined]
        self._placed = True

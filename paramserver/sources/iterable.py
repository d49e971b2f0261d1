"""Any iterable, taken as one trainer's own share: one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from paramserver.sources.base import Source


class IterableSource(Source):
    """One pass over an iterable. It resumes by reading again, and leaving out, what was put before."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable

    def samples(self, position: int) -> Iterator[tuple[int, Any]]:
        return enumerate(islice(iter(self.iterable), position, None), start=position)

    @property
    def total(self) -> int | None:
        try:
            return len(self.iterable)  # type: ignore[arg-type]  # an iterable may know its length
        except TypeError:
            return None

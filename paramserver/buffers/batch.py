"""What a buffer hands out: a batch of samples, and a snapshot of its own state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples that were drawn together; their storage is the batch's own.

    Attributes:
        keys: the identity of each sample, as it was put.
        size: number of samples.
        new: how many of them were served for the first time.
        stacked: what ``torch.utils.data.default_collate`` would make of ``samples``; None where they cannot be stacked.
    """

    keys: list[Any]
    size: int
    new: int
    stacked: Any | None
    _rebuild: Callable[[], list[Any]] = field(repr=False)

    def __len__(self) -> int:
        return self.size

    @cached_property
    def samples(self) -> list[Any]:
        """The samples in the types they were put in. Tensors and arrays are rows of ``stacked``, not copies."""
        return self._rebuild()


@dataclass
class ServingCounts:
    """What a buffer counts from its creation on, also across a checkpoint. Attributes as of BufferInfo."""

    puts: int = 0
    gets: int = 0
    batches: int = 0
    evicted: int = 0
    put_wait_s: float = 0.0
    get_wait_s: float = 0.0


@dataclass(frozen=True)
class BufferInfo:
    """One moment of a buffer, taken under its lock.

    Attributes:
        kind: fifo, firo or reservoir.
        population: samples held.
        unseen: of these, how many were never served.
        capacity: samples that may be held.
        puts: samples put since creation.
        gets: samples served since creation.
        batches: times that samples were served.
        evicted: samples that a reservoir let go, by a put or, after ``finish()``, by the get that served them.
        put_wait_s: seconds that producers were blocked, summed over them.
        get_wait_s: seconds that the consumer was blocked.
        bytes: size of the samples held.
        seen_histogram: {times served: samples}, over every sample ever put, held or gone.
    """

    kind: str
    population: int
    unseen: int
    capacity: int
    puts: int
    gets: int
    batches: int
    evicted: int
    put_wait_s: float
    get_wait_s: float
    bytes: int
    seen_histogram: dict[int, int]

"""Parts of samples, which the processes of a group send one by one, and what becomes of them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Arrays: TypeAlias = "tuple[npt.NDArray[Any], ...]"
"""The fields of a sample or part, in the order of the plan."""

_MOST_SIMULATIONS = 65_536


class PartOutcome(Enum):
    """Of a part that completes nothing."""

    WAITING = "waits for the others"
    DUPLICATE = "was there before"
    STALE = "is of an older attempt"
    FULL = "begins one sample too many"


@dataclass(frozen=True)
class SamplePart:
    """What one member sent. ``giver`` is whatever the caller wants back with it."""

    arrays: Arrays
    giver: Any


class SampleAssembly:
    """The samples of groups of which some parts are missing.

    Not thread-safe. Its memory is bounded: ``limit`` unfinished samples of a simulation, and the attempts of so many
    simulations as were last begun.

    Args:
        members: parts of a whole sample.
        limit: unfinished samples of one simulation.
    """

    def __init__(self, members: int, limit: int) -> None:
        self.members = members
        self.limit = limit
        self._attempts: OrderedDict[int, int] = OrderedDict()
        self._unfinished: dict[int, dict[int, dict[int, SamplePart]]] = {}
        self._count = 0

    def __len__(self) -> int:
        """How many samples are unfinished; for any thread."""
        return self._count

    def begin(self, simulation: int, attempt: int) -> list[SamplePart]:
        """A member opened this attempt of a simulation: the parts of older ones, which are dropped."""
        known = self._attempts.pop(simulation, attempt)
        self._attempts[simulation] = max(known, attempt)
        if len(self._attempts) > _MOST_SIMULATIONS:
            self._attempts.popitem(last=False)
        return self.drop(simulation) if attempt > known else []

    def drop(self, simulation: int) -> list[SamplePart]:
        """Forget the unfinished samples of a simulation; their parts."""
        steps = self._unfinished.pop(simulation, {})
        self._count -= len(steps)
        return [part for parts in steps.values() for part in parts.values()]

    def add(self, key: tuple[int, int], attempt: int, member: int, part: SamplePart) -> PartOutcome | list[SamplePart]:
        """Take one part; all parts of its sample in the order of members where it was the last one."""
        simulation, step = key
        if attempt < self._attempts.get(simulation, attempt):
            return PartOutcome.STALE
        steps = self._unfinished.setdefault(simulation, {})
        if step not in steps and len(steps) >= self.limit:
            return PartOutcome.FULL
        if step not in steps:
            steps[step] = {}
            self._count += 1
        parts = steps[step]
        if member in parts:
            return PartOutcome.DUPLICATE
        parts[member] = part
        if len(parts) < self.members:
            return PartOutcome.WAITING
        del steps[step]
        self._count -= 1
        if not steps:
            del self._unfinished[simulation]
        return [parts[i] for i in range(self.members)]


def joined(parts: list[SamplePart]) -> Arrays:
    """The whole arrays: those of the parts one below the other."""
    columns = zip(*(part.arrays for part in parts), strict=True)
    return tuple(np.concatenate(column) for column in columns)

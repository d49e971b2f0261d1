"""Which samples of a trainer were applied: with it a replacement continues where a lost trainer stopped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Key: TypeAlias = tuple[int, int]
"""Simulation and step of a sample."""

_BITS = 6


class KeySet:
    """A set of samples of simulations, with one bit for each. Not thread-safe.

    The steps of a simulation are in fixed blocks of 64, so that the set stays small also when they arrive with gaps, as
    they do when several trainers share them.
    """

    def __init__(self, state: Iterable[Sequence[int]] = ()) -> None:
        self._blocks: dict[int, dict[int, int]] = {}  # {simulation: {step // 64: bits}}
        for simulation, block, bits in state:
            self._blocks.setdefault(simulation, {})[block] = bits

    def update(self, keys: Iterable[Key]) -> None:
        for simulation, step in keys:
            self.add(simulation, step)

    def add(self, simulation: int, step: int) -> bool:
        """Add one sample; return whether it was not in the set."""
        blocks = self._blocks.get(simulation)
        if blocks is None:
            blocks = self._blocks[simulation] = {}
        block, bit = step >> _BITS, 1 << (step & 63)
        bits = blocks.get(block, 0)
        blocks[block] = bits | bit
        return not bits & bit

    def __contains__(self, key: Key) -> bool:
        blocks = self._blocks.get(key[0])
        return blocks is not None and bool(blocks.get(key[1] >> _BITS, 0) >> (key[1] & 63) & 1)

    def __iter__(self) -> Iterator[Key]:
        for simulation, blocks in sorted(self._blocks.items()):
            for block, bits in sorted(blocks.items()):
                yield from ((simulation, (block << _BITS) + bit) for bit in range(64) if bits >> bit & 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeySet) and self._blocks == other._blocks

    __hash__ = None  # type: ignore[assignment]  # mutable

    def state_dict(self) -> list[list[int]]:
        """Return a simulation, a block and its bits for each block, as numbers and lists of numbers."""
        return [[i, block, bits] for i, blocks in self._blocks.items() for block, bits in blocks.items()]


@dataclass
class AppliedPositions:
    """How often the samples of one trainer were applied, by position. Not thread-safe.

    The n-th sample that a source gives has position n, from 0 on and over all passes. Every position below ``low`` was
    applied as often as it is due, so the size is that of the dictionary, which the buffer's capacity keeps small.

    A stream of simulations gives no order that another process could repeat: its samples are named by their keys,
    (simulation, step), and ``keys`` has those that were applied at least once, in a bit each.

    Attributes:
        low: all positions below it are complete.
        above: {position: times applied} of positions from ``low`` on.
        count: servings that were applied, of all positions.
        stale: of samples that count as applied or were received before, how many were removed as too old instead.
    """

    low: int = 0
    above: dict[int, int] = field(default_factory=dict)
    count: int = 0
    stale: int = field(default=0, repr=False)
    keys: KeySet = field(default_factory=KeySet, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        self.above = dict(self.above)

    def add(self, positions: Sequence[int] | npt.NDArray[np.int64], times_due: int | None) -> None:
        """Count one more serving of each of these positions; a position may occur more than once.

        ``times_due`` is how often each sample is served (``Buffer.times_due``). Where it is None, as in a reservoir,
        which repeats samples as it likes, a position is complete with the first time, and more are counted only.

        Raises:
            ValueError: a position was applied more than ``times_due`` times.
        """
        if isinstance(positions, np.ndarray):
            positions = positions.tolist()  # Python's numbers, which a dictionary finds faster
        above, low, due = self.above, self.low, times_due or 1
        for position in positions:
            times = above.get(position, 0) if position >= low else due
            if times < due:
                above[position] = times + 1
            elif times_due is not None:
                raise ValueError(
                    f"position ({position}) must be applied at most {due} times, it is applied once more; "
                    "a sample was served twice"
                )
        while above.get(low) == due:
            del above[low]
            low += 1
        self.low = low
        self.count += len(positions)

    def times(self, position: int) -> int | None:
        """Return how often this position was applied; None if it is below ``low``, so complete."""
        return None if position < self.low else self.above.get(position, 0)

    def add_keys(self, keys: Sequence[Key]) -> None:
        """Count one more serving of each of these samples of a stream."""
        self.keys.update(keys)
        self.count += len(keys)

    def state_dict(self) -> dict[str, Any]:
        """Return the account as numbers and lists of numbers, for a message, JSON or a checkpoint."""
        return {
            "low": self.low,
            "count": self.count,
            "positions": list(self.above.keys()),
            "times": list(self.above.values()),
            "keys": self.keys.state_dict(),
            "stale": self.stale,
        }

    def packed_state_dict(self) -> dict[str, Any]:
        """Return ``state_dict()`` with tensors in place of lists, which are copied number by number."""

        def packed(numbers: Iterable[int]) -> torch.Tensor:
            # The bits of a block are 64; torch has few operations on unsigned numbers.
            return torch.from_numpy(np.fromiter(numbers, np.uint64).view(np.int64))

        state = self.state_dict()
        keys = packed(chain.from_iterable(state["keys"])).reshape(-1, 3)
        return state | {"positions": packed(state["positions"]), "times": packed(state["times"]), "keys": keys}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()`` or ``packed_state_dict()``."""
        state = {
            name: value.numpy().view(np.uint64).tolist() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }
        self.low, self.count = state["low"], state["count"]
        self.above = dict(zip(state["positions"], state["times"], strict=True))
        self.keys = KeySet(state["keys"])
        self.stale = state.get("stale", 0)

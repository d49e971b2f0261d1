"""Which samples a trainer has received: what is known, and the order in which its buffer got them."""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paramserver.errors import CheckpointError

Key: TypeAlias = tuple[int, int]
"""Simulation and step."""

Keys: TypeAlias = npt.NDArray[np.int64]
"""A row for each key."""

_BITS = 6


class ReceivedLog:
    """A log of the samples that were handed to the feeder, and the set of those that were seen.

    Position n of the log is the n-th put into the buffer. Before the log lies what was inherited: samples that trainers
    of an earlier run, of another number, had got; it is the same in all trainers. What was seen is all of this and
    what has been accepted since and not been handed over yet.

    ``has`` and ``see`` belong to the thread that receives, ``extend`` to the feeder; each costs O(1) per sample.
    ``state`` and the counts are for any thread. What replaces the content is for before these threads start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replace(_no_keys(), _no_keys(), 0)

    def _replace(self, inherited: Keys, log: Keys, held: int) -> None:
        self._inherited = inherited
        self._log = array("q", log.tobytes())
        self._held = held
        # {simulation: {step // 64: a bit for each of these steps}}: a number for 64 steps, wherever they lie.
        self._seen: dict[int, dict[int, int]] = {}
        for simulation, step in (*inherited.tolist(), *log.tolist()):
            self.see(simulation, step)

    # The thread that receives.

    def has(self, simulation: int, step: int) -> bool:
        """Whether this sample was seen."""
        blocks = self._seen.get(simulation)
        return blocks is not None and bool(blocks.get(step >> _BITS, 0) >> (step & 63) & 1)

    def see(self, simulation: int, step: int) -> None:
        """Know this sample from now on; it need not have been handed over."""
        blocks = self._seen.setdefault(simulation, {})
        blocks[step >> _BITS] = blocks.get(step >> _BITS, 0) | 1 << (step & 63)

    # The feeder.

    def extend(self, keys: Iterable[Key]) -> None:
        """Append what is handed over next to the log."""
        flat = [number for key in keys for number in key]
        with self._lock:
            self._log.extend(flat)

    def __len__(self) -> int:
        return len(self._log) // 2

    # Anybody.

    def log(self, position: int | None = None) -> Keys:
        """The keys of the first ``position`` samples of the log; None = of all. A copy."""
        with self._lock:
            flat = self._log[: len(self._log) if position is None else 2 * position]
        return np.frombuffer(flat, np.int64).reshape(-1, 2)

    def counts(self, position: int | None = None) -> dict[int, int]:
        """{simulation: samples} of the log, without those that were inherited."""
        return _counted(self.log(position)[self._held :])

    def inherited(self) -> dict[int, int]:
        """{simulation: samples} of what trainers of an earlier run had got."""
        return _counted(self._inherited)

    def inherited_for(self, index: int, trainers: int) -> int:
        """How many samples were inherited that trainer ``index`` of ``trainers`` would be sent, dealt in turn."""
        return int(np.count_nonzero(self._inherited.sum(axis=1) % trainers == index))

    @property
    def held(self) -> int:
        """How many positions at the head of the log are inherited samples that this trainer's buffer began with."""
        return self._held

    # Checkpoints.

    def state(self, position: int | None = None) -> dict[str, Any]:
        """What ``restore`` and ``take_over`` take: plain arrays, of the log as far as ``position``."""
        return {"inherited": self._inherited.copy(), "log": self.log(position), "held": self._held}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._replace(*_read(state), int(state["held"]))

    def truncate(self, position: int) -> None:
        """Forget what was handed over after ``position`` samples, and what was seen and not handed over.

        Raises:
            CheckpointError: the log is shorter.
        """
        if position > len(self):
            raise CheckpointError(
                f"the source's position ({position}) must be at most the {len(self)} samples that it noted; the "
                "checkpoint is of another source: resume with the one that it was written with"
            )
        self._replace(self._inherited, self.log(position), min(self._held, position))

    def take_over(self, states: Sequence[Mapping[str, Any]], positions: Sequence[int], held: Sequence[Key]) -> None:
        """Begin where another number of trainers left.

        Args:
            states: of all of them.
            positions: how many samples each had put into its buffer.
            held: the keys that this trainer's buffer begins with.
        """
        known = [_no_keys()]
        for state, position in zip(states, positions, strict=True):
            inherited, log = _read(state)
            known += [inherited, log[:position]]
        self._replace(np.unique(np.concatenate(known), axis=0), _rows(held), len(held))


def _counted(keys: Keys) -> dict[int, int]:
    return dict(Counter(keys[:, 0].tolist()))


def _read(state: Mapping[str, Any]) -> tuple[Keys, Keys]:
    return _rows(state["inherited"]), _rows(state["log"])


def _rows(keys: Any) -> Keys:
    return np.asarray(keys, dtype=np.int64).reshape(-1, 2)


def _no_keys() -> Keys:
    return np.empty((0, 2), np.int64)

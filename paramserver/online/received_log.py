"""Which samples a trainer has received: the set of them, and the order in which its buffer stored them."""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paramserver.buffers.positions import Key, KeySet
from paramserver.errors import CheckpointError

Keys: TypeAlias = npt.NDArray[np.int64]
"""One row per key."""


class ReceivedLog:
    """The log of the samples that were handed to the feeder, and the set of all samples that were received.

    Entry n of the log is the n-th sample that is put into the buffer. The inherited keys are samples that the trainers
    of an earlier run, of another number, received; they are the same on all trainers. The set holds the inherited keys,
    the log, and the samples that were accepted since and are not in the log yet.

    Threads: ``contains`` and ``mark_received`` belong to the receiver thread, ``extend`` to the feeder; each takes O(1)
    per sample. ``state_dict`` and the counts are safe to call from any thread. ``load_state_dict``, ``truncate``,
    ``restart`` and ``reshard`` replace the content and must be called before these threads start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replace(_no_keys(), _no_keys(), 0)

    def _replace(self, inherited: Keys, log: Keys, num_held: int) -> None:
        self._inherited = inherited
        self._log = array("q", log.tobytes())
        # Entries at the head of the log that are inherited samples in this trainer's buffer.
        self.num_held = num_held
        self._received = KeySet()
        self._lost: dict[int, set[int]] = {}
        for simulation, step in (*inherited.tolist(), *log.tolist()):
            self.mark_received(simulation, step)

    # Called by the receiver thread. No lock: no other thread touches the set.

    def contains(self, simulation: int, step: int) -> bool:
        return (simulation, step) in self._received

    def mark_received(self, simulation: int, step: int) -> bool:
        """Add this sample to the set, before it is handed to the feeder; return whether it was not in it."""
        if self._lost:
            self._lost.get(simulation, set()).discard(step)
        return self._received.add(simulation, step)

    def mark_lost(self, simulation: int, step: int) -> None:
        """A trainer that this one replaces had this sample: it is lost, until it is received here."""
        if not self.contains(simulation, step):
            self._lost.setdefault(simulation, set()).add(step)

    def lost_counts(self) -> dict[int, int]:
        """{simulation: samples} that are lost."""
        return {simulation: len(steps) for simulation, steps in self._lost.items()}

    # Called by the feeder.

    def extend(self, keys: Iterable[Key]) -> None:
        """Append samples to the log, before they are put into the buffer."""
        flat = list(chain.from_iterable(keys))
        with self._lock:
            self._log.extend(flat)

    def __len__(self) -> int:
        return len(self._log) // 2

    # Called by any thread.

    def keys(self, position: int | None = None) -> Keys:
        """A copy of the first ``position`` keys of the log; None = all."""
        with self._lock:
            flat = self._log[: len(self._log) if position is None else 2 * position]
        return np.frombuffer(flat, np.int64).reshape(-1, 2)

    def counts(self, position: int | None = None) -> dict[int, int]:
        """{simulation: samples} of the log, without those at its head that were inherited."""
        return _counted(self.keys(position)[self.num_held :])

    def inherited_counts(self) -> dict[int, int]:
        """{simulation: samples} that the trainers of an earlier run received."""
        return _counted(self._inherited)

    def num_inherited_for(self, trainer_index: int, num_trainers: int) -> int:
        """How many of the inherited samples would be sent to this trainer, round robin."""
        return int(np.count_nonzero(self._inherited.sum(axis=1) % num_trainers == trainer_index))

    # Checkpoints.

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """The state as plain arrays, with the first ``position`` entries of the log; None = all."""
        return {"inherited": self._inherited.copy(), "log": self.keys(position), "held": self.num_held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._replace(*_read(state), int(state["held"]))

    def truncate(self, position: int) -> None:
        """Drop the log entries after ``position``, and the samples that were received and are not in the log.

        Raises:
            CheckpointError: the log is shorter.
        """
        if position > len(self):
            raise CheckpointError(
                f"the source's position ({position}) must be at most the {len(self)} samples that it noted; the "
                "checkpoint is of another source: resume with the one that it was written with"
            )
        self._replace(self._inherited, self.keys(position), min(self.num_held, position))

    def restart(self, keys: Iterable[Key]) -> None:
        """Replace the log by these keys; the inherited ones stay."""
        self._replace(self._inherited, _rows(list(keys)), 0)

    def reshard(self, states: Sequence[Mapping[str, Any]], positions: Sequence[int], held: Sequence[Key]) -> None:
        """Continue from the checkpoint of a run with another number of trainers.

        Args:
            positions: samples that each of them had put into its buffer.
            held: the keys of the samples that this trainer's buffer starts with.
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

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

    Entry n of the log is the n-th sample that is put into the buffer. With another number of trainers than before, the
    log begins with the samples that this trainer's buffer was given. The *inherited* keys are those that were received
    before and are in no buffer, the same on all trainers; those *elsewhere* are in the buffers of the other trainers.
    Each sample is so in the log of one trainer, or inherited; if its trainer dies, it is lost. The set holds all of
    these, and the samples that were accepted since and are not in the log yet.

    Threads: ``contains``, ``first_missing`` and ``mark_received`` belong to the receiver thread, ``extend`` to the
    feeder; each takes O(1) per sample. ``state_dict`` and the counts are safe to call from any thread.
    ``load_state_dict``, ``truncate``, ``restart`` and ``reshard`` replace the content and must be called before these
    threads start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replace(_no_keys(), _no_keys(), _no_keys(), 0, _no_keys())

    def _replace(self, inherited: Keys, elsewhere: Keys, log: Keys, num_held: int, lost: Keys) -> None:
        self._inherited, self._elsewhere = inherited, elsewhere
        self._log = array("q", log.tobytes())
        # Entries at the head of the log that this trainer's buffer was given.
        self.num_held = num_held
        self._received = KeySet()
        self._first_missing: dict[int, int] = {}  # as of the last call of ``first_missing``
        self._lost: dict[int, set[int]] = {}
        for simulation, step in (*inherited.tolist(), *elsewhere.tolist(), *log.tolist()):
            self.mark_received(simulation, step)
        for simulation, step in lost.tolist():
            self.mark_lost(simulation, step)

    # Called by the receiver thread. No lock for the set, which no other thread touches.

    def contains(self, simulation: int, step: int) -> bool:
        return (simulation, step) in self._received

    def mark_received(self, simulation: int, step: int) -> bool:
        """Add this sample to the set, before it is handed to the feeder; return whether it was not in it."""
        if self._lost:
            with self._lock:
                self._lost.get(simulation, set()).discard(step)
        return self._received.add(simulation, step)

    def first_missing(self, simulation: int, first: int, stride: int) -> int:
        """Return the first of the steps ``first``, ``first + stride``, ... that is not in the set."""
        step = self._first_missing.get(simulation, first)
        while (simulation, step) in self._received:
            step += stride
        self._first_missing[simulation] = step
        return step

    def mark_lost(self, simulation: int, step: int) -> None:
        """A trainer that this one replaces had this sample: it is lost, until it is received here."""
        if not self.contains(simulation, step):
            with self._lock:
                self._lost.setdefault(simulation, set()).add(step)

    def is_lost(self, simulation: int, step: int) -> bool:
        return step in self._lost.get(simulation, ())

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
        """{simulation: samples} of the first ``position`` entries of the log; None = all."""
        return _counted(self.keys(position))

    def simulations(self) -> list[int]:
        """The simulations of all samples of the log, and of those that are inherited or elsewhere."""
        known = np.concatenate([self._inherited, self._elsewhere, self.keys()])
        return list(np.unique(known[:, 0]).tolist())

    def inherited_counts(self) -> dict[int, int]:
        """{simulation: samples} that the trainers of an earlier run received and that are in no buffer."""
        return _counted(self._inherited)

    def num_inherited_for(self, trainer_index: int, num_trainers: int) -> int:
        """How many of the inherited samples would be sent to this trainer, round robin."""
        return _num_dealt_to(self._inherited, trainer_index, num_trainers)

    def num_unplanned(self, trainer_index: int, num_trainers: int) -> int:
        """How many samples more than those that would be sent to this trainer, round robin, are put into its buffer.

        Those that its buffer was given are more, and those that were received before are fewer.
        """
        held = self.keys(self.num_held)
        known = (self._inherited, self._elsewhere, held)
        return len(held) - sum(_num_dealt_to(keys, trainer_index, num_trainers) for keys in known)

    # Checkpoints.

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """The state as plain arrays, with the first ``position`` entries of the log; None = all."""
        return {
            "inherited": self._inherited.copy(),
            "elsewhere": self._elsewhere.copy(),
            "log": self.keys(position),
            "held": self.num_held,
            "lost": self._lost_keys(),
        }

    def _lost_keys(self) -> Keys:
        with self._lock:
            return _rows([(simulation, step) for simulation, steps in self._lost.items() for step in steps])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        inherited, log = _rows(state["inherited"]), _rows(state["log"])
        if len(inherited) and "elsewhere" not in state:
            raise CheckpointError(
                f"the {len(inherited)} samples that the checkpoint inherited must be without those of buffers, and an "
                "earlier release counted both; resume it with another number of trainers, which counts them anew"
            )
        elsewhere, lost = (_rows(state.get(name, ())) for name in ("elsewhere", "lost"))
        self._replace(inherited, elsewhere, log, int(state["held"]), lost)

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
        log, num_held = self.keys(position), min(self.num_held, position)
        self._replace(self._inherited, self._elsewhere, log, num_held, self._lost_keys())

    def restart(self, applied: Iterable[Key]) -> None:
        """Replace the log by the samples that were applied, of it and of those after it; the others are lost.

        A lost sample is received again if it is sent to this trainer. One that the buffer was given, and that is sent
        to another trainer, is dropped there and stays lost.
        """
        before, after = self.keys(), _rows(list(applied))
        held = before[: self.num_held]
        given = _without(held, _without(held, after))  # of those that the buffer was given, the applied ones
        log, lost = np.concatenate([given, _without(after, given)]), np.concatenate([self._lost_keys(), before])
        self._replace(self._inherited, self._elsewhere, log, len(given), lost)

    def reshard(
        self, states: Sequence[Mapping[str, Any]], positions: Sequence[int], held: Sequence[Key], kept: Sequence[Key]
    ) -> None:
        """Continue from the checkpoint of a run with another number of trainers.

        Args:
            positions: samples that each of them had put into its buffer.
            held: the keys of the samples that this trainer's buffer starts with.
            kept: those of the samples that the buffers of all trainers start with.
        """
        known = [_no_keys()]
        for state, position in zip(states, positions, strict=True):
            known += [_rows(state["inherited"]), _rows(state["log"])[:position]]
        here, buffers = _rows(held), _rows(kept)
        inherited = _without(np.unique(np.concatenate(known), axis=0), buffers)
        self._replace(inherited, _without(buffers, here), here, len(here), _no_keys())


def _counted(keys: Keys) -> dict[int, int]:
    return dict(Counter(keys[:, 0].tolist()))


def _num_dealt_to(keys: Keys, trainer_index: int, num_trainers: int) -> int:
    return int(np.count_nonzero(keys.sum(axis=1) % num_trainers == trainer_index))


def _without(keys: Keys, others: Keys) -> Keys:
    """Those of ``keys`` that are not in ``others``, in their order."""
    left_out = KeySet()
    left_out.update((simulation, step) for simulation, step in others.tolist())
    return _rows([(simulation, step) for simulation, step in keys.tolist() if (simulation, step) not in left_out])


def _rows(keys: Any) -> Keys:
    return np.asarray(keys, dtype=np.int64).reshape(-1, 2)


def _no_keys() -> Keys:
    return np.empty((0, 2), np.int64)

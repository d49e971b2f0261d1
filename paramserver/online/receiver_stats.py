"""Statistics of what a trainer receives: counters of messages, and mean and deviation of the fields."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserver.online.protocol import SimulationReport
from paramserver.online.validator import (
    REASONS,
    DuplicateSample,
    MessageRefused,
    Outcome,
    Reason,
    SampleAccepted,
    describe_sender,
)

_log = logging.getLogger("paramserver")

# Pairs of reason and sender whose first refusal is logged; further pairs are only counted.
_MAX_LOGGED = 1000


class ReceiveStats:
    """Counters of the receiver thread. ``counters`` is safe to call from any thread and may lag by one message.

    Args:
        stored: simulation -> samples in the buffer so far.
        sample_bytes: of the fields of one sample.
        trainer_index: for the log.
    """

    def __init__(self, stored: Mapping[int, int], sample_bytes: int, trainer_index: int) -> None:
        self.stored = Counter(stored)
        self.received = sum(stored.values())
        self.duplicated = 0
        self.refused: Counter[Reason] = Counter(dict.fromkeys(REASONS, 0))
        self._sample_bytes = sample_bytes
        self._trainer_index = trainer_index
        self._logged: set[tuple[Reason, str]] = set()
        self._changed: set[int] = set()
        self._active: set[tuple[int, int]] = set()

    def record(self, outcome: Outcome, host: str) -> None:
        """Count one message. The first refusal for each reason and sender is logged, with the sender's host."""
        if isinstance(outcome, MessageRefused):
            self._record_refusal(outcome, host)
        elif outcome.session is not None:
            header = outcome.session.header
            self._active.add((header.simulation, header.member))
            self.duplicated += isinstance(outcome, DuplicateSample)

    def _record_refusal(self, outcome: MessageRefused, host: str) -> None:
        self.refused[outcome.reason] += 1
        header = outcome.header if outcome.session is None else outcome.session.header
        sender = f"a client on {host}" if header is None else describe_sender(header)
        if (outcome.reason, sender) in self._logged or len(self._logged) >= _MAX_LOGGED:
            return
        self._logged.add((outcome.reason, sender))
        _log.warning(
            "trainer %d refused a message of %s: %s; more of this kind (%s) are counted and not logged",
            self._trainer_index,
            sender,
            outcome.text,
            outcome.reason,
        )

    def record_stored(self, samples: Sequence[SampleAccepted]) -> set[int]:
        """Count samples that the buffer has stored; returns their simulations."""
        simulations = [sample.key[0] for sample in samples]
        self.stored.update(simulations)
        self.received += len(simulations)
        self._changed.update(simulations)
        return set(simulations)

    def counters(self) -> dict[str, Any]:
        """Samples stored in the buffer since the start of the run and their bytes; messages since the last resume.

        ``refusals`` is {reason: messages} of the reasons that occurred, and ``refused`` their sum.
        """
        # Copied first: iteration over a dict that the receiver thread changes would fail.
        refusals = {reason: n for reason, n in self.refused.copy().items() if n}
        return {
            "received": self.received,
            "bytes": self.received * self._sample_bytes,
            "duplicated": self.duplicated,
            "refused": sum(refusals.values()),
            "refusals": refusals,
        }

    def make_report(self, pending: Sequence[int]) -> SimulationReport:
        """What has changed since the last report, the counters, and the ``pending`` simulations."""
        received = {simulation: self.stored[simulation] for simulation in sorted(self._changed)}
        report = SimulationReport(received, sorted(self._active), self.counters(), pending)
        self._changed, self._active = set(), set()
        return report


# One of so many samples is measured. A prime, so that simulations that take turns are all measured.
_SAMPLE_EVERY = 7


class RunningMoments:
    """Count, mean and deviation of numbers that arrive in arrays, without keeping the numbers.

    Arrays are merged by T. Chan, G. Golub and R. LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", Stanford 1979. Numbers that are not finite are counted and left out.

    Example::

        >>> moments = RunningMoments()
        >>> moments.add(np.array([1.0, 3.0]))
        >>> moments.add(np.array([5.0, np.nan]))
        >>> moments.count, moments.mean, moments.not_finite
        (3, 3.0, 1)
        >>> round(moments.deviation, 3)
        1.633
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.not_finite = 0
        self._squares = 0.0

    def add(self, array: npt.NDArray[Any]) -> None:
        """Add all numbers of an array."""
        values = array.astype(np.float64).ravel()
        with np.errstate(all="ignore"):
            mean = _mean(values)
            # A mean that is not finite is the cheap test for a number that is not.
            if not math.isfinite(mean):
                finite = values[np.isfinite(values)]
                self.not_finite += values.size - finite.size
                values, mean = finite, _mean(finite)
            values -= mean
            squares = float(values.dot(values))
        if not values.size:
            return
        total = self.count + values.size
        delta = mean - self.mean
        self.mean += delta * values.size / total
        self._squares += squares + delta * delta * self.count * values.size / total
        self.count = total

    @property
    def deviation(self) -> float:
        """Standard deviation, as numpy's ``std``."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0

    def as_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "deviation": self.deviation, "count": self.count, "not_finite": self.not_finite}


def _mean(values: npt.NDArray[np.float64]) -> float:
    return float(np.add.reduce(values)) / values.size if values.size else 0.0


class FieldStatistics:
    """Moments of every field between two reads. Thread-safe.

    One sample in seven is measured, and at most one of the samples that arrive together.

    Args:
        names: of the fields.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._skipped = _SAMPLE_EVERY
        self._moments = {name: RunningMoments() for name in self._names}

    def add(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Add samples that arrived together."""
        with self._lock:
            self._skipped += len(samples)
            if self._skipped >= _SAMPLE_EVERY:
                for name, moments in self._moments.items():
                    moments.add(samples[-1][name])
                self._skipped = 0

    def read_and_reset(self) -> dict[str, dict[str, float]]:
        """``{field: {mean, deviation, count, not_finite}}`` of the samples measured since the last call."""
        with self._lock:
            rows = {name: moments.as_dict() for name, moments in self._moments.items()}
            self._reset()
        return rows

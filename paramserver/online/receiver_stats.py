"""What a trainer has received, counted.

Mean and deviation of the fields of what arrives.
"""

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
    named,
)

_log = logging.getLogger("paramserver")

# Kinds of refusals that are told to the log, each with its source; those beyond are only counted.
_MOST_TOLD = 1000


class ReceiveStats:
    """Counts of one thread; ``figures`` is for any thread, and may be one message behind.

    Args:
        counts: simulation -> samples that the buffer has got already.
        sample_bytes: of the fields of one sample.
        trainer_index: for the log.
    """

    def __init__(self, counts: Mapping[int, int], sample_bytes: int, trainer_index: int) -> None:
        self.counts = Counter(counts)
        self.received = sum(counts.values())
        self.duplicated = 0
        self.refused: Counter[Reason] = Counter(dict.fromkeys(REASONS, 0))
        self._sample_bytes = sample_bytes
        self._trainer_index = trainer_index
        self._told: set[tuple[Reason, str]] = set()
        self._changed: set[int] = set()
        self._heard: set[tuple[int, int]] = set()

    def note(self, verdict: Outcome, host: str) -> None:
        """Count one message; of a refused one the first of its kind and source, with its host, goes to the log."""
        if isinstance(verdict, MessageRefused):
            self._note_refused(verdict, host)
        elif verdict.visitor is not None:
            header = verdict.visitor.header
            self._heard.add((header.simulation, header.member))
            self.duplicated += isinstance(verdict, DuplicateSample)

    def _note_refused(self, verdict: MessageRefused, host: str) -> None:
        self.refused[verdict.reason] += 1
        source = _source(verdict, host)
        if (verdict.reason, source) in self._told or len(self._told) >= _MOST_TOLD:
            return
        self._told.add((verdict.reason, source))
        _log.warning(
            "trainer %d refused a message of %s: %s; more of this kind (%s) are counted and not told",
            self._trainer_index,
            source,
            verdict.sentence,
            verdict.reason,
        )

    def settle(self, accepted: Sequence[SampleAccepted]) -> set[int]:
        """The buffer has got these samples; of which simulations they are."""
        simulations = [one.key[0] for one in accepted]
        self.counts.update(simulations)
        self.received += len(simulations)
        self._changed.update(simulations)
        return set(simulations)

    def figures(self) -> dict[str, Any]:
        """Samples that the buffer has got since the start of the run, and their bytes; messages since it was resumed.

        ``refusals`` is {reason: messages}, of the reasons that came up, and ``refused`` their sum.
        """
        refusals = {reason: n for reason, n in self.refused.copy().items() if n}
        return {
            "received": self.received,
            "bytes": self.received * self._sample_bytes,
            "duplicated": self.duplicated,
            "refused": sum(refusals.values()),
            "refusals": refusals,
        }

    def report(self, waiting: Sequence[int]) -> SimulationReport:
        """What is new for the desk since the last report, the figures, and what is ``waiting``."""
        received = {simulation: self.counts[simulation] for simulation in sorted(self._changed)}
        report = SimulationReport(received, sorted(self._heard), self.figures(), waiting)
        self._changed, self._heard = set(), set()
        return report


def _source(verdict: MessageRefused, host: str) -> str:
    header = verdict.header if verdict.visitor is None else verdict.visitor.header
    return f"a client on {host}" if header is None else named(header)


# Of how many samples one is looked at. A prime: simulations that take turns would else be looked at in a part only.
_EVERY = 7


class RunningMoments:
    """Count, mean and deviation of numbers that come in arrays, whose values are not kept.

    Arrays are merged by T. Chan, G. Golub and R. LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", Stanford 1979. Numbers that are not finite are counted and left out.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.not_finite = 0
        self._squares = 0.0

    def add(self, array: npt.NDArray[Any]) -> None:
        values = array.astype(np.float64).ravel()
        with np.errstate(all="ignore"):
            mean = _mean(values)
            if not math.isfinite(mean):
                finite = values[np.isfinite(values)]
                self.not_finite += values.size - finite.size
                values, mean = finite, _mean(finite)
            values -= mean
            squares = float(values.dot(values))
        self._merge(values.size, mean, squares)

    def _merge(self, count: int, mean: float, squares: float) -> None:
        if not count:
            return
        total = self.count + count
        apart = mean - self.mean
        self.mean += apart * count / total
        self._squares += squares + apart * apart * self.count * count / total
        self.count = total

    @property
    def deviation(self) -> float:
        """Of the numbers seen, as numpy's ``std``."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0

    def row(self) -> dict[str, float]:
        return {"mean": self.mean, "deviation": self.deviation, "count": self.count, "not_finite": self.not_finite}


def _mean(values: npt.NDArray[np.float64]) -> float:
    return float(np.add.reduce(values)) / values.size if values.size else 0.0


class FieldStatistics:
    """The moments of every field from one reading to the next. For any thread.

    One sample in seven is looked at, and of those that came together no more than one.

    Args:
        names: of the fields.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._passed_over = _EVERY
        self._moments = {name: RunningMoments() for name in self._names}

    def see(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Samples that came together."""
        with self._lock:
            self._passed_over += len(samples)
            if self._passed_over >= _EVERY:
                for name, moments in self._moments.items():
                    moments.add(samples[-1][name])
                self._passed_over = 0

    def read(self) -> dict[str, dict[str, float]]:
        """``{field: {mean, deviation, count, not_finite}}`` of what was looked at since it was read last."""
        with self._lock:
            rows = {name: moments.row() for name, moments in self._moments.items()}
            self._begin()
        return rows

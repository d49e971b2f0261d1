"""How far a benchmark is, in lines, with the time that is left."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TextIO

from paramserver.bench.cases import Case
from paramserver.report.results import Result

# Of a run whose like was not seen yet, beside its training: imports, meeting, the end.
START_S = 6.0


class Progress:
    """Says what was measured, and how long the rest takes.

    Args:
        stream: for the lines.
        runs: the case of each run, in order.
        training_s: what each run trains.
    """

    def __init__(self, stream: TextIO, runs: Sequence[Case], training_s: float) -> None:
        self._stream = stream
        self._runs = [case.name for case in runs]
        self._guess_s = training_s + START_S
        self._took_s: dict[str, list[float]] = {}
        self._done = 0

    def begin(self) -> None:
        cases = len(set(self._runs))
        self.say(f"{len(self._runs)} runs of {cases} cases, about {told_s(self.left_s())}")

    def done(self, result: Result) -> None:
        """One more is over."""
        self._done += 1
        self._took_s.setdefault(result.case, []).append(result.wall_s or 0.0)
        rate = result.samples_per_second
        what = f"failed: {result.error}" if rate is None else f"{rate:.0f} samples/s"
        left = "" if self._done == len(self._runs) else f"; about {told_s(self.left_s())} left"
        self.say(f"{self._done}/{len(self._runs)} {result.case}, repeat {result.repeat + 1}: {what}{left}")

    def left_s(self) -> float:
        return remaining_s(self._runs[self._done :], self._took_s, self._guess_s)

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def remaining_s(names: Sequence[str], took_s: Mapping[str, Sequence[float]], guess_s: float) -> float:
    """How long runs of these cases take: as long as before; a case not seen before as long as the others did.

    Args:
        names: a case for each run that is left.
        took_s: what runs took, by case.
        guess_s: of a run, where none was seen.
    """
    every = [seconds for taken in took_s.values() for seconds in taken]
    usual_s = statistics.fmean(every) if every else guess_s
    return sum(statistics.fmean(took_s[name]) if name in took_s else usual_s for name in names)


def told_s(seconds: float) -> str:
    """A duration as 0:02:05."""
    return str(timedelta(seconds=round(seconds)))

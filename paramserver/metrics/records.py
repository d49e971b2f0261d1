"""What travels from a step to the report: plain values, no behaviour beyond adding and naming them."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]

PHASES = ("data", "wait", "pull", "forward", "backward", "push", "apply")


def make_record(kind: str, step: int | None, **fields: Any) -> Record:
    """A line of metrics.jsonl."""
    return {"time": time.time(), "kind": kind, "step": step, **fields}


@dataclass(frozen=True)
class StepReport:
    """One trainer's part in one step.

    ``version`` is the one its gradient was taken at.
    ``loss`` is the mean over its batches, ``samples`` how many these held, ``seconds`` how long the trainer has trained
    so far; ``used`` tells which parameters got a gradient (None: all of them).
    """

    trainer_index: int
    version: int
    samples: int
    loss: float
    seconds: float
    used: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class StepResult:
    """What an update made.

    ``step`` is the version that it made, ``samples`` all that were applied up to it, ``loss`` the mean over those
    trainers that took part, ``seconds`` the training time so far; ``apply_s`` it took, ``held_s`` a push waited.
    A push that came too late is ``dropped``: the other figures are then those of the version that is there.
    """

    step: int
    samples: int
    loss: float
    lr: tuple[float, ...]
    seconds: float
    apply_s: float = 0.0
    held_s: float = 0.0
    dropped: bool = False


@dataclass
class RecordWindow:
    """The steps since the last ``train`` record, as sums: a run that is resumed closes it as if it had not stopped.

    ``step``, ``samples``, ``seconds`` and ``lr`` are those of the last step, ``samples_before`` and ``seconds_before``
    those at which the window opened.
    """

    samples_before: int = 0
    seconds_before: float = 0.0
    steps: int = 0
    losses: float = 0.0
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    lr: tuple[float, ...] = ()

    def add(self, result: StepResult) -> None:
        self.steps += 1
        self.losses += result.loss
        self.step, self.samples, self.seconds, self.lr = result.step, result.samples, result.seconds, result.lr

    def next_window(self) -> RecordWindow:
        """The one that opens where this one closes."""
        return RecordWindow(self.samples, self.seconds)

    def to_record(self, epoch: int) -> Record:
        elapsed_s = max(self.seconds - self.seconds_before, 1e-9)
        is_timed = self.samples_before > 0  # the first one holds the start of the run
        return make_record(
            "train",
            self.step,
            loss=self.losses / self.steps,
            samples=self.samples,
            epoch=epoch,
            lr=list(self.lr),
            samples_per_second=(self.samples - self.samples_before) / elapsed_s if is_timed else None,
            step_ms=elapsed_s / self.steps * 1e3 if is_timed else None,
            seconds=self.seconds,
        )


class DurationHistogram:
    """Counts of durations in logarithmic bins of 2 %, so that quantiles of any number of steps merge exactly."""

    _GROWTH = math.log(1.02)
    _SMALLEST_S = 1e-6

    def __init__(self) -> None:
        self.bins: dict[int, int] = {}
        self.count = 0
        self.total_s = 0.0
        self.max_s = 0.0

    def add(self, duration_s: float) -> None:
        index = round(math.log(max(duration_s, self._SMALLEST_S) / self._SMALLEST_S) / self._GROWTH)
        self.bins[index] = self.bins.get(index, 0) + 1
        self.count += 1
        self.total_s += duration_s
        self.max_s = max(self.max_s, duration_s)

    def merge(self, other: DurationHistogram) -> None:
        for index, count in other.bins.items():
            self.bins[index] = self.bins.get(index, 0) + count
        self.count += other.count
        self.total_s += other.total_s
        self.max_s = max(self.max_s, other.max_s)

    def quantile_s(self, q: float) -> float:
        """The duration below which a share ``q`` of all lies, within 1 %."""
        if not self.count:
            return 0.0
        indices = sorted(self.bins)
        cumulated, total = [], 0
        for index in indices:
            total += self.bins[index]
            cumulated.append(total)
        place = bisect.bisect_left(cumulated, q * self.count)
        return min(self._SMALLEST_S * math.exp(indices[min(place, len(indices) - 1)] * self._GROWTH), self.max_s)

    def summary_ms(self) -> dict[str, float]:
        mean_s = self.total_s / self.count if self.count else 0.0
        quantiles = {f"p{int(q * 100)}": round(self.quantile_s(q) * 1e3, 4) for q in (0.5, 0.9, 0.95, 0.99)}
        return {"mean": round(mean_s * 1e3, 4), **quantiles, "max": round(self.max_s * 1e3, 4)}


class PhaseClock:
    """Shares a trainer's time among the phases of a step: each lap goes to one phase, so that they sum to the step.

    Only steps that were closed count: what was waited for a step that never came is in none of the figures.

    Attributes:
        on_step: called with each step that is closed: ``time.perf_counter()`` at its end, its length in seconds, and
            the seconds of each phase and of ``hidden``.
    """

    def __init__(self) -> None:
        self.on_step: Callable[[float, float, Mapping[str, float]], None] | None = None
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.hidden_s = 0.0
        self.steps = DurationHistogram()
        self._step = dict.fromkeys(PHASES, 0.0)
        self._step_hidden_s = 0.0
        self._last = self._step_started = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._step[phase] += now - self._last
        self._last = now

    def lap_shared(self, phase: str, **others_s: float) -> None:
        """Like ``lap``, where some seconds of the time are known to belong to other phases."""
        before = self._step[phase]
        self.lap(phase)
        for other, seconds in others_s.items():
            share_s = min(seconds, self._step[phase] - before)
            self._step[phase] -= share_s
            self._step[other] += share_s

    def add_hidden(self, seconds: float) -> None:
        """So long something of this step went on beside what the laps account for."""
        self._step_hidden_s += seconds

    def end_step(self) -> float:
        """Close the step; its length in seconds. What passed since the last lap counts as waiting."""
        self.lap("wait")
        duration_s = self._last - self._step_started
        self.steps.add(duration_s)
        for phase, seconds in self._step.items():
            self.seconds[phase] += seconds
        self.hidden_s += self._step_hidden_s
        if self.on_step is not None:
            self.on_step(self._last, duration_s, {**self._step, "hidden": self._step_hidden_s})
        self._begin_step()
        return duration_s

    def skip(self) -> None:
        """Leave out the time since the last step: validation, a checkpoint, a start, a wait that came to nothing."""
        self._last = time.perf_counter()
        self._begin_step()

    def _begin_step(self) -> None:
        self._step = dict.fromkeys(PHASES, 0.0)
        self._step_hidden_s = 0.0
        self._step_started = self._last


@dataclass
class TrainerTotals:
    """One trainer's account of a run; it travels to rank 0 at the end."""

    trainer_index: int
    samples: int = 0
    batches: int = 0
    samples_left: int | None = None
    seconds: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)
    steps: DurationHistogram = field(default_factory=DurationHistogram)
    buffer: dict[str, Any] = field(default_factory=dict)
    peak_rss_mb: float = 0.0
    wire_bytes: int = 0


@dataclass
class WeightedSums:
    """Sums of the metrics of a validation, weighted by samples, so that shares of several trainers add up exactly."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    samples: int = 0

    def add(self, means: Mapping[str, float], samples: int) -> None:
        for name, value in means.items():
            self.sums[name] = self.sums.get(name, 0.0) + value * samples
            self.counts[name] = self.counts.get(name, 0) + samples
        self.samples += samples

    def merge(self, other: WeightedSums) -> None:
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + other.counts[name]
        self.samples += other.samples

    def means(self) -> dict[str, float]:
        return {name: value / self.counts[name] for name, value in self.sums.items() if self.counts[name]}


def merge_sums(parts: Mapping[int, WeightedSums]) -> WeightedSums:
    """The shares of all trainers, added in the order of their indices so that the result does not depend on timing."""
    total = WeightedSums()
    for index in sorted(parts):
        total.merge(parts[index])
    return total


def peak_rss_mb() -> float:
    """Largest resident memory that this process ever had, in 2**20 bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

"""From the steps of all trainers to the figures of a case: what came after the warm-up, while all of them trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paramserver.bench.stamps import COLUMNS, Stamps, Step
from paramserver.errors import TrainingError
from paramserver.records import PHASES, DurationHistogram

# The first steps make what later ones use again: buffers, buckets, caches.
WARM_STEPS = 3


@dataclass(frozen=True)
class Window:
    """From when to when is measured."""

    begin: float
    end: float


def window_of(trainers: Sequence[Stamps], warm_s: float) -> Window:
    """From when the last trainer is warm until the first one has made its last step.

    A trainer is warm at the end of the step by which it has trained ``warm_s`` seconds, but not before the third.

    Raises:
        TrainingError: no trainer, or not every one, made a step in between.
    """
    warm = [_warm_at(one, warm_s) for one in trainers]
    begin = max((moment for moment in warm if moment is not None), default=0.0)
    end = min((one.steps[-1].end for one in trainers if one.steps), default=0.0)
    window = Window(begin, end)
    if None in warm or not all(_inside(one, window) for one in trainers):
        counts = ", ".join(str(len(one.steps)) for one in trainers)
        raise TrainingError(
            f"after a warm-up of {warm_s:g} s and {WARM_STEPS} steps no trainer may be without a step, and they made "
            f"{counts} in all; raise --seconds, or give data that lasts longer"
        )
    return window


def _warm_at(one: Stamps, warm_s: float) -> float | None:
    trained_s = 0.0
    for count, step in enumerate(one.steps, start=1):
        trained_s += step.seconds
        if trained_s >= warm_s and count >= WARM_STEPS:
            return step.end
    return None


def _inside(one: Stamps, window: Window) -> list[Step]:
    """The steps that ended in the window."""
    return [step for step in one.steps if window.begin < step.end <= window.end]


def _share(step: Step, window: Window) -> float:
    """How much of a step lies in the window; a trainer of its own pace is in the middle of one where it begins."""
    inside_s = min(step.end, window.end) - max(step.begin, window.begin)
    return min(max(inside_s / step.seconds, 0.0), 1.0) if step.seconds else 0.0


def figures(
    trainers: Sequence[Stamps], window: Window, applied: float = 1.0, updates: float = 1.0, processes: int = 1
) -> dict[str, Any]:
    """The fields of a record that follow from steps.

    Args:
        trainers: of one case.
        window: what is measured.
        applied: which share of the samples that trainers drew became part of an update.
        updates: how many updates there are to a step of a trainer: 1 / T where T trainers make one together.
        processes: trainers and servers.
    """
    shares = [[(step, _share(step, window)) for step in one.steps] for one in trainers]
    seconds = [sum(step.seconds * share for step, share in own) for own in shares]
    samples = [applied * sum(step.samples * share for step, share in own) for own in shares]
    mean_s = sum(seconds) / len(seconds)
    rate = sum(samples) / mean_s
    whole = [step for one in trainers for step in _inside(one, window)]
    durations = DurationHistogram()
    for step in whole:
        durations.add(step.seconds)
    return {
        "seconds": mean_s,
        "steps": round(len(whole) * updates),
        "samples": round(sum(samples)),
        "samples_per_second": rate,
        "per_trainer": tuple(n / s for n, s in zip(samples, seconds, strict=True)),
        "per_process": rate / processes,
        "step_ms": durations.milliseconds(),
        "step_bins": dict(sorted(durations.bins.items())),
        "phases_ms": _phases_ms(whole),
        "wire_bytes_per_step": sum(step.wire_bytes for step in whole) / len(whole),
    }


def _phases_ms(steps: Sequence[Step]) -> dict[str, float]:
    """Mean milliseconds per step and trainer. All but ``hidden``, which goes on beside them, make up the step."""
    assert COLUMNS[: len(PHASES)] == PHASES
    sums = [sum(values) for values in zip(*(step.phases for step in steps), strict=True)]
    return {name: total / len(steps) * 1e3 for name, total in zip(COLUMNS, sums, strict=True)}

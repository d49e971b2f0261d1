"""Where the time of a step goes, and what more trainers bring, in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from paramserver.report.case import Case, families, limit_of
from paramserver.report.figures import efficiency
from paramserver.report.groups import Group, name_of
from paramserver.report.writing import capital, listed, number, percent, plural, quoted, with_bounds

__all__ = ["communication_ms", "growth", "limits", "prediction_of", "predictions", "spent", "staleness"]

_SHOWN = 3
_LEAST_SHARE = 0.05


def limits(group: Group, cases: Sequence[Case]) -> list[str]:
    """What share of the speed without communication the best of each mode reached."""
    shares = []
    for case in group.best_of_modes():
        limit = limit_of(case, cases)
        share = None if limit is None else case.times(limit)
        if share is not None:
            shares.append(f"{name_of(case)} reached {percent(share)}")
    told = f"of the speed of the same loops without communication, {listed(shares)}." if shares else ""
    return [capital(f"{group.conditions}{told}")] if told else []


def spent(group: Group) -> list[str]:
    """What fills a step of the best of each mode."""
    return [text for case in group.best_of_modes() if (text := _spent_text(case))]


def _spent_text(case: Case) -> str:
    phases = {name: value for name, value in case.phases_ms.items() if name != "hidden" and value > 0}
    total = sum(phases.values())
    largest = sorted(phases, key=lambda name: phases[name], reverse=True)[:_SHOWN]
    shares = [f"{100 * phases[name] / total:.0f} % {name}" for name in largest if phases[name] >= _LEAST_SHARE * total]
    mean = case.step_ms.get("mean")
    return f"A step of {name_of(case)} took {number(mean)} ms: {listed(shares)}." if shares and mean is not None else ""


def growth(cases: Sequence[Case]) -> list[str]:
    """What the largest number of trainers brings over the smallest."""
    sentences = []
    for name, members in families(case for case in cases if case.baseline is None).items():
        first, last = members[0], members[-1]
        times = last.times(first) if last.trainers > first.trainers else None
        if times is None:
            continue
        loss = ", which is slower" if times.excludes(1) and times.value < 1 else ""
        grown = f"From {first.trainers} to {plural(last.trainers, 'trainer')}, {quoted(name)} became"
        sentences.append(
            f"{grown} {with_bounds(times)} times as fast{loss}: "
            f"{percent(efficiency(times, last.trainers, first.trainers))} of the ideal."
        )
    return sentences


def staleness(cases: Sequence[Case]) -> list[str]:
    """How stale gradients were where they were stale at all, the most stale first."""
    stale = []
    for case in cases:
        count = sum(case.staleness.values())
        mean = sum(value * n for value, n in case.staleness.items()) / count if count else 0.0
        if mean > 0:
            stale.append((mean, max(case.staleness), name_of(case)))
    if not stale:
        return []
    stale.sort(reverse=True)
    told = [f"{name} {number(mean)} versions on average, {largest} at most" for mean, largest, name in stale[:_SHOWN]]
    more = f"; less in {plural(len(stale) - _SHOWN, 'other case')}" if len(stale) > _SHOWN else ""
    return [f"Gradients were stale when they were applied: {'; '.join(told)}{more}."]


def predictions(group: Group, cases: Sequence[Case]) -> list[str]:
    """What the model of the network says, beside what was measured."""
    sentences = []
    for case in group.best_of_modes():
        predicted = prediction_of(case)
        expected_ms, servers = predicted.get("communication_ms"), predicted.get("break_even_servers")
        measured_ms = communication_ms(case, limit_of(case, cases))
        if isinstance(expected_ms, int | float) and measured_ms is not None:
            difference = f"{number(abs(measured_ms))} ms {'longer' if measured_ms >= 0 else 'shorter'}"
            sentences.append(
                f"The model of the network predicts {number(expected_ms)} ms of communication for a step of "
                f"{name_of(case)}; the step was {difference} than without communication."
            )
        if isinstance(servers, int | float):
            sentences.append(
                f"By that model, with every process on a host of its own, {name_of(case)} would be as fast as "
                f"all-reduce from {plural(math.ceil(servers), 'server')} on."
            )
    return sentences


def prediction_of(case: Case) -> Mapping[str, object]:
    """What was predicted for it; empty where nothing was."""
    return next((one.predicted for one in case.completed if one.predicted), {})


def communication_ms(case: Case, limit: Case | None) -> float | None:
    """How much longer a step takes than one of the loops without communication."""
    if limit is None:
        return None
    with_it, without = case.step_ms.get("mean"), limit.step_ms.get("mean")
    return None if with_it is None or without is None else with_it - without

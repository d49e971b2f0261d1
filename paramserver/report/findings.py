"""What was found, in sentences that are derived from the numbers: the first lines of a report.

Where the time of a step goes, and what more trainers bring, in sentences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from paramserver.report.cases import (
    SAMPLES_TO_TARGET,
    TIME_TO_TARGET,
    Group,
    ReportCase,
    communication_limit,
    groups_of,
    is_significant,
    key_without_scenario,
    quoted_name,
    ratio_text,
    reference_case,
    scaling_families,
    significance_caveat,
)
from paramserver.report.formatting import (
    capitalize_first,
    first_line,
    format_estimate,
    format_interval,
    format_number,
    format_percent,
    join_names,
    plural,
    quoted,
)
from paramserver.report.results import NO_COMMUNICATION
from paramserver.report.statistics import Estimate, efficiency

_SHOWN = 3
_LEAST_SHARE = 0.05


def limits(group: Group, cases: Sequence[ReportCase]) -> list[str]:
    """What share of the speed without communication the best of each mode reached."""
    shares = []
    for case in group.best_of_modes():
        limit = communication_limit(case, cases)
        share = None if limit is None else case.ratio_to(limit)
        if share is not None:
            shares.append(f"{quoted_name(case)} reached {format_percent(share)}")
    told = f"of the speed of the same loops without communication, {join_names(shares)}." if shares else ""
    return [capitalize_first(f"{group.conditions}{told}")] if told else []


def spent(group: Group) -> list[str]:
    """What fills a step of the best of each mode."""
    return [text for case in group.best_of_modes() if (text := _spent_text(case))]


def _spent_text(case: ReportCase) -> str:
    phases = {name: value for name, value in case.phases_ms.items() if name != "hidden" and value > 0}
    total = sum(phases.values())
    largest = sorted(phases, key=lambda name: phases[name], reverse=True)[:_SHOWN]
    shares = [f"{100 * phases[name] / total:.0f} % {name}" for name in largest if phases[name] >= _LEAST_SHARE * total]
    mean = case.step_ms.get("mean")
    return (
        f"A step of {quoted_name(case)} took {format_number(mean)} ms: {join_names(shares)}."
        if shares and mean is not None
        else ""
    )


def growth(cases: Sequence[ReportCase]) -> list[str]:
    """What the largest number of trainers brings over the smallest."""
    sentences = []
    for name, members in scaling_families(case for case in cases if case.baseline is None).items():
        first, last = members[0], members[-1]
        times = last.ratio_to(first) if last.trainers > first.trainers else None
        if times is None:
            continue
        loss = ", which is slower" if times.excludes(1) and times.value < 1 else ""
        grown = f"From {first.trainers} to {plural(last.trainers, 'trainer')}, {quoted(name)} became"
        sentences.append(
            f"{grown} {format_estimate(times)} times as fast{loss}: "
            f"{format_percent(efficiency(times, last.trainers, first.trainers))} of the ideal."
        )
    return sentences


def staleness(cases: Sequence[ReportCase]) -> list[str]:
    """How stale gradients were where they were stale at all, the most stale first."""
    stale = []
    for case in cases:
        count = sum(case.staleness.values())
        mean = sum(value * n for value, n in case.staleness.items()) / count if count else 0.0
        if mean > 0:
            stale.append((mean, max(case.staleness), quoted_name(case)))
    if not stale:
        return []
    stale.sort(reverse=True)
    told = [
        f"{name} {format_number(mean)} versions on average, {largest} at most" for mean, largest, name in stale[:_SHOWN]
    ]
    more = f"; less in {plural(len(stale) - _SHOWN, 'other case')}" if len(stale) > _SHOWN else ""
    return [f"Gradients were stale when they were applied: {'; '.join(told)}{more}."]


def predictions(group: Group, cases: Sequence[ReportCase]) -> list[str]:
    """What the model of the network says, beside what was measured."""
    sentences = []
    for case in group.best_of_modes():
        predicted = prediction_of(case)
        expected_ms, servers = predicted.get("communication_ms"), predicted.get("break_even_servers")
        measured_ms = communication_ms(case, communication_limit(case, cases))
        if isinstance(expected_ms, int | float) and measured_ms is not None:
            difference = f"{format_number(abs(measured_ms))} ms {'longer' if measured_ms >= 0 else 'shorter'}"
            sentences.append(
                f"The model of the network predicts {format_number(expected_ms)} ms of communication for a step of "
                f"{quoted_name(case)}; the step was {difference} than without communication."
            )
        if isinstance(servers, int | float):
            sentences.append(
                f"By that model, with every process on a host of its own, {quoted_name(case)} would be as fast as "
                f"all-reduce from {plural(math.ceil(servers), 'server')} on."
            )
    return sentences


def prediction_of(case: ReportCase) -> Mapping[str, object]:
    """What was predicted for it; empty where nothing was."""
    return next((one.predicted for one in case.completed if one.predicted), {})


def communication_ms(case: ReportCase, limit: ReportCase | None) -> float | None:
    """How much longer a step takes than one of the loops without communication."""
    if limit is None:
        return None
    with_it, without = case.step_ms.get("mean"), limit.step_ms.get("mean")
    return None if with_it is None or without is None else with_it - without


_WIDE = 0.15


def findings(cases: Sequence[ReportCase]) -> list[str]:
    """One sentence or two for each thing that was found, the most important first. Names stand in backquotes."""
    groups = groups_of(cases)
    if not groups:
        return ["No case was completed: there is nothing to compare.", *_failures(cases)]
    speaker = reference_case(groups)
    parts: list[Iterable[str]] = [
        [sentence for group in groups for sentence in (_fastest(group), *_between_modes(group))],
        _failures(cases),
        _kept(groups, cases),
        _targets(groups, cases),
        limits(speaker, cases),
        spent(speaker),
        growth(cases),
        staleness(cases),
        predictions(speaker, cases),
        _precision(groups),
        _crowded(cases),
    ]
    return [sentence for part in parts for sentence in part]


# Which case was the fastest.


def _fastest(group: Group) -> str:
    best, others = group.best, group.cases[1:]
    reached = f"{format_estimate(best.speed)} samples/s"
    if not others:
        return f"{group.conditions}{quoted_name(best)} applied {reached}."
    tied = _tied(group)
    if not tied:
        ahead = ratio_text(best.ratio_to(others[0]), others[0])
        return f"{group.conditions}{quoted_name(best)} was the fastest: {reached}, {ahead}" + (
            ", the next." if len(others) > 1 else "."
        )
    nearest = best.ratio_to(tied[0])
    text = f"{quoted_name(best)} applied {reached}, {ratio_text(nearest, tied[0])}{significance_caveat(nearest)}."
    if len(tied) > 1 and nearest is not None and nearest.has_interval:
        text += f" Nor can {join_names([quoted_name(case) for case in tied[1:]])} be told apart from it."
    behind = _first_behind(group)
    return f"{group.conditions}{text}" + (
        f" It was {ratio_text(best.ratio_to(behind), behind)}." if behind is not None else ""
    )


def _tied(group: Group) -> list[ReportCase]:
    """Those that may be as fast as the best."""
    return [case for case in group.cases[1:] if not is_significant(group.best.ratio_to(case))]


def _first_behind(group: Group) -> ReportCase | None:
    return next((case for case in group.cases[1:] if is_significant(group.best.ratio_to(case))), None)


def _between_modes(group: Group) -> list[str]:
    """The best of every other mode beside the best of all, where that has not been said."""
    best, *others = group.best_of_modes()
    said = (*group.cases[1:2], _first_behind(group))
    told = []
    for other in others:
        if all(case is not other for case in said):
            ratio = best.ratio_to(other)
            told.append(
                f"{quoted_name(best)} was {ratio_text(ratio, other)}, the best of {other.mode}{significance_caveat(ratio)}"
            )
    return [capitalize_first(f"{group.conditions}{'; '.join(told)}.")] if told else []


def _failures(cases: Sequence[ReportCase]) -> list[str]:
    broken = [case for case in cases if case.failed]
    if not broken:
        return []
    told = []
    for case in broken:
        of = f" in {len(case.failed)} of {len(case.results)} repeats" if len(case.results) > 1 else ""
        told.append(f"{quoted_name(case)}{of}: {first_line(case.failed[0].error) or 'no reason is known'}".rstrip("."))
    return [f"Of {plural(len(cases), 'case')}, {len(broken)} failed. {'. '.join(told)}."]


# What matters beside speed.


def _kept(groups: Sequence[Group], cases: Sequence[ReportCase]) -> list[str]:
    """What each case keeps of its speed under a scenario."""
    usual = {key_without_scenario(case): case for case in cases if not case.scenario and case.speed is not None}
    sentences = []
    for group in groups:
        kept = []
        for case in group.cases:
            before = usual.get(key_without_scenario(case)) if case.scenario else None
            share = None if before is None else case.ratio_to(before)
            if share is not None:
                kept.append((share.value, f"{quoted_name(case)} keeps {format_percent(share)}"))
        if kept:
            told = join_names([text for _, text in sorted(kept, reverse=True)])
            sentences.append(capitalize_first(f"{group.conditions}of its speed otherwise, {told}."))
    return sentences


def _targets(groups: Sequence[Group], cases: Sequence[ReportCase]) -> list[str]:
    """Who reached the target first; the loops without communication train models of their own, and are left out."""
    able = [case for case in cases if case.completed and case.baseline != NO_COMMUNICATION]
    target = next((one.target for case in able for one in case.results if one.target), None)
    what = " and ".join(f"{name} {value:g}" for name, value in target.items()) if target else "the target"
    by_time = sorted((case for case in able if _reached(case)), key=_time)
    if not by_time:
        return [f"No case reached {what} in the time it had."] if target else []
    first, others = by_time[0], by_time[1:]
    text = f"{capitalize_first(what)} was reached first by {quoted_name(first)}{_in_some(first)}, after "
    text += f"{format_estimate(first.estimate(TIME_TO_TARGET))} s"
    if others:
        longer = others[0].ratio_to(first, TIME_TO_TARGET)
        text += f"; {quoted_name(others[0])}{_in_some(others[0])} took {format_estimate(longer)} times as long{significance_caveat(longer)}"
    sentences = [f"{text}."]
    if len(groups) == 1 and groups[0].best in others:
        sentences.append(
            f"{quoted_name(groups[0].best)}, which applied the most samples per second, was not the first."
        )
    fewest = min(by_time, key=lambda case: _value(case.estimate(SAMPLES_TO_TARGET)))
    if fewest is not first:
        samples = fewest.estimate(SAMPLES_TO_TARGET)
        sentences.append(f"{quoted_name(fewest)} needed the fewest samples for it: {format_estimate(samples)}.")
    never = [quoted_name(case) for case in able if not _reached(case)]
    return sentences + ([f"It was not reached by {join_names(never)}."] if never else [])


def _reached(case: ReportCase) -> int:
    return sum(value is not None for value in case.values(TIME_TO_TARGET).values())


def _time(case: ReportCase) -> tuple[bool, float]:
    """A case that reaches the target now and then comes after those that always do."""
    return _reached(case) < len(case.completed), _value(case.estimate(TIME_TO_TARGET))


def _in_some(case: ReportCase) -> str:
    reached, repeats = _reached(case), len(case.completed)
    return "" if reached == repeats else f" (in {reached} of {repeats} repeats)"


def _value(estimate: Estimate | None) -> float:
    return float("inf") if estimate is None else estimate.value


# What limits the rest.


def _precision(groups: Sequence[Group]) -> list[str]:
    known = [(case, case.speed) for group in groups for case in group.cases if case.speed is not None]
    wide = [(case, speed) for case, speed in known if (speed.relative_width or 0) > _WIDE]
    if wide:
        widest, speed = max(wide, key=lambda one: one[1].relative_width or 0)
        which = quoted_name(widest) + (f" and {plural(len(wide) - 1, 'other')}" if len(wide) > 1 else "")
        return [
            f"The interval of {which} is wider than {100 * _WIDE:.0f} % of the mean ({format_interval(speed)} samples/s): more "
            "repeats or more seconds would tell more."
        ]
    if all(not speed.has_interval for _, speed in known):
        return ["Each case ran once, so nothing is known of the spread: repeat to learn what is chance."]
    return []


def _crowded(cases: Sequence[ReportCase]) -> list[str]:
    crowded = []
    for case in cases:
        cores = case.first.environment.get("cores")
        if isinstance(cores, int) and case.completed and case.trainers + case.servers > cores:
            crowded.append((case.trainers + case.servers, cores))
    if not crowded:
        return []
    processes, cores = max(crowded)
    return [
        f"Up to {processes} trainers and servers shared {plural(cores, 'core')}: what they compete for is in these "
        f"figures, and hosts of their own would give others."
    ]

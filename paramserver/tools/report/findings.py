"""The findings of a report: sentences derived from the numbers, the most important first.

They answer which settings validated best where these were searched for, which case was the fastest, by how much,
whether the difference is significant, what failed, what a scenario costs, which case learned first, what rounds of
local steps save, and what limits the speed. ``compare`` compares two sets of results case by case: the change of each
figure with its spread, and a lower limit for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from paramserver.config.schema import sends
from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.report.cases import (
    BEST,
    FIGURES,
    LOCAL_STEPS,
    SPEED,
    TIME_TO_TARGET,
    WIRE_OF_SAMPLE,
    Figure,
    ReportCase,
    best_name,
    by_best,
    by_speed,
    cases_of,
    communication_limit,
    folders_of,
    quoted_name,
)
from paramserver.tools.report.formatting import (
    aligned,
    capitalize_first,
    first_line,
    format_estimate,
    format_interval,
    format_number,
    format_percent,
    join_names,
    plural,
    scenario_text,
    too_few,
)
from paramserver.tools.report.plots import SAMPLES, loss_against, validation_against
from paramserver.tools.report.results import NO_COMMUNICATION, Results
from paramserver.tools.report.statistics import FEWEST_REPEATS, Estimate, difference, interpolated, ratio
from paramserver.tools.report.tables import machine_names, transports_of

_MOST_PHASES = 3
_LEAST_SHARE = 0.05
_WIDE = 0.15
# In which a run with rounds may differ from the run without that it is compared with; one step of it is a round.
_OF_ROUNDS = (
    *("training.local_steps", "training.outer", "server.compression", "server.dynamic_local_steps"),
    *("training.max_steps", "training.validate_every", "checkpoint."),
)


@dataclass(frozen=True)
class Group:
    """Cases of one number of trainers and scenario, the fastest first; ``conditions`` begins a sentence or is empty."""

    cases: tuple[ReportCase, ...]
    conditions: str

    @property
    def best(self) -> ReportCase:
        return self.cases[0]

    def best_of_modes(self) -> list[ReportCase]:
        best: dict[str, ReportCase] = {}
        for case in self.cases:
            best.setdefault(case.mode, case)
        return list(best.values())


def findings(cases: Sequence[ReportCase]) -> list[str]:
    """The findings about ``cases``; names in them are in backquotes."""
    groups = groups_of(cases)
    if not groups:
        return ["No case was completed: there is nothing to compare.", *_failures(cases)]
    # Where the time goes is reported for one group: without a scenario, and with the most trainers.
    reference = max([g for g in groups if not g.best.scenario] or groups, key=lambda group: group.best.trainers)
    parts: list[Iterable[str]] = [
        _best_settings(cases),
        [sentence for group in groups for sentence in (_fastest(group), *_other_modes(group))],
        _failures(cases),
        _scenario_costs(groups, cases),
        _target(cases),
        _rounds(groups),
        _communication_share(reference, cases),
        _largest_phases(reference),
        _precision(groups),
        _shared_cores(cases),
    ]
    return [sentence for part in parts for sentence in part]


def groups_of(cases: Sequence[ReportCase]) -> list[Group]:
    """Completed cases by number of trainers and scenario. Baselines are in no group, unless there is nothing else."""
    timed = [case for case in cases if case.speed is not None]
    found: dict[str, list[ReportCase]] = {}
    for case in [case for case in timed if case.baseline is None] or timed:
        found.setdefault(json.dumps([case.trainers, case.scenario], sort_keys=True, default=str), []).append(case)
    groups = []
    for members in found.values():
        trainers = [plural(members[0].trainers, "trainer")] if len(found) > 1 else []
        scenario = scenario_text(members[0].scenario)
        parts = [*trainers, *([scenario] if scenario else [])]
        groups.append(Group(tuple(by_speed(members)), f"With {', '.join(parts)}: " if parts else ""))
    return groups


def _best_settings(cases: Sequence[ReportCase]) -> list[str]:
    """Which settings of a search validated best, and by how much."""
    ranked = by_best(cases)
    if not ranked:
        return []
    first, *others = ranked
    samples = fmean(one.best["samples"] for one in first.completed if one.best)
    after = f" after {format_number(samples)} samples" if samples else ""
    text = f"{_with_folders(first)} validated best: {best_name(first)} {format_estimate(first.estimate(BEST))}{after}"
    if others:
        second = others[0]
        text += f"; next is {_with_folders(second)} with {format_estimate(second.estimate(BEST))}"
        # Not the ratio: a log-likelihood, say, is below 0.
        text += _caveat(difference(first.values(BEST), second.values(BEST)), equal=0.0)
    return [f"{text}."]


def _with_folders(case: ReportCase) -> str:
    folders = folders_of(case)
    return f"{quoted_name(case)} ({folders})" if folders else quoted_name(case)


# Speed.


def _fastest(group: Group) -> str:
    best, others = group.best, group.cases[1:]
    speed = f"{format_estimate(best.speed)} samples/s"
    if not others:
        return f"{group.conditions}{quoted_name(best)} applied {speed}."
    tied = [case for case in others if not _is_significant(best.ratio_to(case))]
    if not tied:
        rest = ", the next." if len(others) > 1 else "."
        return f"{group.conditions}{quoted_name(best)} was the fastest: {speed}, {_lead(best, others[0])}{rest}"
    nearest = best.ratio_to(tied[0])
    text = f"{quoted_name(best)} applied {speed}, {_lead(best, tied[0])}{_caveat(nearest)}."
    if len(tied) > 1 and nearest is not None and nearest.has_interval:
        text += f" Its lead over {join_names([quoted_name(case) for case in tied[1:]])} is not significant either."
    behind = next((case for case in others if _is_significant(best.ratio_to(case))), None)
    return f"{group.conditions}{text}" + ("" if behind is None else f" It was {_lead(best, behind)}.")


def _other_modes(group: Group) -> list[str]:
    """The lead over the best of each other mode that the sentence about the fastest does not name."""
    best, *others = group.best_of_modes()
    behind = next((case for case in group.cases[1:] if _is_significant(best.ratio_to(case))), None)
    leads = [
        f"{quoted_name(best)} was {_lead(best, other)}, the best of {other.mode}{_caveat(best.ratio_to(other))}"
        for other in others
        if other is not group.cases[1] and other is not behind
    ]
    return [capitalize_first(f"{group.conditions}{'; '.join(leads)}.")] if leads else []


def _is_significant(ratio: Estimate | None) -> bool:
    return ratio is not None and ratio.excludes(1.0)


def _lead(case: ReportCase, other: ReportCase) -> str:
    ratio = case.ratio_to(other)
    return f"ahead of {quoted_name(other)}" if ratio is None else f"{format_estimate(ratio)} times {quoted_name(other)}"


def _caveat(compared: Estimate | None, equal: float = 1.0) -> str:
    """The end of a sentence about a ratio, or a difference (``equal`` is then 0), that may be chance."""
    if compared is not None and compared.excludes(equal):
        return ""
    if compared is None or not compared.has_interval:
        return f", but {too_few(1 if compared is None else compared.repeats)} to show whether that is chance"
    return f", and {'that interval includes 1: ' if equal else ''}the difference is not significant"


def _scenario_costs(groups: Sequence[Group], cases: Sequence[ReportCase]) -> list[str]:
    """The share of its speed that each case keeps under a scenario."""
    usual = {_key(case): case for case in cases if not case.scenario and case.speed is not None}
    sentences = []
    for group in groups:
        kept = []
        for case in group.cases:
            before = usual.get(_key(case)) if case.scenario else None
            share = None if before is None else case.ratio_to(before)
            if share is not None:
                kept.append((share.value, f"{quoted_name(case)} keeps {format_percent(share)}"))
        if kept:
            shares = join_names([text for _, text in sorted(kept, reverse=True)])
            sentences.append(capitalize_first(f"{group.conditions}of its speed otherwise, {shares}."))
    return sentences


def _key(case: ReportCase, without: tuple[str, ...] = ()) -> str:
    """Equal for cases that differ in their scenario only, and in the keys that begin with one of ``without``."""
    one = case.first
    overrides = {key: value for key, value in one.overrides.items() if not key.startswith(without)}
    return json.dumps([one.mode, one.trainers, one.servers, one.baseline, overrides], sort_keys=True, default=str)


def _rounds(groups: Sequence[Group]) -> list[str]:
    """What the case with the fewest bytes per sample gains, among those that differ in local steps and compression."""
    sentences = []
    for group in groups:
        alike: dict[str, list[ReportCase]] = {}
        for case in group.cases:
            alike.setdefault(_key(case, _OF_ROUNDS), []).append(case)
        for members in alike.values():
            plain = min(members, key=_plainness)
            savers = [case for case in members if _plainness(case) > _plainness(plain)]
            ratios = [(case.ratio_to(plain, WIRE_OF_SAMPLE), case) for case in savers]
            sizes = [(ratio.value, case) for ratio, case in ratios if ratio is not None]
            # By others only module buffers are sent, which is no measure of a network.
            used = {name for case in members for one in case.results for name in one.transports.values()}
            if not sizes or not all(map(sends, used)):
                continue
            share, case = min(sizes, key=lambda one: one[0])
            part = f"1/{1 / share:.0f}" if share < 0.1 else f"{100 * share:.0f} %"
            text = f"{quoted_name(case)} exchanged {part} of the bytes per sample of {quoted_name(plain)}, and applied "
            speed = case.ratio_to(plain)
            text += f"{format_estimate(speed)} times as many samples/s{_caveat(speed)}.{_losses(case, plain)}"
            sentences.append(capitalize_first(f"{group.conditions}{text}"))
    return sentences


def _plainness(case: ReportCase) -> tuple[float, bool]:
    """The order of cases by what they do to exchange less: one local step without compression comes first."""
    overrides = case.first.overrides
    steps = overrides.get("training.local_steps")
    return steps if isinstance(steps, int) else 1, overrides.get("server.compression", "none") != "none"


def _losses(case: ReportCase, plain: ReportCase) -> str:
    """A sentence about the losses of both at the most samples that all of their repeats have reached."""
    for what, get in (("validation", validation_against(SAMPLES, "loss")), ("train", loss_against(SAMPLES))):
        both = [[get(one) for one in each.completed] for each in (case, plain)]
        curves = [curve for found in both for curve in found]
        samples = min((curve[-1][0] if curve else 0.0 for curve in curves), default=0.0)
        if samples and all(curve[0][0] <= samples for curve in curves):
            ours, other = (format_number(fmean(interpolated(one, samples) for one in found)) for found in both)
            return f" After {samples:.0f} samples its {what} loss was {ours}, and that of the other {other}."
    return ""


# Failures and learning.


def _failures(cases: Sequence[ReportCase]) -> list[str]:
    broken = [case for case in cases if case.failed]
    reasons = []
    for case in broken:
        of = f" in {len(case.failed)} of {len(case.results)} repeats" if len(case.results) > 1 else ""
        reason = first_line(case.failed[0].error) or "no reason is known"
        reasons.append(f"{quoted_name(case)}{of}: {reason}".rstrip("."))
    return [f"Of {plural(len(cases), 'case')}, {len(broken)} failed. {'. '.join(reasons)}."] if broken else []


def _target(cases: Sequence[ReportCase]) -> list[str]:
    """Which case reached the target first. Loops without communication train models of their own, and are left out."""
    able = [case for case in cases if case.completed and case.baseline != NO_COMMUNICATION]
    target = next((one.target for case in able for one in case.results if one.target), None)
    values = " and ".join(f"{name} {value:g}" for name, value in (target or {}).items())
    what = f"the target {values}".rstrip()
    reached = [(case, s) for case in able if (s := case.estimate(TIME_TO_TARGET)) is not None]
    if not reached:
        return [f"No case reached {what} in its time."] if target else []
    # A case that reaches the target in some repeats only is behind those that always do.
    (first, seconds), *others = sorted(reached, key=lambda one: (bool(_in_some_repeats(one[0])), one[1].value))
    text = f"{capitalize_first(what)} was reached first by {quoted_name(first)}{_in_some_repeats(first)}, after "
    text += f"{format_estimate(seconds)} s"
    if others:
        second = others[0][0]
        longer = second.ratio_to(first, TIME_TO_TARGET)
        text += f"; {quoted_name(second)}{_in_some_repeats(second)} took {format_estimate(longer)} times as long"
        text += _caveat(longer)
    never = [quoted_name(case) for case in able if case.estimate(TIME_TO_TARGET) is None]
    return [f"{text}.", *([f"It was not reached by {join_names(never)}."] if never else [])]


def _in_some_repeats(case: ReportCase) -> str:
    reached, repeats = sum(s is not None for s in case.values(TIME_TO_TARGET).values()), len(case.completed)
    return "" if reached == repeats else f" (in {reached} of {repeats} repeats)"


# Limits.


def _communication_share(group: Group, cases: Sequence[ReportCase]) -> list[str]:
    """The share of the speed without communication that the best case of each mode reached."""
    shares = []
    for case in group.best_of_modes():
        limit = communication_limit(case, cases)
        share = None if limit is None else case.ratio_to(limit)
        if share is not None:
            shares.append(f"{quoted_name(case)} reached {format_percent(share)}")
    text = f"{group.conditions}of the speed of the same loops without communication, {join_names(shares)}."
    return [capitalize_first(text)] if shares else []


def _largest_phases(group: Group) -> list[str]:
    """What a step of the best case of each mode consists of."""
    sentences = []
    for case in group.best_of_modes():
        phases = {name: ms for name, ms in case.phases_ms.items() if name != "hidden" and ms > 0}
        total = sum(phases.values())
        largest = sorted(phases, key=lambda name: phases[name], reverse=True)[:_MOST_PHASES]
        shares = [f"{100 * phases[n] / total:.0f} % {n}" for n in largest if phases[n] >= _LEAST_SHARE * total]
        mean_ms = case.step_ms.get("mean")
        if shares and mean_ms is not None:
            steps = case.estimate(LOCAL_STEPS)
            what = "step" if steps is None else f"round of {format_number(steps.value)} local steps"
            took = f"A {what} of {quoted_name(case)} took {format_number(mean_ms)} ms"
            sentences.append(f"{took}: {join_names(shares)}.")
    return sentences


def _precision(groups: Sequence[Group]) -> list[str]:
    known = [(case, case.speed) for group in groups for case in group.cases if case.speed is not None]
    wide = [(case, speed) for case, speed in known if (speed.relative_width or 0) > _WIDE]
    if wide:
        widest, speed = max(wide, key=lambda one: one[1].relative_width or 0)
        which = quoted_name(widest) + (f" and {plural(len(wide) - 1, 'other')}" if len(wide) > 1 else "")
        return [
            f"The interval of {which} is wider than {100 * _WIDE:.0f} % of the mean ({format_interval(speed)} "
            "samples/s): use more repeats or more seconds."
        ]
    if all(not speed.has_interval for _, speed in known):
        most = too_few(max((speed.repeats for _, speed in known), default=0))
        return [f"{capitalize_first(most)} for an interval: use at least {FEWEST_REPEATS} to find out what is chance."]
    return []


def _shared_cores(cases: Sequence[ReportCase]) -> list[str]:
    known = [(case.trainers + case.servers, case.first.environment.get("cores")) for case in cases if case.completed]
    shared = [(processes, cores) for processes, cores in known if isinstance(cores, int) and processes > cores]
    if not shared:
        return []
    processes, cores = max(shared)
    return [
        f"Up to {processes} trainers and servers shared {plural(cores, 'core')}: the figures include their "
        "competition, and would differ on separate hosts."
    ]


# Two sets of results.

_TITLES = ("figure", "A", "B", "B / A", "95 %", "")


@dataclass(frozen=True)
class Change:
    """A figure of one case in A and in B; ``ratio`` is B over A, None where one of them is 0."""

    figure: Figure
    before: Estimate
    after: Estimate
    ratio: Estimate | None

    @property
    def verdict(self) -> str:
        """What the interval of the ratio shows, in one to three words."""
        if self.ratio is None:
            return "same" if self.before.value == self.after.value else ""
        if not self.ratio.has_interval:
            return "too few repeats"
        if not self.ratio.excludes(1):
            return "no difference shown"
        return {0: "changed", 1: "better", -1: "worse"}[self.figure.better * (1 if self.ratio.value > 1 else -1)]


@dataclass(frozen=True)
class Comparison:
    """The result of ``compare``.

    ``changes`` has the figures that A and B both have, by case, ``broken`` why B has none of a case that A has, and
    ``notes`` differences that make the comparison doubtful.
    """

    changes: dict[str, list[Change]]
    broken: dict[str, str]
    notes: tuple[str, ...]

    def regressions(self, limit: float) -> list[str]:
        """One sentence for each case of B whose throughput is below ``limit`` times that of A, or is missing.

        Raises:
            UnsupportedConfiguration: ``limit`` is not above 0.
        """
        if not 0 < limit < float("inf"):
            raise UnsupportedConfiguration(f"--fail_below ({limit:g}) must be a number above 0; give one such as 0.95")
        found = [f"{name}: {reason}" for name, reason in self.broken.items()]
        for name, changes in self.changes.items():
            speed = next((change.ratio for change in changes if change.figure is SPEED), None)
            if speed is not None and speed.value < limit:
                times = f"{format_estimate(speed)} times that of A"
                found.append(f"{name}: throughput is {times}, below {limit:g}{_limit_caveat(speed, limit)}")
        return found

    def text(self) -> str:
        """A table for each case, then the notes."""
        parts = [f"{name}\n{_table(changes)}" for name, changes in self.changes.items()]
        parts += [f"{name}: {reason}" for name, reason in self.broken.items()]
        return "\n\n".join([*parts, *self.notes])


def _limit_caveat(speed: Estimate, limit: float) -> str:
    if speed.high is None:
        return f" ({too_few(speed.repeats)} for an interval: it may be chance)"
    return "" if speed.high < limit else f" (its interval reaches {format_number(speed.high)}: use more repeats)"


def compare(before: Results, after: Results) -> Comparison:
    """Compare B with A case by case, as independent samples: their repeats were not interleaved.

    Raises:
        UnsupportedConfiguration: they have no case in common.
    """
    old, new = ({case.name: case for case in cases_of(one.results)} for one in (before, after))
    if not old.keys() & new.keys():
        raise UnsupportedConfiguration(
            f"{before.source} and {after.source} must have a case in common; "
            f"A has {join_names(list(old))}, B has {join_names(list(new))}: compare benchmarks of the same cases"
        )
    changes: dict[str, list[Change]] = {}
    broken: dict[str, str] = {}
    for name, case in old.items():
        if case.speed is None:
            continue
        reason = _missing(new.get(name))
        if reason:
            broken[name] = reason
        else:
            changes[name] = _changes(case, new[name])
    notes = [*before.notes, *after.notes]
    if added := [name for name in new if name not in old]:
        notes.append(f"Only B has {join_names(added)}.")
    if failed := [name for name, case in old.items() if case.speed is None]:
        notes.append(f"A has no figures of {join_names(failed)}.")
    a, b = machine_names(list(old.values())), machine_names(list(new.values()))
    if a != b:
        notes.append(
            f"A ran on {join_names(a)}, B on {join_names(b)}: the figures include the difference of the machines."
        )
    for name in changes:
        used = [transports_of(cases[name]) for cases in (old, new)]
        if all(used) and used[0] != used[1]:
            notes.append(f"{name} used {used[0]} as its transport in A, and {used[1]} in B: not only the code differs.")
    return Comparison(changes, broken, tuple(notes))


def _missing(case: ReportCase | None) -> str:
    if case is None:
        return "B has no such case"
    if case.speed is not None:
        return ""
    error = first_line(case.failed[0].error) if case.failed else ""
    return f"B has no figures of it{': ' if error else ''}{error}"


def _changes(old: ReportCase, new: ReportCase) -> list[Change]:
    found = []
    for figure in FIGURES:
        before, after = old.estimate(figure), new.estimate(figure)
        if before is not None and after is not None:
            times = ratio(new.values(figure), old.values(figure), are_interleaved=False)
            found.append(Change(figure, before, after, times))
    return found


def _table(changes: Sequence[Change]) -> str:
    lines = aligned([_TITLES, *map(_row, changes)], numbers=range(1, len(_TITLES) - 1))
    return "\n".join(f"  {line}" for line in lines)


def _row(change: Change) -> tuple[str, ...]:
    unit = f" ({change.figure.unit})" if change.figure.unit else ""
    times = "-" if change.ratio is None else format_number(change.ratio.value)
    a, b = format_number(change.before.value), format_number(change.after.value)
    return f"{change.figure.name}{unit}", a, b, times, format_interval(change.ratio), change.verdict

"""Compares two sets of results case by case: the change of each figure with its spread, and a lower limit for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.report.cases import FIGURES, SPEED, Figure, ReportCase, cases_of
from paramserver.tools.report.formatting import (
    aligned,
    first_line,
    format_estimate,
    format_interval,
    format_number,
    join_names,
    too_few,
)
from paramserver.tools.report.results import Results
from paramserver.tools.report.statistics import Estimate, ratio
from paramserver.tools.report.tables import machine_names, transports_of

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

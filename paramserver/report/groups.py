"""Cases that may be compared with each other, and how a comparison is put into words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from paramserver.report.case import Case
from paramserver.report.figures import Estimate
from paramserver.report.writing import plural, quoted, scenario_words, with_bounds

__all__ = ["Group", "doubt", "groups_of", "is_told_apart", "name_of", "speaker_of", "times_words"]


@dataclass(frozen=True)
class Group:
    """Cases that do the same work under the same conditions, the fastest first."""

    cases: tuple[Case, ...]
    conditions: str

    @property
    def best(self) -> Case:
        return self.cases[0]

    def best_of_modes(self) -> list[Case]:
        """The fastest of each mode."""
        best: dict[str, Case] = {}
        for case in self.cases:
            best.setdefault(case.mode, case)
        return list(best.values())


def groups_of(cases: Sequence[Case]) -> list[Group]:
    """Completed cases by number of trainers and scenario. Baselines are in none, unless there is nothing else."""
    timed = [case for case in cases if case.speed is not None]
    chosen = [case for case in timed if case.baseline is None] or timed
    found: dict[str, list[Case]] = {}
    for case in chosen:
        found.setdefault(json.dumps([case.trainers, case.scenario], sort_keys=True, default=str), []).append(case)
    is_alone = len(found) == 1
    return [
        Group(tuple(sorted(members, key=_speed, reverse=True)), _conditions(members[0], is_alone))
        for members in found.values()
    ]


def _conditions(case: Case, is_alone: bool) -> str:
    scenario = scenario_words(case.scenario)
    parts = ([] if is_alone else [plural(case.trainers, "trainer")]) + ([scenario] if scenario else [])
    return f"With {', '.join(parts)}: " if parts else ""


def _speed(case: Case) -> float:
    return case.speed.value if case.speed is not None else 0.0


def is_told_apart(ratio: Estimate | None) -> bool:
    return ratio is not None and ratio.excludes(1.0)


def times_words(ratio: Estimate | None, other: Case) -> str:
    return f"ahead of {name_of(other)}" if ratio is None else f"{with_bounds(ratio)} times {name_of(other)}"


def doubt(ratio: Estimate | None) -> str:
    """What follows a ratio that may be chance."""
    if is_told_apart(ratio):
        return ""
    if ratio is None or not ratio.has_interval:
        return ", but one repeat cannot tell whether that is chance"
    return ", and that interval includes 1: they cannot be told apart"


def name_of(case: Case) -> str:
    """Its name in a sentence or a table."""
    return quoted(case.name)


def speaker_of(groups: Sequence[Group]) -> Group:
    """The group that speaks for all of them: no scenario, the most trainers."""
    usual = [group for group in groups if not group.best.scenario] or list(groups)
    return max(usual, key=lambda group: group.best.trainers)

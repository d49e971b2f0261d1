"""A case of a report: its repeats, its figures with their spread, and the baselines it is compared with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

from paramserver.metrics.records import MEASURED, PHASES
from paramserver.tools.report.formatting import join_names, quoted
from paramserver.tools.report.results import LOCAL, NO_COMMUNICATION, CaseResult
from paramserver.tools.report.statistics import Estimate, estimate, merged_counts, merged_steps, ratio

Getter = Callable[[CaseResult], float | None]
QUANTILES = ("mean", "p50", "p90", "p95", "p99", "max")
_NUMBER_OF_TRAINERS = re.compile(r"[ ,]*\b\d+ trainers?\b")


@dataclass(frozen=True)
class Figure:
    """A number that a record may have.

    ``unit`` is empty for a number without one. ``get`` returns None where it is unknown. ``better`` is 1 where more is
    better, -1 where less is better, 0 otherwise.
    """

    name: str
    unit: str
    get: Getter
    better: int


def _inside(field: str, name: str) -> Getter:
    def get(result: CaseResult) -> float | None:
        value = (getattr(result, field) or {}).get(name)
        return None if value is None else float(value)

    return get


def _cpu_of_samples(result: CaseResult) -> float | None:
    used = [value for value in result.cpu_s.values() if value is not None]
    return sum(used) / result.samples * 1000 if used and result.samples else None


def _mean_of(quantity: str) -> Getter:
    def get(result: CaseResult) -> float | None:
        known = [value for _, _, value in result.quantities.get(quantity, ()) if value is not None]
        return sum(known) / len(known) if known else None

    return get


SPEED = Figure("throughput", "samples/s", lambda r: r.samples_per_second, 1)
PER_PROCESS = Figure("throughput per process", "samples/s", lambda r: r.per_process, 1)
WIRE = Figure("on the wire per step", "bytes", lambda r: r.wire_bytes_per_step, -1)
STEPS = tuple(Figure(f"step {name}", "ms", _inside("step_ms", name), -1) for name in QUANTILES)
PARTS = tuple(Figure(f"phase {name}", "ms", _inside("phases_ms", name), -1) for name in (*PHASES, "hidden"))
CPU = tuple(Figure(f"CPU time of {who}", "s", _inside("cpu_s", who), -1) for who in ("servers", "trainers"))
MEMORY = tuple(
    Figure(f"peak memory of a {who}", "MiB", _inside("peak_rss_mb", who), -1) for who in ("server", "trainer")
)
CPU_OF_SAMPLES = Figure("CPU time of 1000 samples", "s", _cpu_of_samples, -1)
STALENESS = tuple(
    Figure(f"staleness {name}", "versions", _inside("staleness", name), -1) for name in ("mean", "p95", "max")
)
WIRE_OF_SAMPLE = Figure("on the wire per sample", "bytes", lambda r: r.wire_bytes_per_sample, -1)
OF_STEPS = {one.name: Figure(one.title, one.unit, _mean_of(one.record), one.better) for one in MEASURED}
LOCAL_STEPS = OF_STEPS["inner_steps"]
LOSS = Figure("train loss", "", lambda r: r.loss[-1][2] if r.loss else None, -1)
BEST = Figure("best validation", "", lambda r: r.best["value"] if r.best else None, 0)
TIME_TO_TARGET = Figure("time to the target", "s", lambda r: r.time_to_target_s, -1)
SAMPLES_TO_TARGET = Figure("samples to the target", "", lambda r: r.samples_to_target, -1)
FIGURES = (
    SPEED,
    PER_PROCESS,
    *STEPS,
    *PARTS,
    WIRE,
    WIRE_OF_SAMPLE,
    *OF_STEPS.values(),
    *STALENESS,
    *CPU,
    CPU_OF_SAMPLES,
    *MEMORY,
    LOSS,
    TIME_TO_TARGET,
    SAMPLES_TO_TARGET,
)


@dataclass(frozen=True)
class ReportCase:
    """All records of one name, in the order of their repeats. Figures are over the completed ones."""

    name: str
    results: tuple[CaseResult, ...]

    @property
    def first(self) -> CaseResult:
        return self.results[0]

    @property
    def mode(self) -> str:
        return self.first.mode

    @property
    def trainers(self) -> int:
        return self.first.trainers

    @property
    def servers(self) -> int:
        return self.first.servers

    @property
    def baseline(self) -> str | None:
        return self.first.baseline

    @property
    def scenario(self) -> Mapping[str, Any]:
        return self.first.scenario

    @property
    def completed(self) -> tuple[CaseResult, ...]:
        return tuple(one for one in self.results if one.is_completed)

    @property
    def failed(self) -> tuple[CaseResult, ...]:
        return tuple(one for one in self.results if not one.is_completed)

    @cached_property
    def speed(self) -> Estimate | None:
        return self.estimate(SPEED)

    def values(self, figure: Figure) -> dict[int, float | None]:
        return {one.repeat: figure.get(one) for one in self.completed}

    def estimate(self, figure: Figure) -> Estimate | None:
        return estimate(self.values(figure).values())

    def ratio_to(self, other: ReportCase, figure: Figure = SPEED) -> Estimate | None:
        """This case's ``figure`` over that of ``other``; the repeats of both were interleaved."""
        return ratio(self.values(figure), other.values(figure))

    @cached_property
    def step_ms(self) -> dict[str, float]:
        """Mean, quantiles and maximum over the steps of all repeats; without bins, means of the repeats' figures."""
        # Quantiles of repeats cannot be averaged: the bins of all repeats are merged instead.
        merged = merged_steps(self.completed)
        if merged.count:
            below = {f"p{q}": merged.quantile_s(q / 100) * 1e3 for q in (5, 25, 75)}
            return {**merged.summary_ms(), **below}
        return self._means(zip(QUANTILES, STEPS, strict=True))

    @cached_property
    def phases_ms(self) -> dict[str, float]:
        """Arithmetic means over all steps of all repeats; they sum to the mean of these steps."""
        return self._means(zip((*PHASES, "hidden"), PARTS, strict=True))

    def _means(self, figures: Iterable[tuple[str, Figure]]) -> dict[str, float]:
        """Means over the steps of all repeats, from figures that are means over the steps of one."""
        found = {}
        for name, figure in figures:
            known = [(value, one.steps or 1) for one in self.completed if (value := figure.get(one)) is not None]
            if known:
                found[name] = sum(value * steps for value, steps in known) / sum(steps for _, steps in known)
        return found

    @cached_property
    def staleness(self) -> dict[int, int]:
        """Gradients by staleness; empty where it was not counted."""
        return merged_counts((one.staleness or {}).get("histogram") or {} for one in self.completed)

    def staleness_by_trainer(self) -> dict[int, dict[int, int]]:
        parts: dict[int, list[Mapping[str, int]]] = {}
        for one in self.completed:
            for index, part in enumerate((one.staleness or {}).get("trainers") or ()):
                parts.setdefault(int(part.get("trainer", index)), []).append(part.get("histogram") or {})
        return {index: merged_counts(histograms) for index, histograms in sorted(parts.items())}

    def trainer_speeds(self) -> list[Estimate | None]:
        rows = [one.per_trainer for one in self.completed]
        count = max((len(row) for row in rows), default=0)
        return [estimate(row[i] for row in rows if i < len(row)) for i in range(count)]


def cases_of(results: Iterable[CaseResult]) -> list[ReportCase]:
    """The records by name, in the order in which the names first appear."""
    named: dict[str, list[CaseResult]] = {}
    for one in results:
        named.setdefault(one.case, []).append(one)
    return [ReportCase(name, tuple(sorted(found, key=lambda r: r.repeat))) for name, found in named.items()]


def communication_limit(case: ReportCase, cases: Sequence[ReportCase]) -> ReportCase | None:
    """The baseline without communication for ``case``; with one trainer that is the single process."""
    fitting = [*_baselines(case, cases, NO_COMMUNICATION), *_baselines(case, cases, LOCAL)]
    # Loops without communication depend on the number of trainers and the straggler; a single process does only where
    # the case has one trainer.
    alike = (one for one in fitting if one.trainers == case.trainers and one.scenario == case.scenario)
    return next(alike, None)


def local_baseline(case: ReportCase, cases: Sequence[ReportCase]) -> ReportCase | None:
    return next(iter(_baselines(case, cases, LOCAL)), None)


def _baselines(case: ReportCase, cases: Sequence[ReportCase], baseline: str) -> list[ReportCase]:
    """Baselines whose overrides are a subset of those of ``case``, the one with the most first."""
    own = case.first.overrides
    fitting = [
        one
        for one in cases
        if one.baseline == baseline
        and one.speed is not None
        and one is not case
        and all(own.get(key) == value for key, value in one.first.overrides.items())
    ]
    return sorted(fitting, key=lambda one: -len(one.first.overrides))


def scaling_families(cases: Iterable[ReportCase]) -> dict[str, list[ReportCase]]:
    """Completed cases that differ in their number of trainers only, fewest trainers first, by the name they share."""
    found: dict[str, list[ReportCase]] = {}
    for case in cases:
        if case.speed is not None:
            found.setdefault(_family_key(case), []).append(case)
    named: dict[str, list[ReportCase]] = {}
    for members in found.values():
        members.sort(key=lambda case: case.trainers)
        named[_family_name(members, named)] = members
    return named


def _family_key(case: ReportCase) -> str:
    one = case.first
    overrides = {key: value for key, value in one.overrides.items() if key != "cluster.num_trainers"}
    return json.dumps([one.mode, one.servers, one.baseline, overrides, one.scenario], sort_keys=True, default=str)


def _family_name(members: Sequence[ReportCase], taken: Iterable[str]) -> str:
    stripped = {_NUMBER_OF_TRAINERS.sub("", case.name).strip(" ,") for case in members}
    name = stripped.pop() if len(stripped) == 1 else ""
    return name if name and name not in taken else members[0].name


def by_speed(cases: Iterable[ReportCase]) -> list[ReportCase]:
    timed = [(case.speed.value, case) for case in cases if case.speed is not None]
    return [case for _, case in sorted(timed, key=lambda one: -one[0])]


def by_best(cases: Sequence[ReportCase]) -> list[ReportCase]:
    """The cases of a search for settings, the one with the best validation first; none if it is no search.

    It is one if the cases differ in ``task_args``. Those that validate another metric than the first are left out.
    """
    if not any(key.partition(".")[0] == "task_args" for case in cases for key in case.first.overrides):
        return []
    known = [(best.value, case) for case in cases if (best := case.estimate(BEST)) is not None]
    name, less = (best_name(known[0][1]), _best(known[0][1])["less_is_better"]) if known else ("", True)
    same = [(value, case) for value, case in known if best_name(case) == name]
    return [case for _, case in sorted(same, key=lambda one: one[0] if less else -one[0])]


def best_name(case: ReportCase) -> str:
    """The metric whose best value is known; empty without one."""
    return str(_best(case).get("name", ""))


def _best(case: ReportCase) -> Mapping[str, Any]:
    return next((one.best for one in case.completed if one.best), {})


def folders_of(case: ReportCase) -> str:
    """The names of the folders of its runs, in backquotes; empty for a benchmark."""
    folders = [str(folder) for one in case.results if (folder := one.environment.get("folder"))]
    return join_names([quoted(PurePath(folder).name) for folder in folders])


def quoted_name(case: ReportCase) -> str:
    return quoted(case.name)

"""The tables of a report: the figures of each case, the fastest case first."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paramserver.metrics.records import PHASES
from paramserver.tools.report.cases import (
    CPU,
    CPU_OF_SAMPLES,
    LOSS,
    MEMORY,
    PER_PROCESS,
    QUANTILES,
    SAMPLES_TO_TARGET,
    TIME_TO_TARGET,
    WIRE,
    Figure,
    ReportCase,
    by_speed,
    communication_limit,
    quoted_name,
    scaling_families,
)
from paramserver.tools.report.conditions import transports_of
from paramserver.tools.report.formatting import (
    DASH,
    first_line,
    format_estimate,
    format_interval,
    format_number,
    format_percent,
    quoted,
    scenario_text,
)
from paramserver.tools.report.statistics import Estimate, efficiency

Cell = Callable[[ReportCase], str]


@dataclass(frozen=True)
class Table:
    """Rows of text below their titles; all columns but the first hold numbers, unless ``are_numbers`` is false."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    are_numbers: bool = True


def _case_table(cases: Iterable[ReportCase], columns: Mapping[str, Cell], are_numbers: bool = True) -> Table:
    """A row for each case and a column for each title, without rows and columns that hold no known value."""
    titles = ("case", *columns)
    rows = [(quoted_name(case), *(cell(case) for cell in columns.values())) for case in cases]
    rows = [row for row in rows if any(cell != DASH for cell in row[1:])]
    kept = [i for i in range(len(titles)) if i == 0 or any(row[i] != DASH for row in rows)]
    return Table([titles[i] for i in kept], [[row[i] for i in kept] for row in rows], are_numbers)


def _estimate_of(figure: Figure) -> Cell:
    return lambda case: format_estimate(case.estimate(figure))


def _value(estimate: Estimate | None) -> str:
    return format_number(estimate.value if estimate else None)


def throughput_table(cases: Sequence[ReportCase]) -> Table:
    """Samples per second, against the fastest case and against the loops without communication."""
    timed = by_speed(cases)
    best = next((case for case in timed if case.baseline is None), timed[0] if timed else None)

    def against_best(case: ReportCase) -> str:
        return "1" if best is None or case is best else format_estimate(case.ratio_to(best))

    def against_limit(case: ReportCase) -> str:
        limit = communication_limit(case, cases)
        return DASH if limit is None else format_percent(case.ratio_to(limit))

    columns: dict[str, Cell] = {
        "samples/s": lambda case: _value(case.speed),
        "95 %": lambda case: format_interval(case.speed),
        "median": lambda case: format_number(case.speed.median if case.speed else None),
        "repeats": lambda case: f"{len(case.completed)} of {len(case.results)}",
        "times the best": against_best,
        "of no communication": against_limit,
        "per process": lambda case: _value(case.estimate(PER_PROCESS)),
        "per trainer": lambda case: " / ".join(map(_value, case.trainer_speeds())) or DASH,
    }
    if any(map(transports_of, timed)):
        columns["transport"] = lambda case: transports_of(case) or DASH
    return _case_table(timed, columns)


def scaling_table(cases: Sequence[ReportCase]) -> Table:
    """How the speed of cases that differ in their number of trainers alone grows with that number."""
    rows = []
    for name, members in scaling_families(cases).items():
        first = members[0]
        for case in members if members[-1].trainers > first.trainers else ():
            growth = case.ratio_to(first)
            share = None if growth is None else efficiency(growth, case.trainers, first.trainers)
            cells = ("1", DASH) if case is first else (format_estimate(growth), format_percent(share))
            rows.append((quoted(name), str(case.trainers), format_estimate(case.speed), *cells))
    return Table(("cases", "trainers", "samples/s", "times the fewest", "efficiency"), rows)


def steps_table(cases: Sequence[ReportCase]) -> Table:
    def step(name: str) -> Cell:
        return lambda case: format_number(case.step_ms.get(name))

    return _case_table(by_speed(cases), {f"{name} (ms)": step(name) for name in QUANTILES})


def phases_table(cases: Sequence[ReportCase]) -> Table:
    """The mean duration of each phase of a step; ``hidden`` overlaps the others."""

    def phase(name: str) -> Cell:
        return lambda case: format_number(case.phases_ms.get(name))

    def total(case: ReportCase) -> str:
        return format_number(sum(case.phases_ms.get(name, 0.0) for name in PHASES) if case.phases_ms else None)

    def step(case: ReportCase) -> str:
        return format_number(case.step_ms.get("mean") if case.phases_ms else None)

    columns = {f"{name} (ms)": phase(name) for name in PHASES}
    columns |= {"sum (ms)": total, "step (ms)": step, "hidden, overlapped (ms)": phase("hidden")}
    return _case_table(by_speed(cases), columns)


def learning_table(cases: Sequence[ReportCase]) -> Table:
    """What each case learned: the last losses of training and validation, and the way to the target."""

    def reached(case: ReportCase) -> str:
        known = [value is not None for value in case.values(TIME_TO_TARGET).values()]
        has_target = any(one.target for one in case.completed) or any(known)
        return f"{sum(known)} of {len(case.completed)}" if has_target else DASH

    columns = {
        "train loss": _estimate_of(LOSS),
        "valid": _last_validation,
        "to the target (s)": _estimate_of(TIME_TO_TARGET),
        "to the target (samples)": _estimate_of(SAMPLES_TO_TARGET),
        "reached it": reached,
    }
    return _case_table(by_speed(cases), columns)


def _last_validation(case: ReportCase) -> str:
    lasts = [one.validation[-1][2] for one in case.completed if one.validation]
    names = sorted({name for last in lasts for name in last})
    means = {name: [v for last in lasts if (v := last.get(name)) is not None] for name in names}
    return ", ".join(f"{name} {format_number(sum(v) / len(v))}" for name, v in means.items() if v) or DASH


def staleness_table(cases: Sequence[ReportCase]) -> Table:
    """How many versions old gradients were when they were applied."""

    def figure(index: int) -> Cell:
        return lambda case: staleness_figures(case.staleness)[index]

    def by_trainer(case: ReportCase) -> str:
        return " / ".join(staleness_figures(one)[0] for one in case.staleness_by_trainer().values()) or DASH

    columns = {name: figure(i) for i, name in enumerate(("mean", "p95", "max", "gradients"))}
    return _case_table(
        (case for case in by_speed(cases) if case.staleness), {**columns, "mean of each trainer": by_trainer}
    )


def staleness_figures(counts: Mapping[int, int]) -> tuple[str, str, str, str]:
    """Mean, 95th percentile, maximum and number of gradients. The counts are by staleness, in ascending order."""
    total = sum(counts.values())
    if not total:
        return DASH, DASH, DASH, "0"
    below = itertools.accumulate(counts.values())
    p95 = next(value for value, count in zip(counts, below, strict=True) if 100 * count >= 95 * total)
    return format_number(sum(value * n for value, n in counts.items()) / total), str(p95), str(max(counts)), str(total)


def resources_table(cases: Sequence[ReportCase]) -> Table:
    def wire(case: ReportCase) -> str:
        """Bytes on the wire, and their source where the trainers did not count them."""
        sources = {one.wire_bytes_source for one in case.completed if one.wire_bytes_source}
        return " ".join([format_estimate(case.estimate(WIRE), 1 / 1024), *(f"({one})" for one in sorted(sources))])

    columns = {
        "wire per step (KiB)": wire,
        "CPU of servers (s)": _estimate_of(CPU[0]),
        "CPU of trainers (s)": _estimate_of(CPU[1]),
        "CPU of 1000 samples (s)": _estimate_of(CPU_OF_SAMPLES),
        "memory of a server (MiB)": _estimate_of(MEMORY[0]),
        "memory of a trainer (MiB)": _estimate_of(MEMORY[1]),
    }
    return _case_table(by_speed(cases), columns)


def predictions_table(cases: Sequence[ReportCase]) -> Table:
    """Communication time: the network model's prediction, and what a step lasted longer than without communication."""

    def prediction(case: ReportCase) -> Mapping[str, Any]:
        return next((one.predicted for one in case.completed if one.predicted), {})

    def predicted(name: str, scale: float = 1.0) -> Cell:
        def cell(case: ReportCase) -> str:
            value = prediction(case).get(name)
            return format_number(value * scale if isinstance(value, int | float) else None)

        return cell

    def measured(case: ReportCase) -> str:
        limit = communication_limit(case, cases)
        own, without = case.step_ms.get("mean"), limit.step_ms.get("mean") if limit else None
        return format_number(None if own is None or without is None else own - without)

    columns = {
        "built": lambda case: str(prediction(case).get("built") or DASH),
        "bandwidth (MB/s)": predicted("bandwidth_bytes_s", 1e-6),
        "latency (us)": predicted("latency_s", 1e6),
        "predicted (ms a step)": predicted("communication_ms"),
        "measured (ms a step)": measured,
        "servers to break even": predicted("break_even_servers"),
    }
    return _case_table((case for case in by_speed(cases) if prediction(case)), columns)


def failures_table(cases: Sequence[ReportCase]) -> Table:
    rows = [
        (quoted_name(case), str(one.repeat), first_line(one.error) or "no reason is known")
        for case in cases
        for one in case.failed
    ]
    return Table(("case", "repeat", "error"), rows, are_numbers=False)


def definitions_table(cases: Sequence[ReportCase]) -> Table:
    """What each case is: its mode, numbers of processes, config keys and scenario."""

    def keys(case: ReportCase) -> str:
        overrides = case.first.overrides.items()
        texts = (f"{k}={v if isinstance(v, str) else json.dumps(v, default=str)}" for k, v in overrides)
        return ", ".join(map(quoted, texts)) or DASH

    columns: dict[str, Cell] = {
        "mode": lambda case: case.mode,
        "trainers": lambda case: str(case.trainers),
        "servers": lambda case: str(case.servers),
        "keys of the config": keys,
        "scenario": lambda case: scenario_text(case.scenario) or DASH,
        "baseline": lambda case: case.baseline or DASH,
    }
    return _case_table(cases, columns, are_numbers=False)

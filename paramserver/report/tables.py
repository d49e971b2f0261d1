"""The tables of a report: every figure of every case, the fastest case first."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paramserver.metrics.records import PHASES
from paramserver.report.cases import (
    CPU,
    CPU_OF_SAMPLES,
    LOSS,
    MEMORY,
    PER_PROCESS,
    QUANTILES,
    SAMPLES_TO_TARGET,
    TIME_TO_TARGET,
    WIRE,
    ReportCase,
    communication_limit,
    quoted_name,
    scaling_families,
)
from paramserver.report.document import Table
from paramserver.report.findings import communication_ms, prediction_of
from paramserver.report.formatting import (
    DASH,
    first_line,
    format_estimate,
    format_interval,
    format_number,
    format_percent,
    quoted,
    scenario_text,
)
from paramserver.report.statistics import Estimate, efficiency

Row = Sequence[str]


def _by_speed(cases: Iterable[ReportCase]) -> list[ReportCase]:
    timed = [(case.speed.value, case) for case in cases if case.speed is not None]
    return [case for _, case in sorted(timed, key=lambda one: -one[0])]


def _filled(titles: Row, rows: Sequence[Row]) -> Table:
    """The table without the columns in which nothing is known."""
    kept = [i for i in range(len(titles)) if i == 0 or any(row[i] != DASH for row in rows)]
    return Table([titles[i] for i in kept], [[row[i] for i in kept] for row in rows])


def throughput_table(cases: Sequence[ReportCase]) -> Table:
    titles = (
        "case",
        "samples/s",
        "95 %",
        "median",
        "repeats",
        "times the best",
        "of no communication",
        "per process",
        "per trainer",
    )
    timed = _by_speed(cases)
    best = next((case for case in timed if case.baseline is None), timed[0] if timed else None)
    rows = []
    for case in timed:
        assert case.speed is not None
        assert best is not None
        limit = communication_limit(case, cases)
        rows.append(
            (
                quoted_name(case),
                format_number(case.speed.value),
                format_interval(case.speed),
                format_number(case.speed.median),
                f"{len(case.completed)} of {len(case.results)}",
                "1" if case is best else format_estimate(case.ratio_to(best)),
                DASH if limit is None else format_percent(case.ratio_to(limit)),
                _value(case.estimate(PER_PROCESS)),
                " / ".join(_value(speed) for speed in case.trainer_speeds()) or DASH,
            )
        )
    return _filled(titles, rows)


def _value(estimate: Estimate | None) -> str:
    return DASH if estimate is None else format_number(estimate.value)


def scaling_table(cases: Sequence[ReportCase]) -> Table:
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
    rows = [
        (quoted_name(case), *(format_number(case.step_ms.get(name)) for name in QUANTILES)) for case in _by_speed(cases)
    ]
    return _known(("case", *(f"{name} (ms)" for name in QUANTILES)), rows)


def _known(titles: Row, rows: Sequence[Row]) -> Table:
    """Without the cases of which nothing is known."""
    return _filled(titles, [row for row in rows if any(cell != DASH for cell in row[1:])])


def phases_table(cases: Sequence[ReportCase]) -> Table:
    rows = []
    for case in _by_speed(cases):
        known = case.phases_ms
        total = sum(known.get(name, 0.0) for name in PHASES) if known else None
        sums = (total, case.step_ms.get("mean") if known else None, known.get("hidden"))
        rows.append(
            (quoted_name(case), *(format_number(value) for value in (*(known.get(name) for name in PHASES), *sums)))
        )
    titles = ("case", *(f"{name} (ms)" for name in PHASES), "sum (ms)", "step (ms)", "hidden, beside (ms)")
    return _known(titles, rows)


def learning_table(cases: Sequence[ReportCase]) -> Table:
    rows = []
    for case in _by_speed(cases):
        reached = [value for value in case.values(TIME_TO_TARGET).values() if value is not None]
        has_target = any(one.target for one in case.completed) or bool(reached)
        rows.append(
            (
                quoted_name(case),
                format_estimate(case.estimate(LOSS)),
                _last_validation(case),
                format_estimate(case.estimate(TIME_TO_TARGET)),
                format_estimate(case.estimate(SAMPLES_TO_TARGET)),
                f"{len(reached)} of {len(case.completed)}" if has_target else DASH,
            )
        )
    titles = ("case", "last loss", "last validation", "to the target (s)", "to the target (samples)", "reached it")
    return _known(titles, rows)


def _last_validation(case: ReportCase) -> str:
    lasts = [one.validation[-1][2] for one in case.completed if one.validation]
    names = sorted({name for last in lasts for name in last})
    means = {name: [v for last in lasts if (v := last.get(name)) is not None] for name in names}
    return ", ".join(f"{name} {format_number(sum(v) / len(v))}" for name, v in means.items() if v) or DASH


def staleness_table(cases: Sequence[ReportCase]) -> Table:
    rows = []
    for case in _by_speed(cases):
        if case.staleness:
            each = case.staleness_by_trainer()
            figures = staleness_figures(case.staleness)
            rows.append(
                (quoted_name(case), *figures, " / ".join(staleness_figures(one)[0] for one in each.values()) or DASH)
            )
    return _filled(("case", "mean", "p95", "max", "gradients", "mean of each trainer"), rows)


def staleness_figures(counts: Mapping[int, int]) -> tuple[str, str, str, str]:
    """Mean, the least that 95 % do not exceed, maximum, number."""
    total = sum(counts.values())
    if not total:
        return DASH, DASH, DASH, "0"
    below = itertools.accumulate(counts.values())
    p95 = next(value for value, count in zip(counts, below, strict=True) if 100 * count >= 95 * total)
    return format_number(sum(value * n for value, n in counts.items()) / total), str(p95), str(max(counts)), str(total)


def resources_table(cases: Sequence[ReportCase]) -> Table:
    columns: tuple[tuple[str, Callable[[ReportCase], Estimate | None]], ...] = (
        ("CPU of servers (s)", lambda case: case.estimate(CPU[0])),
        ("CPU of trainers (s)", lambda case: case.estimate(CPU[1])),
        ("CPU of 1000 samples (s)", lambda case: case.estimate(CPU_OF_SAMPLES)),
        ("memory of a server (MiB)", lambda case: case.estimate(MEMORY[0])),
        ("memory of a trainer (MiB)", lambda case: case.estimate(MEMORY[1])),
    )
    rows = [
        (quoted_name(case), _wire(case), *(format_estimate(take(case)) for _, take in columns))
        for case in _by_speed(cases)
    ]
    return _known(("case", "wire per step (KiB)", *(title for title, _ in columns)), rows)


def _wire(case: ReportCase) -> str:
    """Bytes on the wire, and how they are known where no trainer counted them."""
    sources = {one.wire_bytes_source for one in case.completed if one.wire_bytes_source}
    return " ".join([format_estimate(case.estimate(WIRE), 1 / 1024), *(f"({source})" for source in sorted(sources))])


def predictions_table(cases: Sequence[ReportCase]) -> Table:
    rows = []
    for case in _by_speed(cases):
        said = prediction_of(case)
        if said:
            measured = communication_ms(case, communication_limit(case, cases))
            bandwidth, latency = _float(said.get("bandwidth_bytes_s")), _float(said.get("latency_s"))
            rows.append(
                (
                    quoted_name(case),
                    str(said.get("built") or DASH),
                    format_number(None if bandwidth is None else bandwidth / 1e6),
                    format_number(None if latency is None else latency * 1e6),
                    format_number(_float(said.get("communication_ms"))),
                    format_number(measured),
                    format_number(_float(said.get("break_even_servers"))),
                )
            )
    titles = (
        "case",
        "built",
        "bandwidth (MB/s)",
        "latency (us)",
        "predicted (ms a step)",
        "measured (ms a step)",
        "servers to break even",
    )
    return _filled(titles, rows)


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def failures_table(cases: Sequence[ReportCase]) -> Table:
    rows = [
        (quoted_name(case), str(one.repeat), first_line(one.error) or "no reason is known")
        for case in cases
        for one in case.failed
    ]
    return Table(("case", "repeat", "error"), rows, are_numbers=False)


def definitions_table(cases: Sequence[ReportCase]) -> Table:
    """What each case is."""
    rows = []
    for case in cases:
        keys = ", ".join(quoted(f"{key}={_short(value)}") for key, value in case.first.overrides.items())
        role = case.baseline or DASH
        scenario = scenario_text(case.scenario) or DASH
        rows.append((quoted_name(case), case.mode, str(case.trainers), str(case.servers), keys or DASH, scenario, role))
    titles = ("case", "mode", "trainers", "servers", "keys of the config", "scenario", "baseline")
    kept = [i for i in range(len(titles)) if i == 0 or any(row[i] != DASH for row in rows)]
    return Table([titles[i] for i in kept], [[row[i] for i in kept] for row in rows], are_numbers=False)


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)

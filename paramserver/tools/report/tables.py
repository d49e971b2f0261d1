"""The tables of a report: the figures of each case, the fastest case first; and the conditions of the results."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from paramserver.config.modes import MODES
from paramserver.metrics.records import MEASURED, PHASES, summarize_staleness
from paramserver.metrics.summary import transport_text
from paramserver.tools.report.cases import (
    BEST,
    CPU,
    CPU_OF_SAMPLES,
    LOCAL_STEPS,
    LOSS,
    MEMORY,
    OF_STEPS,
    PER_PROCESS,
    QUANTILES,
    SAMPLES_TO_TARGET,
    TIME_TO_TARGET,
    WIRE,
    WIRE_OF_SAMPLE,
    Figure,
    ReportCase,
    best_name,
    by_best,
    by_speed,
    communication_limit,
    folders_of,
    quoted_name,
    scaling_families,
)
from paramserver.tools.report.formatting import (
    DASH,
    first_line,
    format_estimate,
    format_interval,
    format_number,
    format_percent,
    join_names,
    plural,
    quoted,
    scenario_text,
)
from paramserver.tools.report.results import CaseResult
from paramserver.tools.report.statistics import Estimate, efficiency

# The conditions of a set of results, with which they can be measured again.


def machine_names(cases: Sequence[ReportCase]) -> list[str]:
    """Each machine that ran them: "green with 8 cores"."""
    return _distinct(_machine(one) for one in _all(cases))


def conditions_text(cases: Sequence[ReportCase]) -> str:
    """How often and how long each case ran, on which machine, in one sentence."""
    results = [one for one in _all(cases) if one.is_completed] or _all(cases)
    counts = {len([one for one in case.results if one.is_completed]) for case in cases} - {0}
    seconds = [one.seconds for one in results if one.seconds]
    repeats = plural(max(counts), "repeat") if counts else "no completed repeat"
    if len(counts) > 1:
        repeats = f"{min(counts)} to {repeats}"
    lengths = _distinct(format_number(get(seconds)) for get in (min, max)) if seconds else []
    long = f" of {' to '.join(lengths)} s" if seconds else ""
    versions = _distinct(_version(one, "torch") for one in results)
    machines = join_names(machine_names(cases)) or "an unknown machine"
    return (
        f"{plural(len(cases), 'case')}, {repeats}{long} each, on {machines}"
        f"{', with torch ' + join_names(versions) if versions else ''}. Brackets hold the 95 % confidence interval of "
        "the geometric mean over the repeats (Student's t, of the logarithm)."
    )


def method_text(cases: Sequence[ReportCase]) -> str:
    """What the figures mean, in a few sentences."""
    has_baselines = any(case.baseline for case in cases)
    text = (
        "Each repeat of a case is a fresh start. Speeds, durations and sizes are geometric means over the repeats, and "
        "their intervals are those of the logarithm, so that no bound is below 0. Where a figure is 0 in some repeat, "
        "as staleness may be, mean and interval are arithmetic. Ratios compare repeat with repeat where both cases "
        "have the same ones, so that a slow period of the machine affects both. Means and quantiles of steps, and the "
        "means of phases, which sum to the step, are over the steps of all repeats."
    )
    if any(LOCAL_STEPS.get(one) for one in _all(cases)):
        text += (
            " With rounds of local steps a step is a round. Its drift is how far a round moves the parameters of a "
            "trainer, relative to their norm."
        )
    if has_baselines:
        text += (
            " Baselines: `local` is one process; `no communication` is the trainers' loops at the same time on the "
            "same machine without an exchange, an upper bound for every case that does the same work."
        )
    return text


def transports_of(case: ReportCase) -> str:
    """What the trainers of a case used to exchange parameters and gradients; empty without a server."""
    return join_names(_distinct(transport_text(one.transports) for one in case.results))


def comparability_warnings(cases: Sequence[ReportCase]) -> list[str]:
    """Sentences about different machines, transports, commits or versions, which make a comparison doubtful."""
    found = []
    for what, get in (
        ("machines", _machine),
        ("transports", lambda one: transport_text(one.transports) if _has_servers(one) else ""),
        ("commits", lambda one: _text(one.environment.get("commit"))[:12]),
        ("versions of torch", lambda one: _version(one, "torch")),
        ("versions of Python", lambda one: _version(one, "python")),
    ):
        values = _distinct(get(one) for one in _all(cases))
        if len(values) > 1:
            found.append(f"The results are of different {what} ({join_names(values)}): not only the cases differ.")
    return found


def _has_servers(result: CaseResult) -> bool:
    return result.mode in MODES and MODES[result.mode].has_servers  # of a run without files it is unknown


def condition_rows(cases: Sequence[ReportCase]) -> list[tuple[str, str]]:
    """Name and value of each condition; a condition with several values has a row for each."""
    results = _all(cases)
    rows = [("machine", text) for text in machine_names(cases)]
    names = sorted({name for one in results for name in _versions(one)})
    rows += [(f"{name} version", text) for name in names for text in _distinct(_version(one, name) for one in results)]
    rows += [("commit", text) for text in _distinct(_text(one.environment.get("commit")) for one in results)]
    commands = (one.environment.get("command") for one in results)
    texts = (shlex.join(map(str, c)) if isinstance(c, list | tuple) else _text(c) for c in commands)
    rows += [("command", quoted(text)) for text in _distinct(texts)]
    started = sorted(one.started for one in results if one.started is not None)
    if started:
        rows.append(("measured", f"{_date(started[0])} to {_date(started[-1])} (UTC, starts)"))
    known = ("versions", "host", "cores", "commit", "config", "command")
    others = sorted({name for one in results for name in one.environment} - set(known))
    rows += [(name, text) for name in others for text in _distinct(_text(one.environment.get(name)) for one in results)]
    return rows


def cases_by_config(cases: Sequence[ReportCase]) -> dict[str, list[str]]:
    """The names of the cases by the text of their config; that of a case is the config of its first repeat."""
    found: dict[str, list[str]] = {}
    for case in cases:
        found.setdefault(_text(case.first.environment.get("config")), []).append(case.name)
    return {text: names for text, names in found.items() if text}


def _all(cases: Iterable[ReportCase]) -> list[CaseResult]:
    return [one for case in cases for one in case.results]


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(text for text in texts if text))


def _machine(one: CaseResult) -> str:
    host, cores = _text(one.environment.get("host")), one.environment.get("cores")
    parts = ([host] if host else []) + ([plural(cores, "core")] if isinstance(cores, int) else [])
    return " with ".join(parts)


def _versions(one: CaseResult) -> dict[str, Any]:
    versions = one.environment.get("versions")
    return versions if isinstance(versions, dict) else {}


def _version(one: CaseResult, name: str) -> str:
    return _text(_versions(one).get(name))


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):  # a clock may be wrong
        return format_number(seconds)


# Tables.

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


def _quantities_in(section: str) -> dict[str, Cell]:
    return {one.label: _estimate_of(OF_STEPS[one.name]) for one in MEASURED if one.section == section}


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
    """What each case learned: its best validation, the last losses, and the way to the target; and its folders."""
    ranked = by_best(cases)
    names = list(dict.fromkeys(name for case in cases if (name := best_name(case))))

    def reached(case: ReportCase) -> str:
        known = [value is not None for value in case.values(TIME_TO_TARGET).values()]
        has_target = any(one.target for one in case.completed) or any(known)
        return f"{sum(known)} of {len(case.completed)}" if has_target else DASH

    def best(case: ReportCase) -> str:
        name = f"{best_name(case)} " if len(names) > 1 and best_name(case) else ""
        return f"{name}{format_estimate(case.estimate(BEST))}"

    columns: dict[str, Cell] = {
        f"best {names[0]}" if len(names) == 1 else "best": best,
        "train loss": _estimate_of(LOSS),
        "valid": _last_validation,
        **_quantities_in("learning"),
        "to the target (s)": _estimate_of(TIME_TO_TARGET),
        "to the target (samples)": _estimate_of(SAMPLES_TO_TARGET),
        "reached it": reached,
        "folder": lambda case: folders_of(case) or DASH,
    }
    return _case_table([*ranked, *(case for case in by_speed(cases) if case not in ranked)], columns)


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
    """Mean, 95th percentile, maximum and number of gradients. The counts are by staleness."""
    total, found = sum(counts.values()), summarize_staleness(counts)
    if not total:
        return DASH, DASH, DASH, "0"
    return format_number(found["mean"]), str(found["p95"]), str(found["max"]), str(total)


def rounds_table(cases: Sequence[ReportCase]) -> Table:
    """What is measured of rounds, and for all cases the bytes of an applied sample; empty if no case has rounds."""
    columns = {**_quantities_in("rounds"), "wire per sample (bytes)": _estimate_of(WIRE_OF_SAMPLE)}
    have_rounds = any(LOCAL_STEPS.get(one) for one in _all(cases))
    return _case_table(by_speed(cases) if have_rounds else (), columns)


def embedding_table(cases: Sequence[ReportCase]) -> Table:
    """What a step of a trainer used of each embedding table, in the last repeat of each case."""

    def figure(name: str, scale: float = 1.0) -> Callable[[Mapping[str, Any]], str]:
        return lambda own: format_number(None if own.get(name) is None else own[name] * scale)

    def busiest(own: Mapping[str, Any]) -> str:
        rows = own.get("busiest_rows")
        return f"{rows[0]} to {rows[1] - 1}" if rows else DASH

    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "rows": figure("rows"),
        "ids per step": figure("ids_per_step"),
        "rows per step": figure("rows_per_step"),
        "rows per step (KiB)": figure("bytes_per_step", 1 / 1024),
        "all rows (KiB)": figure("bytes_of_all_rows", 1 / 1024),
        "busiest 64th of the rows": busiest,
        "its share of the use": figure("busiest_share"),
        "share of each server": lambda own: " / ".join(map(format_number, own.get("server_shares") or ())) or DASH,
    }
    rows = [
        (quoted_name(case), quoted(name), *(cell(own) for cell in columns.values()))
        for case in by_speed(cases)
        for name, own in (case.completed[-1].tables.items() if case.completed else ())
    ]
    return Table(("case", "table", *columns), rows)


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


SECTIONS: tuple[tuple[str, str, Callable[[Sequence[ReportCase]], Table]], ...] = (
    ("Throughput", "throughput", throughput_table),
    ("Scaling", "scaling", scaling_table),
    ("Steps", "steps", steps_table),
    ("Where a step goes", "phases", phases_table),
    ("Learning", "learning", learning_table),
    ("Rounds of local steps", "rounds", rounds_table),
    ("Staleness", "staleness", staleness_table),
    ("Embedding tables", "", embedding_table),
    ("Bytes, CPU time and memory", "", resources_table),
    ("The network model and the measurement", "", predictions_table),
    ("Failures", "", failures_table),
)
"""The sections of a report: the title, the name by which the plots know it, and what makes the table."""

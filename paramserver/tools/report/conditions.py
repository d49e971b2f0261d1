"""The conditions of a set of results, with which they can be measured again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

from paramserver.metrics.summary import transport_text
from paramserver.tools.report.cases import ReportCase
from paramserver.tools.report.formatting import format_number, join_names, plural, quoted
from paramserver.tools.report.results import CaseResult


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
        ("transports", lambda one: transport_text(one.transports)),
        ("commits", lambda one: _text(one.environment.get("commit"))[:12]),
        ("versions of torch", lambda one: _version(one, "torch")),
        ("versions of Python", lambda one: _version(one, "python")),
    ):
        values = _distinct(get(one) for one in _all(cases))
        if len(values) > 1:
            found.append(f"The results are of different {what} ({join_names(values)}): not only the cases differ.")
    return found


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

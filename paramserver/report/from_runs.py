"""Results out of the folders of runs that exist: a case for each config, a repeat for each run of it.

What a run learned, from its records: loss and validation against samples and seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from paramserver.config.io import flatten_mapping
from paramserver.config.modes import MODES
from paramserver.errors import UnsupportedConfiguration
from paramserver.report.formatting import join_names, plural
from paramserver.report.results import (
    COMPLETED,
    FAILED,
    LOCAL,
    RESULTS_FILE,
    CaseResult,
    Results,
    parse_result,
    read_results,
)


def learning_curves(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
    """The points ``loss``, [samples, seconds, loss], and ``validation``, [samples, seconds, {name: value}].

    The record of a validation holds a step, of which the samples are the mean of all steps.

    Args:
        records: the lines of metrics.jsonl.
        summary: summary.json; empty where there is none.
    """
    train = [one for one in _of_kind(records, "train") if has_numbers(one, "step", "samples", "seconds")]
    validations = [one for one in _of_kind(records, "validation") if has_numbers(one, "step", "seconds")]
    per_step = _samples_per_step(train, summary)
    return {
        "loss": [[one["samples"], one["seconds"], one.get("loss")] for one in train],
        "validation": [
            [one["step"] * per_step, one["seconds"], _numbers(one.get("values") or {})] for one in validations
        ],
    }


def _samples_per_step(train: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> float:
    last = {"step": summary.get("steps"), "samples": summary.get("samples")}
    if not has_numbers(last, "step", "samples"):
        last = {**train[-1]} if train else {"step": 0, "samples": 0}
    return float(last["samples"] / last["step"]) if last["step"] else 0.0


def _of_kind(records: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [record for record in records if record.get("kind") == kind]


def has_numbers(record: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(record.get(name), int | float) for name in names)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the text that stands beside a number that is not finite."""
    return {name: value for name, value in values.items() if value is None or isinstance(value, int | float)}


_FILES = ("config.yaml", "summary.json", "metrics.jsonl")
# Runs that differ in these alone are repeats of one case.
_NOT_OF_THE_CASE = ("seed", "logging.", "cluster.master_", "cluster.token_file", "cluster.interface")
# What the name and the columns of a case say already.
_SAID = ("mode", "cluster.num_trainers", "cluster.num_servers")
_VALUE_LETTERS = 40


@dataclass(frozen=True)
class Run:
    """What stands in the folder of a run."""

    folder: Path
    config: Mapping[str, Any]
    config_text: str
    summary: Mapping[str, Any]
    environment: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    damaged: int

    @property
    def mode(self) -> str:
        return str(self.summary.get("mode") or self.config.get("mode") or "unknown")

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [record for record in self.records if record.get("kind") == kind]


def results_at(paths: Sequence[Path]) -> Results:
    """The results of a benchmark (its ``results.jsonl``, or the folder that holds it), or those of runs by folder.

    Raises:
        UnsupportedConfiguration: a path is none of these, several are benchmarks, or a file is damaged.
    """
    benchmarks = [path for path in paths if path.is_file() or (path / RESULTS_FILE).is_file()]
    if not benchmarks:
        return _of_runs([_read(path) for path in dict.fromkeys(paths)])
    if len(paths) > 1:
        raise UnsupportedConfiguration(
            f"{benchmarks[0]} holds the results of a benchmark, and must be reported alone; "
            "report it by itself, or use paramserver benchmark compare A B"
        )
    return read_results(benchmarks[0])


# Reading.


def _read(folder: Path) -> Run:
    if not any((folder / name).is_file() for name in _FILES):
        raise UnsupportedConfiguration(f"{folder} must be the folder of a run{_what_it_is(folder)}")
    config_file = folder / "config.yaml"
    config = _parsed(config_file, yaml.safe_load)
    records, damaged = _records(folder / "metrics.jsonl")
    return Run(
        folder,
        config,
        _text(config_file),
        _parsed(folder / "summary.json", json.loads),
        _parsed(folder / "environment.json", json.loads),
        records,
        damaged,
    )


def _what_it_is(folder: Path) -> str:
    if not folder.is_dir():
        return ", and does not exist; give one such as runs/<name>"
    inside = sorted(path for path in folder.iterdir() if any((path / name).is_file() for name in _FILES))
    if inside:
        shown = " ".join(str(path) for path in inside[:3]) + (" ..." if len(inside) > 3 else "")
        return f", and holds {plural(len(inside), 'run')} instead; give them: {shown}"
    return f", and holds none of {', '.join(_FILES)} nor {RESULTS_FILE}; give one such as runs/<name>"


def _text(path: Path) -> str:
    """The content; empty where there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedConfiguration(f"{path} must be a text that can be read ({error}); restore it") from error


def _parsed(path: Path, parse: Callable[[str], Any]) -> Mapping[str, Any]:
    text = _text(path)
    try:
        content = parse(text) if text.strip() else {}
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        first = " ".join(str(error).split("\n")[:1])
        raise UnsupportedConfiguration(f"{path} is damaged ({first}); restore it, or leave this run out") from error
    if not isinstance(content, Mapping):
        raise UnsupportedConfiguration(f"{path} must hold a mapping; restore it, or leave this run out")
    return content


def _records(path: Path) -> tuple[Sequence[Mapping[str, Any]], int]:
    """The records that can be read, and how many lines cannot: a run that was killed may leave such."""
    records, damaged = [], 0
    for line in _text(path).splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            damaged += 1
            continue
        if isinstance(record, dict):
            records.append(record)
    return records, damaged


# Cases and repeats.


def _of_runs(runs: Sequence[Run]) -> Results:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_identity(run), sort_keys=True, default=str), []).append(run)
    cases = [sorted(members, key=_started) for members in groups.values()]
    varying = _varying([members[0] for members in cases])
    is_mixed = len({_is_single(run) for run in runs}) > 1
    results = []
    for members, name in zip(cases, _names([members[0] for members in cases]), strict=True):
        baseline = LOCAL if is_mixed and _is_single(members[0]) else None
        results += [_result(run, name, repeat, varying, baseline) for repeat, run in enumerate(members)]
    return Results(", ".join(str(run.folder) for run in runs), tuple(results), tuple(_notes(runs)))


def _is_single(run: Run) -> bool:
    return run.mode in MODES and MODES[run.mode].single_process


def _keys(run: Run) -> dict[str, Any]:
    """The keys that matter to this run, by dotted name: those of servers only where there are some, and so on."""
    unused = (*_NOT_OF_THE_CASE, *(MODES[run.mode].unused_prefixes if run.mode in MODES else ()))
    return {name: value for name, value in flatten_mapping(run.config) if not name.startswith(unused)}


def _identity(run: Run) -> dict[str, Any]:
    return {**_keys(run), "mode": run.mode, "trainers": run.summary.get("num_trainers")}


def _varying(runs: Sequence[Run]) -> set[str]:
    """Keys that have not the same value wherever they matter."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in _keys(run).items():
            values.setdefault(name, set()).add(json.dumps(value, default=str))
    return {name for name, found in values.items() if len(found) > 1}


def _names(runs: Sequence[Run]) -> list[str]:
    """What each is, as short as tells them apart: mode and numbers, then the keys in which those alike differ."""
    plain = [_described(run) for run in runs]
    names = []
    for run, name in zip(runs, plain, strict=True):
        alike = [other for other, its in zip(runs, plain, strict=True) if its == name]
        differing = _varying(alike)
        keys = _keys(run)
        parts = [f"{key}={_short(keys[key])}" for key in keys if key in differing]
        names.append(", ".join([name, *parts]))
    return _unique(names)


def _unique(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def _described(run: Run) -> str:
    consistency = run.summary.get("consistency")
    parts = [f"{run.mode} {consistency}" if consistency else run.mode]
    servers, trainers = _counts(run)
    parts += [plural(servers, "server")] if servers > 1 else []
    parts += [] if _is_single(run) else [plural(trainers, "trainer")]
    return ", ".join(parts)


def _counts(run: Run) -> tuple[int, int]:
    """Servers and trainers."""
    cluster = run.config.get("cluster")
    cluster = cluster if isinstance(cluster, Mapping) else {}
    servers = run.summary.get("num_servers")
    trainers = run.summary.get("num_trainers") or cluster.get("num_trainers")
    return (servers if isinstance(servers, int) else 0), (trainers if isinstance(trainers, int) else 1)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _VALUE_LETTERS else f"...{text[-_VALUE_LETTERS + 3 :]}"


def _notes(runs: Sequence[Run]) -> Iterable[str]:
    yield "These are runs of the launcher: their first, slower steps are in the figures, and they did not take turns."
    tasks = list(dict.fromkeys(str(run.config.get("task")) for run in runs))
    if len(tasks) > 1:
        yield f"They are of different tasks ({join_names(tasks)}): samples of one are no samples of another."
    for run in runs:
        if run.summary.get("status") == "interrupted":
            yield f"{run.folder} was interrupted after {run.summary.get('steps')} steps; its figures are of these."
        if run.damaged:
            yield f"{plural(run.damaged, 'line')} of {run.folder / 'metrics.jsonl'} cannot be read and are left out."


# One run as a record.


def _result(run: Run, case: str, repeat: int, varying: set[str], baseline: str | None) -> CaseResult:
    summary = run.summary
    servers, trainers = _counts(run)
    has_failed = summary.get("status") not in ("completed", "interrupted")
    speed = summary.get("samples_per_second")
    record: dict[str, Any] = {
        "format": 1,
        "case": case,
        "repeat": repeat,
        "mode": run.mode,
        "trainers": trainers,
        "servers": servers,
        "status": FAILED if has_failed else COMPLETED,
        "error": _error(run) if has_failed else None,
        "overrides": {key: value for key, value in _keys(run).items() if key in varying and key not in _SAID},
        "baseline": baseline,
        "started": _started(run) or None,
        "wall_s": _wall_s(run),
        "per_trainer": [one.get("samples_per_second") for one in summary.get("trainers") or ()],
        "per_process": speed / (servers + trainers) if isinstance(speed, int | float) else None,
        **{name: summary.get(name) for name in ("seconds", "steps", "samples", "samples_per_second", "step_ms")},
        **{name: summary.get(name) for name in ("phases_ms", "wire_bytes_per_step", "staleness", "peak_rss_mb")},
        **learning_curves(run.records, run.summary),
        "environment": _environment(run),
    }
    return parse_result(record, str(run.folder / "summary.json"))


def _error(run: Run) -> str:
    if not run.summary:
        return f"{run.folder} has no summary.json: the run has not ended, or was killed"
    return str(run.summary.get("error") or run.summary.get("reason") or "")


def _environment(run: Run) -> dict[str, Any]:
    environment = run.environment
    known = {name: environment.get(name) for name in ("versions", "host", "command")}
    renamed = {"cores": environment.get("cpu_count"), "commit": environment.get("git_commit")}
    return {**known, **renamed, "config": run.config_text, "folder": str(run.folder)}


def _started(run: Run) -> float:
    try:
        return datetime.fromisoformat(str(run.environment.get("started"))).timestamp()
    except ValueError:
        return 0.0


def _wall_s(run: Run) -> float | None:
    times = [one["time"] for one in run.records if has_numbers(one, "time")]
    return max(times) - min(times) if times else None

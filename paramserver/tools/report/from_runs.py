"""Results from the folders of finished runs: a case for each config, a repeat for each run of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from paramserver.config.io import flatten_mapping
from paramserver.config.layers import KEYS
from paramserver.config.modes import MODES
from paramserver.errors import UnsupportedConfiguration
from paramserver.fileio import is_file, is_folder
from paramserver.metrics.summary import core_wait_text
from paramserver.tools.report.formatting import join_names, plural
from paramserver.tools.report.results import (
    COMPLETED,
    CURVES,
    FAILED,
    FIELDS,
    FORMAT,
    LOCAL,
    RESULTS_FILE,
    CaseResult,
    Results,
    best_validation,
    parse_result,
    read_results,
)
from paramserver.tools.report.statistics import interpolated

Record = Mapping[str, Any]

_RUN_FILES = ("config.yaml", "summary.json", "metrics.jsonl")
# Runs that differ in these keys only are repeats of one case.
_NOT_OF_THE_CASE = ("seed", "logging.", "cluster.master_", "cluster.token_file", "cluster.interface")
# Keys whose values are in the name and the columns of a case.
_SHOWN_ELSEWHERE = ("mode", "cluster.num_trainers", "cluster.num_servers")
_MOST_LETTERS = 40


def results_at(paths: Sequence[Path]) -> Results:
    """Read the results of one benchmark (its ``results.jsonl`` or the folder of it), or those of runs by folder.

    Raises:
        UnsupportedConfiguration: a path is none of these, several are benchmarks, or a file is damaged.
    """
    benchmarks = [path for path in paths if is_file(path) or is_file(path / RESULTS_FILE)]
    if not benchmarks:
        return _results([read_run(path) for path in dict.fromkeys(paths)])
    if len(paths) > 1:
        raise UnsupportedConfiguration(
            f"{benchmarks[0]} holds the results of a benchmark, and must be reported alone; "
            "report it alone, or use paramserver benchmark compare A B"
        )
    return read_results(benchmarks[0])


def learning_curves(records: Sequence[Record], summary: Record) -> dict[str, list[list[Any]]]:
    """The points of each curve, [samples, seconds, value]; a value of ``validation`` is {name: value}.

    A quantity has points where it was recorded. The record of a validation has a step; its samples are those of the
    record ``train`` of this step, or lie between those of the steps before and after it.
    """

    def of_kind(kind: str, *numbers: str) -> list[Record]:
        return [one for one in records if one.get("kind") == kind and _has_numbers(one, *numbers)]

    train = of_kind("train", "step", "samples", "seconds")

    def known(values: Record) -> dict[str, Any]:  # without the text next to a number that is not finite
        return {name: value for name, value in values.items() if value is None or isinstance(value, int | float)}

    last = {"step": summary.get("steps"), "samples": summary.get("samples")}
    reached = [{"step": 0, "samples": 0}, *train, *([last] if _has_numbers(last, "step", "samples") else [])]
    samples_at = [(one["step"], one["samples"]) for one in reached]
    return {
        "loss": [[one["samples"], one["seconds"], one.get("loss")] for one in train],
        **{
            name: [[one["samples"], one["seconds"], one[name]] for one in train if _has_numbers(one, name)]
            for name in CURVES
        },
        "validation": [
            [float(interpolated(samples_at, one["step"])), one["seconds"], known(one.get("values") or {})]
            for one in of_kind("validation", "step", "seconds")
        ],
    }


def _has_numbers(record: Record, *names: str) -> bool:
    return all(isinstance(record.get(name), int | float) for name in names)


@dataclass(frozen=True)
class Run:
    """The content of the folder of a run; ``damaged`` lines of its records could not be read."""

    folder: Path
    config: Record
    config_text: str
    summary: Record
    environment: Record
    records: Sequence[Record]
    damaged: int

    @property
    def mode(self) -> str:
        return str(self.summary.get("mode") or self.config.get("mode") or "unknown")

    @property
    def is_single_process(self) -> bool:
        return self.mode in MODES and MODES[self.mode].single_process

    # Of a run that was killed only the config has these.

    @property
    def consistency(self) -> str | None:
        return self.summary.get("consistency") or self.keys.get("server.consistency")

    @property
    def servers(self) -> int:
        return self._number("num_servers", 0)

    @property
    def trainers(self) -> int:
        return self._number("num_trainers", 1)

    def _number(self, name: str, default: int) -> int:
        number = self.summary.get(name) or self.keys.get(f"cluster.{name}")
        return number if isinstance(number, int) else default

    @property
    def started(self) -> float:
        """Seconds since the epoch; 0 where unknown."""
        try:
            return datetime.fromisoformat(str(self.environment.get("started"))).timestamp()
        except ValueError:
            return 0.0

    @property
    def transports(self) -> dict[str, str]:
        """By trainer, from the records of the last session: a run that was killed has no summary."""
        used: dict[str, str] = {}
        for one in self.records:
            if one.get("kind") == "start":
                used.clear()  # it may have fewer trainers than the one before, or another mode
            elif one.get("kind") == "transport":
                used[str(one.get("trainer"))] = str(one.get("transport"))
        return used

    def of_kind(self, kind: str) -> list[Record]:
        return [one for one in self.records if one.get("kind") == kind]

    @property
    def last_trained(self) -> Record:
        """The newest record of training; empty before the first."""
        return next(reversed(self.of_kind("train")), {})

    @property
    def curves(self) -> dict[str, list[list[Any]]]:
        """See ``learning_curves``."""
        return learning_curves(self.records, self.summary)

    @property
    def best(self) -> dict[str, Any] | None:
        """The best validation, by ``checkpoint.best`` of the config; see ``best_validation``."""
        checkpoint = self.config.get("checkpoint")
        best = checkpoint.get("best") if isinstance(checkpoint, Mapping) else None
        wanted = best if isinstance(best, Mapping) else {}
        return best_validation(self.curves["validation"], wanted.get("metric"), wanted.get("mode"))

    @cached_property
    def keys(self) -> dict[str, Any]:
        """The config keys that this run uses, by dotted name: those of servers only where there are servers."""
        unused = (*_NOT_OF_THE_CASE, *(MODES[self.mode].unused_prefixes if self.mode in MODES else ()))
        return {name: value for name, value in flatten_mapping(self.config) if not name.startswith(unused)}

    def case_key(self) -> str:
        """Equal for the runs that are repeats of one case."""
        key = {**self.keys, "mode": self.mode, "trainers": self.trainers}
        return json.dumps(key, sort_keys=True, default=str)


def read_run(folder: Path) -> Run:
    """Read the folder of a run.

    Raises:
        UnsupportedConfiguration: it is none, or a file of it is damaged.
    """
    if not _is_run(folder):
        raise UnsupportedConfiguration(f"{folder} must be the folder of a run{_reason(folder)}")
    config_text = _read_text(folder / "config.yaml")
    records, damaged = [], 0
    for line in _read_text(folder / "metrics.jsonl", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # a run that was killed may leave such a line, of any bytes
            damaged += 1
            continue
        if isinstance(record, dict):
            records.append(record)
    return Run(
        folder,
        _read_mapping(folder / "config.yaml", yaml.safe_load),
        config_text,
        _read_mapping(folder / "summary.json", json.loads),
        _read_mapping(folder / "environment.json", json.loads),
        records,
        damaged,
    )


def _is_run(folder: Path) -> bool:
    return any(is_file(folder / name) for name in _RUN_FILES)


def _reason(folder: Path) -> str:
    """Why ``folder`` is not the folder of a run, and the cure."""
    if not is_folder(folder):
        return ", and does not exist; give one such as runs/<name>"
    try:
        runs = sorted(filter(_is_run, folder.iterdir()))
    except OSError as error:
        return f" that this user can read ({error.strerror}); change its permissions"
    if runs:
        shown = " ".join(str(path) for path in runs[:3]) + (" ..." if len(runs) > 3 else "")
        return f", and holds {plural(len(runs), 'run')} instead; give them: {shown}"
    return f", and holds none of {', '.join(_RUN_FILES)} nor {RESULTS_FILE}; give one such as runs/<name>"


def _read_text(path: Path, errors: str = "strict") -> str:
    """The content; empty where there is no such file. ``errors`` as in ``bytes.decode``."""
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedConfiguration(f"{path} must be a text that can be read ({error}); restore it") from error


def _read_mapping(path: Path, parse: Callable[[str], Any]) -> Record:
    text = _read_text(path)
    try:
        content = parse(text) if text.strip() else {}
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        first = str(error).split("\n")[0]
        raise UnsupportedConfiguration(f"{path} is damaged ({first}); restore it, or leave this run out") from error
    if not isinstance(content, Mapping):
        raise UnsupportedConfiguration(f"{path} must hold a mapping; restore it, or leave this run out")
    return content


def _results(runs: Sequence[Run]) -> Results:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.case_key(), []).append(run)
    cases = [sorted(members, key=lambda run: run.started) for members in groups.values()]
    firsts = [members[0] for members in cases]
    varying = _varying_keys(firsts)
    # A single process is a baseline only among runs with several trainers; alone it is a case.
    is_mixed = len({run.is_single_process for run in runs}) > 1
    results = []
    for members, name in zip(cases, _case_names(firsts), strict=True):
        baseline = LOCAL if is_mixed and members[0].is_single_process else None
        results += [_result(run, name, repeat, varying, baseline) for repeat, run in enumerate(members)]
    return Results(", ".join(str(run.folder) for run in runs), tuple(results), tuple(_notes(runs)))


def _varying_keys(runs: Sequence[Run]) -> set[str]:
    """Keys that do not have the same value in all runs that use them.

    Names that the user chose, as those of ``task_args``, are used by the runs that lack them too, with their defaults.
    """
    values: dict[str, list[str]] = {}
    for run in runs:
        for name, value in run.keys.items():
            values.setdefault(name, []).append(json.dumps(value, default=str))

    def varies(name: str, found: Sequence[str]) -> bool:
        is_of_user = any(name.startswith(f"{key}.") for key in KEYS)
        return len(set(found)) > 1 or (is_of_user and len(found) < len(runs))

    return {name for name, found in values.items() if varies(name, found)}


def _case_names(runs: Sequence[Run]) -> list[str]:
    """A short distinct name for each: mode and numbers, then the keys in which runs with equal names differ."""
    plain = [plain_name(run) for run in runs]
    of_name: dict[str, list[Run]] = {}
    for run, name in zip(runs, plain, strict=True):
        of_name.setdefault(name, []).append(run)
    differing = {name: _varying_keys(equal) for name, equal in of_name.items()}
    names, seen = [], Counter[str]()
    for run, name in zip(runs, plain, strict=True):
        keys = [f"{key}={_short(value)}" for key, value in run.keys.items() if key in differing[name]]
        name = ", ".join([name, *keys])
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def plain_name(run: Run) -> str:
    """The mode of a run, with its consistency and numbers of processes."""
    parts = [f"{run.mode} {run.consistency}" if run.consistency else run.mode]
    parts += [plural(run.servers, "server")] if run.servers > 1 else []
    parts += [] if run.is_single_process else [plural(run.trainers, "trainer")]
    return ", ".join(parts)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _MOST_LETTERS else f"...{text[-_MOST_LETTERS + 3 :]}"


def _notes(runs: Sequence[Run]) -> Iterable[str]:
    yield "These are single runs: their first, slower steps are in the figures, and they were not interleaved."
    tasks = list(dict.fromkeys(str(run.config.get("task")) for run in runs))
    if len(tasks) > 1:
        yield f"They are of different tasks ({join_names(tasks)}), whose samples cannot be compared."
    for run in runs:
        if run.summary.get("status") == "interrupted":
            yield f"{run.folder} was interrupted {_when(run)}."
        if waited := core_wait_text(run.summary):
            yield f"The cores were not free in {run.folder}: {waited}."
        streams = [one.get("stream") or {} for one in run.summary.get("trainers") or ()]
        if stale := sum(stream.get("stale", 0) for stream in streams):
            yield f"{plural(stale, 'sample')} of {run.folder} became too old and had no use (buffer.max_staleness)."
        if run.damaged:
            yield f"{plural(run.damaged, 'line')} of {run.folder / 'metrics.jsonl'} cannot be read and are left out."


def _when(run: Run) -> str:
    """After how many steps a run was interrupted; a summary that rank 0 could not write lacks them."""
    if (steps := run.summary.get("steps")) is not None:
        return f"after {plural(steps, 'step')}" if steps else "before its first step"
    recorded = run.last_trained.get("step")
    return f"after {plural(recorded, 'step')} or more" if recorded else "before the first record of a step"


def _wire_bytes_per_sample(summary: Record) -> float | None:
    """Those of an applied sample; the summary has those of a served one."""
    names = ("wire_bytes_per_sample", "samples_served", "samples")
    of_served, served, applied = (summary[name] for name in names) if _has_numbers(summary, *names) else (0, 0, 0)
    return of_served * served / applied if of_served and applied else None  # ddp does not count its bytes


def _result(run: Run, case: str, repeat: int, varying: set[str], baseline: str | None) -> CaseResult:
    summary, environment = run.summary, run.environment
    has_failed = summary.get("status") not in ("completed", "interrupted")
    error = str(summary.get("error") or summary.get("reason") or "")
    if not summary:
        error = f"{run.folder} has no summary.json: the run has not ended, or was killed"
    speed = summary.get("samples_per_second")
    times = [one["time"] for one in run.records if _has_numbers(one, "time")]
    record: dict[str, Any] = {
        **{name: summary.get(name) for name in FIELDS},  # those of the same name
        "format": FORMAT,
        "case": case,
        "repeat": repeat,
        "mode": run.mode,
        "trainers": run.trainers,
        "servers": run.servers,
        "status": FAILED if has_failed else COMPLETED,
        "error": error if has_failed else None,
        "overrides": {k: value for k, value in run.keys.items() if k in varying and k not in _SHOWN_ELSEWHERE},
        "baseline": baseline,
        "started": run.started or None,
        "wall_s": max(times) - min(times) if times else None,
        "per_trainer": [one.get("samples_per_second") for one in summary.get("trainers") or ()],
        "per_process": speed / (run.servers + run.trainers) if isinstance(speed, int | float) else None,
        "wire_bytes_per_sample": _wire_bytes_per_sample(summary),
        "transports": run.transports,
        **run.curves,
        "best": run.best,
        "environment": {
            **{name: environment.get(name) for name in ("versions", "host", "command")},
            "cores": environment.get("cpu_count"),
            "commit": environment.get("git_commit"),
            "config": run.config_text,
            "folder": str(run.folder),
        },
    }
    return parse_result(record, str(run.folder / "summary.json"))

"""The commands that report finished runs: ``paramserver report RUN_DIR...`` and ``paramserver runs [FOLDER]``."""

from __future__ import annotations

import argparse
import dataclasses
import math
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paramserver.errors import UnsupportedConfiguration
from paramserver.fileio import is_file, is_folder, json_text
from paramserver.launch import CommandParser, run_command
from paramserver.metrics.sinks import with_numbers
from paramserver.process_utils import print_output
from paramserver.runs.rundir import RunDir, newest_first
from paramserver.tools.report.cases import cases_of
from paramserver.tools.report.findings import findings
from paramserver.tools.report.formatting import DASH, aligned, format_number
from paramserver.tools.report.from_runs import Run, plain_name, read_run, results_at
from paramserver.tools.report.page import NO_PLOTS, write_report
from paramserver.tools.report.plots import has_matplotlib
from paramserver.tools.report.results import parse_target, with_target


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver report",
        description="Compare runs that exist, or show a benchmark again: report.html (one file, no network needed) and "
        "report.md. Runs that differ in seed and name alone are repeats of one case.",
        epilog="Exit codes: 0 done, 2 the input is wrong.",
    )
    parser.add_argument(
        "paths", type=Path, nargs="+", metavar="RUN_DIR", help="folders of runs, or the folder of one benchmark"
    )
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="default: report")
    parser.add_argument(
        "--target", metavar="NAME=VALUE", help="report when a validation metric reached a value, such as accuracy=0.95"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    return run_command(lambda: print_output(_report(arguments.paths, arguments.out, arguments.target)))


def _report(paths: Sequence[Path], out: Path, target_text: str | None) -> str:
    target = None if target_text is None else parse_target(target_text)
    results = results_at(paths)
    if target is not None:
        results = dataclasses.replace(results, results=tuple(with_target(one, target) for one in results.results))
    pages = write_report(results, out)
    sentences = [*findings(cases_of(results.results)), *results.notes, *([] if has_matplotlib() else [NO_PLOTS])]
    return "\n".join([*sentences, "", *map(str, pages)])


# ``paramserver runs [FOLDER]``.


_TITLES = ("run", "status", "mode", "steps", "best validation", "last validation", "samples/s")


def make_runs_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver runs",
        description="List the runs of a folder, the newest first: how each ended, or that it is running, its mode, "
        "steps, validation and speed. The best validation is that of checkpoint.best, or the lowest loss.",
        epilog="Exit codes: 0 done, 2 the input is wrong.",
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"), metavar="FOLDER", help="default: runs")
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")
    return parser


def runs_main(argv: Sequence[str]) -> int:
    arguments = make_runs_parser().parse_args(argv)

    def runs() -> None:
        found = runs_in(arguments.folder)
        print_output(json_text(found, indent=2) if arguments.json else _table(found))

    return run_command(runs)


def runs_in(folder: Path) -> list[dict[str, Any]]:
    """Describe the runs in ``folder``, or the run that it is, the newest first; a damaged one by its ``error``.

    Raises:
        UnsupportedConfiguration: there is no such folder.
    """
    if not is_folder(folder):
        raise UnsupportedConfiguration(f"{folder} must be a folder of runs, and is none; give a logging.run_dir")
    runs = [run for run in (RunDir(folder), *newest_first(folder)) if is_file(run.environment_file)]
    return [_describe_or_error(run) for run in runs]


def _describe_or_error(folder: RunDir) -> dict[str, Any]:
    try:
        return _describe(folder, read_run(folder.path))
    except UnsupportedConfiguration as error:  # of this run: the others are listed too
        unknown = dict.fromkeys(("mode", "task", "started", "steps", "best", "samples_per_second"))
        return {"path": str(folder.path), "status": "damaged", **unknown, "validation": {}, "error": str(error)}


def _describe(folder: RunDir, run: Run) -> dict[str, Any]:
    """A run that is in progress is described by its newest records."""
    host = folder.used_on()
    summary = {} if host is not None else run.summary
    running = None if host is None else "running" if host == socket.gethostname() else f"running on {host}"
    last = run.last_trained
    validations = run.curves["validation"]
    return {
        "path": str(folder.path),
        "status": running or summary.get("status", "killed"),
        "mode": plain_name(run),
        "task": run.config.get("task"),
        "started": run.environment.get("started"),
        "steps": summary.get("steps", last.get("step")),
        "best": run.best,
        "validation": with_numbers(summary.get("validation", validations[-1][2] if validations else {})),
        "samples_per_second": summary.get("samples_per_second", last.get("samples_per_second")),
    }


def _table(runs: Sequence[Mapping[str, Any]]) -> str:
    if not runs:
        return "no run was found"
    lines = aligned([_TITLES, *map(_row, runs)], numbers=(3, 6))
    return "\n".join([*lines, *(run["error"] for run in runs if "error" in run)])


def _metric(name: str, value: float | None) -> str:
    is_finite = value is None or math.isfinite(value)
    return f"{name} {format_number(value, 4) if is_finite else value}"


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    best = run["best"]
    return (
        run["path"],
        run["status"],
        run["mode"] or DASH,
        DASH if run["steps"] is None else str(run["steps"]),
        DASH if best is None else _metric(best["name"], best["value"]),
        ", ".join(_metric(name, value) for name, value in run["validation"].items()) or DASH,
        format_number(run["samples_per_second"]),
    )

"""Lists the runs of a folder: ``paramserver runs [FOLDER]``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paramserver.errors import UnsupportedConfiguration
from paramserver.launch import CommandParser, run_command
from paramserver.process_utils import print_output
from paramserver.runs.rundir import RunDir, newest_first
from paramserver.tools.report.formatting import DASH, format_number
from paramserver.tools.report.from_runs import Run, plain_name, read_run

_TITLES = ("run", "status", "mode", "steps", "best validation", "last validation", "samples/s")
_NUMBERS = ("steps", "samples/s")


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver runs",
        description="List the runs of a folder, the newest first: how each ended, or that it is running, its mode, "
        "steps, validation and speed. The best validation is that of checkpoint.best, or the lowest loss.",
        epilog="Exit codes: 0 done, 2 the input is wrong.",
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"), metavar="FOLDER", help="default: runs")
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)

    def runs() -> None:
        found = runs_in(arguments.folder)
        print_output(json.dumps(found, indent=2) if arguments.json else _table(found))

    return run_command(runs)


def runs_in(folder: Path) -> list[dict[str, Any]]:
    """Describe the runs in ``folder``, or the run that it is, the newest first; a damaged one by its ``error``.

    Raises:
        UnsupportedConfiguration: there is no such folder.
    """
    if not folder.is_dir():
        raise UnsupportedConfiguration(f"{folder} must be a folder of runs, and is none; give a logging.run_dir")
    runs = [run for run in (RunDir(folder), *newest_first(folder)) if run.environment_file.is_file()]
    return [_describe_or_error(run) for run in runs]


def _describe_or_error(folder: RunDir) -> dict[str, Any]:
    try:
        return _describe(folder, read_run(folder.path))
    except UnsupportedConfiguration as error:  # of this run: the others are listed too
        unknown = dict.fromkeys(("mode", "task", "started", "steps", "best", "samples_per_second"))
        return {"path": str(folder.path), "status": "damaged", **unknown, "validation": {}, "error": str(error)}


def _describe(folder: RunDir, run: Run) -> dict[str, Any]:
    """A run that is in progress is described by its newest records."""
    running = folder.is_in_use()
    summary = {} if running else run.summary
    last = run.of_kind("train")[-1:] or [{}]
    validations = run.curves["validation"]
    return {
        "path": str(folder.path),
        "status": "running" if running else summary.get("status", "killed"),
        "mode": plain_name(run),
        "task": run.config.get("task"),
        "started": run.environment.get("started"),
        "steps": summary.get("steps", last[0].get("step")),
        "best": run.best,
        "validation": summary.get("validation", validations[-1][2] if validations else {}),
        "samples_per_second": summary.get("samples_per_second", last[0].get("samples_per_second")),
    }


def _table(runs: Sequence[Mapping[str, Any]]) -> str:
    if not runs:
        return "no run was found"
    rows = [_TITLES, *map(_row, runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    sides = [">" if title in _NUMBERS else "<" for title in _TITLES]
    lines = ["  ".join(f"{text:{s}{w}}" for text, s, w in zip(row, sides, widths, strict=True)) for row in rows]
    return "\n".join([*(line.rstrip() for line in lines), *(run["error"] for run in runs if "error" in run)])


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    best = run["best"]
    return (
        run["path"],
        run["status"],
        run["mode"] or DASH,
        DASH if run["steps"] is None else str(run["steps"]),
        DASH if best is None else f"{best['name']} {format_number(best['value'], 4)}",
        ", ".join(f"{name} {format_number(value, 4)}" for name, value in run["validation"].items()) or DASH,
        format_number(run["samples_per_second"]),
    )

"""The command line that reports finished runs and benchmarks: ``paramserver report RUN_DIR...``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from paramserver.launch import CommandParser, run_command
from paramserver.process_utils import print_output
from paramserver.tools.report.cases import cases_of
from paramserver.tools.report.findings import findings
from paramserver.tools.report.from_runs import results_at
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

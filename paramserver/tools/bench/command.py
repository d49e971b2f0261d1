"""The command line that compares modes and configs of one task: ``paramserver benchmark``."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from paramserver.cluster import child_environment, process_environ
from paramserver.config import num_commands_of
from paramserver.errors import Interrupted, TrainingError, UnsupportedConfiguration
from paramserver.fileio import explain_not_writable
from paramserver.importing import code_folders
from paramserver.launch import CommandParser, add_overrides, run_command
from paramserver.platform import num_usable_cores
from paramserver.process_utils import collecting_signals, print_output, stop_signals
from paramserver.runs.rundir import environment_record
from paramserver.tools.bench.cases import (
    Case,
    RequestedCases,
    add_case_flags,
    interleaved,
    make_cases,
    parse_positive,
    target_for,
)
from paramserver.tools.bench.link_probe import GLOO, RPC, LinkSpeed, measure_links
from paramserver.tools.bench.measure import MeasuringMethod, measure
from paramserver.tools.bench.processes import NetworkHosts, parse_bandwidth, require_network_namespaces
from paramserver.tools.bench.slowdown import parse_slowdown
from paramserver.tools.report.cases import cases_of
from paramserver.tools.report.findings import compare, findings
from paramserver.tools.report.page import CHOOSE_OUT, NO_PLOTS, write_report
from paramserver.tools.report.plots import has_matplotlib
from paramserver.tools.report.results import RESULTS_FILE, CaseResult, Results, append_result, read_results

# The time around the training of a run, before one was measured: imports, rendezvous, the end.
START_S = 6.0


class BenchmarkProgress:
    """Prints a line for each finished run, in the order of ``runs``, with an estimate of the remaining time."""

    def __init__(self, stream: TextIO, runs: Sequence[Case], training_s: float) -> None:
        self._stream = stream
        self._runs = [case.name for case in runs]
        self._guess_s = training_s + START_S
        self._took_s: dict[str, list[float]] = {}
        self._done = 0

    def start(self) -> None:
        cases = len(set(self._runs))
        self.print_line(f"{len(self._runs)} runs of {cases} cases, about {duration_text(self.remaining_s())}")

    def run_finished(self, result: CaseResult) -> None:
        self._done += 1
        self._took_s.setdefault(result.case, []).append(result.wall_s or 0.0)
        rate = result.samples_per_second
        what = f"failed: {result.error}" if rate is None else f"{rate:.0f} samples/s"
        left = "" if self._done == len(self._runs) else f"; about {duration_text(self.remaining_s())} left"
        self.print_line(f"{self._done}/{len(self._runs)} {result.case}, repeat {result.repeat + 1}: {what}{left}")

    def remaining_s(self) -> float:
        return remaining_s(self._runs[self._done :], self._took_s, self._guess_s)

    def print_line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def remaining_s(names: Sequence[str], took_s: Mapping[str, Sequence[float]], guess_s: float) -> float:
    """The expected duration of the remaining runs: the mean of earlier runs of their case, or else of all runs."""
    every = [seconds for taken in took_s.values() for seconds in taken]
    usual_s = statistics.fmean(every) if every else guess_s
    # Means and not medians: the total is a sum of all runs, slow ones included.
    return sum(statistics.fmean(took_s[name]) if name in took_s else usual_s for name in names)


def duration_text(seconds: float) -> str:
    """A duration as 0:02:05, rounded to seconds."""
    return str(timedelta(seconds=round(seconds)))


WARM_S = 1.0
_TITLE = "Benchmark"


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver benchmark",
        description="Train the task of a config in several ways, in turns, and report how fast each was. A single "
        "process and the trainers' loops without communication are measured as baselines.",
        epilog="paramserver benchmark compare A B compares two results; paramserver benchmark predict RESULTS "
        "simulates other numbers of trainers and servers. Exit codes: 0 done, 1 a case failed (the report lists which "
        "and why), 2 the input is wrong, 3 interrupted (the report holds what was finished).",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", required=True, help="the YAML file of the runs")
    add_case_flags(parser, "cluster.num_trainers")
    add_overrides(parser)
    parser.add_argument("--repeats", default="3", metavar="N", help="runs of each case (default: 3)")
    parser.add_argument("--seconds", default="5", metavar="S", help="measured seconds of training (default: 5)")
    parser.add_argument(
        "--warm_up", default=f"{WARM_S:g}", metavar="S", help="seconds of training before that (default: 1)"
    )
    parser.add_argument(
        "--target", metavar="NAME=VALUE", help="measure the time to this validation value, such as accuracy=0.95"
    )
    parser.add_argument(
        "--bandwidth",
        metavar="RATE",
        help="give each rank a network interface of its own with this rate, such as 100mbit (needs root)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: <logging.run_dir>/benchmark-<time>")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["compare"]:
        return run_command(lambda: _compare(words[1:]))
    if words[:1] == ["predict"]:
        from paramserver.tools.bench.prediction import predict  # needs torch, as it runs the server's classes

        return run_command(lambda: predict(words[1:]))
    return run_command(lambda: _benchmark(make_parser().parse_args(words), words))


def _benchmark(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    cases, repeats, method = prepare(arguments, words)
    runs = list(interleaved(cases, repeats))
    progress = BenchmarkProgress(sys.stderr, [case for _, case in runs], method.warm_s + method.seconds)
    results: list[CaseResult] = []
    notes: list[str] = []
    # Handlers first and restored last: a Ctrl-C while hosts are made or removed must not leave half of them.
    with collecting_signals(stop_signals(), method.stop.set), method.hosts or contextlib.nullcontext():
        try:
            # Before the first run, on the same hosts: predictions must be of the network that the cases use.
            method = replace(method, speeds=_speeds(cases, method, progress))
            progress.start()
            for repeat, case in runs:
                result = measure(case, repeat, method)
                append_result(method.out / RESULTS_FILE, result)  # an interrupt keeps all finished runs
                results.append(result)
                progress.run_finished(result)
        except Interrupted:
            notes.append(f"It was interrupted: {len(results)} of {len(runs)} runs were finished.")
            progress.print_line(notes[0])
    with contextlib.suppress(OSError):  # it holds the files of cases that failed
        (method.out / "runs").rmdir()
    if not results:
        with contextlib.suppress(OSError):
            method.out.rmdir()
        raise Interrupted("interrupted before a run was finished; there is nothing to report")
    _report(Results(str(method.out / RESULTS_FILE), tuple(results), tuple(notes)), method.out)
    if notes:
        return Interrupted.exit_code
    # A failed case does not end the benchmark, so the exit code reports it.
    return int(any(not result.is_completed for result in results))


def prepare(arguments: argparse.Namespace, words: Sequence[str]) -> tuple[list[Case], int, MeasuringMethod]:
    """The cases, the number of repeats, and the settings of the measurement.

    ``words`` are the unparsed arguments, for the records.

    Raises:
        UnsupportedConfiguration: an argument is invalid.
    """
    slow = None if arguments.slow is None else parse_slowdown(arguments.slow)
    requested = RequestedCases(
        arguments.config, arguments.modes, arguments.trainers, arguments.overrides, arguments.sweep, slow
    )
    seconds, warm_s = _above_zero("--seconds", arguments.seconds), _above_zero("--warm_up", arguments.warm_up)
    repeats = parse_positive(arguments.repeats, "--repeats")
    cases = make_cases(requested)
    base = cases[0].config
    target = None if arguments.target is None else target_for(arguments.target, base)
    hosts = None if arguments.bandwidth is None else _hosts(arguments.bandwidth, cases)
    network = {} if hosts is None else {"network": f"an interface for each rank, {arguments.bandwidth} each way"}
    folders = code_folders(arguments.config, arguments.overrides)
    # The same number of threads in all cases, also in those with fewer trainers, or they would not be comparable.
    threads = _threads(max(case.trainers for case in cases))
    environ = child_environment(process_environ(), num_trainers=1, folders=folders)
    method = MeasuringMethod(
        # Made after every other check: an argument that is refused must not leave an empty folder.
        out=_new_folder(arguments.out or Path(base.logging.run_dir) / time.strftime("benchmark-%Y%m%d-%H%M%S")),
        folders=folders,
        environ={**environ, "OMP_NUM_THREADS": threads},
        seconds=seconds,
        warm_s=warm_s,
        target=target,
        hosts=hosts,
        environment={**_environment(words, threads), **network},
    )
    return cases, repeats, method


def _above_zero(flag: str, word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = float("nan")
    if not 0 < number < float("inf"):
        raise UnsupportedConfiguration(f"{flag} ({word}) must be a number above 0; correct it")
    return number


def _hosts(bandwidth: str, cases: Sequence[Case]) -> NetworkHosts:
    """Hosts for the largest case, and at least two for the probe of the links; they are made later, on entry."""
    rate = parse_bandwidth(bandwidth)
    require_network_namespaces()
    return NetworkHosts(max(2, *(num_commands_of(case.config) for case in cases)), rate)


def _threads(most_trainers: int) -> str:
    """The user's OMP_NUM_THREADS, or else a number that is the same in all cases, so that trainers compute alike."""
    shared = max(1, num_usable_cores() // most_trainers)
    return process_environ().get("OMP_NUM_THREADS", str(shared))


def _new_folder(out: Path) -> Path:
    with explain_not_writable(str(out), CHOOSE_OUT):
        out.mkdir(parents=True, exist_ok=True)
        taken = any(out.iterdir())
    if taken:
        raise UnsupportedConfiguration(f"--out {out} must be a new or an empty folder, and holds files; name another")
    return out


def _environment(words: Sequence[str], threads: str) -> dict[str, Any]:
    about = environment_record([])
    kept = ("versions", "host", "platform")
    return {
        **{name: about[name] for name in kept},
        "cores": num_usable_cores(),
        "threads": int(threads) if threads.isdecimal() else threads,
        "commit": about["git_commit"],
        "command": shlex.join(["paramserver", "benchmark", *words]),
    }


def _speeds(cases: Sequence[Case], method: MeasuringMethod, progress: BenchmarkProgress) -> Mapping[str, LinkSpeed]:
    """The speed of the link of each mode; empty, and then reports have no predictions, where it cannot be measured."""
    modes = {case.mode.name: case.mode for case in cases if not case.mode.single_process}
    folder = method.out / "links"
    try:
        found = measure_links(folder, method.environ, cases[0].config.device.kind, method.hosts) if modes else {}
    except TrainingError as error:
        progress.print_line(f"the links between processes were not measured, so nothing is predicted: {error}")
        return {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    links = {name: GLOO if mode.has_process_group else RPC for name, mode in modes.items()}
    return {name: found[link] for name, link in links.items() if link in found}


def _report(results: Results, out: Path) -> None:
    pages = write_report(results, out, _TITLE)
    if not has_matplotlib():
        print(NO_PLOTS, file=sys.stderr)
    print_output("\n".join([*findings(cases_of(results.results)), *(f"written: {page}" for page in pages)]))


def make_compare_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="paramserver benchmark compare",
        description="Print how each figure of each case changed from A to B, with its spread.",
        epilog="Exit codes: 0 done, 1 a throughput of B is below the limit or missing, 2 the input is wrong.",
    )
    parser.add_argument("before", type=Path, metavar="A", help="a results.jsonl, or the folder that holds it")
    parser.add_argument("after", type=Path, metavar="B", help="the same, to be compared with A")
    parser.add_argument("--fail_below", metavar="RATIO", help="the least throughput of B, in times that of A")
    return parser


def _compare(words: Sequence[str]) -> int:
    arguments = make_compare_parser().parse_args(words)
    limit = None if arguments.fail_below is None else _above_zero("--fail_below", arguments.fail_below)
    found = compare(read_results(arguments.before), read_results(arguments.after))
    print_output(found.text())
    reasons = [] if limit is None else found.regressions(limit)
    for reason in reasons:
        print(f"error: {reason}", file=sys.stderr)
    return int(bool(reasons))

"""Steps over a network of limited bandwidth: parameter servers against all-reduce, and both against a bound.

    python -m tests.measure.network [--bandwidth 1gbit] [--trainers 2] [--servers 2] [--seconds 5] [--repeats 3]
                                    [--model mlp] [--optimizer sgd] [--config FILE] [--set key=value ...]
                                    [--sweep cluster.colocate=false,true]

Needs root. Each rank runs in its own network namespace; with ``cluster.colocate`` each server runs in that of a
trainer, so that n hosts are enough.

The cases run in turns. A line per case has the time of a step, and the part of it that is communication (the step
without that of the same trainers without an exchange) as a multiple of ``max(M/B, nM/(kB))``, or for all-reduce and as
many co-located servers of ``2(n-1)M/(nB)``. Of the task of another ``--config`` there is no bound.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import yaml

from paramserver.config import is_colocated, mode_of, num_commands_of
from paramserver.tools.bench.cases import NO_COMMUNICATION, Case, RequestedCases, make_cases
from paramserver.tools.bench.link_probe import communication_s
from paramserver.tools.bench.measure import measure
from paramserver.tools.bench.processes import NetworkHosts, parse_bandwidth
from paramserver.tools.report.results import CaseResult
from tests.measure.common import MODELS, OPTIMIZERS, origin, parser_of, spread
from tests.measure.outside_clock import ROOT, method_of


def cases_of(folder: Path, arguments: argparse.Namespace) -> list[Case]:
    config = {
        "task": f"{Path(__file__).parent / 'common.py'}:Measured",
        "task_args": {"model": arguments.model, "optimizer": arguments.optimizer},
        "cluster": {"num_trainers": arguments.trainers, "num_servers": arguments.servers},
        "training": {"batch_size": 32, "validate_every": 0},
    }
    file = arguments.config or folder / "config.yaml"
    if arguments.config is None:
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
    cases = make_cases(RequestedCases(file, modes="ddp,rpc", overrides=arguments.set, sweeps=arguments.sweep))
    return [case for case in cases if case.baseline in (None, NO_COMMUNICATION)]


def print_case(name: str, results: list[CaseResult], alone_ms: float, size: int, arguments: argparse.Namespace) -> None:
    steps = [result.step_ms["mean"] or 0.0 for result in results]
    line = f"{name}: step {spread(steps, '.1f')} ms"
    case = results[0]
    if case.baseline is None and arguments.config is None:
        config = next(one.config for one in arguments.cases if one.name == name)
        counts = case.trainers, case.servers, parse_bandwidth(arguments.bandwidth)
        bound_ms = 1e3 * communication_s(mode_of(config), size, *counts, 0.0, True, is_colocated(config))
        ratio = (statistics.median(steps) - alone_ms) / bound_ms
        line += f", communication {ratio:.2f} times the bound of {bound_ms:.1f} ms"
    print(f"{line}; CPU of a step {1e3 * cpu_of_step(results[-1]):.0f} ms; phases {phases(results[-1])}")


def cpu_of_step(result: CaseResult) -> float:
    return sum(value or 0.0 for value in result.cpu_s.values()) / max(result.steps or 0, 1)


def phases(result: CaseResult) -> str:
    return " ".join(f"{name} {value:.1f}" for name, value in result.phases_ms.items() if value)


def main() -> None:
    parser = parser_of(__doc__, trainers=2, servers=2, seconds=5.0, repeats=3)
    parser.add_argument("--bandwidth", default="1gbit")
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--config", type=Path, help="of the task, in place of --model and --optimizer")
    parser.add_argument("--modes", nargs="+", default=["no communication", "ddp", "rpc"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=VALUE,VALUE")
    arguments = parser.parse_args()
    print(origin())
    found: dict[str, list[CaseResult]] = {}
    with tempfile.TemporaryDirectory() as name:
        cases = arguments.cases = [
            case for case in cases_of(Path(name), arguments) if (case.baseline or case.mode.name) in arguments.modes
        ]
        for repeat in range(arguments.repeats):
            for case in cases:
                count = max(2, num_commands_of(case.config))
                with NetworkHosts(count, parse_bandwidth(arguments.bandwidth)) as hosts:
                    folders = [ROOT] if arguments.config is None else [arguments.config.resolve().parent, ROOT]
                    method = replace(method_of(Path(name) / "out", arguments.seconds, 1.0, folders), hosts=hosts)
                    result = measure(case, repeat, method)
                if not result.is_completed:
                    raise RuntimeError(result.error)
                found.setdefault(case.name, []).append(result)
                print(
                    f"  {repeat + 1}/{arguments.repeats} {case.name}: {result.step_ms['mean']:.1f} ms", file=sys.stderr
                )
    size = sum(parameter.nbytes for parameter in MODELS[arguments.model]().parameters())
    alone = [result.step_ms["mean"] or 0.0 for of in found.values() for result in of if result.baseline is not None]
    for case_name, results in found.items():
        print_case(case_name, results, statistics.median(alone) if alone else 0.0, size, arguments)
    ddp = next((of for of in found.values() if of[0].mode == "ddp"), [])
    for case_name, results in found.items():
        if ddp and results[0].mode == "rpc":
            pairs = zip(ddp, results, strict=True)
            ratios = [(one.step_ms["mean"] or 0.0) / (other.step_ms["mean"] or 1.0) for one, other in pairs]
            print(f"{case_name} against ddp, steps per second: {spread(ratios)}")


if __name__ == "__main__":
    main()

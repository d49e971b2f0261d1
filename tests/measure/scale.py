"""The simulator against runs: throughput with 3 to 8 trainers, predicted from runs with 2.

    python -m tests.measure.scale --results FILE [--repeats 2] [--seconds 12] [--for_s 110] [--only TEXT] [--judge]
    python -m tests.measure.scale --curves

Needs root: each rank runs in its own network namespace, with an interface of a limited bandwidth. A batch is a sleep of
``COMPUTE_S``, so that two cores carry 12 processes. The cases of ``FITTED`` have two trainers; the simulator's costs
are fitted on them. Those of ``JUDGED`` and ``HELD_OUT`` have 3 to 8 trainers, 1 to 4 servers, stragglers and each
consistency; the error of each prediction is printed, and the median and the largest of both lists. While the model was
made, the errors of ``JUDGED`` were known; the cases of ``HELD_OUT`` were measured after it was finished.

Every run is a line of FILE, and predictions are held against the mean of a case's runs. Cases that are in it
``--repeats`` times are not run again, and none is begun ``--for_s`` seconds after the start, so the measurement can be
made in several parts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paramserver import Task
from paramserver.config import MODES, ClusterConfig, Config, ServerConfig, config_from_mapping, num_commands_of
from paramserver.tools.bench.cases import Case
from paramserver.tools.bench.link_probe import LinkSpeed
from paramserver.tools.bench.measure import measure
from paramserver.tools.bench.prediction import JITTER, all_reduce, break_even_servers, deployment_of, error_of, fit
from paramserver.tools.bench.processes import NetworkHosts, parse_bandwidth
from paramserver.tools.bench.simulation import Deployment, simulate
from paramserver.tools.bench.slowdown import SlowdownSpec
from paramserver.tools.report.results import CaseResult, append_result, read_results
from tests.measure.common import origin, parser_of, verdict
from tests.measure.outside_clock import method_of

Results = defaultdict[str, list[CaseResult]]

COMPUTE_S = 0.2
BATCH = 4
SAMPLES = 4096
WIDTH, LAYERS = 256, 2
LATENCY_S = 1e-4
MEDIAN, WORST = 0.10, 0.25


class Sleeps(Task):
    """A model of 512 KiB whose step takes ``COMPUTE_S`` without a core."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    def train_source(self, partition: Any) -> TensorDataset:
        return TensorDataset(torch.zeros(SAMPLES, 1))

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(COMPUTE_S)
        return sum((parameter.square().mean() for parameter in model.parameters()), torch.zeros(()))


@dataclass(frozen=True)
class Planned:
    """A case: numbers of trainers and servers, what differs from ``sync``, the straggler, and the bandwidth."""

    trainers: int
    servers: int
    server: dict[str, Any] = field(default_factory=dict)
    slow: SlowdownSpec | None = None
    bandwidth: str = "50mbit"

    @property
    def name(self) -> str:
        about = ", ".join(f"{name}={value}" for name, value in self.server.items()) or "consistency=sync"
        slow = "" if self.slow is None else f", {self.slow}"
        return f"{self.trainers} trainers, {self.servers} servers, {self.bandwidth}, {about}{slow}"

    def case(self) -> Case:
        config = {
            "mode": "rpc",
            "task": f"{Path(__file__).resolve()}:Sleeps",
            "cluster": {"num_trainers": self.trainers, "num_servers": self.servers},
            "server": {"transport": "rpc", **self.server},
            "training": {"batch_size": BATCH, "validate_every": 0, "max_epochs": 1_000_000},
        }
        return Case(self.name, config_from_mapping(config), self.trainers, slow=self.slow)


ASYNC, BOUNDED, BACKUP = (
    {"consistency": "async"},
    {"consistency": "bounded", "staleness_bound": 2},
    {"backup_trainers": 1},
)
FITTED = [
    Planned(2, 1),
    Planned(2, 2),
    Planned(2, 1, ASYNC),
    Planned(2, 2, ASYNC),
    Planned(2, 1, bandwidth="200mbit"),
]
JUDGED = [
    Planned(3, 1),
    Planned(4, 2),
    Planned(8, 1),
    Planned(8, 2),
    Planned(8, 4),
    Planned(4, 1, bandwidth="200mbit"),
    Planned(4, 1, ASYNC),
    Planned(6, 4, ASYNC),
    Planned(8, 2, ASYNC),
    Planned(3, 1, BOUNDED),
    Planned(6, 2, BOUNDED),
    Planned(4, 1, BACKUP),
    Planned(8, 2, BACKUP),
    Planned(4, 2, slow=SlowdownSpec(1, 3.0)),
    Planned(4, 2, ASYNC, SlowdownSpec(1, 5.0)),
    Planned(4, 2, BOUNDED, SlowdownSpec(1, 3.0)),
    Planned(4, 1, BACKUP, SlowdownSpec(1, 5.0)),
    Planned(6, 3, slow=SlowdownSpec(2, 4.0, 0.3)),
    Planned(5, 2),
    Planned(7, 3),
    Planned(6, 2, bandwidth="100mbit"),
    Planned(5, 1, ASYNC),
    Planned(7, 2, ASYNC),
    Planned(8, 4, ASYNC),
    Planned(8, 3, ASYNC, bandwidth="100mbit"),
    Planned(5, 3, BOUNDED),
    Planned(7, 2, BOUNDED),
    Planned(6, 2, BACKUP),
    Planned(5, 2, BOUNDED, SlowdownSpec(2, 4.0)),
    Planned(6, 2, ASYNC, SlowdownSpec(0, 3.0)),
]
HELD_OUT = [
    Planned(6, 1),
    Planned(5, 4),
    Planned(7, 2, bandwidth="100mbit"),
    Planned(3, 2, ASYNC),
    Planned(6, 1, ASYNC),
    Planned(7, 3, ASYNC),
    Planned(4, 2, BOUNDED),
    Planned(8, 3, BOUNDED),
    Planned(6, 3, BOUNDED, bandwidth="100mbit"),
    Planned(7, 2, BACKUP),
    Planned(6, 2, slow=SlowdownSpec(1, 3.0)),
    Planned(5, 2, ASYNC, SlowdownSpec(0, 4.0)),
]


def run_missing(planned: list[Planned], known: Results, arguments: argparse.Namespace) -> None:
    began = time.monotonic()
    for repeat, one in product(range(arguments.repeats), planned):
        if repeat < len(known[one.name]) or time.monotonic() - began > arguments.for_s:
            continue
        case, rate = one.case(), parse_bandwidth(one.bandwidth)
        with tempfile.TemporaryDirectory() as folder, NetworkHosts(num_commands_of(case.config), rate) as hosts:
            method = replace(method_of(Path(folder), arguments.seconds, 1.0), hosts=hosts)
            result = measure(case, repeat, method)
            if not result.is_completed:
                raise RuntimeError(result.error)
        append_result(arguments.results, result)
        print(f"{one.name}: {result.samples_per_second:.1f} samples/s, {result.wall_s:.0f} s", file=sys.stderr)


def read_runs(file: Path) -> Results:
    runs = defaultdict(list)
    for one in read_results(file).results if file.exists() else ():
        runs[one.case].append(one)
    return runs


def judge(results: Results) -> None:
    def deployed(one: Planned) -> tuple[Any, float]:
        runs = results[one.name]
        link = LinkSpeed(parse_bandwidth(one.bandwidth), LATENCY_S)
        rate = statistics.mean(run.samples_per_second for run in runs if run.samples_per_second is not None)
        return deployment_of(runs[0], link, len(os.sched_getaffinity(0))), rate

    fitted = [deployed(one) for one in FITTED]
    costs = fit(fitted)
    print(f"fitted: {costs}")
    forward_s = statistics.mean(deployment.forward_s for deployment, _ in fitted)
    backward_s = statistics.mean(deployment.backward_s for deployment, _ in fitted)
    for kind, planned in (("fitted", FITTED), ("judged", JUDGED), ("held out", HELD_OUT)):
        cases = [one for one in planned if results[one.name]]
        print(f"{kind}: samples/s measured (of each run), predicted, error")
        errors = []
        for one in cases:
            deployment, rate = deployed(one)
            deployment = replace(deployment, costs=costs, forward_s=forward_s, backward_s=backward_s)
            error = error_of(deployment, rate, 30, 10)
            each = ", ".join(f"{run.samples_per_second:.1f}" for run in results[one.name])
            print(f"  {one.name}: {rate:.1f} ({each}) {rate * (1 + error):.1f} {error:+.1%}")
            errors.append(abs(error))
        if kind == "fitted" or not errors:
            continue
        median, worst = statistics.median(errors), max(errors)
        print(f"{len(errors)} of {len(planned)} cases: error {median:.1%} in the median, {worst:.1%} at most; ", end="")
        print(f"at most {MEDIAN:.0%} and {WORST:.0%}: {verdict(median <= MEDIAN and worst <= WORST)}")


# What cannot be measured here.


def simulated(trainers: int, servers: int, consistency: str = "sync", **changes: Any) -> Deployment:
    """A model of 25 MB on hosts with 8 cores and 10 Gbit/s; a step computes for 100 ms, give or take 5 %."""
    config = Config(
        cluster=ClusterConfig(num_trainers=trainers, num_servers=servers),
        server=ServerConfig(consistency=consistency, bucket_mb=4),
    )
    return Deployment(config, 25e6, 0.1, LinkSpeed(1.25e9, 5e-5), jitter=JITTER, **changes)


def print_curves() -> None:
    print("SIMULATED, not measured: a model of 25 MB, 100 ms of compute, hosts with 8 cores and 10 Gbit/s")
    print("ms a step of a trainer, and steps of all per second")
    for trainers in (8, 64, 256, 1000):
        for servers in (1, 8) if trainers == 1000 else (1, 8, 32):
            for consistency in ("sync", "async"):
                found = simulate(simulated(trainers, servers, consistency), 3, 2)
                rate = found.samples_per_second
                print(f"  {trainers} trainers, {servers} servers, {consistency}: {found.step_s * 1e3:.0f} {rate:.0f}")
    print("servers with which a step of sync lasts no longer than one of all-reduce")
    for trainers in (4, 8, 16):
        limit_s = all_reduce(MODES["ddp"], simulated(trainers, 1)).step_s
        print(f"  {trainers} trainers: {break_even_servers(simulated(trainers, 1), limit_s)}, {limit_s * 1e3:.0f} ms")
    print("throughput kept by 64 trainers and 8 servers, of which each trainer fails every F seconds for 10 s")
    for consistency in ("sync", "async"):
        calm = simulate(simulated(64, 8, consistency), 30, 5).samples_per_second
        for every_s in (1_000.0, 4_000.0, 16_000.0):
            failing = simulated(64, 8, consistency, failure_every_s=every_s, restart_s=10.0)
            found = simulate(failing, warm=5, seconds=every_s / 16)
            kept = found.samples_per_second / calm
            print(f"  {consistency}, F = {every_s:.0f}: {kept:.3f}, {found.failures} failures")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--results", type=Path, metavar="FILE")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each case")
    parser.add_argument("--seconds", type=float, default=12.0, help="of training that are measured")
    parser.add_argument("--for_s", type=float, default=1e9, help="no case is begun later than this")
    parser.add_argument("--only", default="", help="measure only cases whose name contains this")
    parser.add_argument("--judge", action="store_true", help="measure nothing")
    parser.add_argument("--curves", action="store_true", help="only simulate what is larger than this machine")
    arguments = parser.parse_args()
    print(origin())
    if arguments.curves:
        print_curves()
        return
    if arguments.results is None:
        parser.error("--results FILE is missing")
    known = read_runs(arguments.results)
    if not arguments.judge:
        run_missing([one for one in FITTED + JUDGED + HELD_OUT if arguments.only in one.name], known, arguments)
        known = read_runs(arguments.results)
    if all(known[one.name] for one in FITTED):
        judge(known)


if __name__ == "__main__":
    main()

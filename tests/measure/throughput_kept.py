"""The share of the throughput that a run keeps when a trainer dies every now and then.

    python -m tests.measure.throughput_kept [--minutes 30] [--every 29] [--trainers 8] [--spares 1] [--seed 0]

One run of one server and several trainers in ``sync``. Windows without faults, of ``CALM_S``, stand between windows in
which a random trainer is killed (SIGKILL) every ``--every`` seconds, ``FAULTS_OF_A_WINDOW`` times. Printed are the
applied samples per second without faults, the ratio of both window by window, and beside it the prediction
1 - (r/n + p)/F: every F seconds one of n trainers is missing for r seconds, and all others stop for p seconds.

The task sleeps for its compute, so that two cores carry the processes: the figure is about the protocol, not the cores.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paramserver import Task
from tests.measure.common import origin, parser_of, spread, verdict
from tests.measure.recovery import Watch, start_run

COMPUTE_S = 0.2
BATCH = 4
SAMPLES = 4096
CALM_S = 60.0
FAULTS_OF_A_WINDOW = 6
AIM = 0.977


class Sleeps(Task):
    """A small model whose step takes ``COMPUTE_S`` without a core."""

    def build_model(self) -> nn.Module:
        return nn.Linear(16, 1)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    def train_source(self, partition: Any) -> TensorDataset:
        return TensorDataset(torch.randn(SAMPLES, 16))

    def training_step(self, model: nn.Module, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        time.sleep(COMPUTE_S)
        return model(batch[0]).square().mean()


@dataclass(frozen=True)
class Window:
    """Part of a run: when it began and ended (``time.time()``), and the ranks that were killed in it, and when."""

    began: float
    ended: float
    kills: tuple[tuple[float, int], ...] = ()


class Applied:
    """The updates of a run, from its records."""

    def __init__(self, run: Path) -> None:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        self.updates = [(r["time"], r["samples"]) for r in records if r["kind"] == "train"]
        self.first_steps = [(r["time"], r["rank"]) for r in records if r["kind"] == "phase"]

    def per_second(self, window: Window) -> float:
        inside = [(at, samples) for at, samples in self.updates if window.began <= at <= window.ended]
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])

    def longest_pause(self, since: float, until: float) -> float:
        """The longest time between two updates, beyond that of a usual step."""
        times = [at for at, _ in self.updates]
        usual = statistics.median(b - a for a, b in pairwise(times))
        inside = [since, *(at for at in times if since < at < until)]
        return max(b - a for a, b in pairwise(inside)) - usual

    def missing(self, at: float, rank: int) -> float:
        """How long a trainer that was killed ``at`` was missing: until the first step of its replacement."""
        return next(time for time, which in self.first_steps if which == rank and time > at) - at


def make_windows(watch: Watch, arguments: argparse.Namespace) -> list[Window]:
    """Kill trainers, window by window, until the faulty windows add up to the minutes that were asked for."""
    draw, windows, faulty_s = random.Random(arguments.seed), [], 0.0
    while True:
        began = time.time()
        time.sleep(CALM_S)
        windows.append(Window(began, time.time()))
        if faulty_s >= arguments.minutes * 60:
            return windows
        began, kills = time.time(), []
        for number in range(1, FAULTS_OF_A_WINDOW + 1):
            rank = 1 + draw.randrange(arguments.trainers)
            kills.append((time.time(), rank))
            watch.kill(rank)
            time.sleep(max(began + number * arguments.every - time.time(), 0.0))
        windows.append(Window(began, time.time(), tuple(kills)))
        faulty_s += windows[-1].ended - began
        print(f"  {faulty_s / 60:.0f} of {arguments.minutes:g} minutes with faults", file=sys.stderr)


def report(windows: list[Window], applied: Applied, arguments: argparse.Namespace) -> float:
    ratios, pauses, missing = [], [], []
    for before, faulty, after in zip(windows[::2], windows[1::2], windows[2::2], strict=False):
        calm = (applied.per_second(before) + applied.per_second(after)) / 2
        ratios.append(applied.per_second(faulty) / calm)
        for at, rank in faulty.kills:
            pauses.append(applied.longest_pause(at, at + arguments.every))
            missing.append(applied.missing(at, rank))
    faults, n = len(pauses), arguments.trainers
    predicted = 1 - (statistics.mean(missing) / n + statistics.mean(pauses)) / arguments.every
    kept = statistics.mean(ratios)
    rates = [applied.per_second(window) for window in windows[::2]]
    print(f"{n} trainers, a SIGKILL every {arguments.every:g} s, {faults} of them, sync, {arguments.spares} spares")
    print(f"  without faults      {spread(rates, '.1f')} samples/s, a step computes for {COMPUTE_S:g} s")
    print(f"  a trainer is missing {spread(missing)} s, all others stop for {spread(pauses)} s")
    print(f"  throughput kept     {spread(ratios, '.3f')}, mean {kept:.4f}; predicted {predicted:.4f}", end="")
    print(f"; at least {AIM:g}: {verdict(kept >= AIM)}")
    return kept


def main() -> None:
    parser = parser_of(__doc__, trainers=8, spares=1)
    parser.add_argument("--minutes", type=float, default=30.0, help="with faults; those without come in addition")
    parser.add_argument("--every", type=float, default=29.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=0, help="of the ranks that are killed")
    arguments = parser.parse_args()
    config = {
        "task": f"{Path(__file__).resolve()}:Sleeps",
        "mode": "rpc",
        "cluster": {"num_trainers": arguments.trainers, "spares": arguments.spares, "max_restarts": 10_000},
        "training": {"max_seconds": 1e6, "batch_size": BATCH, "uneven_inputs": "join"},
        "checkpoint": {"every": 200},
    }
    with tempfile.TemporaryDirectory() as name, start_run(Path(name), config, arguments.spares) as watch:
        run = Path(name) / "run"
        watch.await_value("a checkpoint", lambda: True if (run / "checkpoints" / "latest").exists() else None)
        windows = make_windows(watch, arguments)
        applied = Applied(run)
    print(origin())
    report(windows, applied, arguments)


if __name__ == "__main__":
    main()

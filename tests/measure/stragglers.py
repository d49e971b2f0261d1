"""The cost of slow trainers: applied samples per second of each consistency, compared with ``ddp``.

    python -m tests.measure.stragglers [--scenarios permanent backup random] [--seconds 20] [--repeats 5] [--base_ms 20]

- ``permanent``: the last of two trainers takes five times as long for each batch. ``ddp`` applies 2 batches in the time
  of 5, ``async`` 6: 3.0 times as many. ``bounded`` lets the fast one run ahead by its bound and then to the beat of
  the slow one: 1.0.
- ``backup``: the last of three trainers is so slow. ``ddp`` applies 3 batches in the time of 5, ``sync`` with one
  backup trainer 2 in the time of 1: 3.33 times as many.
- ``random``: each batch of both trainers is slowed five times with probability 0.2, drawn from (repeat, trainer,
  batch): all cases have the same delays. A batch takes 1.8 times as long on average, the slower of two 2.44 times:
  ``async`` 1.36; ``bounded`` with a bound of 4 smoothes most of it: 1.25.

A batch is a sleep (``--base_ms``) and a step of a small network, which takes about a millisecond: a machine with few
cores could not compute three trainers at once, and the figures would be those of its scheduler. So they measure what
the consistency allows, not the speed of the arithmetic.

A figure is the growth of the applied samples in the ``train`` records over the time between them, from ``--warm``
seconds after the first record on. Checkpoints (but the one after the last step) and validation are off. Each run is a
fresh process; the cases are interleaved, in alternating order.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn

from paramserver.tools.bench.cases import interleaved
from paramserver.tools.bench.slowdown import seeded_chance
from tests.measure.common import (
    Measured,
    loss_of,
    measured_config,
    measuring_environment,
    origin,
    parser_of,
    read_records,
    run_fresh,
    spread,
    verdict,
)

SLOWNESS = 5
PROBABILITY = 0.2
ENDLESS = 10**9
SERVERS: dict[str, dict[str, Any]] = {
    "async": {"consistency": "async"},
    "bounded": {"consistency": "bounded", "staleness_bound": 4},
    "backup": {"consistency": "sync", "backup_trainers": 1},
}


@dataclass(frozen=True)
class Aim:
    """Multiples of the applied samples of ``ddp``: the ideal, and what is required (None: nothing)."""

    ideal: float
    required: float | None


@dataclass(frozen=True)
class Scenario:
    """Who is slow, among how many, and what each case is to reach."""

    trainers: int
    random: bool
    aims: dict[str, Aim]


SCENARIOS = {
    "permanent": Scenario(2, False, {"async": Aim(3.0, 2.5), "bounded": Aim(1.0, None)}),
    "backup": Scenario(3, False, {"backup": Aim(10 / 3, 2.0)}),
    "random": Scenario(2, True, {"async": Aim(1.36, 0.85 * 1.36), "bounded": Aim(1.25, 0.85 * 1.25)}),
}


class Delayed(Measured):
    """A small network whose batches take different times.

    Args:
        base_s: what a batch sleeps.
        slow_trainer: the index of the one that always sleeps ``SLOWNESS`` times as long; None for delays at random.
        seed: of those.
    """

    def __init__(self, base_s: float, slow_trainer: int | None, seed: int) -> None:
        super().__init__("small")
        self.base_s, self.slow_trainer, self.seed = base_s, slow_trainer, seed

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor:
        index = self.trainer.trainer_index
        slow = is_slow(self.seed, index, batch_idx) if self.slow_trainer is None else index == self.slow_trainer
        time.sleep(self.base_s * (SLOWNESS if slow else 1))
        return loss_of(model, batch)


def is_slow(seed: int, trainer_index: int, batch_idx: int) -> bool:
    """Whether chance slows this batch: the same answer in every case and at every time."""
    return seeded_chance(PROBABILITY, seed, trainer_index, batch_idx)


def config_of(case: str, scenario: Scenario, folder: Path, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    slow_trainer = None if scenario.random else scenario.trainers - 1
    task_args = {"base_s": arguments.base_ms / 1e3, "slow_trainer": slow_trainer, "seed": seed}
    config = measured_config("ddp" if case == "ddp" else "rpc", folder, ENDLESS, scenario.trainers, task_args)
    config["training"]["max_seconds"] = arguments.seconds
    config["logging"] |= {"log_every": 1, "tensorboard": False}
    return {**config, "task": "tests.measure.stragglers:Delayed", "server": SERVERS.get(case, {})}


def measure(case: str, scenario: Scenario, seed: int, arguments: argparse.Namespace) -> float:
    """Applied samples per second of one fresh run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(config_of(case, scenario, Path(folder), seed, arguments)), encoding="utf-8")
        run_fresh([["-m", "paramserver.launch", "--config", str(file)]], measuring_environment())
        return rate(read_records(Path(folder) / "run", "train"), arguments.warm)


def rate(records: Sequence[dict[str, Any]], warm_s: float) -> float:
    """Applied samples per second, from the first record at least ``warm_s`` after the very first to the last one.

    Raises:
        RuntimeError: fewer than two records are left.
    """
    kept = [record for record in records if record["time"] >= records[0]["time"] + warm_s]
    if len(kept) < 2:
        raise RuntimeError(f"{len(kept)} of {len(records)} records came after the warm-up; raise --seconds")
    return float((kept[-1]["samples"] - kept[0]["samples"]) / (kept[-1]["time"] - kept[0]["time"]))


def report(scenario: Scenario, rates: dict[str, list[float]]) -> None:
    print(f"  {'':9s}{'samples per second':28s}times ddp")
    for case, taken in rates.items():
        row = f"  {case:9s}{spread(taken, '.0f'):28s}"
        print(row + ("" if case == "ddp" else against_ddp(scenario.aims[case], taken, rates["ddp"])), flush=True)


def against_ddp(aim: Aim, taken: Sequence[float], of_ddp: Sequence[float]) -> str:
    """The ratio repeat by repeat, and whether its median is as required."""
    ratios = [ours / theirs for ours, theirs in zip(taken, of_ddp, strict=True)]
    text = f"{spread(ratios)}, ideal {aim.ideal:.2f}"
    if aim.required is None:
        return text
    return f"{text}, at least {aim.required:.2f}: {verdict(statistics.median(ratios) >= aim.required)}"


def main() -> None:
    parser = parser_of(__doc__, repeats=5)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of training, per run")
    parser.add_argument("--warm", type=float, default=2.0, help="seconds that are left out")
    parser.add_argument("--base_ms", type=float, default=20.0, help="what a batch sleeps")
    arguments = parser.parse_args()
    if arguments.seconds <= arguments.warm:
        parser.error(f"--seconds ({arguments.seconds:g}) must be above --warm ({arguments.warm:g}); raise it")
    print(origin())
    for name in arguments.scenarios:
        scenario = SCENARIOS[name]
        rates: dict[str, list[float]] = {case: [] for case in ("ddp", *scenario.aims)}
        for repeat, case in interleaved(list(rates), arguments.repeats):
            rates[case].append(measure(case, scenario, repeat, arguments))
            print(f"  {repeat + 1}/{arguments.repeats} {name} {case}: {rates[case][-1]:.0f}", file=sys.stderr)
        print(f"\n{name}: {scenario.trainers} trainers, {arguments.base_ms:g} ms a batch, {arguments.repeats} repeats")
        report(scenario, rates)


if __name__ == "__main__":
    main()

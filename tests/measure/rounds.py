"""Rounds of local steps: speed over slow links, bytes, the time with a slow trainer, and a table of losses.

    python -m tests.measure.rounds [link] [bytes] [straggler] [table] [--repeats 2] [--steps N] [--local_steps H ...]
                                   [--bandwidth 10mbit] [--momenta 0 0.9] [--compressions none int8]
                                   [--set training.outer.lr=1 ...]

Without a case, all but ``table`` are measured. There are two trainers with one thread each. On a quiet machine of two
cores a repeat takes: ``link`` 5 minutes, ``bytes`` 2, ``straggler`` 2, ``table`` 20 (5 with ``--steps 256
--local_steps 8 128 --momenta 0 0.9``). ``link`` and ``table`` need root: each rank has a network namespace with an
interface of ``--bandwidth``.

- ``link``: samples per second, relative to the same trainers without communication. A batch is a sleep and a step of a
  network (784, ``--width``, ``--width``, 10), together ``--step_ms``, so that the machine's cores do not decide. In
  ``sync`` and in rounds, a server is on the host of each trainer (``cluster.colocate``), so there are as many hosts as
  in ``ddp``. Rounds send int8 and receive bfloat16; the rows ``float32`` send and receive float32.
- ``bytes``: those of a sample, both directions, and of the pushes alone, against ``sync`` with float32 and an update
  per step; and the loss on the validation data after as many samples. examples/characters, over ``server.transport:
  rpc``. Both directions are ``wire_bytes_per_sample`` of summary.json. The pushes are what remains of it without the
  parameters that are pulled, once per step or round and trainer, each in ``server.wire_dtype``.
- ``straggler``: seconds of training until the loss on the validation data is ``--target``, where a batch of trainer 1
  takes four times as long (a sleep after each batch fills it up). examples/characters with a constant learning rate
  after a warmup. Rounds in ``sync``, of equal numbers of local steps, take four times as long as without; in ``async``
  with ``server.dynamic_local_steps`` there are 5 local steps for 2 of ``sync``: ideal 2.5 at equal losses of equal
  samples. The line also has the ratio of the samples per second, to tell the two apart.
- ``table``: the loss on the validation data for each of ``--local_steps``, ``--momenta`` of the outer optimizer (SGD
  without momentum, else Nesterov; with its default learning rate) and ``--compressions``, as a markdown table: at the
  end, after equal samples, and after the seconds of training that the fastest run took. Runs that are slower are then
  in the middle of their schedule, whose learning rate is still high.

A time is one of training, without start and validation. Values between two validations are interpolated. Each run is in
fresh processes; the cases run in turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor, nn

from paramserver.config import Config, load_config, num_commands_of
from paramserver.optim.outer import OuterBuilder
from paramserver.tools.bench.cases import Case, interleaved
from paramserver.tools.bench.measure import measure, rank_commands
from paramserver.tools.bench.processes import NetworkHosts, ProcessGroup, parse_bandwidth
from paramserver.tools.report.results import NO_COMMUNICATION, CaseResult
from tests.measure.common import (
    BATCH_SIZE,
    DEADLINE_S,
    Measured,
    loss_of,
    mlp,
    origin,
    parser_of,
    random_images,
    read_records,
    spread,
    verdict,
)
from tests.measure.outside_clock import method_of

TRAINERS = 2
CHARACTERS_FILE = Path(__file__).parents[2] / "examples" / "characters" / "task.py"
Characters: Any = runpy.run_path(str(CHARACTERS_FILE))["Characters"]
INT8 = {"compression": "int8", "compression_block": 256}
BFLOAT16_REPLIES = {"wire_dtype": "bfloat16"}


# A run.


class Point(NamedTuple):
    """A validation: the samples applied and the seconds of training before it, and its loss."""

    samples: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Run:
    """What a run left: its summary, its validations, and how it was configured."""

    summary: Mapping[str, Any]
    curve: Sequence[Point]
    config: Config

    @property
    def loss(self) -> float:
        return self.curve[-1].loss

    @property
    def bytes_per_sample(self) -> float:
        return float(self.summary["wire_bytes_per_sample"])


def write_config(config: Mapping[str, Any], folder: Path, overrides: Sequence[str] = ()) -> Config:
    """Write the effective config into ``folder``, with ``overrides`` where it has rounds, and return it."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
    if overrides and load_config(file).training.has_rounds:
        given = load_config(file, overrides=overrides).given_mapping()
        file.write_text(yaml.safe_dump(given), encoding="utf-8")
    return load_config(file)


def run(config: Mapping[str, Any], arguments: argparse.Namespace, bandwidth: str | None = None) -> Run:
    """Make one run in fresh processes: of this machine, or with a bandwidth in a network namespace each.

    Raises:
        TrainingError: it failed, or took longer than ``DEADLINE_S``.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        logging = {"run_dir": name, "name": "run", "log_every": 1, "tensorboard": False, "progress": "off"}
        effective = write_config({**config, "checkpoint": {"every": 0}, "logging": logging}, folder, arguments.set)
        method = method_of(folder, 0.0, 0.0)
        if bandwidth is not None:
            hosts = NetworkHosts(num_commands_of(effective), parse_bandwidth(bandwidth))
            method = replace(method, hosts=stack.enter_context(hosts))
        commands = rank_commands(Case("run", effective, TRAINERS), method, folder / "config.yaml")
        with ProcessGroup(commands, method.environ, folder) as processes:
            processes.wait(DEADLINE_S, lambda: None)
        place = folder / "run"
        summary = json.loads((place / "summary.json").read_text(encoding="utf-8"))
        return Run(summary, curve_of(read_records(place, "train"), read_records(place, "validation")), effective)


def curve_of(trained: Sequence[Mapping[str, Any]], validated: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The validations, with the samples and seconds of the update that made what was validated.

    The seconds of a ``validation`` record are later ones, where trainers that run freely validate a retained version.
    """
    made = {record["step"]: record for record in trained}
    updates = [(made[record["step"]], record) for record in validated]
    return [Point(update["samples"], update["seconds"], record["values"]["loss"]) for update, record in updates]


def seconds_until(curve: Sequence[Point], loss: float) -> float:
    """The seconds at which the loss first is at most ``loss``, between two validations on a straight line.

    Raises:
        RuntimeError: it never is.
    """
    for before, after in itertools.pairwise([Point(0, 0.0, math.inf), *curve]):
        if after.loss <= loss:
            if math.isinf(before.loss):
                return after.seconds
            share = (before.loss - loss) / (before.loss - after.loss)
            return before.seconds + share * (after.seconds - before.seconds)
    raise RuntimeError(
        f"no validation had a loss of {loss:g}, the least was {min(point.loss for point in curve):g}; "
        "raise --target or --steps"
    )


def loss_at(curve: Sequence[Point], seconds: float) -> float:
    """The loss after so many seconds: between two validations on a straight line, nan before the first."""
    for before, after in itertools.pairwise(curve):
        if before.seconds <= seconds <= after.seconds:
            share = (seconds - before.seconds) / max(after.seconds - before.seconds, 1e-9)
            return before.loss + share * (after.loss - before.loss)
    return curve[-1].loss if curve[-1].seconds <= seconds else math.nan


def characters(steps: int, local_steps: int, training: Mapping[str, Any], server: Mapping[str, Any]) -> dict[str, Any]:
    """A run of examples/characters of so many local steps of each trainer."""
    return {
        "mode": "rpc",
        "task": f"{CHARACTERS_FILE}:Characters",
        "task_args": {"steps": steps},
        "cluster": {"num_trainers": TRAINERS},
        "training": {
            "max_steps": steps // local_steps,
            "local_steps": local_steps,
            "batch_size": BATCH_SIZE,
            "validation_batch_size": 250,
            "validate_every": 0,
            **training,
        },
        "server": {"transport": "rpc", **server},
    }


def runs_in_turn(
    configs: Mapping[str, Callable[[int], Mapping[str, Any]]],
    arguments: argparse.Namespace,
    bandwidth: str | None = None,
) -> dict[str, list[Run]]:
    """The runs of each config, which depends on the number of the repeat, its seed."""
    found: dict[str, list[Run]] = {name: [] for name in configs}
    for repeat, name in interleaved(list(configs), arguments.repeats):
        one = run({**configs[name](repeat), "seed": repeat}, arguments, bandwidth)
        found[name].append(one)
        print(
            f"  {repeat + 1}/{arguments.repeats} {name}: loss {one.loss:.4f} after {one.summary['samples']} samples, "
            f"{one.summary['seconds']:.1f} s, {one.bytes_per_sample:.0f} bytes a sample",
            file=sys.stderr,
        )
    return found


# Speed over slow links.

LINK_H = (8, 32, 128)
LEAST_SHARE, MOST_SHARE = 0.9, 0.1
_LINK_ROUNDS = 6  # of the time of their batches alone; the first three rounds are a warm-up


class Timed(Measured):
    """A network whose batches take ``step_s`` seconds each, nearly all of it asleep.

    Args:
        width: of the two hidden layers.
    """

    def __init__(self, width: int, step_s: float) -> None:
        super().__init__("mlp")
        self.width, self.step_s = width, step_s

    def build_model(self) -> nn.Module:
        return mlp(self.width)

    def train_source(self, partition: Any) -> Any:
        return random_images()

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor:
        ends_at = time.perf_counter() + self.step_s
        loss = loss_of(model, batch)
        time.sleep(max(ends_at - time.perf_counter(), 0.0))
        return loss


@dataclass(frozen=True)
class LinkCase:
    """A way to train over links, the share of the speed without communication that it is to reach, or to stay below."""

    mode: str
    local_steps: int = 1
    server: Mapping[str, Any] = field(default_factory=dict)
    at_least: float | None = None
    below: float | None = None

    def verdict(self, shares: Sequence[float]) -> str:
        median = statistics.median(shares)
        if self.at_least is not None:
            return f", at least {self.at_least:g}: {verdict(median >= self.at_least)}"
        return "" if self.below is None else f", below {self.below:g}: {verdict(median < self.below)}"


def link_cases(local_steps: Sequence[int]) -> dict[str, LinkCase]:
    small = {**INT8, **BFLOAT16_REPLIES}
    most = max(local_steps)
    aim = LEAST_SHARE if most >= LINK_H[-1] else None
    return {
        NO_COMMUNICATION: LinkCase("local"),
        "ddp": LinkCase("ddp", below=MOST_SHARE),
        "sync": LinkCase("rpc", below=MOST_SHARE),
        **{f"H={h}": LinkCase("rpc", h, small, aim if h == most else None) for h in sorted(local_steps)},
        f"H={most} float32": LinkCase("rpc", most),
        f"H={most} float32, ddp": LinkCase("ddp", most),
    }


def measure_link(name: str, case: LinkCase, repeat: int, arguments: argparse.Namespace) -> CaseResult:
    step_s = (arguments.step_ms or 40.0) / 1e3
    has_servers = case.mode == "rpc"
    config = {
        "mode": case.mode,
        "task": "tests.measure.rounds:Timed",
        "task_args": {"width": arguments.width, "step_s": step_s},
        "cluster": {"num_trainers": TRAINERS, **({"num_servers": TRAINERS, "colocate": True} if has_servers else {})},
        "training": {"batch_size": BATCH_SIZE, "validate_every": 0, "local_steps": case.local_steps},
        **({"server": dict(case.server)} if has_servers else {}),
    }
    baseline = NO_COMMUNICATION if case.mode == "local" else None
    seconds = max(arguments.seconds, _LINK_ROUNDS * case.local_steps * step_s)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        effective = write_config(config, Path(folder), arguments.set)
        one = Case(name, effective, TRAINERS, baseline=baseline)
        hosts = NetworkHosts(max(2, num_commands_of(effective)), parse_bandwidth(arguments.bandwidth or "10mbit"))
        method = replace(method_of(Path(folder), seconds, 1.0), hosts=stack.enter_context(hosts))
        result = measure(one, repeat, method)
        if not result.is_completed:
            raise RuntimeError(result.error)
    return result


def report_link(arguments: argparse.Namespace) -> None:
    cases = link_cases(arguments.local_steps or LINK_H)
    found: dict[str, list[CaseResult]] = {name: [] for name in cases}
    for repeat, name in interleaved(list(cases), arguments.repeats):
        result = measure_link(name, cases[name], repeat, arguments)
        found[name].append(result)
        print(
            f"  {repeat + 1}/{arguments.repeats} {name}: {result.samples_per_second:.1f} samples/s, a step or round "
            f"{result.step_ms['mean']:.0f} ms ({phases_of(result)}), {result.wall_s:.0f} s in all",
            file=sys.stderr,
        )
    size = sum(parameter.nbytes for parameter in mlp(arguments.width).parameters())
    alone = found[NO_COMMUNICATION]
    alone_ms = spread([result.step_ms["mean"] or 0.0 for result in alone], ".1f")
    print(
        f"\nlink: {arguments.bandwidth or '10mbit'}, model of {size:,} bytes, step without communication {alone_ms} "
        f"ms, {arguments.repeats} repeats; samples per second relative to no communication"
    )
    for name, results in found.items():
        rates = [result.samples_per_second or 0.0 for result in results]
        shares = [rate / (one.samples_per_second or 1.0) for rate, one in zip(rates, alone, strict=True)]
        sent = statistics.median(result.wire_bytes_per_step or 0.0 for result in results)
        print(
            f"  {name:22s}{spread(shares, '.3f')}{cases[name].verdict(shares)}; {spread(rates, '.1f')} samples/s, "
            f"{sent / 1e3:.0f} kB a step or round and trainer"
        )


def phases_of(result: CaseResult) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in result.phases_ms.items() if value)


# Bytes.

BYTES_H, BYTES_STEPS = 100, 600
PUSHES_LESS, FLOAT32_LESS, BFLOAT16_LESS = 390, 159, 260
LOSS_WITHIN = 0.01
# With the default of many local steps, lr 0.7 and momentum 0.9, six rounds are too few for the momentum: 6 % more loss.
BYTES_OUTER = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.5}


def pushed_per_sample(run: Run, model_bytes: int) -> float:
    """Bytes of a sample without those of the parameters that each trainer pulled in each step or round.

    ``model_bytes`` are those of the parameters in float32.
    """
    share = 0.5 if run.config.server.wire_dtype == "bfloat16" else 1.0
    pulled = run.summary["steps"] * TRAINERS * model_bytes * share
    return run.bytes_per_sample - float(pulled / run.summary["samples"])


def report_bytes(arguments: argparse.Namespace) -> None:
    steps = arguments.steps or BYTES_STEPS
    names = "sync", "int8", "int8, replies bfloat16"
    outer = {"outer": BYTES_OUTER}
    configs = {
        "sync": lambda seed: characters(steps, 1, {}, {}),
        "int8": lambda seed: characters(steps, BYTES_H, outer, INT8),
        "int8, replies bfloat16": lambda seed: characters(steps, BYTES_H, outer, {**INT8, **BFLOAT16_REPLIES}),
    }
    found = runs_in_turn(configs, arguments)
    size = sum(parameter.nbytes for parameter in Characters().build_model().parameters())
    samples = found["sync"][0].summary["samples"]
    print(
        f"\nbytes: examples/characters, {size:,} bytes of parameters, {steps} local steps of {TRAINERS} trainers, "
        f"{samples} samples, H={BYTES_H}, {arguments.repeats} repeats; {outer_of(found['int8'][0].config)}"
    )
    sync = found["sync"]
    print(f"  sync, float32: {spread([one.bytes_per_sample for one in sync], '.0f')} bytes a sample, {losses(sync)}")
    for name, aim in ((names[1], FLOAT32_LESS), (names[2], BFLOAT16_LESS)):
        runs = found[name]
        both = [one.bytes_per_sample / other.bytes_per_sample for one, other in zip(sync, runs, strict=True)]
        pushes = [
            pushed_per_sample(one, size) / pushed_per_sample(other, size) for one, other in zip(sync, runs, strict=True)
        ]
        apart = [other.loss / one.loss - 1 for one, other in zip(sync, runs, strict=True)]
        print(f"  {name}: {spread([one.bytes_per_sample for one in runs], '.1f')} bytes a sample")
        print(f"    pushes 1 / {spread(pushes, '.1f')}, at most 1 / {PUSHES_LESS}: {at_least(pushes, PUSHES_LESS)}")
        print(f"    both directions 1 / {spread(both, '.1f')}, at most 1 / {aim}: {at_least(both, aim)}")
        print(
            f"    {losses(runs)}: {spread([100 * one for one in apart], '+.2f')} % against sync, within "
            f"{LOSS_WITHIN:.0%}: {verdict(statistics.median(apart) <= LOSS_WITHIN)}"
        )


def at_least(ratios: Sequence[float], aim: float) -> str:
    return verdict(statistics.median(ratios) >= aim)


def losses(runs: Sequence[Run]) -> str:
    return f"validation loss {spread([one.loss for one in runs], '.4f')}"


def outer_of(config: Config) -> str:
    """The outer optimizer of a config, with its hyper-parameters."""
    outer = OuterBuilder(config)
    return f"outer {outer.name}, " + ", ".join(f"{name} {value}" for name, value in outer.hyperparameters.items())


# A slow trainer.

SLOWNESS = 4
STRAGGLER_H, STRAGGLER_AIM, STRAGGLER_IDEAL = 8, 2.3, 2.5


class Paced(Characters):  # type: ignore[misc]
    """Characters with a smaller model, batches of a given time, and a learning rate that is constant after a warmup.

    A batch computes for 10 ms, so that the time of a trainer does not depend on the other processes of the machine.

    Args:
        period_s: of a batch; a sleep after it fills it up.
        slow_trainer: the index of the one whose batches take ``SLOWNESS`` times as long.
        warmup: local steps.
    """

    def __init__(self, period_s: float, slow_trainer: int, lr: float, warmup: int = 30) -> None:
        super().__init__(samples=10_000, length=32, width=32, lr=lr)
        self.period_s, self.slow_trainer, self.warmup = period_s, slow_trainer, warmup

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / self.warmup, 1.0))

    def on_batch_start(self, batch_idx: int) -> None:
        slow = self.trainer.trainer_index == self.slow_trainer
        self.ends_at = time.perf_counter() + self.period_s * (SLOWNESS if slow else 1)

    def on_batch_end(self, batch_idx: int) -> None:
        time.sleep(max(self.ends_at - time.perf_counter(), 0.0))


def paced(consistency: str, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    local_steps = (arguments.local_steps or [STRAGGLER_H])[0]
    steps = arguments.steps or 320
    is_async = consistency == "async"
    # In ``async`` a step is the round of one trainer. Both take as many samples.
    samples = steps * TRAINERS * BATCH_SIZE
    training = {"max_steps": None, "max_samples": samples, "validate_every": 4 if is_async else 1}
    server = {"consistency": consistency, "transport": "auto", "dynamic_local_steps": is_async}
    config = characters(steps, local_steps, training, server)
    task_args = {"period_s": (arguments.step_ms or 60.0) / 1e3, "slow_trainer": 1, "lr": arguments.lr}
    return {**config, "task": "tests.measure.rounds:Paced", "task_args": task_args}


def report_straggler(arguments: argparse.Namespace) -> None:
    configs = {name: partial(paced, name, arguments) for name in ("sync", "async")}
    found = runs_in_turn(configs, arguments)
    times = {name: [seconds_until(one.curve, arguments.target) for one in runs] for name, runs in found.items()}
    ratios = [one / other for one, other in zip(times["sync"], times["async"], strict=True)]
    rates = {name: [one.summary["samples_per_second"] for one in runs] for name, runs in found.items()}
    faster = [other / one for one, other in zip(rates["sync"], rates["async"], strict=True)]
    print(
        f"\nstraggler: one of {TRAINERS} trainers {SLOWNESS} times slower, {arguments.step_ms or 60:g} ms a batch, "
        f"H={found['sync'][0].config.training.local_steps}, {arguments.repeats} repeats"
    )
    for name, runs in found.items():
        took = spread([one.summary["trainers"][1]["inner_steps"] for one in runs], ".0f")
        print(
            f"  {name}: {spread(times[name], '.1f')} s to a loss of {arguments.target:g}, {spread(rates[name], '.0f')} "
            f"samples/s, {took} local steps of the slow trainer; {outer_of(runs[0].config)}"
        )
    aim = f"ideal {STRAGGLER_IDEAL}, at least {STRAGGLER_AIM}: {at_least(ratios, STRAGGLER_AIM)}"
    print(f"  sync / async: {spread(ratios)}, {aim}; samples per second {spread(faster)}")


# A table of losses.

TABLE_H, TABLE_STEPS = (1, 8, 32, 128), 640
MOMENTA, COMPRESSIONS = (0.0, 0.5, 0.9), ("none", "int8")
_VALIDATIONS = 20  # at most, and one for each round at most


def table_config(steps: int, local_steps: int, momentum: float, compression: str, seed: int) -> dict[str, Any]:
    outer = {"optimizer": "nesterov" if momentum else "sgd", "momentum": momentum}
    training = {"outer": outer, "validate_every": max(1, steps // _VALIDATIONS // local_steps)}
    return characters(steps, local_steps, training, INT8 if compression == "int8" else {"compression": compression})


def report_table(arguments: argparse.Namespace) -> None:
    steps, bandwidth = arguments.steps or TABLE_STEPS, arguments.bandwidth or "100mbit"
    grid = list(itertools.product(arguments.local_steps or TABLE_H, arguments.momenta, arguments.compressions))
    configs: dict[str, Callable[[int], Mapping[str, Any]]] = {
        " | ".join([str(h), f"{mu:g}", "float32" if kind == "none" else kind]): partial(
            table_config, steps, h, mu, kind
        )
        for h, mu, kind in grid
    }
    every = {"validate_every": max(1, steps // _VALIDATIONS)}
    configs["no rounds | - | float32"] = lambda seed: characters(steps, 1, every, {})
    found = runs_in_turn(configs, arguments, bandwidth)
    seconds = min(one.curve[-1].seconds for runs in found.values() for one in runs)
    samples = next(iter(found.values()))[0].summary["samples"]
    print(
        f"\ntable: examples/characters, {steps} local steps of {TRAINERS} trainers, {bandwidth}, "
        f"{arguments.repeats} repeats\n"
    )
    print(
        f"| H | outer momentum | pushes | loss after {samples:,} samples | after {seconds:.0f} s | bytes a sample | s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, runs in found.items():
        cells = [
            spread([one.loss for one in runs], ".4f"),
            spread([loss_at(one.curve, seconds) for one in runs], ".3f"),
            spread([one.bytes_per_sample for one in runs], ".0f"),
            spread([one.curve[-1].seconds for one in runs], ".0f"),
        ]
        if arguments.repeats == 1:
            cells = [cell.partition(" ")[0] for cell in cells]
        print(f"| {name} | {' | '.join(cells)} |")


CASES: dict[str, Callable[[argparse.Namespace], None]] = {
    "link": report_link,
    "bytes": report_bytes,
    "straggler": report_straggler,
    "table": report_table,
}


def main() -> None:
    parser = parser_of(__doc__, repeats=2)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--steps", type=int, help="local steps of each trainer: bytes 600, straggler 320, table 640")
    parser.add_argument("--local_steps", type=int, nargs="+", help="link 8 32 128, straggler 8 (one), table 1 8 32 128")
    parser.add_argument("--bandwidth", help="link 10mbit, table 100mbit")
    parser.add_argument("--seconds", type=float, default=8.0, help="link: of training, at least")
    parser.add_argument("--step_ms", type=float, help="of a batch: link 40, straggler 60")
    parser.add_argument("--width", type=int, default=256, help="link: of the network")
    parser.add_argument("--lr", type=float, default=6e-3, help="straggler: of the local steps")
    parser.add_argument("--target", type=float, default=0.62, help="straggler: the loss that is timed")
    parser.add_argument("--momenta", type=float, nargs="+", default=list(MOMENTA), help="table: of the outer optimizer")
    parser.add_argument("--compressions", nargs="+", default=list(COMPRESSIONS), help="table: server.compression")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of runs with rounds")
    arguments = parser.parse_args()
    for name in arguments.cases:
        if name not in CASES:
            parser.error(f"{name} must be one of {', '.join(CASES)}; correct it")
    chosen = arguments.cases or [name for name in CASES if name != "table"]
    for name, steps, rounds in (
        ("bytes", BYTES_STEPS, [BYTES_H]),
        ("table", TABLE_STEPS, arguments.local_steps or TABLE_H),
    ):
        if name in chosen and any((arguments.steps or steps) % h for h in rounds):
            parser.error(f"--steps ({arguments.steps or steps}) must be whole rounds of {rounds} steps in {name}")
    print(origin())
    for name in chosen:
        CASES[name](arguments)
        sys.stdout.flush()


if __name__ == "__main__":
    main()

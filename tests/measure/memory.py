"""Memory of a large model in each process, and CPU time while the ranks wait.

    python -m tests.measure.memory [--parameters 100000000] [--trainers 2] [--steps 30] [--silence 10]
                                   [--transport auto]

One server and so many trainers on this machine, ``sync`` and then ``async``; four square Linear layers of float32,
SGD with momentum, batches of 4 samples, so that activations weigh next to nothing. The proportional set size (memory
that several processes map is shared out among them; /proc/PID/smaps_rollup) of every rank is read from outside, five
times a second. What counts is the greatest one while training is steady: from ``--warm`` steps on to the last step;
the greatest one of the whole run, with its start and its last checkpoint, is printed next to it.

With P the bytes of the parameters and T trainers, a server may take (4 + T) P in ``sync`` and (4 + 2T) P in ``async``,
a trainer 3.5 P, each plus 300 MB for the interpreter and torch. Then a run whose streams give nothing for ``--silence``
seconds: the CPU time of every rank in that span, which must be below 1 % of a core. Exits with 1 where a figure is
missed, with 2 where the machine lacks the memory.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paramserver
from paramserver import Task
from tests.measure.common import measured_config, origin, parser_of, read_records, verdict
from tests.measure.soak import Reading, Sampler, listen, title

LAYERS = 4
BATCH_SIZE = 4
SAMPLES = 64
EVERY_S = 0.2
MB = 10**6
ALLOWANCE_BYTES = 300 * MB
TRAINER_TIMES = 3.5
CONSISTENCIES = ("sync", "async")


class Heavy(Task):
    """Many parameters, hardly any activations.

    Args:
        width: of each of the square layers.
    """

    def __init__(self, width: int) -> None:
        self.width = width

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(self.width, self.width, bias=False) for _ in range(LAYERS)))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def train_source(self, partition: Any) -> Any:
        return TensorDataset(torch.randn(SAMPLES, self.width, generator=torch.Generator().manual_seed(0)))

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor:
        (inputs,) = batch
        return F.mse_loss(model(inputs), torch.zeros_like(inputs))


def server_times(consistency: str, trainers: int) -> int:
    """How many times the bytes of the parameters a server may take."""
    return 4 + (trainers if consistency == "sync" else 2 * trainers)


def needed_bytes(parameter_bytes: int, consistency: str, trainers: int) -> int:
    """What all ranks together may take."""
    times = server_times(consistency, trainers) + TRAINER_TIMES * trainers
    return int(times * parameter_bytes) + (1 + trainers) * ALLOWANCE_BYTES


def proportional_bytes(process: psutil.Process) -> int:
    return int(process.memory_full_info().pss)


def weigh(consistency: str, width: int, arguments: argparse.Namespace) -> bool:
    """Print what each rank takes; whether all stay within what they may."""
    with tempfile.TemporaryDirectory() as folder:
        config = measured_config("rpc", Path(folder), arguments.steps, arguments.trainers, {"width": width})
        config["training"]["batch_size"] = BATCH_SIZE
        config["logging"] |= {"log_every": 1, "tensorboard": False}
        server = {"consistency": consistency, "transport": arguments.transport}
        with Sampler(memory_of=proportional_bytes, every_s=EVERY_S) as sampler, redirect_stdout(sys.stderr):
            result = paramserver.run(Heavy, {**config, "server": server})
        trained = {record["step"]: record["time"] for record in read_records(result.run_dir, "train")}
    begin, end = trained[arguments.warm], trained[arguments.steps]
    parameter_bytes = LAYERS * width**2 * 4
    print(f"\n{consistency}: {arguments.steps} steps of {1e3 * (end - begin) / (len(trained) - arguments.warm):.0f} ms")
    print(f"  {'':10s}{'steady, MB':>12s}{'whole run, MB':>15s}{'times the parameters':>22s}")
    times = [float(server_times(consistency, arguments.trainers)), *([TRAINER_TIMES] * arguments.trainers)]
    met = [
        print_weight(rank, readings, (begin, end), parameter_bytes, times[rank])
        for rank, readings in sorted(sampler.readings.items())
    ]
    return all(met) and len(met) == 1 + arguments.trainers


def print_weight(
    rank: int, readings: Sequence[Reading], span: tuple[float, float], parameter_bytes: int, times: float
) -> bool:
    steady = [reading.memory_bytes for reading in readings if span[0] <= reading.time <= span[1]]
    if not steady:
        raise RuntimeError(f"{title(rank)} was not read once in {span[1] - span[0]:.2f} s; raise --steps")
    most, limit = max(steady), times * parameter_bytes + ALLOWANCE_BYTES
    met = most <= limit
    print(
        f"  {title(rank):10s}{most / MB:12.0f}{max(r.memory_bytes for r in readings) / MB:15.0f}"
        f"{most / parameter_bytes:22.2f}   at most {times:g} x {parameter_bytes / MB:.0f} + "
        f"{ALLOWANCE_BYTES / MB:.0f} = {limit / MB:.0f} MB: {verdict(met)}",
        flush=True,
    )
    return met


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, parameters=100_000_000, trainers=2, steps=30, warm=5)
    parser.add_argument("--silence", type=float, default=10.0, help="seconds; 0 leaves waiting out")
    parser.add_argument("--transport", choices=("auto", "tcp", "rpc"), default="auto", help="the aims are of auto")
    parser.add_argument("--consistencies", nargs="+", choices=CONSISTENCIES, default=list(CONSISTENCIES))
    return parser


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace, parameter_bytes: int) -> None:
    if not 1 <= arguments.warm < arguments.steps:
        parser.error(f"--warm ({arguments.warm}) must be from 1 to --steps ({arguments.steps}) less one; raise --steps")
    needed = max(needed_bytes(parameter_bytes, name, arguments.trainers) for name in arguments.consistencies)
    free = psutil.virtual_memory().available
    if needed > free:
        parser.error(
            f"--parameters ({arguments.parameters}) with {arguments.trainers} trainers must have "
            f"{needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free; give fewer"
        )


def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()
    width = math.isqrt(arguments.parameters // LAYERS)
    parameter_bytes = LAYERS * width**2 * 4
    check(parser, arguments, parameter_bytes)
    print(origin())
    print(
        f"{LAYERS * width**2 / 1e6:.1f} million float32 parameters ({parameter_bytes / MB:.0f} MB), SGD with momentum, "
        f"1 server, {arguments.trainers} trainers; proportional set size"
    )
    met = [weigh(consistency, width, arguments) for consistency in arguments.consistencies]
    print()
    for consistency in arguments.consistencies if arguments.silence else ():
        with tempfile.TemporaryDirectory() as folder:
            met.append(listen(arguments.silence, arguments.trainers, Path(folder), consistency))
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()

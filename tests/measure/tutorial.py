"""Compares the official RPC parameter-server tutorial with this package: samples per second on the same network.

    python -m tests.measure.tutorial --script PATH [--steps 200] [--warm 40] [--repeats 7] [--cases ...]

``PATH`` is your copy of distributed/rpc/parameter_server/rpc_parameter_server.py from github.com/pytorch/examples, at
commit 77f55b912142e11fcfdf5b530231fb9c52f181e8 (the file's SHA-256 is printed). It is not part of this
project. What is run is that file with its data replaced, which the printed difference shows in full: random images of
MNIST's shape from ``TimedBatches`` for the training set, 32 more for its test set, and no import of torchvision. Each
case has one trainer unless noted, one thread in every process and the same allocator settings; with ``--own_threads``
both programs run without these environment variables:

- ``tutorial``: as it comes, with torch's default transports; one server, one trainer.
- ``quiet``: the same with transports that do not spin while they wait (``uv``; ``cma``, ``mpt_uv``, ``basic``).
- ``ours``: this package, ``rpc`` with one server and one trainer, on the script's own ``Net`` with its optimizer, batch
  size and loss. ``ours-2``: with two trainers.
- ``tutorial-2`` (once): the tutorial with two trainers, which fails: the optimizer step of one changes in place what
  the backward of the other needs. The error it ends with is printed.

A step lasts from one request for a batch to the next; the first ``--warm`` steps and the measurement of accuracy are
left out. Runs are fresh processes; the cases are interleaved, in alternating order.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import runpy
import socket
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.utils.data import DataLoader

import paramserver
from paramserver.cluster import process_environ
from tests.measure.common import (
    BATCH_SIZE,
    Measured,
    Stamp,
    measured_config,
    measured_in_turn,
    measuring_environment,
    measuring_parser,
    now,
    origin,
    parsed,
    random_images,
    read_stamps,
    run_fresh,
    spread,
    verdict,
    write_stamps,
)
from tests.measure.foreign import difference, run_until_error, with_other_data

COMMIT = "77f55b912142e11fcfdf5b530231fb9c52f181e8"
REQUIRED = 2.0
LEARNING_RATE = 0.03
CASES = {"tutorial": 1, "quiet": 1, "ours": 1, "ours-2": 2}
FAILING_TRAINERS = 2
LOOPBACK = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


# What the replaced lines of the script call.


class TimedBatches:
    """A loader of random batches that records when each is requested.

    Args:
        folder: where the stamps go when all batches were served; one file for each trainer.
        trainer_index: of the trainer that it serves.
        steps: how many batches.
    """

    def __init__(self, folder: str, trainer_index: int, steps: int) -> None:
        self.folder, self.trainer_index, self.steps = Path(folder), trainer_index, steps

    def __iter__(self) -> Iterator[Any]:
        loader = DataLoader(random_images(), batch_size=BATCH_SIZE, shuffle=True)
        stamps: list[Stamp] = []
        while len(stamps) < self.steps:
            for batch in loader:
                stamps.append(now())
                if len(stamps) > self.steps:
                    break
                yield batch
        write_stamps(self.folder, self.trainer_index, stamps)


def few_images() -> DataLoader[tuple[Tensor, ...]]:
    """Replaces the test set, which is not measured."""
    return DataLoader(random_images(BATCH_SIZE), batch_size=BATCH_SIZE)


def use_quiet_transports() -> None:
    """Let ``init_rpc`` take transports that do not spin."""
    make_options: Any = rpc.TensorPipeRpcBackendOptions
    options = make_options(_transports=["uv"], _channels=["cma", "mpt_uv", "basic"])
    module: Any = rpc
    module.init_rpc = functools.partial(rpc.init_rpc, rpc_backend_options=options)


def replaced(source: str, folder: Path, steps: int, quiet: bool) -> str:
    """The script with its data replaced, and its transports where ``quiet``."""
    return with_other_data(
        source,
        {
            "torchvision": ["from tests.measure import tutorial", *(["tutorial.use_quiet_transports()"] * quiet)],
            "train_loader": [f"train_loader = tutorial.TimedBatches({str(folder)!r}, args.rank - 1, {steps})"],
            "test_loader": ["test_loader = tutorial.few_images()"],
        },
    )


# The cases.


class OnTheirNetwork(Measured):
    """The tutorial's network, optimizer and loss, as a task of this package.

    Args:
        script: the replaced script, of which ``Net`` is taken.
        folder: see ``Measured``.
    """

    def __init__(self, script: str, folder: str) -> None:
        super().__init__(folder=folder)
        self.script = script

    def build_model(self) -> nn.Module:
        network: nn.Module = runpy.run_path(self.script)["Net"]()
        return network

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def be_child(arguments: argparse.Namespace) -> None:
    folder, trainers = arguments.folder, CASES[arguments.child]
    task_args = {"script": str(arguments.script), "folder": str(folder)}
    paramserver.run(OnTheirNetwork, measured_config("rpc", folder, arguments.steps, trainers, task_args))


def commands_of_tutorial(script: Path, trainers: int) -> list[list[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [str(script), "--world_size", str(1 + trainers), "--master_port", str(port)]
    return [[*words, "--rank", str(rank)] for rank in range(1 + trainers)]


def run_tutorial(
    source: str, folder: Path, steps: int, trainers: int, environ: Mapping[str, str], quiet: bool = False
) -> str | None:
    """Run the replaced script; the error it ended with, or None."""
    script = folder / "replaced.py"
    script.write_text(replaced(source, folder, steps, quiet), encoding="utf-8")
    return run_until_error(commands_of_tutorial(script, trainers), {**environ, **LOOPBACK})


def environment(own_threads: bool) -> dict[str, str]:
    """Of both programs: the one that all measurements use, or what a user's shell has and where modules are found."""
    measuring = measuring_environment()
    return {**process_environ(), "PYTHONPATH": measuring["PYTHONPATH"]} if own_threads else measuring


def measure(case: str, source: str, arguments: argparse.Namespace) -> float:
    """Samples per second of all trainers together, in one fresh run."""
    environ = environment(arguments.own_threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case.startswith("ours"):
            script = folder / "replaced.py"
            script.write_text(replaced(source, folder, arguments.steps, quiet=False), encoding="utf-8")
            words = ["-m", "tests.measure.tutorial", "--child", case, "--script", str(script), "--folder", name]
            run_fresh([[*words, "--steps", str(arguments.steps)]], environ)
        else:
            error = run_tutorial(source, folder, arguments.steps, CASES[case], environ, quiet=case == "quiet")
            if error is not None:
                raise RuntimeError(f"{case} must run through, and ended with: {error}")
        stamps = read_stamps(folder)
    assert len(stamps) == CASES[case]
    return sum(rate(one, arguments.warm) for one in stamps)


def rate(stamps: Sequence[Stamp], warm: int) -> float:
    kept = [wall for wall, _ in stamps[warm:]]
    return BATCH_SIZE * (len(kept) - 1) / (kept[-1] - kept[0])


def report(rates: dict[str, list[float]]) -> None:
    print(f"\n  {'':12s}{'samples per second':30s}ours with one trainer, times this")
    for case, taken in rates.items():
        row = f"  {case:12s}{spread(taken, '.0f'):30s}"
        if "ours" in rates and not case.startswith("ours"):
            ratios = [ours / theirs for ours, theirs in zip(rates["ours"], taken, strict=True)]
            row += f"{spread(ratios)}, at least {REQUIRED:g}: {verdict(statistics.median(ratios) >= REQUIRED)}"
        print(row)


def show_failure(source: str, steps: int, environ: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        error = run_tutorial(source, Path(folder), steps, FAILING_TRAINERS, environ)
    outcome = f"it did not fail in {steps} steps" if error is None else f"fails: {error}"
    print(f"  tutorial-{FAILING_TRAINERS}  {outcome}")


def make_parser() -> argparse.ArgumentParser:
    parser = measuring_parser(__doc__, list(CASES))
    parser.add_argument("--script", type=Path, required=True, help="rpc_parameter_server.py from pytorch/examples")
    parser.add_argument("--own_threads", action="store_true", help="leave threads and allocator to the programs")
    return parser


def main() -> None:
    parser = make_parser()
    arguments = parsed(parser)
    if arguments.child is not None:
        be_child(arguments)
        return
    if not arguments.script.is_file():
        parser.error(f"--script ({arguments.script}) must be a file; take it from pytorch/examples at commit {COMMIT}")
    source = arguments.script.read_text(encoding="utf-8")
    print(origin())
    print(f"{arguments.script.name}, SHA-256 {hashlib.sha256(source.encode()).hexdigest()}; what was replaced:\n")
    print(difference(source, replaced(source, Path("FOLDER"), arguments.steps, quiet=False)))
    rates = measured_in_turn(arguments.cases, arguments.repeats, lambda case: measure(case, source, arguments), ".0f")
    print(f"batch {BATCH_SIZE}, {arguments.repeats} repeats: median (least to greatest)")
    report(rates)
    show_failure(source, arguments.steps, environment(arguments.own_threads))


if __name__ == "__main__":
    main()

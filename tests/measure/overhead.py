"""Compares the training loop with one written by hand: milliseconds per step, with one torch thread per trainer.

    python -m tests.measure.overhead [--model cnn] [--steps 200] [--warm 40] [--repeats 7] [--cases loop local ...]

``loop`` is a plain loop over a DataLoader in one process and ``loop-ddp`` the same with DistributedDataParallel (gloo
on the loopback, gradients as views of buckets as in ours) and a DistributedSampler in two; ``local``, ``ddp`` and
``rpc`` (one server) are runs of this package without validation and checkpoints, with their usual logging. All get the
same samples, batch size, optimizer and environment (OMP_NUM_THREADS=1 and the MALLOC_ variables of
``paramserver.cluster.child_environment``). Every measurement is a fresh process; the cases are interleaved, in
alternating order.

A step lasts from one ``on_batch_start`` (by hand: from the moment before the forward) to the next, by the same clock;
the first ``--warm`` are left out. Of two trainers the slower counts. Each pair of ours and by hand, measured in the
same repeat, gives three ratios: of the mean steps, which include everything and decide; of the median steps; and of the
CPU time of a trainer per step, all its threads together. The last two are more reliable on a machine with other load.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import paramserver
from tests.measure.common import (
    BATCH_SIZE,
    MODELS,
    Measured,
    Stamp,
    loss_of,
    measured_config,
    measured_in_turn,
    measuring_environment,
    measuring_parser,
    now,
    optimizer_of,
    parsed,
    read_stamps,
    run_fresh,
    samples_of,
    spread,
    verdict,
    write_stamps,
)

TRAINERS = 2
TARGETS = {"local": 1.03, "ddp": 1.03}
BY_HAND = {"loop": 1, "loop-ddp": TRAINERS}
CASES = ("loop", "local", "loop-ddp", "ddp", "rpc")
PAIRS = {"local": "loop", "ddp": "loop-ddp", "rpc": "loop-ddp"}
FIGURES = {"mean_ms": "mean step, ms", "median_ms": "median step, ms", "cpu_ms": "CPU time of a trainer per step, ms"}
LOG_EVERY = 10


@dataclass(frozen=True)
class Timing:
    """Milliseconds per step of one run: all steps together over their number, the step in the middle, and CPU time."""

    mean_ms: float
    median_ms: float
    cpu_ms: float


# By hand.


def train_by_hand(
    model: nn.Module,
    loader: DataLoader[object],
    steps: int,
    sampler: DistributedSampler[object] | None,
    stamps: list[Stamp],
    find_loss: Callable[[nn.Module, Any], Tensor] = loss_of,
) -> list[Stamp]:
    """The loop of a tutorial; when each step began."""
    optimizer = optimizer_of(model)
    model.train()
    for epoch in itertools.count():
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            stamps.append(now())
            optimizer.zero_grad()
            loss = find_loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if len(stamps) % LOG_EVERY == 0:
                print(f"step {len(stamps)}: loss {loss.item():.4f}")
            if len(stamps) == steps:
                return stamps
    raise AssertionError("an endless loop ended")


def run_loop(model: str, steps: int, folder: Path, rank: int, stamps: list[Stamp] | None = None) -> None:
    """One process by hand; ``stamps`` is the list that gets the moments."""
    loader = DataLoader(samples_of(model), batch_size=BATCH_SIZE, shuffle=True, num_workers=0)
    torch.manual_seed(0)
    write_stamps(folder, rank, train_by_hand(MODELS[model](), loader, steps, None, [] if stamps is None else stamps))


def run_loop_ddp(model: str, steps: int, folder: Path, rank: int, stamps: list[Stamp] | None = None) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=TRAINERS)
    try:
        data = samples_of(model)
        sampler: DistributedSampler[object] = DistributedSampler(data)
        loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, num_workers=0)
        torch.manual_seed(0)
        wrapped = DistributedDataParallel(MODELS[model](), gradient_as_bucket_view=True)
        write_stamps(folder, rank, train_by_hand(wrapped, loader, steps, sampler, [] if stamps is None else stamps))
    finally:
        dist.destroy_process_group()


def run_ours(case: str, model: str, steps: int, folder: Path) -> None:
    task_args = {"model": model, "folder": str(folder)}
    paramserver.run(Measured, measured_config(case, folder, steps, TRAINERS, task_args))


def be_child(arguments: argparse.Namespace) -> None:
    """One process of a measurement."""
    if arguments.child == "loop":
        run_loop(arguments.model, arguments.steps, arguments.folder, arguments.rank)
    elif arguments.child == "loop-ddp":
        run_loop_ddp(arguments.model, arguments.steps, arguments.folder, arguments.rank)
    else:
        run_ours(arguments.child, arguments.model, arguments.steps, arguments.folder)


# The measurement.


def measure(case: str, arguments: argparse.Namespace) -> Timing:
    """One fresh run of a case."""
    environ = {**measuring_environment(), "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "tests.measure.overhead", "--child", case, "--folder", folder]
        words += ["--model", arguments.model, "--steps", str(arguments.steps)]
        run_fresh([[*words, "--rank", str(rank)] for rank in range(BY_HAND.get(case, 1))], environ)
        timings = [timing_of(stamps, arguments.warm) for stamps in read_stamps(Path(folder))]
    return max(timings, key=lambda timing: timing.mean_ms)


def timing_of(stamps: list[Stamp], warm: int) -> Timing:
    kept = stamps[warm:]
    walls, cpus = zip(*kept, strict=True)
    steps_s = [after - before for before, after in itertools.pairwise(walls)]
    per_step = 1e3 / len(steps_s)
    return Timing(per_step * (walls[-1] - walls[0]), 1e3 * statistics.median(steps_s), per_step * (cpus[-1] - cpus[0]))


def report(timings: dict[str, list[Timing]]) -> None:
    for name in FIGURES:
        print(f"\n{FIGURES[name]}")
        for case, taken in timings.items():
            row = f"  {case:9s} {spread([getattr(t, name) for t in taken]):28s}"
            print(row + ratio_of(case, name, timings))


def ratio_of(case: str, name: str, timings: dict[str, list[Timing]]) -> str:
    """This case over its partner by hand, pair by pair."""
    partner = timings.get(PAIRS.get(case, ""))
    if partner is None:
        return ""
    ratios = [getattr(a, name) / getattr(b, name) for a, b in zip(timings[case], partner, strict=True)]
    text = f" {spread(ratios, '.3f')} of {PAIRS[case]}"
    if name == "mean_ms" and case in TARGETS:
        text += f", at most {TARGETS[case]}: {verdict(statistics.median(ratios) <= TARGETS[case])}"
    return text


def make_parser(description: str | None = __doc__) -> argparse.ArgumentParser:
    parser = measuring_parser(description, list(CASES))
    parser.add_argument("--model", choices=MODELS, default="cnn")
    return parser


def main() -> None:
    arguments = parsed(make_parser())
    if arguments.child is not None:
        be_child(arguments)
        return
    timings = measured_in_turn(arguments.cases, arguments.repeats, lambda case: measure(case, arguments))
    print(
        f"{arguments.model}, batch {BATCH_SIZE}, {arguments.steps - arguments.warm - 1} steps, "
        f"{arguments.repeats} repeats: median (least to greatest)"
    )
    report(timings)


if __name__ == "__main__":
    main()

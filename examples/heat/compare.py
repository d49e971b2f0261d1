"""Compares the buffers online with training on stored simulations, on the same simulations of the heat equation.

    python examples/heat/compare.py runs/heat [--seeds 0 1 2] [--count 60] [--mode rpc] [--quick]

Every run has the same number of batches and the same learning rate. The number is that of FIFO with ``--count``
simulations and each sample served once. The cases are interleaved, for each seed:

- ``fifo``, ``firo``: the trainers receive what the simulations send, with this buffer;
- ``fifo, half``, ``firo, half``, ``reservoir, half``: only the first half of the simulations are run, and their samples
  are served twice: exactly (by pseudo_epochs), or in the mean (a reservoir, by min_new_per_batch of half a batch);
- ``offline``, ``offline, half``: the simulations are stored first, then read in random order, in one or two passes;
- ``offline, a tenth``: ten passes over few simulations, as if disk space were the limit.

The folder then holds results.jsonl (one line per run), table.md, plot.png and the runs. ``--draw`` makes table and plot
again from results.jsonl alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
from curves import Curve, plot, read_lines, read_run, table, write_lines
from store import store

import paramserver
from paramserver.config import load_config

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        buffer: the kind of buffer; None = offline.
        uses: how many times a sample is trained on, exactly or in the mean. The number of simulations is divided by it.
    """

    buffer: str | None = None
    uses: int = 1

    def serving(self, batch_size: int) -> list[str]:
        """The buffer settings that give this number of uses."""
        if self.buffer == "reservoir":
            return [f"min_new_per_batch={max(1, batch_size // self.uses)}"]
        return [f"pseudo_epochs={self.uses}"]


CASES = {
    "fifo": Case("fifo"),
    "firo": Case("firo"),
    "offline": Case(),
    "fifo, half": Case("fifo", uses=2),
    "firo, half": Case("firo", uses=2),
    "reservoir, half": Case("reservoir", uses=2),
    "offline, half": Case(uses=2),
    "offline, a tenth": Case(uses=10),
}


class Comparison:
    """Runs of all cases, which differ in nothing else.

    Args:
        folder: for all results.
        arguments: sizes and options; see ``make_parser``.
    """

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder = folder
        self.sizes = arguments
        self.steps = arguments.count * arguments.steps // (arguments.batch_size * arguments.trainers)
        if self.steps < arguments.validate_every:
            raise SystemExit(
                f"--validate_every ({arguments.validate_every}) must be at most the {self.steps} batches of a run; "
                "lower it, or raise --count"
            )

    def run(self, name: str, seed: int) -> Curve:
        """Run one case, including its simulations."""
        case = CASES[name]
        count = -(-self.sizes.count // case.uses)
        place = self.folder / "runs" / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
        if case.buffer is not None:
            made = self._train("config.yaml", place, seed, self._online(count, case))
            return read_run(made, name, seed)
        stored = self.folder / "data" / place.name
        stored_s = store(stored, load_config(HERE / "config.yaml", overrides=[f"seed={seed}", *self._ensemble(count)]))
        made = self._train("offline.yaml", place, seed, self._offline(stored))
        return read_run(made, name, seed, stored_s, count * self.sizes.steps)

    def warning(self, curve: Curve) -> str:
        """A warning if the run is not comparable with the others; else an empty string."""
        if curve.last.step == self.steps:
            return ""
        return (
            f"\nwarning: {curve.case} made {curve.last.step} batches and not {self.steps} as the others: its "
            "simulations were over too early; lower --at_once, or raise --capacity"
        )

    def _train(self, config: str, place: Path, seed: int, own: Sequence[str]) -> Path:
        every = self.sizes.validate_every
        overrides = [
            f"mode={self.sizes.mode}",
            f"seed={seed}",
            f"cluster.num_trainers={self.sizes.trainers}",
            f"training.batch_size={self.sizes.batch_size}",
            f"training.max_steps={self.steps}",
            f"training.validate_every={every}",
            f"logging.log_every={every}",  # so that the records have the applied samples of each validation
            f"logging.run_dir={place.parent}",
            f"logging.name={place.name}",
            "logging.tensorboard=false",
            "checkpoint={every: 0, best: null}",
        ]
        with redirect_stdout(sys.stderr):
            result = paramserver.run(None, HERE / config, overrides=[*overrides, *own])
        return Path(result.run_dir)

    def _ensemble(self, count: int) -> list[str]:
        sizes = self.sizes
        return [
            f"simulations.count={count}",
            f"simulations.at_once={sizes.at_once}",
            f"simulations.steps={sizes.steps}",
            f"simulations.sampler={sizes.sampler}",
            f"simulations.fields.temperature={{shape: [{sizes.n}, {sizes.n}], finite: true}}",
        ]

    def _online(self, count: int, case: Case) -> list[str]:
        sizes = self.sizes
        buffer = [f"kind={case.buffer}", f"capacity={sizes.capacity}", f"watermark={sizes.watermark}"]
        return [
            *self._ensemble(count),
            *(f"buffer.{setting}" for setting in [*buffer, *case.serving(sizes.batch_size)]),
        ]

    def _offline(self, stored: Path) -> list[str]:
        sizes = {"folder": stored, "n": self.sizes.n, "steps": self.sizes.steps}
        return ["training.max_epochs=null", *(f"task_args.{name}={value}" for name, value in sizes.items())]


def interleaved(cases: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Interleave the cases; their order is reversed with each seed."""
    for turn, seed in enumerate(seeds):
        for case in cases if turn % 2 == 0 else cases[::-1]:
            yield case, seed


def draw(folder: Path, cases: Sequence[str]) -> None:
    """Write table and plot from results.jsonl, for these cases and in this order."""
    held = read_lines(folder / "results.jsonl")
    curves = [curve for case in cases for curve in held if curve.case == case]
    (folder / "table.md").write_text(table(curves) + "\n", encoding="utf-8")
    plot(curves, folder / "plot.png")
    print(f"{table(curves)}\n\n{folder / 'table.md'}, {folder / 'plot.png'}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for results, runs and stored simulations; must be new")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--mode", choices=("rpc", "ddp", "local"), default="rpc")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--count", type=int, default=60, help="simulations")
    parser.add_argument("--at_once", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="samples of each simulation")
    parser.add_argument("--n", type=int, default=32, help="points of a field in each direction")
    parser.add_argument("--sampler", default="uniform")
    parser.add_argument("--batch_size", type=int, default=10, help="of each trainer")
    parser.add_argument("--capacity", type=int, default=1000, help="of each trainer's buffer")
    parser.add_argument("--watermark", type=int, default=100)
    parser.add_argument("--validate_every", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help="small sizes and one seed, as a quick check")
    parser.add_argument("--draw", action="store_true", help="table and plot from results.jsonl; no run")
    return parser


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    arguments = make_parser().parse_args(argv)
    if arguments.quick:
        quick = {"seeds": [0], "count": 4, "steps": 40, "n": 8, "capacity": 100, "watermark": 10, "validate_every": 4}
        vars(arguments).update(quick)
    if arguments.mode == "local":
        arguments.trainers = 1
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parsed(argv)
    folder = arguments.folder.resolve()
    results = folder / "results.jsonl"
    if not arguments.draw:
        folder.mkdir(parents=True, exist_ok=False)
        print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}", file=sys.stderr)
        comparison = Comparison(folder, arguments)
        for case, seed in interleaved(arguments.cases, arguments.seeds):
            curve = comparison.run(case, seed)
            write_lines(results, [curve])
            print(f"{case}, seed {seed}: {curve.last}{comparison.warning(curve)}", file=sys.stderr, flush=True)
    draw(folder, arguments.cases)


if __name__ == "__main__":
    main()

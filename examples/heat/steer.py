"""Compares the sampler ``importance`` with uniform draws: the tail of the error at equal numbers of simulations.

    python examples/heat/steer.py runs/steered [--seeds 0 1 2 3 4] [--cases uniform importance] [--count 400]

All runs are those of steered.yaml: equal simulations, batches and learning rates. Each model is then evaluated on the
same simulations with uniform parameters. The error of a simulation is the mean square over its fields, normalised; the
table has its 99th percentile, mean and median over the simulations, averaged over the seeds, and the seconds of
training. The folder then holds the runs and results.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch
from solver import SPREAD, VALIDATION_SEED, solve
from torch import nn

import paramserver

HERE = Path(__file__).resolve().parent
CASES = {
    "uniform": ["simulations.sampler=uniform", "simulations.sampler_args={}"],
    "importance": [],
    "weighted": ["task_args.weighted=true"],
    "power 1": ["simulations.sampler_args.power=1"],
    "sigma 0.1": ["simulations.sampler_args.sigma=0.1"],
    "sigma 0.3": ["simulations.sampler_args.sigma=0.3"],
    "share 0.5": ["simulations.sampler_args.share=0.5"],
}


def errors(model: nn.Module, count: int) -> list[float]:
    """The error of each of ``count`` simulations with uniform parameters, the same ones in each call."""
    middle, half = np.array(model.means), np.array(model.spreads) * 3**0.5
    all_parameters = np.random.default_rng([VALIDATION_SEED, 1]).uniform(
        middle - half, middle + half, (count, len(half))
    )
    steps = torch.arange(model.steps)
    found = []
    with torch.no_grad():
        for parameters in all_parameters:
            fields = torch.from_numpy(np.stack(list(solve(parameters, model.n, model.steps))))
            predicted = model(torch.from_numpy(parameters).expand(len(steps), -1), steps)
            found.append(float(((predicted - fields) / SPREAD).square().mean()))
    return found


def run(case: str, seed: int, folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    overrides = [
        f"seed={seed}",
        f"simulations.count={arguments.count}",
        f"logging.run_dir={folder}",
        f"logging.name={case.replace(' ', '-')}-{seed}",
        "logging.tensorboard=false",
        "checkpoint={every: 0, best: null}",
        *CASES[case],
    ]
    with redirect_stdout(sys.stderr):
        result = paramserver.run(None, HERE / "steered.yaml", overrides=overrides)
    summary = json.loads((Path(result.run_dir) / "summary.json").read_text(encoding="utf-8"))
    return {
        "case": case,
        "seed": seed,
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "errors": errors(result.model(), arguments.evaluated),
    }


def table(results: Sequence[dict[str, object]]) -> str:
    """Markdown with one row per case."""
    figures = {
        "99th percentile": lambda one: float(np.quantile(one["errors"], 0.99)),
        "mean": lambda one: float(np.mean(one["errors"])),
        "median": lambda one: float(np.median(one["errors"])),
        "train, s": lambda one: one["seconds"],
    }
    lines = [f"| case | seeds | batches | {' | '.join(figures)} |", "| --- " * (3 + len(figures)) + "|"]
    cases = list(dict.fromkeys(str(one["case"]) for one in results))
    of = {case: [one for one in results if one["case"] == case] for case in cases}
    for case in cases:
        cells = []
        for figure in figures.values():
            value, base = (statistics.fmean(map(figure, of[name])) for name in (case, cases[0]))
            cells.append(f"{value:.3g}" + ("" if case == cases[0] else f" ({100 * (value / base - 1):+.0f} %)"))
        batches = statistics.fmean(int(str(one["steps"])) for one in of[case])
        lines.append(f"| {case} | {len(of[case])} | {batches:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for results and runs; must be new")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["uniform", "importance"], metavar="CASE")
    parser.add_argument("--count", type=int, default=400, help="simulations")
    parser.add_argument("--evaluated", type=int, default=1000, help="simulations that a model is evaluated on")
    arguments = parser.parse_args(argv)
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True)
    results = []
    for seed in arguments.seeds:
        for case in arguments.cases:
            results.append(run(case, seed, folder, arguments))
            with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(results[-1]) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()

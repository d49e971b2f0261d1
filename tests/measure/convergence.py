"""Whether and how fast the digits are learned in each consistency and with each transport.

    python -m tests.measure.convergence [--epochs 20] [--every 10] [--repeats 1] [--cases ...]

``examples/digits`` (1,437 samples to train, 360 to validate) with batches of 32, validated every so many steps; each
repeat has its own seed. It prints where the accuracy first reaches 0.95: the global step, the number of samples applied
by then (comparable also where steps are not: a step is one batch in ``bounded`` and ``async``) and the seconds of
training; the best accuracy of the run; and the staleness of the applied gradients, from its summary. There are two
trainers, three where one is a backup. The learning rate is the example's in each consistency.

A combination that this version refuses is printed as such and misses nothing. Exits with 1 if a run does not reach the
accuracy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramserver
from paramserver.errors import UnsupportedConfiguration
from tests.measure.common import origin, parser_of, read_records, verdict

CONFIG = Path(__file__).parents[2] / "examples" / "digits" / "config.yaml"
METRIC, REQUIRED = "accuracy", 0.95
CONSISTENCIES: dict[str, list[str]] = {
    "sync": ["server.consistency=sync"],
    "backup": ["server.consistency=sync", "server.backup_trainers=1", "cluster.num_trainers=3"],
    "bounded": ["server.consistency=bounded", "server.staleness_bound=4"],
    "async": ["server.consistency=async"],
}
PLACEMENTS: dict[str, list[str]] = {
    "memory": ["server.transport=shared_memory"],
    "wire": ["server.transport=rpc"],
    "bfloat16": ["server.transport=rpc", "server.wire_dtype=bfloat16"],
    "compute": ["server.compute=server"],
    "2-servers": ["cluster.num_servers=2"],
}
CASES: dict[str, list[str]] = {
    "local": ["mode=local"],
    "ddp": ["mode=ddp"],
    **{f"{c}/{p}": [*CONSISTENCIES[c], *PLACEMENTS[p]] for c in CONSISTENCIES for p in PLACEMENTS},
}


@dataclass(frozen=True)
class Convergence:
    """Where a run first reached the required value (None: nowhere), its best value, and its staleness if any."""

    step: int | None
    samples: int | None
    seconds: float | None
    best: float
    staleness: Mapping[str, Any]


def outcome_of(
    validations: Sequence[Mapping[str, Any]], trained: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]
) -> Convergence:
    """From the records of a run (kinds ``validation`` and ``train``) and its summary."""
    best = max((record["values"][METRIC] for record in validations), default=0.0)
    staleness = summary.get("staleness") or {}
    reached = next((record for record in validations if record["values"][METRIC] >= REQUIRED), None)
    if reached is None:
        return Convergence(None, None, None, best, staleness)
    samples = max((r["samples"] for r in trained if r["step"] <= reached["step"]), default=None)
    return Convergence(reached["step"], samples, reached["seconds"], best, staleness)


def measure(case: str, seed: int, arguments: argparse.Namespace) -> Convergence:
    with tempfile.TemporaryDirectory() as folder:
        own = [f"logging.run_dir={folder}", "logging.name=run", f"logging.log_every={arguments.every}"]
        limits = [f"training.max_epochs={arguments.epochs}", f"training.validate_every={arguments.every}"]
        overrides = [*CASES[case], *own, *limits, "checkpoint.every=0", f"seed={seed}", "logging.tensorboard=false"]
        with redirect_stdout(sys.stderr):
            result = paramserver.run(None, CONFIG, overrides=overrides)
        validations, trained = (read_records(result.run_dir, kind) for kind in ("validation", "train"))
    return outcome_of(validations, trained, result.summary)


def row(case: str, outcomes: Sequence[Convergence]) -> str:
    """Medians over the repeats; one that never came counts as more than any other."""
    reached = all(outcome.step is not None for outcome in outcomes)
    cells = [
        median_of(outcomes, name, form) for name, form in (("step", ".0f"), ("samples", ".0f"), ("seconds", ".1f"))
    ]
    best = statistics.median(outcome.best for outcome in outcomes)
    known = [outcome.staleness for outcome in outcomes if outcome.staleness]
    stale = [middle([one.get(key) for one in known]) for key in ("mean", "p95", "max")]
    return (
        f"  {case:18s}" + "".join(f"{cell:>9s}" for cell in cells) + f"{best:9.3f}"
        f"   {' / '.join(stale) if known else '-':18s}{verdict(reached)}"
    )


def median_of(outcomes: Sequence[Convergence], name: str, form: str) -> str:
    values = [getattr(outcome, name) for outcome in outcomes]
    return "never" if None in values else format(statistics.median(values), form)


def middle(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.3g}" if known else "-"


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, epochs=20, repeats=1)
    parser.add_argument("--every", type=int, default=10, help="steps between two validations")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    print(origin())
    print(
        f"digits: where {METRIC} first is {REQUIRED:g}, {arguments.epochs} epochs, "
        f"{arguments.repeats} repeats (medians)"
    )
    print(
        f"\n  {'':18s}{'step':>9s}{'samples':>9s}{'seconds':>9s}{'best':>9s}   staleness mean / p95 / max", flush=True
    )
    missed = False
    for case in arguments.cases:
        try:
            outcomes = [measure(case, seed, arguments) for seed in range(arguments.repeats)]
        except UnsupportedConfiguration as error:
            print(f"  {case:18s}{error}", flush=True)
            continue
        missed = missed or any(outcome.step is None for outcome in outcomes)
        print(row(case, outcomes), flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

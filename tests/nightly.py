"""``python -m tests.nightly``: campaigns that take hours, one after the other; prints one line for each.

    python -m tests.nightly [CAMPAIGN ...] [--scale 1.0] [--logs FOLDER]

``python -m pytest`` runs a part of each. ``--scale 0.1`` makes a tenth of the seeds, kills and rounds. A campaign that
fails does not keep the others from running; its output is in the folder of logs, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Campaign:
    """Commands of Python that are run in a row.

    Attributes:
        shows: what holds if all of them end with 0.
        commands: returns them, given a function that scales a number.
        busy: run beside so many loops that each keep a core busy.
    """

    shows: str
    commands: Callable[[Callable[[int], int]], list[list[str]]]
    busy: int = 0


def _measure(script: str, *arguments: str) -> list[str]:
    return ["-m", f"tests.measure.{script}", *arguments]


def _unit_tests(count: int) -> list[list[str]]:
    return [["-m", "pytest", "-q", "tests/unit"] for _ in range(count)]


CAMPAIGNS = {
    "seeds": Campaign(
        "the protocol keeps its invariants under random faults",
        lambda scaled: [["-m", "tests.simulation", "--seeds", str(scaled(100_000)), "--first", "10000"]],
    ),
    "mutations": Campaign("tests find each fault that is put into the package", lambda _: [["-m", "tests.mutations"]]),
    "tests": Campaign("all tests pass, with all cases of each", lambda _: [["-m", "pytest", "-q", "--all_cases"]]),
    "faults": Campaign(
        "every fault in every role, phase and consistency ends as documented, over every transport",
        lambda _: [_measure("faults", "--transport", transport) for transport in ("auto", "rpc", "tcp")],
    ),
    "kills": Campaign(
        "no sample is lost or applied twice where processes are killed at random instants",
        lambda scaled: [_measure("kills", "--count", str(scaled(100)))],
    ),
    "joining": Campaign(
        "trainers that join at once, or are killed while they join, all train or are replaced",
        lambda scaled: [_measure("joining", "--repeats", str(scaled(3)))],
    ),
    "damage": Campaign(
        "each damaged checkpoint is refused by name",
        lambda scaled: [_measure("damaged_checkpoints", "--count", str(scaled(1000)))],
    ),
    "hunt": Campaign("no unit test fails now and then on a quiet machine", lambda scaled: _unit_tests(scaled(10))),
    "busy_hunt": Campaign(
        "no unit test fails now and then on a busy machine", lambda scaled: _unit_tests(scaled(10)), busy=4
    ),
}


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep so many cores busy meanwhile."""
    with ExitStack() as stack:
        for _ in range(count):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        yield


def run(name: str, campaign: Campaign, scale: float, logs: Path) -> bool:
    """Run the commands of a campaign, also after one that failed; return whether all ended with 0."""
    commands = campaign.commands(lambda number: max(1, round(number * scale)))
    began, failed = time.perf_counter(), []
    with busy_loops(campaign.busy):
        for number, command in enumerate(commands, start=1):
            log = logs / f"{name}-{number}.log"
            with log.open("w") as file:
                done = subprocess.run(
                    [sys.executable, *command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False
                )
            if done.returncode:
                failed.append(f"{log} (exit code {done.returncode})")
    outcome = f"{len(failed)} of {len(commands)} FAILED: {', '.join(failed)}" if failed else "held"
    print(f"{name}: {campaign.shows}: {outcome} ({time.perf_counter() - began:.0f} s)", flush=True)
    return not failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nightly", description=__doc__)
    parser.add_argument("campaigns", nargs="*", help=f"of {', '.join(CAMPAIGNS)}; all without it")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of seeds, kills and rounds")
    parser.add_argument("--logs", type=Path, default=Path("runs/nightly"), help="folder for the output of the commands")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.campaigns if name not in CAMPAIGNS]:
        parser.error(f"campaigns ({' '.join(unknown)}) must be of {', '.join(CAMPAIGNS)}")
    args.logs.mkdir(parents=True, exist_ok=True)
    names = args.campaigns or list(CAMPAIGNS)
    held = [run(name, CAMPAIGNS[name], args.scale, args.logs.resolve()) for name in names]
    print(f"{sum(held)} of {len(held)} campaigns held")
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())

"""Compares this package with a hand-written loop, Lightning, Ray's parameter server and the official tutorial.

    python examples/peers/compare.py [--models digits mlp] [--trainers 2] [--steps 300] [--repeats 5] [--official DIR]

Every case trains the same network from the same weights, on the same batches of 32 in the same order, with one thread
in each process, on this machine: ``rpc`` and ``ddp`` are this package, ``loop`` is DistributedDataParallel by hand.
Runs are fresh processes, and the cases are interleaved. A step lasts from one batch to the next; the first ``--warm``
are left out, and so are start, validation and saving. Speeds are samples per second of all trainers
together: their geometric mean, and in brackets the 95 % interval over the repeats; ratios are of the same repeat.

``--official`` names a checkout of github.com/pytorch/examples. Its rpc_parameter_server.py is run with other data, and
nothing else replaced, and this package on the script's own network, each with one trainer: with two the script
fails (see tests/measure/tutorial.py, which does this).
"""

from __future__ import annotations

import argparse
import importlib.util
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from work import BATCH_SIZE, HERE, NAMES, ROOT, read_rows

from paramserver.tools.bench.cases import interleaved
from paramserver.tools.report.formatting import format_estimate, join_names
from paramserver.tools.report.statistics import estimate, ratio
from tests.measure import tutorial
from tests.measure.common import measuring_environment, origin
from tests.measure.foreign import run_until_error

OURS = ("rpc", "ddp")
DEADLINE_S = 300.0
OFFICIAL, OFFICIAL_SCRIPT = "official", Path("distributed/rpc/parameter_server/rpc_parameter_server.py")

Rows = Sequence[tuple[float, int, float]]
Speeds = dict[str, dict[int, float | None]]


@dataclass(frozen=True)
class Case:
    """A program that trains.

    Args:
        script: in this folder, with its flags.
        needs: the package that it requires; None without one.
        starts_all: whether it starts all processes; otherwise it is started once for each rank.
    """

    script: tuple[str, ...]
    needs: str | None = None
    starts_all: bool = True


CASES = {
    "rpc": Case(("ours.py", "--mode", "rpc")),
    "ddp": Case(("ours.py", "--mode", "ddp")),
    "loop": Case(("ddp_loop.py",), starts_all=False),
    "lightning": Case(("lightning_ddp.py",), needs="lightning", starts_all=False),
    "ray": Case(("ray_server.py",), needs="ray"),
}


class PeerError(RuntimeError):
    """A case failed; the message is its error."""


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def missing_packages(names: Sequence[str], installed: Callable[[str], bool] = is_installed) -> list[str]:
    """The cases among ``names`` whose package is not installed."""
    return [name for name in names if (need := CASES[name].needs) is not None and not installed(need)]


def missing_sentence(names: Sequence[str]) -> str:
    return (
        f"Left out, because they are not installed: {join_names(names)} (python -m pip install 'paramserver[peers]')."
    )


# One run.


def commands_of(case: str, model: str, trainers: int, steps: int, folder: Path) -> list[list[str]]:
    """The arguments of the interpreters that run at the same time."""
    script, *flags = CASES[case].script
    words = [str(HERE / script), *flags, "--model", model, "--folder", str(folder)]
    words += ["--trainers", str(trainers), "--steps", str(steps)]
    if CASES[case].starts_all:
        return [words]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [[*words, "--rank", str(rank), "--port", str(port)] for rank in range(trainers)]


def environment() -> Mapping[str, str]:
    """The environment of every program: one thread, the same allocator, the modules of this checkout."""
    environ = measuring_environment()
    return {**environ, "PYTHONPATH": f"{ROOT}:{environ.get('PYTHONPATH', '')}".rstrip(":")}


def run(case: str, model: str, trainers: int, steps: int) -> list[Rows]:
    """The steps of each trainer in one fresh run.

    Raises:
        PeerError: it failed, or took longer than ``DEADLINE_S``.
    """
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        error = run_until_error(commands_of(case, model, trainers, steps, Path(name)), environment(), DEADLINE_S)
        if error is not None:
            raise PeerError(error)
        return [*read_rows(Path(name), trainers)]


def speed(trainers: Sequence[Rows], warm: int) -> float:
    """Samples per second of all trainers, each between the beginning of its step ``warm`` and of its last one."""
    return sum(_speed(rows[warm:]) for rows in trainers)


def _speed(rows: Rows) -> float:
    return sum(samples for _, samples, _ in rows[:-1]) / (rows[-1][0] - rows[0][0])


# All of them.


def measure_all(
    cases: Sequence[str], repeats: int, measure: Callable[[str], float], failures: list[str], title: str
) -> Speeds:
    """Speeds by case and repeat; the speed of a failed run is None, and its error is appended to ``failures``."""
    speeds: Speeds = {case: {} for case in cases}
    for repeat, case in interleaved(cases, repeats):
        try:
            found = speeds[case][repeat] = measure(case)
            outcome = f"{found:.0f} samples/s"
        except (PeerError, RuntimeError) as error:
            speeds[case][repeat] = None
            outcome = f"failed: {str(error).strip().splitlines()[-1]}"
            failures.append(f"{title}, {case}, repeat {repeat + 1} {outcome}")
        print(f"  {repeat + 1}/{repeats} {title} {case}: {outcome}", file=sys.stderr, flush=True)
    return speeds


def table(speeds: Speeds, ours: Sequence[str] = OURS) -> str:
    """A row for each case: its speed, and how many times as fast each of ours is."""
    against = [name for name in ours if name in speeds]
    rows = [("", "samples/s", *(f"{name}, times this" for name in against))]
    for case, found in speeds.items():
        times = ("1" if case == one else format_estimate(ratio(speeds[one], found)) for one in against)
        rows.append((case, format_estimate(estimate(found.values())), *times))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def compare(model: str, cases: Sequence[str], arguments: argparse.Namespace, failures: list[str]) -> None:
    def measure(case: str) -> float:
        return speed(run(case, model, arguments.trainers, arguments.steps), arguments.warm)

    speeds = measure_all(cases, arguments.repeats, measure, failures, model)
    count = f"{arguments.trainers} trainer{'s' if arguments.trainers > 1 else ''}"
    size = f"{arguments.steps - arguments.warm - 1} steps, {arguments.repeats} repeats"
    print(f"\n{model}, {count}, batch {BATCH_SIZE}, {size}")
    print(table(speeds), flush=True)


def compare_official(script: Path, arguments: argparse.Namespace, failures: list[str]) -> None:
    source = script.read_text(encoding="utf-8")
    given = argparse.Namespace(steps=arguments.steps, warm=arguments.warm, own_threads=False)
    names = {"rpc": "ours", OFFICIAL: "tutorial"}
    speeds = measure_all(
        list(names), arguments.repeats, lambda case: tutorial.measure(names[case], source, given), failures, "tutorial"
    )
    print(f"\nthe tutorial's network, 1 trainer, batch {tutorial.BATCH_SIZE}, {arguments.repeats} repeats")
    print(table(speeds), flush=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=NAMES, default=["digits", "mlp"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--official", type=Path, metavar="DIR", help="a checkout of pytorch/examples")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    return parser


def main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    if arguments.warm < 0 or arguments.steps < arguments.warm + 2 or min(arguments.trainers, arguments.repeats) < 1:
        parser.error("--trainers and --repeats must be at least 1, and --steps at least --warm + 2; correct them")
    script = None if arguments.official is None else arguments.official / OFFICIAL_SCRIPT
    if script is not None and not script.is_file():
        parser.error(
            f"--official ({arguments.official}) must hold {OFFICIAL_SCRIPT}; check out github.com/pytorch/examples at "
            f"commit {tutorial.COMMIT}"
        )
    print(origin())
    absent, failures = missing_packages(arguments.cases), list[str]()
    if absent:
        print(missing_sentence(absent))
    for model in arguments.models:
        compare(model, [case for case in arguments.cases if case not in absent], arguments, failures)
    if script is not None:
        compare_official(script, arguments, failures)
    print("".join(f"\n{one}" for one in failures), file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())

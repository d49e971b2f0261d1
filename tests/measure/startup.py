"""How long a run takes from the command to its first step, and where that time goes.

    python -m tests.measure.startup [--config examples/digits/config.yaml] [--mode rpc] [--repeats 5] [--set k=v ...]

Starts the main job (one server, two trainers: three ranks) for one step, repeatedly. Each trainer records how long each
phase of its start took (its ``phase`` record); before them is ``command``, from the start of the command to the moment
at which the supervisor begins to count. It prints medians over the repeats, then the wall clock from outside: to the
first step of the last trainer, and to the end of the command; and the CPU time of all processes together, which is more
reliable on a machine with other load. ``--imports MODULE`` prints instead the cost of importing a module in a fresh
interpreter: the packages that take longest, with all that they import.
"""

from __future__ import annotations

import re
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.measure.common import measuring_environment, parser_of, read_records, run_fresh, spread, verdict

TARGET_S = 3.0
SHOWN_IMPORTS = 25


@dataclass(frozen=True)
class Start:
    """Seconds of one start: each rank's phases, from the command to the first step and to the end, and CPU time."""

    phases: dict[int, dict[str, float]]
    first_step_s: float
    end_s: float
    cpu_s: float


def measure(config: Path, mode: str, overrides: list[str]) -> Start:
    with tempfile.TemporaryDirectory() as folder:
        limits = ["training.max_epochs=null", "training.max_steps=1"]
        own = [f"logging.run_dir={folder}", "logging.name=run"]
        words = [word for setting in [*limits, *own, *overrides] for word in ("--set", setting)]
        began, cpu_s = time.time(), children_cpu_s()
        command = ["-m", "paramserver.launch", "--config", str(config), "--mode", mode, *words]
        run_fresh([command], measuring_environment())
        ended, cpu_s = time.time(), children_cpu_s() - cpu_s
        records = read_records(Path(folder) / "run", "phase")
    phases = {r["rank"]: {"command": r["time"] - sum(r["phases"].values()) - began, **r["phases"]} for r in records}
    return Start(phases, max(r["time"] for r in records) - began, ended - began, cpu_s)


def children_cpu_s() -> float:
    """CPU time of all processes that were started here, or by those, and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def report(starts: list[Start]) -> None:
    ranks = sorted(starts[0].phases)
    print(f"{'median s':24s}" + "".join(f"{f'rank {rank}':>9s}" for rank in ranks))
    for phase in starts[0].phases[ranks[0]]:
        row = [statistics.median(start.phases[rank].get(phase, 0.0) for start in starts) for rank in ranks]
        print(f"  {phase:22s}" + "".join(f"{seconds:9.2f}" for seconds in row))
    first_steps = [start.first_step_s for start in starts]
    met = statistics.median(first_steps) < TARGET_S
    print(f"command to first step    {spread(first_steps)} s, below {TARGET_S:g}: {verdict(met)}")
    print(f"command to end           {spread([start.end_s for start in starts])} s")
    print(f"CPU time, all processes  {spread([start.cpu_s for start in starts])} s")


# Imports.


def print_imports(module: str, repeats: int) -> None:
    """Cumulated import times (``python -X importtime``) of packages and their modules one level down."""
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        for name, seconds in import_times(module).items():
            taken[name].append(seconds)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    for name, seconds in sorted(medians.items(), key=lambda item: -item[1])[:SHOWN_IMPORTS]:
        print(f"  {seconds:6.2f} s  {name}")


def import_times(module: str) -> dict[str, float]:
    (output,) = run_fresh([["-X", "importtime", "-c", f"import {module}"]], measuring_environment())
    lines = re.findall(r"^import time:\s+\d+ \|\s+(\d+) \|\s+(\S+)$", output, re.MULTILINE)
    return {name: int(microseconds) / 1e6 for microseconds, name in lines if name.count(".") < 3}


def main() -> None:
    parser = parser_of(__doc__, repeats=5)
    parser.add_argument("--config", type=Path, default=Path("examples/digits/config.yaml"))
    parser.add_argument("--mode", default="rpc")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--imports", metavar="MODULE", help="print what importing this costs, and nothing else")
    arguments = parser.parse_args()
    if arguments.imports is not None:
        print_imports(arguments.imports, arguments.repeats)
        return
    starts = []
    for repeat in range(arguments.repeats):
        starts.append(measure(arguments.config, arguments.mode, arguments.overrides))
        print(f"  {repeat + 1}/{arguments.repeats}: {starts[-1].first_step_s:.2f} s", file=sys.stderr)
    print(f"{arguments.config}, mode {arguments.mode}, {arguments.repeats} repeats")
    report(starts)


if __name__ == "__main__":
    main()

"""Whether two runs of the same benchmark agree within what they report, and how wide their intervals are.

    python -m tests.measure.twice [--config examples/digits/config.yaml] [--pairs 10] [--repeats 3] [--seconds 5] [...]

Runs the benchmark twice for each pair, one after the other, in fresh processes and folders. A case agrees in a pair
where the interval of B over A, which ``benchmark compare`` prints, holds 1: then the two differ by less than the
interval they report. Nine of ten must agree, and the width of the interval of a case's throughput must be below 15 % of
its mean. Arguments after ``--`` are passed to the benchmark.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paramserver.tools.report.cases import SPEED, ReportCase, cases_of
from paramserver.tools.report.results import read_results
from paramserver.tools.report.statistics import ratio
from tests.measure.common import origin, spread, verdict

REQUIRED = 0.9
WIDEST = 0.15
DEADLINE_S = 1800.0


@dataclass
class Agreement:
    """The pairs of one case: whether each agreed, the ratios, and the width of each interval."""

    held: list[bool] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)

    def add(self, before: ReportCase, after: ReportCase) -> None:
        """One more pair.

        Raises:
            ValueError: one of them has fewer than two completed repeats.
        """
        times = ratio(after.values(SPEED), before.values(SPEED), are_interleaved=False)
        widths = [case.speed.relative_width for case in (before, after) if case.speed is not None]
        known = [width for width in widths if width is not None]
        if times is None or not times.has_interval or len(known) != 2:
            raise ValueError(f"{before.name} must have two completed repeats in both; give --repeats 2 or more")
        self.held.append(not times.excludes(1))
        self.ratios.append(times.value)
        self.widths += known

    @property
    def share(self) -> float:
        return sum(self.held) / len(self.held)


def agreements(pairs: Sequence[tuple[Sequence[ReportCase], Sequence[ReportCase]]]) -> dict[str, Agreement]:
    """By case, in the order of the first benchmark."""
    found: dict[str, Agreement] = {}
    for first, second in pairs:
        others = {case.name: case for case in second}
        for case in first:
            found.setdefault(case.name, Agreement()).add(case, others[case.name])
    return found


def table(found: dict[str, Agreement]) -> str:
    rows = [f"  {'':32s}{'agree':10s}{'B / A':26s}width of the interval, % of the mean"]
    for name, one in found.items():
        width = statistics.median(one.widths)
        rows.append(
            f"  {name:32s}{f'{sum(one.held)} of {len(one.held)}':10s}{spread(one.ratios, '.3f'):26s}"
            f"{spread([100 * w for w in one.widths], '.1f')}, below {100 * WIDEST:g}: {verdict(width < WIDEST)}"
        )
    held = [one for agreement in found.values() for one in agreement.held]
    share = sum(held) / len(held)
    rows.append(f"  all: {sum(held)} of {len(held)}, at least {REQUIRED:g}: {verdict(share >= REQUIRED)}")
    return "\n".join(rows)


def benchmark(config: Path, flags: Sequence[str]) -> list[ReportCase]:
    """One fresh benchmark.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        words = [sys.executable, "-m", "paramserver.benchmark", "--config", str(config), "--out", str(out), *flags]
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
        return cases_of(read_results(out).results)


def main() -> None:
    words = sys.argv[1:]
    given = words[words.index("--") + 1 :] if "--" in words else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("examples/digits/config.yaml"))
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args(words[: len(words) - len(given) - 1] if "--" in words else words)
    if arguments.pairs < 1 or arguments.repeats < 2:
        parser.error("--pairs must be at least 1 and --repeats at least 2, or there is nothing to compare; raise them")
    flags = ["--repeats", str(arguments.repeats), "--seconds", f"{arguments.seconds:g}", *given]
    print(origin())
    pairs = []
    for number in range(arguments.pairs):
        pairs.append((benchmark(arguments.config, flags), benchmark(arguments.config, flags)))
        print(f"{number + 1} of {arguments.pairs}", file=sys.stderr, flush=True)
        print(table(agreements(pairs[-1:])), file=sys.stderr, flush=True)
    sizes = f"{arguments.pairs} pairs of {arguments.repeats} repeats of {arguments.seconds:g} s"
    print(f"\n{sizes}: median (least to greatest)")
    print(table(agreements(pairs)))


if __name__ == "__main__":
    main()

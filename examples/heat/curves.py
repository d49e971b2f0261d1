"""Results of the runs of compare.py: read from their records, and written as JSON lines, a table and a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# The palette of Okabe and Ito, which is safe for colour-blind readers.
_COLORS = ("#0072B2", "#E69F00", "#999999", "#56B4E9", "#F0E442", "#009E73", "#CC79A7", "#D55E00")


@dataclass(frozen=True)
class Point:
    """One validation.

    Attributes:
        step: number of updates before it.
        samples: applied by then.
        seconds: since training began, or since simulating began if that came first.
        loss: mean squared error of normalised temperatures.
        kelvin: mean absolute error.
    """

    step: int
    samples: int
    seconds: float
    loss: float
    kelvin: float


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        case: name of the case.
        seed: of the run.
        stored_s: seconds for simulating and storing before the run; 0 online.
        seconds: of training, waiting for data included.
        different: distinct samples that it was trained on.
        points: its validations, in order; at least one.
    """

    case: str
    seed: int
    stored_s: float
    seconds: float
    different: int
    points: tuple[Point, ...]

    @property
    def last(self) -> Point:
        return self.points[-1]

    @property
    def rate(self) -> float:
        """Samples per second, simulating included."""
        return self.last.samples / (self.stored_s + self.seconds)


def read_run(run_dir: Path, case: str, seed: int, stored_s: float = 0.0, different: int | None = None) -> Curve:
    """Read the curve from a run folder.

    Args:
        run_dir: with metrics.jsonl and summary.json.
        case: its name in the comparison.
        seed: of the run.
        stored_s: seconds for simulating and storing before the run.
        different: distinct samples that it was trained on; None = those that the buffers served.
    """
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    applied = {record["step"]: record["samples"] for record in records if record["kind"] == "train"}
    applied[summary["steps"]] = summary["samples"]
    points = {  # a run's last validation may come twice
        record["step"]: Point(
            record["step"],
            applied[record["step"]],
            stored_s + record["seconds"],
            record["values"]["loss"],
            record["values"]["kelvin"],
        )
        for record in records
        if record["kind"] == "validation"
    }
    if different is None:
        unseen = {record["rank"]: record["unseen"] for record in records if record["kind"] == "buffer"}
        different = summary["buffer"]["puts"] - sum(unseen.values())
    return Curve(case, seed, stored_s, summary["seconds"], different, tuple(points.values()))


def write_lines(file: Path, curves: Iterable[Curve]) -> None:
    """Append the curves, one per line."""
    with file.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(asdict(curve)) + "\n" for curve in curves)


def read_lines(file: Path) -> list[Curve]:
    values = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [Curve(**{**one, "points": tuple(Point(**point) for point in one["points"])}) for one in values]


def by_case(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Group the curves by case, in order of first appearance."""
    cases: dict[str, list[Curve]] = {}
    for curve in sorted(curves, key=lambda curve: curve.seed):
        cases.setdefault(curve.case, []).append(curve)
    return {case: cases[case] for case in dict.fromkeys(curve.case for curve in curves)}


def table(curves: Sequence[Curve], baseline: str = "fifo") -> str:
    """Markdown with one row per case: means over the seeds; the validation error also with its extremes."""
    cases = by_case(curves)
    base = mean(c.last.loss for c in cases[baseline]) if baseline in cases else None
    head = ["case", "batches", "different samples", "validation error", "in kelvin", f"against {baseline}"]
    head += ["simulate and store, s", "train, s", "samples/s"]
    return "\n".join([_line(head), _line(["---"] * len(head)), *(_line(_row(*item, base)) for item in cases.items())])


def _row(case: str, curves: Sequence[Curve], base: float | None) -> list[str]:
    losses = [curve.last.loss for curve in curves]
    return [
        case,
        f"{mean(c.last.step for c in curves):.0f}",
        f"{mean(c.different for c in curves):.0f}",
        f"{mean(losses):.3g} ({min(losses):.3g} to {max(losses):.3g})",
        f"{mean(c.last.kelvin for c in curves):.2f}",
        "" if base is None else f"{100 * (mean(losses) / base - 1):+.0f} %",
        f"{mean(c.stored_s for c in curves):.1f}" if any(c.stored_s for c in curves) else "-",
        f"{mean(c.seconds for c in curves):.1f}",
        f"{mean(c.rate for c in curves):.0f}",
    ]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def band(curves: Sequence[Curve]) -> list[tuple[Point, float, float]]:
    """The mean over the seeds at each validation that all runs have, with the smallest and the largest loss."""
    at: list[Mapping[int, Point]] = [{point.step: point for point in curve.points} for curve in curves]
    shared = sorted(set.intersection(*(set(points) for points in at)))
    rows = [[points[step] for points in at] for step in shared]
    return [(_mean_point(row), min(p.loss for p in row), max(p.loss for p in row)) for row in rows]


def _mean_point(points: Sequence[Point]) -> Point:
    samples = round(mean(p.samples for p in points))
    means = (mean(getattr(p, name) for p in points) for name in ("seconds", "loss", "kelvin"))
    return Point(points[0].step, samples, *means)


def plot(curves: Sequence[Curve], file: Path) -> None:
    """Plot the validation error over samples and over time, and samples per second, into ``file``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    by_samples, by_time, rates = figure.subplots(1, 3, width_ratios=(5, 5, 3))
    cases = by_case(curves)
    for (case, own), color in zip(cases.items(), _COLORS, strict=False):
        points, low, high = zip(*band(own), strict=True)
        for axes, x in ((by_samples, [p.samples for p in points]), (by_time, [p.seconds for p in points])):
            axes.plot(x, [p.loss for p in points], color=color, label=case, marker=".", markersize=4)
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    for axes, words in ((by_samples, "samples applied"), (by_time, "seconds, simulating included")):
        axes.set(xlabel=words, yscale="log")
        axes.grid(alpha=0.3)
    by_samples.set_ylabel("validation error (normalised, squared)")
    figure.legend(*by_samples.get_legend_handles_labels(), loc="outside upper center", ncols=len(cases), frameon=False)
    rates.barh(list(cases), [mean(c.rate for c in own) for own in cases.values()], color=_COLORS[: len(cases)])
    rates.invert_yaxis()
    rates.set_xlabel("samples/s, simulating included")
    figure.savefig(file, dpi=80)

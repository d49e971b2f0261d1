"""The plots of a report, drawn by matplotlib as SVG: styles do not rely on colour, and figures fit a narrow page."""

from __future__ import annotations

import html
import io
import itertools
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from paramserver.metrics.records import MEASURED, PHASES
from paramserver.tools.report.cases import SPEED, ReportCase, local_baseline, scaling_families
from paramserver.tools.report.formatting import format_number
from paramserver.tools.report.results import CaseResult
from paramserver.tools.report.statistics import interpolated

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Drawing with matplotlib.

# Okabe and Ito's palette, "Color Universal Design", 2008, without its yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
# The cycles have different lengths, so that 45 lines differ in stroke or marker without colour.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (7, 1.5, 1.5, 1.5, 1.5, 1.5)))
HATCHES = ("", "////", "||||", "\\\\\\\\", "xx", "--", "++")  # of straight strokes: each dot would cost a kilobyte
# Inches. The page never shows a figure so small that its text has less than 12 pixels.
WIDTH = 4.0
LETTERS = 45  # the number of letters in a line of this width
_LINE, _THICKNESS = 0.19, 0.26
_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#444444",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "grid.color": "#dddddd",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "text.parse_math": False,  # names may hold dollars
    "text.usetex": False,
}


def has_matplotlib() -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def new_figure(height: float, rows: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of the page's width and ``height`` inches, with ``rows`` axes one below the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False, **options)
    return figure, [row[0] for row in axes]


def svg_of(figure: Figure, name: str, caption: str) -> str:
    """The figure as an SVG element; its ids begin with ``name``, so that they are unique on a page."""
    import matplotlib

    salt: Any = {"svg.hashsalt": name}
    text = io.StringIO()
    with matplotlib.rc_context(salt):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    label = html.escape(caption.replace("`", ""), quote=True)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1).rstrip()


def wrapped(name: str, letters: int = LETTERS) -> str:
    """The name in lines that fit into the width of a figure."""
    return "\n".join(textwrap.wrap(name, letters, break_on_hyphens=False)) or name


def named_rows(names: Sequence[str]) -> tuple[Figure, Axes, list[float]]:
    """Axes with a row for each name, and the name above its row, where it has the whole width.

    Return the figure, its axes and the height of each row's middle; a row is ``_THICKNESS`` inches high.
    """
    texts = [wrapped(name) for name in names]
    heights = [_THICKNESS + _LINE * (text.count("\n") + 1) + 0.08 for text in texts]
    figure, (axes,) = new_figure(sum(heights) + 0.75)
    bottom, middles = 0.0, []
    for text, height in zip(texts, heights, strict=True):
        middles.append(bottom + height - _THICKNESS / 2)
        axes.text(
            0.0,
            bottom + height - _THICKNESS - 0.03,
            text,
            transform=axes.get_yaxis_transform(),
            ha="left",
            va="bottom",
            linespacing=1.15,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},  # no line of the grid runs through it
        )
        bottom += height
    axes.set_ylim(bottom + 0.06, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    return figure, axes, middles


# Curves of several repeats.

Curve: TypeAlias = list[tuple[float, float]]
SAMPLES, SECONDS = 0, 1
_POINTS = 60


@dataclass(frozen=True)
class Picture:
    """A plot as an SVG element, its name among those of a report, and a caption that describes what it shows."""

    name: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Band:
    """The mean, minimum and maximum of the repeats at each ``x``."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def loss_against(axis: int) -> Callable[[CaseResult], Curve]:
    """A function that returns the loss of a record against its samples (0) or seconds (1)."""
    return lambda result: [(point[:2][axis], point[2]) for point in result.loss if point[2] is not None]


def validation_against(axis: int, name: str) -> Callable[[CaseResult], Curve]:
    """A function that returns a validation metric of a record against its samples (0) or seconds (1)."""

    def get(result: CaseResult) -> Curve:
        pairs = [(point[:2][axis], point[2].get(name)) for point in result.validation]
        return [(x, value) for x, value in pairs if value is not None]

    return get


def band(curves: Iterable[Curve]) -> Band | None:
    """The band over the range that all curves cover, each smoothed to ``_POINTS`` points; None without any point."""
    thinned = [_thinned(sorted(curve)) for curve in curves if curve]
    if not thinned:
        return None
    start, end = max(curve[0][0] for curve in thinned), min(curve[-1][0] for curve in thinned)
    if start > end:  # no common range: the first curve alone is drawn
        thinned = thinned[:1]
        start, end = thinned[0][0][0], thinned[0][-1][0]
    count = min(_POINTS, max(map(len, thinned))) if end > start else 1
    places = [start + (end - start) * i / max(count - 1, 1) for i in range(count)]
    if len(thinned) == 1:
        places = [x for x, _ in thinned[0]]
    columns = [[interpolated(curve, x) for curve in thinned] for x in places]
    return Band(places, [statistics.fmean(c) for c in columns], list(map(min, columns)), list(map(max, columns)))


def _thinned(curve: Curve) -> Curve:
    """The curve with neighbours averaged to at most ``_POINTS`` points."""
    if len(curve) <= _POINTS:
        return curve
    edges = [i * len(curve) // _POINTS for i in range(_POINTS + 1)]
    parts = [curve[a:b] for a, b in itertools.pairwise(edges)]
    return [(statistics.fmean(x for x, _ in part), statistics.fmean(y for _, y in part)) for part in parts]


# The plots.

_LEGEND_LINE = 0.21
_LATE = 40  # gradients of this staleness or more are counted together
_TALL = 20.0  # a longest step of this many medians gets a logarithmic axis
_METRICS = 3
_BEYOND = 1.5  # times the fastest repeat: wider intervals, as of two very different repeats, are cut off there


def draw(cases: Sequence[ReportCase]) -> dict[str, list[Picture]]:
    """Draw every plot for which there are numbers.

    Return the pictures by the section of the report to which they belong.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    timed = sorted((case for case in cases if case.speed is not None), key=lambda case: -_value(case))
    found: dict[str, list[Picture]] = {}
    with matplotlib.rc_context(_STYLE):  # in place of the user's own settings
        for section, drawn in (
            ("throughput", _throughput(timed)),
            ("scaling", _scaling(timed)),
            ("steps", _steps(timed)),
            ("phases", _phases(timed)),
            ("learning", _learning(timed)),
            ("staleness", _staleness(timed)),
            *(
                (one.section, _lines(timed, _curve_of(one.record), one.record, "samples", one.label, one.caption))
                for one in MEASURED
                if one.caption
            ),
        ):
            found.setdefault(section, []).extend(drawn)
    return found


def _value(case: ReportCase) -> float:
    return case.speed.value if case.speed is not None else 0.0


def _picture(figure: Figure, name: str, caption: str) -> Picture:
    return Picture(name, svg_of(figure, name, caption), caption)


# A row for each case.


def _throughput(cases: Sequence[ReportCase]) -> Iterator[Picture]:
    if not cases:
        return
    figure, axes, rows = named_rows([case.name for case in cases])
    largest, most = 0.0, _most(cases)
    for case, y in zip(cases, rows, strict=True):
        speed = case.speed
        assert speed is not None
        is_baseline = case.baseline is not None
        axes.barh(
            y,
            speed.value,
            height=0.24,
            facecolor="#e4e4e4" if is_baseline else COLOURS[0],
            edgecolor="#555555",
            hatch="////" if is_baseline else "",
        )
        repeats = [value for value in case.values(SPEED).values() if value is not None]
        axes.plot(repeats, [y] * len(repeats), "o", markersize=3, color="white", markeredgecolor="black", zorder=4)
        end = min(max([speed.high or speed.value, *repeats]), most)
        if speed.low is not None and speed.high is not None:
            ends = [[speed.value - speed.low], [min(speed.high, most) - speed.value]]
            axes.errorbar(speed.value, y, xerr=ends, color="black", capsize=3, linewidth=1.4, zorder=3)
            if speed.high > most:
                axes.plot(most, y, ">", color="black", markersize=6, zorder=4)
        axes.annotate(format_number(speed.value), (end, y), (5, 0), textcoords="offset points", va="center")
        largest = max(largest, end)
    axes.set_xlim(0, largest * 1.16 or 1)
    axes.set_xlabel("samples per second")
    yield _picture(
        figure,
        "throughput",
        "Applied samples per second: geometric mean, 95 % interval (an arrow: it is wider) and each repeat (dots). "
        "Hatched: baselines.",
    )


def _most(cases: Sequence[ReportCase]) -> float:
    """The largest speed that is drawn."""
    return _BEYOND * max(value for case in cases for value in case.values(SPEED).values() if value is not None)


def _steps(cases: Sequence[ReportCase]) -> Iterator[Picture]:
    known = [case for case in cases if case.step_ms.get("p50")]
    if not known:
        return
    figure, axes, rows = named_rows([case.name for case in known])
    for case, y in zip(known, rows, strict=True):
        ms = case.step_ms
        low, high = ms.get("p25", ms["p50"]), ms.get("p75", ms.get("p90", ms["p50"]))
        axes.plot([ms.get("p5", low), ms.get("p95", high)], [y, y], color="#444444", linewidth=1.4, zorder=2)
        axes.barh(y, high - low, left=low, height=0.2, facecolor=COLOURS[4], edgecolor="black", zorder=3)
        axes.plot([ms["p50"]] * 2, [y - 0.1, y + 0.1], color="black", linewidth=2.5, zorder=4)
        for key, marker in (("mean", "D"), ("p99", "|"), ("max", "x")):
            if ms.get(key) is not None:
                axes.plot(ms[key], y, marker, color="black", markersize=5, markerfacecolor="white", zorder=5)
    if max(case.step_ms.get("max", 0.0) for case in known) > _TALL * min(case.step_ms["p50"] for case in known):
        _logarithmic(axes)
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds per step")
    boxed = "quarter to three quarters" if "p25" in known[0].step_ms else "median to 90 %"
    lined = "5 to 95 %" if "p25" in known[0].step_ms else "to 95 %"
    yield _picture(
        figure,
        "steps",
        f"Duration of a step. Box: {boxed} of all steps, thick mark: median, line: {lined}; diamond: mean, tick: 99 %, "
        "cross: the longest.",
    )


def _logarithmic(axes: Axes) -> None:
    """Ticks at 1, 2, 5, 10, ... (at 1, 10, ... of a wide range), in plain numbers: powers are set as formulas."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _phases(cases: Sequence[ReportCase]) -> Iterator[Picture]:
    known = [case for case in cases if any(case.phases_ms.values())]
    if not known:
        return
    figure, axes, rows = named_rows([case.name for case in known])
    # Colours and hatches follow the place among all phases, so that they mean the same in every report.
    shown = [name for name in PHASES if any(case.phases_ms.get(name) for case in known)]
    for i, name in enumerate(PHASES):
        lefts = [sum(case.phases_ms.get(before, 0.0) for before in PHASES[:i]) for case in known]
        widths = [case.phases_ms.get(name, 0.0) for case in known]
        if name in shown:
            axes.barh(
                rows,
                widths,
                left=lefts,
                height=0.22,
                label=name,
                facecolor=_light(COLOURS[i % len(COLOURS)]),
                edgecolor="black",
                linewidth=0.6,
                hatch=HATCHES[i],
            )
    hidden = [case.phases_ms.get("hidden", 0.0) for case in known]
    if any(hidden):
        axes.barh([y + 0.145 for y in rows], hidden, height=0.05, color="#888888", label="hidden")
    axes.set_xlabel("milliseconds per step")
    _legend_below(figure, axes, 2)
    yield _picture(
        figure,
        "phases",
        "Mean phases of a step in a trainer's main thread, which sum to the step; apply is the server's update, "
        "and those of local steps. Thin grey bar: hidden, which overlapped them.",
    )


def _light(colour: str) -> str:
    """The colour at half strength, on which a hatch is visible."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{(part + 255) // 2:02x}" for part in parts)


def _legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    lines = -(-len(labels) // columns) if columns > 1 else sum(label.count("\n") + 1 for label in labels)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + _LEGEND_LINE * lines + 0.1)
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, handlelength=3.2)


# A line for each case.


def _learning(cases: Sequence[ReportCase]) -> Iterator[Picture]:
    axes_of = ((SECONDS, "seconds", "seconds of training"), (SAMPLES, "samples", "samples"))
    for axis, name, label in axes_of:
        caption = f"Train loss against {label}: mean and range of the repeats."
        yield from _lines(cases, loss_against(axis), f"loss-{name}", label, "train loss", caption)
    results = [one for case in cases for one in case.completed]
    metrics = sorted({name for one in results for point in one.validation for name in point[2]})
    for i, metric in enumerate(metrics[:_METRICS]):
        for axis, name, label in axes_of:
            caption = f"Validation: {metric} against {label}, mean and range of the repeats."
            get = validation_against(axis, metric)
            yield from _lines(cases, get, f"validation-{i}-{name}", label, metric, caption, _target(results, metric))


def _curve_of(quantity: str) -> Callable[[CaseResult], Curve]:
    return lambda result: [
        (samples, value) for samples, _, value in result.quantities.get(quantity, ()) if value is not None
    ]


def _target(results: Sequence[CaseResult], metric: str) -> float | None:
    return next((one.target[metric] for one in results if one.target and metric in one.target), None)


def _lines(
    cases: Sequence[ReportCase],
    get: Callable[[CaseResult], Curve],
    name: str,
    label: str,
    quantity: str,
    caption: str,
    target: float | None = None,
) -> Iterator[Picture]:
    # The repeats have their points at different places: a band resamples them to common ones.
    bands = [(case, found) for case in cases if (found := band(get(one) for one in case.completed)) is not None]
    if all(len(found.x) < 2 for _, found in bands):
        return  # one validation at the end makes no curve; the table has it
    figure, (axes,) = new_figure(3.4)
    for i, (case, found) in enumerate(bands):
        axes.plot(found.x, found.mean, label=wrapped(case.name, LETTERS - 8), **_line_style(i, len(found.x)))
        axes.fill_between(found.x, found.low, found.high, color=COLOURS[i % len(COLOURS)], alpha=0.15, linewidth=0)
    if target is not None:
        axes.axhline(target, color="#666666", linewidth=1.2, linestyle=(0, (2, 2)), label=f"target {target:g}")
    axes.set_xlabel(label)
    axes.set_ylabel(wrapped(quantity, 30))
    axes.grid()
    _legend_below(figure, axes, 1)
    yield _picture(figure, name, caption)


def _line_style(index: int, points: int = 1) -> dict[str, Any]:
    """Colour, stroke and marker of a line; they change in cycles of different lengths."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": LINES[index % len(LINES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 5,
        "markevery": max(points // 8, 1),
        "linewidth": 1.6,
    }


def _scaling(cases: Sequence[ReportCase]) -> Iterator[Picture]:
    grown = {
        name: members for name, members in scaling_families(cases).items() if len({c.trainers for c in members}) > 1
    }
    if not grown:
        return
    figure, (axes,) = new_figure(3.6)
    for i, (name, members) in enumerate(grown.items()):
        speeds = [case.speed for case in members]
        lows = [0.0 if s is None or s.low is None else s.value - s.low for s in speeds]
        highs = [0.0 if s is None or s.high is None else s.high - s.value for s in speeds]
        places = [case.trainers for case in members]
        values = [_value(case) for case in members]
        axes.errorbar(places, values, yerr=[lows, highs], capsize=3, label=wrapped(name, LETTERS - 8), **_line_style(i))
    one, base = _ideal(grown, cases)
    counts = sorted({case.trainers for members in grown.values() for case in members})
    axes.plot(counts, [one * count for count in counts], color="#888888", linewidth=1, label=f"ideal: {base}")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(0, min(axes.get_ylim()[1], max(_most(cases), one * counts[-1] * 1.05)))
    axes.set_xlabel("trainers")
    axes.set_ylabel("samples per second")
    axes.grid()
    _legend_below(figure, axes, 1)
    yield _picture(figure, "scaling", "Samples per second by number of trainers, with 95 % intervals, and the ideal.")


def _ideal(grown: dict[str, list[ReportCase]], cases: Sequence[ReportCase]) -> tuple[float, str]:
    """Samples per second of one trainer under ideal scaling, and the label of that line."""
    first = next(iter(grown.values()))[0]
    alone = local_baseline(first, cases)
    if alone is not None:
        return _value(alone), "as many times the single process"
    best = max((members[0] for members in grown.values()), key=lambda case: _value(case) / case.trainers)
    return _value(best) / best.trainers, "as many times the fastest with the fewest trainers"


# A panel for each case.


def _staleness(cases: Sequence[ReportCase]) -> Iterator[Picture]:
    stale = [case for case in cases if any(case.staleness)]
    if not stale:
        return
    names = [wrapped(case.name) for case in stale]
    height = sum(0.95 + 0.18 * name.count("\n") for name in names) + 0.4
    figure, panels = new_figure(height, len(stale), sharex=True)
    largest = min(max(max(case.staleness) for case in stale), _LATE)
    for case, name, axes in zip(stale, names, panels, strict=True):
        total = sum(case.staleness.values())
        shares = [0.0] * (largest + 1)
        for value, count in case.staleness.items():
            shares[min(value, largest)] += 100 * count / total
        axes.bar(range(largest + 1), shares, width=0.8, color=COLOURS[0], edgecolor="black", linewidth=0.4)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_ylim(0, max(shares) * 1.1)
        axes.grid(axis="y")
        axes.yaxis.set_major_locator(_few_ticks(2))
    panels[-1].xaxis.set_major_locator(_few_ticks(10))
    panels[-1].set_xlabel("versions that a gradient was old" + (f" ({_LATE}: or older)" if largest == _LATE else ""))
    figure.supylabel("% of gradients", fontsize=10)
    yield _picture(
        figure, "staleness", "The staleness of gradients when they were applied, in versions, over all repeats."
    )


def _few_ticks(count: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count, integer=True)

"""Drawing with matplotlib: figures for a narrow page, styles that do not rely on colour, and SVG for HTML."""

from __future__ import annotations

import html
import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's palette, "Color Universal Design", 2008, without its yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
# The cycles have different lengths, so that 45 lines differ in stroke or marker without colour.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (7, 1.5, 1.5, 1.5, 1.5, 1.5)))
HATCHES = ("", "////", "||||", "\\\\\\\\", "xx", "--", "++")  # of straight strokes: each dot would cost a kilobyte
# Inches. A page on a phone shows a figure of this width at about two thirds of its size, which can still be read.
WIDTH = 5.8
LETTERS = 66  # the number of letters in a line of this width
_LINE = 0.19
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
    """Whether plots can be drawn (the extra ``report``)."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def style() -> Iterator[None]:
    """A context for all drawing that replaces the user's own settings of matplotlib."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


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


def named_rows(names: Sequence[str], thickness: float = 0.26) -> tuple[Figure, Axes, list[float]]:
    """Axes with a row for each name, and the name above its row, where it has the whole width.

    Return the figure, its axes and the height of each row's middle; a row is 1 high at most, from -0.5 to 0.5 of
    ``thickness`` inches.
    """
    texts = [wrapped(name) for name in names]
    heights = [thickness + _LINE * (text.count("\n") + 1) + 0.08 for text in texts]
    figure, (axes,) = new_figure(sum(heights) + 0.75)
    bottom, middles = 0.0, []
    for text, height in zip(texts, heights, strict=True):
        middles.append(bottom + height - thickness / 2)
        axes.text(
            0.0,
            bottom + height - thickness - 0.03,
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

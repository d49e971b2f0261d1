"""Draws the mermaid figures of the documents as HTML and SVG, so that the site needs no script of another host.

A Sphinx extension for what the documents use of mermaid. A ``sequenceDiagram`` becomes rows whose text wraps on a
narrow screen; a ``flowchart LR`` needs a line ``%% grid: a b / . c`` (a comment for mermaid): the rows of its nodes and
subgraphs. A line that is not understood is an error of the build.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from itertools import zip_longest
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

LANE = 28  # pixels between the lines of two participants


class Mermaid(Directive):
    """A block of mermaid in a document."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        kind, *lines = [line.strip() for line in self.content if line.strip()]
        draw = {"sequenceDiagram": sequence, "flowchart LR": flowchart}.get(kind)
        if draw is None:
            raise self.error(f"mermaid: {kind!r} is not drawn")
        head = f"head-{self.state.document.settings.env.new_serialno('mermaid')}"
        try:
            figure = draw(lines).replace("<path ", f'<path marker-end="url(#{head})" ')
        except ValueError as error:
            raise self.error(f"mermaid: {error}") from error
        figure = figure.replace('class="both"', f'class="both" marker-start="url(#{head})"')
        marker = f'<marker id="{head}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
        marker += ' orient="auto-start-reverse"><polygon points="0 0 8 4 0 8"/></marker>'
        figure = f'<div class="mermaid"><svg width="0" height="0">{marker}</svg>{figure}</div>'
        return [nodes.raw("", figure, format="html")]


def sequence(lines: list[str]) -> str:
    """One row for each message or note: the lines of the participants with an arrow, and the text beside them."""
    names: dict[str, str] = {}
    rows, dashes = [], ' stroke-dasharray="4"'

    def x(participant: str) -> int:
        return list(names).index(participant) * LANE + LANE // 2

    for line in lines:
        if found := re.fullmatch(r"participant (\w+) as (.+)", line):
            names[found[1]] = found[2]
            continue
        if found := re.fullmatch(r"(\w+)(-?)->>(\w+): (.+)", line):
            start, dashed, end, text = found.groups()
            points = f"{x(start)} 12 {x(end)} 12" if start != end else f"{x(start)} 7h9v10h-9"
            words = f"{start} to {end}" if start != end else start
            drawn = f'<path{dashes if dashed else ""} d="M{points}"/>'
        elif found := re.fullmatch(r"Note over (\w+): (.+)", line):
            words, text = found.groups()
            drawn = f'<rect x="{x(words) - 6}" y="6" width="12" height="12"/>'
        else:
            raise ValueError(f"{line!r} is not drawn")
        rows.append((drawn, words, text))
    width = len(names) * LANE
    heads = "".join(f'<text x="{x(name)}" y="17">{name}</text>' for name in names)
    legend = "".join(f"<li><b>{name}</b> {escape(text)}</li>" for name, text in names.items())
    parts = [f'<svg width="{width}" height="24">{heads}</svg><ul>{legend}</ul>']
    lanes = f'<svg class="lanes" width="{width}" height="24" role="img"'
    for drawn, words, text in rows:
        wrapped = "<br>".join(escape(part) for part in text.split("<br/>"))
        parts.append(f'{lanes} aria-label="{words}">{drawn}</svg><p>{wrapped}</p>')
    return f'<div class="sequence">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


@dataclass
class Box:
    """A node, or a subgraph with its members beside each other; its place once it has one."""

    lines: list[str]
    members: list[str] = field(default_factory=list)
    group: Box | None = None
    width: float = 0
    height: float = 0
    left: float = 0
    top: float = 0

    @property
    def centre(self) -> tuple[float, float]:
        return self.left + self.width / 2, self.top + self.height / 2


NODE = r"(\w+)(?:\[([^\]]+)\])?"
EDGE = re.compile(r"\s*(<)?(--|-\.)(?: (.+?) (?=--|\.-))?(?:-->|\.->|->|>)\s*" + NODE)


def flowchart(lines: list[str]) -> str:
    """The boxes in the rows and columns of the grid, with straight lines between them."""
    boxes: dict[str, Box] = {}
    edges: list[tuple[str, str, str, bool, bool]] = []
    grid: list[list[str]] = []
    group: Box | None = None

    def add(name: str, label: str | None) -> None:
        if name not in boxes:
            boxes[name] = Box((label or name).split("<br/>"))
            if group is not None:
                group.members.append(name)
                boxes[name].group = group

    for line in lines:
        if line.startswith("%% grid: "):
            grid = [row.split() for row in line.removeprefix("%% grid: ").split("/")]
        elif line == "end":
            group = None
        elif found := re.fullmatch(rf"subgraph {NODE}", line):
            group = None
            add(found[1], found[2])
            group = boxes[found[1]]
        elif found := re.match(NODE, line):
            add(found[1], found[2])
            start, rest = found[1], line[found.end() :]
            while rest:
                if (edge := EDGE.match(rest)) is None:
                    raise ValueError(f"{rest!r} is not drawn")
                back, dash, label, end, title = edge.groups()
                add(end, title)
                edges.append((start, end, label or "", bool(back), dash == "-."))
                start, rest = end, rest[edge.end() :]
        else:
            raise ValueError(f"{line!r} is not drawn")
    missing = boxes.keys() - {name for row in grid for name in row} - {m for box in boxes.values() for m in box.members}
    if missing:
        raise ValueError(f"{sorted(missing)} must be in a line '%% grid:'")
    width, height = _place(boxes, grid, any(label for _, _, label, _, _ in edges))
    shapes = [_box(box) for box in sorted(boxes.values(), key=lambda box: not box.members)]
    shapes += [_edge(boxes[start], boxes[end], *looks) for start, end, _, *looks in edges]
    texts = [_lines(box.lines, box.centre[0], box.top + 19, 18, bool(box.members)) for box in boxes.values()]
    texts += [_label(boxes[start], boxes[end], label) for start, end, label, *_ in edges]
    svg = f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img">'
    return f'<div class="flowchart">{svg}{"".join(shapes + texts)}</svg></div>'


def _place(boxes: dict[str, Box], grid: list[list[str]], has_labels: bool) -> tuple[float, float]:
    """Set size and place of each box; return the size of the figure."""
    across, down = (86, 76) if has_labels else (26, 26)
    for box in sorted(boxes.values(), key=lambda box: bool(box.members)):
        if box.members:
            box.width = sum(boxes[name].width for name in box.members) + 24 * (len(box.members) + 1)
            box.height = boxes[box.members[0]].height + 46
        else:
            box.width = max(map(len, box.lines)) * 7.2 + 18
            box.height = 18 * len(box.lines) + 12
    columns = [max(boxes[name].width for name in names if name != ".") for names in zip_longest(*grid, fillvalue=".")]
    rows = [max(boxes[name].height for name in names if name != ".") for names in grid]
    for row, names in enumerate(grid):
        for column, name in enumerate(names):
            if name != ".":
                box = boxes[name]
                box.left = 1 + sum(columns[:column]) + across * column + (columns[column] - box.width) / 2
                box.top = 1 + sum(rows[:row]) + down * row + (rows[row] - box.height) / 2
                left = box.left + 24
                for member in (boxes[name] for name in box.members):
                    member.left, member.top = left, box.top + 32
                    left += member.width + 24
    return sum(columns) + across * (len(columns) - 1) + 2, sum(rows) + down * (len(rows) - 1) + 2


def _box(box: Box) -> str:
    place = f'x="{box.left:g}" y="{box.top:g}" width="{box.width:g}" height="{box.height:g}"'
    return f'<rect class="{"group" if box.members else "node"}" {place} rx="4"/>'


def _lines(words: list[str], x: float, y: float, height: int, has_halo: bool) -> str:
    start = f'<text class="{"halo" if has_halo else ""}" x="{x:g}"'
    return "".join(f'{start} y="{y + height * i:g}">{escape(line)}</text>' for i, line in enumerate(words))


def _ends(start: Box, end: Box) -> tuple[float, float, float, float]:
    """A line between the borders: upright or level where the boxes face each other, else from centre to centre."""
    (x1, y1), (x2, y2) = start.centre, end.centre
    if min(start.left + start.width, end.left + end.width) - max(start.left, end.left) > 10:
        x1 = x2 = min(start, end, key=lambda box: box.width).centre[0]
    elif min(start.top + start.height, end.top + end.height) - max(start.top, end.top) > 10:
        y1 = y2 = min(start, end, key=lambda box: box.height).centre[1]
    return *_border(start, (x1, y1), (x2, y2)), *_border(end, (x2, y2), (x1, y1))


def _edge(start: Box, end: Box, is_double: bool, is_dashed: bool) -> str:
    look = (' class="both"' if is_double else "") + (' stroke-dasharray="4"' if is_dashed else "")
    x1, y1, x2, y2 = _ends(start, end)
    return f'<path{look} d="M{x1:.1f} {y1:.1f} {x2:.1f} {y2:.1f}"/>'


def _label(start: Box, end: Box, label: str) -> str:
    """The text of an edge, a part of it in each line, in the middle between what surrounds its ends."""
    x1, y1, x2, y2 = _ends(start.group or start, end.group or end)
    x1, _, x2, _ = _ends(start, end) if y1 != y2 else (x1, 0, x2, 0)
    words = label.replace(", ", ",\n").splitlines()
    return _lines(words, (x1 + x2) / 2, (y1 + y2) / 2 - 8 * len(words) + 12, 16, True)


def _border(box: Box, inside: tuple[float, float], outside: tuple[float, float]) -> tuple[float, float]:
    """Where the line from a point in the box to one outside of it leaves the box."""
    (x, y), (dx, dy) = inside, (outside[0] - inside[0], outside[1] - inside[1])
    right, bottom = box.left + box.width, box.top + box.height
    shares = [((right if dx > 0 else box.left) - x) / dx] if dx else []
    shares += [((bottom if dy > 0 else box.top) - y) / dy] if dy else []
    share = min(shares)
    return x + share * dx, y + share * dy


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("mermaid", Mermaid)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

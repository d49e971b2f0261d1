"""The figures of the documents, drawn from what the package's own classes decide.

``python docs/figures.py`` writes docs/figures/. A timeline is a replay of ``CASES`` with the consistency classes, on a
clock of its own; a buffer is shown with the batches that its class gives. A test compares the files with this script.
"""

from __future__ import annotations

import heapq
import textwrap
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paramserver.buffers import make_buffer
from paramserver.consistency import Announcement, Async, Bounded, Consistency, Readiness, RunTerms, Sync
from paramserver.consistency.free_running import BackupSync
from paramserver.limits import Limits

FOLDER = Path(__file__).parent / "figures"

# How long trainer 0, 1 and 2 take for each batch, in milliseconds.
COMPUTE_MS = ([50.0] * 9, [64.0] * 9, [114.0] * 9)
SHOWN_MS = 186.0
TERMS = RunTerms(num_trainers=3, limits=Limits())


@dataclass(frozen=True)
class Case:
    """One timeline: the title, the rule that decides, and what the last line says."""

    title: str
    make_rule: Callable[[], Consistency]
    note: str
    server: str = "server"


CASES = {
    "sync": Case("server.consistency: sync", lambda: Sync(TERMS), "One update is the mean of all three gradients."),
    "backup": Case(
        "sync, server.backup_trainers: 1",
        lambda: BackupSync(TERMS, backups=1),
        "The mean of the first two gradients; the third is dropped.",
    ),
    "bounded": Case(
        "bounded, server.staleness_bound: 1",
        lambda: Bounded(TERMS, bound=1),
        "Each gradient is an update; no trainer starts more than one step ahead.",
    ),
    "async": Case("server.consistency: async", lambda: Async(TERMS), "Each gradient is an update; no trainer waits."),
    "ddp": Case(
        "mode: ddp",
        lambda: Sync(TERMS),
        "No server: the trainers average their gradients, and each one updates.",
        server="all-reduce",
    ),
}


@dataclass
class Batch:
    """What one trainer computed: at which version, when, and what became of its gradient."""

    start: float
    end: float
    version: int
    staleness: int | None = None  # None = not applied, so far


@dataclass
class Timeline:
    """The batches of each trainer, and the time of each update."""

    batches: dict[int, list[Batch]] = field(default_factory=lambda: defaultdict(list))
    updates: list[tuple[float, int]] = field(default_factory=list)
    dropped: list[Batch] = field(default_factory=list)


def replay(rule: Consistency, compute_ms: tuple[list[float], ...], shown_ms: float) -> Timeline:
    """Let trainers that compute for these times follow the decisions of a rule; messages and updates take no time."""
    line, ends, now = Timeline(), [], 0.0
    durations = [iter(times) for times in compute_ms]

    def decide() -> None:
        for trainer, decision in rule.pop_decisions().items():
            batch = Batch(now, now + next(durations[trainer]), decision.step)
            line.batches[trainer].append(batch)
            heapq.heappush(ends, (batch.end, trainer))

    for trainer in range(len(compute_ms)):
        rule.announce(trainer, Announcement(Readiness.READY))
    decide()
    while ends and ends[0][0] <= shown_ms:
        now, trainer = heapq.heappop(ends)
        batch = line.batches[trainer][-1]
        if not rule.push(trainer, batch.version, samples=1):
            line.dropped.append(batch)
        while (update := rule.next_update()) is not None:
            line.updates.append((now, rule.step))
            for index, staleness in zip(update.trainers, update.staleness, strict=True):
                line.batches[index][-1].staleness = staleness
        rule.announce(trainer, Announcement(Readiness.READY))
        decide()
    return line


# Drawing. A figure is as wide as a telephone, and no text is smaller than 12 pixels.

WIDTH = 360
INK, GREY, PALE, BLUE, ORANGE, RED = "#1f2933", "#6b7785", "#e4e8ec", "#2f6fb2", "#d9822b", "#c0392b"
FILLS = ("#cfe2f5", "#d5ecd4", "#fbe3c4")


class Drawing:
    """The elements of an SVG file; its background is white, so it is readable on a dark page."""

    def __init__(self, label: str, height: int = 0) -> None:
        self.height, self.label, self.elements = height, label, []

    def text(self, x: float, y: float, words: str, size: int = 13, anchor: str = "start", **style: str) -> None:
        values = {"fill": INK, "font-size": str(size), "text-anchor": anchor, **style}
        self._add("text", {"x": x, "y": y, **values}, words)

    def notes(self, y: float, *notes: str) -> None:
        """Grey lines, as many as the notes need; the figure ends after them."""
        lines = [line for note in notes for line in textwrap.wrap(note, 54)]
        for place, line in enumerate(lines):
            self.text(12, y + 17 * place, line, 12, fill=GREY)
        self.height = round(y + 17 * len(lines) - 4)

    def box(self, x: float, y: float, width: float, height: float, **style: str) -> None:
        self._add("rect", {"x": x, "y": y, "width": width, "height": height, **style})

    def line(self, x1: float, y1: float, x2: float, y2: float, **style: str) -> None:
        self._add("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "stroke": GREY, **style})

    def arrow(self, x1: float, y1: float, x2: float, y2: float, **style: str) -> None:
        self.line(x1, y1, x2, y2, **{"marker-end": "url(#head)", **style})

    def circle(self, x: float, y: float, radius: float, **style: str) -> None:
        self._add("circle", {"cx": x, "cy": y, "r": radius, **style})

    def _add(self, name: str, attributes: dict[str, float | str], words: str | None = None) -> None:
        pairs = " ".join(
            f'{key.replace("_", "-")}="{value:g}"' if isinstance(value, float) else f'{key.replace("_", "-")}="{value}"'
            for key, value in attributes.items()
        )
        self.elements.append(f"<{name} {pairs}/>" if words is None else f"<{name} {pairs}>{words}</{name}>")

    def __str__(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" role="img" aria-label="{self.label}" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{GREY}"/></marker></defs>'
        )
        ground = f'<rect width="{WIDTH}" height="{self.height}" rx="6" fill="white"/>'
        return "\n".join([head, marker, ground, *self.elements, "</svg>", ""])


def draw_timeline(case: Case) -> Drawing:
    """One row per trainer, and one for the versions that the updates make."""
    line = replay(case.make_rule(), COMPUTE_MS, SHOWN_MS)
    left, right, top, row = 82, WIDTH - 12, 40, 34
    trainers = len(COMPUTE_MS)
    server_y, bottom = top + trainers * row + 8, top + (trainers + 1) * row + 8
    drawing = Drawing(f"Timeline of {case.title}")

    def at(time: float) -> float:
        return round(left + (right - left) * time / SHOWN_MS, 1)

    drawing.text(12, 22, case.title, 14, font_weight="600")
    for trainer in range(trainers):
        y = top + trainer * row
        drawing.text(12, y + 18, f"trainer {trainer}")
        drawing.line(left, y + 13, right, y + 13, stroke=PALE, stroke_dasharray="3 3")
        for batch in line.batches[trainer]:
            start, end = at(batch.start), min(at(batch.end), right)
            if end - start < 20:
                continue  # it has just begun
            lost = batch in line.dropped
            fill, stroke = ("white", RED) if lost else (FILLS[trainer], GREY)
            drawing.box(start, y, round(end - start, 1), 26, rx="3", fill=fill, stroke=stroke)
            words = f"v{batch.version}" + (" dropped" if lost else f" +{batch.staleness}" if batch.staleness else "")
            drawing.text(round((start + end) / 2, 1), y + 17, words, 12, "middle", fill=RED if lost else INK)
            if batch.end <= SHOWN_MS and not lost:
                drawing.line(at(batch.end), y + 26, at(batch.end), server_y + 2, stroke=BLUE, stroke_opacity="0.55")
    drawing.text(12, server_y + 18, case.server)
    drawing.line(left, server_y + 13, right, server_y + 13, stroke=BLUE)
    for time, version in line.updates:
        drawing.circle(at(time), server_y + 13, 9, fill=BLUE)
        drawing.text(at(time), server_y + 17, str(version), 12, "middle", fill="white")
    stale = any(batch.staleness for batches in line.batches.values() for batch in batches)
    legend = "Circle: a new version." + (" +n: n versions newer when its gradient arrived." if stale else "")
    drawing.notes(bottom + 14, case.note, "Box: a batch, and the version that it read.", legend)
    return drawing


# What a buffer of 6 does: {name: (title, note, keyword arguments)}.
BUFFERS = {
    "fifo": ("buffer.kind: fifo", "The oldest samples first, each one once, in the order of arrival.", {}),
    "firo": (
        "buffer.kind: firo, watermark: 3",
        "At random, each one once; a get waits until 3 samples are held.",
        {"watermark": 3, "seed": 5},
    ),
    "reservoir": (
        "buffer.kind: reservoir",
        "At random, also again. Samples stay until new ones take their place.",
        {"seed": 7},
    ),
}
PUTS = ((1, 6), (7, 7), (8, 8), (9, 9))  # first and last number, before each batch of 2


def draw_buffer(kind: str) -> Drawing:
    """A row for each batch: what was put, what the buffer holds then, and the batch that it gives."""
    title, note, options = BUFFERS[kind]
    buffer = make_buffer(kind, capacity=6, **options)
    left, top, row, slot = 58, 66, 42, 30
    batch_x = left + 6 * slot + 40
    drawing = Drawing(f"Four batches of {title}")
    drawing.text(12, 22, title, 14, font_weight="600")
    for x, words in ((12, "put"), (left, "the buffer holds"), (batch_x, "batch of 2")):
        drawing.text(x, top - 14, words, 12, fill=GREY)
    for place, (first, last) in enumerate(PUTS):
        buffer.put_many(list(range(first, last + 1)), keys=list(range(first, last + 1)), timeout=1.0)
        state = buffer.state_dict(samples=False)
        held = dict(zip(map(int, state["keys"]), map(int, state["served"]), strict=True))
        drawn = list(map(int, buffer.get_batch(2, timeout=1.0).keys))
        y = top + place * row
        drawing.text(12, y + 20, f"{first} to {last}" if last > first else str(first))
        for column, (key, served) in enumerate(sorted(held.items()) if kind != "fifo" else held.items()):
            fill = FILLS[2] if served else "white"
            edge = {"stroke": BLUE, "stroke_width": "3"} if key in drawn else {"stroke": GREY}
            drawing.box(left + column * slot, y, slot - 4, 30, rx="4", fill=fill, **edge)
            drawing.text(left + column * slot + 13, y + 20, str(key), 13, "middle")
        drawing.arrow(left + 6 * slot + 4, y + 15, batch_x - 8, y + 15)
        for column, key in enumerate(drawn):
            drawing.box(batch_x + column * slot, y, slot - 4, 30, rx="4", fill=FILLS[0], stroke=BLUE)
            drawing.text(batch_x + column * slot + 13, y + 20, str(key), 13, "middle")
    legend = "Blue edge: drawn now." + (" Orange: served before." if kind == "reservoir" else "")
    drawing.notes(top + len(PUTS) * row + 12, note, legend)
    return drawing


def draw_overview() -> Drawing:
    """The three modes beside each other: which processes there are, and what they exchange."""
    drawing = Drawing("One task in three modes: rpc, ddp and local", 252)
    drawing.box(90, 12, 180, 36, rx="6", fill=FILLS[2], stroke=ORANGE)
    drawing.text(180, 35, "your task, written once", 13, "middle", font_weight="600")
    columns = (("mode: rpc", 70), ("mode: ddp", 205), ("mode: local", 312))
    for title, x in columns:
        drawing.arrow(180, 48, x, 76)
        drawing.text(x, 94, title, 14, "middle", font_weight="600")

    def process(x: float, y: float, name: str, fill: str, width: int = 56) -> None:
        drawing.box(x - width / 2, y, width, 30, rx="4", fill=fill, stroke=GREY)
        drawing.text(x, y + 20, name, 12, "middle")

    process(70, 108, "server: parameters", FILLS[0], 120)
    for x in (38, 102):
        process(x, 178, "trainer", FILLS[1])
        drawing.arrow(x - 8, 178, x - 8, 140)
        drawing.arrow(x + 8, 140, x + 8, 178)
    drawing.text(70, 156, "push", 12, "middle", fill=GREY)
    drawing.text(70, 170, "pull", 12, "middle", fill=GREY)
    for x in (173, 237):
        process(x, 178, "trainer", FILLS[1])
        drawing.line(x, 174, x, 148)
    drawing.line(173, 148, 237, 148)
    drawing.text(205, 140, "all-reduce", 12, "middle", fill=GREY)
    process(312, 178, "trainer", FILLS[1])
    drawing.text(312, 140, "one process", 12, "middle", fill=GREY)
    drawing.text(180, 236, "the same data order, buffers, checkpoints, records", 13, "middle", fill=GREY)
    return drawing


def figures() -> dict[str, str]:
    """Return the contents of each file of docs/figures, by name."""
    drawings = {f"{name}.svg": draw_timeline(case) for name, case in CASES.items()}
    drawings |= {f"{kind}.svg": draw_buffer(kind) for kind in BUFFERS}
    drawings["overview.svg"] = draw_overview()
    return {name: str(drawing) for name, drawing in drawings.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in figures().items():
        (FOLDER / name).write_text(text)

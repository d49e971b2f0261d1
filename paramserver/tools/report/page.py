"""The report of a set of results: ``report.md`` with its plots, and ``report.html``, which needs no other file."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from paramserver.fileio import atomic_write_text, explain_not_writable
from paramserver.tools.report.cases import ReportCase, by_best, cases_of
from paramserver.tools.report.findings import findings
from paramserver.tools.report.formatting import join_names, quoted
from paramserver.tools.report.plots import Picture, draw, has_matplotlib
from paramserver.tools.report.results import Results
from paramserver.tools.report.tables import (
    SECTIONS,
    Table,
    cases_by_config,
    comparability_warnings,
    condition_rows,
    conditions_text,
    definitions_table,
    method_text,
)

CHOOSE_OUT = "choose another --out"
NO_PLOTS = "The plots are left out, because matplotlib is not installed: python -m pip install 'paramserver[report]'."


def write_report(results: Results, folder: Path, title: str = "What was measured") -> list[Path]:
    """Write ``report.html``, ``report.md`` and ``plots/`` into ``folder``, which is made.

    Raises:
        UnsupportedConfiguration: the folder cannot be written to.
    """
    cases = cases_of(results.results)
    pictures = draw(cases) if has_matplotlib() else {}
    blocks = [heading(title, 1), *_blocks(results, cases, pictures)]
    markdown = "\n\n".join(block.markdown for block in blocks) + "\n"
    pages = {folder / "report.html": to_html(title, blocks), folder / "report.md": markdown}
    plots = {folder / "plots" / f"{one.name}.svg": one.svg for drawn in pictures.values() for one in drawn}
    with explain_not_writable(str(folder), CHOOSE_OUT):
        (folder / "plots" if plots else folder).mkdir(parents=True, exist_ok=True)
        for path, text in {**plots, **pages}.items():
            atomic_write_text(path, text)
    return list(pages)


def _blocks(
    results: Results, cases: Sequence[ReportCase], pictures: Mapping[str, Sequence[Picture]]
) -> Iterator[Block]:
    """The page below its title."""
    is_search = bool(by_best(cases))
    opening = [paragraph(conditions_text(cases)), bullets(findings(cases))]
    yield from reversed(opening) if is_search else opening
    notes = [*results.notes, *comparability_warnings(cases), *([] if has_matplotlib() else [NO_PLOTS])]
    if notes:
        yield bullets(notes)
    sections = [(title, name, make(cases)) for title, name, make in SECTIONS]
    if is_search:
        sections.sort(key=lambda section: section[0] != "Learning")
    for title, section, rows in sections:
        drawn = pictures.get(section, ())
        if rows.rows or drawn:
            yield heading(title, 2)
            yield from map(picture, drawn)
        if rows.rows:
            yield table(rows)
    yield heading("Conditions", 2)
    yield paragraph(method_text(cases))
    yield table(Table(("", "value"), condition_rows(cases), are_numbers=False))
    yield table(definitions_table(cases))
    for text, names in cases_by_config(cases).items():
        yield paragraph(f"Config of {join_names([quoted(name) for name in names])}:")
        yield code(text)
    yield paragraph(f"All records, one line for each case and repeat, are in {quoted(results.source)}.")


# The blocks of a page.


class Block(NamedTuple):
    """A part of a report, in both of its forms."""

    markdown: str
    html: str


def heading(text: str, level: int) -> Block:
    return Block(f"{'#' * level} {_markdown(text)}", f"<h{level}>{_html(text)}</h{level}>")


def paragraph(text: str) -> Block:
    return Block(_markdown(text), f"<p>{_html(text)}</p>")


def bullets(items: Sequence[str]) -> Block:
    lines = "\n".join(f"<li>{_html(item)}</li>" for item in items)
    return Block("\n".join(f"- {_markdown(item)}" for item in items), f"<ul>\n{lines}\n</ul>")


def code(text: str) -> Block:
    """A fenced block whose fence is longer than any run of backquotes in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return Block(f"{fence}\n{text.rstrip()}\n{fence}", f"<pre>{html.escape(text.rstrip())}</pre>")


def picture(drawn: Picture) -> Block:
    """A link to the file of a plot, or the plot itself, and its caption."""
    shown = f'<div class="picture" tabindex="0">{drawn.svg}</div>'
    return Block(
        f"![{drawn.name}](plots/{drawn.name}.svg)\n\n{_markdown(drawn.caption)}",
        f"<figure>\n{shown}\n<figcaption>{_html(drawn.caption)}</figcaption>\n</figure>",
    )


def table(content: Table) -> Block:
    marks = ["---", *(["---:" if content.are_numbers else "---"] * (len(content.titles) - 1))]
    rows = [[_markdown(cell).replace("|", "\\|") for cell in row] for row in (content.titles, marks, *content.rows)]
    head = "".join(f"<th>{_html(title)}</th>" for title in content.titles)
    # For a telephone; the first column names what the row is about.
    marks_of_cells = ["", *(f' data-title="{html.escape(title.replace("`", ""))}"' for title in content.titles[1:])]
    body = []
    for row in content.rows:
        # Lines do not break inside an interval.
        cells = [_html(cell).replace(" to ", "&nbsp;to&nbsp;") for cell in row]
        tagged = (f"<td{mark}>{cell}</td>" for mark, cell in zip(marks_of_cells, cells, strict=True))
        body.append(f"<tr>{''.join(tagged)}</tr>")
    return Block(
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        f'<div class="wide {"numbers" if content.are_numbers else "words"}" tabindex="0"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(body) + "\n</tbody>\n</table></div>",
    )


def _markdown(text: str) -> str:
    """One line, in which the ``<`` outside of backquotes is escaped: it would begin an element."""
    return "".join(f"`{part}`" if is_name else part.replace("<", "&lt;") for part, is_name in _spans(text))


def _html(text: str) -> str:
    return "".join(
        f"<code>{html.escape(part)}</code>" if is_name else html.escape(part) for part, is_name in _spans(text)
    )


def _spans(text: str) -> Iterator[tuple[str, bool]]:
    """The text as one line, in parts, and whether each is in backquotes.

    A backquote without a partner is a character like any other.
    """
    line = " ".join(text.split())
    parts = line.split("`")
    if len(parts) % 2 == 0:
        parts = [line]
    return ((part, i % 2 == 1) for i, part in enumerate(parts))


# The page that needs no other file.

_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: #fff; color: #1a1a1a;
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #bbb; }
code, pre { font-family: ui-monospace, monospace; font-size: .88em; background: #f2f2f2; }
code { padding: 0 .2em; }
pre { padding: .7rem; overflow-x: auto; overflow-wrap: normal; }
.wide { overflow-x: auto; box-sizing: border-box; min-width: 100%; width: max-content; max-width: calc(100vw - 2rem);
  position: relative; left: 50%; transform: translateX(-50%); }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ccc; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #555; }
td:first-child, .words td { min-width: 8rem; overflow-wrap: anywhere; }
.numbers th:not(:first-child), .numbers td:not(:first-child) { text-align: right; }
figure { margin: 1.2rem 0; } figcaption { font-size: .9rem; color: #444; }
.picture { overflow-x: auto; } /* the text of a picture has at least 12 pixels */
.picture svg { display: block; width: 100%; min-width: 21.6rem; max-width: 36rem; height: auto; }
li { margin: .35rem 0; }
/* On a telephone the cells of a row are in lines, each with the title of its column. */
@media (max-width: 40rem) {
  thead { display: none; } tr { display: block; border-bottom: 1px solid #ccc; padding: .3rem 0; }
  td { display: inline-block; border: 0; padding: 0 .8rem 0 0; overflow-wrap: anywhere; }
  td:first-child, .words td { display: block; }
  td[data-title]::before { content: attr(data-title) " "; color: #666; }
}
"""
# Nothing is fetched and no script runs, whatever a name or an error contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def to_html(title: str, blocks: Iterable[Block]) -> str:
    """Return a report as one HTML file without links."""
    body = "\n".join(block.html for block in blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )

"""The report of a set of results: ``report.md`` with its plots, and ``report.html``, which needs no other file.

The Markdown is the source; ``to_html`` converts the part of Markdown that reports use.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from paramserver.errors import UnsupportedConfiguration
from paramserver.fileio import atomic_write_text
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

NO_PLOTS = "The plots are left out, because matplotlib is not installed: python -m pip install 'paramserver[report]'."


def write_report(results: Results, folder: Path, title: str = "What was measured") -> list[Path]:
    """Write ``report.html``, ``report.md`` and ``plots/`` into ``folder``, which is made.

    Raises:
        UnsupportedConfiguration: the folder cannot be written to.
    """
    cases = cases_of(results.results)
    pictures = draw(cases) if has_matplotlib() else {}
    markdown = "\n\n".join([f"# {title}", *_blocks(results, cases, pictures)]) + "\n"
    # The plots are drawn once, for the files and for the page.
    svgs = {picture.name: picture.svg for drawn in pictures.values() for picture in drawn}
    pages = {folder / "report.html": to_html(title, markdown, svgs), folder / "report.md": markdown}
    plots = {folder / "plots" / f"{name}.svg": svg for name, svg in svgs.items()}
    try:
        (folder / "plots" if plots else folder).mkdir(parents=True, exist_ok=True)
        for path, text in {**plots, **pages}.items():
            atomic_write_text(path, text)
    except OSError as error:
        raise not_writable_out(folder, error) from error
    return list(pages)


def not_writable_out(folder: Path, error: OSError) -> UnsupportedConfiguration:
    """Return the error for a folder of ``--out`` that cannot be written to."""
    return UnsupportedConfiguration(
        f"{folder} must be a folder that this user can write to ({error.strerror or error}); choose another --out"
    )


def _blocks(results: Results, cases: Sequence[ReportCase], pictures: Mapping[str, Sequence[Picture]]) -> Iterator[str]:
    """The page below its title, in blocks of Markdown."""
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
            yield f"## {title}"
            yield from (f"![{one.name}](plots/{one.name}.svg)\n\n{paragraph(one.caption)}" for one in drawn)
        if rows.rows:
            yield table(rows)
    yield "## Conditions"
    yield paragraph(method_text(cases))
    yield table(Table(("", "value"), condition_rows(cases), are_numbers=False))
    yield table(definitions_table(cases))
    for text, names in cases_by_config(cases).items():
        yield paragraph(f"Config of {join_names([quoted(name) for name in names])}:")
        yield code(text)
    yield paragraph(f"All records, one line for each case and repeat, are in {quoted(results.source)}.")


# Markdown.


def paragraph(text: str) -> str:
    """One line, in which the ``<`` outside of backquotes is escaped: it would begin an element."""
    line = " ".join(text.split())
    return "".join(part if is_name else part.replace("<", "&lt;") for part, is_name in _spans(line, "`"))


def _spans(text: str, mark: str = "") -> Iterator[tuple[str, bool]]:
    """The text in parts, and whether each is in backquotes; ``mark`` is put around those that are.

    A backquote without a partner is a character like any other.
    """
    parts = text.split("`")
    if len(parts) % 2 == 0:
        parts = [text]
    for i, part in enumerate(parts):
        yield (f"{mark}{part}{mark}", True) if i % 2 else (part, False)


def bullets(items: Iterable[str]) -> str:
    return "\n".join(f"- {paragraph(item)}" for item in items)


def code(text: str) -> str:
    """A fenced block whose fence is longer than any run of backquotes in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}\n{text.rstrip()}\n{fence}"


def table(content: Table) -> str:
    marks = ["---", *(["---:" if content.are_numbers else "---"] * (len(content.titles) - 1))]
    rows = [[paragraph(cell).replace("|", "\\|") for cell in row] for row in (content.titles, marks, *content.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# HTML.

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
# A fenced block, a picture with its caption, or lines up to the next empty one.
_BLOCK = re.compile(
    r"^(?P<fence>`{3,})\n(?P<code>.*?)\n(?P=fence)$"
    r"|^!\[(?P<picture>[^\]]*)\]\([^)]*\)\n\n(?P<caption>[^\n]*)$"
    r"|^(?P<lines>[^\n]+(?:\n[^\n]+)*)",
    re.DOTALL | re.MULTILINE,
)


def to_html(title: str, markdown: str, svgs: Mapping[str, str]) -> str:
    """Convert a report to one HTML file without links.

    ``markdown`` is made of the blocks above, headings, and pictures followed by their captions. ``svgs`` take the place
    of the links to pictures, by name.
    """
    body = "\n".join(_html_block(match, svgs) for match in _BLOCK.finditer(markdown))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _html_block(block: re.Match[str], svgs: Mapping[str, str]) -> str:
    if block["fence"]:
        return f"<pre>{html.escape(block['code'])}</pre>"
    if block["picture"]:
        caption = f"<figcaption>{_inline(block['caption'])}</figcaption>"
        return f'<figure>\n<div class="picture" tabindex="0">{svgs[block["picture"]]}</div>\n{caption}\n</figure>'
    text = block["lines"]
    if heading := re.match("(#+) ", text):
        return f"<h{len(heading[1])}>{_inline(text[heading.end() :])}</h{len(heading[1])}>"
    if text.startswith("- "):
        return "<ul>\n" + "\n".join(f"<li>{_inline(line[2:])}</li>" for line in text.split("\n")) + "\n</ul>"
    if text.startswith("| "):
        return _html_table(text.split("\n"))
    return f"<p>{_inline(text)}</p>"


def _html_table(lines: Sequence[str]) -> str:
    titles, marks, *rows = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines)
    head = "".join(f"<th>{_inline(title)}</th>" for title in titles)
    # For a telephone; the first column names what the row is about.
    marks_of_cells = ["", *(f' data-title="{html.escape(title.replace("`", ""))}"' for title in titles[1:])]
    body = []
    for row in rows:
        # Lines do not break inside an interval.
        cells = [_inline(cell.replace("\\|", "|")).replace(" to ", "&nbsp;to&nbsp;") for cell in row]
        tagged = (f"<td{mark}>{cell}</td>" for mark, cell in zip(marks_of_cells, cells, strict=True))
        body.append(f"<tr>{''.join(tagged)}</tr>")
    style = "numbers" if "---:" in marks else "words"
    return (
        f'<div class="wide {style}" tabindex="0"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(body)
        + "\n</tbody>\n</table></div>"
    )


def _inline(text: str) -> str:
    return "".join(
        f"<code>{html.escape(part)}</code>" if is_name else html.escape(part.replace("&lt;", "<"))
        for part, is_name in _spans(text)
    )

"""A page as a list of blocks, which Markdown and HTML say alike."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Sentences:
    """One item each; what stands in backquotes is a name."""

    items: Sequence[str]


@dataclass(frozen=True)
class NoteBlock:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Table:
    """Rows of text below their titles; the first column holds names, the others are numbers unless told."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    are_numbers: bool = True


@dataclass(frozen=True)
class Picture:
    """A plot as an SVG element; ``caption`` says what can be seen in it."""

    name: str
    svg: str
    caption: str


Block: TypeAlias = Heading | Sentences | NoteBlock | Code | Table | Picture


# Markdown.


def as_markdown(title: str, blocks: Iterable[Block]) -> str:
    """The page as text; pictures are links to ``plots/NAME.svg`` beside it."""
    return "\n\n".join([f"# {title}", *(_markdown(block) for block in blocks)]) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"## {block.text}"
    if isinstance(block, Sentences):
        return "\n".join(f"- {_one_line(item)}" for item in block.items)
    if isinstance(block, NoteBlock):
        return _one_line(block.text)
    if isinstance(block, Code):
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", block.text)), default=0))
        return f"{fence}\n{block.text.rstrip()}\n{fence}"
    if isinstance(block, Table):
        return _markdown_table(block)
    return f"![{block.name}](plots/{block.name}.svg)\n\n{_one_line(block.caption)}"


def _one_line(text: str) -> str:
    """Outside backquotes a ``<`` would begin an element."""
    parts = " ".join(text.split()).split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def _markdown_table(table: Table) -> str:
    marks = ["---", *(["---:" if table.are_numbers else "---"] * (len(table.titles) - 1))]
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in (table.titles, marks, *table.rows))


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


# HTML.

_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: #fff; color: #1a1a1a;
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #bbb; }
code, pre { font-family: ui-monospace, monospace; font-size: .88em; background: #f2f2f2; }
code { padding: 0 .2em; }
pre { padding: .7rem; overflow-x: auto; overflow-wrap: normal; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ccc; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #555; }
td:first-child, .words td { min-width: 8rem; overflow-wrap: anywhere; }
.numbers th:not(:first-child), .numbers td:not(:first-child) { text-align: right; }
figure { margin: 1.2rem 0; } figcaption { font-size: .9rem; color: #444; }
figure svg { display: block; width: 100%; max-width: 46rem; height: auto; }
li { margin: .35rem 0; }
"""
# Nothing is fetched and nothing runs, whatever stands in a name or an error.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def as_html(title: str, blocks: Iterable[Block]) -> str:
    """The page as one file that needs no other."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h2>{html.escape(block.text)}</h2>"
    if isinstance(block, Sentences):
        return "<ul>\n" + "\n".join(f"<li>{_with_names(item)}</li>" for item in block.items) + "\n</ul>"
    if isinstance(block, NoteBlock):
        return f"<p>{_with_names(block.text)}</p>"
    if isinstance(block, Code):
        return f"<pre>{html.escape(block.text.rstrip())}</pre>"
    if isinstance(block, Table):
        return _html_table(block)
    return f"<figure>\n{block.svg}\n<figcaption>{_with_names(block.caption)}</figcaption>\n</figure>"


def _with_names(text: str) -> str:
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backquote without its partner is a character like any other
        return html.escape(text)
    return "".join(f"<code>{html.escape(part)}</code>" if i % 2 else html.escape(part) for i, part in enumerate(parts))


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in table.titles)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{_whole(_with_names(cell))}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    style = "wide numbers" if table.are_numbers else "wide words"
    return (
        f'<div class="{style}" tabindex="0"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n'
        "</table></div>"
    )


def _whole(cell: str) -> str:
    """A cell whose lines do not break inside an interval."""
    return cell.replace(" to ", "&nbsp;to&nbsp;")

"""The report of a set of results: report.html, which needs no other file, and report.md with its plots beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from paramserver.errors import UnsupportedConfiguration
from paramserver.fileio import atomic_write_text
from paramserver.report.cases import ReportCase, cases_of
from paramserver.report.conditions import (
    cases_by_config,
    comparability_warnings,
    condition_rows,
    conditions_text,
    method_text,
)
from paramserver.report.document import Block, Code, Heading, NoteBlock, Picture, Sentences, Table, as_html, as_markdown
from paramserver.report.findings import findings
from paramserver.report.formatting import join_names, quoted
from paramserver.report.results import Results
from paramserver.report.svg import has_matplotlib
from paramserver.report.tables import (
    definitions_table,
    failures_table,
    learning_table,
    phases_table,
    predictions_table,
    resources_table,
    scaling_table,
    staleness_table,
    steps_table,
    throughput_table,
)

NO_PLOTS = "The plots are left out, because matplotlib is not installed: python -m pip install 'paramserver[report]'."
_TITLE = "What was measured"


def write_report(results: Results, folder: Path, title: str = _TITLE) -> list[Path]:
    """Write ``report.html``, ``report.md`` and ``plots/`` into ``folder``, which is made.

    Returns:
        The two pages.

    Raises:
        UnsupportedConfiguration: the folder cannot be written to.
    """
    blocks = blocks_of(results)
    pages = {folder / "report.html": as_html(title, blocks), folder / "report.md": as_markdown(title, blocks)}
    plots = {folder / "plots" / f"{one.name}.svg": one.svg for one in blocks if isinstance(one, Picture)}
    try:
        (folder / "plots" if plots else folder).mkdir(parents=True, exist_ok=True)
        for path, text in {**plots, **pages}.items():
            atomic_write_text(path, text)
    except OSError as error:
        raise UnsupportedConfiguration(
            f"{folder} must be a folder that this user can write to ({error.strerror or error}); choose another --out"
        ) from error
    return list(pages)


def blocks_of(results: Results) -> list[Block]:
    """The content of the pages."""
    cases = cases_of(results.results)
    pictures = _pictures(cases)
    blocks: list[Block] = [NoteBlock(conditions_text(cases)), Sentences(findings(cases))]
    notes = [*results.notes, *comparability_warnings(cases), *([] if has_matplotlib() else [NO_PLOTS])]
    if notes:
        blocks.append(Sentences(notes))
    for title, table, section in (
        ("Throughput", throughput_table(cases), "throughput"),
        ("Scaling", scaling_table(cases), "scaling"),
        ("Steps", steps_table(cases), "steps"),
        ("Where a step goes", phases_table(cases), "phases"),
        ("Learning", learning_table(cases), "learning"),
        ("Staleness", staleness_table(cases), "staleness"),
        ("Bytes, CPU time and memory", resources_table(cases), ""),
        ("The model of the network beside the measurement", predictions_table(cases), ""),
        ("Failures", failures_table(cases), ""),
    ):
        drawn = pictures.get(section, [])
        if table.rows or drawn:
            blocks += [Heading(title), *drawn, *([table] if table.rows else [])]
    return [*blocks, *_conditions(results, cases)]


def _pictures(cases: Sequence[ReportCase]) -> dict[str, list[Picture]]:
    if not has_matplotlib():
        return {}
    from paramserver.report.plots import draw

    return draw(cases)


def _conditions(results: Results, cases: Sequence[ReportCase]) -> Iterator[Block]:
    yield Heading("Conditions")
    yield NoteBlock(method_text(cases))
    yield Table(("", "value"), condition_rows(cases), are_numbers=False)
    yield definitions_table(cases)
    for text, names in cases_by_config(cases).items():
        yield NoteBlock(f"Config of {join_names([quoted(name) for name in names])}:")
        yield Code(text)
    yield NoteBlock(f"All records, one line for each case and repeat, are in {quoted(results.source)}.")

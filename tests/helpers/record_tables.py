"""The fields of each kind of record, as the tables of docs/interface.md have them, for all records that tests read."""

import re
from functools import cache
from pathlib import Path

INTERFACE = Path(__file__).resolve().parents[2] / "docs" / "interface.md"
OF_ALL = {"time", "kind", "step"}


def _names(cell):
    """The names in backticks, without those of an explanation in brackets."""
    return set(re.findall(r"`(\w+)`", re.sub(r"\((?:[^()]|\([^()]*\))*\)", "", cell)))


def _rows(heading):
    table = INTERFACE.read_text(encoding="utf-8").split(f"\n{heading}\n", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in table.splitlines()[1:]]


@cache
def tables():
    """``{kind: (the fields that each has, those that some have)}``; of the ``stream`` of a buffer as its own kind."""
    found = {
        kind: (_names(fields) | OF_ALL, _names(only))
        for kinds, _, fields, only in _rows("| kind | when, and of what | fields | only |")
        for kind in _names(kinds)
    }
    stream = _rows("| of a `stream` | | only |")
    always, sometimes = (set().union(*(_names(row[column]) for row in stream)) for column in (1, 2))
    return {**found, "stream": (always, sometimes)}


def check_fields(kind, fields):
    """Fail where fields differ from those that the document names."""
    assert kind in tables(), f"docs/interface.md has no record of kind {kind}: {sorted(fields)}"
    always, sometimes = tables()[kind]
    assert always <= fields, f"a {kind} record lacks {sorted(always - fields)}, which docs/interface.md has"
    assert fields <= always | sometimes, (
        f"docs/interface.md lacks {sorted(fields - always - sometimes)} of {kind} records"
    )


def check_records(records):
    for record in records:
        check_fields(record["kind"], set(record))
        if "stream" in record:
            check_fields("stream", set(record["stream"]))

"""The parts of the site that are made from the code or from results, and are not committed.

docs/conf.py appends them to the pages that ``PARTS`` names. ``python docs/generated.py refused`` prints one of them.
"""

from __future__ import annotations

import ast
import csv
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from paramserver import errors
from paramserver.config import checks

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

# What is refused.

CLASSES = {
    name
    for name, member in vars(errors).items()
    if isinstance(member, type) and issubclass(member, errors.UnsupportedConfiguration)
}
"""The errors of wrong input, with which a command ends with exit code 2."""
SUBJECTS = {
    "Config": "config",
    "Command line, processes and hosts": (
        "launch cli cluster context devices distributed doctor elastic process_utils runtime"
    ),
    "Tasks and models": "task api importing parameters rng trainers limits consistency",
    "Data and buffers": "sources buffers",
    "Optimizers and servers": "coordination optim server transport",
    "Runs and checkpoints": "runs checkpoint fileio evaluate predict",
    "Records": "metrics",
    "Simulations, clients and subscribers": "online client subscriber run_simulation",
    "Lightning": "integrations",
    "Benchmarks and reports": "bench benchmark prediction report reporting",
    "Faults": "chaos faults",
}
OTHER = "Other commands"


class Sentence(NamedTuple):
    """A sentence that refuses input: where the code has it, and what it says, with ``…`` for what is filled in."""

    file: Path
    line: int
    text: str


def sentences() -> Iterator[Sentence]:
    """Every sentence with which the package refuses input, in the order of files and lines."""
    for file in sorted(path for folder in ("paramserver", "trainers") for path in (ROOT / folder).rglob("*.py")):
        if file.name != "__init__.py":
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found = _relations() if file == Path(checks.__file__) else _raised(tree)
            # A text that consists of what is filled in has no words of its own.
            worded = ((line, text) for line, text in sorted(found) if len(re.findall(r"\w{3,}", text)) > 2)
            yield from (Sentence(file, line, text) for line, text in worded)


def text_of(node: ast.AST) -> str | None:
    """The text of a string in the code; None if it is no literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else f"{left or '…'}{right or '…'}"
    return None


def _called(node: ast.AST) -> str | None:
    """The name of what a call calls, without its module."""
    function = getattr(node, "func", None)
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def _raised(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and first argument of each error that is made."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and _called(node) in CLASSES and (text := text_of(node.args[0])):
            yield node.lineno, text


def _relations() -> Iterator[tuple[int, str]]:
    """The messages of the relations between keys, in their order."""
    for number, relation in enumerate(checks.RELATIONS):
        filled_in = re.sub(r"(?<!{){[^{}]+}(?!})", "…", relation.message)
        yield number, filled_in.replace("{{", "{").replace("}}", "}")


def subject_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    unit = next(part for part in parts if part not in ("paramserver", "tools"))
    return next((subject for subject, units in SUBJECTS.items() if unit in units.split()), OTHER)


def refused() -> str:
    """The sentences by subject, each once."""
    by_subject: dict[str, dict[str, None]] = {subject: {} for subject in (*SUBJECTS, OTHER)}
    for sentence in sentences():
        by_subject[subject_of(sentence.file)][_bullet(sentence.text)] = None
    return "".join(f"\n## {subject}\n\n" + "".join(found) for subject, found in by_subject.items() if found)


def _bullet(text: str) -> str:
    escaped = re.sub(r"([*<\[\]\\`])|__", lambda found: "".join(f"\\{letter}" for letter in found[0]), text)
    words = " ".join(escaped.replace("……", "…").split())
    return textwrap.fill(words, 119, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False) + "\n"


# Real faults.


def faults() -> str:
    """The tables of docs/faults.csv, one for each role, after its comment on how they were made."""
    lines = (DOCS / "faults.csv").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))
    _, *columns = next(rows := csv.reader(line for line in lines if not line.startswith("#")))
    parts = [f"\n{comment}\n"]
    for role, cells in groupby(rows, key=lambda row: row[0]):
        table = [columns, ["---"] * len(columns), *(row[1:] for row in cells)]
        parts.append(f"\n### {role}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in table))
    return "".join(parts)


PARTS = {"docs/refused": refused, "docs/losses": faults}
"""What is appended to a page of the site."""


if __name__ == "__main__":
    print({function.__name__: function for function in PARTS.values()}[sys.argv[1]]())

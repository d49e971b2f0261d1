"""Counts files, lines, functions and comments of this package: how much there is to read, and in which pieces.

    python -m tests.measure.tree [FOLDER ...]

Without arguments, ``paramserver`` and ``trainers`` of the current folder are measured. Nothing is imported, so any
folder of Python files can be compared with them.

A *code line* is neither blank nor a comment nor part of a docstring. A *small private helper* is a function whose name
begins with one underscore, whose body has at most ``SMALL_LINES`` lines without its docstring, and whose name occurs
once in all files besides its definition.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SMALL_LINES = 8
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PRAGMA = re.compile(r"#\s*(noqa|type:)")
PRIVATE = re.compile(r"\b_[A-Za-z]\w*")


@dataclass(frozen=True)
class Source:
    """A Python file.

    Args:
        path: relative to the folder that holds its package.
        text: its content.
        depth: the number of folders between it and the folder that is measured.
    """

    path: Path
    text: str
    depth: int

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @property
    def lines(self) -> list[str]:
        return [line.strip() for line in self.text.splitlines()]

    @property
    def lines_without_docstrings(self) -> list[str]:
        spans = [node.body[0] for node in self.nodes if isinstance(node, Documented) and docstring_lines(node)]
        inside = {number for span in spans for number in range(span.lineno, (span.end_lineno or span.lineno) + 1)}
        return [line for number, line in enumerate(self.lines, 1) if number not in inside]

    @property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]

    @property
    def docstring_lines(self) -> int:
        return sum(docstring_lines(node) for node in self.nodes)

    @property
    def comments(self) -> int:
        return sum(line.startswith("#") and not PRAGMA.match(line) for line in self.lines_without_docstrings)

    @property
    def code_lines(self) -> int:
        return sum(bool(line) and not line.startswith("#") for line in self.lines_without_docstrings)


def docstring_lines(node: ast.AST) -> int:
    """The number of lines of the docstring of ``node``; 0 where it has none."""
    if not isinstance(node, Documented) or ast.get_docstring(node, clean=False) is None:
        return 0
    return length(node.body[0])


def length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def body_lines(function: Function) -> int:
    """Lines of a function below the line of ``def``, without the docstring."""
    return length(function) - 1 - docstring_lines(function)


def read_sources(folder: Path) -> list[Source]:
    """All Python files in ``folder`` and its subfolders."""
    paths = sorted(folder.rglob("*.py"))
    return [Source(p, p.read_text(encoding="utf-8"), len(p.relative_to(folder).parts) - 1) for p in paths]


def small_private_helpers(sources: Iterable[Source]) -> list[tuple[Path, Function]]:
    sources = list(sources)
    uses = Counter(name for source in sources for name in PRIVATE.findall(source.text))
    return [
        (source.path, function)
        for source in sources
        for function in source.functions
        if re.match(r"_[^_]", function.name) and body_lines(function) <= SMALL_LINES and uses[function.name] == 2
    ]


def repeated_class_names(sources: Iterable[Source]) -> list[str]:
    counts = Counter(node.name for source in sources for node in source.nodes if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in counts.items() if count > 1)


def distribution(values: Sequence[int]) -> str:
    """Median, 90th percentile and maximum."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):.0f}, {ordered[int(0.9 * (len(ordered) - 1))]}, {ordered[-1]}"


def measures(sources: Sequence[Source]) -> dict[str, str]:
    functions = [function for source in sources for function in source.functions]
    code = sum(source.code_lines for source in sources)
    helpers = small_private_helpers(sources)
    repeated = repeated_class_names(sources)
    per_100 = 100 / max(code, 1)
    return {
        "modules at the top level": str(sum(s.depth == 0 and s.path.name != "__init__.py" for s in sources)),
        "files": str(len(sources)),
        "lines": str(sum(len(source.lines) for source in sources)),
        "code lines": str(code),
        "lines of a file: median, 90 %, longest": distribution([len(source.lines) for source in sources]),
        "lines of a function: median, 90 %, longest": distribution([body_lines(f) for f in functions] or [0]),
        "functions per 100 code lines": f"{per_100 * len(functions):.1f}",
        f"private helpers of up to {SMALL_LINES} lines, one caller": f"{len(helpers)} of {len(functions)}",
        "comments per 100 code lines": f"{per_100 * sum(source.comments for source in sources):.1f}",
        "docstring lines per 100 code lines": f"{per_100 * sum(source.docstring_lines for source in sources):.0f}",
        "lines of examples in docstrings": str(sum(source.text.count(">>>") for source in sources)),
        "class names used twice": f"{len(repeated)} {', '.join(repeated)}".strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", default=[Path("paramserver"), Path("trainers")]
    )
    parser.add_argument("--list", action="store_true", help="print the private helpers")
    arguments = parser.parse_args()
    sources = [source for folder in arguments.folders for source in read_sources(folder)]
    if not sources:
        parser.error(f"FOLDER ({', '.join(map(str, arguments.folders))}) must contain Python files")
    for name, value in measures(sources).items():
        print(f"{name:<52}{value}")
    if arguments.list:
        for path, function in small_private_helpers(sources):
            print(f"{path}:{function.lineno} {function.name}")


if __name__ == "__main__":
    main()

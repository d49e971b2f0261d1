"""Runs a third-party script with its data replaced: the replacement, its difference to the original, and the error."""

from __future__ import annotations

import ast
import difflib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

DEADLINE_S = 300.0
# The last line of a traceback, also where another rank passes it on.
_ERROR = re.compile(r"^(\w*(?:Error|Exception)\b.*)$")


def with_other_data(source: str, lines: Mapping[str, Sequence[str]]) -> str:
    """Replace the statements that import a module, or set a variable, by other lines.

    Args:
        source: of a module.
        lines: for each name of a module that is imported from, or of a variable: what takes the statement's place.

    Raises:
        ValueError: a name is not there exactly once.
    """
    statements: dict[str, list[ast.stmt]] = {name: [] for name in lines}
    for node in ast.walk(ast.parse(source)):
        name = _name_of(node)
        if isinstance(node, ast.stmt) and name in statements:
            statements[name].append(node)
    wrong = [name for name, found in statements.items() if len(found) != 1]
    if wrong:
        raise ValueError(f"the script must import or set {', '.join(wrong)} once; take the commit that is named")
    text = source.splitlines()
    for name, (node,) in sorted(statements.items(), key=lambda item: -item[1][0].lineno):
        indent = " " * node.col_offset
        text[node.lineno - 1 : node.end_lineno] = [indent + line for line in lines[name]]
    return "\n".join(text) + "\n"


def _name_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.ImportFrom):
        return node.module
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def difference(before: str, after: str) -> str:
    """As ``diff -u`` shows it."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "original", "replaced", lineterm="", n=1)
    return "\n".join(lines) + "\n"


def run_until_error(
    commands: Sequence[Sequence[str]], environ: Mapping[str, str], deadline_s: float = DEADLINE_S
) -> str | None:
    """Run fresh interpreters side by side until all have ended or one prints a traceback; then all are ended.

    The exit code of a parent does not show that its child failed, and peers of a failed process may wait for
    ever: so the output is what counts.

    Returns:
        The last line of the first traceback, what else went wrong, or None where all went well.
    """
    read_end, write_end = os.pipe()
    processes = [
        subprocess.Popen(
            [sys.executable, *words], env=dict(environ), stdout=write_end, stderr=write_end, start_new_session=True
        )
        for words in commands
    ]
    os.close(write_end)
    late = threading.Event()
    timer = threading.Timer(deadline_s, lambda: (late.set(), end(processes)))
    timer.start()
    try:
        error = _first_error(read_end)  # until all have closed their end
    finally:
        timer.cancel()
        end(processes)
        codes = [process.wait() for process in processes]
    if error is None and late.is_set():
        return f"no end within {deadline_s:g} s"
    return error if error is not None or not any(codes) else f"exit codes {codes}"


def _first_error(read_end: int) -> str | None:
    with open(read_end, encoding="utf-8", errors="replace") as output:
        for line in output:
            found = _ERROR.match(line)
            if found:
                return found[1]
    return None


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill these and all that they started."""
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # all of its group have ended

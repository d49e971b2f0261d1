"""Files that are appended to: a line that a kill left incomplete never becomes part of the next one."""

import ast
import json

import pytest
from fake_results import result
from source_tree import imported, modules

from paramserver.fileio import end_last_line
from paramserver.metrics.sinks import JsonLines
from paramserver.online.coordinator import CoordinatorJournal, SamplerRecord
from paramserver.tools.report.results import append_result, read_results

# Logs of text for people, in which every line stands alone.
LOGS = {
    "paramserver.online.process_runner",
    "paramserver.runtime.preloaded",
    "paramserver.runtime.rank",
    "paramserver.runtime.supervisor",
    "paramserver.process_utils",
}


def write_metrics(path):
    with JsonLines(path) as sink:
        sink.write({"kind": "note", "step": 1, "text": "a" * 40})


WRITERS = {
    "metrics.jsonl": write_metrics,
    "sampler.jsonl": lambda path: SamplerRecord(path).begin({"mean": 0.5, "points": [[0, [0.25]]]}),
    "coordinator.jsonl": lambda path: CoordinatorJournal(path, continues=True).record_port(5555),
    "results.jsonl": lambda path: append_result(path, result()),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_that_is_killed_anywhere_in_a_line_harms_neither_the_one_before_nor_the_next(tmp_path, name):
    file, write = tmp_path / name, WRITERS[name]
    write(file)
    line = file.read_bytes()
    whole = json.loads(line)
    for cut in (*range(min(len(line), 60)), *range(len(line) - 3, len(line))):
        file.write_bytes(line + line[:cut])
        write(file)
        found = [json.loads(one) for one in file.read_text().splitlines()]
        assert len(found) == (3 if cut == len(line) - 1 else 2), "only its line end was missing" if cut else cut
        assert all(one.keys() == whole.keys() for one in found)
    write(file)
    assert file.read_bytes().endswith(line)
    if name == "coordinator.jsonl":
        assert CoordinatorJournal(file, continues=True).port == 5555
    if name == "results.jsonl":
        assert [note for note in read_results(file).notes if "incomplete" in note] == []


@pytest.mark.parametrize("torn", [b"", b"{", b"{}", b"\xff\xfe{", b"\0" * 70_000, b'{"a": "' + b"x" * 200_000])
def test_what_follows_the_last_line_end_is_removed_unless_it_is_whole(tmp_path, torn):
    file = tmp_path / "lines.jsonl"
    for before in (b"", b'{"kept": 1}\n', b'{"kept": "' + b"y" * 100_000 + b'"}\n'):
        file.write_bytes(before + torn)
        with file.open("a+b") as opened:
            end_last_line(opened)
            opened.write(b'{"next": 2}\n')
        assert file.read_bytes() == before + (b"{}\n" if torn == b"{}" else b"") + b'{"next": 2}\n'


def test_every_module_that_appends_lines_ends_the_last_one_or_writes_a_log():
    appends = {
        module.name
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "open"
        for argument in node.args[:1]
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("a")
    }
    ends = {module.name for module in modules() if "paramserver.fileio.end_last_line" in imported(module.tree)}
    assert appends - ends == LOGS
    assert appends >= ends

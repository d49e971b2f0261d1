"""results.jsonl keeps what was finished, and refuses what it cannot understand in one sentence."""

import json
import math
import os

import pytest
from fake_results import failed, repeats, result, stale

from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.report.results import FORMAT, append_result, parse_result, read_results


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "results.jsonl"
    for one in (
        *repeats("rpc, 2 trainers", [1000.0, 1010.0], staleness=stale({0: 5, 1: 3})),
        failed("ddp, 2 trainers"),
    ):
        append_result(path, one)
    return path


def refused(call, *arguments):
    with pytest.raises(UnsupportedConfiguration) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_is_written_is_read_again(file):
    first, second, third = read_results(file).results
    assert first == result("rpc, 2 trainers", 0, 1000.0, staleness=stale({0: 5, 1: 3}))
    assert first.step_bins
    assert all(isinstance(index, int) for index in first.step_bins)
    assert (second.repeat, second.samples_per_second) == (1, 1010.0)
    assert (third.status, third.error, third.is_completed) == ("failed", "TaskError: no data", False)
    assert read_results(file.parent) == read_results(file)  # the folder that holds it does as well
    assert read_results(file).notes == ()


def test_every_field_is_read_back(file):
    everything = result(
        overrides={"server.consistency": "async", "task_args": {"width": [1, 2]}},
        scenario={"slow": {"trainer": 1, "factor": 5.0, "probability": 0.1}},
        baseline="no communication",
        target={"accuracy": 0.9},
        time_to_target_s=3.5,
        samples_to_target=1e4,
        predicted={"communication_ms": 4.0, "built": "one server"},
    )
    append_result(file, everything)
    # The record of the same case and repeat came first, and takes its place among the others.
    assert read_results(file).results[0] == everything
    assert "1 repeat" in read_results(file).notes[0]


def test_a_number_that_is_not_finite_is_not_known(tmp_path):
    path = tmp_path / "results.jsonl"
    diverged = result(loss=((1.0, 1.0, math.nan),), validation=((1.0, 1.0, {"loss": math.inf}),), per_process=math.nan)
    append_result(path, diverged)
    one = read_results(path).results[0]
    assert one.loss == ((1.0, 1.0, None),)
    assert one.validation == ((1.0, 1.0, {"loss": None}),)
    assert one.per_process is None
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))


def test_each_record_is_on_the_disk_before_the_next_is_made(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    path = tmp_path / "results.jsonl"
    for repeat in range(3):
        append_result(path, result(repeat=repeat))
        assert synced[-1] == path.stat().st_size
    assert len(synced) == 3


@pytest.mark.parametrize("cut", [1, 2, 40, 500])
def test_a_last_line_that_was_torn_is_left_out_and_reported(file, cut):
    whole = file.read_bytes()
    last = whole[whole[:-1].rfind(b"\n") + 1 :]
    file.write_bytes(whole[: -min(cut, len(last) - 1)])
    found = read_results(file)
    if cut == 1:  # the line end alone is missing: the record is whole
        assert (len(found.results), found.notes) == (3, ())
    else:
        assert len(found.results) == 2
        assert "last line" in found.notes[0]
        assert "incomplete" in found.notes[0]
    append_result(file, result("new"))
    assert [one.case for one in read_results(file).results][-1] == "new"
    assert read_results(file).notes == ()


def test_a_writer_that_is_killed_anywhere_loses_only_its_own_line(file):
    whole = file.read_bytes()
    for length in range(whole.index(b"\n") + 1, len(whole), 97):
        file.write_bytes(whole[:length])
        assert len(read_results(file).results) == max(whole[:length].count(b"\n"), 1)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (b'{"format": 1, "case": ', "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b"[1, 2]", "must be one record"),
        (b"3", "must be one record"),
        (b'{"case": "x"}', "format (None) must be 1"),
    ],
)
def test_a_damaged_line_is_named_in_one_sentence(file, line, part):
    lines = file.read_bytes().split(b"\n")
    lines.insert(1, line)
    file.write_bytes(b"\n".join(lines))
    message = refused(read_results, file)
    assert message.startswith(f"{file}:2: ")
    assert part in message
    assert len(message) < 400


def test_another_format_is_refused_by_name(file):
    record = result().to_mapping() | {"format": 2}
    message = refused(parse_result, record, "r.jsonl:7")
    assert message.startswith(f"r.jsonl:7: format (2) must be {FORMAT}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("case", ""),
        ("case", None),
        ("repeat", -1),
        ("repeat", True),
        ("trainers", 0),
        ("servers", 1.5),
        ("status", "done"),
        ("baseline", "ddp"),
        ("samples_per_second", "fast"),
        ("samples_per_second", -1.0),
        ("seconds", 10**400),
        ("per_trainer", [1.0, "x"]),
        ("step_ms", {"mean": "x"}),
        ("step_bins", {"x": 1}),
        ("step_bins", {"12345678": 1}),
        ("step_bins", {"3": -1}),
        ("phases_ms", [1.0]),
        ("loss", [[1.0, 2.0]]),
        ("loss", [[None, 2.0, 1.0]]),
        ("validation", [[1.0, 2.0, 3.0]]),
        ("staleness", {"mean": "x"}),
        ("staleness", {"histogram": {"-1": 2}}),
        ("environment", "here"),
    ],
)
def test_a_wrong_field_is_named_with_value_and_rule(name, value):
    record = json.loads(json.dumps(result().to_mapping())) | {name: value}
    message = refused(parse_result, record, "r.jsonl:1")
    assert message.startswith(f"r.jsonl:1: {name} (")
    assert " must be " in message
    assert len(message) < 250


@pytest.mark.parametrize("name", ["case", "repeat", "mode", "trainers", "servers", "status"])
def test_a_required_field_may_not_be_missing(name):
    record = json.loads(json.dumps(result().to_mapping()))
    del record[name]
    assert f"{name} (missing)" in refused(parse_result, record, "r.jsonl:1")


def test_unknown_fields_are_left_out_and_unknown_figures_may_be_null():
    given = {"format": 1, "case": "a", "repeat": 0, "mode": "rpc", "trainers": 2, "servers": 1, "status": "failed"}
    one = parse_result(given, "x")
    nulls = dict.fromkeys(one.to_mapping().keys() - given.keys())
    assert parse_result({**given, **nulls, "of_a_later_version": 1}, "x") == one


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"format"'])
def test_a_file_without_records_is_refused(tmp_path, content):
    path = tmp_path / "results.jsonl"
    path.write_bytes(content)
    assert "holds none" in refused(read_results, path)


def test_places_that_are_none_are_refused(tmp_path):
    assert "No such file" in refused(read_results, tmp_path / "nothing")
    assert "results.jsonl" in refused(read_results, tmp_path)
    assert "--out" in refused(append_result, tmp_path / "no" / "results.jsonl", result())

"""The transport that each trainer used is in records, summary and report; comparing different ones warns."""

import json
import re

import pytest
from launching import TASKS, WITNESS_TRAINERS, train

from paramserver.config import Config, load_config
from paramserver.metrics import FanOut
from paramserver.metrics.records import make_record
from paramserver.metrics.summary import summary_text
from paramserver.reporting import main as report
from paramserver.runs.monitor import RunMonitor
from paramserver.tools.report.findings import compare
from paramserver.tools.report.from_runs import results_at
from paramserver.tools.report.results import append_result, read_results

pytestmark = pytest.mark.claim("transport-used")

TABLES = TASKS.with_name("table_tasks.py")
CONFIG = {"training": {"max_steps": 3, "batch_size": 8}}
USED = {
    "shared_memory": {},  # auto
    "rpc": {"transport": "rpc"},
    "tcp": {"transport": "tcp"},
    "served": {"compute": "server"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transports")
    return {name: train(folder / name, "rpc", 2, server=server, **CONFIG) for name, server in USED.items()}


@pytest.mark.processes
@pytest.mark.parametrize("name", USED)
def test_records_summary_and_report_name_what_each_trainer_used(runs, name, tmp_path):
    run, used = runs[name], "rpc" if name == "served" else name
    records = sorted((r["trainer"], r["transport"]) for r in run.of_kind("transport"))
    assert records == [(0, used), (1, used)]
    assert run.summary["transports"] == {"0": used, "1": used}
    assert f"transport    {used}\n" in run.output
    assert report([str(run.run_dir), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert f" {used} |" in text
    assert "different transports" not in text


@pytest.mark.processes
def test_a_report_of_different_transports_warns(runs, tmp_path):
    folders = [str(runs[name].run_dir) for name in ("shared_memory", "rpc")]
    assert report([*folders, "--out", str(tmp_path)]) == 0
    assert "The results are of different transports (shared_memory and rpc)" in (tmp_path / "report.md").read_text()


@pytest.mark.processes
def test_benchmarks_of_different_transports_are_compared_with_a_warning(runs, tmp_path):
    found = []
    for name in ("shared_memory", "rpc"):
        (one,) = results_at([runs[name].run_dir]).results
        append_result(tmp_path / f"{name}.jsonl", one)
        found.append(read_results(tmp_path / f"{name}.jsonl"))
    notes = compare(*found).notes
    assert any("used shared_memory as its transport in A, and rpc in B" in note for note in notes)
    assert not [note for note in compare(found[0], found[0]).notes if "transport" in note]


OTHER_WAYS = {
    "default": ({}, "shared_memory"),
    "off": ({"ddp": {"shared_memory": "off"}}, "gloo"),
    "hook": ({"ddp": {"comm_hook": "fp16"}}, "gloo"),
    "own": ({"trainer": f"{WITNESS_TRAINERS}:CountingTrainer"}, "gloo"),
    "hosts": ({"trainer": f"{WITNESS_TRAINERS}:ReducingTrainer"}, "gloo"),
    "small": ({"task": f"{TASKS}:LittleSharedMemory"}, "gloo"),
    "tables": ({"task": f"{TABLES}:Tables", "task_args": {"rare": False}}, "gloo"),
}


@pytest.mark.parametrize(("word", "meant"), [("off", "off"), ("'off'", "off"), ("auto", "auto")])
def test_shared_memory_of_ddp_is_switched_off_by_the_word(tmp_path, word, meant):
    """YAML 1.1 reads it as false."""
    (tmp_path / "config.yaml").write_text(f"task: a:B\nmode: ddp\nddp: {{shared_memory: {word}}}\n")
    assert load_config(tmp_path / "config.yaml").ddp.shared_memory == meant


@pytest.mark.processes
@pytest.mark.claim("all-reduce")
@pytest.mark.parametrize("name", OTHER_WAYS)
def test_ddp_names_where_gradients_were_reduced(name, tmp_path):
    config, used = OTHER_WAYS[name]
    run = train(tmp_path, "ddp", 2, **{**CONFIG, **config})
    assert run.code == 0, run.output
    assert run.summary["transports"] == {"0": used, "1": used}
    assert sorted((r["trainer"], r["transport"]) for r in run.of_kind("transport")) == [(0, used), (1, used)]
    notes = [r["text"] for r in run.of_kind("note") if "over gloo" in r["text"]]
    assert len(notes) == (name == "small")
    if notes:
        assert re.match(
            r"ddp.shared_memory \(auto\): gradients are reduced over gloo, as segment gradients needs", notes[0]
        )


@pytest.mark.processes
def test_a_mode_without_communication_has_none(tmp_path):
    local = train(tmp_path, "local", 1, **CONFIG)
    assert local.summary["transports"] is None
    assert not local.of_kind("transport")
    assert "transport " not in local.output


def test_a_trainer_that_fell_back_is_named_also_where_the_run_fails(tmp_path):
    monitor = RunMonitor(Config(), FanOut([]), tmp_path / "summary.json")
    for trainer, transport in enumerate(("shared_memory", "rpc", "rpc")):
        monitor.record(make_record("transport", 0, trainer=trainer, transport=transport))
    monitor.record(make_record("transport", 7, trainer=2, transport="shared_memory"))  # another process took its place
    summary = monitor.close("failed", [], error="it failed")
    assert json.loads((tmp_path / "summary.json").read_text())["transports"] == summary["transports"]
    assert "  shared_memory (trainers 0, 2), rpc (trainer 1)\n" in summary_text(summary, tmp_path)

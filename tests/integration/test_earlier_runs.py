"""Runs that an earlier version stored, one of each mode, resume, and are evaluated, predicted from and reported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from launching import FinishedRun, resume

from paramserver import evaluate, predict as predict_command
from paramserver.reporting import main as report

FIXTURES = Path(__file__).parents[1] / "fixtures"
MODES = ("local", "ddp", "rpc")
REMOVED = {"find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb"}


@pytest.fixture
def stored(tmp_path, request):
    shutil.copy(FIXTURES / "stored_run" / "tiny_task.py", tmp_path)
    shutil.copytree(FIXTURES / "earlier_runs" / request.param, tmp_path / request.param)
    return FinishedRun(0, "", tmp_path / request.param)


@pytest.fixture
def task(tmp_path):
    return f"task={tmp_path / 'tiny_task.py'}:TinyTask"


def validations(run):
    return [record for record in run.records_as_they_are if record["kind"] == "validation"]


@pytest.mark.processes
@pytest.mark.parametrize("stored", MODES, indirect=True)
def test_it_resumes_and_ends_as_the_earlier_version_did(stored, task):
    mode = stored.run_dir.name
    assert yaml.safe_load((stored.run_dir / "config.yaml").read_text())["ddp"].keys() >= REMOVED
    more = resume(stored, "--set", "training.max_steps=8", "--set", task)
    assert more.code == 0, more.output
    assert [r["step"] for r in validations(more)] == [2, 4, 6, 8]
    expected = json.loads((FIXTURES / "earlier_runs" / "expected.json").read_text())[mode]
    assert {name: value.flatten().tolist() for name, value in more.load("model").items()} == expected
    assert not yaml.safe_load((stored.run_dir / "config.yaml").read_text())["ddp"].keys() & REMOVED


@pytest.mark.processes
@pytest.mark.parametrize("stored", MODES, indirect=True)
def test_it_is_evaluated_to_what_it_recorded(stored, task, capsys):
    (record,) = (r for r in validations(stored) if r["step"] == 4)
    for which in ("latest", "best"):
        assert evaluate.main([str(stored.run_dir), "--checkpoint", which, "--set", task, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["values"] == pytest.approx(record["values"], rel=1e-6)
        assert (found["step"], found["samples"]) == (4, record["samples"])


@pytest.mark.processes
@pytest.mark.parametrize("stored", MODES, indirect=True)
def test_its_model_predicts(stored, task, tmp_path):
    (tmp_path / "inputs.py").write_text("import torch\n\ndef ones():\n    return torch.ones(3, 2).double().split(1)\n")
    out = tmp_path / "out.pt"
    arguments = [str(stored.run_dir), "--source", f"{tmp_path / 'inputs.py'}:ones", "--out", str(out), "--set", task]
    assert predict_command.main(arguments) == 0
    weight, bias = stored.load("model").values()
    if stored.run_dir.name == "local":  # whose averages had another name in optimizer.pt
        weight, bias = (state["average"] for state in stored.load("optimizer")["state"].values())
    output = weight.sum() + bias
    torch.testing.assert_close(torch.load(out, weights_only=True).flatten(), output.repeat(3))


@pytest.mark.parametrize("stored", MODES, indirect=True)
def test_it_is_reported(stored, tmp_path):
    assert report([str(stored.run_dir), "--out", str(tmp_path / "report")]) == 0
    assert stored.run_dir.name in (tmp_path / "report" / "report.md").read_text()

"""Each loss has one name, and each name one number, wherever a run shows it."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from launching import run_in_process
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paramserver.metrics.summary import summary_text
from paramserver.reporting import main as report
from paramserver.tools.report.from_runs import results_at

pytestmark = pytest.mark.claim("loss-names")

STORED = Path(__file__).parents[1] / "fixtures" / "stored_run" / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Of 25 steps with a record of every tenth: the last record is of five steps."""
    finished = run_in_process(
        tmp_path_factory.mktemp("losses"),
        mode="local",
        training={"max_steps": 25, "validate_every": 10},
        logging={"log_every": 10, "tensorboard": True, "sinks": ["csv"]},
    )
    assert finished.code == 0, finished.output
    return finished


def rows(text):
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in text.splitlines() if "  " in line)


def test_the_train_loss_is_the_mean_of_the_last_record_everywhere(run, tmp_path):
    record = run.of_kind("train")[-1]
    loss = record["loss"]
    assert record["step"] == 25
    assert run.summary["train_loss"] == loss != run.summary["last_step_loss"]
    shown = f"{loss:.4g}"
    assert re.findall(r"^step 25/25: train loss ([^,]+),", run.output, re.MULTILINE)[-1] == shown
    assert rows(summary_text(run.summary, run.run_dir))["train loss"] == shown
    assert f"train loss   {shown}" in run.output
    assert not re.search(r"(?<!train )(?<!valid )\bloss\b", run.output.replace("valid        loss", "valid loss"))
    assert curve(run, "train/loss")[-1] == (25, pytest.approx(loss))
    table = list(csv.DictReader((run.run_dir / "metrics.csv").read_text().splitlines()))
    assert [float(row["value"]) for row in table if row["name"] == "train/loss"][-1] == loss
    assert results_at([run.run_dir]).results[0].loss[-1][2] == loss
    assert report([str(run.run_dir), "--out", str(tmp_path / "report")]) == 0
    assert "| train loss |" in (tmp_path / "report" / "report.md").read_text()


def test_values_of_validations_have_one_name_and_tags_of_one_style(run):
    values = run.of_kind("validation")[-1]["values"]
    assert run.summary["validation"] == values
    assert f"valid loss {values['loss']:.4g} accuracy" in run.output
    for name, value in values.items():
        assert curve(run, f"valid/{name}")[-1] == (25, pytest.approx(value))
    assert [tag for tag in tags(run) if tag != tag.lower()] == []


def test_a_stored_run_of_an_earlier_version_is_reported(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(STORED, run)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "summary.json").write_text(json.dumps(records[-1]["summary"]))
    assert report([str(run), "--out", str(tmp_path), "--target", "Loss/valid=10"]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "| train loss |" in text
    assert "1 of 1" in text  # reached the target
    assert (
        results_at([run]).results[0].loss[-1][2]
        == [record["loss"] for record in records if record["kind"] == "train"][-1]
    )


def events(run):
    accumulator = EventAccumulator(str(run.run_dir / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def tags(run):
    return events(run).Tags()["scalars"]


def curve(run, tag):
    return [(event.step, event.value) for event in events(run).Scalars(tag)]

"""``paramserver runs``: what it tells of complete, failed, running and killed runs; ``paramserver init``."""

import json
import os
import socket
import subprocess
import sys

import pytest
import yaml
from launching import train

from paramserver.config import load_config
from paramserver.importing import load_object
from paramserver.tools import init
from paramserver.tools.report import command as report_command

CONFIG = {"training": {"max_steps": 12, "batch_size": 8, "validate_every": 4}, "logging": {"tensorboard": False}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs"), "local", 1, **CONFIG)


def listed(capsys, *arguments):
    code = report_command.runs_main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def copied(finished, folder, started, summary=None, config=None):
    """A copy of the run that began at another time; ``summary`` replaces fields, {} removes the file."""
    folder.mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "environment.json", "summary.json"):
        (folder / name).write_bytes((finished.run_dir / name).read_bytes())
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**environment, "started": started}))
    if summary == {}:
        (folder / "summary.json").unlink()
    elif summary is not None:
        (folder / "summary.json").write_text(json.dumps({**finished.summary, **summary}))
    if config is not None:
        stored = yaml.safe_load((folder / "config.yaml").read_text())
        (folder / "config.yaml").write_text(yaml.safe_dump({**stored, **config}))
    return folder


def test_each_run_is_listed_with_its_end_the_newest_first(finished, tmp_path, capsys):
    copied(finished, tmp_path / "a", "2026-01-01T00:00:00+00:00")
    copied(finished, tmp_path / "b", "2026-01-02T00:00:00+00:00", {"status": "failed", "steps": 7})
    copied(finished, tmp_path / "c", "2026-01-03T00:00:00+00:00", {})
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.yaml").write_text("task: task.py:Mine\n")  # no run
    code, out, _ = listed(capsys, tmp_path, "--json")
    found = json.loads(out)
    assert code == 0
    assert [(one["path"], one["status"], one["steps"]) for one in found] == [
        (str(tmp_path / "c"), "killed", 12),
        (str(tmp_path / "b"), "failed", 7),
        (str(tmp_path / "a"), "completed", 12),
    ]
    validations = finished.of_kind("validation")
    least = min(record["values"]["loss"] for record in validations)
    assert found[2]["best"]["value"] == pytest.approx(least)
    assert found[2]["validation"] == found[0]["validation"] == validations[-1]["values"]
    assert found[2]["samples_per_second"] == finished.summary["samples_per_second"]
    code, out, _ = listed(capsys, tmp_path)
    titles, *rows = out.splitlines()
    assert titles.split() == ["run", "status", "mode", "steps", "best", "validation", "last", "validation", "samples/s"]
    assert len(rows) == 3
    assert rows[2].split()[:4] == [str(tmp_path / "a"), "completed", "local", "12"]
    assert f"loss {least:.4g}"[:10] in rows[2]


def test_a_value_that_is_not_finite_hides_no_run(finished, tmp_path, capsys):
    validation = {"loss": 0.5, "corr": None, "corr_text": "nan"}
    copied(finished, tmp_path / "a", "2026-01-01T00:00:00+00:00", {"validation": validation})
    code, out, _ = listed(capsys, tmp_path)
    assert code == 0
    assert "loss 0.5000, corr nan" in out
    code, out, _ = listed(capsys, tmp_path, "--json")
    assert json.loads(out)[0]["validation"] == validation


def test_the_best_validation_is_that_of_the_config(finished, tmp_path):
    validations = [record["values"] for record in finished.of_kind("validation")]
    for mode, choose in (("max", max), ("min", min)):
        folder = copied(
            finished, tmp_path / mode, "2026-01-01", config={"checkpoint": {"best": {"metric": "loss", "mode": mode}}}
        )
        (found,) = report_command.runs_in(folder)
        assert (found["best"]["name"], found["best"]["value"]) == ("loss", choose(v["loss"] for v in validations))


def test_a_run_is_running_while_its_process_lives(finished, tmp_path):
    folder = copied(finished, tmp_path / "run", "2026-01-01T00:00:00+00:00", {"steps": 3})
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    holders = {"here": process.pid, "elsewhere": 1}
    for where, pid in holders.items():
        host = socket.gethostname() if where == "here" else "another-host"
        (folder / ".reserved.json").write_text(json.dumps({"pid": pid, "host": host}))
        (found,) = report_command.runs_in(folder)
        # Of another host only what its last process has left is known.
        status = "running" if where == "here" else "running on another-host"
        assert (found["status"], found["steps"]) == (status, 12), "the summary is of an earlier start"
    (folder / ".reserved.json").write_text(json.dumps({"pid": process.pid, "host": socket.gethostname()}))
    process.communicate(b"\n")
    assert report_command.runs_in(folder)[0]["status"] == "completed"


def test_a_folder_that_is_none_is_refused_and_an_empty_one_is_not(tmp_path, capsys):
    code, _, err = listed(capsys, tmp_path / "none")
    assert (code, err.count("\n")) == (2, 1)
    assert "must be a folder of runs, and is none" in err
    assert listed(capsys, tmp_path) == (0, "no run was found\n", "")
    assert listed(capsys, tmp_path, "--json") == (0, "[]\n", "")


# paramserver init.


@pytest.mark.processes
def test_what_init_writes_trains_and_its_test_passes(tmp_path, capsys, fork_server):
    folder = tmp_path / "wave-model"
    assert init.main([str(folder)]) == 0
    assert "paramserver launch --config" in capsys.readouterr().out
    assert load_config(folder / "config.yaml").task == "task.py:WaveModel"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    plain = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(
        [sys.executable, *plain], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    words = ["--config", "config.yaml", "--set", "training.max_epochs=2"]
    code, output = fork_server.run(words, folder, 150, environment)
    assert code == 0, output
    assert "2 epochs done" in output
    (found,) = report_command.runs_in(folder / "runs")
    assert (found["status"], found["mode"]) == ("completed", "rpc sync, 2 trainers")


@pytest.mark.parametrize("name", ["tensorDataset", "path", "task"])
def test_the_class_of_init_hides_no_name_that_its_program_uses(tmp_path, monkeypatch, name):
    assert init.main([str(tmp_path / name)]) == 0
    made = load_object(load_config(tmp_path / name / "config.yaml").task, "task", [tmp_path / name])
    monkeypatch.delitem(sys.modules, made.__module__)
    assert made.__name__ == f"{name[0].upper()}{name[1:]}Task"
    assert len(made().train_source(None)) == 1024


def test_a_run_that_is_damaged_does_not_hide_the_others(finished, tmp_path, capsys):
    copied(finished, tmp_path / "good", "2026-01-01T00:00:00+00:00")
    bad = copied(finished, tmp_path / "bad", "2026-01-02T00:00:00+00:00")
    (bad / "summary.json").write_text("{")
    code, out, _ = listed(capsys, tmp_path)
    assert code == 0
    assert [line.split()[1] for line in out.splitlines()[1:3]] == ["damaged", "completed"]
    assert out.splitlines()[3].startswith(f"{bad / 'summary.json'} is damaged")
    assert [one["status"] for one in report_command.runs_in(tmp_path)] == ["damaged", "completed"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("3d", "must end with a letter"), ("none", "must end with a letter"), ("here", "must not exist")],
)
def test_a_name_that_cannot_be_used_is_refused(tmp_path, capsys, name, message):
    (tmp_path / "here").mkdir()
    assert init.main([str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]

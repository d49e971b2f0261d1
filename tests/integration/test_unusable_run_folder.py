"""A run's folder in which something is not what it must be: one sentence and exit code 2, and nothing is changed."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest
from cli_errors import assert_readers_refuse, error_message, file_contents
from launching import environment, resume, resume_in_process, run_concurrently, run_in_process, write_config
from stored_run import CONFIG
from tasks import ReferenceTask

import paramserver
from paramserver import evaluate, predict
from paramserver.checkpoint.format import Manifest, _manifest_digest
from paramserver.errors import CheckpointError
from paramserver.runs.attempt import resume_transaction
from paramserver.runs.rundir import RunDir


def without_logs(run_dir):
    return {name: held for name, held in file_contents(run_dir).items() if name.parts[0] != "logs"}


def test_latest_is_a_folder(run_dir, call, capsys):
    latest = run_dir / "checkpoints" / "latest"
    latest.unlink()
    latest.mkdir()
    assert_readers_refuse(
        run_dir, call, capsys, rf"{latest} must be a file, as the run wrote it, and is none; move it away\n$"
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"a: [", "not valid YAML"), (b"", "is empty"), (b"[1]", "must be a mapping"), (b"\xff\xfe", "is not UTF-8 text")],
)
def test_a_config_that_is_none(run_dir, call, capsys, content, expected):
    (run_dir / "config.yaml").write_bytes(content)
    assert_readers_refuse(run_dir, call, capsys, rf"{run_dir}/config.yaml.*{expected}")


@pytest.mark.claim("no-best")
@pytest.mark.parametrize("command", [evaluate.main, predict.main])
def test_the_best_checkpoint_of_a_run_that_marks_none(run_dir, capsys, command):
    options = ["--source", f"{__file__}:nothing", "--out", str(run_dir / "out.npz")] if command is predict.main else []
    assert command([str(run_dir), "--checkpoint", "best", *options]) == 2
    assert capsys.readouterr().err.partition("error: ")[2] == (
        f"checkpoint best of {run_dir} must exist, and no validation has marked one, as only a run with "
        "checkpoint.best and a validation_source does; choose latest, or one of the steps 4, 2\n"
    )
    assert not (run_dir / "out.npz").exists()


def test_no_config_or_a_folder_in_its_place(run_dir, call, capsys):
    (run_dir / "config.yaml").unlink()
    command = rf"python -m paramserver.launch --config FILE --resume {run_dir}(/checkpoints/step-\d+)?\n$"
    expected = rf"{run_dir} holds checkpoints and no config.yaml; give the config that they were made with: {command}"
    assert_readers_refuse(run_dir, call, capsys, expected)
    with pytest.raises(CheckpointError, match="holds checkpoints and no config"):
        paramserver.run(ReferenceTask, resume=run_dir)
    (run_dir / "config.yaml").mkdir()
    assert_readers_refuse(run_dir, call, capsys, rf"{run_dir}/config.yaml must be a file, as the run")
    (run_dir / "config.yaml").rmdir()
    for step in (2, 4):
        (run_dir / "checkpoints" / f"step-0000000{step}" / "manifest.json").unlink()
    assert_readers_refuse(
        run_dir, call, capsys, rf"{run_dir} holds no config.yaml and no checkpoint: that run never began"
    )


@pytest.mark.parametrize("chosen", [None, "step-00000002"])
def test_a_lost_config_is_replaced_by_the_given_one(tmp_path, run_dir, call, chosen):
    """It becomes the run's; a config.yaml in the folder takes precedence."""
    given = write_config(tmp_path / "given", **{**CONFIG, "training": {**CONFIG["training"], "max_steps": 6}})
    (run_dir / "config.yaml").unlink()
    before = without_logs(run_dir)
    resumed = run_dir if chosen is None else run_dir / "checkpoints" / chosen
    error_message(call(run_dir, "--config", given, "--resume", resumed, "--set", "task_args.batch_norm=false"))
    assert without_logs(run_dir) == before
    finished = call(run_dir, "--config", given, "--resume", resumed)
    assert finished.code == 0, finished.output
    assert "note: the run holds no config.yaml, so the given one is used" in finished.output
    assert [record["step"] for record in finished.of_kind("train")] == list(range(1, 7))
    assert "max_steps: 6" in (run_dir / "config.yaml").read_text()
    assert evaluate.evaluate_run(run_dir).step == 6
    again = call(run_dir, "--config", write_config(tmp_path / "other", **CONFIG), "--resume", run_dir)
    assert again.code == 0, again.output
    assert again.summary["steps"] == 6


def rewrite_manifest(run_dir, change):
    """As another program would, with the right digest."""
    for step in (2, 4):
        path = run_dir / "checkpoints" / f"step-{step:08d}" / "manifest.json"
        content = json.loads(path.read_text())
        content.pop("manifest_sha256")
        change(content)
        path.write_text(json.dumps({**content, "manifest_sha256": _manifest_digest(content)}))


@pytest.mark.parametrize("trainers", [None, 0, "2", True, 1.5])
def test_a_manifest_without_the_number_of_trainers(run_dir, call, capsys, trainers):
    """An evaluation does not need it."""
    rewrite_manifest(run_dir, lambda content: content.update(trainers=trainers))
    expected = rf"trainers \({trainers}\) in .*manifest.json must be how many trainers stored a part"
    assert_readers_refuse(run_dir, call, capsys, expected, slice(1, None))
    rewrite_manifest(run_dir, lambda content: content.pop("trainers"))
    assert_readers_refuse(run_dir, call, capsys, r"trainers \(None\) in", slice(1, None))
    assert evaluate.evaluate_run(run_dir).step == 4


@pytest.mark.parametrize("field", ["files", "step", "created", "format_version"])
def test_a_manifest_without_one_of_its_fields(run_dir, call, capsys, field):
    rewrite_manifest(run_dir, lambda content: content.pop(field))
    named = r".*manifest.json is damaged \(KeyError: "
    assert_readers_refuse(run_dir, call, capsys, rf"{named}|.*must hold a complete checkpoint.*{named}|checkpoint 2 of")


@pytest.mark.parametrize("name", ["model", "optimizer", "run", "trainer-0"])
def test_a_checkpoint_without_one_of_its_parts(run_dir, call, capsys, name):
    rewrite_manifest(run_dir, lambda content: content["files"].pop(f"{name}.pt"))
    ways = slice(None) if name in ("model", "trainer-0") else slice(1, None)
    assert_readers_refuse(run_dir, call, capsys, rf"checkpoint .* holds no '{name}(\.pt)?' \(it holds ", ways)


def test_a_closed_pipe_is_no_error(original):
    """As in ``... | true``, but with certainty: the reading end is closed before anything is written."""
    for words in (["evaluate", str(original)], ["--help"], ["--version"]):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-c", "from paramserver.cli import main; main()", *words],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            timeout=150,
            check=False,
        )
        os.close(writing)
        assert (done.returncode, done.stderr) == (0, ""), words


# Two at once.


@pytest.mark.parametrize("chosen", [None, "step-00000002"])
def test_a_resume_reserves_the_folder_before_its_rank_0_locks_it(run_dir, call, chosen):
    run = RunDir(run_dir, None if chosen is None else run_dir / "checkpoints" / chosen)
    other = run_dir if chosen else run_dir / "checkpoints" / "step-00000002"
    with resume_transaction(run):
        before = file_contents(run_dir)
        refused = call(run_dir, "--resume", other, "--set", "training.max_steps=6")
        message = error_message(refused)
        assert refused.output == f"error: {message}"  # not what would have changed, had it continued
        assert f"in use by another run (process {os.getpid()} on host {socket.gethostname()})" in message
        assert file_contents(run_dir) == before
    finished = call(run_dir, "--resume", run_dir, "--set", "training.max_steps=6")
    assert finished.code == 0, finished.output
    assert "  changed: training.max_steps" in finished.output


@pytest.mark.processes
def test_of_two_that_resume_at_once_one_wins_and_nothing_is_damaged(tmp_path):
    run = run_in_process(tmp_path, **CONFIG)
    both = run_concurrently(*[lambda: resume(run, "--set", "training.max_steps=60")] * 2)
    codes = sorted(finished.code for finished in both)
    assert codes in ([0, 2], [0, 0]), [finished.output for finished in both]
    for finished in both:
        assert finished.code == 0 or re.search(r"in use by another run \(process \d+ on host", error_message(finished))
    assert [record["step"] for record in run.of_kind("train")] == list(range(1, 61))
    assert run.summary["steps"] == 60
    assert resume_in_process(run, "--set", "training.max_steps=62").code == 0
    assert not [path for path in run.run_dir.rglob(".*") if path.name != ".lock"]
    assert Manifest.parse((run.run_dir / "checkpoints/step-00000062/manifest.json").read_text()).step == 62

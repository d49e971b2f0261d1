"""A checkpoint, or a run's folder, that is damaged: the message, what is left, and how to resume."""

import json
import os
import re
import shutil
import socket
from pathlib import Path

import pytest
import torch
from cli_errors import EVERY_3, assert_failed_with, error_message, file_contents, has_table, invalid_task
from launching import FinishedRun, differing_tensors, main_in_process, write_config

from paramserver.runs.rundir import RunDir


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    """A run with checkpoints of steps 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("trained")
    file = write_config(
        folder, task=invalid_task("Wide"), logging={"run_dir": "runs", "name": "run", "progress": "off"}, **EVERY_3
    )
    before = Path.cwd()
    os.chdir(folder)
    try:
        code, output = main_in_process("--config", file)
    finally:
        os.chdir(before)
    assert code == 0, output
    return folder / "runs" / "run"


@pytest.fixture
def trained(trained_once, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "runs" / "run"
    shutil.copytree(trained_once, copy)
    return FinishedRun(0, "", copy)


def flip(folder):
    content = bytearray((folder / "model.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "model.pt").write_bytes(content)


def truncated(folder):
    content = (folder / "trainer-0.pt").read_bytes()
    (folder / "trainer-0.pt").write_bytes(content[: len(content) // 2])


def of_another_format(folder):
    (folder / "manifest.json").write_text(json.dumps({"format_version": 99}))


def without(folder):
    (folder / "optimizer.pt").unlink()


def empty(folder):
    (folder / "manifest.json").write_text("")


DAMAGES = {
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json is missing"),
    "truncated": (truncated, r"trainer-0\.pt has \d+ bytes where its manifest lists \d+"),
    "without": (without, r"optimizer\.pt is missing"),
    "empty": (empty, r"manifest\.json is damaged"),
    "flipped": (flip, r"model\.pt is damaged: its SHA-256 is not the one in the manifest"),
    "newer": (of_another_format, r"has format version 99, .* reads version 3; update paramserver"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_chosen_checkpoint_names_the_newest_good_one_and_how_to_resume(call, trained, name):
    damage, expected = DAMAGES[name]
    chosen, good = (trained.run_dir / "checkpoints" / f"step-0000000{step}" for step in (9, 6))
    damage(chosen)
    before = file_contents(trained.run_dir)
    message = error_message(call(trained.run_dir, "--resume", chosen))
    assert re.search(expected, message)
    command = re.search(r"the newest good one is (\S+); resume from it with (--resume) (\S+)\n", message).groups()
    assert command == (str(good), "--resume", str(good))
    assert file_contents(trained.run_dir) == before
    assert call(trained.run_dir, *command[1:]).code == 0
    assert trained.summary["steps"] == 9


@pytest.mark.parametrize("name", DAMAGES)
def test_the_newest_checkpoint_that_is_not_whole_is_passed_over_or_refused_but_never_in_silence(call, trained, name):
    """Without a manifest it has never been written; one that is not what was written, in any way, is a refusal."""
    damage, expected = DAMAGES[name]
    damage(trained.run_dir / "checkpoints" / "step-00000009")
    before = file_contents(trained.run_dir)
    finished = call(trained.run_dir, "--resume", trained.run_dir)
    assert re.search(expected, finished.output)
    good = trained.run_dir / "checkpoints" / "step-00000006"
    if name != "no manifest":
        assert f"the newest good one is {good}; resume from it with --resume {good}\n" in error_message(finished)
        assert file_contents(trained.run_dir) == before
        finished = call(trained.run_dir, "--resume", good)
        assert finished.code == 0, finished.output
    else:
        assert finished.code == 0, finished.output
        assert f"resuming {trained.run_dir} from step-00000006\n  skipped: " in finished.output
    assert file_contents(trained.run_dir / "checkpoints" / "step-00000003")


def test_a_run_resumes_from_the_chosen_checkpoint(call, trained):
    whole = trained.load("model")
    finished = call(trained.run_dir, "--resume", trained.run_dir / "checkpoints" / "step-00000003")
    assert finished.code == 0, finished.output
    assert "resuming" in finished.output
    assert "from step-00000003" in finished.output
    assert [record["step"] for record in finished.of_kind("train")] == list(range(1, 10))
    superseded = (trained.run_dir / "metrics.superseded.jsonl").read_text().splitlines()
    assert {step for line in superseded if (step := json.loads(line)["step"]) <= 3} == set()
    assert [r["step"] for r in map(json.loads, superseded) if r["kind"] == "train"] == list(range(4, 10))
    assert differing_tensors(trained.load("model", 9), whole) == []
    assert finished.checkpoints == trained.checkpoints


def test_what_a_killed_process_was_writing_is_removed(call, trained):
    half = [trained.run_dir / f".{name}.jsonl.1.tmp" for name in ("metrics", "metrics.superseded")]
    half.append(trained.run_dir / "checkpoints" / ".latest.99999999.tmp")
    for path in half:
        path.write_text("{")
    assert call(trained.run_dir, "--resume", trained.run_dir, "--set", "training.max_steps=10").code == 0
    assert [path for path in half if path.exists()] == []


def test_no_checkpoint_at_all(call, trained):
    shutil.rmtree(trained.run_dir / "checkpoints")
    before = file_contents(trained.run_dir)
    for given in (trained.run_dir, trained.run_dir / "checkpoints" / "step-00000003"):
        message = error_message(call(trained.run_dir, "--resume", given))
        assert "checkpoint" in message
        assert file_contents(trained.run_dir) == before


CHANGED = {
    "shape": (["task_args={width: 9}"], r"1\.weight has shape \(8, 36\) there and \(9, 36\) here; .*; use"),
    "names": (
        ["task_args={extra: true}"],
        r"3\.weight is missing there; 3\.bias is missing there; use the task and the",
    ),
    "dtype": (
        ["task_args={dtype: float64}"],
        r"1\.weight is torch\.float32 there and torch\.float64 here, which only init_from converts; .* more; use",
    ),
    "optimizer": (
        ["task_args={optimizer: adam}"],
        r"not one of this Adam \(.*groups lack amsgrad, betas.*\); resume with",
    ),
    "groups": (
        ["task_args={groups: true}"],
        r"not one of this SGD \(ValueError: loaded state dict has a different number",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("step", [None, 3])
def test_a_checkpoint_of_something_else_leaves_the_run_as_it_was(call, trained, name, step):
    """Also its config: the next --resume without the change works."""
    changes, expected = CHANGED[name]
    kept = ("config.yaml", "environment.json", "summary.json")
    before = file_contents(trained.run_dir)
    given = trained.run_dir if step is None else trained.run_dir / "checkpoints" / f"step-{step:08d}"
    finished = call(trained.run_dir, "--resume", given, *(word for c in changes for word in ("--set", c)))
    assert re.search(expected, error_message(finished)), finished.output
    assert not has_table(finished.output)
    after = file_contents(trained.run_dir)
    assert {n: after[Path(n)] for n in kept} == {n: before[Path(n)] for n in kept}
    assert file_contents(trained.run_dir / "checkpoints") == {
        path.relative_to("checkpoints"): content for path, content in before.items() if path.parts[0] == "checkpoints"
    }
    assert call(trained.run_dir, "--resume", trained.run_dir, "--set", "training.max_steps=10").code == 0
    assert trained.summary["steps"] == 10


def test_weights_to_start_from_that_are_none(start, tmp_path):
    other = tmp_path / "weights.pt"
    for content, expected in (([1, 2], "holds list, and must hold a state_dict"), ({"a": 1}, "holds another model")):
        torch.save(content, other)
        finished = start(init_from=str(other))
        assert f"{other} {expected}" in error_message(finished)
        assert not has_table(finished.output)
        assert not finished.run_dir.exists()


def test_the_files_of_a_run_that_cannot_be_read(call, trained):
    (trained.run_dir / "environment.json").write_text("{")
    assert call(trained.run_dir, "--resume", trained.run_dir).code == 0
    config = trained.run_dir / "config.yaml"
    config.write_text(config.read_text() + "cluster: [\n")
    lines = len(config.read_text().splitlines())
    before = file_contents(trained.run_dir)
    message = error_message(call(trained.run_dir, "--resume", trained.run_dir))
    assert re.match(rf"{config}:{lines + 1}: not valid YAML", message), message
    assert file_contents(trained.run_dir) == before


def test_a_run_that_another_process_holds_is_not_touched(call, trained):
    before = file_contents(trained.run_dir)
    with RunDir(trained.run_dir).lock():
        message = error_message(call(trained.run_dir, "--resume", trained.run_dir / "checkpoints" / "step-00000003"))
    holder = f"process {os.getpid()} on host {socket.gethostname()}"
    assert f"is in use by another run ({holder}); wait until it has ended, or stop it\n" in message
    assert file_contents(trained.run_dir) == before


def test_a_failure_in_a_step_of_a_resumed_run_is_reported_in_its_own_files(call, trained):
    """It made a step, so the files are those of the new attempt."""
    changes = ("training.max_steps=12", "task_args={vector_at: 11}")
    finished = call(trained.run_dir, "--resume", trained.run_dir, *(word for c in changes for word in ("--set", c)))
    assert "batch 11: returned a tensor of shape (3,)" in error_message(finished)
    assert_failed_with(trained, "returned a tensor of shape (3,)", [3, 6, 9], 11)
    assert "vector_at: 11" in (trained.run_dir / "config.yaml").read_text()
    assert [record["step"] for record in trained.of_kind("train")] == list(range(1, 12))

"""metrics.jsonl of a run that was stopped continues without gap and without overlap."""

import json

import pytest
import torch
from launching import (
    TASKS,
    buffer_records,
    launch,
    main_in_process,
    resume,
    resume_in_process,
    run_in_process,
    train,
    write_config,
)
from logging_tasks import OF_A_START

from paramserver.metrics.records import RecordWindow, StepResult
from paramserver.runs.monitor import kinds_recorded_later

TASK = f"{TASKS.with_name('logging_tasks.py')}:LogsEverywhere"
# An epoch is four steps, a window three; a checkpoint is due in the middle of one and at the end of another.
CONFIG = {
    "training": {"max_steps": 11, "batch_size": 4, "validate_every": 2},
    "checkpoint": {"every": 4, "keep": 10, "background": False},
    "logging": {"log_every": 3},
}


def config_of(folder, trainers, max_steps=11, **task_args):
    task_args = {"mark": str(folder / "mark"), "samples": 16 * trainers, "validation": 5, **task_args}
    training = {**CONFIG["training"], "max_steps": max_steps}
    return {**CONFIG, "task": TASK, "task_args": task_args, "training": training}


def account(finished):
    """The content of the records, without the times."""
    logged = [(r["step"], r["trainer"], r["name"], r["value"]) for r in finished.of_kind("log")]
    return {
        "log": sorted(record for record in logged if record[2] not in OF_A_START),
        "reduced": [
            [r[f] for f in ("step", "name", "value", "trainers")]
            for r in finished.of_kind("reduced")
            if r["name"] not in OF_A_START
        ],
        "train": [
            [r[f] for f in ("step", "loss", "samples", "epoch", "lr")] + [r["step_ms"] is None]
            for r in finished.of_kind("train")
        ],
        "validation": [[r[f] for f in ("step", "values")] for r in finished.of_kind("validation")],
        "buffer": buffer_records(finished),
        # Each gradient is in the record of one window.
        "staleness": [[r["step"], r["histogram"]] for r in finished.of_kind("staleness")],
    }


@pytest.mark.processes
@pytest.mark.parametrize(("mode", "trainers"), [("local", 1), ("ddp", 2), ("rpc", 2)])
def test_killed_and_resumed_it_has_the_records_of_a_run_that_was_not(tmp_path, mode, trainers):
    """Killed while step 7 or 11 is made: of the steps after the checkpoint, that one and those before it come again."""
    whole = train(tmp_path / "whole", mode, trainers, **config_of(tmp_path, trainers))
    kind = "log" if trainers == 1 else "reduced"
    stored = [(r["step"], r["value"]) for r in whole.of_kind(kind) if r["name"] == "checkpoint"]
    assert stored == [(4, trainers), (8, trainers), (11, trainers)]
    for kill_at in (6, 10) if mode == "local" else (6,):
        folder = tmp_path / f"killed-{kill_at}"
        config = config_of(folder, trainers, kill_at=kill_at)
        ends_at_loss = {"cluster": {"num_trainers": trainers, "max_restarts": 0}, "server": {"on_loss": "fail"}}
        killed = launch(folder, mode=mode, **ends_at_loss, **config)
        assert killed.code != 0
        assert (folder / "mark").exists()
        run = resume(killed)
        assert run.code == 0, run.output
        assert account(run) == account(whole)
        if mode == "local":  # elsewhere what a trainer has not sent yet dies with it
            superseded = (run.run_dir / "metrics.superseded.jsonl").read_text()
            assert '"name": "batch_start"' in superseded


def test_a_run_that_continues_after_a_loss_keeps_the_time_of_its_start(tmp_path, monkeypatch):
    def started(finished):
        assert finished.code == 0, finished.output
        return json.loads((finished.run_dir / "environment.json").read_text())["started"]

    monkeypatch.setenv("PARAMSERVER_JOB_ID", "job")
    run = run_in_process(tmp_path, training={"max_steps": 2})
    first = started(run)
    (run.run_dir / "summary.json").unlink()  # as if it had been killed
    again = main_in_process("--config", write_config(tmp_path, training={"max_steps": 2}), "--set", "logging.name=run")
    assert again[0] == 0, again[1]
    assert "continues its run" in again[1]
    assert started(run) == first
    assert started(resume_in_process(run, "--set", "training.max_steps=3")) > first


def test_each_record_has_the_step_that_it_was_made_for(tmp_path):
    run = run_in_process(tmp_path, **config_of(tmp_path, 1, max_steps=5))
    assert run.code == 0, run.output
    steps = {}
    for record in run.of_kind("log"):
        steps.setdefault(record["name"], []).append(record["step"])
    made = [1, 2, 3, 4, 5]
    # The second epoch is entered when step 5 is to be made; it ends with the run.
    assert steps.pop("epoch_start") == [1, 5]
    assert steps.pop("epoch_end") == [5, 5]
    assert steps.pop("validation_end") == [2, 4, 5]
    assert steps.pop("checkpoint") == [4, 5]
    assert (steps.pop("train_start"), steps.pop("train_end")) == ([0], [5])
    assert steps == {"batch_start": made, "batch_end": made, "loss": made}


@pytest.mark.parametrize("stop", [4, 5, 6])
def test_a_run_resumed_after_its_end_has_the_windows_of_one_that_did_not_end(tmp_path, stop):
    """Step 4 is validated and saved when that is due, 5 when the run ends in the middle of a window, 6 at one's end."""
    whole = run_in_process(tmp_path, name="whole", **config_of(tmp_path, 1))
    run = run_in_process(tmp_path, **config_of(tmp_path, 1, max_steps=stop))
    assert run.of_kind("train")[-1]["step"] == stop
    run = resume_in_process(run, "--set", "training.max_steps=11")
    assert run.code == 0, run.output
    assert account(run)["train"] == account(whole)["train"]
    assert account(run)["buffer"] == account(whole)["buffer"] == [(step, 0) for step in (3, 6, 9, 11)]


@pytest.mark.claim("resumed-validations")
@pytest.mark.processes
@pytest.mark.parametrize(
    ("mode", "trainers", "server"),
    [("local", 1, {}), ("ddp", 2, {}), ("rpc", 2, {}), ("rpc", 2, {"consistency": "bounded", "staleness_bound": 0})],
)
def test_a_validation_that_was_made_because_the_run_ended_is_superseded(tmp_path, mode, trainers, server):
    def options(max_steps):
        training = {"max_steps": max_steps, "batch_size": 4, "validate_every": 4}
        return {"training": training, "checkpoint": {"best": {"metric": "loss"}}, "server": server}

    def validated(run):
        return [record["step"] for record in run.of_kind("validation")]

    whole = train(tmp_path / "whole", mode, trainers, **options(9))
    part = train(tmp_path / "part", mode, trainers, **options(5))
    assert (validated(whole), validated(part)) == ([4, 8, 9], [4, 5])
    again = resume(part)  # which has nothing to do, and ends at the same step
    assert again.code == 0, again.output
    assert validated(again) == [4, 5]
    more = resume(part, "--set", "training.max_steps=9")
    assert more.code == 0, more.output
    assert validated(more) == validated(whole)
    if not server:
        assert account(more)["validation"] == account(whole)["validation"]
    superseded = (more.run_dir / "metrics.superseded.jsonl").read_text()
    assert '"kind": "validation", "step": 5' in superseded


def test_an_end_that_comes_again_is_recorded_once(tmp_path):
    """Step 8 is saved because that is due; only then the run validates it, which that checkpoint does not know."""
    config = config_of(tmp_path, 1, max_steps=8)
    config["training"]["validate_every"] = 5
    run = run_in_process(tmp_path, **config)
    once = account(run)
    assert [step for step, _ in once["validation"]] == [5, 8]
    run = resume_in_process(run)
    assert run.code == 0, run.output
    again = account(run)
    assert all(again[kind] == once[kind] for kind in ("validation", "train", "buffer"))


def test_a_checkpoint_without_a_stored_window_resumes(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("paramserver.runs.monitor.RunMonitor.state_dict", without_window())
        run = run_in_process(tmp_path, **config_of(tmp_path, 1, max_steps=5))
    assert "window" not in run.load("run")
    assert "window" in resume_in_process(run, "--set", "training.max_steps=11").load("run")
    assert [r["step"] for r in run.of_kind("train")] == [3, 5, 6, 9, 11]


def without_window():
    from paramserver.runs.monitor import RunMonitor

    state_dict = RunMonitor.state_dict
    return lambda monitor: {k: v for k, v in state_dict(monitor).items() if k != "window"}


def result(step):
    return StepResult(step, 8 * step, 1.0 / step, (0.1 * step,), 0.5 * step)


def test_a_window_goes_through_a_file_and_closes_the_same(tmp_path):
    whole, first = RecordWindow(), RecordWindow()
    for step in (1, 2, 3):
        whole.add(result(step))
    first.add(result(1))
    torch.save(first.state_dict(), tmp_path / "window.pt")
    second = RecordWindow.of_state(torch.load(tmp_path / "window.pt", weights_only=True))
    for step in (2, 3):
        second.add(result(step))
    one, other = (window.to_record(2) | {"time": 0} for window in (whole, second))
    assert one == other
    assert one["loss"] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert (one["step_ms"], one["samples_per_second"]) == (None, None)
    following = whole.next_window()
    following.add(result(4))
    timed = following.to_record(2)
    assert (timed["step"], timed["samples"], timed["loss"]) == (4, 32, 0.25)
    assert (timed["step_ms"], timed["samples_per_second"]) == (pytest.approx(500), pytest.approx(16))


@pytest.mark.parametrize(
    ("state", "kinds"),
    [
        ({"step": 4, "validated_step": 4, "window": {"steps": 0}}, set()),
        ({"step": 4, "validated_step": 2, "window": {"steps": 0}}, {"validation"}),
        ({"step": 4, "validated_step": None, "window": {"steps": 1}}, {"train", "staleness", "validation"}),
        ({"step": 4}, set()),
    ],
)
def test_which_records_of_its_own_step_a_checkpoint_does_not_know(state, kinds):
    assert kinds_recorded_later(state) == kinds

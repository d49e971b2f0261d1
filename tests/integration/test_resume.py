"""Stop and resume equals not stopping; what the records look like afterwards."""

import json
import shutil

import pytest
from launching import (
    TASKS,
    FinishedRun,
    differing_tensors,
    environment,
    fork_server,
    main_in_process,
    resume,
    resume_in_process,
    train,
    write_config,
)

pytestmark = pytest.mark.processes

CONFIG = {
    "task_args": {"optimizer": "adam", "schedule": "step", "groups": True, "samples": 96},
    "training": {"batch_size": 8, "accumulate_batches": 2, "validate_every": 5, "clip_grad_norm": 1.0},
    "checkpoint": {"every": 4, "keep": 10, "best": {"metric": "loss", "mode": "min"}},
}


def config_with(max_steps, **sections):
    merged = {**CONFIG, **sections}
    return {**merged, "training": {**CONFIG["training"], "max_steps": max_steps}}


@pytest.fixture(scope="module")
def whole_of_two(tmp_path_factory):
    """Two trainers that do not stop: in ddp and in rpc the same, bit for bit."""
    return train(tmp_path_factory.mktemp("whole"), "ddp", 2, **config_with(20, buffer=BUFFER))


BUFFER = {"kind": "fifo", "capacity": 96}


@pytest.mark.parametrize(("mode", "trainers"), [("rpc", 2), ("local", 1), ("ddp", 2)])
def test_stop_and_resume_is_not_stopping_bit_for_bit(tmp_path, request, mode, trainers):
    """Stopped at step 11, a step without a checkpoint; the other runs through to 20.

    test_resume_stops.py has the other buffers.
    """
    if trainers == 2:
        whole = request.getfixturevalue("whole_of_two")
    else:
        whole = train(tmp_path / "whole", mode, trainers, **config_with(20, buffer=BUFFER))
    first = train(tmp_path / "stopped", mode, trainers, **config_with(11, buffer=BUFFER))
    assert first.summary["steps"] == 11
    second = resume(first, "--set", "training.max_steps=20")
    assert second.code == 0, second.output
    assert "training.max_steps: 11 -> 20" in second.output
    assert differing_tensors(whole.load("model"), second.load("model")) == []
    assert differing_tensors(whole.load("optimizer"), second.load("optimizer")) == []
    assert whole.summary["validation"] == second.summary["validation"]
    losses = {r["step"]: r["loss"] for r in whole.of_kind("train")}
    assert {r["step"]: r["loss"] for r in second.of_kind("train")} == losses
    assert second.summary["samples"] == whole.summary["samples"]
    for trainer in range(trainers):
        one, other = (run.load(f"trainer-{trainer}") for run in (whole, second))
        assert one["buffer"]["counters"]["gets"] == other["buffer"]["counters"]["gets"]
        assert differing_tensors(one["random"], other["random"]) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mode", "trainers"), [("rpc", 2), ("local", 1), ("ddp", 2)])
def test_what_a_task_has_frozen_stays_frozen(tmp_path, mode, trainers):
    config = {"task": "FreezesOnce", "task_args": {"optimizer": "adam", "samples": 96}, "buffer": BUFFER}
    config["ddp"] = {"extra": {"find_unused_parameters": True}} if mode == "ddp" else {}
    training = {"batch_size": 8, "validate_every": 0}
    whole = train(tmp_path / "whole", mode, trainers, **config, training={**training, "max_steps": 9})
    first = train(tmp_path / "stopped", mode, trainers, **config, training={**training, "max_steps": 5})
    second = resume(first, "--set", "training.max_steps=9")
    assert second.code == 0, second.output
    assert differing_tensors(whole.load("model"), second.load("model")) == []
    assert differing_tensors(whole.load("optimizer"), second.load("optimizer")) == []
    flags = second.load("trainer-0")["flags"]
    assert flags["frozen"] == ["first.weight", "first.bias", "square.weight", "tied.weight"]
    assert flags["eval"] == ["bn"]
    again = resume(second, "--set", "training.max_steps=10", "--set", "cluster.num_trainers=3", "--mode", "rpc")
    assert again.code == 0, again.output
    assert [again.load(f"trainer-{trainer}")["flags"] for trainer in range(3)] == [flags] * 3


def test_resume_starts_at_the_newest_checkpoint_and_supersedes_later_records(tmp_path):
    each = {**CONFIG["checkpoint"], "background": False}  # none is replaced by a later one
    first = train(tmp_path, "local", 1, **config_with(11, checkpoint=each))
    folder = first.run_dir / "checkpoints"
    shutil.rmtree(folder / "step-00000011")
    (folder / "latest").write_text("step-00000008")
    before = {r["step"]: r["loss"] for r in first.of_kind("train")}
    second = resume_in_process(first)
    assert second.code == 0, second.output
    steps = [r["step"] for r in second.of_kind("train")]
    assert steps == list(range(1, 12))  # without gap or overlap
    assert {r["step"]: r["loss"] for r in second.of_kind("train")} == before
    superseded = [json.loads(line) for line in (first.run_dir / "metrics.superseded.jsonl").read_text().splitlines()]
    assert {r["step"] for r in superseded if r["kind"] == "train"} == {9, 10, 11}


def test_hooks_save_and_restore_their_own_state(tmp_path):
    hooks = tmp_path / "hooks"
    first = train(tmp_path, "rpc", 1, task="HookRecorder", task_args={"folder": str(hooks)}, training={"max_steps": 2})
    assert resume(first, "--set", "training.max_steps=3").code == 0
    lines = (hooks / "trainer-0").read_text().splitlines()
    assert "resume 7" in lines
    assert lines.index("resume 7") < lines.index("batch_start 2")


def test_resume_without_a_folder_takes_the_newest_run_of_the_task(tmp_path):
    first = train(tmp_path, "local", 1, **config_with(4))
    config = first.run_dir.parent.parent / "config.yaml"
    for name in ("a-copy", "run-copy", "zero", "old"):
        shutil.copytree(first.run_dir, first.run_dir.with_name(name))
    code, output = main_in_process("--config", config, "--resume", "--set", "training.max_steps=6")
    assert code == 0, output
    assert f"resuming {first.run_dir}" in output
    assert first.summary["steps"] == 6


def test_a_task_in_a_file_beside_the_config_is_found_again(tmp_path):
    """Resumed from elsewhere, by the folder alone, as in the message of an interrupted run."""
    elsewhere = tmp_path / "config"
    elsewhere.mkdir()
    shutil.copy(TASKS, elsewhere / "own_tasks.py")
    file = write_config(
        elsewhere, task="own_tasks.py:ReferenceTask", logging={"run_dir": str(tmp_path / "runs"), "name": "run"}
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code, output = fork_server().run(["--config", file], elsewhere, 60, environment())
    assert code == 0, output
    again = ["--resume", tmp_path / "runs" / "run", "--set", "training.max_steps=14"]
    code, output = fork_server().run(again, tmp_path, 60, environment())
    assert code == 0, output
    assert FinishedRun(0, "", tmp_path / "runs" / "run").summary["steps"] == 14


def test_retention_keeps_the_newest_and_the_best(tmp_path):
    finished = train(
        tmp_path,
        "local",
        1,
        task_args={"optimizer": "sgd"},
        training={"max_steps": 30, "batch_size": 8, "validate_every": 3},
        checkpoint={"every": None, "keep": 2, "background": False, "best": {"metric": "loss", "mode": "min"}},
    )
    best = min(finished.of_kind("validation"), key=lambda r: r["values"]["loss"])["step"]
    expected = sorted({f"step-{s:08d}" for s in (27, 30, best)})
    assert finished.checkpoints == expected
    assert (finished.run_dir / "checkpoints" / "best").read_text().strip() == f"step-{best:08d}"


def test_init_from_starts_with_stored_weights_and_step_0(tmp_path):
    first = train(tmp_path / "first", "local", 1, **config_with(4))
    second = train(tmp_path / "second", "rpc", 1, init_from=str(first.run_dir), training={"max_steps": 1})
    assert second.summary["steps"] == 1
    third = train(tmp_path / "third", "local", 1, init_from=str(first.run_dir), training={"max_steps": 1})
    assert differing_tensors(second.load("model"), third.load("model")) == []
    fresh = train(tmp_path / "fresh", "local", 1, training={"max_steps": 1})
    assert differing_tensors(third.load("model"), fresh.load("model")) != []


@pytest.mark.parametrize(
    ("mode", "trainers", "schedule", "stop"),
    [("local", 1, "epoch", 4), ("local", 1, "validation", 6), ("rpc", 2, "epoch", 4), ("ddp", 2, "validation", 6)],
)
def test_schedules_continue_as_if_the_run_had_not_ended(tmp_path, mode, trainers, schedule, stop):
    """Four steps are an epoch; validation comes every four. Stopped at the end of an epoch, and between validations."""

    def run(folder, steps):
        return train(
            tmp_path / folder,
            mode,
            trainers,
            task_args={"schedule": schedule, "samples": 32 * trainers},
            training={"max_steps": steps, "batch_size": 8, "validate_every": 4},
        )

    whole, first = run("whole", 11), run("stopped", stop)
    go_on = resume_in_process if mode == "local" else resume
    assert go_on(first, "--set", "training.max_steps=11").code == 0
    rates = [r["lr"] for r in whole.of_kind("train")]
    assert len({tuple(rate) for rate in rates}) >= 2
    assert [r["lr"] for r in first.of_kind("train")] == rates
    assert differing_tensors(whole.load("optimizer"), first.load("optimizer")) == []

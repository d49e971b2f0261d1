"""Random numbers of a validation: its own, the same for the same version and share, without effect on training."""

from pathlib import Path

import pytest
from launching import differing_tensors, launch, resume, resume_in_process, train

from paramserver.evaluate import evaluate_run

pytestmark = [pytest.mark.processes, pytest.mark.claim("validation-draws")]

TASKS = Path(__file__).parents[1] / "helpers" / "validation_tasks.py"
WAYS = {
    "local": ("local", 1, {}),
    "local iterable": ("local", 1, {"task_args": {"source": "iterable"}}),
    "ddp": ("ddp", 2, {}),
    "rpc": ("rpc", 2, {}),
    "bounded": ("rpc", 1, {"server": {"consistency": "bounded"}}),
    "workers": ("rpc", 2, {"training": {"loader_workers": 1}}),
    "server computes": ("rpc", 1, {"server": {"compute": "server"}}),
}


def trained(folder, mode, trainers, max_steps=6, task_args=None, training=None, **config):
    limits = {"max_steps": max_steps, "batch_size": 8, "validate_every": 2, **(training or {})}
    config = {"task": f"{TASKS}:DrawsInValidation", "task_args": task_args or {}, "training": limits, **config}
    return train(folder, mode, trainers, **config)


def assert_equal_training(one, other, trainers):
    for name in ("model", "optimizer"):
        assert differing_tensors(one.load(name), other.load(name)) == []
    for index in range(trainers):
        first, second = (run.load(f"trainer-{index}")["random"] for run in (one, other))
        assert differing_tensors(first, second) == []
        assert first["random"][::2] == second["random"][::2]
        assert first["numpy"][2:] == second["numpy"][2:]


@pytest.mark.parametrize("way", WAYS)
def test_training_is_the_same_with_and_without_validations(tmp_path, way):
    mode, trainers, config = WAYS[way]
    without = {**config, "task_args": {"source": "nothing"}}
    one, other = (
        trained(tmp_path / "with", mode, trainers, **config),
        trained(tmp_path / "w", mode, trainers, **without),
    )
    assert [record["step"] for record in one.of_kind("validation")] == [2, 4, 6]
    assert not other.of_kind("validation")
    assert_equal_training(one, other, trainers)


@pytest.mark.parametrize(("mode", "trainers", "again"), [("local", 1, resume_in_process), ("rpc", 2, resume)])
def test_a_validation_because_a_run_ends_does_not_change_the_run_that_resumes(tmp_path, mode, trainers, again):
    whole = trained(tmp_path / "whole", mode, trainers, max_steps=10)
    stopped = trained(tmp_path / "stopped", mode, trainers, max_steps=5)
    resumed = again(stopped, "--set", "training.max_steps=10")
    assert resumed.code == 0, resumed.output
    assert_equal_training(whole, resumed, trainers)
    due = [record["values"] for record in whole.of_kind("validation")]
    assert [record["values"] for record in resumed.of_kind("validation") if record["step"] != 5] == due


def test_evaluate_draws_what_the_validation_of_the_run_drew(tmp_path):
    run = trained(tmp_path, "local", 1, task_args={"hooks": False})
    assert evaluate_run(run.run_dir).values == pytest.approx(run.summary["validation"], rel=1e-6)


def test_the_share_of_a_lost_trainer_has_its_random_numbers(tmp_path):
    config = {
        "task": f"{TASKS}:DrawsInValidation",
        "training": {"max_steps": 6, "batch_size": 8, "validate_every": 4},
        "cluster": {"num_trainers": 2, "timeout_s": 30},
        "mode": "rpc",
    }
    dies = {"dies": 1, "mark": str(tmp_path / "mark")}
    lost = launch(tmp_path / "lost", task_args={"hooks": False, **dies}, **config)
    assert lost.code == 0, lost.output
    assert (tmp_path / "mark").exists()
    whole = launch(tmp_path / "whole", task_args={"hooks": False}, **config)
    values = [[r["values"] for r in run.of_kind("validation") if r["step"] == 4] for run in (lost, whole)]
    assert values[0] == values[1]
    assert len(values[0]) == 1

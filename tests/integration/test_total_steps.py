"""``self.total_steps``: a schedule over the whole run ends with it, in every mode."""

import pytest
from launching import TASKS, resume, train

pytestmark = pytest.mark.processes

TASK = f"{TASKS}:OneCycle"
ONE_PASS = {"max_epochs": 2, "batch_size": 8, "validate_every": 0}


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
@pytest.mark.parametrize("training", [{}, {"max_steps": 20}], ids=["data", "limit"])
def test_the_last_step_of_the_schedule_is_that_of_the_run(tmp_path, mode, training):
    run = train(tmp_path, mode, 2, task=TASK, task_args={"samples": 250}, training={**ONE_PASS, **training})
    scheduler = run.load("run")["scheduler"]
    assert scheduler["last_epoch"] == scheduler["total_steps"] == run.summary["steps"]


@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_a_schedule_ends_with_steps_that_are_not_full(tmp_path, mode):
    # Batches of 21 and 20 samples: three steps of both trainers, and a last one with the batch that only one has.
    training = {"max_epochs": 1, "batch_size": 4, "accumulate_batches": 2, "uneven_inputs": "join", "validate_every": 0}
    run = train(tmp_path, mode, 2, task=TASK, task_args={"samples": 41}, training=training)
    scheduler = run.load("run")["scheduler"]
    assert scheduler["last_epoch"] == scheduler["total_steps"] == run.summary["steps"] == 4


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_a_schedule_of_local_steps_ends_with_them(tmp_path, mode):
    training = {**ONE_PASS, "local_steps": 3}
    run = train(tmp_path, mode, 2, task=TASK, task_args={"samples": 250}, training=training)
    state = run.load("trainer-0")["local_steps"]["scheduler"]
    assert state["last_epoch"] == state["total_steps"] > run.summary["steps"]


@pytest.mark.parametrize("mode", ["local", "ddp", "rpc"])
def test_a_resumed_run_has_the_number_of_its_new_limit(tmp_path, mode):
    training = {**ONE_PASS, "max_epochs": None, "max_steps": 6}
    config = {"task": TASK, "task_args": {"schedule": "decay"}, "logging": {"log_every": 1}}
    resumed = resume(train(tmp_path, mode, 2, training=training, **config), "--set", "training.max_steps=12")
    assert resumed.code == 0, resumed.output
    rates = [record["lr"][0] / 0.05 for record in resumed.of_kind("train")]
    # The rate of the seventh step is that of the checkpoint: after six steps of six it is 0.
    assert rates == pytest.approx([1 - step / 6 for step in range(7)] + [1 - step / 12 for step in range(7, 12)])


def test_a_run_that_resumes_with_more_trainers_counts_the_steps_before_and_those_of_what_is_left(tmp_path):
    training = {**ONE_PASS, "max_epochs": 2, "max_steps": 8}
    config = {"task": TASK, "task_args": {"schedule": "decay", "samples": 64}, "logging": {"log_every": 1}}
    run = train(tmp_path, "local", 1, training=training, **config)
    settings = ("training.max_steps=null", "cluster.num_trainers=2")
    resumed = resume(run, "--mode", "ddp", *(argument for one in settings for argument in ("--set", one)))
    assert resumed.code == 0, resumed.output
    rates = [record["lr"][0] / 0.05 for record in resumed.of_kind("train")][9:]
    assert rates == pytest.approx([1 - step / 12 for step in range(9, 12)])

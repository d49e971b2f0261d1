"""Trained parameters that a task changes itself: refused where a server owns them, in each transport."""

import os

import pytest
from launching import differing_tensors, launch, train

pytestmark = [pytest.mark.processes, pytest.mark.claim("changed-parameters")]

TRAINING = {"max_epochs": 3, "batch_size": 8, "validate_every": 3}
PLACES = [
    # where, at which call, how
    ("training_step", 0, "clamp"),
    ("training_step", 9, "copy"),
    ("on_batch_end", 5, "assign"),
    ("on_batch_start", 7, "load"),
    ("on_train_start", 0, "clamp"),
    ("on_train_start", 0, "load"),
    ("on_epoch_start", 1, "clamp"),
    ("on_epoch_end", 0, "clamp"),
    ("on_validation_start", 1, "copy"),
    ("on_validation_end", 0, "clamp"),
]


def started(folder, trainers, **config):
    cluster = {"num_trainers": trainers, "timeout_s": 30, **config.pop("cluster", {})}
    return launch(folder, mode="rpc", cluster=cluster, **config)


def config_of(**task_args):
    return {"task": "changing_tasks:Changing", "task_args": task_args, "training": TRAINING}


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("where", "at", "how"), PLACES)
@pytest.mark.parametrize("transport", ["shared_memory", "rpc", "tcp"])
def test_a_change_by_the_task_is_refused_by_name(tmp_path, where, at, how, transport):
    run = started(tmp_path, 2, server={"transport": transport}, **config_of(where=where, at=at, how=how))
    assert run.code == 2, run.output
    assert "was changed by the task, and belongs to the servers" in run.output
    assert "(trainer 0)" in run.output or "(trainer 1)" in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize("transport", ["shared_memory", "rpc", "tcp"])
def test_a_change_through_data_that_begins_late_is_refused(tmp_path, transport):
    training = {"max_steps": 200, "batch_size": 8}
    config = {**config_of(where="training_step", how="clamp", at=70, again=True), "training": training}
    run = started(tmp_path, 1, server={"transport": transport}, **config)
    assert run.code == 2, run.output
    assert "was changed by the task" in run.output


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("transport", ["shared_memory", "rpc", "tcp"])
def test_with_several_optimizers_a_change_is_refused(tmp_path, transport, servers):
    config = config_of(where="training_step", at=4, how="copy", optimizers=2)
    cluster = {"num_servers": servers}
    run = started(tmp_path, 2, server={"transport": transport}, cluster=cluster, **config)
    assert run.code == 2, run.output
    assert "parameter 2.weight was changed by the task" in run.output


def test_an_optimizer_that_limits_its_weights_is_the_same_in_every_mode(tmp_path):
    config = {"task": "changing_tasks:Clipped", "training": TRAINING}
    local = train(tmp_path / "local", "local", 1, **config)
    assert local.load("model")["0.weight"].abs().max() <= 0.1
    over_rpc = {"server": {"transport": "rpc"}}
    for name, mode, sections in (("ddp", "ddp", {}), ("memory", "rpc", {}), ("rpc", "rpc", over_rpc)):
        other = train(tmp_path / name, mode, 1, **sections, **config)
        assert differing_tensors(local.load("model"), other.load("model")) == [], name
    ddp = train(tmp_path / "ddp-2", "ddp", 2, **config)
    rpc = train(tmp_path / "rpc-2", "rpc", 2, cluster={"num_servers": 2}, **over_rpc, **config)
    assert differing_tensors(ddp.load("model"), rpc.load("model")) == []


def test_parameters_that_a_task_restores_are_not_changed(tmp_path):
    config = {"task": "changing_tasks:Sharpness", "training": {"max_steps": 70, "batch_size": 8, "validate_every": 30}}
    local = train(tmp_path / "local", "local", 1, **config)
    rpc = train(tmp_path / "rpc", "rpc", 1, server={"transport": "rpc"}, **config)
    assert differing_tensors(local.load("model"), rpc.load("model")) == []
    shared = started(tmp_path / "shared", 1, server={"transport": "shared_memory"}, **config)
    assert shared.code == 2, "other trainers may read them meanwhile"


def test_what_the_server_changes_while_a_trainer_has_no_data_is_no_change_of_the_task(tmp_path):
    os.mkfifo(tmp_path / "read")
    config = {
        "task": "changing_tasks:Idle",
        "task_args": {"mark": str(tmp_path / "mark"), "has_read": str(tmp_path / "read")},
        "training": {"max_epochs": 6, "batch_size": 1, "uneven_inputs": "join"},
        "server": {"transport": "shared_memory"},
    }
    train(tmp_path, "rpc", 2, **config)
    assert (tmp_path / "mark").exists(), "no parameter changed during the hook"

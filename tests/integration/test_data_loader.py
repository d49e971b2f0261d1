"""A DataLoader and a sampler of the user: the same in every mode, and after a resume, bit for bit."""

from pathlib import Path

import pytest
from cli_errors import error_message
from launching import NOT_GIVEN, assert_equal_runs, differing_tensors, launch, resume, train

pytestmark = pytest.mark.processes

TASKS = Path(__file__).parents[1] / "helpers" / "sampler_tasks.py"
CONFIG = {
    "task": f"{TASKS}:Loaded",
    "training": {"max_epochs": 3, "max_steps": None, "batch_size": NOT_GIVEN, "uneven_inputs": "join"},
}
KINDS = ["shuffled", "plain", "weighted", "generator", "keeps", "buckets", "batches"]


def trained(folder, mode, trainers, kind, workers=0, **sections):
    config = {**CONFIG, "task_args": {"kind": kind, "workers": workers, "samples": 61}, **sections}
    return train(folder, mode, trainers, **config)


@pytest.mark.parametrize("kind", KINDS)
def test_one_trainer_is_the_same_in_every_mode(tmp_path, kind):
    local, rpc = (trained(tmp_path, mode, 1, kind) for mode in ("local", "rpc"))
    assert local.summary["samples"] == 3 * (56 if kind in ("shuffled", "plain") else 61)
    assert differing_tensors(local.load("model"), rpc.load("model")) == []
    assert differing_tensors(local.load("optimizer"), rpc.load("optimizer")) == []


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", [*KINDS, "distributed", "iterable"])
def test_two_trainers_are_the_same_in_ddp_and_rpc(tmp_path, kind):
    limits = {"max_epochs": None} if kind == "iterable" else {}
    sections = {"training": {**CONFIG["training"], **limits}}
    ddp, rpc = (trained(tmp_path, mode, 2, kind, **sections) for mode in ("ddp", "rpc"))
    once = {"shuffled": 48, "plain": 48, "distributed": 62}.get(kind, 61)
    assert ddp.summary["samples"] == rpc.summary["samples"] == once * (1 if kind == "iterable" else 3)
    assert differing_tensors(ddp.load("model"), rpc.load("model")) == []


SMALL = {**CONFIG, "buffer": {"capacity": 16}}  # less than a batch of the default size


@pytest.mark.parametrize("mode", ["ddp", "rpc"])
@pytest.mark.parametrize("kind", ["plain", "buckets"])
def test_a_buffer_that_holds_the_batches_of_a_data_loader_is_enough(tmp_path, mode, kind):
    assert trained(tmp_path, mode, 2, kind, **SMALL).summary["samples"] > 0


@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_a_default_that_no_data_loader_replaces_is_refused_by_the_ranks(tmp_path, mode):
    finished = launch(tmp_path, mode=mode, **{**SMALL, "task": "ReferenceTask", "cluster": {"num_trainers": 2}})
    message = error_message(finished)
    assert message.partition(": ")[2].startswith(
        "a batch of 32 can never be gathered from a buffer of 16; raise buffer"
    )
    assert "Traceback" not in finished.output
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.usefixtures("forked_loaders")
@pytest.mark.parametrize("kind", ["weighted", "keeps", "buckets"])
def test_two_servers_and_worker_processes_change_nothing(tmp_path, kind):
    one = trained(tmp_path, "rpc", 2, kind)
    two = trained(tmp_path / "two", "rpc", 2, kind, workers=2, cluster={"num_servers": 2})
    assert differing_tensors(one.load("model"), two.load("model")) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [*KINDS, "iterable"])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path, kind):
    limits = {"max_epochs": None} if kind == "iterable" else {}
    stop = 5 if kind == "iterable" else 19
    whole = trained(tmp_path / "whole", "local", 1, kind, training={**CONFIG["training"], **limits})
    begun = trained(tmp_path / "begun", "local", 1, kind, training={**CONFIG["training"], **limits, "max_steps": stop})
    ended = resume(begun, "--set", "training.max_steps=null")
    assert ended.code == 0, ended.output
    assert_equal_runs(whole, ended)


@pytest.mark.parametrize("kind", ["generator", "buckets"])
def test_a_run_resumes_with_worker_processes_in_a_later_pass(tmp_path, kind):
    whole = trained(tmp_path / "whole", "local", 1, kind)
    begun = trained(tmp_path / "begun", "local", 1, kind, training={**CONFIG["training"], "max_steps": 20})
    ended = resume(begun, "--set", "training.max_steps=null", "--set", "task_args.workers=2")
    assert ended.code == 0, ended.output
    assert_equal_runs(whole, ended)


def test_two_trainers_resume_in_another_mode(tmp_path):
    whole = trained(tmp_path / "whole", "ddp", 2, "generator")
    begun = trained(tmp_path / "begun", "rpc", 2, "generator", training={**CONFIG["training"], "max_steps": 7})
    ended = resume(begun, "--set", "training.max_steps=null", "--set", "mode=ddp")
    assert ended.code == 0, ended.output
    assert_equal_runs(whole, ended, trainers=2)


@pytest.mark.parametrize("kind", ["keeps", "buckets"])
def test_another_number_of_trainers_serves_the_rest_once(tmp_path, kind):
    begun = trained(tmp_path, "rpc", 2, kind, training={**CONFIG["training"], "max_steps": 3})
    ended = resume(begun, "--set", "training.max_steps=null", "--world_size", "4")
    assert ended.code == 0, ended.output
    assert ended.summary["samples"] == 3 * 61


def test_async_ends_exactly_with_the_batch_size_of_the_data_loader(tmp_path):
    training = {**CONFIG["training"], "max_epochs": None, "max_samples": 80}
    run = trained(tmp_path, "rpc", 2, "shuffled", training=training, server={"consistency": "async"})
    assert run.summary["samples"] == 80


def test_the_sampler_of_the_task_is_that_of_the_data_loader(tmp_path):
    args = {"kind": "weighted", "samples": 61}
    one = train(tmp_path / "one", "local", 1, **CONFIG, task_args=args)
    config = {**CONFIG, "training": {**CONFIG["training"], "batch_size": 8}}
    two = train(tmp_path / "two", "local", 1, **config, task_args={**args, "as_method": True})
    assert differing_tensors(one.load("model"), two.load("model")) == []


def test_validation_by_a_data_loader_is_the_mean_over_all_samples(tmp_path):
    args = {"kind": "shuffled", "samples": 61, "validation": 37}
    runs = [train(tmp_path, mode, trainers, **CONFIG, task_args=args) for mode, trainers in (("ddp", 2), ("rpc", 2))]
    assert runs[0].summary["validation"] == runs[1].summary["validation"]
    assert runs[0].summary["validation"]["accuracy"] * 37 == pytest.approx(
        round(runs[0].summary["validation"]["accuracy"] * 37), abs=1e-4
    )


def test_what_differs_between_trainers_is_refused(tmp_path):
    finished = launch(tmp_path, **CONFIG, mode="ddp", task_args={"kind": "unequal"}, cluster={"num_trainers": 2})
    assert finished.code == 2
    assert "with checksum" in finished.output
    assert "train_source must return the same data set on every trainer" in finished.output


@pytest.mark.parametrize("mode", ["local", "rpc"])
def test_a_key_that_was_given_is_not_overruled(tmp_path, mode):
    training = {**CONFIG["training"], "batch_size": 32}  # the default, but given
    finished = launch(
        tmp_path, task=CONFIG["task"], training=training, mode=mode, task_args={"kind": "shuffled"},
        cluster={"num_trainers": 1},
    )  # fmt: skip
    assert finished.code == 2
    assert "training.batch_size (32) must be what the DataLoader of train_source has (8)" in finished.output
    assert "Traceback" not in finished.output

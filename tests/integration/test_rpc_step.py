"""A step in rpc mode, as a trainer and the server execute it."""

import pytest
from launching import WITNESS_TRAINERS, differing_tensors, train

pytestmark = pytest.mark.processes


def test_every_step_is_a_context_a_backward_and_a_step_of_the_distributed_optimizer(tmp_path):
    finished = train(tmp_path, "rpc", 2, trainer=f"{WITNESS_TRAINERS}:WitnessTrainer", training={"max_steps": 9})
    assert [r["value"] for r in finished.of_kind("log") if r["name"] == "witnessed"] == [9.0, 9.0]


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_a_step_in_shared_memory_sends_its_push_over_the_socket_and_nothing_over_rpc(tmp_path, consistency):
    finished = train(
        tmp_path,
        "rpc",
        2,
        trainer=f"{WITNESS_TRAINERS}:LocalTrainer",
        server={"transport": "shared_memory", "consistency": consistency},
    )
    logged = {(r["trainer"], r["name"]): r["value"] for r in finished.of_kind("log")}
    for trainer in (0, 1):
        assert logged[trainer, "local push"] == logged[trainer, "steps"] > 0
        names = {name for index, name in logged if index == trainer and name.startswith("rpc ")}
        assert not names & {"rpc pull", "rpc push", "rpc announce", "rpc wait_version"}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_a_step_over_tcp_makes_no_call_over_rpc(tmp_path, consistency, servers):
    finished = train(
        tmp_path,
        "rpc",
        2,
        trainer=f"{WITNESS_TRAINERS}:LocalTrainer",
        cluster={"num_servers": servers},
        server={"transport": "tcp", "consistency": consistency},
    )
    logged = {(r["trainer"], r["name"]): r["value"] for r in finished.of_kind("log")}
    for trainer in (0, 1):
        assert logged[trainer, "tcp pull"] == servers * logged[trainer, "steps"]
        assert logged[trainer, "tcp push"] == logged[trainer, "steps"] > 0
        assert logged[trainer, "tcp receive_bucket"] >= servers * logged[trainer, "steps"]
        names = {name.partition(" ")[2] for index, name in logged if index == trainer and name.startswith("rpc ")}
        assert not names & {"pull", "push", "announce", "wait_version", "receive_bucket", "report_push"}


@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("consistency", ["sync", "bounded"])
def test_a_run_whose_connections_end_continues_over_rpc_with_the_same_bits(tmp_path, consistency, trainers, servers):
    config = {
        "cluster": {"num_servers": servers},
        "server": {"transport": "tcp", "bucket_mb": 0.0005, "consistency": consistency},
        "training": {"max_steps": 8},
    }
    broken = train(tmp_path / "broken", "rpc", trainers, trainer=f"{WITNESS_TRAINERS}:BrokenOffTrainer", **config)
    counts = [record["value"] for record in broken.of_kind("log") if record["name"] == "broken off"]
    assert counts
    assert set(counts) == {servers}
    assert broken.summary["samples"] == broken.summary["samples_served"]
    assert broken.summary["restarts"] == 0
    if consistency == "sync" or trainers == 1:
        whole = train(tmp_path / "whole", "rpc", trainers, **config)
        for file in ("model", "optimizer"):
            assert differing_tensors(broken.load(file), whole.load(file)) == []


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("unused", [False, True])
def test_a_trainer_that_cannot_connect_takes_part_over_rpc(tmp_path, servers, unused):
    """And none waits for a bucket that only the other way of sending would complete."""
    config = {
        "cluster": {"num_servers": servers},
        "server": {"transport": "tcp", "bucket_mb": 0.0005},
        "task_args": {"unused": unused},
        "training": {"max_steps": 6},
    }
    mixed = train(tmp_path / "mixed", "rpc", 2, trainer=f"{WITNESS_TRAINERS}:MixedTrainer", **config)
    assert mixed.summary["transports"] == {"0": "tcp", "1": "rpc"}
    whole = train(tmp_path / "whole", "rpc", 2, **config)
    for file in ("model", "optimizer"):
        assert differing_tensors(mixed.load(file), whole.load(file)) == []


def test_one_server_answers_all_trainers_as_in_the_tutorial(tmp_path):
    """Its forward and gradients are those of the model, and its RRef is one object for all trainers."""
    finished = train(
        tmp_path,
        "rpc",
        3,
        trainer=f"{WITNESS_TRAINERS}:TutorialTrainer",
        task_args={"dropout": 0.0, "batch_norm": False},
        env={"PYTHONPATH": str(WITNESS_TRAINERS.parent)},
    )
    logged = {(r["trainer"], r["name"]): r["value"] for r in finished.of_kind("log")}
    assert len({logged[i, "server"] for i in range(3)}) == 1
    assert {logged[i, "references"] for i in range(3)} == {10.0}


OVER_RPC = {"server": {"transport": "rpc", "bucket_mb": 0.0005}, "trainer": f"{WITNESS_TRAINERS}:EarlyTrainer"}


def left(finished):
    """How often each message of a step was sent during the backward, and how often after it."""
    logged = {(r["trainer"], r["name"]): r["value"] for r in finished.of_kind("log")}
    assert logged[0, "early"] == logged[1, "early"]
    return logged[0, "early"], logged[0, "late"]


def test_gradients_are_sent_during_the_backward(tmp_path):
    finished = train(tmp_path, "rpc", 2, training={"accumulate_batches": 2}, **OVER_RPC)
    assert left(finished) == (1.0, 0.0)
    assert finished.summary["phases_ms"]["hidden"] > 0


def test_gradients_changed_in_a_hook_reach_the_server(tmp_path):
    """Also through ``grad.data``, which autograd does not track."""
    rpc = train(tmp_path / "rpc", "rpc", 2, task="ClampsGradients", **OVER_RPC)
    assert left(rpc) == (0.0, 1.0)
    shared = train(tmp_path / "shared", "rpc", 2, task="ClampsGradients", server={"transport": "shared_memory"})
    assert differing_tensors(rpc.load("model"), shared.load("model")) == []
    plain = train(tmp_path / "plain", "rpc", 2, server={"transport": "shared_memory"})
    assert differing_tensors(plain.load("model"), shared.load("model")) != []


def test_a_hook_that_is_set_when_training_starts_counts(tmp_path):
    assert left(train(tmp_path, "rpc", 2, task="ClampsFromTheStart", **OVER_RPC)) == (0.0, 1.0)


BY_BUCKET = {"transport": "rpc", "bucket_mb": 0.0005}
ARGS = {"optimizer": "adamw", "groups": True, "schedule": "step", "unused": True}
# A norm that is never reached: no gradient changes, and every update waits for all gradients.
NEVER_CLIPPED = {"clip_grad_norm": 1e9}


def logged(finished, name):
    return [record["value"] for record in finished.of_kind("log") if record["name"] == name]


@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (2, 2), (3, 1)])
def test_an_update_made_bucket_by_bucket_is_that_of_all_gradients_together(tmp_path, trainers, servers):
    """In every bit, also of the optimizer's state; also with parameters that have no gradient."""
    config = {"trainer": f"{WITNESS_TRAINERS}:EarlyCounter", "task_args": ARGS, "server": BY_BUCKET}
    cluster = {"num_servers": servers}
    by_bucket = train(tmp_path / "by_bucket", "rpc", trainers, cluster=cluster, training={"max_steps": 7}, **config)
    together = train(
        tmp_path / "together", "rpc", trainers, cluster=cluster, training={"max_steps": 7, **NEVER_CLIPPED}, **config
    )
    for file in ("model", "optimizer"):
        assert differing_tensors(by_bucket.load(file), together.load(file)) == []
    assert min(logged(by_bucket, "early")) > 1
    assert logged(together, "early") == [0.0] * trainers


@pytest.mark.parametrize("servers", [1, 2])
def test_no_bucket_of_an_update_survives_that_was_abandoned(tmp_path, servers):
    """A trainer is killed between two buckets, of which the other one has received the update."""
    config = {
        "trainer": f"{WITNESS_TRAINERS}:DiesBetweenBuckets",
        "task_args": {"optimizer": "adam"},
        "server": {**BY_BUCKET, "lost_after_s": 4.0},
        "cluster": {"num_servers": servers, "max_restarts": 0},
    }
    by_bucket = train(tmp_path / "by_bucket", "rpc", 2, training={"max_steps": 9}, **config)
    together = train(tmp_path / "together", "rpc", 2, training={"max_steps": 9, **NEVER_CLIPPED}, **config)
    for finished in (by_bucket, together):
        assert [record["trainer"] for record in finished.of_kind("lost")] == [1]
        assert finished.summary["steps"] == 9
    for file in ("model", "optimizer"):
        assert differing_tensors(by_bucket.load(file), together.load(file)) == []
    assert logged(by_bucket, "anew") >= [1]


@pytest.mark.parametrize(("mode", "transport"), [("rpc", "shared_memory"), ("rpc", "tcp"), ("ddp", "auto")])
def test_steps_leave_no_tensors_to_the_garbage_collector(tmp_path, mode, transport):
    """It runs seldom where few objects are made, so that gradients in a reference cycle stay for many steps."""
    finished = train(
        tmp_path,
        mode,
        2,
        task="CountsGarbage",
        task_args={"seconds": 0.05},
        server={"transport": transport, "lost_after_s": 1.0},  # a heartbeat in each few steps
        training={"max_steps": 24},
    )
    assert [r["value"] for r in finished.of_kind("log") if r["name"] == "garbage"] == [0, 0]

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
        assert logged[trainer, "local push_in_place"] == logged[trainer, "steps"] > 0
        names = {name for index, name in logged if index == trainer and name.startswith("rpc ")}
        assert not names & {"rpc pull", "rpc push", "rpc push_in_place", "rpc announce", "rpc wait_version"}


def test_module_buffers_that_are_too_large_for_a_packet_are_sent_over_rpc(tmp_path):
    """The parameters are the same bit for bit."""
    small = train(tmp_path / "local", "rpc", 2, trainer=f"{WITNESS_TRAINERS}:LocalTrainer")
    large = train(tmp_path / "rpc", "rpc", 2, trainer=f"{WITNESS_TRAINERS}:LargeBuffersTrainer")
    assert differing_tensors(small.load("model"), large.load("model")) == []
    logged = {r["name"] for r in large.of_kind("log")}
    assert "rpc push_in_place" in logged
    assert not any(name.startswith("local ") for name in logged)


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

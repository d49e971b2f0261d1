"""Theory: what communication costs, and where a server is as fast as all-reduce."""

import pytest

from paramserver.config import MODES
from paramserver.tools.bench.link_probe import (
    LinkSpeed,
    break_even_servers,
    communication_s,
    predict_communication,
    ring_bytes,
)

DDP, RPC, LOCAL = MODES["ddp"], MODES["rpc"], MODES["local"]
M, B = 8e6, 1e9


def free(mode, trainers, servers=1, overlap=False):
    return communication_s(mode, M, trainers, servers, B, 0.0, overlap)


def test_all_reduce_sends_each_byte_nearly_twice():
    assert free(DDP, 1) == 0
    assert free(DDP, 2) == pytest.approx(M / B)
    assert free(DDP, 8) == pytest.approx(2 * 7 / 8 * M / B)
    assert free(DDP, 10**6) == pytest.approx(2 * M / B, rel=1e-5)


@pytest.mark.parametrize(("trainers", "times"), [(2, 2.0), (4, 16 / 6), (8, 64 / 14)])
def test_one_server_is_slower_than_all_reduce_by_the_known_factor(trainers, times):
    assert free(RPC, trainers, overlap=True) / free(DDP, trainers) == pytest.approx(times)
    assert free(RPC, trainers) == 2 * free(RPC, trainers, overlap=True)


def test_no_server_beats_the_interface_of_a_trainer():
    assert free(RPC, 4, servers=100, overlap=True) == pytest.approx(M / B)
    assert free(RPC, 4, servers=2, overlap=True) == pytest.approx(2 * M / B)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("trainers", [2, 3, 4, 5, 8, 16])
def test_at_break_even_servers_are_as_fast_and_with_one_less_they_are_not(trainers, overlap):
    enough = break_even_servers(trainers, overlap)
    limit = free(DDP, trainers) * (1 + 1e-9)
    # The interface of a trainer bounds what overlaps from below; the formula is about the servers'.
    assert free(RPC, trainers, enough, overlap) <= max(limit, M / B * (1 + 1e-9))
    assert enough == 1 or free(RPC, trainers, enough - 1, overlap) > limit


def test_break_even_needs_two_trainers():
    assert break_even_servers(1) is None
    assert (break_even_servers(2), break_even_servers(2, overlap=True)) == (4, 2)
    assert (break_even_servers(8), break_even_servers(8, overlap=True)) == (10, 5)


@pytest.mark.parametrize("trainers", [1, 2, 3, 8])
def test_as_many_colocated_servers_as_trainers_send_what_all_reduce_sends(trainers):
    bound = communication_s(RPC, M, trainers, trainers, B, 0.0, overlap=True, colocated=True)
    assert bound == pytest.approx(free(DDP, trainers))
    whole = communication_s(RPC, M, trainers, 1, B, 0.0, overlap=True, colocated=True)
    assert whole == pytest.approx((trainers - 1) * M / B)  # all but its own trainer's
    assert communication_s(RPC, M, trainers, 1, B, 0.0, colocated=True) == pytest.approx(2 * whole)


def test_messages_that_wait_for_each_other_cost_their_latency():
    assert communication_s(DDP, 0, 4, 0, B, 0.001) == pytest.approx(6 * 0.001)
    assert communication_s(RPC, 0, 4, 1, B, 0.001) == pytest.approx(4 * 0.001)
    assert communication_s(RPC, 0, 4, 1, B, 0.001, overlap=True) == pytest.approx(2 * 0.001)
    assert communication_s(LOCAL, M, 1, 0, B, 0.001) == 0


def test_what_was_built_is_predicted_from_what_travelled():
    speed = LinkSpeed(B, 1e-4)
    over_wire = predict_communication(RPC, speed, int(M), 2 * M, 2, 1, "none")
    assert over_wire["communication_ms"] == pytest.approx((2 * 2 * M / B + 4e-4) * 1e3)
    assert over_wire["built"] == "1 server: push, apply, pull, one after the other"
    assert (over_wire["bandwidth_bytes_s"], over_wire["latency_s"]) == (B, 1e-4)
    half = predict_communication(RPC, speed, int(M), M, 2, 2, "none")  # in half of the bytes, on two servers
    assert half["communication_ms"] == pytest.approx((M / B / 1 + 4e-4) * 1e3)
    by_bucket = predict_communication(RPC, speed, int(M), 2 * M, 2, 1, "none", overlap=True)
    assert by_bucket["communication_ms"] == pytest.approx((2 * M / B + 2e-4) * 1e3)
    assert by_bucket["built"] == "1 server: push, apply, pull, bucket by bucket"
    in_memory = predict_communication(RPC, speed, int(M), 8.0, 2, 1, "none", overlap=True)
    assert in_memory["communication_ms"] == pytest.approx(0.4, rel=1e-3)
    assert "shared memory" in in_memory["built"]


def test_all_reduce_is_predicted_from_the_model_and_its_compression():
    speed = LinkSpeed(B, 0.0)
    assert predict_communication(DDP, speed, int(M), 2 * M, 2, 0, "none")["communication_ms"] == pytest.approx(8.0)
    assert predict_communication(DDP, speed, int(M), M, 2, 0, "fp16")["communication_ms"] == pytest.approx(4.0)
    in_memory = predict_communication(DDP, speed, int(M), 0.0, 4, 0, "none")
    assert (in_memory["communication_ms"], in_memory["break_even_servers"]) == (0.0, None)
    assert in_memory["built"] == "all-reduce of 4 in shared memory: nothing is sent"
    assert predict_communication(RPC, speed, int(M), 2 * M, 4, 1, "none")["break_even_servers"] == 6
    assert predict_communication(DDP, speed, int(M), 0.0, 2, 0, "powersgd") is None
    assert predict_communication(LOCAL, speed, int(M), 0.0, 1, 0, "none") is None


def test_bytes_of_a_ring_are_those_of_both_directions():
    assert ring_bytes(int(M), 1, "none") == 0
    assert ring_bytes(int(M), 2, "none") == pytest.approx(
        2 * M
    )  # half to the other, the other half back, and the same in
    assert ring_bytes(int(M), 4, "bf16") == pytest.approx(2 * 1.5 * M / 2)
    assert ring_bytes(int(M), 2, "powersgd") is None

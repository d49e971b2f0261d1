"""Plans of faults: what a command line may say, and faults that are drawn."""

from itertools import pairwise

import pytest

from paramserver.config import Config, config_from_mapping, roles
from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.chaos.faults import EXAMPLE, Fault, parse_faults, random_faults

RPC = Config()
RANKS = roles(RPC, 4)
DDP = config_from_mapping({"task": "task.py:Task", "mode": "ddp"})


def test_every_kind_of_fault_is_understood_and_printed_as_it_is_written():
    text = (
        "kill trainer:1 @step 50; freeze server:0 @8s for 5s; freeze trainer:0; hold_gil trainer:1 for 20s; "
        "slow trainer:2 x5; lose replies 2%; lose requests 0.5% @2.5s for 10s; partition trainer:1 @step 80 for 3s"
    )
    faults = parse_faults(text + ";", RANKS, RPC)
    assert "; ".join(map(str, faults)) == text
    assert faults[0] == Fault("kill", "trainer:1", at_step=50)
    assert faults[1] == Fault("freeze", "server:0", at_s=8.0, for_s=5.0)
    assert faults[4] == Fault("slow", "trainer:2", amount=5.0)
    assert faults[6] == Fault("lose", "", "requests", amount=0.5, at_s=2.5, for_s=10.0)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "must name a fault"),
        (" ; ", "must name a fault"),
        ("explode trainer:1", "the fault (explode) must be one of kill, freeze, hold_gil, slow, lose, partition"),
        ("kill", "kill must be followed by a rank"),
        ("kill trainer1", "kill must be followed by a rank"),
        ("kill trainer:3", "trainer:3 must be a rank of this run (server:0, trainer:0, trainer:1, trainer:2)"),
        ("kill server:1", "server:1 must be a rank of this run"),
        ("kill trainer:1 now", "now is not understood after kill trainer:1"),
        ("kill trainer:1 for 5s", "kill must have no duration"),
        ("kill trainer:1 @step 5 @2s", "the instant must be a step or a time, not both"),
        ("freeze server:0 for 0s", "the duration (0 s) must be above 0"),
        ("freeze server:0 for -1s", "for -1s is not understood after freeze server:0"),
        ("freeze server:0 @soon", "@soon is not understood after freeze server:0"),
        ("hold_gil trainer:1", "hold_gil must have a duration"),
        ("partition trainer:1 @step 80", "partition must have a duration"),
        ("slow trainer:1", "slow must be followed by a trainer and a factor"),
        ("slow trainer:1 x0.5", "slow must be followed by a trainer and a factor of at least 1"),
        ("slow server:0 x5", "slow must be followed by a trainer"),
        ("lose letters 2%", "lose must be followed by replies or requests and a percentage"),
        ("lose replies 90%", "a percentage of at most 50"),
        ("lose replies 0%", "a percentage of at most 50"),
        ("lose replies nan%", "a percentage of at most 50"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_sentence(text, rule):
    with pytest.raises(UnsupportedConfiguration) as refused:
        parse_faults(text, RANKS, RPC)
    message = str(refused.value)
    assert message.startswith("--faults (")
    assert rule in message
    assert "\n" not in message
    assert EXAMPLE in message or "must be a rank" in message


@pytest.mark.parametrize("text", ["lose replies 2%", "partition trainer:1 for 3s"])
def test_faults_of_calls_need_a_mode_that_makes_calls(text):
    with pytest.raises(UnsupportedConfiguration, match="must be used with mode rpc"):
        parse_faults(text, roles(DDP, 2), DDP)


def test_random_faults_depend_on_their_seed_only():
    drawn = random_faults(20, 7, RANKS, RPC)
    assert len(drawn) == 20
    assert drawn == random_faults(20, 7, RANKS, RPC)
    assert drawn != random_faults(20, 8, RANKS, RPC)
    assert parse_faults("; ".join(map(str, drawn)), RANKS, RPC) == drawn


def test_random_faults_leave_time_to_recover_and_restarts_to_do_so():
    lost_after_s, limit = RPC.server.lost_after_s, RPC.cluster.max_restarts
    for seed in range(50):
        drawn = random_faults(20, seed, RANKS, RPC)
        for before, after in pairwise(drawn):
            assert after.at_s - before.at_s >= (before.for_s or 0.0) + lost_after_s
        ended = [fault.target for fault in drawn if fault.silences(lost_after_s)]
        assert max(map(ended.count, ended)) <= limit
    assert {fault.kind for seed in range(50) for fault in random_faults(20, seed, RANKS, RPC)} == {
        "kill",
        "freeze",
        "hold_gil",
        "slow",
        "partition",
    }
    assert "partition" not in {fault.kind for fault in random_faults(50, 0, roles(DDP, 2), DDP)}


@pytest.mark.parametrize(
    ("fault", "silences"),
    [
        (Fault("kill", "trainer:0"), True),
        (Fault("freeze", "trainer:0"), True),
        (Fault("freeze", "trainer:0", for_s=6.0), True),
        (Fault("freeze", "trainer:0", for_s=4.0), False),
        (Fault("hold_gil", "trainer:0", for_s=6.0), True),
        (Fault("partition", "trainer:0", for_s=4.0), False),
        (Fault("slow", "trainer:0", amount=5.0), False),
        (Fault("lose", "", "replies", amount=5.0), False),
    ],
)
def test_which_faults_end_the_part_of_a_rank(fault, silences):
    assert fault.silences(lost_after_s=5.0) is silences

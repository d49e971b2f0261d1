"""Modes and worlds: the role of each rank, and the world sizes that a mode accepts."""

import dataclasses

import pytest

from paramserver.config import (
    MODES,
    ClusterConfig,
    Config,
    Role,
    is_colocated,
    mode_of,
    num_commands_of,
    num_ranks_started,
    num_servers_of,
    num_trainers_of,
    roles,
    with_world_size,
    world_size_of,
)
from paramserver.errors import UnsupportedConfiguration


def config(mode: str, num_servers: int = 1, num_trainers: int = 2) -> Config:
    return Config(mode=mode, cluster=ClusterConfig(num_servers=num_servers, num_trainers=num_trainers))


def test_the_table_names_each_mode_by_its_key():
    assert {name: mode.name for name, mode in MODES.items()} == {"rpc": "rpc", "ddp": "ddp", "local": "local"}
    assert {mode.trainer_class for mode in MODES.values()} == {
        "paramserver.trainers:RpcTrainer",
        "paramserver.trainers:DdpTrainer",
        "paramserver.trainers:LocalTrainer",
    }
    assert mode_of(config("ddp")) is MODES["ddp"]


@pytest.mark.parametrize(
    ("mode", "servers", "trainers", "world_size"),
    [("rpc", 1, 2, 3), ("rpc", 2, 3, 5), ("ddp", 1, 2, 2), ("ddp", 2, 5, 5), ("local", 1, 2, 1)],
)
def test_the_world_of_a_config(mode, servers, trainers, world_size):
    assert world_size_of(config(mode, servers, trainers)) == world_size


@pytest.mark.parametrize(
    ("mode", "servers", "world_size", "expected"),
    [
        ("rpc", 1, 2, ["server 0", "trainer 0"]),
        ("rpc", 2, 5, ["server 0", "server 1", "trainer 0", "trainer 1", "trainer 2"]),
        ("ddp", 2, 3, ["trainer 0", "trainer 1", "trainer 2"]),
        ("ddp", 1, 1, ["trainer 0"]),
        ("local", 1, 1, ["trainer 0"]),
    ],
)
def test_roles(mode, servers, world_size, expected):
    found = roles(config(mode, servers), world_size)
    assert [str(role) for role in found] == expected
    assert [role.global_rank for role in found] == list(range(world_size))
    assert [role.kind for role in found] == [text.split()[0] for text in expected]
    for role in found:
        assert (role.server_index is None) == (role.trainer_index is not None)


def test_a_role_is_a_plain_value():
    assert roles(config("rpc"), 3)[2] == Role(2, "trainer", server_index=None, trainer_index=1)


@pytest.mark.parametrize(
    ("mode", "servers", "world_size", "message"),
    [
        ("rpc", 1, 1, r"world_size \(1\) must be at least 2 in mode rpc: 1 for the servers and 1 for a trainer; "),
        ("rpc", 3, 3, r"world_size \(3\) must be at least 4 in mode rpc"),
        ("ddp", 1, 0, r"world_size \(0\) must be at least 1 in mode ddp"),
        ("local", 1, 2, r"world_size \(2\) must be 1 in mode local, which is one process; leave it out or "),
        ("local", 1, 0, r"world_size \(0\) must be 1 in mode local"),
        ("ddp", 1, 10**8, r"world_size \(100000000\) must be at most 65536; start fewer servers and trainers"),
    ],
)
def test_a_world_that_the_mode_cannot_run_in(mode, servers, world_size, message):
    for function in (roles, with_world_size):
        with pytest.raises(UnsupportedConfiguration, match=message):
            function(config(mode, servers), world_size)


@pytest.mark.parametrize(("mode", "num_trainers"), [("rpc", 5), ("ddp", 7)])
def test_a_given_world_size_settles_the_number_of_trainers(mode, num_trainers):
    before = config(mode, num_servers=2)
    after = with_world_size(before, 7)
    assert after.cluster == dataclasses.replace(before.cluster, num_trainers=num_trainers)
    assert world_size_of(after) == 7
    assert num_servers_of(after) == num_servers_of(before)


@pytest.mark.parametrize(("servers", "hosts", "ranks"), [(None, 1, 2), (None, 3, 6), (1, 3, 4), (2, 2, 4)])
def test_colocated_servers_are_counted_with_the_hosts(servers, hosts, ranks):
    before = Config(cluster=ClusterConfig(num_servers=servers, colocate=True))
    assert num_ranks_started(before, hosts) == ranks
    after = with_world_size(before, ranks)
    assert (num_servers_of(after), num_trainers_of(after)) == (servers or hosts, hosts)
    assert num_commands_of(after) == hosts
    kinds = [role.kind for role in roles(before, ranks)]
    assert kinds == ["server"] * (servers or hosts) + ["trainer"] * hosts
    fewer = with_world_size(after, ranks - hosts + 1)  # trainers that leave take no server with them
    assert (num_servers_of(fewer), num_trainers_of(fewer)) == (servers or hosts, 1)


@pytest.mark.parametrize("mode", ["ddp", "local"])
def test_without_servers_none_is_colocated(mode):
    of = Config(mode=mode, cluster=ClusterConfig(colocate=True))
    assert (is_colocated(of), num_ranks_started(of, 1), num_servers_of(of)) == (False, 1, 0)
    assert num_commands_of(of) == world_size_of(of)


def test_more_colocated_servers_than_trainers_are_refused():
    of = Config(cluster=ClusterConfig(num_servers=3, colocate=True))
    with pytest.raises(UnsupportedConfiguration, match=r"cluster.num_servers \(3\) must be at most .* trainers \(2\)"):
        roles(of, 5)


def test_a_single_process_keeps_its_config():
    assert with_world_size(config("local"), 1) == config("local")

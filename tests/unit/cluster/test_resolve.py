"""The identity of this process: from flags, torchrun, variables set by hand, or none of these."""

import dataclasses

import pytest

import paramserver.cluster
from paramserver.cluster import ProcessIdentity, RankFlags, bind_listener, resolve_identity, unused_tasks
from paramserver.cluster.resolve import ENVIRONMENTS
from paramserver.cluster.torchrun import VARIABLES, EnvVarEnvironment
from paramserver.config import ClusterConfig, Config
from paramserver.errors import UnsupportedConfiguration
from paramserver.launch import parse, rank_flags

NO_FLAGS = RankFlags()


def config(mode: str = "rpc", **cluster) -> Config:
    return Config(mode=mode, cluster=ClusterConfig(**cluster))


def torchrun(
    global_rank: int = 3, *, nodes: int = 2, per_node: int = 2, restarts: int = 0, **changes
) -> dict[str, str]:
    """What torchrun sets for one of ``nodes * per_node`` workers."""
    variables = {
        "RANK": str(global_rank),
        "WORLD_SIZE": str(nodes * per_node),
        "LOCAL_RANK": str(global_rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(global_rank // per_node),
        "MASTER_ADDR": "node0.cluster",
        "MASTER_PORT": "41234",
        "TORCHELASTIC_RUN_ID": "job7",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return {name: value for name, value in {**variables, **changes}.items() if value is not None}


def refused(flags: RankFlags, environ: dict, of: Config) -> str:
    with pytest.raises(UnsupportedConfiguration) as caught:
        resolve_identity(flags, environ, of)
    return str(caught.value)


def test_without_a_rank_all_ranks_are_started_here():
    assert resolve_identity(NO_FLAGS, {}, config()) is None
    assert resolve_identity(RankFlags(world_size=4, master_port=1234), {"PATH": "/bin", "RANK": "1"}, config()) is None
    assert "must be at least 2 in mode rpc" in refused(RankFlags(world_size=1), {}, config())
    assert "must be 1 in mode local" in refused(RankFlags(world_size=2), {}, config("local"))


def test_a_rank_without_a_world_size_is_named_where_all_ranks_are_started_here():
    assert unused_tasks({"RANK": "1"}).startswith("warning: RANK is set without WORLD_SIZE, and all ranks are started")
    assert unused_tasks({"RANK": "1", "WORLD_SIZE": "3"}) == unused_tasks({"WORLD_SIZE": "3"}) == ""


def test_a_rank_of_this_machine_by_flags():
    assert resolve_identity(RankFlags(1, 3, "127.0.0.1", 1234), {}, config()) == ProcessIdentity(
        global_rank=1,
        world_size=3,
        local_rank=1,
        local_world_size=3,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=1234,
        store_is_hosted=False,
        job="job",
        source="flags",
    )


def test_a_rank_of_another_host_by_flags():
    identity = resolve_identity(RankFlags(2, 3, "node0"), {}, config())
    assert (identity.local_rank, identity.local_world_size, identity.node_rank) == (0, 1, 2)
    assert identity.master_addr == "node0"


@pytest.mark.parametrize(
    ("flags", "cluster", "world_size", "address"),
    [
        (RankFlags(0), {}, 3, ("127.0.0.1", 29500)),
        (RankFlags(0, master_port=0), {}, 3, ("127.0.0.1", 29500)),
        (RankFlags(4), {"num_trainers": 4, "master_addr": "node0", "master_port": 1111}, 5, ("node0", 1111)),
        (RankFlags(4, 9, "node1", 2222), {"master_addr": "node0", "master_port": 1111}, 9, ("node1", 2222)),
    ],
)
def test_flags_that_are_not_given_come_from_the_config(flags, cluster, world_size, address):
    identity = resolve_identity(flags, {}, config(**cluster))
    assert identity.world_size == world_size
    assert (identity.master_addr, identity.master_port) == address


@pytest.mark.parametrize("flags", [RankFlags(1, 3), RankFlags(role="trainer", index=0)])
def test_variables_have_the_address_of_rank_0_also_where_flags_have_the_rank(flags):
    given = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "23456"}
    of = config(num_trainers=2, master_addr="node0", master_port=1111)
    identity = resolve_identity(flags, given, of)
    assert (identity.master_addr, identity.master_port) == ("10.0.0.9", 23456)
    assert identity.local_world_size == 1  # others are on other hosts
    flagged = resolve_identity(dataclasses.replace(flags, master_addr="node1", master_port=2222), given, of)
    assert (flagged.master_addr, flagged.master_port) == ("node1", 2222)
    assert "MASTER_PORT (x)" in refused(flags, {"MASTER_PORT": "x"}, of)
    assert resolve_identity(NO_FLAGS, {"MASTER_PORT": "x"}, of) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (RankFlags(3, 3), "--rank (3) must be below --world_size (3): ranks count from 0"),
        (RankFlags(3), "--rank (3) must be below the world size (3) of the config, as no --world_size is given: ranks "
         "count from 0"),
        (RankFlags(-1, 3), "--rank (-1) must be at least 0; ranks count from 0"),
        (RankFlags(0, 0), "--world_size (0) must be at least 1; count all ranks"),
        (RankFlags(world_size=-2), "--world_size (-2) must be at least 1; count all ranks"),
        (RankFlags(0, 3, master_port=65536), "--master_port (65536) must be from 0 to 65535; give a free port"),
        (RankFlags(0, 3, master_addr=" "), "--master_addr () must not be empty; give the host of rank 0"),
        (RankFlags(0, 1), "world_size (1) must be at least 2 in mode rpc: 1 for the servers and 1 for a trainer; start "
         "more ranks"),
    ],
)  # fmt: skip
def test_wrong_flags(flags, message):
    assert refused(flags, {}, config()) == message


@pytest.mark.parametrize(
    ("mode", "cluster", "flags", "rank", "world_size"),
    [
        ("rpc", {}, {"role": "server", "index": 0}, 0, 3),
        ("rpc", {}, {"role": "trainer", "index": 1}, 2, 3),
        ("rpc", {"num_servers": 2, "num_trainers": 4}, {"role": "server", "index": 1}, 1, 6),
        ("rpc", {"num_servers": 2, "num_trainers": 4}, {"role": "trainer", "index": 3}, 5, 6),
        ("rpc", {"num_servers": 2}, {"role": "trainer", "index": 3, "world_size": 6}, 5, 6),
        ("ddp", {"num_servers": 2, "num_trainers": 4}, {"role": "trainer", "index": 3, "num_trainers": 4}, 3, 4),
        ("local", {}, {"role": "trainer", "index": 0}, 0, 1),
    ],
)
def test_a_role_and_an_index_make_a_rank(mode, cluster, flags, rank, world_size):
    identity = resolve_identity(RankFlags(master_addr="node0", **flags), {}, config(mode, **cluster))
    assert (identity.global_rank, identity.world_size, identity.source) == (rank, world_size, "flags")
    assert (identity.local_rank, identity.local_world_size, identity.node_rank) == (0, 1, rank)


@pytest.mark.parametrize(
    ("flags", "of", "message"),
    [
        ({"role": "server", "index": 0, "global_rank": 1}, config(), "--role (server) and --rank (1) both name this "
         "process; leave one of them out"),
        ({"index": 1}, config(), "--index (1) must be given together with --role, whose processes it counts; add "
         "--role"),
        ({"role": "trainer", "index": -1}, config(), "--index (-1) must be at least 0; processes of a role count from "
         "0"),
        ({"role": "trainer"}, config(), "--index must be given with --role (trainer); add it, counting the processes "
         "of the role from 0"),
        ({"role": "trainer", "index": 2}, config(), "--index (2) must be below the number of trainers (2); correct it, "
         "or give --num_trainers"),
        ({"role": "server", "index": 1}, config(), "--index (1) must be below the number of servers (1); correct it, "
         "or give --num_servers"),
        ({"role": "trainer", "index": 7, "world_size": 1}, config(num_servers=3), "world_size (1) must be at least 4 "
         "in mode rpc: 3 for the servers and 1 for a trainer; start more ranks"),
        ({"role": "server", "index": 2, "world_size": 2}, config(num_servers=3), "world_size (2) must be at least 4 "
         "in mode rpc: 3 for the servers and 1 for a trainer; start more ranks"),
        ({"role": "server", "index": 0}, config("ddp"), "--role (server) must be trainer in mode ddp, which has no "
         "servers; start no server, or choose mode rpc"),
        ({"role": "server", "index": 0}, config(colocate=True), "--role (server) cannot be used with cluster.colocate "
         "(True), where one command starts both roles of a host; give --rank, which counts hosts, or set "
         "cluster.colocate to false"),
        ({"global_rank": 0, "world_size": 3, "num_trainers": 3}, config(), "--num_trainers (3), or the key in --set, "
         "must be the 2 that --world_size leaves for trainers; leave it out, or start as many"),
        ({"world_size": 3, "num_trainers": 3}, config(), "--num_trainers (3), or the key in --set, must be the 2 "
         "that --world_size leaves for trainers; leave it out, or start as many"),
    ],
)  # fmt: skip
def test_roles_that_are_refused(flags, of, message):
    assert refused(RankFlags(**flags), {}, of) == message


def test_a_number_of_trainers_must_agree_with_the_launcher():
    assert refused(RankFlags(num_trainers=4), torchrun(), config()) == (
        "--num_trainers (4), or the key in --set, must be the 3 that torchrun leaves for trainers; leave it out, or "
        "start as many"
    )
    assert resolve_identity(RankFlags(num_trainers=3), torchrun(), config()).world_size == 4


def test_keys_of_set_count_as_their_flags_before_variables():
    keys = {"master_addr": "10.0.0.8", "master_port": 30123, "num_trainers": 2}
    arguments = parse([word for key, value in keys.items() for word in ("--set", f"cluster.{key}={value}")])
    flags = rank_flags(arguments)
    assert flags == RankFlags(**keys)
    variables = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29999", "RANK": "1", "WORLD_SIZE": "3"}
    identity = resolve_identity(flags, variables, config(**keys))
    assert (identity.master_addr, identity.master_port) == ("10.0.0.8", 30123)
    assert refused(flags, {**variables, "WORLD_SIZE": "4"}, config(**keys)).startswith("--num_trainers (2), or the key")
    assert rank_flags(parse(["--set", "cluster.master_port=30123", "--master_port", "2222"])).master_port == 2222


def test_ranks_started_by_flags_and_by_variables_meet_in_one_run():
    by_flag = resolve_identity(RankFlags(1, 3), {}, config())
    by_variable = resolve_identity(NO_FLAGS, {"RANK": "2", "WORLD_SIZE": "3"}, config())
    assert by_flag.job == by_variable.job


@pytest.mark.parametrize("address", ["fd00::1", "[fd00::1]"])
def test_an_address_of_ipv6_may_have_brackets(address):
    by_flag = resolve_identity(RankFlags(1, 3, master_addr=address), {}, config())
    by_key = resolve_identity(RankFlags(1, 3), {}, config(master_addr=address))
    by_variable = resolve_identity(NO_FLAGS, torchrun() | {"MASTER_ADDR": address}, config("ddp"))
    assert [one.master_addr for one in (by_flag, by_key, by_variable)] == ["fd00::1"] * 3


def test_an_address_of_one_link_is_refused():
    address = "fe80::1%eth0"
    message = (
        f"cluster.master_addr ({address}) must be valid on more than one link; give another address of rank 0's host, "
        "or its name"
    )
    assert refused(RankFlags(1, 3, master_addr=f"[{address}]"), {}, config()) == message
    assert refused(NO_FLAGS, torchrun() | {"MASTER_ADDR": address}, config("ddp")) == message
    assert refused(NO_FLAGS, {}, config(master_addr=address)) == message
    with pytest.raises(UnsupportedConfiguration) as raised:
        bind_listener(address, 0)
    assert str(raised.value) == message


@pytest.mark.parametrize("global_rank", range(6))
def test_torchrun_on_several_nodes(global_rank):
    identity = resolve_identity(NO_FLAGS, torchrun(global_rank, nodes=3, per_node=2, restarts=1), config())
    assert identity == ProcessIdentity(
        global_rank=global_rank,
        world_size=6,
        local_rank=global_rank % 2,
        local_world_size=2,
        node_rank=global_rank // 2,
        master_addr="node0.cluster",
        master_port=41234,
        store_is_hosted=True,
        job="job7",
        source="torchrun",
        launch="job7",
    )


@pytest.mark.parametrize(("value", "restarts_all"), [("3", True), ("0", False), (None, False)])
def test_torchrun_may_start_all_ranks_again(value, restarts_all):
    environ = torchrun(TORCHELASTIC_MAX_RESTARTS=value)
    assert resolve_identity(NO_FLAGS, environ, config()).restarts_all is restarts_all


@pytest.mark.parametrize("hosted", ["True", "False"])
def test_agents_that_count_other_restarts_share_the_job(hosted):
    """An agent counts its own restarts only."""
    own = {"TORCHELASTIC_USE_AGENT_STORE": hosted}
    jobs = {resolve_identity(NO_FLAGS, torchrun(restarts=n, **own), config()).job for n in (0, 2)}
    assert jobs == {"job7"}


@pytest.mark.parametrize(("value", "hosted"), [("True", True), ("False", False), (None, False)])
def test_the_agent_of_torchrun_may_serve_the_store(value, hosted):
    environ = torchrun(TORCHELASTIC_USE_AGENT_STORE=value)
    identity = resolve_identity(NO_FLAGS, environ, config())
    assert identity.store_is_hosted is hosted
    assert identity.launch == ("job7" if hosted else "")  # what is kept for the next attempt needs a store that lasts


@pytest.mark.parametrize("is_trainer", [False, True])
@pytest.mark.parametrize(
    ("servers", "host", "ranks"), [(None, 0, (0, 3)), (None, 2, (2, 5)), (1, 0, (0, 1)), (1, 2, (3, 3))]
)
def test_a_host_with_a_colocated_server_has_two_ranks(servers, host, ranks, is_trainer):
    of, world_size = config(colocate=True, num_servers=servers), 3 + (servers or 3)
    by_flags = resolve_identity(RankFlags(host, 3, "node0", is_colocated_trainer=is_trainer), {}, of)
    by_torchrun = resolve_identity(RankFlags(is_colocated_trainer=is_trainer), torchrun(host, nodes=3, per_node=1), of)
    for identity in (by_flags, by_torchrun):
        assert (identity.global_rank, identity.world_size) == (ranks[is_trainer], world_size)
        assert (identity.local_rank, identity.local_world_size, identity.node_rank) == (0, 1, host)


def test_a_supervisor_counts_all_ranks():
    of = config(colocate=True, num_servers=2)
    assert resolve_identity(RankFlags(3, 4, supervised=True), {}, of).global_rank == 3
    assert "--rank (2) must be below --world_size (2)" in refused(RankFlags(2, 2), {}, of)
    assert "--rank (2) must be below the world size (2) of the config" in refused(RankFlags(2), {}, of)


@pytest.mark.parametrize("name", [*VARIABLES.values()][:-4])
def test_a_missing_variable_of_torchrun_is_refused(name):
    environ = torchrun()
    del environ[name]
    if name == "TORCHELASTIC_RUN_ID":  # the rest is the same as when set by hand
        assert resolve_identity(NO_FLAGS, environ, config()).source == "environment"
    else:
        message = f"{name} must be set, as torchrun does; start the ranks with it, or give --rank"
        assert refused(NO_FLAGS, environ, config()) == message
        assert refused(NO_FLAGS, {**environ, name: " "}, config()) == message


@pytest.mark.parametrize("name", [n for n, v in torchrun().items() if v.isdigit() and not n.endswith("RESTART_COUNT")])
@pytest.mark.parametrize("value", ["many", "-1", "1.0", "²"])
def test_a_variable_of_torchrun_must_be_a_number(name, value):
    message = refused(NO_FLAGS, torchrun(**{name: value}), config())
    assert message.startswith(f"{name} ({value}) must be a whole number from ")
    assert "; " in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "4"}, "RANK (4) must be below 4: ranks count from 0"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK (2) must be below 2: ranks count from 0"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT (70000) must be below 65536; correct the variable"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE (0) must be at least 1; correct the variable"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT (0) must be at least 1; correct the variable"),
    ],
)
def test_variables_out_of_range(changes, message):
    assert refused(NO_FLAGS, torchrun(**changes), config()) == message


def test_the_mode_must_fit_the_world_that_torchrun_started():
    assert "world_size (4) must be 1 in mode local" in refused(NO_FLAGS, torchrun(), config("local"))
    alone = torchrun(0, nodes=1, per_node=1)
    assert resolve_identity(NO_FLAGS, alone, config("local")).world_size == 1
    assert "must be at least 2 in mode rpc" in refused(NO_FLAGS, alone, config())


def test_variables_set_by_hand_are_completed_from_the_config():
    environ = {"RANK": "1", "WORLD_SIZE": "2"}
    identity = resolve_identity(NO_FLAGS, environ, config("ddp"))
    assert identity == ProcessIdentity(1, 2, 1, 2, 0, "127.0.0.1", 29500, False, "job", "environment")
    identity = resolve_identity(NO_FLAGS, environ, config("ddp", master_addr="node0", master_port=1111))
    assert identity == ProcessIdentity(1, 2, 0, 1, 1, "node0", 1111, False, "job", "environment")


def test_a_local_rank_set_by_hand_needs_the_number_of_ranks_of_its_host():
    """Where each rank cannot be the only one of its host, as without LOCAL_RANK."""
    given = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}
    message = "LOCAL_WORLD_SIZE must be set, as torchrun does; start the ranks with it, or give --rank"
    assert refused(NO_FLAGS, {**given, "LOCAL_RANK": "1"}, config("ddp")) == message
    for place in ({}, {"LOCAL_RANK": "0"}):
        identity = resolve_identity(NO_FLAGS, {**given, **place}, config("ddp"))
        assert (identity.local_rank, identity.local_world_size) == (0, 1)


def test_variables_set_by_hand_override_the_config():
    given = {"RANK": "5", "WORLD_SIZE": "6", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2222"}
    place = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2"}
    identity = resolve_identity(NO_FLAGS, {**given, **place}, config(master_addr="node0", master_port=1111))
    assert identity == ProcessIdentity(5, 6, 1, 2, 2, "10.0.0.1", 2222, False, "job", "environment")
    assert "LOCAL_RANK (2) must be below 2" in refused(NO_FLAGS, {**given, **place, "LOCAL_RANK": "2"}, config())


@pytest.mark.parametrize(
    ("rank", "local_rank", "here"), [("1", "2", "-1 to 1"), ("1", "0", "1 to 3"), ("2", "0", "2 to 4")]
)
def test_variables_must_put_consecutive_ranks_of_the_run_on_this_host(rank, local_rank, here):
    place = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": "3"}
    message = refused(NO_FLAGS, {"RANK": rank, "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", **place}, config())
    assert message == (
        f"LOCAL_RANK ({local_rank}) and LOCAL_WORLD_SIZE (3) must agree with RANK ({rank}) and WORLD_SIZE (3), and put "
        f"ranks {here} on this host; correct them, and give the ranks of a host consecutive numbers"
    )


def test_a_rank_flag_overrides_torchrun():
    identity = resolve_identity(RankFlags(0, 2), torchrun(), config())
    assert (identity.global_rank, identity.world_size, identity.source) == (0, 2, "flags")


def test_other_flags_under_torchrun():
    same = resolve_identity(NO_FLAGS, torchrun(), config())
    assert resolve_identity(RankFlags(world_size=4, master_addr="node0.cluster"), torchrun(), config()) == same
    moved = resolve_identity(RankFlags(master_port=2222), torchrun(), config())
    assert moved == dataclasses.replace(same, master_port=2222, store_is_hosted=False, launch="")
    hosted = torchrun(TORCHELASTIC_USE_AGENT_STORE="True")
    by_name = resolve_identity(RankFlags(master_addr="127.0.0.1"), hosted, config())
    assert by_name == dataclasses.replace(resolve_identity(NO_FLAGS, hosted, config()), master_addr="127.0.0.1")
    assert refused(RankFlags(world_size=3), torchrun(), config()) == (
        "--world_size (3) must be the 4 that torchrun started; leave the flag out"
    )


@pytest.mark.parametrize("flags", [NO_FLAGS, RankFlags(master_port=2222)])
@pytest.mark.parametrize("hosted", ["True", "False"])
def test_trainers_join_under_no_launcher_that_ends_all_ranks_after_a_loss(flags, hosted):
    """Wherever the store is: it is rank 0's own with another port, or if torchrun does not share that of its agent."""
    environ = torchrun(TORCHELASTIC_USE_AGENT_STORE=hosted)
    message = "cluster.elastic (True) must be false under torchrun, which fixes the number of processes"
    assert refused(flags, environ, config(elastic=True)).startswith(message)
    by_hand = {"RANK": "0", "WORLD_SIZE": "4"}
    assert resolve_identity(flags, by_hand, config(elastic=True)).source == "environment"


def test_each_environment_detects_itself_only():
    by_hand = {"RANK": "0", "WORLD_SIZE": "2"}
    assert [e.detect(torchrun(), NO_FLAGS) for e in ENVIRONMENTS] == [False, True, True, False]
    assert [e.detect(by_hand, RankFlags(0)) for e in ENVIRONMENTS] == [True, False, True, False]
    assert not EnvVarEnvironment.detect({"RANK": "0"}, NO_FLAGS)
    assert not EnvVarEnvironment.detect({"WORLD_SIZE": "2"}, NO_FLAGS)


def test_every_public_name_resolves_and_no_other():
    for name in paramserver.cluster.__all__:
        assert getattr(paramserver.cluster, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = paramserver.cluster.nothing

"""The identity of a task of srun."""

import pytest

from paramserver import devices
from paramserver.cluster import RankFlags, resolve_identity
from paramserver.cluster.slurm import SlurmEnvironment, expand_counts, expand_hosts, step_command
from paramserver.config import ClusterConfig, Config, roles, with_world_size
from paramserver.errors import UnsupportedConfiguration
from paramserver.runtime.rank import place_rank

NO_FLAGS = RankFlags()


def task(rank=3, **changes):
    """What srun sets for one of the tasks of ``srun -N 2 --ntasks-per-node 2``."""
    variables = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "node[9-10]",
    }
    return {name: value for name, value in {**variables, **changes}.items() if value is not None}


def refused(environ, flags=NO_FLAGS, config=None):
    with pytest.raises(UnsupportedConfiguration) as caught:
        resolve_identity(flags, environ, config or Config(mode="ddp"))
    return str(caught.value)


def test_rank_host_and_address_follow_from_the_step():
    identity = resolve_identity(NO_FLAGS, task(), Config(mode="ddp"))
    assert identity.source == "srun"
    assert (identity.global_rank, identity.world_size) == (3, 4)
    assert (identity.local_rank, identity.local_world_size, identity.node_rank) == (1, 2, 1)
    assert (identity.master_addr, identity.master_port) == ("node9", 15000 + (4711 * 9271 + 2) % 15000)
    assert not identity.store_is_hosted
    assert identity.job_step == "step 2 of job 4711"


def test_steps_and_jobs_have_ports_of_their_own():
    steps = [(str(job), str(step)) for job in range(4711, 4911) for step in range(20)]
    ports = {
        SlurmEnvironment(task(SLURM_JOB_ID=job, SLURM_STEP_ID=step), Config(), NO_FLAGS).master_port
        for job, step in (*steps, ("99999999", "0"))
    }
    assert len(ports) == len(steps) + 1
    assert all(15000 <= port < 30000 for port in ports)


def test_flags_variables_and_config_override_the_address():
    flags = RankFlags(master_addr="other", master_port=1234)
    identity = resolve_identity(flags, task(), Config(mode="ddp"))
    assert (identity.master_addr, identity.master_port) == ("other", 1234)
    identity = resolve_identity(NO_FLAGS, task(MASTER_ADDR="node9-ib", MASTER_PORT="3456"), Config(mode="ddp"))
    assert (identity.master_addr, identity.master_port) == ("node9-ib", 3456)
    config = Config(mode="ddp", cluster=ClusterConfig(master_port=2345))
    assert resolve_identity(NO_FLAGS, task(), config).master_port == 2345
    config = Config(mode="ddp", cluster=ClusterConfig(master_addr="node9-ib"))
    assert resolve_identity(NO_FLAGS, task(), config).master_addr == "node9-ib"


def test_tasks_of_one_host_use_the_loopback():
    one = {"SLURM_STEP_NODELIST": "node9", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "3"}
    identity = resolve_identity(NO_FLAGS, task(**one), Config(mode="ddp"))
    assert (identity.master_addr, identity.local_rank) == ("127.0.0.1", 3)


def tasks_of(counts, nodes, **changes):
    """The identities of all tasks of a step by node: ``nodes`` has the ranks of each."""
    number = sum(map(len, nodes))
    for node, ranks in enumerate(nodes):
        for local_rank, rank in enumerate(ranks):
            place = {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(local_rank), "SLURM_STEP_TASKS_PER_NODE": counts}
            yield ranks, task(rank, **{"SLURM_STEP_NUM_TASKS": str(number), **place, **changes})


@pytest.mark.parametrize(
    ("changes", "counts", "nodes"),
    [
        ({}, "3,1", [[0, 1, 2], [3]]),
        ({"SLURM_DISTRIBUTION": "block:cyclic"}, "1,3", [[0], [1, 2, 3]]),
        ({"SLURM_DISTRIBUTION": "block,nopack"}, "2(x2)", [[0, 1], [2, 3]]),
        ({"SLURM_DISTRIBUTION": "cyclic"}, "2(x2)", [[0, 2], [1, 3]]),
        ({"SLURM_DISTRIBUTION": "cyclic:block"}, "3,1,2", [[0, 3, 5], [1], [2, 4]]),
        ({"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "2"}, "4,3", [[0, 1, 4, 5], [2, 3, 6]]),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "2,1", [[0, 1], [2]]),
        # Two groups, the second of one task for each node, which srun distributes in turns.
        ({"SLURM_DISTRIBUTION": "cyclic", "SLURM_HET_SIZE": "2"}, "2,1(x2)", [[0, 1], [2], [3]]),
    ],
)
def test_the_ranks_of_a_host_follow_from_the_distribution(changes, counts, nodes):
    for ranks, environ in tasks_of(counts, nodes, **changes):
        assert list(resolve_identity(NO_FLAGS, environ, Config(mode="ddp")).ranks_here) == ranks


def test_trainers_of_a_cyclic_distribution_have_gpus_of_their_own(monkeypatch):
    monkeypatch.setattr(devices, "num_gpus", lambda: 2)
    found = {}
    for _, environ in tasks_of("3,2", [[0, 2, 4], [1, 3]], SLURM_DISTRIBUTION="cyclic"):
        identity = resolve_identity(NO_FLAGS, environ, Config())
        config = with_world_size(Config(), identity.world_size)
        device = place_rank(identity, roles(config, identity.world_size), config).device
        found[identity.global_rank] = str(device)
    assert found == {0: "cpu", 2: "cuda:0", 4: "cuda:1", 1: "cuda:0", 3: "cuda:1"}


def test_trainers_of_colocated_hosts_are_counted_after_the_servers():
    config = Config(cluster=ClusterConfig(colocate=True, num_servers=2))
    for ranks, environ in tasks_of("2(x2)", [[0, 2], [1, 3]], SLURM_DISTRIBUTION="cyclic"):
        identity = resolve_identity(RankFlags(is_colocated_trainer=True), environ, config)
        assert list(identity.ranks_here) == [rank + 2 for rank in ranks]


def test_a_task_that_its_distribution_does_not_place_is_refused():
    cyclic = {"SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    assert refused(task(2, **cyclic)) == (
        "SLURM_PROCID (2) must follow from SLURM_LOCALID (1) and SLURM_NODEID (0) by SLURM_STEP_TASKS_PER_NODE (2(x2)) "
        "and SLURM_DISTRIBUTION (block), which may be block, cyclic or plane, and block in a heterogeneous job; start "
        "the ranks with srun --distribution=block"
    )
    assert "and SLURM_DISTRIBUTION (arbitrary), which" in refused(task(2, **cyclic, SLURM_DISTRIBUTION="arbitrary"))
    assert refused(task(SLURM_DISTRIBUTION="plane")).startswith("SLURM_DIST_PLANESIZE must be set")


@pytest.mark.parametrize(
    "environ",
    [
        task(SLURM_STEP_NUM_TASKS="1"),  # srun --pty bash
        task(SLURM_STEP_ID=None, SLURM_STEP_NUM_TASKS=None),  # a batch script
        {},
    ],
)
def test_without_several_tasks_all_ranks_are_started_here(environ):
    assert resolve_identity(NO_FLAGS, environ, Config(mode="ddp")) is None


def test_other_launchers_inside_of_a_task_come_first():
    assert resolve_identity(RankFlags(0, 2), task(), Config(mode="ddp")).source == "flags"
    assert resolve_identity(NO_FLAGS, task(RANK="1", WORLD_SIZE="2"), Config(mode="ddp")).source == "environment"


def test_tasks_that_are_not_used_are_counted():
    assert SlurmEnvironment.unused_tasks(task(SLURM_STEP_ID=None)) == "4 tasks (SLURM_NTASKS)"
    assert (
        SlurmEnvironment.unused_tasks({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"})
        == "2 nodes (SLURM_JOB_NUM_NODES)"
    )
    assert SlurmEnvironment.unused_tasks(task()) == ""
    # As several runs may share an allocation.
    assert SlurmEnvironment.unused_tasks(task(SLURM_STEP_NUM_TASKS="1", SLURM_JOB_NUM_NODES="2")) == ""
    assert SlurmEnvironment.unused_tasks({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}) == ""
    assert SlurmEnvironment.unused_tasks({"SLURM_NTASKS": "4"}) == ""


def test_a_simulation_overlaps_the_step_of_the_ranks_and_else_has_cpus_of_its_own(tmp_path):
    (tmp_path / "srun").touch(mode=0o755)
    batch = {"PATH": str(tmp_path), "SLURM_JOB_ID": "1"}
    assert "--exact" in step_command("auto", batch, 2)
    in_step = step_command("auto", {**batch, "SLURM_STEP_ID": "0"}, 2)
    assert "--overlap" in in_step
    assert "--exact" not in in_step


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node", ["node"]),
        ("a,b", ["a", "b"]),
        ("host[1,5-7]", ["host1", "host5", "host6", "host7"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("n[98-101]", ["n98", "n99", "n100", "n101"]),
        ("a[1-2],b3,c[4,6]-ib", ["a1", "a2", "b3", "c4-ib", "c6-ib"]),
        ("r[1-2]c[0-1]s", ["r1c0s", "r1c1s", "r2c0s", "r2c1s"]),
    ],
)
def test_lists_of_hosts(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n1]", "n[]", "n[a-b]", "n[5-3]", "n[1,,2]"])
def test_a_malformed_list_is_named(text):
    with pytest.raises(UnsupportedConfiguration, match=r"SLURM_STEP_NODELIST .* must be a list of hosts"):
        expand_hosts(text)


def test_counts_of_nodes():
    assert expand_counts("4") == [4]
    assert expand_counts("2(x3),1,3(x2)") == [2, 2, 2, 1, 3, 3]


def test_wrong_variables_are_named():
    assert "SLURM_PROCID" in refused(task(SLURM_PROCID="four"))
    assert "SLURM_PROCID (4)" in refused(task(SLURM_PROCID="4"))
    assert "SLURM_NODEID" in refused(task(SLURM_NODEID=None))
    assert "SLURM_STEP_TASKS_PER_NODE (2) must have a count for node 1" in refused(task(SLURM_STEP_TASKS_PER_NODE="2"))
    assert "SLURM_STEP_TASKS_PER_NODE (x) must be counts" in refused(task(SLURM_STEP_TASKS_PER_NODE="x"))
    assert "must be the 4 that srun started" in refused(task(), RankFlags(world_size=3))
    assert "must be 1 in mode local" in refused(task(), config=Config(mode="local"))


def test_the_gpus_of_an_allocation_are_counted():
    assert SlurmEnvironment.allocated_gpus(task(SLURM_GPUS_ON_NODE="4")) == 4
    assert SlurmEnvironment.allocated_gpus(task()) == 0
    assert SlurmEnvironment.allocated_gpus({"SLURM_GPUS_ON_NODE": "4"}) == 0  # of an earlier allocation
    assert SlurmEnvironment.allocated_gpus(task(SLURM_GPUS_ON_NODE="a100:2")) == 0

"""Runs over several hosts that share nothing but a network: the run of one host, bit for bit (helpers/hosts.py)."""

import shutil
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import name_tasks
import pytest
from hosts import FOLDER, PORT, Hosts, Ranks, name_of, start_ranks, write_configs
from launching import TASKS, FinishedRun, assert_equal_runs, differing_tensors, environment, train
from simulations import SHAPE

from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.bench.processes import INTERFACE

pytestmark = pytest.mark.processes

HELPERS = TASKS.parent
STEPS = 12
RUN = {
    "task_args": {"groups": True, "schedule": "step"},
    "training": {"max_steps": STEPS, "batch_size": 8, "validate_every": 6},
}
CLUSTER = {"num_trainers": 2, "timeout_s": 20}
PACED = {"task": "Slow", "task_args": {"seconds": 0.03}}
# The name of each host is that of its loopback: torch cannot find an address by it.
LOOPBACK_NAMES = {number: f"127.0.0.1 localhost {name_of(number)}\n" for number in range(2)}


@pytest.fixture(scope="module")
def one_host(tmp_path_factory):
    """Runs on one host by mode and servers, each made once, with the all-reduce that several hosts use in `ddp`."""
    made = {}

    def run(mode, servers=1, trainers=2):
        key = mode, servers, trainers
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{mode}-{servers}-{trainers}")
            # Beyond two trainers the all-reduce of gloo sums in another order than that in shared memory.
            made[key] = train(
                folder, mode, trainers, cluster={"num_servers": servers}, ddp={"shared_memory": "off"}, **RUN
            )
        return made[key]

    return run


def written_bytes(run):
    """Bytes of the parameters that one trainer sends as gradients, or receives, in all steps."""
    state = run.load("optimizer")["state"]
    return STEPS * sum(one["momentum_buffer"].nbytes for one in state.values())


def files_of(hosts, number):
    """What a host has in the folder of the run."""
    folder = hosts.path(number, FOLDER / "runs" / "run")
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_ddp_over_two_hosts_is_the_run_of_one(one_host):
    whole = one_host("ddp")
    with Hosts(2) as hosts, start_ranks(hosts, [0, 1], mode="ddp", cluster=CLUSTER, **RUN) as ranks:
        assert_equal_runs(whole, ranks.finish(), trainers=2)
        # With two trainers a ring sends as much as the parameters have, and receives it.
        assert all(hosts.moved_bytes(number) > 2 * written_bytes(whole) for number in (0, 1))
        assert files_of(hosts, 1) == ["logs/rank-1.log"]
        assert "checkpoints/latest" in files_of(hosts, 0)


@contextmanager
def name_servers(hosts, numbers, names):
    """A name server on each host; yields what one was asked and did not answer, as a function of the host."""
    with ExitStack() as stack:
        for number in numbers:
            words = [f"{name}={address}" for name, address in names.items()]
            command = [sys.executable, str(HELPERS / "name_server.py"), str(FOLDER / "questions"), *words]
            server = stack.enter_context(hosts.start(number, command, environment()))
            stack.callback(server.kill)
            assert server.stdout.readline() == "listens\n"
            mount = "echo nameserver 127.0.0.1 > /tmp/resolv.conf; mount --bind /tmp/resolv.conf /etc/resolv.conf"
            hosts.run(number, "sh", "-c", mount)

        def unanswered(number):
            file = hosts.path(number, FOLDER / "questions")
            return file.read_text().splitlines() if file.exists() else []

        yield unanswered


@pytest.mark.claim("name-server")
@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_ranks_find_hosts_by_a_name_server_that_they_ask_for_nothing_else(mode):
    hosts_file = dict.fromkeys(range(2), "127.0.0.1 localhost\n")  # no names of the hosts
    run = {"task": f"{HELPERS / 'name_tasks.py'}:LooksUpAName", "training": {"max_steps": 2}, "cluster": CLUSTER}
    placement = [0, 0, 1] if mode == "rpc" else [0, 1]
    with Hosts(2, names=hosts_file) as hosts:
        names = {name_of(number): hosts.address(number) for number in range(2)}
        with (
            name_servers(hosts, range(2), {**names, name_tasks.NAME: name_tasks.ADDRESS}) as unanswered,
            start_ranks(hosts, placement, mode=mode, master=name_of(0), **run) as ranks,
        ):
            assert ranks.finish().summary["steps"] == 2
            assert [unanswered(number) for number in range(2)] == [[], []]


def test_shared_memory_within_a_host_and_tcp_between_hosts_in_one_run(one_host):
    whole, moved = one_host("rpc"), {}
    for placement in ([0, 1, 2], [0, 0, 1]):
        with Hosts(3) as hosts, start_ranks(hosts, placement, mode="rpc", cluster=CLUSTER, **RUN) as ranks:
            assert_equal_runs(whole, ranks.finish(), trainers=2)
            used = ["transport of parameters and gradients: " + name for name in ("shared_memory", "tcp")]
            assert [host == 0 for host in placement[1:]] == [used[0] in ranks.output(rank) for rank in (1, 2)]
            assert [host != 0 for host in placement[1:]] == [used[1] in ranks.output(rank) for rank in (1, 2)]
            moved[placement[1]] = [hosts.moved_bytes(number) for number in range(3)]
    # Each trainer on another host pulls and pushes all parameters; one on the host of the server does not.
    each = 2 * written_bytes(whole)
    assert moved[1][0] > 2 * each
    assert min(moved[1][1:]) > each
    assert each < moved[0][0] < 2 * each
    assert moved[0][2] < 0.1 * each


def test_names_and_ipv6_and_a_job_token(one_host):
    """No host has an address of IPv4; two servers, of which each shares its host with a trainer."""
    cluster = {**CLUSTER, "num_servers": 2}
    token = {"PARAMSERVER_TOKEN": "a token of enough bytes"}
    config = {"mode": "rpc", "master": name_of(0), "environ": token, "cluster": cluster, **RUN}
    with Hosts(2, ipv6=True) as hosts, start_ranks(hosts, [0, 1, 0, 1], **config) as ranks:
        assert_equal_runs(one_host("rpc", servers=2), ranks.finish(), trainers=2)
    with Hosts(2, ipv6=True, names=LOOPBACK_NAMES) as hosts:
        for mode, placement in (("ddp", [0, 1]), ("rpc", [0, 0, 1])):
            master = f"[{hosts.address(0)}]"
            with start_ranks(hosts, placement, mode=mode, master=master, cluster=CLUSTER, name=mode, **RUN) as ranks:
                assert_equal_runs(one_host(mode), ranks.finish(), trainers=2)


@pytest.mark.parametrize(("mode", "placement"), [("ddp", [0, 1]), ("rpc", [0, 1, 0])])
def test_interfaces_are_chosen_by_the_route_or_by_name(one_host, mode, placement):
    """Rank 0 is at the second address of its interface, and the other host has an interface of another name."""
    with Hosts(2, names=LOOPBACK_NAMES) as hosts:
        hosts.run(0, "ip", "address", "add", "10.99.7.1/16", "dev", INTERFACE)
        for words in (f"{INTERFACE} down", f"{INTERFACE} name data7", "data7 up"):
            hosts.run(1, "ip", "link", "set", *words.split())
        with start_ranks(hosts, placement, mode=mode, master="10.99.7.1", cluster=CLUSTER, start=False, **RUN) as ranks:
            for rank, host in enumerate(placement):
                ranks.start(rank, *(["--set", "cluster.interface=data7"] if host == 1 else []))
            assert_equal_runs(one_host(mode), ranks.finish(), trainers=2)


def test_a_name_that_is_a_loopback_address_on_its_own_host(one_host):
    """As Debian's installer writes it to /etc/hosts."""
    known = f"127.0.0.1 localhost\n10.99.0.1 {name_of(0)}\n10.99.0.2 {name_of(1)}\n"
    names = {0: known.replace("10.99.0.1", "127.0.1.1"), 1: known}
    with Hosts(2, names=names) as hosts:
        config = {"mode": "rpc", "master": name_of(0), **RUN}
        variable = {"GLOO_SOCKET_IFNAME": INTERFACE}
        # Also for the rank on the host of rank 0, which reaches it by the loopback address.
        with start_ranks(hosts, [0, 0, 1], environ=variable, cluster=CLUSTER, **config) as ranks:
            assert_equal_runs(one_host("rpc"), ranks.finish(), trainers=2)
        with start_ranks(hosts, [0, 1, 1], cluster={**CLUSTER, "timeout_s": 2}, name="alone", **config) as ranks:
            assert ranks.wait() == [1, 1, 1]
            assert "is a loopback address on this host, so ranks on other hosts do not reach this one" in ranks.output(
                0
            )
            assert ends_with(ranks, 0, "rank 0 waited cluster.timeout_s (2 s) for a world of 3; missing: rank 1, 2.")
            assert ends_with(ranks, 1, "rank 1 found no rank 0 at node0:29500 within cluster.timeout_s (2 s); start")
        variable = {"GLOO_SOCKET_IFNAME": "eth9"}
        with start_ranks(hosts, [0, 1], environ=variable, **{**config, "mode": "ddp"}, name="eth9") as ranks:
            assert ranks.wait() == [2, 2]
            assert ends_with(
                ranks, 1, "GLOO_SOCKET_IFNAME (eth9) must be a network interface of this machine (lo, eth0)"
            )


def ends_with(ranks, rank, sentence):
    """Whether the last line of a rank is this error, without a traceback."""
    output = ranks.output(rank)
    return output.splitlines()[-1].startswith(f"error: {sentence}") and "Traceback" not in output


@pytest.mark.parametrize(("mode", "placement"), [("ddp", [0, 1]), ("rpc", [0, 1, 2])])
def test_a_run_is_resumed_where_only_the_host_of_rank_0_has_its_folder(one_host, mode, placement):
    with Hosts(max(placement) + 1) as hosts:
        half = {**RUN, "training": {**RUN["training"], "max_steps": 6}}
        with start_ranks(hosts, placement, mode=mode, cluster=CLUSTER, **half) as ranks:
            ranks.finish()
        # The other hosts have another config file: that of the run counts, with the same changes on all ranks.
        write_configs(hosts, placement[1:], mode=mode, cluster=CLUSTER, seed=5, **half)
        more = ["--resume", "runs/run", "--set", f"training.max_steps={STEPS}"]
        with start_ranks(hosts, placement, *more, mode=mode, cluster=CLUSTER, new=False) as ranks:
            assert_equal_runs(one_host(mode), ranks.finish(), trainers=2)
            assert "this rank takes the config from rank 0" in ranks.output(1)
            assert files_of(hosts, 1) == ["logs/rank-1.log"]


def test_what_needs_one_host_or_files_is_refused(tmp_path):
    with Hosts(2) as hosts:
        shared = {"server": {"transport": "shared_memory"}}
        with start_ranks(hosts, [0, 1], mode="rpc", cluster={"num_trainers": 1, "timeout_s": 20}, **shared) as ranks:
            assert ranks.wait() == [2, 2]
            assert "server.transport (shared_memory) must have all ranks on one host" in ranks.output(0)
            assert "trainer 0 (node1, process" in ranks.output(1)
        ranks = Ranks(hosts, [0, 1], ["--resume", "runs/other", "--world_size", 2, "--master_addr", "10.99.0.1"])
        with ranks:
            for rank in (0, 1):
                ranks.start(rank)
            assert ranks.wait() == [2, 2]
            assert ends_with(ranks, 0, "run folder runs/other must exist; give the folder of a run")
            assert ranks.output(1).endswith("where only the host of rank 0 has it, give --config FILE in addition\n")


@pytest.mark.parametrize(
    ("run_dir", "codes", "sentence"),
    [
        (
            "config.yaml",
            [1, 2],
            "logging.run_dir (config.yaml) must be a folder that this user can write to (Not a dir",
        ),
        # Rank 0 waits for this one no more.
        ("/proc/none", [2, 2], "run folder /proc/none/run must be a folder that this user can write to (No such file"),
    ],
)
def test_a_folder_that_cannot_be_written_is_one_sentence(run_dir, codes, sentence):
    config = {"mode": "ddp", "cluster": {**CLUSTER, "timeout_s": 3}, "start": False}
    with Hosts(2) as hosts, start_ranks(hosts, [0, 1], **config) as ranks:
        ranks.start(0)
        ranks.start(1, "--set", f"logging.run_dir={run_dir}")
        assert ranks.wait() == codes
        assert ends_with(ranks, 1, sentence)
        assert codes[0] == 1 or ends_with(ranks, 0, f"rank 1 failed: UnsupportedConfiguration: {sentence}")


def test_a_trainer_joins_from_a_further_host():
    training = {"max_steps": None, "max_epochs": 8, "batch_size": 8, "validate_every": 0, "uneven_inputs": "join"}
    config = {"mode": "rpc", "training": training, "cluster": {**CLUSTER, "elastic": True}, **PACED}
    with Hosts(3) as hosts, start_ranks(hosts, [0, 1, 1], **config) as ranks:
        ranks.wait_for(lambda: ranks.step() >= 5)
        # Its config has the values that the others have by flags.
        write_configs(hosts, [2], **config, logging={"name": "run"})
        words = ["runs/run", "--config", FOLDER / "config.yaml", "--master_port", PORT]
        ranks.runs[3] = hosts.fork(2, [*words, "--master_addr", hosts.address(0)], "elastic", "join_main")
        run = ranks.finish()
        assert run.summary["num_trainers"] == 3
        assert run.summary["samples"] == 8 * 256
        assert files_of(hosts, 2) == ["logs/rank-3.log"]


def test_simulations_reach_trainers_on_other_hosts():
    """Each host of a rank needs the keys; one without them ends the run at once, on all hosts."""
    simulations = {
        "function": f"{HELPERS / 'simulations.py'}:simulate",
        "count": 3,
        "at_once": 3,
        "steps": 8,
        "fields": {"u": {"shape": list(SHAPE), "finite": True}},
        "parameters": {"a": [0.0, 1.0], "b": [2.0, 3.0]},
        "keys": "keys",
    }
    training = {"max_steps": None, "batch_size": 4, "validate_every": 0, "uneven_inputs": "join"}
    with Hosts(2, ipv6=True) as hosts:
        config = {"mode": "rpc", "simulations": {**simulations, "address": hosts.address(0)}, "training": training}
        config |= {"task": f"{HELPERS / 'stream_tasks.py'}:Fed", "task_args": {"ledger": "."}, "cluster": CLUSTER}
        with hosts.fork(0, ["keys"], "cli", "keys_main") as made:
            assert made.wait() == 0
        with start_ranks(hosts, [0, 0, 1], **config) as ranks:
            assert ranks.wait(15) == [2, 2, 2]  # less than cluster.timeout_s
            assert ends_with(
                ranks, 0, "rank 2 failed: UnsupportedConfiguration: simulations.keys (keys) must be a folder"
            )
        shutil.copytree(hosts.path(0, FOLDER / "keys"), hosts.path(1, FOLDER / "keys"))
        with start_ranks(hosts, [0, 0, 1], **config) as ranks:
            run = ranks.finish()
            assert run.summary["samples"] == 3 * 8
            assert f"clients reach this run at tcp://[{hosts.address(0)}]:" in ranks.output(0)
            served = [
                len(hosts.path(host, FOLDER / f"trainer-{i}").read_text().splitlines()) for i, host in enumerate((0, 1))
            ]
            assert served == [12, 12]


# A link that is cut.


@contextmanager
def cut_link(ranks, host, at_step):
    """Cut the link of a host once the run has made that step; restore it at the end of the block."""
    ranks.wait_for(lambda: ranks.step() >= at_step)
    ranks.hosts.cut(host)
    try:
        yield
    finally:
        ranks.hosts.restore(host)


def pause(seconds):
    """Let a link be cut for so long."""
    time.sleep(seconds)  # the fault itself: nothing is waited for


@pytest.mark.parametrize(("mode", "placement"), [("ddp", [0, 1]), ("rpc", [0, 1, 0])])
def test_a_link_that_returns_in_time_changes_nothing(tmp_path, mode, placement):
    training = {"training": {"max_steps": 30, "batch_size": 8, "validate_every": 0}}
    whole = train(tmp_path, mode, 2, **training)
    with Hosts(2) as hosts, start_ranks(hosts, placement, mode=mode, cluster=CLUSTER, **PACED, **training) as ranks:
        with cut_link(ranks, 1, at_step=10):
            cut_at = ranks.step()  # on a busy machine some steps after the tenth
            pause(1.0)
            assert ranks.step() <= cut_at + 2
        run = ranks.finish()
        assert run.summary["faults"] == []
        assert differing_tensors(whole.load("model"), run.load("model")) == []
        assert differing_tensors(whole.load("optimizer"), run.load("optimizer")) == []


def test_a_trainer_whose_link_returns_late_joins_again():
    training = {"max_steps": None, "max_epochs": 6, "batch_size": 8, "validate_every": 0, "uneven_inputs": "join"}
    config = {"mode": "rpc", "training": training, "server": {"lost_after_s": 1.5}, **PACED}
    with Hosts(3) as hosts, start_ranks(hosts, [0, 1, 2], cluster=CLUSTER, **config) as ranks:
        with cut_link(ranks, 2, at_step=10):
            ranks.wait_for(lambda: ranks.step() >= 30)  # the other one continues
        run = ranks.finish()
        assert run.summary["restarts"] == 1
        assert run.summary["samples"] == 6 * 256
        assert [record["incarnation"] for record in run.of_kind("joined") if record["trainer"] == 1][-1] == 2


def test_a_link_of_a_server_that_returns_late_returns_all_to_the_last_checkpoint(tmp_path):
    """Bit for bit: also where another server notices the loss first, and connects again before server 0 notices it."""
    training = {"training": {"max_steps": 40, "batch_size": 8, "validate_every": 0}}
    config = {"cluster": {**CLUSTER, "num_servers": 2}, "checkpoint": {"every": 5}, **training}
    whole = train(tmp_path, "rpc", 2, **config)
    server = {"lost_after_s": 1.5}
    with Hosts(3) as hosts, start_ranks(hosts, [0, 1, 0, 2], mode="rpc", server=server, **PACED, **config) as ranks:
        with cut_link(ranks, 0, at_step=12):
            ranks.wait_for(lambda: "this process joins again" in ranks.output(1), 20)
        run = ranks.finish()
        assert run.summary["faults"] != []
        assert differing_tensors(whole.load("model"), run.load("model")) == []
        assert differing_tensors(whole.load("optimizer"), run.load("optimizer")) == []


ALONE = {
    "ddp": ["rank 1 is lost: it gave no sign of life", "rank 0 is lost: it gave no sign of life"],
    "rpc": ["all trainers are lost, and none joined again", "rank 1 found no rank 0 at 10.99.0.1:29500"],
}


@pytest.mark.parametrize("mode", ["ddp", "rpc"])
def test_a_link_that_does_not_return_ends_the_run_on_both_sides(mode):
    cluster = {"num_trainers": 2 if mode == "ddp" else 1, "timeout_s": 3}
    training = {"max_steps": 10000, "batch_size": 8, "validate_every": 0}
    config = {"mode": mode, "training": training, "server": {"lost_after_s": 1.0}, **PACED}
    with Hosts(2) as hosts, start_ranks(hosts, [0, 1], cluster=cluster, **config) as ranks:
        with cut_link(ranks, 0, at_step=10):
            assert ranks.wait(30) == [1, 1]
        assert [ends_with(ranks, rank, sentence) for rank, sentence in enumerate(ALONE[mode])] == [True, True]


# Launchers.


@pytest.mark.nightly
@pytest.mark.parametrize(("mode", "ipv6"), [("ddp", False), ("rpc", True)])
def test_torchrun_over_two_hosts(one_host, mode, ipv6):
    trainers = 4 if mode == "ddp" else 3
    config = {"mode": mode, "cluster": {"timeout_s": 60}, **RUN}
    words = "-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-id a --rdzv-endpoint"
    words = [sys.executable, *words.split(), f"{name_of(0)}:{PORT}", "-m", "paramserver.launch"]
    words += ["--config", str(FOLDER / "config.yaml"), "--set", "logging.name=run"]
    whole = one_host(mode, trainers=trainers)
    with Hosts(2, ipv6=ipv6) as hosts:
        write_configs(hosts, [0, 1], **config)
        nodes = [hosts.start(number, words, environment()) for number in (0, 1)]
        outputs = [node.communicate(timeout=120)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], outputs
        run = FinishedRun(0, outputs[0], hosts.path(0, FOLDER / "runs" / "run"))
        assert_equal_runs(whole, run, trainers=trainers)
        assert files_of(hosts, 1) == ["logs/rank-2.log", "logs/rank-3.log"]
        assert min(hosts.moved_bytes(number) for number in (0, 1)) > 2 * written_bytes(whole)


def test_a_server_and_a_trainer_on_each_host(one_host):
    cluster = {"colocate": True, "timeout_s": 60}
    with Hosts(2) as hosts, start_ranks(hosts, [0, 1], mode="rpc", cluster=cluster, **RUN) as ranks:
        assert_equal_runs(one_host("rpc", servers=2), ranks.finish(), trainers=2)
        assert files_of(hosts, 1) == ["logs/rank-1.log", "logs/rank-3.log"]


# The hosts themselves.


def test_hosts_share_no_files_and_are_gone_after_a_failure():
    with Hosts(2) as hosts:
        for folder in ("/tmp", "/dev/shm", FOLDER):
            hosts.path(0, folder).joinpath("file").write_text("of host 0")
            assert not hosts.path(1, folder).joinpath("file").exists()
        assert [hosts.run(number, "hostname").strip() for number in (0, 1)] == ["node0", "node1"]
    failing = FailsAtTheLast(3)
    with pytest.raises(ZeroDivisionError):
        failing.__enter__()
    assert [Path(f"/proc/{pid}").exists() for pid in failing.pids] == [False, False]


class FailsAtTheLast(Hosts):
    pids = ()

    def _make_host(self, number):
        if number == 2:
            raise ZeroDivisionError
        host = super()._make_host(number)
        self.pids = (*self.pids, host.pid)
        return host


def test_hosts_are_skipped_by_name_where_they_are_not_permitted(monkeypatch):
    def refuse():
        raise UnsupportedConfiguration("this user is not root")

    monkeypatch.setattr("paramserver.tools.bench.processes.require_network_namespaces", refuse)
    with pytest.raises(pytest.skip.Exception, match="no hosts on this machine: this user is not root"):
        Hosts(1).__enter__()

"""The command ``paramserver doctor``: on one machine, and between hosts in network namespaces."""

import json
import subprocess
import sys
from contextlib import ExitStack
from functools import partial

import pytest
from launching import environment, fork_server, free_port, run_concurrently, write_config

from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.bench.processes import NetworkHosts, host_address, require_network_namespaces

DOCTOR = [sys.executable, "-m", "paramserver.cli", "doctor"]
pytestmark = pytest.mark.processes


def start(words, folder, **options):
    """A doctor; its output is read by ``ended``."""
    pipe = subprocess.PIPE
    return subprocess.Popen([*words], cwd=folder, env=environment(), stdout=pipe, stderr=pipe, text=True, **options)


def ended(process):
    output, errors = process.communicate(timeout=100)
    return process.returncode, output, errors


def doctor(folder, *words):
    """The exit code and all output of a doctor that is a fork."""
    return fork_server().run(words, folder, 100, environment(), program="tools.doctor.command")


def test_one_machine_without_a_config(tmp_path):
    code, output, errors = ended(start(DOCTOR, tmp_path))
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert lines[0].startswith("paramserver doctor: ")
    assert [line for line in lines if line in ("machine", "choices", "deadlines")] == [
        "machine",
        "choices",
        "deadlines",
    ]
    assert max(len(line) for line in lines if "/" not in line) <= 80
    assert list(tmp_path.iterdir()) == []


def test_flags_count_without_a_config_too(tmp_path):
    flags = ["--num_servers", "2", "--num_trainers", "3", "--master_port", str(port := free_port()), "--json"]
    code, output = doctor(tmp_path, *flags)
    started = json.loads(output)["choices"]
    assert (code, len(started["devices"]["value"])) == (0, 5)
    assert started["rank 0"]["value"] == {"host": "127.0.0.1", "port": port}
    code, output = doctor(tmp_path, "--role", "server", "--index", "2", *flags)
    assert code == 2
    assert output.startswith("error: --index (2) must be below the number of servers (2)")


def test_a_problem_sets_the_exit_code_and_comes_first(tmp_path):
    config = write_config(tmp_path, mode="rpc", cluster={"interface": "eth99"})
    code, output = doctor(tmp_path, "--config", config, "--json")
    content = json.loads(output)
    assert code == content["exit_code"] == 1
    assert next(iter(content)) == "problems"
    (problem,) = content["problems"]
    assert problem["text"].startswith("cluster.interface (eth99) must be a network interface of this machine")
    assert content["deadlines"]["wait_s"] == 30.0


@pytest.mark.parametrize(
    "words", [["--config", "none.yaml"], ["--set", "mode=none"], ["--rank", "5", "--world_size", "3"]]
)
def test_wrong_input_is_one_sentence(words, tmp_path):
    code, output = doctor(tmp_path, *words)
    assert code == 2
    assert output.startswith("error: ")
    assert "Traceback" not in output


def test_ranks_of_one_host_meet_and_a_missing_one_is_named(tmp_path):
    config = write_config(tmp_path, mode="rpc", cluster={"timeout_s": 3})
    common = ["--config", config, "--world_size", 3, "--master_port", free_port(), "--json"]
    (code, output), (other_code, other_output) = run_concurrently(
        *(partial(doctor, tmp_path, *common, "--rank", rank) for rank in (0, 1))
    )
    assert code == other_code == 1
    assert "{" not in other_output  # rank 0 prints for all
    errors, begin, text = output.partition("{")
    content = json.loads(begin + text)
    assert [one["text"] for one in content["problems"]] == ["rank 2 did not arrive within cluster.timeout_s (3 s)"]
    (host,) = content["hosts"].values()
    assert host["ranks"] == [0, 1]
    assert "links" not in content
    assert "waiting up to 3 s for all 3 ranks" in errors


def test_a_rank_that_finds_no_rank_0_says_so(tmp_path):
    config = write_config(tmp_path, mode="rpc", cluster={"timeout_s": 2})
    words = ["--config", config, "--rank", 1, "--world_size", 3, "--master_port", free_port()]
    code, output = doctor(tmp_path, *words)
    assert code == 1
    assert "rank 1 found no rank 0 at 127.0.0.1" in " ".join(output.split())


@pytest.mark.nightly
def test_hosts_that_do_not_reach_each_other_are_named(tmp_path):
    """Three hosts in mode ddp; the second and third reach the first, and not each other."""
    try:
        require_network_namespaces()
    except UnsupportedConfiguration as error:
        pytest.skip(str(error))
    config = write_config(tmp_path, mode="ddp", cluster={"master_addr": host_address(0), "timeout_s": 30})
    words = [*DOCTOR, "--config", str(config), "--world_size", "3", "--json"]
    with ExitStack() as stack:
        network = stack.enter_context(NetworkHosts(3, 12.5e6))
        cut = ["ip", "route", "add", "unreachable", host_address(2)]
        subprocess.run(network.command_on(1, cut), check=True, timeout=30)
        processes = [start(network.command_on(rank, [*words, "--rank", str(rank)]), tmp_path) for rank in range(3)]
        results = [ended(process) for process in processes]
    assert [code for code, _, _ in results] == [1, 1, 1], results
    content = json.loads(results[0][1])
    first, second = (one["text"] for one in content["problems"])
    assert f"({host_address(1)}) cannot connect to " in first
    assert f"({host_address(2)}): No route to host" in first
    assert f"({host_address(1)}): no answer within 5 s" in second
    links = {(one["source"], one["target"]): one for one in content["links"].values()}
    assert len(links) == 6
    for pair in ((0, 1), (1, 0), (0, 2), (2, 0)):
        # The interfaces are limited to 12.5 MB/s; a burst may pass at once.
        assert 1e6 < links[pair]["bytes_per_s"] < 20e6, links[pair]
        assert links[pair]["round_trip_s"] < 1
    assert [host["address"] for host in content["hosts"].values()] == [host_address(n) for n in range(3)]
    assert {host["interface"] for host in content["hosts"].values()} == {"eth0"}

"""Hosts of one machine: who may make them, how fast they are, and that nothing of them is left."""

import select
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from launching import environment, write_config

from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.bench import processes as network
from paramserver.tools.bench.cases import RequestedCases, make_cases
from paramserver.tools.bench.measure import MeasuringMethod, rank_commands
from paramserver.tools.bench.processes import NetworkHosts, host_address, parse_bandwidth, require_network_namespaces


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("100mbit", 12.5e6), ("1gbit", 125e6), (" 2.5Mbit ", 312500), ("800kbit", 1e5)]
)
def test_bandwidths_are_read_in_bits_and_reported_in_bytes(text, bytes_per_s):
    assert parse_bandwidth(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("text", ["", "100", "0mbit", "-1mbit", "100mb", "fast", "1e3mbit"])
def test_what_is_no_bandwidth_is_refused(text):
    with pytest.raises(UnsupportedConfiguration, match="must be a number above 0 and one of kbit, mbit, gbit"):
        parse_bandwidth(text)


def test_every_host_has_an_address_of_its_own():
    assert len({host_address(number) for number in range(1000)}) == 1000
    assert (host_address(0), host_address(250)) == ("10.99.0.1", "10.99.1.1")


def test_who_may_not_make_hosts_is_reported_why(monkeypatch):
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network.shutil, "which", lambda tool: f"/sbin/{tool}")
    with pytest.raises(UnsupportedConfiguration, match=r"needs root .* \(this user is not root\)"):
        require_network_namespaces()
    monkeypatch.setattr(network.shutil, "which", lambda tool: None)
    with pytest.raises(UnsupportedConfiguration, match=r"\(ip of iproute2 is missing\)"):
        require_network_namespaces()


class Namespaces:
    """A fake of the namespaces that records the commands in each, and may fail at one."""

    def __init__(self, fails_at=None):
        self.commands, self.made, self.closed, self.fails_at = [], 0, 0, fails_at

    def __call__(self):
        self.made += 1
        return Pretended(self, 1000 + self.made)


class Pretended:
    def __init__(self, made, pid):
        self.made, self.pid = made, pid

    def command_in(self, *command):
        return ["in", str(self.pid), *command]

    def run(self, *command):
        self.made.commands.append(" ".join(self.command_in(*command)))
        if self.made.fails_at is not None and self.made.fails_at in self.made.commands[-1]:
            raise UnsupportedConfiguration("--bandwidth: not allowed")

    def close(self):
        self.made.closed += 1


@pytest.fixture
def pretended(monkeypatch):
    def pretend(**options):
        made = Namespaces(**options)
        monkeypatch.setattr(network, "require_network_namespaces", lambda: None)
        monkeypatch.setattr(network, "Namespace", made)
        return made

    return pretend


def test_both_ends_of_each_interface_have_the_bandwidth(pretended):
    made = pretended()
    with NetworkHosts(3, 12.5e6):
        limits = [line for line in made.commands if " tc qdisc add " in line]
        assert len(limits) == 6
        assert all("rate 100000000bit" in line for line in limits)
        assert sum("dev eth0" in line for line in limits) == 3
    assert made.made == made.closed == 4


def test_hosts_that_could_not_be_made_are_released(pretended):
    made = pretended(fails_at="tc qdisc")
    with pytest.raises(UnsupportedConfiguration, match=r"^--bandwidth: not allowed"):
        NetworkHosts(2, 1e6).__enter__()
    assert made.made == made.closed == 2


def test_a_tool_that_fails_is_reported_in_one_sentence(monkeypatch):
    with pytest.raises(UnsupportedConfiguration, match=r"^--bandwidth: sh .* failed \(not allowed\); leave it out"):
        network._run(["sh", "-c", "echo more; echo not allowed >&2; exit 1"])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError):
        network._run(["ip"])  # who may make hosts was checked before


def test_ranks_that_communicate_have_a_host_each_and_others_none(tmp_path, pretended):
    cases = {case.name: case for case in make_cases(RequestedCases(write_config(tmp_path)))}
    method = MeasuringMethod(tmp_path, [tmp_path], {}, 1.0, 1.0)
    alone = rank_commands(cases["rpc 2 trainers"], method, tmp_path / "c.yaml")
    assert len(alone) == 1
    assert "--rank" not in alone[0]
    pretended()
    hosts = NetworkHosts(3, 1e6)
    hosts.__enter__()
    with_hosts = replace(method, hosts=hosts)
    ranks = rank_commands(cases["rpc 2 trainers"], with_hosts, tmp_path / "c.yaml")
    assert [words[words.index("--rank") + 1] for words in ranks] == ["0", "1", "2"]
    assert len({tuple(words[:3]) for words in ranks}) == 3
    assert all(words[words.index("--master_addr") + 1] == host_address(0) for words in ranks)
    assert rank_commands(cases["local"], with_hosts, tmp_path / "c.yaml")[0][:3] != ranks[0][:3]


def namespaces():
    """Those of all processes that can be looked at."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        with suppress(OSError):  # it has ended, or belongs to another user
            found.add(str(link.readlink()))
    return found


def wait_until_gone(held):
    deadline = time.monotonic() + 30
    while namespaces() & held:
        assert time.monotonic() < deadline, "namespaces are left"
        select.select([], [], [], 0.05)


def own(hosts):
    return {str(Path(f"/proc/{one.pid}/ns/net").readlink()) for one in (*hosts._hosts, hosts._switch)}


@pytest.mark.processes
def test_hosts_reach_each_other_and_are_gone_at_the_end_or_are_refused():
    refused, held = "", set()
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(NetworkHosts(2, 12.5e6))
        except UnsupportedConfiguration as error:  # no root, no iproute2, or a container that allows none
            refused = str(error)
        else:
            held = own(hosts)
            assert len(held) == 3
            assert held <= namespaces()
            check_traffic(hosts)
    wait_until_gone(held)
    assert not refused or refused.startswith("--bandwidth")


KILLED = """
import os, signal, sys
from paramserver.tools.bench.processes import NetworkHosts
from paramserver.errors import UnsupportedConfiguration
hosts = NetworkHosts(2, 12.5e6)
try:
    hosts.__enter__()
except UnsupportedConfiguration:
    sys.exit(0)
print(*[os.readlink(f"/proc/{one.pid}/ns/net") for one in (*hosts._hosts, hosts._switch)], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_nothing_is_left_of_the_hosts_of_a_process_that_was_killed():
    done = subprocess.run(
        [sys.executable, "-c", KILLED], env=environment(), capture_output=True, text=True, timeout=150
    )
    assert (done.returncode, len(done.stdout.split())) in ((-9, 3), (0, 0)), done.stderr
    wait_until_gone(set(done.stdout.split()))
    assert not list(Path("/run/netns").glob("bench*"))


def check_traffic(hosts):
    moved = hosts.moved_bytes(1)
    send = f"import socket; socket.create_connection(('{host_address(0)}', 5000)).sendall(bytes(10**6))"
    take = (
        "import socket; s = socket.create_server(('', 5000)); print(flush=True); c = s.accept()[0]\n"
        "while c.recv(1 << 20): pass"
    )
    with subprocess.Popen(hosts.command_on(0, [sys.executable, "-c", take]), stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        subprocess.run(hosts.command_on(1, [sys.executable, "-c", send]), check=True, timeout=30)
        assert server.wait(30) == 0
    assert 10**6 <= hosts.moved_bytes(1) - moved < 1.2e6

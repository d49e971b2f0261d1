"""Addresses, interfaces, and the environment of a child."""

import errno
import os
import socket
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from paramserver.cluster import (
    SUPERVISED,
    bind_interface,
    bind_listener,
    child_environment,
    choose_interface,
    chosen_interface,
    is_loopback,
    network,
    own_address,
    process_environ,
)
from paramserver.cluster.network import DEFAULT_PORT, list_interfaces, producer_environment
from paramserver.cluster.slurm import in_slurm_allocation
from paramserver.errors import UnsupportedConfiguration


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "LOCALHOST", "ip6-localhost"])
def test_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "10.0.0.1", "::", "node0", "localhost.example.org", "128.0.0.1"])
def test_not_loopback(host):
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_ranks_of_one_machine_listen_where_no_other_machine_reaches_them(host):
    environ = {}
    choose_interface(environ, None, host)
    (addresses,) = [one.addresses for one in list_interfaces() if one.name == chosen_interface(environ)]
    assert addresses
    assert all(map(is_loopback, addresses))


def test_the_default_port_is_that_of_the_launcher_of_torch():
    (option,) = [action for action in get_args_parser()._actions if action.dest == "master_port"]
    assert f"Defaults to {DEFAULT_PORT}." in option.help or option.default == DEFAULT_PORT


def test_both_transports_are_bound_to_the_interface():
    environ = {"TP_SOCKET_IFNAME": "eth9", "OTHER": "1"}
    bind_interface(environ, "lo")
    assert environ == {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "OTHER": "1"}


class Machine:
    """A fake of this machine's interfaces and of its routes."""

    def __init__(self, monkeypatch, interfaces, routes=()):
        self.routes = dict(routes)
        monkeypatch.setattr(network, "_interface_addresses", lambda: [one for one in interfaces if one[1]])
        monkeypatch.setattr(socket, "if_nameindex", lambda: [(i, one[0]) for i, one in enumerate(interfaces)])
        monkeypatch.setattr(network, "_route_to", self.route_to)

    def route_to(self, host):
        if host not in self.routes:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.routes[host]


INTERFACES = [("lo", "127.0.0.1"), ("eth0", "10.0.0.2"), ("ib0", "10.1.0.2"), ("eth1", "fd00::2"), ("eth2", "")]


@pytest.mark.parametrize(
    ("configured", "master_addr", "given", "chosen"),
    [
        ("ib0", "10.0.0.1", {}, "ib0 ib0"),
        ("ib0", "127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth0"}, "ib0 ib0"),
        (None, "127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth0"}, "lo lo"),
        (None, "10.0.0.1", {}, "eth0 eth0"),
        (None, "node0", {}, "eth1 eth1"),
        (None, "10.0.0.1", {"GLOO_SOCKET_IFNAME": "ib0"}, "ib0 ib0"),
        (None, "10.0.0.1", {"TP_SOCKET_IFNAME": "ib0"}, "ib0 ib0"),
        (None, "10.0.0.1", {"GLOO_SOCKET_IFNAME": "ib0,eth0"}, "ib0,eth0 ib0"),
        (None, "10.0.0.1", {"GLOO_SOCKET_IFNAME": "ib0", "TP_SOCKET_IFNAME": "eth0"}, "ib0 eth0"),
        (None, "unknown", {}, " "),
    ],
)
def test_the_interface_is_that_of_the_config_of_the_user_or_of_the_route(
    monkeypatch, configured, master_addr, given, chosen
):
    Machine(monkeypatch, INTERFACES, {"10.0.0.1": "10.0.0.2", "node0": "fd00::2"})
    environ = dict(given)
    choose_interface(environ, configured, master_addr)
    variables = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    assert " ".join(environ.get(name, "") for name in variables) == chosen
    assert chosen_interface(environ) == (chosen.split(" ")[0].split(",")[0] or None)
    before = dict(environ)
    choose_interface(environ, configured, master_addr)  # once more, when the name of rank 0 is known
    assert environ == before


@pytest.mark.parametrize(
    ("configured", "given", "message"),
    [
        ("eth9", {}, r"^cluster.interface \(eth9\) must be a network interface of this machine \(lo, eth0, ib0, "),
        (None, {"GLOO_SOCKET_IFNAME": "eth0,eth9"}, r"^GLOO_SOCKET_IFNAME \(eth9\) must be a network interface"),
        ("eth2", {}, r"^cluster.interface \(eth2\) must be an interface with an address, and has none"),
    ],
)
def test_an_interface_that_nothing_can_listen_on_is_refused(monkeypatch, configured, given, message):
    Machine(monkeypatch, INTERFACES)
    with pytest.raises(UnsupportedConfiguration, match=message):
        choose_interface(given, configured, "10.0.0.1")


def test_a_name_of_rank_zero_that_is_loopback_here_is_named_in_a_warning(monkeypatch, caplog):
    Machine(monkeypatch, INTERFACES, {"node0": "127.0.0.1"})
    environ = {}
    choose_interface(environ, None, "node0")
    assert environ["TP_SOCKET_IFNAME"] == "lo"
    assert "cluster.master_addr (node0) is a loopback address on this host" in caplog.text


def test_the_addresses_of_an_interface_are_those_of_the_family_of_the_host(monkeypatch):
    Machine(monkeypatch, [("eth0", "10.0.0.2"), ("eth0", "fd00::2"), ("eth1", "fd00::3")])
    assert own_address("10.0.0.1", "eth0") == own_address("node0", "eth0") == "10.0.0.2"
    assert own_address("fd00::1", "eth0") == "fd00::2"
    assert own_address("10.0.0.1", "eth1") == "fd00::3"


def test_the_addresses_of_this_machine_include_those_of_loopback():
    found = network._interface_addresses()
    assert ("lo", "127.0.0.1") in found
    assert {name for name, _ in found} <= {name for _, name in socket.if_nameindex()}
    assert not any(address.startswith("fe80") for _, address in found)


@pytest.mark.parametrize(("host", "address"), [("[::1]", "::1"), ("::1", "::1"), ("127.0.0.2", "127.0.0.2")])
def test_a_listener_has_the_family_of_its_address(host, address):
    with bind_listener(host, 0) as listener:
        assert listener.getsockname()[0] == address


def test_loopback_that_is_down_is_named_at_once(monkeypatch):
    """As in a network namespace of a sandbox, where one can listen and none connect."""

    def fail(address):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(network, "_route_to", fail)
    number = errno.ENETUNREACH
    with pytest.raises(UnsupportedConfiguration, match=r"the interface lo must be up, .*\(127\.0\.0\.1\) .*ip link"):
        bind_listener("127.0.0.1", 0)
    number = errno.EPERM
    bind_listener("127.0.0.1", 0).close()


@pytest.mark.parametrize(("interface", "address"), [("eth0", "0.0.0.0"), ("lo", "127.0.1.1"), (None, "127.0.1.1")])
def test_a_name_that_is_loopback_here_is_served_where_others_look_for_it(monkeypatch, interface, address):
    known = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known)
    with bind_listener("node0", 0, interface) as listener:
        assert listener.getsockname()[0] == address


def test_a_child_gets_a_copy_with_the_allocator_tuned_and_output_unbuffered():
    environ = {"HOME": "/h"}
    child = child_environment(environ, num_trainers=2)
    assert environ == {"HOME": "/h"}
    assert child["HOME"] == "/h"
    assert child["PYTHONUNBUFFERED"] == "1"
    assert {name: value for name, value in child.items() if name.startswith("MALLOC_")} == {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "MALLOC_TRIM_THRESHOLD_": "536870912",
        "MALLOC_TOP_PAD_": "67108864",
    }


def test_variables_of_the_user_are_kept():
    own = {"OMP_NUM_THREADS": "7", "MALLOC_ARENA_MAX": "4", "MALLOC_TOP_PAD_": "0"}
    child = child_environment(own, num_trainers=2)
    assert {name: child[name] for name in own} == own
    assert child["MALLOC_TRIM_THRESHOLD_"] == "536870912"


@pytest.mark.parametrize(("cores", "trainers", "threads"), [(8, 3, "2"), (2, 3, "1"), (16, 1, "16"), (9, 3, "3")])
def test_the_cores_are_divided_among_the_trainers(monkeypatch, cores, trainers, threads):
    monkeypatch.setattr(network, "num_usable_cores", lambda: cores)
    assert child_environment({}, num_trainers=trainers)["OMP_NUM_THREADS"] == threads


def test_a_program_that_is_no_rank_gets_the_variables_of_the_user_and_not_of_the_launcher():
    user = {"HOME": "/h", "MALLOC_ARENA_MAX": "4"}
    rank = child_environment(user, num_trainers=1)
    rank[SUPERVISED] = "1"
    program = producer_environment(rank, {"PARAMSERVER_MEMBER": "1"})
    assert program == {
        **user,
        "OMP_NUM_THREADS": "1",
        "PARAMSERVER_MEMBER": "1",
        "PYTHONPATH": rank["PYTHONPATH"],
        "PYTHONUNBUFFERED": "1",
    }
    threads = child_environment({"OMP_NUM_THREADS": "3"}, num_trainers=1)
    assert producer_environment(threads, {})["OMP_NUM_THREADS"] == "3"


def test_a_slurm_allocation_is_detected_by_its_job():
    assert in_slurm_allocation({"SLURM_JOB_ID": "7"})
    assert not in_slurm_allocation({"SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": ""})


def test_only_cores_that_this_process_may_use_are_counted():
    threads = child_environment({}, num_trainers=1)["OMP_NUM_THREADS"]
    assert int(threads) == len(os.sched_getaffinity(0))


def test_the_folders_of_the_task_come_first_on_the_path(tmp_path, monkeypatch):
    current, config = tmp_path / "current", tmp_path / "config"
    environ = {"PYTHONPATH": os.pathsep.join(["/site", "", str(config), "/more"])}
    child = child_environment(environ, num_trainers=1, folders=[current, config])
    assert child["PYTHONPATH"].split(os.pathsep) == [str(current), str(config), "/site", "/more"]
    monkeypatch.chdir(tmp_path)
    assert child_environment({}, num_trainers=1, folders=[Path("config")])["PYTHONPATH"] == str(config)
    assert child_environment({}, num_trainers=1)["PYTHONPATH"] == str(tmp_path)


def test_the_environment_of_the_process_can_be_written(own_environ, monkeypatch):
    monkeypatch.setenv("PARAMSERVER_TEST", "1")
    assert process_environ()["PARAMSERVER_TEST"] == "1"
    bind_interface(process_environ(), "lo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_the_own_address_is_of_the_same_scope_as_the_host():
    assert own_address("127.0.0.1") == own_address("127.8.9.1") == "127.0.0.1"
    assert own_address("host.invalid", "lo") == "127.0.0.1"  # the interface decides, and no name is resolved
    assert own_address("localhost") == "127.0.0.1"


def test_an_unreachable_address_is_refused(monkeypatch):
    def unknown(*args, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UnsupportedConfiguration, match=r"cluster.master_addr \(node7\) must be an address that this"):
        own_address("node7")

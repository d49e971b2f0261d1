"""Addresses, interfaces, and the environment of a child."""

import os
import socket
from pathlib import Path

import pytest

from paramserver.cluster import (
    DEFAULT_PORT,
    bind_interface,
    child_environment,
    is_loopback,
    loopback_interface,
    mark_supervised,
    own_address,
    process_environ,
)
from paramserver.cluster.network import producer_environment
from paramserver.cluster.simulation import in_slurm_allocation
from paramserver.errors import UnsupportedConfiguration


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "LOCALHOST", "ip6-localhost"])
def test_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "10.0.0.1", "::", "node0", "localhost.example.org", "128.0.0.1"])
def test_not_loopback(host):
    assert not is_loopback(host)


def test_the_loopback_interface_is_one_of_this_machine():
    assert (Path("/sys/class/net") / loopback_interface()).exists()
    assert DEFAULT_PORT == 29500


def test_both_transports_are_bound_to_the_interface():
    environ = {"TP_SOCKET_IFNAME": "eth9", "OTHER": "1"}
    bind_interface(environ, "lo")
    assert environ == {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "OTHER": "1"}


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
    child = child_environment(own, num_trainers=2, cores=64)
    assert {name: child[name] for name in own} == own
    assert child["MALLOC_TRIM_THRESHOLD_"] == "536870912"


@pytest.mark.parametrize(("cores", "trainers", "threads"), [(8, 3, "2"), (2, 3, "1"), (16, 1, "16"), (9, 3, "3")])
def test_the_cores_are_divided_among_the_trainers(cores, trainers, threads):
    assert child_environment({}, num_trainers=trainers, cores=cores)["OMP_NUM_THREADS"] == threads


def test_a_program_that_is_no_rank_gets_the_variables_of_the_user_and_not_of_the_launcher():
    user = {"HOME": "/h", "MALLOC_ARENA_MAX": "4"}
    rank = child_environment(user, num_trainers=1, cores=8)
    mark_supervised(rank)
    program = producer_environment(rank, {"PARAMSERVER_MEMBER": "1"})
    assert program == {
        **user,
        "OMP_NUM_THREADS": "1",
        "PARAMSERVER_MEMBER": "1",
        "PYTHONPATH": rank["PYTHONPATH"],
        "PYTHONUNBUFFERED": "1",
    }
    threads = child_environment({"OMP_NUM_THREADS": "3"}, num_trainers=1, cores=8)
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

"""What one machine offers and what would be chosen on it, with limits, folders and addresses that are wrong."""

import resource
import socket
import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest

from paramserver.cluster import RankFlags, bind_listener, resolve_identity
from paramserver.config import ClusterConfig, Config, DeviceConfig, LoggingConfig, ServerConfig, TrainingConfig
from paramserver.distributed import session
from paramserver.tools.doctor import machine
from paramserver.tools.doctor.diagnosis import Diagnosis
from paramserver.tools.doctor.machine import describe_choices, describe_deadlines, describe_machine


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """The interface is bound in a copy of the environment."""
    variables = {}
    monkeypatch.setattr(machine, "process_environ", lambda: variables)


@pytest.fixture
def config(tmp_path):
    return Config(task="task.py:Task", logging=LoggingConfig(run_dir=str(tmp_path / "runs")))


def machine_of(config, environ=None):
    found = Diagnosis()
    describe_machine(found, config, environ or {})
    return found


def choices_of(config, identity=None, environ=None):
    found = Diagnosis()
    address = describe_choices(found, config, identity, environ or {})
    return found, address


def facts(found):
    return {fact.name: f"{fact.text} ({fact.why})" if fact.why else fact.text for fact in found.subjects[0].facts}


def problems(found):
    return [f"{one.text}; {one.cure}" for one in found.problems]


def test_this_machine_is_described(config, tmp_path):
    found = machine_of(config)
    shown = facts(found)
    assert found.problems == []
    assert shown["torch.distributed"].startswith("rpc, gloo, ")
    assert shown["interface lo"].startswith("127.0.0.1")
    assert shown["run folder"].startswith(f"{tmp_path}/runs: can be made")
    assert list(tmp_path.iterdir()) == []  # nothing is left
    assert max(map(len, found.to_text().splitlines())) <= 80 + len(str(tmp_path))


def test_the_variables_of_launchers_are_listed(config):
    found = machine_of(config, {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "HOME": "/root", "RANK": "2"})
    assert facts(found)["launcher"] == "RANK=2, SLURM_PROCID=1, SLURM_JOB_ID=7"


def test_gpus_of_the_allocation_that_torch_does_not_see(config, monkeypatch):
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    environ = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}
    (problem,) = problems(machine_of(config, environ))
    assert problem.startswith(
        "this allocation has 4 GPU(s) on this host (SLURM_GPUS_ON_NODE), and torch sees 0 of them"
    )
    assert problems(machine_of(replace(config, device=DeviceConfig(kind="cpu")), environ)) == []


def test_a_name_server_that_answers_late(config, monkeypatch):
    monkeypatch.setattr(machine, "_SLOW_LOOKUP_S", 0.0)
    found = machine_of(config)
    (note,) = [one for one in found.findings if "name server" in one.text]
    assert note.cure == "correct /etc/resolv.conf, or name rank 0 by its address"
    assert facts(found)["name of an address"].endswith(" s (of a connection, asked of a name server)")


def test_a_name_server_that_does_not_answer(config, monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(machine, "_LOOKUP_S", 0.5)
    monkeypatch.setattr(socket, "getnameinfo", lambda *question: answered.wait(60.0))
    found = machine_of(config)
    answered.set()
    assert any("the name of an address took over 0.5 s" in one.text for one in found.findings)
    assert found.problems == []


def test_too_few_open_files(config, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (300, resource.RLIM_INFINITY))
    found = machine_of(replace(config, cluster=ClusterConfig(num_trainers=7)))
    assert facts(found)["open files"] == "300 (ulimit -n), at most no limit"
    assert problems(found)[0].startswith(
        "a process may open 300 files, and rank 0 of 8 ranks opens up to about 384; ulim"
    )


@pytest.mark.parametrize(("soft", "starts"), [(128, False), (256, True), (resource.RLIM_INFINITY, True)])
def test_no_rpc_agent_is_started_with_so_few_open_files_that_it_aborts(config, monkeypatch, soft, starts):
    started = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
    monkeypatch.setattr(session, "rpc_server", lambda rendezvous: nullcontext(started.append(rendezvous)))
    machine.check_rpc_agent(Diagnosis(), config)
    assert bool(started) is starts


def test_a_small_dev_shm_is_noted_and_is_no_problem_for_loader_workers(config, monkeypatch):
    monkeypatch.setattr(machine, "_LITTLE_SHM_BYTES", 2**60)
    found = machine_of(replace(config, training=TrainingConfig(loader_workers=2)))
    assert problems(found) == []
    assert any("/dev/shm has " in str(one) for one in found.findings)


def test_a_limit_of_the_control_group_is_noted(config, monkeypatch):
    monkeypatch.setattr(machine, "cpu_limit", lambda: 0.5)
    found = machine_of(config)
    assert "the control group allows 0.5" in facts(found)["cores"]
    assert [one.cure for one in found.findings] == ["set OMP_NUM_THREADS to 1 divided by the trainers of this host"]


@pytest.mark.parametrize("run_dir", ["/proc/runs", "file", "file/runs", "link"])
def test_a_run_folder_that_cannot_be_made(config, tmp_path, run_dir):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nothing")
    folder = tmp_path / run_dir
    (problem,) = problems(machine_of(replace(config, logging=LoggingConfig(run_dir=str(folder)))))
    assert problem.startswith(f"{folder} cannot be written to (")
    assert problem.endswith("; set logging.run_dir to a folder of yours")


def test_another_release_of_torch(config, monkeypatch):
    from paramserver import importing

    monkeypatch.setattr(importing.metadata, "version", lambda package: "1.13.1")
    (problem,) = problems(machine_of(config))
    assert problem.startswith("torch (1.13.1) must be at least ")


# Choices.


def test_one_command_on_one_host(config):
    found, address = choices_of(config)
    shown = facts(found)
    assert (found.findings, address) == ([], "127.0.0.1")
    assert shown["mode"].startswith("rpc: 1 server and 2 trainers")
    assert shown["rank 0"] == "127.0.0.1:<free> (cluster.master_port is 0: a free port)"
    assert shown["interface"] == "lo, address 127.0.0.1 (all ranks are on this host)"
    assert shown["transport"].startswith("shared memory (server.transport is auto")
    assert shown["lost trainer"].endswith("(server.on_loss: continue)")
    rpc = replace(config, server=ServerConfig(transport="rpc", wire_dtype="bfloat16"))
    assert facts(choices_of(rpc)[0])["transport"] == "RPC, in bfloat16 (server.transport is rpc)"


def test_one_process_has_no_address_and_no_deadlines(config):
    local = replace(config, mode="local")
    found, address = choices_of(local)
    describe_deadlines(found, local)
    assert address == ""
    assert [subject.title for subject in found.subjects] == ["choices"]


def test_a_rank_of_a_launcher(config):
    environ = {"RANK": "2", "WORLD_SIZE": "3", "OMP_NUM_THREADS": "3"}
    identity = resolve_identity(RankFlags(), environ, replace(config, mode="ddp"))
    found, _ = choices_of(replace(config, mode="ddp", cluster=ClusterConfig(num_trainers=3)), identity, environ)
    shown = facts(found)
    assert shown["started by"] == "environment: rank 2 of 3, 3 of them on this host (RANK and WORLD_SIZE are set)"
    assert shown["threads"] == "3 per rank (OMP_NUM_THREADS)"
    assert shown["backend"].startswith("gloo")


def test_a_port_that_is_taken(config):
    with bind_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        (problem,) = problems(choices_of(replace(config, cluster=ClusterConfig(master_port=port)))[0])
    assert problem.startswith(f"cluster.master_port ({port}) on cluster.master_addr (127.0.0.1) cannot be opened")


@pytest.fixture
def names(monkeypatch):
    """Names that are not known yet: how often each is asked for in vain."""
    unknown, resolve = {}, socket.getaddrinfo

    def look_up(host, *args, **options):
        if unknown.get(host, 0) > 0:
            unknown[host] -= 1
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1" if host in unknown else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return unknown


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_of_rank_zero_that_is_known_later_is_waited_for_as_in_a_run(config, names, capsys, rank):
    names["node7"] = 3
    identity = resolve_identity(RankFlags(global_rank=rank, world_size=3, master_addr="node7"), {}, config)
    found, address = choices_of(config, identity)
    assert (problems(found), address, names) == ([], "127.0.0.1", {"node7": 0})
    assert "waiting up to 60 s for the name node7, as a run does" in capsys.readouterr().err


def test_a_name_of_rank_zero_that_stays_unknown_is_named_with_the_wait_of_a_run(config, names):
    names["node7"] = 10**6
    short = replace(config, cluster=ClusterConfig(timeout_s=0.3))
    flags = RankFlags(role="trainer", index=0, master_addr="node7", master_port=29500)
    found, address = choices_of(short, resolve_identity(flags, {}, short))
    assert address == ""
    assert problems(found) == [
        "trainer 0 (rank 1) found no server 0 (rank 0) at node7:29500 within cluster.timeout_s (0.3 s): the name node7 "
        "is not known here (Name or service not known); start server 0 (rank 0), or correct --master_addr and "
        "--master_port"
    ]


def test_an_interface_that_is_not_there(config):
    found, address = choices_of(replace(config, cluster=ClusterConfig(interface="eth99")))
    assert problems(found)[0].startswith("cluster.interface (eth99) must be a network interface of this machine")
    assert address == ""


def test_devices_that_are_not_there(config):
    (problem,) = problems(choices_of(replace(config, device=DeviceConfig(kind="cuda")))[0])
    assert problem.startswith("device.kind (cuda) needs 2 GPUs on this host")


def test_deadlines_have_their_names_in_json(config):
    found = Diagnosis()
    describe_deadlines(found, config)
    assert found.to_json()["deadlines"]["silent_s"] == 5.0
    assert "  60 s  " in found.to_text()

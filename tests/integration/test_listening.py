"""A run on one machine listens on loopback only: TCPStore, TensorPipe, gloo, the control channel and ZeroMQ."""

import ipaddress
import json
import socket
import time

import psutil
import pytest
from launching import TASKS, FinishedRun, environment, fork_server, launch, write_config
from simulations import SHAPE
from supervised_tasks import ranks_of

pytestmark = pytest.mark.processes

HELPERS = TASKS.parent
SIMULATIONS = {
    "simulations": {
        "function": f"{HELPERS / 'simulations.py'}:simulate",
        "count": 8,
        "at_once": 3,
        "steps": 10,
        "fields": {"u": {"shape": list(SHAPE), "finite": True}},
        "parameters": {"a": [0.0, 1.0], "b": [2.0, 3.0]},
        "timeout_s": 20.0,
    },
    "training": {"max_steps": None, "batch_size": 4, "uneven_inputs": "join"},
}


@pytest.mark.parametrize(
    ("mode", "servers", "simulations", "fewest"),
    [
        ("rpc", 1, False, 4),  # the store, and an agent in each of three processes
        ("rpc", 2, False, 5),
        ("ddp", 1, False, 3),  # the store, and a group in each of two processes
        ("rpc", 1, True, 6),  # in addition rank 0's coordinator, and a receiver in each trainer
    ],
    ids=["rpc", "two servers", "ddp", "simulations"],
)
def test_a_local_run_listens_on_loopback_only(tmp_path, mode, servers, simulations, fewest):
    listeners = tmp_path / "listeners.json"
    task_args = {"listeners": str(listeners)}
    if simulations:
        (tmp_path / "ledger").mkdir()
        task_args["ledger"] = str(tmp_path / "ledger")
    name = "ListeningToSimulations" if simulations else "Listening"
    finished = launch(
        tmp_path,
        mode=mode,
        task=f"{HELPERS / 'listening_tasks.py'}:{name}",
        task_args=task_args,
        cluster={"num_servers": servers, "num_trainers": 2, "timeout_s": 30},
        **(SIMULATIONS if simulations else {}),
    )
    assert finished.code == 0, finished.output
    found = json.loads(listeners.read_text())
    assert len(found) >= fewest, found
    assert {address for _, address in found if not ipaddress.ip_address(address).is_loopback} == set(), found


def test_a_listener_that_was_closed_is_made_anew(tmp_path):
    """A connection that ends before its first message closes the listeners of TensorPipe; the run outlives it."""
    file = write_config(
        tmp_path,
        task=f"{HELPERS / 'injected_faults.py'}:Injected",
        task_args={"folder": str(tmp_path)},
        mode="rpc",
        cluster={"num_trainers": 2},
        training={"max_steps": None, "max_epochs": 8, "uneven_inputs": "join"},
        checkpoint={"every": 5},
    )
    run_dir = tmp_path / "runs" / "run"
    with fork_server().start(["--config", file, "--set", "logging.name=run"], tmp_path, environment()) as run:
        deadline = time.monotonic() + 30
        while not (run_dir / "checkpoints" / "latest").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        deadline += 30
        ranks = ranks_of(run.pid)
        ports = [c.laddr.port for c in ranks[0].net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        # One ends all: that of the agent, or one of a channel. The store goes on, and the listener of calls over TCP.
        # The other process closes its listeners when it comes to run.
        left = set(ports)
        while len(left) > 2:
            assert time.monotonic() < deadline, (left, ports)
            left = {port for port in left if not is_refused(port)}
            time.sleep(0.01)
        assert len(left) == 2, ports
        ranks[2].kill()
        assert run.wait(60) == 0, run.output.read_text()
        finished = FinishedRun(0, run.output.read_text(), run_dir)
    assert "ECONNREFUSED" in finished.log(0)
    assert "returns to its last checkpoint" in finished.log(0)
    assert finished.summary["samples"] == 8 * 256


def is_refused(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False

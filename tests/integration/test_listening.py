"""A run on one machine listens on loopback only: TCPStore, TensorPipe, gloo, the control channel and ZeroMQ."""

import ipaddress
import json

import pytest
from launching import TASKS, launch
from simulations import SHAPE

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

"""Agents of torchrun that stand for several hosts: a fixed number of them, and hosts that join."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event

import pytest
import yaml
from launching import FinishedRun, assert_equal_runs, environment, free_port, launch, write_config

from paramserver.distributed.timeouts import poll_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "torchrun"
HELPERS = Path(__file__).parents[1] / "helpers"
# Agents, each of which starts interpreters that import torch, take long on a busy machine.
LIMIT_S = 240


def script(folder, name, **replaced):
    """An example with other lines, as its reader changes them."""
    text = (EXAMPLES / name).read_text()
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    (folder / name).write_text(text)
    return name


@contextmanager
def agent(folder, *words):
    """Run a command in a process group of its own; yield its process, whose output is in ``output-<words>``."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (folder / f"output-{'-'.join(words)}").open("w") as output:
        process = subprocess.Popen(
            words, cwd=folder, env=environment(PATH=path), stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def outputs(folder):
    return "\n".join(file.read_text() for file in folder.glob("output-*"))


@pytest.mark.nightly
def test_two_nodes_continue_from_the_last_checkpoint_after_a_loss(tmp_path):
    """Two servers on the first node, two trainers on the second, of which one is killed.

    The first agent starts its ranks again only because they end too, whatever ``server.on_loss`` is.
    """
    options = {
        "mode": "rpc",
        "cluster": {"num_servers": 2, "num_trainers": 2, "timeout_s": LIMIT_S},
        "server": {"lost_after_s": 30},
        "training": {"max_steps": 20, "validate_every": 10},
        "checkpoint": {"every": 5, "background": False},
        "logging": {"name": "run"},
    }
    whole = launch(tmp_path / "whole", **options)
    assert whole.code == 0, whole.output
    folder = tmp_path / "nodes"
    fault = {"mark": str(folder / "mark"), "fault": "sigkill", "batch": 13}
    write_config(folder, task=f"{HELPERS / 'ddp_fault_tasks.py'}:FaultAtBatch", task_args=fault, **options)
    port = str(free_port())
    name = script(folder, "node.sh", **{"=node0": "=127.0.0.1", "29500": port})
    with agent(folder, "bash", name, "0") as first, agent(folder, "bash", name, "1") as second:
        assert (first.wait(LIMIT_S), second.wait(LIMIT_S)) == (0, 0), outputs(folder)
    assert (folder / "mark").exists()
    finished = FinishedRun(0, outputs(folder), folder / "runs" / "run")
    assert finished.of_kind("start")[-1]["step"] == 10
    assert finished.summary["updates_redone"] == 3
    assert yaml.safe_load((finished.run_dir / "config.yaml").read_text())["server"]["on_loss"] == "continue"
    assert_equal_runs(whole, finished, trainers=2)


DIES_AT_FIRST = """
import os, signal
from pathlib import Path
from tasks import ReferenceTask

if os.environ["RANK"] == "1":
    try:
        Path("died").touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)
    except FileExistsError:
        pass
"""


@pytest.mark.nightly
def test_a_node_whose_rank_dies_before_the_rendezvous_joins_the_node_that_waits(tmp_path):
    """One agent counts a restart and the other none."""
    write_config(
        tmp_path, task="dies.py:ReferenceTask", mode="ddp", cluster={"timeout_s": LIMIT_S}, logging={"name": "run"}
    )
    (tmp_path / "dies.py").write_text(DIES_AT_FIRST)
    replaced = {
        "=node0": "=127.0.0.1",
        "29500": str(free_port()),
        "per_node=2": "per_node=1",
        "restarts 3": "restarts 1",
    }
    name = script(tmp_path, "node.sh", **replaced)
    with agent(tmp_path, "bash", name, "0") as first, agent(tmp_path, "bash", name, "1") as second:
        assert (first.wait(LIMIT_S), second.wait(LIMIT_S)) == (0, 0), outputs(tmp_path)
    assert (tmp_path / "died").exists()
    finished = FinishedRun(0, outputs(tmp_path), tmp_path / "runs" / "run")
    assert [one["resumed"] for one in finished.of_kind("start")] == [False]  # the first node did not start again
    assert finished.summary["status"] == "completed"


@pytest.mark.nightly
def test_a_host_that_joins_takes_its_share_of_what_is_left(tmp_path):
    """Each sample is applied once: alone, or in the mean of two trainers."""
    write_config(
        tmp_path,
        task=f"{HELPERS / 'elastic_tasks.py'}:CountsSamples",
        # Slow enough that samples are left when the second host has started.
        task_args={"folder": str(tmp_path), "step_s": 0.5},
        mode="ddp",
        training={"max_steps": None, "max_epochs": 1, "batch_size": 2, "uneven_inputs": "join"},
        checkpoint={"every": 2},
        cluster={"timeout_s": LIMIT_S},
    )
    endpoint = {"=node0:29400": f"=127.0.0.1:{free_port()}"}
    # A round begins as soon as two hosts are there, or one has waited for a second.
    name = script(
        tmp_path, "elastic.sh", **endpoint, **{"--nnodes 1:4": "--nnodes 1:2 --rdzv-conf last_call_timeout=1"}
    )

    def recorded(kind, **values):
        lines = [
            line
            for file in tmp_path.glob("runs/*/metrics.jsonl")
            for line in file.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        records = [record for record in map(json.loads, lines) if record["kind"] == kind]
        return any(values.items() <= record.items() for record in records) or None

    def wait_for(kind, **values):
        there = partial(recorded, kind, **values)
        assert poll_until(time.monotonic() + LIMIT_S, there, Event()), outputs(tmp_path)

    with agent(tmp_path, "bash", name) as first:
        wait_for("checkpoint", step=2)  # of steps made alone, which the next start does not make again
        with agent(tmp_path, "bash", name, "joins") as second:
            wait_for("start", world_size=2)
            (tmp_path / "fast").touch()
            assert (first.wait(LIMIT_S), second.wait(LIMIT_S)) == (0, 0), outputs(tmp_path)
    (run_dir,) = (tmp_path / "runs").iterdir()
    finished = FinishedRun(0, outputs(tmp_path), run_dir)
    assert finished.summary["num_trainers"] == 2
    assert finished.summary["samples"] == 600
    applied = set(finished.load("model")["weights"].tolist())
    assert applied == {1.0, 0.5}


def test_torchrun_shows_the_sentence_that_ended_a_rank(tmp_path):
    write_config(tmp_path, mode="local", training={"max_steps": 2, "batch_size": -1})
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone"]
    words += ["-m", "paramserver.launch", "--config", "config.yaml"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    shown = done.stderr.partition("Root Cause")[2]
    assert "exitcode  : 2" in shown
    assert "traceback : error: " in shown
    assert "training.batch_size (-1) must be" in shown

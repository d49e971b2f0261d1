"""Runs under a real SLURM, whose nodes are on this machine."""

import os
import sys

import pytest
import slurm_cluster
from launching import FinishedRun, differing_tensors, environment, free_port, train, write_config

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(slurm_cluster.MISSING) or os.geteuid() != 0, reason=slurm_cluster.REASON),
]

TRAINING = {"training": {"max_steps": 12, "batch_size": 8}}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster.SlurmCluster(folder, [free_port() for _ in range(3)]) as cluster:
        yield cluster


def srun(slurm, folder, *flags, mode, trainers):
    """Run with the tasks of a step as ranks. The names of the nodes have no address here, so it is given."""
    file = write_config(folder, mode=mode, cluster={"num_trainers": trainers, "timeout_s": 60}, **TRAINING)
    command = [sys.executable, "-m", "paramserver.launch", "--config", file, "--set", "logging.name=run"]
    done = slurm.run("srun", *flags, *command, "--master_addr", "127.0.0.1", folder=folder, **environment())
    finished = FinishedRun(done.returncode, done.stdout + done.stderr, folder / "runs" / "run")
    assert finished.code == 0, finished.output
    return finished


@pytest.mark.parametrize(("mode", "tasks"), [("rpc", 3), ("ddp", 2)])
def test_the_tasks_of_one_node_are_the_ranks(tmp_path, slurm, mode, tasks):
    finished = srun(slurm, tmp_path / "srun", "-N1", f"-n{tasks}", mode=mode, trainers=2)
    alone = train(tmp_path / "alone", mode, 2, **TRAINING)
    assert differing_tensors(finished.load("model"), alone.load("model")) == []


def test_two_tasks_on_each_of_two_nodes(tmp_path, slurm):
    finished = srun(slurm, tmp_path, "-N2", "--ntasks-per-node=2", mode="rpc", trainers=3)
    assert finished.summary["num_trainers"] == 3
    assert finished.summary["steps"] == 12


def test_a_batch_script_without_srun_is_warned(tmp_path, slurm):
    file = write_config(tmp_path, mode="local", **TRAINING)
    command = f"{sys.executable} -m paramserver.launch --config {file} --set logging.name=run"
    words = ["sbatch", "--wait", "-n2", "-o", str(tmp_path / "output"), "--wrap", command]
    done = slurm.run(*words, folder=tmp_path, **environment())
    output = (tmp_path / "output").read_text()
    assert done.returncode == 0, done.stderr + output
    assert "warning: this allocation has 2 tasks (SLURM_NTASKS), and all ranks are started on this host" in output

"""Runs under a real SLURM, whose nodes are on this machine."""

import json
import os
import sys
import time
from pathlib import Path
from threading import Event

import pytest
import slurm_cluster
from launching import FinishedRun, differing_tensors, environment, free_port, train, write_config
from online_runs import STEPS, online_config

from paramserver.distributed.timeouts import poll_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(slurm_cluster.MISSING) or os.geteuid() != 0, reason=slurm_cluster.REASON),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm" / "job.sh"
TRAINING = {"training": {"max_steps": 12, "batch_size": 8}}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster.SlurmCluster(folder, [free_port() for _ in range(3)]) as cluster:
        yield cluster


def srun(slurm, folder, *flags, mode, trainers, address=(), config=TRAINING):
    """Run with the tasks of a step as ranks."""
    file = write_config(folder, **{**config, "mode": mode, "cluster": {"num_trainers": trainers, "timeout_s": 150}})
    command = [sys.executable, "-m", "paramserver.launch", "--config", file, "--set", "logging.name=run"]
    done = slurm.run("srun", *flags, *command, *address, folder=folder, **environment())
    finished = FinishedRun(done.returncode, done.stdout + done.stderr, folder / "runs" / "run")
    assert finished.code == 0, finished.output
    return finished


@pytest.mark.nightly
@pytest.mark.parametrize(("mode", "tasks"), [("rpc", 3), ("ddp", 2)])
def test_the_tasks_of_one_node_are_the_ranks(tmp_path, slurm, mode, tasks):
    finished = srun(slurm, tmp_path / "srun", "-N1", f"-n{tasks}", mode=mode, trainers=2)
    alone = train(tmp_path / "alone", mode, 2, **TRAINING)
    assert differing_tensors(finished.load("model"), alone.load("model")) == []


def test_two_tasks_on_each_of_two_nodes(tmp_path, slurm):
    # The names of the nodes have no address here.
    address = ("--master_addr", "127.0.0.1")
    finished = srun(slurm, tmp_path, "-N2", "--ntasks-per-node=2", mode="rpc", trainers=3, address=address)
    assert finished.summary["num_trainers"] == 3
    assert finished.summary["steps"] == 12


@pytest.mark.nightly
def test_simulations_run_beside_the_ranks_whose_step_has_all_cpus(tmp_path, slurm):
    config = online_config(tmp_path, simulations={"count": 2, "at_once": 2, "max_restarts": 0})
    finished = srun(slurm, tmp_path, "-N1", "-n4", mode="ddp", trainers=4, config=config)
    assert finished.summary["simulations"]["complete"] == 2
    assert finished.summary["samples"] == 2 * STEPS


PRINT_RANKS = """
import os
from paramserver.cluster import RankFlags, resolve_identity
from paramserver.config import Config
identity = resolve_identity(RankFlags(), os.environ, Config(mode="ddp"))
print(identity.node_rank, identity.global_rank, *identity.ranks_here)
"""


@pytest.mark.parametrize("groups", ["-N2 -n4 -m cyclic", "-N2 -n4 -m plane=2", "-N2 -n3 -m block", "-N1 -n2 : -N1 -n1"])
def test_each_task_knows_the_ranks_of_its_node(tmp_path, slurm, groups):
    """The last step is of two groups; in the second srun distributes one task for each node, in turns."""
    printing = [sys.executable, "-c", PRINT_RANKS]
    command = [word for group in groups.split(":") for word in (":", *group.split(), *printing)]
    done = slurm.run("srun", *command[1:], folder=tmp_path, **environment())
    assert done.returncode == 0, done.stderr
    places = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    for node, _, *here in places:
        assert here == sorted(rank for other, rank, *_ in places if other == node)
    assert len({node for node, *_ in places}) == 2


@pytest.mark.nightly
def test_a_heterogeneous_job_has_its_server_in_the_first_group(tmp_path, slurm):
    """The tasks of all groups are one world, so this needs neither ranks nor roles."""
    group = [sys.executable, "-m", "paramserver.launch", "--config", "config.yaml", "--master_addr", "127.0.0.1"]
    config = {"cluster": {"num_trainers": 2, "timeout_s": 150}, "logging": {"name": "run"}}
    write_config(tmp_path, mode="rpc", **config, **TRAINING)
    words = ["-N1", "-n1", "-c1", *group, ":", "-N1", "-n2", "-c2", *group]
    done = slurm.run("srun", *words, folder=tmp_path, **environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert FinishedRun(0, "", tmp_path / "runs" / "run").summary["num_trainers"] == 2


@pytest.mark.nightly
def test_the_job_of_the_example_is_requeued_before_its_limit_and_resumes(tmp_path, slurm):
    """The signal that SLURM sends before the limit is sent by hand here: the limit counts in minutes."""
    text = EXAMPLE.read_text().replace("--nodes=2 --ntasks-per-node=2 --cpus-per-task=4", "--nodes=1 --ntasks=3")
    (tmp_path / "job.sh").write_text(text.replace("python -m", f"{sys.executable} -m").replace("USR1@120", "USR1@1"))
    training = {"max_steps": 8, "batch_size": 8, "validate_every": 0}
    cluster = {"num_trainers": 2, "timeout_s": 150}
    config = {
        "mode": "rpc",
        "training": training,
        "cluster": cluster,
        "checkpoint": {"every": 100},
        "logging": {"progress": "auto"},
    }
    write_config(tmp_path, task="Slow", **config)
    submitted = slurm.run("sbatch", "--parsable", "-o", "output", "job.sh", folder=tmp_path, **environment())
    assert submitted.returncode == 0, submitted.stderr
    job, output = submitted.stdout.strip(), tmp_path / "output"

    def wait_for(text):
        def there():
            return (output.exists() and text in output.read_text(errors="replace")) or None

        assert poll_until(time.monotonic() + 120, there, Event()), output.read_text()

    wait_for("first step after")
    assert slurm.run("scancel", "--signal=USR1", job).returncode == 0
    wait_for("checkpoint is written")
    wait_for("was started again by its job")
    wait_for("resumed, mode rpc")
    wait_for("status       completed")
    finished = FinishedRun(0, output.read_text(), tmp_path / "runs" / f"job-{job}")
    assert finished.summary["steps"] == 8
    assert finished.summary["samples"] == 8 * 2 * 8
    assert finished.summary["restarts"] == 0  # nothing was lost
    assert json.loads((finished.run_dir / "environment.json").read_text())["job"] == f"slurm/{job}"


def test_a_batch_script_without_srun_is_warned(tmp_path, slurm):
    file = write_config(tmp_path, mode="local", **TRAINING)
    command = f"{sys.executable} -m paramserver.launch --config {file} --set logging.name=run; echo exit code $?"
    log = tmp_path / "output"
    done = slurm.run("sbatch", "-n2", "-o", str(log), "--wrap", command, folder=tmp_path, **environment())
    assert done.returncode == 0, done.stderr

    def ended():  # sbatch --wait asks only every few seconds; one that completes is listed until its processes are gone
        return not slurm.run("squeue", "--noheader").stdout or None

    assert poll_until(time.monotonic() + 120, ended, Event()), log.exists() and log.read_text()
    output = log.read_text()
    assert output.splitlines()[-1] == "exit code 0", output
    assert "warning: this allocation has 2 tasks (SLURM_NTASKS), and all ranks are started on this host" in output

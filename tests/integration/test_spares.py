"""Runs with spare processes: a spare takes the role of a rank that is killed, and none is left behind."""

import os
import select
import signal
import time
from pathlib import Path

import psutil
import pytest
from launching import launch, write_config
from spare_tasks import waiting

pytestmark = pytest.mark.processes

TASKS = Path(__file__).parents[1] / "helpers" / "spare_tasks.py"


def run_with_kills(folder, ranks, **config):
    imports = folder / "imports"
    finished = launch(
        folder,
        task=f"{TASKS}:KillsRanks",
        task_args={"folder": str(folder), "logs": str(folder / "runs" / "run" / "logs"), "ranks": ranks},
        training={"max_steps": 100},
        checkpoint={"every": 5},  # a record of before the second loss is kept if a checkpoint lies between
        env={"SPARE_IMPORTS": str(imports)},
        timeout_s=240,
        **config,
    )
    assert finished.code == 0, finished.output
    assert finished.summary["steps"] == 100
    spares = waiting(finished.run_dir / "logs")
    imported = imports.read_text().split()
    for rank in ranks:
        killed, spare = (folder / f"killed-{rank}").read_text().split()
        assert killed != spare
        assert spare in imported, f"the spare did not become rank {rank}: {finished.output}"
    for pid in spares:
        assert not psutil.pid_exists(pid)
    return finished, spares


@pytest.mark.claim("rpc-faults")
@pytest.mark.parametrize("transport", ["shared_memory", "rpc", "tcp"])
def test_spares_take_the_roles_of_a_trainer_and_of_the_server(tmp_path, transport):
    """The second spare, which was started after the first had become trainer 1, becomes the server."""
    cluster = {"num_trainers": 2, "spares": 1, "timeout_s": 120}
    finished, spares = run_with_kills(tmp_path, [2, 0], mode="rpc", cluster=cluster, server={"transport": transport})
    assert len(spares) >= 2
    assert "rank 2 (trainer 1) is lost" in finished.output
    assert "rank 0 (server 0) is lost" in finished.output
    # The times of the replacement's start are its own.
    phases = [record["phases"] for record in finished.of_kind("phase") if record["rank"] == 2]
    assert phases
    assert phases[-1]["interpreter and imports"] < phases[0]["interpreter and imports"] + 2.0


def test_spares_take_the_roles_of_all_ranks_of_ddp(tmp_path):
    finished, spares = run_with_kills(
        tmp_path, [1], mode="ddp", cluster={"num_trainers": 2, "spares": 2, "timeout_s": 120}
    )
    imported = (tmp_path / "imports").read_text().split()
    assert len([pid for pid in spares if str(pid) in imported]) >= 1
    assert "is lost" in finished.output


def test_a_spare_ends_after_the_death_of_its_supervisor(tmp_path, fork_server):
    file = write_config(
        tmp_path,
        mode="rpc",
        cluster={"num_trainers": 1, "spares": 1},
        server={"lost_after_s": 1.0},
        training={"max_steps": 10**9},
    )
    with fork_server.start(["--config", file, "--set", "logging.name=run"], tmp_path) as run:
        deadline = time.monotonic() + 60
        while not (found := spares_of(run.pid)):
            assert time.monotonic() < deadline, "no spare was started"
            select.select([], [], [], 0.05)
        end = os.pidfd_open(found[0].pid)
        try:
            os.kill(run.pid, signal.SIGKILL)
            assert select.select([end], [], [], 15)[0], "the spare is left"
        finally:
            os.close(end)


def spares_of(supervisor):
    children = psutil.Process(supervisor).children()
    return [child for child in children if b"--spare" in Path(f"/proc/{child.pid}/cmdline").read_bytes().split(b"\0")]

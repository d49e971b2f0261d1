"""A job that starts its command again continues the run that it began: by the supervisor, and rank by rank."""

import time
from contextlib import ExitStack
from threading import Event

import pytest
from launching import FinishedRun, assert_equal_runs, environment, fork_server, free_port, launch, write_config

from paramserver.distributed.timeouts import poll_until

pytestmark = pytest.mark.processes

FAULTS = "ddp_fault_tasks:FaultAtBatch"


def settings(mode, **more):
    return {
        "mode": mode,
        "cluster": {"num_trainers": 2, "timeout_s": 30, "max_restarts": 0},
        "server": {"on_loss": "fail", "lost_after_s": 30} if mode == "rpc" else {"lost_after_s": 30},
        "training": {"max_steps": 20, "validate_every": 10},
        "checkpoint": {"every": 5, "background": False},
        **more,
    }


def killed_at(folder, batch):
    return {"task": FAULTS, "task_args": {"mark": str(folder / "mark"), "fault": "sigkill", "batch": batch}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    finished = launch(tmp_path_factory.mktemp("whole"), **settings("ddp"))
    assert finished.code == 0, finished.output
    return finished


@pytest.mark.parametrize(("mode", "killed", "begins_at"), [("rpc", 13, 10), ("ddp", 3, 0)])
def test_a_requeued_batch_job_continues_its_run(tmp_path, whole, mode, killed, begins_at):
    """From the last checkpoint, or from the beginning where there is none; as if nothing had happened."""
    options = settings(mode, **killed_at(tmp_path, killed))
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "1"}
    first = launch(tmp_path, env=job, **options)
    assert first.code == 1
    again = launch(tmp_path, env=job, **options)
    assert again.code == 2
    assert "exists already" in again.output
    finished = launch(tmp_path, env={**job, "SLURM_RESTART_COUNT": "1"}, **options)
    assert finished.code == 0, finished.output
    assert "was started again by its job or launcher, and continues its run" in finished.output
    assert finished.of_kind("start")[-1]["step"] == begins_at
    assert finished.summary["updates_redone"] == killed - begins_at
    assert [sorted(fault) for fault in finished.summary["faults"]] == [["step", "text", "time"]]
    assert_equal_runs(whole, finished, trainers=2)


class Pods:
    """Ranks with the variables that Kubeflow's PyTorchJob sets, and the name of their job."""

    def __init__(self, folder, stack, world_size, config):
        self.folder, self.stack, self.world_size, self.config = folder, stack, world_size, config
        self.port = str(free_port())

    def start(self, rank):
        names = {"RANK": str(rank), "WORLD_SIZE": str(self.world_size), "MASTER_ADDR": "127.0.0.1"}
        environ = environment(**names, MASTER_PORT=self.port, PYTHONUNBUFFERED="0", PARAMSERVER_JOB_ID="digits-5e3c")
        return self.stack.enter_context(fork_server().start(["--config", self.config], self.folder, environ))


def test_ranks_in_containers_that_start_again_continue_their_run(tmp_path, whole):
    config = write_config(tmp_path, **settings("ddp", **killed_at(tmp_path, 13)))
    with ExitStack() as stack:
        pods = Pods(tmp_path, stack, 2, config)
        first = [pods.start(rank) for rank in range(2)]
        assert first[0].wait(90) == 1
        first[1].wait(90)
        first[0].join()  # its port is that of the next start
        second = [pods.start(rank) for rank in range(2)]
        output = second[0].output
        assert [pod.wait(90) for pod in second] == [0, 0], output.read_text()
    (run_dir,) = (tmp_path / "runs").iterdir()
    finished = FinishedRun(0, output.read_text(), run_dir)
    assert "continues its run" in finished.output
    assert finished.of_kind("start")[-1]["step"] == 10
    assert_equal_runs(whole, finished, trainers=2)


def test_a_server_in_a_container_returns_to_its_trainers(tmp_path):
    """Its command is the same again. Each sample is in the mean of two trainers exactly once."""
    config = write_config(
        tmp_path,
        mode="rpc",
        task="elastic_tasks:CountsSamples",
        task_args={"folder": str(tmp_path)},
        training={"max_steps": None, "max_epochs": 1, "batch_size": 2},
        checkpoint={"every": 10},
        cluster={"timeout_s": 30},
    )
    with ExitStack() as stack:
        pods = Pods(tmp_path, stack, 3, config)
        server, *trainers = [pods.start(rank) for rank in range(3)]
        written = poll_until(
            time.monotonic() + 60, lambda: [*tmp_path.glob("runs/*/checkpoints/step-*/manifest.json")] or None, Event()
        )
        assert written, server.output.read_text()
        server.kill()
        server.wait(10)
        (tmp_path / "fast").touch()
        again = pods.start(0)
        assert [pod.wait(90) for pod in (again, *trainers)] == [0, 0, 0], again.output.read_text()
    (run_dir,) = (tmp_path / "runs").iterdir()
    finished = FinishedRun(0, again.output.read_text(), run_dir)
    assert finished.summary["restarts"] == 1
    assert finished.load("model")["weights"].unique().tolist() == [0.5]

"""A job that starts its command again continues the run that it began: by the supervisor, and rank by rank."""

from contextlib import ExitStack

import pytest
from launching import assert_equal_runs, environment, fork_server, free_port, launch, write_config

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
    assert_equal_runs(whole, finished, trainers=2)


def test_ranks_in_containers_that_start_again_continue_their_run(tmp_path, whole):
    """With the variables that Kubeflow's PyTorchJob sets, and a name of the job that its pods have in common."""
    config = write_config(tmp_path, **settings("ddp", **killed_at(tmp_path, 13)))
    port = str(free_port())

    def start_all():
        with ExitStack() as stack:
            pods = []
            for rank in range(2):
                names = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                environ = environment(**names, PARAMSERVER_JOB_ID="digits-5e3c", PYTHONUNBUFFERED="0")
                pods.append(stack.enter_context(fork_server().start(["--config", config], tmp_path, environ)))
            codes = [pod.wait(90) for pod in pods]
            return codes, [pod.output.read_text() for pod in pods]

    codes, outputs = start_all()
    assert codes[0] == 1, outputs
    codes, outputs = start_all()
    assert codes == [0, 0], outputs
    (run_dir,) = (tmp_path / "runs").iterdir()
    finished = type(whole)(0, outputs[0], run_dir)
    assert "continues its run" in outputs[0]
    assert finished.of_kind("start")[-1]["step"] == 10
    assert_equal_runs(whole, finished, trainers=2)

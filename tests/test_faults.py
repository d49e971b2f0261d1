"""What happens when something goes wrong: who says what, how soon, and what is left. Each fault leaves a mark."""

import json
import time

import psutil
import pytest
from runs import launch

pytestmark = pytest.mark.processes

QUICK = {"server": {"heartbeat_s": 0.3, "lost_after_s": 2.0}, "checkpoint": {"every": 3}}


def faulty(tmp_path, mode, what, trainer=1, **config):
    mark = tmp_path / "mark"
    started = time.monotonic()
    finished = launch(
        tmp_path,
        mode=mode,
        task="Faulty",
        task_args={"what": what, "mark": str(mark), "trainer": trainer},
        cluster={"num_trainers": 2, "timeout_s": 6 if mode == "ddp" else 30},
        training={"max_steps": 2000},
        **QUICK,
        **config,
    )
    fired = json.loads(mark.read_text())
    assert fired["what"] == what
    assert not psutil.pid_exists(fired["pid"])
    return finished, time.monotonic() - started


@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_a_trainer_that_is_killed_ends_the_run_within_seconds(tmp_path, mode):
    finished, elapsed_s = faulty(tmp_path, mode, "kill")
    rank = 2 if mode == "rpc" else 1
    assert finished.code == 1
    assert f"rank {rank} (trainer 1): killed by SIGKILL" in finished.output.splitlines()[-1]
    assert finished.summary["status"] == "failed"
    assert finished.checkpoints == ["step-00000003"]
    assert elapsed_s < 25


def test_a_trainer_that_is_frozen_is_noticed_by_its_heartbeat(tmp_path):
    finished, _ = faulty(tmp_path, "rpc", "freeze")
    assert finished.code == 1
    assert "trainer 1" in finished.output
    assert "no heartbeat for server.lost_after_s (2 s)" in finished.output
    assert finished.summary["status"] == "failed"


@pytest.mark.parametrize(("mode", "trainer"), [("rpc", 1), ("ddp", 0), ("local", 0)])
def test_an_error_in_the_task_is_the_last_thing_printed(tmp_path, mode, trainer):
    finished, _ = faulty(tmp_path, mode, "error", trainer=trainer)
    assert finished.code == 1
    assert "Traceback (most recent call last)" in finished.output
    assert finished.output.rstrip().splitlines()[-1] == "RuntimeError: the task raised on purpose"
    if mode != "local":
        rank = trainer + (mode == "rpc")
        assert f"error: rank {rank} (trainer {trainer}): RuntimeError: the task raised on purpose" in finished.output
    assert "the task raised on purpose" in finished.summary["error"] or mode == "ddp"


@pytest.mark.parametrize(("mode", "trainer"), [("rpc", 1), ("ddp", 1), ("local", 0)])
def test_a_loss_that_is_nan_stops_before_it_is_applied(tmp_path, mode, trainer):
    finished, _ = faulty(tmp_path, mode, "nan", trainer=trainer)
    assert finished.code == 1
    assert f"training_step, trainer {trainer}, batch 5: the loss is nan" in finished.output
    assert finished.checkpoints == ["step-00000003"]
    assert all(tensor.isfinite().all() for tensor in finished.load("model").values())


@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_a_source_that_raises_is_named_with_its_sample(tmp_path, mode):
    finished = launch(
        tmp_path,
        mode=mode,
        task="BadSource",
        cluster={"num_trainers": 2, "timeout_s": 8},
        training={"max_steps": None},
        **QUICK,
    )
    assert finished.code == 1
    assert "the source raised at sample 50: OSError('the disk is gone')" in finished.output
    assert "Traceback" in finished.output


def test_a_server_that_is_killed_ends_its_trainers(tmp_path):
    """The task's build_optimizer runs on the server: its scheduler kills it after five steps."""
    finished = launch(
        tmp_path,
        mode="rpc",
        task="KillsItsServer",
        task_args={"mark": str(tmp_path / "mark")},
        cluster={"num_trainers": 2, "timeout_s": 30},
        training={"max_steps": 2000},
        **QUICK,
    )
    assert (tmp_path / "mark").exists()
    assert finished.code == 1
    assert "rank 0 (server 0): killed by SIGKILL" in finished.output.splitlines()[-1]
    assert finished.summary["status"] == "failed"
    assert "the server is lost" in finished.log(1)


@pytest.mark.parametrize(("mode", "who"), [("rpc", "terminate"), ("ddp", "terminate"), ("rpc", "terminate_parent")])
def test_a_signal_finishes_the_step_saves_and_leaves_with_3(tmp_path, mode, who):
    finished, _ = faulty(tmp_path, mode, who)
    assert finished.code == 3
    assert "Resume with: python -m paramserver.launch --resume" in finished.output
    summary = finished.summary
    assert summary["status"] == "interrupted"
    assert finished.checkpoints[-1] == f"step-{summary['steps']:08d}"
    assert summary["checkpoint"] == finished.checkpoints[-1]

"""A rank that holds the interpreter's lock: others notice it, its log shows where, and another process replaces it."""

from pathlib import Path

import pytest
from launching import launch

TASK = Path(__file__).parents[1] / "helpers" / "lock_tasks.py"


@pytest.mark.processes
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["rpc", "ddp"])
def test_a_rank_that_holds_the_lock_is_replaced_and_its_stacks_are_in_its_log(tmp_path: Path, mode: str) -> None:
    fired = tmp_path / "fired"
    run = launch(
        tmp_path,
        task=f"{TASK}:HoldsLock",
        task_args={"fired": str(fired)},
        mode=mode,
        cluster={"num_trainers": 2, "timeout_s": 30},
        training={"max_steps": None, "max_epochs": 2, "batch_size": 8, "validate_every": 0, "uneven_inputs": "join"},
        server={"lost_after_s": 2.0},
    )
    assert fired.exists()
    assert run.code == 0, run.output
    assert run.summary["samples"] == 2 * 256
    assert "gave no sign of life for server.lost_after_s (2 s)" in run.output or mode == "ddp"
    log = run.log(1 if mode == "ddp" else 2)
    assert "most recent call first" in log
    assert "in on_batch_end" in log

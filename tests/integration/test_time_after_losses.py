"""Time and speed of a run that lost processes: of all its sessions, without the time between them."""

import time
from pathlib import Path

import pytest
from launching import launch

TASKS = Path(__file__).parents[1] / "helpers" / "paced_tasks.py"
BATCH_S = 0.2
LOSSES = {
    "rpc": ("PacedKillsItsServer", {}),
    "ddp": ("PacedFaultAtBatch", {"fault": "sigkill", "batch": 6}),
}


@pytest.mark.processes
@pytest.mark.claim("time-after-losses")
@pytest.mark.parametrize("mode", LOSSES)
def test_all_sessions_count_and_the_time_between_them_does_not(tmp_path, mode):
    name, arguments = LOSSES[mode]
    began = time.monotonic()
    finished = launch(
        tmp_path,
        mode=mode,
        task=f"{TASKS}:{name}",
        task_args={"seconds": BATCH_S, "mark": str(tmp_path / "mark"), **arguments},
        training={"max_steps": 9},
        checkpoint={"every": 3},
        logging={"log_every": 100},
        cluster={"num_trainers": 2, "timeout_s": 30},
    )
    elapsed_s = time.monotonic() - began
    assert finished.code == 0, finished.output
    assert (tmp_path / "mark").exists()
    summary = finished.summary
    assert summary["restarts"] == 1
    # The first session made at least five steps, and the last one those after step 3 or 6.
    assert summary["seconds"] > (5 + 3 - 1) * BATCH_S
    assert summary["recovery_s"] > 0
    assert summary["seconds"] + summary["recovery_s"] < elapsed_s
    assert summary["samples_per_second"] == summary["samples"] / summary["seconds"]
    assert "s between sessions" in finished.output
    assert not (finished.run_dir / ".session").exists()

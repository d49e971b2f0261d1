"""Updates that take longer than a silent trainer is waited for: no trainer that lives is taken for lost."""

from pathlib import Path

import pytest
from launching import TASKS, train

pytestmark = [pytest.mark.processes, pytest.mark.claim("slow-update")]

TASK = f"{TASKS.with_name('slow_tasks.py')}:SlowUpdates"
UPDATE_S = 2.0
RUNS = {
    # No barrier: trainers send gradients, and ask for versions, during the updates of others.
    "async": {"trainers": 5, "server": {"consistency": "async"}, "checkpoint": {"every": 100}},
    "two-servers": {"trainers": 2, "cluster": {"num_servers": 2}, "training": {"clip_grad_norm": 1.0, "max_steps": 3}},
}


@pytest.mark.parametrize("name", RUNS)
def test_no_living_trainer_is_lost_while_updates_take_longer_than_it_may_be_silent(tmp_path: Path, name):
    run = RUNS[name]
    training = {"max_steps": 4, **run.get("training", {})}
    finished = train(
        tmp_path,
        "rpc",
        run["trainers"],
        task=TASK,
        task_args={"update_s": UPDATE_S},
        server={
            **{"transport": "rpc", "bucket_mb": 0.0005, "lost_after_s": UPDATE_S / 2},
            **run.get("server", {}),
        },
        cluster=run.get("cluster", {}),
        training=training,
        checkpoint=run.get("checkpoint", {"every": 2}),
    )
    assert finished.summary["steps"] >= training["max_steps"]
    assert finished.of_kind("lost") == []
    assert finished.summary["seconds"] >= training["max_steps"] * UPDATE_S

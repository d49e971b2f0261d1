"""What a step of rpc mode is, seen from a trainer and from the server."""

import pytest
from runs import COUNTING, trained

pytestmark = pytest.mark.processes


def test_every_step_is_a_context_a_backward_and_a_step_of_the_distributed_optimizer(tmp_path):
    finished = trained(tmp_path, "rpc", 2, trainer=f"{COUNTING}:WitnessTrainer", training={"max_steps": 9})
    assert [r["value"] for r in finished.of_kind("log") if r["name"] == "witnessed"] == [9.0, 9.0]


def test_one_server_answers_all_trainers_as_in_the_tutorial(tmp_path):
    """Its forward and gradients are those of the model, and its reference is one object for all who ask at once."""
    finished = trained(
        tmp_path,
        "rpc",
        3,
        trainer=f"{COUNTING}:TutorialTrainer",
        task_args={"dropout": 0.0, "batch_norm": False},
        env={"PYTHONPATH": str(COUNTING.parent)},
    )
    logged = {(r["trainer"], r["name"]): r["value"] for r in finished.of_kind("log")}
    assert len({logged[i, "server"] for i in range(3)}) == 1
    assert {logged[i, "references"] for i in range(3)} == {10.0}

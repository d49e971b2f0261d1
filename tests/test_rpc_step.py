"""What a step of rpc mode is, seen from a trainer and from the server."""

import pytest
from runs import COUNTING, trained

pytestmark = pytest.mark.processes


def test_every_step_is_a_context_a_backward_and_a_step_of_the_distributed_optimizer(tmp_path):
    finished = trained(tmp_path, "rpc", 2, trainer=f"{COUNTING}:WitnessTrainer", training={"max_steps": 9})
    assert [r["value"] for r in finished.of_kind("log") if r["name"] == "witnessed"] == [9.0, 9.0]

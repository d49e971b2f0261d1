"""The shared optimizer: a push that fails inside the backward of its context."""

import pytest

from paramserver.optim.distributed_optimizer import SharedOptimizer


class Client:
    def push_in_place(self, *report):
        raise ValueError("it cannot be sent")

    def push(self, context_id, *report):
        return f"context {context_id}"


def test_an_error_of_sending_a_push_is_raised_by_its_step_as_it_is():
    optimizer = SharedOptimizer(Client())
    optimizer.begin_step(3, "report")
    with pytest.raises(ValueError, match="it cannot be sent"):
        optimizer.step(3)
    assert optimizer.step(4) == "context 4", "the next step is not concerned"

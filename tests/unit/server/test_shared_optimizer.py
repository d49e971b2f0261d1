"""The shared optimizer: a push that fails inside the backward of its context."""

from types import SimpleNamespace

import pytest

from paramserver.server.shared_optimizer import SharedOptimizer


class Client:
    def push(self, push, buckets=(), has_gradients=False):
        if not has_gradients:
            raise ValueError("it cannot be sent")
        return SimpleNamespace(wait=lambda: f"{push} applied")


def test_an_error_of_sending_a_push_is_raised_by_its_step_as_it_is():
    optimizer = SharedOptimizer(Client())
    optimizer.begin_step(3, "push 3")
    with pytest.raises(ValueError, match="it cannot be sent"):
        optimizer.step(3)
    assert optimizer.step(4, "push 4") == "push 4 applied", "the next step is not concerned"

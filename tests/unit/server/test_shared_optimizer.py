"""The shared optimizer: a push that cannot be sent, before the backward of its context."""

from types import SimpleNamespace

import pytest

from paramserver.server.shared_optimizer import SharedOptimizer


class Client:
    def push(self, push, buckets=(), has_gradients=False):
        if not has_gradients:
            raise ValueError("it cannot be sent")
        return SimpleNamespace(wait=lambda: f"{push} applied")


def test_an_error_of_sending_a_push_does_not_concern_the_next_step():
    optimizer = SharedOptimizer(Client())
    with pytest.raises(ValueError, match="it cannot be sent"):
        optimizer.begin_step(3, "push 3")
    assert optimizer.step(4, "push 4") == "push 4 applied"

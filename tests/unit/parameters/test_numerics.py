"""Checks of losses, gradients and parameters for NaN and infinity."""

import pytest
import torch

from paramserver.errors import NotFinite, TaskError
from paramserver.parameters.numerics import check_loss


def loss_of(value: float) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True) * 1


@pytest.mark.parametrize("loss", [loss_of(0.5), loss_of(0.5).reshape(1), loss_of(0.5).bfloat16()])
def test_a_loss_is_a_number(loss):
    assert check_loss(loss, 0, 0) == 0.5


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (0.5, TaskError, "returned float; it must return the loss as a scalar tensor"),
        (None, TaskError, "returned NoneType"),
        ({"loss": loss_of(0.5)}, TaskError, "returned dict"),
        (loss_of(0.5).expand(3), TaskError, r"a tensor of shape \(3,\); the loss must be one number: take \.mean\(\)"),
        (torch.tensor(0.5), TaskError, "does not depend on a trained parameter"),
        (loss_of(float("nan")), NotFinite, "the loss is nan; nothing of this batch was applied"),
        (loss_of(float("inf")), NotFinite, "the loss is inf"),
        (loss_of(float("-inf")), NotFinite, "the loss is -inf"),
    ],
)
def test_a_loss_that_is_none_says_where_it_came_from(loss, error, message):
    with pytest.raises(error, match=f"^training_step, trainer 3, batch 17: .*{message}") as caught:
        check_loss(loss, 3, 17)
    assert type(caught.value) is error

"""Checks of losses, gradients and parameters for NaN and infinity."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paramserver.errors import NotFinite, TaskError
from paramserver.parameters.numerics import LossScaling, check_loss, checksums, explain_errors, first_nonfinite


def loss_of(value: float) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True) * 1


@pytest.mark.parametrize("loss", [loss_of(0.5), loss_of(0.5).reshape(1), loss_of(0.5).bfloat16()])
def test_a_loss_is_a_number(loss):
    assert check_loss(loss, 0, 0) == 0.5


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (0.5, TaskError, "returned float; the loss must be a scalar tensor"),
        (None, TaskError, "returned NoneType"),
        ({"loss": loss_of(0.5)}, TaskError, "returned dict"),
        (
            loss_of(0.5).expand(3),
            TaskError,
            r"shape \(3,\); the loss must be one number, or a vector .* take \.mean\(\)",
        ),
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


def test_a_loss_of_one_of_several_optimizers_names_the_call():
    with pytest.raises(TaskError, match=r"batch 17: gave optimize\('d', loss\) float; the loss must be a scalar"):
        check_loss(0.5, 3, 17, "d")
    with pytest.raises(NotFinite, match="nothing of this call was applied"):
        check_loss(loss_of(float("nan")), 3, 17, "d")


def test_both_parts_of_complex_numbers_must_be_finite():
    spectrum = torch.zeros(3, dtype=torch.complex64)
    assert first_nonfinite({"spectrum": spectrum}) is None
    spectrum[1] = complex(0.0, float("inf"))
    assert first_nonfinite({"spectrum": spectrum}) == "spectrum"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64])
def test_equal_tensors_have_equal_checksums_and_others_do_not(dtype):
    tensor = torch.tensor([[1, 0], [0, 1]]).to(dtype)
    first = checksums({"weight": tensor})
    assert first == checksums({"weight": tensor.clone()})
    tensor[0, 1] = 1
    assert first != checksums({"weight": tensor})
    assert checksums({"weight": tensor.t()}) == checksums({"weight": tensor.t().contiguous()})
    assert checksums({"empty": tensor[:0]}) == {"empty": 0}


def test_a_checksum_of_a_large_tensor_is_computed_in_parts():
    class LargestSum(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **kwargs or {})
            if isinstance(made, torch.Tensor) and made.dtype == torch.int64:
                self.elements = max(self.elements, made.numel())
            return made

    bits = torch.arange(3 * 2**20 + 1, dtype=torch.int32) - 5
    with LargestSum() as largest:
        found = checksums({"weight": bits.view(torch.float32)})
    assert found == {"weight": int((bits.long() ** 2).sum())}
    assert 0 < largest.elements <= 2**20


FLOAT64 = torch.ones(2, 3, 4, dtype=torch.float64)
OPERATIONS = {
    "linear": (nn.Linear(4, 1), FLOAT64),
    "convolution": (nn.Conv1d(3, 1, 1), FLOAT64),
    "normalization": (nn.BatchNorm1d(3), FLOAT64),
    "recurrence": (nn.GRU(4, 2), FLOAT64),
    "bilinear": (nn.Bilinear(4, 4, 1), FLOAT64),
}


@pytest.mark.claim("float64-parameters")
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_float64_tensor_of_a_batch_is_named(name):
    model, tensor = OPERATIONS[name]
    batch = {"parameters": tensor, "u": [torch.ones(1), {3: tensor}]}
    found = r'batch\["parameters"\], batch\["u"\]\[1\]\[3\] are float64, and the model is float32'
    cure = r'convert with batch\["parameters"\]\.to\(torch\.float32\)'
    wanted = pytest.raises(TaskError, match=rf"^training_step: \w+: .*; {found}: {cure}$")
    with wanted, explain_errors("training_step", batch, model):
        model(*(tensor for _ in range(1 + (name == "bilinear"))))


@pytest.mark.claim("float64-parameters")
def test_a_float64_target_that_the_backward_refuses_is_named():
    model = nn.Linear(4, 1)
    batch = torch.ones(2, 4), torch.ones(2, 1, dtype=torch.float64)
    wanted = pytest.raises(TaskError, match=r"batch\[1\] is float64, and the model is float32: convert with batch\[1\]")
    with wanted, explain_errors("training_step", batch, model):
        nn.functional.binary_cross_entropy(model(batch[0]).sigmoid(), batch[1]).backward()


@pytest.mark.parametrize(
    ("batch", "model", "text"),
    [
        (FLOAT64.float(), nn.Linear(4, 1), "Double and Float"),
        (FLOAT64, nn.Linear(4, 1).double(), "Double and Float"),
        (FLOAT64, nn.Linear(4, 1), "the sizes differ"),
        (FLOAT64, nn.Linear(4, 1), "expected target dtype to be Long or Byte, but got Double"),
    ],
)
def test_an_error_that_no_float64_tensor_causes_is_that_of_the_task(batch, model, text):
    error = RuntimeError(text)
    with pytest.raises(RuntimeError) as caught, explain_errors("training_step", batch, model):
        raise error
    assert caught.value is error


def test_after_an_error_in_a_backward_one_of_the_user_has_no_scale():
    parameter, scaling = torch.nn.Parameter(torch.ones(1)), LossScaling(lambda: 4.0)
    hooks = list(scaling.unscale_gradients([parameter]))
    scaling.backward((parameter * 3.0).sum())
    assert parameter.grad.item() == 3.0
    loss = (parameter * 3.0).square().sum()
    loss.backward()  # which frees what the next one needs
    with pytest.raises(RuntimeError, match="second time"):
        scaling.backward(loss)
    parameter.grad = None
    (parameter * 3.0).sum().backward()
    assert parameter.grad.item() == 3.0
    for hook in hooks:
        hook.remove()

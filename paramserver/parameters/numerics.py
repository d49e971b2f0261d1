"""Checks for NaN and infinity: of each loss, of gradients by the norm that clipping computes, of what is saved.

``explain_errors`` names what in a batch causes an error of torch: a float64 tensor, or an id without a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paramserver.errors import NotFinite, TaskError, TrainingError, message_of
from paramserver.importing import describe_user_error
from paramserver.parameters.tables import describe_missing_row


def check_gradient_norm(norm: float, step: int, what: str = "the norm") -> None:
    """Check gradients by their norm, or by ``what`` else was computed of all, before any of them is applied.

    Raises:
        NotFinite: the norm is NaN or infinite.
    """
    if not math.isfinite(norm):
        raise NotFinite(
            f"step {step}: {what} of all gradients is {norm} and must be finite; nothing of this step was applied. "
            "Lower the learning rate, or look at the batches"
        )


def largest_value(tensors: Iterable[Tensor]) -> Tensor:
    """Return the largest absolute value of all elements, also of sparse tensors; NaN if one is, and 0 without any."""
    values = (_as_real(tensor._values() if tensor.is_sparse else tensor) for tensor in tensors)
    parts = [own for own in values if own.numel()]
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    largest: Any = torch._foreach_norm(parts, math.inf)
    return torch.stack([value.to(parts[0].device, torch.float64) for value in largest]).max()


def find_nonfinite(loss: float, gradients: Iterable[Tensor | None]) -> str:
    """Return what of a step is NaN or infinite: "loss", "gradient", or the empty string for nothing."""
    if not math.isfinite(loss):
        return "loss"
    found = largest_value(gradient for gradient in gradients if gradient is not None)
    return "" if math.isfinite(float(found)) else "gradient"


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with an element that is NaN or infinite; None if there is none.

    The sum of such a tensor is not finite. The sum of a finite tensor may overflow; only then are its elements checked,
    which takes many times longer.
    """
    for name, tensor in tensors.items():
        values = _as_real(tensor)
        if not math.isfinite(float(values.sum())) and not bool(torch.isfinite(values).all()):
            return name
    return None


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


_SUMMED_AT_ONCE = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def divide_(tensors: Sequence[Tensor], count: int) -> None:
    """Divide each tensor in place, as all means over trainers are.

    Complex numbers by their parts, which rounds otherwise than a division by a complex number:
    DistributedDataParallel holds them as parts.
    """
    torch._foreach_div_([_as_real(tensor) for tensor in tensors], float(count))


def mean_in_order(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Return the mean, added in the given order, on which a sum of float32 depends.

    Without ``out`` the mean of one tensor is that tensor, and not a copy.
    """
    if len(tensors) == 1:
        return tensors[0] if out is None else out.copy_(tensors[0])
    mean = torch.add(tensors[0], tensors[1], out=out)
    for other in tensors[2:]:
        mean += other
    divide_([mean], len(tensors))
    return mean


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sum of squares of each tensor's bit patterns, as integers modulo 2**64, so in any order of adding.

    Different tensors have equal sums only by chance, or if they differ in the order of their elements. (The plain sum
    would not do: what is added to a positive and a negative number cancels out.)
    """
    sums = []
    for tensor in tensors.values():
        values = _as_real(tensor)
        bits = values.reshape(-1).contiguous().view(_INTEGERS[values.element_size()])
        # In parts: all elements as int64, and their squares, would be several times the memory of the tensor.
        parts = (part.long() for part in torch.split(bits, _SUMMED_AT_ONCE))
        sums.append(reduce(torch.add, [part.mul_(part).sum() for part in parts]).cpu())
    return {name: int(total) for name, total in zip(tensors, sums, strict=True)}


def check_parameters_finite(parameters: Mapping[str, Tensor], step: int, resume_command: str | None) -> None:
    """Check parameters before they are saved: no training can continue from NaN or infinity.

    Training resumes from the last checkpoint with ``resume_command``; None if there is none.

    Raises:
        NotFinite: one is NaN or infinite.
    """
    name = first_nonfinite(parameters)
    if name is None:
        return
    again = "start anew" if resume_command is None else f"resume from the last checkpoint ({resume_command})"
    raise NotFinite(
        f"step {step}: parameter {name} is NaN or infinite and must be finite to be stored; a gradient was not, though "
        f"the loss was; no checkpoint of this step is written: {again} with a lower learning rate or "
        "training.clip_grad_norm, which stops at the first such gradient"
    )


def check_loss(
    loss: object, trainer_index: int, batch_idx: int, optimizer: str = "", may_be_nonfinite: bool = False
) -> float:
    """Return the loss of a batch as a number, before its backward.

    Raises:
        TaskError: it is not a scalar tensor with a gradient.
        NotFinite: it is NaN or infinite, unless it may be; nothing of this batch, or call, is applied.
    """
    where = f"training_step, trainer {trainer_index}, batch {batch_idx}"
    origin, unit = (f"gave optimize({optimizer!r}, loss)", "call") if optimizer else ("returned", "batch")
    if not isinstance(loss, torch.Tensor):
        raise TaskError(f"{where}: {origin} {type(loss).__name__}; the loss must be a scalar tensor")
    if loss.numel() != 1:
        raise TaskError(
            f"{where}: {origin} a tensor of shape {tuple(loss.shape)}; the loss must be one number, or a vector with "
            "one for each sample of the batch: take .mean()"
        )
    if loss.is_complex():
        raise TaskError(
            f"{where}: {origin} a complex number ({loss.dtype}); the loss must be real: take .abs(), or .real"
        )
    if not loss.requires_grad:
        raise TaskError(
            f"{where}: the loss does not depend on a trained parameter; compute it from model(...) with gradients on"
        )
    value = to_number(loss, f"{where}: the loss", "it must be one real number on a device that holds values")
    if not (math.isfinite(value) or may_be_nonfinite):
        raise NotFinite(
            f"{where}: the loss is {value}; nothing of this {unit} was applied. "
            "Lower the learning rate, set training.clip_grad_norm, or look at the batch"
        )
    return value


class LossScaling:
    """Scales losses for their backward, so that gradients of float16 do not underflow, and unscales the gradients.

    ``scale`` returns what a loss is multiplied by, a power of two; None if losses are not scaled.
    """

    def __init__(self, scale: Callable[[], float] | None) -> None:
        self._scale = scale
        self._in_backward = False

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute the gradients of a loss; ``options`` are those of ``Tensor.backward``."""
        if self._scale is not None:
            # Not by a number: a loss of float16 would overflow.
            loss = loss * torch.tensor(self._scale(), dtype=torch.float32, device=loss.device)
        self._in_backward = self._scale is not None
        try:
            loss.backward(**options)  # type: ignore[no-untyped-call]
        finally:
            self._in_backward = False  # also for a task that catches the error

    def unscale_gradients(self, parameters: Iterable[nn.Parameter]) -> Iterator[RemovableHandle]:
        """Let each gradient be unscaled before it is accumulated: before it is summed, reduced, sent or clipped.

        Yields what removes the hook of each parameter.
        """

        def unscale(gradient: Tensor) -> Tensor:
            # A backward of the user has no scale. The division is exact, unless the result is subnormal.
            return gradient / self._scale() if self._in_backward and self._scale is not None else gradient

        for parameter in parameters if self._scale is not None else ():
            requires_grad = parameter.requires_grad  # not where on_resume has frozen it for a time
            hook: RemovableHandle = parameter.requires_grad_().register_hook(unscale)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(requires_grad)
            yield hook
            hooks = parameter._backward_hooks or {}
            for earlier in [*hooks][:-1]:  # of the task, which torch would call first
                hooks[earlier] = hooks.pop(earlier)


@contextmanager
def explain_errors(what: str, batch: Any, model: nn.Module) -> Iterator[None]:
    """Raise a ``TaskError`` in place of an error that float64 tensors of ``batch`` cause, or an id without a row."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TrainingError) as error:
        if (missing := describe_missing_row(error, model)) is not None:
            raise TaskError(f"{what}: {missing}") from error
        # A TrainingError is that of a server which computes the forward; the traceback of the server follows its text.
        raised = (
            message_of(error).partition("\n")[0] if isinstance(error, TrainingError) else describe_user_error(error)
        )
        text = message_of(error)
        # torch names the dtypes of an operation and not the tensors, in other words in each of its functions. One that
        # needs whole numbers is not helped by another float.
        if not re.search(r"double|float64|datatype", text, re.IGNORECASE) or re.search(r"\bLong\b", text):
            raise
        found = list(_float64_in(batch, "batch"))
        # With server.compute: server the parameters are elsewhere.
        dtypes = {p.dtype for p in getattr(model, "parameters", list)() if p.is_floating_point()}
        if not found or torch.float64 in dtypes:
            raise
        own = str(next(iter(dtypes), torch.float32)).removeprefix("torch.")
        raise TaskError(
            f"{what}: {raised}; {', '.join(found)} {'is' if len(found) == 1 else 'are'} float64, and the model is "
            f"{own}: convert with {found[0]}.to(torch.{own})"
        ) from error


def _float64_in(value: Any, name: str) -> Iterator[str]:
    """How the task writes each float64 tensor of a batch."""
    if isinstance(value, Tensor):
        if value.dtype == torch.float64:
            yield name
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _float64_in(item, f'{name}["{key}"]' if isinstance(key, str) else f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _float64_in(item, f"{name}[{index}]")


def to_number(value: Any, what: str, cure: str) -> float:
    """Return a value that the task gave as a number.

    Raises:
        TaskError: it is not one real number.
    """
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError  # text that float() reads would be a number by accident
        number = value.detach() if isinstance(value, torch.Tensor) else value
        return float(number.item() if hasattr(number, "item") else number)
    except (TypeError, ValueError, RuntimeError, OverflowError, NotImplementedError) as error:
        raise TaskError(f"{what} is {describe_value(value)}; {cure}") from error


def describe_value(value: Any) -> str:
    """Describe a value for a message: type, shape and dtype of a tensor or array, the value itself of others."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__} ({text[:57]}...)"

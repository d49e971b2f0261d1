"""Gradients on their way out: packed when all are there, or while backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from paramserver.transport.base import GradientBucket, TrainerTransport

# A gradient as it was packed: the tensor, and how often it had been changed.
_Packed = tuple[Tensor, int]


class GradientBuckets:
    """Copies the gradients of a step to where they leave from, and sends what may leave early.

    While it is awaited, a gradient is copied as soon as it is accumulated, and a message leaves with the last of its
    gradients. ``finish`` copies and sends the rest, and again what was changed since it left, so that what arrives is
    what the parameters hold at the end.

    Args:
        way: by which they leave.
        parameters: the trained ones, in the order of the layout.
        send: takes a message that may leave; the same one anew, after a change, replaces the first.
    """

    def __init__(
        self, way: TrainerTransport, parameters: Sequence[Tensor], send: Callable[[GradientBucket], None]
    ) -> None:
        self._way = way
        self._parameters = list(parameters)
        self._send = send
        self._awaited = False
        self._packed: dict[int, _Packed] = {}
        self._missing: dict[GradientBucket, int] = {}
        self._messages: list[list[GradientBucket]] = [[] for _ in parameters]
        for early, numbers in way.early.items():
            for number in set(numbers):
                self._messages[number].append(early)
        hooks = {
            number: parameter.register_post_accumulate_grad_hook(self._hook(number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(parameters)
            if self._messages[number]
        }
        self._hooks = list(hooks.values())
        self._ids = {number: hook.id for number, hook in hooks.items()}

    def close(self) -> None:
        """Leave the parameters as they were."""
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """The gradients that are accumulated from now on are final, as far as one can know."""
        self._missing = {early: len(set(numbers)) for early, numbers in self._way.early.items()}
        self._awaited = True

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def accumulated(parameter: Tensor) -> None:
            if self._awaited and number not in self._packed and _is_here(parameter) and self._is_last(number):
                self._pack(number)
                for early in self._messages[number]:
                    self._missing[early] -= 1
                    if not self._missing[early]:
                        self._send(early)

        return accumulated

    def _is_last(self, number: int) -> bool:
        """Whether no hook follows this one, which could change the gradient unseen (``grad.data``)."""
        hooks: Mapping[int, object] = self._parameters[number]._post_accumulate_grad_hooks
        return bool(next(reversed(hooks)) == self._ids[number])

    def _pack(self, number: int) -> None:
        gradient = self._parameters[number].grad
        assert gradient is not None
        with torch.no_grad():
            self._way.gradient_views[number].copy_(gradient)
        self._packed[number] = gradient, gradient._version

    def finish(self) -> tuple[bool, ...] | None:
        """Pack and send what is left.

        Returns:
            Which parameters have a gradient; None for all.
        """
        self._awaited = False
        stale = [number for number, parameter in enumerate(self._parameters) if not self._is_packed(number, parameter)]
        again = {early for number in stale for early in self._messages[number]}
        self._pack_all(stale)
        self._packed.clear()
        for early in self._way.early:
            if early in again:  # every message that has not left has a gradient that was not packed
                self._send(early)
        used = tuple(parameter.grad is not None for parameter in self._parameters)
        return None if all(used) else used

    def _is_packed(self, number: int, parameter: Tensor) -> bool:
        gradient, version = self._packed.get(number, (None, 0))
        return gradient is not None and gradient is parameter.grad and gradient._version == version

    @torch.no_grad()
    def _pack_all(self, numbers: Sequence[int]) -> None:
        views, gradients = [], []
        for number in numbers:
            view, gradient = self._way.gradient_views[number], self._parameters[number].grad
            if gradient is None:
                view.zero_()
            else:
                views.append(view)
                gradients.append(gradient)
        if views:
            torch._foreach_copy_(views, gradients, non_blocking=True)
        for device in {gradient.device for gradient in gradients if gradient.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


def _is_here(parameter: Tensor) -> bool:
    """Whether its gradient can be copied at once, and without waiting for a GPU."""
    return parameter.grad is not None and parameter.grad.layout is torch.strided and not parameter.grad.is_cuda

"""Random numbers of a forward that runs beside others: those of the trainer that called it, and of nobody else."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paramserver.errors import TaskError

# torch has one generator for all threads of a process.
_generator = threading.Lock()


class PrivateRng(TorchDispatchMode):
    """Makes the operations of one thread draw from a state of their own, while other threads draw from theirs.

    Dropout and its like name no generator. So each operation that draws (torch tags them) borrows the process's
    generator for as long as it runs; all else goes on side by side. Numbers of ``random``, numpy and of other devices
    than the CPU are left as they are.

    Args:
        state: of torch's CPU generator, as ``torch.get_rng_state()`` gives it; afterwards that of the next draw.
    """

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.state = state

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        _refuse_recomputation()
        with _generator:
            others = torch.get_rng_state()
            torch.set_rng_state(self.state)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.state = torch.get_rng_state()
                torch.set_rng_state(others)


def _refuse_recomputation() -> None:
    """Activation checkpointing draws again in the backward, from the process's state and not from that of the call."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise TaskError(
                "the model draws random numbers (dropout) inside torch.utils.checkpoint, which a server that many "
                "trainers call cannot draw again in the backward; use server.compute: trainer"
            )

"""What server and trainers say to each other in a step, and the server's table of those who wait for an answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paramserver.consistency import Decision
from paramserver.flat import Layout
from paramserver.records import StepReport

Future: TypeAlias = "torch.futures.Future[Any]"


@dataclass(frozen=True)
class Welcome:
    """What a trainer gets when it joins: the whole model, how its tensors lie in flat ones (``wire``: on the way).

    ``lockstep`` says that all trainers take every step together; ``segments`` is where processes of the server's host
    find its memory, None where it is not shared.
    """

    model: dict[str, Any]
    parameters: Layout
    wire: Layout
    buffers: Layout
    step: int
    lockstep: bool
    segments: str | None
    part: bytes | None


@dataclass(frozen=True)
class Round:
    """The answer to an announcement: what to do, and the version to do it with.

    ``pulled`` and ``buffers`` are empty for a trainer that takes no part; ``wants_buffers`` says whether its push is to
    bring its module buffers; ``held_s`` is how long the answer waited for the other trainers.
    """

    decision: Decision
    pulled: tuple[Tensor, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    wants_buffers: bool = False
    held_s: float = 0.0


@dataclass(frozen=True)
class Look:
    """A version to be validated: as a pull brings it, or where it is past, as tensors of the trainer's own."""

    pulled: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    is_copy: bool


@dataclass(frozen=True)
class Push:
    """A trainer's gradients as they wait on the server for those of the others."""

    gradients: list[Tensor]
    report: StepReport
    buffers: Sequence[Tensor]
    future: Future
    arrived: float


class Gathering:
    """A round that is complete when every trainer has given its part: the parts, and the futures of their answers."""

    def __init__(self) -> None:
        self.parts: dict[int, Any] = {}
        self.futures: dict[int, Future] = {}
        self.arrived: dict[int, float] = {}

    def add(self, trainer_index: int, part: Any) -> Future:
        future: Future = torch.futures.Future()
        self.parts[trainer_index] = part
        self.futures[trainer_index] = future
        self.arrived[trainer_index] = time.perf_counter()
        return future

    def take_one(self, trainer_index: int) -> tuple[Future, float]:
        """One trainer's future, and when it came."""
        del self.parts[trainer_index]
        return self.futures.pop(trainer_index), self.arrived.pop(trainer_index)

    def take(self) -> tuple[dict[int, Any], dict[int, Future], dict[int, float]]:
        """Everything so far; the next round begins empty."""
        taken = self.parts, self.futures, self.arrived
        self.parts, self.futures, self.arrived = {}, {}, {}
        return taken


def union(masks: Sequence[tuple[bool, ...] | None]) -> tuple[bool, ...] | None:
    """Which parameters got a gradient from any trainer; None for all of them."""
    present = [mask for mask in masks if mask is not None]
    if len(present) < len(masks):
        return None
    return tuple(any(column) for column in zip(*present, strict=True))

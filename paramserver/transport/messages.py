"""What server and trainers say to each other in a step, and the server's table of those who wait for an answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paramserver.consistency import Announcement, Decision
from paramserver.metrics.records import StepReport, StepResult
from paramserver.parameters.flat import FlatLayout
from paramserver.parameters.sharding import Shard, States

Future: TypeAlias = "torch.futures.Future[Any]"


@dataclass(frozen=True)
class JoinReply:
    """What a trainer gets when it joins: what no optimizer changes of the model, and how the rest lies in flat tensors.

    ``wire`` is how that travels; ``lockstep`` says that all trainers take every step together; ``segments`` is where
    processes of the server's host find its memory, None where it is not shared; ``shards`` is who owns what, where
    there are several servers.
    """

    model: dict[str, Any]
    parameter_layout: FlatLayout
    wire_layout: FlatLayout
    buffer_layout: FlatLayout
    step: int
    lockstep: bool
    segments_address: str | None
    stored_part: bytes | None
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True)
class ShardAssignment:
    """What a server beside the first gets when it joins: what it owns, in the version that the run begins with.

    ``parameters`` is the layout of all of them, ``weights`` are the shard's ranges, ``states`` what the optimizer knows
    of it; ``segments`` and ``segments_key`` say where the first server's memory is, None where it is not shared.
    """

    shard: Shard
    parameter_layout: FlatLayout
    weights: list[Tensor]
    states: States
    step: int
    segments_address: str | None
    segments_key: str


@dataclass(frozen=True)
class ApplyRequest:
    """What makes ``version`` out of the one before, on a server beside the first.

    ``pushes`` are trainers in order, the version of each gradient, and whether it lies in shared memory; each is
    multiplied by its factor; ``used`` as in ``StepReport``. ``groups`` are the optimizer's hyper-parameters, None where
    the norm of all gradients is to be known first. Of the versions before, those in ``needed`` may still be pulled.
    """

    version: int
    pushes: tuple[tuple[int, int, bool], ...]
    factors: tuple[float, ...]
    used: tuple[bool, ...] | None
    groups: list[dict[str, Any]] | None
    retained_versions: frozenset[int]


@dataclass(frozen=True)
class StepGrant:
    """The answer to an announcement: what to do, and the version to do it with; or to a push: what came of it.

    ``place`` tells a trainer's end where the version is that it pulls; ``buffers`` are the version's module buffers,
    empty for a trainer that takes no part; ``wants_buffers`` says whether its push is to bring its own; ``result`` is
    what the push made that came with the announcement; ``held_s`` is how long the answer waited for other trainers.
    """

    decision: Decision | None = None
    slot: int = 0
    buffers: tuple[Tensor, ...] = ()
    wants_buffers: bool = False
    result: StepResult | None = None
    held_s: float = 0.0


@dataclass(frozen=True)
class VersionView:
    """A version to be validated: ``place`` where a trainer's end finds it, else tensors of the trainer's own."""

    slot: int | None
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]


@dataclass(frozen=True)
class ModelCall:
    """A call of the model on the server (``server.compute: server``). Nothing of a call stays behind for the next.

    ``args`` and ``kwargs`` hold tensors of the CPU without gradients; ``batch`` counts the batches of the step;
    ``training`` is what ``train()`` or ``eval()`` said last (None: neither); ``wants_grad`` says whether gradients are
    recorded; ``autocast_dtype`` is None where there is no autocast; ``random_state`` is torch's.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: int
    training: bool | None
    wants_grad: bool
    autocast_dtype: torch.dtype | None
    random_state: Tensor


@dataclass(frozen=True)
class ModelReply:
    """What the model returned, with a ticket (see ``edge.Departure``) where some of it has a gradient."""

    output: Any
    token: Tensor | None
    random_state: Tensor


@dataclass(frozen=True)
class Push:
    """A trainer's gradients as they wait on the server for those of the others, and its word for the step after."""

    gradients: list[Tensor]
    report: StepReport
    buffers: Sequence[Tensor]
    announcement: Announcement | None
    future: Future
    arrival_s: float


class PendingReplies:
    """A round that is complete when every trainer has given its part: the parts, and the futures of their answers."""

    def __init__(self) -> None:
        self.parts: dict[int, Any] = {}
        self.futures: dict[int, Future] = {}
        self.arrival_s: dict[int, float] = {}

    def add(self, trainer_index: int, part: Any, future: Future | None = None) -> Future:
        """Its part, and the future of its answer: a new one, or one that it waits for already."""
        future = torch.futures.Future() if future is None else future
        self.parts[trainer_index] = part
        self.futures[trainer_index] = future
        self.arrival_s[trainer_index] = time.perf_counter()
        return future

    def pop(self, trainer_index: int) -> tuple[Future, float]:
        """One trainer's future, and when it came."""
        del self.parts[trainer_index]
        return self.futures.pop(trainer_index), self.arrival_s.pop(trainer_index)

    def pop_all(self) -> tuple[dict[int, Any], dict[int, Future], dict[int, float]]:
        """Everything so far; the next round begins empty."""
        taken = self.parts, self.futures, self.arrival_s
        self.parts, self.futures, self.arrival_s = {}, {}, {}
        return taken


def merge_used(masks: Sequence[tuple[bool, ...] | None]) -> tuple[bool, ...] | None:
    """Which parameters got a gradient from any trainer; None for all of them."""
    present = [mask for mask in masks if mask is not None]
    if len(present) < len(masks):
        return None
    return tuple(any(column) for column in zip(*present, strict=True))

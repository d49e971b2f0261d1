"""The messages of a run between servers and trainers, and the table of replies that a server still owes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paramserver.consistency import Announcement, Decision, PushId
from paramserver.metrics.records import StepQuantities, StepReport, StepResult
from paramserver.parameters.flat import FlatLayout
from paramserver.parameters.model_tree import PackedBuffers
from paramserver.parameters.sharding import Shard, States

Future: TypeAlias = "torch.futures.Future[Any]"


@dataclass(frozen=True)
class JoinReply:
    """The reply to a trainer that joins: everything that no step changes, and where the run starts."""

    model: dict[str, Any]  # of the model's ``state_dict()`` what no step changes: frozen parameters, and extra state
    # The server's layout, not the trainer's own: both sides must divide the flat tensors at the same places.
    parameter_layout: FlatLayout  # of the trained parameters in flat tensors
    step: int
    lockstep: bool  # all trainers take every step together
    segments_address: str | None  # where processes of the server's host attach its memory; None if it is not shared
    stored_part: bytes | None  # the trainer's part of the checkpoint that the run resumes from
    # What each server owns, in the ranges that are sent; empty with one server that sends its flat tensors.
    shards: tuple[Shard, ...] = ()
    # Generation and incarnation name the pushes of this process; see ``consistency/ledger.py``.
    generation: int = 1
    incarnation: int = 1
    # Where the data of a lost trainer continues that this process replaces; None for others.
    data_position: DataPosition | None = None
    # Why an update waits for the gradients of all buckets; empty if each is updated as these arrive.
    why_not_by_bucket: str = ""
    # The names of the parameters of each optimizer; empty if there is one without a name.
    parameters_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    validates_averages: bool = False  # a validation is of the server's ``averages`` in place of the parameters
    validated_step: int | None = None  # of the last due validation that the checkpoint has, from which the run resumed


@dataclass(frozen=True)
class DataPosition:
    """Which samples of a trainer's source have been applied; a process that takes its place continues there."""

    source: dict[str, Any]  # ``state_dict()`` of the source, from which its order follows
    applied: dict[str, Any]  # ``AppliedPositions.state_dict()``: positions in that order
    counters: dict[str, Any] = field(default_factory=dict)  # of the trainer's progress; one that is missing is 0
    can_reshard: bool = False  # this and the next one are of the source; see ``Source``
    refetchable: bool = False


@dataclass(frozen=True)
class ShardAssignment:
    """The reply to a shard server that joins: what it owns, in the version that the run starts with."""

    shard: Shard
    parameter_layout: FlatLayout
    weights: list[Tensor]  # the shard's ranges; empty where the server may reach the memory that has them
    states: States  # the optimizer's states of the shard
    step: int
    segments_address: str | None  # where the memory of server 0 is attached; None if it is not shared
    segments_key: str  # of the parameters in that memory
    # The shard in ranges that are updated as their gradients arrive; None if all are updated together.
    buckets: Shard | None = None


@dataclass(frozen=True)
class SnapshotTensor:
    """Stands for a tensor in a ``ShardState``, which is in a snapshot of the shard: see ``RowSnapshot``.

    ``name`` is that of the optimizer's state, or ``WEIGHT``.
    """

    slot: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ShardState:
    """What a checkpoint stores of a shard.

    The weights are its ranges, None for those in ``tables``; without any where they are read in shared memory.
    """

    weights: list[Tensor | None] | None
    states: States  # of the optimizer; ``SnapshotTensor`` for what has the rows of a table in ``tables``
    tables: dict[int, SnapshotTensor]  # the weights of large tables, by slot


@dataclass(frozen=True)
class ApplyRequest:
    """Server 0's request to a shard server to make ``version`` out of the version before.

    If it does not complete it, the gradients are added to those of the request that does.
    """

    version: int
    # In the order of trainers; of each, the key of the segment where its gradient is, or None if it was sent.
    pushes: tuple[tuple[PushId, str | None], ...]
    factors: tuple[float, ...]  # by which each gradient is multiplied
    used: tuple[bool, ...] | None  # as in ``StepReport``
    # The optimizer's hyper-parameters; None for those of the process that it is sent to.
    groups: list[dict[str, Any]] | None
    retained_versions: frozenset[int]  # earlier versions that may still be pulled
    completes: bool = True


@dataclass(frozen=True)
class OptimizerCall(StepQuantities):
    """A trainer's call of ``optimize`` with one of several optimizers."""

    name: str = ""  # of the optimizer; empty at the end of a batch
    loss: float = 0.0
    samples: int = 0  # of the batch, with its first call; 0 with others
    used: tuple[bool, ...] = ()  # whether each parameter of the optimizer has a gradient
    sparse: tuple[int, ...] = ()  # of each gradient the number of sparse dimensions; 0 if it is dense, or there is none
    nonfinite: str = ""  # as in ``StepReport``
    version: int = 0  # that it is made at

    def __str__(self) -> str:
        return f"optimize({self.name!r})" if self.name else "none"


@dataclass(frozen=True)
class StepGrant:
    """The reply to an announcement (what to do next, and with which version), or to a push (what it resulted in)."""

    decision: Decision | None = None  # what to do next; None in the reply to a push without an announcement
    slot: int = 0  # where the transport of the trainer finds the version
    # Module buffers of the version; None for a trainer that takes no part in the step.
    buffers: PackedBuffers | None = None
    wants_buffers: bool = False  # the push of this step brings the trainer's own module buffers
    result: StepResult | None = None  # of the push that the announcement was sent with
    held_s: float = 0.0  # how long the reply waited for other trainers
    scale: float = 1.0  # of the losses from now on


@dataclass(frozen=True)
class VersionView:
    """A version for validation: ``slot`` where the transport of the trainer finds it, or None and ``parameters``."""

    slot: int | None
    parameters: tuple[Tensor, ...]
    buffers: PackedBuffers | None


@dataclass(frozen=True)
class ValidationReply:
    """The reply to shares of a validation.

    The shares of lost trainers that are ``missing`` are evaluated by the trainer before there are means.
    """

    means: Mapping[str, float] = field(default_factory=dict)
    improved: bool = False
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelCall:
    """A call of the model on the server (``server.compute: server``). The server keeps no state of a call."""

    args: tuple[Any, ...]  # with ``kwargs``, the inputs; tensors on the CPU without gradients
    kwargs: dict[str, Any]
    batch: int  # index of the batch in the step
    training: bool | None  # argument of the last ``train()`` or ``eval()``; None if neither was called
    wants_grad: bool  # gradients are recorded
    autocast_dtype: torch.dtype | None  # None without autocast
    random_state: Tensor  # of torch on the trainer


@dataclass(frozen=True)
class ModelReply:
    """The model's output; with the token of ``autograd.send_outputs`` if some of it has a gradient."""

    output: Any
    token: Tensor | None
    random_state: Tensor


@dataclass(frozen=True)
class Push:
    """What a trainer reports of a step: all of its push but the gradients.

    It has module buffers if the grant wants them; with an announcement of the next step the reply is its grant too.
    """

    id: PushId
    report: StepReport
    buffers: PackedBuffers | None = None
    announcement: Announcement | None = None


@dataclass(frozen=True, kw_only=True)
class PendingPush(Push):
    """A push on the server until it is applied or dropped."""

    future: Future
    arrival_s: float  # when it was complete
    segment_key: str | None = None  # of the segment where the gradients are; None if they are at the shards


class PendingReplies:
    """Parts that trainers have sent for what all do together, and the futures of the replies that they wait for."""

    def __init__(self) -> None:
        # No lock of its own: every call holds the server's lock. The three dictionaries always have the same keys.
        self.parts: dict[int, Any] = {}
        self.futures: dict[int, Future] = {}
        self.arrival_s: dict[int, float] = {}

    def add(self, trainer_index: int, part: Any, future: Future | None = None) -> Future:
        """Add a trainer's part and return the future of its reply: a new one, or ``future``."""
        # The RPC agent sends the reply when this future is completed, so no thread waits for the other trainers
        # meanwhile.
        future = torch.futures.Future() if future is None else future
        self.parts[trainer_index] = part
        self.futures[trainer_index] = future
        self.arrival_s[trainer_index] = time.perf_counter()
        return future

    def has_all(self, trainers: Set[int]) -> bool:
        """Return whether there are parts, and none of these trainers is missing."""
        return bool(self.parts) and trainers <= self.parts.keys()

    def pop(self, trainer_index: int) -> tuple[Future, float]:
        """Remove one trainer; return its future and its time of arrival (``time.perf_counter``)."""
        # The caller completes the future; removed first, so that the end of the run does not complete it a second time.
        del self.parts[trainer_index]
        return self.futures.pop(trainer_index), self.arrival_s.pop(trainer_index)

    def pop_all(self) -> tuple[dict[int, Any], dict[int, Future], dict[int, float]]:
        """Remove and return parts, futures and times of arrival of all trainers."""
        popped = self.parts, self.futures, self.arrival_s
        # New dictionaries: the caller completes the popped futures outside of the lock, while others add to these.
        self.parts, self.futures, self.arrival_s = {}, {}, {}
        return popped


def merge_used(masks: Sequence[tuple[bool, ...] | None]) -> tuple[bool, ...] | None:
    """Return which parameters have a gradient from any trainer; None for all of them."""
    # A None stands for all parameters, so one of them decides the result.
    present = [mask for mask in masks if mask is not None]
    if len(present) < len(masks):
        return None
    return tuple(any(column) for column in zip(*present, strict=True))

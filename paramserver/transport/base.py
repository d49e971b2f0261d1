"""The transport interface: how a version of the parameters reaches a trainer and how its gradients return.

There is one pair for each trainer, a ``ServerTransport`` and a ``TrainerTransport``. A step calls them in this order::

    server                               trainer
    pin_version ---- grant ------------> map_version where memory is shared, else a pull, and load
                <---- gradients -------- bucket_tensor, while backward continues
                <---- push ------------- backward_root, the root of the distributed backward, if that sends it
    unpin

What is pulled comes from ``ParameterShard`` (server/shard.py), and gradients that are sent arrive there.
Implementations: transport/rpc.py (messages), transport/shared_memory.py (same host), server/model_service.py (the
forward is on the server, and only outputs are sent).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from paramserver.metrics.records import StepReport
from paramserver.parameters.model_tree import PackedBuffers
from paramserver.transport.compression import ErrorFeedback
from paramserver.transport.messages import VersionView


@dataclass(frozen=True)
class GradientBucket:
    """A flat tensor of gradients that is sent as a message of its own, as in DDP."""

    server_index: int
    flat_index: int


class ServerTransport(ABC):
    """The server side for one trainer. Every method is called under the server's lock and does not block."""

    zero_copy = False  # gradients are in memory that several servers may share
    segment_key: str | None = None  # of the segment that gradients are in; None where they are sent
    sends_buffers = True  # the trainer needs the module buffers of its version

    @abstractmethod
    def pin_version(self) -> int:
        """Retain the current version for the next pull of the trainer.

        Return the slot where ``TrainerTransport.map_version`` finds it; 0 where versions are sent.
        """

    @abstractmethod
    def view_version(self) -> tuple[int | None, Sequence[Tensor]]:
        """Return the current version without gradients, for validation; valid until the next ``pin_version``.

        Return its slot and no tensors, or None and its tensors.
        """

    def view_retained(self, parameters: Sequence[Tensor], buffers: PackedBuffers) -> VersionView:
        """Return a past version that the server has retained, for validation."""
        return VersionView(None, tuple(parameters), buffers)

    def collect_gradients(self) -> list[Tensor] | None:
        """Return the gradients of a push that were computed here, which the caller may change; None if there are none.

        Those of other transports are in a segment, or arrive at the shard.
        """
        return None

    def complete_push(
        self, report: StepReport, buffers: PackedBuffers | None
    ) -> tuple[StepReport, PackedBuffers | None]:
        """Return the report and the module buffers of a push, completed by what only the server knows.

        Call it when the gradients are complete.
        """
        return report, buffers

    def changed_buffers(self) -> PackedBuffers | None:
        """Return the module buffers that changed on the server since the trainer's last push; None if none did."""
        return None

    @abstractmethod
    def unpin(self) -> None:
        """Release the pinned version: the trainer has pushed or is lost."""


class TrainerTransport(ABC):
    """The trainer side."""

    name: str  # the value of server.transport
    zero_copy: bool  # a version is found by its slot, so there is no call to pull it
    recorded = False  # a pull is recorded by distributed autograd, whose backward sends the gradients to the servers
    shares_parameters = False  # those of the model are the server's memory
    # Where the gradients of a step are put, one for each trained parameter in the order of the layout. They keep the
    # gradients of the last step until they are overwritten.
    gradient_views: Sequence[Tensor]
    # Those of embedding tables, by their numbers, are given to ``write_rows`` instead.
    tables: Collection[int] = ()
    shares_rows = False  # the tables of the model are the server's memory
    # All that a pull returns, one for each flat tensor of each server, with the parameters as in ``buckets``.
    ranges: Mapping[GradientBucket, Sequence[int]] = {}
    feedback: ErrorFeedback | None = None  # of gradients that are compressed; committed once a push is applied
    sends_unused = True  # also the gradients of a range none of whose parameters has one are sent
    # What is sent before the push, each with the indices of the parameters whose gradients it carries. It may
    # be sent as soon as these are in place, while backward continues.
    buckets: Mapping[GradientBucket, Sequence[int]] = {}

    def bucket_tensor(self, bucket: GradientBucket) -> Tensor:
        """Return what a bucket carries, from ``gradient_views``, or the rows that it has of the gradient of a table.

        Do not change it before the step is applied.
        """
        raise AssertionError("this transport has no buckets")

    @abstractmethod
    def write_rows(self, number: int, gradient: Tensor | None) -> None:
        """Put the gradient of a table, which is coalesced, where that of a step is put; None if it has none."""

    def map_version(self, slot: int) -> None:
        """Make the parameters of the model those of a slot. Only if ``zero_copy``."""
        raise AssertionError("versions are received with the reply to a pull")

    @abstractmethod
    def load(self, flats: Sequence[Tensor]) -> None:
        """Make the parameters of the model those in ``flats``, which the caller gives away."""

    def load_updated(self, view: VersionView, numbers: Collection[int]) -> None:
        """Make some parameters of the model, given by their numbers, those of a later version.

        From then on autograd refuses graphs that need their earlier values. All others stay untouched.
        """
        raise AssertionError("this transport has one optimizer")

    def backward_root(self, pulled: Sequence[Tensor]) -> Tensor:
        """Return the root of the distributed backward that pushes what is in ``gradient_views``. Only if ``recorded``.

        Raises:
            NotFinite: a gradient does not fit into server.wire_dtype.
        """
        raise AssertionError("the backward of this transport is local")

    def residuals(self) -> dict[str, Tensor]:
        """Return what compression has lost so far, by parameter. Only with ``feedback``."""
        raise AssertionError("this transport compresses nothing")

    def load_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Continue with ``residuals()``, of this or of another division of the parameters. Only with ``feedback``."""
        raise AssertionError("this transport compresses nothing")

    @abstractmethod
    def step_bytes(self, pulled: Sequence[Tensor]) -> int:
        """Return the bytes that a step with this version moves between two processes, in both directions."""

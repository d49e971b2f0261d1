"""The two ends of the way that parameters and gradients take between the server and one trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from paramserver.metrics.records import StepReport
from paramserver.transport.messages import VersionView


@dataclass(frozen=True)
class GradientBucket:
    """Flat tensor ``number`` of those that server ``server`` owns."""

    server_index: int
    flat_index: int


class ServerTransport(ABC):
    """The server's end, one for each trainer. Called under the server's lock.

    ``in_place`` says that gradients lie in memory that several servers may share.
    """

    in_place = False

    @abstractmethod
    def pin_version(self) -> int:
        """Set the current version aside for the trainer's next pull; the place by which the other end finds it."""

    @abstractmethod
    def pull(self) -> tuple[Tensor, ...]:
        """What was offered, as tensors whose gradients come back."""

    @abstractmethod
    def view_version(self) -> tuple[int | None, Sequence[Tensor]]:
        """The current version without a way back, for validation: its place, or itself. Good until the next offer."""

    def receive_bucket(self, number: int, gradient: Tensor) -> None:
        """The gradient of flat tensor ``number``, sent before the context; see ``TrainerTransport.early``."""
        raise AssertionError("no gradient comes early")

    @abstractmethod
    def collect_gradients(self, held: Mapping[Tensor, Tensor]) -> list[Tensor] | None:
        """The flat gradients of a push, which the caller may change; None where the context holds none.

        Args:
            held: the gradients of the context, by leaf.
        """

    def buffers_to_send(self, current: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What a trainer gets of the module buffers of a version beside what it was offered."""
        return tuple(current)

    def view_retained(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> VersionView:
        """A past version, for validation."""
        return VersionView(None, tuple(parameters), tuple(buffers))

    def complete_push(self, report: StepReport, buffers: Sequence[Tensor]) -> tuple[StepReport, Sequence[Tensor]]:
        """A push's report and module buffers, with what only this end knows. Called after ``gradients``."""
        return report, buffers

    @abstractmethod
    def unpin(self) -> None:
        """The trainer has pushed, or is gone: it needs what it was offered no more."""


class TrainerTransport(ABC):
    """A trainer's end.

    ``name`` is the word of the key server.transport; ``in_place`` says that a version is found by its place, so that
    the answer to a pull is needed no sooner than the gradients. ``gradient_views`` are where the gradients of a step
    are put, one for each trained parameter in the order of the layout; they stay valid, with what the last step left.
    ``early`` are the messages that leave by themselves before ``seal``, each with the numbers of the parameters whose
    gradients it carries: it may leave once those are there, while backward goes on.
    """

    name: str
    zero_copy: bool
    gradient_views: Sequence[Tensor]
    buckets: Mapping[GradientBucket, Sequence[int]] = {}

    def bucket_tensor(self, early: GradientBucket) -> Tensor:
        """What such a message carries, from ``gradient_views``. It is not changed before the step has its answer."""
        raise AssertionError("no gradient leaves early")

    @abstractmethod
    def map_version(self, place: int) -> None:
        """Make the model hold the version at a place. Only with ``in_place``."""

    @abstractmethod
    def load(self, flats: Sequence[Tensor]) -> None:
        """Make the model hold what is in these flat tensors, which nobody else uses."""

    @abstractmethod
    def backward_root(self, pulled: Sequence[Tensor]) -> Tensor:
        """The root of the distributed backward that hands over what is in ``gradient_views``."""

    @abstractmethod
    def step_bytes(self, pulled: Sequence[Tensor]) -> int:
        """What a step with this version moves between two processes, both ways."""

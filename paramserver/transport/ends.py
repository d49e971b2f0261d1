"""The two ends of the way that parameters and gradients take between the server and one trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor


class ServerEnd(ABC):
    """The server's end, one for each trainer. Called under the server's lock."""

    @abstractmethod
    def pull(self) -> tuple[Tensor, ...]:
        """The current version, as tensors whose gradients come back: what the answer to an announcement carries."""

    @abstractmethod
    def look(self) -> tuple[Tensor, ...]:
        """The current version without a way back: for validation. Good until the next pull or look."""

    @abstractmethod
    def gradients(self, held: Mapping[Tensor, Tensor]) -> list[Tensor] | None:
        """The flat gradients of a push, which the caller may change; None where the context holds none.

        Args:
            held: the gradients of the context, by leaf.
        """

    @abstractmethod
    def release(self) -> None:
        """The trainer has pushed, or is gone: it reads the version that it pulled no more."""


class TrainerEnd(ABC):
    """A trainer's end.

    ``name`` is the word of the key server.transport. ``gradient_views`` are where the gradients of a step are put, one
    for each trained parameter in the order of the layout; they stay valid, with what the last step left in them.
    """

    name: str
    gradient_views: Sequence[Tensor]

    @abstractmethod
    def take(self, pulled: Sequence[Tensor]) -> None:
        """Make the model hold a version that came from the other end."""

    @abstractmethod
    def take_copy(self, flats: Sequence[Tensor]) -> None:
        """Make the model hold these flat tensors, which nobody else uses."""

    @abstractmethod
    def seal(self, pulled: Sequence[Tensor]) -> Tensor:
        """The root of the distributed backward that hands over what is in ``gradient_views``."""

    @abstractmethod
    def bytes_of(self, pulled: Sequence[Tensor]) -> int:
        """What a step with this version moves between two processes, both ways."""

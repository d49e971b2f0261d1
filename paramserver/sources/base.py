"""The protocol between what produces samples and the trainer's buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Partition:
    """A trainer's share: ``index`` of ``count``."""

    index: int
    count: int


class Source(ABC):
    """An ordered sequence of ``(key, sample)``, read by one feeder thread.

    Its position is the number of samples that were put into the buffer, which the buffer counts under the lock that
    guards its content; so the two always agree.

    Attributes:
        refetchable: ``fetch(key)`` gives a sample again, so that checkpoints store keys in place of samples.
    """

    refetchable: bool = False

    @abstractmethod
    def samples(self, position: int) -> Iterator[tuple[Any, Any]]:
        """The sequence from ``position`` on, which is 0 at the start of a run."""

    def groups(self, position: int) -> Iterator[Sequence[tuple[Any, Any]]]:
        """``samples`` in the groups in which they are at hand: what follows a group may take its time."""
        return ([pair] for pair in self.samples(position))

    def fetch(self, key: Any) -> Any:
        """The sample of this key; only where ``refetchable``."""
        raise LookupError(f"{type(self).__name__} cannot give sample {key!r} a second time")

    @property
    def endless(self) -> bool:
        """Whether the sequence never ends by itself."""
        return False

    @property
    def total(self) -> int | None:
        """How many samples this share will put from position 0 to the end; None where unknown or endless."""
        return None

    @property
    def pass_samples(self) -> int | None:
        """How many samples one pass over the data holds for all trainers together; None where unknown."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What besides the position is needed to go on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back ``state_dict()``."""

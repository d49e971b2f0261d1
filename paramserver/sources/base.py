"""The protocol between what produces samples and the trainer's buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paramserver.errors import CheckpointError
from paramserver.online.spec import ReceiverSpec


@dataclass(frozen=True)
class Partition:
    """A trainer's share: ``index`` of ``count``."""

    index: int
    count: int


@dataclass(frozen=True)
class ResumePosition:
    """How far one trainer of an earlier run had come, for a run with another number of trainers.

    Attributes:
        state: its source's ``state_dict()``.
        position: how many samples it had put into its buffer.
        unserved: keys of those that it held and had never served, in order; only where the source is ``refetchable``
            (otherwise the samples themselves go over).
        mark: of the last group that the buffer had got; None where there was none.
    """

    state: Mapping[str, Any]
    position: int
    unserved: Sequence[Any] = ()
    mark: Any = None


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
    def expected(self) -> int | None:
        """How many samples this share is planned to put from position 0 to the end; there may come to be others."""
        return self.total

    @property
    def pass_samples(self) -> int | None:
        """How many samples one pass over the data holds for all trainers together; None where unknown."""
        return None

    def connect(self, post: ReceiverSpec) -> None:
        """Learn of the online run, before anything is read; for sources whose samples come over the network."""

    def stop(self) -> None:
        """No more samples are wanted: whoever makes them is told, and ``groups`` ends. ``close`` comes later."""

    def close(self) -> None:
        """Stop, and have ``groups`` end in the thread that reads it, also where it waits; called once by its owner."""

    def figures(self) -> dict[str, Any]:
        """Counts for a record, of what was received, expected and not taken in the whole run; from any thread."""
        return {}

    def statistics(self) -> dict[str, dict[str, float]]:
        """``{field: {mean, deviation, count, not_finite}}`` of what came since this was asked last; from any thread."""
        return {}

    def mark(self) -> Any:
        """What the source needs besides the position to go on after the group that ``groups`` gave last.

        It is kept with the samples of that group, so that it always belongs to what the buffer has got.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on, besides the position and the mark."""
        return {}

    def load_state_dict(self, state: dict[str, Any], mark: Any = None) -> None:
        """Take back ``state_dict()``, and the mark of the last group that the buffer got."""

    def reshard(self, leftovers: Sequence[ResumePosition], held: Sequence[Any]) -> None:
        """Go on with this trainer's share of what another number of trainers left.

        Args:
            leftovers: of all earlier trainers, in their order.
            held: the keys that this trainer's buffer begins with; they count as the first positions.

        Raises:
            CheckpointError: this kind of source has a share for the same number of trainers only.
        """
        raise CheckpointError(
            f"a checkpoint of {len(leftovers)} trainers, whose data comes from {type(self).__name__}, must be resumed "
            f"with {len(leftovers)}; give cluster.num_trainers or --world_size so, or a source with reshard"
        )

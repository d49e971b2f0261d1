"""The interface between what produces samples and the feeder, which puts them into a trainer's buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paramserver.errors import CheckpointError, UnsupportedConfiguration
from paramserver.online.spec import ReceiverSpec
from paramserver.sources.loader import WorkerOptions


@dataclass(frozen=True)
class Partition:
    """One trainer's share of the data: ``index`` of ``count``.

    Example::

        >>> partition = Partition(index=1, count=3)
        >>> list(range(10))[partition.index :: partition.count]
        [1, 4, 7]
    """

    index: int
    count: int


@dataclass(frozen=True)
class ResumePosition:
    """Where one trainer of an earlier run stopped reading, for a run with another number of trainers.

    Attributes:
        state: its source's ``state_dict()``.
        position: how many samples it had put into its buffer.
        unserved: keys of those that its buffer held and had never served, in order; only if the source is
            ``refetchable`` (otherwise the samples themselves are resharded).
        mark: of the last group in its buffer; None if there was none.
        applied: ``AppliedPositions.state_dict()`` of a trainer that was lost: what was applied of its samples. Position
            and ``unserved`` follow from it; only if the source is ``refetchable``.
        partly: (key, times served) of samples that its buffer had served fewer times than due, and that no buffer of
            the new trainers has room for; only if the source is ``refetchable``.
        kept: keys of the samples of its buffer that the buffers of the new trainers start with.
        times_due: how often each sample is served.

    Example::

        >>> ResumePosition(state={"seed": 0}, position=640, unserved=[638, 639]).mark is None
        True
    """

    state: Mapping[str, Any]
    position: int
    unserved: Sequence[Any] = ()
    mark: Any = None
    applied: Mapping[str, Any] | None = None
    partly: Sequence[tuple[Any, int]] = ()
    kept: Sequence[Any] = ()
    times_due: int = 1


@dataclass(frozen=True)
class KeyedSamples(Sequence[tuple[Any, Any]]):
    """Keys and samples that were read together: a group of ``Source.groups`` without a tuple per sample.

    Example::

        >>> list(KeyedSamples([7, 8], [0.5, 1.5]))
        [(7, 0.5), (8, 1.5)]
    """

    keys: Sequence[Any]
    samples: Sequence[Any]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return KeyedSamples(self.keys[index], self.samples[index])
        return self.keys[index], self.samples[index]


class Source(ABC):
    """An ordered sequence of ``(key, sample)``, read by one feeder thread.

    The position of a source is the number of its samples that were put into the buffer. The buffer counts them under
    the lock that guards its content, so position and content always agree.

    To write a source: subclass it, implement ``samples``, and return it from ``Task.train_source``.

    Attributes:
        refetchable: ``fetch(key)`` returns a sample again, so that checkpoints store keys instead of samples.
        repeatable: ``samples`` gives the same sequence in another process, so that the replacement of a lost trainer
            serves those samples that were not applied.
        acknowledges: ``mark_stored`` is called with each part of a group that the buffer has stored; without ``mark``.

    Example::

        >>> class Countdown(Source):
        ...     def samples(self, position):
        ...         for key in range(position, 3):
        ...             yield key, 3.0 - key
        >>> list(Countdown().samples(1))
        [(1, 2.0), (2, 1.0)]
    """

    refetchable: bool = False
    repeatable: bool = True
    acknowledges: bool = False

    def use_workers(self, options: WorkerOptions) -> None:
        """Read in worker processes instead of the thread that calls ``groups``. Called before anything is read.

        Raises:
            UnsupportedConfiguration: this kind of source cannot be read so.
            TaskError: the data set or ``worker_init_fn`` cannot be pickled.
        """
        raise UnsupportedConfiguration(
            f"training.loader_workers ({options.count}) must be 0, as train_source gives no map-style data set and no "
            "IterableDataset, and only those are read in worker processes; set it to 0"
        )

    # Reading, in the feeder thread.

    @abstractmethod
    def samples(self, position: int) -> Iterator[tuple[Any, Any]]:
        """Return the sequence from ``position`` on, which is 0 at the start of a run."""

    def groups(self, position: int) -> Iterator[Sequence[tuple[Any, Any]]]:
        """Return ``samples`` in the groups in which they become available; the feeder puts each group at once."""
        return ([pair] for pair in self.samples(position))

    def fetch(self, key: Any) -> Any:
        """Return the sample of this key; only if ``refetchable``."""
        raise LookupError(f"{type(self).__name__} cannot give sample {key!r} a second time")

    def fetch_all(self, keys: Sequence[Any], positions: Sequence[int]) -> list[Any]:
        """Return the samples of these keys, which were read at these positions; only if ``refetchable``."""
        return [self.fetch(key) for key in keys]

    def mark_stored(self, count: int) -> None:
        """Called once the buffer has stored the next ``count`` samples of ``groups``, if ``acknowledges``."""

    def mark(self) -> Any:
        """Return what the source needs besides the position to continue after the last group of ``groups``.

        The buffer keeps it with the samples of that group, so mark and content always agree.
        """
        return None

    # What is known before the end.

    @property
    def endless(self) -> bool:
        """Whether the sequence ends only when the run does."""
        return False

    @property
    def total(self) -> int | None:
        """How many samples this trainer puts from position 0 to the end; None if unknown or endless."""
        return None

    @property
    def expected(self) -> int | None:
        """How many samples this trainer is planned to put from position 0 to the end; the final number may differ."""
        return self.total

    @property
    def samples_per_pass(self) -> int | None:
        """How many samples one pass over the data has for all trainers together; None if unknown."""
        return None

    @property
    def failed_at(self) -> str:
        """Which of its samples the source was reading when it raised, by a name of its own; empty if it has none."""
        return ""

    # Start and end.

    def connect(self, receiver_spec: ReceiverSpec) -> None:
        """Set where samples arrive. Called before anything is read, for sources that receive over the network."""

    def stop(self) -> None:
        """End ``groups`` and notify the producers: no more samples are needed. ``close`` is called later."""

    def close(self) -> None:
        """End ``groups`` in the feeder thread, even while it waits. Called once, by the owner."""

    # Records, from any thread.

    def figures(self) -> dict[str, Any]:
        """Return counts for a record: samples received, expected and refused in the whole run."""
        return {}

    def statistics(self) -> dict[str, dict[str, float]]:
        """Return ``{field: {mean, deviation, count, not_finite}}`` of the samples since the last call."""
        return {}

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue, besides the position and the mark."""
        return {}

    def release_order(self, state: dict[str, Any], position: int) -> None:
        """Let a run that resumes with this ``state_dict()`` serve what follows in another order, if no pass has begun.

        Nothing before ``position`` is held.
        """

    def load_state_dict(self, state: dict[str, Any], mark: Any = None) -> None:
        """Restore ``state_dict()``, and the mark of the last group in the buffer."""

    @property
    def resume_note(self) -> str:
        """What the user should know after ``load_state_dict``; empty if nothing."""
        return ""

    @property
    def can_reshard(self) -> bool:
        """Whether another number of trainers can continue what this one leaves."""
        return type(self).reshard is not Source.reshard

    def reshard(self, leftovers: Sequence[ResumePosition], held: Sequence[Any]) -> Mapping[int, int] | None:
        """Continue with this trainer's share of what another number of trainers left.

        Args:
            leftovers: of all earlier trainers, in their order.
            held: the keys that this trainer's buffer starts with; they count as the first positions.

        Returns:
            {position: times applied} of samples after ``held`` that are applied fewer times than due from now on. None:
            there are none.

        Raises:
            CheckpointError: this kind of source can only continue with the same number of trainers.
        """
        raise CheckpointError(
            f"a checkpoint of {len(leftovers)} trainers, whose data comes from {type(self).__name__}, must be resumed "
            f"with {len(leftovers)}; set cluster.num_trainers or --world_size to it (several need mode rpc or ddp), or "
            "use a source with reshard"
        )

"""What every consistency answers: who may go on, and which gradients make the next update. Pure counts, no clock.

What trainers announce before a step, and what they are told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

from paramserver.limits import Limits


class Readiness(IntEnum):
    """What a trainer says before a step: it has its next batches, it waits for samples, or no more will come."""

    READY = 1
    WAITING = 2
    DRAINED = 3


class Stop(IntEnum):
    """Why a trainer asks all to stop; the larger one wins."""

    NO = 0
    LIMIT = 1
    SIGNAL = 2


class Verdict(Enum):
    """What a trainer does next.

    ``GO`` takes a step; ``WAIT`` announces itself again; ``END`` is the same for all. The other two come where trainers
    run freely: ``STAND`` says that all stand at the same step, where what is due there is done together; ``VALIDATE``
    that this trainer validates its share of a version that is kept for it, while others go on.
    """

    GO = "go"
    WAIT = "wait"
    END = "end"
    BARRIER = "barrier"
    VALIDATE = "validate"


@dataclass(frozen=True)
class Announcement:
    """One trainer's word before a step; ``batches`` it has ready for it."""

    readiness: Readiness
    batches: int = 1
    stop: Stop = Stop.NO
    reason: str = ""


@dataclass(frozen=True)
class Decision:
    """The answer to an announcement.

    ``active`` are the trainers that take part in the step, each with ``batches`` batches (fewer than
    ``accumulate_batches`` only where somebody's data ends); ``step`` and ``samples`` are what was applied before it
    (``VALIDATE``: the version to validate); ``interrupted`` tells a run that a signal ended from one that is complete.
    """

    verdict: Verdict
    active: tuple[int, ...]
    step: int
    samples: int
    reason: str = ""
    interrupted: bool = False
    batches: int = 0


@dataclass(frozen=True)
class RunTerms:
    """What a run agreed on before it began.

    Args:
        trainers: how many there are.
        limits: the first that is reached ends the run.
        uneven_inputs: "stop" or "join", where one trainer's data ends before another's.
        batch_size: samples of a batch at most; tells how many samples are on their way.
        barrier_every: steps at whose multiples trainers that run freely all stand still (checkpoints); 0 is never.
        validate_every: steps at whose multiples they validate a version that is kept for them; 0 is never.
    """

    num_trainers: int
    limits: Limits
    uneven_inputs: str = "stop"
    batch_size: int = 1
    barrier_every: tuple[int, ...] = ()
    validate_every: int = 0


@dataclass(frozen=True)
class Update:
    """The gradients that make the next version: their mean, in the order of ``trainers``.

    ``staleness[k]`` is the version that the k-th gradient is applied to minus the one that it was taken at;
    ``buffers_from`` the trainer whose module buffers become the version's.
    """

    trainers: tuple[int, ...]
    staleness: tuple[int, ...]
    buffers_from: int


class Consistency(ABC):
    """Takes announcements and pushes, and says what follows from them. Not thread-safe; it decides and does nothing.

    After each ``announce`` and ``push`` the caller asks ``due`` until it has no update left, makes each, and then hands
    out ``answers``.

    Args:
        terms: of the run.
        step, samples: applied so far.
    """

    lockstep: bool
    """All trainers take every step together, so each knows by itself when all validate and save."""

    def __init__(self, terms: RunTerms, step: int = 0, samples: int = 0) -> None:
        self.terms = terms
        self.step = step
        self.samples = samples
        self.dropped = dict.fromkeys(range(terms.num_trainers), 0)
        self._announced: dict[int, Announcement] = {}

    def announce(self, trainer_index: int, announcement: Announcement) -> None:
        """A trainer's word before a step. It waits until ``answers`` has a decision for it."""
        self._announced[trainer_index] = announcement

    @abstractmethod
    def pop_decisions(self) -> dict[int, Decision]:
        """The trainers that wait no longer, and what each does next. Each announcement is answered once."""

    @abstractmethod
    def rejection_reason(self, trainer_index: int, version: int) -> str | None:
        """Why a push may not be counted, or None: the update after the last, a second push, one out of turn."""

    @abstractmethod
    def push(self, trainer_index: int, version: int, samples: int) -> bool:
        """Count a push that was not refused; False where it came too late and is dropped."""

    @abstractmethod
    def next_update(self) -> Update | None:
        """The next update that can be made; ``step`` and ``samples`` then count it."""

    @abstractmethod
    def wants_buffers_from(self, trainer_index: int) -> bool:
        """Whether the module buffers of a trainer's next push may become those of the version."""

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on needs beside the counts."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back ``state_dict()``."""


def sequence_of(numbers: Sequence[int], trainers: int) -> dict[int, int] | None:
    """A number for each trainer; None where they are of another number of trainers."""
    return dict(enumerate(numbers)) if len(numbers) == trainers else None

"""What trainers announce before a step, and what they are told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


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
    STAND = "stand"
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

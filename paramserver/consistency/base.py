"""The consistency interface: which trainer continues, and which gradients make the next version. No clock, no process.

To add a consistency model:

1. Write a module with a subclass of ``Consistency``. It implements ``announce`` (optional), ``pop_decisions``,
   ``rejection_reason``, ``push``, ``next_update`` and ``wants_buffers_from``, and sets ``lockstep``; with keys of its
   own it implements ``from_config``, and with a state ``state_dict`` and ``load_state_dict``. If trainers wait for each
   other at checkpoints only, subclass ``FreeRunning`` instead: it leaves ``may_start``, ``push``, ``next_update`` and
   ``wants_buffers_from``.
2. Add the class to ``CLASSES`` in consistency/factory.py.
3. Add its name to ``CONSISTENCIES`` in config/schema.py.

tests/helpers/consistency_model.py runs random trainers against a model and checks what must hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

from paramserver.config import ServerConfig
from paramserver.limits import Limits


class Readiness(IntEnum):
    """What a trainer announces before a step: it has its next batches, it waits for samples, or its data has ended.

    Example::

        >>> Readiness.READY < Readiness.DRAINED
        True
    """

    READY = 1
    WAITING = 2
    DRAINED = 3


class Stop(IntEnum):
    """Why a trainer requests the end of the run; the larger reason wins.

    Example::

        >>> max(Stop.NO, Stop.SIGNAL, Stop.LIMIT)
        <Stop.SIGNAL: 2>
    """

    NO = 0
    LIMIT = 1
    SIGNAL = 2


class Verdict(Enum):
    """What a trainer does next.

    ``GO``: take a step. ``WAIT``: announce again. ``END``: the run ends, for all trainers. The other two exist without
    lockstep. ``BARRIER``: all trainers are at the same step, where they validate or save together. ``VALIDATE``: this
    trainer validates its share of a retained version, while the others continue.

    Example::

        >>> Verdict("barrier")
        <Verdict.BARRIER: 'barrier'>
    """

    GO = "go"
    WAIT = "wait"
    END = "end"
    BARRIER = "barrier"
    VALIDATE = "validate"


@dataclass(frozen=True)
class Announcement:
    """What a trainer sends before each step; it has ``batches`` batches ready for it.

    Example::

        >>> Announcement(Readiness.READY, batches=4).stop
        <Stop.NO: 0>
    """

    readiness: Readiness
    batches: int = 1
    stop: Stop = Stop.NO
    reason: str = ""


@dataclass(frozen=True)
class Decision:
    """The reply to an announcement.

    Attributes:
        verdict: what to do next.
        active: indices of the trainers that take part in the step.
        step: steps applied before it; with ``VALIDATE`` the version to validate.
        samples: samples applied before it.
        reason: why the run ends.
        interrupted: a signal ends the run, which is therefore not complete.
        batches: of each active trainer; fewer than ``training.accumulate_batches`` only at the end of the data.

    Example::

        >>> Decision(Verdict.GO, active=(0, 1), step=10, samples=640, batches=1).interrupted
        False
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
    """What is fixed before a run starts.

    Attributes:
        num_trainers: number of trainers.
        limits: the first that is reached ends the run.
        uneven_inputs: "stop" or "join": what happens when the data of one trainer ends before that of another.
        batch_size: samples of a batch, at most; bounds the samples that are in flight.
        barrier_every: steps; at multiples of any of them all trainers wait for each other (checkpoints). 0 is never.
        validate_every: steps; multiples of it are retained and validated without a barrier. 0 is never.

    Example::

        >>> RunTerms(2, Limits(max_steps=100), barrier_every=(50,)).uneven_inputs
        'stop'
    """

    num_trainers: int
    limits: Limits
    uneven_inputs: str = "stop"
    batch_size: int = 1
    barrier_every: tuple[int, ...] = ()
    validate_every: int = 0


@dataclass(frozen=True)
class Update:
    """The gradients whose mean makes the next version, in the order of ``trainers``.

    Attributes:
        trainers: indices of the trainers.
        staleness: of each gradient: the version that it is applied to minus the version that it was computed at.
        buffers_from: the trainer whose module buffers become those of the version.

    Example::

        >>> Update(trainers=(0, 2), staleness=(0, 1), buffers_from=0).staleness
        (0, 1)
    """

    trainers: tuple[int, ...]
    staleness: tuple[int, ...]
    buffers_from: int


class Consistency(ABC):
    """Decides which trainer continues and which gradients make an update; the caller carries the decisions out.

    After each ``announce`` and each ``push``, call ``next_update`` until it returns None and apply each update, then
    send what ``pop_decisions`` returns. Not thread-safe: one lock of the caller covers these calls.

    Args:
        terms: of the run.
        step: steps applied so far.
        samples: samples applied so far.

    Example::

        >>> from paramserver.consistency import Sync
        >>> rule = Sync(RunTerms(2, Limits()))
        >>> for trainer in (0, 1):
        ...     rule.announce(trainer, Announcement(Readiness.READY))
        >>> rule.next_update() is None, [decision.verdict.name for decision in rule.pop_decisions().values()]
        (True, ['GO', 'GO'])
    """

    lockstep: bool
    """All trainers take every step together, so each of them knows without a message when to validate and save."""

    def __init__(self, terms: RunTerms, step: int = 0, samples: int = 0) -> None:
        self.terms = terms
        self.step = step
        self.samples = samples
        self.dropped = dict.fromkeys(range(terms.num_trainers), 0)
        self._announced: dict[int, Announcement] = {}

    @classmethod
    def from_config(cls, config: ServerConfig, terms: RunTerms, step: int, samples: int) -> Consistency:
        """Return an instance with the keys of the server section that concern it."""
        return cls(terms, step, samples)

    def announce(self, trainer_index: int, announcement: Announcement) -> None:
        """Record an announcement. The trainer waits until ``pop_decisions`` returns a decision for it."""
        self._announced[trainer_index] = announcement

    @abstractmethod
    def pop_decisions(self) -> dict[int, Decision]:
        """Return what each trainer does next that need not wait any longer; one decision for each announcement."""

    @abstractmethod
    def rejection_reason(self, trainer_index: int, version: int) -> str | None:
        """Return why a push must not be counted, or None.

        Such a push is an error of the trainer: it is for another version, a second one, or outside of a step.
        """

    @abstractmethod
    def push(self, trainer_index: int, version: int, samples: int) -> bool:
        """Count a push that is not rejected; return False if it arrived too late and is dropped."""

    @abstractmethod
    def next_update(self) -> Update | None:
        """Return the next update that is complete, and count it in ``step`` and ``samples``; None if there is none."""

    @abstractmethod
    def wants_buffers_from(self, trainer_index: int) -> bool:
        """Return whether the module buffers of a trainer's next push may become those of the version."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs in addition to ``step`` and ``samples``, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``, also of another consistency or another number of trainers."""

"""The consistency interface: which trainer continues, and which gradients make the next version. No clock, no process.

A consistency model is a subclass of ``Consistency``, or of ``FreeRunning`` if trainers wait for each other at
checkpoints only. It implements the abstract methods, and declares ``lockstep`` and ``drops_pushes``, and what else
applies of the attributes below; with keys of its own it implements ``from_config``, and with a state ``state_dict`` and
``load_state_dict``. docs/architecture.md ("Where to make changes") has where it is registered.
tests/helpers/consistency_model.py runs random trainers against a model and checks what must hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Any

from paramserver.config import ServerConfig
from paramserver.limits import Limits


class Readiness(IntEnum):
    """What a trainer announces before a step: it has its next batches, it waits for samples, or its data has ended."""

    READY = 1
    WAITING = 2
    DRAINED = 3


class Stop(IntEnum):
    """Why the end of the run, or of its generation, is requested; the larger reason wins.

    ``RESIZE``: the run continues from here with other trainers.
    """

    NO = 0
    RESIZE = 1
    LIMIT = 2
    SIGNAL = 3


class Verdict(Enum):
    """What a trainer does next.

    ``GO``: take a step. ``WAIT``: announce again. ``END``: the run ends, for all trainers. ``BARRIER``: all trainers
    are at the same step, where they validate or save together; in lockstep they do so without it, and get it where all
    that had to are lost. ``VALIDATE``, only without lockstep: this trainer validates a share of a retained version, its
    own or that of a lost trainer, while the others continue.
    """

    GO = "go"
    WAIT = "wait"
    END = "end"
    BARRIER = "barrier"
    VALIDATE = "validate"


@dataclass(frozen=True)
class Announcement:
    """What a trainer sends before each step; it has ``batches`` batches ready for it."""

    readiness: Readiness
    batches: int = 1
    stop: Stop = Stop.NO
    reason: str = ""
    samples: int | None = None  # of these batches, at most; None = ``RunTerms.batch_size`` each
    waited_s: float = 0.0  # for its data, before it announced: training time, of which the server does not know


@dataclass(frozen=True)
class Decision:
    """The reply to an announcement."""

    verdict: Verdict
    active: tuple[int, ...]  # indices of the trainers that take part in the step
    step: int  # steps applied before it; with ``VALIDATE`` the version to validate
    samples: int  # samples applied before it
    reason: str = ""  # why the run ends
    interrupted: bool = False  # a signal ends the run, which is therefore not complete
    batches: int = 0  # of each active trainer; fewer than ``training.accumulate_batches`` only at the end of the data
    resizes: bool = False  # only this generation ends; the run continues with other trainers
    share: int = -1  # with ``VALIDATE`` the trainer whose share of the validation samples is meant
    skipped: int = 0  # samples of steps that were skipped before it
    batch_began: int | None = None  # with several optimizers the version that the batch before it began with

    @property
    def position(self) -> int:
        """The samples before it that count for epochs: those that were applied and those that were skipped."""
        return self.samples + self.skipped

    @property
    def completes(self) -> bool:
        """With ``END``: whether the run is complete, so that nothing of it follows."""
        return not (self.interrupted or self.resizes)


def end(stop: Stop, reason: str, step: int, samples: int) -> Decision:
    """Return the decision that ends the run, or this generation of it, because of ``stop``."""
    interrupted, resizes = stop is Stop.SIGNAL, stop is Stop.RESIZE
    return Decision(Verdict.END, (), step, samples, reason, interrupted=interrupted, resizes=resizes)


@dataclass(frozen=True)
class RunTerms:
    """What is fixed before a run starts."""

    num_trainers: int
    limits: Limits  # the first that is reached ends the run
    # "stop" or "join": what happens when the data of one trainer ends before that of another.
    uneven_inputs: str = "stop"
    batch_size: int = 1  # samples of a batch, at most; bounds the samples that are in flight
    # Steps; at multiples of any of them all trainers wait for each other (checkpoints). 0 is never.
    barrier_every: tuple[int, ...] = ()
    validate_every: int = 0  # steps; multiples of it are retained and validated without a barrier. 0 is never.
    has_rounds: bool = False  # a step is a round of local steps


@dataclass(frozen=True)
class Update:
    """The gradients whose mean makes the next version, in the order of ``trainers``."""

    trainers: tuple[int, ...]
    # Of each gradient: the version that it is applied to minus the version that it was computed at.
    staleness: tuple[int, ...]
    # The trainer whose module buffers become those of the version. If the trainer that was asked for them left, this
    # one may have pushed none; then those of the version before are kept.
    buffers_from: int
    averages_buffers: bool = False  # the version has their mean over all these trainers instead
    # Otherwise no version is made yet: the gradients are added to those of the next update.
    completes: bool = True
    # No version is made of them, as one is NaN or infinite.
    is_skipped: bool = False


class Consistency(ABC):
    """Decides which trainer continues and which gradients make an update; the caller carries the decisions out.

    After each ``announce``, ``push``, ``join``, ``remove``, ``give_up``, ``set_blocks`` and ``request_stop``, call
    ``next_update`` until it returns None and apply each update, then send what ``pop_decisions`` returns. Not
    thread-safe: one lock of the caller covers these calls.

    A trainer whose process is lost leaves, and its replacement joins under the same index. In between the others
    continue. If their data ends first they wait, because that of the lost trainer has not been served, until a
    replacement joins or ``give_up`` is called for the lost one.
    """

    lockstep: bool
    """All trainers take every step together, so each of them knows without a message when to validate and save."""

    drops_pushes: bool
    """A push that arrives after the update of its version is dropped and counted, although nothing failed."""

    allows_tables = False
    """Embedding tables can be trained: each update has whole pushes, none of which is dropped or added up before."""

    waits_for_all = False
    """Each update has the gradients of all trainers of its step, so its buckets can be computed as they arrive."""

    validates_together = False
    """All trainers wait for each other to validate, also where they could validate retained versions without that."""

    several_updates = False
    """With several optimizers: the trainers of a step may push again after its update, and after each further one.

    The step of a trainer ends when it announces the next one.
    """

    trainers: set[int]
    """Indices of the live trainers: those that take part now."""

    participants: set[int]
    """The live trainers that validate and save together: those of the last barrier or end, or in lockstep step."""

    def __init__(self, terms: RunTerms, step: int = 0, samples: int = 0) -> None:
        self.terms = terms
        self.step = step
        self.samples = samples
        self.trainers = set(range(terms.num_trainers))
        self.participants = set()
        self.dropped = dict.fromkeys(range(terms.num_trainers), 0)
        self._announced: dict[int, Announcement] = {}
        self._drained: set[int] = set()  # live trainers whose data has ended
        self._waiting: set[int] = set()  # live trainers that waited for samples when they announced last
        self._blocks: set[int] = set()  # see ``set_blocks``
        self._lost: set[int] = set()  # trainers that left before their data had ended

    @classmethod
    def from_config(cls, config: ServerConfig, terms: RunTerms, step: int, samples: int) -> Consistency:
        """Return an instance with the keys of the server section that concern it."""
        return cls(terms, step, samples)

    @classmethod
    @abstractmethod
    def gradients_per_update(cls, config: ServerConfig, trainers: int) -> int:
        """Return of how many trainers an update has the gradients while all of them have data."""

    @classmethod
    def updates_per_round(cls, config: ServerConfig, trainers: int) -> float:
        """Return how many updates there are while each trainer pushes once."""
        return 1.0 if cls.drops_pushes else trainers / cls.gradients_per_update(config, trainers)

    # Which trainers there are.

    def join(self, trainer_index: int) -> None:
        """Let a trainer take part from now on: the replacement of one that left, or one more.

        A step, a barrier or a validation that is in progress does not include it. Not after a decision to end the run.
        """
        assert trainer_index not in self.trainers, trainer_index
        self.trainers.add(trainer_index)
        self._lost.discard(trainer_index)
        self.dropped.setdefault(trainer_index, 0)

    def remove(self, trainer_index: int) -> None:
        """Forget a trainer, for which no other waits any longer.

        A push of it that was counted remains part of an update; from now on its pushes are rejected, and it must not
        announce.
        """
        self.trainers.remove(trainer_index)
        self.participants.discard(trainer_index)
        self._announced.pop(trainer_index, None)
        self._waiting.discard(trainer_index)
        self._blocks.discard(trainer_index)
        if trainer_index not in self._drained:
            self._lost.add(trainer_index)
        self._drained.discard(trainer_index)

    def give_up(self, trainer_index: int) -> None:
        """Give up a trainer that left: the run may end although not all of its data was served."""
        self._lost.discard(trainer_index)

    def is_validated(self, version: int) -> bool:
        """Return whether all shares of the retained versions up to this one were reported, which ``VALIDATE`` asks for.

        In lockstep no version is retained.
        """
        return True

    def share_reported(self, trainer_index: int) -> None:
        """Note that a trainer has reported the share that it was to validate. If it leaves before, another does."""

    def validate_at_barriers(self) -> None:
        """Let all trainers wait for each other to validate: no version can be retained. Call it before the start."""
        if every := self.terms.validate_every:
            self.terms = replace(self.terms, barrier_every=(*self.terms.barrier_every, every), validate_every=0)

    @property
    def is_paused(self) -> bool:
        """Whether no trainer trains: all that have data validate or save, or there is none."""
        return not self.trainers

    @property
    def in_step(self) -> bool:
        """Whether a step in lockstep is in progress: a trainer without data waits for the version that it makes.

        If all active trainers of the step leave before they push, it is abandoned. Then no version follows from it, and
        those that wait must announce again.
        """
        return False

    # What they do.

    def announce(self, trainer_index: int, announcement: Announcement) -> None:
        """Record an announcement. The trainer waits until ``pop_decisions`` returns a decision for it."""
        assert trainer_index in self.trainers, trainer_index
        self._announced[trainer_index] = announcement
        if announcement.readiness is Readiness.DRAINED:
            self._drained.add(trainer_index)
        mark = self._waiting.add if announcement.readiness is Readiness.WAITING else self._waiting.discard
        mark(trainer_index)

    def set_blocks(self, trainer_index: int, blocks: bool) -> None:
        """Record whether the buffer of a live trainer is full, and simulations wait for room in it.

        They may be those whose samples other trainers wait for, once trainers have consumed differently many samples of
        a stream, as after the loss of one of them. Then it does not wait for these.
        """
        mark = self._blocks.add if blocks else self._blocks.discard
        mark(trainer_index)

    def blocks(self, trainer_index: int) -> bool:
        """Return what ``set_blocks`` recorded."""
        return trainer_index in self._blocks

    def request_stop(self, stop: Stop, reason: str) -> None:
        """Request the end on behalf of the trainers that wait for a decision; they may not announce again for long."""
        for trainer_index, announcement in list(self._announced.items()):
            if stop > announcement.stop:
                self.announce(trainer_index, replace(announcement, stop=stop, reason=reason))

    @abstractmethod
    def pop_decisions(self) -> dict[int, Decision]:
        """Return what each trainer does next that need not wait any longer; one decision for each announcement."""

    @abstractmethod
    def rejection_reason(self, trainer_index: int, version: int) -> str | None:
        """Return why a push must not be counted, or None.

        Such a push is an error of the trainer: it is for another version, a second one, or outside of a step.
        """

    @abstractmethod
    def push(self, trainer_index: int, version: int, samples: int, finite: bool = True) -> bool:
        """Count a push that is not rejected; return False if it arrived too late and is dropped.

        One that is not ``finite`` is dropped where trainers run freely. In lockstep the whole update is skipped.
        """

    @abstractmethod
    def next_update(self) -> Update | None:
        """Return the next update that is complete, and count it in ``step`` and ``samples``; None if there is none."""

    def complete_update(self) -> Update | None:
        """Return an update that has what was added to the next one so far, for a checkpoint; None if nothing was."""
        return None

    @abstractmethod
    def wants_buffers_from(self, trainer_index: int) -> bool:
        """Return whether the module buffers of a trainer's next push may become those of the version."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs in addition to ``step`` and ``samples``, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``, also of another consistency or another number of trainers."""

"""Trainers that run freely: each is answered by itself, and all stand still only where something is done together."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from dataclasses import dataclass

from paramserver.consistency.base import Announcement, Consistency, Decision, Readiness, RunTerms, Stop, Verdict
from paramserver.limits import is_due

MAX_RETAINED_VERSIONS = 2
"""So many versions are kept for validations at once: one that is validated, and the next."""


@dataclass(frozen=True)
class StepPermit:
    """A step that a trainer was let go for: the version it has, and how many samples it may bring."""

    version: int
    samples: int


class FreeRunning(Consistency):
    """What consistencies without lockstep share: tickets, stands, validations of kept versions, the end.

    A ticket is given only where its push is sure to be wanted: never more of them than there are versions up to the
    next stand or limit. So limits are exact, a checkpoint is of exactly the step that is due, no push is in flight
    when all stand, and no served sample is lost (but what a kind of it drops).
    """

    lockstep = False

    def __init__(self, terms: RunTerms, step: int = 0, samples: int = 0) -> None:
        super().__init__(terms, step, samples)
        self._permits: dict[int, StepPermit] = {}
        self._owed: dict[int, deque[int]] = {i: deque() for i in range(terms.num_trainers)}
        self._validating: set[int] = set()
        self._drained: set[int] = set()
        self._stood = step
        self._end: tuple[Stop, str] | None = None

    # What a kind of it says.

    @abstractmethod
    def may_start(self, trainer_index: int) -> bool:
        """Whether a trainer that has data may start its next step, as far as the others are concerned."""

    def may_still_apply(self, coming: int) -> bool:
        """Whether one more push, of at most ``coming`` samples, will be applied in whatever order all arrive."""
        terms, under_way = self.terms, len(self._permits)
        last = [every * (self.step // every + 1) for every in terms.barrier_every if every]
        last += [terms.limits.max_steps] if terms.limits.max_steps is not None else []
        if last and self.step + under_way >= min(last):
            return False
        if terms.limits.max_samples is None:
            return True
        brought = [coming, *(ticket.samples for ticket in self._permits.values())]
        return self.samples + sum(brought) - min(brought) < terms.limits.max_samples  # the smallest may come last

    def has_version_slot(self) -> bool:
        """Whether one more push makes no version that would have to be kept beside ``KEPT_VERSIONS`` others.

        A hold until those who owe validations have made some: each does at its next boundary, whoever is held, so all
        go on. Every push that is under way makes a version of its own.
        """
        every = self.terms.validate_every
        if not every:
            return True
        kept = max(len(owed) + (i in self._validating) for i, owed in self._owed.items())
        coming = (self.step + len(self._permits) + 1) // every - self.step // every
        return kept + coming <= MAX_RETAINED_VERSIONS

    @property
    def has_partial_update(self) -> bool:
        """Whether a push waits for others, who must be let go before anything is done together."""
        return False

    # Answers.

    def announce(self, trainer_index: int, announcement: Announcement) -> None:
        super().announce(trainer_index, announcement)
        self._validating.discard(trainer_index)
        if announcement.stop is not Stop.NO:
            self._ask_to_end(announcement.stop, announcement.reason)
        if announcement.readiness is Readiness.DRAINED:
            self._drained.add(trainer_index)  # also while it stands or validates
            if len(self._drained) == self.terms.num_trainers:
                self._ask_to_end(Stop.LIMIT, "all data was served")
            elif self.terms.uneven_inputs == "stop":
                self._ask_to_end(Stop.LIMIT, f"trainer {trainer_index} has no more data (training.uneven_inputs: stop)")

    def _ask_to_end(self, stop: Stop, reason: str) -> None:
        """Remember why all shall end: the first reason, but a signal outweighs a limit."""
        if self._end is None or stop > self._end[0]:
            self._end = stop, reason

    def pop_decisions(self) -> dict[int, Decision]:
        if (limit := self.terms.limits.reached(self.step, self.samples)) is not None:
            self._end = Stop.LIMIT, limit  # such a run is complete, whatever else would end it (see ``decide``)
        answered = self._validations()
        if (self._stands_wanted or self._end is not None) and not self.has_partial_update:
            return answered or self._stand()
        for index in sorted(set(self._announced) - set(answered)):
            decision = self._alone(index, self._announced[index])
            if decision is not None:
                answered[index] = decision
                del self._announced[index]
        return answered

    @property
    def _stands_wanted(self) -> bool:
        return self._stood != self.step and any(is_due(self.step, every) for every in self.terms.barrier_every)

    def _validations(self) -> dict[int, Decision]:
        """Those that are at a boundary and owe the validation of a version that is kept for them, also before an end.

        What is due at a version is done before a signal ends the run there, as in lockstep: who goes on would not.
        """
        owing = [i for i in sorted(self._announced) if self._owed[i]]
        for index in owing:
            del self._announced[index]
        self._validating.update(owing)
        return {i: Decision(Verdict.VALIDATE, (), self._owed[i].popleft(), self.samples) for i in owing}

    def _stand(self) -> dict[int, Decision]:
        """One answer for all, once all are at a boundary."""
        if len(self._announced) < self.terms.num_trainers:
            return {}
        everybody = sorted(self._announced)
        self._announced.clear()
        if self._stands_wanted:
            self._stood = self.step
            return dict.fromkeys(everybody, Decision(Verdict.BARRIER, (), self.step, self.samples))
        assert self._end is not None
        interrupted = self._end[0] is Stop.SIGNAL
        end = Decision(Verdict.END, (), self.step, self.samples, self._end[1], interrupted)
        return dict.fromkeys(everybody, end)

    def _alone(self, trainer_index: int, announcement: Announcement) -> Decision | None:
        if announcement.readiness is Readiness.WAITING:
            return Decision(Verdict.WAIT, (), self.step, self.samples) if self._end is None else None
        if announcement.readiness is Readiness.DRAINED or not self.may_start(trainer_index):
            return None
        coming = announcement.batches * self.terms.batch_size
        if not self.may_still_apply(coming):
            return None
        self._permits[trainer_index] = StepPermit(self.step, coming)
        return Decision(Verdict.GO, (trainer_index,), self.step, self.samples, batches=announcement.batches)

    # Pushes.

    def rejection_reason(self, trainer_index: int, version: int) -> str | None:
        ticket = self._permits.get(trainer_index)
        if ticket is None:
            return f"trainer {trainer_index} pushed outside a step that it takes part in (step {self.step})"
        if version != ticket.version:
            return (
                f"trainer {trainer_index} pushed a gradient of version {version}, and was let go with {ticket.version}"
            )
        return None

    def _advance(self) -> None:
        """One version more; where it is to be validated, each trainer owes its share."""
        self.step += 1
        if is_due(self.step, self.terms.validate_every):
            for owed in self._owed.values():
                owed.append(self.step)

"""The base of consistencies without lockstep: trainers get decisions one by one, and meet at barriers only."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from paramserver.consistency.base import Announcement, Consistency, Decision, Readiness, RunTerms, Stop, Verdict, end
from paramserver.limits import ALL_SERVED, is_due, no_more_data

MAX_RETAINED_VERSIONS = 2
"""How many versions are retained for validation at the same time: the one being validated, and the next."""


VersionShare: TypeAlias = "tuple[int, int]"
"""A retained version, and the trainer whose share of the validation samples is meant."""


@dataclass(frozen=True)
class StepPermit:
    """Permission for one step: the version that the trainer pulls, and the samples that it pushes at most."""

    version: int
    samples: int


class FreeRunning(Consistency):
    """Permits, barriers, validations of retained versions and the end of the run, for consistencies without lockstep.

    A trainer gets a permit only if its push is certain to be applied: there are never more permits than versions up to
    the next barrier or limit. So limits are exact, a checkpoint is of exactly the step that is due, no push is in
    flight at a barrier, and no served sample is lost (except for gradients that a subclass drops).
    """

    lockstep = False

    def __init__(self, terms: RunTerms, step: int = 0, samples: int = 0) -> None:
        super().__init__(terms, step, samples)
        self._permits: dict[int, StepPermit] = {}
        # Of each trainer, versions with shares to validate, the trainer's own and those of lost trainers, in order.
        self._to_validate: dict[int, list[VersionShare]] = {i: [] for i in self.trainers}
        self._validating: dict[int, VersionShare] = {}
        self._unassigned: list[VersionShare] = []  # while there is no trainer
        self._last_barrier = step  # a resumed run has done what is due at its first step
        self._at_barrier = False  # until one of the participants announces again
        self._end: tuple[Stop, str] | None = None

    # What subclasses decide.

    @abstractmethod
    def may_start(self, trainer_index: int) -> bool:
        """Return whether a trainer that has data may start a step, considering the progress of the others."""

    def may_still_apply(self, coming: int) -> bool:
        """Return whether one more push, of at most ``coming`` samples, will be applied in whatever order all arrive.

        Where pushes are dropped all permits for one version contribute to one update.
        """
        if self.drops_pushes:
            return True
        terms = self.terms
        last = [every * (self.step // every + 1) for every in terms.barrier_every if every]
        last += [terms.limits.max_steps] if terms.limits.max_steps is not None else []
        if last and self.step + self.versions_coming() >= min(last):
            return False
        if terms.limits.max_samples is None:
            return True
        pushed = [coming, *(permit.samples for permit in self._permits.values())]
        # The smallest push may arrive last: it is applied only if all others together stay below the limit.
        return self.samples + self.samples_coming() + sum(pushed) - min(pushed) < terms.limits.max_samples

    def versions_coming(self) -> int:
        """Return how many versions follow from the permits and from pushes that are in no version yet."""
        return len(self._permits)

    def samples_coming(self) -> int:
        """Return how many samples the pushes have that are in no version yet."""
        return 0

    def has_version_slot(self) -> bool:
        """Return whether one more push cannot make a version that exceeds ``MAX_RETAINED_VERSIONS``.

        If not, the trainer waits until others have validated. That cannot deadlock: they validate at their next
        announcement, whether or not they could start a step. Every permit counts as a version of its own.
        """
        every = self.terms.validate_every
        if not every:
            return True
        # A version is retained until those before it are validated too.
        oldest = min((version for version, _ in self._pending_shares()), default=self.step + 1)
        last = self.step + len(self._permits) + 1
        return last // every - (oldest - 1) // every <= MAX_RETAINED_VERSIONS

    @property
    @abstractmethod
    def has_partial_update(self) -> bool:
        """Whether a push waits for those of other trainers, which must continue before a barrier or the end."""

    # Which trainers there are.

    def join(self, trainer_index: int) -> None:
        super().join(trainer_index)
        self._to_validate[trainer_index], self._unassigned = self._unassigned, []

    def remove(self, trainer_index: int) -> None:
        super().remove(trainer_index)
        self._permits.pop(trainer_index, None)
        if self._at_barrier and not self.participants:
            self._at_barrier, self._last_barrier = False, -1  # for those that join: none has done what is due
        pending = self._to_validate.pop(trainer_index)
        if trainer_index in self._validating:
            pending = [self._validating.pop(trainer_index), *pending]
        for version, share in pending:
            self._assign(version, share)

    def give_up(self, trainer_index: int) -> None:
        super().give_up(trainer_index)
        self._end_if_all_served()

    # Validations.

    def _assign(self, version: int, share: int) -> None:
        """Let the trainer of a share validate it, or if that is lost the one with the fewest to validate."""
        to = self._to_validate
        owner = share if share in to else min(to, key=lambda i: (len(to[i]), i), default=None)
        shares = self._unassigned if owner is None else to[owner]
        shares.append((version, share))
        shares.sort()

    def _pending_shares(self) -> Iterator[VersionShare]:
        return chain(self._unassigned, *self._to_validate.values(), self._validating.values())

    def is_validated(self, version: int) -> bool:
        return all(version < pending for pending, _ in self._pending_shares())

    def share_reported(self, trainer_index: int) -> None:
        del self._validating[trainer_index]

    # Decisions.

    def announce(self, trainer_index: int, announcement: Announcement) -> None:
        super().announce(trainer_index, announcement)
        if trainer_index in self.participants:
            self._at_barrier = False
        if announcement.stop is not Stop.NO:
            self._request_end(announcement.stop, announcement.reason)
        if announcement.readiness is Readiness.DRAINED:
            self._end_if_all_served()
            if self.terms.uneven_inputs == "stop":
                self._request_end(Stop.LIMIT, no_more_data(trainer_index))

    def _end_if_all_served(self) -> None:
        if self._drained == self.trainers and not self._lost:
            self._request_end(Stop.LIMIT, ALL_SERVED)

    def request_stop(self, stop: Stop, reason: str) -> None:
        super().request_stop(stop, reason)
        self._request_end(stop, reason)

    def _request_end(self, stop: Stop, reason: str) -> None:
        if self._end is None or stop > self._end[0]:  # the first reason counts, but a signal outweighs a limit
            self._end = stop, reason

    def pop_decisions(self) -> dict[int, Decision]:
        if (limit := self.terms.limits.reached(self.step, self.samples)) is not None:
            self._end = Stop.LIMIT, limit  # such a run is complete, whatever else would end it (see ``decide``)
        if self._at_barrier:
            return {}  # a trainer that has just joined makes no version while the others validate and save this one
        decisions = self._start_validations()
        if (self._is_barrier_due or self._end is not None) and not self.has_partial_update:
            return decisions or self._decide_together()
        for index in sorted(set(self._announced) - set(decisions)):
            decision = self._decide_one(index, self._announced[index])
            if decision is not None:
                decisions[index] = decision
                del self._announced[index]
        return decisions

    @property
    def _is_barrier_due(self) -> bool:
        return self._last_barrier != self.step and any(is_due(self.step, every) for every in self.terms.barrier_every)

    def _start_validations(self) -> dict[int, Decision]:
        """Decide for trainers that have a retained version to validate.

        This comes before the end of the run: what is due at a version is done before a signal ends the run there, as in
        lockstep, because a resumed run does not repeat it.
        """
        decisions = {}
        for index in [i for i in sorted(self._announced) if self._to_validate[i]]:
            del self._announced[index]
            version, share = self._validating[index] = self._to_validate[index].pop(0)
            decisions[index] = Decision(Verdict.VALIDATE, (), version, self.samples, share=share)
        return decisions

    def _decide_together(self) -> dict[int, Decision]:
        """Return one decision for all trainers, a barrier or the end, once all have announced a step."""
        if not self._announced or len(self._announced) < len(self.trainers):
            return {}
        trainers, self.participants = sorted(self._announced), set(self.trainers)
        self._announced.clear()
        if self._is_barrier_due:
            self._last_barrier, self._at_barrier = self.step, True
            return dict.fromkeys(trainers, Decision(Verdict.BARRIER, (), self.step, self.samples))
        assert self._end is not None
        return dict.fromkeys(trainers, end(*self._end, self.step, self.samples))

    def _decide_one(self, trainer_index: int, announcement: Announcement) -> Decision | None:
        if announcement.readiness is Readiness.WAITING:
            return Decision(Verdict.WAIT, (), self.step, self.samples) if self._end is None else None
        if announcement.readiness is Readiness.DRAINED or not self.has_version_slot():
            return None
        if not self.may_start(trainer_index):
            return None
        samples = announcement.samples
        coming = announcement.batches * self.terms.batch_size if samples is None else samples
        if not self.may_still_apply(coming):
            return None
        self._permits[trainer_index] = StepPermit(self.step, coming)
        return Decision(Verdict.GO, (trainer_index,), self.step, self.samples, batches=announcement.batches)

    # Pushes.

    def rejection_reason(self, trainer_index: int, version: int) -> str | None:
        permit = self._permits.get(trainer_index)
        if permit is None:
            return f"trainer {trainer_index} pushed outside a step that it takes part in (step {self.step})"
        if version != permit.version:
            return (
                f"trainer {trainer_index} pushed a gradient of version {version}, and has a permit for {permit.version}"
            )
        return None

    def _advance(self) -> None:
        """Count a version; if it is to be validated, each trainer validates its share at its next announcement."""
        self.step += 1
        if is_due(self.step, self.terms.validate_every):
            for share in range(self.terms.num_trainers):
                self._assign(self.step, share)

"""Consistencies without lockstep, and their base: trainers get decisions one by one, and meet at barriers only."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from paramserver.config import ServerConfig
from paramserver.consistency.base import (
    Announcement,
    Consistency,
    Decision,
    Readiness,
    RunTerms,
    Stop,
    Update,
    Verdict,
    end,
)
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

    @property
    def is_paused(self) -> bool:
        return self._at_barrier or self.trainers - self._drained <= self._validating.keys()

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
        return self._last_barrier != self.step and is_due(self.step, *self.terms.barrier_every)

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


class Async(FreeRunning):
    """Every gradient is an update, applied when it arrives to whatever version the server has then.

    Dean et al., "Large scale distributed deep networks", NeurIPS 2012 (Downpour SGD). As in Recht et al., "Hogwild!",
    NeurIPS 2011, reading and writing parameters takes no lock, but trainers read complete versions only.
    """

    drops_pushes = False
    allows_tables = True
    has_partial_update = False

    def __init__(self, terms: RunTerms, step: int = 0, samples: int = 0) -> None:
        super().__init__(terms, step, samples)
        self.clocks = dict.fromkeys(self.trainers, 0)
        self._arrived: deque[tuple[int, int, int]] = deque()  # trainer index, version, samples

    @classmethod
    def gradients_per_update(cls, config: ServerConfig, trainers: int) -> int:
        return 1

    @property
    def slowest_clock(self) -> int:
        """The smallest clock of a trainer whose data has not ended; of all trainers if all data has ended."""
        running = [clock for i, clock in self.clocks.items() if i not in self._drained]
        return min(running or self.clocks.values(), default=0)

    def join(self, trainer_index: int) -> None:
        super().join(trainer_index)
        self.clocks[trainer_index] = self.slowest_clock

    def remove(self, trainer_index: int) -> None:
        super().remove(trainer_index)
        del self.clocks[trainer_index]

    def may_start(self, trainer_index: int) -> bool:
        return True

    def push(self, trainer_index: int, version: int, samples: int, finite: bool = True) -> bool:
        del self._permits[trainer_index]
        self.clocks[trainer_index] += 1
        if not finite:
            return False
        self._arrived.append((trainer_index, version, samples))
        return True

    def next_update(self) -> Update | None:
        if not self._arrived:
            return None
        trainer_index, version, samples = self._arrived.popleft()
        update = Update((trainer_index,), (self.step - version,), trainer_index)
        self.samples += samples
        self._advance()
        return update

    def wants_buffers_from(self, trainer_index: int) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"clocks": [self.clocks.get(i) for i in range(max(self.clocks, default=-1) + 1)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        clocks = {i: c for i, c in enumerate(state.get("clocks", ())) if c is not None and i in self.trainers}
        slowest = min(clocks.values(), default=0)  # also of a trainer that was lost when the state was saved
        self.clocks = {i: clocks.get(i, slowest) for i in self.trainers}


class Bounded(Async):
    """Stale-synchronous parallel: a trainer starts step c only once the slowest has finished c - 1 - ``bound`` steps.

    Otherwise like ``Async``. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
    server", NeurIPS 2013. Their condition is on clocks. It follows that a gradient of one of T trainers is at most
    (T - 1)(2 ``bound`` + 1) versions stale: while a trainer computes, each of the others starts no clock more than
    ``bound`` ahead of it, and may have been ``bound`` behind it. A trainer whose data has ended does not count.

    A trainer whose full buffer blocks simulations does not wait for those that wait for samples. Their clocks are
    raised to its own less ``bound``, as if they had made those steps with gradients of zero. So the condition still
    holds, and what follows from it.
    """

    def __init__(self, terms: RunTerms, bound: int, step: int = 0, samples: int = 0) -> None:
        super().__init__(terms, step, samples)
        self.bound = bound

    @classmethod
    def from_config(cls, config: ServerConfig, terms: RunTerms, step: int, samples: int) -> Bounded:
        return cls(terms, config.staleness_bound, step, samples)

    def may_start(self, trainer_index: int) -> bool:
        return self.clocks[trainer_index] - self.slowest_clock <= self.bound

    def pop_decisions(self) -> dict[int, Decision]:
        for index in self._blocks & self._announced.keys():
            least = self.clocks[index] - self.bound
            behind = {i for i, clock in self.clocks.items() if clock < least and i not in self._drained}
            # Only if that lets it start: a clock must not move ahead of what another one waits for.
            if self._announced[index].readiness is Readiness.READY and behind <= self._waiting:
                self.clocks |= dict.fromkeys(behind, least)
        return super().pop_decisions()


class Buffered(Async):
    """An update is the mean of the next ``arrivals`` gradients, of any trainers, which continue as soon as they pushed.

    Nguyen et al., "Federated learning with buffered asynchronous aggregation" (FedBuff), AISTATS 2022. A gradient is
    added to a sum when it arrives, and counts from then on, also if its trainer is lost before the update is made. The
    last update before the end of the run has fewer gradients, rather than waiting for more.
    """

    allows_tables = False

    def __init__(self, terms: RunTerms, arrivals: int, step: int = 0, samples: int = 0) -> None:
        super().__init__(terms, step, samples)
        self.arrivals = arrivals
        self._held = 0  # gradients in the sum
        self._held_samples = 0

    @classmethod
    def from_config(cls, config: ServerConfig, terms: RunTerms, step: int, samples: int) -> Buffered:
        return cls(terms, config.arrivals, step, samples)

    @classmethod
    def gradients_per_update(cls, config: ServerConfig, trainers: int) -> int:
        return config.arrivals

    def versions_coming(self) -> int:
        return (self._held + len(self._arrived) + len(self._permits)) // self.arrivals

    def samples_coming(self) -> int:
        return self._held_samples + sum(samples for _, _, samples in self._arrived)

    def next_update(self) -> Update | None:
        if self._arrived:
            trainer_index, version, samples = self._arrived.popleft()
            self._held, self._held_samples = self._held + 1, self._held_samples + samples
            staleness = self.step - version
            completes = self._held == self.arrivals
            if completes:
                self._make_version()
            return Update((trainer_index,), (staleness,), trainer_index, completes=completes)
        return self.complete_update() if self._ends() and not self._permits else None

    def complete_update(self) -> Update | None:
        if not self._held:
            return None
        self._make_version()
        return Update((), (), -1)

    def _ends(self) -> bool:
        limits = self.terms.limits
        return self._end is not None or limits.reached(self.step, self.samples + self._held_samples) is not None

    def _make_version(self) -> None:
        self.samples += self._held_samples
        self._held = self._held_samples = 0
        self._advance()


class BackupSync(FreeRunning):
    """An update is the mean of the first T - B gradients of a version; later ones are dropped and counted.

    Chen et al., "Revisiting distributed synchronous SGD", ICLR workshop 2016 (arXiv:1604.00981), section 3. A trainer
    whose gradient was dropped continues with the newest version. T counts the trainers that have pushed for this
    version and the live ones whose data has not ended; of these not those that wait for samples, once the run is to
    end, so that a partial update delays no stop, and while a trainer that has pushed blocks simulations with its full
    buffer. An update has at least one gradient, however many trainers leave. B is at most T - 1.
    """

    drops_pushes = True
    validates_together = True

    def __init__(self, terms: RunTerms, backups: int, step: int = 0, samples: int = 0) -> None:
        super().__init__(terms, step, samples)
        self.backups = backups
        self._held: dict[int, int] = {}  # trainer index: samples of its gradient of this version

    @classmethod
    def from_config(cls, config: ServerConfig, terms: RunTerms, step: int, samples: int) -> BackupSync:
        return cls(terms, config.backup_trainers, step, samples)

    @classmethod
    def gradients_per_update(cls, config: ServerConfig, trainers: int) -> int:
        return max(1, trainers - config.backup_trainers)

    def may_start(self, trainer_index: int) -> bool:
        return trainer_index not in self._held  # one gradient of each trainer in a version

    @property
    def has_partial_update(self) -> bool:
        return bool(self._held)

    def push(self, trainer_index: int, version: int, samples: int, finite: bool = True) -> bool:
        del self._permits[trainer_index]
        if not finite:
            return False
        if version < self.step:
            self.dropped[trainer_index] += 1
            return False
        self._held[trainer_index] = samples
        return True

    def next_update(self) -> Update | None:
        # No gradient of this version can come from trainers without data, nor, before the end, from those that wait;
        # nor from those whose samples wait behind a full buffer, of which the next batch is taken after this version.
        only_ready = self._end is not None or not self._blocks.isdisjoint(self._held)
        absent = self._drained | (self._waiting if only_ready else set())
        if not self._held or len(self._held) < len((self.trainers - absent) | self._held.keys()) - self.backups:
            return None
        trainers = tuple(sorted(self._held))
        self.samples += sum(self._held.values())
        self._held = {}
        self._advance()
        return Update(trainers, (0,) * len(trainers), trainers[0])

    def wants_buffers_from(self, trainer_index: int) -> bool:
        return True

"""Lockstep: all trainers take every step together, as ranks of a process group or with a server (``Sync``)."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

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
from paramserver.limits import ALL_SERVED, Limits, is_due, no_more_data


def decide(
    announced: Mapping[int, Announcement],
    step: int,
    samples: int,
    limits: Limits,
    uneven_inputs: str,
    some_lost: bool = False,
    blocking: Set[int] = frozenset(),
) -> Decision:
    """Return what all trainers do next, from the announcements of all of them and what was applied so far.

    The result depends on the arguments only, so ranks that have reduced the same values take the same decision. With
    ``some_lost``, there are trainers with data that cannot announce, so the others wait once theirs has ended.

    All wait for a trainer that waits for samples, unless one of ``blocking`` is ready, whose full buffer may block the
    simulations that the other waits for; see ``Consistency.set_blocks``.
    """
    active, drained, batches, blocked = [], [], [], False
    stop, reason = Stop.NO, ""
    for trainer_index, announcement in sorted(announced.items()):
        if announcement.readiness is Readiness.READY:
            active.append(trainer_index)
            batches.append(announcement.batches)
            blocked = blocked or trainer_index in blocking
        elif announcement.readiness is Readiness.DRAINED:
            drained.append(trainer_index)
        if announcement.stop > stop or (announcement.stop is stop and not reason):
            stop, reason = announcement.stop, announcement.reason

    # A limit comes before a signal: a run that has reached it is complete, whatever else would end it.
    if (limit := limits.reached(step, samples)) is not None:
        return Decision(Verdict.END, (), step, samples, limit)
    if stop is not Stop.NO:
        return end(stop, reason, step, samples)
    if len(drained) == len(announced) and not some_lost:
        return Decision(Verdict.END, (), step, samples, ALL_SERVED)
    if drained and uneven_inputs == "stop":
        return Decision(Verdict.END, (), step, samples, no_more_data(drained[0]))
    if not active or (len(active) + len(drained) < len(announced) and not blocked):
        return Decision(Verdict.WAIT, (), step, samples)
    return Decision(Verdict.GO, tuple(active), step, samples, batches=min(batches))


def module_buffer_owner(active: tuple[int, ...], uneven_inputs: str) -> int:
    """Return the trainer whose module buffers (BatchNorm) a step keeps: as in DDP the first, in DDP's join the last."""
    return active[-1] if uneven_inputs == "join" else active[0]


class Sync(Consistency):
    """An update is the mean over all trainers that take part, and no trainer continues before it is applied.

    Bulk-synchronous parallelism with a server: Valiant, "A bridging model for parallel computation", CACM 33(8), 1990.
    DistributedDataParallel computes the same mean (Li et al., "PyTorch Distributed", VLDB 2020). If a trainer leaves
    during a step, the mean is over those that push.
    """

    lockstep = True
    drops_pushes = False
    allows_tables = True
    waits_for_all = True
    validates_together = True

    def __init__(self, terms: RunTerms, step: int = 0, samples: int = 0) -> None:
        super().__init__(terms, step, samples)
        self._active: tuple[int, ...] = ()
        self._pushed: dict[int, int] = {}
        self._is_skipped = False  # a push of the step is not finite
        self._left: set[int] = set()  # trainers whose last push is part of the next update
        self._is_due = False  # a validation or checkpoint of this version, until one of the participants has done it

    @classmethod
    def gradients_per_update(cls, config: ServerConfig, trainers: int) -> int:
        return trainers

    @property
    def is_paused(self) -> bool:
        return self._is_due or super().is_paused

    @property
    def in_step(self) -> bool:
        return bool(self._active)

    def remove(self, trainer_index: int) -> None:
        super().remove(trainer_index)
        self._active = tuple(i for i in self._active if i != trainer_index or i in self._pushed)
        if trainer_index in self._active:
            self._left.add(trainer_index)

    def announce(self, trainer_index: int, announcement: Announcement) -> None:
        super().announce(trainer_index, announcement)
        if trainer_index in self.participants:
            self._is_due = False
        if self.several_updates and trainer_index not in self._pushed:
            self._active = tuple(i for i in self._active if i != trainer_index)

    def pop_decisions(self) -> dict[int, Decision]:
        if self.in_step or not self._announced or len(self._announced) < len(self.trainers):
            return {}
        if self._is_due and not self.participants:
            self.participants = set(self.trainers)
            decisions = dict.fromkeys(sorted(self._announced), Decision(Verdict.BARRIER, (), self.step, self.samples))
            self._announced.clear()
            return decisions
        terms, some_lost = self.terms, bool(self._lost)
        decision = decide(
            self._announced, self.step, self.samples, terms.limits, terms.uneven_inputs, some_lost, self._blocks
        )
        if decision.verdict is Verdict.WAIT and self._drained == self.trainers:
            return {}  # until a lost trainer is replaced or forgotten
        if decision.verdict is Verdict.GO:
            self._active, self._pushed, self._is_skipped = decision.active, {}, False
            self._left.clear()
        if decision.verdict is not Verdict.WAIT:
            self.participants = set(self.trainers)
        decisions = dict.fromkeys(sorted(self._announced), decision)
        self._announced.clear()
        return decisions

    def rejection_reason(self, trainer_index: int, version: int) -> str | None:
        if trainer_index not in self._active:
            return f"trainer {trainer_index} pushed outside a step that it takes part in (step {self.step})"
        if trainer_index in self._pushed:
            return f"trainer {trainer_index} pushed twice in step {self.step}"
        if version != self.step:
            return f"trainer {trainer_index} pushed a gradient of version {version} to version {self.step}"
        return None

    def push(self, trainer_index: int, version: int, samples: int, finite: bool = True) -> bool:
        self._pushed[trainer_index] = samples
        self._is_skipped = self._is_skipped or not finite
        return True

    def next_update(self) -> Update | None:
        if not self._active or len(self._pushed) < len(self._active):
            return None
        owner = module_buffer_owner(self._active, self.terms.uneven_inputs)
        update = Update(self._active, (0,) * len(self._active), owner, averages_buffers=self.terms.has_rounds)
        self._active = tuple(i for i in self._active if i not in self._left) if self.several_updates else ()
        if self._is_skipped:
            self._pushed, self._is_skipped = {}, False
            return replace(update, is_skipped=True)
        self.step += 1
        self.samples += sum(self._pushed.values())
        self._pushed = {}
        self._is_due = self._is_due or is_due(self.step, *self.terms.barrier_every)
        return update

    def wants_buffers_from(self, trainer_index: int) -> bool:
        if self.terms.has_rounds:
            return trainer_index in self._active
        return bool(self._active) and trainer_index == module_buffer_owner(self._active, self.terms.uneven_inputs)

"""Synchronous consistency that does not wait for the slowest."""

from __future__ import annotations

from paramserver.consistency.base import Readiness, RunTerms, Update
from paramserver.consistency.free_running import FreeRunning


class BackupSync(FreeRunning):
    """An update is the mean of the first T - B gradients of a version; those that come later are dropped and counted.

    Chen et al., "Revisiting distributed synchronous SGD", ICLR workshop 2016 (arXiv:1604.00981), section 3. A trainer
    that was too late goes on with the newest version. Where the data of some trainers has ended, T counts the others.
    Once the run is to end, those that wait for samples count as ended too: a begun update holds up no stop.

    Args:
        terms, step, samples: see ``Consistency``.
        backups: B, at most T - 1.
    """

    def __init__(self, terms: RunTerms, backups: int, step: int = 0, samples: int = 0) -> None:
        super().__init__(terms, step, samples)
        self.backups = backups
        self._held: dict[int, int] = {}

    def may_start(self, trainer_index: int) -> bool:
        """Whether it has not given its gradient of this version."""
        return trainer_index not in self._held

    def may_still_apply(self, coming: int) -> bool:
        """Always: all who are let go with a version make the next one together, and late ones are dropped."""
        return True

    @property
    def has_partial_update(self) -> bool:
        return bool(self._held)

    def push(self, trainer_index: int, version: int, samples: int) -> bool:
        del self._permits[trainer_index]
        if version < self.step:
            self.dropped[trainer_index] += 1
            return False
        self._held[trainer_index] = samples
        return True

    def next_update(self) -> Update | None:
        if not self._held or len(self._held) < self.terms.num_trainers - len(self._absent) - self.backups:
            return None
        trainers = tuple(sorted(self._held))
        self.samples += sum(self._held.values())
        self._held = {}
        self._advance()
        return Update(trainers, (0,) * len(trainers), trainers[0])

    @property
    def _absent(self) -> set[int]:
        """Those from whom no gradient of this version can come."""
        waiting = {i for i, a in self._announced.items() if a.readiness is Readiness.WAITING}
        return (self._drained | (waiting if self._end is not None else set())) - self._held.keys()

    def wants_buffers_from(self, trainer_index: int) -> bool:
        return True

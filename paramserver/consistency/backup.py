"""Synchronous consistency that does not wait for the slowest trainers."""

from __future__ import annotations

from paramserver.config import ServerConfig
from paramserver.consistency.base import RunTerms, Update
from paramserver.consistency.free_running import FreeRunning


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

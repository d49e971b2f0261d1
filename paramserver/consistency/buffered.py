"""Asynchronous consistency whose updates are means of several gradients, for each of which no trainer waits."""

from __future__ import annotations

from paramserver.config import ServerConfig
from paramserver.consistency.asynchronous import Async
from paramserver.consistency.base import RunTerms, Update


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

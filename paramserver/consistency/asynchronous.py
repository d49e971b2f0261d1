"""Every gradient is an update: asynchronous, and stale-synchronous with a bound between the clocks of trainers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from paramserver.config import ServerConfig
from paramserver.consistency.base import Decision, Readiness, RunTerms, Update
from paramserver.consistency.free_running import FreeRunning


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
    """Stale-synchronous parallel: a trainer starts clock c only once the slowest has finished c - ``bound``.

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

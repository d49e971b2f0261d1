"""Updates on arrival: asynchronous, and stale-synchronous with a bound on how far trainers part."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from paramserver.consistency.base import RunTerms, Update, sequence_of
from paramserver.consistency.free_running import FreeRunning


class Async(FreeRunning):
    """Every gradient is an update by itself, applied when it arrives, at whatever version the server has by then.

    Dean et al., "Large scale distributed deep networks", NeurIPS 2012 (Downpour SGD); without locks between the reading
    and the writing of parameters as in Recht et al., "Hogwild!", NeurIPS 2011, but of whole versions.
    """

    def __init__(self, terms: RunTerms, step: int = 0, samples: int = 0) -> None:
        super().__init__(terms, step, samples)
        self.clocks = dict.fromkeys(range(terms.num_trainers), 0)
        self._arrived: deque[tuple[int, int, int]] = deque()

    def may_start(self, trainer_index: int) -> bool:
        return self.has_version_slot()

    def push(self, trainer_index: int, version: int, samples: int) -> bool:
        del self._permits[trainer_index]
        self.clocks[trainer_index] += 1
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
        return {"clocks": [self.clocks[i] for i in sorted(self.clocks)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Trainers of another number begin at the same clock."""
        self.clocks = sequence_of(state.get("clocks", ()), self.terms.num_trainers) or self.clocks


class Bounded(Async):
    """Stale-synchronous parallelism: a trainer starts clock c only when the slowest has finished c - ``bound``.

    Otherwise like ``Async``. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
    server", NeurIPS 2013. Their condition is on clocks; here it follows that a gradient is at most
    (T - 1)(2 ``bound`` + 1) versions stale: while a trainer computes, each of the others starts no clock beyond
    ``bound`` above and may have been ``bound`` behind.
    A trainer whose data has ended holds nobody up.

    Args:
        terms, step, samples: see ``Consistency``.
        bound: clocks that a trainer may start ahead of the slowest, at least 0.
    """

    def __init__(self, terms: RunTerms, bound: int, step: int = 0, samples: int = 0) -> None:
        super().__init__(terms, step, samples)
        self.bound = bound

    def may_start(self, trainer_index: int) -> bool:
        return super().may_start(trainer_index) and self.clocks[trainer_index] - self.slowest_clock <= self.bound

    @property
    def slowest_clock(self) -> int:
        """The clock of the slowest trainer that has not said that its data ended; of all, where all have."""
        return min((c for i, c in self.clocks.items() if i not in self._drained), default=min(self.clocks.values()))

"""Every gradient is an update: asynchronous, and stale-synchronous with a bound between the clocks of trainers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from fractions import Fraction
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


_P95 = Fraction(95, 100)  # exact, so that rounding never moves the rank, however many gradients there are


class StalenessHistogram:
    """How often gradients of each trainer were applied at each staleness (versions)."""

    def __init__(self) -> None:
        self._counts: dict[int, Counter[int]] = {}
        self._window: Counter[int] = Counter()

    def add(self, trainer_index: int, staleness: int) -> None:
        """Count an applied gradient."""
        self._counts.setdefault(trainer_index, Counter())[staleness] += 1
        self._window[staleness] += 1

    def summary(self) -> dict[str, Any]:
        """Return ``mean``, ``p95`` (the smallest value that 95 % do not exceed), ``max`` and ``histogram``.

        ``histogram`` maps the staleness, as a string, to the number of gradients, in ascending order. Without any
        gradient the figures are 0 and it is empty.
        """
        return _summarize(sum(self._counts.values(), Counter()))

    def for_trainer(self, trainer_index: int) -> dict[str, Any]:
        """Return the summary of one trainer."""
        return _summarize(self._counts.get(trainer_index, Counter()))

    def by_trainer(self) -> list[dict[str, Any]]:
        """Return the summary of each trainer that has pushed a gradient, with its index as ``trainer``."""
        return [{"trainer": index, **self.for_trainer(index)} for index in sorted(self._counts)]

    def pop_window(self) -> dict[str, Any]:
        """Return the summary of what was added since the last call."""
        window, self._window = self._window, Counter()
        return _summarize(window)

    def state_dict(self) -> dict[str, Any]:
        """Return all counts, as JSON values."""
        counts = {str(index): _to_json(counts) for index, counts in sorted(self._counts.items())}
        return {"counts": counts, "window": _to_json(self._window)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all counts by those of ``state_dict()``."""
        self._counts = {int(index): _from_json(histogram) for index, histogram in state["counts"].items()}
        self._window = _from_json(state.get("window", {}))


def _to_json(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(value): counts[value] for value in sorted(counts)}


def _from_json(histogram: Mapping[str, int]) -> Counter[int]:
    return Counter({int(value): count for value, count in histogram.items()})


def _summarize(counts: Mapping[int, int]) -> dict[str, Any]:
    total = sum(counts.values())
    if not total:
        return {"mean": 0.0, "p95": 0, "max": 0, "histogram": {}}
    mean = sum(value * count for value, count in counts.items()) / total
    not_above, p95 = 0, 0
    for p95 in sorted(counts):
        not_above += counts[p95]
        if not_above >= _P95 * total:
            break
    return {"mean": mean, "p95": p95, "max": max(counts), "histogram": _to_json(counts)}

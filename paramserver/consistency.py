"""Who may go on, and when a gradient is applied: pure rules over counts, with no process and no clock of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum

from paramserver.limits import Limits


class Readiness(IntEnum):
    """What a trainer says before a step: it has its next batches, it waits for samples, or no more will come."""

    READY = 1
    WAITING = 2
    DRAINED = 3


class Stop(IntEnum):
    """Why a trainer asks all to stop; the larger one wins."""

    NO = 0
    LIMIT = 1
    SIGNAL = 2


class Verdict(Enum):
    GO = "go"
    WAIT = "wait"
    END = "end"


@dataclass(frozen=True)
class Announcement:
    """One trainer's word before a step; ``batches`` it has ready for it."""

    readiness: Readiness
    batches: int = 1
    stop: Stop = Stop.NO
    reason: str = ""


@dataclass(frozen=True)
class Decision:
    """The answer that every trainer gets.

    ``active`` are the trainers that take part in the step, each with ``batches`` batches (fewer than
    ``accumulate_batches`` only where somebody's data ends); ``step`` and ``samples`` are what was applied before it;
    ``interrupted`` tells a run that a signal ended from one that is complete.
    """

    verdict: Verdict
    active: tuple[int, ...]
    step: int
    samples: int
    reason: str = ""
    interrupted: bool = False
    batches: int = 0


def decide(
    announced: Mapping[int, Announcement], step: int, samples: int, limits: Limits, uneven_inputs: str
) -> Decision:
    """What all trainers do next, from what each of them announced and from what was applied so far.

    It depends on its arguments alone, so that ranks which reduced the same values take the same decision.
    """
    active = tuple(i for i in sorted(announced) if announced[i].readiness is Readiness.READY)
    drained = tuple(i for i in sorted(announced) if announced[i].readiness is Readiness.DRAINED)

    def end(reason: str, interrupted: bool = False) -> Decision:
        return Decision(Verdict.END, (), step, samples, reason, interrupted)

    stop = max((a.stop for a in announced.values()), default=Stop.NO)
    if (limit := limits.reached(step, samples)) is not None:
        return end(limit)
    if stop is not Stop.NO:
        reason = next((a.reason for _, a in sorted(announced.items()) if a.stop is stop and a.reason), "")
        return end(reason, interrupted=stop is Stop.SIGNAL)
    if len(drained) == len(announced):
        return end("all data was served")
    if drained and uneven_inputs == "stop":
        return end(f"trainer {drained[0]} has no more data (training.uneven_inputs: stop)")
    if len(active) + len(drained) < len(announced):
        return Decision(Verdict.WAIT, (), step, samples)
    return Decision(Verdict.GO, active, step, samples, batches=min(announced[i].batches for i in active))


def buffer_source(active: tuple[int, ...], uneven_inputs: str) -> int:
    """The trainer whose module buffers (BatchNorm) a step keeps: the first, as in DDP; in DDP's join the last."""
    return active[-1] if uneven_inputs == "join" else active[0]


class Sync:
    """Synchronous consistency: an update is the mean over all trainers that take part, as in data-parallel SGD.

    Bulk-synchronous parallelism with a server: Valiant, "A bridging model for parallel computation", CACM 1990;
    the mean over trainers is what DistributedDataParallel computes (Li et al., VLDB 2020).

    Each trainer announces itself before a step; when the last one has, ``announce`` returns the decision for all.
    Then each active trainer pushes once; ``push`` says when the round is complete.
    """

    def __init__(self, trainers: int, limits: Limits, uneven_inputs: str, step: int = 0, samples: int = 0) -> None:
        self.trainers = trainers
        self.limits = limits
        self.uneven_inputs = uneven_inputs
        self.step = step
        self.samples = samples
        self._announced: dict[int, Announcement] = {}
        self._active: tuple[int, ...] = ()
        self._pushed: set[int] = set()

    def announce(self, trainer_index: int, announcement: Announcement) -> Decision | None:
        """Take one trainer's word; the decision once all have spoken, None before."""
        self._announced[trainer_index] = announcement
        if len(self._announced) < self.trainers:
            return None
        decision = decide(self._announced, self.step, self.samples, self.limits, self.uneven_inputs)
        self._announced.clear()
        if decision.verdict is Verdict.GO:
            self._active, self._pushed = decision.active, set()
        return decision

    def refusal(self, trainer_index: int, version: int) -> str | None:
        """Why a push may not be counted, or None. The update after the last, a second push, a stale one."""
        if trainer_index not in self._active:
            return f"trainer {trainer_index} pushed outside a step that it takes part in (step {self.step})"
        if trainer_index in self._pushed:
            return f"trainer {trainer_index} pushed twice in step {self.step}"
        if version != self.step:
            return f"trainer {trainer_index} pushed a gradient of version {version} to version {self.step}"
        return None

    def push(self, trainer_index: int, samples: int) -> tuple[int, ...] | None:
        """Count a push that was not refused; the trainers to average, in order, when it completes the step."""
        self._pushed.add(trainer_index)
        self.samples += samples
        if len(self._pushed) < len(self._active):
            return None
        complete, self._active = self._active, ()
        self.step += 1
        return complete

    @property
    def buffer_source(self) -> int:
        return buffer_source(self._active, self.uneven_inputs)

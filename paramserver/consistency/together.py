"""What trainers do that take every step together, as ranks of a process group or under a server."""

from __future__ import annotations

from collections.abc import Mapping

from paramserver.consistency.words import Announcement, Decision, Readiness, Stop, Verdict
from paramserver.limits import Limits


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

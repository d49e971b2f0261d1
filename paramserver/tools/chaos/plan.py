"""Plans of faults: what ``paramserver chaos`` injects into a run, and when. Parsing and drawing them; no process."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paramserver.config import Config, Role, mode_of
from paramserver.errors import UnsupportedConfiguration

EXAMPLE = 'write for example --faults "kill trainer:1 @step 50; freeze server:0 @8s for 5s"'

_KINDS = ("kill", "freeze", "hold_gil", "slow", "lose", "partition")
_NEEDS_SERVERS = ("lose", "partition")
_MESSAGES = ("replies", "requests")
_TARGET = re.compile(r"(trainer|server):(\d{1,6})")
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
# With these the text of a fault ends, the first one last.
_TIMES: Mapping[str, tuple[re.Pattern[str], type[int] | type[float]]] = {
    "for_s": (re.compile(rf" for {_NUMBER}s$"), float),
    "at_s": (re.compile(rf" @{_NUMBER}s$"), float),
    "at_step": (re.compile(r" @step (\d{1,12})$"), int),
}
# What a random fault leaves for the run to recover in, in addition to its own length and server.lost_after_s.
_RECOVERY_S = 8.0


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        target: the rank, as ``trainer:1``; empty for ``lose``, which concerns all trainers.
        messages: of ``lose``: ``replies`` or ``requests``.
        amount: of ``slow`` the factor, of ``lose`` the percentage.
        at_step: fires when the run has made this step.
        at_s: fires this many seconds after the first update of the run. Without either, it fires at the first update.
        for_s: how long it lasts; None: until the end of the run.
    """

    kind: str
    target: str = ""
    messages: str = ""
    amount: float = field(default=0.0, kw_only=True)
    at_step: int | None = field(default=None, kw_only=True)
    at_s: float | None = field(default=None, kw_only=True)
    for_s: float | None = field(default=None, kw_only=True)

    def __str__(self) -> str:
        words = [self.kind, self.target or f"{self.messages} {self.amount:g}%"]
        words += [f"x{self.amount:g}"] if self.kind == "slow" else []
        words += [f"@step {self.at_step}"] if self.at_step is not None else []
        words += [f"@{self.at_s:g}s"] if self.at_s is not None else []
        words += [f"for {self.for_s:g}s"] if self.for_s is not None else []
        return " ".join(words)

    def silences(self, lost_after_s: float) -> bool:
        """Return whether the rank dies, or gives no sign of life for so long that it counts as lost."""
        if self.kind == "kill":
            return True
        lasts = self.for_s is None or self.for_s > lost_after_s
        return self.kind in ("freeze", "hold_gil", "partition") and lasts


def parse_faults(text: str, ranks: Sequence[Role], config: Config) -> list[Fault]:
    """Return the faults that ``--faults`` lists, separated by semicolons.

    Raises:
        UnsupportedConfiguration: a fault is not understood, or does not fit the run.
    """
    parts = [part.strip() for part in text.split(";")]
    faults = [_parse(part) for part in parts if part]
    if not faults:
        raise UnsupportedConfiguration(f"--faults ({text}) must name a fault; {EXAMPLE}")
    known = [name_of(role) for role in ranks]
    for fault in faults:
        if fault.target and fault.target not in known:
            raise UnsupportedConfiguration(
                f"--faults ({fault}): {fault.target} must be a rank of this run ({', '.join(known)}); correct it"
            )
        if fault.kind in _NEEDS_SERVERS and not mode_of(config).has_servers:
            raise UnsupportedConfiguration(
                f"--faults ({fault}): {fault.kind} must be used with mode rpc, as the other modes make no calls; "
                "choose another fault or mode"
            )
    return faults


def name_of(role: Role) -> str:
    """Return how faults name a rank: ``trainer:1``."""
    return str(role).replace(" ", ":")


def _parse(part: str) -> Fault:
    rest, times = _split_times(part)
    kind, *words = rest.split()
    try:
        if kind not in _KINDS:
            raise ValueError(f"the fault ({kind}) must be one of {', '.join(_KINDS)}")
        _check_times(kind, times)
        return Fault(kind, **_parameters(kind, words), **times)
    except ValueError as rule:
        raise UnsupportedConfiguration(f"--faults ({part}): {rule}; {EXAMPLE}") from None


def _split_times(part: str) -> tuple[str, dict[str, Any]]:
    """Return the text of a fault without its instant and duration, and these as fields of ``Fault``."""
    times = {}
    for name, (pattern, kind) in _TIMES.items():
        if (match := pattern.search(part)) is not None:
            times[name] = kind(match[1])
            part = part[: match.start()].rstrip()
    return part, times


def _check_times(kind: str, times: Mapping[str, float]) -> None:
    """Raise ValueError, with the rule, for an instant or a duration that a fault of this kind cannot have."""
    if times.get("for_s") == 0:
        raise ValueError("the duration (0 s) must be above 0")
    if "at_s" in times and "at_step" in times:
        raise ValueError("the instant must be a step or a time, not both")
    if kind == "kill" and "for_s" in times:
        raise ValueError("kill must have no duration")
    if kind in ("hold_gil", "partition") and "for_s" not in times:
        raise ValueError(f"{kind} must have a duration, such as for 5s")


def _parameters(kind: str, words: Sequence[str]) -> dict[str, Any]:
    """Return what follows the kind, as fields of ``Fault``; raise ValueError, with the rule, for anything else."""
    if kind == "lose":
        match = re.fullmatch(rf"({'|'.join(_MESSAGES)}) {_NUMBER}%", " ".join(words))
        if match is None or not 0 < float(match[2]) <= 50:
            raise ValueError("lose must be followed by replies or requests and a percentage of at most 50")
        return {"messages": match[1], "amount": float(match[2])}
    target, rest = " ".join(words[:1]), " ".join(words[1:])
    if _TARGET.fullmatch(target) is None:
        raise ValueError(f"{kind} must be followed by a rank, such as trainer:1 or server:0")
    if kind == "slow":
        factor = re.fullmatch(rf"x{_NUMBER}", rest)
        if factor is None or float(factor[1]) < 1 or not target.startswith("trainer"):
            raise ValueError("slow must be followed by a trainer and a factor of at least 1, such as x5")
        return {"target": target, "amount": float(factor[1])}
    if rest:
        raise ValueError(f"{rest} is not understood after {kind} {target}")
    return {"target": target}


def random_faults(number: int, seed: int, ranks: Sequence[Role], config: Config) -> list[Fault]:
    """Return faults at random instants, of random kinds and ranks, in the order of their instants.

    They depend on the arguments only. Each begins when the run has had time to recover from the one before, and no rank
    is ended more often than ``cluster.max_restarts`` allows.
    """
    rng, lost_after_s = random.Random(f"chaos/{seed}"), config.server.lost_after_s
    kinds = [kind for kind in _KINDS if kind != "lose" and (kind != "partition" or mode_of(config).has_servers)]
    ends = {name_of(role): 0 for role in ranks}
    trainers = [name for name in ends if name.startswith("trainer")]
    faults: list[Fault] = []
    at_s = rng.uniform(1.0, 4.0)
    while len(faults) < number:
        kind, target = rng.choice(kinds), rng.choice(list(ends))
        for_s = round(rng.uniform(0.2, 1.6) * lost_after_s, 1)
        fault = Fault(kind, target, at_s=round(at_s, 1), for_s=None if kind == "kill" else for_s)
        if kind == "slow":
            amount = round(rng.uniform(2.0, 8.0), 1)
            fault = Fault(kind, rng.choice(trainers), amount=amount, at_s=round(at_s, 1), for_s=for_s)
        elif fault.silences(lost_after_s):
            if ends[target] == config.cluster.max_restarts:
                continue
            ends[target] += 1
        faults.append(fault)
        at_s += (fault.for_s or 0.0) + lost_after_s + _RECOVERY_S + rng.uniform(0.0, 4.0)
    return faults

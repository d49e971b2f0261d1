"""Plans of faults: what ``paramserver chaos`` injects into a run, and when. Parsing and drawing them; no process."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paramserver.config import Config, Role, mode_of
from paramserver.errors import UnsupportedConfiguration

EXAMPLE = 'write for example --faults "kill trainer:1 @step 50; freeze server:0 @8s for 5s"'

_KINDS = ("kill", "freeze", "hold_gil", "slow", "lose", "partition")
_NEEDS_SERVERS = ("lose", "partition")
_MESSAGES = ("replies", "requests")
_TARGET = re.compile(r"(trainer|server):(\d{1,6})")
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
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
    known = [_name(role) for role in ranks]
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


def _name(role: Role) -> str:
    return str(role).replace(" ", ":")


def _parse(part: str) -> Fault:
    def refuse(rule: str) -> UnsupportedConfiguration:
        return UnsupportedConfiguration(f"--faults ({part}): {rule}; {EXAMPLE}")

    rest = part
    found: dict[str, float | int] = {}
    for name, pattern in (
        ("for_s", rf" for {_NUMBER}s$"),
        ("at_s", rf" @{_NUMBER}s$"),
        ("at_step", r" @step (\d{1,12})$"),
    ):
        if (match := re.search(pattern, rest)) is not None:
            found[name] = int(match[1]) if name == "at_step" else float(match[1])
            rest = rest[: match.start()].rstrip()
    kind, *words = rest.split()
    if kind not in _KINDS:
        raise refuse(f"the fault ({kind}) must be one of {', '.join(_KINDS)}")
    if found.get("for_s") == 0:
        raise refuse("the duration (0 s) must be above 0")
    if "at_s" in found and "at_step" in found:
        raise refuse("the instant must be a step or a time, not both")
    at_step, for_s = found.get("at_step"), found.get("for_s")
    fault = Fault(kind, at_step=None if at_step is None else int(at_step), at_s=found.get("at_s"), for_s=for_s)
    if kind == "kill" and for_s is not None:
        raise refuse("kill must have no duration")
    if kind in ("hold_gil", "partition") and for_s is None:
        raise refuse(f"{kind} must have a duration, such as for 5s")
    if kind == "lose":
        percent = re.fullmatch(rf"{_NUMBER}%", words[1]) if len(words) == 2 and words[0] in _MESSAGES else None
        if percent is None or not 0 < float(percent[1]) <= 50:
            raise refuse("lose must be followed by replies or requests and a percentage of at most 50")
        return replace(fault, messages=words[0], amount=float(percent[1]))
    if not words or _TARGET.fullmatch(words[0]) is None:
        raise refuse(f"{kind} must be followed by a rank, such as trainer:1 or server:0")
    if kind == "slow":
        factor = re.fullmatch(rf"x{_NUMBER}", words[1]) if len(words) == 2 else None
        if factor is None or float(factor[1]) < 1 or not words[0].startswith("trainer"):
            raise refuse("slow must be followed by a trainer and a factor of at least 1, such as x5")
        return replace(fault, target=words[0], amount=float(factor[1]))
    if len(words) > 1:
        raise refuse(f"{' '.join(words[1:])} is not understood after {kind} {words[0]}")
    return replace(fault, target=words[0])


def random_faults(number: int, seed: int, ranks: Sequence[Role], config: Config) -> list[Fault]:
    """Return faults at random instants, of random kinds and ranks, in the order of their instants.

    They depend on the arguments only. Each begins when the run has had time to recover from the one before, and no rank
    is ended more often than ``cluster.max_restarts`` allows.
    """
    rng, lost_after_s = random.Random(f"chaos/{seed}"), config.server.lost_after_s
    kinds = [kind for kind in _KINDS if kind != "lose" and (kind != "partition" or mode_of(config).has_servers)]
    ends = {_name(role): 0 for role in ranks}
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

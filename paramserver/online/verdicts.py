"""What a trainer finds a message to be, and who sent it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from paramserver.online.identities import Key
from paramserver.online.messages import Header

Reason: TypeAlias = Literal[
    "malformed",  # no message of this protocol, or of another version of it
    "kind",  # of a kind that no trainer is sent
    "simulation",  # a number that the plan does not count
    "group",  # another number of processes than the plan's
    "parameters",  # of a wrong number, not finite, or not those of before
    "unopened",  # the simulation, its attempt or its member was not opened by this client
    "step",  # beyond the steps of the plan
    "window",  # more on their way than the window holds
    "field",  # one is missing, or unknown
    "dtype",
    "shape",
    "size",  # bytes that do not fit the shape
    "values",  # not finite where that is asked, or no booleans
    "stale",  # a part for an older attempt
    "unfinished",  # a part of one unfinished sample too many
]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""Why messages are refused; each is counted."""


class Refusal(Exception):  # noqa: N818 - what a check says of a message, in one sentence
    """The message must not be taken."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason: Reason = reason


def named(header: Header) -> str:
    """Whose message it is, for people."""
    part = f", member {header.member}" if header.members > 1 else ""
    return f"simulation {header.simulation} (attempt {header.attempt}{part})"


@dataclass(eq=False, slots=True)
class Visitor:
    """One member of one simulation, as one peer sends it.

    Attributes:
        peer: where its answers go.
        header: of its OPEN; of its first sample where it has sent none.
        parameters: of the simulation; None where it has not been opened.
        received: samples, or parts, that came.
        dealt: how many of them were dealt with: put into the buffer, dropped as duplicates, or refused.
        heard: when it was heard last, by the clock of the receiver.
    """

    peer: bytes
    header: Header
    parameters: npt.NDArray[np.float64] | None = None
    received: int = 0
    dealt: int = 0
    heard: float = 0.0

    def __str__(self) -> str:
        return named(self.header)


@dataclass(eq=False)
class Verdict:
    """What a message was. Nobody changes it; to have that forbidden would double the time that one takes to be made.

    Attributes:
        visitor: who sent it; None where that cannot be told.
        told: visitors whose ``dealt`` has changed by it.
    """

    visitor: Visitor | None
    told: tuple[Visitor, ...] = ()


class Opened(Verdict):
    """The simulation may send."""


class Touched(Verdict):
    """A sign of life."""


class Waiting(Verdict):
    """A part of which others are still to come."""


class Duplicate(Verdict):
    """It had come before, and was dropped."""


@dataclass(eq=False)
class Accepted(Verdict):
    """A whole sample.

    Attributes:
        key: its simulation and step.
        sample: for the task. Its arrays are the message's own memory, of a group new ones.
        givers: who sent it, member by member; each has one message more dealt with once the buffer has it.
    """

    key: Key = (0, 0)
    sample: dict[str, Any] = field(default_factory=dict)
    givers: tuple[Visitor, ...] = ()


@dataclass(eq=False)
class Refused(Verdict):
    """It was not taken; ``header`` is of whom it named, where that can be read."""

    reason: Reason = "malformed"
    sentence: str = ""
    header: Header | None = None

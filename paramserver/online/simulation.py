"""One simulation as the desk knows it, and what the desk wants done about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class State(str, Enum):
    WAITING = "waiting"  # to be started, or started again
    RUNNING = "running"  # its process lives, or somebody outside opened it
    SETTLING = "settling"  # its process ended well; its last samples are still being counted
    COMPLETE = "complete"
    GIVEN_UP = "given_up"


@dataclass
class Simulation:
    """What is known of one simulation.

    Attributes:
        id: its number.
        attempt: how often it was started before its present or next start.
        failures: how often it failed since it was first started.
        state: see ``State``.
        parameters: drawn or told; None before.
        told: those that its clients say; None before the first does.
        total: its samples, once they are known.
        trainer: the one that gets all of its samples, where they are dealt by simulation.
        alive: whether its process runs; it may go on when all is received.
        since_s: when it entered its state, or its attempt began.
        heard_s: member -> when it last gave a sign of life in this attempt.
        byes: member -> the samples that it said it sent.
        silent: whether its silence was told, and not broken since.
        killed: why its process was asked to end; None where it was not.
        failed: how its process ended by itself, where it did not end well.
        settled_at: of each trainer the report from which on the samples are all counted.
    """

    id: int
    attempt: int = 0
    failures: int = 0
    state: State = State.WAITING
    parameters: list[float] | None = None
    told: list[float] | None = None
    total: int | None = None
    trainer: int | None = None
    alive: bool = False
    since_s: float = 0.0
    heard_s: dict[int, float] = field(default_factory=dict)
    byes: dict[int, int] = field(default_factory=dict)
    silent: bool = False
    killed: str | None = None
    failed: str | None = None
    settled_at: list[int] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether nothing more is expected of it."""
        return self.state in (State.COMPLETE, State.GIVEN_UP)

    def hear(self, member: int, now: float) -> None:
        """A sign of life; of one that is complete, or about to be ended, none matters any more."""
        if not self.ended and self.killed is None:
            self.heard_s[member] = now
            self.silent = False

    def begin(self, now: float) -> None:
        """This attempt begins."""
        self.enter(State.RUNNING, now)
        self.killed = self.failed = None
        self.byes.clear()
        self.heard_s.clear()

    def enter(self, state: State, now: float) -> None:
        self.state, self.since_s = state, now

    def quiet_since(self, members: int) -> float:
        """When the member that has been silent longest was heard last.

        The others of its group may wait for it for ever, and say so. Those that said BYE have nothing more to say.
        """
        open_ones = [self.heard_s.get(member, self.since_s) for member in range(members) if member not in self.byes]
        return min(open_ones) if open_ones else max(self.heard_s.values(), default=self.since_s)

    def all_said_bye(self, members: int) -> bool:
        return len(self.byes) >= members

    def state_dict(self) -> dict[str, Any]:
        given_up = self.state is State.GIVEN_UP
        started = self.alive or self.state is not State.WAITING
        return {
            "id": self.id,
            # A resumed run starts it again, and nothing of the old attempt may be taken for the new one.
            "attempt": self.attempt + (started and not given_up),
            "failures": self.failures,
            "given_up": given_up,
            "parameters": None if self.parameters is None else list(self.parameters),
            "total": self.total,
            "trainer": self.trainer,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Simulation:
        """As ``state_dict`` left it; not running."""
        rest = {name: state[name] for name in ("id", "attempt", "failures", "parameters", "total", "trainer")}
        return cls(**rest, state=State.GIVEN_UP if state["given_up"] else State.WAITING)


# What is to be done.


@dataclass(frozen=True)
class Start:
    simulation: int
    attempt: int
    parameters: tuple[float, ...]


@dataclass(frozen=True)
class Kill:
    simulation: int
    why: str


@dataclass(frozen=True)
class Note:
    """Something to record; ``kind`` is one of complete, restarted, given_up, silent, exited."""

    kind: str
    simulation: int
    text: str


Action = Start | Kill | Note


def log_file(logs: Path, simulation: int) -> Path:
    """Where the output of all attempts of a simulation goes."""
    return logs / f"simulation-{simulation}.log"


def listed(ids: list[int], most: int = 10) -> str:
    """Numbers of simulations, as a sentence names them."""
    shown = ", ".join(str(i) for i in ids[:most])
    noun = "simulation" if len(ids) == 1 else "simulations"
    return f"{noun} {shown}" + (f" and {len(ids) - most} more" if len(ids) > most else "")

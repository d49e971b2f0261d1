"""All simulations of a run: which wait, run, are complete or given up, and what follows from what is told of them.

Pure: events are told with the time at which they came, ``tick`` answers with what is to be done. Two kinds:
``ManagedSimulations``, which the run starts, and ``ExternalSimulations``, which are started by the user.

One simulation as the desk knows it, and what the desk wants done about it.

Simulations that come by themselves: the run waits for them, and tells who is missing. Pure, see ``study``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from paramserver.config import SimulationsConfig
from paramserver.online.protocol import Header, SimulationReport, TrainerJoined


class SimulationState(str, Enum):
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
        state: see ``SimulationState``.
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
    state: SimulationState = SimulationState.WAITING
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
        return self.state in (SimulationState.COMPLETE, SimulationState.GIVEN_UP)

    def hear(self, member: int, now: float) -> None:
        """A sign of life; of one that is complete, or about to be ended, none matters any more."""
        if not self.ended and self.killed is None:
            self.heard_s[member] = now
            self.silent = False

    def begin(self, now: float) -> None:
        """This attempt begins."""
        self.enter(SimulationState.RUNNING, now)
        self.killed = self.failed = None
        self.byes.clear()
        self.heard_s.clear()

    def enter(self, state: SimulationState, now: float) -> None:
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
        given_up = self.state is SimulationState.GIVEN_UP
        started = self.alive or self.state is not SimulationState.WAITING
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
        return cls(**rest, state=SimulationState.GIVEN_UP if state["given_up"] else SimulationState.WAITING)


# What is to be done.


@dataclass(frozen=True)
class StartProcess:
    simulation: int
    attempt: int
    parameters: tuple[float, ...]


@dataclass(frozen=True)
class KillProcess:
    simulation: int
    why: str


@dataclass(frozen=True)
class TrackerEvent:
    """Something to record; ``kind`` is one of complete, restarted, given_up, silent, exited."""

    kind: str
    simulation: int
    text: str


Action = StartProcess | KillProcess | TrackerEvent


def log_file(logs: Path, simulation: int) -> Path:
    """Where the output of all attempts of a simulation goes."""
    return logs / f"simulation-{simulation}.log"


def listed(ids: list[int], most: int = 10) -> str:
    """Numbers of simulations, as a sentence names them."""
    shown = ", ".join(str(i) for i in ids[:most])
    noun = "simulation" if len(ids) == 1 else "simulations"
    return f"{noun} {shown}" + (f" and {len(ids) - most} more" if len(ids) > most else "")


class SimulationTracker(ABC):
    """What both kinds share: counts, totals, which trainer a simulation is dealt to, the state in a checkpoint.

    A simulation is complete when its samples that were received, over all trainers, are its total: ``steps`` of the
    config. Where that is null, it is complete when all of its members have said BYE, which they say when all that they
    sent was dealt with.

    Args:
        config: ``simulations``, checked.
        trainers: how many.

    Attributes:
        simulations: by their numbers.
        complete: how many are complete.
        done: whether all that was wanted is complete.
        failure: why the run cannot go on, in one sentence.
        restarts: simulations that were started again after a failure.
    """

    def __init__(self, config: SimulationsConfig, trainers: int) -> None:
        self.config = config
        self.trainers = trainers
        self.simulations: dict[int, Simulation] = {}
        self.done = False
        self.failure: str | None = None
        self.restarts = 0
        self.complete = 0
        self._begun = False
        self._received: list[dict[int, int]] = [{} for _ in range(trainers)]
        self._inherited: Mapping[int, int] = {}
        self._reports = [0] * trainers

    # Events.

    def begin(self, joined: Sequence[TrainerJoined], now: float) -> None:
        """All trainers have joined: what they had received before decides what is complete."""
        self._received = [{**one.received, **reported} for one, reported in zip(joined, self._received, strict=True)]
        self._inherited = dict(joined[0].inherited)
        self._begun = True
        for simulation in self.simulations.values():
            if self._is_complete(simulation):
                simulation.state = SimulationState.COMPLETE
                self.complete += 1
            simulation.since_s = now

    def refusal(self, header: Header) -> str | None:
        """Why the HELLO of this simulation must be refused; None where it is welcome."""
        if header.members != self.config.group_size:
            return (
                f"simulation {header.simulation} has a group of {header.members}, which must be "
                f"simulations.group_size ({self.config.group_size}); correct one of them"
            )
        return None

    def hello(self, header: Header, parameters: Sequence[float], now: float) -> None:
        """A member of a simulation that is not refused opened it."""
        self.simulations[header.simulation].told = list(parameters)

    def bye(self, header: Header, now: float) -> None:
        """A member said that all of its ``header.step`` samples were dealt with."""
        simulation = self.simulations.get(header.simulation)
        if simulation is None or header.attempt != simulation.attempt or simulation.ended:
            return
        simulation.hear(header.member, now)
        simulation.byes[header.member] = header.step
        if self.config.steps is None and simulation.all_said_bye(header.members):
            simulation.total = sum(simulation.byes.values()) // header.members

    def reported(self, trainer: int, report: SimulationReport, now: float) -> None:
        """A trainer told how far it is."""
        self._received[trainer].update(report.received)
        self._reports[trainer] += 1
        for number, member in report.heard:
            if number in self.simulations:
                self.simulations[number].hear(member, now)

    def last(self, now: float) -> str | None:
        """Nobody else will come from outside; a sentence where that is not for others to say."""
        return "the run starts its simulations itself, and knows which is the last"

    def exited(self, number: int, attempt: int, code: int, now: float) -> None:
        """The process of a simulation ended; only where the run started it."""

    @abstractmethod
    def tick(self, now: float) -> list[Action]:
        """What is to be done now. Afterwards ``done`` and ``failure`` may be set."""

    # Questions.

    def received(self, number: int) -> int:
        """Samples of a simulation that some buffer has got, in this run and those before."""
        return self._inherited.get(number, 0) + sum(one.get(number, 0) for one in self._received)

    def told_parameters(self, number: int) -> list[float] | None:
        """With which a simulation was opened first; None where it was not."""
        simulation = self.simulations.get(number)
        return None if simulation is None else simulation.told

    def counts(self) -> dict[str, int]:
        """How many simulations are waiting, running, complete and given up."""
        found = Counter(one.state for one in self.simulations.values())
        running = found[SimulationState.RUNNING] + found[SimulationState.SETTLING]
        return {
            "waiting": found[SimulationState.WAITING],
            "running": running,
            "complete": found[SimulationState.COMPLETE],
            "given_up": found[SimulationState.GIVEN_UP],
        }

    def in_state(self, *states: SimulationState) -> list[Simulation]:
        return [one for one in self.simulations.values() if one.state in states]

    def trainer_for(self, number: int) -> int | None:
        """Which trainer gets all samples of this simulation; None where each step goes to another.

        The one with the fewest running simulations, then with the fewest in all; it stays with it.
        """
        if self.config.deal != "simulation":
            return None
        simulation = self.simulations[number]
        if simulation.trainer is None:
            running: Counter[int] = Counter()
            dealt: Counter[int] = Counter()
            for one in self.simulations.values():
                if one.trainer is not None:
                    dealt[one.trainer] += 1
                    running[one.trainer] += one.state in (SimulationState.RUNNING, SimulationState.SETTLING)
            simulation.trainer = min(range(self.trainers), key=lambda i: (running[i], dealt[i], i))
        return simulation.trainer

    def _is_complete(self, simulation: Simulation) -> bool:
        """Whether all of its samples are received; given up ones have been replaced."""
        if simulation.state is SimulationState.GIVEN_UP:
            return False
        total = self.config.steps or simulation.total
        if total is not None and self.received(simulation.id) >= total:
            return True
        return self.config.steps is None and bool(simulation.byes) and simulation.total is not None

    def _complete(self, simulation: Simulation, now: float) -> TrackerEvent:
        simulation.enter(SimulationState.COMPLETE, now)
        self.complete += 1
        return TrackerEvent("complete", simulation.id, f"simulation {simulation.id} is complete")

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Plain values; ``load_state_dict`` before ``begin`` takes them back."""
        return {"restarts": self.restarts, "simulations": [one.state_dict() for one in self.simulations.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.restarts = state["restarts"]
        found = [Simulation.of(one) for one in state["simulations"]]
        for one in found:
            if one.trainer is not None and one.trainer >= self.trainers:
                one.trainer = None  # of a run with more trainers; all of these know what theirs had received
        self.simulations = {one.id: one for one in found}


class ExternalSimulations(SimulationTracker):
    """It is done when ``count`` simulations are complete, or, once somebody said LAST, all that were ever opened.

    One that is silent for ``timeout_s`` is noted once, and waited for: who started it may start it again. Where there
    is no sign of life from anybody for ``timeout_s``, the study fails. Before the first has come in this run it waits
    for ``first_s``, if that is longer.

    Args:
        config: ``simulations``.
        trainers: how many.
        first_s: how long nobody need come at the start, in seconds: ``cluster.timeout_s``.
    """

    def __init__(self, config: SimulationsConfig, trainers: int, first_s: float) -> None:
        super().__init__(config, trainers)
        self._first_s = first_s
        self._open: dict[int, Simulation] = {}
        self._last_said = False
        self._anybody = False
        self._sign_s = 0.0

    # Events.

    def begin(self, joined: Sequence[TrainerJoined], now: float) -> None:
        for number in {*joined[0].inherited, *(key for one in joined for key in one.received)}:
            self._known(number)  # the desk's part of a checkpoint may be a little older than the trainers'
        super().begin(joined, now)
        self._open = {one.id: one for one in self.in_state(SimulationState.WAITING)}
        self._sign_s = now

    def refusal(self, header: Header) -> str | None:
        count, known = self.config.count, self.simulations.get(header.simulation)
        if count is not None and header.simulation >= count:
            return f"simulation ({header.simulation}) must be below simulations.count ({count})"
        if known is not None and header.attempt < known.attempt:
            return (
                f"attempt ({header.attempt}) of simulation {known.id} must be at least {known.attempt}, which is open"
            )
        return super().refusal(header)

    def hello(self, header: Header, parameters: Sequence[float], now: float) -> None:
        simulation = self._known(header.simulation)
        self._sign_s, self._anybody = now, True
        super().hello(header, parameters, now)
        simulation.parameters = simulation.told
        if simulation.ended:
            return  # somebody sends it again: duplicates
        if header.attempt > simulation.attempt or simulation.state is SimulationState.WAITING:
            simulation.attempt = header.attempt
            simulation.begin(now)
            self._open[simulation.id] = simulation
        simulation.byes.pop(header.member, None)
        simulation.hear(header.member, now)

    def bye(self, header: Header, now: float) -> None:
        self._sign_s = now
        super().bye(header, now)

    def reported(self, trainer: int, report: SimulationReport, now: float) -> None:
        if any(count != self._received[trainer].get(number, 0) for number, count in report.received.items()):
            self._sign_s = now
        if any(number in self._open for number, _ in report.heard):
            self._sign_s = now
        super().reported(trainer, report, now)

    def last(self, now: float) -> str | None:
        self._last_said, self._sign_s = True, now
        return None

    # What follows.

    def tick(self, now: float) -> list[Action]:
        if not self._begun or self.failure is not None:
            return []
        actions: list[Action] = []
        for simulation in list(self._open.values()):
            if self._is_complete(simulation):
                actions.append(self._complete(simulation, now))
            elif not simulation.silent and self._is_quiet(simulation, now):
                actions.append(self._fell_silent(simulation))
        enough = self.config.count is not None and self.complete >= self.config.count
        self.done = enough or (self._last_said and not self._open)
        if not self.done and now - self._sign_s > self._patience[0]:
            self.failure = self._missing(*self._patience)
        return actions

    def _complete(self, simulation: Simulation, now: float) -> TrackerEvent:
        del self._open[simulation.id]
        return super()._complete(simulation, now)

    def _known(self, number: int) -> Simulation:
        return self.simulations.setdefault(number, Simulation(number))

    def _is_quiet(self, simulation: Simulation, now: float) -> bool:
        return now - simulation.quiet_since(self.config.group_size) > self.config.timeout_s

    def _fell_silent(self, simulation: Simulation) -> TrackerEvent:
        simulation.silent = True
        got, of = self.received(simulation.id), self.config.steps or "an unknown number of"
        return TrackerEvent(
            "silent",
            simulation.id,
            f"simulation {simulation.id} has been silent for {self.config.timeout_s:g} s, after {got} of {of} samples; "
            "it is waited for",
        )

    @property
    def _patience(self) -> tuple[float, str]:
        """How long nobody need give a sign of life, and the key that says so."""
        if self._anybody or self._first_s <= self.config.timeout_s:
            return self.config.timeout_s, "simulations.timeout_s"
        return self._first_s, "cluster.timeout_s"

    def _missing(self, patience_s: float, key: str) -> str:
        """Who did not come, in one sentence with the cure."""
        cure = f"start what is missing and resume, or raise {key}"
        if self._open:
            verb = "is" if len(self._open) == 1 else "are"
            return f"nothing came for {patience_s:g} s, and {listed([*self._open])} {verb} not complete; {cure}"
        of = "" if self.config.count is None else f" of {self.config.count}"
        if self.complete or self._anybody:
            return (
                f"no simulation came for {patience_s:g} s after {self.complete}{of} were complete, and nobody said "
                f"which was the last; {cure}"
            )
        return f"no simulation came for {patience_s:g} s; start clients with the address of this run, or {cure}"

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "last_said": self._last_said}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._last_said = state["last_said"]
        for simulation in self.simulations.values():
            simulation.attempt = 0  # counted by whoever starts it
            simulation.told = simulation.parameters

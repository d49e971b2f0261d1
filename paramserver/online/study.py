"""All simulations of a run: which wait, run, are complete or given up, and what follows from what is told of them.

Pure: events are told with the time at which they came, ``tick`` answers with what is to be done. Two kinds:
``Started``, whose simulations the run starts, and ``Outside``, whose simulations come by themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paramserver.config import SimulationsConfig
from paramserver.online.messages import Header, Joined, Report
from paramserver.online.simulation import Action, Note, Simulation, State


class Study(ABC):
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

    def begin(self, joined: Sequence[Joined], now: float) -> None:
        """All trainers have joined: what they had received before decides what is complete."""
        self._received = [{**one.received, **reported} for one, reported in zip(joined, self._received, strict=True)]
        self._inherited = dict(joined[0].inherited)
        self._begun = True
        for simulation in self.simulations.values():
            if self._is_complete(simulation):
                simulation.state = State.COMPLETE
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

    def reported(self, trainer: int, report: Report, now: float) -> None:
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
        running = found[State.RUNNING] + found[State.SETTLING]
        return {
            "waiting": found[State.WAITING],
            "running": running,
            "complete": found[State.COMPLETE],
            "given_up": found[State.GIVEN_UP],
        }

    def in_state(self, *states: State) -> list[Simulation]:
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
                    running[one.trainer] += one.state in (State.RUNNING, State.SETTLING)
            simulation.trainer = min(range(self.trainers), key=lambda i: (running[i], dealt[i], i))
        return simulation.trainer

    def _is_complete(self, simulation: Simulation) -> bool:
        """Whether all of its samples are received; given up ones have been replaced."""
        if simulation.state is State.GIVEN_UP:
            return False
        total = self.config.steps or simulation.total
        if total is not None and self.received(simulation.id) >= total:
            return True
        return self.config.steps is None and bool(simulation.byes) and simulation.total is not None

    def _complete(self, simulation: Simulation, now: float) -> Note:
        simulation.enter(State.COMPLETE, now)
        self.complete += 1
        return Note("complete", simulation.id, f"simulation {simulation.id} is complete")

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

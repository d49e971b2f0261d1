"""Simulations that the run starts, watches, starts again and replaces. Pure, see ``study``."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paramserver.config import SimulationsConfig
from paramserver.online.protocol import Header, SimulationReport, TrainerJoined
from paramserver.online.tracker import (
    Action,
    KillProcess,
    Simulation,
    SimulationState,
    SimulationTracker,
    StartProcess,
    TrackerEvent,
    listed,
    log_file,
)

GIVEN_UP_IN_A_ROW = 3
"""So many simulations given up, with none complete in between, end the study: it is not the parameters' fault."""

# Of a process that ended well all samples are dealt with; the trainers' next reports have them. Those that were under
# way do not count.
_REPORTS_TO_SETTLE = 2
_SETTLE_S = 1.0
_LEAST_TO_END_S = 30.0


class ManagedSimulations(SimulationTracker):
    """At most ``at_once`` processes run, one for each simulation.

    One that crashes, or is silent for ``timeout_s``, is started again with the same parameters, up to ``max_restarts``
    times; then it is given up, and a new one with the next number and new parameters takes its place.

    Args:
        config: ``simulations``, with a count.
        trainers: how many.
        draw: number of a simulation -> its parameters.
        logs: folder of their output, for messages.
    """

    def __init__(
        self, config: SimulationsConfig, trainers: int, draw: Callable[[int], Sequence[float]], logs: Path
    ) -> None:
        super().__init__(config, trainers)
        assert config.count is not None
        self.count = config.count
        self._draw = draw
        self._logs = logs
        self._given_up_in_a_row = 0
        # Not all simulations, so that a tick looks only at those with which something may happen: to be started again,
        # for the first time, and started.
        self._again: deque[Simulation] = deque()
        self._fresh: deque[Simulation] = deque()
        self._started: dict[int, Simulation] = {}
        self._fill_up()

    # Events.

    def begin(self, joined: Sequence[TrainerJoined], now: float) -> None:
        super().begin(joined, now)
        self._fresh = deque(self.in_state(SimulationState.WAITING))

    def refusal(self, header: Header) -> str | None:
        simulation = self.simulations.get(header.simulation)
        if simulation is None or not simulation.alive:
            return f"simulation ({header.simulation}) must be one that the run has started, and that runs"
        if header.attempt != simulation.attempt:
            return f"attempt ({header.attempt}) of simulation {simulation.id} must be the present {simulation.attempt}"
        return super().refusal(header)

    def hello(self, header: Header, parameters: Sequence[float], now: float) -> None:
        super().hello(header, parameters, now)
        self.simulations[header.simulation].hear(header.member, now)

    def reported(self, trainer: int, report: SimulationReport, now: float) -> None:
        super().reported(trainer, report, now)
        for number in report.waiting:
            simulation = self._started.get(number)
            if simulation is not None and simulation.state is SimulationState.SETTLING:
                simulation.since_s = now
                simulation.settled_at[trainer] = self._reports[trainer] + 1

    def exited(self, number: int, attempt: int, code: int, now: float) -> None:
        simulation = self.simulations[number]
        if not simulation.alive or attempt != simulation.attempt:
            return
        simulation.alive = False
        if simulation.killed is not None:
            return
        simulation.failed = None if code == 0 else how_it_ended(code)
        if not simulation.ended and (code == 0 or self._may_have_sent_all(simulation)):
            simulation.enter(SimulationState.SETTLING, now)
            simulation.settled_at = [reports + _REPORTS_TO_SETTLE for reports in self._reports]

    def _may_have_sent_all(self, simulation: Simulation) -> bool:
        """Of one that did not end well: where ``steps`` is known, nothing but the samples says."""
        if self.config.steps is None:
            return simulation.all_said_bye(self.config.group_size)
        return bool(simulation.heard_s)

    # What follows.

    def tick(self, now: float) -> list[Action]:
        if not self._begun or self.failure is not None:
            return []
        actions: list[Action] = []
        for simulation in [*self._again, *self._started.values()]:
            if not simulation.ended and self._is_complete(simulation):
                actions.append(self._complete(simulation, now))
        for simulation in list(self._started.values()):
            if self.failure is None:
                actions += self._look_at(simulation, now)
        self.done = self.complete >= self.count
        if not self.done and self.failure is None:
            actions += self._start_more(now)
        return actions

    def _look_at(self, simulation: Simulation, now: float) -> list[Action]:
        if simulation.alive:
            return self._watch(simulation, now)
        if simulation.ended:
            del self._started[simulation.id]
            return [] if simulation.failed is None else [_ended_late(simulation.id, simulation.failed)]
        if simulation.state is SimulationState.SETTLING and not self._is_settled(simulation, now - simulation.since_s):
            return []
        return self._failed(simulation, simulation.killed or simulation.failed or self._too_few(simulation))

    def _watch(self, simulation: Simulation, now: float) -> list[Action]:
        """Of a process that runs: silence, or life beyond its last sample."""
        limit_s = self.config.timeout_s
        if simulation.killed is not None:
            if now - simulation.since_s > max(limit_s, _LEAST_TO_END_S):
                self.failure = f"simulation {simulation.id} was to be ended ({simulation.killed}) and is still there"
            return []
        complete = simulation.state is SimulationState.COMPLETE
        since_s = simulation.since_s if complete else simulation.quiet_since(self.config.group_size)
        if now - since_s <= limit_s:
            return []
        if complete:
            simulation.killed = f"it went on for {limit_s:g} s after its last sample was received"
        else:
            simulation.killed = f"it was silent for {limit_s:g} s"
        simulation.since_s = now
        return [KillProcess(simulation.id, simulation.killed)]

    def _is_settled(self, simulation: Simulation, quiet_s: float) -> bool:
        told = all(self._reports[i] >= at for i, at in enumerate(simulation.settled_at))
        return (told and quiet_s >= _SETTLE_S) or quiet_s >= self.config.timeout_s

    def _too_few(self, simulation: Simulation) -> str:
        got = self.received(simulation.id)
        if self.config.steps is not None:
            return f"it ended after {got} of {self.config.steps} samples"
        return (
            f"it ended after {got} samples without close()" if simulation.total is None else "it ended with no sample"
        )

    def _failed(self, simulation: Simulation, why: str) -> list[Action]:
        del self._started[simulation.id]
        simulation.failures += 1
        simulation.state = SimulationState.WAITING
        told = f"simulation {simulation.id}, attempt {simulation.attempt}: {why}"
        if simulation.failures <= self.config.max_restarts:
            self.restarts += 1
            simulation.attempt += 1
            simulation.total = None
            self._again.append(simulation)
            return [TrackerEvent("restarted", simulation.id, f"{told}; it is started again")]
        simulation.state = SimulationState.GIVEN_UP
        self._given_up_in_a_row += 1
        if self._given_up_in_a_row >= GIVEN_UP_IN_A_ROW:
            self.failure = self._in_a_row(simulation, why)
            return [TrackerEvent("given_up", simulation.id, f"{told}; it is given up")]
        taking_over = self._fill_up()
        return [TrackerEvent("given_up", simulation.id, f"{told}; it is given up for {listed(taking_over)}")]

    def _in_a_row(self, simulation: Simulation, why: str) -> str:
        tries = self.config.max_restarts + 1
        return (
            f"{GIVEN_UP_IN_A_ROW} simulations in a row failed {tries} {'time' if tries == 1 else 'times'} each; "
            f"the last of them, simulation {simulation.id}: {why}; its output is in "
            f"{log_file(self._logs, simulation.id)}"
        )

    def _start_more(self, now: float) -> list[Action]:
        free = self.config.at_once - sum(one.alive for one in self._started.values())
        actions: list[Action] = []
        while len(actions) < free and (waiting := self._again or self._fresh):
            simulation = waiting.popleft()
            if simulation.state is SimulationState.WAITING:  # else its last samples were counted while it waited
                actions.append(self._start(simulation, now))
        return actions

    def _start(self, simulation: Simulation, now: float) -> StartProcess:
        if simulation.parameters is None:
            simulation.parameters = [float(value) for value in self._draw(simulation.id)]
        simulation.begin(now)
        simulation.alive = True
        self._started[simulation.id] = simulation
        return StartProcess(simulation.id, simulation.attempt, tuple(simulation.parameters))

    def _complete(self, simulation: Simulation, now: float) -> TrackerEvent:
        self._given_up_in_a_row = 0
        return super()._complete(simulation, now)

    def _is_complete(self, simulation: Simulation) -> bool:
        # One that sends nothing and says that this was all has failed.
        return simulation.total != 0 and super()._is_complete(simulation)

    def _fill_up(self) -> list[int]:
        """As many simulations as are wanted; the numbers of those that are new."""
        wanted = self.count - sum(one.state is not SimulationState.GIVEN_UP for one in self.simulations.values())
        first = max(self.simulations, default=-1) + 1
        fresh = [Simulation(first + i) for i in range(wanted)]
        self.simulations.update((one.id, one) for one in fresh)
        self._fresh.extend(fresh)
        return [one.id for one in fresh]

    # Checkpoints.

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._fill_up()  # more may be wanted than before


def _ended_late(number: int, how: str) -> TrackerEvent:
    told = f"of simulation {number} all samples had arrived before {how}; it counts as complete"
    return TrackerEvent("exited", number, told)


def how_it_ended(code: int) -> str:
    """What an exit code says, as a shell tells it: beyond 128 the number of a signal."""
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"it was killed by {signal.Signals(number).name}"
    return f"it ended with exit code {code}"

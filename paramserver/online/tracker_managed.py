"""Simulations that the run starts, watches, starts again and replaces. Pure, see tracker.py."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paramserver.config import SimulationsConfig
from paramserver.errors import CheckpointError
from paramserver.online.protocol import Header, SimulationReport, TrainerJoined
from paramserver.online.sampler import CheckedSampler
from paramserver.online.tracker import (
    Action,
    KillProcess,
    Simulation,
    SimulationState,
    SimulationTracker,
    StartProcess,
    TrackerEvent,
    format_simulations,
    log_file,
)
from paramserver.process_utils import signal_name

MAX_GIVEN_UP_IN_A_ROW = 3
"""This many simulations given up in a row, with none complete in between, fail the run: the cause is not the
parameters of one of them."""

_SETTLE_S = 1.0
_MIN_KILL_TIMEOUT_S = 30.0


class ManagedSimulations(SimulationTracker):
    """Simulations that run as processes, at most ``at_once`` at a time.

    A simulation that crashes, or is silent for ``timeout_s``, is started again with the same parameters, up to
    ``max_restarts`` times. Then it is given up, and one with the next number and new parameters replaces it.
    """

    def __init__(
        self,
        config: SimulationsConfig,
        num_trainers: int,
        sampler: CheckedSampler,
        logs: Path,
    ) -> None:
        super().__init__(config, num_trainers)
        assert config.count is not None
        self.count = config.count
        self._sampler = sampler
        self._logs = logs
        self._given_up_in_a_row = 0
        # Three sets, so that poll() visits only simulations with which something may happen: to be started again, to be
        # started for the first time, and started.
        self._to_restart: deque[Simulation] = deque()
        self._to_start: deque[Simulation] = deque()
        self._started: dict[int, Simulation] = {}
        self._add_missing()

    # Events.

    def on_trainers_joined(self, joined: Sequence[TrainerJoined], now: float) -> None:
        super().on_trainers_joined(joined, now)
        self._to_start = deque(self.in_state(SimulationState.WAITING))

    def check_hello(self, header: Header) -> str | None:
        simulation = self.simulations.get(header.simulation)
        if simulation is None or not simulation.process_alive:
            return f"simulation ({header.simulation}) must be one that the run has started, and that runs"
        if header.attempt != simulation.attempt:
            return f"attempt ({header.attempt}) of simulation {simulation.id} must be the present {simulation.attempt}"
        return super().check_hello(header)

    def on_hello(self, header: Header, parameters: Sequence[float], now: float) -> None:
        super().on_hello(header, parameters, now)
        self.simulations[header.simulation].mark_seen(header.member, now)

    def on_report(self, trainer_index: int, report: SimulationReport, now: float) -> None:
        super().on_report(trainer_index, report, now)
        self._sampler.observe({number: loss for number, loss in report.losses.items() if number in self.simulations})
        for number in report.pending:
            simulation = self._started.get(number)
            if simulation is not None and simulation.state is SimulationState.SETTLING:
                # Samples of it wait for room in a buffer: not before the next report can they all be counted.
                simulation.since_s = now
                simulation.settled_at[trainer_index] = self._num_reports[trainer_index] + 1

    def on_exit(self, number: int, attempt: int, exit_code: int, now: float, last_line: str = "") -> None:
        simulation = self.simulations[number]
        if not simulation.process_alive or attempt != simulation.attempt:
            return
        simulation.process_alive = False
        if simulation.kill_reason is not None:
            return
        simulation.exit_error = None if exit_code == 0 else describe_exit(exit_code)
        simulation.last_line = last_line
        if not simulation.ended and (exit_code == 0 or self._may_have_sent_all(simulation)):
            simulation.set_state(SimulationState.SETTLING, now)
            self._expect_reports(simulation)

    def _may_have_sent_all(self, simulation: Simulation) -> bool:
        """Whether a process that failed may have failed after its last sample."""
        if self.config.steps is None:
            return simulation.has_all_byes(self.config.group_size)
        return bool(simulation.last_seen_s)

    # Actions.

    def poll(self, now: float) -> list[Action]:
        if not self._trainers_joined or self.failure is not None:
            return []
        actions: list[Action] = []
        # Completion first: a simulation whose samples are all received must not count as failed.
        for simulation in [*self._to_restart, *self._started.values()]:
            if not simulation.ended and self._is_complete(simulation):
                actions.append(self._complete(simulation, now))
        for simulation in list(self._started.values()):
            if self.failure is None:
                actions += self._check(simulation, now)
        self.done = self.num_complete >= self.count
        if not self.done and self.failure is None:
            actions += self._start_next(now)
        return actions

    def _check(self, simulation: Simulation, now: float) -> list[Action]:
        if simulation.process_alive:
            return self._check_process(simulation, now)
        if simulation.ended:
            del self._started[simulation.id]
            if simulation.exit_error is None:
                return []
            text = (
                f"of simulation {simulation.id} all samples had arrived before {simulation.exit_error}; it counts as "
                "complete"
            )
            return [TrackerEvent("exited", simulation.id, text)]
        if simulation.state is SimulationState.SETTLING:
            if not self._is_settled(simulation, self.quiet_s(simulation.since_s, now)):
                return []
            self._close(simulation)
            if self._is_complete(simulation):
                return [self._complete(simulation, now)]
        reason = simulation.kill_reason or simulation.exit_error or self._too_few(simulation)
        # The run knows that the process failed, the process why.
        if simulation.kill_reason is None and simulation.last_line:
            reason = f'{reason}, and its last line is "{simulation.last_line}"'
        return self._fail_attempt(simulation, reason)

    def _check_process(self, simulation: Simulation, now: float) -> list[Action]:
        """Kill a process that is silent, or that runs on after its last sample."""
        limit_s = self.config.timeout_s
        if simulation.kill_reason is not None:
            if now - simulation.since_s > max(limit_s, _MIN_KILL_TIMEOUT_S):
                self.failure = f"simulation {simulation.id} was to be ended ({simulation.kill_reason}) and still runs"
            return []
        complete = simulation.state is SimulationState.COMPLETE
        since_s = simulation.since_s if complete else simulation.silent_since(self.config.group_size)
        waits = not complete and self.waits_for_parts(simulation)
        if self.quiet_s(since_s, now) <= limit_s and not waits:
            return []
        if complete:
            simulation.kill_reason = f"it continued for {limit_s:g} s after its last sample was received"
        elif waits:
            simulation.kill_reason = f"its processes waited for each other's parts of a sample for {limit_s:g} s"
        else:
            simulation.kill_reason = f"it was silent for {limit_s:g} s"
        simulation.since_s = now
        return [KillProcess(simulation.id, simulation.kill_reason)]

    def _is_settled(self, simulation: Simulation, quiet_s: float) -> bool:
        return (self._is_reported(simulation) and quiet_s >= _SETTLE_S) or quiet_s >= self.config.timeout_s

    def _too_few(self, simulation: Simulation) -> str:
        got = self.num_received(simulation.id)
        if self.config.command is not None and not got and not simulation.last_seen_s:
            return (
                "it ended well without sending anything; the program of simulations.command must send its samples with "
                "a client, see examples/clients/README.md (C, Fortran) and docs/protocol.md (other languages)"
            )
        if self.config.steps is not None:
            return f"it ended after {got} of {self.config.steps} samples"
        return (
            f"it ended after {got} samples without close()" if simulation.total is None else "it ended with no sample"
        )

    def _fail_attempt(self, simulation: Simulation, reason: str) -> list[Action]:
        del self._started[simulation.id]
        simulation.failures += 1
        simulation.state = SimulationState.WAITING
        text = f"simulation {simulation.id}, attempt {simulation.attempt}: {reason}"
        if simulation.failures <= self.config.max_restarts:
            self.restarts += 1
            simulation.attempt += 1
            simulation.total = None
            self._to_restart.append(simulation)
            return [TrackerEvent("restarted", simulation.id, f"{text}; it is started again")]
        simulation.state = SimulationState.GIVEN_UP
        self._given_up_in_a_row += 1
        if self._given_up_in_a_row >= MAX_GIVEN_UP_IN_A_ROW:
            tries = "1 time" if self.config.max_restarts == 0 else f"{self.config.max_restarts + 1} times"
            self.failure = (
                f"{MAX_GIVEN_UP_IN_A_ROW} simulations in a row failed {tries} each; "
                f"the last of them, simulation {simulation.id}: {reason}; its output is in "
                f"{log_file(self._logs, simulation.id)}"
            )
            return [TrackerEvent("given_up", simulation.id, f"{text}; it is given up")]
        replacements = format_simulations(self._add_missing())
        return [TrackerEvent("given_up", simulation.id, f"{text}; it is given up for {replacements}")]

    def _start_next(self, now: float) -> list[Action]:
        free = self.config.at_once - sum(one.process_alive for one in self._started.values())
        actions: list[Action] = []
        while len(actions) < free and (waiting := self._to_restart or self._to_start):
            simulation = waiting.popleft()
            # Else its last samples were counted while it waited for its restart.
            if simulation.state is SimulationState.WAITING:
                actions.append(self._start(simulation, now))
        return actions

    def _start(self, simulation: Simulation, now: float) -> StartProcess:
        if simulation.parameters is None:
            simulation.parameters, simulation.density_ratio = self._sampler.draw_with_ratio(simulation.id)
        simulation.start_attempt(now)
        simulation.process_alive = True
        self._started[simulation.id] = simulation
        return StartProcess(simulation.id, simulation.attempt, tuple(simulation.parameters), simulation.density_ratio)

    def _complete(self, simulation: Simulation, now: float) -> TrackerEvent:
        self._given_up_in_a_row = 0
        return super()._complete(simulation, now)

    def _is_complete(self, simulation: Simulation) -> bool:
        # One that sends BYE without a sample has failed.
        return simulation.total != 0 and super()._is_complete(simulation)

    def _add_missing(self) -> list[int]:
        """Add simulations up to the count, without those given up; returns the numbers of the new ones."""
        missing = self.count - sum(one.state is not SimulationState.GIVEN_UP for one in self.simulations.values())
        first = max(self.simulations, default=-1) + 1
        added = [Simulation(first + i) for i in range(missing)]
        self.simulations.update((one.id, one) for one in added)
        self._to_start.extend(added)
        return [one.id for one in added]

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        learned = {"sampler": self._sampler.state_dict()} if self._sampler.learns else {}
        return {**super().state_dict(), "drawn_by": self._sampler.reference, **learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        drawn = [one for one in self.simulations.values() if one.parameters is not None]
        learned = state.get("sampler")
        if drawn and self._sampler.learns != (learned is not None):
            does, other = ("learns", "does not") if self._sampler.learns else ("does not learn", "does")
            raise CheckpointError(
                f"simulations.sampler ({self._sampler.reference}) {does}, and that of the checkpoint "
                f"({state.get('drawn_by', 'another one')}), which has drawn simulations, {other}; resume with the "
                "sampler of the checkpoint"
            )
        if any((one.density_ratio is not None) != self._sampler.gives_density_ratio for one in drawn):
            had, has = ("no", "a") if self._sampler.gives_density_ratio else ("a", "no")
            raise CheckpointError(
                f"simulations.sampler ({self.config.sampler}) gives {has} density_ratio, and the samples of the "
                f"checkpoint have {had} density_ratio; resume with the sampler of the checkpoint"
            )
        if self._sampler.learns and learned is not None:
            self._sampler.load_state_dict(learned)
        self._add_missing()  # the count may be larger than that of the run that is resumed


def describe_exit(exit_code: int) -> str:
    """How a process ended, from its exit code. As in a shell, 128 + n stands for signal n."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    if exit_code < 0 or number in set(signal.Signals):
        return f"it was killed by {signal_name(number)}"
    return f"it ended with exit code {exit_code}"

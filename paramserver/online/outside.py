"""Simulations that come by themselves: the run waits for them, and tells who is missing. Pure, see ``study``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paramserver.config import SimulationsConfig
from paramserver.online.messages import Header, Joined, Report
from paramserver.online.simulation import Action, Note, Simulation, State, listed
from paramserver.online.study import Study


class Outside(Study):
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

    def begin(self, joined: Sequence[Joined], now: float) -> None:
        for number in {*joined[0].inherited, *(key for one in joined for key in one.received)}:
            self._known(number)  # the desk's part of a checkpoint may be a little older than the trainers'
        super().begin(joined, now)
        self._open = {one.id: one for one in self.in_state(State.WAITING)}
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
        if header.attempt > simulation.attempt or simulation.state is State.WAITING:
            simulation.attempt = header.attempt
            simulation.begin(now)
            self._open[simulation.id] = simulation
        simulation.byes.pop(header.member, None)
        simulation.hear(header.member, now)

    def bye(self, header: Header, now: float) -> None:
        self._sign_s = now
        super().bye(header, now)

    def reported(self, trainer: int, report: Report, now: float) -> None:
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

    def _complete(self, simulation: Simulation, now: float) -> Note:
        del self._open[simulation.id]
        return super()._complete(simulation, now)

    def _known(self, number: int) -> Simulation:
        return self.simulations.setdefault(number, Simulation(number))

    def _is_quiet(self, simulation: Simulation, now: float) -> bool:
        return now - simulation.quiet_since(self.config.group_size) > self.config.timeout_s

    def _fell_silent(self, simulation: Simulation) -> Note:
        simulation.silent = True
        got, of = self.received(simulation.id), self.config.steps or "an unknown number of"
        return Note(
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

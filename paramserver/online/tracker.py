"""The state of all simulations of a run: which wait, run, are complete or given up, and what is to be done next.

Pure: no sockets, processes or clocks. The coordinator reports each event with the time at which it occurred, and
``SimulationTracker.poll`` returns the actions to take. ``ExternalSimulations`` are started by the user;
``ManagedSimulations`` are started by the run.
"""

from __future__ import annotations

import math
import signal
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import ge
from pathlib import Path
from typing import Any, ClassVar

from paramserver.config import SimulationsConfig
from paramserver.errors import CheckpointError
from paramserver.online.protocol import Header, MessageKind, SimulationReport, TrainerJoined
from paramserver.online.sampler import CheckedSampler
from paramserver.process_utils import signal_name


class SimulationState(str, Enum):
    WAITING = "waiting"  # for its start or restart
    RUNNING = "running"  # its process runs, or an external client has opened it
    SETTLING = "settling"  # its process ended well; its last samples are still being counted
    COMPLETE = "complete"
    GIVEN_UP = "given_up"


@dataclass
class Simulation:
    """One simulation.

    Attributes:
        parameters: sampled by the run or sent by its clients; None before.
        density_ratio: of the parameters, see ``Sampler``; None if the sampler gives none.
        client_parameters: those that its clients sent; None before the first HELLO.
        lost: samples of it that died with a trainer, as far as no trainer reports them.
        closed_with: samples that its clients, which are closed, had sent, once all trainers have counted them.
        trainer: index of the trainer that receives all of its samples, with ``deal: simulation``.
        since_s: when it entered its state, or its attempt began.
        last_seen_s: member -> when it last sent a message in this attempt.
        moved_s: when a report last had another number of its samples or parts than the one before, or pending ones.
        byes: member -> the number of samples in its BYE.
        reported_silent: whether its silence was reported and lasts.
        kill_reason: why the run ends its process; None = it does not.
        exit_error: how its process ended without being killed by the run, if not with exit code 0.
        settled_at: for each trainer the number of the report by which all samples are counted; empty = not known.
    """

    id: int
    attempt: int = 0
    failures: int = 0
    state: SimulationState = SimulationState.WAITING
    parameters: list[float] | None = None
    density_ratio: float | None = None
    client_parameters: list[float] | None = None
    total: int | None = None
    lost: int = 0
    closed_with: int | None = None
    trainer: int | None = None
    process_alive: bool = False
    since_s: float = 0.0
    last_seen_s: dict[int, float] = field(default_factory=dict)
    moved_s: float = 0.0
    byes: dict[int, int] = field(default_factory=dict)
    reported_silent: bool = False
    kill_reason: str | None = None
    exit_error: str | None = None
    last_line: str = ""
    settled_at: list[int] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether no more samples of it are expected."""
        return self.state in (SimulationState.COMPLETE, SimulationState.GIVEN_UP)

    def mark_seen(self, member: int, now: float) -> None:
        """A member sent a message. Has no effect on a simulation that is complete or being killed."""
        if not self.ended and self.kill_reason is None:
            self.last_seen_s[member] = now

    def start_attempt(self, now: float) -> None:
        self.set_state(SimulationState.RUNNING, now)
        self.moved_s = now
        self.kill_reason = self.exit_error = None
        # Its clients send all of their samples again, or report which ones they cannot send.
        self.lost, self.closed_with = 0, None
        self.settled_at = []
        self.byes.clear()
        self.last_seen_s.clear()

    def set_state(self, state: SimulationState, now: float) -> None:
        self.state, self.since_s = state, now

    def silent_since(self, members: int) -> float:
        """When the member that has been silent for longest sent its last message.

        One silent member is enough: the others of its group may wait for it forever and send heartbeats. Members that
        sent BYE do not count.
        """
        open_members = [
            self.last_seen_s.get(member, self.since_s) for member in range(members) if member not in self.byes
        ]
        return min(open_members) if open_members else max(self.last_seen_s.values(), default=self.since_s)

    @property
    def samples_sent(self) -> int:
        """The samples of which each member has sent a part that was not refused, once all have sent BYE."""
        return min(self.byes.values())

    def state_dict(self) -> dict[str, Any]:
        given_up = self.state is SimulationState.GIVEN_UP
        started = self.process_alive or self.state is not SimulationState.WAITING
        return {
            "id": self.id,
            # A resumed run starts it again as the next attempt, so that messages of the old one are recognized.
            "attempt": self.attempt + (started and not given_up),
            "failures": self.failures,
            "given_up": given_up,
            "parameters": None if self.parameters is None else list(self.parameters),
            "density_ratio": self.density_ratio,
            "total": self.total,
            "trainer": self.trainer,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Simulation:
        """A simulation that does not run, as ``state_dict`` describes it."""
        rest = {name: state[name] for name in ("id", "attempt", "failures", "parameters", "total", "trainer")}
        return cls(
            **rest,
            density_ratio=state.get("density_ratio"),
            lost=state.get("lost", 0),
            state=SimulationState.GIVEN_UP if state["given_up"] else SimulationState.WAITING,
        )


# Actions.


@dataclass(frozen=True)
class StartProcess:
    simulation: int
    attempt: int
    parameters: tuple[float, ...]
    density_ratio: float | None = None


@dataclass(frozen=True)
class KillProcess:
    simulation: int
    reason: str


@dataclass(frozen=True)
class TrackerEvent:
    """An event to record; ``kind`` is one of complete, restarted, given_up, silent, exited."""

    kind: str
    simulation: int
    text: str


Action = StartProcess | KillProcess | TrackerEvent

# When its clients have ended well all samples of a simulation are acknowledged, and the trainers' next reports count
# them. Reports that were in flight at that moment may not, so two of each trainer are awaited.
_REPORTS_TO_SETTLE = 2
_SET_STEPS = "set simulations.steps to null where simulations have different numbers of samples"
# Numbers of simulations in one message.
_MOST_SHOWN = 10


def log_file(logs: Path, simulation: int) -> Path:
    """The file for the output of all attempts of a simulation."""
    return logs / f"simulation-{simulation}.log"


def format_simulations(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:_MOST_SHOWN]))
    noun = "simulation" if len(ids) == 1 else "simulations"
    return f"{noun} {shown}" + (f" and {len(ids) - _MOST_SHOWN} more" if len(ids) > _MOST_SHOWN else "")


class SimulationTracker(ABC):
    """Common part of both kinds: counts, totals, the trainer of each simulation, and the checkpoint state.

    A simulation is complete when the samples that all trainers have received of it reach its total, ``steps`` of the
    config. If ``steps`` is null, it is complete when all of its members have sent BYE, which they send when everything
    they sent is acknowledged.

    Not thread-safe: the coordinator calls it under its lock. ``failure`` is why the run cannot continue, as one
    message; None = it can.
    """

    starts_simulations: ClassVar[bool] = True

    def __init__(self, config: SimulationsConfig, num_trainers: int) -> None:
        self.config = config
        self.num_trainers = num_trainers
        self.simulations: dict[int, Simulation] = {}
        self.done = False
        self.failure: str | None = None
        self.restarts = 0
        self.num_complete = 0
        self._trainers_joined = False
        # When the last trainer joined; infinite while one is missing, for which simulations wait in silence.
        self.all_joined_s = -math.inf
        self._received: list[dict[int, int]] = [{} for _ in range(num_trainers)]
        self._lost: list[Mapping[int, int]] = [{} for _ in range(num_trainers)]
        self._first_missing: list[dict[int, int]] = [{} for _ in range(num_trainers)]
        self._inherited: Mapping[int, int] = {}
        self._num_reports = [0] * num_trainers
        # Of the last report of each trainer; infinitely long ago before it has sent one.
        self._parts: list[Mapping[int, int]] = [{} for _ in range(num_trainers)]
        self._reported_s = [-math.inf] * num_trainers
        # Whether samples that were acknowledged may be missing: with a trainer, or because of a return to a checkpoint.
        self._some_lost = False
        # simulation -> what each trainer had reported as lost, when the state of a checkpoint was made.
        self._lost_before: dict[int, Sequence[int]] = {}

    # Events.

    def on_trainers_joined(self, joined: Sequence[TrainerJoined], now: float) -> None:
        """All trainers have joined. What they received before determines which simulations are complete."""
        self._received = [{**one.received, **reported} for one, reported in zip(joined, self._received, strict=True)]
        self._inherited = dict(joined[0].inherited)
        self._lost = [one.lost for one in joined]
        self._first_missing = [dict(one.first_missing) for one in joined]
        self._trainers_joined = True
        for simulation in self.simulations.values():
            # Of a checkpoint, in which it is the number of all: without those that the trainers had reported.
            reported = [lost.get(simulation.id, 0) for lost in self._lost]
            simulation.lost = max(simulation.lost - sum(self._lost_before.get(simulation.id, reported)), 0)
            if self._is_complete(simulation):
                simulation.state = SimulationState.COMPLETE
                self.num_complete += 1
            simulation.since_s = now

    def on_trainer_replaced(self, index: int, joined: TrainerJoined) -> None:
        """Another process has taken the place of a trainer, with what was applied of it."""
        self._some_lost = True
        self._parts[index], self._reported_s[index] = {}, -math.inf
        before, self._received[index] = self._received[index], dict(joined.received)
        lost, self._lost[index] = self._lost[index], joined.lost
        self._first_missing[index] = dict(joined.first_missing)
        for simulation in self.simulations.values():
            # The clients of the others report to the replacement what the trainer had of them.
            if simulation.ended:
                missing = before.get(simulation.id, 0) - joined.received.get(simulation.id, 0)
                found = joined.lost.get(simulation.id, 0)
                simulation.lost += max(max(missing, 0) + lost.get(simulation.id, 0) - found, 0)

    def check_hello(self, header: Header) -> str | None:
        """Why the HELLO of this simulation must be refused; None = it must not."""
        if header.members != self.config.group_size:
            return (
                f"simulation {header.simulation} has a group of {header.members}, which must be "
                f"simulations.group_size ({self.config.group_size}); correct one of them"
            )
        return None

    def on_hello(self, header: Header, parameters: Sequence[float], now: float) -> None:
        """A member opened a simulation; call ``check_hello`` first."""
        self.simulations[header.simulation].client_parameters = list(parameters)

    def on_bye(self, header: Header, now: float) -> None:
        """A member reports that all of its ``header.step`` samples are acknowledged."""
        simulation = self.simulations.get(header.simulation)
        # A BYE of an older attempt must not count for the current one.
        if simulation is None or header.attempt != simulation.attempt or simulation.ended:
            return
        simulation.mark_seen(header.member, now)
        simulation.byes[header.member] = header.step
        if self._is_closed(simulation):
            if self.config.steps is None:
                simulation.total = simulation.samples_sent
            self._expect_reports(simulation)

    def on_report(self, trainer_index: int, report: SimulationReport, now: float) -> None:
        self._received[trainer_index].update(report.received)
        self._lost[trainer_index] = report.lost
        self._first_missing[trainer_index].update(report.first_missing)
        self._num_reports[trainer_index] += 1
        before, self._parts[trainer_index] = self._parts[trainer_index], report.parts
        moved = {number for number, _ in before.items() ^ report.parts.items()}
        # All, after a time in which the clients may have waited for this trainer.
        starts = self._reported_s[trainer_index] == -math.inf
        self._reported_s[trainer_index] = now
        for number in self.simulations if starts else moved.union(report.received, report.pending):
            if number in self.simulations:
                self.simulations[number].moved_s = now
        for number, member in report.active:
            if number in self.simulations:
                self.simulations[number].mark_seen(member, now)

    def on_finish(self, now: float) -> str | None:
        """No more simulations come from outside. Returns why this must be refused; None = it must not."""
        return "the run starts its simulations itself, and knows which is the last"

    def on_exit(self, number: int, attempt: int, exit_code: int, now: float, last_line: str = "") -> None:
        """The process of a simulation ended, after this line of output; only for simulations that the run starts."""

    def quiet_s(self, since_s: float, now: float) -> float:
        """The seconds since then in which no trainer was missing, after the last time that one was."""
        return now - max(since_s, self.all_joined_s)

    def waits_for_parts(self, simulation: Simulation) -> bool:
        """Whether its processes wait for each other: for long, there are parts of samples, and no others arrive."""
        has_parts = any(simulation.id in parts for parts in self._parts)
        return has_parts and min(self._reported_s) - simulation.moved_s > self.config.timeout_s

    def on_started(self, number: int, now: float) -> None:
        """The processes of a simulation were started: its silence counts from now, not from before its draw."""
        self.simulations[number].since_s = self.simulations[number].moved_s = now

    @abstractmethod
    def poll(self, now: float, max_starts: float = math.inf) -> list[Action]:
        """What is to be done now, with at most so many starts. Updates ``done`` and ``failure``."""

    def poll_complete(self, now: float) -> list[Action]:
        """What is to be done with processes of complete simulations where the run needs no more samples."""
        return []

    def replay(self, received: Iterable[Header], trainers: Mapping[int, int]) -> None:
        """Take over what clients reported to an earlier coordinator, before ``on_trainers_joined``.

        Those that are still open have sent samples to the ``trainers`` of their simulations, and continue.
        """

    # State.

    def num_received(self, number: int) -> int:
        """Samples of a simulation in all buffers, in this run and those that it resumes."""
        return self._inherited.get(number, 0) + sum(one.get(number, 0) for one in self._received)

    def num_lost(self, number: int) -> int:
        """Samples of a simulation that were in the buffer of a trainer that died, after its last checkpoint."""
        known = self.simulations.get(number)
        if known is None:
            return sum(one.get(number, 0) for one in self._lost)
        # Of one that is complete, a client that still waited for an ACK may report what ``lost`` counts already.
        total = self._total(known) if known.state is SimulationState.COMPLETE else None
        sent = total if total is not None and self._is_reported(known) else known.closed_with
        if sent is not None:
            return max(sent - self.num_received(number), 0)
        return known.lost + sum(one.get(number, 0) for one in self._lost)

    def first_missing(self, number: int, trainer_index: int) -> int | None:
        """The first step of a simulation for a trainer that it has not received; None = it has received none."""
        return self._first_missing[trainer_index].get(number)

    def client_parameters(self, number: int) -> list[float] | None:
        """The parameters with which clients opened a simulation; None = it was not opened."""
        simulation = self.simulations.get(number)
        return None if simulation is None else simulation.client_parameters

    def counts(self) -> dict[str, int]:
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
        """Index of the trainer that receives all samples of this simulation; None = its steps are sent round robin.

        Assigns the trainer that has samples of it, else the one with the fewest running simulations, then with the
        fewest overall, and never changes it.
        """
        if self.config.deal != "simulation":
            return None
        simulation = self.simulations[number]
        if simulation.trainer is None:
            simulation.trainer = self._trainer_with(number)
        if simulation.trainer is None:
            running: Counter[int] = Counter()
            assigned: Counter[int] = Counter()
            for one in self.simulations.values():
                if one.trainer is not None:
                    assigned[one.trainer] += 1
                    running[one.trainer] += one.state in (SimulationState.RUNNING, SimulationState.SETTLING)
            simulation.trainer = min(range(self.num_trainers), key=lambda i: (running[i], assigned[i], i))
        return simulation.trainer

    def _trainer_with(self, number: int) -> int | None:
        """Index of the only trainer that has received samples of a simulation; None = there is none.

        The coordinator's part of a checkpoint may be older than those of trainers: they may have samples of a
        simulation that was assigned after it. What they have lost counts for them too.
        """
        pairs = enumerate(zip(self._received, self._lost, strict=True))
        found = [i for i, counts in pairs if any(one.get(number) for one in counts)]
        return found[0] if len(found) == 1 else None

    def _is_complete(self, simulation: Simulation) -> bool:
        # One that was given up has been replaced, whatever still arrives of it.
        if simulation.state is SimulationState.GIVEN_UP:
            return False
        total = self._total(simulation)
        if total is not None and self.num_received(simulation.id) + self.num_lost(simulation.id) >= total:
            return True
        # BYE follows the last ACK, so all samples are stored, even if no report has counted them yet.
        return self.config.steps is None and bool(simulation.byes) and simulation.total is not None

    def _total(self, simulation: Simulation) -> int | None:
        return self.config.steps or simulation.total

    def _is_closed(self, simulation: Simulation) -> bool:
        """Whether all of its clients were closed, which does not complete it where ``steps`` is given."""
        return len(simulation.byes) >= self.config.group_size

    def _expect_reports(self, simulation: Simulation) -> None:
        # What is acknowledged is in the next report of each trainer, but not in one that was in flight.
        simulation.settled_at = [reports + _REPORTS_TO_SETTLE for reports in self._num_reports]

    def _is_reported(self, simulation: Simulation) -> bool:
        return all(map(ge, self._num_reports, simulation.settled_at))

    def _close(self, simulation: Simulation) -> None:
        """Count what its clients, all closed, had sent and no trainer has as lost; call it once that is reported."""
        if self._some_lost and self._is_closed(simulation):
            simulation.closed_with = simulation.samples_sent

    def _complete(self, simulation: Simulation, now: float) -> TrackerEvent:
        simulation.set_state(SimulationState.COMPLETE, now)
        self.num_complete += 1
        return TrackerEvent("complete", simulation.id, f"simulation {simulation.id} is complete")

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        simulations = [
            {
                **one.state_dict(),
                "lost": self.num_lost(one.id),
                "lost_by_trainer": [lost.get(one.id, 0) for lost in self._lost],
            }
            for one in self.simulations.values()
        ]
        names = list(self.config.parameters)
        return {"restarts": self.restarts, "simulations": simulations, "deal": self.config.deal, "parameters": names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; call it before ``on_trainers_joined``.

        Raises:
            CheckpointError: it is that of simulations that were started, assigned or drawn in another way.
        """
        found = [Simulation.from_state_dict(one) for one in state["simulations"]]
        self._check_state(state, any(one.parameters is not None for one in found))
        self.restarts = state["restarts"]
        for one in found:
            # A run with more trainers wrote the checkpoint: deal it anew. All trainers know what was received of it.
            if one.trainer is not None and one.trainer >= self.num_trainers:
                one.trainer = None
        # The part of a trainer may be that of one which died after this state was made, and has lost more by then. With
        # another number of trainers, or of an earlier release, the parts say what is known.
        by_trainer = {one["id"]: one.get("lost_by_trainer", ()) for one in state["simulations"]}
        self._lost_before = {number: lost for number, lost in by_trainer.items() if len(lost) == self.num_trainers}
        self.simulations = {one.id: one for one in found}

    def _check_state(self, state: Mapping[str, Any], opened: bool) -> None:
        """Refuse a state that cannot be continued with this config. ``opened``: simulations of it were opened."""
        # Also of an earlier release: only ExternalSimulations store it.
        if ("finish_received" in state) == self.starts_simulations:
            must, where, cure = "be given", "the run starts its simulations", "with it"
            if self.starts_simulations:
                must, where, cure = "be null", "simulations come from outside", "without it"
            raise CheckpointError(
                f"simulations.command or function must {must}, as in the checkpoint, where {where}; resume {cure}"
            )
        deal, names = self.config.deal, list(self.config.parameters)
        if opened and (before := state.get("deal", deal)) != deal:
            raise CheckpointError(
                f"simulations.deal ({deal}) must be that of the checkpoint ({before}), as trainers drop only those "
                "repeated samples that are sent to the same trainer as before; resume with it"
            )
        if opened and (before := state.get("parameters", names)) != names:
            raise CheckpointError(
                f"simulations.parameters ({', '.join(names)}) must be those of the checkpoint, in their order "
                f"({', '.join(before)}), as it has simulations that were drawn with them; resume with them"
            )


class ExternalSimulations(SimulationTracker):
    """Simulations that the user starts.

    The run is done when ``count`` simulations are complete, or, after FINISH, all that were opened. A simulation that
    is silent for ``timeout_s`` is reported once and waited for, because the user may start it again. The run fails if
    no simulation at all shows a sign of life for ``timeout_s``; before the first HELLO it waits for ``first_s``, if
    that is longer.
    """

    starts_simulations = False

    def __init__(self, config: SimulationsConfig, num_trainers: int, first_s: float) -> None:
        super().__init__(config, num_trainers)
        self._first_s = first_s
        self._open: dict[int, Simulation] = {}
        self._finish_received = False
        self._hello_received = False
        self._last_sign_s = 0.0

    # Events.

    def on_trainers_joined(self, joined: Sequence[TrainerJoined], now: float) -> None:
        # The coordinator's part of a checkpoint may be slightly older than the trainers' parts.
        for number in {*joined[0].inherited, *(key for one in joined for key in one.received)}:
            self._get_or_add(number)
        super().on_trainers_joined(joined, now)
        self._open = {one.id: one for one in self.in_state(SimulationState.WAITING)}
        self._last_sign_s = now

    def check_hello(self, header: Header) -> str | None:
        count, known = self.config.count, self.simulations.get(header.simulation)
        if count is not None and header.simulation >= count:
            return f"simulation ({header.simulation}) must be below simulations.count ({count})"
        # Not before its first sample: a client that opens a simulation with a high attempt and sends nothing must not
        # keep the real one out.
        if known is not None and header.attempt < known.attempt and self.num_received(known.id):
            return (
                f"attempt ({header.attempt}) of simulation {known.id} must be at least {known.attempt}, which is open"
            )
        return super().check_hello(header)

    def on_hello(self, header: Header, parameters: Sequence[float], now: float) -> None:
        simulation = self._get_or_add(header.simulation)
        self._last_sign_s, self._hello_received = now, True
        super().on_hello(header, parameters, now)
        simulation.parameters = simulation.client_parameters
        if simulation.ended:
            return  # it is sent again: the trainers drop the duplicates
        if header.attempt != simulation.attempt or simulation.state is SimulationState.WAITING:
            simulation.attempt = header.attempt
            simulation.start_attempt(now)
            self._open[simulation.id] = simulation
        simulation.byes.pop(header.member, None)
        simulation.mark_seen(header.member, now)

    def on_bye(self, header: Header, now: float) -> None:
        self._last_sign_s = now
        super().on_bye(header, now)

    def replay(self, received: Iterable[Header], trainers: Mapping[int, int]) -> None:
        for number, trainer in trainers.items():
            self._get_or_add(number).trainer = trainer
        for header in received:
            self._some_lost = True
            if header.kind is MessageKind.FINISH:
                self._finish_received = True
                continue
            simulation = self._get_or_add(header.simulation)
            if header.attempt != simulation.attempt:
                simulation.byes.clear()
            simulation.attempt = header.attempt
            if header.kind is MessageKind.HELLO:
                simulation.byes.pop(header.member, None)
                simulation.closed_with = None
                continue
            simulation.byes[header.member] = header.step
            if self._is_closed(simulation):
                # Settled: the trainers report exact counts when they join.
                simulation.total = simulation.closed_with = simulation.samples_sent

    def on_report(self, trainer_index: int, report: SimulationReport, now: float) -> None:
        received = self._received[trainer_index]
        is_new = any(count != received.get(number, 0) for number, count in report.received.items())
        if is_new or any(number in self._open for number, _ in report.active):
            self._last_sign_s = now
        super().on_report(trainer_index, report, now)

    def on_finish(self, now: float) -> str | None:
        self._finish_received, self._last_sign_s = True, now
        return None

    # Actions.

    def poll(self, now: float, max_starts: float = math.inf) -> list[Action]:
        if not self._trainers_joined or self.failure is not None:
            return []
        actions: list[Action] = []
        for simulation in list(self._open.values()):
            if simulation.settled_at and self._is_reported(simulation):
                self._close(simulation)
            if self._is_complete(simulation):
                del self._open[simulation.id]
                actions.append(self._complete(simulation, now))
            else:
                silent_since = simulation.silent_since(self.config.group_size)
                is_silent = self.quiet_s(silent_since, now) > self.config.timeout_s
                waits = self.waits_for_parts(simulation)
                closed = self._is_closed(simulation) and self._is_reported(simulation)
                if (is_silent or waits or closed) and not simulation.reported_silent:
                    actions.append(
                        self._report_silent(simulation, "waited for parts of a sample" if waits else "been silent")
                    )
                simulation.reported_silent = is_silent or waits or closed
        enough = self.config.count is not None and self.num_complete >= self.config.count
        self.done = enough or (self._finish_received and not self._open)
        timeout_s, key = self.config.timeout_s, "simulations.timeout_s"
        if not self._hello_received and self._first_s > timeout_s:
            timeout_s, key = self._first_s, "cluster.timeout_s"
        if not self.done and self.quiet_s(self._last_sign_s, now) > timeout_s:
            self.failure = self._describe_missing(timeout_s, key)
        return actions

    def _get_or_add(self, number: int) -> Simulation:
        return self.simulations.setdefault(number, Simulation(number))

    def _report_silent(self, simulation: Simulation, what: str) -> TrackerEvent:
        got, of = self.num_received(simulation.id), self.config.steps or "an unknown number of"
        happened, cure = f"has {what} for {self.config.timeout_s:g} s,", ""
        if self._is_closed(simulation):
            happened, cure = "was closed", f"; {_SET_STEPS}"
        text = f"simulation {simulation.id} {happened} after {got} of {of} samples; it is waited for{cure}"
        return TrackerEvent("silent", simulation.id, text)

    def _describe_missing(self, timeout_s: float, key: str) -> str:
        """Which simulations are missing, as one message with the cure."""
        cure = f"start what is missing and resume, or raise {key}"
        if self._open:
            verb = "is" if len(self._open) == 1 else "are"
            missing = format_simulations([*self._open])
            closed = [one.id for one in self._open.values() if self._is_closed(one)]
            if closed:
                cure = f"clients closed {format_simulations(closed)} after too few samples: {_SET_STEPS}, or {cure}"
            return f"nothing came for {timeout_s:g} s, and {missing} {verb} not complete; {cure}"
        of = "" if self.config.count is None else f" of {self.config.count}"
        if self.num_complete or self._hello_received:
            return (
                f"no simulation came for {timeout_s:g} s after {self.num_complete}{of} were complete, and no client "
                f"declared which was the last; {cure}"
            )
        return f"no simulation came for {timeout_s:g} s; start clients with the address of this run, or {cure}"

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "finish_received": self._finish_received}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._finish_received = state["finish_received"]
        for simulation in self.simulations.values():
            simulation.attempt = 0  # the user counts the attempts
            simulation.client_parameters = simulation.parameters


# Simulations that the run starts.

MAX_GIVEN_UP_IN_A_ROW, _MOST_MORE = 3, 7
"""This many simulations given up in a row, with none complete in between, fail the run: the cause is not the
parameters of one of them. It takes one more for each simulation that has come further, up to the second number."""

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
        self._given_up_in_a_row: list[Simulation] = []
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
            return self._is_closed(simulation)
        return bool(simulation.last_seen_s)

    # Actions.

    def poll(self, now: float, max_starts: float = math.inf) -> list[Action]:
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
            actions += self._start_next(now, max_starts)
        return actions

    def poll_complete(self, now: float) -> list[Action]:
        return [action for one in [*self._started.values()] if one.ended for action in self._check(one, now)]

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
            quiet_s = self.quiet_s(simulation.since_s, now)
            is_reported = self._is_reported(simulation) and quiet_s >= _SETTLE_S
            if not (is_reported or quiet_s >= self.config.timeout_s):
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
        self._given_up_in_a_row.append(simulation)
        got, others = self.num_received(simulation.id), self.simulations.values()
        better = sum(one.state is not SimulationState.GIVEN_UP and self.num_received(one.id) > got for one in others)
        if len(self._given_up_in_a_row) >= MAX_GIVEN_UP_IN_A_ROW + min(better, _MOST_MORE):
            tries = "1 time" if self.config.max_restarts == 0 else f"{self.config.max_restarts + 1} times"
            self.failure = (
                f"{len(self._given_up_in_a_row)} simulations in a row failed {tries} each; "
                f"the last of them, simulation {simulation.id}: {reason}; its output is in "
                f"{log_file(self._logs, simulation.id)}"
            )
            if better:  # their parameters may be the cause, so a run that resumes draws others
                self._add_missing()
            else:
                self._take_back()
            return [TrackerEvent("given_up", simulation.id, f"{text}; it is given up")]
        replacements = format_simulations(self._add_missing())
        return [TrackerEvent("given_up", simulation.id, f"{text}; it is given up for {replacements}")]

    def _take_back(self) -> None:
        """Let a run that resumes start those again that failed in a row, each in place of one that has not begun."""
        for simulation in reversed(self._given_up_in_a_row):
            if not self._num_missing():
                if not (self._to_start and self._to_start[-1].parameters is None):
                    return  # an earlier one, whose replacement is in the row too
                del self.simulations[self._to_start.pop().id]
            simulation.state, simulation.failures = SimulationState.WAITING, 0
            simulation.attempt += 1

    def _start_next(self, now: float, max_starts: float) -> list[Action]:
        free = self.config.at_once - sum(one.process_alive for one in self._started.values())
        actions: list[Action] = []
        while len(actions) < min(free, max_starts) and (waiting := self._to_restart or self._to_start):
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
        self._given_up_in_a_row.clear()
        return super()._complete(simulation, now)

    def _is_complete(self, simulation: Simulation) -> bool:
        # One that sends BYE without a sample has failed.
        return simulation.total != 0 and super()._is_complete(simulation)

    def _add_missing(self) -> list[int]:
        """Add simulations up to the count, without those given up; returns the numbers of the new ones."""
        missing = self._num_missing()
        first = max(self.simulations, default=-1) + 1
        added = [Simulation(first + i) for i in range(missing)]
        self.simulations.update((one.id, one) for one in added)
        self._to_start.extend(added)
        return [one.id for one in added]

    def _num_missing(self) -> int:
        return self.count - sum(one.state is not SimulationState.GIVEN_UP for one in self.simulations.values())

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

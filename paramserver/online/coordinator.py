"""The coordinator of an online run, on rank 0: one thread that serves clients and trainers and runs the simulations.

``SimulationCoordinator`` owns the thread, its ``RouterSocket``, and the processes of the simulations. The replies are
decided in coordinator_protocol.py, the processes to start and to end in tracker.py.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paramserver.config import SimulationsConfig
from paramserver.errors import TrainingError, text_of
from paramserver.fileio import end_last_line, explain_disk_errors
from paramserver.online.connections import peer_host
from paramserver.online.coordinator_protocol import RequestHandler
from paramserver.online.process_runner import ProcessRunner
from paramserver.online.protocol import Header, MessageKind, start_secret
from paramserver.online.router import RouterSocket, RouterThread
from paramserver.online.sampler import sampler_of_run
from paramserver.online.spec import IngestSpec
from paramserver.online.tracker import (
    Action,
    ExternalSimulations,
    KillProcess,
    ManagedSimulations,
    SimulationState,
    SimulationTracker,
    StartProcess,
    TrackerEvent,
    format_simulations,
)

_MAX_MESSAGES_AT_ONCE = 256
_POLL_INTERVAL_S = 0.5
# Time for the processes to end: 2 s after SIGTERM the guard kills the group, 1 s later the runner kills the guard.
_KILL_TIMEOUT_S = 6.0

_log = logging.getLogger("paramserver.coordinator")

OnEvent = Callable[[str, Mapping[str, Any]], None]
"""Called with (kind, details): started, restarted, given_up, complete, silent, exited, refused, finish, failed."""


class CoordinatorJournal:
    """A file of the run folder to which a coordinator appends while it runs, one JSON object per line.

    It has the port, so that clients from outside find the next coordinator at the address that they know, and which of
    them have opened and closed a simulation: HELLO, BYE and FINISH, and with ``deal: simulation`` its trainer. A client
    that has sent BYE may be gone, and does not send its samples again; one that has not is waited for, and continues
    with the same trainer.

    A line is written before the client gets its answer. It survives the end of the process, not that of the host. If it
    ``continues``, another coordinator of this run wrote the file, else it is started anew. ``port`` is that of the last
    coordinator, or None; ``received`` has the HELLO, BYE and FINISH of earlier ones, and ``trainers`` has
    simulation -> index of its trainer.
    """

    def __init__(self, file: Path, continues: bool) -> None:
        self._file = file
        self.port: int | None = None
        self.received: list[Header] = []
        self.trainers: dict[int, int] = {}
        if not continues:
            file.unlink(missing_ok=True)
        elif file.exists():
            with file.open("a+b") as opened:
                end_last_line(opened)  # the client of an incomplete one got no answer
            for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
                try:
                    self._read(json.loads(line))
                except (ValueError, LookupError, TypeError, RecursionError) as error:
                    raise TrainingError(
                        f"{file}, line {number}, must be what the coordinator wrote there ({error}); the simulations "
                        "cannot continue: start the run again, from a checkpoint with --resume"
                    ) from error

    def _read(self, entry: dict[str, Any]) -> None:
        if "port" in entry:
            self.port = entry["port"]
        else:
            if (trainer := entry.pop("trainer", None)) is not None:
                self.trainers[entry["simulation"]] = trainer
            self.received.append(Header(**{**entry, "kind": MessageKind[entry["kind"]]}))

    def record_port(self, port: int) -> None:
        self._append({"port": port})

    def record(self, header: Header, trainer: int | None = None) -> None:
        of_trainer = {} if trainer is None else {"trainer": trainer}
        self._append({**header._asdict(), "kind": header.kind.name, **of_trainer})

    def _append(self, entry: dict[str, Any]) -> None:
        with explain_disk_errors(self._file, "file"), self._file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(entry) + "\n")


class SamplerRecord:
    """A file to which what a sampler that learns did is appended, one JSON object per line, for ``replay``.

    The run does not need it: when it cannot be written, there is one warning, and it ends there.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ended = False

    def begin(self, state: Mapping[str, Any] | None) -> None:
        """Append that a coordinator starts with this state of the sampler; None = a new one."""
        self.append({"state": state}, begins=True)

    def append(self, entry: Mapping[str, Any], begins: bool = False) -> None:
        if self._ended:
            return
        try:
            with self._file.open("a+b") as opened:
                if begins:
                    end_last_line(opened)
                opened.write(json.dumps(entry).encode() + b"\n")
        except OSError as error:
            self._ended = True
            _log.warning("%s cannot be written (%s); the run continues without it", self._file, error)


class SimulationCoordinator(RouterThread):
    """Owns the thread ``coordinator``, its socket and the processes of the simulations, which its close ends.

    Threads: only the coordinator thread touches the socket and the processes. Handler and tracker are guarded by one
    lock, because ``state_dict`` and ``summary`` are called by other threads. The lock is not held while the thread
    polls, starts processes or calls ``on_event``.

    Args:
        num_trainers: trainers of the run. No client is welcome, and no simulation is started, before all have joined.
        logs: folder for the output of simulations.
        timeout_s: minimum time to wait for the first external simulation.
        folders: where a user's sampler or function is searched.
        state: ``state_dict`` of the run that this one resumes.
        status: what PONG holds in addition; called in the coordinator thread.
        is_stopping: whether the run was requested to stop. Then no simulation is started, and none that ends has
            failed: a scheduler sends its signal to simulations too.
        on_event: called for each event of a simulation, in the coordinator thread.
        journal: of the run. If an earlier coordinator wrote it, this one takes its place: it listens on the same port,
            and what the other one trained on after ``state`` is needed again. Simulations that are closed do not send
            it: it is lost.
        publisher: address of the versions of the model, for the simulations that are started.
        record: file for what a sampler that learns draws and observes, for ``replay``.

    Attributes:
        token: the secret that trainers show in JOIN.
        learns: whether the sampler learns from the losses of trainers.

    Raises:
        UnsupportedConfiguration: the sampler or command cannot be used; on entry, the address cannot be bound.
    """

    def __init__(
        self,
        spec: IngestSpec,
        num_trainers: int,
        seed: int,
        logs: Path,
        *,
        timeout_s: float = 60.0,
        folders: Sequence[Path] = (),
        state: Mapping[str, Any] | None = None,
        status: Callable[[], Mapping[str, Any]] = dict,
        is_stopping: Callable[[], bool] = lambda: False,
        on_event: OnEvent = lambda kind, details: None,
        journal: CoordinatorJournal | None = None,
        publisher: str | None = None,
        record: Path | None = None,
    ) -> None:
        self.spec = spec
        self.token = secrets.token_hex(16).encode()
        self._tracker: SimulationTracker
        sampler = sampler_of_run(spec, seed, folders)
        self._runner = ProcessRunner(spec, logs, folders, publisher=publisher)
        self.learns = sampler is not None and sampler.learns
        if sampler is not None:
            self._tracker = ManagedSimulations(spec.config, num_trainers, sampler, logs)
        else:
            self._tracker = ExternalSimulations(spec.config, num_trainers, timeout_s)
        if state is not None:
            self._tracker.load_state_dict(state)
            planned = sum(not one["given_up"] for one in state["simulations"])
            if sampler is not None and sampler.depends_on_count and planned != spec.config.count:
                _log.warning(
                    "simulations.count (%s) is not that of the checkpoint (%d): %s draws the others from another "
                    "hypercube, and all together are none; halton covers the ranges evenly with any count",
                    spec.config.count,
                    planned,
                    sampler.reference,
                )
        if sampler is not None and sampler.learns and record is not None:
            kept = SamplerRecord(record)
            kept.begin(None if state is None else state.get("sampler"))
            sampler.record = kept.append
        self._handler = RequestHandler(spec, self._tracker, num_trainers, self.token, status)
        if journal is not None:
            self._tracker.replay(journal.received, journal.trainers)
            self._handler.record = journal.record
        self._is_stopping = is_stopping
        self._on_event = on_event
        # Reentrant: PING calls a user's status function under the lock, which may call summary().
        self._lock = threading.RLock()
        # All simulations are complete and the trainers were sent DRAIN.
        self.finished = False
        self._finishing = threading.Event()
        # Why the run cannot continue. After it the thread only replies to trainers, until the run has saved what they
        # received.
        self.failure: BaseException | None = None
        super().__init__(
            threading.Thread(target=self._run, name="coordinator", daemon=True),
            2 * _KILL_TIMEOUT_S,
            partial(open_router, spec.config, None if journal is None else journal.port),
            (lambda port: None) if journal is None else journal.record_port,
        )

    def trainer_lost(self, trainer_index: int) -> None:
        """Report that a trainer has died, before its replacement is started. Safe to call from any thread.

        New clients, and those that were connected to it, wait until a ``SampleReceiver`` with this index joins.
        What its buffer held and the replacement's ``ReceivedLog`` does not contain is counted as ``lost``.
        """
        with self._lock:
            self._handler.trainer_lost(trainer_index)

    def finish(self) -> None:
        """Close it after a run that has not failed: complete simulations may end first, as during the run.

        A request to stop ends this wait.
        """
        self._finishing.set()
        if self._thread.is_alive():
            self._wakeup.set()
            self._thread.join(self.spec.config.timeout_s + _KILL_TIMEOUT_S)
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """The state of the simulations as plain values. Safe to call from any thread."""
        with self._lock:
            return self._tracker.state_dict()

    def summary(self) -> dict[str, Any]:
        """The entry of summary.json. Safe to call from any thread."""
        with self._lock:
            tracker = self._tracker
            unfinished = tracker.in_state(SimulationState.WAITING, SimulationState.RUNNING)
            return {
                "simulations": {
                    "planned": self.spec.config.count,
                    **tracker.counts(),
                    "restarted": tracker.restarts,
                    "lost": sum(map(tracker.num_lost, tracker.simulations)),
                    "silent": [one.id for one in unfinished if one.reported_silent],
                    "refused": dict(self._handler.refused),
                }
            }

    # The thread.

    def _run(self) -> None:
        assert self._router is not None
        try:
            try:
                self._serve(self._router)
            except BaseException as error:  # noqa: BLE001 - raised by the run, which records it
                self.failure = error
                self._handler.record = lambda *reported: None  # another error, as of a full disk, would end the replies
                self._on_event("failed", {"text": text_of(error)})
                self._end_all(self._router)
                while not (self._closing.is_set() or self._finishing.is_set()):
                    self._router.poll([self._wakeup.fileno()], _POLL_INTERVAL_S)
                    self._wakeup.clear()
                    self._handle_messages(self._router)
            finally:
                try:
                    self._end_all(self._router)
                finally:
                    self._router.close()
        except BaseException as error:  # noqa: BLE001 - recorded; trainers notice the end of the thread
            self.failure = self.failure or error

    def _serve(self, router: RouterSocket) -> None:
        poll_interval_s = min(_POLL_INTERVAL_S, self.spec.config.timeout_s / 4)
        starts = is_waiting = False
        while not self._closing.is_set():
            watched = [self._wakeup.fileno(), *self._runner.exit_pipes]
            router.poll(watched, 0.0 if starts else poll_interval_s)
            self._wakeup.clear()
            # Messages before exits and timeouts: what a process sent before its end, or before it seemed silent, must
            # be counted first.
            self._handle_messages(router)
            with self._lock:
                now = time.monotonic()
                for simulation, attempt, exit_code in self._runner.poll_exited():
                    self._tracker.on_exit(simulation, attempt, exit_code, now, self._runner.last_line(simulation))
                # One start at a time: the draws of several could take longer than others wait for a reply.
                poll = self._tracker.poll_complete if self._handler.over else partial(self._tracker.poll, max_starts=1)
                actions = [] if self._is_stopping() else poll(now)
                drain = self._handler.drain() if self._tracker.done and not self.finished else []
            # Outside of the lock: starting a process and recording an event take time.
            for action in actions:
                self._carry_out(router, action)
            starts = any(isinstance(action, StartProcess) for action in actions)
            running = self._runner.running
            complete = {number for number in running if self._tracker.simulations[number].ended}
            if self._handler.over:
                # No more samples are needed. Simulations that are complete end without being killed.
                for number in set(running) - complete:
                    self._runner.kill(number)
            if self._tracker.failure is not None:
                raise TrainingError(self._tracker.failure)
            if drain:
                self.finished = True
                self._on_event("finish", self._tracker.counts())
                router.send(drain)
            if self._finishing.is_set():
                if not complete:
                    return
                whose = f"{format_simulations(sorted(complete))}, whose samples have all arrived"
                if self._is_stopping():
                    _log.warning("the request to stop ends the processes of %s", whose)
                    return
                if not is_waiting:
                    _log.info("waiting up to %g s for the processes of %s", self.spec.config.timeout_s, whose)
                is_waiting = True

    def _handle_messages(self, router: RouterSocket) -> None:
        for received in router.receive(_MAX_MESSAGES_AT_ONCE):
            peer, *frames = (frame.bytes for frame in received)
            with self._lock:
                known = self._handler.first_refusals
                replies = self._handler.handle(peer, frames, time.monotonic(), peer_host(received))
                refusals = [text for kind, text in self._handler.first_refusals.items() if kind not in known]
            router.send(replies)
            for text in refusals:  # outside of the lock
                self._on_event("refused", {"text": text})

    def _carry_out(self, router: RouterSocket, action: Action) -> None:
        if isinstance(action, TrackerEvent):
            level = logging.INFO if action.kind == "complete" else logging.WARNING
            _log.log(level, "%s", action.text)
            self._on_event(action.kind, {"simulation": action.simulation, "text": action.text})
            return
        if isinstance(action, StartProcess):
            secret = start_secret(self.token, action.simulation, action.attempt, action.density_ratio)
            self._runner.start(action, router.address, secret)
            with self._lock:
                self._tracker.on_started(action.simulation, time.monotonic())
            self._on_event("started", {name: value for name, value in vars(action).items() if value is not None})
        elif isinstance(action, KillProcess):
            _log.warning("simulation %d is ended: %s", action.simulation, action.reason)
            # OVER first: a client that receives it may end well before the signal ends it.
            with self._lock:
                router.send(self._handler.end_clients(action.simulation))
            self._runner.kill(action.simulation)

    def _end_all(self, router: RouterSocket) -> None:
        """Send OVER to all clients, also to those whose HELLO comes meanwhile, and end all processes."""
        if self._suspended and not self._tracker.starts_simulations:
            return
        with self._lock:
            router.send(self._handler.end_all_clients())
        self._runner.kill_all()
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while self._runner.running:
            if time.monotonic() > deadline:
                raise TrainingError(f"simulations still run {_KILL_TIMEOUT_S:g} s after they were killed")
            router.poll(self._runner.exit_pipes, _POLL_INTERVAL_S)
            self._handle_messages(router)
            self._runner.poll_exited()


# What a trainer sends grows with the number of simulations that it knows, by some 20 bytes each; it also knows those in
# whose place others were started. The limit is that of one message, and of all together that have begun to arrive.
_MAX_MESSAGE_BYTES = 64 * 2**20
_SPARE_BYTES, _BYTES_PER_SIMULATION = 2**20, 256
# JOIN has header, token and JSON.
_MAX_PARTS = 3


def open_router(config: SimulationsConfig, port: int | None = None) -> RouterSocket:
    """Open the socket of a coordinator; the port is that of the last one."""
    max_bytes = _MAX_MESSAGE_BYTES
    if config.count is not None:
        max_bytes = min(max_bytes, _SPARE_BYTES + _BYTES_PER_SIMULATION * config.count)
    return RouterSocket.of_section("simulations", config, _MAX_PARTS, max_bytes, port)

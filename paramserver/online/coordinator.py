"""The desk of rank 0: one thread that clients and trainers talk to, and that starts and watches the simulations.

The socket on which rank 0 hears clients and trainers.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paramserver.config import SimulationsConfig
from paramserver.errors import TrainingError, UnsupportedConfiguration
from paramserver.online.coordinator_protocol import Message, RequestHandler
from paramserver.online.process_runner import ProcessRunner
from paramserver.online.sampler import make_sampler
from paramserver.online.security import ServerSecurity
from paramserver.online.spec import IngestSpec
from paramserver.online.tracker import (
    Action,
    ExternalSimulations,
    KillProcess,
    SimulationState,
    SimulationTracker,
    StartProcess,
    TrackerEvent,
)
from paramserver.online.tracker_managed import ManagedSimulations
from paramserver.online.zmq_import import host_of, listening_host, zmq

# What a trainer tells grows with the simulations that it knows, some 20 bytes for each.
_MOST_BYTES = 64 * 2**20
_LINGER_MS = 1000


class RouterSocket:
    """One ROUTER with its context and keys. Opened by one thread, then used and closed by another.

    Args:
        config: address, port and keys.

    Attributes:
        address: where clients and trainers reach it: ``tcp://host:port``.

    Raises:
        UnsupportedConfiguration: it cannot be opened, the keys are none, or pyzmq is missing.
    """

    def __init__(self, config: SimulationsConfig) -> None:
        host = listening_host(config.address)
        self._context: zmq.Context[Any] = zmq.Context()
        self._security: ServerSecurity | None = None
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._security = ServerSecurity(self._context, config.keys)
            self._security.protect(self._router)
            self._router.linger = _LINGER_MS
            self._router.maxmsgsize = _MOST_BYTES
            # Who connects anew under its own name is the same one.
            self._router.router_handover = True
            self._router.ipv6 = ":" in host
            self._bind(host, config)
        except BaseException:
            self.close()
            raise
        endpoint: bytes = self._router.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        self.address = endpoint.decode().rstrip("\0")

    def _bind(self, host: str, config: SimulationsConfig) -> None:
        try:
            self._router.bind(f"tcp://{host}:{config.port or '*'}")
        except zmq.ZMQError as error:
            raise UnsupportedConfiguration(
                f"simulations.port ({config.port}) on simulations.address ({config.address}) cannot be opened: "
                f"{error.strerror}; choose a free port, and an address of rank 0's own host"
            ) from error

    def wait(self, pipes: Iterable[int], timeout_s: float) -> set[int]:
        """Until there is a message, or one of the pipes is ready, or the time is over; which pipes are."""
        watched: list[Any] = [self._router, *pipes]
        ready = zmq.zmq_poll([(one, zmq.POLLIN) for one in watched], round(1000 * timeout_s))
        return {one for one, _ in ready if one is not self._router}

    def messages(self, most: int) -> Iterable[tuple[Message, str]]:
        """Those that are there, up to so many, and from which host each came; does not wait."""
        for _ in range(most):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer, *rest = (frame.bytes for frame in frames)
            yield (peer, rest), host_of(frames)

    def send(self, messages: Sequence[Message]) -> None:
        """What cannot be delivered is dropped: a router never waits."""
        for peer, frames in messages:
            self._router.send_multipart([peer, *frames])

    def close(self) -> None:
        """What was sent has a second to leave."""
        self._router.close()
        if self._security is not None:
            self._security.close()
        self._context.term()


_MESSAGES_AT_ONCE = 256
_TICK_S = 0.5
# Of processes that do not listen: 2 s, then they are killed.
_LEAVE_S = 6.0

_log = logging.getLogger("paramserver.desk")

OnEvent = Callable[[str, Mapping[str, Any]], None]
"""Told (kind, details): started, restarted, given_up, complete, silent, finish."""


class SimulationCoordinator:
    """Owns the thread ``desk``, its socket and the processes of simulations, from ``with`` to ``close``.

    Args:
        plan: checked.
        trainers: how many join; no client is welcome, and no simulation started, before all have.
        seed: of the run; parameters are drawn from it.
        logs: folder for the output of simulations.
        timeout_s: how long it may take, at least, until the first simulation from outside comes.
        folders: where a sampler or function of the user's is looked for.
        state: ``state_dict`` of the run that this one goes on from.
        status: what else is told to whoever asks whether the run is alive; called in the desk's thread.
        on_event: told of what happens to simulations; called in the desk's thread.

    Attributes:
        token: what trainers must show; a secret of the run.

    Raises:
        UnsupportedConfiguration: a sampler or command that cannot work; from ``with`` on, an address that cannot.
    """

    def __init__(
        self,
        plan: IngestSpec,
        trainers: int,
        seed: int,
        logs: Path,
        *,
        timeout_s: float = 60.0,
        folders: Sequence[Path] = (),
        state: Mapping[str, Any] | None = None,
        status: Callable[[], Mapping[str, Any]] = dict,
        on_event: OnEvent = lambda kind, details: None,
    ) -> None:
        self.plan = plan
        self.token = secrets.token_hex(16).encode()
        self._runner = ProcessRunner(plan, logs, folders) if plan.started_here else None
        self._study = _make_study(plan, trainers, seed, logs, folders, timeout_s)
        if state is not None:
            self._study.load_state_dict(state)
        self._clerk = RequestHandler(plan, self._study, trainers, self.token, status)
        self._on_event = on_event
        # Again and again by one thread, as a user's status may ask for the summary.
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._finished = False
        self._failure: BaseException | None = None
        self._door: RouterSocket | None = None
        self._thread = threading.Thread(target=self._run, name="desk", daemon=True)

    def __enter__(self) -> SimulationCoordinator:
        self._door = RouterSocket(self.plan.config)
        self._address = self._door.address
        self._bell, self._button = socket.socketpair()
        self._thread.start()
        return self

    @property
    def address(self) -> str:
        """Where clients and trainers reach it: ``tcp://host:port``; from ``with`` on."""
        return self._address

    @property
    def failure(self) -> BaseException | None:
        """What ended the desk, if it did not end well: the run cannot go on."""
        return self._failure

    @property
    def finished(self) -> bool:
        """Whether all simulations are complete, and the trainers were told."""
        return self._finished

    def state_dict(self) -> dict[str, Any]:
        """Of the simulations, as plain values; for any thread."""
        with self._lock:
            return self._study.state_dict()

    def summary(self) -> dict[str, Any]:
        """For summary.json; for any thread."""
        with self._lock:
            study = self._study
            return {
                "simulations": {
                    "planned": self.plan.config.count,
                    **study.counts(),
                    "restarted": study.restarts,
                    "silent": [
                        one.id for one in study.in_state(SimulationState.WAITING, SimulationState.RUNNING) if one.silent
                    ],
                    "refused": dict(self._clerk.refused),
                }
            }

    def close(self) -> None:
        """Tell all clients that the run is over and end all simulations, within some seconds. Again: no effect.

        Raises:
            TrainingError: the thread has not ended in time.
        """
        if self._door is None:
            return
        self._closing.set()
        if self._thread.is_alive():
            self._button.send(b"\0")
            self._thread.join(2 * _LEAVE_S)
            if self._thread.is_alive():
                raise TrainingError(f"the desk must end within {2 * _LEAVE_S:g} s of its close, and has not")
        self._bell.close()
        self._button.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    # The thread.

    def _run(self) -> None:
        assert self._door is not None
        try:
            try:
                self._serve(self._door)
            except BaseException as error:
                self._door.send(self._clerk.give_up(str(error)))
                raise
            finally:
                try:
                    self._leave(self._door)
                finally:
                    self._door.close()
        except BaseException as error:  # noqa: BLE001 - kept, for the run to learn
            self._failure = error

    def _serve(self, door: RouterSocket) -> None:
        tick_s = min(_TICK_S, self.plan.config.timeout_s / 4)
        while not self._closing.is_set():
            # The bell is rung once, to close.
            door.wait([self._bell.fileno(), *(self._runner.pipes if self._runner else ())], tick_s)
            # What was said before the end of a process, or before a silence is noticed, comes first.
            self._listen(door)
            with self._lock:
                now = time.monotonic()
                for simulation, attempt, code in self._runner.ended() if self._runner else ():
                    self._study.exited(simulation, attempt, code, now)
                actions = [] if self._clerk.over else self._study.tick(now)
                finish = self._clerk.finish() if self._study.done and not self._finished else []
            for action in actions:
                self._act(door, action)
            if self._clerk.over:
                self._end_unfinished()
            if self._study.failure is not None:
                raise TrainingError(self._study.failure)
            if finish:
                self._finished = True
                self._on_event("finish", self._study.counts())
                door.send(finish)

    def _listen(self, door: RouterSocket) -> None:
        for (peer, frames), host in door.messages(_MESSAGES_AT_ONCE):
            with self._lock:
                answers = self._clerk.hear(peer, frames, time.monotonic(), host)
            door.send(answers)

    def _act(self, door: RouterSocket, action: Action) -> None:
        if isinstance(action, TrackerEvent):
            level = logging.INFO if action.kind == "complete" else logging.WARNING
            _log.log(level, "%s", action.text)
            self._on_event(action.kind, {"simulation": action.simulation, "text": action.text})
            return
        assert self._runner is not None
        if isinstance(action, StartProcess):
            self._runner.start(action, door.address)
            self._on_event("started", vars(action))
        elif isinstance(action, KillProcess):
            _log.warning("simulation %d is ended: %s", action.simulation, action.why)
            with self._lock:
                door.send(self._clerk.dismiss(action.simulation))
            self._runner.kill(action.simulation)

    def _leave(self, door: RouterSocket) -> None:
        """Clients are told, also those that come meanwhile, and processes are ended."""
        with self._lock:
            door.send(self._clerk.dismiss_all())
        if self._runner is None:
            return
        self._runner.kill_all()
        deadline = time.monotonic() + _LEAVE_S
        while self._runner.any_left:
            if time.monotonic() > deadline:
                raise TrainingError(f"simulations still run {_LEAVE_S:g} s after they were killed")
            door.wait(self._runner.pipes, _TICK_S)
            self._listen(door)
            self._runner.ended()

    def _end_unfinished(self) -> None:
        """What they would still send is not wanted; those that are complete may end by themselves."""
        if self._runner is None:
            return
        for number in self._runner.numbers:
            if not self._study.simulations[number].ended:
                self._runner.kill(number)


def _make_study(
    plan: IngestSpec, trainers: int, seed: int, logs: Path, folders: Sequence[Path], timeout_s: float
) -> SimulationTracker:
    config = plan.config
    if not plan.started_here:
        return ExternalSimulations(config, trainers, timeout_s)
    assert config.count is not None
    sampler = make_sampler(config.sampler, plan.parameters, seed, config.count, folders)
    return ManagedSimulations(config, trainers, sampler.draw, logs)

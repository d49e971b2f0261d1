"""The coordinator's replies to clients and trainers. Pure: messages in, messages out, without sockets or clocks."""

from __future__ import annotations

import hmac
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np

from paramserver.online.protocol import (
    NO_MORE_SAMPLES,
    Header,
    MalformedMessage,
    Message,
    MessageKind,
    SimulationReport,
    TrainerDirectory,
    TrainerJoined,
    check_secret,
    first_frame,
    pack_json,
    unpack_parameters,
)
from paramserver.online.spec import IngestSpec
from paramserver.online.tracker import SimulationTracker

_log = logging.getLogger("paramserver.coordinator")


class RequestRefused(Exception):  # noqa: N818 - a reply to a client, not an error of this process
    """Why a message is refused; ``reason`` is one of a few words, for counting."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class ConnectedTrainer:
    """A trainer that has joined, by the routing id of its socket, with the time and counters of its last report."""

    def __init__(self, peer: bytes, joined: TrainerJoined, now: float) -> None:
        self.peer, self.joined, self.last_seen_s = peer, joined, now
        self.counters: Mapping[str, Any] = {}


@dataclass(eq=False)
class RequestHandler:
    """Handles the messages of clients and trainers: updates the tracker and returns the replies.

    The reply to HELLO waits until all trainers have joined. A message that is refused is answered with a text and
    counted; the first of each kind is logged.

    Not thread-safe: the coordinator calls it under its lock. PONG holds what ``status`` returns in addition to the
    state of simulations and trainers.

    Attributes:
        refused: kind -> messages that were refused.
        first_refusals: kind -> the first message of this kind that a trainer has refused, and why.
        over: whether the run needs no more samples.
        record: called with each HELLO, BYE and FINISH of a client from outside, before it is answered; with HELLO also
            with the trainer of its simulation, or None.
    """

    spec: IngestSpec
    tracker: SimulationTracker
    num_trainers: InitVar[int]
    _token: bytes
    _status: Callable[[], Mapping[str, Any]]

    def __post_init__(self, num_trainers: int) -> None:
        self.refused: Counter[str] = Counter()
        self.first_refusals: dict[str, str] = {}
        self.over = False
        self.record: Callable[..., None] = lambda *reported: None
        # Everything below is guarded by the coordinator's lock. One entry for each trainer: one that joins again
        # replaces its own.
        self._trainers: list[ConnectedTrainer | None] = [None] * num_trainers
        self._started = False  # whether all trainers were joined once
        self._clients: dict[tuple[int, int], tuple[bytes, Header]] = {}
        self._waiting_hellos: dict[bytes, list[bytes]] = {}
        self._first_steps: dict[int, tuple[int, int]] = {}  # simulation -> attempt, and its first step
        self._handlers: dict[MessageKind, Callable[[bytes, Header, list[bytes], float], list[Message]]] = {
            MessageKind.HELLO: self._handle_hello,
            MessageKind.BYE: self._handle_bye,
            MessageKind.PING: self._handle_ping,
            MessageKind.FINISH: self._handle_finish,
            MessageKind.JOIN: self._handle_join,
            MessageKind.REPORT: self._handle_report,
            MessageKind.OVER: self._handle_over,
        }

    @property
    def trainers(self) -> list[ConnectedTrainer]:
        return [trainer for trainer in self._trainers if trainer is not None]

    @property
    def all_joined(self) -> bool:
        return None not in self._trainers

    def handle(self, peer: bytes, frames: Sequence[bytes], now: float, host: str = "one that waited") -> list[Message]:
        """Handle one message from ``host`` and return the replies. Never raises, whatever the message holds."""
        header: Header | None = None
        try:
            header = Header.unpack(first_frame(frames))
            if header.kind not in self._handlers:
                raise RequestRefused("unexpected", f"{header.kind.name} must not be sent to the coordinator")
            return self._handlers[header.kind](peer, header, list(frames[1:]), now)
        except (MalformedMessage, RequestRefused) as refusal:
            what, reply = "a message", Header(MessageKind.REFUSED)
            if header is not None:
                what, reply = _describe(header), header.reply(MessageKind.REFUSED)
            # Only the first of each kind: a client that repeats its message must not fill the log.
            if not self.refused[refusal.reason]:
                _log.warning(
                    "the coordinator refused %s from %s: %s; more of this kind (%s) are counted and not logged",
                    what,
                    host,
                    refusal,
                    refusal.reason,
                )
            self.refused[refusal.reason] += 1
            return [_to(peer, reply, str(refusal).encode())]

    # Clients.

    def _handle_hello(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        # Before the wait for trainers: nothing will come for a client of a run that is over.
        if self.over or self.tracker.done:
            return [_to(peer, header.reply(MessageKind.OVER), NO_MORE_SAMPLES.encode())]
        if self.spec.is_managed and (reason := check_secret(self._token, header, body)) is not None:
            raise RequestRefused("secret", reason)
        if not self.all_joined:
            # Kept as frames, with the secret, and handled later as if it had just arrived: the state may have changed
            # by then. By peer, so that a repeated HELLO waits once.
            self._waiting_hellos[peer] = [header.pack(), *body]
            return []
        parameters = self._read_parameters(body[:1] if self.spec.is_managed else body)
        if (reason := self.tracker.check_hello(header)) is not None:
            raise RequestRefused("simulation", reason)
        # All members and attempts of a simulation must have the same parameters: its samples carry them. Without a
        # sample a simulation from outside belongs to the client that opened it last: one that opens it and sends no
        # sample must not keep the real one out.
        known = self.tracker.client_parameters(header.simulation)
        fixed = self.spec.is_managed or self.tracker.num_received(header.simulation) > 0
        if fixed and known is not None and known != parameters:
            raise RequestRefused(
                "parameters",
                f"parameters ({parameters}) of simulation {header.simulation} must be those with which it was opened "
                f"before, {known}; give other parameters another simulation id",
            )
        # The first change of state; every refusal is above it.
        self.tracker.on_hello(header, parameters, now)
        if not self.spec.is_managed:
            self.record(header, self.tracker.trainer_for(header.simulation))
        self._clients[header.simulation, header.member] = (peer, header)
        return [_to(peer, header.reply(MessageKind.WELCOME), self._directory(header).pack())]

    def _directory(self, header: Header) -> TrainerDirectory:
        config = self.spec.config
        return TrainerDirectory(
            trainers=tuple(trainer.joined.address for trainer in self.trainers),
            single_trainer=self.tracker.trainer_for(header.simulation),
            window=self.spec.window,
            timeout_s=config.timeout_s,
            steps=config.steps,
            fields=(*self.spec.fields, *self.spec.required_columns),
            # Required ones too: so a client knows that they are none of the user's fields.
            optional=self.spec.columns,
            first_step=self._first_step(header),
        )

    def _first_step(self, header: Header) -> int:
        """The first step of a simulation that a trainer lacks. All members of an attempt get the same one."""
        number, count = header.simulation, len(self._trainers)
        attempt, step = self._first_steps.get(number, (-1, 0))
        if attempt != header.attempt or header.members == 1:
            single = self.tracker.trainer_for(number)
            missing = {i: self.tracker.first_missing(number, i) for i in (range(count) if single is None else [single])}
            step = min(
                self.spec.range_for(number, i, count)[0] if found is None else found for i, found in missing.items()
            )
            self._first_steps[number] = header.attempt, step
        return step

    def _read_parameters(self, body: list[bytes]) -> list[float]:
        vector = unpack_parameters(_single_frame(body, "HELLO"))
        expected = len(self.spec.parameters)
        if expected and len(vector) != expected:
            names = ", ".join(name for name, _, _ in self.spec.parameters)
            raise RequestRefused("parameters", f"parameters ({len(vector)}) must be {expected} numbers: {names}")
        if not np.isfinite(vector).all():
            raise RequestRefused("parameters", f"parameters ({vector.tolist()}) must be finite")
        return list(vector.tolist())

    def _handle_bye(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        key = header.simulation, header.member
        if key not in self._clients:
            raise RequestRefused(
                "unknown_peer", f"member {header.member} of simulation {header.simulation} is not open"
            )
        # One of another attempt, as a client that was frozen while the user started the next: that one stays open.
        if self._clients[key][1].attempt != header.attempt:
            return [_to(peer, header.reply(MessageKind.READY))]
        # Removed here, so that OVER is sent to clients only that are still open.
        del self._clients[key]
        self.tracker.on_bye(header, now)
        if not self.spec.is_managed:
            self.record(header)
        return [_to(peer, header.reply(MessageKind.READY))]

    def _handle_ping(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        trainers = [
            {"index": i, "reported_s": round(now - one.last_seen_s, 3), "samples": one.counters.get("received", 0)}
            for i, one in enumerate(self._trainers)
            if one is not None
        ]
        state = {"alive": True, **self._status(), "simulations": self.tracker.counts(), "trainers": trainers}
        return [_to(peer, header.reply(MessageKind.PONG), pack_json(state))]

    def _handle_finish(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        if (reason := self.tracker.on_finish(now)) is not None:
            raise RequestRefused("finish", reason)
        self.record(header)
        return []

    # Trainers.

    def _handle_join(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        index, count = header.simulation, len(self._trainers)
        # In constant time: how long a refusal takes must not reveal how much of the token was right. The token is
        # checked first, so that a stranger learns nothing else.
        if len(body) != 2 or not hmac.compare_digest(body[0], self._token):
            raise RequestRefused("unknown_peer", "JOIN must show the token of this run")
        if index >= count:
            raise RequestRefused("unknown_peer", f"trainer ({index}) must be below the number of trainers ({count})")
        joined = TrainerJoined.unpack(body[1])
        self._trainers[index] = ConnectedTrainer(peer, joined, now)
        replies = [_to(peer, Header(MessageKind.READY))]
        if self._started:
            self.tracker.on_trainer_replaced(index, joined)
            if self.tracker.done:
                replies += self.drain()
        if not self.all_joined:
            return replies
        self.tracker.all_joined_s = now
        # Clients whose connection to the old address has not ended learn of the new one.
        for client, hello in self._clients.values():
            replies.append(_to(client, hello.reply(MessageKind.WELCOME), self._directory(hello).pack()))
        if not self._started:
            self._started = True
            # Before the waiting clients: the tracker must know what the trainers have received before it judges a
            # HELLO.
            self.tracker.on_trainers_joined([trainer.joined for trainer in self.trainers], now)
        for client, frames in self._waiting_hellos.items():
            replies += self.handle(client, frames, now)
        self._waiting_hellos.clear()
        return replies

    def trainer_lost(self, index: int) -> None:
        """A trainer has died. Until its replacement joins every HELLO waits, and what it sends still is refused."""
        self._trainers[index] = None
        self.tracker.all_joined_s = math.inf

    def _find_trainer(self, peer: bytes, index: int) -> ConnectedTrainer:
        trainer = self._trainers[index] if index < len(self._trainers) else None
        # The index comes from the message; only the connection that has shown the token may use it.
        if trainer is None or trainer.peer != peer:
            raise RequestRefused("unknown_peer", f"trainer {index} did not join from here")
        return trainer

    def _handle_over(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        """A trainer needs no more samples, so the run needs none: nothing is started or checked any more."""
        self._find_trainer(peer, header.simulation)
        return self.end_all_clients()

    def _handle_report(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        index = header.simulation
        trainer = self._find_trainer(peer, index)
        report = SimulationReport.unpack(_single_frame(body, "REPORT"))
        trainer.last_seen_s, trainer.counters = now, report.counters
        self.first_refusals = {**report.first_refusals, **self.first_refusals}
        self.tracker.on_report(index, report, now)
        # A trainer whose reports get no reply concludes that the coordinator is gone.
        return [_to(peer, Header(MessageKind.READY))]

    def drain(self) -> list[Message]:
        """DRAIN to all trainers: the last simulation has ended."""
        return [_to(trainer.peer, Header(MessageKind.DRAIN)) for trainer in self.trainers]

    # The end.

    def end_clients(self, simulation: int) -> list[Message]:
        """OVER to the clients of one simulation that are still open."""
        keys = [key for key in self._clients if key[0] == simulation]
        clients = [self._clients.pop(key) for key in keys]
        return [_to(peer, header.reply(MessageKind.OVER), NO_MORE_SAMPLES.encode()) for peer, header in clients]

    def end_all_clients(self) -> list[Message]:
        """OVER to every client that is open or waits for WELCOME, and to those whose HELLO comes later."""
        # First: a HELLO that is handled after this gets OVER at once.
        self.over = True
        clients = [(peer, header) for peer, header in self._clients.values()]
        clients += [(peer, Header.unpack(frames[0])) for peer, frames in self._waiting_hellos.items()]
        self._clients.clear()
        self._waiting_hellos.clear()
        return [_to(peer, header.reply(MessageKind.OVER), NO_MORE_SAMPLES.encode()) for peer, header in clients]


def _describe(header: Header) -> str:
    if header.kind in (MessageKind.JOIN, MessageKind.REPORT):
        return f"{header.kind.name} of trainer {header.simulation}"
    return f"{header.kind.name} of simulation {header.simulation}"


def _to(peer: bytes, header: Header, *body: bytes) -> Message:
    return peer, [header.pack(), *body]


def _single_frame(body: list[bytes], what: str) -> bytes:
    if len(body) != 1:
        raise MalformedMessage(f"{what} must have 2 frames, it has {len(body) + 1}")
    return body[0]

"""What the desk answers to clients and trainers. No sockets: messages in, messages out."""

from __future__ import annotations

import hmac
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paramserver.online.protocol import (
    ENOUGH,
    Header,
    MalformedMessage,
    MessageKind,
    SimulationReport,
    TrainerDirectory,
    TrainerJoined,
    pack_json,
    read_parameters,
)
from paramserver.online.spec import IngestSpec
from paramserver.online.tracker import SimulationTracker

Message = tuple[bytes, list[bytes]]
"""To or from whom, and the frames."""


_log = logging.getLogger("paramserver.desk")


class RequestRefused(Exception):  # noqa: N818 - an answer, not an error of this process
    """Why a message was not taken; ``kind`` is one of few words, for counting."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class ConnectedTrainer:
    """One that joined, as the desk knows it.

    Attributes:
        peer: where its answers go.
        joined: what it told.
        heard_s: when it told something last.
        figures: of its last report.
    """

    def __init__(self, peer: bytes, joined: TrainerJoined, now: float) -> None:
        self.peer, self.joined, self.heard_s = peer, joined, now
        self.figures: Mapping[str, Any] = {}


class RequestHandler:
    """Knows who is at the other ends, tells the study what they say, and what is to be answered.

    HELLO is answered when all trainers have joined. Whatever is refused is answered with a sentence, counted, and
    logged once per kind.

    Args:
        plan: what is asked for.
        study: is told.
        trainers: how many must join.
        token: what a trainer must show.
        status: what PONG tells besides.

    Attributes:
        refused: kind -> messages that were refused.
        over: whether no more samples are wanted.
    """

    def __init__(
        self,
        plan: IngestSpec,
        study: SimulationTracker,
        trainers: int,
        token: bytes,
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.plan = plan
        self.study = study
        self.refused: Counter[str] = Counter()
        self.over = False
        self._token = token
        self._status = status
        self._trainers: list[ConnectedTrainer | None] = [None] * trainers
        self._clients: dict[tuple[int, int], tuple[bytes, Header]] = {}
        self._held: dict[bytes, list[bytes]] = {}
        self._hear: dict[MessageKind, Callable[[bytes, Header, list[bytes], float], list[Message]]] = {
            MessageKind.HELLO: self._hello,
            MessageKind.BYE: self._bye,
            MessageKind.PING: self._ping,
            MessageKind.LAST: self._last,
            MessageKind.JOIN: self._join,
            MessageKind.REPORT: self._report,
            MessageKind.OVER: self._enough,
        }

    @property
    def trainers(self) -> list[ConnectedTrainer]:
        """Those that have joined."""
        return [trainer for trainer in self._trainers if trainer is not None]

    @property
    def all_joined(self) -> bool:
        return None not in self._trainers

    def hear(self, peer: bytes, frames: Sequence[bytes], now: float, host: str = "one that waited") -> list[Message]:
        """The answers to one message, which came from ``host``."""
        header: Header | None = None
        try:
            try:
                header = Header.unpack(frames[0] if frames else b"")
                if header.kind not in self._hear:
                    raise RequestRefused("unexpected", f"{header.kind.name} is nothing that the desk is told")
                return self._hear[header.kind](peer, header, list(frames[1:]), now)
            except MalformedMessage as error:
                raise RequestRefused("malformed", str(error)) from error
        except RequestRefused as refusal:
            self._count(refusal, "a message" if header is None else _named(header), host)
            answer = Header(MessageKind.REFUSED) if header is None else header.answer(MessageKind.REFUSED)
            return [_to(peer, answer, str(refusal).encode())]

    def _count(self, refusal: RequestRefused, what: str, host: str) -> None:
        if not self.refused[refusal.kind]:
            _log.warning(
                "the desk refused %s from %s: %s; more of this kind (%s) are counted and not told",
                what,
                host,
                refusal,
                refusal.kind,
            )
        self.refused[refusal.kind] += 1

    # Clients.

    def _hello(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        if self.over or self.study.done:
            return [_to(peer, header.answer(MessageKind.OVER), ENOUGH.encode())]
        if not self.all_joined:
            self._held[peer] = [header.pack(), *body]
            return []
        parameters = self._parameters(body)
        if (why := self.study.refusal(header)) is not None:
            raise RequestRefused("simulation", why)
        self._check_known(header.simulation, parameters)
        self.study.hello(header, parameters, now)
        self._clients[header.simulation, header.member] = (peer, header)
        config = self.plan.config
        welcome = TrainerDirectory(
            trainers=tuple(trainer.joined.address for trainer in self.trainers),
            only=self.study.trainer_for(header.simulation),
            window=config.window,
            timeout_s=config.timeout_s,
            steps=config.steps,
            fields=self.plan.shaped,
        )
        return [_to(peer, header.answer(MessageKind.WELCOME), welcome.pack())]

    def _parameters(self, body: list[bytes]) -> list[float]:
        vector = read_parameters(_only(body, "HELLO"))
        wanted = len(self.plan.parameters)
        if wanted and len(vector) != wanted:
            names = ", ".join(name for name, _, _ in self.plan.parameters)
            raise RequestRefused("parameters", f"parameters ({len(vector)}) must be {wanted} numbers: {names}")
        if not np.isfinite(vector).all():
            raise RequestRefused("parameters", f"parameters ({vector.tolist()}) must be finite")
        return list(vector.tolist())

    def _check_known(self, simulation: int, parameters: list[float]) -> None:
        """All who send one simulation must mean the same one."""
        known = self.study.told_parameters(simulation)
        if known is not None and known != parameters:
            raise RequestRefused(
                "parameters",
                f"parameters ({parameters}) of simulation {simulation} must be those with which it was opened before, "
                f"{known}; give other parameters another simulation id",
            )

    def _bye(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        if self._clients.pop((header.simulation, header.member), None) is None:
            raise RequestRefused("stranger", f"member {header.member} of simulation {header.simulation} is not open")
        self.study.bye(header, now)
        return []

    def _ping(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        return [_to(peer, header.answer(MessageKind.PONG), pack_json(self.state(now)))]

    def _last(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        if (why := self.study.last(now)) is not None:
            raise RequestRefused("last", why)
        return []

    def state(self, now: float) -> dict[str, Any]:
        """Of the run, for whoever asks whether it is alive."""
        trainers = [
            {"index": i, "reported_s": round(now - one.heard_s, 3), "samples": one.figures.get("received", 0)}
            for i, one in enumerate(self._trainers)
            if one is not None
        ]
        return {"alive": True, **self._status(), "simulations": self.study.counts(), "trainers": trainers}

    # Trainers.

    def _join(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        index, count = header.simulation, len(self._trainers)
        if len(body) != 2 or not hmac.compare_digest(body[0], self._token):
            raise RequestRefused("stranger", "JOIN must show the token of this run")
        if index >= count:
            raise RequestRefused("stranger", f"trainer ({index}) must be below the number of trainers ({count})")
        began = self.all_joined
        self._trainers[index] = ConnectedTrainer(peer, TrainerJoined.unpack(body[1]), now)
        answers = [_to(peer, Header(MessageKind.READY))]
        if began:  # it came anew
            self.study.reported(index, SimulationReport(self.trainers[index].joined.received), now)
            return answers + self.finish() if self.study.done else answers
        if self.all_joined:
            self.study.begin([trainer.joined for trainer in self.trainers], now)
            answers += [answer for client, frames in self._held.items() for answer in self.hear(client, frames, now)]
            self._held.clear()
        return answers

    def _known(self, peer: bytes, index: int) -> ConnectedTrainer:
        trainer = self._trainers[index] if index < len(self._trainers) else None
        if trainer is None or trainer.peer != peer:
            raise RequestRefused("stranger", f"trainer {index} did not join from here")
        return trainer

    def _enough(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        """A trainer needs no more samples, and so nobody does: nothing is started or judged any more."""
        self._known(peer, header.simulation)
        return self.dismiss_all()

    def _report(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        index = header.simulation
        trainer = self._known(peer, index)
        report = SimulationReport.unpack(_only(body, "REPORT"))
        trainer.heard_s, trainer.figures = now, report.figures
        self.study.reported(index, report, now)
        return [_to(peer, Header(MessageKind.READY))]  # a trainer whose reports nobody answers is without its run

    def finish(self) -> list[Message]:
        """To all trainers: drain."""
        return [_to(trainer.peer, Header(MessageKind.FINISH)) for trainer in self.trainers]

    def give_up(self, why: str) -> list[Message]:
        """To all trainers: no more samples come, and why."""
        return [_to(trainer.peer, Header(MessageKind.OVER), why.encode()) for trainer in self.trainers]

    # Farewells.

    def dismiss(self, simulation: int) -> list[Message]:
        """To the clients of one simulation that are still open."""
        mine = [key for key in self._clients if key[0] == simulation]
        return [
            _to(peer, header.answer(MessageKind.OVER), ENOUGH.encode()) for peer, header in map(self._clients.pop, mine)
        ]

    def dismiss_all(self) -> list[Message]:
        """To every client that is open or waits to be."""
        self.over = True
        found = [(peer, header) for peer, header in self._clients.values()]
        found += [(peer, Header.unpack(frames[0])) for peer, frames in self._held.items()]
        self._clients.clear()
        self._held.clear()
        return [_to(peer, header.answer(MessageKind.OVER), ENOUGH.encode()) for peer, header in found]


def _named(header: Header) -> str:
    """What was said, and by whom, for people."""
    if header.kind in (MessageKind.JOIN, MessageKind.REPORT):
        return f"{header.kind.name} of trainer {header.simulation}"
    return f"{header.kind.name} of simulation {header.simulation}"


def _to(peer: bytes, header: Header, *body: bytes) -> Message:
    return peer, [header.pack(), *body]


def _only(body: list[bytes], what: str) -> bytes:
    if len(body) != 1:
        raise MalformedMessage(f"{what} must have 2 frames, it has {len(body) + 1}")
    return body[0]

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
    Joined,
    Kind,
    Malformed,
    Report,
    Welcome,
    pack_json,
    read_parameters,
)
from paramserver.online.spec import Plan
from paramserver.online.tracker import Study

Message = tuple[bytes, list[bytes]]
"""To or from whom, and the frames."""


_log = logging.getLogger("paramserver.desk")


class Refused(Exception):  # noqa: N818 - an answer, not an error of this process
    """Why a message was not taken; ``kind`` is one of few words, for counting."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class Trainer:
    """One that joined, as the desk knows it.

    Attributes:
        peer: where its answers go.
        joined: what it told.
        heard_s: when it told something last.
        figures: of its last report.
    """

    def __init__(self, peer: bytes, joined: Joined, now: float) -> None:
        self.peer, self.joined, self.heard_s = peer, joined, now
        self.figures: Mapping[str, Any] = {}


class Clerk:
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
        self, plan: Plan, study: Study, trainers: int, token: bytes, status: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.plan = plan
        self.study = study
        self.refused: Counter[str] = Counter()
        self.over = False
        self._token = token
        self._status = status
        self._trainers: list[Trainer | None] = [None] * trainers
        self._clients: dict[tuple[int, int], tuple[bytes, Header]] = {}
        self._held: dict[bytes, list[bytes]] = {}
        self._hear: dict[Kind, Callable[[bytes, Header, list[bytes], float], list[Message]]] = {
            Kind.HELLO: self._hello,
            Kind.BYE: self._bye,
            Kind.PING: self._ping,
            Kind.LAST: self._last,
            Kind.JOIN: self._join,
            Kind.REPORT: self._report,
            Kind.OVER: self._enough,
        }

    @property
    def trainers(self) -> list[Trainer]:
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
                    raise Refused("unexpected", f"{header.kind.name} is nothing that the desk is told")
                return self._hear[header.kind](peer, header, list(frames[1:]), now)
            except Malformed as error:
                raise Refused("malformed", str(error)) from error
        except Refused as refusal:
            self._count(refusal, "a message" if header is None else _named(header), host)
            answer = Header(Kind.REFUSED) if header is None else header.answer(Kind.REFUSED)
            return [_to(peer, answer, str(refusal).encode())]

    def _count(self, refusal: Refused, what: str, host: str) -> None:
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
            return [_to(peer, header.answer(Kind.OVER), ENOUGH.encode())]
        if not self.all_joined:
            self._held[peer] = [header.pack(), *body]
            return []
        parameters = self._parameters(body)
        if (why := self.study.refusal(header)) is not None:
            raise Refused("simulation", why)
        self._check_known(header.simulation, parameters)
        self.study.hello(header, parameters, now)
        self._clients[header.simulation, header.member] = (peer, header)
        config = self.plan.config
        welcome = Welcome(
            trainers=tuple(trainer.joined.address for trainer in self.trainers),
            only=self.study.trainer_for(header.simulation),
            window=config.window,
            timeout_s=config.timeout_s,
            steps=config.steps,
            fields=self.plan.shaped,
        )
        return [_to(peer, header.answer(Kind.WELCOME), welcome.pack())]

    def _parameters(self, body: list[bytes]) -> list[float]:
        vector = read_parameters(_only(body, "HELLO"))
        wanted = len(self.plan.parameters)
        if wanted and len(vector) != wanted:
            names = ", ".join(name for name, _, _ in self.plan.parameters)
            raise Refused("parameters", f"parameters ({len(vector)}) must be {wanted} numbers: {names}")
        if not np.isfinite(vector).all():
            raise Refused("parameters", f"parameters ({vector.tolist()}) must be finite")
        return list(vector.tolist())

    def _check_known(self, simulation: int, parameters: list[float]) -> None:
        """All who send one simulation must mean the same one."""
        known = self.study.told_parameters(simulation)
        if known is not None and known != parameters:
            raise Refused(
                "parameters",
                f"parameters ({parameters}) of simulation {simulation} must be those with which it was opened before, "
                f"{known}; give other parameters another simulation id",
            )

    def _bye(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        if self._clients.pop((header.simulation, header.member), None) is None:
            raise Refused("stranger", f"member {header.member} of simulation {header.simulation} is not open")
        self.study.bye(header, now)
        return []

    def _ping(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        return [_to(peer, header.answer(Kind.PONG), pack_json(self.state(now)))]

    def _last(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        if (why := self.study.last(now)) is not None:
            raise Refused("last", why)
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
            raise Refused("stranger", "JOIN must show the token of this run")
        if index >= count:
            raise Refused("stranger", f"trainer ({index}) must be below the number of trainers ({count})")
        began = self.all_joined
        self._trainers[index] = Trainer(peer, Joined.unpack(body[1]), now)
        answers = [_to(peer, Header(Kind.READY))]
        if began:  # it came anew
            self.study.reported(index, Report(self.trainers[index].joined.received), now)
            return answers + self.finish() if self.study.done else answers
        if self.all_joined:
            self.study.begin([trainer.joined for trainer in self.trainers], now)
            answers += [answer for client, frames in self._held.items() for answer in self.hear(client, frames, now)]
            self._held.clear()
        return answers

    def _known(self, peer: bytes, index: int) -> Trainer:
        trainer = self._trainers[index] if index < len(self._trainers) else None
        if trainer is None or trainer.peer != peer:
            raise Refused("stranger", f"trainer {index} did not join from here")
        return trainer

    def _enough(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        """A trainer needs no more samples, and so nobody does: nothing is started or judged any more."""
        self._known(peer, header.simulation)
        return self.dismiss_all()

    def _report(self, peer: bytes, header: Header, body: list[bytes], now: float) -> list[Message]:
        index = header.simulation
        trainer = self._known(peer, index)
        report = Report.unpack(_only(body, "REPORT"))
        trainer.heard_s, trainer.figures = now, report.figures
        self.study.reported(index, report, now)
        return [_to(peer, Header(Kind.READY))]  # a trainer whose reports nobody answers is without its run

    def finish(self) -> list[Message]:
        """To all trainers: drain."""
        return [_to(trainer.peer, Header(Kind.FINISH)) for trainer in self.trainers]

    def give_up(self, why: str) -> list[Message]:
        """To all trainers: no more samples come, and why."""
        return [_to(trainer.peer, Header(Kind.OVER), why.encode()) for trainer in self.trainers]

    # Farewells.

    def dismiss(self, simulation: int) -> list[Message]:
        """To the clients of one simulation that are still open."""
        mine = [key for key in self._clients if key[0] == simulation]
        return [_to(peer, header.answer(Kind.OVER), ENOUGH.encode()) for peer, header in map(self._clients.pop, mine)]

    def dismiss_all(self) -> list[Message]:
        """To every client that is open or waits to be."""
        self.over = True
        found = [(peer, header) for peer, header in self._clients.values()]
        found += [(peer, Header.unpack(frames[0])) for peer, frames in self._held.items()]
        self._clients.clear()
        self._held.clear()
        return [_to(peer, header.answer(Kind.OVER), ENOUGH.encode()) for peer, header in found]


def _named(header: Header) -> str:
    """What was said, and by whom, for people."""
    if header.kind in (Kind.JOIN, Kind.REPORT):
        return f"{header.kind.name} of trainer {header.simulation}"
    return f"{header.kind.name} of simulation {header.simulation}"


def _to(peer: bytes, header: Header, *body: bytes) -> Message:
    return peer, [header.pack(), *body]


def _only(body: list[bytes], what: str) -> bytes:
    if len(body) != 1:
        raise Malformed(f"{what} must have 2 frames, it has {len(body) + 1}")
    return body[0]

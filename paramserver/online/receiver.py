"""The sockets of a trainer's reception, and what its thread does with them until it is told to stop.

The thread of a trainer that receives samples, and the feeder's door to it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from paramserver.errors import SourceError, UnsupportedConfiguration
from paramserver.online.handoff import HandoffQueue, WakeupFd
from paramserver.online.protocol import ENOUGH, Header, MalformedMessage, MessageKind, TrainerJoined
from paramserver.online.received_log import ReceivedLog
from paramserver.online.receiver_stats import FieldStatistics, ReceiveStats
from paramserver.online.security import peer_security, server_security
from paramserver.online.spec import ReceiverSpec
from paramserver.online.validator import ClientSession, MessageRefused, MessageValidator, Outcome, SampleAccepted
from paramserver.online.zmq_import import host_of, listening_host, zmq

# Messages that are read before anything else gets its turn.
_AT_ONCE = 64
_REPORT_EVERY_S = 1.0
_REPORT_AGAIN_S = 0.05
_LINGER_MS = 500
# A frame of a wrong size is refused with a sentence; beyond twice the plan's and this it costs the connection.
_SPARE_BYTES = 2**20


class _ReceiverLoop:
    """Receives samples, judges them and answers, and keeps the desk informed. For one thread, from ``with`` to its end.

    Args:
        post: where.
        identities: which samples are there already.
        pending: where what is accepted goes.
        bell: rung when something else than a socket wants attention.
        tally: counts it.
        moments: of the fields.

    Attributes:
        clients: how many were heard within ``timeout_s``, when that was looked at last.
    """

    def __init__(
        self,
        post: ReceiverSpec,
        identities: ReceivedLog,
        pending: HandoffQueue,
        bell: WakeupFd,
        tally: ReceiveStats,
        moments: FieldStatistics,
    ) -> None:
        self.post = post
        self.identities = identities
        self.pending = pending
        self.bell = bell
        self.tally = tally
        self.moments = moments
        self.inspector = MessageValidator(post.plan, identities)
        self.interval_s = min(_REPORT_EVERY_S, post.timeout_s / 4)
        self.clients = 0
        self._ready = self._finishing = self._over = False
        self._unanswered = 0
        self._report_due = self._reported = self._counted = 0.0
        self._told: dict[ClientSession, None] = {}

    # The sockets.

    def __enter__(self) -> _ReceiverLoop:
        with ExitStack() as opening:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            opening.callback(context.term)
            security = opening.enter_context(server_security(context, self.post.keys))
            self._clients = opening.enter_context(self._socket(context, zmq.ROUTER))
            security.protect(self._clients)
            self._bind()
            self._desk = opening.enter_context(self._socket(context, zmq.DEALER))
            # Under its own name it is known again where its connection broke; nobody else can guess it.
            self._desk.routing_id = b"trainer" + secrets.token_bytes(16)
            peer_security(self._desk, self.post.keys)
            self._desk.connect(self.post.desk)
            self._opened = opening.pop_all()
        return self

    def _socket(self, context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
        opened = context.socket(kind)
        opened.linger = _LINGER_MS
        opened.ipv6 = ":" in self.post.host
        return opened

    def _bind(self) -> None:
        largest = max((field.bytes for field in self.post.plan.shaped), default=0)
        self._clients.maxmsgsize = 2 * largest + _SPARE_BYTES
        # A client that connects anew under its own name is the same client.
        self._clients.router_handover = True
        try:
            self._clients.bind(f"tcp://{listening_host(self.post.host)}:*")
        except zmq.ZMQError as error:
            raise UnsupportedConfiguration(
                f"trainer {self.post.trainer_index} cannot listen on {self.post.host} ({error}); correct "
                "simulations.address"
            ) from error

    @property
    def address(self) -> str:
        return bytes(self._clients.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    # The loop.

    def serve(self) -> None:
        """Until ``pending`` is closed.

        Raises:
            SourceError: the desk refused this trainer, or it is silent.
        """
        poller = zmq.Poller()
        for one in (self._clients, self._desk, self.bell.fileno()):
            poller.register(one, zmq.POLLIN)
        self._join()
        while not self.pending.closed:
            due = dict(poller.poll(max(0, int(1000 * (self._report_due - time.monotonic())) + 1)))
            if self.bell.fileno() in due:
                self.bell.hear()
            self._settle()
            if self._desk in due:
                self._hear_desk()
            emptied = self._receive() if self._clients in due else True
            self._tell()
            self._report()
            if self._finishing and emptied and not self._over and self.pending.is_empty():
                self._over = True
                self._report_due = 0.0  # the figures of the end, for the summary
                self.pending.end()
        self._say_over()
        if self._desk.poll(0, zmq.POLLOUT):
            self._desk.send_multipart([self._to_desk(MessageKind.OVER)])

    # The desk.

    def _join(self) -> None:
        joined = TrainerJoined(self.address, dict(self.tally.counts), self.identities.inherited())
        self._desk.send_multipart([self._to_desk(MessageKind.JOIN), self.post.token, joined.pack()])
        self._report_due = time.monotonic() + self.interval_s

    def _to_desk(self, kind: MessageKind) -> bytes:
        return Header(kind, simulation=self.post.trainer_index).pack()

    def _hear_desk(self) -> None:
        while (frames := self._next(self._desk)) is not None:
            self._unanswered = 0
            try:
                kind = Header.unpack(frames[0]).kind
            except MalformedMessage as error:
                raise _stopped(f"trainer {self.post.trainer_index} cannot understand the desk: {error}") from error
            if kind is MessageKind.READY and not self._ready:
                self._ready = True
                self._report_due = time.monotonic()
            self._finishing = self._finishing or kind is MessageKind.FINISH
            why = bytes(frames[-1]).decode(errors="replace")
            if kind is MessageKind.OVER:
                raise _stopped(f"no more samples come: {why}")
            if kind is MessageKind.REFUSED:
                raise _stopped(f"trainer {self.post.trainer_index} was refused by the desk of rank 0: {why}")

    def _report(self) -> None:
        now = time.monotonic()
        if now < self._report_due:
            return
        # With nobody at the other end a send would wait; the silence is noticed below.
        if self._ready and self._desk.poll(0, zmq.POLLOUT):
            report = self.tally.report(self.pending.simulations())
            self._desk.send_multipart([self._to_desk(MessageKind.REPORT), report.pack()])
        self._reported, self._report_due = now, now + self.interval_s
        if now - self._counted >= self.interval_s:
            self._counted = now
            self._count_clients(now)
            self._check_desk()

    def _check_desk(self) -> None:
        # In reports without an answer, not in seconds: who was stopped for a while has not waited for any.
        self._unanswered += 1
        if self._unanswered * self.interval_s > self.post.timeout_s and not self._over:
            raise _stopped(
                f"trainer {self.post.trainer_index} has heard nothing of the desk at {self.post.desk} for "
                f"{self.post.timeout_s:g} s; rank 0 is gone or cannot be reached"
            )

    def _count_clients(self, now: float) -> None:
        self.clients = sum(now - visitor.heard <= self.post.timeout_s for visitor in self.inspector.visitors())

    # Clients.

    def _receive(self) -> bool:
        """Read what is there; whether that was all."""
        accepted: list[SampleAccepted] = []
        now = time.monotonic()
        emptied = False
        for _ in range(_AT_ONCE):
            message = self._next(self._clients)
            if message is None:
                emptied = True
                break
            peer, *frames = message
            if self._over:
                self._refuse_late(bytes(peer), frames[0])
            else:
                self._judge(bytes(peer), frames, accepted, now)
        if accepted:
            self.moments.see([one.sample for one in accepted])
            self.pending.put(accepted)
        return emptied

    def _refuse_late(self, peer: bytes, frame: Any) -> None:
        try:
            header = Header.unpack(frame)
        except MalformedMessage:
            return
        self._send(peer, header.answer(MessageKind.OVER), ENOUGH)

    def _judge(self, peer: bytes, frames: Sequence[Any], accepted: list[SampleAccepted], now: float) -> None:
        verdict: Outcome = self.inspector.judge(peer, frames)
        self.tally.note(verdict, host_of(frames) if isinstance(verdict, MessageRefused) else "")
        visitor = verdict.visitor
        if visitor is not None:
            visitor.heard = now
        if isinstance(verdict, SampleAccepted):
            accepted.append(verdict)
        elif isinstance(verdict, MessageRefused):
            header = Header(MessageKind.REFUSED) if visitor is None else visitor.header.answer(MessageKind.REFUSED)
            self._send(peer, header, verdict.sentence)
        for told in verdict.told:
            self._told[told] = None

    def _settle(self) -> None:
        """Count what the buffer has got."""
        settled = self.pending.settled()
        for accepted in settled:
            for giver in accepted.givers:
                giver.dealt += 1
                self._told[giver] = None
        changed = self.tally.settle(settled)
        due = any(self.tally.counts[simulation] == self._steps_of(simulation) for simulation in changed)
        # The desk waits for nothing that it could know: of a simulation that is complete, or of the last for now.
        if due or (self._told and self.pending.is_empty()):
            self._report_due = min(self._report_due, self._reported + _REPORT_AGAIN_S)

    def _steps_of(self, simulation: int) -> int | None:
        return self.post.plan.steps_for(simulation, self.post.trainer_index, self.post.trainers)

    def _tell(self) -> None:
        """Answer each client once, with all that was dealt with."""
        for visitor in self._told:
            if self.inspector.is_current(visitor):
                self._send(visitor.peer, visitor.header.answer(MessageKind.TAKEN, visitor.dealt))
        self._told.clear()

    def _say_over(self) -> None:
        for visitor in self.inspector.visitors():
            self._send(visitor.peer, visitor.header.answer(MessageKind.OVER), ENOUGH)

    def _send(self, peer: bytes, header: Header, *sentence: str) -> None:
        """What cannot be delivered is dropped: a router never waits."""
        self._clients.send_multipart([peer, header.pack(), *(text.encode(errors="replace") for text in sentence)])

    def _next(self, readable: Any) -> list[Any] | None:
        """The frames of a message, which lie where they were received; None where there is none."""
        try:
            frame = readable.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        frames = [frame]
        while frame.more:
            frame = readable.recv(copy=False)
            frames.append(frame)
        return frames


def _stopped(sentence: str) -> SourceError:
    """No more samples can come; where that was noticed says nothing more."""
    error = SourceError(sentence)
    error.says_all = True
    return error


GROUP = 64
"""Samples that are handed over at once, at most."""


class SampleReceiver:
    """Owns the thread ``reception-<trainer>``, from ``start`` to ``close``, and all that it uses.

    ``take`` and ``taken`` are for one thread, the feeder's; it may take its time. Whoever sends may have
    ``simulations.window`` samples on their way, and learns of room by what was ``taken``.

    Args:
        post: where to receive, and what.
        identities: what was received before. The thread marks in it what it accepts; the log is the caller's.
    """

    def __init__(self, post: ReceiverSpec, identities: ReceivedLog) -> None:
        self._bell = WakeupFd()
        self._pending = HandoffQueue(self._bell)
        self._tally = ReceiveStats(identities.counts(), post.plan.sample_bytes, post.trainer_index)
        self._moments = FieldStatistics([field.name for field in post.plan.fields])
        self._ear = _ReceiverLoop(post, identities, self._pending, self._bell, self._tally, self._moments)
        self._thread = threading.Thread(target=self._run, name=f"reception-{post.trainer_index}", daemon=True)

    def start(self) -> None:
        """Listen, and tell the desk."""
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._ear:
                self._ear.serve()
        except BaseException as error:  # noqa: BLE001 - kept, and raised to who takes
            self._pending.fail(error)

    def take(self, timeout: float | None = None) -> list[SampleAccepted] | None:
        """What was accepted and not given yet, up to ``GROUP`` of it, in the order in which it came.

        Returns:
            Nothing where none came within ``timeout`` seconds. None at the end: the desk said that the last simulation
            has ended and all was taken, or this is closed.

        Raises:
            SourceError: the desk refused this trainer, or has been silent.
            UnsupportedConfiguration: the address is not this machine's, or pyzmq is missing.
        """
        return self._pending.take(GROUP, timeout)

    def taken(self, n: int) -> None:
        """The buffer has got the next ``n`` of what ``take`` gave."""
        self._pending.taken(n)

    def figures(self) -> dict[str, Any]:
        """``ReceiveStats.figures``, with ``partial`` (samples of which parts are missing) and ``clients``."""
        return {
            **self._tally.figures(),
            "partial": len(self._ear.inspector.assembly),
            "clients": self._ear.clients,
        }

    def statistics(self) -> dict[str, dict[str, float]]:
        """Mean and deviation of each field since they were read last, see ``FieldStatistics.read``."""
        return self._moments.read()

    def leave(self) -> None:
        """Begin to close: all clients, and the desk, are told that the run is over. Wakes who takes."""
        self._pending.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """The same, and wait for the end. Again: no effect.

        Raises:
            SourceError: the thread has not ended in time.
        """
        self.leave()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise SourceError(f"{self._thread.name} must end within {timeout_s:g} s of its close, and has not")
        self._bell.close()

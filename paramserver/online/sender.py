"""A connection from a client to one party of a run: messages out, messages in, and when it was heard last.

Whether anybody listens at the other end of a connection.

What a client asks the desk of a run, and the answer.

The samples of one member on their way to all trainers, a window of them at once to each.

The way from a client to one trainer: how many samples are on it, and whether there is somebody at its end.
"""

from __future__ import annotations

import logging
import struct
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paramserver.cluster.network import is_loopback
from paramserver.errors import ClientError, RunOver
from paramserver.online.protocol import ENOUGH, Header, MalformedMessage, MessageKind, TrainerDirectory
from paramserver.online.security import client_security
from paramserver.online.zmq_import import zmq

Message = tuple[Header, list[bytes]]


class ClientConnection:
    """One DEALER socket. For one thread; closed by its owner before the context is terminated.

    Args:
        context: where the socket lives.
        name: of the other end, for messages.
        address: of the other end: ``tcp://host:port``.
        keys: as in ``client_security``.

    Raises:
        ClientError: no address, or one that others reach, without keys.
        UnsupportedConfiguration: the keys are none.
    """

    def __init__(self, context: zmq.Context[Any], name: str, address: str, keys: str | Path | None) -> None:
        self.name, self.address = name, address
        self.heard = time.monotonic()
        _check_keys(address, keys)
        self.socket = context.socket(zmq.DEALER)
        try:
            # What waits to leave is bounded by whoever sends; a program that ends without close() must not hang.
            self.socket.sndhwm, self.socket.linger = 0, 0
            self.socket.ipv6 = "[" in address
            client_security(self.socket, keys)
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        try:
            self.socket.connect(self.address)
        except zmq.ZMQError as error:
            raise ClientError(
                f"address ({self.address}) must be tcp://host:port ({error.strerror}); take the one that the run tells"
            ) from error

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        """Whoever waits for news of this line polls these."""
        return [self.socket]

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"

    def send(self, header: Header, *frames: Any) -> None:
        """What a frame is made of may change afterwards: it is copied.

        Raises:
            ClientError: the other end has broken off the connection for good.
        """
        try:
            self.socket.send_multipart([header.pack(), *frames], zmq.NOBLOCK)
        except zmq.Again as error:
            # Without a limit on what waits to leave, a send has to wait only where there is no connection any more:
            # ZeroMQ does not try again after a handshake that failed.
            raise ClientError(
                f"{self} has broken off the connection to this client: it is no run, or it does not know this client's "
                "key; correct the address, or the keys on both sides"
            ) from error

    def receive(self) -> Iterator[Message]:
        """Every message that is there; does not wait.

        Raises:
            ClientError: what came is no message of this protocol and version.
            RunOver: the run wants no more samples.
        """
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.heard = time.monotonic()
            try:
                header = Header.unpack(frames[0])
            except MalformedMessage as error:
                raise ClientError(f"{self} answered what cannot be understood: {error}") from error
            if header.kind is MessageKind.OVER:
                raise RunOver(sentence(frames[1:]) or ENOUGH)
            yield header, frames[1:]

    def close(self, linger_s: float = 0.0) -> None:
        """What has not left by then is dropped."""
        self.socket.close(linger=round(1000 * linger_s))


def sentence(frames: list[bytes]) -> str:
    """What OVER and REFUSED say."""
    return b" ".join(frames).decode(errors="replace").strip()


def _check_keys(address: str, keys: str | Path | None) -> None:
    host = address.partition("://")[2].rpartition(":")[0]
    if keys is None and host and not is_loopback(host):
        raise ClientError(
            f"keys (None) must be given with the address {address}, which is beyond this machine; name the folder of "
            "the run's keys"
        )


_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED


class ConnectionMonitor:
    """What ZeroMQ tells of one socket's connection, which it makes again and again by itself.

    Args:
        socket: not connected yet.

    Attributes:
        connections: how many there were so far.
    """

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self.connections = 0
        self._absent_since: float | None = None
        self._socket = socket
        address = f"inproc://presence-{socket.underlying}"
        socket.monitor(address, _EVENTS)
        monitor = socket.context.socket(zmq.PAIR)
        # Where these messages had a limit, the thread that writes them, which serves every socket of the context, would
        # wait for a program that computes and reads none.
        monitor.rcvhwm = 0
        monitor.connect(address)
        self._monitor: zmq.Socket[Any] | None = monitor

    def absent_s(self) -> float:
        """For how long nobody has listened there, or who did has left; 0 where somebody may."""
        now = time.monotonic()
        while self._monitor is not None and self._monitor.poll(0):
            (event,) = struct.unpack_from("=H", self._monitor.recv_multipart()[0])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connections += 1
                self._absent_since = None
            elif self._absent_since is None and (self.connections or event == zmq.EVENT_CONNECT_RETRIED):
                self._absent_since = now
        return 0.0 if self._absent_since is None else now - self._absent_since

    def close(self) -> None:
        """Before the socket is closed. Again: no effect."""
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None


_ASK_AGAIN_S = 1.0
# A run that lives is waited for so many times longer than one that is silent.
_PATIENCE = 10
# Who takes a port again after a moment is there.
_GONE_S = 5.0


class CoordinatorConnection(ClientConnection):
    """The connection to the desk, which can be asked before the run is there.

    Nobody listens before a run, and nobody after it. So who was not connected waits; who was, or whom the run has
    started, knows soon that it is gone.

    Args:
        context, name, address, keys: as for ``ClientConnection``.
        was_there: whether this run has begun.
    """

    def __init__(
        self, context: zmq.Context[Any], name: str, address: str, keys: str | Path | None, was_there: bool = False
    ) -> None:
        self._was_there = was_there
        self._presence: ConnectionMonitor | None = None
        super().__init__(context, name, address, keys)

    def _connect(self) -> None:
        self._presence = ConnectionMonitor(self.socket)
        super()._connect()

    def close(self, linger_s: float = 0.0) -> None:
        if self._presence is not None:
            self._presence.close()
        super().close(linger_s)

    def ask(self, question: Header, *frames: Any, answer: MessageKind, timeout_s: float) -> list[bytes]:
        """The frames of the answer.

        The desk answers HELLO when all trainers are there. Meanwhile it is asked each second whether it lives.

        Raises:
            ClientError: the desk refused, with its sentence, was silent for ``timeout_s``, did not answer this in
                ten times as long, or is gone.
            RunOver: the run wants no more samples.
        """
        assert self._presence is not None
        self.heard = asked = began = time.monotonic()
        self.send(question, *frames)
        unanswered, connections = answer is MessageKind.PONG, 1
        while True:
            self._wait(min(asked + _ASK_AGAIN_S, self.heard + timeout_s))
            for header, body in self.receive():
                if header.kind is answer:
                    return body
                if header.kind is MessageKind.REFUSED:
                    raise ClientError(f"{self} refused this client: {sentence(body)}")
                unanswered = unanswered and header.kind is not MessageKind.PONG
            now = time.monotonic()
            self._check_patience(now - began, now - self.heard, timeout_s)
            if now >= asked + _ASK_AGAIN_S:
                asked = now
                if self._presence.connections > connections:
                    connections = self._presence.connections
                    self.send(question, *frames)  # somebody new is there, who was not asked
                if not unanswered:
                    unanswered = True
                    self.send(Header(MessageKind.PING))

    def _wait(self, until: float) -> None:
        self.socket.poll(max(0, round(1000 * (until - time.monotonic())) + 1), zmq.POLLIN)

    def _check_patience(self, waited_s: float, silent_s: float, timeout_s: float) -> None:
        assert self._presence is not None
        absent_s = self._presence.absent_s()
        if absent_s >= _GONE_S and (self._was_there or self._presence.connections):
            raise ClientError(f"{self} is gone, nobody has listened there for {absent_s:.0f} s; see its log")
        if silent_s >= timeout_s:
            told = f"{self} gave no sign of life for {timeout_s:g} s; see that it runs and that this is its address"
            if self.socket.mechanism == zmq.CURVE:
                told += ", and that the public key of this client is in the folder clients of its keys"
            raise ClientError(told)
        if waited_s >= _PATIENCE * timeout_s:
            raise ClientError(
                f"{self} lives, but its trainers were not ready within {waited_s:.0f} s; see the log of the run"
            )


_TOUCH_EVERY_S = 1.0
# A trainer whose connection ends may have been told that the run is over, as the desk is about to tell.
_FAREWELL_S = 2.0


class TrainerConnection(ClientConnection):
    """Sends samples of one member to one trainer.

    A connection that was lost is not made anew: nobody knows what was on it, and a simulation that is started again
    sends all of it, of which the trainer takes what it lacks.

    Args:
        context, name, address, keys: as for ``ClientConnection``.
        header: of the member, as in HELLO.
        parameters: of the simulation, packed.
        timeout_s: how long the trainer may be silent while it is waited for.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        name: str,
        address: str,
        keys: str | Path | None,
        *,
        header: Header,
        parameters: bytes,
        timeout_s: float,
    ) -> None:
        self.sent = self.taken = 0
        self._header, self._timeout_s = header, timeout_s
        self._touch_every_s = min(_TOUCH_EVERY_S, timeout_s / 4)
        self._waits_since = self._touched = 0.0
        self._lost_at: float | None = None
        self._monitor: zmq.Socket[Any] | None = None
        super().__init__(context, name, address, keys)
        self.send(header.answer(MessageKind.OPEN), parameters)

    def _connect(self) -> None:
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        super()._connect()

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        monitors = [] if self._monitor is None or self._lost_at is not None else [self._monitor]
        return [self.socket, *monitors]

    @property
    def outstanding(self) -> int:
        """Samples on their way: the trainer has not said yet that it dealt with them."""
        return self.sent - self.taken

    def post(self, step: int, frames: list[Any]) -> None:
        self.send(self._header.answer(MessageKind.SAMPLE, step), *frames)
        self.sent += 1

    def hear(self) -> list[Message]:
        """Take note of what was taken; gives what else was said.

        Raises:
            ClientError, RunOver: as ``receive``.
        """
        others = []
        for header, body in self.receive():
            if header.kind is not MessageKind.TAKEN:
                others.append((header, body))
            elif header.simulation == self._header.simulation and header.step <= self.sent:
                self.taken = max(self.taken, header.step)
        return others

    # Waiting.

    def begin_to_wait(self) -> None:
        """From now on the trainer may not be silent for too long."""
        self._waits_since = self._touched = time.monotonic()

    def touch(self) -> float:
        """Tell that this client lives, when it is time; until when it may be waited before the next call.

        Raises:
            ClientError: the trainer is gone.
        """
        now = time.monotonic()
        if self._lost_at is None and self._is_lost():
            self._lost_at = now
        if self._lost_at is not None:
            if now >= self._lost_at + _FAREWELL_S:
                raise ClientError(f"the connection to {self} was lost; that trainer is gone, see the log of the run")
            return self._lost_at + _FAREWELL_S
        silent_at = max(self.heard, self._waits_since) + self._timeout_s
        if now >= silent_at:
            raise ClientError(
                f"{self} gave no sign of life for {self._timeout_s:g} s; that trainer is gone, see the log of the run"
            )
        if now >= self._touched + self._touch_every_s:
            self._touched = now
            self.send(self._header.answer(MessageKind.TOUCH))
        return min(silent_at, self._touched + self._touch_every_s)

    def _is_lost(self) -> bool:
        return self._monitor is not None and bool(self._monitor.poll(0))

    def close(self, linger_s: float = 0.0) -> None:
        """Let go of the trainer."""
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        super().close(linger_s)


DESK = "the run"
_GREETING_S = 60.0
_MOST_SENTENCES = 20
# A sender that has room listens so often, because to listen costs more than to send a small sample.
_LISTEN_EVERY_S = 0.1

_logger = logging.getLogger("paramserver.client")


class SampleSender:
    """Owns a client's sockets. For one thread; ``close`` also after an error.

    Args:
        address: of the desk.
        keys: as in ``client_security``.
        header: who sends: simulation, member, members and attempt.
        parameters: of the simulation, packed.
        timeout_s: how long the desk and each trainer may be silent while they are waited for; None = what the run
            tells, and 60 s until then.
        was_there: whether this run has begun, see ``CoordinatorConnection``.

    Raises:
        ClientError: the desk refused, was silent, or is gone.
        RunOver: the run wants no more samples.
    """

    def __init__(
        self,
        address: str,
        keys: str | Path | None,
        header: Header,
        parameters: bytes,
        timeout_s: float | None,
        was_there: bool = False,
    ) -> None:
        self._keys, self._header, self._parameters = keys, header, parameters
        self._postmen: dict[int, TrainerConnection] = {}
        self._logged: set[str] = set()
        self.refused = 0
        self.waited_s = self._listen_at = 0.0
        with ExitStack() as stack:
            self._context: zmq.Context[Any] = zmq.Context()
            stack.callback(self._context.term)
            self._desk = CoordinatorConnection(self._context, DESK, address, keys, was_there)
            stack.callback(self._desk.close)
            self.welcome = self._greet(timeout_s or _GREETING_S)
            stack.pop_all()
        # A context that is collected together with its sockets waits for them for ever (pyzmq closes what it finds by
        # weak references, which are gone by then); this holds both until a client that nobody closed is collected.
        self._let_go = weakref.finalize(self, _let_go, self._context, self._desk, self._postmen)
        self._timeout_s = timeout_s or self.welcome.timeout_s

    def _greet(self, timeout_s: float) -> TrainerDirectory:
        hello = self._header.answer(MessageKind.HELLO)
        answer = self._desk.ask(hello, self._parameters, answer=MessageKind.WELCOME, timeout_s=timeout_s)
        try:
            return TrainerDirectory.unpack(b"".join(answer))
        except MalformedMessage as error:
            raise ClientError(f"{self._desk} answered what cannot be understood: {error}") from error

    @property
    def sent(self) -> int:
        return sum(postman.sent for postman in self._postmen.values())

    def send(self, step: int, frames: list[Any]) -> None:
        """Send a sample to its trainer, once there is room on the way.

        Raises:
            ClientError: that trainer is gone.
            RunOver: the run wants no more samples.
        """
        postman = self._postman(self.welcome.trainer_of(self._header.simulation, step))
        now = time.monotonic()
        if now >= self._listen_at:
            self._listen_at = now + _LISTEN_EVERY_S
            self._hear(list(self._postmen.values()))
        if postman.outstanding >= self.welcome.window:
            self._hear([postman])
        if postman.outstanding >= self.welcome.window:
            self._wait_for_room(postman)
        postman.post(step, frames)

    def _wait_for_room(self, postman: TrainerConnection) -> None:
        began = time.monotonic()
        try:
            self._wait([postman], self.welcome.window - 1)
        finally:
            self.waited_s += time.monotonic() - began

    def settle(self) -> None:
        """Wait until everything that was sent was dealt with; raises as ``send``."""
        self._wait(list(self._postmen.values()), 0)

    def say_bye(self) -> None:
        """Tell the desk that this member is done."""
        self._desk.send(self._header.answer(MessageKind.BYE, self.sent))

    def close(self, linger_s: float = 0.0) -> None:
        """Let go of everybody; what was said to the desk has ``linger_s`` to leave."""
        self._desk.close(linger_s)
        self._let_go()

    def _postman(self, index: int) -> TrainerConnection:
        if index not in self._postmen:
            self._postmen[index] = TrainerConnection(
                self._context,
                f"trainer {index}",
                self.welcome.trainers[index],
                self._keys,
                header=self._header,
                parameters=self._parameters,
                timeout_s=self._timeout_s,
            )
        return self._postmen[index]

    def _wait(self, postmen: Sequence[TrainerConnection], at_most: int) -> None:
        """Until no more than ``at_most`` samples are on the way to each of these."""
        for postman in postmen:
            postman.begin_to_wait()
        while waited_for := [postman for postman in postmen if postman.outstanding > at_most]:
            until = min([postman.touch() for postman in waited_for])
            self._poll(waited_for, until)
            self._hear(waited_for)

    def _poll(self, postmen: Sequence[TrainerConnection], until: float) -> None:
        poller = zmq.Poller()
        for socket in [socket for line in (self._desk, *postmen) for socket in line.sockets]:
            poller.register(socket, zmq.POLLIN)
        poller.poll(max(0, round(1000 * (until - time.monotonic())) + 1))

    def _hear(self, postmen: Sequence[TrainerConnection]) -> None:
        for postman in postmen:
            self._note(postman, postman.hear())
        self._note(self._desk, self._desk.receive())

    def _note(self, who: ClientConnection, messages: Iterable[Message]) -> None:
        """Refusals are counted, and logged once for each sentence."""
        for header, body in messages:
            if header.kind is MessageKind.REFUSED:
                self.refused += 1
                told = f"{who} refused a message: {sentence(body)}"
                if told not in self._logged and len(self._logged) < _MOST_SENTENCES:
                    self._logged.add(told)
                    _logger.warning("%s", told)


def _let_go(context: zmq.Context[Any], desk: CoordinatorConnection, postmen: dict[int, TrainerConnection]) -> None:
    for line in (desk, *postmen.values()):
        line.close()
    context.term()

"""What a client asks the desk of a run, and the answer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from paramserver.errors import ClientError
from paramserver.online.connection import ClientConnection, ConnectionMonitor, sentence
from paramserver.online.protocol import Header, MessageKind
from paramserver.online.zmq_import import zmq

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

"""A connection from a client to one party of a run: messages out, messages in, and when it was heard last.

Whether anybody listens at the other end of a connection.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paramserver.cluster.network import is_loopback
from paramserver.errors import ClientError, RunOver
from paramserver.online.protocol import ENOUGH, Header, MalformedMessage, MessageKind
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

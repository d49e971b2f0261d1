"""Whether anybody listens at the other end of a connection."""

from __future__ import annotations

import struct
import time
from typing import Any

from paramserver.online.zeromq import zmq

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED


class Presence:
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

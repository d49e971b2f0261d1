"""Imports pyzmq or fails with one clear message; addresses and connections of its sockets.

Every module of the package that uses the network takes ``zmq`` from here.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import logging
import os
import socket
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from paramserver.errors import UnsupportedConfiguration

try:
    import zmq as zmq
except ImportError as error:
    raise UnsupportedConfiguration(
        "simulations, publish and subscribers need pyzmq; install pyzmq, or the extra online"
    ) from error

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
# tcpi_bytes_received of struct tcp_info, see linux/tcp.h.
_TCP_INFO_BYTES, _BYTES_RECEIVED_AT = 136, 128
_IDLE_S, _INTERVAL_S, _SUSPECT_INTERVAL_S = 60.0, 0.1, 0.01
# The connections are looked at for at most about a hundredth of the time.
_INTERVAL_PER_CONNECTION_S = 0.001

_log = logging.getLogger("paramserver.connections")


def resolve_listen_address(host: str, key: str = "simulations.address") -> str:
    """Resolve an address to listen on, the value of ``key``, to a numeric one. ZeroMQ resolves no names when it binds.

    Raises:
        UnsupportedConfiguration: the host does not exist, or is the wildcard address, which no client can connect to.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnsupportedConfiguration(
            f"{key} ({host}) must be an address of rank 0's host ({error.strerror}); correct it"
        ) from error
    address = str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])  # IPv4 first
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise UnsupportedConfiguration(
            f"{key} ({host}) must be the one on which clients reach rank 0; give this host's own"
        )
    return f"[{address}]" if ":" in address else address


def receive_parts(router: Any, max_parts: int = sys.maxsize, max_bytes: int = sys.maxsize) -> list[Any] | None:
    """Receive one message of a ROUTER, or without limits of any socket; no wait, no copy, None if there is none.

    A message beyond a limit is read to its end and not kept, its sender is disconnected, and only its first part, the
    routing id, is returned. ZeroMQ delivers a message when its last part has arrived; its own limit, ``maxmsgsize``, is
    for one part. ``max_parts`` is without the routing id, ``max_bytes`` of all parts.
    """
    receive = router.recv  # with positional arguments, which take half of the time: flags, and no copy
    try:
        frame = receive(zmq.NOBLOCK, False)
    except zmq.Again:
        return None
    # A message is atomic: once its first part is readable the others are too. Not recv_multipart, which is slower and
    # keeps everything.
    frames = [frame]
    num_bytes, fits = len(frame), True
    while frame.more:
        frame = receive(0, False)
        num_bytes += len(frame)
        if not fits:
            continue
        frames.append(frame)
        if len(frames) > 1 + max_parts or num_bytes > max_bytes:
            fits = False
            del frames[1:]
    if not fits:
        with suppress(zmq.ZMQError):  # the connection has ended
            end_connection(router, frames[0].get(zmq.SRCFD), num_bytes - len(frames[0]))
    return frames


@contextmanager
def connection_of(router: Any, fd: int) -> Iterator[socket.socket | None]:
    """A TCP connection of a bound socket, by the number of its file descriptor, for ``with``; None if it has ended."""
    port = router.last_endpoint.rstrip(b"\0").rpartition(b":")[2].decode()
    with ExitStack() as opened:
        connection = None
        # Of a copy, so that ZeroMQ may close its own. The number of a connection that has ended may belong to something
        # else meanwhile: only one of this socket is given.
        with suppress(OSError, IndexError):
            found = opened.enter_context(_from_copy(os.dup(fd)))
            connection = found if str(found.getsockname()[1]) == port and found.getpeername() else None
        yield connection


def _from_copy(fd: int) -> socket.socket:
    try:
        return socket.socket(fileno=fd)  # of the family that it has: addresses are read by it
    except OSError:
        os.close(fd)
        raise


def end_connection(router: Any, fd: int, num_bytes: int) -> str | None:
    """End the TCP connection of a bound socket over which ``num_bytes`` or more have arrived.

    A ROUTER has no call for this. Its I/O thread then closes the connection as if the client had. Returns the host of
    the peer; None if the connection has ended already, also where its number belongs to a new connection of the same
    socket: less has arrived over that one.
    """
    with connection_of(router, fd) as connection, suppress(OSError):  # the client may end it at this moment
        if connection is not None and _bytes_received(connection) >= num_bytes:
            host = str(connection.getpeername()[0])
            # Reset when ZeroMQ closes it: otherwise a client whose send waits for room would wait on, as the kernel
            # announces no more room after a shutdown.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.shutdown(socket.SHUT_RDWR)
            return host
    return None


def peer_host(frames: Sequence[Any]) -> str:
    """The host that a received message came from, for log messages."""
    try:
        return str(frames[0].get("Peer-Address"))
    except (IndexError, AttributeError, zmq.ZMQError):
        return "an unknown host"


class UnfinishedMessages:
    """Ends connections whose unfinished messages take too much memory. For the thread of the socket.

    ZeroMQ keeps the parts of a message until the last one has arrived; ``maxmsgsize`` limits each part, and nothing
    their number. While a message is unfinished no other one arrives over its connection. So what ZeroMQ has read from a
    connection since its last message, by the counters of the kernel, is what it holds.

    Call ``received`` for each message, ``check`` after messages were received, and ``close`` before the socket is
    closed. The router is not bound yet. ``max_bytes`` is for one connection, ``max_total_bytes`` for all together (None
    = no limit). The next ``check`` is due from ``check_at`` on, in ``time.monotonic()``.
    """

    def __init__(self, router: zmq.Socket[Any], max_bytes: int, max_total_bytes: int | None = None) -> None:
        self._router, self._max_bytes, self._max_total_bytes = router, max_bytes, max_total_bytes
        self.check_at = 0.0
        # File descriptor -> bytes that were read up to its last message.
        self._finished: dict[int, int] = {}
        self._active: set[int] = set()
        self._suspects: set[int] = set()
        self._num_received = 0
        address = f"inproc://accepted-{router.underlying}"
        router.monitor(address, _EVENTS)
        # Readable when a connection has begun or ended. Poll it too, then call ``check``.
        self.events: zmq.Socket[Any] = router.context.socket(zmq.PAIR)
        # No limit on events: ZeroMQ's I/O thread writes them, and would wait for this thread.
        self.events.rcvhwm = 0
        self.events.linger = 0
        self.events.connect(address)

    def received(self, frame: zmq.Frame) -> None:
        """A message has arrived, which begins with this frame."""
        self._num_received += 1
        try:
            self._active.add(int(frame.get(zmq.SRCFD)))
        except zmq.ZMQError:
            return  # the connection has ended

    def check(self, no_message_left: bool) -> None:
        """End the connections whose unfinished messages are too large, if it is time to.

        ``no_message_left``: all messages that had arrived were received.
        """
        self._read_events()
        now = time.monotonic()
        # A ROUTER receives from its connections in turn: after as many messages, none of them has a finished one that
        # was there at the last check.
        if now < self.check_at or not (no_message_left or self._num_received > len(self._finished)):
            return
        unfinished = self._measure()
        over = {fd for fd, num_bytes in unfinished.items() if num_bytes > self._max_bytes}
        if self._max_total_bytes is not None:
            rest = sorted((num_bytes, fd) for fd, num_bytes in unfinished.items() if fd not in over)
            total = sum(num_bytes for num_bytes, _ in rest)
            while total > self._max_total_bytes:
                num_bytes, fd = rest.pop()
                total -= num_bytes
                over.add(fd)
        # Twice in a row: messages that were finished since this thread has received its last one are not unfinished.
        for fd in over & self._suspects:
            self._end(fd, unfinished[fd])
        self._suspects = over - self._suspects
        self._active.clear()
        self._num_received = 0
        interval_s = max(_INTERVAL_S, _INTERVAL_PER_CONNECTION_S * len(self._finished))
        self.check_at = now + (_SUSPECT_INTERVAL_S if self._suspects else interval_s if self._finished else _IDLE_S)

    def _read_events(self) -> None:
        while int(self.events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # in a third of the time of poll
            event, fd = struct.unpack_from("=Hi", self.events.recv_multipart()[0])
            if event == zmq.EVENT_ACCEPTED:
                self._finished[fd] = 0
                self.check_at = min(self.check_at, time.monotonic() + _INTERVAL_S)
            else:
                self._finished.pop(fd, None)
                self._suspects.discard(fd)

    def _measure(self) -> dict[int, int]:
        """Bytes of the unfinished message of each connection."""
        unfinished = {}
        for fd, finished in self._finished.items():
            with connection_of(self._router, fd) as connection:
                num_bytes = finished if connection is None else _bytes_read(connection)
            if fd in self._active:
                self._finished[fd] = finished = num_bytes
            unfinished[fd] = num_bytes - finished
        return unfinished

    def _end(self, fd: int, num_bytes: int) -> None:
        if (host := end_connection(self._router, fd, num_bytes)) is not None:
            _log.warning(
                "the connection of a client on %s was ended: a message of which %.0f MiB had arrived was not finished",
                host,
                num_bytes / 2**20,
            )

    def close(self) -> None:
        self._router.disable_monitor()
        self.events.close()


def _bytes_received(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)[0])


def _bytes_read(connection: socket.socket) -> int:
    """Bytes that were received from a connection and read by the process."""
    num_bytes, unread = _bytes_received(connection), array.array("i", [0])
    fcntl.ioctl(connection, termios.FIONREAD, unread)
    return num_bytes - unread[0]

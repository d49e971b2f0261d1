"""Imports pyzmq or fails with one clear message, and resolves addresses for it.

Every module of the package that uses the network takes ``zmq`` from here.
"""

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from paramserver.errors import UnsupportedConfiguration

try:
    import zmq as zmq
except ImportError as error:
    raise UnsupportedConfiguration("online training needs pyzmq; install paramserver[online]") from error


def resolve_listen_address(host: str) -> str:
    """Resolve ``simulations.address`` to a numeric address. ZeroMQ resolves no names when it binds.

    Raises:
        UnsupportedConfiguration: the host does not exist, or is the wildcard address, which no client can connect to.

    Example::

        >>> resolve_listen_address("localhost")
        '127.0.0.1'
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnsupportedConfiguration(
            f"simulations.address ({host}) must be an address of rank 0's host ({error.strerror}); correct it"
        ) from error
    address = str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])  # IPv4 first
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise UnsupportedConfiguration(
            f"simulations.address ({host}) must be the one on which clients reach rank 0; give this host's own"
        )
    return f"[{address}]" if ":" in address else address


def receive_parts(router: Any, max_parts: int = sys.maxsize, max_bytes: int = sys.maxsize) -> list[Any] | None:
    """Receive one message of a ROUTER, or without limits of any socket; no wait, no copy, None if there is none.

    A message beyond a limit is read to its end and not kept, its sender is disconnected, and only its first part, the
    routing id, is returned. ZeroMQ delivers a message when its last part has arrived; its own limit, ``maxmsgsize``, is
    for one part. ``max_parts`` is without the routing id, ``max_bytes`` of all parts.
    """
    try:
        frame = router.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    # A message is atomic: once its first part is readable the others are too. Not recv_multipart, which is slower and
    # keeps everything.
    frames = [frame]
    num_bytes, fits = len(frame), True
    while frame.more:
        frame = router.recv(copy=False)
        if not fits:
            continue
        num_bytes += len(frame)
        frames.append(frame)
        if len(frames) > 1 + max_parts or num_bytes > max_bytes:
            fits = False
            del frames[1:]
    if not fits:
        with suppress(zmq.ZMQError):  # the connection has ended
            end_connection(router, frames[0].get(zmq.SRCFD))
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
        return socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise


def end_connection(router: Any, fd: int) -> str | None:
    """End a TCP connection of a bound socket; returns the host of the peer, None if it has ended already.

    A ROUTER has no call for this. Its I/O thread then closes the connection as if the client had.
    """
    with connection_of(router, fd) as connection, suppress(OSError):  # the client may end it at this moment
        if connection is not None:
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

"""Imports pyzmq or fails with one clear message, and resolves addresses for it.

Every module of the package that uses the network takes ``zmq`` from here.
"""

import ipaddress
import os
import socket
from collections.abc import Sequence
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


def receive_parts(router: Any, max_parts: int, max_bytes: int) -> list[Any] | None:
    """Receive one message of a ROUTER without blocking and without a copy; None if there is none.

    A message beyond a limit is read to its end and not kept, its sender is disconnected, and only its first part, the
    routing id, is returned. ZeroMQ delivers a message when its last part has arrived; its own limit, ``maxmsgsize``, is
    for one part.

    Args:
        router: the socket.
        max_parts: without the routing id.
        max_bytes: of all parts.
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
        _disconnect(router, frames[0])
    return frames


def _disconnect(router: Any, frame: Any) -> None:
    """End the TCP connection that a message came from. A ROUTER has no call for this."""
    port = router.last_endpoint.rstrip(b"\0").rpartition(b":")[2].decode()
    try:
        connection = socket.socket(fileno=os.dup(frame.get(zmq.SRCFD)))
    except (OSError, zmq.ZMQError):
        return  # it is closed already
    with connection:
        try:
            # The number of a connection that has ended meanwhile may belong to something else: only one of this socket
            # is shut down. Its I/O thread then closes it as if the client had.
            if str(connection.getsockname()[1]) == port:
                connection.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError):
            return


def peer_host(frames: Sequence[Any]) -> str:
    """The host that a received message came from, for log messages."""
    try:
        return str(frames[0].get("Peer-Address"))
    except (IndexError, AttributeError, zmq.ZMQError):
        return "an unknown host"

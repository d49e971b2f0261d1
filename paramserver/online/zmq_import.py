"""Imports pyzmq or fails with one clear message, and resolves addresses for it.

Every module of the package that uses the network takes ``zmq`` from here.
"""

import ipaddress
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


def peer_host(frames: Sequence[Any]) -> str:
    """The host that a received message came from, for log messages."""
    try:
        return str(frames[0].get("Peer-Address"))
    except (IndexError, AttributeError, zmq.ZMQError):
        return "an unknown host"

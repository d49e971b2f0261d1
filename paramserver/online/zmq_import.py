"""pyzmq, or one sentence that it is not there. Whoever talks over the network here takes ``zmq`` from this module."""

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

from paramserver.errors import UnsupportedConfiguration

try:
    import zmq as zmq
except ImportError as error:
    raise UnsupportedConfiguration("online training needs pyzmq; install paramserver[online]") from error


def listening_host(host: str) -> str:
    """The address of ``simulations.address`` as ZeroMQ wants it, which looks up no names where it listens.

    Raises:
        UnsupportedConfiguration: there is no such host, or it means all addresses, which no client can be told.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnsupportedConfiguration(
            f"simulations.address ({host}) must be an address of rank 0's host ({error.strerror}); correct it"
        ) from error
    address = str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise UnsupportedConfiguration(
            f"simulations.address ({host}) must be the one on which clients reach rank 0; give this host's own"
        )
    return f"[{address}]" if ":" in address else address


def host_of(frames: Sequence[Any]) -> str:
    """From which host a message came, for people."""
    try:
        return str(frames[0].get("Peer-Address"))
    except (IndexError, AttributeError, zmq.ZMQError):
        return "an unknown host"

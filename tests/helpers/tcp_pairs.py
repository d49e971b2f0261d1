"""Both ends of a TCP connection over the loopback interface."""

import socket

TIMEOUT_S = 20.0


def connected_pair():
    """Return two connected sockets, whose calls end after some seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one, other = socket.create_connection(listener.getsockname()), listener.accept()[0]
    one.settimeout(TIMEOUT_S)
    other.settimeout(TIMEOUT_S)
    return one, other

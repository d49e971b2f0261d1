"""Both ends of a TCP connection over the loopback interface."""

import socket


def connected_pair():
    """Return two connected sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]

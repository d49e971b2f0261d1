"""The socket on which rank 0's store will answer."""

import socket

from paramserver.errors import UnsupportedConfiguration


def bind_listener(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host:port`` alone; port 0 takes a free one.

    Raises:
        UnsupportedConfiguration: the address is not this machine's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise UnsupportedConfiguration(
            f"cluster.master_port ({port}) on cluster.master_addr ({host}) cannot be opened: "
            f"{error.strerror or error}; choose a free port, and for rank 0 an address of its own host"
        ) from error
    return listener

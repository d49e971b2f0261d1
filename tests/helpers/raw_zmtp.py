"""A client that speaks ZMTP 3.0 (RFC 23) over a plain socket, and so may leave a message unfinished."""

import socket
import struct
from contextlib import contextmanager

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
_MORE, _LONG = 1, 2


class RawClient:
    """A DEALER without keys."""

    def __init__(self, address):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.socket.sendall(_GREETING)
        self._receive(len(_GREETING))
        self.socket.sendall(b"\x04" + bytes([len(_READY)]) + _READY)
        _, size = self._receive(2)
        self._receive(size)

    def _receive(self, size):
        while size:
            received = self.socket.recv(size)
            assert received
            size -= len(received)
            last = received
        return last

    def send_part(self, data, more=True):
        """Send one part; False if the connection has ended."""
        try:
            self.socket.sendall(bytes([_LONG | (_MORE if more else 0)]) + struct.pack(">Q", len(data)) + data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def is_connected(self):
        """Whether the peer has not ended the connection. What it has sent is dropped."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(65536):
                pass
            return False
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        finally:
            self.socket.settimeout(60)


@contextmanager
def raw_clients():
    """``new(address)`` makes one; all are closed at the end."""
    made = []

    def new(address):
        made.append(RawClient(address))
        return made[-1]

    try:
        yield new
    finally:
        for one in made:
            one.socket.close()

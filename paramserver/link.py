"""A stream between two ranks: messages in order, and signs of life. The kernel tells at once that a process is gone."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Collection
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from paramserver.errors import PeerLost

Body = npt.NDArray[np.uint8]

# Kind and length of what follows.
_HEAD = struct.Struct("!BI")
_BEAT = 0

# A sender looks so often whether the peer was found to be lost.
_LOOK_S = 0.2


class Link:
    """One end. One thread sends; another polls, beats and tells the first whom it found to be lost.

    A peer is lost when its connection ends, or when nothing came from it for ``lost_after_s``: no message, no part of
    one, no beat. How long a message takes does not matter.

    Args:
        connection: of TCP, this object's from now on.
        peer: global rank at the other end.
        lost_after_s: ``server.lost_after_s``.
    """

    def __init__(self, connection: socket.socket, peer: int, lost_after_s: float) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.lost_after_s = lost_after_s
        self.lost: PeerLost | None = None
        self.heard = time.monotonic()
        self._socket = connection
        self._writing = threading.Lock()
        self._kind = 0
        self._body: Body | None = None
        self._expect(np.empty(_HEAD.size, np.uint8))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: int, body: bytes | memoryview = b"") -> None:
        """Send a message of ``kind`` (1 to 255); returns when the kernel has it.

        Raises:
            PeerLost: the peer is gone.
        """
        with self._writing:
            for data in (_HEAD.pack(kind, len(body)), body):
                self._write(memoryview(data))

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                wait_ready([self], select.POLLOUT, _LOOK_S)
                if self.lost is not None:
                    raise self.lost from None
            except OSError as error:
                raise self._lose(f"its connection was closed ({error.strerror})") from error

    def poll(self) -> tuple[int, Body] | None:
        """The next message, kind and body; None where it is not all here. Beats are left out."""
        while True:
            if self._left:
                if not self._read():
                    return None
            elif self._body is None:
                self._kind, length = _HEAD.unpack(self._target.data)
                self._body = None if self._kind == _BEAT else np.empty(length, np.uint8)
                self._expect(np.empty(_HEAD.size, np.uint8) if self._body is None else self._body)
            else:
                kind, body, self._body = self._kind, self._body, None
                self._expect(np.empty(_HEAD.size, np.uint8))
                return kind, body

    def _expect(self, target: Body) -> None:
        self._target = target
        self._left = target.data

    def _read(self) -> bool:
        try:
            count = self._socket.recv_into(self._left)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lose(f"its connection was closed ({error.strerror})") from error
        if not count:
            raise self._lose("its connection was closed")
        self.heard = time.monotonic()
        self._left = self._left[count:]
        return True

    def _lose(self, why: str) -> PeerLost:
        self.lost = self.lost or PeerLost(f"rank {self.peer} is lost: {why}; look for its own error")
        return self.lost

    def check_silence(self) -> None:
        """Raises PeerLost: nothing came for too long."""
        if time.monotonic() - self.heard > self.lost_after_s:
            raise self._lose(f"it gave no sign of life for server.lost_after_s ({self.lost_after_s:g} s)")

    def offer(self, kind: int, body: bytes = b"") -> None:
        """Send a few bytes if that is possible at once: not while a message is sent, nor where nobody reads."""
        if self._writing.acquire(blocking=False):
            try:
                # The end of the connection is met by who polls, and told there.
                with suppress(OSError, ValueError):
                    if wait_ready([self], select.POLLOUT, 0.0):  # and so there is room for all of it
                        self._socket.send(_HEAD.pack(kind, len(body)) + body)
            finally:
                self._writing.release()

    def beat(self) -> None:
        """Give a sign of life, unless a message is just being sent, which is one."""
        self.offer(_BEAT)

    def end(self) -> None:
        """End the connection, which the peer notices at once, and whoever waits here."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def wait_ready(links: Collection[Link], events: int, timeout_s: float) -> dict[int, int]:
    """What poll(2) says of the links, by descriptor; those of which it says nothing are left out."""
    poller = select.poll()
    for link in links:
        poller.register(link, events)
    return dict(poller.poll(timeout_s * 1e3))

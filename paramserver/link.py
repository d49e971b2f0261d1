"""A stream between two ranks: messages in order, and signs of life. The kernel tells at once that a process is gone."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from paramserver.errors import PeerLost

Body = npt.NDArray[np.uint8]

# Kind and length of what follows.
_HEAD = struct.Struct("!BI")
_BEAT = _HEAD.pack(0, 0)

# A wait is cut into so many; one that lasted longer than it should says that this process itself stood still.
_SLICES = 10


class Link:
    """One end. One thread sends and receives, another may ``beat`` meanwhile.

    A peer is lost when its connection ends, or when nothing came from it for ``lost_after_s`` while this end waited:
    no message, no part of one, no beat, no room for more. How long a message takes does not matter.

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

    def attend(self) -> None:
        """Silence counts from now on: nobody listened before."""
        self.heard = time.monotonic()

    def send(self, kind: int, body: bytes | memoryview = b"") -> None:
        """Send a message of ``kind`` (1 to 255); returns when the kernel has it.

        Raises:
            PeerLost: the peer is gone or silent, or sends itself what ends the exchange.
        """
        with self._writing:
            for data in (_HEAD.pack(kind, len(body)), body):
                self._write(memoryview(data))

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                self._await_room()
            except OSError as error:
                raise self._lose(f"its connection was closed ({error.strerror})") from error

    def _await_room(self) -> None:
        if self.poll() is not None:  # nobody speaks to one who speaks, unless to end it
            raise PeerLost(f"rank {self.peer} could not take what was sent; look for its own error")
        _await([self], select.POLLIN | select.POLLOUT)

    def poll(self) -> tuple[int, Body] | None:
        """The next message, kind and body; None where it is not all here. Beats are left out."""
        while True:
            if self._left:
                if not self._read():
                    return None
            elif self._body is None:
                self._kind, length = _HEAD.unpack(self._target.data)
                if self._kind:
                    self._body = np.empty(length, np.uint8)
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

    def beat(self) -> None:
        """Give a sign of life, unless a message is just being sent, which is one, or nobody reads."""
        if self._writing.acquire(blocking=False):
            try:
                # The end of the connection is met by who sends or receives, and told there.
                with suppress(OSError, ValueError):
                    if _ready([self], select.POLLOUT, 0.0):  # and so there is room for all of a beat
                        self._socket.send(_BEAT)
            finally:
                self._writing.release()

    def close(self) -> None:
        """End the connection, which the peer notices at once, and so does a thread that waits here."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def messages(links: Collection[Link]) -> Iterator[tuple[Link, int, Body]]:
    """What comes over ``links``, in turn and as it comes, until the caller has taken all out of ``links``.

    Raises:
        PeerLost: one of them ended, or is silent.
    """
    while links:
        idle = True
        for link in list(links):
            if (message := link.poll()) is not None:
                idle = False
                yield link, *message
        if idle:
            _await(links, select.POLLIN)


def _await(links: Collection[Link], events: int) -> None:
    """Until one of ``links`` has something, or a while has passed."""
    slice_s = min(link.lost_after_s for link in links) / _SLICES
    began = time.monotonic()
    ready = _ready(links, events, slice_s)
    late_s = max(time.monotonic() - began - slice_s, 0.0)
    for link in links:
        if ready.get(link.fileno(), 0) & ~select.POLLIN:
            link.attend()  # it took something
        link.heard += late_s  # this process stood still: others cannot be blamed for that time
        if link.fileno() not in ready:
            link.check_silence()


def _ready(links: Collection[Link], events: int, timeout_s: float) -> dict[int, int]:
    poller = select.poll()
    for link in links:
        poller.register(link, events)
    return dict(poller.poll(timeout_s * 1e3))

"""All links of a rank, and the thread that listens to them.

A stream between two ranks: messages in order, and signs of life. The kernel tells at once that a process is gone.

Links between rank 0 and each other rank of a run, made when they have met.
"""

from __future__ import annotations

import logging
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from ipaddress import ip_address
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paramserver.cluster import own_address
from paramserver.config import Config
from paramserver.distributed.rendezvous import Rendezvous
from paramserver.errors import DeadlineExceeded, PeerLost

Body = npt.NDArray[np.uint8]

# Kind and length of what follows.
_HEAD = struct.Struct("!BI")
_BEAT = 0

# A sender looks so often whether the peer was found to be lost.
_LOOK_S = 0.2


class Connection:
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


def wait_ready(links: Collection[Connection], events: int, timeout_s: float) -> dict[int, int]:
    """What poll(2) says of the links, by descriptor; those of which it says nothing are left out."""
    poller = select.poll()
    for link in links:
        poller.register(link, events)
    return dict(poller.poll(timeout_s * 1e3))


_BYE = 255
_LOSS = 254
_CLOSE_S = 5.0


class ControlMessage(NamedTuple):
    """``kind`` and ``body`` as they were sent by rank ``peer``."""

    peer: int
    kind: int
    body: Body


class ControlChannel:
    """Takes what comes over all links as it comes, gives signs of life, and notices who is lost.

    The end of a connection without a goodbye is a loss at any time, silence only while ``attend`` is on: a process may
    have reasons to stand still that are nobody else's business. One thread uses this object beside the one that it has.

    Args:
        links: by the rank at their other end; closed with this object.
        beat_s: ``server.heartbeat_s``.
        on_lost: called once, in the listening thread, when somebody is lost before this rank said goodbye.
    """

    def __init__(self, links: Mapping[int, Connection], beat_s: float, on_lost: Callable[[], None]) -> None:
        self._links = dict(links)
        self._beat_s = beat_s
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._inbox: deque[ControlMessage] = deque()
        self._attentive = False
        self._leaving = False
        self.lost: PeerLost | None = None
        self.moved = 0.0
        self._here = list(self._links.values())
        self._slice_s = min([beat_s, *(link.lost_after_s / 10 for link in self._here)])
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="links", daemon=True)
        self._thread.start()

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(self._links)

    # The owner's thread.

    def send(self, peer: int, kind: int, body: bytes | memoryview = b"") -> None:
        """Send a message of ``kind`` (1 to 253).

        Raises:
            PeerLost: that peer is gone.
        """
        self._links[peer].send(kind, body)
        self.moved = time.monotonic()

    def receive(self) -> ControlMessage:
        """The next message of anybody. ``moved`` is the last moment at which this waited, and all were alive.

        Raises:
            PeerLost: somebody is lost, and nothing came before that.
        """
        with self._changed:
            while not self._inbox:
                if self.lost is not None:
                    raise self.lost
                if not self._thread.is_alive():
                    raise PeerLost("all other ranks have said goodbye, and nothing more comes from them")
                self.moved = time.monotonic()
                self._changed.wait(self._slice_s)
            return self._inbox.popleft()

    def await_loss(self, timeout_s: float) -> None:
        """Where something else failed because somebody is lost: wait until it is known here who."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None, timeout_s)

    def attend(self, attentive: bool) -> None:
        """Whether silence matters from now on. What was before does not count."""
        for link in self._here:
            link.heard = time.monotonic()
        self._attentive = attentive

    def leave(self) -> None:
        """Say goodbye: from now on nobody is missed here, nor this rank elsewhere."""
        self._leaving = True
        for link in self._here:
            if link.lost is None:
                link.send(_BYE)

    def close(self) -> None:
        """End all connections; those who were told no goodbye miss this rank."""
        self._leaving = True
        self._closed.set()
        for link in self._links.values():
            link.end()
        self._thread.join(_CLOSE_S)
        for link in self._links.values():
            link.close()

    # The listening thread.

    def _listen(self) -> None:
        beaten = 0.0
        while self._here and not self._closed.is_set():
            if time.monotonic() - beaten >= self._beat_s:
                beaten = time.monotonic()
                for link in self._here:
                    link.beat()
            self._wait()
            for link in list(self._here):
                try:
                    self._take(link)
                except PeerLost as loss:
                    self._here.remove(link)
                    self._miss(loss)

    def _wait(self) -> None:
        began = time.monotonic()
        wait_ready(self._here, select.POLLIN, self._slice_s)
        late_s = max(time.monotonic() - began - self._slice_s, 0.0)
        for link in self._here:
            link.heard += late_s  # this process stood still: others cannot be blamed for that time

    def _take(self, link: Connection) -> None:
        message = link.poll()
        if message is None:
            if self._attentive:
                link.check_silence()
        elif message[0] == _BYE:
            self._here.remove(link)
        elif message[0] == _LOSS:
            raise PeerLost(bytes(message[1]).decode())
        else:
            with self._changed:
                self._inbox.append(ControlMessage(link.peer, *message))
                self._changed.notify_all()

    def _miss(self, loss: PeerLost) -> None:
        if self._leaving or self.lost is not None:
            return  # it ends later than this rank, which needs nobody any more; or because of the first loss
        for link in self._here:
            link.offer(_LOSS, str(loss).encode())  # others have no connection to the one who is lost
        with self._changed:
            self.lost = loss
            self._changed.notify_all()
        self._on_lost()


_log = logging.getLogger(__name__)
_KEY = "star"
_TOKEN_BYTES = 16
_RANK = struct.Struct("!I")
_HELLO_BYTES = _TOKEN_BYTES + _RANK.size


@contextmanager
def connect_ranks(meeting: Rendezvous, config: Config, on_lost: Callable[[], None]) -> Iterator[ControlChannel]:
    """This rank's links by the rank at their other end: rank 0 has one to each, each other rank one to rank 0.

    Rank 0 listens until all are there, at the address over which it is reached anyway. Each first tells the token that
    the store holds, or is refused.

    Args:
        meeting, config: this rank's.
        on_lost: as for ``ControlChannel``.

    Raises:
        DeadlineExceeded: ranks are missing after ``cluster.timeout_s``.
        PeerLost: rank 0 cannot be reached.
    """
    if meeting.identity.global_rank == 0:
        connections = _accept(meeting, own_address(meeting.identity.master_addr, config.cluster.interface))
    else:
        connections = {0: _connect(meeting)}
    made = {rank: Connection(found, rank, config.server.lost_after_s) for rank, found in connections.items()}
    with closing(ControlChannel(made, config.server.heartbeat_s, on_lost)) as links:
        yield links


def _connect(meeting: Rendezvous) -> socket.socket:
    host, port, token = meeting.ask(_KEY).split()
    try:
        connection = socket.create_connection((host, int(port)), timeout=meeting.timeout_s)
        connection.sendall(bytes.fromhex(token) + _RANK.pack(meeting.identity.global_rank))
    except OSError as error:
        raise PeerLost(
            f"rank 0 cannot be reached at {host}:{port} ({error.strerror or error}); look for its own error, at the "
            "network, and at cluster.interface"
        ) from error
    return connection


def _accept(meeting: Rendezvous, address: str) -> dict[int, socket.socket]:
    token = secrets.token_bytes(_TOKEN_BYTES)
    family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=512) as listener:
        meeting.tell(_KEY, f"{address} {listener.getsockname()[1]} {token.hex()}")
        with Handshake(listener, token, set(range(1, meeting.identity.world_size))) as reception:
            return reception.receive(meeting.timeout_s)


class Handshake:
    """Tells guests from strangers, at a door that many may come to at once. A context manager.

    Args:
        listener: its owner closes it.
        token: what each guest says first, and then its rank.
        missing: who is expected.
    """

    def __init__(self, listener: socket.socket, token: bytes, missing: set[int]) -> None:
        self._listener = listener
        self._token = token
        self._missing = missing
        self._selector = selectors.DefaultSelector()
        self._said: dict[socket.socket, bytes] = {}
        self._guests: dict[int, socket.socket] = {}
        self._selector.register(listener, selectors.EVENT_READ)
        listener.setblocking(False)

    def receive(self, timeout_s: float) -> dict[int, socket.socket]:
        """The connections of all who are expected, by rank.

        Raises:
            DeadlineExceeded: some did not come.
        """
        deadline = time.monotonic() + timeout_s
        while self._missing:
            ready = self._selector.select(max(deadline - time.monotonic(), 0.0))
            if not ready and time.monotonic() > deadline:
                names = ", ".join(str(rank) for rank in sorted(self._missing))
                raise DeadlineExceeded(
                    f"rank {names} did not connect to rank 0 within cluster.timeout_s ({timeout_s:g} s)"
                )
            for key, _ in ready:
                self._meet(key.fileobj)  # type: ignore[arg-type]
        guests, self._guests = self._guests, {}
        return guests

    def _meet(self, ready: socket.socket) -> None:
        if ready is self._listener:
            visitor, _ = ready.accept()
            visitor.setblocking(False)
            self._selector.register(visitor, selectors.EVENT_READ)
            self._said[visitor] = b""
            return
        said = self._said[ready] + _hear(ready, _HELLO_BYTES - len(self._said[ready]))
        if said != self._said[ready] and len(said) < _HELLO_BYTES:
            self._said[ready] = said
            return
        self._selector.unregister(ready)
        del self._said[ready]
        token, rank = said[:_TOKEN_BYTES], _RANK.unpack(said[_TOKEN_BYTES:])[0] if len(said) == _HELLO_BYTES else None
        if secrets.compare_digest(token, self._token) and rank in self._missing:
            self._missing.remove(rank)
            self._guests[rank] = ready
            return
        ready.close()
        _log.warning("somebody who does not belong to this run was refused")

    def __enter__(self) -> Handshake:
        return self

    def __exit__(self, *exception: object) -> None:
        self._selector.close()
        for visitor in (*self._said, *self._guests.values()):
            visitor.close()


def _hear(visitor: socket.socket, most: int) -> bytes:
    """What a visitor said; nothing where it went away."""
    try:
        return visitor.recv(most)
    except OSError:
        return b""

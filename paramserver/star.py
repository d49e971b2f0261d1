"""Links between rank 0 and each other rank of a run, made when they have met."""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from ipaddress import ip_address

from paramserver.cluster import own_address
from paramserver.config import Config
from paramserver.errors import DeadlineExceeded, PeerLost
from paramserver.link import Link
from paramserver.links import Links
from paramserver.meeting import Meeting

_log = logging.getLogger(__name__)
_KEY = "star"
_TOKEN_BYTES = 16
_RANK = struct.Struct("!I")
_HELLO_BYTES = _TOKEN_BYTES + _RANK.size


@contextmanager
def star(meeting: Meeting, config: Config, on_lost: Callable[[], None]) -> Iterator[Links]:
    """This rank's links by the rank at their other end: rank 0 has one to each, each other rank one to rank 0.

    Rank 0 listens until all are there, at the address over which it is reached anyway. Each first tells the token that
    the store holds, or is refused.

    Args:
        meeting, config: this rank's.
        on_lost: as for ``Links``.

    Raises:
        DeadlineExceeded: ranks are missing after ``cluster.timeout_s``.
        PeerLost: rank 0 cannot be reached.
    """
    if meeting.identity.global_rank == 0:
        connections = _accept(meeting, own_address(meeting.identity.master_addr, config.cluster.interface))
    else:
        connections = {0: _connect(meeting)}
    made = {rank: Link(found, rank, config.server.lost_after_s) for rank, found in connections.items()}
    with closing(Links(made, config.server.heartbeat_s, on_lost)) as links:
        yield links


def _connect(meeting: Meeting) -> socket.socket:
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


def _accept(meeting: Meeting, address: str) -> dict[int, socket.socket]:
    token = secrets.token_bytes(_TOKEN_BYTES)
    family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=512) as listener:
        meeting.tell(_KEY, f"{address} {listener.getsockname()[1]} {token.hex()}")
        with Reception(listener, token, set(range(1, meeting.identity.world_size))) as reception:
            return reception.receive(meeting.timeout_s)


class Reception:
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

    def __enter__(self) -> Reception:
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

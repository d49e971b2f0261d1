"""Calls over TCP connections between hosts, for those that a step waits for and those that carry its gradients.

They take less CPU time than over RPC (docs/torch-notes.md, "Messages of RPC on the CPU"): tensors are sent from the
memory that has them, and received into the memory that will. A process that connects authenticates with a token, which
it has read in the store, as calls are pickled; the token is as private as the store, and is not encrypted.
"""

from __future__ import annotations

import logging
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from itertools import islice
from typing import Any

import numpy as np
import torch

from paramserver.distributed.socket_calls import (
    Bytes,
    CallConnection,
    CallerConnection,
    CallServer,
    ConnectionThread,
    pack_apart,
    unpack_apart,
)
from paramserver.platform import end_unacknowledged

log = logging.getLogger("paramserver")

# Of a message: the length of what is pickled, and the number of tensors that follow it. Their lengths are next.
_HEADER = struct.Struct("!QI")
_LENGTH = struct.Struct("!Q")
_TOKEN_BYTES = 16
_ACCEPTED = b"\x01"  # the reply to the token
# Parts that are sent by one system call.
_PARTS = 64
# The thread that reads is woken when so much of a message has arrived, or all of it.
_WAKE_BYTES = 256 * 2**10
_BACKLOG = 512


class _Connection(CallConnection):
    """One end of a TCP connection. ``on_blocked`` is called, in the thread that sends, when some is left to send."""

    def __init__(self, connection: socket.socket, on_blocked: Callable[[Any], None], timeout_s: float) -> None:
        super().__init__(connection)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Before a call that waits for a reply gives up, so that it is sent again over RPC.
        end_unacknowledged(connection, timeout_s / 4)
        self.token = b""  # what was received of it
        self._on_blocked = on_blocked
        self._unsent: deque[Bytes] = deque()
        self._received: list[Any] = []
        self._wake_bytes = 1  # without which the socket is not readable
        self._targets = self._read_messages()
        self._unfilled = next(self._targets)

    @property
    def is_unknown(self) -> bool:
        return len(self.token) < _TOKEN_BYTES

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, value: Any) -> None:
        self.raise_if_ended()
        head, memory = pack_apart(value)
        lengths = b"".join(_LENGTH.pack(part.nbytes) for part in memory)
        first = b"".join((_HEADER.pack(len(head), len(memory)), lengths, head))
        with self._lock:
            self.raise_if_ended()
            was_blocked = bool(self._unsent)
            self._unsent += [np.frombuffer(first, np.uint8), *memory]
            if not was_blocked:
                self._send_unsent()
            is_blocked = bool(self._unsent)
        if is_blocked and not was_blocked:
            self._on_blocked(self)

    def flush(self) -> None:
        with self._lock:
            self._send_unsent()

    def _send_unsent(self) -> None:
        with suppress(BlockingIOError):
            while self._unsent:
                sent = self._socket.sendmsg([part.data for part in islice(self._unsent, _PARTS)])
                while sent and sent >= self._unsent[0].nbytes:
                    sent -= self._unsent.popleft().nbytes
                if sent:
                    self._unsent[0] = self._unsent[0][sent:]

    def send_accepted(self) -> None:
        """Reply to the token."""
        self._socket.sendall(_ACCEPTED)

    def receive(self) -> list[Any]:
        with suppress(BlockingIOError):
            while not self._received:
                while self._unfilled.size:
                    if not (count := self._socket.recv_into(self._unfilled.data)):
                        raise ConnectionError("the other end has closed the connection")
                    self._unfilled = self._unfilled[count:]
                self._unfilled = next(self._targets)
        received, self._received = self._received, []
        wanted = 1 if received else min(max(self._unfilled.size, 1), _WAKE_BYTES)
        if wanted != self._wake_bytes:
            self._wake_bytes = wanted
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
        return received

    def _read_messages(self) -> Iterator[Bytes]:
        """Yield, one after the other, the memory that is to be filled next."""
        while True:
            yield (header := np.empty(_HEADER.size, np.uint8))
            size, count = _HEADER.unpack(header.data)
            yield (lengths := np.empty(count * _LENGTH.size, np.uint8))
            yield (head := np.empty(size, np.uint8))
            memory = [torch.empty(length, dtype=torch.uint8) for (length,) in _LENGTH.iter_unpack(lengths.data)]
            yield from (part.numpy() for part in memory)
            self._received.append(unpack_apart(head.tobytes(), memory))
            del head, memory  # the reader may release them before the next message

    def receive_token(self) -> bool:
        """Return whether the token is complete, of which no byte more is read."""
        with suppress(BlockingIOError):
            while self.is_unknown:
                if not (received := self._socket.recv(_TOKEN_BYTES - len(self.token))):
                    raise ConnectionError("the other end has closed the connection")
                self.token += received
        return not self.is_unknown


class TcpCallServer(CallServer[_Connection]):
    """Runs handlers for callers of any host. A context manager; ``listen`` inside ``with``.

    A connection that has not authenticated after ``timeout_s`` is closed.
    """

    thread_name = "calls-tcp"

    def __init__(self, handle: Callable[..., torch.futures.Future[Any]], timeout_s: float) -> None:
        super().__init__(handle, timeout_s)
        self._token = secrets.token_bytes(_TOKEN_BYTES)

    def listen(self, address: str) -> str:
        """Listen at an address of this host; return what ``TcpCaller.connect`` needs, for members of the run only.

        Raises:
            OSError: there is no such address here.
        """
        family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self._listen(listener)
        return f"{address} {listener.getsockname()[1]} {self._token.hex()}"

    def _accepted(self, connection: socket.socket) -> _Connection:
        return _Connection(connection, self._on_blocked, self._timeout_s)

    def _on_no_descriptor(self, error: OSError, has_freed: bool) -> None:
        if not has_freed:
            log.warning("calls of trainers that join from now on are sent over RPC: %s", error)
            self._close_listener()

    def _read(self, connection: _Connection) -> None:
        if connection.is_unknown:
            if not connection.receive_token():
                return
            # In constant time: the time of a reply must not reveal how much of a token is right.
            if not secrets.compare_digest(connection.token, self._token):
                log.warning("refused a connection that does not belong to this run")
                raise ConnectionError("another token")
            connection.send_accepted()
        super()._read(connection)


class TcpConnection(CallerConnection, _Connection):
    """The caller's end of a connection to a ``TcpCallServer``.

    Any thread may call. The future of a reply is completed by the thread that reads.
    """

    def send(self, value: Any) -> None:
        try:
            super().send(value)
        except OSError:
            self.shut_down()  # what was sent of the call must not be completed later
            raise


class TcpCaller(ConnectionThread[TcpConnection]):
    """The connections of a process to the ``TcpCallServer`` of others. A context manager."""

    thread_name = "calls-tcp-caller"

    def connect(self, address: str) -> TcpConnection:
        """Connect to a process; ``address`` is what ``TcpCallServer.listen`` returned there.

        Raises:
            OSError: it cannot be reached within ``timeout_s``.
        """
        host, port, token = address.split()
        connection = socket.create_connection((host, int(port)), timeout=self._timeout_s)
        try:
            connection.sendall(bytes.fromhex(token))
            # The kernel completes a connection that no process accepts, over which no call would return.
            if connection.recv(len(_ACCEPTED)) != _ACCEPTED:
                raise ConnectionError("it refused the connection")
            connected = TcpConnection(connection, self._on_blocked, self._timeout_s)
        except OSError:
            connection.close()
            raise
        self._add(connected)
        return connected

    def _on_value(self, connection: TcpConnection, value: Any) -> None:
        connection.complete(*value)

    def _on_end(self, connection: TcpConnection) -> None:
        if connection.fail():
            log.warning("a TCP connection to a server has ended; calls continue over RPC")

"""Calls between two processes of one host over a unix socket, for those that a step waits for.

A round trip over RPC takes about 0.6 ms and, in each of the two processes, 0.3 ms of CPU time (docs/torch-notes.md,
"Default transports spin"); one over a socket takes a twentieth of that, as no thread but the caller's and the server's
takes part.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from paramserver.distributed.socket_calls import CallConnection, CallerConnection, CallServer, pack, unpack
from paramserver.platform import CLOSE_ON_EXEC, memory_file

# A call and its reply are one packet each, which the kernel copies. A longer one is in a file in memory, and its
# descriptor is sent instead: the file has no name, and the kernel frees it with the last process that has it.
MAX_PACKET_BYTES = 64 * 1024
_SEND_BUFFER_BYTES = 4 * MAX_PACKET_BYTES
# As a number: the enum takes 0.03 ms to find the name of an intersection.
_TRUNCATED = int(socket.MSG_CTRUNC)
# At most 2 GiB are written at once.
_WRITE_BYTES = 1 << 30


class _PacketConnection(CallConnection):
    """One end of a connection."""

    def send(self, value: Any) -> None:
        packed = pack(value)
        with self._lock:
            self.raise_if_ended()
            # Without waiting: an OSError if too much is on its way, or no descriptor is left.
            if len(packed) <= MAX_PACKET_BYTES:
                self._socket.send(packed, socket.MSG_DONTWAIT)
                return
            with os.fdopen(memory_file("paramserver-call"), "w+b", buffering=0) as file:
                for first in range(0, len(packed), _WRITE_BYTES):
                    file.write(packed[first : first + _WRITE_BYTES])
                socket.send_fds(self._socket, [b"file"], [file.fileno()], socket.MSG_DONTWAIT)

    def receive(self) -> list[Any]:
        packet = b""
        with suppress(OSError):  # the other end was closed with packets that it had not read
            received, descriptors, flags, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 1, CLOSE_ON_EXEC)
            for descriptor in descriptors:
                with os.fdopen(descriptor, "rb", buffering=0) as file:
                    file.seek(0)  # the sender's position, which is at the end
                    received = file.read()
            # Truncated if no descriptor is left for a long one.
            packet = b"" if flags & _TRUNCATED else received
        if not packet:
            raise ConnectionError("the other end has closed the connection")
        return [unpack(packet)]


class LocalCallServer(CallServer[_PacketConnection]):
    """Runs handlers for callers of this host. A context manager; open inside ``with``."""

    thread_name = "calls-local"

    def __init__(self, handle: Callable[..., torch.futures.Future[Any]], timeout_s: float) -> None:
        super().__init__(handle, timeout_s)
        self._by_caller: dict[str, _PacketConnection] = {}

    def connect(self, caller: str) -> socket.socket:
        """Return the caller's end of a new connection; an earlier one of the same caller ends.

        After the end of the thread it is one that has ended too, so that the caller calls over RPC.
        """
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (own, theirs):
            end.settimeout(None)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        connection = _PacketConnection(own)
        with self._lock:
            earlier, self._by_caller[caller] = self._by_caller.get(caller), connection
        if earlier is not None:
            earlier.shut_down()
        self._add(connection)
        return theirs


class LocalConnection(CallerConnection, _PacketConnection):
    """The caller's end of a connection to a ``LocalCallServer``.

    One thread calls and receives; any other one may ``shut_down``, with which ``receive_until`` returns.
    """

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        connected.settimeout(None)  # the task may have set ``socket.setdefaulttimeout``

    def receive_until(self, awaited: torch.futures.Future[Any]) -> None:
        """Receive replies until ``awaited`` has its own, or the connection ends; complete the futures of all."""
        while self._waiting and not awaited.done():
            try:
                (reply,) = self.receive()
            except ConnectionError:
                self.fail()
            else:
                self.complete(*reply)

"""Calls between two processes of one host over a unix socket, for those that a step waits for.

They reach the same handlers as the calls of ``rpc_calls``. A round trip over RPC takes about 0.6 ms and, in each of the
two processes, 0.3 ms of CPU time (docs/torch-notes.md, "Default transports spin"); one over a socket takes a twentieth
of that, as no thread but the caller's and the server's takes part.

A connection that fails stays closed, and the caller sends its call again over RPC. So nothing depends on it: liveness,
membership and all other calls are those of RPC.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from paramserver.distributed.tensor_pickle import pack, unpack
from paramserver.errors import DeadlineExceeded
from paramserver.platform import CLOSE_ON_EXEC, WakeupFd, memory_file

log = logging.getLogger("paramserver")

# A call and its reply are one packet each, which the kernel copies. A longer one is in a file in memory, and its
# descriptor is sent instead: the file has no name, and the kernel frees it with the last process that has it.
MAX_PACKET_BYTES = 64 * 1024
_SEND_BUFFER_BYTES = 4 * MAX_PACKET_BYTES
# At most 2 GiB are written at once.
_WRITE_BYTES = 1 << 30


def _send_packet(connection: socket.socket, packed: bytes) -> None:
    """Send a value that was packed, without waiting.

    Raises:
        OSError: the connection has ended, or too much is on its way, or no descriptor is left.
    """
    if len(packed) <= MAX_PACKET_BYTES:
        connection.send(packed, socket.MSG_DONTWAIT)
        return
    with os.fdopen(memory_file("paramserver-call"), "w+b", buffering=0) as file:
        for first in range(0, len(packed), _WRITE_BYTES):
            file.write(packed[first : first + _WRITE_BYTES])
        socket.send_fds(connection, [b"file"], [file.fileno()], socket.MSG_DONTWAIT)


def _receive_packet(connection: socket.socket) -> bytes:
    """Return the next packet; an empty one at the end of the connection, or if no descriptor is left for a long one."""
    try:
        packet, descriptors, flags, _ = socket.recv_fds(connection, MAX_PACKET_BYTES, 1, CLOSE_ON_EXEC)
        if flags & socket.MSG_CTRUNC:
            return b""
        for descriptor in descriptors:
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                file.seek(0)  # the sender's position, which is at the end
                packet = file.read()
        return packet
    except OSError:  # the other end was closed with packets that it had not read
        return b""


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


class LocalCallServer:
    """Runs handlers for callers of this host. A context manager; open inside ``with``.

    One thread serves all callers, as handlers do not block. Replies are sent by the thread that completes them.
    ``handle`` runs a handler: class, name and arguments as in ``rpc_calls``; it returns a future that gets no
    exception. Closing may take ``timeout_s``.
    """

    def __init__(self, handle: Callable[..., torch.futures.Future[Any]], timeout_s: float) -> None:
        self._handle = handle
        self._timeout_s = timeout_s
        # Covers both tables and ``_ended``, and each reply: a descriptor that is closed meanwhile could be another file
        # by then.
        self._lock = threading.Lock()
        self._ended = False  # no thread reads any more
        self._by_caller: dict[str, socket.socket] = {}
        self._connections: dict[int, socket.socket] = {}  # by descriptor
        self._closing = threading.Event()
        self._error: BaseException | None = None

    def connect(self, caller: str) -> socket.socket:
        """Return the caller's end of a new connection; an earlier one of the same caller ends.

        After the end of the thread it is one that has ended too, so that the caller calls over RPC.
        """
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (own, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        with self._lock:
            if self._ended:
                own.close()
                return theirs
            if (earlier := self._by_caller.get(caller)) is not None:
                _shut_down(earlier)
            self._by_caller[caller] = self._connections[own.fileno()] = own
            self._selector.register(own, selectors.EVENT_READ)
        return theirs

    def __enter__(self) -> LocalCallServer:
        self._wakeup = WakeupFd()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="local-calls", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """End all connections.

        Raises:
            DeadlineExceeded: the thread did not end in time; it and its connections are abandoned.
            Exception: what ended the thread before, unless another exception is being raised.
        """
        self._closing.set()
        self._wakeup.set()
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the thread of local calls did not end within {self._timeout_s:g} s")
        self._selector.close()
        self._wakeup.close()
        if self._error is not None and exception[0] is None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                for key, _ in self._selector.select():
                    if key.fileobj is not self._wakeup:
                        with self._lock:
                            connection = self._connections[key.fd]
                        self._serve(connection)
        except BaseException as error:
            self._error = error
            log.exception("the thread of local calls ends; trainers continue over RPC")
        finally:
            with self._lock:
                self._ended = True
                for connection in self._connections.values():
                    # Shut down first: a forked child may have it too, and the caller would wait for ever.
                    _shut_down(connection)
                    connection.close()

    def _serve(self, connection: socket.socket) -> None:
        if not (packet := _receive_packet(connection)):
            self._selector.unregister(connection)
            with self._lock:
                del self._connections[connection.fileno()]
                connection.close()
            return
        number, target, kwargs = unpack(packet)
        future = self._handle(*target, **kwargs)
        future.add_done_callback(partial(self._reply, connection, number))

    def _reply(self, connection: socket.socket, number: int, done: torch.futures.Future[Any]) -> None:
        # In any thread, also under the lock of the parameter server: it does not block.
        try:
            packet = pack((number, done.value()))
            with self._lock:
                _send_packet(connection, packet)
        except OSError as error:
            log.debug("a reply does not reach its caller over the socket, which calls again over RPC: %s", error)
            _shut_down(connection)
        except Exception as error:  # noqa: BLE001 - whatever the pickler meets; torch only prints what a callback raises
            log.warning("a reply cannot be pickled, so its caller, which calls again over RPC, gets that: %s", error)
            _shut_down(connection)


class LocalConnection:
    """The caller's end of a connection to a ``LocalCallServer``.

    One thread calls and receives; any other one may ``break_off``.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._number = 0
        self._waiting: dict[int, torch.futures.Future[Any]] = {}

    def call(self, target: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.futures.Future[Any] | None:
        """Send a call; return the future of its reply, or None if it has to be sent over RPC.

        The future fails with a ``RuntimeError`` if the connection ends, as those of RPC do.
        """
        self._number += 1
        try:
            _send_packet(self._socket, pack((self._number, target, kwargs)))
        except OSError:  # the connection has ended, or no descriptor is left
            return None
        future = self._waiting[self._number] = torch.futures.Future()
        return future

    @property
    def is_waiting(self) -> bool:
        """Whether there is a call without a reply."""
        return bool(self._waiting)

    def receive(self) -> None:
        """Wait for the next reply, or for the end of the connection, and complete the futures that it concerns."""
        if packet := _receive_packet(self._socket):
            number, value = unpack(packet)
            self._waiting.pop(number).set_result(value)
            return
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(RuntimeError("the connection to the server's process was closed"))

    def break_off(self) -> None:
        """End the connection; a thread that waits in ``receive`` returns."""
        _shut_down(self._socket)

    def close(self) -> None:
        self._socket.close()

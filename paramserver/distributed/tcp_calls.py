"""Calls over TCP connections between hosts, for those that a step waits for and those that carry its gradients.

They reach the same handlers as the calls of ``rpc_calls``, with less CPU time (docs/torch-notes.md, "Messages of RPC on
the CPU"): tensors are sent from the memory that has them, and received into the memory that will.

A connection that fails stays closed, and the caller sends its call again over RPC. So nothing depends on it: liveness,
membership and all other calls are those of RPC. A process that connects authenticates with a token, which it has read
in the store, as calls are pickled; the token is as private as the store, and is not encrypted.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from paramserver.distributed.tensor_pickle import Bytes, pack_apart, unpack_apart
from paramserver.errors import DeadlineExceeded
from paramserver.platform import WakeupFd, end_unacknowledged

log = logging.getLogger("paramserver")

# Of a message: the length of what is pickled, and the number of tensors that follow it. Their lengths are next.
_HEADER = struct.Struct("!QI")
_LENGTH = struct.Struct("!Q")
_TOKEN_BYTES = 16
_ACCEPTED = b"\x01"  # the reply to the token
_MOST_UNAUTHENTICATED = 256
# Parts that are sent by one system call.
_PARTS = 64
# The thread that reads is woken when so much of a message has arrived, or all of it.
_WAKE_BYTES = 256 * 2**10
_BACKLOG = 512


class _Connection:
    """One end of a connection. One thread reads and flushes, others send; owns the socket.

    ``on_blocked`` is called, in the thread that sends, when the rest of a message is left for ``flush``.
    """

    def __init__(self, connection: socket.socket, on_blocked: Callable[[], None], timeout_s: float) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Before a call that waits for a reply gives up, so that it is sent again over RPC.
        end_unacknowledged(connection, timeout_s / 4)
        self.token = b""  # what was received of it
        self.opened = time.monotonic()
        self._socket = connection
        self._on_blocked = on_blocked
        # Held for a system call: a descriptor that is closed meanwhile could be another file by then.
        self._lock = threading.Lock()
        self._ended = False
        self._unsent: deque[Bytes] = deque()
        self._received: list[Any] = []
        self._wake_bytes = 1  # without which the socket is not readable
        self._targets = self._read_messages()
        self._unfilled = next(self._targets)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, value: Any) -> None:
        """Send a value, without waiting. Memory of its tensors must stay as it is until the other end has it.

        Raises:
            OSError: the connection has ended.
        """
        if self._ended:
            raise ConnectionError("the connection has ended")
        head, memory = pack_apart(value)
        lengths = b"".join(_LENGTH.pack(part.nbytes) for part in memory)
        first = b"".join((_HEADER.pack(len(head), len(memory)), lengths, head))
        with self._lock:
            if self._ended:
                raise ConnectionError("the connection has ended")
            was_blocked = bool(self._unsent)
            self._unsent += [np.frombuffer(first, np.uint8), *memory]
            if not was_blocked:
                self._send_unsent()
            is_blocked = bool(self._unsent)
        if is_blocked and not was_blocked:
            self._on_blocked()

    def flush(self) -> None:
        """Send more of what is left.

        Raises:
            OSError: the connection has ended.
        """
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
        """Return the next value in a list if it is complete; at most one, so that no sender starves the others.

        Raises:
            OSError: the connection has ended.
        """
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
            for part in memory:
                yield part.numpy()
            self._received.append(unpack_apart(head.tobytes(), memory))

    def receive_token(self) -> bool:
        """Return whether the token is complete, of which no byte more is read."""
        with suppress(BlockingIOError):
            while len(self.token) < _TOKEN_BYTES:
                if not (received := self._socket.recv(_TOKEN_BYTES - len(self.token))):
                    raise ConnectionError("the other end has closed the connection")
                self.token += received
        return len(self.token) == _TOKEN_BYTES

    def shut_down(self) -> None:
        """End the connection; the thread that reads it finds out. In any thread."""
        with self._lock, suppress(OSError):  # the other end has ended it
            if not self._ended:
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut_down()  # a forked child may have the socket too
        with self._lock:
            self._ended = True
            self._unsent.clear()
            self._socket.close()


C = TypeVar("C", bound=_Connection)


class _Loop(ABC, Generic[C]):
    """The thread that reads all connections of a process, and sends what could not be sent at once.

    A context manager. Closing may take ``timeout_s``. ``_on_value`` and ``_on_end`` are called in the thread.
    """

    connection_class: type[C]
    end = ""  # of a connection, for the name of the thread

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # Covers the table and ``_ended``.
        self._lock = threading.Lock()
        self._ended = False  # no thread reads any more
        self._connections: list[C] = []
        self._closing = threading.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> Any:
        self._wakeup = WakeupFd()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"tcp-{self.end}", daemon=True)
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
            raise DeadlineExceeded(f"the thread of calls over TCP did not end within {self._timeout_s:g} s")
        self._selector.close()
        self._wakeup.close()
        if self._error is not None and exception[0] is None:
            raise self._error

    def _add(self, connection: socket.socket) -> C:
        """Read a connection from now on. In any thread; after the end of the thread it is one that has ended."""
        added = self.connection_class(connection, self._wakeup.set, self._timeout_s)
        with self._lock:
            if not (ended := self._ended):
                self._connections.append(added)
        if ended:
            added.close()
        self._wakeup.set()
        return added

    @abstractmethod
    def _on_value(self, connection: C, value: Any) -> None:
        """Called with what has arrived."""

    @abstractmethod
    def _on_end(self, connection: C) -> None:
        """Called when a connection has ended."""

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._wait_and_serve()
        except BaseException as error:
            self._error = error
            log.exception("the thread of calls over TCP ends; calls continue over RPC")
        finally:
            with self._lock:
                self._ended = True
                connections, self._connections = self._connections, []
            for connection in connections:
                connection.close()
                self._on_end(connection)
            self._close_listener()

    def _wait_and_serve(self) -> None:
        with self._lock:
            connections = list(self._connections)
        known = self._selector.get_map()
        for connection in connections:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
            if connection.fileno() not in known:
                self._selector.register(connection, events)
            elif known[connection.fileno()].events != events:
                self._selector.modify(connection, events)
        for key, events in self._selector.select(self._poll_s()):
            if key.fileobj is self._wakeup:
                self._wakeup.clear()
            elif isinstance(key.fileobj, self.connection_class):
                self._serve(key.fileobj, events)
            else:
                self._accept()

    def _poll_s(self) -> float | None:
        """Return when to look again, whatever happens; None for no limit."""
        return None

    def _accept(self) -> None:
        """Accept a connection at the listener, if this process has one."""

    def _close_listener(self) -> None:
        """Accept no more connections."""

    def _serve(self, connection: C, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            if events & selectors.EVENT_READ:
                self._read(connection)
        except OSError as error:
            log.debug("a connection for calls over TCP has ended: %s", error)
            self._remove(connection)
        except Exception:
            log.exception("a connection for calls over TCP ends, with what it received; its calls continue over RPC")
            self._remove(connection)

    def _read(self, connection: C) -> None:
        for value in connection.receive():
            self._on_value(connection, value)

    def _remove(self, connection: C) -> None:
        self._selector.unregister(connection)
        with self._lock:
            self._connections.remove(connection)
        connection.close()
        self._on_end(connection)


class TcpCallServer(_Loop[_Connection]):
    """Runs handlers for callers of any host. A context manager; ``listen`` inside ``with``.

    One thread serves all callers, as handlers do not block. Replies are sent by the thread that completes them.
    ``handle`` runs a handler: class, name and arguments as in ``rpc_calls``; it returns a future that gets no
    exception. A connection that has not authenticated after ``timeout_s`` is closed.
    """

    connection_class = _Connection
    end = "server"

    def __init__(self, handle: Callable[..., torch.futures.Future[Any]], timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._handle = handle
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener: socket.socket | None = None

    def listen(self, address: str) -> str:
        """Listen at an address of this host; return what ``TcpCaller.connect`` needs, for members of the run only.

        Raises:
            OSError: there is no such address here.
        """
        family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)
        self._wakeup.set()
        return f"{address} {listener.getsockname()[1]} {self._token.hex()}"

    def _unauthenticated(self) -> list[_Connection]:
        with self._lock:
            return [one for one in self._connections if len(one.token) < _TOKEN_BYTES]

    def _poll_s(self) -> float | None:
        """Close what has not authenticated in time, or the oldest of too many; return when to look again."""
        unauthenticated, now = self._unauthenticated(), time.monotonic()
        for one in unauthenticated:
            if now - one.opened > self._timeout_s:
                self._remove(one)
        for one in unauthenticated[:-_MOST_UNAUTHENTICATED]:
            if one.fileno() >= 0:
                self._remove(one)
        return self._timeout_s if unauthenticated else None

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has ended already
        except OSError as error:  # no descriptor is left
            unauthenticated = self._unauthenticated()
            for one in unauthenticated:
                self._remove(one)
            if not unauthenticated:
                log.warning("calls of trainers that join from now on are sent over RPC: %s", error)
                self._close_listener()
            return
        self._add(connection)

    def _close_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._selector.unregister(listener)
            listener.close()

    def _read(self, connection: _Connection) -> None:
        if len(connection.token) < _TOKEN_BYTES:
            if not connection.receive_token():
                return
            # In constant time: the time of a reply must not reveal how much of a token is right.
            if not secrets.compare_digest(connection.token, self._token):
                log.warning("refused a connection that does not belong to this run")
                raise ConnectionError("another token")
            connection.send_accepted()
        super()._read(connection)

    def _on_value(self, connection: _Connection, value: Any) -> None:
        number, target, kwargs = value
        future = self._handle(*target, **kwargs)
        future.add_done_callback(partial(_reply, connection, number))

    def _on_end(self, connection: _Connection) -> None:
        """Its caller calls again over RPC, or is lost."""


def _reply(connection: _Connection, number: int, done: torch.futures.Future[Any]) -> None:
    # In any thread, also under the lock of the parameter server: it does not block.
    try:
        connection.send((number, done.value()))
    except OSError as error:
        log.debug("a reply does not reach its caller over TCP, which calls again over RPC: %s", error)
    except Exception as error:  # noqa: BLE001 - whatever the pickler meets; torch only prints what a callback raises
        log.warning("a reply cannot be pickled, so its caller, which calls again over RPC, gets that: %s", error)
        connection.shut_down()


class TcpConnection(_Connection):
    """The caller's end of a connection to a ``TcpCallServer``.

    Any thread may call. The future of a reply is completed by the thread that reads.
    """

    def __init__(self, connection: socket.socket, on_blocked: Callable[[], None], timeout_s: float) -> None:
        super().__init__(connection, on_blocked, timeout_s)
        self._calls = threading.Lock()  # covers the two below
        self._number = 0
        self._waiting: dict[int, torch.futures.Future[Any]] = {}

    def call(self, target: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.futures.Future[Any] | None:
        """Send a call; return the future of its reply, or None if it has to be sent over RPC.

        The future fails with a ``RuntimeError`` if the connection ends, as those of RPC do.
        """
        future: torch.futures.Future[Any] = torch.futures.Future()
        with self._calls:
            self._number += 1
            number = self._number
            self._waiting[number] = future
        try:
            self.send((number, target, kwargs))
        except OSError:
            self.shut_down()  # what was sent of the call must not be completed later
            with self._calls:
                # If it is not there, ``fail`` has completed it.
                return None if self._waiting.pop(number, None) else future
        return future

    def complete(self, number: int, reply: Any) -> None:
        """Complete the future of a call."""
        with self._calls:
            future = self._waiting.pop(number)
        future.set_result(reply)

    def fail(self) -> None:
        """Fail all calls that wait."""
        with self._calls:
            waiting, self._waiting = self._waiting, {}
        if waiting:
            log.warning("a TCP connection to a server has ended; calls continue over RPC")
        for future in waiting.values():
            future.set_exception(RuntimeError("the connection to the server's process was closed"))


class TcpCaller(_Loop[TcpConnection]):
    """The connections of a process to the ``TcpCallServer`` of others. A context manager."""

    connection_class = TcpConnection
    end = "caller"

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
            return self._add(connection)
        except OSError:
            connection.close()
            raise

    def _on_value(self, connection: TcpConnection, value: Any) -> None:
        connection.complete(*value)

    def _on_end(self, connection: TcpConnection) -> None:
        connection.fail()

"""Calls over sockets, without RPC: the thread that reads connections, the server of calls, and calls as bytes.

They reach the same handlers as the calls of ``rpc_calls``. A connection that fails stays closed, and its caller sends
its calls again over RPC. So nothing depends on them: liveness, membership and all other calls are those of RPC. The
thread also serves the segments of shared memory (``transport/segments.py``).
"""

from __future__ import annotations

import copyreg
import io
import logging
import pickle
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paramserver.errors import DeadlineExceeded
from paramserver.platform import WakeupFd

log = logging.getLogger("paramserver")


class CallConnection(ABC):
    """One end of a connection. One thread reads and flushes, others send; owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # Held for a system call: a descriptor that is closed meanwhile could be another file by then.
        self._lock = threading.Lock()
        self._ended = False
        self.opened = time.monotonic()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_unknown(self) -> bool:
        """Whether the other end has not shown yet that it belongs to the run."""
        return False

    @property
    def has_unsent(self) -> bool:
        """Whether some of what was sent is left for ``flush``."""
        return False

    @abstractmethod
    def send(self, value: Any) -> None:
        """Send a value, without waiting. Memory of its tensors must stay as it is until the other end has it.

        Raises:
            OSError: the connection has ended.
        """

    def flush(self) -> None:
        """Send more of what is left.

        Raises:
            OSError: the connection has ended.
        """

    @abstractmethod
    def receive(self) -> list[Any]:
        """Return the next value in a list if it is complete; at most one, so that no sender starves the others.

        Raises:
            OSError: the connection has ended.
        """

    def raise_if_ended(self) -> None:
        if self._ended:
            raise ConnectionError("the connection has ended")

    def shut_down(self) -> None:
        """End the connection; the thread that reads it is woken. In any thread."""
        with self._lock, suppress(OSError):  # the other end has ended it
            if not self._ended:
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut_down()  # a forked child may have the socket too
        with self._lock:
            self._ended = True
            self._socket.close()


class CallerConnection(CallConnection):
    """The caller's end of a connection: it knows the futures of its calls."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
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
        except OSError:  # the connection has ended, or no descriptor is left
            with self._calls:
                # If it is not there, ``fail`` has completed it.
                return None if self._waiting.pop(number, None) else future
        except Exception:  # it cannot be pickled
            with self._calls:
                self._waiting.pop(number, None)
            raise
        return future

    def complete(self, number: int, reply: Any) -> None:
        """Complete the future of a call."""
        with self._calls:
            future = self._waiting.pop(number)
        future.set_result(reply)

    def fail(self) -> int:
        """Fail all calls that wait, as the connection has ended, and return their number."""
        with self._calls:
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(RuntimeError("the connection to the server's process was closed"))
        return len(waiting)


_LOOK_AGAIN_S = 5.0

C = TypeVar("C", bound=CallConnection)


class ConnectionThread(ABC, Generic[C]):
    """The thread that reads connections, and sends what could not be sent at once.

    A context manager. Closing may take ``timeout_s``. ``_on_value`` and ``_on_end`` are called in the thread. With a
    listener it also accepts connections, and closes one that is unknown after ``timeout_s``.
    """

    thread_name: str
    when_it_ends = "calls continue over RPC"
    most_unknown = 256  # connections; of more the oldest is closed

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._listener: socket.socket | None = None
        # Covers the table and ``_ended``.
        self._lock = threading.Lock()
        self._ended = False  # no thread reads any more
        self._connections: dict[int, C] = {}  # by descriptor
        self._blocked: deque[C] = deque()  # that have more to send since the thread was woken
        self._closing = threading.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> Any:
        with ExitStack() as until_started:
            self._wakeup = WakeupFd()
            until_started.callback(self._wakeup.close)
            self._selector = until_started.enter_context(selectors.DefaultSelector())
            self._selector.register(self._wakeup, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._run, name=self.thread_name, daemon=True)
            self._thread.start()
            until_started.pop_all()
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
            raise DeadlineExceeded(f"the thread {self.thread_name} did not end within {self._timeout_s:g} s")
        self._selector.close()
        self._wakeup.close()
        if self._error is not None and exception[0] is None:
            raise self._error

    def _listen(self, listener: socket.socket) -> None:
        """Accept connections from now on, until the end of the thread, which closes the listener."""
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)

    def _add(self, added: C) -> None:
        """Read a connection from now on. In any thread; after the end of the thread the connection is closed."""
        with self._lock:
            if not (ended := self._ended):
                self._connections[added.fileno()] = added
                self._selector.register(added, selectors.EVENT_READ)
        if ended:
            added.close()

    def _on_blocked(self, connection: C) -> None:
        """Send the rest of what is left for ``flush``. In any thread."""
        self._blocked.append(connection)
        self._wakeup.set()

    @abstractmethod
    def _on_value(self, connection: C, value: Any) -> None:
        """Called with what has arrived."""

    @abstractmethod
    def _on_end(self, connection: C) -> None:
        """Called when a connection has ended."""

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                for key, events in self._selector.select(self._close_unknown()):
                    if key.fileobj is self._wakeup:
                        self._on_wakeup()
                    elif (connection := self._connections.get(key.fd)) is not None:
                        self._serve(connection, events)
                    else:
                        self._accept()
        except BaseException as error:
            self._error = error
            log.exception("the thread %s ends; %s", self.thread_name, self.when_it_ends)
        finally:
            with self._lock:
                self._ended = True
                connections, self._connections = self._connections, {}
            for connection in connections.values():
                connection.close()
                self._on_end(connection)
            self._close_listener()

    def _on_wakeup(self) -> None:
        self._wakeup.clear()
        while self._blocked:
            connection = self._blocked.popleft()
            if connection.has_unsent and self._connections.get(connection.fileno()) is connection:
                self._selector.modify(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _unknown(self) -> list[C]:
        with self._lock:
            return [one for one in self._connections.values() if one.is_unknown]

    def _close_unknown(self) -> float | None:
        """Close what is unknown for too long, or the oldest of too many; return when to look again."""
        if self._listener is None:
            return None
        unknown, now = self._unknown(), time.monotonic()
        excess = len(unknown) - self.most_unknown
        for number, one in enumerate(unknown):
            if number < excess or now - one.opened > self._timeout_s:
                self._remove(one)
        # epoll takes no longer limit than 24 days.
        return min(self._timeout_s, _LOOK_AGAIN_S) if unknown else None

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has ended already
        except OSError as error:  # no descriptor is left: unknown connections have them, or the rest of this process
            unknown = self._unknown()
            for one in unknown:
                self._remove(one)
            self._on_no_descriptor(error, bool(unknown))
            return
        self._add(self._accepted(connection))

    def _accepted(self, connection: socket.socket) -> C:
        """Return the connection over a socket that was accepted."""
        raise AssertionError("this process has no listener")

    def _on_no_descriptor(self, error: OSError, has_freed: bool) -> None:
        """Called where a connection cannot be accepted; ``has_freed``: unknown ones were closed."""

    def _close_listener(self) -> None:
        """Accept no more connections."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._selector.unregister(listener)
            # A child that was forked meanwhile has the listener too, so closing it here would leave it accepting.
            with suppress(OSError):  # not every system shuts down a socket that listens
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _serve(self, connection: C, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
                if not connection.has_unsent:
                    self._selector.modify(connection, selectors.EVENT_READ)
            if events & selectors.EVENT_READ:
                self._read(connection)
        except OSError as error:
            log.debug("a connection of the thread %s has ended: %s", self.thread_name, error)
            self._remove(connection)
        except Exception:
            log.exception("a connection ends with what it received; its calls continue over RPC")
            self._remove(connection)

    def _read(self, connection: C) -> None:
        for value in connection.receive():
            self._on_value(connection, value)

    def _remove(self, connection: C) -> None:
        self._selector.unregister(connection)
        with self._lock:
            del self._connections[connection.fileno()]
        connection.close()
        self._on_end(connection)


class CallServer(ConnectionThread[C]):
    """Runs handlers for callers. One thread serves all callers, as handlers do not block.

    Replies are sent by the thread that completes them. ``handle`` runs a handler: class, name and arguments as in
    ``rpc_calls``; it returns a future that gets no exception.
    """

    def __init__(self, handle: Callable[..., torch.futures.Future[Any]], timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._handle = handle

    def _on_value(self, connection: C, value: Any) -> None:
        number, target, kwargs = value
        self._handle(*target, **kwargs).add_done_callback(partial(_reply, connection, number))

    def _on_end(self, connection: C) -> None:
        """Its caller calls again over RPC, or is lost."""


def _reply(connection: CallConnection, number: int, done: torch.futures.Future[Any]) -> None:
    # In any thread, also under the lock of the parameter server: it does not block.
    try:
        connection.send((number, done.value()))
    except OSError as error:
        log.debug("a reply does not reach its caller over the socket, which calls again over RPC: %s", error)
        connection.shut_down()
    except Exception as error:  # noqa: BLE001 - whatever the pickler meets; torch only prints what a callback raises
        log.warning("a reply cannot be pickled, so its caller, which calls again over RPC, gets that: %s", error)
        connection.shut_down()


# Calls and replies as bytes, and the memory of their tensors, which is not copied. torch's own way to pickle a tensor
# writes an archive, which takes longer than a call over a socket.

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""Memory as it is sent. No memoryview: one that is garbage in a cycle ends the process in Python 3.11."""

# A tensor of less is copied into the bytes.
_LEAST_BYTES = 4096


def pack(value: Any) -> bytes:
    """Return a value as bytes, with a copy of its tensors."""
    packed = io.BytesIO()
    pickler = pickle.Pickler(packed, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    return packed.getvalue()


def unpack(packed: bytes) -> Any:
    """Return the value that was packed."""
    return pickle.loads(packed)


def pack_apart(value: Any) -> tuple[bytes, list[Bytes]]:
    """Return a value as bytes, and the memory of its larger tensors, of which nothing is copied."""
    packed = io.BytesIO()
    pickler = _Pickler(packed)
    pickler.dump(value)
    return packed.getvalue(), pickler.memory


def unpack_apart(packed: bytes, memory: Sequence[Tensor]) -> Any:
    """Return the value that was packed; its larger tensors are over ``memory``, which has their bytes."""
    unpickler = _Unpickler(io.BytesIO(packed))
    unpickler.memory = memory
    return unpickler.load()


def _tensor_of(data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def _sparse_of(indices: Tensor, values: Tensor, shape: torch.Size, is_coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)


def _is_expanded(tensor: Tensor) -> bool:
    """Whether one element stands for all."""
    return tensor.numel() > 1 and not any(tensor.stride())


def _expanded_of(element: Tensor, shape: torch.Size) -> Tensor:
    return element.expand(shape)


def _bytes_of(plain: Tensor) -> Bytes:
    memory: Bytes = plain.view(-1).view(torch.uint8).numpy()
    return memory


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.is_sparse:
        return _sparse_of, (tensor._indices(), tensor._values(), tensor.shape, tensor.is_coalesced())
    if _is_expanded(tensor):
        return _expanded_of, (tensor.detach().as_strided((1,), (1,)), tensor.shape)
    plain = _plain(tensor)
    return _tensor_of, (_bytes_of(plain).tobytes(), plain.dtype, plain.shape)


_REDUCERS = {**copyreg.dispatch_table, Tensor: _reduce_tensor}


class _Pickler(pickle.Pickler):
    dispatch_table = _REDUCERS

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.memory: list[Bytes] = []

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not Tensor or value.is_sparse or value.nbytes < _LEAST_BYTES or _is_expanded(value):
            return None
        plain = _plain(value)
        self.memory.append(_bytes_of(plain))
        return len(self.memory) - 1, plain.dtype, plain.shape


class _Unpickler(pickle.Unpickler):
    memory: Sequence[Tensor] = ()

    def persistent_load(self, found: Any) -> Tensor:
        number, dtype, shape = found
        tensor: Tensor = self.memory[number].view(dtype).view(shape)
        return tensor

"""A thread that serves many peers over the network, and its socket: limits, keys, the address of an earlier one."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

from paramserver.config import PublishConfig, SimulationsConfig
from paramserver.errors import TrainingError, UnsupportedConfiguration
from paramserver.online.connections import UnfinishedMessages, receive_parts, resolve_listen_address, zmq
from paramserver.online.protocol import Message
from paramserver.online.security import ServerSecurity
from paramserver.platform import WakeupFd

LINGER_MS = 1000
"""For how long messages may leave after a socket is closed."""

_log = logging.getLogger("paramserver.coordinator")


class RouterSocket:
    """One bound ROUTER socket with its context and keys. Created by one thread, then used and closed by another.

    Peers connect to ``address``, ``tcp://host:port``. Sockets of ``context`` are closed before this one.

    Args:
        host: as ``resolve_listen_address`` returns it.
        port: 0 = any.
        max_parts, max_bytes: the limits of a message, beyond which its sender is disconnected.
        max_total_bytes: of what has begun to arrive, for all connections together; None = no limit.
        max_frame_bytes: of a part of a message; None = ``max_bytes``.

    Raises:
        zmq.ZMQError: the address cannot be bound.
        UnsupportedConfiguration: the keys cannot be read, or pyzmq is missing.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keys: str | None,
        max_parts: int,
        max_bytes: int,
        max_total_bytes: int | None = None,
        max_frame_bytes: int | None = None,
    ) -> None:
        self._max_parts, self._max_bytes = max_parts, max_bytes
        with ExitStack() as opening:
            self.context: zmq.Context[Any] = zmq.Context()
            opening.callback(self.context.term)
            security = opening.enter_context(ServerSecurity(self.context, keys))
            self._router: Any = opening.enter_context(self.context.socket(zmq.ROUTER))
            security.protect(self._router)
            self._router.linger = LINGER_MS
            self._router.sndtimeo = 0  # the thread that serves all peers must not wait for one of them
            # ZeroMQ ends the connection of a larger one before it is in memory.
            self._router.maxmsgsize = max_frame_bytes or max_bytes
            # A peer that reconnects with its routing id replaces its old connection.
            self._router.router_handover = True
            self._router.ipv6 = ":" in host
            self._unfinished = UnfinishedMessages(self._router, max_bytes, max_total_bytes)
            opening.callback(self._unfinished.close)
            self._router.bind(f"tcp://{host}:{port or '*'}")
            self._opened = opening.pop_all()
        endpoint: Any = self._router.last_endpoint
        self.address: str = endpoint.decode().rstrip("\0")

    @classmethod
    def of_section(
        cls,
        section: str,
        config: SimulationsConfig | PublishConfig,
        max_parts: int,
        max_bytes: int,
        last_port: int | None = None,
    ) -> RouterSocket:
        """Open that of a section of the configuration; where that has no port, at the ``last_port`` if it is free.

        Raises:
            UnsupportedConfiguration: the address cannot be bound, the keys cannot be read, or pyzmq is missing.
        """
        host = resolve_listen_address(config.address, f"{section}.address")
        if last_port is not None and not config.port:
            try:
                return cls(host, last_port, config.keys, max_parts, max_bytes, max_bytes)
            except zmq.ZMQError as error:
                _log.warning(
                    "port %d, where clients reached this run, cannot be opened again (%s); they must be started again "
                    "with the new address",
                    last_port,
                    error.strerror,
                )
        try:
            return cls(host, config.port, config.keys, max_parts, max_bytes, max_bytes)
        except zmq.ZMQError as error:
            raise UnsupportedConfiguration(
                f"{section}.port ({config.port}) on {section}.address ({config.address}) cannot be opened: "
                f"{error.strerror}; choose a free port, and an address of rank 0's own host"
            ) from error

    def poll(self, others: Iterable[Any], timeout_s: float, receives: bool = True) -> list[Any]:
        """Wait until a message has arrived, another socket or file descriptor is readable, or the time is over.

        Without ``receives`` messages wait in the socket. Returns those of the ``others`` that are readable: to read one
        that is not costs more than to receive a sample.
        """
        watched = [*others]
        if receives:
            watched += [self._router, self._unfinished.events]
            timeout_s = min(timeout_s, self._unfinished.check_at - time.monotonic())
        found = zmq.zmq_poll([(one, zmq.POLLIN) for one in watched], math.ceil(1000 * max(0.0, timeout_s)))
        return [one for one, _ in found]

    def receive(self, max_messages: int) -> Iterator[list[zmq.Frame]]:
        """Yield the messages that have arrived, up to a number, as routing id and frames; does not block."""
        frames = None
        for _ in range(max_messages):
            if (frames := receive_parts(self._router, self._max_parts, self._max_bytes)) is None:
                break
            self._unfinished.received(frames[0])
            yield frames
        self._unfinished.check(no_message_left=frames is None)

    def send(self, messages: Iterable[Message], copies: bool = True) -> None:
        """Send messages without blocking: a ROUTER drops what it cannot deliver.

        Frames that are not copied must not change any more.
        """
        for peer, frames in messages:
            self._router.send_multipart([peer, *frames], copy=copies)

    def close(self) -> None:
        """Close the socket; messages have a second to leave."""
        self._opened.close()


_Self = TypeVar("_Self", bound="RouterThread")


class RouterThread:
    """Owns a ``RouterSocket`` and the ``thread`` that serves it, which ends within ``timeout_s`` of its close.

    A context manager: on entry it opens the socket, whose ``address`` peers connect to, records its port, and starts
    the thread.
    """

    def __init__(
        self,
        thread: threading.Thread,
        timeout_s: float,
        open_socket: Callable[[], RouterSocket],
        record_port: Callable[[int], None],
    ) -> None:
        self._thread, self._timeout_s = thread, timeout_s
        self._open_socket, self._record_port = open_socket, record_port
        self._closing, self._suspended = threading.Event(), False
        self._router: RouterSocket | None = None

    def __enter__(self: _Self) -> _Self:
        # Bound here and not in the thread: an address that cannot be bound must be raised to the caller. The thread
        # start is the memory barrier that ZeroMQ asks for when a socket changes its thread.
        self._router = self._open_socket()
        self.address = self._router.address
        try:
            self._record_port(int(self.address.rpartition(":")[2]))
        except BaseException:
            self._router.close()
            raise
        self._wakeup = WakeupFd()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def suspend(self) -> None:
        """The run continues with another one in this one's place: at its close it sends no OVER."""
        self._suspended = True

    def close(self) -> None:
        """Send OVER to all peers, and end the thread. Calling it again has no effect.

        Raises:
            TrainingError: the thread has not ended in time.
        """
        if self._router is None:
            return
        self._closing.set()
        if self._thread.is_alive():
            self._wakeup.set()
            self._thread.join(self._timeout_s)
            if self._thread.is_alive():
                raise TrainingError(
                    f"the {self._thread.name} must end within {self._timeout_s:g} s of its close, and has not"
                )
        self._wakeup.close()

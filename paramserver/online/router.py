"""The socket of a thread that serves many peers over the network: limits, keys, and the address of an earlier one."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from paramserver.errors import TrainingError, UnsupportedConfiguration
from paramserver.online.connections import UnfinishedMessages, peer_host, receive_parts, resolve_listen_address, zmq
from paramserver.online.protocol import Message
from paramserver.online.security import ServerSecurity
from paramserver.platform import WakeupFd

_LINGER_MS = 1000

_log = logging.getLogger("paramserver.coordinator")


def end_thread(thread: threading.Thread, wakeup: WakeupFd, timeout_s: float) -> None:
    """Wait for the end of a thread that serves a socket, and is to end; close what wakes it.

    Raises:
        TrainingError: it has not ended in time.
    """
    if thread.is_alive():
        wakeup.set()
        thread.join(timeout_s)
        if thread.is_alive():
            raise TrainingError(f"the {thread.name} must end within {timeout_s:g} s of its close, and has not")
    wakeup.close()


class RouterSocket:
    """One bound ROUTER socket with its context and keys. Created by one thread, then used and closed by another.

    Peers connect to ``address``, ``tcp://host:port``. With ``port`` 0 that is the ``last_port`` if it is free. The
    limits of a message are for all connections together too, of what has begun to arrive.

    Args:
        section: of the configuration, for messages.

    Raises:
        UnsupportedConfiguration: the address cannot be bound, the keys cannot be read, or pyzmq is missing.
    """

    def __init__(
        self,
        section: str,
        address: str,
        port: int,
        keys: str | None,
        max_parts: int,
        max_bytes: int,
        last_port: int | None = None,
    ) -> None:
        host = resolve_listen_address(address, f"{section}.address")
        self._max_parts, self._max_bytes = max_parts, max_bytes
        with ExitStack() as opening:
            context: zmq.Context[Any] = zmq.Context()
            opening.callback(context.term)
            security = opening.enter_context(ServerSecurity(context, keys))
            self._router = opening.enter_context(context.socket(zmq.ROUTER))
            security.protect(self._router)
            self._router.linger = _LINGER_MS
            self._router.sndtimeo = 0  # the thread that serves all peers must not wait for one of them
            self._router.maxmsgsize = self._max_bytes
            # A peer that reconnects with its routing id replaces its old connection.
            self._router.router_handover = True
            self._router.ipv6 = ":" in host
            self._unfinished = UnfinishedMessages(self._router, self._max_bytes, self._max_bytes)
            opening.callback(self._unfinished.close)
            self._bind(section, address, host, port, last_port)
            self._opened = opening.pop_all()
        endpoint: bytes = self._router.getsockopt(zmq.LAST_ENDPOINT)
        self.address = endpoint.decode().rstrip("\0")

    def _bind(self, section: str, address: str, host: str, port: int, last_port: int | None) -> None:
        if last_port is not None and not port:
            try:
                self._router.bind(f"tcp://{host}:{last_port}")
                return
            except zmq.ZMQError as error:
                _log.warning(
                    "port %d, where clients reached this run, cannot be opened again (%s); they must be started again "
                    "with the new address",
                    last_port,
                    error.strerror,
                )
        try:
            self._router.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise UnsupportedConfiguration(
                f"{section}.port ({port}) on {section}.address ({address}) cannot be opened: {error.strerror}; choose "
                "a free port, and an address of rank 0's own host"
            ) from error

    def poll(self, descriptors: Iterable[int], timeout_s: float) -> None:
        """Wait until a message has arrived, a file descriptor is readable, or the time is over."""
        watched: list[Any] = [self._router, self._unfinished.events, *descriptors]
        timeout_s = min(timeout_s, max(0.0, self._unfinished.check_at - time.monotonic()))
        zmq.zmq_poll([(one, zmq.POLLIN) for one in watched], math.ceil(1000 * timeout_s))

    def receive(self, max_messages: int) -> Iterable[tuple[Message, str]]:
        """The messages that have arrived, up to a number, each with the host that it came from; does not block."""
        for _ in range(max_messages):
            frames = receive_parts(self._router, self._max_parts, self._max_bytes)
            if frames is None:
                self._unfinished.check(no_message_left=True)
                return
            self._unfinished.received(frames[0])
            peer, *rest = (frame.bytes for frame in frames)
            yield (peer, rest), peer_host(frames)
        self._unfinished.check(no_message_left=False)

    def send(self, messages: Sequence[Message], copies: bool = True) -> None:
        """Send messages without blocking: a ROUTER drops what it cannot deliver.

        Frames that are not copied must not change any more.
        """
        for peer, frames in messages:
            self._router.send_multipart([peer, *frames], copy=copies)

    def close(self) -> None:
        """Close the socket; messages have a second to leave."""
        self._opened.close()

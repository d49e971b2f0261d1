"""The socket on which rank 0 hears clients and trainers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paramserver.config import SimulationsConfig
from paramserver.errors import UnsupportedConfiguration
from paramserver.online.clerk import Message
from paramserver.online.keys import ServerSecurity
from paramserver.online.zeromq import host_of, listening_host, zmq

# What a trainer tells grows with the simulations that it knows, some 20 bytes for each.
_MOST_BYTES = 64 * 2**20
_LINGER_MS = 1000


class Door:
    """One ROUTER with its context and keys. Opened by one thread, then used and closed by another.

    Args:
        config: address, port and keys.

    Attributes:
        address: where clients and trainers reach it: ``tcp://host:port``.

    Raises:
        UnsupportedConfiguration: it cannot be opened, the keys are none, or pyzmq is missing.
    """

    def __init__(self, config: SimulationsConfig) -> None:
        host = listening_host(config.address)
        self._context: zmq.Context[Any] = zmq.Context()
        self._security: ServerSecurity | None = None
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._security = ServerSecurity(self._context, config.keys)
            self._security.protect(self._router)
            self._router.linger = _LINGER_MS
            self._router.maxmsgsize = _MOST_BYTES
            # Who connects anew under its own name is the same one.
            self._router.router_handover = True
            self._router.ipv6 = ":" in host
            self._bind(host, config)
        except BaseException:
            self.close()
            raise
        endpoint: bytes = self._router.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        self.address = endpoint.decode().rstrip("\0")

    def _bind(self, host: str, config: SimulationsConfig) -> None:
        try:
            self._router.bind(f"tcp://{host}:{config.port or '*'}")
        except zmq.ZMQError as error:
            raise UnsupportedConfiguration(
                f"simulations.port ({config.port}) on simulations.address ({config.address}) cannot be opened: "
                f"{error.strerror}; choose a free port, and an address of rank 0's own host"
            ) from error

    def wait(self, pipes: Iterable[int], timeout_s: float) -> set[int]:
        """Until there is a message, or one of the pipes is ready, or the time is over; which pipes are."""
        watched: list[Any] = [self._router, *pipes]
        ready = zmq.zmq_poll([(one, zmq.POLLIN) for one in watched], round(1000 * timeout_s))
        return {one for one, _ in ready if one is not self._router}

    def messages(self, most: int) -> Iterable[tuple[Message, str]]:
        """Those that are there, up to so many, and from which host each came; does not wait."""
        for _ in range(most):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer, *rest = (frame.bytes for frame in frames)
            yield (peer, rest), host_of(frames)

    def send(self, messages: Sequence[Message]) -> None:
        """What cannot be delivered is dropped: a router never waits."""
        for peer, frames in messages:
            self._router.send_multipart([peer, *frames])

    def close(self) -> None:
        """What was sent has a second to leave."""
        self._router.close()
        if self._security is not None:
            self._security.close()
        self._context.term()

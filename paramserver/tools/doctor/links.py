"""The link between two hosts: whether each can connect to the other, how long a message takes, and how fast it is.

One host listens at the address and interface that a run would choose, the other one connects, and then the other way
round. A message is its size (8 bytes) and as many bytes; the answer to it is the time of the listening host.
"""

from __future__ import annotations

import select
import socket
import statistics
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

CONNECT_S = 5.0
"""For a connection to be accepted, and for an answer."""

PROBE_S = 15.0
"""For all messages of one direction."""

_ACCEPT_S = CONNECT_S + 2.0
DIRECTION_S = _ACCEPT_S + PROBE_S
"""For one direction of a link, whatever happens."""

TOKEN_BYTES = 16
_NUMBER, _TIME = struct.Struct("!Q"), struct.Struct("!d")
_PINGS = 20
_ZEROS = memoryview(bytes(2**20))
_FIRST_BYTES, _MOST_BYTES, _LONG_ENOUGH_S = 64 * 2**10, 256 * 2**20, 0.2


@dataclass(frozen=True)
class Link:
    """What one host measured towards another; ``error`` is empty if everything arrived.

    Attributes:
        source, target: numbers of the hosts.
        round_trip_s: median of a message without content.
        bytes_per_s: of a long message.
        clock_offset_s: how far the clock of the target is ahead.
        connected: the connection was accepted, and small messages arrived.
    """

    source: int
    target: int
    round_trip_s: float | None = None
    bytes_per_s: float | None = None
    clock_offset_s: float | None = None
    error: str = ""
    connected: bool = False


def rounds(items: Sequence[T]) -> Iterator[list[tuple[T, T]]]:
    """Yield each pair once, in rounds in which no item is in two: the circle method for round-robin tournaments."""
    count = len(items) + len(items) % 2
    order = list(range(count))
    for _ in range(count - 1):
        pairs = ((order[i], order[count - 1 - i]) for i in range(count // 2))
        # Of an odd number, the last one stands for a pause.
        yield [(items[min(pair)], items[max(pair)]) for pair in pairs if max(pair) < len(items)]
        order = [order[0], order[-1], *order[1:-1]]


def measure_link(source: int, target: int, address: tuple[str, int], token: bytes) -> Link:
    """Measure the link to a host that calls ``serve_link`` with this token; both hosts are given by number."""
    give_up_at = time.monotonic() + PROBE_S
    try:
        connection = socket.create_connection(address, timeout=CONNECT_S)
    except OSError as error:
        return Link(source, target, error=_reason(error))
    round_trips: list[tuple[float, float]] = []
    with closing(connection):
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token)
            round_trips = [_exchange(connection, 0) for _ in range(_PINGS)]
        except OSError as error:
            return Link(source, target, error=f"accepts a connection and does not answer: {_reason(error)}")
        round_trip_s, offset_s = statistics.median(s for s, _ in round_trips), min(round_trips)[1]
        size, took_s = 0, 0.0
        try:
            while took_s < _LONG_ENOUGH_S and size < _MOST_BYTES and time.monotonic() < give_up_at:
                size = size * 4 or _FIRST_BYTES
                took_s = _exchange(connection, size)[0]
        except OSError as error:
            text = f"small messages arrive, and one of {size // 2**10} KiB does not: {_reason(error)}"
            return Link(source, target, round_trip_s, None, offset_s, text, True)
    return Link(source, target, round_trip_s, size / max(took_s - round_trip_s, 1e-9), offset_s, "", True)


def serve_link(listener: socket.socket, token: bytes) -> bool:
    """Answer the messages of one connection; return whether one with the token came in time."""
    accept_until = time.monotonic() + _ACCEPT_S
    while (left_s := accept_until - time.monotonic()) > 0 and select.select([listener], [], [], left_s)[0]:
        connection, _ = listener.accept()
        with closing(connection):
            connection.settimeout(_ACCEPT_S)  # longer than the other host waits, which reports what failed
            try:
                if _receive(connection, TOKEN_BYTES) != token:
                    continue
                _answer(connection, time.monotonic() + PROBE_S)
            except OSError:
                pass  # the other host reports why
            return True
    return False


def _answer(connection: socket.socket, until: float) -> None:
    buffer = memoryview(bytearray(len(_ZEROS)))
    while time.monotonic() < until and (number := _receive(connection, _NUMBER.size)):
        left = int(_NUMBER.unpack(number)[0])
        if left > _MOST_BYTES:
            return
        while left:
            if not (received := connection.recv_into(buffer[:left])):
                return
            left -= received
        connection.sendall(_TIME.pack(time.time()))


def _exchange(connection: socket.socket, size: int) -> tuple[float, float]:
    """Send a message of so many bytes; return how long the answer took, and how far the other host's clock is ahead."""
    clock, began = time.time(), time.perf_counter()
    connection.sendall(_NUMBER.pack(size))
    for start in range(0, size, len(_ZEROS)):
        connection.sendall(_ZEROS[: size - start])
    answer = _receive(connection, _TIME.size)
    took_s = time.perf_counter() - began
    if not answer:
        raise ConnectionResetError("the connection was closed")
    return took_s, float(_TIME.unpack(answer)[0]) - (clock + took_s / 2)


def _receive(connection: socket.socket, count: int) -> bytes:
    """Return so many bytes; none if the connection ends before."""
    received = b""
    while len(received) < count:
        if not (part := connection.recv(count - len(received))):
            return b""
        received += part
    return received


def _reason(error: OSError) -> str:
    return f"no answer within {CONNECT_S:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)

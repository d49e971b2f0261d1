"""TCP connections between rank 0 and each other rank of a ddp run, next to its collectives.

A rank learns over them within moments that another process is gone or frozen, which gloo notices only at its own
timeout, and parts of a checkpoint are sent over them while the ranks train. :func:`connect_ranks` makes the connections
after the rendezvous, :class:`ControlChannel` owns them and the thread that reads from all of them.
"""

from __future__ import annotations

import logging
import math
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from ipaddress import ip_address
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from paramserver.cluster import chosen_interface, host_and_port, own_address, process_environ
from paramserver.cluster.base import list_numbers
from paramserver.config import Config
from paramserver.distributed.rendezvous import Rendezvous
from paramserver.errors import DeadlineExceeded, Interrupted, MissingRanks, PeerLost

Body = npt.NDArray[np.uint8]

_log = logging.getLogger(__name__)

# Kind of the message, and length of the body that follows.
_HEADER = struct.Struct("!BI")
# Kinds below 252 belong to the users of a channel.
_HEARTBEAT, _OVER, _COMPLETE, _LOSS, _BYE = 0, 252, 253, 254, 255
_RANK = struct.Struct("!I")
# Body of a loss: the rank that is lost, and whether it was asked to end and did not; the reason follows.
_LOST_RANK = struct.Struct("!I?")
# A sender that waits for room checks this often whether the reading thread found the peer to be lost.
_LOST_CHECK_S = 0.2
_CLOSE_S = 5.0

# Each rank authenticates with a token that only members of the run can read, then states its rank.
_KEY = "control-channel"
_TOKEN_BYTES = 16
_HELLO_BYTES = _TOKEN_BYTES + _RANK.size


@contextmanager
def connect_ranks(
    rendezvous: Rendezvous, config: Config, on_lost: Callable[[], None], interrupted: threading.Event
) -> Iterator[ControlChannel]:
    """Connect rank 0 with each other rank, and yield this rank's channel. Called once by all ranks.

    Rank 0 listens only until all ranks are connected, at the address over which it is reached anyway. ``interrupted``
    ends rank 0's wait for the others, and so theirs for rank 0.

    Raises:
        Interrupted: by that event.
        PeerFailed, PeerRefused: another rank failed before it connected.
        DeadlineExceeded: ranks are missing after ``cluster.timeout_s``.
        PeerLost: rank 0 cannot be reached.
    """
    identity, lost_after_s = rendezvous.identity, config.server.lost_after_s
    with closing(ControlChannel(identity.global_rank, config.server.heartbeat_s, on_lost)) as channel:
        if identity.global_rank == 0:

            def check() -> None:
                channel.raise_if_lost()
                if (failure := rendezvous.reported_failure()) is not None:
                    raise failure.error()
                if interrupted.is_set():
                    raise Interrupted("interrupted while waiting for the other ranks")

            address = own_address(identity.master_addr, chosen_interface(process_environ()))
            _accept(rendezvous, address, channel, lost_after_s, check)
            for peer in channel.peers:
                channel.send(peer, _COMPLETE)
        else:
            channel.add(Connection(_connect(rendezvous), 0, lost_after_s))
            channel.receive()  # rank 0 has all ranks; until then it sends heartbeats
        yield channel


def _connect(rendezvous: Rendezvous) -> socket.socket:
    host, port, token = rendezvous.get(_KEY).split()
    try:
        connection = socket.create_connection((host, int(port)), timeout=rendezvous.timeout_s)
        connection.sendall(bytes.fromhex(token) + _RANK.pack(rendezvous.identity.global_rank))
    except OSError as error:
        raise PeerLost(
            f"rank 0 cannot be reached at {host_and_port(host, int(port))} ({error.strerror or error}); look for its "
            "own error, at the network, and at cluster.interface"
        ) from error
    return connection


def _accept(
    rendezvous: Rendezvous, address: str, channel: ControlChannel, lost_after_s: float, check: Callable[[], None]
) -> None:
    token = secrets.token_bytes(_TOKEN_BYTES)
    family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
    missing = set(range(1, rendezvous.identity.world_size))
    with socket.create_server((address, 0), family=family, backlog=512) as listener:
        rendezvous.set(_KEY, f"{address} {listener.getsockname()[1]} {token.hex()}")
        with closing(accept_ranks(listener, token, missing, rendezvous.timeout_s, check)) as arriving:
            try:
                for rank, connection in arriving:
                    channel.add(Connection(connection, rank, lost_after_s))
            except DeadlineExceeded:
                limit = f"cluster.timeout_s ({rendezvous.timeout_s:g} s)"
                channel.report_loss(min(missing), f"it did not connect to rank 0 within {limit}")
                raise


class ControlMessage(NamedTuple):
    """A message of ``kind`` with ``body``, sent by rank ``peer``."""

    peer: int
    kind: int
    body: Body


class ControlChannel:
    """The connections of a rank: messages in order, heartbeats, and detection of lost peers.

    A peer is lost when its connection ends before it left, or when nothing arrived from it for ``lost_after_s``. All
    ranks are informed which one is lost, also that one: a process that was stopped finds out when it continues.

    Threads: the owner's thread sends and receives; one more thread, ``control-channel``, reads all connections and
    sends heartbeats. Connections that were added are closed with this object.
    ``on_lost`` is called in the reading thread when a peer is lost before this rank left, and repeatedly from then on
    until ``close``, as the owner may begin another wait. It must not block.
    """

    def __init__(self, own_rank: int, heartbeat_s: float, on_lost: Callable[[], None]) -> None:
        self._own_rank = own_rank
        self._connections: dict[int, Connection] = {}  # by the rank of the peer
        self._heartbeat_s = heartbeat_s
        self._on_lost = on_lost
        # Guards the inbox and ``lost``. Never held while a socket is used.
        self._changed = threading.Condition()
        self._inbox: deque[ControlMessage] = deque()
        self._leaving = False
        self._sent_over = False
        # Called in the reading thread with what another rank gave to ``send_over``. Must not block.
        self.on_over: Callable[[str, str], None] = lambda reason, limit: None
        self.lost: PeerLost | None = None
        self.stuck = ""  # the lost rank, and why, if it was asked to end and did not; otherwise ""
        self.last_progress = 0.0
        self._active: list[Connection] = []
        self._lost_after_s = math.inf
        self._poll_s = heartbeat_s
        self._closed = threading.Event()
        # Takes ``_changed`` to deliver a message or a loss; a connection's send lock only without waiting. Calls
        # ``on_lost``. Begins with the first connection; ends with the last one, or with close().
        self._thread = threading.Thread(target=self._run, name="control-channel", daemon=True)

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(self._connections)

    # The owner's thread.

    def add(self, connection: Connection) -> None:
        """Add a connection to a peer. From now on this side sends heartbeats on it, and expects them."""
        self._lost_after_s = min(self._lost_after_s, connection.lost_after_s)
        self._poll_s = min(self._poll_s, self._lost_after_s / 10)
        self._connections[connection.peer] = connection
        self._active.append(connection)
        if len(self._connections) == 1:
            self._thread.start()

    def raise_if_lost(self) -> None:
        """Raise ``PeerLost`` if a peer is lost."""
        if self.lost is not None:
            raise self.lost

    def send(self, peer: int, kind: int, body: bytes | memoryview = b"") -> None:
        """Send a message of ``kind`` (1 to 251).

        Raises:
            PeerLost: that peer is gone.
        """
        self._connections[peer].send(kind, body)
        self.last_progress = time.monotonic()

    def receive(self) -> ControlMessage:
        """Wait for the next message of any peer.

        ``last_progress`` is the last moment at which this method waited with all peers alive.

        Raises:
            PeerLost: a peer is lost, and no message arrived before that; or all peers have left.
        """
        with self._changed:
            # Messages first: one that arrived before the loss is still delivered.
            while not self._inbox:
                self.raise_if_lost()
                if not self._thread.is_alive():
                    raise PeerLost("all other ranks have left, so no message can arrive from them")
                self.last_progress = time.monotonic()
                self._changed.wait(self._poll_s)
            return self._inbox.popleft()

    def wait_loss(self, timeout_s: float) -> None:
        """Wait until ``lost`` names the lost peer. Called when another operation, such as a collective, failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None, timeout_s)

    def leave(self) -> None:
        """Announce the end of this rank: from now on neither side treats a closed connection as a loss."""
        self._leaving = True
        for connection in self._active:
            # A peer may have left, and closed its end, while its announcement has not been read here.
            with suppress(PeerLost):
                connection.send(_BYE)

    def close(self) -> None:
        """Close all connections. A peer to which this rank did not announce its end treats that as a loss."""
        self._leaving = True
        self._closed.set()
        for connection in self._connections.values():
            connection.shut_down()  # wakes the thread
        if self._connections:
            self._thread.join(_CLOSE_S)
        for connection in self._connections.values():
            connection.close()

    # The reading thread.

    def _run(self) -> None:
        last_sent, last_pass = 0.0, time.monotonic()
        while (self._active or self.lost is not None) and not self._closed.is_set():
            if time.monotonic() - last_sent >= self._heartbeat_s:
                last_sent = time.monotonic()
                for connection in list(self._active):
                    connection.try_send(_HEARTBEAT)  # a message that is being sent is a sign of life too
            if self._active:
                wait_ready(self._active, select.POLLIN, self._poll_s)
            else:
                self._closed.wait(self._poll_s)
            elapsed_s, last_pass = time.monotonic() - last_pass, time.monotonic()
            # All connections, not only the readable ones: silence and losses found by a sender count too.
            for connection in list(self._active):
                try:
                    self._read_one(connection, elapsed_s)
                except PeerLost:
                    self._active.remove(connection)
                    # The others close their connections to a rank that did not run for so long.
                    rank, why = connection.peer, connection.why_lost
                    if connection.is_closed and elapsed_s > self._lost_after_s:
                        limit = f"server.lost_after_s: {self._lost_after_s:g} s"
                        rank, why = self._own_rank, f"it did not run for {elapsed_s:.3g} s ({limit})"
                    self.report_loss(rank, why)
            if self.lost is not None and not self._leaving:
                self._on_lost()

    def _read_one(self, connection: Connection, elapsed_s: float) -> None:
        """Take at most one message, so that a peer that sends without pause does not starve the others."""
        message = connection.poll()
        if message is None:
            # Of a longer pass, this process was stopped or starved for the rest: no peer is to blame for that.
            connection.count_silence(min(elapsed_s, 2 * self._poll_s))
        elif message[0] == _BYE:
            self._active.remove(connection)
        elif message[0] == _OVER:
            limit, _, reason = bytes(message[1]).decode().partition("\n")
            self.send_over(reason, limit)
            self.on_over(reason, limit)
        elif message[0] == _LOSS:
            body = bytes(message[1])
            rank, is_stuck = _LOST_RANK.unpack_from(body)
            self.report_loss(rank, body[_LOST_RANK.size :].decode(), is_stuck)
        else:
            with self._changed:
                self._inbox.append(ControlMessage(connection.peer, *message))
                self._changed.notify_all()

    def send_over(self, reason: str, limit: str) -> None:
        """Inform all ranks, once, that the limit of a request to stop has passed. May be called from any thread.

        ``limit`` is ``StopLimit.limit_text``.
        """
        if not self._sent_over:
            self._sent_over = True
            for connection in list(self._connections.values()):
                connection.try_send(_OVER, f"{limit}\n{reason}".encode(), _LOST_CHECK_S)

    def report_loss(self, rank: int, why: str, is_stuck: bool = False) -> None:
        """Inform all ranks, and the owner of this channel, that ``rank`` is lost. May be called from any thread.

        ``why`` follows the name of the rank in every error. A rank that is stuck was asked to end, and its limit has
        passed. Any other loss is an error, also after a signal: the supervisor that notices it may end the other ranks
        by one.
        """
        if self._leaving or self.lost is not None:
            return  # the peer ended later than this rank, or because of the first loss
        loss = PeerLost(f"rank {rank} is lost: {why}; look for its own error")
        if rank == self._own_rank:
            loss = PeerLost(
                f"the other ranks ended the run without this one, rank {rank}: {why}; find out what stopped it"
            )
        # Also to the lost rank, which may continue later. The others have no connection to it, except rank 0.
        for connection in list(self._connections.values()):
            connection.try_send(_LOSS, _LOST_RANK.pack(rank, is_stuck) + why.encode(), _LOST_CHECK_S)
        with self._changed:
            self.stuck = f"rank {rank}: {why}" if is_stuck else ""
            self.lost = loss
            self._changed.notify_all()


class Connection:
    """One end of a TCP connection to a peer. One thread sends; another thread polls and sends heartbeats.

    A peer is lost when its connection ends, or when nothing arrived from it for ``lost_after_s``: no message, no part
    of one, no heartbeat. A message may take any time as long as bytes arrive. The connection is owned by this object
    from now on.
    """

    def __init__(self, connection: socket.socket, peer: int, lost_after_s: float) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.lost_after_s = lost_after_s
        self.lost: PeerLost | None = None
        self.why_lost = ""
        self.is_closed = False
        self._silent_s = 0.0
        self._socket = connection
        # Held for a whole message, so that no heartbeat is written into the middle of one.
        self._send_lock = threading.Lock()
        self._received: tuple[int, Body] | None = None
        self._targets = self._read_messages()
        self._unread = next(self._targets)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: int, body: bytes | memoryview = b"") -> None:
        """Send a message of ``kind`` (1 to 255). Returns when the kernel has all of it.

        Raises:
            PeerLost: the peer is gone.
        """
        with self._send_lock:
            for data in (_HEADER.pack(kind, len(body)), body):
                self._write(memoryview(data))

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                wait_ready([self], select.POLLOUT, _LOST_CHECK_S)
                if self.lost is not None:
                    raise self.lost from None
            except OSError as error:
                raise self._mark_closed(error.strerror) from error

    def poll(self) -> tuple[int, Body] | None:
        """Read what has arrived. Return the next message, kind and body, or None while it is incomplete.

        Heartbeats are consumed here.
        """
        while self._received is None:
            if not self._unread.size:
                self._unread = next(self._targets)
            elif not self._read():
                return None
        received, self._received = self._received, None
        return received

    def _read_messages(self) -> Iterator[Body]:
        """Yield, one after the other, the memory that is to be filled next."""
        while True:
            yield (header := np.empty(_HEADER.size, np.uint8))
            kind, length = _HEADER.unpack(header.data)
            if kind != _HEARTBEAT:
                yield (body := np.empty(length, np.uint8))
                self._received = kind, body
                del body  # the reader may release it before the next message

    def _read(self) -> bool:
        try:
            count = self._socket.recv_into(self._unread.data)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._mark_closed(error.strerror) from error
        if not count:
            raise self._mark_closed()
        self._silent_s = 0.0
        self._unread = self._unread[count:]
        return True

    def _mark_closed(self, how: str | None = None) -> PeerLost:
        self.is_closed = True
        return self._mark_lost("its connection was closed" + (f" ({how})" if how else ""))

    def _mark_lost(self, why: str) -> PeerLost:
        if self.lost is None:
            self.why_lost = why
            self.lost = PeerLost(f"rank {self.peer} is lost: {why}; look for its own error")
        return self.lost

    def count_silence(self, seconds: float) -> None:
        """Count time in which nothing arrived; raise ``PeerLost`` once that is ``lost_after_s``."""
        self._silent_s += seconds
        if self._silent_s > self.lost_after_s:
            raise self._mark_lost(f"it gave no sign of life for server.lost_after_s ({self.lost_after_s:g} s)")

    def try_send(self, kind: int, body: bytes = b"", timeout_s: float = 0.0) -> None:
        """Send a few bytes, unless a message is being sent for longer than ``timeout_s``, or the peer does not read.

        Never waits for the peer: the reading thread serves all of them.
        """
        if self._send_lock.acquire(timeout=timeout_s):
            try:
                with suppress(OSError, ValueError):  # poll() reports the end of a connection
                    # POLLOUT means room for far more than these bytes, so send() takes all of them.
                    if wait_ready([self], select.POLLOUT, 0.0):
                        self._socket.send(_HEADER.pack(kind, len(body)) + body)
            finally:
                self._send_lock.release()

    def shut_down(self) -> None:
        """End the connection in both directions, which wakes the peer and every thread that waits here."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def wait_ready(connections: Collection[Connection], events: int, timeout_s: float) -> dict[int, int]:
    """Return the events of poll(2) by file descriptor; connections without events are left out."""
    poller = select.poll()
    for connection in connections:
        poller.register(connection, events)
    return dict(poller.poll(timeout_s * 1e3))


def accept_ranks(
    listener: socket.socket,
    token: bytes,
    missing: set[int],
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> Generator[tuple[int, socket.socket], None, None]:
    """Accept and authenticate ``missing`` ranks at the same time; yield each as it arrives, with its connection.

    A connection that sends nothing, too little or another token keeps no rank from connecting, and is closed, at the
    latest with the generator. The listener is closed by its owner. A rank sends the token first; its number follows.
    ``check`` is called at least every 0.2 s; what it raises ends the wait.

    Raises:
        DeadlineExceeded: ranks are missing after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    pending: dict[socket.socket, bytes] = {}  # with the bytes that each has sent so far
    selector = selectors.DefaultSelector()
    listener.setblocking(False)
    try:
        selector.register(listener, selectors.EVENT_READ)
        while missing:
            check()
            ready = selector.select(min(max(deadline - time.monotonic(), 0.0), _LOST_CHECK_S))
            if not ready and time.monotonic() > deadline:
                names = list_numbers(missing)
                raise MissingRanks(f"rank {names} did not connect to rank 0 within cluster.timeout_s ({timeout_s:g} s)")
            for key, _ in ready:
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    connection.setblocking(False)
                    selector.register(connection, selectors.EVENT_READ)
                    pending[connection] = b""
                    continue
                connection = cast("socket.socket", key.fileobj)
                received = b""
                with suppress(OSError):  # a reset counts as an end
                    # Not a byte more than the hello: what follows belongs to the Connection.
                    received = connection.recv(_HELLO_BYTES - len(pending[connection]))
                pending[connection] += received
                if received and len(pending[connection]) < _HELLO_BYTES:
                    continue
                selector.unregister(connection)
                hello = pending.pop(connection)
                rank = _RANK.unpack(hello[_TOKEN_BYTES:])[0] if len(hello) == _HELLO_BYTES else None
                # In constant time: the time of an answer must not reveal how much of a token is right.
                if secrets.compare_digest(hello[:_TOKEN_BYTES], token) and rank in missing:
                    missing.remove(rank)
                    yield rank, connection  # the caller's from now on
                else:
                    connection.close()
                    _log.warning("refused a connection that does not belong to this run")
    finally:
        selector.close()
        for connection in pending:
            connection.close()

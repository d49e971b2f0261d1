"""For programs that use the model while it is trained: ``from paramserver.subscriber import Subscriber``.

Needs numpy and pyzmq, nothing else::

    with Subscriber("tcp://127.0.0.1:5556") as model:
        weights = model.latest(timeout_s=5)
        while True:
            act(weights["policy.weight"], weights["policy.bias"])
            weights = model.newer_than(weights.version, timeout_s=0) or weights
"""

from __future__ import annotations

import logging
import mmap
import os
import time
import weakref
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from paramserver.client import check_timeout, check_version
from paramserver.cluster.simulation import VARIABLES, SimulationEnvironment
from paramserver.errors import ClientError, RunOver
from paramserver.online.connections import zmq
from paramserver.online.protocol import Header, MalformedMessage, MessageKind
from paramserver.online.sender import ClientConnection, decode_text
from paramserver.online.weights import (
    DIFFERENCE,
    EXACT,
    MAPPED,
    ROUNDED,
    Description,
    MappedFile,
    Version,
    Weights,
    WeightsRequest,
    apply_difference,
    offsets,
)
from paramserver.platform import SHARES_MEMORY, host_number, open_memory_file

NAME = "the publisher of the run"
_POLL_S = 0.25
# Of the time that a caller waits, how much the publisher does: its reply has to arrive within the rest.
_PUBLISHERS_SHARE = 0.8
# A host that is gone is noticed, and connected to again. Heartbeats of ZeroMQ would break off what takes longer to
# arrive than their timeout.
_SOCKET_OPTIONS = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 15_000,
}
_MOST_FAILURES = 3
_LARGEST_NUMBER = 2**32 - 1

_log = logging.getLogger("paramserver.subscriber")


class Subscriber(AbstractContextManager["Subscriber"]):
    """Receives versions of the model that a run with the section ``publish`` trains. For one thread; a context manager.

    It may be created before the run starts, and reconnects by itself. No version is older than the one before, also if
    rank 0 is lost and returns; see ``Version``. Of versions that are made between two calls, the newest is received.

    Args:
        address: ``tcp://host:port``, which the run prints. A simulation that the run starts gives none: address and
            keys are then those of its environment.
        keys: folder of the run's keys, or a client's secret key; required beyond this machine.
        encoding: ``exact``, or ``bfloat16`` to receive floating-point values rounded: half as many bytes for float32,
            and fewer where little has changed since the version before, as only the difference is sent then.

    Raises:
        ClientError: no valid address, encoding or keys.

    Example::

        with Subscriber("tcp://127.0.0.1:5556") as model:
            weights = model.latest(timeout_s=5)
            newer = model.newer_than(weights.version, timeout_s=1)
    """

    def __init__(self, address: str | None = None, *, keys: str | Path | None = None, encoding: str = EXACT) -> None:
        if address is None:
            environment = SimulationEnvironment.from_environ()
            address, keys = environment.publisher, keys or environment.keys
        if address is None:
            raise ClientError(
                "address (None) must be given where the run has not started this process, or does not publish "
                f"({VARIABLES['publisher']} is not set); give the one that the run prints"
            )
        if encoding not in (EXACT, ROUNDED):
            raise ClientError(f"encoding ({encoding}) must be {EXACT} or {ROUNDED}; correct it")
        self._encoding = encoding
        self._newest: Weights | None = None
        self._over: RunOver | None = None
        # The next request may be answered by values in memory; how many times in succession they were not there.
        self._host = host_number() if SHARES_MEMORY and encoding == EXACT else ""
        self._maps, self._failures = bool(self._host), 0
        # Number of the last request, and the number of connections when it was sent; 0 = it has its reply.
        self._number, self._asked_on = 0, 0
        with ExitStack() as stack:
            context: zmq.Context[Any] = zmq.Context()
            stack.callback(context.term)
            for option, value in _SOCKET_OPTIONS.items():
                context.setsockopt(option, value)  # of the sockets that are created next
            self._connection = ClientConnection(context, NAME, address, keys)
            stack.callback(self._connection.close)
            # As for ``SampleSender``: a context that is collected together with its socket would wait for it.
            self._finalizer = weakref.finalize(self, stack.pop_all().close)

    def latest(self, timeout_s: float) -> Weights:
        """Return the newest version that is published, or that can be: one is copied if a subscriber asks.

        Where none is newer within ``timeout_s``, it is the last one that was received.

        Raises:
            ClientError: none was received yet, or the publisher refused the request.
            RunOver: the run has ended.
        """
        have = None if self._newest is None else self._newest.version
        self._request(have, timeout_s, waits=self._newest is None)
        if self._newest is None:
            raise ClientError(
                f"{self._connection} has sent no version of the model within {timeout_s:g} s; see that the run trains, "
                f"has the section publish, and prints this address{self._connection.hint_of_keys()}"
            )
        return self._newest

    def newer_than(self, version: Version, timeout_s: float) -> Weights | None:
        """Return the newest version if it is newer than ``version``; None if there is none within ``timeout_s``.

        With a timeout of 0 it is what has arrived since the last call, which asked for it.

        Raises:
            ClientError: it is no version, or the publisher refused the request.
            RunOver: the run has ended.
        """
        asked, before = Version(*check_version(version)), self._newest
        self._request(asked, timeout_s, waits=before is None or before.version <= asked)
        return self._newest if self._is_newer(asked, before) else None

    def _is_newer(self, than: Version | None, before: Weights | None) -> bool:
        """Return whether the newest version is newer than another one, or of another run than that ``before``."""
        newest = self._newest
        if newest is None or than is None:
            return newest is not None
        return newest.version > than or (before is not None and before.run != newest.run)

    def _request(self, have: Version | None, timeout_s: float, waits: bool) -> None:
        """Ask for a version that is newer than ``have``, and take over what arrives within ``timeout_s``.

        There is one request at a time: replies to many would pile up on a slow connection, and the requests without
        one. ``waits`` includes versions that are not made yet.
        """
        if not self._finalizer.alive:
            raise ClientError("this subscriber is closed; make another one")
        check_timeout(timeout_s)
        deadline = time.monotonic() + timeout_s
        connection, before, is_own = self._connection, self._newest, False
        while True:
            is_answered = self._take_replies() and is_own
            is_done = self._is_newer(have, before) if waits else is_answered
            if self._over is not None and not is_done:
                raise self._over
            left_s = deadline - time.monotonic()
            # Another publisher, after a lost connection, has not received the request. With a timeout of 0 the next
            # call returns what is asked for now.
            if connection.num_connections > self._asked_on and (not is_done or timeout_s == 0):
                self._send(have, max(0.0, _PUBLISHERS_SHARE * left_s), waits)
                self._asked_on, is_own = connection.num_connections, True
            if is_done or left_s <= 0:
                return
            connection.socket.poll(1 + 1000 * min(left_s, _POLL_S), zmq.POLLIN)

    def _send(self, have: Version | None, timeout_s: float, waits: bool) -> None:
        known = self._newest
        if known is not None and (have is None or known.version >= have):
            have = known.version
        request = WeightsRequest(
            "" if known is None else known.run,
            self._encoding,
            timeout_s,
            waits,
            holds=known is not None and known.version == have and self._encoding == ROUNDED,
            host=self._host if self._maps else "",
        )
        generation, step = (0, 0) if have is None else have
        self._number = self._number % _LARGEST_NUMBER + 1
        self._connection.send(Header(MessageKind.GET, generation, step, attempt=self._number), request.pack())

    def _take_replies(self) -> bool:
        """Take over the versions that have arrived; return whether one is the reply to the last request."""
        is_answered = False
        try:
            for header, frames in self._connection.receive():
                if header.kind is MessageKind.REFUSED:
                    self._asked_on = 0
                    raise ClientError(f"{self._connection} refused this subscriber: {decode_text(frames)}")
                taken = header.kind is not MessageKind.WEIGHTS or self._take(
                    Version(header.simulation, header.step), frames
                )
                if header.attempt == self._number and self._asked_on:
                    self._asked_on, is_answered = 0, taken  # otherwise it is asked for again
        except RunOver as over:
            self._over = over
        return is_answered

    def _take(self, version: Version, frames: list[bytes]) -> bool:
        """Take over a version, unless one is known that is as new. Return False if its values are gone."""
        known = self._newest
        data: bytes | memoryview | None
        try:
            about, values = Description.unpack(frames[0]), frames[1:]
            if known is not None and known.run == about.run and known.version >= version:
                return True  # a reply that comes late
            if about.encoding == DIFFERENCE:
                if known is None or about.base != known.version:
                    return True  # it is to what this subscriber had when it asked
                data = apply_difference(known.data, values)
            elif about.encoding == MAPPED and about.file is not None:
                data = _map(about.file, offsets(about.tensors)[1])
                self._maps = data is not None
                self._failures = 0 if self._maps else self._failures + 1
                if data is None:
                    return False
            else:
                data = values[0]
                # After a failure the values were sent; always from now on where none can be mapped, as in another
                # namespace of processes.
                self._maps = bool(self._host) and self._failures < _MOST_FAILURES
            newest = Weights(version, about, data)
        except (MalformedMessage, LookupError) as error:
            raise ClientError(f"{self._connection} answered what cannot be understood: {error}") from error
        if known is not None and known.run != newest.run:
            _log.warning("another run (%s) publishes at %s now", newest.run_name, self._connection.address)
        elif known is not None and not newest.is_current(known.version):
            _log.warning("rank 0 has returned to a checkpoint: versions up to step %d were taken back", known.step)
        self._newest = newest
        return True

    def close(self) -> None:
        """Close the connection. Calling it again has no effect."""
        self._finalizer()

    def __exit__(self, *exception: object) -> None:
        self.close()


def _map(file: MappedFile, size: int) -> memoryview | None:
    """Return values in the memory of the publisher; None if they are not there, or not any more."""
    try:
        descriptor = open_memory_file(file.pid, file.descriptor)
        try:
            if os.fstat(descriptor).st_size != size + len(file.id):
                return None
            mapped = memoryview(mmap.mmap(descriptor, size + len(file.id), prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)
    except OSError:
        return None
    # Another file may have the same number, of a process that this one cannot see, or since the version was dropped.
    return mapped[:size] if bytes(mapped[size:]) == file.id.encode() else None

"""The client's side of the network: connections to the coordinator and to the trainers, and flow control over them.

No thread is started: everything happens inside the calls of the simulation's own thread, and ZeroMQ's I/O thread moves
the bytes.
"""

from __future__ import annotations

import logging
import os
import struct
import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from paramserver.cluster.network import is_loopback
from paramserver.errors import ClientError, RunOver
from paramserver.online.connections import zmq
from paramserver.online.protocol import (
    NO_MORE_SAMPLES,
    Header,
    MalformedMessage,
    MessageKind,
    TrainerDirectory,
    pack_integers,
    unpack_integers,
)
from paramserver.online.security import secure_client_socket

ReceivedMessage = tuple[Header, list[bytes]]

_HELLO_TIMEOUT_S = 60.0
_MAX_LOGGED = 20
# While there is room in the window, replies are received this often: a receive costs more than sending a small sample.
_RECEIVE_INTERVAL_S = 0.1
# Of trainers that have not sent OVER yet when another process has.
_LAST_ACKS_S = 2.0

_logger = logging.getLogger("paramserver.client")


class SampleSender:
    """Sends the samples of one member, at most a window of them in flight to each trainer. For one thread.

    Samples are kept until they are acknowledged. If the connection to a trainer is lost, the sender asks the
    coordinator for that trainer's address, which is another one if the trainer was replaced, and sends them again. So
    it does if the connection to the coordinator was lost and made again: another one may listen there.

    Call ``finish`` after the last sample, and ``close`` in any case, also after an error. ``timeout_s`` limits the
    silence of the coordinator, or of a trainer that is waited for; None = 60 s for the coordinator's first answer, then
    the timeout that the run announces.

    Raises:
        ClientError: the coordinator refused, is silent, or is gone.
        RunOver: the run needs no more samples.
    """

    def __init__(
        self,
        address: str,
        keys: str | Path | None,
        header: Header,
        opening: Sequence[bytes],
        timeout_s: float | None,
        run_started: bool = False,
    ) -> None:
        self._keys, self._header, self._opening = keys, header, opening
        self._trainers: dict[int, TrainerConnection] = {}
        self._logged: set[str] = set()
        self._registered_on = self._num_trainers = 0
        self.sent = self.refused = 0
        self.waited_s = self._receive_at = 0.0
        with ExitStack() as stack:
            self._context: zmq.Context[Any] = zmq.Context()
            stack.callback(self._context.term)
            self._coordinator = CoordinatorConnection(self._context, address, keys, run_started)
            stack.callback(self._coordinator.close)
            self.directory = self._register(timeout_s or _HELLO_TIMEOUT_S)
            stack.callback(_close_all, self._trainers)
            # A context that is garbage-collected together with its sockets waits for them forever: pyzmq closes the
            # sockets that it finds by weak references, which are gone by then. The finalizer keeps both alive until it
            # has run.
            self._finalizer = weakref.finalize(self, stack.pop_all().close)
        # ``_not_sent``: steps that the run had before, and that this client has not sent again.
        self._first_step = self._not_sent = self.directory.first_step
        self._timeout_s = timeout_s or self.directory.timeout_s

    def _register(self, timeout_s: float, limit_s: float | None = None) -> TrainerDirectory:
        hello = self._header.reply(MessageKind.HELLO)
        reply = self._coordinator.request(
            hello, *self._opening, expect=MessageKind.WELCOME, timeout_s=timeout_s, limit_s=limit_s
        )
        self._registered_on = self._coordinator.num_connections
        return self._unpack_directory(reply)

    def _unpack_directory(self, body: list[bytes]) -> TrainerDirectory:
        try:
            directory = TrainerDirectory.unpack(b"".join(body))
        except MalformedMessage as error:
            raise ClientError(f"{self._coordinator} answered what cannot be understood: {error}") from error
        trainers = len(directory.trainers)
        if self._num_trainers not in (0, trainers):  # samples that are kept would be another trainer's now
            raise ClientError(
                f"the run at {self._coordinator.address} must have {self._num_trainers} trainers while a simulation is "
                f"connected, and has {trainers} now; start this simulation again"
            )
        self._num_trainers = trainers
        return directory

    def send(self, step: int, frames: list[Any]) -> None:
        """Send a sample to its trainer; wait first while the window to it is full.

        Raises:
            ClientError: that trainer is gone.
            RunOver: the run needs no more samples.
        """
        index = self.directory.trainer_for(self._header.simulation, step)
        if index not in self._trainers:
            self._trainers[index] = self._new_connection(index)
        trainer = self._trainers[index]
        now = time.monotonic()
        # Also with room in every window: ACKs would pile up, and OVER would be noticed only when a window is full.
        if now >= self._receive_at:
            self._receive_at = now + _RECEIVE_INTERVAL_S
            self._receive(list(self._trainers.values()))
            if self._is_lost(index):
                trainer = self._reconnect(index)
        if trainer.in_flight >= self.directory.window:
            self._receive([trainer])
        if trainer.in_flight >= self.directory.window:
            began = time.monotonic()
            try:
                self._wait([index], self.directory.window - 1)
            finally:
                self.waited_s += time.monotonic() - began
        self._trainers[index].send_sample(step, frames)
        self.sent += 1
        self._not_sent -= step < self._first_step

    def flush(self) -> None:
        """Wait until every sample that was sent is acknowledged by those trainers that the run has now.

        Raises as ``send``.
        """
        for index in list(self._trainers):
            if self._is_lost(index):
                self._reconnect(index)
        self._wait(list(self._trainers), 0)

    def finish(self) -> None:
        """Wait until every sample that was sent is acknowledged, and the coordinator knows that this member is done.

        Raises:
            ClientError: as ``send``.
            RunOver: the run needs no more samples, and not all that were sent are acknowledged.
        """
        try:
            while not self._finish():
                pass  # another coordinator has taken the place of the one that knew this client
        except RunOver:
            if not self._last_acks():
                raise

    def _last_acks(self) -> bool:
        """Return whether all samples are acknowledged once the run is over.

        Each trainer sends OVER after its last ACK, but that of one process may overtake the ACK of another.
        """
        deadline = time.monotonic() + _LAST_ACKS_S
        for trainer in self._trainers.values():
            with suppress(RunOver):
                is_last = False
                while trainer.in_flight and not is_last:
                    # What arrived before the connection has ended is read too: the client may have computed meanwhile.
                    is_last = trainer.is_lost() or time.monotonic() >= deadline
                    if not is_last:
                        trainer.socket.poll(_poll_ms(deadline))
                    self._process(trainer, trainer.receive_acks())
        return not any(trainer.in_flight for trainer in self._trainers.values())

    def _finish(self) -> bool:
        self.flush()
        if self._coordinator_returned():  # and there is no trainer, or it would have been connected to again
            self.directory = self._register(self._timeout_s, limit_s=self._timeout_s)
        try:
            # BYE means that all is acknowledged.
            bye = self._header.reply(MessageKind.BYE, max(self.sent - self.refused, 0) + self._not_sent)
            self._coordinator.request(bye, expect=MessageKind.READY, timeout_s=self._timeout_s, limit_s=self._timeout_s)
        except RunOver:
            raise
        except ClientError:
            if not self._coordinator_returned():
                raise
        return not self._coordinator_returned()

    def close(self) -> None:
        self._finalizer()

    def _new_connection(self, index: int, lost: TrainerConnection | None = None) -> TrainerConnection:
        return TrainerConnection(
            self._context,
            f"trainer {index}",
            self.directory.trainers[index],
            self._keys,
            header=self._header,
            opening=self._opening,
            timeout_s=self._timeout_s,
            window=self.directory.window,
            lost=lost,
        )

    def _is_lost(self, index: int) -> bool:
        """Whether the connection has ended, or the trainer was replaced, or the coordinator may know of a change."""
        trainer = self._trainers[index]
        changed = trainer.is_lost() or trainer.address != self.directory.trainers[index]
        return changed or self._coordinator_returned()

    def _coordinator_returned(self) -> bool:
        """Whether a coordinator listens that may not be the one that knows this client."""
        return self._coordinator.num_connections > self._registered_on

    def _reconnect(self, index: int) -> TrainerConnection:
        """Connect to a trainer again, or to its replacement, and send again what was not acknowledged.

        Raises:
            ClientError: the trainer was not replaced within ``timeout_s``.
            RunOver: the run needs no more samples.
        """
        lost = self._trainers[index]
        deadline = time.monotonic() + self._timeout_s
        # First what it has sent before the connection ended: it may be OVER.
        self._receive([lost])
        _logger.warning("the connection to %s was lost; this client asks the run for its replacement", lost)
        while (left_s := deadline - time.monotonic()) > 0:
            # The reply waits until the trainer has a replacement, if the run knows that it is gone.
            self.directory = self._register(self._timeout_s, limit_s=left_s)
            self._trainers[index] = trainer = self._new_connection(index, self._trainers[index])
            retry_at = min(deadline, time.monotonic() + _RETRY_S)
            while time.monotonic() < retry_at and trainer.address == self.directory.trainers[index]:
                if trainer.is_connected():
                    trainer.start_waiting()
                    return trainer
                self._poll([trainer], retry_at)
                self._receive([trainer])
        raise ClientError(
            f"the connection to {lost} was lost, and it was not replaced within {self._timeout_s:g} s; see the log of "
            "the run"
        )

    def _wait(self, indices: Sequence[int], max_in_flight: int) -> None:
        """Wait until at most ``max_in_flight`` samples are in flight to each of these trainers."""
        for index in indices:
            self._trainers[index].start_waiting()
        while waiting_for := [index for index in indices if self._trainers[index].in_flight > max_in_flight]:
            # Also the connections that are not waited for: what was lost with one of them is sent again now, as these
            # trainers may not store anything before that one has its samples.
            for index in list(self._trainers):
                if self._is_lost(index):
                    self._reconnect(index)
            trainers = list(self._trainers.values())
            poll_until = min([self._trainers[index].keep_alive() for index in waiting_for])
            self._poll(trainers, poll_until)
            self._receive(trainers)

    def _poll(self, trainers: Sequence[TrainerConnection], until: float) -> None:
        # The coordinator is polled too, so that its OVER ends a wait for a trainer.
        sockets = [socket for connection in (self._coordinator, *trainers) for socket in connection.sockets]
        zmq.zmq_poll([(socket, zmq.POLLIN) for socket in sockets], _poll_ms(until))

    def _receive(self, trainers: Sequence[TrainerConnection]) -> None:
        for trainer in trainers:
            self._process(trainer, trainer.receive_acks())
        self._process(self._coordinator, self._coordinator.receive())

    def _process(self, connection: ClientConnection, messages: Iterable[ReceivedMessage]) -> None:
        """Refusals are counted, and each text is logged once. WELCOME has the address of a trainer's replacement."""
        for header, body in messages:
            if header.kind is MessageKind.WELCOME and connection is self._coordinator:
                self.directory = self._unpack_directory(body)
            if header.kind is MessageKind.REFUSED:
                self.refused += 1
                text = f"{connection} refused a message: {decode_text(body)}"
                if text not in self._logged and len(self._logged) < _MAX_LOGGED:
                    self._logged.add(text)
                    _logger.warning("%s", text)


def _close_all(trainers: dict[int, TrainerConnection]) -> None:
    # A function and not a method: a finalizer that refers to its object would keep it alive forever.
    for trainer in trainers.values():
        trainer.close()


def _poll_ms(until: float) -> int:
    # One millisecond more: a poll that ends just before the deadline would be repeated with no time left.
    return max(0, round(1000 * (until - time.monotonic())) + 1)


_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED


class ClientConnection:
    """One DEALER socket to one process of the run. For one thread; closed before the context is terminated.

    ZeroMQ makes its connection again and again without notice, so a second socket has the events. ``name`` is that of
    the peer, for messages.

    Raises:
        ClientError: no valid address, or one beyond loopback without keys.
        UnsupportedConfiguration: the keys cannot be read.
    """

    def __init__(self, context: zmq.Context[Any], name: str, address: str, keys: str | Path | None) -> None:
        if not isinstance(address, str):
            raise ClientError(f"address ({address}) must be a text, tcp://host:port; take the one that the run prints")
        self.name, self.address = name, address
        self._pid = os.getpid()
        self.last_seen_s = time.monotonic()
        self._num_made = 0  # connections, by the events that were read
        self._disconnected_at: float | None = None
        host = address.partition("://")[2].rpartition(":")[0]
        if keys is None and host and not is_loopback(host):
            raise ClientError(
                f"keys (None) must be given with the address {address}, which is beyond this machine; name the folder "
                "of the run's keys"
            )
        with ExitStack() as opening:
            self.socket = context.socket(zmq.DEALER)
            opening.callback(self.socket.close, linger=0)
            # No high-water mark: the window bounds what waits to leave, so that a send never blocks. No linger: a
            # program that ends without close() must not hang.
            self.socket.sndhwm, self.socket.linger = 0, 0
            self.socket.ipv6 = "[" in address
            secure_client_socket(self.socket, keys)
            self._monitor: zmq.Socket[Any] = context.socket(zmq.PAIR)
            opening.callback(self.close)
            # No limit on events: ZeroMQ's I/O thread writes them and serves every socket of the context. With a limit
            # it would block while the simulation computes and reads none.
            self._monitor.rcvhwm = 0
            events = f"inproc://monitor-{self.socket.underlying}"
            self.socket.monitor(events, _EVENTS)  # before connect(), so that no event is missed
            self._monitor.connect(events)
            try:
                self.socket.connect(address)
            except zmq.ZMQError as error:
                raise ClientError(
                    f"address ({address}) must be tcp://host:port ({error.strerror}); take the one that the run prints"
                ) from error
            opening.pop_all()

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        """The sockets to poll while waiting for this peer."""
        return [self.socket]

    @property
    def num_connections(self) -> int:
        """How often the connection was made, at least 1.

        Raises:
            ClientError: as ``check_process``.
        """
        self.check_process()
        self.disconnected_s()
        return max(1, self._num_made)

    def disconnected_s(self) -> float:
        """For how many seconds there has been no connection; 0 while connected, or while the first attempt lasts."""
        now = time.monotonic()
        while not self._monitor.closed and self._monitor.poll(0):
            (event,) = struct.unpack_from("=H", self._monitor.recv_multipart()[0])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_made += 1
                self._disconnected_at = None
            elif self._disconnected_at is None and (self._num_made or event == zmq.EVENT_CONNECT_RETRIED):
                self._disconnected_at = now
        return 0.0 if self._disconnected_at is None else now - self._disconnected_at

    def check_process(self) -> None:
        """Check that this process has made the connection: ZeroMQ's threads are not in a fork of it.

        Raises:
            ClientError: another process has.
        """
        if self._pid != os.getpid():
            raise ClientError(
                f"the connection to {self} must be used by the process that made it ({self._pid}), and this is a fork "
                f"of it ({os.getpid()}); make another one here"
            )

    def hint_of_keys(self) -> str:
        """What else may be wrong where nothing comes: no peer reports that it does not know the keys of another."""
        if self.socket.mechanism != zmq.CURVE:
            return ""
        return ", and that the public key of this client is in the folder clients of its keys"

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"

    def send(self, header: Header, *frames: Any, copy: bool = True) -> None:
        """Send a message without blocking. Frames that are copied may be changed by the caller afterwards.

        Raises:
            ClientError: the peer has refused the connection for good, or this process is a fork.
        """
        self.check_process()
        try:
            self.socket.send_multipart([header.pack(), *frames], zmq.NOBLOCK, copy)
        except zmq.Again as error:
            # Without a high-water mark a send blocks only if there is no connection any more: ZeroMQ does not
            # reconnect after a failed handshake.
            raise ClientError(
                f"{self} has broken off the connection to this client: it is no run, or it does not know this client's "
                "key; correct the address, or the keys on both sides"
            ) from error

    def receive(self) -> Iterator[ReceivedMessage]:
        """Every message that has arrived; does not block.

        Raises:
            ClientError: a message is not of this protocol and version, or this process is a fork.
            RunOver: the run needs no more samples.
        """
        self.check_process()
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.last_seen_s = time.monotonic()
            try:
                header = Header.unpack(frames[0])
            except MalformedMessage as error:
                raise ClientError(f"{self} answered what cannot be understood: {error}") from error
            if header.kind is MessageKind.OVER:
                raise RunOver(decode_text(frames[1:]) or NO_MORE_SAMPLES)
            yield header, frames[1:]

    def close(self) -> None:
        """Close the socket; what has not left is dropped. Calling it again has no effect."""
        if not self._monitor.closed:
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
        self.socket.close(linger=0)


def decode_text(frames: list[bytes]) -> str:
    """The text of OVER and REFUSED."""
    return b" ".join(frames).decode(errors="replace").strip()


_HEARTBEAT_INTERVAL_S = 1.0
# After a lost connection the address of the trainer is asked for this often.
_RETRY_S = 1.0
# Steps in one message, well below what a receiver takes.
_MAX_STEPS = 65_536


class TrainerConnection(ClientConnection):
    """The connection to one trainer, which counts the samples in flight and keeps them until they are released.

    A lost connection is not reestablished: which samples were lost with it is unknown. Another one takes its place,
    sends those that were not released again, and the trainer drops those that it has. It also reports which ones were
    released, so that a trainer's replacement knows what it lacks. ``timeout_s`` limits the silence of the trainer while
    it is waited for. The place of ``lost``, which is closed, is taken.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        name: str,
        address: str,
        keys: str | Path | None,
        *,
        header: Header,
        opening: Sequence[bytes],
        timeout_s: float,
        window: int,
        lost: TrainerConnection | None = None,
    ) -> None:
        self._sent = self._acked = 0
        self._header, self._timeout_s, self._window = header, timeout_s, window
        self._heartbeat_interval_s = min(_HEARTBEAT_INTERVAL_S, timeout_s / 4)
        self._waiting_since = self._heartbeat_at = 0.0
        # Samples in the order in which they were sent: released (their steps), sent and kept, and to be sent again.
        self._released = array("q")
        self._num_released = 0  # on this connection
        self._kept: deque[tuple[int, list[zmq.Frame]]] = deque()
        self._to_resend: deque[tuple[int, list[zmq.Frame]]] = deque()
        super().__init__(context, name, address, keys)
        self.send(header.reply(MessageKind.OPEN), *opening)
        if lost is not None:
            self._take_over(lost)

    def _take_over(self, lost: TrainerConnection) -> None:
        lost.close()
        self._released = lost._released
        for first in range(0, len(self._released), _MAX_STEPS):
            steps = self._released[first : first + _MAX_STEPS]
            self.send(self._header.reply(MessageKind.HAD), pack_integers(steps))
        self._to_resend = lost._kept + lost._to_resend
        self._resend()

    def _resend(self) -> None:
        while self._to_resend and self._sent - self._acked < self._window:
            self._send_sample(*self._to_resend.popleft())

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        return [self.socket] if self._monitor.closed else [self.socket, self._monitor]

    def is_lost(self) -> bool:
        """Whether it cannot be connected, or the connection has ended, also if ZeroMQ has connected again since.

        Raises:
            ClientError: as ``check_process``.
        """
        self.check_process()
        return self.disconnected_s() > 0 or self._num_made > 1

    def is_connected(self) -> bool:
        """Whether the trainer has answered, and the connection has not ended since."""
        return self.disconnected_s() == 0 and self._num_made == 1

    @property
    def in_flight(self) -> int:
        """Samples that were sent, or are to be sent again, and are not acknowledged."""
        return len(self._to_resend) + self._sent - self._acked

    def send_sample(self, step: int, frames: list[Any]) -> None:
        """Send a sample whose arrays the caller may change afterwards. Call it with room in the window."""
        self._send_sample(step, [zmq.Frame(frame, copy=True) for frame in frames])

    def _send_sample(self, step: int, frames: list[zmq.Frame]) -> None:
        # The socket shares the memory of the frames.
        self.send(self._header.reply(MessageKind.SAMPLE, step), *frames, copy=False)
        self._kept.append((step, frames))
        self._sent += 1

    def receive_acks(self) -> list[ReceivedMessage]:
        """Receive all messages, process each ACK, and return the messages that are no ACK.

        Raises:
            ClientError, RunOver: as ``receive``.
        """
        others = []
        for header, body in self.receive():
            if header.kind is not MessageKind.ACK:
                others.append((header, body))
            elif header.simulation == self._header.simulation and header.step <= self._sent:
                # ACKs carry totals, so a repeated or reordered one does no harm.
                self._acked = max(self._acked, header.step)
                try:
                    self._release(min([header.step, *unpack_integers(b"".join(body))]))
                except MalformedMessage as error:
                    raise ClientError(f"{self} answered what cannot be understood: {error}") from error
        self._resend()
        return others

    def _release(self, total: int) -> None:
        while self._num_released < total:
            self._released.append(self._kept.popleft()[0])
            self._num_released += 1

    def start_waiting(self) -> None:
        """Silence of the trainer counts from now on. Before, the simulation computed and received nothing."""
        self._waiting_since = self._heartbeat_at = time.monotonic()

    def keep_alive(self) -> float:
        """Send a heartbeat if one is due; returns the monotonic time at which to call this again.

        Raises:
            ClientError: the trainer is gone.
        """
        now = time.monotonic()
        fails_at = max(self.last_seen_s, self._waiting_since) + self._timeout_s
        if now >= fails_at:
            raise ClientError(
                f"{self} gave no sign of life for {self._timeout_s:g} s; that trainer is gone, see the log of the run"
            )
        if now >= self._heartbeat_at + self._heartbeat_interval_s:
            self._heartbeat_at = now
            self.send(self._header.reply(MessageKind.HEARTBEAT))
        return min(fails_at, self._heartbeat_at + self._heartbeat_interval_s)


_PING_INTERVAL_S = 1.0
# A coordinator that answers PING but not the request is waited for this many times longer than a silent one.
_ALIVE_FACTOR = 10
# After this long without a listener the run is gone. A process that takes over a port is there within a moment.
_GONE_S = 5.0


class CoordinatorConnection(ClientConnection):
    """The connection to the coordinator. It may be created before the run starts.

    No process listens before a run, and none after it. So a client that was never connected waits, and one that was
    connected, or that was started by the run, fails after 5 s without a listener. ``run_started`` is whether this run
    is known to have started.
    """

    def __init__(
        self, context: zmq.Context[Any], address: str, keys: str | Path | None, run_started: bool = False
    ) -> None:
        self._run_started = run_started
        super().__init__(context, "the run", address, keys)

    def request(
        self, header: Header, *frames: Any, expect: MessageKind, timeout_s: float, limit_s: float | None = None
    ) -> list[bytes]:
        """Send a request and return the frames of its reply.

        The coordinator replies to HELLO when all trainers have joined. Until then it is sent a PING each second.

        Raises:
            ClientError: the coordinator refused (with its text), is silent for ``timeout_s``, sends no reply within
                ``limit_s`` (ten times as long, if None), or is gone: for 5 s, or for ``limit_s`` if it is given.
            RunOver: the run needs no more samples.
        """
        self.last_seen_s = pinged_at = began_at = time.monotonic()
        self.send(header, *frames)
        ping_unanswered, connections = expect is MessageKind.PONG, max(1, self._num_made)
        gone_s = _GONE_S if limit_s is None else limit_s
        limit_s = _ALIVE_FACTOR * timeout_s if limit_s is None else limit_s
        while True:
            self.socket.poll(
                _poll_ms(min(pinged_at + _PING_INTERVAL_S, self.last_seen_s + timeout_s, began_at + limit_s)),
                zmq.POLLIN,
            )
            for received, body in self.receive():
                if received.kind is expect:
                    return body
                if received.kind is MessageKind.REFUSED:
                    raise ClientError(f"{self} refused this client: {decode_text(body)}")
                ping_unanswered = ping_unanswered and received.kind is not MessageKind.PONG
            now = time.monotonic()
            self._check_timeouts(now - began_at, limit_s, now - self.last_seen_s, timeout_s, gone_s)
            if now >= pinged_at + _PING_INTERVAL_S:
                pinged_at = now
                # After a reconnect another coordinator may listen, which has not received the request.
                if self._num_made > connections:
                    connections = self._num_made
                    self.send(header, *frames)
                    ping_unanswered = expect is MessageKind.PONG
                # At most one PING in flight: without a listener they would pile up in the socket.
                if not ping_unanswered:
                    ping_unanswered = True
                    self.send(Header(MessageKind.PING))

    def _check_timeouts(
        self, waited_s: float, limit_s: float, silent_s: float, timeout_s: float, gone_s: float
    ) -> None:
        disconnected_s = self.disconnected_s()
        # Its return, if there is one, would come too late.
        gone = disconnected_s >= gone_s or (disconnected_s > 0 and waited_s >= limit_s)
        if gone and (self._run_started or self._num_made):
            raise ClientError(f"{self} is gone, no process has listened there for {disconnected_s:.0f} s; see its log")
        if silent_s >= timeout_s:
            raise ClientError(
                f"{self} gave no sign of life for {timeout_s:g} s; see that it runs and that this is its address"
                f"{self.hint_of_keys()}"
            )
        if waited_s >= limit_s:
            raise ClientError(
                f"{self} lives, but its trainers were not ready within {waited_s:.0f} s; see the log of the run"
            )

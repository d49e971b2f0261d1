"""The receiver of a trainer: the thread that receives samples from clients, and the feeder's interface to it.

The thread receives messages, validates them, puts accepted samples into the ``HandoffQueue``, acknowledges what the
buffer has stored, and reports to the coordinator.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserver.errors import SourceError, UnsupportedConfiguration
from paramserver.online.connections import peer_host, receive_parts, resolve_listen_address, zmq
from paramserver.online.protocol import (
    NO_MORE_SAMPLES,
    Header,
    MalformedMessage,
    MessageKind,
    SimulationReport,
    TrainerJoined,
    first_frame,
    pack_integers,
)
from paramserver.online.received_log import ReceivedLog
from paramserver.online.router import LINGER_MS, RouterSocket
from paramserver.online.security import secure_trainer_socket
from paramserver.online.spec import ReceiverSpec
from paramserver.online.validator import (
    REASONS,
    ClientSession,
    DuplicateSample,
    MessageRefused,
    MessageValidator,
    Outcome,
    Reason,
    SampleAccepted,
    StepsReported,
    describe_sender,
)
from paramserver.online.weights import SampleVersions
from paramserver.platform import WakeupFd

GROUP = 64
"""Maximum of samples that ``SampleReceiver.get`` returns at once."""

# Messages that are received before the other steps of the loop get their turn.
_MAX_MESSAGES_AT_ONCE = 64
_REPORT_INTERVAL_S = 1.0
_EARLY_REPORT_S = 0.05
# A frame of a wrong size is refused with a text. One that is larger than twice the spec's largest field and this costs
# the client its connection: ZeroMQ drops it before it is in memory.
_SPARE_BYTES = 2**20

_log = logging.getLogger("paramserver")


class SampleReceiver:
    """Receives the samples of one trainer in the thread ``receiver-<trainer_index>``.

    Call ``start``, then ``get`` and ``mark_stored`` from one thread, the feeder's, which may block in between: clients
    may have ``simulations.window`` samples in flight each, and are sent an ACK for what was marked as stored. Call
    ``stop`` when no more samples are needed, and ``close`` in any case. Without ``stop`` the clients get no OVER: they
    wait for a receiver that takes this one's place, or for the coordinator's OVER. The thread adds what it accepts to
    the set of ``received_log``; the caller extends its log. ``versions`` are those that samples may have, if any.
    """

    def __init__(self, spec: ReceiverSpec, received_log: ReceivedLog, versions: SampleVersions | None = None) -> None:
        self.spec, self.received_log = spec, received_log
        self._thread = threading.Thread(target=self._run, name=f"receiver-{spec.trainer_index}", daemon=True)
        # Other threads use these four too.
        self._wakeup = WakeupFd()
        self._queue = HandoffQueue(self._wakeup)
        self.stats = ReceiveStats(received_log.counts(), spec.ingest.sample_bytes, spec.trainer_index)
        self.field_statistics = FieldStatistics([field.name for field in spec.ingest.fields])
        # Clients that sent a message within ``timeout_s``, as of the last report. Read by other threads.
        self._num_clients = 0
        # Whether clients and coordinator are informed, at the end, that no more samples are needed.
        self._sends_over = False
        # All that follows is the thread's alone, but for the length of the validator's assembly.
        self._validator = MessageValidator(spec.ingest, received_log, spec.token, versions)
        self._report_interval_s = min(_REPORT_INTERVAL_S, spec.timeout_s / 4)
        self._refusal: str | None = None
        self._ready = self._draining = self._over = False
        self._reports_unanswered = 0
        self._report_at = self._reported_at = self._checked_at = 0.0
        # A dict as an ordered set: one ACK per client and iteration, however many of its samples were processed.
        self._to_ack: dict[ClientSession, None] = {}

    def start(self) -> None:
        """Bind the socket and join the coordinator, in the thread."""
        self._thread.start()

    def get(self, timeout_s: float | None = None) -> list[SampleAccepted] | None:
        """Return the next accepted samples, up to ``GROUP``, in order of arrival.

        An empty list if none arrive within ``timeout_s`` seconds. None at the end: the coordinator reports that the
        last simulation has ended and all samples are returned, or this receiver is closed.

        Raises:
            SourceError: the coordinator refused this trainer or its keys, or is silent.
            UnsupportedConfiguration: the address is not of this machine, or pyzmq is missing.
        """
        return self._queue.get(GROUP, timeout_s)

    def mark_stored(self, n: int) -> None:
        """The buffer has stored the next ``n`` samples that ``get`` returned; their clients are sent an ACK."""
        self._queue.mark_stored(n)

    def counters(self) -> dict[str, Any]:
        """``ReceiveStats.counters``, with ``partial`` (samples of which parts are missing) and ``clients``."""
        return {
            **self.stats.counters(lambda: self._queue.num_stored),
            "partial": len(self._validator.assembly),
            "clients": self._num_clients,
        }

    def stop(self) -> None:
        """Begin to close without waiting; wakes ``get``. The thread sends OVER to all clients and the coordinator."""
        self._sends_over = True  # before the queue is closed, which ends the loop
        self._queue.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread, and wait for that. Calling it again has no effect.

        Raises:
            SourceError: the thread has not ended in time.
        """
        self._queue.close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise SourceError(f"{self._thread.name} must end within {timeout_s:g} s of its close, and has not")
        self._wakeup.close()

    # The thread.

    def _run(self) -> None:
        try:
            # ZeroMQ sockets belong to the thread that opens them, so they are opened here and not in __init__.
            with self._open_sockets():
                self._serve()
        except BaseException as error:  # noqa: BLE001 - raised by get(), in the owner's thread
            self._queue.fail(error)

    def _open_sockets(self) -> ExitStack:
        spec = self.spec
        largest_bytes = max((field.num_bytes for field in spec.ingest.fields), default=0)
        with ExitStack() as opening:
            try:
                self._clients = RouterSocket(
                    resolve_listen_address(spec.host),
                    0,
                    spec.keys,
                    # Header, descriptor, fields and columns of a sample, or header, parameters and secret.
                    max_parts=max(2 + len(spec.ingest.fields) + len(spec.ingest.columns), 3),
                    max_bytes=2 * spec.ingest.sample_bytes + _SPARE_BYTES,
                    max_frame_bytes=2 * largest_bytes + _SPARE_BYTES,
                )
            except zmq.ZMQError as error:
                raise UnsupportedConfiguration(
                    f"trainer {spec.trainer_index} cannot listen on {spec.host} ({error}); correct simulations.address"
                ) from error
            opening.callback(self._clients.close)
            self._coordinator: zmq.Socket[bytes] = opening.enter_context(self._clients.context.socket(zmq.DEALER))
            self._coordinator.linger = LINGER_MS
            self._coordinator.sndtimeo = 0
            self._coordinator.ipv6 = ":" in spec.host
            # With its own routing id the trainer is recognized after a reconnect. It is random, so that no client can
            # take it over.
            self._coordinator.routing_id = b"trainer" + secrets.token_bytes(16)
            # Without a high-water mark a send fails only if there is no connection any more, see _send_to_coordinator.
            self._coordinator.sndhwm = 0
            secure_trainer_socket(self._coordinator, spec.keys)
            self._coordinator.connect(spec.coordinator_address)
            return opening.pop_all()

    def _serve(self) -> None:
        """Serve clients and coordinator until the queue is closed."""
        others = [self._coordinator, self._wakeup.fileno()]
        self._join()
        while not self._queue.closed:
            receives = self._refusal is None  # otherwise messages that are finished stay in the socket
            readable = self._clients.poll(others, self._report_at - time.monotonic(), receives)
            # The order of the steps matters:
            # 1. Clear the wakeup before the queue is read: what is stored in between sets it again and is not missed.
            if self._wakeup.fileno() in readable:
                self._wakeup.clear()
            # 2. Count stored samples before new messages are validated: they free places in the clients' windows.
            self._process_stored()
            # 3. The coordinator before the clients, which may keep the loop busy: its DRAIN and READY come through.
            if self._coordinator in readable:
                self._receive_from_coordinator()
            # 4. A bounded number of messages; poll() returns at once if there are more.
            no_message_left = self._receive_from_clients() if self._refusal is None else True
            # 5. One ACK per client for all of the above, and the report last, so that it includes this iteration.
            self._send_acks()
            self._report()
            # The end: DRAIN was received, no message waits in the socket, and the buffer has stored every sample.
            if self._draining and no_message_left and not self._over and self._queue.is_empty():
                self._over = True
                self._report_at = 0.0  # the final counters, for the summary
                self._queue.finish()
        if not self._sends_over:
            return
        # The buffer may have stored samples since the last iteration; after OVER a client reads no ACK.
        self._process_stored()
        self._send_acks()
        for session in self._validator.sessions():
            self._send(session.peer, session.header.reply(MessageKind.OVER), NO_MORE_SAMPLES)
        self._send_to_coordinator(MessageKind.OVER)

    # The coordinator.

    def _join(self) -> None:
        inherited, self.stats.lost = self.received_log.inherited_counts(), self.received_log.lost_counts()
        stored = dict(self.stats.stored)
        # Also of simulations whose samples were received before a resume and are not in this trainer's buffer.
        first_missing = self._first_missing(self.received_log.simulations())
        joined = TrainerJoined(self._clients.address, stored, inherited, self.stats.lost, first_missing)
        self._send_to_coordinator(MessageKind.JOIN, self.spec.token, joined.pack())
        self._report_at = time.monotonic() + self._report_interval_s

    def _first_missing(self, simulations: Iterable[int]) -> dict[int, int]:
        spec = self.spec
        ranges = {one: spec.ingest.range_for(one, spec.trainer_index, spec.num_trainers) for one in simulations}
        return {one: self.received_log.first_missing(one, *steps) for one, steps in ranges.items()}

    def _send_to_coordinator(self, kind: MessageKind, *frames: bytes) -> None:
        try:
            self._coordinator.send_multipart([Header(kind, simulation=self.spec.trainer_index).pack(), *frames])
        except zmq.Again as error:
            raise self._connection_refused() from error

    def _connection_refused(self) -> SourceError:
        # ZeroMQ does not reconnect after a failed handshake. A connection that is lost is made again, and what is sent
        # meanwhile waits in the socket.
        return _source_error(
            f"the coordinator at {self.spec.coordinator_address} has refused the connection of trainer "
            f"{self.spec.trainer_index}; simulations.keys ({self.spec.keys or 'null'}) must hold the same keys on the "
            "hosts of all ranks"
        )

    def _receive_from_coordinator(self) -> None:
        while (frames := receive_parts(self._coordinator)) is not None:
            try:
                kind = Header.unpack(frames[0]).kind
            except MalformedMessage as error:
                raise _source_error(
                    f"trainer {self.spec.trainer_index} cannot understand the coordinator: {error}"
                ) from error
            if kind is MessageKind.READY and not self._ready:
                self._ready = True
                self._report_at = time.monotonic()
            self._draining = self._draining or kind is MessageKind.DRAIN
            if kind is MessageKind.REFUSED:
                self._stand_by(bytes(frames[-1]).decode(errors="replace"))
            else:
                self._reports_unanswered = 0

    def _stand_by(self, reason: str) -> None:
        """Receive nothing more: the coordinator counts on another process or session in this one's place.

        This trainer learns the same from the server, and joins again. If it does not, the silence is an error.
        """
        if self._refusal is None:
            _log.warning("trainer %d was refused by the coordinator on rank 0: %s", self.spec.trainer_index, reason)
        self._refusal, self._ready = reason, False

    def _report(self) -> None:
        now = time.monotonic()
        if now < self._report_at:
            return
        if self._ready:
            report = self.stats.make_report(self._queue.pending_simulations())
            missing, parts = self._first_missing(report.received), self._validator.assembly.num_parts()
            report = replace(report, first_missing=missing, parts=parts)
            self._send_to_coordinator(MessageKind.REPORT, report.pack())
        self._reported_at, self._report_at = now, now + self._report_interval_s
        # Early reports do not count as unanswered, so the check keeps its own interval.
        if now - self._checked_at >= self._report_interval_s:
            self._checked_at = now
            sessions = self._validator.sessions()
            self._num_clients = sum(now - session.last_seen_s <= self.spec.timeout_s for session in sessions)
            self._check_coordinator()

    def _check_coordinator(self) -> None:
        # A trainer that was never READY has sent nothing since JOIN, which can be sent before the handshake fails.
        if not self._coordinator.poll(0, zmq.POLLOUT):
            raise self._connection_refused()
        # Counted in unanswered reports and not in seconds: a process that was suspended has waited for no answer.
        self._reports_unanswered += 1
        if self._reports_unanswered * self._report_interval_s > self.spec.timeout_s and not self._over:
            if self._refusal is not None:
                raise _source_error(
                    f"trainer {self.spec.trainer_index} was refused by the coordinator on rank 0: {self._refusal}"
                )
            keys = ", or it has keys, and simulations.keys is null here"
            if self.spec.keys is not None:
                keys = f", or its keys are not those of this host ({self.spec.keys})"
            raise _source_error(
                f"trainer {self.spec.trainer_index} received nothing from the coordinator at "
                f"{self.spec.coordinator_address} for {self.spec.timeout_s:g} s; rank 0 is gone or cannot be "
                f"reached{keys}"
            )

    # The clients.

    def _receive_from_clients(self) -> bool:
        """Receive and validate a bounded number of messages; returns whether no message is left."""
        messages = [*self._clients.receive(_MAX_MESSAGES_AT_ONCE)]
        accepted: list[SampleAccepted] = []
        now = time.monotonic()
        # After all of them are received: in turns both take longer, as one's code and data displace the other's from
        # the processor's caches.
        for peer, *frames in messages:
            if self._over:
                self._refuse_late(peer.bytes, frames)
            else:
                self._validate(peer.bytes, frames, accepted, now)
        if accepted:
            self.field_statistics.add([sample.sample for sample in accepted])
            self._queue.put(accepted)
        return len(messages) < _MAX_MESSAGES_AT_ONCE

    def _refuse_late(self, peer: bytes, frames: list[Any]) -> None:
        try:
            header = Header.unpack(first_frame(frames))
        except MalformedMessage:
            return  # no client of this protocol: there is no reply that it understands
        self._send(peer, header.reply(MessageKind.OVER), NO_MORE_SAMPLES)

    def _validate(self, peer: bytes, frames: list[Any], accepted: list[SampleAccepted], now: float) -> None:
        outcome = self._validator.validate(peer, frames)
        session = outcome.session
        if isinstance(outcome, SampleAccepted):
            same_session = bool(accepted) and accepted[-1].session is session
            accepted.append(outcome)
            if same_session:
                return  # recorded with the sample before
        self.stats.record(outcome, peer_host(frames) if isinstance(outcome, MessageRefused) else "")
        if session is not None:
            session.last_seen_s = now
        if isinstance(outcome, MessageRefused):
            header = Header(MessageKind.REFUSED) if session is None else session.header.reply(MessageKind.REFUSED)
            self._send(peer, header, outcome.text)
            for other in outcome.to_ack:
                # The members whose parts of that sample had arrived: the BYE of each has the samples that are complete.
                if other is not session and self._validator.is_current(other):
                    self._send(other.peer, other.header.reply(MessageKind.REFUSED), f"another part: {outcome.text}")
        elif isinstance(outcome, StepsReported):
            self.stats.lost = self.received_log.lost_counts()
            self._report_at = min(self._report_at, self._reported_at + _EARLY_REPORT_S)
        for session in outcome.to_ack:
            self._to_ack[session] = None

    def _process_stored(self) -> None:
        """Count the samples that the buffer has stored since the last iteration."""
        stored = self._queue.pop_stored()
        if self.stats.lost:
            self.stats.lost = self.received_log.lost_counts()  # some may have been sent again
        for accepted in stored:
            for session, number in accepted.contributors:
                session.mark_processed(number)
                self._to_ack[session] = None
        spec = self.spec
        # A simulation whose last sample is stored is reported early: the coordinator may start the next one.
        early = any(
            self.stats.stored[simulation] + self.stats.lost.get(simulation, 0)
            == spec.ingest.steps_for(simulation, spec.trainer_index, spec.num_trainers)
            for simulation in self.stats.record_stored(stored)
        )
        # So is the last sample for now: the coordinator learns that nothing of a simulation is pending any more.
        if early or (self._to_ack and self._queue.is_empty()):
            self._report_at = min(self._report_at, self._reported_at + _EARLY_REPORT_S)

    def _send_acks(self) -> None:
        for session in self._to_ack:
            # A client that opened the simulation anew counts from 0; the counts of its old session mean nothing to it.
            if self._validator.is_current(session):
                ack = [session.header.reply(MessageKind.ACK, session.processed).pack()]
                if session.released != session.processed:
                    ack.append(pack_integers(session.released))
                self._clients.send([(session.peer, ack)])
        self._to_ack.clear()

    def _send(self, peer: bytes, header: Header, *text: str) -> None:
        # What is dropped as it cannot be delivered: a client that gets no ACK gives up by its timeout.
        self._clients.send([(peer, [header.pack(), *(line.encode(errors="replace") for line in text)])])


def _source_error(text: str) -> SourceError:
    """An error that is reported without a traceback: where it was noticed is of no interest."""
    error = SourceError(text)
    error.self_explanatory = True
    return error


# The queue between the receiver thread and the feeder.


class HandoffQueue:
    """Accepted samples in order of arrival, kept until the buffer has stored them.

    A sample passes three stages: waiting (after ``put``), handed out (after ``get``) and stored (after
    ``mark_stored``), and leaves the queue with ``pop_stored``. Only then does the receiver thread acknowledge it, which
    is how back-pressure reaches the clients. The queue has no capacity: the clients' windows bound it.

    Threads: the receiver thread calls ``put``, ``pop_stored``, ``finish`` and ``fail``; the feeder calls ``get`` and
    ``mark_stored``; any thread may call ``close``. One condition guards all fields. No caller holds it while it blocks
    on a socket or on the buffer. ``wakeup`` is set when samples were stored or the queue is closed; it wakes the
    receiver thread.
    """

    def __init__(self, wakeup: WakeupFd) -> None:
        self._wakeup = wakeup
        self._changed = threading.Condition()
        self._waiting: deque[SampleAccepted] = deque()
        self._handed_out: deque[SampleAccepted] = deque()
        self._stored: list[SampleAccepted] = []
        self._error: BaseException | None = None
        self._finished = False
        self.closed = False

    # Called by the receiver thread.

    def put(self, samples: Sequence[SampleAccepted]) -> None:
        with self._changed:
            self._waiting.extend(samples)
            self._changed.notify()

    def pop_stored(self) -> list[SampleAccepted]:
        """The samples that the buffer has stored since the last call."""
        with self._changed:
            stored, self._stored = self._stored, []
        return stored

    @property
    def num_stored(self) -> int:
        """The samples that the buffer has stored and ``pop_stored`` has not returned."""
        return len(self._stored)

    def is_empty(self) -> bool:
        """Whether the buffer has stored all samples, and ``pop_stored`` has returned them all."""
        with self._changed:
            return not (self._waiting or self._handed_out or self._stored)

    def pending_simulations(self) -> list[int]:
        """The simulations of the samples that are in the queue, in any stage."""
        with self._changed:
            return sorted({sample.key[0] for sample in (*self._waiting, *self._handed_out, *self._stored)})

    def finish(self) -> None:
        """No more samples come: ``get`` returns what waits, and then None."""
        with self._changed:
            self._finished = True
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """No more samples can come: ``get`` raises this error at once, unless the queue was finished before."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify()

    # Called by the feeder.

    def get(self, max_samples: int, timeout_s: float | None) -> list[SampleAccepted] | None:
        """Up to ``max_samples`` of the waiting samples; an empty list after ``timeout_s`` seconds; None at the end.

        Raises:
            BaseException: the error of the receiver thread.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting or self._finished or self.closed or self._error is not None, timeout_s
            )
            # In this order: after close() nothing is wanted, and an error after the end is of no concern.
            if self.closed:
                return None
            if self._error is not None and not self._finished:
                raise self._error
            samples = [self._waiting.popleft() for _ in range(min(max_samples, len(self._waiting)))]
            self._handed_out.extend(samples)
            return samples if samples or not self._finished else None

    def mark_stored(self, n: int) -> None:
        """The buffer has stored the next ``n`` samples that ``get`` returned."""
        with self._changed:
            self._stored += [self._handed_out.popleft() for _ in range(n)]
        self._wakeup.set()

    # Called by any thread.

    def close(self) -> None:
        """Drop the waiting samples and wake both threads: ``get`` returns None, the receiver thread ends."""
        with self._changed:
            self.closed = True
            self._waiting.clear()
            self._changed.notify()
        self._wakeup.set()


# Statistics.

STARVATION = "starvation"
"""Among the first refusals of a report: samples were received, and all are too old."""

# Pairs of reason and sender whose first refusal is logged; further pairs are only counted.
_MAX_LOGGED = 1000


class ReceiveStats:
    """Counters of the receiver thread. ``counters`` is safe to call from any thread and may lag by one message.

    ``stored`` has the samples of each simulation in the buffer so far.
    """

    def __init__(self, stored: Mapping[int, int], sample_bytes: int, trainer_index: int) -> None:
        self.stored = Counter(stored)
        self.received = sum(stored.values())
        self.duplicated = 0
        self.lost: Mapping[int, int] = {}
        self.refused: Counter[Reason] = Counter(dict.fromkeys(REASONS, 0))
        self._sample_bytes = sample_bytes
        self._trainer_index = trainer_index
        self._logged: set[tuple[Reason, str]] = set()
        self._first_refusals: dict[str, str] = {}
        self._starvation: dict[str, str] = {}  # set by the training thread
        # Batches that were trained on: appended by the training thread, removed by that of the receiver.
        self._losses: deque[tuple[Sequence[int], Sequence[float]]] = deque()
        self._changed: set[int] = set()
        self._active: set[tuple[int, int]] = set()

    def report_losses(self, simulations: Sequence[int], losses: Sequence[float]) -> None:
        """Send the coordinator the loss of each sample of a batch, with the next report. For any thread.

        Losses that are not finite are left out.
        """
        self._losses.append((simulations, losses))

    def record(self, outcome: Outcome, host: str) -> None:
        """Count one message. The first refusal for each reason and sender is logged, with the sender's host."""
        if isinstance(outcome, MessageRefused):
            self._record_refusal(outcome, host)
        elif outcome.session is not None:
            header = outcome.session.header
            self._active.add((header.simulation, header.member))
            self.duplicated += isinstance(outcome, DuplicateSample)

    def _record_refusal(self, outcome: MessageRefused, host: str) -> None:
        self.refused[outcome.reason] += 1
        header = outcome.header if outcome.session is None else outcome.session.header
        sender = f"a client on {host}" if header is None else describe_sender(header)
        if (outcome.reason, sender) in self._logged or len(self._logged) >= _MAX_LOGGED:
            return
        self._logged.add((outcome.reason, sender))
        text = f"trainer {self._trainer_index} refused a message of {sender}: {outcome.text}"
        self._first_refusals = {outcome.reason: text, **self._first_refusals}
        _log.warning("%s; more of this kind (%s) are counted and not logged", text, outcome.reason)

    def report_starvation(self, text: str) -> None:
        """Log that samples arrive and none can be used; of the first text rank 0 informs the user. For any thread."""
        self._starvation = self._starvation or {STARVATION: text}
        _log.warning(text)

    def record_stored(self, samples: Sequence[SampleAccepted]) -> set[int]:
        """Count samples that the buffer has stored; returns their simulations."""
        simulations = [sample.key[0] for sample in samples]
        self.stored.update(simulations)
        self.received += len(simulations)
        self._changed.update(simulations)
        return set(simulations)

    def counters(self, num_stored: Callable[[], int] = lambda: 0) -> dict[str, Any]:
        """Samples stored in the buffer since the start of the run and their bytes; messages since the last resume.

        ``num_stored`` returns how many are stored and not recorded yet.
        ``lost`` counts samples that died with a trainer which this one replaces. ``refusals`` is {reason: messages} of
        the reasons that occurred, and ``refused`` their sum.
        """
        # Copied first: iteration over a dict that the receiver thread changes would fail.
        refusals = {reason: n for reason, n in self.refused.copy().items() if n}
        # In this order: what is recorded meanwhile is missing for a moment, and never counted twice.
        received = self.received
        received += num_stored()
        return {
            "received": received,
            "bytes": received * self._sample_bytes,
            "duplicated": self.duplicated,
            "lost": sum(self.lost.values()),
            "refused": sum(refusals.values()),
            "refusals": refusals,
        }

    def make_report(self, pending: Sequence[int]) -> SimulationReport:
        """What has changed since the last report, the counters, and the ``pending`` simulations."""
        received = {simulation: self.stored[simulation] for simulation in sorted(self._changed)}
        report = SimulationReport(
            received,
            sorted(self._active),
            self.counters(),
            pending,
            self.lost,
            {**self._first_refusals, **self._starvation},
            self._mean_losses(),
        )
        self._changed, self._active = set(), set()
        return report

    def _mean_losses(self) -> dict[int, float]:
        """The mean loss of each simulation since the last call."""
        found: dict[int, list[float]] = {}
        while self._losses:
            for simulation, loss in zip(*self._losses.popleft(), strict=True):
                if math.isfinite(loss):
                    found.setdefault(simulation, []).append(loss)
        # Divided first: the sum of losses that are finite may not be.
        return {one: math.fsum(loss / len(found[one]) for loss in found[one]) for one in sorted(found)}


# One of so many samples is measured. A prime, so that simulations that take turns are all measured.
_SAMPLE_EVERY = 7


class RunningMoments:
    """Count, mean and deviation of numbers that arrive in arrays, without keeping the numbers.

    Arrays are merged by T. Chan, G. Golub and R. LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", Stanford 1979. Numbers that are not finite are counted and left out.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.not_finite = 0
        self._squares = 0.0

    def add(self, array: npt.NDArray[Any]) -> None:
        values = array.astype(np.float64).ravel()
        with np.errstate(all="ignore"):
            mean = _mean(values)
            # A mean that is not finite is the cheap test for a number that is not.
            if not math.isfinite(mean):
                finite = values[np.isfinite(values)]
                self.not_finite += values.size - finite.size
                values, mean = finite, _mean(finite)
            values -= mean
            squares = float(values.dot(values))
        if not values.size:
            return
        total = self.count + values.size
        delta = mean - self.mean
        self.mean += delta * values.size / total
        self._squares += squares + delta * delta * self.count * values.size / total
        self.count = total

    @property
    def deviation(self) -> float:
        """Standard deviation, as numpy's ``std``."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0

    def as_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "deviation": self.deviation, "count": self.count, "not_finite": self.not_finite}


def _mean(values: npt.NDArray[np.float64]) -> float:
    return float(np.add.reduce(values)) / values.size if values.size else 0.0


class FieldStatistics:
    """Moments of every field between two reads. Thread-safe.

    One sample in seven is measured, and at most one of the samples that arrive together.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._skipped = _SAMPLE_EVERY
        self._moments = {name: RunningMoments() for name in self._names}

    def add(self, samples: Sequence[Mapping[str, Any]]) -> None:
        with self._lock:
            self._skipped += len(samples)
            if self._skipped >= _SAMPLE_EVERY:
                for name, moments in self._moments.items():
                    moments.add(samples[-1][name])
                self._skipped = 0

    def read_and_reset(self) -> dict[str, dict[str, float]]:
        """``{field: {mean, deviation, count, not_finite}}`` of the samples measured since the last call."""
        with self._lock:
            rows = {name: moments.as_dict() for name, moments in self._moments.items()}
            self._reset()
        return rows

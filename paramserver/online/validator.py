"""Validates each message that a trainer receives, against the spec of the run and against earlier messages.

``MessageValidator.validate`` turns a message into an ``Outcome``. It uses no sockets, threads or clocks. The parts of a
sample that the processes of a group send are collected by ``SampleAssembly``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from paramserver.buffers.positions import Key
from paramserver.online.protocol import (
    ArrayDescriptor,
    Frames,
    Header,
    MalformedMessage,
    MessageKind,
    check_secret,
    density_ratio_of,
    first_frame,
    unpack_descriptor,
    unpack_integers,
    unpack_parameters,
)
from paramserver.online.received_log import ReceivedLog
from paramserver.online.spec import COLUMNS, RESERVED, VERSION_COLUMN, FieldSpec, IngestSpec
from paramserver.online.weights import SampleVersions

Reason: TypeAlias = Literal[
    "malformed",  # no message of this protocol, or of another version of it
    "kind",  # a kind that is not sent to trainers
    "simulation",  # a number beyond simulations.count
    "group",  # another number of processes than simulations.group_size
    "parameters",  # a wrong number of them, not finite, or not those of an earlier OPEN
    "secret",  # not that of this start of a simulation that the run starts
    "unopened",  # this client has not opened the simulation, its attempt or its member
    "step",  # beyond simulations.steps
    "window",  # more samples in flight than simulations.window
    "field",  # one is missing, or unknown
    "dtype",
    "shape",
    "size",  # bytes that do not fit the shape
    "values",  # not finite although the spec requires it, or no booleans
    "version",  # none of the model's
    "stale",  # a part of another attempt
    "unfinished",  # a part of one unfinished sample too many, or of one of which another part was refused
]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""Why messages are refused; each is counted."""
_OF_CONTENT: tuple[Reason, ...] = ("malformed", "field", "dtype", "shape", "size", "values", "version")

Arrays: TypeAlias = "tuple[npt.NDArray[Any], ...]"
"""The fields of a sample or of a part, in the order of the spec, and the columns after them."""

_MAX_SESSIONS = 65_536
_MAX_SIMULATIONS = 65_536
_MAX_GIVEN_UP = 1_000_000  # samples of one simulation
_MAX_DESCRIPTORS = 16
_MAX_TEXT = 400

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Refusal(Exception):  # noqa: N818 - control flow inside the validator, never raised to a caller
    """The message must be refused, for this reason."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason: Reason = reason


def describe_sender(header: Header) -> str:
    part = f", member {header.member}" if header.members > 1 else ""
    return f"simulation {header.simulation} (attempt {header.attempt}{part})"


@dataclass(eq=False, slots=True)
class Opening:
    """The parameters of a simulation. An OPEN with others replaces them until a valid sample or part has arrived.

    Each sample of the simulation holds the ``optional`` values, by their names in ``spec.OPTIONAL``.
    """

    parameters: npt.NDArray[np.float64]
    optional: dict[str, Any] = field(default_factory=dict)
    has_sample: bool = False
    replaced: bool = False


@dataclass(eq=False, slots=True)
class ClientSession:
    """One member of one simulation, as one ZeroMQ peer sends it.

    Attributes:
        header: of its OPEN; of its first sample if it has sent no OPEN.
        opening: of the simulation; None = not opened.
        received: samples, or parts of samples, that have arrived.
        processed: how many of them are stored in the buffer, dropped as duplicates, or refused. An ACK carries it.
        released: how many from the first on are processed without a gap: they need not be sent again.
        ahead: the numbers of those that are processed and come after a gap.
        last_seen_s: when the last message arrived, by the receiver's monotonic clock.
    """

    peer: bytes
    header: Header
    opening: Opening | None = None
    received: int = 0
    processed: int = 0
    released: int = 0
    ahead: set[int] = field(default_factory=set)
    last_seen_s: float = 0.0

    def mark_processed(self, number: int) -> None:
        """The sample or part that arrived as the n-th, from 0, is processed."""
        self.processed += 1
        if number != self.released:
            self.ahead.add(number)
            return
        self.released += 1
        while self.released in self.ahead:
            self.ahead.remove(self.released)
            self.released += 1


# Outcomes are not frozen, although nothing changes them: frozen=True doubles the time to create one.


@dataclass(eq=False, slots=True)
class Outcome:
    """The result of validating one message.

    The session is None where it is unknown. Those ``to_ack`` have a new ``processed``, or wait for a sign of life: each
    is sent an ACK.
    """

    session: ClientSession | None
    to_ack: tuple[ClientSession, ...] = ()


class SessionOpened(Outcome):
    """The client may send samples of the simulation."""


class SessionAlive(Outcome):
    """A heartbeat."""


class StepsReported(Outcome):
    """The client reports which of its samples an earlier receiver of this trainer had acknowledged."""


class PartReceived(Outcome):
    """A part of a sample; other parts are missing."""


class DuplicateSample(Outcome):
    """The sample or part was received before and is dropped."""


@dataclass(eq=False, slots=True)
class SampleAccepted(Outcome):
    """A whole sample.

    The arrays of ``sample`` share the message's memory; those of a group are copies. ``contributors`` are the session
    of each member and the number of its message, which is processed once the buffer has the sample.
    """

    key: Key = (0, 0)
    sample: dict[str, Any] = field(default_factory=dict)
    contributors: tuple[tuple[ClientSession, int], ...] = ()


@dataclass(eq=False, slots=True)
class MessageRefused(Outcome):
    """The message is refused. ``header`` is that of the message, if it can be read."""

    reason: Reason = "malformed"
    text: str = ""
    header: Header | None = None


class MessageValidator:
    """Validates messages one by one and marks accepted samples as received in ``received_log``. Not thread-safe.

    Its memory is bounded: sessions and parameters beyond some ten thousands are dropped, the least recently used first,
    and there are no more unfinished samples than the windows of the members allow.

    A simulation from outside belongs to the client that opened it last, until its first valid sample has arrived. From
    then on its parameters are fixed, and its attempt is the highest that was opened. One that the run starts is opened
    with the secret of its start only. ``versions`` are those that samples may have, if they have any.
    """

    def __init__(
        self,
        spec: IngestSpec,
        received_log: ReceivedLog,
        token: bytes = b"",
        versions: SampleVersions | None = None,
    ) -> None:
        self.spec = spec
        self._versions = versions
        self._token = token
        self.received_log = received_log
        self._all_fields = (*spec.fields, *spec.columns)
        self._names = (*RESERVED, *(field.name for field in self._all_fields))
        self._version_at = self._all_fields.index(VERSION_COLUMN) if versions is not None else -1
        self.assembly = SampleAssembly(spec.config.group_size, spec.window * spec.config.group_size)
        self._sessions: OrderedDict[tuple[bytes, int], ClientSession] = OrderedDict()
        self._openings: OrderedDict[int, Opening] = OrderedDict()
        # A client describes all of its samples with the same bytes, so a descriptor is parsed once.
        self._field_frames = lru_cache(_MAX_DESCRIPTORS)(self._read_field_frames)

    def validate(self, peer: bytes, frames: Frames) -> Outcome:
        """Validate one message; never raises. The arrays of an accepted sample are views of ``frames``."""
        session: ClientSession | None = None
        header: Header | None = None
        counted = False
        try:
            header = Header.unpack(first_frame(frames))
            session = self._find(peer, header.simulation)
            if header.kind is MessageKind.SAMPLE:
                if session is None:
                    # A sample without an OPEN needs a session too: its refusal must be counted as processed, because
                    # the client waits until everything it sent is acknowledged.
                    session = ClientSession(peer, header)
                    _remember(self._sessions, (peer, header.simulation), session)
                session.received += 1
                counted = True
                return self._validate_sample(session, header, frames)
            if header.kind is MessageKind.OPEN:
                return self._open(peer, header, frames)
            if header.kind is MessageKind.HAD:
                return self._had(session, header, frames)
            return self._heartbeat(session, header, frames)
        except (MalformedMessage, Refusal) as refusal:
            dropped = self._give_up(header, refusal.reason) if header is not None and counted else []
            return _refused(session, counted, refusal.reason, str(refusal), _count_processed(dropped), header)

    def _give_up(self, header: Header, reason: Reason) -> list[SamplePart]:
        """Drop the parts of the other members if one is refused for what it holds: they do not wait for it."""
        if reason not in _OF_CONTENT:
            return []
        return self.assembly.give_up(header.simulation, header.attempt, [header.step])

    def is_current(self, session: ClientSession) -> bool:
        """Whether the peer has not opened the simulation anew since, so that the counts are those of the client."""
        return self._sessions.get((session.peer, session.header.simulation)) is session

    def sessions(self) -> list[ClientSession]:
        return list(self._sessions.values())

    def _find(self, peer: bytes, simulation: int) -> ClientSession | None:
        session = self._sessions.get((peer, simulation))
        if session is not None:
            self._sessions.move_to_end((peer, simulation))
        return session

    # OPEN and HEARTBEAT.

    def _open(self, peer: bytes, header: Header, frames: Frames) -> Outcome:
        _check_frames(frames, 3 if self.spec.is_managed else 2, least=2)
        simulation = header.simulation
        self._check_header(header)
        if self.spec.is_managed and (reason := check_secret(self._token, header, frames[1:])) is not None:
            raise Refusal("secret", reason)
        parameters = self._read_parameters(simulation, frames[1])
        opening = self._openings.get(simulation)
        # Whether this client takes the simulation over: a client that opens one and sends nothing must not keep the
        # real one out.
        newest = not self.spec.is_managed and (opening is None or not opening.has_sample)
        if opening is None or not np.array_equal(opening.parameters, parameters):
            if opening is not None:
                self._replace(simulation, opening)
            opening = Opening(parameters)
            if self.spec.is_managed and (ratio := density_ratio_of(bytes(frames[2]))) is not None:
                opening.optional["density_ratio"] = ratio
        session = self._find(peer, simulation)
        # A repeated OPEN must not reset the counts; one of another attempt or member starts a new session.
        if session is None or session.header != header or session.opening is not opening:
            session = ClientSession(peer, header, opening)
            _remember(self._sessions, (peer, simulation), session)
        _remember(self._openings, simulation, opening)
        dropped = self.assembly.start_attempt(simulation, header.attempt, newest)
        return SessionOpened(session, _count_processed(dropped))

    def _replace(self, simulation: int, opening: Opening) -> None:
        if opening.has_sample or self.spec.is_managed:
            raise Refusal(
                "parameters",
                f"parameters of simulation {simulation} must be those with which it was opened before; give other "
                "parameters another simulation id",
            )
        opening.replaced = True

    def _check_header(self, header: Header) -> None:
        config = self.spec.config
        if header.members != config.group_size:
            raise Refusal("group", f"members ({header.members}) must be simulations.group_size ({config.group_size})")
        # A managed simulation that is given up is replaced by one with a number beyond count.
        if not self.spec.is_managed and config.count is not None and header.simulation >= config.count:
            raise Refusal(
                "simulation", f"simulation ({header.simulation}) must be below simulations.count ({config.count})"
            )

    def _read_parameters(self, simulation: int, frame: bytes) -> npt.NDArray[np.float64]:
        try:
            parameters = unpack_parameters(frame)
        except MalformedMessage as error:
            raise Refusal("parameters", str(error)) from error
        declared = self.spec.parameters
        if declared and len(parameters) != len(declared):
            names = ", ".join(name for name, _, _ in declared)
            raise Refusal("parameters", f"parameters ({len(parameters)} numbers) must be {len(declared)}: {names}")
        if not np.isfinite(parameters).all():
            raise Refusal("parameters", f"parameters of simulation {simulation} must be finite")
        return parameters

    def _had(self, session: ClientSession | None, header: Header, frames: Frames) -> Outcome:
        _check_frames(frames, 2)
        if session is None or not _is_open(session, header):
            raise _unopened(header)
        steps, numbers = self.spec.config.steps, unpack_integers(frames[1])
        if steps is not None and max(numbers, default=0) >= steps:
            raise Refusal("step", f"step ({max(numbers)}) must be below simulations.steps ({steps})")
        for number in numbers:
            self.received_log.mark_lost(header.simulation, number)
        dropped = self.assembly.give_up(header.simulation, header.attempt, numbers)
        return StepsReported(session, _count_processed(dropped))

    def _heartbeat(self, session: ClientSession | None, header: Header, frames: Frames) -> Outcome:
        if header.kind is not MessageKind.HEARTBEAT:
            raise Refusal("kind", f"{header.kind.name} must not be sent to a trainer")
        _check_frames(frames, 1)
        if session is None:
            raise _unopened(header)
        return SessionAlive(session, (session,))

    # SAMPLE.

    def _validate_sample(self, session: ClientSession, header: Header, frames: Frames) -> Outcome:
        opening = session.opening
        # The header of the OPEN was checked; that of a sample has another kind and step, and else the same numbers.
        if opening is None or header[3:] != session.header[3:]:
            if opening is None or not _is_open(session, header):
                raise _unopened(header)
            self._check_header(header)
        steps, window = self.spec.config.steps, self.spec.window
        if steps is not None and header.step >= steps:
            raise Refusal("step", f"step ({header.step}) must be below simulations.steps ({steps})")
        if session.received - session.processed > window:
            raise Refusal("window", f"samples on their way must be at most simulations.window ({window})")
        # Arrays are checked before the duplicate test: a wrong array is refused whether or not its key is known.
        arrays = self._read_arrays(frames)
        if self._versions is not None:
            reason = self._versions.reason_to_refuse(arrays[self._version_at].tolist())
            if reason is not None:
                raise Refusal("version", reason)
        if opening.replaced:
            raise Refusal("parameters", f"simulation {header.simulation} was opened anew, with other parameters")
        opening.has_sample = True
        key = (header.simulation, header.step)
        if self.assembly.members == 1:
            return self._accept(session, opening, key, arrays, ((session, session.received - 1),))
        if self.received_log.contains(*key):
            return _duplicate(session)
        return self._add_part(session, opening, header, arrays)

    def _add_part(self, session: ClientSession, opening: Opening, header: Header, arrays: Arrays) -> Outcome:
        key = (header.simulation, header.step)
        parts = self.assembly.add(key, header.attempt, header.member, SamplePart(arrays, session, session.received - 1))
        if parts is PartOutcome.WAITING:
            return PartReceived(session)
        if parts is PartOutcome.DUPLICATE:
            return _duplicate(session)
        if parts is PartOutcome.STALE:
            raise Refusal(
                "stale",
                f"attempt ({header.attempt}) of simulation {header.simulation} must be that which was opened last",
            )
        if parts is PartOutcome.GIVEN_UP and self.received_log.is_lost(*key):
            return _duplicate(session)  # a trainer that this one replaces had the whole sample
        if parts is PartOutcome.GIVEN_UP:
            raise Refusal("unfinished", f"another part of step {header.step} was refused")
        if parts is PartOutcome.FULL:
            raise Refusal("unfinished", f"at most {self.assembly.limit} samples of a simulation may be unfinished")
        assert isinstance(parts, list)
        whole = concatenate_parts(parts, len(self.spec.columns))
        for declared, array in zip(self._all_fields, whole, strict=True):
            if array.shape != declared.shape:
                text = f"{declared.name} ({list(array.shape)}) must have the shape {list(declared.shape)} when its "
                text += "parts are put together"
                others = [part for part in parts if part.session is not session]
                return _refused(session, True, "shape", text, _count_processed(others))
        return self._accept(session, opening, key, whole, tuple((part.session, part.number) for part in parts))

    def _accept(
        self,
        session: ClientSession,
        opening: Opening,
        key: Key,
        arrays: Arrays,
        contributors: tuple[tuple[ClientSession, int], ...],
    ) -> SampleAccepted | DuplicateSample:
        if not self.received_log.mark_received(*key):
            return _duplicate(session)
        sample = dict(zip(self._names, (*key, opening.parameters, *arrays)))  # noqa: B905 - as many as fields
        if opening.optional:
            sample.update(opening.optional)
        return SampleAccepted(session, (), key, sample, contributors)

    def _read_arrays(self, frames: Frames) -> Arrays:
        """The arrays of a message in the order of the spec's fields and columns: views of its frames."""
        most = 2 + len(self._all_fields)
        if len(frames) != most:
            _check_frames(frames, most, least=2)
        expected, field_frames = self._field_frames(bytes(frames[1]))
        if len(frames) != expected:  # a wrong descriptor is refused first
            _check_frames(frames, expected)
        return tuple([one.array(frames[one.frame]) for one in field_frames])

    def _read_field_frames(self, descriptor: bytes) -> tuple[int, tuple[_FieldFrame | _NoColumn, ...]]:
        described = {found.name: (2 + i, found) for i, found in enumerate(unpack_descriptor(descriptor))}
        names = [field.name for field in (*self.spec.fields, *self.spec.required_columns)]
        if not set(names) <= described.keys() <= {field.name for field in self._all_fields}:
            raise Refusal("field", f"fields ({', '.join(described)}) must be {', '.join(names)}")
        return 2 + len(described), tuple(
            self._field_frame(field, *described[field.name])
            if field.name in described
            else _NoColumn(np.array(COLUMNS[field], field.dtype))
            for field in self._all_fields
        )

    def _field_frame(self, field: FieldSpec, frame: int, found: ArrayDescriptor) -> _FieldFrame:
        if found.dtype != field.dtype:
            raise Refusal("dtype", f"{field.name} ({found.dtype}) must have the dtype {field.dtype}")
        is_whole = self.assembly.members == 1 or field in self.spec.columns
        fits = found.shape == field.shape if is_whole else _is_part(found.shape, field.shape)
        if not fits:
            raise Refusal("shape", f"{field.name} ({list(found.shape)}) must have the shape {list(field.shape)}")
        return _FieldFrame(field, frame, found.shape, np.dtype(found.dtype), found.num_bytes)


@dataclass(frozen=True)
class _FieldFrame:
    """Which frame of a message holds a field of the spec, and with which shape and dtype."""

    field: FieldSpec
    frame: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    num_bytes: int

    def array(self, frame: bytes) -> npt.NDArray[Any]:
        if len(frame) != self.num_bytes:
            raise Refusal("size", f"{self.field.name} ({len(frame)} bytes) must have {self.num_bytes} for its shape")
        array: npt.NDArray[Any] = np.ndarray(self.shape, self.dtype, frame)
        if self.field.finite and not np.isfinite(array).all():
            raise Refusal("values", f"{self.field.name} must be finite, it holds a NaN or an infinity")
        if self.dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
            raise Refusal("values", f"{self.field.name} must hold booleans, a byte of it is neither 0 nor 1")
        return array


@dataclass(frozen=True)
class _NoColumn:
    """Stands for a column that a message does not have."""

    value: npt.NDArray[Any]
    frame: int = 1  # any

    def array(self, frame: bytes) -> npt.NDArray[Any]:
        return self.value


def _is_part(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(shape) == len(whole) and shape[1:] == whole[1:] and shape[:1] <= whole[:1]


def _check_frames(frames: Frames, most: int, least: int | None = None) -> None:
    if not (most if least is None else least) <= len(frames) <= most:
        raise Refusal("malformed", f"a message of this kind must have {most} frames, this one has {len(frames)}")


def _is_open(session: ClientSession, header: Header) -> bool:
    opened = session.header
    return session.opening is not None and (header.attempt, header.member) == (opened.attempt, opened.member)


def _unopened(header: Header) -> Refusal:
    return Refusal(
        "unopened",
        f"simulation {header.simulation} (attempt {header.attempt}, member {header.member}) must be opened first",
    )


def _refused(
    session: ClientSession | None,
    counted: bool,
    reason: Reason,
    text: str,
    to_ack: tuple[ClientSession, ...] = (),
    header: Header | None = None,
) -> MessageRefused:
    if session is not None and counted:
        session.mark_processed(session.received - 1)
        to_ack = (*to_ack, session)
    return MessageRefused(session, to_ack, reason, _printable(text), header)


def _printable(text: str) -> str:
    """One line of bounded length, whatever names a client sends: the text goes to the log."""
    shown = text[:_MAX_TEXT]
    return shown if shown.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def _duplicate(session: ClientSession) -> DuplicateSample:
    session.mark_processed(session.received - 1)
    return DuplicateSample(session, (session,))


def _count_processed(dropped: list[SamplePart]) -> tuple[ClientSession, ...]:
    for part in dropped:
        part.session.mark_processed(part.number)
    return tuple(part.session for part in dropped)


def _remember(table: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    """Insert the most recent entry; drop the least recent one beyond the limit."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > _MAX_SESSIONS:
        table.popitem(last=False)


# Samples of groups.


class PartOutcome(Enum):
    """The result of adding a part that completes no sample."""

    WAITING = "other parts are missing"
    DUPLICATE = "the part was received before"
    STALE = "the part is of another attempt"
    FULL = "the part begins one sample too many"
    GIVEN_UP = "another part of the sample does not come"


@dataclass(frozen=True)
class SamplePart:
    """What one member sends of a sample, as the n-th of its ``session``, which is any object that the caller needs."""

    arrays: Arrays
    session: Any
    number: int = 0


class SampleAssembly:
    """Collects the parts of samples that the members of a group send one by one. Not thread-safe.

    Its memory is bounded: ``limit`` unfinished samples of a simulation, and the attempts of the simulations that were
    started last. ``members`` send the parts of a whole sample.
    """

    def __init__(self, members: int, limit: int) -> None:
        self.members = members
        self.limit = limit
        self._attempts: OrderedDict[int, int] = OrderedDict()
        self._unfinished: dict[int, dict[int, dict[int, SamplePart]]] = {}
        self._given_up: dict[int, set[int]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Number of unfinished samples. Safe to call from any thread."""
        return self._count

    def start_attempt(self, simulation: int, attempt: int, newest: bool = False) -> list[SamplePart]:
        """Register an attempt: the highest counts, or a ``newest`` one; returns the dropped parts of others."""
        known = self._attempts.pop(simulation, attempt)
        self._attempts[simulation] = current = attempt if newest else max(known, attempt)
        if len(self._attempts) > _MAX_SIMULATIONS:
            self._given_up.pop(self._attempts.popitem(last=False)[0], None)
        return self.drop(simulation) if current != known else []

    def drop(self, simulation: int) -> list[SamplePart]:
        """Drop the unfinished samples of a simulation; returns their parts."""
        self._given_up.pop(simulation, None)
        steps = self._unfinished.pop(simulation, {})
        self._count -= len(steps)
        return [part for parts in steps.values() for part in parts.values()]

    def give_up(self, simulation: int, attempt: int, steps: Iterable[int]) -> list[SamplePart]:
        """Drop the parts of these samples, now and later in this attempt; returns those that are dropped now."""
        if self.members == 1 or attempt != self._attempts.get(simulation, attempt):
            return []
        given_up = self._given_up.setdefault(simulation, set())
        unfinished = self._unfinished.get(simulation, {})
        dropped: list[SamplePart] = []
        for step in steps:
            if len(given_up) < _MAX_GIVEN_UP:
                given_up.add(step)
            if step in unfinished:
                dropped += unfinished.pop(step).values()
                self._count -= 1
        if not unfinished:
            self._unfinished.pop(simulation, None)
        return dropped

    def num_parts(self) -> dict[int, int]:
        """{simulation: parts} of unfinished samples."""
        return {one: sum(map(len, steps.values())) for one, steps in self._unfinished.items()}

    def add(self, key: Key, attempt: int, member: int, part: SamplePart) -> PartOutcome | list[SamplePart]:
        """Add one part; returns all parts of the sample, ordered by member, if this is the last one."""
        simulation, step = key
        if attempt != self._attempts.get(simulation, attempt):
            return PartOutcome.STALE
        if step in self._given_up.get(simulation, ()):
            return PartOutcome.GIVEN_UP
        steps = self._unfinished.setdefault(simulation, {})
        if step not in steps and len(steps) >= self.limit:
            return PartOutcome.FULL
        if step not in steps:
            steps[step] = {}
            self._count += 1
        parts = steps[step]
        if member in parts:
            return PartOutcome.DUPLICATE
        parts[member] = part
        if len(parts) < self.members:
            return PartOutcome.WAITING
        del steps[step]
        self._count -= 1
        if not steps:
            del self._unfinished[simulation]
        return [parts[i] for i in range(self.members)]


def concatenate_parts(parts: list[SamplePart], num_columns: int = 0) -> Arrays:
    """The whole arrays: the parts of each field along the first dimension.

    Of each of the last ``num_columns`` arrays, which every part has whole, it is the least that is not all zeros: the
    oldest version that a part has.
    """
    arrays = list(zip(*(part.arrays for part in parts), strict=True))
    num_fields = len(arrays) - num_columns
    fields = [np.concatenate(parts_of) for parts_of in arrays[:num_fields]]
    columns = [
        min(filter(np.any, parts_of), key=np.ndarray.tolist, default=parts_of[0]) for parts_of in arrays[num_fields:]
    ]
    return (*fields, *columns)

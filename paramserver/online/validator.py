"""Parts of samples, which the processes of a group send one by one, and what becomes of them.

The check of each message that a trainer gets, against the plan and against what came before.

What a trainer finds a message to be, and who sent it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from paramserver.online.protocol import (
    ArrayDescriptor,
    Frames,
    Header,
    MalformedMessage,
    MessageKind,
    read_descriptor,
    read_parameters,
)
from paramserver.online.received_log import Key, ReceivedLog
from paramserver.online.spec import RESERVED, FieldSpec, IngestSpec

Arrays: TypeAlias = "tuple[npt.NDArray[Any], ...]"
"""The fields of a sample or part, in the order of the plan."""

_MOST_SIMULATIONS = 65_536


class PartOutcome(Enum):
    """Of a part that completes nothing."""

    WAITING = "waits for the others"
    DUPLICATE = "was there before"
    STALE = "is of an older attempt"
    FULL = "begins one sample too many"


@dataclass(frozen=True)
class SamplePart:
    """What one member sent. ``giver`` is whatever the caller wants back with it."""

    arrays: Arrays
    giver: Any


class SampleAssembly:
    """The samples of groups of which some parts are missing.

    Not thread-safe. Its memory is bounded: ``limit`` unfinished samples of a simulation, and the attempts of so many
    simulations as were last begun.

    Args:
        members: parts of a whole sample.
        limit: unfinished samples of one simulation.
    """

    def __init__(self, members: int, limit: int) -> None:
        self.members = members
        self.limit = limit
        self._attempts: OrderedDict[int, int] = OrderedDict()
        self._unfinished: dict[int, dict[int, dict[int, SamplePart]]] = {}
        self._count = 0

    def __len__(self) -> int:
        """How many samples are unfinished; for any thread."""
        return self._count

    def begin(self, simulation: int, attempt: int) -> list[SamplePart]:
        """A member opened this attempt of a simulation: the parts of older ones, which are dropped."""
        known = self._attempts.pop(simulation, attempt)
        self._attempts[simulation] = max(known, attempt)
        if len(self._attempts) > _MOST_SIMULATIONS:
            self._attempts.popitem(last=False)
        return self.drop(simulation) if attempt > known else []

    def drop(self, simulation: int) -> list[SamplePart]:
        """Forget the unfinished samples of a simulation; their parts."""
        steps = self._unfinished.pop(simulation, {})
        self._count -= len(steps)
        return [part for parts in steps.values() for part in parts.values()]

    def add(self, key: tuple[int, int], attempt: int, member: int, part: SamplePart) -> PartOutcome | list[SamplePart]:
        """Take one part; all parts of its sample in the order of members where it was the last one."""
        simulation, step = key
        if attempt < self._attempts.get(simulation, attempt):
            return PartOutcome.STALE
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


def joined(parts: list[SamplePart]) -> Arrays:
    """The whole arrays: those of the parts one below the other."""
    columns = zip(*(part.arrays for part in parts), strict=True)
    return tuple(np.concatenate(column) for column in columns)


Reason: TypeAlias = Literal[
    "malformed",  # no message of this protocol, or of another version of it
    "kind",  # of a kind that no trainer is sent
    "simulation",  # a number that the plan does not count
    "group",  # another number of processes than the plan's
    "parameters",  # of a wrong number, not finite, or not those of before
    "unopened",  # the simulation, its attempt or its member was not opened by this client
    "step",  # beyond the steps of the plan
    "window",  # more on their way than the window holds
    "field",  # one is missing, or unknown
    "dtype",
    "shape",
    "size",  # bytes that do not fit the shape
    "values",  # not finite where that is asked, or no booleans
    "stale",  # a part for an older attempt
    "unfinished",  # a part of one unfinished sample too many
]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""Why messages are refused; each is counted."""


class Refusal(Exception):  # noqa: N818 - what a check says of a message, in one sentence
    """The message must not be taken."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason: Reason = reason


def named(header: Header) -> str:
    """Whose message it is, for people."""
    part = f", member {header.member}" if header.members > 1 else ""
    return f"simulation {header.simulation} (attempt {header.attempt}{part})"


@dataclass(eq=False, slots=True)
class ClientSession:
    """One member of one simulation, as one peer sends it.

    Attributes:
        peer: where its answers go.
        header: of its OPEN; of its first sample where it has sent none.
        parameters: of the simulation; None where it has not been opened.
        received: samples, or parts, that came.
        dealt: how many of them were dealt with: put into the buffer, dropped as duplicates, or refused.
        heard: when it was heard last, by the clock of the receiver.
    """

    peer: bytes
    header: Header
    parameters: npt.NDArray[np.float64] | None = None
    received: int = 0
    dealt: int = 0
    heard: float = 0.0

    def __str__(self) -> str:
        return named(self.header)


@dataclass(eq=False)
class Outcome:
    """What a message was. Nobody changes it; to have that forbidden would double the time that one takes to be made.

    Attributes:
        visitor: who sent it; None where that cannot be told.
        told: visitors whose ``dealt`` has changed by it.
    """

    visitor: ClientSession | None
    told: tuple[ClientSession, ...] = ()


class SessionOpened(Outcome):
    """The simulation may send."""


class SessionAlive(Outcome):
    """A sign of life."""


class PartReceived(Outcome):
    """A part of which others are still to come."""


class DuplicateSample(Outcome):
    """It had come before, and was dropped."""


@dataclass(eq=False)
class SampleAccepted(Outcome):
    """A whole sample.

    Attributes:
        key: its simulation and step.
        sample: for the task. Its arrays are the message's own memory, of a group new ones.
        givers: who sent it, member by member; each has one message more dealt with once the buffer has it.
    """

    key: Key = (0, 0)
    sample: dict[str, Any] = field(default_factory=dict)
    givers: tuple[ClientSession, ...] = ()


@dataclass(eq=False)
class MessageRefused(Outcome):
    """It was not taken; ``header`` is of whom it named, where that can be read."""

    reason: Reason = "malformed"
    sentence: str = ""
    header: Header | None = None


_MOST_REMEMBERED = 65_536
_MOST_DESCRIPTORS = 16
_LONGEST_SENTENCE = 400

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class MessageValidator:
    """Judges messages one by one. Not thread-safe; what it accepts it marks as seen in ``identities``.

    Its memory is bounded: of visitors and parameters those are forgotten that were not needed for longest, beyond some
    ten thousands, and no more samples are unfinished than the windows hold.
    """

    def __init__(self, plan: IngestSpec, identities: ReceivedLog) -> None:
        self.plan = plan
        self.identities = identities
        self._names = (*RESERVED, *(field.name for field in plan.fields))
        self.assembly = SampleAssembly(plan.config.group_size, plan.config.window * plan.config.group_size)
        self._visitors: OrderedDict[tuple[bytes, int], ClientSession] = OrderedDict()
        self._parameters: OrderedDict[int, npt.NDArray[np.float64]] = OrderedDict()
        # A client describes all its samples with the same bytes.
        self._slots = lru_cache(_MOST_DESCRIPTORS)(self._read_slots)

    def judge(self, peer: bytes, frames: Frames) -> Outcome:
        """Say what a message is. Whatever it holds, nothing is raised.

        Args:
            peer: who sent it.
            frames: the message, as bytes or what shares its memory as they do; the arrays of a sample are views of it.
        """
        visitor: ClientSession | None = None
        header: Header | None = None
        counted = False
        try:
            header = Header.unpack(frames[0] if frames else b"")
            visitor = self._find(peer, header.simulation)
            if header.kind is MessageKind.SAMPLE:
                visitor = visitor or self._stranger(peer, header)
                visitor.received += 1
                counted = True
                return self._sample(visitor, header, frames)
            if header.kind is MessageKind.OPEN:
                return self._open(peer, header, frames)
            return self._touch(visitor, header, frames)
        except MalformedMessage as error:
            return _refused(visitor, counted, "malformed", str(error), header=header)
        except Refusal as refusal:
            return _refused(visitor, counted, refusal.reason, str(refusal), header=header)

    def is_current(self, visitor: ClientSession) -> bool:
        """Whether this is what its peer opened last for this simulation, so that its counts are the client's."""
        return self._visitors.get((visitor.peer, visitor.header.simulation)) is visitor

    def visitors(self) -> list[ClientSession]:
        return list(self._visitors.values())

    def _find(self, peer: bytes, simulation: int) -> ClientSession | None:
        visitor = self._visitors.get((peer, simulation))
        if visitor is not None:
            self._visitors.move_to_end((peer, simulation))
        return visitor

    def _stranger(self, peer: bytes, header: Header) -> ClientSession:
        """One who sends before it opened: its samples are refused, and counted, or it would wait for ever."""
        visitor = ClientSession(peer, header)
        _remember(self._visitors, (peer, header.simulation), visitor)
        return visitor

    # What opens, and what only lives.

    def _open(self, peer: bytes, header: Header, frames: Frames) -> Outcome:
        _check_frames(frames, 2)
        simulation = header.simulation
        self._check_header(header)
        parameters = self._read_parameters(simulation, frames[1])
        visitor = self._find(peer, simulation)
        if visitor is None or visitor.header != header or visitor.parameters is None:
            visitor = ClientSession(peer, header, parameters)
            _remember(self._visitors, (peer, simulation), visitor)
        _remember(self._parameters, simulation, parameters)
        return SessionOpened(visitor, _deal_with(self.assembly.begin(simulation, header.attempt)))

    def _check_header(self, header: Header) -> None:
        config = self.plan.config
        if header.members != config.group_size:
            raise Refusal("group", f"members ({header.members}) must be simulations.group_size ({config.group_size})")
        # Where the run starts simulations itself, one that was given up is replaced by one with a number beyond.
        if not self.plan.started_here and config.count is not None and header.simulation >= config.count:
            raise Refusal(
                "simulation", f"simulation ({header.simulation}) must be below simulations.count ({config.count})"
            )

    def _read_parameters(self, simulation: int, frame: bytes) -> npt.NDArray[np.float64]:
        try:
            parameters = read_parameters(frame)
        except MalformedMessage as error:
            raise Refusal("parameters", str(error)) from error
        declared = self.plan.parameters
        if declared and len(parameters) != len(declared):
            names = ", ".join(name for name, _, _ in declared)
            raise Refusal("parameters", f"parameters ({len(parameters)} numbers) must be {len(declared)}: {names}")
        if not np.isfinite(parameters).all():
            raise Refusal("parameters", f"parameters of simulation {simulation} must be finite")
        known = self._parameters.get(simulation)
        if known is None:
            return parameters
        if not np.array_equal(known, parameters):
            raise Refusal(
                "parameters",
                f"parameters of simulation {simulation} must be those with which it was opened before; give other "
                "parameters another simulation id",
            )
        return known

    def _touch(self, visitor: ClientSession | None, header: Header, frames: Frames) -> Outcome:
        if header.kind is not MessageKind.TOUCH:
            raise Refusal("kind", f"{header.kind.name} must not be sent to a trainer")
        _check_frames(frames, 1)
        if visitor is None:
            raise _unopened(header)
        return SessionAlive(visitor, (visitor,))

    # Samples.

    def _sample(self, visitor: ClientSession, header: Header, frames: Frames) -> Outcome:
        opened = visitor.header
        if visitor.parameters is None or (header.attempt, header.member) != (opened.attempt, opened.member):
            raise _unopened(header)
        self._check_header(header)
        steps, window = self.plan.config.steps, self.plan.config.window
        if steps is not None and header.step >= steps:
            raise Refusal("step", f"step ({header.step}) must be below simulations.steps ({steps})")
        if visitor.received - visitor.dealt > window:
            raise Refusal("window", f"samples on their way must be at most simulations.window ({window})")
        arrays = self._arrays(frames)
        key = (header.simulation, header.step)
        if self.identities.has(*key):
            return _drop(visitor)
        if self.assembly.members == 1:
            return self._accept(visitor, key, arrays, (visitor,))
        return self._part(visitor, header, arrays)

    def _part(self, visitor: ClientSession, header: Header, arrays: Arrays) -> Outcome:
        key = (header.simulation, header.step)
        parts = self.assembly.add(key, header.attempt, header.member, SamplePart(arrays, visitor))
        if parts is PartOutcome.WAITING:
            return PartReceived(visitor)
        if parts is PartOutcome.DUPLICATE:
            return _drop(visitor)
        if parts is PartOutcome.STALE:
            raise Refusal("stale", f"attempt ({header.attempt}) of simulation {header.simulation} must be its last")
        if parts is PartOutcome.FULL:
            raise Refusal("unfinished", f"at most {self.assembly.limit} samples of a simulation may be unfinished")
        assert isinstance(parts, list)
        whole = joined(parts)
        for declared, array in zip(self.plan.fields, whole, strict=True):
            if array.shape != declared.shape:
                others = [part for part in parts if part.giver is not visitor]
                return _refused(visitor, True, "shape", _shape_of_parts(declared, array.shape), _deal_with(others))
        return self._accept(visitor, key, whole, tuple(part.giver for part in parts))

    def _accept(
        self, visitor: ClientSession, key: tuple[int, int], arrays: Arrays, givers: tuple[ClientSession, ...]
    ) -> SampleAccepted:
        self.identities.see(*key)
        sample = dict(zip(self._names, (*key, visitor.parameters, *arrays), strict=True))
        return SampleAccepted(visitor, (), key, sample, givers)

    def _arrays(self, frames: Frames) -> Arrays:
        """The arrays of a message in the order of the plan's fields: views of its frames."""
        _check_frames(frames, 2 + len(self.plan.fields), least=2)
        slots = self._slots(bytes(frames[1]))
        _check_frames(frames, 2 + len(slots))
        return tuple([slot.array(frames[slot.frame]) for slot in slots])

    def _read_slots(self, descriptor: bytes) -> tuple[_SessionSlot, ...]:
        described = {shaped.name: (2 + i, shaped) for i, shaped in enumerate(read_descriptor(descriptor))}
        names = [field.name for field in self.plan.fields]
        if described.keys() != set(names):
            raise Refusal("field", f"fields ({', '.join(described)}) must be {', '.join(names)}")
        return tuple(self._slot(field, *described[field.name]) for field in self.plan.fields)

    def _slot(self, field: FieldSpec, frame: int, shaped: ArrayDescriptor) -> _SessionSlot:
        if shaped.dtype != field.dtype:
            raise Refusal("dtype", f"{field.name} ({shaped.dtype}) must have the dtype {field.dtype}")
        fits = shaped.shape == field.shape if self.assembly.members == 1 else _is_part(shaped.shape, field.shape)
        if not fits:
            raise Refusal("shape", f"{field.name} ({list(shaped.shape)}) must have the shape {list(field.shape)}")
        return _SessionSlot(field, frame, shaped.shape, np.dtype(shaped.dtype), shaped.bytes)


@dataclass(frozen=True)
class _SessionSlot:
    """Where in a message a field of the plan is, and how."""

    field: FieldSpec
    frame: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int

    def array(self, frame: bytes) -> npt.NDArray[Any]:
        """A view of the frame."""
        if len(frame) != self.size:
            raise Refusal("size", f"{self.field.name} ({len(frame)} bytes) must have {self.size}, as its shape says")
        array: npt.NDArray[Any] = np.ndarray(self.shape, self.dtype, frame)
        if self.field.finite and not np.isfinite(array).all():
            raise Refusal("values", f"{self.field.name} must be finite, it holds a NaN or an infinity")
        if self.dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
            raise Refusal("values", f"{self.field.name} must hold booleans, a byte of it is neither 0 nor 1")
        return array


def _is_part(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(shape) == len(whole) and shape[1:] == whole[1:] and shape[:1] <= whole[:1]


def _shape_of_parts(field: FieldSpec, shape: tuple[int, ...]) -> str:
    return f"{field.name} ({list(shape)}) must have the shape {list(field.shape)} when its parts are put together"


def _check_frames(frames: Frames, most: int, least: int | None = None) -> None:
    if not (most if least is None else least) <= len(frames) <= most:
        raise Refusal("malformed", f"a message of this kind must have {most} frames, this one has {len(frames)}")


def _unopened(header: Header) -> Refusal:
    return Refusal(
        "unopened",
        f"simulation {header.simulation} (attempt {header.attempt}, member {header.member}) must be opened first",
    )


def _refused(
    visitor: ClientSession | None,
    counted: bool,
    reason: Reason,
    sentence: str,
    told: tuple[ClientSession, ...] = (),
    header: Header | None = None,
) -> MessageRefused:
    if visitor is not None and counted:
        visitor.dealt += 1
        told = (*told, visitor)
    return MessageRefused(visitor, told, reason, _printable(sentence), header)


def _printable(sentence: str) -> str:
    """One line of bounded length, whatever names a client has chosen."""
    shown = sentence[:_LONGEST_SENTENCE]
    return shown if shown.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def _drop(visitor: ClientSession) -> DuplicateSample:
    visitor.dealt += 1
    return DuplicateSample(visitor, (visitor,))


def _deal_with(parts: list[SamplePart]) -> tuple[ClientSession, ...]:
    """Count dropped parts as dealt with."""
    for part in parts:
        part.giver.dealt += 1
    return tuple(part.giver for part in parts)


def _remember(table: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    """As the newest entry; beyond many the oldest goes."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > _MOST_REMEMBERED:
        table.popitem(last=False)

"""What clients, trainers and the desk of a run say to each other: frames of bytes, never pickles.

A message is a list of frames. The first is a ``Header``; what follows depends on its kind::

    client -> desk       HELLO   parameters (float64)            a simulation is about to be opened
                         BYE     -                               all was taken; ``step`` = samples of this member
                         PING    -                               is the run alive?
                         LAST    -                               no more simulations will come from outside
    desk -> client       WELCOME JSON, see ``JoinReply``           where to send
                         PONG    JSON                            the run's state
                         REFUSED a sentence                      this client or message was not taken, and why
                         OVER    a sentence                      the run wants no more samples
    client -> trainer    OPEN    parameters (float64)            samples of this simulation follow
                         SAMPLE  descriptor, one frame a field   one step of one member; see ``describe_error``
                         TOUCH   -                               the client lives and waits for room
    trainer -> client    TAKEN   -                               ``step`` = samples of this member dealt with so far
                         REFUSED a sentence
                         OVER    a sentence
    trainer -> desk      JOIN    token, JSON, see ``TrainerJoined``     a trainer is ready to receive
                         REPORT  JSON, see ``SimulationReport``            what it has taken so far, every second
                         OVER    -                               it leaves: the run wants no more samples
    desk -> trainer      READY   -                               it was told
                         FINISH  -                               the last simulation has ended: drain
                         OVER    a sentence                      simulations failed for good

Numbers are in network order in the header and little-endian in arrays.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

VERSION = 1
"""Of this protocol: clients and runs of another version refuse each other by name."""

ENOUGH = "the run wants no more samples"
"""What OVER says where the run ends well."""

Frames = Sequence[bytes]

_MAGIC = b"ps"
_HEADER = struct.Struct("!2sBBqqHHI")
# Of kind, dtype and order as numpy writes them, which are all that a message may hold.
DTYPES = frozenset({"|b1", "|i1", "|u1"} | {f"<{kind}{size}" for kind in "iu" for size in (2, 4, 8)}) | frozenset(
    {"<f2", "<f4", "<f8"}
)
_MOST_DIMENSIONS = 16


class MessageKind(IntEnum):
    HELLO = 1
    BYE = 2
    PING = 3
    LAST = 4
    WELCOME = 17
    PONG = 18
    REFUSED = 19
    OVER = 20
    OPEN = 33
    SAMPLE = 34
    TOUCH = 35
    TAKEN = 49
    JOIN = 65
    READY = 66
    REPORT = 67
    FINISH = 68


_KINDS = {int(kind): kind for kind in MessageKind}


class MalformedMessage(ValueError):  # noqa: N818 - a state of a message, said in one sentence
    """These frames are no message of this protocol."""


class Header(NamedTuple):
    """The first frame. A tuple, because one is made for each sample that is sent or received.

    Attributes:
        kind: what is said.
        simulation: which simulation it is about; a trainer's index in JOIN and REPORT; 0 where it is about none.
        step: of a sample, from 0; a count in TAKEN and BYE.
        member: which process of the simulation's group.
        members: how many there are in the group, at least 1.
        attempt: how often this simulation was started before.
    """

    kind: MessageKind
    simulation: int = 0
    step: int = 0
    member: int = 0
    members: int = 1
    attempt: int = 0

    def pack(self) -> bytes:
        return _HEADER.pack(
            _MAGIC, VERSION, self.kind, self.simulation, self.step, self.member, self.members, self.attempt
        )

    @classmethod
    def unpack(cls, frame: bytes) -> Header:
        """Read it.

        Raises:
            Malformed: another length, protocol or version, an unknown kind, a negative number, a member outside its
                group.
        """
        if len(frame) != _HEADER.size:
            raise MalformedMessage(f"a header must have {_HEADER.size} bytes, this one has {len(frame)}")
        magic, version, number, simulation, step, member, members, attempt = _HEADER.unpack(frame)
        if magic != _MAGIC:
            raise MalformedMessage("these bytes do not begin as a message of paramserver does")
        if version != VERSION:
            raise MalformedMessage(
                f"protocol version ({version}) must be {VERSION}; install the same paramserver on both sides"
            )
        kind = _KINDS.get(number)
        if kind is None:
            raise MalformedMessage(f"kind ({number}) must be one of {', '.join(str(known) for known in _KINDS)}")
        if simulation < 0 or step < 0:
            raise MalformedMessage(f"simulation ({simulation}) and step ({step}) must be at least 0")
        if member >= members:
            raise MalformedMessage(f"member ({member}) must be below the size of its group ({members})")
        return cls(kind, simulation, step, member, members, attempt)

    def answer(self, kind: MessageKind, step: int = 0) -> Header:
        """The header of an answer about the same simulation."""
        return Header(kind, self.simulation, step, self.member, self.members, self.attempt)


# Fields of samples.


@dataclass(frozen=True)
class ArrayDescriptor:
    """One field as a message describes it. ``dtype`` is one of ``DTYPES``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """How long its frame is."""
        return int(np.prod(self.shape, dtype=object)) * int(self.dtype[2:])


def describe(fields: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """The descriptor of these arrays, whose frames follow in this order: JSON, ``[[name, dtype, shape], ...]``."""
    return json.dumps([[name, wire_dtype(array), array.shape] for name, array in fields.items()]).encode()


def wire_dtype(array: npt.NDArray[Any]) -> str:
    """The dtype in which an array travels, whatever its order of bytes is here.

    Raises:
        Malformed: no message can hold it (objects, text, complex numbers, dates).
    """
    name: str = array.dtype.newbyteorder("<").str
    if name not in DTYPES:
        raise MalformedMessage(f"dtype ({array.dtype}) must be a boolean, an integer or a float; convert the array")
    return name


def raw(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of an array in C order, little-endian; a view where they lie so already."""
    plain = np.ascontiguousarray(array, dtype=wire_dtype(array))
    return plain.reshape(-1).view(np.uint8).data


def read_descriptor(frame: bytes) -> tuple[ArrayDescriptor, ...]:
    """The fields that ``describe_error`` wrote.

    Raises:
        Malformed: anything else.
    """
    rows = _json(frame, "a descriptor")
    if not isinstance(rows, list) or not rows:
        raise MalformedMessage("a descriptor must be a list with at least one field")
    fields = tuple(_shaped(row) for row in rows)
    if len({field.name for field in fields}) < len(fields):
        raise MalformedMessage("a descriptor must name each field once")
    return fields


def _shaped(row: Any) -> ArrayDescriptor:
    match row:
        case [str(name), str(dtype), list(shape)] if (
            name
            and dtype in DTYPES
            and len(shape) <= _MOST_DIMENSIONS
            and all(type(size) is int and 0 <= size < 2**40 for size in shape)
        ):
            return ArrayDescriptor(name, dtype, tuple(shape))
    raise MalformedMessage("a field must be described by its name, a dtype and the sizes of its dimensions")


def array_of(field: ArrayDescriptor, frame: bytes | memoryview) -> npt.NDArray[Any]:
    """The array in a frame, read-only and without a copy.

    Raises:
        Malformed: the frame is longer or shorter than the field.
    """
    if len(frame) != field.bytes:
        raise MalformedMessage(f"{field.name} must have {field.bytes} bytes for its shape, it has {len(frame)}")
    return np.frombuffer(frame, dtype=field.dtype).reshape(field.shape)


# Parameters of simulations.


def pack_parameters(parameters: Any) -> bytes:
    """A vector of numbers as float64."""
    return np.asarray(parameters, dtype="<f8").reshape(-1).tobytes()


def read_parameters(frame: bytes) -> npt.NDArray[np.float64]:
    """The vector, read-only.

    Raises:
        Malformed: no whole number of float64.
    """
    if len(frame) % 8:
        raise MalformedMessage(f"parameters must be float64, {len(frame)} bytes are none")
    return np.frombuffer(frame, dtype="<f8")


# What travels as JSON.


@dataclass(frozen=True)
class TrainerDirectory:
    """The desk's answer to HELLO.

    Attributes:
        trainers: the addresses where their samples go, in the order of trainer_index: ``tcp://host:port``.
        only: the one trainer that gets all samples of this simulation; None: step ``s`` of simulation ``i`` goes to
            trainer ``(i + s) % len(trainers)``.
        window: samples of this member that may be on their way to one trainer.
        timeout_s: how long a client waits for any sign of life.
        steps: samples of the simulation, if known.
        fields: ``[[name, dtype, shape], ...]`` of a whole sample, as ``describe`` writes them; of a group each member
            sends a part along the first dimension.
    """

    trainers: tuple[str, ...]
    only: int | None
    window: int
    timeout_s: float
    steps: int | None
    fields: tuple[ArrayDescriptor, ...]

    def pack(self) -> bytes:
        return pack_json({**asdict(self), "fields": [[f.name, f.dtype, f.shape] for f in self.fields]})

    @classmethod
    def unpack(cls, frame: bytes) -> TrainerDirectory:
        """Read it; Malformed where it is none."""
        body = read_json(frame)
        try:
            fields = tuple(ArrayDescriptor(name, dtype, tuple(shape)) for name, dtype, shape in body["fields"])
            return cls(tuple(body["trainers"]), body["only"], body["window"], body["timeout_s"], body["steps"], fields)
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedMessage(f"this is no welcome ({error})") from error

    def trainer_of(self, simulation: int, step: int) -> int:
        return self.only if self.only is not None else (simulation + step) % len(self.trainers)


@dataclass(frozen=True)
class TrainerJoined:
    """What a trainer tells when it joins.

    Attributes:
        address: where its samples go: ``tcp://host:port``.
        received: simulation -> samples that its buffer has got, also before it was resumed.
        inherited: simulation -> samples that trainers of an earlier run, of another number, had got; the same in all.
    """

    address: str
    received: Mapping[int, int]
    inherited: Mapping[int, int]

    def pack(self) -> bytes:
        return pack_json(asdict(self))

    @classmethod
    def unpack(cls, frame: bytes) -> TrainerJoined:
        """Read it; Malformed where it is none."""
        body = read_json(frame)
        try:
            counts = ({int(key): int(n) for key, n in body[name].items()} for name in ("received", "inherited"))
            return cls(str(body["address"]), *counts)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise MalformedMessage(f"this is no announcement of a trainer ({error})") from error


@dataclass(frozen=True)
class SimulationReport:
    """What a trainer tells each second.

    Attributes:
        received: simulation -> samples that its buffer has got, also before it was resumed; those that are not named
            are as they were.
        heard: (simulation, member) of all from which anything came since the last report.
        figures: totals so far, for people and summaries: received, duplicated, refused and the like.
        waiting: simulations of which samples have arrived that the buffer has not got yet.
    """

    received: Mapping[int, int]
    heard: Sequence[tuple[int, int]] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    waiting: Sequence[int] = ()

    def pack(self) -> bytes:
        return pack_json(asdict(self))

    @classmethod
    def unpack(cls, frame: bytes) -> SimulationReport:
        """Read it; Malformed where it is none."""
        body = read_json(frame)
        try:
            received = {int(key): int(n) for key, n in body["received"].items()}
            heard = tuple((int(simulation), int(member)) for simulation, member in body["heard"])
            return cls(received, heard, dict(body["figures"]), tuple(int(number) for number in body["waiting"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise MalformedMessage(f"this is no report of a trainer ({error})") from error


def pack_json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()


def read_json(frame: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        Malformed: anything else.
    """
    body = _json(frame, "the body")
    if not isinstance(body, dict):
        raise MalformedMessage("the body must be a JSON object")
    return body


def _json(frame: bytes, what: str) -> Any:
    try:
        return json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"{what} must be JSON") from error

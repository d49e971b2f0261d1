"""The wire protocol between clients, trainers and the coordinator of an online run: frames of bytes, never pickles.

docs/protocol.md states which kind of message is sent by whom, when, and what follows its header. This file holds the
kinds, the header, and the encoding of everything that follows it. It knows no sockets. The header is in network byte
order, arrays are little-endian. What a publisher sends is in weights.py.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

VERSION = 1
"""Version of this protocol. A client and a run with different versions refuse each other with a clear message."""

NO_MORE_SAMPLES = "the run wants no more samples"
"""The text of OVER when the run ends normally."""

Frames = Sequence[bytes]

Message = tuple[bytes, list[Any]]
"""A peer's routing id, and the frames to or from it."""

_MAGIC = b"ps"
_HEADER = struct.Struct("!2sBBqqHHI")
DTYPES = frozenset({"|b1", "|i1", "|u1"} | {f"<{kind}{size}" for kind in "iu" for size in (2, 4, 8)}) | frozenset(
    {"<f2", "<f4", "<f8"}
)
"""The dtypes that a message may hold: kind, size and byte order as numpy writes them."""
_MAX_DIMENSIONS = 16


class MessageKind(IntEnum):
    """What a message asks or reports; docs/protocol.md has a table of them."""

    # The numbers are on the wire: a change of one needs a new ``VERSION``.
    HELLO = 1
    BYE = 2
    PING = 3
    FINISH = 4
    WELCOME = 17
    PONG = 18
    REFUSED = 19
    OVER = 20
    OPEN = 33
    SAMPLE = 34
    HEARTBEAT = 35
    HAD = 36
    ACK = 49
    JOIN = 65
    READY = 66
    REPORT = 67
    DRAIN = 68
    GET = 81
    WEIGHTS = 82
    UNCHANGED = 83


_KINDS = {int(kind): kind for kind in MessageKind}


class MalformedMessage(ValueError):  # noqa: N818 - describes a message, not a failure of this process
    """The frames are no message of this protocol."""

    reason: Final = "malformed"


class Header(NamedTuple):
    """The first frame of a message. A tuple, because one is created for each sample that is sent or received.

    Attributes:
        simulation: number of the simulation; the trainer's index in JOIN, REPORT and a trainer's OVER; else 0.
        step: number of a sample, from 0; a count of samples in ACK and BYE.
        member: index of the process in the simulation's group.
        members: processes in the group, at least 1.
        attempt: how many times this simulation was started before.
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
        """Decode the first frame of a message.

        Raises:
            MalformedMessage: another length, protocol or version, an unknown kind, a negative number, or a member
                outside its group.
        """
        if len(frame) != _HEADER.size:
            raise MalformedMessage(f"a header must have {_HEADER.size} bytes, this one has {len(frame)}")
        # Magic and version first: the rest of another protocol's bytes has no meaning here.
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
        # What comes from the network is checked once, here; all code behind relies on it.
        if member >= members:
            raise MalformedMessage(f"member ({member}) must be below the size of its group ({members})")
        # As cls(...), in half of the time.
        return tuple.__new__(cls, (kind, simulation, step, member, members, attempt))

    def reply(self, kind: MessageKind, step: int = 0) -> Header:
        """The header of a reply about the same member of the same simulation."""
        return Header(kind, self.simulation, step, self.member, self.members, self.attempt)


def first_frame(frames: Frames) -> bytes:
    """The frame with the header.

    Raises:
        MalformedMessage: there is none; ``receive_parts`` keeps none of a message that is too large.
    """
    if not frames:
        raise MalformedMessage("a message must have a header, and no more parts and bytes than its kind needs")
    return frames[0]


# The fields of a sample.


@dataclass(frozen=True)
class ArrayDescriptor:
    """Name, dtype (one of ``DTYPES``) and shape of one field of a sample."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        # dtype=object: a shape from the network must not overflow an int64.
        return int(np.prod(self.shape, dtype=object)) * int(self.dtype[2:])


VERSION_ROW = ArrayDescriptor("version", "<i8", (2,))
"""The version of the weights with which a sample was made, generation and step, in its descriptor."""


def pack_descriptor(fields: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Describe the arrays whose frames follow in this order: JSON, ``[[name, dtype, shape], ...]``.

    Raises:
        MalformedMessage: no message can hold an array of this dtype (objects, text, complex numbers, dates).
    """
    return json.dumps([[name, wire_dtype(array), array.shape] for name, array in fields.items()]).encode()


def wire_dtype(array: npt.NDArray[Any]) -> str:
    """The dtype of an array on the wire, whatever its byte order in memory.

    Raises:
        MalformedMessage: see ``pack_descriptor``.
    """
    # Only the name of the dtype; the sender converts the bytes.
    name: str = array.dtype.newbyteorder("<").str
    if name not in DTYPES:
        raise MalformedMessage(f"dtype ({array.dtype}) must be a boolean, an integer or a float; convert the array")
    return name


def unpack_descriptor(frame: bytes) -> tuple[ArrayDescriptor, ...]:
    """Decode what ``pack_descriptor`` encodes.

    Raises:
        MalformedMessage: the frame holds anything else.
    """
    rows = _decode_json(frame, "a descriptor")
    if not isinstance(rows, list) or not rows:
        raise MalformedMessage("a descriptor must be a list with at least one field")
    fields = tuple(_array_descriptor(row) for row in rows)
    # A second field of one name would replace the first without an error in the dictionary of the sample.
    if len({field.name for field in fields}) < len(fields):
        raise MalformedMessage("a descriptor must name each field once")
    return fields


def _array_descriptor(row: Any) -> ArrayDescriptor:
    match row:
        case [str(name), str(dtype), list(shape)] if (
            name
            and dtype in DTYPES
            and len(shape) <= _MAX_DIMENSIONS
            # ``type``, as a bool is an int too. The limit keeps a product of sizes from a network peer small enough to
            # compute.
            and all(type(size) is int and 0 <= size < 2**40 for size in shape)
        ):
            return ArrayDescriptor(name, dtype, tuple(shape))
    raise MalformedMessage("a field must be described by its name, a dtype and the sizes of its dimensions")


# Opening a simulation.

_DIGEST_LENGTH = 64


def start_secret(token: bytes, simulation: int, attempt: int, density_ratio: float | None = None) -> str:
    """What the clients of a simulation that the run starts must show. All ranks derive it from the token of the run.

    The ``density_ratio`` of its parameters, if there is one, follows in clear text: so trainers receive it from the
    coordinator, before the first sample, and no client needs to know of it or can change it.
    """
    ratio = "" if density_ratio is None else f" {density_ratio!r}"
    return hmac.new(token, f"{simulation} {attempt}{ratio}".encode(), hashlib.sha256).hexdigest() + ratio


def density_ratio_of(secret: bytes) -> float | None:
    """The ``density_ratio`` in a secret that ``check_secret`` has accepted."""
    _, _, ratio = secret.decode().partition(" ")
    return float(ratio) if ratio else None


def pack_opening(parameters: Any, secret: str | None) -> list[bytes]:
    """The body of HELLO and OPEN."""
    return [pack_parameters(parameters), *([] if secret is None else [secret.encode()])]


def check_secret(token: bytes, header: Header, body: Sequence[Any]) -> str | None:
    """Why the HELLO or OPEN of a simulation that the run starts must be refused; None = it must not."""
    shown = bytes(body[1]) if len(body) == 2 else b""
    digest, ratio = shown[:_DIGEST_LENGTH], shown[_DIGEST_LENGTH:]
    expected = hmac.new(token, f"{header.simulation} {header.attempt}".encode() + ratio, hashlib.sha256).hexdigest()
    # In constant time: how long a refusal takes must not reveal how much of it was right.
    if hmac.compare_digest(digest, expected.encode()):
        return None
    return (
        f"simulation {header.simulation}, attempt {header.attempt}, must be opened with the secret of this start; open "
        "it in the process that the run has started, which finds the secret in PARAMSERVER_SECRET"
    )


def pack_parameters(parameters: Any) -> bytes:
    """Encode a vector of numbers as float64."""
    return np.asarray(parameters, dtype="<f8").reshape(-1).tobytes()


def unpack_parameters(frame: bytes) -> npt.NDArray[np.float64]:
    """Decode the vector; the array is read-only.

    Raises:
        MalformedMessage: the length is no multiple of 8 bytes.
    """
    if len(frame) % 8:
        raise MalformedMessage(f"parameters must be float64, {len(frame)} bytes are none")
    # A view of the frame, without a copy.
    return np.frombuffer(frame, dtype="<f8")


def pack_integers(numbers: Any) -> bytes:
    """Encode whole numbers as int64: the steps of HAD, and the ``released`` of ACK."""
    return np.asarray(numbers, dtype="<i8").reshape(-1).tobytes()


def unpack_integers(frame: bytes) -> list[int]:
    """Decode them.

    Raises:
        MalformedMessage: the length is no multiple of 8 bytes, or one is negative.
    """
    if len(frame) % 8:
        raise MalformedMessage(f"numbers must be int64, {len(frame)} bytes are none")
    numbers: list[int] = np.frombuffer(frame, dtype="<i8").tolist()
    if min(numbers, default=0) < 0:
        raise MalformedMessage(f"numbers ({min(numbers)}) must be at least 0")
    return numbers


# Bodies in JSON.


@dataclass(frozen=True)
class TrainerDirectory:
    """The body of WELCOME: where a client sends its samples, and what they must be; docs/protocol.md has its keys."""

    trainers: tuple[str, ...]
    single_trainer: int | None
    window: int
    timeout_s: float
    steps: int | None
    fields: tuple[ArrayDescriptor, ...]
    optional: tuple[ArrayDescriptor, ...] = ()
    first_step: int = 0

    def pack(self) -> bytes:
        fields, optional = ([[f.name, f.dtype, f.shape] for f in rows] for rows in (self.fields, self.optional))
        body = {**asdict(self), "fields": fields, "optional": optional}
        return pack_json({key: value for key, value in body.items() if key not in ("optional", "first_step") or value})

    @classmethod
    def unpack(cls, frame: bytes) -> TrainerDirectory:
        """Decode it. Raises ``MalformedMessage`` if the frame holds anything else."""
        body = unpack_json(frame)
        with decoding("this is no welcome"):
            fields, optional = (
                tuple(ArrayDescriptor(name, dtype, tuple(shape)) for name, dtype, shape in rows)
                for rows in (body["fields"], body.get("optional", ()))
            )
            addresses, timeout_s, first_step = tuple(body["trainers"]), body["timeout_s"], body.get("first_step", 0)
            single, window, steps = body["single_trainer"], body["window"], body["steps"]
            return cls(addresses, single, window, timeout_s, steps, fields, optional, int(first_step))

    def trainer_for(self, simulation: int, step: int) -> int:
        """Index of the trainer that receives this sample. The same step goes to the same trainer in every attempt."""
        # A function of both numbers alone: after a restart each trainer receives the samples that it knows, and drops
        # them as duplicates.
        return self.single_trainer if self.single_trainer is not None else (simulation + step) % len(self.trainers)


@dataclass(frozen=True)
class TrainerJoined:
    """The body of JOIN.

    Attributes:
        address: where this trainer receives samples: ``tcp://host:port``.
        received: simulation -> samples in this trainer's buffer so far, including those before a resume.
        inherited: simulation -> samples received by the trainers of an earlier run with another number of trainers,
            and in no buffer; the same on all trainers.
        lost: simulation -> samples that died with a trainer which this one replaces, as far as it knows.
        first_missing: simulation -> the first step for this trainer that it has not received.
    """

    address: str
    received: Mapping[int, int]
    inherited: Mapping[int, int]
    lost: Mapping[int, int] = field(default_factory=dict)
    first_missing: Mapping[int, int] = field(default_factory=dict)

    def pack(self) -> bytes:
        optional = ("lost", "first_missing")
        return pack_json({key: value for key, value in asdict(self).items() if key not in optional or value})

    @classmethod
    def unpack(cls, frame: bytes) -> TrainerJoined:
        """Decode it. Raises ``MalformedMessage`` if the frame holds anything else."""
        body = unpack_json(frame)
        with decoding("this is no announcement of a trainer"):
            optional = (body.get(name, {}) for name in ("lost", "first_missing"))
            return cls(str(body["address"]), *map(_counts, (body["received"], body["inherited"], *optional)))


@dataclass(frozen=True)
class SimulationReport:
    """The body of REPORT.

    Attributes:
        received: simulation -> samples in this trainer's buffer so far; simulations without a change are left out.
        active: (simulation, member) of all that sent a message since the last report.
        counters: totals for logs and summaries: received, duplicated, refused and others.
        pending: simulations of which samples have arrived that are not in the buffer yet.
        lost: simulation -> samples that died with a trainer which this one replaces.
        first_refusals: kind -> the first message of this kind that was refused, and why.
        losses: simulation -> mean loss of its samples that were trained on since the last report.
        first_missing: simulation -> the first step for this trainer that it has not received, of those in ``received``.
        parts: simulation -> parts that have arrived of samples of which other parts are missing.
    """

    received: Mapping[int, int]
    active: Sequence[tuple[int, int]] = ()
    counters: Mapping[str, Any] = field(default_factory=dict)
    pending: Sequence[int] = ()
    lost: Mapping[int, int] = field(default_factory=dict)
    first_refusals: Mapping[str, str] = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)
    first_missing: Mapping[int, int] = field(default_factory=dict)
    parts: Mapping[int, int] = field(default_factory=dict)

    def pack(self) -> bytes:
        optional = ("first_missing", "parts")
        return pack_json({key: value for key, value in asdict(self).items() if key not in optional or value})

    @classmethod
    def unpack(cls, frame: bytes) -> SimulationReport:
        """Decode it. Raises ``MalformedMessage`` if the frame holds anything else."""
        body = unpack_json(frame)
        with decoding("this is no report of a trainer"):
            return cls(
                received=_counts(body["received"]),
                active=tuple((int(simulation), int(member)) for simulation, member in body["active"]),
                counters=dict(body["counters"]),
                pending=tuple(int(number) for number in body["pending"]),
                lost=_counts(body["lost"]),
                first_refusals={str(kind): str(text) for kind, text in body["first_refusals"].items()},
                losses={int(key): float(loss) for key, loss in body["losses"].items()},
                first_missing=_counts(body.get("first_missing", {})),
                parts=_counts(body.get("parts", {})),
            )


def _counts(rows: Mapping[str, Any]) -> dict[int, int]:
    return {int(key): int(n) for key, n in rows.items()}


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Raise ``MalformedMessage``, with ``what`` is wrong, where a body has other keys or values than its kind."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise MalformedMessage(f"{what} ({error})") from error


def pack_json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()


def unpack_json(frame: bytes) -> dict[str, Any]:
    """Decode a JSON object.

    Raises:
        MalformedMessage: the frame holds anything else.
    """
    body = _decode_json(frame, "the body")
    if not isinstance(body, dict):
        raise MalformedMessage("the body must be a JSON object")
    return body


def _decode_json(frame: bytes, what: str) -> Any:
    try:
        return json.loads(frame)
    except (ValueError, RecursionError) as error:  # RecursionError: a frame of ten thousand brackets
        raise MalformedMessage(f"{what} must be JSON") from error

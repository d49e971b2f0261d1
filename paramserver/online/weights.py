"""Versions of the model: how they are named, laid out in bytes and sent to subscribers; how old those of samples are.

This file knows numpy, and neither sockets nor torch. A version is a JSON description and one frame with the values of
all tensors, each of which begins at a multiple of 64 bytes. Floating-point values are sent as they are, or rounded to
bfloat16. A rounded version may be sent as the difference to another one, in two frames that zlib has compressed: where
16-bit words differ, and by how much.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paramserver.online.protocol import MalformedMessage, decoding, unpack_json

EXACT, ROUNDED, DIFFERENCE, MAPPED = "exact", "bfloat16", "difference", "mapped"
"""How the values of a version are sent."""

RUN_ID = "#"
"""Between the name of a run and an id, in messages: another run may have the same name."""

BFLOAT16 = "bfloat16"
"""The dtype, of a description, that numpy lacks."""

_ALIGNMENT = 64
_LONGEST_GAP = 255  # that one byte can hold, as a part of a longer one
# Beyond this share of changed words a difference is not even compressed: it would be larger than the version.
_MOST_CHANGED = 0.5

Array = npt.NDArray[Any]


class Version(NamedTuple):
    """Names a version within a run. Versions are compared in this order.

    A run that returns to a checkpoint, as after the death of rank 0, begins a new generation. A version of that is
    newer than all before, also if its step is smaller.

    Example::

        >>> Version(2, 100) > Version(1, 150)
        True
    """

    generation: int
    step: int


NO_VERSION = Version(0, 0)
"""Older than every version."""


def effective_step(version: Sequence[int], starts: Sequence[Version]) -> int:
    """Return the step from which a version differs from those of today: that of a version that was not taken back.

    A return to a checkpoint takes versions after it back. What was made with one of them counts from the checkpoint.
    """
    generation, step = version
    return min((start.step for start in starts if start.generation > generation and start.step < step), default=step)


class TensorLayout(NamedTuple):
    """Name, dtype and shape of a tensor. The dtype is numpy's name of it, with the byte order, or ``BFLOAT16``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.dtype == BFLOAT16 else self.dtype)

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.numpy_dtype.itemsize


def offsets(layouts: Sequence[TensorLayout]) -> tuple[list[int], int]:
    """Return where the values of each tensor begin, and how many bytes all take."""
    found, end = [], 0
    for layout in layouts:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        found.append(begin)
        end = begin + layout.num_bytes
    return found, end


def rounded_layouts(layouts: Sequence[TensorLayout]) -> list[TensorLayout]:
    """Return the layouts of the same tensors with floating-point values in bfloat16."""
    return [one._replace(dtype=BFLOAT16) if one.dtype in ("<f2", "<f4", "<f8") else one for one in layouts]


@dataclass(frozen=True)
class WeightsRequest:
    """What a subscriber asks for: the body of GET, whose keys docs/protocol.md has."""

    run: str = ""
    encoding: str = EXACT
    timeout_s: float = 0.0
    waits: bool = False
    holds: bool = False
    host: str = ""

    def pack(self) -> bytes:
        return json.dumps({name: value for name, value in vars(self).items() if name != "host" or value}).encode()

    @classmethod
    def unpack(cls, frame: bytes) -> WeightsRequest:
        """Decode a request.

        Raises:
            MalformedMessage: it is none.
        """
        fields = unpack_json(frame)
        run, encoding, timeout_s, waits, holds = (
            fields.get(name) for name in ("run", "encoding", "timeout_s", "waits", "holds")
        )
        if not isinstance(run, str) or encoding not in (EXACT, ROUNDED):
            raise MalformedMessage(f"GET must have a run and an encoding ({EXACT} or {ROUNDED})")
        is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
        if not is_number or not 0 <= float(timeout_s or 0) < float("inf"):
            raise MalformedMessage("GET must have a timeout_s of at least 0")
        if not isinstance(waits, bool) or not isinstance(holds, bool):
            raise MalformedMessage("GET must have waits and holds, each true or false")
        if not isinstance(host := fields.get("host", ""), str):
            raise MalformedMessage("GET must have a host that is text, or none")
        return cls(run, encoding, float(timeout_s or 0), waits, holds, host)


class MappedFile(NamedTuple):
    """Where values are in memory: the descriptor of a file of the process ``pid``, at whose end is the ``id``."""

    pid: int
    descriptor: int
    id: str


@dataclass(frozen=True)
class Description:
    """The JSON of WEIGHTS, whose keys docs/protocol.md has."""

    run: str
    encoding: str
    tensors: tuple[TensorLayout, ...]
    starts: tuple[Version, ...]
    base: Version | None = None
    file: MappedFile | None = None

    def pack(self) -> bytes:
        return json.dumps({name: value for name, value in vars(self).items() if name != "file" or value}).encode()

    @classmethod
    def unpack(cls, frame: bytes) -> Description:
        """Decode a description.

        Raises:
            MalformedMessage: it is none.
        """
        fields = unpack_json(frame)
        with decoding("WEIGHTS must describe a version of a model"):
            tensors = tuple(
                TensorLayout(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in fields["tensors"]
            )
            for tensor in tensors:
                if tensor.numpy_dtype.kind not in "biufc" or min(tensor.shape, default=0) < 0:
                    raise ValueError(f"{tensor.name} must be an array of numbers; it is of {tensor.dtype}")
            base, file = fields["base"], fields.get("file")
            return cls(
                str(fields["run"]),
                str(fields["encoding"]),
                tensors,
                tuple(Version(*map(int, start)) for start in fields["starts"]),
                None if base is None else Version(*map(int, base)),
                None if file is None else MappedFile(int(file[0]), int(file[1]), str(file[2])),
            )


def encode_difference(old: bytes | memoryview, new: bytes | memoryview) -> list[bytes] | None:
    """Return two frames from which ``apply_difference`` makes ``new`` out of ``old``; None if that does not pay."""
    if len(old) != len(new):
        return None
    before, after = _words(old), _words(new)
    changed = np.flatnonzero(before != after)
    if len(changed) > _MOST_CHANGED * len(after):
        return None
    # Bytes of 255 add up to a longer gap, which ends with a smaller one.
    gaps = np.diff(changed, prepend=-1) - 1
    whole, rest = np.divmod(gaps, _LONGEST_GAP)
    ends = np.cumsum(whole + 1) - 1
    places = np.full(int(ends[-1]) + 1 if len(ends) else 0, _LONGEST_GAP, np.uint8)
    places[ends] = rest
    # Most values change to the next one: the second bytes are then all alike.
    by = (after[changed] - before[changed]).view(np.uint8).reshape(-1, 2)
    frames = [zlib.compress(places.tobytes(), 1), zlib.compress(np.ascontiguousarray(by.T).tobytes(), 1)]
    return frames if sum(map(len, frames)) < len(after) * after.itemsize else None


def apply_difference(old: bytes | memoryview, frames: Sequence[bytes | memoryview]) -> bytes:
    """Return the values that were encoded as a difference to ``old``.

    Raises:
        MalformedMessage: the frames are no difference to it.
    """
    before = _words(old)
    try:
        places = np.frombuffer(_decompress(frames[0], 2 * len(before)), np.uint8)
        by = np.frombuffer(_decompress(frames[1], 2 * len(before)), np.uint8)
        ends = np.flatnonzero(places != _LONGEST_GAP)
        # Each place is the sum of all bytes before it, plus one for each that ended before.
        changed = np.cumsum(places, dtype=np.int64)[ends] + np.arange(len(ends))
        after = before.copy()
        after[changed] += np.ascontiguousarray(by.reshape(2, -1).T).view("<u2").reshape(-1)
    except (zlib.error, LookupError, ValueError) as error:
        raise MalformedMessage(f"this is no difference to the version that it names ({error})") from error
    found: bytes = after.tobytes()
    return found[: len(old)]


def _words(values: bytes | memoryview) -> npt.NDArray[np.uint16]:
    padded = bytes(values) + b"\0" if len(values) % 2 else values
    return np.frombuffer(padded, "<u2")


def _decompress(frame: bytes | memoryview, limit: int) -> bytes:
    decompressor = zlib.decompressobj()
    found = decompressor.decompress(frame, limit + 1)
    if len(found) > limit or not decompressor.eof:
        raise ValueError("it is too long, or has no end")
    return found


class Weights(Mapping[str, Array]):
    """One version of a model's parameters and module buffers, by their names in its ``state_dict()``.

    The arrays are read-only. Values that were rounded to bfloat16 are float32 arrays.

    Attributes:
        version: generation and step, for ``Subscriber.newer_than``.
        run: names the run: a version of another one is neither newer nor older.
        run_name: the name of the run, for messages.
        starts: the first step of each generation; see ``is_current``.
        data: the values of all tensors, laid out as ``offsets`` has it.
    """

    def __init__(self, version: Version, description: Description, data: bytes | memoryview) -> None:
        self.version = version
        self.run = description.run
        self.run_name = description.run.rpartition(RUN_ID)[0] or description.run
        self.starts = description.starts
        self.data = data
        self.tensors = description.tensors
        begins, size = offsets(self.tensors)
        if len(data) != size:
            raise MalformedMessage(f"the values of WEIGHTS ({len(data)} bytes) must have {size} bytes")
        self._begins = {tensor.name: (tensor, begin) for tensor, begin in zip(self.tensors, begins, strict=True)}
        self._arrays: dict[str, Array] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the values itself: what they are mapped from is on this machine only."""
        return {**vars(self), "data": bytes(self.data), "_arrays": {}}

    @property
    def step(self) -> int:
        """The number of updates that the version has."""
        return self.version.step

    def is_current(self, version: Version) -> bool:
        """Return whether another version was not taken back by a return to a checkpoint.

        Example::

            >>> about = Description("run", EXACT, (), (Version(1, 0), Version(2, 100)))
            >>> weights = Weights(Version(2, 120), about, b"")
            >>> weights.is_current(Version(1, 100)), weights.is_current(Version(1, 101))
            (True, False)
        """
        return effective_step(version, self.starts) == version.step

    def __getitem__(self, name: str) -> Array:
        if name not in self._arrays:
            tensor, begin = self._begins[name]
            array = np.frombuffer(self.data, np.uint8)[begin : begin + tensor.num_bytes].view(tensor.numpy_dtype)
            if tensor.dtype == BFLOAT16:
                array = (array.astype("<u4") << 16).view("<f4")
            array = array.reshape(tensor.shape)
            array.flags.writeable = False
            self._arrays[name] = array
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._begins)

    def __len__(self) -> int:
        return len(self._begins)

    def __repr__(self) -> str:
        return f"<Weights of {self.run_name!r}, generation {self.version.generation}, step {self.step}>"

    def state_dict(self) -> dict[str, Any]:
        """Return torch tensors, for ``load_state_dict`` of the same model. Needs torch."""
        import torch

        return {name: torch.from_numpy(np.array(array)) for name, array in self.items()}


class SampleVersions:
    """Checks the versions of a trainer's samples, and counts how stale those are that it serves.

    The staleness of a sample is the number of updates between its version and that of a step. For a version that was
    taken back it counts from the checkpoint that was returned to.

    Threads: the receiver thread calls ``reason_to_refuse``, the training thread sets ``step`` and ``limit``, which are
    single numbers; the rest belongs to the training thread.

    Args:
        starts: the first version of each generation of the run, in order.
        max_staleness: ``buffer.max_staleness``.

    Attributes:
        step: of the version that the next batch is for.
        limit: step of the newest version that there can be by now; None if it is not known.
        newest: the newest version that was received.
    """

    def __init__(self, starts: Sequence[Version], max_staleness: int | None) -> None:
        self.starts = tuple(starts)
        self.max_staleness = max_staleness
        self.step = self.starts[-1].step
        self.limit: int | None = None
        self.newest = NO_VERSION
        self._first_steps = {start.generation: start.step for start in self.starts}
        self._served: Counter[int] = Counter()

    def reason_to_refuse(self, version: Sequence[int]) -> str | None:
        """Return why a sample with this version must be refused; None if it must not."""
        generation, step = found = Version(*map(int, version))
        if found == NO_VERSION:
            if self.max_staleness is None:
                return None
            return "version (0, 0) must be that of the weights with buffer.max_staleness; send weights.version"
        if step < self._first_steps.get(generation, step + 1):
            begins = ", ".join(f"({start.generation}, {start.step})" for start in self.starts)
            return (
                f"version ({generation}, {step}) must be one of this run, whose generations begin with {begins}; send "
                "weights.version"
            )
        if self.limit is not None and generation == self.starts[-1].generation and step > self.limit:
            return f"version ({generation}, {step}) must not be newer than the model ({generation}, {self.limit})"
        self.newest = max(self.newest, found)
        return None

    @property
    def oldest(self) -> int | None:
        """The oldest step that may be served; None = any."""
        return None if self.max_staleness is None else self.step - self.max_staleness

    def step_of(self, sample: Any) -> int:
        """Return the step from which the staleness of a sample counts."""
        step = effective_step(sample["version"].tolist(), self.starts)
        # A step that is beyond all is one that no model had, and that sample must not be kept for ever.
        return step if self.max_staleness is None else min(step, self.step + self.max_staleness + 1)

    def count_served(self, versions: npt.NDArray[np.int64]) -> None:
        """Count the staleness of the samples of a batch; of those that have a version."""
        for version, count in zip(*np.unique(versions, axis=0, return_counts=True), strict=True):
            if tuple(version) != NO_VERSION:
                # A version that is newer than the step was made while this trainer prepared it.
                self._served[max(0, self.step - effective_step(version.tolist(), self.starts))] += int(count)

    def pop_histogram(self) -> dict[str, int]:
        """Return {staleness: samples that were served} since the last call."""
        served, self._served = self._served, Counter()
        return {str(staleness): count for staleness, count in sorted(served.items())}

    def describe_starvation(self, trainer_index: int, refused: int) -> str:
        """Return the sentence for the user where no batch can be made, as samples are too old."""
        generation, step = self.newest
        return (
            f"trainer {trainer_index} waits for data: {refused} samples were refused since its last batch, as they "
            f"are older than buffer.max_staleness ({self.max_staleness} updates); the newest version that was received "
            f"is ({generation}, {step}), and the model has step {self.step}; let what sends them take newer weights, "
            "or raise buffer.max_staleness"
        )

"""Publishes versions of the model to subscribers: on rank 0, in a thread of its own, in every mode.

``ModelPublisher`` owns the thread and its socket. ``SubscriberRequests`` decides what is sent to whom; it knows neither
sockets nor clocks. A version is copied only if a subscriber waits for one, and sent by reference to all of them.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paramserver.config import PublishConfig
from paramserver.errors import StorageError, TaskError, TrainingError
from paramserver.fileio import atomic_write_text
from paramserver.online.protocol import Header, MalformedMessage, Message, MessageKind, first_frame
from paramserver.online.router import RouterSocket, RouterThread
from paramserver.online.spec import check_keys
from paramserver.online.weights import (
    BFLOAT16,
    DIFFERENCE,
    EXACT,
    MAPPED,
    ROUNDED,
    RUN_ID,
    Description,
    MappedFile,
    TensorLayout,
    Version,
    WeightsRequest,
    encode_difference,
    offsets,
    rounded_layouts,
)
from paramserver.platform import SHARES_MEMORY, host_number, memory_file, num_usable_cores, seal

OVER_TEXT = "the run has ended, and publishes no more versions"
LONGEST_WAIT_S = 600.0
"""The longest time for which a request waits."""

_DTYPES = {
    torch.bool: "|b1",
    torch.uint8: "|u1",
    torch.int8: "|i1",
    torch.int16: "<i2",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.float16: "<f2",
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.complex64: "<c8",
    torch.complex128: "<c16",
    torch.bfloat16: BFLOAT16,
}
_MOST_PEERS = 10_000
# Rounded versions to which differences can be sent.
_NUM_KEPT = 8
# For how long a version stays where a subscriber can map it, which may look for its reply only after some work.
_MAPPED_S = 10.0
# Subscribers of this host read a version on the cores that train. So many do at once, and a subscriber that has not
# asked again after so many seconds counts no more.
NUM_READERS = max(1, num_usable_cores() // 2)
TURN_S = 0.003
_MAX_PARTS, _MAX_BYTES = 3, 2**16
_MAX_MESSAGES_AT_ONCE = 256
_POLL_S = 0.5
_CLOSE_S = 10.0

_log = logging.getLogger("paramserver.publisher")


class VersionMemory:
    """Memory for the values of a version, which subscribers of this host map.

    It is a ``file``, at whose end is its id; None where memory is not shared, or there is no descriptor left.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.file: MappedFile | None = None
        try:
            self.file, self.flat = self._map(size) if SHARES_MEMORY else (None, torch.empty(size, dtype=torch.uint8))
        except OSError as error:
            _warn_once(f"versions are sent to subscribers of this host too, as they cannot map them ({error})")
            self.flat = torch.empty(size, dtype=torch.uint8)

    def _map(self, size: int) -> tuple[MappedFile, Tensor]:
        descriptor, number = memory_file("paramserver-version", sealable=True), secrets.token_hex(16)
        weakref.finalize(self, os.close, descriptor)
        os.pwrite(descriptor, number.encode(), size)
        seal(descriptor)
        mapped = torch.frombuffer(mmap.mmap(descriptor, size + len(number)), dtype=torch.uint8)
        return MappedFile(os.getpid(), descriptor, number), mapped[:size]


@cache
def _warn_once(text: str) -> None:
    _log.warning(text)


class ModelVersion:
    """A private copy of a model's parameters and module buffers, on the CPU, as it is sent.

    It is in ``memory`` if that has the right size.

    Raises:
        TaskError: a tensor has a dtype that no subscriber can receive.
    """

    def __init__(self, version: Version, tensors: Mapping[str, Tensor], memory: VersionMemory | None = None) -> None:
        self.version = version
        for name, tensor in tensors.items():
            if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
                kind = str(tensor.dtype if tensor.layout is torch.strided else tensor.layout).removeprefix("torch.")
                raise TaskError(f"publish cannot send {name} of the model, which is of {kind}; remove the section")
        self.layouts = [TensorLayout(name, _DTYPES[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
        size = offsets(self.layouts)[1]
        self.memory = memory if memory is not None and memory.size == size else VersionMemory(size)
        self._tensors = _copy(self.layouts, list(tensors.values()), self.memory.flat)

    @property
    def values(self) -> memoryview:
        return self.memory.flat.numpy().data

    @cached_property
    def rounded(self) -> tuple[list[TensorLayout], memoryview]:
        """The same with floating-point values in bfloat16."""
        layouts = rounded_layouts(self.layouts)
        flat = torch.empty(offsets(layouts)[1], dtype=torch.uint8)
        _copy(layouts, self._tensors, flat)
        return layouts, flat.numpy().data


def _copy(layouts: list[TensorLayout], tensors: list[Tensor], flat: Tensor) -> list[Tensor]:
    """Copy tensors to their places in a flat tensor of bytes; return these parts of it."""
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    begins, size = offsets(layouts)
    for layout, begin, following in zip(layouts, begins, [*begins[1:], size], strict=True):
        flat[begin + layout.num_bytes : following].zero_()  # what is between two tensors
    parts = [
        flat[begin : begin + layout.num_bytes].view(dtypes[layout.dtype]).view(layout.shape)
        for layout, begin in zip(layouts, begins, strict=True)
    ]
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor)
    return parts


@dataclass
class _Waiting:
    """A request without a reply yet."""

    have: Version
    request: WeightsRequest
    number: int
    deadline: float


class SubscriberRequests:
    """Decides which version each subscriber is sent. Every use holds the lock of the publisher.

    ``may_copy`` returns whether the current version may be copied, and is newer than the ``newest`` copy. A request
    then waits for that, and ``is_asked``. A subscriber has one request at a time: another one replaces it. Of the
    subscribers on this host few are sent a version at once.
    """

    def __init__(self, run: str, starts: tuple[Version, ...], may_copy: Callable[[], bool]) -> None:
        self.newest: ModelVersion | None = None
        self.is_asked = False
        self.waiting: dict[bytes, _Waiting] = {}
        self._run = run
        self._starts = starts
        self._may_copy = may_copy
        self._peers: dict[bytes, None] = {}
        # Rounded versions that were sent, to which there may be differences.
        self._kept: deque[tuple[Version, list[TensorLayout], memoryview]] = deque(maxlen=_NUM_KEPT)
        self._differences: dict[Version, list[bytes] | None] = {}  # to ``newest``, by what a subscriber has
        self._host = host_number()
        self._descriptions: dict[str, bytes] = {}  # of ``newest``, by encoding
        # What subscribers were sent to map, until they ask again, and when that ends in any case.
        self._mapped: dict[bytes, tuple[VersionMemory, float | None]] = {}
        self._due: set[bytes] = set()  # of those in ``waiting``: there is a version that they do not have
        self._readers: dict[bytes, float] = {}  # on this host, and until when they count

    def handle(self, peer: bytes, frames: list[Any], now: float) -> list[Message]:
        """Return the replies to a message."""
        try:
            header = Header.unpack(first_frame(frames))
            if header.kind is not MessageKind.GET or len(frames) != 2:
                raise MalformedMessage(f"{header.kind.name} is nothing that a publisher is sent")
            request = WeightsRequest.unpack(frames[1])
        except MalformedMessage as error:
            return [(peer, [Header(MessageKind.REFUSED).pack(), str(error).encode()])]
        self._mapped.pop(peer, None)
        self._readers.pop(peer, None)
        self._due.discard(peer)
        self._peers[peer] = None
        if len(self._peers) > _MOST_PEERS:  # the first one has long left, or asks again
            del self._peers[next(iter(self._peers))]
        have = Version(header.simulation, header.step) if request.run == self._run else Version(0, 0)
        deadline = now + min(request.timeout_s, LONGEST_WAIT_S)
        waiting = self.waiting[peer] = _Waiting(have, request, header.attempt, deadline)
        is_newer = self.newest is not None and self.newest.version > have
        if self._may_copy():
            self.is_asked = True
        elif is_newer:
            self._due.add(peer)
        elif not request.waits:
            return [self._reply(peer, waiting)]
        return self.expire(now)

    def publish(self, version: ModelVersion, now: float) -> list[Message]:
        """Return the replies to those that wait for a version, and whose turn it is."""
        self.newest, self.is_asked = version, False
        self._differences.clear()
        self._descriptions.clear()
        self._due.update(peer for peer, one in self.waiting.items() if one.have < version.version)
        return self.expire(now)

    @property
    def waits_for_newer(self) -> bool:
        """Whether a request waits for a version that there is no copy of yet."""
        return len(self.waiting) > len(self._due)

    def next_at(self) -> float:
        """Return when to call ``expire`` at the latest."""
        turns = self._readers.values() if self._due else ()
        return min((*turns, *(one.deadline for one in self.waiting.values())), default=float("inf"))

    def expire(self, now: float) -> list[Message]:
        """Return the replies to requests whose time is over, or whose turn it is. Call it often."""
        for peer, (memory, end) in list(self._mapped.items()):
            if end is not None and end <= now:
                del self._mapped[peer]
            elif end is None:
                self._mapped[peer] = memory, now + _MAPPED_S
        self._readers = {peer: end for peer, end in self._readers.items() if end > now}
        replies = []
        for peer, waiting in list(self.waiting.items()):
            reads_here = peer in self._due and waiting.request.host == self._host
            may_read = peer in self._due and not (reads_here and len(self._readers) >= NUM_READERS)
            if may_read or waiting.deadline <= now:
                if reads_here:
                    self._readers[peer] = now + TURN_S
                replies.append(self._reply(peer, waiting))
        return replies

    def end(self) -> list[Message]:
        """Return what all subscribers are sent at the end of the run."""
        last = [self._reply(peer, waiting) for peer, waiting in list(self.waiting.items()) if peer in self._due]
        return [*last, *((peer, [Header(MessageKind.OVER).pack(), OVER_TEXT.encode()]) for peer in self._peers)]

    def _reply(self, peer: bytes, waiting: _Waiting) -> Message:
        del self.waiting[peer]
        self._due.discard(peer)
        newest = self.newest
        if newest is None or newest.version <= waiting.have:
            return peer, [Header(MessageKind.UNCHANGED, attempt=waiting.number).pack()]
        generation, step = newest.version
        header = Header(MessageKind.WEIGHTS, generation, step, attempt=waiting.number).pack()
        if waiting.request.host == self._host and waiting.request.encoding == EXACT and newest.memory.file is not None:
            self._mapped[peer] = newest.memory, None
            return peer, [header, self._describe(MAPPED, newest.layouts)]
        return peer, [header, *self._encode(newest, waiting)]

    def _describe(self, encoding: str, layouts: list[TensorLayout]) -> bytes:
        assert self.newest is not None
        if encoding not in self._descriptions:
            file = self.newest.memory.file if encoding == MAPPED else None
            description = Description(self._run, encoding, tuple(layouts), self._starts, file=file)
            self._descriptions[encoding] = description.pack()
        return self._descriptions[encoding]

    def _encode(self, newest: ModelVersion, waiting: _Waiting) -> list[Any]:
        if waiting.request.encoding == EXACT:
            return [self._describe(EXACT, newest.layouts), newest.values]
        layouts, values = newest.rounded
        if not self._kept or self._kept[-1][0] != newest.version:
            self._kept.append((newest.version, layouts, values))
        if waiting.request.holds and (difference := self._difference(waiting.have)) is not None:
            about = Description(self._run, DIFFERENCE, tuple(layouts), self._starts, waiting.have)
            return [about.pack(), *difference]
        return [self._describe(ROUNDED, layouts), values]

    def _difference(self, have: Version) -> list[bytes] | None:
        """Return the difference of ``newest`` to a version; None if that is not kept, or it does not pay."""
        assert self.newest is not None
        if have not in self._differences:
            layouts, values = self.newest.rounded
            base = next(
                (kept for version, described, kept in self._kept if (version, described) == (have, layouts)), None
            )
            self._differences[have] = None if base is None else encode_difference(base, values)
        return self._differences[have]


class PublisherFile:
    """A file of the run folder: the port, at which subscribers find the next publisher, and the generations so far.

    Another run of the same name has another ``id``.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.port: int | None = None
        self.id = secrets.token_hex(4)
        self.starts: tuple[Version, ...] = ()
        if file.exists():
            try:
                stored = json.loads(file.read_text(encoding="utf-8"))
                self.port, self.id = int(stored["port"]), str(stored["id"])
                self.starts = tuple(Version(*map(int, start)) for start in stored["starts"])
            except (ValueError, LookupError, TypeError) as error:
                raise TrainingError(
                    f"{file} must be what the publisher wrote there ({error}); remove it, and start subscribers anew"
                ) from error

    def begin(self, start: Version) -> None:
        """Add a generation. One that is not newer than those before is of a run that has lost count: another one."""
        if any(one.generation >= start.generation for one in self.starts):
            self.id, self.starts = secrets.token_hex(4), ()
        self.starts = (*self.starts, start)

    def write(self, port: int) -> None:
        """Write the file.

        Raises:
            StorageError: it cannot be written.
        """
        try:
            atomic_write_text(self._file, json.dumps({"port": port, "id": self.id, "starts": self.starts}))
        except OSError as error:
            raise StorageError(f"{self._file} cannot be written ({error}); free the disk, or correct it") from error


class ModelPublisher(RouterThread):
    """Owns the thread ``publisher`` and its socket. Use it as a context manager.

    The owner of the model calls ``is_wanted`` when there is a new version, and often while it waits for data; then
    ``publish`` if that is true, while nothing changes the model. ``on_request`` is called in the publisher thread when
    a subscriber waits for what was not copied yet.

    Args:
        run: the name of the run.
        generation: how often rank 0 of the run has started.
        step: of the version that it starts with.
        file: in the run folder.

    Raises:
        UnsupportedConfiguration: there are no keys beyond loopback; on entry, the address cannot be bound, or the keys
            cannot be read.
    """

    def __init__(self, config: PublishConfig, run: str, generation: int, step: int, file: Path) -> None:
        check_keys("publish", config.address, config.keys)
        self.on_request: Callable[[], None] = lambda: None
        self._config = config
        self._generation = generation
        self._step = step
        self._copied: Version | None = None  # the last version that is, or is being, copied
        self._copied_at = 0.0
        self._memory: VersionMemory | None = None  # for the next copy
        self._replies: list[Message] = []
        self._lock = threading.Lock()
        self._file = PublisherFile(file)
        self._file.begin(Version(generation, step))
        self.starts = self._file.starts  # the first version of each generation so far
        self._requests = SubscriberRequests(f"{run}{RUN_ID}{self._file.id}", self.starts, self._may_copy)
        super().__init__(
            threading.Thread(target=self._run, name="publisher", daemon=True),
            _CLOSE_S,
            partial(RouterSocket.of_section, "publish", config, _MAX_PARTS, _MAX_BYTES, self._file.port),
            self._file.write,
        )

    def is_wanted(self, step: int) -> bool:
        """Return whether to call ``publish`` for the version of ``step``, which is current."""
        with self._lock:
            self._step = step
            is_first = self._copied is None
            if not self._may_copy() or not (is_first or self._requests.is_asked or self._requests.waits_for_newer):
                return False
            self._copied, self._copied_at = Version(self._generation, step), time.monotonic()
            return True

    def _may_copy(self) -> bool:
        """Return whether the current version is newer than the last copy, by as much as configured."""
        if self._copied is None:
            return True
        every_s = self._config.every_s
        return self._step - self._copied.step >= self._config.every and (
            every_s is None or time.monotonic() >= self._copied_at + every_s
        )

    def publish(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy the version of ``step`` and send it to those that wait. Nothing changes the tensors meanwhile."""
        memory, self._memory = self._memory, None
        with torch.no_grad():
            copy = ModelVersion(Version(self._generation, step), tensors, memory)
        with self._lock:
            self._copied = copy.version
            self._replies += self._requests.publish(copy, time.monotonic())
        self._wakeup.set()

    # The thread.

    def _run(self) -> None:
        router = self._router
        assert router is not None
        try:
            try:
                while not self._closing.is_set():
                    self._serve(router)
                if not self._suspended:
                    with self._lock:
                        ending = [*self._replies, *self._requests.end()]
                    router.send(ending, copies=False)
            finally:
                router.close()
        except Exception:  # noqa: BLE001 - training continues without it
            _log.exception("the publisher has failed, and versions of the model are published no more")

    def _serve(self, router: RouterSocket) -> None:
        with self._lock:
            deadline = self._requests.next_at()
        router.poll([self._wakeup.fileno()], min(_POLL_S, max(0.0, deadline - time.monotonic())))
        replies: list[Message] = []
        for received in router.receive(_MAX_MESSAGES_AT_ONCE):
            peer, *frames = (frame.bytes for frame in received)
            with self._lock:
                replies += self._requests.handle(peer, frames, time.monotonic())
        self._wakeup.clear()
        with self._lock:
            replies += self._requests.expire(time.monotonic())
            published, self._replies = self._replies, []
            # Those that wait for a later version ask once there is one.
            self._requests.is_asked |= self._requests.waits_for_newer and self._may_copy()
            asks = self._requests.is_asked
        router.send([*published, *replies], copies=False)
        if published:
            self._prepare_memory()
        if asks:
            self.on_request()

    def _prepare_memory(self) -> None:
        with self._lock:
            newest = self._requests.newest
        assert newest is not None
        memory = VersionMemory(newest.memory.size)
        memory.flat.zero_()  # the kernel provides the pages now: it takes longer than to copy a version to them
        self._memory = memory

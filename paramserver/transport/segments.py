"""Memory that a server shares with trainers of its host, and that ends with the last process that uses it.

A segment is a memfd: a file without a name, which the kernel frees with its last descriptor and mapping. Descriptors
are handed over through an abstract unix socket, which ends with its process too. So nothing is left to clean up,
whoever was killed.

Memory without a name, with the flat tensors of a layout in it: a memfd that other processes can map too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import json
import logging
import mmap
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paramserver.distributed.rpc_calls import RemoteError
from paramserver.errors import (
    DeadlineExceeded,
    ParamserverError,
    PeerLost,
    PeerRefused,
    TrainingError,
    UnsupportedConfiguration,
)
from paramserver.parameters.flat import ALIGNMENT_BYTES, FlatLayout
from paramserver.transport.memory_limits import insufficient_memory, require_memory

# A holder of the descriptor could else cut the file, and kill all others at their next touch.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)


def create_memfd(what: str, layout: FlatLayout) -> int:
    """The descriptor of zeros for ``layout``. Its pages are there: with too little, this fails and not the first touch.

    Raises:
        UnsupportedConfiguration: there is too little memory; ``what`` needs it.
    """
    size_bytes = segment_bytes(layout)
    require_memory(what, size_bytes)
    descriptor = os.memfd_create("paramserver-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with _refused(what, size_bytes):
            os.ftruncate(descriptor, size_bytes)
            os.posix_fallocate(descriptor, 0, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_memfd(what: str, descriptor: int, layout: FlatLayout) -> list[Tensor]:
    """Flat tensors in this memory, with starts aligned to 64 bytes; they need the descriptor no more afterwards.

    The mapping ends with the last of them. Each has the whole memory as its storage: clone before ``torch.save``.

    Raises:
        UnsupportedConfiguration: the system refuses the mapping.
    """
    size_bytes = segment_bytes(layout)
    with _refused(what, size_bytes):
        # torch, when it is refused, keeps the descriptor that it opened, and with it the memory: so this asks first.
        mmap.mmap(descriptor, size_bytes).close()
    whole = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size_bytes, dtype=torch.uint8)
    pairs = zip(_places(layout), layout.dtypes, strict=True)
    return [whole[begin:end].view(dtype) for (begin, end), dtype in pairs]


def segment_bytes(layout: FlatLayout) -> int:
    """At least one line of the cache: nothing at all cannot be mapped."""
    return max([ALIGNMENT_BYTES, *(end for _, end in _places(layout))])


@contextlib.contextmanager
def _refused(what: str, size_bytes: int) -> Iterator[None]:
    """Inside ``with``, a system that has no room is the error of this package."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise insufficient_memory(what, size_bytes, str(error.strerror)) from error
        raise


def _places(layout: FlatLayout) -> list[tuple[int, int]]:
    """Begin and end of each flat tensor in the memory, in bytes."""
    places, begin = [], 0
    for dtype, size in zip(layout.dtypes, layout.sizes, strict=True):
        end = begin + size * dtype.itemsize
        places.append((begin, end))
        begin = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return places


_log = logging.getLogger(__name__)

# A request and its answer are one packet each.
_MOST_PACKET_BYTES = 64 * 1024
_MOST_WAITING = 128  # strangers who knock and say nothing; beyond it the first of them goes
_MOST_KEYS_SHOWN = 8
_WAKE_S = 5.0
_BREATH_S = 0.1
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: unix(7)


class SegmentHost:
    """The owner of segments, who gives them to processes of this host. A context manager; open inside ``with``.

    It answers in a thread of its own, which nobody can hold up: a client that says nothing is sent away after
    ``timeout_s``.

    Args:
        name_hint: of the socket, for who looks at /proc/net/unix.
        timeout_s: how long a client may be silent, and how long closing may take.
    """

    def __init__(self, name_hint: str, timeout_s: float) -> None:
        self._name = f"{name_hint[:32]}-{secrets.token_hex(16)}"
        self._secret = secrets.token_hex(16)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._segments: dict[str, tuple[int, str]] = {}  # key: descriptor, what is laid out in it
        self._waiting: dict[socket.socket, float] = {}  # clients that have not asked yet, and their deadlines
        self._closing = threading.Event()
        self._error: BaseException | None = None
        self._resources = contextlib.ExitStack()
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """What a client needs, to be told over a way that is trusted.

        The name of the socket is visible to every process of the network namespace; the second half is not.
        """
        return f"{self._name}:{self._secret}"

    def allocate(self, key: str, layout: FlatLayout) -> list[Tensor]:
        """Flat tensors of zeros in a new segment, one per dtype of ``layout``, with starts aligned to 64 bytes.

        The segment stays available to others until ``release``; its memory is in use until nobody has its tensors.

        Raises:
            UnsupportedConfiguration: there is too little memory.
            ParamserverError: the key is taken, or the host is not open.
        """
        with self._lock:
            self._require_new(key)
        descriptor = create_memfd(f"segment {key}", layout)  # this takes a while: clients are answered meanwhile
        try:
            tensors = map_memfd(f"segment {key}", descriptor, layout)
            with self._lock:
                self._require_new(key)
                self._segments[key] = descriptor, _in_words(layout)
        except BaseException:
            os.close(descriptor)
            raise
        return tensors

    def _require_new(self, key: str) -> None:
        if self._thread is None or self._closing.is_set():
            raise ParamserverError(f"the host of segment {key} must be open; use it inside its with block")
        if key in self._segments:
            raise ParamserverError(f"segment {key} must be new; release the old one, or use another key")

    def release(self, key: str) -> None:
        """Give the segment to nobody any more; tensors that lie in it stay valid.

        Raises:
            ParamserverError: there is no such segment.
        """
        with self._lock:
            os.close(self._segment(key)[0])
            del self._segments[key]

    def __enter__(self) -> SegmentHost:
        if self._thread is not None:
            raise ParamserverError(f"a segment host ({self._name}) must be entered once; make another")
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(f"\0{self._name}")
            listener.listen(512)
            listener.setblocking(False)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            opened.callback(os.close, self._bell)
            selector = opened.enter_context(selectors.DefaultSelector())
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._bell, selectors.EVENT_READ)
            self._thread = threading.Thread(
                target=self._work, args=(listener, selector), name="segment-host", daemon=True
            )
            self._thread.start()
            self._resources = opened.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        """Close; nobody gets a segment any more, and tensors stay valid.

        Raises:
            DeadlineExceeded: the thread did not end in time; it and its sockets are given up.
            Exception: what ended the thread before, unless another exception is on its way.
        """
        assert self._thread is not None
        self._closing.set()
        os.eventfd_write(self._bell, 1)
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the thread of segment host {self._name} did not end within {self._timeout_s:g} s")
        self._resources.close()
        with self._lock:
            for descriptor, _ in self._segments.values():
                os.close(descriptor)
            self._segments.clear()
        if self._error is not None:
            if exception[0] is None:
                raise self._error
            _log.warning("segment host %s had failed: %r", self._name, self._error)

    def _work(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            while not self._closing.is_set():
                ready = [key.fileobj for key, _ in selector.select(self._patience_s())]
                for client in [client for client in self._waiting if client in ready]:
                    self._answer(client, selector)
                if listener in ready:
                    self._accept(listener, selector)
                self._send_away(selector)
        except BaseException as error:  # noqa: BLE001 - kept: __exit__ raises it to the owner
            self._error = error
        finally:
            # A child that was forked meanwhile holds the listener too: closing it here alone would not silence it.
            listener.shutdown(socket.SHUT_RDWR)
            for client in self._waiting:
                client.close()
            self._waiting.clear()

    def _patience_s(self) -> float:
        first = min(self._waiting.values(), default=float("inf"))
        return min(max(first - time.monotonic(), 0), _WAKE_S)

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # gone before it was let in
        except OSError as error:  # no descriptor is left: those who wait have them, or this process itself
            _log.warning("segment host %s cannot let a client in: %s", self._name, error)
            self._send_away(selector, all_but=0)
            self._closing.wait(_BREATH_S)
            return
        client.setblocking(False)
        self._waiting[client] = time.monotonic() + self._timeout_s
        selector.register(client, selectors.EVENT_READ)
        self._send_away(selector, all_but=_MOST_WAITING)

    def _send_away(self, selector: selectors.BaseSelector, all_but: int | None = None) -> None:
        """Close clients that said nothing in time, and the first of them where they are more than ``all_but``."""
        too_many = 0 if all_but is None else max(len(self._waiting) - all_but, 0)
        now = time.monotonic()
        for i, (client, deadline) in enumerate(list(self._waiting.items())):
            if i < too_many or deadline <= now:
                self._leave(client, selector)

    def _leave(self, client: socket.socket, selector: selectors.BaseSelector) -> None:
        del self._waiting[client]
        selector.unregister(client)
        client.close()

    def _answer(self, client: socket.socket, selector: selectors.BaseSelector) -> None:
        """One request of one client, which has sent it or has gone."""
        try:
            request = client.recv(_MOST_PACKET_BYTES)
            if request:
                self._serve(client, request)
        except (BlockingIOError, ConnectionError) as error:
            _log.debug("a client of segment host %s went before its answer: %s", self._name, error)
        self._leave(client, selector)

    def _serve(self, client: socket.socket, request: bytes) -> None:
        with self._lock:  # no release between finding a descriptor and sending it
            try:
                descriptors = self._asked_for(_peer_uid(client), request)
                answer: dict[str, str] = {}
            except Exception as error:  # noqa: BLE001 - it travels to the client, who raises it
                descriptors, answer = [], vars(RemoteError.of(error, "the segment host"))
            socket.send_fds(client, [json.dumps(answer).encode()], descriptors)

    def _asked_for(self, uid: int, request: bytes) -> list[int]:
        """The descriptor that a request asks for; none for a knock."""
        _require_same_user(uid)
        try:
            secret, key, laid_out = json.loads(request)
            known = hmac.compare_digest(secret, self._secret)
        except (ValueError, TypeError):
            known = False
        if not known:
            raise PeerRefused("a request to a segment host must begin with its secret; use the whole of its address")
        if key is None:
            return []
        descriptor, ours = self._segment(key)
        if laid_out != ours:
            raise ParamserverError(f"segment {key} ({ours}) must be attached with its own layout, not ({laid_out})")
        return [descriptor]

    def _segment(self, key: str) -> tuple[int, str]:
        if (segment := self._segments.get(key)) is None:
            keys = sorted(self._segments)
            shown = ", ".join(keys[:_MOST_KEYS_SHOWN]) + (", ..." if len(keys) > _MOST_KEYS_SHOWN else "")
            raise ParamserverError(f"segment {key} must be one of ({shown}); allocate it first")
        return segment


def attach(address: str, key: str, layout: FlatLayout, timeout_s: float) -> list[Tensor]:
    """The tensors that the host of ``address`` allocated as ``key``, in the same memory.

    Memory and mapping last until the tensors are gone, also when the host has released them or died.

    Raises:
        ParamserverError: the host has no such segment, or with another layout.
        UnsupportedConfiguration: the host belongs to another user, or this process may not map so much.
        PeerLost: nobody answers at ``address``: the host has ended, or runs on another host.
        TrainingError: this process has too many open files.
        DeadlineExceeded: the host took longer than ``timeout_s`` for one of: let in, listen, answer.
    """
    with _asked(address, key, _in_words(layout), timeout_s) as descriptor:
        if descriptor is None:
            raise TrainingError(
                f"the descriptor of segment {key} must find a place in this process, and did not; raise ulimit -n"
            )
        return map_memfd(f"segment {key}", descriptor, layout)


def can_attach(address: str, timeout_s: float) -> bool:
    """Whether this process may attach segments of ``address``: same network namespace, same user, and still there.

    Raises:
        DeadlineExceeded: there is such a host, and it does not answer.
    """
    try:
        with _asked(address, None, "", timeout_s):
            return True
    except (PeerLost, UnsupportedConfiguration):
        return False


@contextlib.contextmanager
def _asked(address: str, key: str | None, laid_out: str, timeout_s: float) -> Iterator[int | None]:
    """Ask a host; inside ``with``, the descriptor that came."""
    name, _, secret = address.partition(":")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as host:
        answer, descriptors = _within(timeout_s, host, name, lambda: _exchange(host, name, [secret, key, laid_out]))
    try:
        if answer:
            raise RemoteError(**answer).error()
        yield descriptors[0] if descriptors else None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _exchange(host: socket.socket, name: str, request: list[Any]) -> tuple[dict[str, str], list[int]]:
    host.connect(f"\0{name}")
    _require_same_user(_peer_uid(host))
    host.send(json.dumps(request).encode())
    packet, descriptors, _, _ = socket.recv_fds(host, _MOST_PACKET_BYTES, 1)
    if not packet:
        raise ConnectionResetError("closed without an answer")
    return json.loads(packet), descriptors


def _within(
    timeout_s: float, host: socket.socket, name: str, talk: Callable[[], tuple[dict[str, str], list[int]]]
) -> tuple[dict[str, str], list[int]]:
    # The kernel's own limits: Python's would not wait for a place in a full queue of a unix socket.
    limit = struct.pack("ll", int(timeout_s), max(int(timeout_s % 1 * 1e6), 1))
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        host.setsockopt(socket.SOL_SOCKET, option, limit)
    try:
        return talk()
    except BlockingIOError as error:
        raise DeadlineExceeded(
            f"segment host {name} did not answer within {timeout_s:g} s; it may be frozen or overloaded"
        ) from error
    except ConnectionError as error:
        raise PeerLost(
            f"segment host {name} must run in this network namespace and does not answer ({error.strerror or error}); "
            "it has ended, or use server.transport: rpc between hosts"
        ) from error


def _peer_uid(peer: socket.socket) -> int:
    _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def _require_same_user(uid: int) -> None:
    if uid != os.geteuid():
        raise UnsupportedConfiguration(
            f"all processes of a host must have one user to share memory; these are uid {uid} and {os.geteuid()}; "
            "start them as one user, or use server.transport: rpc"
        )


def _in_words(layout: FlatLayout) -> str:
    pairs = zip(layout.dtypes, layout.sizes, strict=True)
    return ", ".join(f"{size} {str(dtype).removeprefix('torch.')}" for dtype, size in pairs)

"""Shared memory segments with flat tensors in them, which end with the last process that uses them.

A segment is a memfd: a file without a name, which the kernel frees with its last descriptor and mapping. A
``SegmentHost`` passes descriptors through an abstract unix socket, which ends with its process too. So nothing has to
be cleaned up, no matter which process is killed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import logging
import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from paramserver.distributed.remote_error import RemoteError
from paramserver.distributed.socket_calls import CallConnection, ConnectionThread
from paramserver.errors import (
    DeadlineExceeded,
    ParamserverError,
    PeerLost,
    PeerRefused,
    TrainingError,
    UnsupportedConfiguration,
)
from paramserver.parameters.flat import ALIGNMENT_BYTES, FlatLayout
from paramserver.platform import abstract_address, available_bytes, memory_file, peer_uid, seal

_log = logging.getLogger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)

# A request and its reply are one packet each.
_MAX_PACKET_BYTES = 64 * 1024
_MAX_DESCRIPTION = 8 * 1024  # a reply may have two
_MAX_PENDING = 128  # connections without a request yet; the oldest is closed to admit another
_MAX_KEYS_SHOWN = 8
_MIB = 2**20
_RETRY_S = 0.1
_SOCKET = "a socket"


def insufficient_memory(what: str, needed_bytes: int, reason: str = "") -> UnsupportedConfiguration:
    """Return the error to raise; ``reason`` is that of the system if it refused."""
    refused = f" and the system refused it ({reason})" if reason else ""
    return UnsupportedConfiguration(
        f"{what} needs {needed_bytes / _MIB:.1f} MiB of shared memory, {available_bytes() / _MIB:.1f} MiB are "
        f"available{refused}; use server.transport: rpc, a smaller model, or a larger memory limit"
    )


class _Client(CallConnection):
    """The host's end of a connection with one request, before which it is unknown."""

    is_unknown = True

    def send(self, value: Any) -> None:
        reply, descriptors = value
        socket.send_fds(self._socket, [json.dumps(reply).encode()], descriptors, socket.MSG_DONTWAIT)

    def receive(self) -> list[Any]:
        try:
            request = self._socket.recv(_MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not request:
            raise ConnectionError("closed without a request")
        return [(peer_uid(self._socket), request)]


class SegmentHost(ConnectionThread[_Client]):
    """The owner of segments, which passes them to processes of this host. A context manager; open inside ``with``.

    Requests are served in a thread that no client can block: a connection without a request is closed after
    ``timeout_s``. Closing may take as long.
    """

    thread_name = "segment-host"
    when_it_ends = "no client gets a segment"
    most_unknown = _MAX_PENDING

    def __init__(self, name_hint: str, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._name = f"{name_hint[:32]}-{secrets.token_hex(16)}"
        self._secret = secrets.token_hex(16)
        # Covers ``_segments`` only.
        self._segments_lock = threading.Lock()
        self._segments: dict[str, tuple[int, str]] = {}  # key: descriptor, description of the layout or _SOCKET
        self._is_entered = False

    @property
    def address(self) -> str:
        """What ``attach`` needs; send it over a connection that is trusted.

        Every process of the network namespace can see the name of the socket, which is the first half of it; the
        second half is secret.
        """
        return f"{self._name}:{self._secret}"

    def allocate(self, key: str, layout: FlatLayout) -> list[Tensor]:
        """Return flat tensors of zeros in a new segment, one per dtype of ``layout``, aligned to 64 bytes.

        Other processes can attach the segment until ``release``; its memory is in use while any tensor of it exists.

        Raises:
            UnsupportedConfiguration: there is too little memory.
            ParamserverError: the key is in use, or the host is not open.
        """
        with self._segments_lock:
            self._require_new(key)
        # Allocating the pages takes long for a large model, so the lock is released and clients are served meanwhile.
        descriptor = create_memfd(f"segment {key}", layout)
        try:
            tensors = map_memfd(f"segment {key}", descriptor, layout)
            with self._segments_lock:
                self._require_new(key)
                self._segments[key] = descriptor, _describe(layout)
        except BaseException:
            os.close(descriptor)
            raise
        return tensors

    def offer_socket(self, key: str, connected: socket.socket) -> None:
        """Take over one end of a connection; a process of this host gets it with ``attach_socket`` until ``release``.

        Raises:
            ParamserverError: the key is in use, or the host is not open.
        """
        with self._segments_lock:
            self._require_new(key)
            self._segments[key] = connected.detach(), _SOCKET

    def _require_new(self, key: str) -> None:
        if not self._is_entered or self._closing.is_set():
            raise ParamserverError(f"the host of segment {key} must be open; use it inside its with block")
        if key in self._segments:
            raise ParamserverError(f"segment {key} must be new; release the old one, or use another key")

    def release(self, key: str) -> None:
        """Do not pass the segment to any other process; tensors in it stay valid.

        Raises:
            ParamserverError: there is no such segment.
        """
        with self._segments_lock:
            os.close(self._segment(key)[0])
            del self._segments[key]

    def __enter__(self) -> SegmentHost:
        if self._is_entered:
            raise ParamserverError(f"a segment host ({self._name}) must be entered once; make another")
        with contextlib.ExitStack() as until_entered:
            listener = until_entered.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(abstract_address(self._name))
            listener.listen(512)
            super().__enter__()
            until_entered.pop_all()
        self._listen(listener)
        self._is_entered = True
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop serving, as ``ConnectionThread.__exit__``; tensors stay valid."""
        try:
            super().__exit__(*exception)
        finally:
            with self._segments_lock:
                for descriptor, _ in self._segments.values():
                    os.close(descriptor)
                self._segments.clear()

    # The thread.

    def _accepted(self, connection: socket.socket) -> _Client:
        return _Client(connection)

    def _on_no_descriptor(self, error: OSError, has_freed: bool) -> None:
        _log.warning("segment host %s cannot let a client in: %s", self._name, error)
        self._closing.wait(_RETRY_S)

    def _on_value(self, connection: _Client, value: Any) -> None:
        """Reply to the one request of a connection."""
        # One lock for both: a descriptor that is released in between could be another file when it is sent.
        with self._segments_lock:
            try:
                descriptors = self._find(*value)
                reply: dict[str, str] = {}
            except Exception as error:  # noqa: BLE001 - it is sent to the client, which raises it
                descriptors, reply = [], vars(RemoteError.of(error, "the segment host"))
            connection.send((reply, descriptors))
        self._remove(connection)

    def _on_end(self, connection: _Client) -> None:
        """A client without its reply asks again, or gives up."""

    def _find(self, uid: int, request: bytes) -> list[int]:
        """Return the descriptor that is requested; none for a request without a key, see ``can_attach``."""
        _require_same_user(uid)
        try:
            secret, key, requested = json.loads(request)
            is_authentic = hmac.compare_digest(secret, self._secret)
        except (ValueError, TypeError):
            is_authentic = False
        if not is_authentic:
            raise PeerRefused("a request to a segment host must begin with its secret; use the whole of its address")
        if key is None:
            return []
        descriptor, description = self._segment(key)
        if requested != description:
            raise ParamserverError(
                f"segment {key} ({description}) must be attached with its own layout, not ({requested})"
            )
        return [descriptor]

    def _segment(self, key: str) -> tuple[int, str]:
        if (segment := self._segments.get(key)) is None:
            keys = sorted(self._segments)
            shown = ", ".join(keys[:_MAX_KEYS_SHOWN]) + (", ..." if len(keys) > _MAX_KEYS_SHOWN else "")
            raise ParamserverError(f"segment {key} must be one of ({shown}); allocate it first")
        return segment


def attach(address: str, key: str, layout: FlatLayout, timeout_s: float) -> list[Tensor]:
    """Return the tensors that the host of ``address`` allocated as ``key``, with the same layout, in the same memory.

    ``timeout_s`` is that of the connection, of the request and of the reply.

    Raises:
        ParamserverError: the host has no such segment, or with another layout.
        UnsupportedConfiguration: the host belongs to another user, or this process may not map so much.
        PeerLost: there is no reply from ``address``: the host has ended, or runs on another host.
        TrainingError: this process has too many open files.
        DeadlineExceeded: the host took too long.
    """
    with _requested(address, key, _describe(layout), timeout_s) as (descriptor,):
        return map_memfd(f"segment {key}", descriptor, layout)


def attach_socket(address: str, key: str, timeout_s: float) -> socket.socket:
    """Return the end of a connection that the host of ``address`` offers as ``key``. Raises what ``attach`` raises."""
    with _requested(address, key, _SOCKET, timeout_s) as (descriptor,):
        return socket.socket(fileno=os.dup(descriptor))


def can_attach(address: str, timeout_s: float) -> bool:
    """Return whether this process may attach segments of ``address``: same network namespace, same user, still open.

    Raises:
        DeadlineExceeded: there is such a host, and it does not reply.
    """
    try:
        with _requested(address, None, "", timeout_s):
            return True
    except (PeerLost, UnsupportedConfiguration):
        return False


@contextlib.contextmanager
def _requested(address: str, key: str | None, description: str, timeout_s: float) -> Iterator[list[int]]:
    """Inside ``with``, the descriptor that the host of ``address`` sends for a key; it is closed afterwards."""
    name, _, secret = address.partition(":")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as host:
        # The kernel's own timeouts: those of Python do not cover waiting for room in a unix socket's full queue.
        limit = struct.pack("ll", int(timeout_s), max(int(timeout_s % 1 * 1e6), 1))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            host.setsockopt(socket.SOL_SOCKET, option, limit)
        try:
            reply, descriptors = _exchange(host, name, [secret, key, description])
        except BlockingIOError as error:
            raise DeadlineExceeded(
                f"segment host {name} did not answer within {timeout_s:g} s; it may be frozen or overloaded"
            ) from error
        except ConnectionError as error:
            raise PeerLost(
                f"segment host {name} must run in this network namespace and does not answer "
                f"({error.strerror or error}); it has ended, or use server.transport: rpc between hosts"
            ) from error
    try:
        if reply:
            raise RemoteError(**reply).error()
        if key is not None and not descriptors:
            raise TrainingError(
                f"the descriptor of segment {key} must find a place in this process, and did not; raise ulimit -n"
            )
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _exchange(host: socket.socket, name: str, request: list[Any]) -> tuple[dict[str, str], list[int]]:
    host.connect(abstract_address(name))
    # Before the secret is sent: any user of this namespace can bind a name that is free.
    _require_same_user(peer_uid(host))
    host.send(json.dumps(request).encode())
    packet, descriptors, _, _ = socket.recv_fds(host, _MAX_PACKET_BYTES, 1)
    if not packet:
        raise ConnectionResetError("closed without an answer")
    return json.loads(packet), descriptors


def _require_same_user(uid: int) -> None:
    if uid != os.geteuid():
        raise UnsupportedConfiguration(
            f"all processes of a host must have one user to share memory; these are uid {uid} and {os.geteuid()}; "
            "start them as one user, or use server.transport: rpc"
        )


def _describe(layout: FlatLayout) -> str:
    pairs = zip(layout.dtypes, layout.sizes, strict=True)
    text = ", ".join(f"{size} {str(dtype).removeprefix('torch.')}" for dtype, size in pairs)
    if len(text) <= _MAX_DESCRIPTION:
        return text
    return f"{len(layout.sizes)} flat tensors with sha256 {hashlib.sha256(text.encode()).hexdigest()}"


# Memory of one segment.


def create_memfd(what: str, layout: FlatLayout) -> int:
    """Return the descriptor of new memory for ``layout``, filled with zeros.

    All pages are allocated here, so that too little memory is an error of this call and not of the first access; those
    of sparse flat tensors when they are written.

    Raises:
        UnsupportedConfiguration: there is too little memory; ``what`` needs it.
    """
    dense = _extents(layout)[: len(layout.sizes) - layout.num_sparse]
    size_bytes, needed_bytes = segment_bytes(layout), max([ALIGNMENT_BYTES, *(end for _, end in dense)])
    # Before it is allocated: the kernel promises more memory than it has, and kills the process that touches it.
    if needed_bytes > available_bytes():
        raise insufficient_memory(what, needed_bytes)
    descriptor = memory_file("paramserver-segment", sealable=True)
    try:
        with _out_of_memory_named(what, size_bytes):
            os.ftruncate(descriptor, size_bytes)
            os.posix_fallocate(descriptor, 0, needed_bytes)
        seal(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_memfd(what: str, descriptor: int, layout: FlatLayout) -> list[Tensor]:
    """Map memory and return its flat tensors, aligned to 64 bytes; the descriptor may be closed afterwards.

    The mapping lasts until the last of the tensors is gone. The storage of each is the whole memory: clone it before
    ``torch.save``.

    Raises:
        UnsupportedConfiguration: the system refuses the mapping.
    """
    size_bytes = segment_bytes(layout)
    with _out_of_memory_named(what, size_bytes):
        # torch.from_file leaks its descriptor, and with it the memory, if the mapping fails: so this one tries first.
        mmap.mmap(descriptor, size_bytes).close()
    whole = torch.from_file(f"/dev/fd/{descriptor}", shared=True, size=size_bytes, dtype=torch.uint8)
    return [whole[start:end].view(dtype) for (start, end), dtype in zip(_extents(layout), layout.dtypes, strict=True)]


def segment_bytes(layout: FlatLayout) -> int:
    """Return the size of a segment; at least one cache line, because an empty mapping is an error."""
    return max([ALIGNMENT_BYTES, *(end for _, end in _extents(layout))])


@contextlib.contextmanager
def _out_of_memory_named(what: str, size_bytes: int) -> Iterator[None]:
    """Inside ``with``, convert an ``OSError`` that means too little memory."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise insufficient_memory(what, size_bytes, str(error.strerror)) from error
        raise


def _extents(layout: FlatLayout) -> list[tuple[int, int]]:
    """Return start and end of each flat tensor in the memory, in bytes."""
    extents, start = [], 0
    for dtype, size in zip(layout.dtypes, layout.sizes, strict=True):
        end = start + size * dtype.itemsize
        extents.append((start, end))
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return extents

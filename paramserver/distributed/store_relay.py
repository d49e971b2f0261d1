"""Proof of the job token before a rank reaches rank 0's store.

TCPStore accepts every connection. With a token it listens on a loopback port of its own, and a :class:`StoreGuard` on
``cluster.master_port`` relays connections that have proved the token. At the other end TCPStore takes an address
only, so it connects to a :class:`StoreTunnel` in its process, which proves the token to rank 0 and relays.

The exchange, each side with a nonce of its own, so that what was recorded earlier proves nothing::

    rank -> rank 0   ping             a ping of TCPStore's protocol. A store that asks for no token answers it
    rank 0 -> rank   challenge        magic, nonce
    rank -> rank 0   rank, nonce, HMAC("joins" and all of the above)
    rank 0 -> rank   HMAC("admits" and the same), or zeros for a proof that is not valid

What is relayed afterwards is neither encrypted nor authenticated.

`disable_name_lookups` keeps the stores of a process from looking up names for the addresses of their connections.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import secrets
import socket
import struct
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from hmac import compare_digest
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError

from paramserver.cluster import bind_listener, host_and_port
from paramserver.cluster.network import TOKEN_VARIABLE, JobToken, resolve
from paramserver.distributed.abort_sockets import is_own_connection
from paramserver.distributed.timeouts import call_with_timeout
from paramserver.errors import DeadlineExceeded, UnsupportedConfiguration
from paramserver.platform import memory_file

_log = logging.getLogger("paramserver")

# docs/torch-notes.md, "What a client of TCPStore sends first".
_PING_START = b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\r"
PING_NONCE = b"ping"
PING = _PING_START + PING_NONCE
_MAGIC = b"paramserver token challenge 1\n"
_NONCE_BYTES = _HMAC_BYTES = 32
_ANSWER = struct.Struct(f"!I{_NONCE_BYTES}s")
_REFUSED = bytes(_HMAC_BYTES)

# A connection that has not proved the token within this time is closed.
_PROOF_S = 10.0
# Of more connections that have proved nothing yet, the oldest is closed.
_MAX_UNPROVED = 256
_MAX_REFUSALS_LOGGED = 100
_MAX_EQUAL_REFUSALS_LOGGED = 10
_RETRY_S = 0.1
_CLOSE_S = 5.0
_CHUNK_BYTES = 1 << 16

CURE = f"give all ranks the same one, by cluster.token_file or {TOKEN_VARIABLE}"


class NoStore(ConnectionError):  # noqa: N818 - named for what it states
    """What answers at the address of rank 0 is no store."""


def asks_for_token(connection: socket.socket) -> bool:
    """Return whether the store at the other end of a new connection is guarded.

    Raises:
        NoStore: another service answers.
        OSError: it ends the connection, or sends nothing within the timeout of ``connection``.
    """
    connection.sendall(PING)
    answer = b""
    while len(answer) < len(PING_NONCE):
        answer += (chunk := connection.recv(len(PING_NONCE) - len(answer)))
        if not chunk:
            raise ConnectionError("it ended the connection")
    return _is_challenge(answer)


def _is_challenge(answer: bytes) -> bool:
    """Return whether a store answers a ping with a challenge."""
    if answer not in (PING_NONCE, _MAGIC[: len(PING_NONCE)]):
        raise NoStore(f"what answers there is another service (it begins with {answer!r})")
    return answer != PING_NONCE


class _Relay(ABC):
    """Relays each connection to ``listener`` to one that :meth:`_open` returns.

    Owns the listener and the thread ``store-relay``, which takes no lock. Close it.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        # Connections that have proved nothing yet, the oldest first. Used by the thread alone.
        self._unproved: dict[asyncio.Task[None], None] = {}
        self._refusals: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._accepting = self._loop.create_task(self._accept_and_end())
        self._thread = threading.Thread(target=self._run, name="store-relay", daemon=True)
        self._thread.start()

    @abstractmethod
    async def _open(self, near: socket.socket) -> socket.socket:
        """Return the connection to relay ``near`` to.

        Raises:
            OSError, UnsupportedConfiguration: ``near`` is refused, or there is nothing to relay to.
        """

    def close(self) -> None:
        """End all connections and the thread."""
        with suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._accepting.cancel)
        self._thread.join(_CLOSE_S)

    # The thread.

    def _run(self) -> None:
        with self._listener, closing(self._loop), suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._accepting)

    async def _accept_and_end(self) -> None:
        try:
            await self._accept()
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                near, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                self._log_refusal(f"a connection to the store cannot be accepted ({error})")
                await asyncio.wait([self._loop.create_future()], timeout=_RETRY_S)
                continue
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            serving = asyncio.create_task(self._serve(near))
            serving.add_done_callback(partial(_close, near))  # also if it is cancelled before it begins
            self._unproved[serving] = None
            if len(self._unproved) > _MAX_UNPROVED:
                oldest = next(iter(self._unproved))
                del self._unproved[oldest]
                oldest.cancel()

    async def _serve(self, near: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            far = await asyncio.wait_for(self._open(near), _PROOF_S)
        except asyncio.TimeoutError:
            self._log_refusal(f"refused a connection to the store: it proved no job token within {_PROOF_S:g} s")
            return
        except (OSError, UnsupportedConfiguration) as error:
            self._log_refusal(f"refused a connection to the store: {error}")
            return
        finally:
            self._unproved.pop(task, None)
        with far:
            copies = [asyncio.create_task(self._copy(*ends)) for ends in ((near, far), (far, near))]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                # Before the sockets are closed: a socket's number must not be reused while one is waited for.
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)  # the end of a connection may be a reset

    async def _copy(self, source: socket.socket, target: socket.socket) -> None:
        while data := await self._loop.sock_recv(source, _CHUNK_BYTES):
            await self._loop.sock_sendall(target, data)

    async def _connect(self, address: tuple[Any, ...], family: int = socket.AF_INET) -> socket.socket:
        far = socket.socket(family, socket.SOCK_STREAM)
        far.setblocking(False)
        try:
            await self._loop.sock_connect(far, address)
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            far.close()
            raise
        return far

    async def _receive(self, connection: socket.socket, size: int, start: bytes = b"") -> bytes:
        """Return the next ``size`` bytes, which begin with ``start``; not a byte more is read."""
        data = b""
        while len(data) < size:
            chunk = await self._loop.sock_recv(connection, size - len(data))
            data += chunk
            if data[: len(start)] != start[: len(data)]:
                raise ConnectionError("it is no rank of a run")
            if not chunk:
                raise ConnectionError("it ended before it proved a job token")
        return data

    def _log_refusal(self, text: str) -> None:
        # Limited, as a stranger can make any number of them. Those of one kind do not hide a rank with another token.
        if self._refusals[text] < _MAX_EQUAL_REFUSALS_LOGGED and self._refusals.total() < _MAX_REFUSALS_LOGGED:
            self._refusals[text] += 1
            _log.warning("%s", text)


class StoreGuard(_Relay):
    """On rank 0: relays connections that prove the token to the store.

    The listener is owned by this object from here on.
    """

    def __init__(self, listener: socket.socket, store_port: int, token: JobToken) -> None:
        self._store_port, self._token = store_port, token
        super().__init__(listener)

    async def _open(self, near: socket.socket) -> socket.socket:
        peer = near.getpeername()[0]
        try:
            await self._receive(near, len(PING), _PING_START)
            challenge = _MAGIC + secrets.token_bytes(_NONCE_BYTES)
            await self._loop.sock_sendall(near, challenge)
            answer = await self._receive(near, _ANSWER.size)
            proof = await self._receive(near, _HMAC_BYTES)
            # In constant time: the time of an answer must not reveal how much of a proof is right.
            if not compare_digest(proof, self._token.sign("joins", challenge + answer)):
                await self._loop.sock_sendall(near, _REFUSED)
                raise ConnectionError(f"rank {_ANSWER.unpack(answer)[0]} has another job token; {CURE}")
            await self._loop.sock_sendall(near, self._token.sign("admits", challenge + answer))
        except ConnectionError as error:
            raise ConnectionError(f"{peer}: {error}") from error
        return await self._connect(("127.0.0.1", self._store_port))


class StoreTunnel(_Relay):
    """On the other ranks: relays connections of this process to rank 0, and proves the token there."""

    def __init__(self, host: str, port: int, token: JobToken, rank: int) -> None:
        self._host, self._host_port, self._token, self._rank = host, port, token, rank
        self._family = 0
        self._address: tuple[Any, ...] = ()
        listener = bind_listener("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        super().__init__(listener)

    def prove(self, limit_s: float | None = None) -> bool | None:
        """Prove the token to rank 0, and verify that it knows it; None if it cannot be reached yet.

        Raises:
            UnsupportedConfiguration: rank 0 has another token, or none.
            NoStore: another service answers.
        """
        limit_s = _PROOF_S if limit_s is None else min(limit_s, _PROOF_S)
        try:
            self._family, self._address = resolve(self._host, self._host_port)[0]  # where rank 0 listens
            proved = asyncio.wait_for(self._open_far(), limit_s)
            asyncio.run_coroutine_threadsafe(proved, self._loop).result(2 * _PROOF_S).close()
        except NoStore:
            raise
        except (OSError, asyncio.TimeoutError, futures.TimeoutError):
            return None
        return True

    async def _open(self, near: socket.socket) -> socket.socket:
        if not is_own_connection(near):
            raise ConnectionError("it is from another process of this host")
        return await self._open_far()

    async def _open_far(self) -> socket.socket:
        far = await self._connect(self._address, self._family)
        try:
            await self._prove(far)
        except BaseException:
            far.close()
            raise
        return far

    async def _prove(self, far: socket.socket) -> None:
        where = f"rank 0 at {host_and_port(self._host, self._host_port)}"
        await self._loop.sock_sendall(far, PING)
        challenge = await self._receive(far, len(PING_NONCE))
        if not _is_challenge(challenge):
            raise UnsupportedConfiguration(
                f"rank {self._rank} has a job token, from {self._token.source}, and {where} asks for none; {CURE}"
            )
        challenge += await self._receive(far, len(_MAGIC) + _NONCE_BYTES - len(challenge))
        if not challenge.startswith(_MAGIC):
            raise ConnectionError(f"what answers as {where} is no rank of a run")
        answer = _ANSWER.pack(self._rank, secrets.token_bytes(_NONCE_BYTES))
        await self._loop.sock_sendall(far, answer + self._token.sign("joins", challenge + answer))
        proof = await self._receive(far, _HMAC_BYTES)
        if not compare_digest(proof, self._token.sign("admits", challenge + answer)):
            raise UnsupportedConfiguration(
                f"rank {self._rank} has another job token, from {self._token.source}, than {where}; {CURE}"
            )


def _close(connection: socket.socket, _: asyncio.Task[None]) -> None:
    connection.close()


# Look-ups of names.

# An address of this host for which /etc/hosts has no name.
_ADDRESS = "127.83.17.5"
_LIMIT_S = 2.0
_WARNING = b"The hostname of the client socket cannot be retrieved"


@cache
def disable_name_lookups() -> None:
    """Let the stores of this process look up no names for the addresses of their connections.

    torch does so at both ends of each connection until one look-up of the process fails (docs/torch-notes.md, "TCPStore
    looks up names"). This makes one fail, without a question to a name server: it connects a store in a thread whose
    resolver makes no attempt. Look-ups of other threads, and those of host names, are as before.
    """
    try:
        with _without_warning():
            call_with_timeout(_LIMIT_S, "a connection to this host", _fail_a_lookup)
    except (DeadlineExceeded, DistNetworkError, OSError) as error:
        _log.info("a name server that does not answer may delay the start of this rank: %s", error)


def _fail_a_lookup() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "__res_state"):
        raise OSError("the C library has no resolver that a thread can set")
    libc.__res_state.restype = ctypes.c_void_p
    resolver = libc.__res_state()  # of this thread, which ends with this function
    if libc.__res_ninit(ctypes.c_void_p(resolver)) != 0:
        raise OSError("the resolver cannot be initialized")
    # glibc: struct __res_state begins with the seconds and the number of the attempts.
    (ctypes.c_int * 2).from_address(resolver)[1] = 0
    with (
        socket.create_server((_ADDRESS, 0)) as listener,
        ThreadPoolExecutor(1, thread_name_prefix="name-lookups") as pool,
    ):
        listener.settimeout(_LIMIT_S)
        answered = pool.submit(_answer_ping, listener)
        port, limit = listener.getsockname()[1], timedelta(seconds=_LIMIT_S)
        TCPStore(_ADDRESS, port, is_master=False, wait_for_workers=False, timeout=limit)
        answered.result()


def _answer_ping(listener: socket.socket) -> None:
    """Answer what a client of torch begins with. A store of torch would look up a name here too."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(_LIMIT_S)
        with connection.makefile("rb") as received:
            connection.sendall(received.read(len(PING))[-len(PING_NONCE) :])


@contextmanager
def _without_warning() -> Iterator[None]:
    """Remove the warning about the look-up from what this process writes to its standard error."""
    if sys.__stderr__ is None:  # the process has none
        yield
        return
    sys.__stderr__.flush()
    own, written = os.dup(2), memory_file("stderr")
    try:
        os.dup2(written, 2)
        try:
            yield
        finally:
            os.dup2(own, 2)
        os.lseek(written, 0, os.SEEK_SET)
        with os.fdopen(written, "rb", closefd=False) as lines:
            os.write(2, b"".join(line for line in lines if _WARNING not in line))
    finally:
        os.close(own)
        os.close(written)

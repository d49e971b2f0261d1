"""Keeps torch from looking up names for the connections of its store."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError

from paramserver.distributed.store_relay import PING, PING_NONCE
from paramserver.distributed.timeouts import call_with_timeout
from paramserver.errors import DeadlineExceeded

log = logging.getLogger("paramserver")

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
        log.info("a name server that does not answer may delay the start of this rank: %s", error)


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
    own, written = os.dup(2), os.memfd_create("stderr")
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

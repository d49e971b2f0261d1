"""Connections that a library opened for itself, and how they end from here.

gloo waits for a peer until its own timeout; neither ``abort`` nor a signal ends that wait. The end of the connection
does, as if the peer had died.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


class OpenedSockets:
    """Those opened inside ``recorded``, by whatever thread. Thread-safe once they are recorded."""

    def __init__(self) -> None:
        self._inodes: frozenset[int] = frozenset()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        before = frozenset(_sockets())
        yield
        self._inodes |= frozenset(_sockets()) - before

    def cut(self) -> None:
        """Shut down those that are still open, without closing them."""
        for inode, descriptor in _sockets().items():
            if inode in self._inodes:
                _shut_down(descriptor, inode)


def _sockets() -> dict[int, int]:
    """Descriptors of this process's sockets, by inode."""
    found = {}
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # the one that lists, or closed meanwhile
            kind, _, inode = str(entry.readlink()).partition(":")
            if kind == "socket":
                found[int(inode.strip("[]"))] = int(entry.name)
    return found


def _shut_down(descriptor: int, inode: int) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:  # an error: it ended by itself
        # The number may be another's by now, the copy's is not; a listener that is shut down makes gloo abort.
        if os.fstat(copy.fileno()).st_ino == inode and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            copy.shutdown(socket.SHUT_RDWR)

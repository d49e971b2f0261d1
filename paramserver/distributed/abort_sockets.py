"""Ends connections that a library opened and gives no access to.

Only the end of its connection ends a wait of gloo for a peer (docs/torch-notes.md, "A wait of gloo cannot be
interrupted").
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


class OpenedSockets:
    """The sockets that this process opens while :meth:`record` is active, in any thread.

    ``abort`` may be called from any thread once all recording is done.

    Example::

        >>> opened = OpenedSockets()
        >>> with opened.record():
        ...     near, far = socket.socketpair()
        >>> opened.abort()
        >>> near.recv(1)
        b''
        >>> near.close(), far.close()
        (None, None)
    """

    def __init__(self) -> None:
        self._inodes: frozenset[int] = frozenset()

    @contextmanager
    def record(self) -> Iterator[None]:
        before = frozenset(_sockets())
        yield
        self._inodes |= frozenset(_sockets()) - before

    def abort(self) -> None:
        """Shut down the recorded sockets that are still open. Their owner closes them."""
        for inode, descriptor in _sockets().items():
            if inode in self._inodes:
                _shut_down(descriptor, inode)


def _sockets() -> dict[int, int]:
    """Return the descriptors of this process's sockets, by inode."""
    found = {}
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed since it was listed, such as the descriptor of the listing
            kind, _, inode = str(entry.readlink()).partition(":")
            if kind == "socket":
                found[int(inode.strip("[]"))] = int(entry.name)
    return found


def _shut_down(descriptor: int, inode: int) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:  # an error: it is closed already
        # The number may have been reused since it was listed; the inode of the copy is checked, and stays the same.
        # A listener is left alone: gloo aborts the process when one of its listeners is shut down.
        if os.fstat(copy.fileno()).st_ino == inode and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            copy.shutdown(socket.SHUT_RDWR)

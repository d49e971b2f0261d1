"""Ends connections that a library opened and gives no access to.

Only the end of its connection ends a wait of gloo for a peer (docs/torch-notes.md, "A wait of gloo cannot be
interrupted").
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_DESCRIPTORS = Path("/dev/fd")


class OpenedSockets:
    """The sockets that this process opens while :meth:`record` is active, in any thread.

    ``abort`` may be called from any thread, also while :meth:`record` is active in another.
    """

    def __init__(self) -> None:
        self._inodes: frozenset[int] = frozenset()
        # While recording: the sockets that were open when it began.
        self._before: frozenset[int] | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        self._before = before = frozenset(_sockets())
        try:
            yield
        finally:
            self._inodes |= frozenset(_sockets()) - before
            self._before = None

    def abort(self) -> None:
        """Shut down the recorded sockets that are still open. Their owner closes them."""
        before, sockets = self._before, _sockets()
        for inode, descriptor in sockets.items():
            if inode in self._inodes or (before is not None and inode not in before):
                _shut_down(descriptor, inode)


def abort_connections(addresses: Sequence[str]) -> None:
    """Shut down the connections that this process opened to RPC agents at ``addresses``, such as uv://127.0.0.1:40123.

    Calls that wait for their replies fail at once. May be called from any thread.
    """
    ports = {int(port) for address in addresses for port in re.findall(r":(\d+)", address)}
    for inode, descriptor in _sockets().items():
        connected = False
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:  # an error: it is closed already
            connected = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getpeername()[1] in ports
        if connected:
            _shut_down(descriptor, inode)


def is_own_connection(accepted: socket.socket) -> bool:
    """Return whether the other end of a TCP connection, which a listener of this process accepted, is here too."""
    ends = (accepted.getpeername()[:2], accepted.getsockname()[:2])
    for descriptor in _sockets().values():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:  # an error: it is no such connection
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                found = (copy.getsockname()[:2], copy.getpeername()[:2])
                if tuple((address.removeprefix("::ffff:"), port) for address, port in found) == ends:
                    return True
    return False


def _sockets() -> dict[int, int]:
    """Return the descriptors of this process's sockets, by inode."""
    found = {}
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed since it was listed, such as the descriptor of the listing
            about = os.fstat(int(entry.name))
            if stat.S_ISSOCK(about.st_mode):
                found[about.st_ino] = int(entry.name)
    return found


def _shut_down(descriptor: int, inode: int) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:  # an error: it is closed already
        # The number may have been reused since it was listed; the inode of the copy is checked, and stays the same.
        # A listener is left alone: gloo aborts the process when one of its listeners is shut down.
        if os.fstat(copy.fileno()).st_ino == inode and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            copy.shutdown(socket.SHUT_RDWR)

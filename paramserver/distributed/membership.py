"""Who takes part in a run: the server's table of members, and the detection of dead and frozen processes.

torch's own list of members only grows (removing a member crashes the agent), and torch does not report that a process
is gone. So each side keeps a *liveness call* open at the other, which is not answered while the process lives: the
kernel closes its connection the moment a process dies. *Heartbeats* detect a process that is frozen, or cut off by its
network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed.rpc as rpc

from paramserver.errors import PeerLost


@dataclass
class Member:
    """A trainer or shard server as server 0 knows it. ``name`` and ``worker_id`` are never used twice in a run.

    Attributes:
        trainer_index: or index of the shard server.
        last_heartbeat: ``time.monotonic()`` of the server's host.
        left: it announced its end.
        disconnected: its liveness call ended, so its process is gone or about to exit.
    """

    index: int
    name: str
    worker_id: int
    host_and_pid: str
    last_heartbeat: float = field(default_factory=time.monotonic)
    left: bool = False
    disconnected: bool = False
    kind: str = "trainer"

    def __str__(self) -> str:
        return f"{self.kind} {self.index} ({self.host_and_pid})"


class Members:
    """The table of members. Thread-safe; the server decides what follows from it.

    Example::

        >>> members = Members()
        >>> members.join(Member(0, "trainer0_1", 1, "node7, process 42"))
        >>> members.missing(2), [str(member) for member in members.present()]
        ([1], ['trainer 0 (node7, process 42)'])
        >>> members.leave(0)
        >>> members.present(), members.wait_for_disconnects(timeout_s=0.0)
        ([], False)
        >>> members.mark_disconnected(0)
        >>> members.wait_for_disconnects(timeout_s=0.0)
        True
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._members: dict[int, Member] = {}

    def join(self, member: Member) -> None:
        """Add ``member``.

        Raises:
            PeerLost: its index has joined already.
        """
        with self._changed:
            present = self._members.get(member.index)
            if present is not None:
                raise PeerLost(
                    f"{member.kind} {member.index} joined already: {present}; give each process its own rank"
                )
            # The member was made on its own host, whose monotonic clock has another origin.
            member.last_heartbeat = time.monotonic()
            self._members[member.index] = member

    def record_heartbeat(self, trainer_index: int) -> None:
        """Record a sign of life. One that arrives before ``join`` is ignored."""
        with self._changed:
            if trainer_index in self._members:
                self._members[trainer_index].last_heartbeat = time.monotonic()

    def leave(self, trainer_index: int) -> None:
        """Record that a member announced its end."""
        with self._changed:
            self._members[trainer_index].left = True

    def mark_disconnected(self, trainer_index: int) -> None:
        """Record that the liveness call of a member ended."""
        with self._changed:
            self._members[trainer_index].disconnected = True
            self._changed.notify_all()

    def wait_for_disconnects(self, timeout_s: float) -> bool:
        """Wait until all members are disconnected. Return False if that takes longer than ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: all(m.disconnected for m in self._members.values()), timeout_s)

    def missing(self, trainers: int) -> list[int]:
        """Return the indices below ``trainers`` that have not joined."""
        with self._changed:
            return [i for i in range(trainers) if i not in self._members]

    def get(self, trainer_index: int) -> Member:
        with self._changed:
            return self._members[trainer_index]

    def present(self) -> list[Member]:
        """Return the members that have joined and have not left."""
        with self._changed:
            return [m for m in self._members.values() if not m.left]

    def overdue(self, lost_after_s: float) -> list[Member]:
        """Return the present members whose last heartbeat is older than ``lost_after_s``."""
        now = time.monotonic()
        return [m for m in self.present() if now - m.last_heartbeat > lost_after_s]


_liveness_calls: list[torch.futures.Future[None]] = []
_liveness_lock = threading.Lock()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def liveness_call() -> torch.futures.Future[None]:
    """RPC handler that is answered only by ``release_liveness_calls`` in this process, or by its death."""
    future: torch.futures.Future[None] = torch.futures.Future()
    with _liveness_lock:
        _liveness_calls.append(future)
    return future


def release_liveness_calls() -> None:
    """Answer all open liveness calls: this process ends on purpose."""
    with _liveness_lock:
        futures, _liveness_calls[:] = list(_liveness_calls), []
    # Outside of the lock: the callbacks of a future run in this thread.
    for future in futures:
        future.set_result(None)


def watch_peer(name: str, on_gone: Callable[[str | None], None]) -> None:
    """Call ``on_gone`` when the process behind the RPC name ``name`` ends.

    Args:
        name: of the peer's agent.
        on_gone: called in a thread of the agent, with None if the peer ended on purpose, or else with the reason. Must
            not block.
    """
    future = rpc.rpc_async(name, liveness_call, timeout=0)  # 0 = no limit; an open call costs nothing

    def ended(done: torch.futures.Future[None]) -> None:
        reason = None
        try:
            done.value()
        except RuntimeError as error:
            reason = f"its connection was closed ({str(error).splitlines()[0]})"
        on_gone(reason)

    future.add_done_callback(ended)


class Heartbeat:
    """A thread that sends heartbeats to a server and detects a server that does not answer.

    Args:
        send: calls the server; raises if it does not answer in time.
        interval_s: seconds between two heartbeats.
        on_lost: called once, in the thread, with the reason why a heartbeat failed; the thread ends then.

    Example::

        >>> lost = threading.Event()
        >>> def fail():
        ...     raise RuntimeError("the server is frozen")
        >>> heartbeat = Heartbeat(fail, 0.001, lambda reason: (print(reason), lost.set()))
        >>> lost.wait(20)
        it did not answer (the server is frozen)
        True
        >>> heartbeat.close()
    """

    def __init__(self, send: Callable[[], None], interval_s: float, on_lost: Callable[[str], None]) -> None:
        self._send = send
        self._interval_s = interval_s
        self._on_lost = on_lost
        self._closed = threading.Event()
        # Holds no lock of this package while it sends. Calls ``on_lost``. Ends with close(), or with the first failure.
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self._send()
            except Exception as error:  # noqa: BLE001 - whatever stops a heartbeat: the server is out of reach
                if not self._closed.is_set():
                    self._on_lost(f"it did not answer ({str(error).splitlines()[0]})")
                return

    def close(self, timeout_s: float = 5.0) -> None:
        self._closed.set()
        self._thread.join(timeout_s)

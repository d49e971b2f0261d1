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
from dataclasses import dataclass

import torch
import torch.distributed.rpc as rpc

from paramserver.errors import PeerLost


@dataclass(frozen=True)
class HeartbeatReport:
    """What a process reports about itself in a heartbeat.

    Attributes:
        place: in the code of the user, where its main thread is, or the update of a server that does not end; "" if
            nowhere.
        blocks: its full buffer blocks simulations.
        stop: why a signal to it requests the end of the run; "" if none does.
    """

    place: str = ""
    blocks: bool = False
    stop: str = ""


@dataclass(frozen=True)
class HeartbeatReply:
    """The reply to the heartbeat of a trainer; ``stop`` is why the run is to end, "" if it is not."""

    stop: str


@dataclass
class Member:
    """A trainer or shard server as server 0 knows it. No ``name`` or ``worker_id`` is used twice in a generation."""

    index: int
    name: str
    worker_id: int
    host_and_pid: str
    kind: str = "trainer"
    generation: int = 1  # of the servers that it joins; see ``consistency.Ledger``
    incarnation: int = 1  # as in ``consistency.Ledger``; distinguishes this process from others with the same index
    last_heartbeat: float = 0.0  # on the clock of ``Members``
    left: bool = False
    lost: bool = False  # it died or was silent for too long
    disconnected: bool = False  # its liveness call ended, so its process is gone or about to exit
    report: HeartbeatReport = HeartbeatReport()  # of the last heartbeat

    def __str__(self) -> str:
        return f"{self.kind} {self.index} ({self.host_and_pid})"


class Members:
    """The table of members. Thread-safe; the server decides what follows from it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._members: dict[int, Member] = {}

    def join(self, member: Member) -> None:
        """Add ``member``, in the place of one that is lost or has left.

        Raises:
            PeerLost: its index is present.
        """
        with self._changed:
            present = self._members.get(member.index)
            if present is not None and not (present.left or present.lost):
                raise PeerLost(
                    f"{member.kind} {member.index} joined already: {present}; give each process its own rank"
                )
            # The member was made on its own host, whose monotonic clock has another origin.
            member.last_heartbeat = self._clock()
            self._members[member.index] = member

    def record_heartbeat(self, index: int, worker_id: int, report: HeartbeatReport) -> bool:
        """Record a sign of life and its report; return False if the process takes no part any more.

        One that arrives before ``join`` is ignored.
        """
        with self._changed:
            member = self._members.get(index)
            if member is None or member.worker_id != worker_id:
                # Worker ids come from a counter: a smaller one belongs to a process that was replaced.
                return member is None or member.worker_id < worker_id
            member.last_heartbeat, member.report = self._clock(), report
            return not member.lost

    def leave(self, index: int) -> None:
        """Record that a member announced its end."""
        with self._changed:
            self._members[index].left = True

    def lose(self, member: Member) -> bool:
        """Record that a member is lost; return whether that is new: it was present."""
        with self._changed:
            if member.left or member.lost or self._members.get(member.index) is not member:
                return False
            # Nothing is waited for at the end: its connection may stay open for as long as it is frozen.
            member.lost = member.disconnected = True
            self._changed.notify_all()
            return True

    def mark_disconnected(self, member: Member) -> None:
        with self._changed:
            member.disconnected = True
            self._changed.notify_all()

    def wait_for_disconnects(self, timeout_s: float) -> bool:
        """Wait until all members are disconnected. Return False if that takes longer than ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: all(m.disconnected for m in self._members.values()), timeout_s)

    def missing(self, number: int) -> list[int]:
        """Return the indices below ``number`` that have not joined, or are lost."""
        with self._changed:
            return [i for i in range(number) if i not in self._members or self._members[i].lost]

    def get(self, index: int) -> Member:
        with self._changed:
            return self._members[index]

    def present(self) -> list[Member]:
        """Return the members that have joined, have not left and are not lost."""
        with self._changed:
            return [m for m in self._members.values() if not (m.left or m.lost)]

    def not_lost(self) -> list[Member]:
        """Return the members that have joined and are not lost, also those that have left."""
        with self._changed:
            return [m for m in self._members.values() if not m.lost]

    def overdue(self, lost_after_s: float) -> list[Member]:
        """Return the present members whose last heartbeat is older than ``lost_after_s``."""
        now = self._clock()
        return [m for m in self.present() if now - m.last_heartbeat > lost_after_s]


_liveness_calls: dict[str, list[torch.futures.Future[None]]] = {}  # by the name of the caller, while that lives
_liveness_lock = threading.Lock()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def liveness_call(caller: str) -> torch.futures.Future[None]:
    """RPC handler that is answered only by ``release_liveness_calls`` in this process, or by its death."""
    future: torch.futures.Future[None] = torch.futures.Future()
    with _liveness_lock:
        _liveness_calls.setdefault(caller, []).append(future)
    return future


def release_liveness_calls() -> None:
    """Answer all open liveness calls: this process ends on purpose."""
    with _liveness_lock:
        futures = [future for own in _liveness_calls.values() for future in own]
        _liveness_calls.clear()
    # Outside of the lock: the callbacks of a future run in this thread.
    for future in futures:
        future.set_result(None)


def watch_peer(name: str, on_gone: Callable[[str | None], None]) -> None:
    """Call ``on_gone`` when the process behind the RPC name ``name`` ends.

    It is called in a thread of the agent, with None if the peer ended on purpose, or else with the reason. It must not
    block.
    """
    own_name = rpc.get_worker_info().name
    future = rpc.rpc_async(name, liveness_call, args=(own_name,), timeout=0)  # 0 = no limit; it costs nothing

    def ended(done: torch.futures.Future[None]) -> None:
        # What the peer watched this process by. Without a reply, which no process would receive: torch releases what
        # it holds for the call with the future. A name is never used twice.
        with _liveness_lock:
            unanswered = _liveness_calls.pop(name, [])
        del unanswered  # outside of the lock
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
        send: calls the server; raises if it does not answer in time, or refuses.
        on_lost: called once, in the thread, with the error of a heartbeat that failed; the thread ends then.
        lost_after_s: heartbeats that fail sooner after the last one that was answered do not count, unless the server
            refused them: a message may be lost, and the end of the connection is noticed by the liveness call.
    """

    def __init__(
        self,
        send: Callable[[], None],
        interval_s: float,
        on_lost: Callable[[PeerLost], None],
        lost_after_s: float = 0.0,
    ) -> None:
        self._lost_after_s = lost_after_s
        self._send = send
        self._interval_s = interval_s
        self._on_lost = on_lost
        self._closed = threading.Event()
        # Holds no lock of this package while it sends. Calls ``on_lost``. Ends with close(), or with the first failure.
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        answered = time.monotonic()
        while not self._closed.wait(self._interval_s):
            try:
                self._send()
                answered = time.monotonic()
            except Exception as error:  # noqa: BLE001 - whatever stops a heartbeat: the server is out of reach
                if not isinstance(error, PeerLost) and time.monotonic() - answered < self._lost_after_s:
                    continue
                if not self._closed.is_set():
                    silent = PeerLost(f"it did not answer ({str(error).splitlines()[0]})")
                    self._on_lost(error if isinstance(error, PeerLost) else silent)
                return

    def close(self, timeout_s: float = 5.0) -> None:
        self._closed.set()
        self._thread.join(timeout_s)

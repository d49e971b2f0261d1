"""Who takes part in a run: the server's table of trainers, and the trainer's watch over its server.

torch's own list of members only grows (taking a member off it crashes the agent), and nothing in torch says that a
process is gone. So both ends hold a *lifeline*, a call that the other end never answers while it lives: the kernel
closes its connection the moment a process dies. *Heartbeats* tell when a process is frozen or its network is cut.
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
    """One trainer as the server knows it, or one more server. ``name`` and ``worker_id`` are never used twice."""

    trainer_index: int
    name: str
    worker_id: int
    place: str
    last_beat: float = field(default_factory=time.monotonic)
    left: bool = False
    gone: bool = False
    kind: str = "trainer"

    def __str__(self) -> str:
        return f"{self.kind} {self.trainer_index} ({self.place})"


class Members:
    """The table of trainers. Thread-safe; it decides nothing."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._members: dict[int, Member] = {}

    def join(self, member: Member) -> None:
        with self._lock:
            present = self._members.get(member.trainer_index)
            if present is not None:
                raise PeerLost(
                    f"{member.kind} {member.trainer_index} is here already: {present}; give each process its own rank"
                )
            member.last_beat = time.monotonic()  # of this host: clocks of others mean nothing here
            self._members[member.trainer_index] = member

    def beat(self, trainer_index: int) -> None:
        """A sign of life; one that comes before ``join`` is too early to count."""
        with self._lock:
            if trainer_index in self._members:
                self._members[trainer_index].last_beat = time.monotonic()

    def leave(self, trainer_index: int) -> None:
        with self._lock:
            self._members[trainer_index].left = True

    def say_goodbye(self, trainer_index: int) -> None:
        """Its process has let go of the lifeline, or is dead."""
        with self._lock:
            self._members[trainer_index].gone = True
            self._lock.notify_all()

    def await_goodbyes(self, timeout_s: float) -> bool:
        """Wait until all members have said goodbye; False where that takes longer than ``timeout_s``."""
        with self._lock:
            return self._lock.wait_for(lambda: all(m.gone for m in self._members.values()), timeout_s)

    def missing(self, trainers: int) -> list[int]:
        """Indices below ``trainers`` that have not joined."""
        with self._lock:
            return [i for i in range(trainers) if i not in self._members]

    def get(self, trainer_index: int) -> Member:
        with self._lock:
            return self._members[trainer_index]

    def here(self) -> list[Member]:
        """Those that joined and have not left."""
        with self._lock:
            return [m for m in self._members.values() if not m.left]

    def silent(self, lost_after_s: float) -> list[Member]:
        """Those that have been silent for too long."""
        now = time.monotonic()
        return [m for m in self.here() if now - m.last_beat > lost_after_s]


_lifelines: list[torch.futures.Future[None]] = []
_lifelines_lock = threading.Lock()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def liveness_call() -> torch.futures.Future[None]:
    """Answered only by ``release_liveness_calls`` in this process, or by its death."""
    future: torch.futures.Future[None] = torch.futures.Future()
    with _lifelines_lock:
        _lifelines.append(future)
    return future


def release_liveness_calls() -> None:
    """Tell everybody who watches this process that it leaves on purpose."""
    with _lifelines_lock:
        held, _lifelines[:] = list(_lifelines), []
    for future in held:
        future.set_result(None)


def watch_peer(name: str, gone: Callable[[str | None], None]) -> None:
    """Call ``gone`` when the process behind the RPC name ``name`` lets go of its lifeline.

    With None where it does so on purpose, with a reason where it died. The call has no limit and costs nothing.
    """
    future = rpc.rpc_async(name, liveness_call, timeout=0)

    def ended(done: torch.futures.Future[None]) -> None:
        reason = None
        try:
            done.value()
        except RuntimeError as error:
            reason = f"its connection was closed ({str(error).splitlines()[0]})"
        gone(reason)

    future.add_done_callback(ended)


class Heartbeat:
    """A trainer's thread that tells its server that it lives, and notices a server that does not answer.

    Args:
        beat: one call to the server; raises where it is not answered in time.
        every_s: seconds between two beats.
        lost: called once with the reason when a beat fails; the thread ends then.
    """

    def __init__(self, beat: Callable[[], None], every_s: float, lost: Callable[[str], None]) -> None:
        self._beat = beat
        self._every_s = every_s
        self._lost = lost
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                self._beat()
            except Exception as error:  # noqa: BLE001 - whatever stops a beat means that the server is out of reach
                if not self._closed.is_set():
                    self._lost(f"it did not answer ({str(error).splitlines()[0]})")
                return

    def close(self, timeout_s: float = 5.0) -> None:
        self._closed.set()
        self._thread.join(timeout_s)

"""Injects the faults of a plan into the ranks of a run, in runs of ``paramserver chaos`` only."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from paramserver.config import Config, roles, world_size_of
from paramserver.metrics import Record, Sink
from paramserver.tools.chaos.plan import Fault, name_of

# How often instants are compared with the clock.
_TICK_S = 0.01
_FOR_EVER_S = 1e9


@dataclass
class Shot:
    """A fault of the plan, and when it fired (``time.time()``; None if it did not), after which step of the run."""

    fault: Fault
    fired_at: float | None = None
    step: int = 0


@dataclass(eq=False)
class _Rank:
    """A process that has connected, and has sent its rank if that is not negative."""

    link: socket.socket
    pidfd: int
    global_rank: int = -1
    unread: bytes = b""

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def command(self, **fault: Any) -> None:
        with suppress(OSError):  # it has died; its replacement receives what lasts
            self.link.sendall(json.dumps(fault).encode() + b"\n")

    def close(self) -> None:
        self.link.close()
        os.close(self.pidfd)


class FaultDirector(Sink):
    """Watches the records of a run, and injects the faults of a plan into its ranks.

    Each rank connects as soon as its process starts; signals go to the process at the other end of that connection.
    """

    def __init__(self, faults: Sequence[Fault], config: Config) -> None:
        self.shots = [Shot(fault) for fault in faults]
        self.records: list[dict[str, Any]] = []
        self.step = 0
        self.lost: list[str] = []
        self.repeated: list[str] = []
        self._role_of = {name_of(role): role for role in roles(config, world_size_of(config))}
        self._first_update: float | None = None
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._lasting: list[tuple[float, int | None, dict[str, Any]]] = []
        self._connected: set[_Rank] = set()
        self._ranks: dict[int, _Rank] = {}  # the newest process of each rank
        self._resources = ExitStack()
        self._selector = self._resources.enter_context(selectors.DefaultSelector())
        self._listener = self._resources.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self.address = f"paramserver-chaos-{secrets.token_hex(8)}"
        self._listener.bind(f"\0{self.address}")
        self._listener.listen()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ended = threading.Event()
        self.error: BaseException | None = None
        # Touches what no other thread touches, but ``records``, ``step`` and ``_first_update``, which it only reads.
        # Ends with close(), which raises its error.
        self._thread = threading.Thread(target=self._run, name="fault-director", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        self.records.append(dict(record))
        if record["kind"] == "train":
            self.step = record["step"]
            if self._first_update is None:
                self._first_update = time.monotonic()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        while self._connected:
            self._connected.pop().close()
        self._resources.close()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                for key, _ in self._selector.select(_TICK_S):
                    self._accept() if key.fileobj is self._listener else self._read(key.data)
                now = time.monotonic()
                due = [act for at, act in self._later if at <= now]
                self._later = [(at, act) for at, act in self._later if at > now]
                for act in due:
                    act()
                for shot in self.shots:
                    if shot.fired_at is None and self._is_due(shot.fault, now):
                        self._fire(shot, now)
        except BaseException as error:  # noqa: BLE001 - raised by close()
            self.error = error

    # Ranks.

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        pid, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            link.close()
            return
        try:
            rank = _Rank(link, os.pidfd_open(pid))
        except ProcessLookupError:
            link.close()
            return
        self._connected.add(rank)
        self._selector.register(link, selectors.EVENT_READ, rank)

    def _read(self, rank: _Rank) -> None:
        try:
            received = rank.link.recv(1 << 16)
        except ConnectionResetError:
            received = b""
        if not received:
            self._selector.unregister(rank.link)
            self._connected.remove(rank)
            if self._ranks.get(rank.global_rank) is rank:
                del self._ranks[rank.global_rank]
            rank.close()
            return
        *lines, rank.unread = (rank.unread + received).split(b"\n")
        for message in map(json.loads, lines):
            self.lost += [message["lost"]] if "lost" in message else []
            self.repeated += [message["repeated"]] if "repeated" in message else []
            if "rank" in message:
                rank.global_rank = message["rank"]
                self._ranks[rank.global_rank] = rank
                for until, target, command in self._lasting:
                    if (left_s := until - time.monotonic()) > 0 and target in (None, rank.global_rank):
                        rank.command(**command, for_s=left_s)

    # Faults.

    def _is_due(self, fault: Fault, now: float) -> bool:
        if self._first_update is None:
            return False
        if fault.at_step is not None:
            return self.step >= fault.at_step
        return now >= self._first_update + (fault.at_s or 0.0)

    def _fire(self, shot: Shot, now: float) -> None:
        fault = shot.fault
        role = self._role_of.get(fault.target)
        rank = None if role is None else self._ranks.get(role.global_rank)
        if role is not None and rank is None and fault.kind != "partition":
            return  # the process is being replaced; the next one gets the fault
        shot.fired_at, shot.step = time.time(), self.step
        until = now + (_FOR_EVER_S if fault.for_s is None else fault.for_s)
        if fault.kind in ("kill", "freeze"):
            assert rank is not None
            rank.signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
            if fault.kind == "freeze":
                pidfd = os.dup(rank.pidfd)
                self._resources.callback(os.close, pidfd)
                self._later.append((until, lambda: _continue(pidfd)))
        elif fault.kind == "hold_gil":
            assert rank is not None
            rank.command(fault="hold_gil", for_s=fault.for_s)
        else:
            command: dict[str, Any] = {"fault": fault.kind}
            command |= {"factor": fault.amount} if fault.kind == "slow" else {}
            command |= {"messages": fault.messages, "percent": fault.amount} if fault.kind == "lose" else {}
            command |= {"target": fault.target} if fault.kind == "partition" else {}
            # All ranks take part in a partition: each cuts its own calls to the target.
            target = role.global_rank if role is not None and fault.kind == "slow" else None
            self._lasting.append((until, target, command))
            for other in self._ranks.values():
                if target in (None, other.global_rank):
                    other.command(**command, for_s=until - now)


def _continue(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)

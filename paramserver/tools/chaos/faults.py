"""Faults of ``paramserver chaos``: their plans, what injects them into the ranks of a run, and what receives them.

A rank connects to a socket of the director. Commands to the rank, and what it reports, are JSON lines.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import secrets
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paramserver.cluster import process_environ
from paramserver.config import Config, Role, mode_of, roles, world_size_of
from paramserver.errors import UnsupportedConfiguration
from paramserver.metrics import Record, Sink

if TYPE_CHECKING:
    from torch.futures import Future

    from paramserver.task import Task

FAULT_ADDRESS = "PARAMSERVER_FAULTS"
"""Set by ``paramserver chaos`` for the processes of its run: the socket from which a rank receives faults."""

# A call is lost only once this process takes part in steps: a process that cannot reach the servers at its start ends.
_STEP_CALL = "push"
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


# Faults inside of a rank.


class FaultReceiver:
    """Applies the faults that ``paramserver chaos`` sends over a socket with this abstract address."""

    def __init__(self, address: str, global_rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(f"\0{address}")
        self._lock = threading.Lock()
        self._random = random.Random()
        self._role: Role | None = None
        self._slowdown: Any = None
        self._slow_until = 0.0
        self._lost_percent = {"requests": 0.0, "replies": 0.0}
        self._lose_until = {"requests": 0.0, "replies": 0.0}
        self._cut_off: dict[str, float] = {}  # until when, by the RPC name of a server; "" = all of them
        self._takes_part = False
        self._send({"rank": global_rank})
        # Takes ``_lock`` of this object. Ends with the process, or with the other end of the socket.
        threading.Thread(target=self._receive, name="fault-receiver", daemon=True).start()

    def attach(self, role: Role, task: Task) -> None:
        """Act on this role and task from now on. Call it before the process joins the run."""
        from paramserver.distributed.rpc_calls import set_interceptor

        self._role = role
        set_interceptor(self)
        step = task.training_step

        def training_step(model: Any, batch: Any, batch_idx: int) -> Any:
            began = time.perf_counter()
            loss = step(model, batch, batch_idx)
            took_s = time.perf_counter() - began
            if self._slowdown is not None and time.monotonic() < self._slow_until:
                if loss is None:  # with several optimizers, the step has made its backwards and its updates
                    # The step has waited for other trainers too, which may be slow at the same time.
                    self._slowdown.wait(min(took_s, self._slow_until - time.monotonic()))
                else:
                    self._slowdown.after_forward(model, loss, took_s, batch_idx)
            return loss

        if role.kind == "trainer":
            task.training_step = training_step  # type: ignore[method-assign]

    # Commands.

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self) -> None:
        # A signal, such as that of the watchdog's timer, would end the call that holds the interpreter's lock.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with suppress(ConnectionResetError):  # what injects the faults ended without reading all that was sent to it
            for line in self._socket.makefile("rb"):
                command = json.loads(line)
                getattr(self, f"_{command.pop('fault')}")(**command)

    def _hold_gil(self, for_s: float) -> None:
        # A function of PyDLL keeps the interpreter's lock.
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(for_s * 1e6)))

    def _slow(self, factor: float, for_s: float) -> None:
        from paramserver.tools.bench.slowdown import Slowdown, SlowdownSpec

        self._slowdown = Slowdown(SlowdownSpec(trainer=0, factor=factor), 0, 0)
        self._slow_until = time.monotonic() + for_s

    def _lose(self, messages: str, percent: float, for_s: float) -> None:
        self._lost_percent[messages], self._lose_until[messages] = percent, time.monotonic() + for_s

    def _partition(self, target: str, for_s: float) -> None:
        """Cut this rank off from the servers if it is the target, else from the target if that is a server."""
        own = name_of(self._role) if self._role is not None else ""
        self._cut_off["" if own == target else target.replace(":", "")] = time.monotonic() + for_s

    # Calls; see ``rpc_calls.set_interceptor``.

    def intercept(self, to: str, handler: str, call: Callable[[], Future[Any]]) -> Future[Any]:
        """Make a call, or fail it in the way in which torch does when the connection breaks."""
        import torch

        self._takes_part = self._takes_part or handler == _STEP_CALL
        if self._is_lost(to, handler, "requests"):
            return self._failed(torch.futures.Future(), handler, "request")
        future: Future[Any] = torch.futures.Future()
        reply = call()

        def replied(done: Future[Any]) -> None:
            if self._is_lost(to, handler, "replies"):
                self._failed(future, handler, "reply")
                return
            try:
                future.set_result(done.value())
            except RuntimeError as error:
                future.set_exception(error)

        reply.add_done_callback(replied)
        return future

    def _is_lost(self, to: str, handler: str, messages: str) -> bool:
        now = time.monotonic()
        if self._role is None or not (self._takes_part or self._role.kind == "server"):
            return False
        if any(now < until and name in ("", to) for name, until in self._cut_off.items()):
            return True
        chance = self._lost_percent[messages] if now < self._lose_until[messages] else 0.0
        return self._role.kind == "trainer" and self._random.random() * 100 < chance

    def _failed(self, future: Future[Any], handler: str, what: str) -> Future[Any]:
        self._send({"lost": f"{what} of {handler}"})
        future.set_exception(RuntimeError(f"the {what} was lost (injected)"))
        return future

    def repeated(self, handler: str) -> None:
        self._send({"repeated": handler})


def receive_faults(global_rank: int) -> Callable[[Role, Task], None]:
    """Receive faults in this rank; see ``RANK_PLUGIN`` of ``cluster``."""
    return FaultReceiver(process_environ()[FAULT_ADDRESS], global_rank).attach


# Plans: what is injected, and when. Parsing and drawing them; no process.


EXAMPLE = 'write for example --faults "kill trainer:1 @step 50; freeze server:0 @8s for 5s"'

_KINDS = ("kill", "freeze", "hold_gil", "slow", "lose", "partition")
_NEEDS_SERVERS = ("lose", "partition")
_MESSAGES = ("replies", "requests")
_TARGET = re.compile(r"(trainer|server):(\d{1,6})")
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
# With these the text of a fault ends, the first one last.
_TIMES: Mapping[str, tuple[re.Pattern[str], type[int] | type[float]]] = {
    "for_s": (re.compile(rf" for {_NUMBER}s$"), float),
    "at_s": (re.compile(rf" @{_NUMBER}s$"), float),
    "at_step": (re.compile(r" @step (\d{1,12})$"), int),
}
# What a random fault leaves for the run to recover in, in addition to its own length and server.lost_after_s.
_RECOVERY_S = 8.0


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        target: the rank, as ``trainer:1``; empty for ``lose``, which concerns all trainers.
        messages: of ``lose``: ``replies`` or ``requests``.
        amount: of ``slow`` the factor, of ``lose`` the percentage.
        at_step: fires when the run has made this step.
        at_s: fires this many seconds after the first update of the run. Without either, it fires at the first update.
        for_s: how long it lasts; None: until the end of the run.
    """

    kind: str
    target: str = ""
    messages: str = ""
    amount: float = field(default=0.0, kw_only=True)
    at_step: int | None = field(default=None, kw_only=True)
    at_s: float | None = field(default=None, kw_only=True)
    for_s: float | None = field(default=None, kw_only=True)

    def __str__(self) -> str:
        words = [self.kind, self.target or f"{self.messages} {self.amount:g}%"]
        words += [f"x{self.amount:g}"] if self.kind == "slow" else []
        words += [f"@step {self.at_step}"] if self.at_step is not None else []
        words += [f"@{self.at_s:g}s"] if self.at_s is not None else []
        words += [f"for {self.for_s:g}s"] if self.for_s is not None else []
        return " ".join(words)

    def silences(self, lost_after_s: float) -> bool:
        """Return whether the rank dies, or gives no sign of life for so long that it counts as lost."""
        if self.kind == "kill":
            return True
        lasts = self.for_s is None or self.for_s > lost_after_s
        return self.kind in ("freeze", "hold_gil", "partition") and lasts


def parse_faults(text: str, ranks: Sequence[Role], config: Config) -> list[Fault]:
    """Return the faults that ``--faults`` lists, separated by semicolons.

    Raises:
        UnsupportedConfiguration: a fault is not understood, or does not fit the run.
    """
    parts = [part.strip() for part in text.split(";")]
    faults = [_parse(part) for part in parts if part]
    if not faults:
        raise UnsupportedConfiguration(f"--faults ({text}) must name a fault; {EXAMPLE}")
    known = [name_of(role) for role in ranks]
    for fault in faults:
        if fault.target and fault.target not in known:
            raise UnsupportedConfiguration(
                f"--faults ({fault}): {fault.target} must be a rank of this run ({', '.join(known)}); correct it"
            )
        if fault.kind in _NEEDS_SERVERS and not mode_of(config).has_servers:
            raise UnsupportedConfiguration(
                f"--faults ({fault}): {fault.kind} must be used with mode rpc, as the other modes make no calls; "
                "choose another fault or mode"
            )
    return faults


def name_of(role: Role) -> str:
    """Return how faults name a rank: ``trainer:1``."""
    return str(role).replace(" ", ":")


def _parse(part: str) -> Fault:
    rest, times = _split_times(part)
    kind, *words = rest.split()
    try:
        if kind not in _KINDS:
            raise ValueError(f"the fault ({kind}) must be one of {', '.join(_KINDS)}")
        _check_times(kind, times)
        return Fault(kind, **_parameters(kind, words), **times)
    except ValueError as rule:
        raise UnsupportedConfiguration(f"--faults ({part}): {rule}; {EXAMPLE}") from None


def _split_times(part: str) -> tuple[str, dict[str, Any]]:
    """Return the text of a fault without its instant and duration, and these as fields of ``Fault``."""
    times = {}
    for name, (pattern, kind) in _TIMES.items():
        if (match := pattern.search(part)) is not None:
            times[name] = kind(match[1])
            part = part[: match.start()].rstrip()
    return part, times


def _check_times(kind: str, times: Mapping[str, float]) -> None:
    """Raise ValueError, with the rule, for an instant or a duration that a fault of this kind cannot have."""
    if times.get("for_s") == 0:
        raise ValueError("the duration (0 s) must be above 0")
    if "at_s" in times and "at_step" in times:
        raise ValueError("the instant must be a step or a time, not both")
    if kind == "kill" and "for_s" in times:
        raise ValueError("kill must have no duration")
    if kind in ("hold_gil", "partition") and "for_s" not in times:
        raise ValueError(f"{kind} must have a duration, such as for 5s")


def _parameters(kind: str, words: Sequence[str]) -> dict[str, Any]:
    """Return what follows the kind, as fields of ``Fault``; raise ValueError, with the rule, for anything else."""
    if kind == "lose":
        match = re.fullmatch(rf"({'|'.join(_MESSAGES)}) {_NUMBER}%", " ".join(words))
        if match is None or not 0 < float(match[2]) <= 50:
            raise ValueError("lose must be followed by replies or requests and a percentage of at most 50")
        return {"messages": match[1], "amount": float(match[2])}
    target, rest = " ".join(words[:1]), " ".join(words[1:])
    if _TARGET.fullmatch(target) is None:
        raise ValueError(f"{kind} must be followed by a rank, such as trainer:1 or server:0")
    if kind == "slow":
        factor = re.fullmatch(rf"x{_NUMBER}", rest)
        if factor is None or float(factor[1]) < 1 or not target.startswith("trainer"):
            raise ValueError("slow must be followed by a trainer and a factor of at least 1, such as x5")
        return {"target": target, "amount": float(factor[1])}
    if rest:
        raise ValueError(f"{rest} is not understood after {kind} {target}")
    return {"target": target}


def random_faults(number: int, seed: int, ranks: Sequence[Role], config: Config) -> list[Fault]:
    """Return faults at random instants, of random kinds and ranks, in the order of their instants.

    They depend on the arguments only. Each begins when the run has had time to recover from the one before, and no rank
    is ended more often than ``cluster.max_restarts`` allows.
    """
    rng, lost_after_s = random.Random(f"chaos/{seed}"), config.server.lost_after_s
    kinds = [kind for kind in _KINDS if kind != "lose" and (kind != "partition" or mode_of(config).has_servers)]
    ends = {name_of(role): 0 for role in ranks}
    trainers = [name for name in ends if name.startswith("trainer")]
    faults: list[Fault] = []
    at_s = rng.uniform(1.0, 4.0)
    while len(faults) < number:
        kind, target = rng.choice(kinds), rng.choice(list(ends))
        for_s = round(rng.uniform(0.2, 1.6) * lost_after_s, 1)
        fault = Fault(kind, target, at_s=round(at_s, 1), for_s=None if kind == "kill" else for_s)
        if kind == "slow":
            amount = round(rng.uniform(2.0, 8.0), 1)
            fault = Fault(kind, rng.choice(trainers), amount=amount, at_s=round(at_s, 1), for_s=for_s)
        elif fault.silences(lost_after_s):
            if ends[target] == config.cluster.max_restarts:
                continue
            ends[target] += 1
        faults.append(fault)
        at_s += (fault.for_s or 0.0) + lost_after_s + _RECOVERY_S + rng.uniform(0.0, 4.0)
    return faults

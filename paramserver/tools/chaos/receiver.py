"""Faults inside of a rank, in runs of ``paramserver chaos`` only: a rank receives them over a socket, as JSON lines."""

from __future__ import annotations

import ctypes
import json
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paramserver.cluster import process_environ
from paramserver.config import Role
from paramserver.tools.chaos.director import name_of

if TYPE_CHECKING:
    from torch.futures import Future

    from paramserver.task import Task

FAULT_ADDRESS = "PARAMSERVER_FAULTS"
"""Set by ``paramserver chaos`` for the processes of its run: the socket from which a rank receives faults."""
# A call is lost only once this process takes part in steps: a process that cannot reach the servers at its start ends.
_STEP_CALL = "push"


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
            if self._slowdown is not None and time.monotonic() < self._slow_until:
                self._slowdown.after_forward(model, loss, time.perf_counter() - began, batch_idx)
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

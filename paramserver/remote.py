"""A trainer's view of the server."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed.rpc as rpc

from paramserver import hosting
from paramserver.config import Config
from paramserver.errors import DeadlineExceeded, PeerLost
from paramserver.membership import Heartbeat, watch
from paramserver.session import SERVER_NAME
from paramserver.transport.wire import Failure


class RemoteServer:
    """The server as seen from a trainer: an RRef, calls that end when the server is gone, and a heartbeat.

    Calls that wait for other trainers have no limit of their own: a slow trainer is no failure. What ends them is the
    server's answer, its death (the lifeline) or its silence (the heartbeat).
    """

    def __init__(self, config: Config, trainer_index: int) -> None:
        self.config = config
        self.trainer_index = trainer_index
        self.rref = rpc.remote(SERVER_NAME, hosting.get_parameter_server)
        self._changed = threading.Condition()
        self._reason: str | None = None
        self._heartbeat: Heartbeat | None = None
        watch(SERVER_NAME, self._gone)

    def start_heartbeat(self) -> None:
        lost_after_s = self.config.server.lost_after_s
        self._heartbeat = Heartbeat(
            lambda: rpc.rpc_sync(SERVER_NAME, hosting.call, args=("beat", self.trainer_index), timeout=lost_after_s),
            self.config.server.heartbeat_s,
            self._lost,
        )

    def call(self, method: str, *args: Any) -> Any:
        """A call that the server answers at once, within ``cluster.timeout_s``."""
        return self._answer(self.begin_now(method, *args), method, self.config.cluster.timeout_s)

    def call_later(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """A call that the server answers when other trainers have come as far."""
        return self.end(method, self.begin(method, *args), timeout_s)

    def begin(self, method: str, *args: Any) -> torch.futures.Future[Any]:
        """The first half of ``call_later``: the server works while this trainer does something else."""
        future: torch.futures.Future[Any] = rpc.rpc_async(
            SERVER_NAME, hosting.call_later, args=(method, *args), timeout=0
        )
        return future

    def begin_now(self, method: str, *args: Any) -> torch.futures.Future[Any]:
        """The same for a call that the server answers at once; its answer may never be looked at."""
        future: torch.futures.Future[Any] = rpc.rpc_async(SERVER_NAME, hosting.call, args=(method, *args))
        return future

    def end(self, method: str, begun: torch.futures.Future[Any], timeout_s: float | None = None) -> Any:
        """The answer to what ``begin`` returned."""
        return self._answer(begun, method, timeout_s)

    def call_through(self, method: str, *args: Any) -> Any:
        """A call by the RRef that takes its time; what it returns has a gradient inside a context."""
        future = rpc.rpc_async(self.rref.owner(), hosting.call_through, args=(self.rref, method, *args), timeout=0)
        return self._answer(future, method, None)

    def _answer(self, future: torch.futures.Future[Any], method: str, timeout_s: float | None) -> Any:
        if not future.done():
            future.add_done_callback(self._wake)
        with self._changed:
            ended = self._changed.wait_for(lambda: future.done() or self._reason is not None, timeout_s)
            reason = self._reason
        if not ended:
            raise DeadlineExceeded(f"the server did not answer {method} within cluster.timeout_s ({timeout_s:g} s)")
        if not future.done():
            raise PeerLost(f"the server is lost: {reason}")
        try:
            value = future.value()
        except RuntimeError as error:
            raise PeerLost(f"the server is lost: {str(error).splitlines()[0]}") from error
        if isinstance(value, Failure):
            raise value.error()
        return value

    def _wake(self, _: torch.futures.Future[Any]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _gone(self, reason: str | None) -> None:
        self._lost(reason or "it ended before this trainer did")

    def _lost(self, reason: str) -> None:
        with self._changed:
            self._reason = self._reason or reason
            self._changed.notify_all()

    # What SharedOptimizer asks of its host.

    def apply(self, context_id: int, *report: Any) -> Any:
        return self.call_later("step", context_id, *report)

    def optimizer_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.call("optimizer_state")
        return state

    def close(self) -> None:
        """Stop the heartbeat and let go of the server."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        # The agent's shutdown reports references that are still held as leaks.
        del self.rref

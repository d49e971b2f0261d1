"""A trainer's view of the server."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor

from paramserver.config import Config
from paramserver.distributed import rpc_calls
from paramserver.distributed.membership import Heartbeat, watch_peer
from paramserver.distributed.rpc_calls import RemoteError
from paramserver.distributed.session import SERVER_NAME, server_name
from paramserver.errors import DeadlineExceeded, PeerLost
from paramserver.metrics.records import StepReport
from paramserver.transport.base import GradientBucket
from paramserver.transport.messages import VersionView


class ServerClient:
    """The server as seen from a trainer, or from one more server: an RRef, calls that end when it is gone, a heartbeat.

    Calls that wait for other trainers have no limit of their own: a slow trainer is no failure. What ends them is the
    server's answer, its death (the lifeline) or its silence (the heartbeat).

    Where several servers own a shard each, this is the first of them, and what goes to all goes to each. It looks after
    the others: when one is lost, it ends the run.

    Args:
        config: the run's.
        index: of the trainer, or of the other server.
        beat: the server's method for the heartbeat.
    """

    def __init__(self, config: Config, index: int, beat: str = "beat") -> None:
        self.config = config
        self.index = index
        self._beat = beat
        self._others: list[str] = []
        self._called = "the server" if config.cluster.num_servers == 1 else "server 0"
        self.rref = rpc.remote(SERVER_NAME, rpc_calls.get_parameter_server)
        self._changed = threading.Condition()
        self._reason: str | None = None
        self._heartbeat: Heartbeat | None = None
        watch_peer(SERVER_NAME, self._gone)

    def start_heartbeat(self) -> None:
        lost_after_s = self.config.server.lost_after_s
        self._heartbeat = Heartbeat(
            lambda: rpc.rpc_sync(SERVER_NAME, rpc_calls.call, args=(self._beat, self.index), timeout=lost_after_s),
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
        return rpc_calls.send_later(SERVER_NAME, method, *args)

    def begin_now(self, method: str, *args: Any) -> torch.futures.Future[Any]:
        """The same for a call that the server answers at once; its answer may never be looked at."""
        return self._begin_at(SERVER_NAME, method, *args)

    def end(self, method: str, begun: torch.futures.Future[Any], timeout_s: float | None = None) -> Any:
        """The answer to what ``begin`` returned."""
        return self._answer(begun, method, timeout_s)

    def call_through(self, method: str, *args: Any) -> Any:
        """A call by the RRef that takes its time; what it returns has a gradient inside a context."""
        future = rpc.rpc_async(self.rref.owner(), rpc_calls.call_through, args=(self.rref, method, *args), timeout=0)
        return self._answer(future, method, None)

    def _answer(self, future: torch.futures.Future[Any], method: str, timeout_s: float | None) -> Any:
        if not future.done():
            future.add_done_callback(self._wake)
        with self._changed:
            ended = self._changed.wait_for(lambda: future.done() or self._reason is not None, timeout_s)
            reason = self._reason
        if not ended:
            raise DeadlineExceeded(f"{self._called} did not answer {method} within cluster.timeout_s ({timeout_s:g} s)")
        if not future.done():
            raise PeerLost(f"{self._called} is lost: {reason}")
        try:
            value = future.value()
        except RuntimeError as error:
            raise PeerLost(f"{self._called} is lost: {str(error).splitlines()[0]}") from error
        if isinstance(value, RemoteError):
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

    def check(self) -> None:
        """Raises PeerLost: the server is gone."""
        with self._changed:
            if self._reason is not None:
                raise PeerLost(f"{self._called} is lost: {self._reason}")

    # What goes to all servers.

    def spread(self, servers: int) -> None:
        """From now on a pull and a push are parts of all servers."""
        self._others = [server_name(index) for index in range(1, servers)]

    def begin_pull(self, version: int) -> torch.futures.Future[Any]:
        """Ask for a version inside this thread's distributed-autograd context."""
        first = self.begin_now("pull", self.index)
        if not self._others:
            return first
        return torch.futures.collect_all([first, *(self._begin_at(n, "pull", version) for n in self._others)])

    def end_pull(self, begun: torch.futures.Future[Any]) -> tuple[Tensor, ...]:
        """Its tensors, in the order of servers."""
        answer = self.end("pull", begun)
        if not self._others:
            pulled: tuple[Tensor, ...] = answer
            return pulled
        return tuple(flat for one in answer for flat in self._answer(one, "pull", None))

    def look(self, version: int | None) -> VersionView:
        """A version for validation; None = whatever is current, on each server."""
        begun = [self._begin_at(name, "look", version) for name in self._others]
        look: VersionView = self.call("look", self.index, version)
        others = [flat for one in begun for flat in self._answer(one, "look", self.config.cluster.timeout_s)]
        return replace(look, parameters=(*look.parameters, *others)) if others else look

    def backward(self, context_id: int, root: Tensor) -> None:
        """Push: the distributed backward of ``root``.

        Raises:
            PeerLost: it did not reach all servers.
        """
        try:
            dist_autograd.backward(context_id, [root])  # type: ignore[attr-defined]
        except RuntimeError as error:
            self.check()  # what was noticed first says more than what follows of it
            who = "a server" if self._others else self._called
            reason = str(error).splitlines()[0]
            raise PeerLost(f"{who} is lost: the gradients did not reach it ({reason})") from error

    def begin_early(self, version: int, early: GradientBucket, gradient: Tensor) -> torch.futures.Future[Any]:
        """Send a part of a push to its server. Like the push it takes as long as the network needs."""
        name = server_name(early.server)
        return rpc_calls.send(name, "take_early", self.index, version, early.number, gradient, timeout_s=0)

    def end_early(self, begun: torch.futures.Future[Any]) -> None:
        """It has arrived."""
        self._answer(begun, "take_early", None)

    def _begin_at(self, name: str, method: str, *args: Any) -> torch.futures.Future[Any]:
        return rpc_calls.send(name, method, *args, timeout_s=self.config.cluster.timeout_s)

    # What SharedOptimizer asks of its host.

    def apply(self, context_id: int, report: StepReport, *rest: Any) -> Any:
        push = context_id, self.index, report.version
        told = [self._begin_at(name, "take_push", *push) for name in self._others]
        answer = self.call_later("step", context_id, report, *rest)
        for one in told:  # also of a push that came too late: the context, which holds the gradients, ends after this
            self._answer(one, "take_push", self.config.cluster.timeout_s)
        return answer

    def begin_apply(self, *report: Any) -> torch.futures.Future[Any]:
        return self.begin("expect_step", *report)

    def end_apply(self, begun: torch.futures.Future[Any]) -> Any:
        return self.end("step", begun)

    def optimizer_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.call_later("optimizer_state")
        return state

    def close(self) -> None:
        """Stop the heartbeat and let go of the server."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        # The agent's shutdown reports references that are still held as leaks.
        del self.rref

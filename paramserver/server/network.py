"""The connections of server 0 to other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from paramserver.distributed.membership import watch_peer
from paramserver.distributed.rpc_agent import current_context_id, release_context
from paramserver.distributed.rpc_calls import send, send_deferred

P = ParamSpec("P")
T = TypeVar("T")


class Network:
    """What a server needs of its RPC agent. Tests and the simulation of the protocol derive their own from it."""

    def watch(self, name: str, on_gone: Callable[[str | None], None]) -> None:
        """Call ``on_gone`` when a process ends; see ``watch_peer``."""
        watch_peer(name, on_gone)

    def context_id(self) -> int:
        """Return the id of the distributed-autograd context of the call that runs in this thread."""
        return current_context_id()

    def release_context(self, context_id: int) -> None:
        """Release what this process holds of a context whose trainer is dead."""
        release_context(context_id)

    def send(
        self, name: str, timeout_s: float, handler: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> torch.futures.Future[T]:
        """Call a handler that replies immediately; see ``rpc_calls.send``."""
        return send(name, timeout_s, handler, *args, **kwargs)

    def send_deferred(
        self,
        name: str,
        handler: Callable[Concatenate[Any, P], torch.futures.Future[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> torch.futures.Future[T]:
        """Call a handler that replies later; see ``rpc_calls.send_deferred``."""
        return send_deferred(name, handler, *args, **kwargs)

"""The one parameter server of a process, and the functions by which trainers call it."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed.rpc as rpc

from paramserver.errors import TrainingError
from paramserver.server import ParameterServer
from paramserver.transport.wire import answers, answers_later

_server: ParameterServer | None = None
_lock = threading.Lock()


def host(server: ParameterServer | None) -> None:
    """Make ``server`` the one that this process answers for; None ends that."""
    global _server
    with _lock:
        _server = server


def get_parameter_server() -> ParameterServer:
    """The one ``ParameterServer`` of this process, however many trainers ask: the target of their ``rpc.remote``."""
    with _lock:
        if _server is None:
            raise TrainingError("this process hosts no parameter server (yet, or any more)")
        return _server


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
@answers_later
def call_later(method: str, *args: Any) -> torch.futures.Future[Any]:
    """Call a method of the server that answers with a future."""
    future: torch.futures.Future[Any] = getattr(get_parameter_server(), method)(*args)
    return future


@answers
def call(method: str, *args: Any) -> Any:
    """Call a method of the server that answers at once."""
    return getattr(get_parameter_server(), method)(*args)


@answers
def call_through(server_rref: Any, method: str, *args: Any) -> Any:
    """The same by a reference to the server, as the RPC tutorial does it."""
    return getattr(server_rref.local_value(), method)(*args)

"""The one parameter server of a process, and the functions by which trainers call it."""

from __future__ import annotations

import threading
from operator import attrgetter
from typing import Any

import torch
import torch.distributed.rpc as rpc

from paramserver.errors import TrainingError
from paramserver.transport.wire import answers, answers_later

_server: Any = None
_lock = threading.Lock()


def host(server: Any) -> None:
    """Make ``server`` the one that this process answers for, a ``ParameterServer`` on rank 0; None ends that."""
    global _server
    with _lock:
        _server = server


def get_parameter_server() -> Any:
    """The one ``ParameterServer`` of this process, however many trainers ask: the target of their ``rpc.remote``."""
    with _lock:
        if _server is None:
            raise TrainingError("this process hosts no parameter server (yet, or any more)")
        return _server


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
@answers_later
def call_later(method: str, *args: Any) -> torch.futures.Future[Any]:
    """Call a method of the server, or ``part.method`` of a part of it, that answers with a future."""
    future: torch.futures.Future[Any] = attrgetter(method)(get_parameter_server())(*args)
    return future


@answers
def call(method: str, *args: Any) -> Any:
    """Call a method of the server that answers at once."""
    return attrgetter(method)(get_parameter_server())(*args)


def send(name: str, method: str, *args: Any, timeout_s: float) -> torch.futures.Future[Any]:
    """``call`` in the process of that RPC name; 0 is no limit."""
    future: torch.futures.Future[Any] = rpc.rpc_async(name, call, args=(method, *args), timeout=timeout_s)
    return future


def send_later(name: str, method: str, *args: Any) -> torch.futures.Future[Any]:
    """``call_later`` in the process of that RPC name, without a limit."""
    future: torch.futures.Future[Any] = rpc.rpc_async(name, call_later, args=(method, *args), timeout=0)
    return future


@answers
def call_through(server_rref: Any, method: str, *args: Any) -> Any:
    """The same by a reference to the server, as the RPC tutorial does it."""
    return getattr(server_rref.local_value(), method)(*args)

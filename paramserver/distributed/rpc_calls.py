"""The RPC transport: which channels carry it, and how errors cross it.

The one parameter server of a process, and the functions by which trainers call it.
"""

from __future__ import annotations

import functools
import socket
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from paramserver import errors
from paramserver.errors import TrainingError

P = ParamSpec("P")
T = TypeVar("T")

# Handlers never block, so a few threads serve any number of trainers that compute by themselves.
WORKER_THREADS = 8


def host_identity() -> str:
    """What two processes share when they run on one host and in one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespace = Path("/proc/self/ns/net").readlink()
    return f"{socket.gethostname()}/{boot}/{namespace}"


def agent_options(timeout_s: float, same_host: bool, computing: int = 0) -> rpc.TensorPipeRpcBackendOptions:
    """Options of an agent that does not spin while it waits.

    torch's default transports keep a core busy in every idle process; ``uv`` sleeps. ``cma`` copies between processes
    of one host without a socket. It also reaches across network namespaces of one machine, past the network that
    somebody set up on purpose; so it is used only where both ends share everything that names a host.

    Args:
        timeout_s: of a call that names none.
        same_host: both ends share all that names a host.
        computing: how many handlers compute at once, each of which has a thread beyond those of the others.
    """
    channels = ["cma", "mpt_uv", "basic"] if same_host else ["mpt_uv", "basic"]
    return rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=WORKER_THREADS + computing,
        rpc_timeout=timeout_s,
        _transports=["uv"],
        _channels=channels,
    )


@dataclass(frozen=True)
class RemoteError:
    """An error on its way back: RPC keeps only a few types of exception, so errors travel as values."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException, who: str = "the server") -> RemoteError:
        """An error of this package as it is; any other with its traceback, and with who raised it."""
        if isinstance(error, errors.ParamserverError):
            return cls(type(error).__name__, str(error))
        text = "".join(traceback.format_exception(error))
        return cls("TrainingError", f"{who} raised {type(error).__name__}: {error}\n{text}")

    @classmethod
    def told_by(cls, who: str, error: BaseException) -> RemoteError:
        """Why a process of the run fails, for another one: an error of the user's input stays one."""
        kind = errors.PeerRefused if isinstance(error, errors.UnsupportedConfiguration) else errors.PeerFailed
        says_all = isinstance(error, errors.ParamserverError) and error.says_all
        return cls(kind.__name__, f"{who} failed: {error if says_all else f'{type(error).__name__}: {error}'}")

    def error(self) -> errors.ParamserverError:
        kind = getattr(errors, self.kind, errors.TrainingError)
        made = kind(self.message)
        assert isinstance(made, errors.ParamserverError)
        return made


def returns_errors(handler: Callable[P, T]) -> Callable[P, T | RemoteError]:
    """Make a handler return what it raises."""

    @functools.wraps(handler)
    def answer(*args: P.args, **kwargs: P.kwargs) -> T | RemoteError:
        try:
            return handler(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - it travels to the caller, who raises it
            return RemoteError.of(error)

    return answer


def returns_errors_async(
    handler: Callable[P, torch.futures.Future[Any]],
) -> Callable[P, torch.futures.Future[Any]]:
    """The same for a handler that returns a future; to stand below ``rpc.functions.async_execution``."""

    @functools.wraps(handler)
    def answer(*args: P.args, **kwargs: P.kwargs) -> torch.futures.Future[Any]:
        try:
            return handler(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - it travels to the caller, who raises it
            return completed_future(RemoteError.of(error))

    return answer


def completed_future(value: Any) -> torch.futures.Future[Any]:
    """A future that has its value already."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


_server: Any = None
_lock = threading.Lock()


def register_server(server: Any) -> None:
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
@returns_errors_async
def call_later(method: str, *args: Any) -> torch.futures.Future[Any]:
    """Call a method of the server, or ``part.method`` of a part of it, that answers with a future."""
    future: torch.futures.Future[Any] = attrgetter(method)(get_parameter_server())(*args)
    return future


@returns_errors
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


@returns_errors
def call_through(server_rref: Any, method: str, *args: Any) -> Any:
    """The same by a reference to the server, as the RPC tutorial does it."""
    return getattr(server_rref.local_value(), method)(*args)

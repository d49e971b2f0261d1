"""Typed calls between processes: handlers are named by reference, and errors cross RPC as values.

``send(name, timeout_s, ParameterServer.leave, totals, decision)`` runs ``leave`` of the ``ParameterServer`` that the
process ``name`` has registered. Type checkers match the arguments against the handler, and "go to definition" finds it.
On the wire the handler is its class and its name; ``_handle*`` are the only places that turn these into a method.

Calls address the process by its RPC name and not by an RRef to the server. Both reach the same object, but an RRef in
each message costs about a tenth of a round trip (tests/measure/rref_calls.py), and RRefs belong to the first agent of a
process: in a later generation their messages do not arrive (docs/torch-notes.md, "RRefs in messages").
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed.rpc as rpc

from paramserver.distributed.local_calls import LocalCallServer, LocalConnection
from paramserver.distributed.remote_error import RemoteError as RemoteError
from paramserver.errors import TrainingError

P = ParamSpec("P")
T = TypeVar("T")

# Handlers never block, so a few threads serve any number of trainers.
WORKER_THREADS = 8

# 0 means no limit in torch.distributed.rpc.
NO_TIMEOUT_S = 0.0


def agent_options(timeout_s: float, same_host: bool, computing: int = 0) -> rpc.TensorPipeRpcBackendOptions:
    """Return options of an agent that does not spin while it waits.

    torch's default transports keep a core busy (docs/torch-notes.md, "Default transports spin"). ``cma`` is used only
    if both ends share everything that identifies a host (docs/torch-notes.md, "The cma channel bypasses the network").
    Each of the ``computing`` handlers that compute at the same time gets a thread in addition to the others.
    """
    channels = ["cma", "mpt_uv", "basic"] if same_host else ["basic"]
    return rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=WORKER_THREADS + computing,
        rpc_timeout=timeout_s,
        _transports=["uv"],
        _channels=channels,
    )


def completed_future(value: Any) -> torch.futures.Future[Any]:
    """Return a future that already has its value."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


# The called side.

_handlers: dict[str, Any] = {}
_lock = threading.Lock()


def register_server(server: object) -> None:
    """Make ``server`` the object of this process whose methods other processes may call, under each of its classes."""
    with _lock:
        _handlers.update({cls.__name__: server for cls in type(server).__mro__[:-1]})


def unregister_servers() -> None:
    """Remove all objects; a later call fails."""
    with _lock:
        _handlers.clear()


def get_parameter_server() -> Any:
    """Return the one ``ParameterServer`` of this process: the target of ``rpc.remote``, however many trainers ask."""
    return _find("ParameterServer")


def _find(owner: str) -> Any:
    with _lock:
        if owner not in _handlers:
            raise TrainingError(f"this process has no {owner} (not yet, or not any more)")
        return _handlers[owner]


def returns_errors(handler: Callable[P, T]) -> Callable[P, T | RemoteError]:
    """Decorate a handler to return what it raises."""

    @functools.wraps(handler)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T | RemoteError:
        try:
            return handler(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - returned to the caller, which raises it
            return RemoteError.of(error)

    return wrapped


def returns_errors_async(
    handler: Callable[P, torch.futures.Future[Any]],
) -> Callable[P, torch.futures.Future[Any]]:
    """Decorate a handler that returns a future to return what it raises; goes below ``async_execution``.

    An exception set on such a future would be *returned* by the caller's ``rpc_sync``, so errors are values here too.
    """

    @functools.wraps(handler)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> torch.futures.Future[Any]:
        try:
            return handler(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - returned to the caller, which raises it
            return completed_future(RemoteError.of(error))

    return wrapped


@returns_errors
def _handle(owner: str, method: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(_find(owner), method)(*args, **kwargs)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
@returns_errors_async
def _handle_deferred(owner: str, method: str, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = getattr(_find(owner), method)(*args, **kwargs)
    return future


def serve_local_calls(timeout_s: float) -> LocalCallServer:
    """Return a server of local calls, for handlers that return futures; ``timeout_s`` as there."""
    return LocalCallServer(_handle_deferred, timeout_s)


# The calling side.


class CallInterceptor(Protocol):
    """Stands between ``send`` or ``send_deferred`` and the call; see ``faults/receiver.py``."""

    def intercept(
        self, to: str, handler: str, call: Callable[[], torch.futures.Future[Any]]
    ) -> torch.futures.Future[Any]: ...

    def repeated(self, handler: str) -> None: ...


_interceptor: CallInterceptor | None = None


def set_interceptor(interceptor: CallInterceptor | None) -> None:
    """Let all calls of this process pass through ``interceptor`` from now on."""
    global _interceptor
    _interceptor = interceptor


def note_repeated(handler: str) -> None:
    """Record that a call is sent again, as the first one or its reply did not arrive."""
    if _interceptor is not None:
        _interceptor.repeated(handler)


def _send(
    to: str,
    handle: Any,
    target: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout_s: float,
    local: LocalConnection | None = None,
) -> Any:
    def call() -> torch.futures.Future[Any]:
        if local is not None and (future := local.call(target, kwargs)) is not None:
            return future
        sent: torch.futures.Future[Any] = rpc.rpc_async(to, handle, args=target, kwargs=kwargs, timeout=timeout_s)
        return sent

    return call() if _interceptor is None else _interceptor.intercept(to, target[1], call)


def send(
    to: str, timeout_s: float, handler: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
) -> torch.futures.Future[T]:
    """Call a handler in the process ``to`` that returns immediately; the future is of its result or a ``RemoteError``.

    ``to`` is the RPC name of a process that registered an instance of the handler's class. A timeout of 0 means no
    limit.
    """
    target = *handler.__qualname__.split("."), *args
    future: torch.futures.Future[T] = _send(to, _handle, target, kwargs, timeout_s)
    return future


def send_deferred(
    to: str, handler: Callable[Concatenate[Any, P], torch.futures.Future[T]], *args: P.args, **kwargs: P.kwargs
) -> torch.futures.Future[T]:
    """Call a handler that returns a future: it replies once other processes have taken part. There is no limit."""
    target = *handler.__qualname__.split("."), *args
    future: torch.futures.Future[T] = _send(to, _handle_deferred, target, kwargs, NO_TIMEOUT_S)
    return future


def send_local(
    connection: LocalConnection,
    to: str,
    handler: Callable[Concatenate[Any, P], torch.futures.Future[T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> torch.futures.Future[T]:
    """Call a handler as ``send_deferred`` does, over ``connection`` if it takes the call; ``to`` is at its end."""
    target = *handler.__qualname__.split("."), *args
    future: torch.futures.Future[T] = _send(to, _handle_deferred, target, kwargs, NO_TIMEOUT_S, connection)
    return future

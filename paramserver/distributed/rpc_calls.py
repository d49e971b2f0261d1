"""Typed calls between processes: handlers are named by reference, and errors cross RPC as values.

``send(name, timeout_s, ParameterServer.leave, totals, decision)`` runs ``leave`` of the ``ParameterServer`` that the
process ``name`` has registered. Type checkers match the arguments against the handler, and "go to definition" finds it.
On the wire the handler is its class and its name; ``_handle`` is the only place that turns these into a method.

Calls address the process by its RPC name and not by an RRef to the server. Both reach the same object, but an RRef in
each message costs about a tenth of a round trip (tests/measure/rref_calls.py), and RRefs belong to the first agent of a
process: in a later generation their messages do not arrive (docs/torch-notes.md, "RRefs in messages").

A call is sent again because it or its reply did not arrive, if its handler declares that this is right. ``repeatable``:
called again with the same arguments, it changes nothing. ``executed_once``: each call has a number, and one that is
here again gets its first reply. A call of any other handler is sent once, and its loss ends the session.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, cast

import torch
import torch.distributed.rpc as rpc

from paramserver.consistency import TrainerId
from paramserver.distributed.local_calls import LocalConnection
from paramserver.distributed.remote_error import RemoteError as RemoteError
from paramserver.distributed.rpc_agent import keep_thread_state
from paramserver.distributed.tcp_calls import TcpConnection
from paramserver.errors import TrainingError

P = ParamSpec("P")
T = TypeVar("T")
Handler = TypeVar("Handler", bound=Callable[..., Any])

# Marks of a handler.
_REPEATABLE, _NUMBERED = "is_repeatable", "is_numbered"

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


def server_rref(name: str) -> Any:
    return rpc.remote(name, get_parameter_server)


def rref_of(value: Any) -> Any:
    """Return an RRef of an object of this process."""
    return rpc.RRef(value)


def _find(owner: str) -> Any:
    with _lock:
        if owner not in _handlers:
            raise TrainingError(f"this process has no {owner} (not yet, or not any more)")
        return _handlers[owner]


def _handle(owner: str, method: str, *args: Any, **kwargs: Any) -> Any:
    """Run a handler, and return what it returns or raises."""
    try:
        keep_thread_state()
        return getattr(_find(owner), method)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - returned to the caller, which raises it
        return RemoteError.of(error)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def handle_deferred(owner: str, method: str, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
    """Run a handler and return the future of its reply; what it raises is the value of one.

    An exception set on the future would be *returned* by the caller's ``rpc_sync``, so errors are values here too.
    """
    reply = _handle(owner, method, *args, **kwargs)
    return reply if isinstance(reply, torch.futures.Future) else completed_future(reply)


# The calling side.


SocketConnection: TypeAlias = "LocalConnection | TcpConnection"
"""A connection to a process that runs handlers without RPC."""


class CallInterceptor(Protocol):
    """Stands between ``send`` or ``send_deferred`` and the call; see ``tools/chaos/faults.py``."""

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


def send_call(
    to: str,
    handler: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout_s: float,
    is_deferred: bool,
    connection: SocketConnection | None = None,
) -> torch.futures.Future[Any]:
    """Call a handler as ``send`` or ``send_deferred`` do, over ``connection``, which ends at ``to``, if it takes it."""
    owner, method = handler.__qualname__.split(".")
    target = owner, method, *args

    def call() -> torch.futures.Future[Any]:
        if connection is not None and (future := connection.call(target, kwargs)) is not None:
            return future
        handle = handle_deferred if is_deferred else _handle
        sent: torch.futures.Future[Any] = rpc.rpc_async(to, handle, args=target, kwargs=kwargs, timeout=timeout_s)
        return sent

    return call() if _interceptor is None else _interceptor.intercept(to, method, call)


def send(
    to: str, timeout_s: float, handler: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
) -> torch.futures.Future[T]:
    """Call a handler in the process ``to`` that returns immediately; the future is of its result or a ``RemoteError``.

    ``to`` is the RPC name of a process that registered an instance of the handler's class. A timeout of 0 means no
    limit.
    """
    return send_call(to, handler, args, kwargs, timeout_s, is_deferred=False)


def send_deferred(
    to: str, handler: Callable[Concatenate[Any, P], torch.futures.Future[T]], *args: P.args, **kwargs: P.kwargs
) -> torch.futures.Future[T]:
    """Call a handler that returns a future: it replies once other processes have taken part. There is no limit."""
    return send_call(to, handler, args, kwargs, NO_TIMEOUT_S, is_deferred=True)


def repeatable(handler: Handler) -> Handler:
    """Declare that a handler may be called again with equal arguments: it knows the last ones, or changes nothing."""
    handler.__dict__[_REPEATABLE] = True
    return handler


def is_repeatable(handler: Callable[..., Any]) -> bool:
    """Return whether a call of this handler may be sent again."""
    return _REPEATABLE in handler.__dict__


def is_numbered(handler: Callable[..., Any]) -> bool:
    """Return whether each call of this handler has a number, by which it knows one that is here again."""
    return _NUMBERED in handler.__dict__


class LastReplies:
    """The reply to the last call of each handler by each trainer; every use holds the server's lock.

    A trainer has one call of a handler in flight, so the last one is enough. ``running`` is held while a handler runs
    for a trainer, so that the same call, sent again, waits for its reply. It is taken before the server's lock.
    """

    def __init__(self) -> None:
        self.running: defaultdict[tuple[int, str], threading.Lock] = defaultdict(threading.Lock)
        self._replies: dict[tuple[int, str], tuple[TrainerId, int, Any]] = {}

    def find(self, sender: TrainerId, handler: str, number: int) -> tuple[Any] | None:
        """Return the reply to a call as a tuple of one; None if it was not executed.

        No trainer waits for the reply to an earlier number: such a message was overtaken.
        """
        known = self._replies.get((sender.trainer_index, handler))
        return None if known is None or known[0] != sender or known[1] < number else (known[2],)

    def set(self, sender: TrainerId, handler: str, number: int, reply: Any) -> None:
        self._replies[sender.trainer_index, handler] = sender, number, reply


def executed_once(handler: Handler) -> Handler:
    """Let a method of the server reply to a call that is repeated as it did before; a future is the same one.

    The class has a ``_lock``, ``last_replies`` and a ``roster``, which refuses a sender that takes no part any more.
    The first argument of the handler is the ``TrainerId`` of the sender. A caller that may repeat its call adds the
    keyword ``number``, which grows from 1. Calls that raise have no effect, so they are not recorded.
    """

    @functools.wraps(handler)
    def wrapped(self: Any, sender: TrainerId, *args: Any, number: int = 0) -> Any:
        if not number:
            return handler(self, sender, *args)
        with self._lock:
            running = self.last_replies.running[sender.trainer_index, handler.__name__]
        # No handler blocks, so a call that is repeated while the first one runs in another thread does not wait long.
        with running:
            with self._lock:
                found = self.last_replies.find(sender, handler.__name__, number)
                if found is not None:
                    self.roster.index_of(sender)
            if found is None:
                # Not under the server's lock: a handler may complete futures, or write files, outside of it.
                found = (handler(self, sender, *args),)
                with self._lock:
                    self.last_replies.set(sender, handler.__name__, number, found[0])
        return found[0]

    wrapped.__dict__.update({_REPEATABLE: True, _NUMBERED: True})
    return cast("Handler", wrapped)

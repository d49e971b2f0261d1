"""Every private call into torch's RPC, in one place.

RPC is in maintenance mode upstream: stable, without new features. tests/laws/test_torch_private.py fails where a torch
release changes what is used here.
"""

# mypy: disable-error-code="attr-defined, no-untyped-call"

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store
from torch._C._distributed_rpc import TensorPipeAgent
from torch.distributed.rpc._utils import _update_group_membership

from paramserver.errors import Unreachable

_autograd_id: int | None = None
# Where this process's agent finds addresses; None for the first agent, whose store is that of the run.
_private_store: HashStore | None = None
_thread = threading.local()


def keep_thread_state() -> None:
    """Keep the Python state of this thread of an agent for as long as the process lives; later calls do nothing.

    Otherwise torch makes one for each call of a handler and deletes it afterwards (docs/torch-notes.md, "A thread state
    for each call").
    """
    if not hasattr(_thread, "is_kept"):
        # Its release, which never comes, would let torch delete the state.
        ctypes.pythonapi.PyGILState_Ensure()
        _thread.is_kept = True


def init_autograd(worker_id: int) -> None:
    """Let this process make distributed-autograd contexts, whose ids contain ``worker_id``; later calls do nothing.

    torch accepts one id in the life of a process. No other process that is connected to the same server may have it.
    """
    global _autograd_id
    if _autograd_id is None:
        dist_autograd._init(worker_id)
        _autograd_id = worker_id


def autograd_id() -> int | None:
    """Return the id with which this process makes contexts; None before its first agent."""
    return _autograd_id


def start_first_agent(store: Store, name: str, options: rpc.TensorPipeRpcBackendOptions) -> None:
    """Start the agent with worker id 0, to which the others connect. It publishes its address in ``store``."""
    global _private_store
    _private_store = None
    init_autograd(0)
    rpc._init_rpc_backend(rpc.backend_registry.BackendType.TENSORPIPE, store, name, 0, None, options)


def start_star_agent(
    name: str,
    worker_id: int,
    hubs: Mapping[str, str],
    options: rpc.TensorPipeRpcBackendOptions,
) -> str:
    """Start an agent that knows only the ``hubs``, whose worker ids count from 0 in their order.

    It uses a private store with the names and addresses of the hubs only, so it waits for no other process
    (docs/torch-notes.md, "Groups of fixed and of variable size"). ``hubs`` are the addresses by name. Name and worker
    id were never used before in this run; the name holds no dash, at which torch splits names from ids.
    """
    global _private_store
    _private_store = private = HashStore()
    # The keys under which torch's own agents look up names and addresses.
    private.set("names/_ALL_WORKER_INFOS", "".join(f"{hub}-{i}," for i, hub in enumerate(hubs)))
    for i, (hub, address) in enumerate(hubs.items()):
        private.set(f"names/{i}", hub)
        private.set(f"addrs/{hub}", address)
    init_autograd(worker_id)
    agent = TensorPipeAgent(private, name, worker_id, None, options, {}, [])
    rpc.api._init_rpc_states(agent)
    own: bytes = private.get(f"addrs/{name}")
    return own.decode()


def register_with(hub: str, address: str) -> None:
    """Add this agent, at its ``address``, to the members that ``hub`` knows.

    This is never undone (docs/torch-notes.md, "Members are never removed").

    Raises:
        Unreachable: ``hub`` does not reply: it has ended since it published its address, or accepts no connection any
            more (docs/torch-notes.md, "A connection that ends early ends the listener").
    """
    own = rpc.get_worker_info()
    try:
        rpc.rpc_sync(hub, _add_member, args=(own, address))
    except RuntimeError as error:
        who = f"server {hub.removeprefix('server')}"
        raise Unreachable(f"{who} did not accept this process: {str(error).splitlines()[0]}") from error


def _add_member(member: Any, address: str) -> None:
    # In the hub.
    if _private_store is not None:
        _private_store.set(f"addrs/{member.name}", address)
    _update_group_membership(member, [], {}, True)


def autograd_context() -> AbstractContextManager[int]:
    """Return a new distributed-autograd context, which is entered with its id."""
    context: AbstractContextManager[int] = dist_autograd.context()
    return context


def distributed_backward(context_id: int, roots: Sequence[Tensor]) -> None:
    dist_autograd.backward(context_id, list(roots))


def distributed_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Return the gradients that a context holds in this process, by leaf."""
    gradients: dict[Tensor, Tensor] = dist_autograd.get_gradients(context_id)
    return gradients


def current_context_id() -> int:
    """Return the id of the distributed-autograd context in which the handler was called that runs in this thread."""
    context_id: int = dist_autograd._current_context()._context_id()
    return context_id


def release_context(context_id: int) -> None:
    """Release what this process holds of a context whose trainer cannot do it any more; nothing if it has ended."""
    try:
        dist_autograd._is_valid_context(context_id)
    except RuntimeError:  # torch raises where the name promises an answer
        return
    dist_autograd._release_context(context_id)


def _count_elements(tensor: Tensor) -> int:
    """RPC handler: receive a tensor and reply with a number."""
    return tensor.numel()


def measure_call_s(name: str, tensor: Tensor) -> float:
    """Return the seconds of one call that sends ``tensor`` to the agent ``name`` and receives a number."""
    began = time.perf_counter()
    count = rpc.rpc_sync(name, _count_elements, args=(tensor,))
    assert count == tensor.numel()
    return time.perf_counter() - began


def measure_empty_call_s(name: str) -> float:
    """Return the seconds of one call that sends a single element to the agent ``name``."""
    return measure_call_s(name, torch.zeros(1))

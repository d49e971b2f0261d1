"""Start and stop of what processes share while they train: the RPC agent, the process group."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch._C._distributed_c10d import PrefixStore

from paramserver.distributed.rendezvous import Rendezvous
from paramserver.distributed.rpc_agent import announce_to, start_first_agent, start_star_agent
from paramserver.distributed.rpc_calls import agent_options
from paramserver.distributed.timeouts import call_with_timeout
from paramserver.errors import DeadlineExceeded

log = logging.getLogger("paramserver")

_SHUTDOWN_S = 5.0

# The agent parses "name-id" at the first dash, so names hold none.
SERVER_NAME = "server0"


def server_name(server_index: int) -> str:
    return f"server{server_index}"


@contextmanager
def rpc_server(meeting: Rendezvous, computing: int = 0) -> Iterator[None]:
    """The RPC agent of the server, as the only member that others need to know.

    Args:
        meeting: where others learn of it.
        computing: how many of its handlers may compute at once.
    """
    start_first_agent(meeting.store, SERVER_NAME, agent_options(meeting.timeout_s, True, computing))
    meeting.tell("server/host", meeting.host)
    try:
        yield
    finally:
        _shutdown_agent()


@contextmanager
def rpc_shard_server(meeting: Rendezvous, server_index: int) -> Iterator[str]:
    """The RPC agent of a server beside the first, which knows that one; yields its own name."""
    name = server_name(server_index)
    options = agent_options(meeting.timeout_s, meeting.ask("server/host") == meeting.host)
    first, own_store = {SERVER_NAME: meeting.ask(f"addrs/{SERVER_NAME}")}, PrefixStore(name, meeting.store)
    own_address = start_star_agent(name, server_index, first, options, own_store)
    try:
        meeting.tell(f"addrs/{name}", own_address)
        announce_to(SERVER_NAME)
        meeting.tell(f"{name}/host", meeting.host)
        yield name
    finally:
        _shutdown_agent()


@contextmanager
def rpc_trainer(meeting: Rendezvous, trainer_index: int, servers: int = 1) -> Iterator[tuple[str, int]]:
    """The RPC agent of a trainer, which knows the servers alone; yields its own name and worker id.

    torch's dynamic groups make a joiner call every member and hold a token that a death never releases. Here the agent
    stands on a private store with the servers' names and addresses, and announces itself to them: a star, in which
    nobody waits for anybody else.
    """
    names = [server_name(i) for i in range(servers)]
    hosts = {meeting.ask("server/host"), *(meeting.ask(f"{name}/host") for name in names[1:])}
    addresses = {name: meeting.ask(f"addrs/{name}") for name in names}
    worker_id = servers - 1 + meeting.store.add("workers", 1)
    name = f"trainer{trainer_index}_{worker_id}"
    options = agent_options(meeting.timeout_s, hosts == {meeting.host})
    own_address = start_star_agent(name, worker_id, addresses, options)
    try:
        meeting.tell(f"addrs/{name}", own_address)
        for server in names[1:]:
            meeting.tell(f"{server}/addrs/{name}", own_address)  # in the store of that server's agent
        for server in names:
            announce_to(server)
        yield name, worker_id
    finally:
        _shutdown_agent()


def _shutdown_agent() -> None:
    """Nothing is said over RPC any more. About once in a thousand times torch's threads do not end.

    What this rank had to do is done by then, or it failed for a reason of its own, which must not be hidden.
    """
    try:
        call_with_timeout(_SHUTDOWN_S, "the shutdown of the RPC agent", lambda: rpc.shutdown(graceful=False))
    except DeadlineExceeded as late:
        log.warning("%s; the agent ends with this process", late)


@contextmanager
def process_group(meeting: Rendezvous, backend: str) -> Iterator[None]:
    """The process group of ddp. It is destroyed at once on an error, which tells the other ranks."""
    dist.init_process_group(
        backend,
        store=PrefixStore("group", meeting.store),
        rank=meeting.identity.global_rank,
        world_size=meeting.identity.world_size,
        timeout=timedelta(seconds=meeting.timeout_s),
    )
    try:
        yield
    finally:
        call_with_timeout(_SHUTDOWN_S, "the end of the process group", dist.destroy_process_group)


def exchange(value: Any, group: Any = None) -> list[Any]:
    """What every rank of the process group gave, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values

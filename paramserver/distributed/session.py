"""Start and shutdown of the RPC agents that connect the processes of a run.

They form a star: each trainer and shard server knows the servers only, so no process waits for a trainer, and
the death of one disturbs no other (see ``rpc_agent.start_star_agent``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed.rpc as rpc

from paramserver.cluster import chosen_interface, host_and_port, own_address, process_environ
from paramserver.distributed.rendezvous import Rendezvous, detect_lost_store
from paramserver.distributed.rpc_agent import autograd_id, register_with, start_first_agent, start_star_agent
from paramserver.distributed.rpc_calls import agent_options, handle_deferred
from paramserver.distributed.tcp_calls import TcpCaller, TcpCallServer, TcpConnection
from paramserver.distributed.timeouts import call_with_timeout
from paramserver.errors import DeadlineExceeded, Unreachable

log = logging.getLogger("paramserver")

_SHUTDOWN_S = 5.0

# The agent splits "name-id" at the first dash, so names hold none.
SERVER_NAME = "server0"


def server_name(server_index: int) -> str:
    return f"server{server_index}"


@contextmanager
def rpc_server(rendezvous: Rendezvous, computing: int = 0) -> Iterator[None]:
    """Run the RPC agent of server 0, to which all others connect. ``computing`` handlers compute at the same time."""
    start_first_agent(rendezvous.store, SERVER_NAME, agent_options(rendezvous.timeout_s, True, computing))
    rendezvous.set("server/host", rendezvous.host)
    try:
        yield
    finally:
        _shutdown_agent()


@contextmanager
def rpc_shard_server(rendezvous: Rendezvous, server_index: int) -> Iterator[str]:
    """Run the RPC agent of a shard server, which knows server 0; yield its name."""
    name = server_name(server_index)
    with _star_agent(rendezvous, name, server_index, [SERVER_NAME]):
        rendezvous.set(f"{name}/host", rendezvous.host)
        yield name


@dataclass(frozen=True)
class TrainerAgent:
    """The RPC agent of a trainer: its name and id, and the addresses of the servers' agents."""

    name: str
    worker_id: int
    server_addresses: tuple[str, ...]


@contextmanager
def rpc_trainer(rendezvous: Rendezvous, trainer_index: int, servers: int = 1) -> Iterator[TrainerAgent]:
    """Run the RPC agent of a trainer, which knows the servers only."""
    with detect_lost_store():
        worker_id = _draw_worker_id(rendezvous, servers)
    name = f"trainer{trainer_index}_{worker_id}"
    with _star_agent(rendezvous, name, worker_id, [server_name(i) for i in range(servers)]) as addresses:
        yield TrainerAgent(name, worker_id, addresses)


@contextmanager
def _star_agent(rendezvous: Rendezvous, name: str, worker_id: int, servers: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Run an agent that knows these servers, of which server 0 is the first; yield their addresses."""
    hosts = {rendezvous.get("server/host"), *(rendezvous.get(f"{server}/host") for server in servers[1:])}
    addresses = {server: rendezvous.get(f"addrs/{server}") for server in servers}
    options = agent_options(rendezvous.timeout_s, hosts == {rendezvous.host})
    own_address = start_star_agent(name, worker_id, addresses, options)
    try:
        # Publish before announcing: server 0 looks up the address when it learns of the member.
        rendezvous.set(f"addrs/{name}", own_address)
        try:
            for server in servers:
                register_with(server, own_address)
        except Unreachable as error:
            rendezvous.report_unreachable(error)
            raise
        yield tuple(addresses.values())
    finally:
        _shutdown_agent()


@contextmanager
def tcp_server(rendezvous: Rendezvous, name: str) -> Iterator[None]:
    """Serve calls over TCP in the process ``name``, at the address of the interface over which others reach it."""
    with TcpCallServer(handle_deferred, rendezvous.timeout_s) as server:
        address = own_address(rendezvous.identity.master_addr, chosen_interface(process_environ()))
        rendezvous.set(f"tcp/{name}", server.listen(address))
        yield


def connect_tcp(rendezvous: Rendezvous, caller: TcpCaller, servers: int) -> dict[str, TcpConnection]:
    """Connect to the servers, and return the connections by their names.

    Raises:
        Unreachable: one of them cannot be reached.
    """
    connections = {}
    for name in map(server_name, range(servers)):
        address = rendezvous.get(f"tcp/{name}")
        try:
            connections[name] = caller.connect(address)
        except OSError as error:
            host, port, _ = address.split()
            raise Unreachable(f"{name} at {host_and_port(host, int(port))}: {error.strerror or error}") from error
    return connections


# Ids are 16 bits wide in torch. They are counted over all generations of one store, and a store of a new rank 0, which
# does not know what was drawn before, begins higher: so ids grow over the life of a run, until they repeat.
_IDS_OF_A_GENERATION = 1000
_MAX_ID = 32_000


def _draw_worker_id(rendezvous: Rendezvous, servers: int) -> int:
    """Return an id for the agent of this process that no agent of this generation has had.

    An agent accepts each id once. The ids of contexts contain the id of a process's first agent, to which a server that
    computes sends gradients. So a process keeps its id in later generations, and a new one must not draw the id of a
    process from an earlier generation.
    """
    store, process = rendezvous.store, rendezvous.host_and_pid
    if (own := autograd_id()) is not None:
        is_first = not store.check([f"contexts/{own}"])
        store.set(f"contexts/{own}", process)
        if is_first:
            return own
    first_generation = int(rendezvous.root.compare_set("workers/first_generation", "", str(rendezvous.generation)))
    while True:
        drawn = rendezvous.root.add("workers", 1) - 1
        # Ids below ``servers`` belong to the servers.
        worker_id = servers + (drawn + first_generation * _IDS_OF_A_GENERATION) % _MAX_ID
        if own is not None or store.compare_set(f"contexts/{worker_id}", "", process).decode() == process:
            return worker_id


def _shutdown_agent() -> None:
    """Shut the agent down; called when no RPC is needed any more.

    About once in a thousand times torch's threads do not end. The work of this rank is done by then, or it failed for
    a reason that must not be hidden, so that is a warning.
    """
    try:
        # Not graceful: a graceful shutdown waits for all peers, also for dead ones.
        call_with_timeout(_SHUTDOWN_S, "the shutdown of the RPC agent", lambda: rpc.shutdown(graceful=False))
    except DeadlineExceeded as late:
        log.warning("%s; the agent ends with this process", late)

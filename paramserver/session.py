"""Start and stop of what processes share: the store where they meet, the RPC agent, the process group."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import TensorPipeAgent
from torch.distributed.rpc._utils import _update_group_membership

from paramserver.cluster import Identity, bind_listener
from paramserver.config import Config, config_from_mapping, differences, dump_yaml
from paramserver.deadlines import call_within, poll_until
from paramserver.errors import DeadlineExceeded, Interrupted, UnsupportedConfiguration
from paramserver.transport.wire import agent_options, host_identity

_SHUTDOWN_S = 5.0


@dataclass(frozen=True)
class Meeting:
    """The store under this run's prefix, after all ranks have met."""

    store: dist.Store
    identity: Identity
    timeout_s: float
    host: str

    @property
    def place(self) -> str:
        """Host and process, for messages."""
        return f"{socket.gethostname()}, process {_pid()}"

    def tell(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def ask(self, key: str) -> str:
        """The value that some rank tells under ``key``, within the run's timeout."""
        return call_within(self.timeout_s, f"the store's answer for {key}", lambda: self.store.get(key)).decode()


def meet(
    config: Config, identity: Identity, interrupted: threading.Event, listener: socket.socket | None = None
) -> Meeting:
    """Open the store, claim this rank, compare the configuration with rank 0's, and wait until all ranks are there.

    Args:
        config: this rank's; sections that may differ between hosts are not compared.
        identity: which rank this is, and where rank 0 is.
        interrupted: ends the wait.
        listener: the socket on which rank 0's store answers, where somebody bound it before.

    Raises:
        UnsupportedConfiguration: the port is taken, the rank is taken, or the configurations differ.
        DeadlineExceeded: rank 0 cannot be reached, or ranks are missing, within ``cluster.timeout_s``.
    """
    timeout_s = config.cluster.timeout_s
    deadline = time.monotonic() + timeout_s
    base = _open_store(identity, timeout_s, deadline, interrupted, listener)
    store = dist.PrefixStore(f"paramserver/{identity.job}", base)
    _claim_rank(store, identity)
    _agree_on_config(store, config, identity, timeout_s)
    _await_world(store, identity, timeout_s, deadline, interrupted)
    return Meeting(store, identity, timeout_s, host_identity())


def _open_store(
    identity: Identity, timeout_s: float, deadline: float, interrupted: threading.Event, listener: socket.socket | None
) -> dist.Store:
    host, port = identity.master_addr, identity.master_port
    limit = timedelta(seconds=timeout_s)
    if identity.global_rank == 0 and not identity.store_is_hosted:
        listener = listener or bind_listener(host, port)
        port = listener.getsockname()[1]
        # Given a socket of ours, the store listens where that does, and not on all interfaces.
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
        )
    if poll_until(deadline, lambda: _reachable(host, port), interrupted) is None:
        if interrupted.is_set():
            raise Interrupted("interrupted while waiting for rank 0")
        raise DeadlineExceeded(
            f"rank {identity.global_rank} found no rank 0 at {host}:{port} within cluster.timeout_s ({timeout_s:g} s); start rank 0, "
            "or correct --master_addr and --master_port"
        )
    remaining_s = max(deadline - time.monotonic(), 1.0)
    return call_within(
        remaining_s,
        f"the connection to rank 0 at {host}:{port}",
        lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit),
    )


def _reachable(host: str, port: int) -> bool | None:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return None


def _claim_rank(store: dist.Store, identity: Identity) -> None:
    me = f"{socket.gethostname()}, process {_pid()}"
    holder = store.compare_set(f"rank/{identity.global_rank}", "", me).decode()
    if holder != me:
        raise UnsupportedConfiguration(
            f"rank {identity.global_rank} is taken by {holder}; give each process its own --rank"
        )


def _pid() -> int:
    import os

    return os.getpid()


# What may differ between the ranks of a run: where each looks for its own devices and folders.
_OWN_SECTIONS = ("device.", "logging.run_dir", "logging.progress", "cluster.master_addr", "cluster.master_port")


def _agree_on_config(store: dist.Store, config: Config, identity: Identity, timeout_s: float) -> None:
    if identity.global_rank == 0:
        store.set("config", dump_yaml(config))
        return
    import yaml

    text = call_within(timeout_s, "rank 0's configuration", lambda: store.get("config")).decode()
    theirs = config_from_mapping(yaml.safe_load(text))
    lines = [line for line in differences(theirs, config) if not line.startswith(_OWN_SECTIONS)]
    if lines:
        raise UnsupportedConfiguration(
            f"rank {identity.global_rank} has another configuration than rank 0 ({'; '.join(lines)}); start all ranks with the same one"
        )


def _await_world(
    store: dist.Store, identity: Identity, timeout_s: float, deadline: float, interrupted: threading.Event
) -> None:
    def missing() -> list[int]:
        return [r for r in range(identity.world_size) if not store.check([f"rank/{r}"])]

    if poll_until(deadline, lambda: None if missing() else True, interrupted) is not None:
        return
    if interrupted.is_set():
        raise Interrupted("interrupted while waiting for the other ranks")
    names = ", ".join(str(r) for r in missing())
    raise DeadlineExceeded(
        f"rank {identity.global_rank} waited cluster.timeout_s ({timeout_s:g} s) for a world of {identity.world_size}; "
        f"missing: rank {names}. Start them, or lower --world_size"
    )


# The agent parses "name-id" at the first dash, so names hold none.
SERVER_NAME = "server0"


@contextmanager
def rpc_server(meeting: Meeting) -> Iterator[None]:
    """The RPC agent of the server, as the only member that others need to know."""
    dist_autograd._init(0)
    rpc._init_rpc_backend(
        rpc.backend_registry.BackendType.TENSORPIPE,
        meeting.store,
        SERVER_NAME,
        0,
        None,
        agent_options(meeting.timeout_s, same_host=True),
    )
    meeting.tell("server/host", meeting.host)
    try:
        yield
    finally:
        _shutdown_agent()


@contextmanager
def rpc_trainer(meeting: Meeting, trainer_index: int) -> Iterator[tuple[str, int]]:
    """The RPC agent of a trainer, which knows the server alone; yields its own name and worker id.

    torch's dynamic groups make a joiner call every member and hold a token that a death never releases. Here the agent
    stands on a private store with the server's name and address, and announces itself to the server: a star, in which
    nobody waits for anybody else.
    """
    same_host = meeting.ask("server/host") == meeting.host
    address = meeting.ask(f"addrs/{SERVER_NAME}")
    worker_id = meeting.store.add("workers", 1)
    name = f"trainer{trainer_index}_{worker_id}"
    private = dist.HashStore()
    private.set("names/_ALL_WORKER_INFOS", f"{SERVER_NAME}-0,")
    private.set("names/0", SERVER_NAME)
    private.set(f"addrs/{SERVER_NAME}", address)
    dist_autograd._init(worker_id)
    agent = TensorPipeAgent(private, name, worker_id, None, agent_options(meeting.timeout_s, same_host), {}, [])
    rpc.api._init_rpc_states(agent)
    try:
        meeting.tell(f"addrs/{name}", private.get(f"addrs/{name}").decode())
        rpc.rpc_sync(SERVER_NAME, _update_group_membership, args=(agent.get_worker_info(), [], {}, True))
        yield name, worker_id
    finally:
        _shutdown_agent()


def _shutdown_agent() -> None:
    call_within(_SHUTDOWN_S, "the shutdown of the RPC agent", lambda: rpc.shutdown(graceful=False))


@contextmanager
def process_group(meeting: Meeting, backend: str) -> Iterator[None]:
    """The process group of ddp. It is destroyed at once on an error, which tells the other ranks."""
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", meeting.store),
        rank=meeting.identity.global_rank,
        world_size=meeting.identity.world_size,
        timeout=timedelta(seconds=meeting.timeout_s),
    )
    try:
        yield
    finally:
        call_within(_SHUTDOWN_S, "the end of the process group", dist.destroy_process_group)


def exchange(value: Any, group: Any = None) -> list[Any]:
    """What every rank of the process group gave, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values

"""Where the ranks of a run meet: a store on rank 0, a claim for each rank, one configuration, a full world."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import yaml
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from paramserver.cluster import ProcessIdentity, bind_listener
from paramserver.config import Config, config_from_mapping, differences, dump_yaml
from paramserver.distributed.rpc_calls import RemoteError, host_identity
from paramserver.distributed.timeouts import call_with_timeout, poll_until
from paramserver.errors import DeadlineExceeded, Interrupted, PeerLost, UnsupportedConfiguration

# A store ends its waits by itself, unless its host is frozen: so much later they are given up.
_FROZEN_S = 2.0


_FAILED = "failed"


@dataclass(frozen=True)
class Rendezvous:
    """The store under this run's prefix, after all ranks have met."""

    store: Store
    identity: ProcessIdentity
    timeout_s: float
    host: str

    @property
    def place(self) -> str:
        """Host and process, for messages."""
        return f"{socket.gethostname()}, process {os.getpid()}"

    def tell(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def tell_failure(self, failure: RemoteError) -> None:
        """Say why this rank failed, where it cannot reach the server otherwise."""
        self.tell(_FAILED, f"{failure.kind} {failure.message}")

    def failure(self) -> RemoteError | None:
        """What a rank told by ``tell_failure``."""
        if not self.store.check([_FAILED]):
            return None
        kind, _, message = self.ask(_FAILED).partition(" ")
        return RemoteError(kind, message)

    def ask(self, key: str) -> str:
        """The value that some rank tells under ``key``, within the run's timeout."""
        with _rank_zero_may_be_lost():
            return _get(self.store, key, self.timeout_s, f"the store's answer for {key}")


def rendezvous(
    config: Config, identity: ProcessIdentity, interrupted: threading.Event, listener: socket.socket | None = None
) -> Rendezvous:
    """Open the store, compare the configuration with rank 0's, claim this rank, and wait until all ranks are there.

    Args:
        config: this rank's; sections that may differ between hosts are not compared.
        identity: which rank this is, and where rank 0 is.
        interrupted: ends the wait.
        listener: the socket on which rank 0's store answers, where somebody bound it before.

    Raises:
        UnsupportedConfiguration: the port is taken, the rank is taken, or the configurations differ.
        DeadlineExceeded: rank 0 cannot be reached, or ranks are missing, within ``cluster.timeout_s``.
        PeerLost: rank 0 gave up meanwhile.
    """
    timeout_s = config.cluster.timeout_s
    deadline = time.monotonic() + timeout_s
    base = _open_store(identity, timeout_s, deadline, interrupted, listener)
    store = PrefixStore(f"paramserver/{identity.job}", base)
    with _rank_zero_may_be_lost():
        # In this order a rank that is refused leaves its place free for the corrected one.
        _agree_on_config(store, config, identity, timeout_s)
        _claim_rank(store, identity)
        _await_world(store, identity, timeout_s, deadline, interrupted)
    return Rendezvous(store, identity, timeout_s, host_identity())


def _open_store(
    identity: ProcessIdentity,
    timeout_s: float,
    deadline: float,
    interrupted: threading.Event,
    listener: socket.socket | None,
) -> Store:
    host, port = identity.master_addr, identity.master_port
    limit = timedelta(seconds=timeout_s)
    if identity.global_rank == 0 and not identity.store_is_hosted:
        listener = listener or bind_listener(host, port)
        port = listener.getsockname()[1]
        # Given a socket of ours, the store listens where that does, and not on all interfaces.
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
        )
    if poll_until(deadline, lambda: _reachable(host, port), interrupted) is None:
        if interrupted.is_set():
            raise Interrupted("interrupted while waiting for rank 0")
        raise DeadlineExceeded(
            f"rank {identity.global_rank} found no rank 0 at {host}:{port} within cluster.timeout_s "
            f"({timeout_s:g} s); start rank 0, or correct --master_addr and --master_port"
        )
    remaining_s = max(deadline - time.monotonic(), 1.0)
    return call_with_timeout(
        remaining_s,
        f"the connection to rank 0 at {host}:{port}",
        lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit),
    )


def _reachable(host: str, port: int) -> bool | None:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return None


@contextmanager
def _rank_zero_may_be_lost() -> Iterator[None]:
    try:
        yield
    except DistNetworkError as error:
        raise PeerLost(
            f"rank 0 is gone, and its store with it ({str(error).splitlines()[0]}); look for its own error"
        ) from error


def _get(store: Store, key: str, timeout_s: float, what: str) -> str:
    try:
        answer: bytes = call_with_timeout(timeout_s + _FROZEN_S, what, lambda: store.get(key))
    except DistStoreError as error:
        raise DeadlineExceeded(f"{what} did not come within cluster.timeout_s ({timeout_s:g} s)") from error
    return answer.decode()


def _claim_rank(store: Store, identity: ProcessIdentity) -> None:
    me = f"{socket.gethostname()}, process {os.getpid()}"
    holder = store.compare_set(f"rank/{identity.global_rank}", "", me).decode()
    if holder != me:
        raise UnsupportedConfiguration(
            f"rank {identity.global_rank} is taken by {holder}; give each process its own --rank"
        )


# What may differ between the ranks of a run: where each looks for its own devices and folders.
_OWN_SECTIONS = ("device.", "logging.run_dir", "logging.progress", "cluster.master_addr", "cluster.master_port")


def _agree_on_config(store: Store, config: Config, identity: ProcessIdentity, timeout_s: float) -> None:
    if identity.global_rank == 0:
        store.set("config", dump_yaml(config))
        return
    theirs = config_from_mapping(yaml.safe_load(_get(store, "config", timeout_s, "rank 0's configuration")))
    lines = [line for line in differences(theirs, config) if not line.startswith(_OWN_SECTIONS)]
    if lines:
        raise UnsupportedConfiguration(
            f"rank {identity.global_rank} has another configuration than rank 0 ({'; '.join(lines)}); "
            "start all ranks with the same one"
        )


def _await_world(
    store: Store, identity: ProcessIdentity, timeout_s: float, deadline: float, interrupted: threading.Event
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

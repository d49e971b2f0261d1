"""What this build of torch can communicate with."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed import HashStore  # type: ignore[attr-defined]

from paramserver.cluster import ProcessIdentity
from paramserver.distributed.rendezvous import Rendezvous, host_identity
from paramserver.distributed.session import rpc_server
from paramserver.distributed.timeouts import call_with_timeout


def available_backends() -> dict[str, bool]:
    """Return whether torch was built with RPC and with each backend of process groups.

    Example::

        >>> available_backends()["gloo"]
        True
    """
    return {"rpc": rpc.is_available(), "gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}


def start_rpc_agent(timeout_s: float) -> None:
    """Start an RPC agent as server 0 does, and shut it down again. The interface is that of ``bind_interface``.

    Raises:
        DeadlineExceeded: that takes longer than ``timeout_s``.
        RuntimeError: torch cannot start it.
    """
    identity = ProcessIdentity(0, 1, 0, 1, 0, "127.0.0.1", 0, False, "doctor", "flags")
    rendezvous = Rendezvous(HashStore(), identity, timeout_s, host_identity())

    def start() -> None:
        with rpc_server(rendezvous):
            pass

    call_with_timeout(timeout_s, "the start of an RPC agent", start)

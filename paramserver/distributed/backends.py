"""What torch was built with. Imports nothing of ``torch.distributed.rpc``, which later releases may not have."""

from __future__ import annotations

import torch
import torch.distributed as dist

from paramserver.config.modes import Mode
from paramserver.errors import UnsupportedConfiguration


def available_backends() -> dict[str, bool]:
    """Return whether torch was built with RPC and with each backend of process groups."""
    try:
        from torch.distributed import rpc
    except ImportError:
        has_rpc = False
    else:
        has_rpc = rpc.is_available()
    return {"rpc": has_rpc, "gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}


def require_rpc(mode: Mode) -> None:
    """Check that torch has RPC, if the mode has servers.

    Raises:
        UnsupportedConfiguration: it has none.
    """
    if mode.has_servers and not available_backends()["rpc"]:
        raise UnsupportedConfiguration(
            f"mode ({mode.name}) needs torch.distributed.rpc, which torch {torch.__version__} does not have here; use "
            "mode ddp or local, or install a build of torch for Linux from pytorch.org"
        )

"""Every private call into torch's RPC, in one place.

RPC is in maintenance mode upstream: stable, without new features. tests/laws/test_torch_private.py fails where a torch
release changes what is used here.
"""

# mypy: disable-error-code="attr-defined, no-untyped-call"

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch._C._distributed_c10d import HashStore, Store
from torch._C._distributed_rpc import TensorPipeAgent
from torch.distributed.rpc._utils import _update_group_membership


def start_first_agent(store: Store, name: str, options: rpc.TensorPipeRpcBackendOptions) -> None:
    """Start the agent that the others will know, with worker id 0; its address is then in ``store``."""
    dist_autograd._init(0)
    rpc._init_rpc_backend(rpc.backend_registry.BackendType.TENSORPIPE, store, name, 0, None, options)


def start_star_agent(
    name: str,
    worker_id: int,
    centers: Mapping[str, str],
    options: rpc.TensorPipeRpcBackendOptions,
    store: Store | None = None,
) -> str:
    """Start an agent that knows the ``centers``, whose worker ids count from 0 in their order, and nobody else.

    torch's dynamic groups make a joiner call every member under a token that nobody releases when a member dies. This
    agent stands on a private store that holds the centers' names and addresses only, so it waits for nobody.

    Args:
        name, worker_id: never used before in this run; the name holds no dash, at which torch splits names from ids.
        centers: who is known, and the address that each one's agent published.
        options: transports and timeouts.
        store: of its own, where others that announce themselves to it put their addresses before.

    Returns:
        This agent's own address.
    """
    private = HashStore() if store is None else store
    private.set("names/_ALL_WORKER_INFOS", "".join(f"{center}-{i}," for i, center in enumerate(centers)))
    for i, (center, address) in enumerate(centers.items()):
        private.set(f"names/{i}", center)
        private.set(f"addrs/{center}", address)
    dist_autograd._init(worker_id)
    agent = TensorPipeAgent(private, name, worker_id, None, options, {}, [])
    rpc.api._init_rpc_states(agent)
    own: bytes = private.get(f"addrs/{name}")
    return own.decode()


def announce_to(center: str) -> None:
    """Make ``center`` know this agent. Never undone: taking a member off a list crashes the agent that holds it."""
    own = rpc.get_worker_info()
    rpc.rpc_sync(center, _update_group_membership, args=(own, [], {}, True))

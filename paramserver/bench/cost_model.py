"""What communication costs by theory, beside what was measured.

A step is bound by what has to pass the network interface of a host. With n trainers on hosts of their own, k servers on
hosts of theirs, M bytes of parameters, and B bytes per second in each direction at the same time:

- a ring all-reduce sends 2(n-1)/n of M from each trainer, a reduce-scatter and an all-gather (Patarasuk and Yuan,
  "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): 2(n-1)M / (nB);
- servers that take gradients and give parameters at the same time, piece by piece: max(M/B, nM/(kB)), as all n
  trainers share the k servers' interfaces (Li et al., "Scaling distributed machine learning with the parameter
  server", 2014);
- servers that take all gradients, apply them, and then give the parameters: 2nM / (kB).

To each comes the time of the messages that wait for each other, at ``latency`` seconds each: 2(n-1) around the ring;
one to a server and one back where both ways overlap, and twice that where they do not.

One host, whose processes share one loopback, is not what the formulas assume: there they are a scale, no promise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paramserver.config import Mode


@dataclass(frozen=True)
class LinkSpeed:
    """A way between two processes: bytes per second of a large tensor, and seconds of a small message one way."""

    bandwidth: float
    latency: float


def communication_s(
    mode: Mode, size_bytes: float, trainers: int, servers: int, bandwidth: float, latency: float, overlap: bool = False
) -> float:
    """Seconds that a step of all trainers communicates.

    Args:
        mode: says whether there are servers, or a group that reduces.
        size_bytes: of all parameters, M.
        trainers: n.
        servers: k; without meaning where the mode has none.
        bandwidth: B, bytes per second.
        latency: of one message, seconds.
        overlap: servers give parameters while they take gradients.
    """
    if mode.has_servers:
        shared = trainers * size_bytes / (servers * bandwidth)
        if overlap:
            return max(size_bytes / bandwidth, shared) + 2 * latency
        return 2 * shared + 4 * latency
    if not mode.has_process_group:
        return 0.0
    return 2 * (trainers - 1) * (size_bytes / (trainers * bandwidth) + latency)


def break_even_servers(trainers: int, overlap: bool = False) -> int | None:
    """With how many servers a step communicates no longer than all-reduce, by bandwidth; None where no number does."""
    if trainers < 2:
        return None  # one trainer alone has nothing to reduce
    return math.ceil(trainers**2 / ((trainers - 1) * (2 if overlap else 1)))


# What each compression of ddp.comm_hook leaves of float32; of powersgd that depends on the shapes.
_OF_HOOK = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}


def ring_bytes(model_bytes: int, trainers: int, comm_hook: str) -> float | None:
    """What each of the trainers sends and receives per step in a ring all-reduce: 2(n-1)/n of M, each way.

    Returns:
        None where the compression ``comm_hook`` has no factor of its own.
    """
    share = _OF_HOOK.get(comm_hook)
    return None if share is None else 2 * 2 * (trainers - 1) / trainers * model_bytes * share


def predict_communication(
    mode: Mode, speed: LinkSpeed, model_bytes: int, wire_bytes: float, trainers: int, servers: int, comm_hook: str
) -> dict[str, Any] | None:
    """What the case that was built should need for communication; None where it has none, or no formula is known.

    Args:
        mode: of the case.
        speed: measured between two processes, over the case's transport.
        model_bytes: of the parameters that are trained.
        wire_bytes: what a trainer sent and received per step, as measured.
        trainers, servers: how many.
        comm_hook: the word of ``ddp.comm_hook``.
    """
    if mode.has_servers:
        in_memory = wire_bytes < model_bytes / 2
        size = wire_bytes / 2  # each way
        built = f"{_counted(servers)}: push, apply, pull, one after the other"
        if in_memory:
            built += " (through shared memory: only messages travel)"
    elif mode.has_process_group and comm_hook in _OF_HOOK:
        size, built = model_bytes * _OF_HOOK[comm_hook], f"ring all-reduce of {trainers}"
    else:
        return None
    seconds = communication_s(mode, size, trainers, servers, speed.bandwidth, speed.latency)
    return {
        "bandwidth_bytes_s": speed.bandwidth,
        "latency_s": speed.latency,
        "communication_ms": seconds * 1e3,
        "built": built,
        "break_even_servers": break_even_servers(trainers) if mode.has_servers else None,
    }


def _counted(servers: int) -> str:
    return "1 server" if servers == 1 else f"{servers} servers"

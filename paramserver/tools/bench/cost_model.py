"""A model of the communication time of a step, to compare with the measurement.

A step is bound by the bytes that pass the network interface of a host. With n trainers and k servers, each on its own
host, M bytes of parameters, and B bytes per second in each direction at the same time:

- a ring all-reduce sends 2(n-1)/n of M from each trainer, a reduce-scatter and an all-gather (Patarasuk and Yuan,
  "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): 2(n-1)M / (nB);
- servers that receive gradients and send parameters at the same time, bucket by bucket: max(M/B, nM/(kB)), as all n
  trainers share the k servers' interfaces (Li et al., "Scaling distributed machine learning with the parameter
  server", 2014);
- servers that receive all gradients, apply them, and then send the parameters: 2nM / (kB);
- co-located servers, each on the host of a trainer, whose own part does not pass an interface (Jiang et al., "A unified
  architecture for accelerating distributed DNN training in heterogeneous GPU/CPU clusters", 2020): (n+k-2)M / (kB),
  which is that of all-reduce for k = n, or 2(n-1)M / (kB) one after the other.

Each message that depends on another adds ``latency`` seconds: 2(n-1) around the ring; one to a server and one back
where both directions overlap, twice that where they do not.

The formulas assume several hosts. On one host, whose processes share the loopback, they are only a scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paramserver.config import Mode


@dataclass(frozen=True)
class LinkSpeed:
    """A link between two processes: bytes per second of a large tensor, and seconds of a small message one way."""

    bandwidth: float
    latency: float


def communication_s(
    mode: Mode,
    size_bytes: float,
    trainers: int,
    servers: int,
    bandwidth: float,
    latency: float,
    overlap: bool = False,
    colocated: bool = False,
) -> float:
    """Seconds of communication in a step of all trainers.

    Args:
        size_bytes: of all parameters, M.
        trainers: n.
        servers: k; ignored in modes without servers.
        bandwidth: B, bytes per second.
        overlap: servers send parameters while they receive gradients.
        colocated: each server is on the host of a trainer.
    """
    if mode.has_servers:
        one_share = size_bytes / (servers * bandwidth)
        others = trainers - 1 if colocated else trainers
        if not overlap:
            return 2 * others * one_share + 4 * latency
        busiest = others + servers - 1 if colocated else max(others, servers)
        return busiest * one_share + 2 * latency
    if not mode.has_process_group:
        return 0.0
    return 2 * (trainers - 1) * (size_bytes / (trainers * bandwidth) + latency)


def break_even_servers(trainers: int, overlap: bool = False) -> int | None:
    """The number of servers with which a step communicates no longer than all-reduce; None where no number does."""
    if trainers < 2:
        return None  # one trainer alone has nothing to reduce
    return math.ceil(trainers**2 / ((trainers - 1) * (2 if overlap else 1)))


# The ratio of each compression of ddp.comm_hook; that of powersgd depends on the shapes.
_COMPRESSION = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}


def ring_bytes(model_bytes: int, trainers: int, comm_hook: str) -> float | None:
    """Bytes that a trainer sends and receives per step in a ring, 2(n-1)/n of M each way; None if they are unknown."""
    share = _COMPRESSION.get(comm_hook)
    return None if share is None else 2 * 2 * (trainers - 1) / trainers * model_bytes * share


def predict_communication(
    mode: Mode,
    speed: LinkSpeed,
    model_bytes: int,
    wire_bytes: float,
    trainers: int,
    servers: int,
    comm_hook: str,
    overlap: bool = False,
    colocated: bool = False,
) -> dict[str, Any] | None:
    """The predicted communication of a case; None without communication or without a formula for it.

    ``wire_bytes`` are sent and received by a trainer per step, as measured. ``overlap``: servers update and send back
    each bucket while they receive others.
    """
    in_memory = wire_bytes < model_bytes / 2
    if mode.has_servers:
        size = wire_bytes / 2  # each way
        overlap = overlap and not in_memory
        how = "bucket by bucket" if overlap else "one after the other"
        servers_here = f"{servers} {'co-located ' if colocated else ''}server{'s' if servers > 1 else ''}"
        built = f"{servers_here}: push, apply, pull, {how}"
        if in_memory:
            built += " (through shared memory: only messages are sent)"
    elif mode.has_process_group and comm_hook in _COMPRESSION:
        size, built = model_bytes * _COMPRESSION[comm_hook], f"ring all-reduce of {trainers}"
        if in_memory and trainers > 1:
            size, built = 0.0, f"all-reduce of {trainers} in shared memory: nothing is sent"
    else:
        return None
    seconds = communication_s(mode, size, trainers, servers, speed.bandwidth, speed.latency, overlap, colocated)
    return {
        "bandwidth_bytes_s": speed.bandwidth,
        "latency_s": speed.latency,
        "communication_ms": seconds * 1e3,
        "built": built,
        "break_even_servers": break_even_servers(trainers, overlap) if mode.has_servers and not colocated else None,
    }

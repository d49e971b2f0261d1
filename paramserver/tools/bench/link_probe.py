"""Measures the link between two processes over gloo and over RPC, with the settings of a run; and what a step needs.

    python -m paramserver.tools.bench.link_probe --folder FOLDER --number 0|1

Process 1 sends to process 0 and waits for the answer: first a number, of which half the round trip is the latency of a
message, then a tensor of ``SIZE_BYTES``, whose further time is its size over the bandwidth. The medians of several
exchanges are reported. ``measure_links`` starts both processes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from paramserver.cluster import LOOPBACK, bind_interface, process_environ
from paramserver.config import Mode
from paramserver.errors import TrainingError
from paramserver.process_utils import exit_process
from paramserver.tools.bench.processes import INTERFACE, NetworkHosts, ProcessGroup

SIZE_BYTES = 8 * 2**20
SMALL, LARGE, WARM = 100, 15, 3
_MOST_S = 0.3  # the tensor is made smaller where a limited bandwidth would take longer
TIMEOUT_S = 60.0
GLOO, RPC = "gloo", "rpc"


def measure_links(
    folder: Path, environ: Mapping[str, str], device: str = "cpu", hosts: NetworkHosts | None = None
) -> dict[str, LinkSpeed]:
    """The speed over ``GLOO`` and over ``RPC``; over gloo only where trainers compute on CPUs.

    The two processes run on the first two of ``hosts``; None for this machine. Their rendezvous is in ``folder``, a new
    one.

    Raises:
        TrainingError: the measurement failed.
    """
    folder = folder.resolve()  # a URL of a file has no relative paths
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "paramserver.tools.bench.link_probe", "--folder", str(folder), "--device", device]
    if hosts is not None:
        # Not below 64 KiB, or the time of the tensor would not differ from that of a message.
        size = min(SIZE_BYTES, max(int(hosts.bandwidth * _MOST_S), 2**16))
        command += ["--interface", INTERFACE, "--size", str(size)]
    both = [[*command, "--number", str(i)] for i in range(2)]
    if hosts is not None:
        both = [hosts.command_on(i, words) for i, words in enumerate(both)]
    with ProcessGroup(both, environ, folder) as commands:
        commands.wait(TIMEOUT_S, lambda: None)
    try:
        found = json.loads((folder / "speeds.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainingError("the probe of the links ended without figures") from None
    return {name: LinkSpeed(**speed) for name, speed in found.items()}


# In the two processes.


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--number", type=int, choices=(0, 1), required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--interface", default=LOOPBACK)
    parser.add_argument("--size", type=int, default=SIZE_BYTES)
    arguments = parser.parse_args(argv)
    import torch

    # Before both measurements: gloo and TensorPipe read the variables when they start to listen.
    bind_interface(process_environ(), arguments.interface)
    # One after the other: both links share the two processes and the network.
    speeds = {RPC: _over_rpc(arguments.folder, arguments.number, arguments.size)}
    if arguments.device == "cpu" or not torch.cuda.is_available():
        speeds[GLOO] = _over_gloo(arguments.folder, arguments.number, arguments.size)
    found = {name: vars(speed) for name, speed in speeds.items() if speed is not None}
    # Process 1 has both figures; over RPC, process 0 only serves.
    if arguments.number == 1:
        (arguments.folder / "speeds.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


def _over_gloo(folder: Path, number: int, size_bytes: int) -> LinkSpeed:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo", rank=number, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
    )
    small, large = torch.zeros(1), torch.zeros(size_bytes // 4)

    def exchange(tensor: torch.Tensor) -> float:
        began = time.perf_counter()
        # The answer is small in both exchanges, so that their difference is one transfer of the large tensor.
        if number == 1:
            dist.send(tensor, 0)
            dist.recv(small, 0)
        else:
            dist.recv(tensor, 1)
            dist.send(small, 1)
        return time.perf_counter() - began

    try:
        return _speed(lambda: exchange(small), lambda: exchange(large), size_bytes)
    finally:
        dist.destroy_process_group()


def _over_rpc(folder: Path, number: int, size_bytes: int) -> LinkSpeed | None:
    import torch
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from paramserver.cluster import ProcessIdentity
    from paramserver.distributed.rendezvous import Rendezvous, host_identity
    from paramserver.distributed.rpc_agent import measure_call_s, measure_empty_call_s
    from paramserver.distributed.session import SERVER_NAME, rpc_server, rpc_trainer

    store = FileStore(str(folder / "rpc"), 2)
    store.set_timeout(timedelta(seconds=TIMEOUT_S))
    identity = ProcessIdentity(number, 2, number, 2, 0, "127.0.0.1", 0, False, "probe", "flags")
    rendezvous = Rendezvous(store, identity, TIMEOUT_S, host_identity(), base=store)
    if number == 0:
        with rpc_server(rendezvous):
            # The server's process must stay until the last call has returned; its agent serves the calls meanwhile.
            rendezvous.get("done")
        return None
    large = torch.zeros(size_bytes // 4)
    with rpc_trainer(rendezvous, 0):
        speed = _speed(
            lambda: measure_empty_call_s(SERVER_NAME), lambda: measure_call_s(SERVER_NAME, large), size_bytes
        )
        rendezvous.set("done", "")
    return speed


def _speed(small: Callable[[], float], large: Callable[[], float], size_bytes: int) -> LinkSpeed:
    round_trip_s, large_s = _median_s(small, SMALL), _median_s(large, LARGE)
    # Noise may make the difference negative on a fast link; the bandwidth is then very large, not negative.
    return LinkSpeed(size_bytes / max(large_s - round_trip_s, 1e-9), round_trip_s / 2)


def _median_s(one: Callable[[], float], count: int) -> float:
    # The first exchanges open connections and allocate; they are left out.
    return statistics.median([one() for _ in range(WARM + count)][WARM:])


# What follows for a step.


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

    A step is bound by the bytes that pass the network interface of a host. With n ``trainers`` and k ``servers``, each
    on its own host, M bytes of parameters (``size_bytes``), and B bytes per second in each direction at the same time
    (``bandwidth``):

    - a ring all-reduce sends 2(n-1)/n of M from each trainer, a reduce-scatter and an all-gather (Patarasuk and Yuan,
      "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): 2(n-1)M / (nB);
    - servers that receive gradients and send parameters at the same time, bucket by bucket: max(M/B, nM/(kB)), as all n
      trainers share the k servers' interfaces (Li et al., "Scaling distributed machine learning with the parameter
      server", 2014);
    - servers that receive all gradients, apply them, and then send the parameters: 2nM / (kB);
    - co-located servers, each on the host of a trainer, whose own part does not pass an interface (Jiang et al., "A
      unified architecture for accelerating distributed DNN training in heterogeneous GPU/CPU clusters", 2020): (n+k-2)M
      / (kB), which is that of all-reduce for k = n, or 2(n-1)M / (kB) one after the other.

    Each message that depends on another adds ``latency`` seconds: 2(n-1) around the ring; one to a server and one back
    where both directions overlap, twice that where they do not.

    The formulas assume several hosts. On one host, whose processes share the loopback, they are only a scale. Modes
    without servers ignore their number; with ``overlap`` they send parameters while they receive gradients.
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


if __name__ == "__main__":
    exit_process(main())

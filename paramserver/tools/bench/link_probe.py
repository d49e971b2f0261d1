"""Measures the link between two processes over gloo and over RPC, with the settings of a run.

    python -m paramserver.tools.bench.link_probe --folder FOLDER --number 0|1

Process 1 sends to process 0 and waits for the answer: first a number, of which half the round trip is the latency of a
message, then a tensor of ``SIZE_BYTES``, whose further time is its size over the bandwidth. The medians of several
exchanges are reported. ``measure_links`` starts both processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

from paramserver.cluster import LOOPBACK, bind_interface, process_environ
from paramserver.errors import TrainingError
from paramserver.process_utils import exit_process
from paramserver.tools.bench.cost_model import LinkSpeed
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--number", type=int, choices=(0, 1), required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--interface", default=LOOPBACK)
    parser.add_argument("--size", type=int, default=SIZE_BYTES)
    arguments = parser.parse_args()
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


if __name__ == "__main__":
    exit_process(main())

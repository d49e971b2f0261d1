"""The CPU time of a message with and without a Python state that the agent's threads keep.

    python -m tests.measure.thread_states [--repeats 20] [--elements 10 80000]

Two processes exchange a tensor of 32-bit floats, six calls at a time, over the transport between hosts. Two such pairs
run in turns, one of which keeps the states; the ratio is of its CPU time, of both ends, to that of the other.
"""

from __future__ import annotations

import os
import socket
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

from paramserver.distributed.rpc_agent import keep_thread_state
from paramserver.distributed.rpc_calls import agent_options
from tests.measure.common import measuring_environment, origin, parser_of, spread

BLOCK_S, AT_ONCE = 0.4, 6


def plain(tensor):
    return tensor


def kept(tensor):
    keep_thread_state()
    return tensor


def run(rank: int, port: int, handler, elements: int, link: Connection) -> None:
    torch.set_num_threads(1)
    options = agent_options(60.0, same_host=False)
    options.init_method = f"tcp://127.0.0.1:{port}"
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    tensor = torch.zeros(elements)
    while rank == 0 and link.recv():
        began, other, calls = time.process_time(), rpc.rpc_sync("rank1", time.process_time), 0
        end = time.monotonic() + BLOCK_S
        while time.monotonic() < end:
            for future in [rpc.rpc_async("rank1", handler, args=(tensor,)) for _ in range(AT_ONCE)]:
                future.wait()
            calls += AT_ONCE
        used = time.process_time() - began + rpc.rpc_sync("rank1", time.process_time) - other
        link.send(1e6 * used / calls)
    rpc.shutdown()


def main() -> None:
    parser = parser_of(__doc__, repeats=20)
    parser.add_argument("--elements", type=int, nargs="+", default=[10, 80_000])
    arguments = parser.parse_args()
    print(origin())
    os.environ.update(measuring_environment())  # of the processes that are started
    context = mp.get_context("spawn")
    for elements in arguments.elements:
        links, processes = [], []
        for handler in (plain, kept):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
            own, theirs = context.Pipe()
            links.append(own)
            for rank in (0, 1):
                process = context.Process(target=run, args=(rank, port, handler, elements, theirs), daemon=True)
                process.start()
                processes.append(process)
        found: list[list[float]] = [[], []]
        for _ in range(arguments.repeats):
            for link, times in zip(links, found, strict=True):
                link.send(True)
                times.append(link.recv())
        for link in links:
            link.send(False)
        for process in processes:
            process.join(60)
        ratios = [after / before for before, after in zip(*found, strict=True)]
        print(f"{elements} elements: {spread(found[0], '.0f')} us, kept {spread(found[1], '.0f')} us: {spread(ratios)}")


if __name__ == "__main__":
    main()

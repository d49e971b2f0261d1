"""Compare a call addressed by the server's RPC name with the same call through an RRef to the server.

    python -m tests.measure.rref_calls --repeats 7 --calls 400

Both calls run the same handler in another process of this host, over the transports that a run uses. Repeats are
interleaved; the ratio is by-RRef over by-name, so above 1 the RRef is slower.
"""

import socket
import statistics
import time

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

from paramserver.distributed.rpc_calls import agent_options
from tests.measure.common import origin, parser_of, spread


class Target:
    """What the calls reach."""

    def handle(self, tensor):
        return tensor


_target = Target()


def get_target():
    return _target


def by_name(tensor):
    return _target.handle(tensor)


def by_rref(rref, tensor):
    return rref.local_value().handle(tensor)


def _serve(port):
    options = agent_options(60.0, True)
    options.init_method = f"tcp://127.0.0.1:{port}"
    rpc.init_rpc("server", rank=0, world_size=2, rpc_backend_options=options)
    rpc.shutdown()


def _median_ms(call, calls):
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats (default 7)")
    parser.add_argument("--calls", type=int, default=400, help="calls in each repeat (default 400)")
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = mp.get_context("spawn").Process(target=_serve, args=(port,))
    server.start()
    options = agent_options(60.0, True)
    options.init_method = f"tcp://127.0.0.1:{port}"
    rpc.init_rpc("trainer", rank=1, world_size=2, rpc_backend_options=options)
    measure(rpc.remote("server", get_target), arguments)
    rpc.shutdown()
    server.join(30)


def measure(rref, arguments):
    """Print the times of the three ways to call; the reference is released when this returns."""
    tensor, owner = torch.zeros(1), rref.owner()
    cases = {
        "by name": lambda: rpc.rpc_sync("server", by_name, args=(tensor,)),
        "by RRef": lambda: rpc.rpc_sync(owner, by_rref, args=(rref, tensor)),
        "RRef proxy": lambda: rref.rpc_sync().handle(tensor),
    }
    for call in cases.values():
        _median_ms(call, arguments.calls)
    times = {name: [] for name in cases}
    for _ in range(arguments.repeats):
        for name, call in cases.items():
            times[name].append(_median_ms(call, arguments.calls))
    print(origin())
    for name, found in times.items():
        print(f"{name:<12} {spread(found)} ms a call")
    for name in ("by RRef", "RRef proxy"):
        ratios = [slow / fast for slow, fast in zip(times[name], times["by name"], strict=True)]
        print(f"{name} / by name: {spread(ratios)}")


if __name__ == "__main__":
    main()

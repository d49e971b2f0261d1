"""Compares transports and channels of torch's RPC on one host: CPU time while idle, round trip, context, bandwidth.

    python -m tests.measure.rpc_transports [--cases default run ...] [--repeats 5] [--idle 3] [--calls 300] [--mb 16]

Two processes on the loopback interface, a server and a trainer, with one torch thread each. The cases:

- ``default``: torch's own choice, with transport ``shm`` first.
- ``run``: ``uv`` with ``cma``, ``mpt_uv`` and ``basic``; the options of a run whose processes share a host.
- ``mpt``: ``uv`` with ``mpt_uv`` and ``basic``.
- ``hosts``: ``uv`` with ``basic`` only; the options of a run between hosts.
- ``shm``: ``shm`` before ``uv``, with the channels of ``run``.

The CPU time is that of each process, as a share of one core, in ``--idle`` seconds without a call. The round trip is
the median of calls that send one element; a context is a recorded pull of one element, its backward and the clean-up,
and a local context a backward without RPC; the bandwidth that of calls that send ``--mb`` megabytes. Every repeat of a
case starts fresh processes; the cases are interleaved, in alternating order. docs/torch-notes.md states what a run
concludes from the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

from paramserver.cluster import LOOPBACK, bind_interface
from paramserver.distributed.rpc_agent import measure_call_s, measure_empty_call_s
from paramserver.distributed.rpc_calls import agent_options
from paramserver.tools.bench.cases import interleaved
from tests.measure.common import measuring_environment, origin, parser_of, run_fresh, spread

TIMEOUT_S = 60.0
WARM = 3
LARGE_CALLS = 20
# Case -> transports and channels; None = torch's default.
CASES: dict[str, tuple[list[str] | None, list[str] | None]] = {
    "default": (None, None),
    "run": (["uv"], ["cma", "mpt_uv", "basic"]),
    "mpt": (["uv"], ["mpt_uv", "basic"]),
    "hosts": (["uv"], ["basic"]),
    "shm": (["shm", "uv"], ["cma", "mpt_uv", "basic"]),
}


@dataclass(frozen=True)
class Figures:
    """One repeat of a case: shares of a core while idle, seconds of a round trip and of contexts, bytes per second."""

    idle_server: float
    idle_trainer: float
    round_trip_s: float
    context_s: float
    context_cpu_s: float
    local_context_s: float
    bandwidth: float


def options_of(case: str) -> rpc.TensorPipeRpcBackendOptions:
    if case in ("run", "hosts"):
        return agent_options(TIMEOUT_S, same_host=case == "run")
    transports, channels = CASES[case]
    return rpc.TensorPipeRpcBackendOptions(rpc_timeout=TIMEOUT_S, _transports=transports, _channels=channels)


def _idle(seconds: float) -> tuple[float, float]:
    """Shares of a core that the server and this process use in a span without a call."""
    server, own, began = rpc.rpc_sync("server", time.process_time), time.process_time(), time.perf_counter()
    threading.Event().wait(seconds)
    own, span = time.process_time() - own, time.perf_counter() - began
    return (rpc.rpc_sync("server", time.process_time) - server) / span, own / span


_LEAF = torch.zeros((), requires_grad=True)


def _pull() -> torch.Tensor:
    return _LEAF.view_as(_LEAF)


def _context_s(calls: int, pull: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Median time of a context with a pull and its backward, and mean CPU time of this process."""
    times_s, cpu = [], time.process_time()
    for _ in range(calls):
        began = time.perf_counter()
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [pull()])
        times_s.append(time.perf_counter() - began)
    return statistics.median(times_s), (time.process_time() - cpu) / calls


def measure(arguments: argparse.Namespace) -> Figures:
    """The figures of this process, the trainer, and of the server."""
    large = torch.zeros(int(arguments.mb * 1e6) // 4)
    for _ in range(WARM):
        measure_empty_call_s("server")
        measure_call_s("server", large)
    idle = _idle(arguments.idle)
    round_trip_s = statistics.median(measure_empty_call_s("server") for _ in range(arguments.calls))
    context_s = _context_s(arguments.calls, lambda: rpc.rpc_sync("server", _pull))
    local_context_s, _ = _context_s(arguments.calls, _pull)
    large_s = statistics.median(measure_call_s("server", large) for _ in range(LARGE_CALLS))
    return Figures(*idle, round_trip_s, *context_s, local_context_s, large.nbytes / max(large_s - round_trip_s, 1e-9))


def run_child(arguments: argparse.Namespace) -> None:
    options = options_of(arguments.child)
    options.init_method = f"file://{arguments.folder}/store"
    name = ("server", "trainer")[arguments.rank]
    rpc.init_rpc(name, rank=arguments.rank, world_size=2, rpc_backend_options=options)
    if name == "trainer":
        print(json.dumps(asdict(measure(arguments))))
    rpc.shutdown()


def measure_case(case: str, arguments: argparse.Namespace) -> Figures:
    environ = measuring_environment()
    bind_interface(environ, LOOPBACK)
    with tempfile.TemporaryDirectory() as folder:
        child = ["-W", "ignore", "-m", "tests.measure.rpc_transports", "--child", case, "--folder", folder]
        child += [f"--{name}={getattr(arguments, name)}" for name in ("idle", "calls", "mb")]
        _, output = run_fresh([[*child, "--rank", str(rank)] for rank in range(2)], environ)
    return Figures(**json.loads(output.splitlines()[-1]))


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, repeats=5)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--idle", type=float, default=3.0, help="seconds without a call (default 3)")
    parser.add_argument("--calls", type=int, default=300, help="calls of one element (default 300)")
    parser.add_argument("--mb", type=float, default=16.0, help="megabytes of a large call (default 16)")
    parser.add_argument("--child", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    if arguments.child is not None:
        run_child(arguments)
        return
    found: dict[str, list[Figures]] = {case: [] for case in arguments.cases}
    for _, case in interleaved(arguments.cases, arguments.repeats):
        found[case].append(measure_case(case, arguments))
    print(origin())
    for case, figures in found.items():
        print(
            f"{case:<8} idle {spread([f.idle_server for f in figures])} (server), "
            f"{spread([f.idle_trainer for f in figures])} (trainer) of a core, "
            f"round trip {spread([f.round_trip_s * 1e3 for f in figures])} ms, "
            f"context {spread([f.context_s * 1e3 for f in figures])} ms "
            f"({spread([f.context_cpu_s * 1e3 for f in figures])} of CPU), "
            f"local {spread([f.local_context_s * 1e3 for f in figures])} ms, "
            f"{spread([f.bandwidth / 1e9 for f in figures])} GB/s"
        )


if __name__ == "__main__":
    main()

"""How fast a trainer receives: samples of 40 KB from one client into one buffer, beside a bare loop of pyzmq.

    python -m tests.measure.reception [--samples 20000] [--repeats 5] [--window 256] [--kind fifo]

``paramserver``: a desk, a stream, its feeder and a buffer in one process, from which batches of 32 are taken, and the
project's client in another. ``bare``: a DEALER that sends messages of the same size and a ROUTER that reads them, in
the same two processes' places; nothing is checked, kept or answered. The cases take turns. Time runs from the first
sample that is there to the last.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

import numpy as np
import zmq

from paramserver.buffers import make_buffer
from paramserver.client import Client
from paramserver.config import SimulationsConfig
from paramserver.errors import BufferExhausted
from paramserver.online.coordinator import SimulationCoordinator
from paramserver.online.spec import IngestSpec, ReceiverSpec
from paramserver.sources import Feeder, Stream
from tests.measure.common import measuring_environment, origin, spread, verdict

SHAPE = (100, 100)
SAMPLE_BYTES = 4 * SHAPE[0] * SHAPE[1]
BATCH = 32
ASKED_MB_S = 300.0
ASKED_OF_BARE = 0.5


def send(case: str, address: str, samples: int) -> None:
    """The other process."""
    field = np.zeros(SHAPE, np.float32)
    if case == "paramserver":
        with Client(address).open(0, [1.0]) as client:
            for step in range(samples):
                client.send(step, {"u": field})
        return
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        for _ in range(samples):
            socket.send(field, copy=False)


def receive_bare(samples: int) -> float:
    """Seconds."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with started("bare", f"tcp://127.0.0.1:{port}", samples):
            socket.recv_multipart()
            since = time.perf_counter()
            for _ in range(samples - 1):
                socket.recv_multipart()
            return time.perf_counter() - since


def receive(samples: int, window: int, kind: str) -> float:
    """Seconds."""
    told = SimulationsConfig(fields={"u": list(SHAPE)}, parameters={"a": [0, 1]}, count=1, steps=samples, window=window)
    plan = IngestSpec.of(told)
    with tempfile.TemporaryDirectory() as logs, SimulationCoordinator(plan, 1, 0, Path(logs)) as desk:
        source = Stream()
        source.connect(ReceiverSpec(desk.address, desk.token, plan, 0, 1))
        buffer = make_buffer(kind, capacity=2048, batch_size=BATCH)
        feeder = Feeder(source, buffer, 0)
        feeder.start()
        try:
            with started("paramserver", desk.address, samples):
                buffer.wait_ready(1, 60.0)
                since = time.perf_counter()
                with suppress(BufferExhausted):
                    while True:
                        buffer.get_batch(BATCH, 60.0)
                        seconds = time.perf_counter() - since
        finally:
            feeder.close()
        assert buffer.info().puts == samples
    return seconds


def started(case: str, address: str, samples: int) -> Popen[bytes]:
    command = [sys.executable, "-m", "tests.measure.reception", "--child", case, "--address", address]
    return Popen([*command, "--samples", str(samples)], env=measuring_environment())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--kind", choices=("fifo", "firo", "reservoir"), default="fifo")
    parser.add_argument("--child", choices=("bare", "paramserver"), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        send(arguments.child, arguments.address, arguments.samples)
        return
    print(origin())
    ours, bare = [], []
    for _ in range(arguments.repeats):
        ours.append(rate(arguments.samples, receive(arguments.samples, arguments.window, arguments.kind)))
        bare.append(rate(arguments.samples, receive_bare(arguments.samples)))
        print(f"  {ours[-1]:.0f} MB/s, bare {bare[-1]:.0f} MB/s", flush=True)
    shares = [a / b for a, b in zip(ours, bare, strict=True)]
    print(f"received: {spread(ours, '.0f')} MB/s; asked {ASKED_MB_S:.0f}: {verdict(min(ours) >= ASKED_MB_S)}")
    print(
        f"of the bare loop: {spread(shares)}; asked {ASKED_OF_BARE}: {verdict(sorted(shares)[len(shares) // 2] >= 0.5)}"
    )


def rate(samples: int, seconds: float) -> float:
    """MB/s."""
    return samples * SAMPLE_BYTES / seconds / 1e6


if __name__ == "__main__":
    main()

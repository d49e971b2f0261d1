"""Reception rate of a trainer: samples of 40 KB from one client into one buffer, compared with a bare pyzmq loop.

    python -m tests.measure.reception [--samples 20000] [--repeats 5] [--window 256] [--kind fifo]

``paramserver``: a coordinator, a stream, its feeder and a buffer in one process, from which batches of 32 are read, and
the project's client in another. ``bare``: a DEALER that sends messages of the same size and a ROUTER that reads them,
each in its own process; nothing is checked, kept or acknowledged. The cases are interleaved. Time is from the first
received sample to the last, and so is the CPU time of the process that receives.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple

import numpy as np
import zmq

from paramserver.buffers import make_buffer
from paramserver.client import Client
from paramserver.config import SimulationsConfig
from paramserver.errors import BufferExhausted
from paramserver.online.coordinator import SimulationCoordinator
from paramserver.online.spec import IngestSpec, ReceiverSpec
from paramserver.sources import Feeder, Stream
from tests.measure.common import measuring_environment, origin, parser_of, spread, verdict

SHAPE = (100, 100)
SAMPLE_BYTES = 4 * SHAPE[0] * SHAPE[1]
BATCH = 32
REQUIRED_MB_S = 300.0
REQUIRED_OF_BARE = 0.5


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


class Clock(NamedTuple):
    """Seconds, and those of CPU time of this process."""

    seconds: float
    cpu_s: float

    @classmethod
    def now(cls) -> Clock:
        return cls(time.perf_counter(), time.process_time())

    def since(self, began: Clock) -> Clock:
        return Clock(self.seconds - began.seconds, self.cpu_s - began.cpu_s)


def receive_bare(samples: int) -> Clock:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with started("bare", f"tcp://127.0.0.1:{port}", samples):
            socket.recv_multipart()
            began = Clock.now()
            for _ in range(samples - 1):
                socket.recv_multipart()
            return Clock.now().since(began)


def receive(samples: int, window: int, kind: str) -> Clock:
    fields, parameters = {"u": list(SHAPE)}, {"a": [0, 1]}
    simulations = SimulationsConfig(fields=fields, parameters=parameters, count=1, steps=samples, window=window)
    spec = IngestSpec.from_config(simulations)
    with tempfile.TemporaryDirectory() as logs, SimulationCoordinator(spec, 1, 0, Path(logs)) as coordinator:
        source = Stream()
        source.connect(ReceiverSpec(coordinator.address, coordinator.token, spec, 0, 1))
        buffer = make_buffer(kind, capacity=2048, batch_size=BATCH)
        feeder = Feeder(source, buffer, 0)
        feeder.start()
        try:
            with started("paramserver", coordinator.address, samples):
                buffer.wait_ready(1, 60.0)
                began = Clock.now()
                with suppress(BufferExhausted):
                    while True:
                        buffer.get_batch(BATCH, 60.0)
                        took = Clock.now().since(began)
        finally:
            feeder.close()
        assert buffer.info().puts == samples
    return took


def started(case: str, address: str, samples: int) -> Popen[bytes]:
    command = [sys.executable, "-m", "tests.measure.reception", "--child", case, "--address", address]
    return Popen([*command, "--samples", str(samples)], env=measuring_environment())


def main() -> None:
    parser = parser_of(__doc__, samples=20_000, repeats=5, window=256)
    parser.add_argument("--kind", choices=("fifo", "firo", "reservoir"), default="fifo")
    parser.add_argument("--child", choices=("bare", "paramserver"), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        send(arguments.child, arguments.address, arguments.samples)
        return
    print(origin())
    ours, bare, cpu, cpu_bare = [], [], [], []
    for _ in range(arguments.repeats):
        for rates, times, took in (
            (ours, cpu, receive(arguments.samples, arguments.window, arguments.kind)),
            (bare, cpu_bare, receive_bare(arguments.samples)),
        ):
            rates.append(arguments.samples * SAMPLE_BYTES / took.seconds / 1e6)
            times.append(1e6 * took.cpu_s / arguments.samples)
        print(f"  {ours[-1]:.0f} MB/s, bare {bare[-1]:.0f} MB/s", flush=True)
    shares = [a / b for a, b in zip(ours, bare, strict=True)]
    print(f"received: {spread(ours, '.0f')} MB/s; required {REQUIRED_MB_S:.0f}: {verdict(min(ours) >= REQUIRED_MB_S)}")
    print(
        f"of the bare loop: {spread(shares)}; required {REQUIRED_OF_BARE}: "
        f"{verdict(sorted(shares)[len(shares) // 2] >= REQUIRED_OF_BARE)}"
    )
    print(f"CPU time of a sample: {spread(cpu, '.1f')} us, of the bare loop {spread(cpu_bare, '.1f')} us")


if __name__ == "__main__":
    main()

"""Many producers and one consumer on a buffer: nothing is lost, nothing made up, nothing served too often.

    python -m tests.measure.buffer_stress [--seconds 30] [--producers 8] [--kind all] [--storage columns] [--seed 0]

Prints a line per kind and exits with 1 where a law was broken.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from paramserver.buffers import Buffer, make_buffer
from paramserver.errors import BufferExhausted, BufferTimeout

KINDS = ("fifo", "firo", "reservoir")
STORAGES = ("columns", "objects", "moved")
WAIT_S = 60.0


@dataclass
class Report:
    kind: str
    puts: int = 0
    gets: int = 0
    batches: int = 0
    seconds: float = 0.0
    repeated: int = 0
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        verdict = "ok" if not self.violations else "; ".join(self.violations[:5])
        return (
            f"{self.kind:9s} {self.puts} put, {self.gets} served ({self.repeated} of them again), "
            f"{self.batches} batches, {self.gets / self.seconds:.0f} samples/s: {verdict}"
        )


class Producer:
    """Puts (index, 0), (index, 1), ... until it is stopped; some in bursts, some with a timeout too short to wait."""

    def __init__(self, buffer: Buffer, index: int, seed: int, storage: str, stop: threading.Event) -> None:
        self.buffer, self.index, self.storage, self.stop = buffer, index, storage, stop
        self.rng = np.random.default_rng([seed, index])
        self.position = 0
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self.run, name=f"producer-{index}", daemon=True)

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.burst(int(self.rng.integers(1, 9)))
        except Exception as error:  # noqa: BLE001 - reported as a violation
            self.error = error

    def burst(self, n: int) -> None:
        keys = [(self.index, self.position + i) for i in range(n)]
        samples = [self.sample(key) for key in keys]
        if n > 1:
            self.buffer.put_many(samples, keys, timeout=WAIT_S)
        else:
            try:
                self.buffer.put(samples[0], keys[0], timeout=0)
            except BufferTimeout:
                return  # not taken: the same sample comes again
        self.position += n

    def sample(self, key: tuple[int, int]) -> object:
        values = np.full(16, key[0] * 2**32 + key[1])
        if self.storage == "objects":
            return {"values": values, "name": str(key)}
        if self.storage == "moved" and key[1] % 1000 == 999:
            return {"values": values[:8]}
        return {"values": values}


class Consumer:
    """Get batches of changing size until the buffer is exhausted, and count the samples."""

    def __init__(self, buffer: Buffer, seed: int, largest: int, violations: list[str]) -> None:
        self.buffer, self.largest, self.violations = buffer, largest, violations
        self.rng = np.random.default_rng([seed, 10**6])
        self.served: Counter[tuple[int, int]] = Counter()
        self.last: dict[int, int] = {}

    def run(self) -> None:
        try:
            while True:
                self.check(int(self.rng.integers(1, self.largest + 1)))
        except BufferExhausted:
            return

    def check(self, n: int) -> None:
        batch = self.buffer.get_batch(n, timeout=WAIT_S)
        finished = self.buffer.finished
        if not finished and (len(batch) != n or len(set(batch.keys)) != n):
            self.violations.append(f"a batch of {n} had {len(batch)} samples, {len(set(batch.keys))} different")
        for key, sample in zip(batch.keys, batch.samples, strict=True):
            if (sample["values"] != key[0] * 2**32 + key[1]).any():
                self.violations.append(f"sample {key} had the values of another one")
            if self.buffer.kind == "fifo" and not self.served[key]:
                if self.last.get(key[0], -1) >= key[1]:
                    self.violations.append(f"sample {key} came after a later one of its producer")
                self.last[key[0]] = key[1]
            self.served[key] += 1


def stress(
    kind: str,
    seconds: float,
    producers: int = 8,
    seed: int = 0,
    storage: str = "columns",
    pseudo_epochs: int = 2,
    capacity: int = 256,
) -> Report:
    """Run one buffer for so long, drain it, and report what broke its laws."""
    times = 1 if kind == "reservoir" else pseudo_epochs
    buffer = make_buffer(
        kind, capacity=capacity, seed=seed, watermark=capacity // 4, pseudo_epochs=times, batch_size=32
    )
    stop = threading.Event()
    team = [Producer(buffer, i, seed, storage, stop) for i in range(producers)]
    report = Report(kind)
    consumer = Consumer(buffer, seed, 32, report.violations)
    ender = threading.Thread(target=end, args=(buffer, team, stop, seconds), name="ender", daemon=True)
    started = time.monotonic()
    for thread in [*(producer.thread for producer in team), ender]:
        thread.start()
    try:
        consumer.run()
    finally:
        stop.set()
        ender.join(WAIT_S)
        buffer.close()
    report.seconds = time.monotonic() - started
    verify(buffer, team, consumer, times, report)
    return report


def end(buffer: Buffer, team: list[Producer], stop: threading.Event, seconds: float) -> None:
    """Let the producers run for so long, then finish."""
    stop.wait(seconds)
    stop.set()
    for producer in team:
        producer.thread.join(WAIT_S)
    buffer.finish()


def verify(buffer: Buffer, team: list[Producer], consumer: Consumer, times: int, report: Report) -> None:
    info = buffer.info()
    put = {(producer.index, position) for producer in team for position in range(producer.position)}
    served = consumer.served
    report.puts, report.gets, report.batches = info.puts, info.gets, info.batches
    report.repeated = info.gets - len(served)
    wrong = report.violations
    wrong += [f"producer {p.index} failed: {p.error!r}" for p in team if p.error is not None or p.thread.is_alive()]
    wrong += [f"{len(put - served.keys())} samples were lost"] if put - served.keys() else []
    wrong += [f"{len(served.keys() - put)} samples were never put"] if served.keys() - put else []
    if buffer.kind != "reservoir":
        wrong += [f"sample {key} was served {count} times" for key, count in served.items() if count != times][:3]
    if info.seen_histogram != dict(sorted(Counter(served.values()).items())):
        wrong.append(f"the histogram ({info.seen_histogram}) is not what was served")
    if (info.puts, info.gets, info.population, info.bytes) != (len(put), served.total(), 0, 0):
        wrong.append(f"the counts ({info}) are not what was put and served")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="per kind")
    parser.add_argument("--producers", type=int, default=8)
    parser.add_argument("--kind", choices=("all", *KINDS), default="all")
    parser.add_argument("--storage", choices=STORAGES, default="columns")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    kinds = KINDS if args.kind == "all" else (args.kind,)
    failed = False
    for kind in kinds:
        report = stress(kind, args.seconds, args.producers, args.seed, args.storage)
        print(report, flush=True)
        failed = failed or bool(report.violations)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

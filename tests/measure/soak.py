"""A long run: growth of memory, and CPU time while the ranks wait.

    python -m tests.measure.soak [--steps 20000] [--trainers 2] [--silence 10] [--model small]

First a run in rpc mode (one server, validation off, logging as usual) of so many steps. The resident memory of every
rank is read twice a second from outside; printed is its growth from step 1,000 to the last step, each the median over
a few seconds. Then a run whose streams give nothing for ``--silence`` seconds: the CPU time of every rank in that span,
as a share of one core. Exits with 1 where a rank grows by 2 % or more, or uses 1 % or more while it waits.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import paramserver
from tests.measure.common import (
    BATCH_SIZE,
    MODELS,
    Measured,
    measured_config,
    parser_of,
    random_images,
    read_records,
    verdict,
)

SAMPLE_EVERY_S = 0.5
SETTLED_STEP = 1000
MEDIAN_OF = 10
GROWTH_TARGET = 0.02
CPU_TARGET = 0.01
# A trainer computes what it holds, and a sampler's ticks fall on both ends.
MARGIN_S = 2.0


@dataclass(frozen=True)
class Reading:
    """One rank at one moment: its memory as the sampler counts it, and CPU time since its start."""

    time: float
    memory_bytes: int
    cpu_s: float


def resident_bytes(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


@dataclass
class Sampler:
    """Owns a thread that reads every rank that a supervisor in this process starts, until ``close``.

    Args:
        memory_of: what counts as the memory of a process, in bytes.
        every_s: seconds between two readings.
    """

    memory_of: Callable[[psutil.Process], int] = resident_bytes
    every_s: float = SAMPLE_EVERY_S
    readings: dict[int, list[Reading]] = field(default_factory=dict)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._closed = threading.Event()
        self._known: dict[psutil.Process, int | None] = {}
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._closed.wait(self.every_s):
                now = time.time()
                for process in psutil.Process().children():
                    self._read(process, now)
        except BaseException as error:  # noqa: BLE001 - raised by close()
            self.error = error

    def _read(self, process: psutil.Process, now: float) -> None:
        try:
            if self._known.setdefault(process, rank_of(process)) is None:
                return
            with process.oneshot():
                cpu, memory_bytes = process.cpu_times(), self.memory_of(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            return  # it has just ended
        rank = self._known[process]
        assert rank is not None
        self.readings.setdefault(rank, []).append(Reading(now, memory_bytes, cpu.user + cpu.system))

    def close(self) -> None:
        self._closed.set()
        self._thread.join(10)
        if self.error is not None:
            raise self.error

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def rank_of(process: psutil.Process) -> int | None:
    words = process.cmdline()
    return int(words[words.index("--rank") + 1]) if "--rank" in words else None


def title(rank: int) -> str:
    return "server" if rank == 0 else f"trainer {rank - 1}"


# Memory.


def soak(model: str, steps: int, trainers: int, folder: Path) -> bool:
    """Print the growth of each rank; whether all stay below the target."""
    config = measured_config("rpc", folder, steps, trainers, {"model": model})
    with Sampler() as sampler, redirect_stdout(sys.stderr):
        result = paramserver.run(Measured, config)
    trained = {record["step"]: record["time"] for record in read_records(result.run_dir, "train")}
    begin, end = trained[SETTLED_STEP], trained[steps]
    step_ms = 1e3 * (end - begin) / (steps - SETTLED_STEP)
    print(f"{model}, {trainers} trainers, {steps} steps of {step_ms:.2f} ms; resident memory from step {SETTLED_STEP}")
    met = [print_growth(rank, readings, begin, end) for rank, readings in sorted(sampler.readings.items())]
    return all(met)


def print_growth(rank: int, readings: list[Reading], begin: float, end: float) -> bool:
    span = [reading.memory_bytes / 2**20 for reading in readings if begin <= reading.time <= end]
    first, last = statistics.median(span[:MEDIAN_OF]), statistics.median(span[-MEDIAN_OF:])
    growth = last / first - 1
    met = growth < GROWTH_TARGET
    print(
        f"  {title(rank):10s} {first:7.1f} to {last:7.1f} MB (peak {max(span):.1f}): {100 * growth:+.2f} %, "
        f"below {100 * GROWTH_TARGET:g} %: {verdict(met)}",
        flush=True,
    )
    return met


# Waiting.


class Silent(Measured):
    """Its stream gives some batches, then nothing for ``silence_s`` seconds, then ends.

    Args:
        folder: where each trainer notes that its stream has gone silent.
        silence_s: for how long.
    """

    def __init__(self, folder: str, silence_s: float) -> None:
        super().__init__("small")
        self.marks = Path(folder)
        self.silence_s = silence_s

    def train_source(self, partition: Any) -> Iterator[Any]:
        data = random_images(20 * BATCH_SIZE)
        for index in range(len(data)):
            yield data[index]
        (self.marks / f"silent-{partition.index}").write_text(repr(time.time()), encoding="utf-8")
        threading.Event().wait(self.silence_s)


def listen(silence_s: float, trainers: int, folder: Path, consistency: str = "sync") -> bool:
    """Print what each rank uses in the silence; whether all stay below the target."""
    task_args = {"folder": str(folder), "silence_s": silence_s + 2 * MARGIN_S}
    config = measured_config("rpc", folder, 10**6, trainers, task_args)
    with Sampler() as sampler, redirect_stdout(sys.stderr):
        paramserver.run(Silent, {**config, "server": {"consistency": consistency}})
    marks = [float(path.read_text(encoding="utf-8")) for path in folder.glob("silent-*")]
    begin, end = max(marks) + MARGIN_S, min(marks) + MARGIN_S + silence_s
    print(f"{consistency}: waiting for streams that give nothing for {end - begin:.1f} s: share of a core")
    met = [print_use(rank, readings, begin, end) for rank, readings in sorted(sampler.readings.items())]
    return all(met)


def print_use(rank: int, readings: list[Reading], begin: float, end: float) -> bool:
    span = [reading for reading in readings if begin <= reading.time <= end]
    first, last = span[0], span[-1]
    use = (last.cpu_s - first.cpu_s) / (last.time - first.time)
    met = use < CPU_TARGET
    print(f"  {title(rank):10s} {100 * use:.2f} %, below {100 * CPU_TARGET:g} %: {verdict(met)}", flush=True)
    return met


def main() -> None:
    parser = parser_of(__doc__, steps=20_000, trainers=2)
    parser.add_argument("--silence", type=float, default=10.0, help="seconds; 0 leaves the second run out")
    parser.add_argument("--model", choices=MODELS, default="small")
    arguments = parser.parse_args()
    if arguments.steps < 2 * SETTLED_STEP or arguments.steps % 10:
        parser.error(f"--steps ({arguments.steps}) must be a multiple of 10, {2 * SETTLED_STEP} or more; raise it")
    with tempfile.TemporaryDirectory() as memory, tempfile.TemporaryDirectory() as waiting:
        met = [soak(arguments.model, arguments.steps, arguments.trainers, Path(memory))]
        if arguments.silence:
            met.append(listen(arguments.silence, arguments.trainers, Path(waiting)))
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()

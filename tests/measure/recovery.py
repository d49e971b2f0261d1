"""How soon a run trains again after a process died, with and without a spare process.

    python -m tests.measure.recovery [--spares 0 1] [--model small] [--consistency sync] [--memory_every 0]

Starts a run of one server and two trainers, once for each case and repeat, interleaved. A case is a number of spares
and a ``checkpoint.memory_every``; ``--memory_every 0 50`` compares runs without and with such checkpoints. When it
trains and its spares wait, trainer 1 is killed (SIGKILL); when its replacement trains and the spares wait again, the
server is. Printed are the seconds from the kill to the first step of the replacement, and to the first step after the
loss of the server; the updates that were made again; the phases of the replacement's start; what a waiting spare costs;
and the steps per second before the first death.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # as pytest does: see tests/conftest.py

from supervised_tasks import ranks_of

from tests.measure.common import (
    MODELS,
    Measured,
    measured_config,
    measuring_environment,
    origin,
    parser_of,
    read_records,
    spread,
    verdict,
)

T = TypeVar("T")

LIMIT_S = 180.0
TARGETS_S = {"trainer": (5.0, 1.0), "server": (8.0, 3.0)}
"""Cold, and with a spare."""
SERVER_RANK, TRAINER_RANK = 0, 2
CHECKPOINT_EVERY = 500
SETTLE_S = 1.0
LEAST_PAUSE_S = 0.2
RATE_S = 8.0
MOST_COST = 0.02
"""Of the throughput, for checkpoints in memory."""


class RecordsSteps(Measured):
    """Records the end of each batch at once, so that the time of one survives the process.

    Args:
        stamps: the folder for one file per process, ``<global rank>-<process id>``.
    """

    def __init__(self, stamps: str, **options: Any) -> None:
        super().__init__(**options)
        self.path = Path(stamps)

    def on_batch_end(self, batch_idx: int) -> None:
        name = f"{self.trainer.process.identity.global_rank}-{os.getpid()}"
        with (self.path / name).open("a", encoding="ascii") as file:
            file.write(f"{time.monotonic()}\n")


@dataclass(frozen=True)
class Recovery:
    """One run: seconds until it trained again, updates redone after the death of the server, steps per second before,
    the phases of the replacement, and RSS, PSS and CPU of spares.
    """

    trainer_s: float
    server_s: float
    redone: int
    rate: float
    phases: dict[str, float]
    spare_mb: list[tuple[float, float]]
    spare_cpu: list[float]


class Watch:
    """A started run, seen from outside."""

    def __init__(self, folder: Path, run: subprocess.Popen[bytes], spares: int) -> None:
        self.folder, self.run, self.spares = folder, run, spares

    def stamps(self, rank: int) -> dict[int, list[float]]:
        """The ends of batches of a rank, by process id."""
        found = {}
        for path in (self.folder / "stamps").glob(f"{rank}-*"):
            lines = path.read_text(encoding="ascii").splitlines(keepends=True)
            found[int(path.name.partition("-")[2])] = [float(line) for line in lines if line.endswith("\n")]
        return found

    def await_value(self, what: str, value: Callable[[], T | None]) -> T:
        deadline = time.monotonic() + LIMIT_S
        while (found := value()) is None:
            if self.run.poll() is not None or time.monotonic() > deadline:
                output = (self.folder / "output").read_text(encoding="utf-8")
                raise RuntimeError(f"{what} did not come; exit code {self.run.poll()}: {output[-400:]}")
            time.sleep(0.05)
        return found

    def await_trained(self) -> None:
        """Until both trainers train, the spares wait, and a checkpoint exists."""
        self.await_value("the first steps", lambda: True if self.stamps(1) and self.stamps(TRAINER_RANK) else None)
        latest = self.folder / "run" / "checkpoints" / "latest"
        self.await_value("a checkpoint", lambda: True if latest.exists() else None)
        self.await_value("the spares", lambda: True if len(self.waiting()) >= self.spares else None)
        time.sleep(SETTLE_S)

    def waiting(self) -> list[psutil.Process]:
        """The spares that have imported torch."""
        log = self.folder / "run" / "logs" / "spares.log"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        ready = [int(line.split()[-5]) for line in lines if line.endswith("waits for a role")]
        children = {child.pid: child for child in psutil.Process(self.run.pid).children()}
        roles = {process.pid for process in ranks_of(self.run.pid).values()}
        return [children[pid] for pid in ready if pid in children and pid not in roles]

    def kill(self, rank: int) -> float:
        ranks_of(self.run.pid)[rank].kill()
        return time.monotonic()

    def next_of_other_process(self, rank: int, known: set[int]) -> float | None:
        return next((times[0] for pid, times in self.stamps(rank).items() if pid not in known and times), None)

    def end_of_gap(self, since: float) -> float | None:
        """The end of the longest pause since then; None while there was none."""
        times = sorted(t for stamps in self.stamps(TRAINER_RANK).values() for t in stamps if t > since)
        pauses = [(after - before, after) for before, after in zip([since, *times], times, strict=False)]
        # Steps of the last replies may still end after the death.
        length_s, end = max(pauses, default=(0.0, 0.0))
        return end if length_s > LEAST_PAUSE_S else None


@dataclass(frozen=True)
class Case:
    spares: int
    memory_every: int

    def __str__(self) -> str:
        return f"spares {self.spares}, memory_every {self.memory_every}"


def started(folder: Path, case: Case, model: str, consistency: str) -> contextlib.AbstractContextManager[Watch]:
    (folder / "stamps").mkdir()
    config = measured_config("rpc", folder, 10**9, 2, {"stamps": str(folder / "stamps"), "model": model})
    config["task"] = f"{Path(__file__).resolve()}:RecordsSteps"
    config["cluster"].update(spares=case.spares, timeout_s=60, max_restarts=9)
    config["server"] = {"consistency": consistency}
    config["checkpoint"] = {"every": CHECKPOINT_EVERY, "memory_every": case.memory_every or None}
    return start_run(folder, config, case.spares)


@contextlib.contextmanager
def start_run(folder: Path, config: dict[str, Any], spares: int) -> Iterator[Watch]:
    """Start a run in ``folder / "run"``, and end it at the end."""
    config["logging"] = {"run_dir": str(folder), "name": "run", "log_every": 1, "tensorboard": False}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "paramserver.launch", "--config", str(folder / "config.yaml")]
    with (folder / "output").open("wb") as output:
        run = subprocess.Popen(command, env=measuring_environment(), stdout=output, stderr=output)
    try:
        yield Watch(folder, run, spares)
    finally:
        run.send_signal(signal.SIGINT)
        run.send_signal(signal.SIGINT)
        run.wait(LIMIT_S)


def measure(case: Case, model: str, consistency: str) -> Recovery:
    with tempfile.TemporaryDirectory() as name, started(Path(name), case, model, consistency) as watch:
        watch.await_trained()
        began = time.monotonic()
        time.sleep(RATE_S)
        rate = sum(t > began for stamps in watch.stamps(TRAINER_RANK).values() for t in stamps) / RATE_S
        memory, cpu = costs(watch.waiting())
        known = set(watch.stamps(TRAINER_RANK))
        killed = watch.kill(TRAINER_RANK)
        trained = watch.await_value(
            "the replacement's first step", lambda: watch.next_of_other_process(TRAINER_RANK, known)
        )
        trainer_s = trained - killed
        watch.await_trained()
        phases = [r["phases"] for r in read_records(watch.folder / "run", "phase") if r["rank"] == TRAINER_RANK]
        killed = watch.kill(SERVER_RANK)
        server_s = watch.await_value("a step after the server's death", lambda: watch.end_of_gap(killed)) - killed
        losses = json.loads((watch.folder / "run" / "losses.json").read_text(encoding="utf-8"))
    return Recovery(trainer_s, server_s, losses["updates_redone"], rate, phases[-1], memory, cpu)


def costs(spares: list[psutil.Process]) -> tuple[list[tuple[float, float]], list[float]]:
    """RSS and PSS in MB, and the share of a core that each uses while it waits."""
    memory = [(full.rss / 1e6, full.pss / 1e6) for full in (spare.memory_full_info() for spare in spares)]
    before = [sum(spare.cpu_times()[:2]) for spare in spares]
    time.sleep(SETTLE_S)
    return memory, [sum(s.cpu_times()[:2]) - cpu for s, cpu in zip(spares, before, strict=True)]


def report(case: Case, found: list[Recovery]) -> None:
    print(case)
    for role, times in (
        ("trainer", [recovery.trainer_s for recovery in found]),
        ("server", [recovery.server_s for recovery in found]),
    ):
        aim = TARGETS_S[role][case.spares > 0]
        met = verdict(statistics.median(times) <= aim)
        print(f"  trains after the death of a {role:8s}{spread(times)} s, at most {aim:g}: {met}")
    redone, most = [recovery.redone for recovery in found], case.memory_every or CHECKPOINT_EVERY
    print(f"  updates made again        {spread(redone, '.0f')}, at most {most}: {verdict(max(redone) <= most)}")
    print(f"  steps per second          {spread([recovery.rate for recovery in found], '.1f')}")
    for phase in found[0].phases:
        print(f"    {phase:24s}{spread([recovery.phases.get(phase, 0.0) for recovery in found])} s")
    memory = [each for recovery in found for each in recovery.spare_mb]
    if memory:
        rss, pss = (spread(values, ".0f") for values in zip(*memory, strict=True))
        print(f"  a spare: RSS {rss} MB, PSS {pss} MB")
        print(f"  a spare: {100 * max(share for recovery in found for share in recovery.spare_cpu):.1f} % of a core")


def main() -> None:
    parser = parser_of(__doc__, repeats=5)
    parser.add_argument("--spares", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--memory_every", type=int, nargs="+", default=[0])
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--consistency", choices=["sync", "bounded", "async"], default="sync")
    arguments = parser.parse_args()
    cases = itertools.starmap(Case, itertools.product(arguments.spares, arguments.memory_every))
    found: dict[Case, list[Recovery]] = {case: [] for case in cases}
    for repeat in range(arguments.repeats):
        for case, recoveries in found.items():
            recoveries.append(measure(case, arguments.model, arguments.consistency))
            last = recoveries[-1]
            text = f"trainer {last.trainer_s:.2f} s, server {last.server_s:.2f} s"
            print(f"  {repeat + 1}/{arguments.repeats}, {case}: {text}", file=sys.stderr)
    print(origin())
    for case, recoveries in found.items():
        report(case, recoveries)
        without = found.get(Case(case.spares, 0), [])
        if case.memory_every and without:
            shares = [one.rate / other.rate for one, other in zip(recoveries, without, strict=True)]
            met = verdict(statistics.median(shares) >= 1 - MOST_COST)
            print(f"  throughput, of that without {spread(shares, '.3f')}, at least {1 - MOST_COST}: {met}")


if __name__ == "__main__":
    main()

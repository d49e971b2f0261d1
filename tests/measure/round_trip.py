"""The fixed cost of a step: time per step of a model with 5,000 parameters, and where it goes in ``rpc``.

    python -m tests.measure.round_trip [--cases local ddp rpc ...] [--trainers 2 ...] [--servers 1 ...]
        [--sleep_ms 0] [--consistency sync] [--steps 400] [--warm 100] [--repeats 5] [--paths]

Each trainer has one thread and batches of 32 samples of 32 numbers, so that a step is almost all overhead; with
``--sleep_ms`` its forward sleeps so long, which stands for compute on a machine with a core for each trainer. The last
column is what a step takes beyond one of ``local`` with the same sleep, in the same repeat. With ``async`` the
figure of ``rpc`` is also the number of pushes per second that the servers apply together.

``--paths`` prints, for ``rpc``, how often each thread of the server and of a trainer is woken in a step, its CPU time,
and the median times of a push along its way, by the clock that all processes share: from the end of backward to the
beginning of the next forward, for the trainer that is last in each step, whose push the others wait for.

Every run is fresh processes; cases are interleaved, in alternating order. A step lasts from one ``on_batch_start`` to
the next; of several trainers the mean counts. The CPU time of server 0 is that of all its threads, from the end of the
warm-up on: its inverse is how many pushes per second the server sustains on one core, however slow the trainers are.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paramserver
from paramserver import Task
from paramserver.tools.bench.cases import interleaved
from tests.measure.common import (
    measured_config,
    measuring_environment,
    origin,
    parser_of,
    read_stamps,
    run_fresh,
    spread,
)

BATCH_SIZE, FEATURES, CLASSES = 32, 32, 44
# What a push passes, in this order.
PLACES = ("backward ends", "sent", "received", "update begins", "update ends", "replied", "reply received", "forward")

Threads = dict[str, tuple[str, int, float]]
"""Of each thread: its name, how often it was woken, and its CPU seconds."""


def threads_of(pid: int) -> Threads:
    ticks = os.sysconf("SC_CLK_TCK")
    found: Threads = {}
    for folder in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda folder: int(folder.name)):
        lines = (folder / "status").read_text(encoding="utf-8").splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        cpu = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
        name = "main" if folder.name == str(pid) else status["Name"]
        found[folder.name] = name, int(status["voluntary_ctxt_switches"]), sum(map(int, cpu)) / ticks
    return found


# One rank.


def note_calls(noted: list[tuple[str, float]], owner: Any, method: str, place: str, after: bool = False) -> None:
    """Note the moment at which a method begins, or ends, from now on."""
    plain: Callable[..., Any] = getattr(owner, method)

    @wraps(plain)
    def noting(*args: Any, **kwargs: Any) -> Any:
        if not after:
            noted.append((place, time.perf_counter()))
        result = plain(*args, **kwargs)
        if after:
            noted.append((place, time.perf_counter()))
        return result

    setattr(owner, method, noting)


class Tiny(Task):
    """A model of 4,972 parameters.

    Args:
        folder: where this rank leaves its figures.
        sleep_s: of each forward.
        warm: steps that do not count.
        paths: also note the moments of each push.
    """

    def __init__(self, folder: str, sleep_s: float, warm: int, paths: bool) -> None:
        self.folder, self.sleep_s, self.warm, self.paths = Path(folder), sleep_s, warm, paths
        self.stamps: list[float] = []
        self.noted: list[tuple[str, float]] = []
        self.threads: list[dict[str, Threads]] = []

    def build_model(self) -> nn.Module:
        if self.paths:
            from paramserver.server.aggregator import Aggregator
            from paramserver.server.updates import Updates

            note_calls(self.noted, Aggregator, "push", "received")
            note_calls(self.noted, Updates, "apply", "update begins")
            note_calls(self.noted, Aggregator, "_after_update", "update ends")
            note_calls(self.noted, Aggregator, "_grant", "replied", after=True)
            atexit.register(self._write_moments)
        (self.folder / f"pid-{os.getpid()}").touch()
        return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_source(self, partition: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        samples = torch.randn(4096, FEATURES, generator=generator)
        return TensorDataset(samples, torch.randint(CLASSES, (4096,), generator=generator))

    def on_train_start(self) -> None:
        (self.folder / f"pid-{os.getpid()}").unlink()  # those of the servers are left
        if self.paths:
            from paramserver.trainers import RpcTrainer

            note_calls(self.noted, RpcTrainer, "step_optimizer", "backward ends")
            note_calls(self.noted, type(self.trainer.server), "push", "sent", after=True)
            note_calls(self.noted, type(self.trainer.optimizer), "step", "reply received", after=True)

    def on_batch_start(self, batch_idx: int) -> None:
        self.stamps.append(time.perf_counter())
        if batch_idx == self.warm or (batch_idx == self.warm + 200 and self.paths):
            self._read_threads()

    def _read_threads(self) -> None:
        # The first process that was started is server 0.
        servers = sorted(int(path.name[4:]) for path in self.folder.glob("pid-*"))
        threads = {"server": threads_of(servers[0])} if servers else {}
        self.threads.append({**threads, "trainer": threads_of(os.getpid())})

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def on_train_end(self) -> None:
        kept = [(stamp, 0.0) for stamp in self.stamps[self.warm :]]
        (self.folder / f"stamps-{self.trainer.trainer_index}.json").write_text(json.dumps(kept))
        self._read_threads()
        self.noted += [("forward", stamp) for stamp in self.stamps]
        (self.folder / f"threads-{self.trainer.trainer_index}.json").write_text(json.dumps(self.threads))

    def _write_moments(self) -> None:
        (self.folder / f"moments-{os.getpid()}.json").write_text(json.dumps(self.noted))


# The measurement.


@dataclass(frozen=True)
class Case:
    mode: str
    trainers: int
    servers: int

    def __str__(self) -> str:
        servers = f", {self.servers} servers" if self.servers > 1 else ""
        return self.mode if self.mode == "local" else f"{self.mode}, {self.trainers} trainers{servers}"


@dataclass(frozen=True)
class Figures:
    """Milliseconds of a mean step, and of CPU time that server 0 needs for each push; 0 without a server."""

    step_ms: float
    cpu_ms: float


def run_case(case: Case, arguments: argparse.Namespace, folder: Path) -> Figures:
    """The figures of one fresh run."""
    run_fresh([["-m", "tests.measure.round_trip", *child_words(case, arguments, folder)]], measuring_environment())
    stamps = read_stamps(folder)
    steps_s = [(one[-1][0] - one[0][0]) / (len(one) - 1) for one in stamps]
    first, *_, last = read_json(folder, "threads-0.json")[0]
    cpu_s = [sum(cpu for _, _, cpu in at.get("server", {}).values()) for at in (first, last)]
    # Of a trainer that runs freely, the others' steps in the same time are as many.
    return Figures(1e3 * statistics.mean(steps_s), 1e3 * (cpu_s[1] - cpu_s[0]) / len(stamps[0]) / case.trainers)


def child_words(case: Case, arguments: argparse.Namespace, folder: Path) -> list[str]:
    words = ["--child", case.mode, "--folder", str(folder), "--trainers", str(case.trainers)]
    words += ["--servers", str(case.servers), "--sleep_ms", str(arguments.sleep_ms), "--steps", str(arguments.steps)]
    words += ["--warm", str(arguments.warm), "--consistency", arguments.consistency]
    return words + ["--paths"] * (arguments.paths and case.mode == "rpc")


def be_child(arguments: argparse.Namespace) -> None:
    task_args = {"folder": str(arguments.folder), "sleep_s": arguments.sleep_ms / 1e3}
    task_args |= {"warm": arguments.warm, "paths": arguments.paths}
    trainers, free = arguments.trainers[0], arguments.consistency != "sync"
    steps = arguments.steps * (trainers if free else 1)
    config = measured_config(arguments.child, arguments.folder, steps, trainers, task_args)
    config["training"]["batch_size"] = BATCH_SIZE
    config["logging"]["tensorboard"] = False
    config["cluster"]["num_servers"] = arguments.servers[0]
    if arguments.child == "rpc":
        config["server"] = {"consistency": arguments.consistency, "transport": "shared_memory"}
    paramserver.run(Tiny, config)


def read_json(folder: Path, pattern: str) -> list[Any]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(pattern))]


def print_threads(folder: Path) -> None:
    before, after = read_json(folder, "threads-0.json")[0]
    for process in ("server", "trainer"):
        print(f"    threads of the {process}: woken per step, CPU ms per step")
        rows = []
        for number, (name, woken, cpu_s) in after[process].items():
            _, earlier, earlier_s = before[process].get(number, (name, 0, 0.0))
            rows.append((5 * (cpu_s - earlier_s), (woken - earlier) / 200, name))
        for cpu_ms, woken_per_step, name in sorted(rows, reverse=True):
            if cpu_ms or woken_per_step > 0.1:
                print(f"      {name:18s}{woken_per_step:6.1f}{cpu_ms:8.2f}")


def print_path(folder: Path) -> None:
    """Print the times between the moments of a step, for the trainer that ends its backward last."""
    moments = read_json(folder, "moments-*.json")
    server = next(noted for noted in moments if any(place == "update begins" for place, _ in noted))
    begins = [at for place, at in server if place == "update begins"]
    durations: dict[str, list[float]] = {}
    for noted in moments:
        if noted is server:
            continue
        own = sorted((at, place) for place, at in noted)
        ends = [at for at, place in own if place == "backward ends"]
        for (at, update), following in zip(_pairs(ends, begins), ends[1:], strict=False):
            last = max(t for place, t in server if place == "received" and t < update)
            passed = {"backward ends": at, "received": last, "update begins": update}
            for place in PLACES:
                if place not in passed:
                    source = server if place in ("update ends", "replied") else noted
                    floor = at if place == "sent" else update
                    passed[place] = min((t for p, t in source if p == place and t > floor), default=float("nan"))
            if passed["sent"] > last + 1e-3 or passed["forward"] > following or at < last - 2e-3:
                continue  # another trainer was last
            for first, second in itertools.pairwise(PLACES):
                durations.setdefault(f"{first} to {second}", []).append(1e3 * (passed[second] - passed[first]))
    print("    the way of the last push of a step, ms: median (5 % to 95 %)")
    for name, taken in durations.items():
        taken.sort()
        low, high = taken[len(taken) // 20], taken[-1 - len(taken) // 20]
        print(f"      {name:34s}{statistics.median(taken):7.3f} ({low:.3f} to {high:.3f})")


def _pairs(ends: list[float], begins: list[float]) -> list[tuple[float, float]]:
    """Each end of a backward with the update that follows it."""
    pairs, update = [], iter(begins)
    begin = next(update, None)
    for end in ends:
        while begin is not None and begin < end:
            begin = next(update, None)
        if begin is not None:
            pairs.append((end, begin))
    return pairs


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, sleep_ms=0.0, steps=400, warm=100, repeats=5)
    parser.add_argument("--cases", nargs="+", choices=("local", "ddp", "rpc"), default=["local", "ddp", "rpc"])
    parser.add_argument("--trainers", nargs="+", type=int, default=[2])
    parser.add_argument("--servers", nargs="+", type=int, default=[1])
    parser.add_argument("--consistency", choices=("sync", "bounded", "async"), default="sync")
    parser.add_argument("--paths", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    if arguments.child is not None:
        be_child(arguments)
        return
    cases = [Case("local", 1, 1)] if "local" in arguments.cases else []
    for trainers in arguments.trainers:
        cases += [Case("ddp", trainers, 1)] if "ddp" in arguments.cases else []
        cases += [Case("rpc", trainers, servers) for servers in arguments.servers if "rpc" in arguments.cases]
    taken: dict[Case, list[Figures]] = {case: [] for case in cases}
    details: dict[Case, Path] = {}
    with tempfile.TemporaryDirectory() as root:
        for repeat, number in interleaved([str(i) for i in range(len(cases))], arguments.repeats):
            case = cases[int(number)]
            folder = details[case] = Path(root) / f"{repeat}-{number}"
            folder.mkdir()
            taken[case].append(run_case(case, arguments, folder))
        print(origin())
        alone = taken.get(Case("local", 1, 1))
        for case, figures in taken.items():
            steps_ms = [one.step_ms for one in figures]
            row = f"  {case!s:32s}{spread(steps_ms):26s} ms a step"
            if case.mode == "rpc" and arguments.consistency != "sync":
                row += f", {spread([1e3 * case.trainers / ms for ms in steps_ms], '.0f')} pushes per second"
            if alone is not None and case.mode != "local":
                beyond = [ms - base.step_ms for ms, base in zip(steps_ms, alone, strict=True)]
                row += f", {spread(beyond)} beyond local"
            if case.mode == "rpc":
                row += f", server {spread([one.cpu_ms for one in figures])} ms of CPU for each push"
            print(row, flush=True)
            if arguments.paths and case.mode == "rpc":
                print_threads(details[case])
                print_path(details[case])


if __name__ == "__main__":
    main()

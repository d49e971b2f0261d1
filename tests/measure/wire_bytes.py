"""Compares the bytes per step in a benchmark's record with the counters of the kernel.

    python -m tests.measure.wire_bytes [--bandwidth 400mbit] [--seconds 10] [--repeats 3] [--trainers 1 2] [--ids 0]

Needs root. Each rank runs in its own network namespace, so that all its traffic passes through its interface. The model
has 1.9 million parameters, or with ``--ids`` an embedding table of a million rows of 16, of which a trainer uses so
many ids in a step: then the record's bytes are those of the rows and of their ids. During a run, this process reads the
counters of the trainers' interfaces several times a second, and receives each batch from the task (see
``outside_clock``). The growth of the counters per batch is compared with the record's bytes per step. Headers of
packets, agreements and heartbeats are in the kernel's figure only: at most 5 %, and 20 % of rows.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.utils.data import TensorDataset

from paramserver.tools.bench.cases import Case, RequestedCases, make_cases
from paramserver.tools.bench.measure import MeasuringMethod, measure
from paramserver.tools.bench.processes import NetworkHosts, parse_bandwidth
from paramserver.tools.report.statistics import interpolated
from tests.measure.common import origin, parser_of, spread, verdict
from tests.measure.outside_clock import Listener, Reporting, config_of, method_of

AGREES = 0.05
AGREES_WITH_ROWS = 0.2
LOOK_EVERY_S = 0.2


class Lookup(Reporting):
    """Looks up ``ids`` random ids of an embedding table for each batch."""

    def __init__(self, pipe: str, ids: int) -> None:
        super().__init__(pipe)
        self.ids = ids

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(1_000_000, 16, sparse=True), nn.LogSoftmax(1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=0.01)

    def train_source(self, partition: Any) -> TensorDataset:
        return TensorDataset(torch.randint(0, 1_000_000, (64, self.ids)), torch.zeros(64, dtype=torch.int64))


class Counters:
    """Reads the counters of some hosts in a thread, added up. A context manager."""

    def __init__(self, hosts: NetworkHosts, numbers: range) -> None:
        self._hosts, self._numbers = hosts, numbers
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="counters")
        self.samples: list[tuple[float, float]] = []

    def _read(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            moved = sum(self._hosts.moved_bytes(number) for number in self._numbers)
            self.samples.append((time.perf_counter(), float(moved)))

    def __enter__(self) -> Counters:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def moved(self, begin: float, end: float) -> float:
        """Bytes between two moments."""
        return interpolated(self.samples, end) - interpolated(self.samples, begin)


def bytes_per_step(counters: Counters, received: Sequence[tuple[float, int]], trainers: int, warm_s: float) -> float:
    """What the kernel counted for each batch that the task reported, from one after ``warm_s`` seconds to the last.

    Both ends are the same moment of a step of all trainers, so that whole steps lie between.
    """
    moments = [moment for moment, _ in received if moment >= received[0][0] + warm_s]
    steps = (len(moments) - 1) // trainers * trainers
    return counters.moved(moments[0], moments[steps]) / steps


def case_of(folder: Path, pipe: Path, trainers: int, ids: int) -> Case:
    file, config = folder / f"config-{trainers}.yaml", config_of(pipe, "mlp", trainers)
    if ids:
        config |= {"task": "tests.measure.wire_bytes:Lookup", "task_args": {"pipe": str(pipe), "ids": ids}}
        config["training"]["batch_size"] = 1
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return make_cases(RequestedCases(file, modes="rpc", trainers=str(trainers)))[-1]


def compared(case: Case, repeat: int, method: MeasuringMethod, pipe: Path) -> tuple[float, float]:
    """Bytes per step and trainer: the kernel's, and the record's."""
    assert method.hosts is not None
    pipe.unlink(missing_ok=True)
    trainers = range(case.servers, case.servers + case.trainers)
    with Listener(pipe) as listener, Counters(method.hosts, trainers) as counters:
        record = measure(case, repeat, method)
    if not record.is_completed:
        raise RuntimeError(record.error)
    return bytes_per_step(counters, listener.received, case.trainers, method.warm_s), record.wire_bytes_per_step or 0.0


def main() -> None:
    parser = parser_of(__doc__, seconds=10.0, repeats=3, ids=0)
    parser.add_argument("--bandwidth", default="400mbit")
    parser.add_argument("--trainers", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    print(origin())
    with tempfile.TemporaryDirectory() as name:
        for trainers in arguments.trainers:
            pipe = Path(name) / "pipe"
            case = case_of(Path(name), pipe, trainers, arguments.ids)
            ratios = []
            for repeat in range(arguments.repeats):
                # New interfaces, whose counters begin at nothing.
                with NetworkHosts(case.trainers + case.servers, parse_bandwidth(arguments.bandwidth)) as hosts:
                    method = replace(method_of(Path(name) / "out", arguments.seconds, 1.0), hosts=hosts)
                    counted, reported = compared(case, repeat, method, pipe)
                ratios.append(counted / reported)
                print(
                    f"  {repeat + 1}/{arguments.repeats} {case.name}: {counted:.0f} and {reported:.0f} bytes a step",
                    file=sys.stderr,
                )
            within = AGREES_WITH_ROWS if arguments.ids else AGREES
            agrees = verdict(all(abs(ratio - 1) <= within for ratio in ratios))
            print(f"{case.name}: kernel / record {spread(ratios, '.3f')}, within {within:.0%}: {agrees}")


if __name__ == "__main__":
    main()

"""Compares a step with an embedding table in `rpc` with that of DDP with sparse and with dense gradients.

    python -m tests.measure.tables [--rows 1000000] [--ids 4096] [--width 16] [--steps 60] [--repeats 5]
                                   [--cases rpc ddp dense] [--servers 1] [--checkpoint_every 0]
    python -m tests.measure.tables --update_only [--rows 1000000] [--ids 4096] [--width 16] [--steps 60] [--repeats 5]

Two trainers with one thread each on this machine, and with `rpc` a server; the table is of float32, and its optimizer
is Adagrad. Each trainer looks up so many random ids in a step. `dense` is `ddp` with `sparse=False`. The runs are fresh
processes in turns. A step lasts from one `on_batch_start` to the next; the first `--warm` are left out; of two trainers
the slower counts. Speeds are ratios of the mean steps of one repeat. The memory is the greatest sum of the proportional
set sizes of all ranks that was read during a run of its own, which reading slows down, in multiples of the table with
its state; that of a run with 1,000 rows is subtracted.

`--update_only` measures what a server computes in a step, in this process and with one thread: from the gradients of
two trainers their mean and the step of the optimizer, and the version of each row. Rows are those that change.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paramserver
from paramserver import Task
from paramserver.optim.row_steps import RowStep, record_rows
from paramserver.parameters.tables import mean_of_rows, sparse_gradient
from tests.measure.common import measured_in_turn, now, origin, parsed, parser_of, read_stamps, spread, write_stamps
from tests.measure.memory import proportional_bytes
from tests.measure.overhead import timing_of
from tests.measure.soak import Sampler

CASES = {"rpc": ("rpc", True), "ddp": ("ddp", True), "dense": ("ddp", False)}
SMALL_ROWS = 1000


class Lookup(Task):
    """Looks up the ids of a batch, one id for each sample, in a table; next to no other arithmetic."""

    def __init__(self, rows: int, width: int, ids: int, sparse: bool, folder: str) -> None:
        self.rows, self.width, self.ids, self.sparse, self.folder = rows, width, ids, sparse, folder
        self.stamps: list[Any] = []

    def build_model(self) -> nn.Module:
        return nn.Embedding(self.rows, self.width, sparse=self.sparse)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=0.01)

    def train_source(self, partition: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randint(0, self.rows, (64, self.ids), generator=generator))

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor:
        output: Tensor = model(batch[0][0])
        return output.square().mean()

    def on_batch_start(self, batch_idx: int) -> None:
        self.stamps.append(now())

    def on_train_end(self) -> None:
        write_stamps(Path(self.folder), self.trainer.trainer_index, self.stamps)


def measure(case: str, rows: int, arguments: argparse.Namespace, every_s: float = 0.1) -> tuple[float, int]:
    """Return milliseconds of a step, and the bytes of all ranks, which are read every ``every_s``."""
    mode, sparse = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        task_args = {"rows": rows, "width": arguments.width, "ids": arguments.ids, "sparse": sparse, "folder": folder}
        config = {
            "mode": mode,
            "task_args": task_args,
            "cluster": {"num_trainers": 2, "num_servers": arguments.servers if mode == "rpc" else 1},
            "training": {"max_steps": arguments.steps, "batch_size": 1, "validate_every": 0},
            "checkpoint": {"every": arguments.checkpoint_every, "keep": 1},
            "logging": {"run_dir": folder, "name": "run", "tensorboard": False},
        }
        with Sampler(memory_of=proportional_bytes, every_s=every_s) as sampler, redirect_stdout(sys.stderr):
            paramserver.run(Lookup, config)
        stamps = read_stamps(Path(folder))
    step_ms = max(timing_of(one, arguments.warm).mean_ms for one in stamps)
    return step_ms, peak_bytes(sampler)


def updated_rows_per_second(rows: int, arguments: argparse.Namespace) -> float:
    """Return how many rows one thread updates in a second."""
    table, generator = nn.Parameter(torch.zeros(rows, arguments.width)), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adagrad([table], lr=0.01)
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    step, updated, seconds = RowStep(optimizer), 0, 0.0
    for version in range(arguments.steps):
        ids = [torch.randint(0, rows, (arguments.ids,), generator=generator) for _ in range(2)]
        gradients = [
            sparse_gradient(own, torch.ones(len(own), arguments.width), table.shape) for own in map(torch.unique, ids)
        ]
        began = time.perf_counter()
        table.grad = mean_of_rows(gradients, [1.0, 1.0])
        step()
        record_rows(optimizer, version + 1)
        if version >= arguments.warm:
            seconds += time.perf_counter() - began
            updated += table.grad._nnz()
    return updated / seconds


def peak_bytes(sampler: Sampler) -> int:
    """Return the greatest sum of what all ranks had at one time."""
    # Those of earlier times do not count: what a rank shared with one that has ended is the other ranks' now.
    sums: Counter[float] = Counter()
    for own in sampler.readings.values():
        sums.update({reading.time: reading.memory_bytes for reading in own})
    return max(sums.values(), default=0)


def main() -> None:
    parser = parser_of(__doc__, rows=1_000_000, ids=4096, width=16, steps=60, warm=10, repeats=5, servers=1)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--checkpoint_every", type=int, default=0, help="steps; 0 for one checkpoint, at the end")
    parser.add_argument("--update_only", action="store_true", help="what a server computes in a step")
    parser.set_defaults(child=None)
    arguments = parsed(parser)
    print(origin())
    if arguments.update_only:
        torch.set_num_threads(1)
        rates = [updated_rows_per_second(arguments.rows, arguments) / 1e6 for _ in range(arguments.repeats)]
        print(f"{arguments.rows:,} rows of {arguments.width}, {arguments.ids} ids for each of two trainers and step")
        print(f"  {spread(rates)} million rows/s, with one thread")
        return
    never_s = 3600.0  # the kernel walks the page tables of a process, which takes a tenth of a core with a large table
    found = measured_in_turn(
        arguments.cases, arguments.repeats, lambda case: measure(case, arguments.rows, arguments, never_s)[0]
    )
    memory = {case: measure(case, arguments.rows, arguments)[1] for case in arguments.cases}
    small = {case: measure(case, SMALL_ROWS, arguments)[1] for case in arguments.cases}
    table_bytes = 2 * 4 * arguments.width * arguments.rows
    print(f"{arguments.rows:,} rows of {arguments.width}, {arguments.ids} ids for each trainer and step")
    for case, steps in found.items():
        times = (memory[case] - small[case]) / table_bytes
        row = f"  {case:6s} step {spread(steps)} ms, memory {times:.2f} times the table"
        if case != "rpc" and "rpc" in found:
            row += f"; rpc is {spread([s / own for s, own in zip(steps, found['rpc'], strict=True)])} times as fast"
        print(row)


if __name__ == "__main__":
    main()

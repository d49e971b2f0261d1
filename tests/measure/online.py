"""Online training at full size with a check of every sample, and whether reception slows training down.

    python -m tests.measure.online [--cases whole killed slow] [--modes rpc ddp] [--simulations 100] [--steps 100]
    python -m tests.measure.online --cases held [--repeats 3]

``whole``: 100 simulations of 100 steps of 100x100 numbers, 4 at a time, two trainers, ``uneven_inputs: join``, with
each buffer; ``killed``: one simulation kills itself in its middle, once; ``slow``: trainer 1 takes longer for each
batch. Every sample must be received once, and served exactly once (fifo, firo) or at least once (reservoir). Each
trainer records the samples that it is served.

``held``: samples per second of one ``local`` trainer that is fed by simulations, against the same trainer with all
samples in memory, where a step takes long enough for the producers to keep up; interleaved. torch leaves one core to
the producers.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import paramserver
from paramserver import Task
from paramserver.sources import Simulations
from tests.measure.common import origin, parser_of, spread, verdict

SHAPE = (100, 100)
SIMULATION = Path(__file__).with_name("online_simulation.py")
HELD_REQUIRED = 0.9
CASES = ("whole", "killed", "slow", "held")


class Fed(Task):
    """A small network on large fields.

    Args:
        ledger: folder for what each trainer is served; None = none is kept.
        slow_s: what a batch of trainer 1 takes longer.
        busy: matrix products per batch, so that a step takes its time.
        held: so many samples come from memory; 0 = from simulations.
    """

    def __init__(self, ledger: str | None = None, slow_s: float = 0.0, busy: int = 0, held: int = 0) -> None:
        self.ledger, self.slow_s, self.busy, self.held = ledger, slow_s, busy, held

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(SHAPE[0] * SHAPE[1], 32), nn.ReLU(), nn.Linear(32, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-9)

    def train_source(self, partition: Any) -> Any:
        if not self.held:
            return Simulations()
        one = {"simulation": 0, "step": 0, "parameters": np.zeros(2), "u": np.zeros(SHAPE, np.float32)}
        return [one] * self.held

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor:
        index = self.trainer.trainer_index
        if self.ledger is not None:
            rows = np.stack([batch["simulation"].numpy(), batch["step"].numpy()], axis=1)
            with (Path(self.ledger) / f"trainer-{index}").open("ab") as file:
                file.write(rows.astype("<i8").tobytes())
        if index == 1:
            time.sleep(self.slow_s)
        square = torch.ones(256, 256)
        for _ in range(self.busy):
            square = square @ square / 256
        out: Tensor = model(batch["u"]).pow(2).mean() * 1e-9
        return out


def base(folder: Path, simulations: int, steps: int, at_once: int, killed: bool) -> dict[str, Any]:
    return {
        "simulations": {
            "function": f"{SIMULATION}:simulate",
            "count": simulations,
            "at_once": at_once,
            "steps": steps,
            "fields": {"u": {"shape": list(SHAPE), "finite": True}},
            "parameters": {"a": [0.0, 1.0], "b": [0.6, 1.0] if killed else [0.0, 0.4]},
        },
        "training": {"batch_size": 10, "uneven_inputs": "join", "validate_every": 0},
        "checkpoint": {"every": 0},
        "logging": {"run_dir": str(folder), "tensorboard": False, "progress": "off", "log_every": 1000},
    }


def account(case: str, mode: str, kind: str, simulations: int, steps: int) -> bool:
    """One run, and whether every sample was served as its buffer promises."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ledger").mkdir()
        config = base(folder / "runs", simulations, steps, 4, case == "killed")
        config |= {"mode": mode, "cluster": {"num_trainers": 2}, "buffer": {"kind": kind, "capacity": 500}}
        arguments = {"ledger": str(folder / "ledger"), "slow_s": 0.01 if case == "slow" else 0.0}
        since = time.perf_counter()
        result = paramserver.run(Fed, {**config, "task_args": arguments})
        seconds = time.perf_counter() - since
        rows = [np.fromfile(file, "<i8").reshape(-1, 2) for file in sorted((folder / "ledger").iterdir())]
    served = Counter(map(tuple, np.concatenate(rows).tolist()))
    expected = set(product(range(simulations), range(steps)))
    streams = [trainer["stream"] for trainer in result.summary["trainers"]]
    received = sum(stream["received"] for stream in streams)
    once = kind == "reservoir" or set(served.values()) == {1}
    good = set(served) == expected and once and received == len(expected)
    print(
        f"  {case:7s}{mode:5s}{kind:10s}{received} received, {sum(stream['duplicated'] for stream in streams)} "
        f"duplicated, {sum(served.values())} served, {min(served.values())} to {max(served.values())} times each; "
        f"{result.summary['simulations']['restarted']} restarted; {seconds:.0f} s: {'ok' if good else 'WRONG'}",
        flush=True,
    )
    return good


def held(repeats: int, simulations: int, steps: int, busy: int) -> None:
    # On two cores torch would take both, and none would be free for the producers.
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) - 1, 1))
    shares = []
    for _ in range(repeats):
        rates = []
        for in_memory in (0, simulations * steps):
            with tempfile.TemporaryDirectory() as name:
                config = base(Path(name), simulations, steps, 1, False)
                config |= {"mode": "local", "buffer": {"capacity": 1000, "watermark": 500}}
                if in_memory:
                    config["simulations"] = None
                    config["training"]["max_epochs"] = 1
                task_args = {"held": in_memory, "busy": busy}
                rates.append(paramserver.run(Fed, {**config, "task_args": task_args}).summary)
        online, memory = (summary["samples"] / own_seconds(summary) for summary in rates)
        waited = rates[0]["trainers"][0]["data_wait_share"]
        shares.append(online / memory)
        print(f"  {online:.0f} samples/s online (waited {100 * waited:.0f} %), {memory:.0f} from memory", flush=True)
    met = statistics.median(shares) >= HELD_REQUIRED
    print(f"fed by simulations against memory: {spread(shares)}; required {HELD_REQUIRED}: {verdict(met)}")


def own_seconds(summary: dict[str, Any]) -> float:
    """Of training, without the wait for the first samples, which no step of a data set has."""
    return float(summary["seconds"]) - float(summary["buffer"]["get_wait_s"])


def main() -> None:
    parser = parser_of(__doc__, simulations=100, steps=100, repeats=3, busy=40)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--modes", nargs="+", choices=("rpc", "ddp"), default=["rpc", "ddp"])
    parser.add_argument("--kinds", nargs="+", choices=("fifo", "firo", "reservoir"), default=["fifo", "reservoir"])
    arguments = parser.parse_args()
    print(origin())
    good = True
    for case in [case for case in arguments.cases if case != "held"]:
        for mode, kind in product(arguments.modes, arguments.kinds):
            good &= account(case, mode, kind, arguments.simulations, arguments.steps)
    if "held" in arguments.cases:
        # Few and long ones: what a process takes to start is no part of reception.
        held(arguments.repeats, max(arguments.simulations // 20, 1), 10 * arguments.steps, arguments.busy)
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Compares a synchronous step of the parameter server with all-reduce, and with no communication.

    python -m tests.measure.versus_ddp [--settings cnn mlp-sgd mlp-adam tiny] [--steps 200] [--repeats 7] [--pin]

Two trainers with one thread each on this machine, batches of 32 random images of 28x28. ``cnn`` is the tutorial's
network, ``mlp-`` 784-1024-1024-10, ``tiny`` one of 4,780 parameters, whose step is its fixed cost; SGD has a momentum
of 0.9. The cases:

- ``ddp``: the default, all-reduce in shared memory.
- ``gloo``: ``ddp.shared_memory: off``, gloo on the loopback, with the package's default buckets.
- ``memory``: ``rpc`` with one server and parameters and gradients in shared memory, which is what ``transport: auto``
  takes on one host; named here, so that a run without it fails instead of measuring something else.
- ``wire``: ``rpc`` with ``transport: rpc``.
- ``limit``: the same loops without communication: two ``local`` runs of this package at once, each with its own
  optimizer. A barrier before their first step makes both run at the same time.

Validation is off, and the only checkpoint is written after the last step. Every run is a fresh process; the cases are
interleaved, in alternating order. A step lasts from one ``on_batch_start`` to
the next; the first ``--warm`` are left out; of two trainers the slower counts. ``--pin`` binds the training thread of
trainer i, and the thread that fills its buffer, to core i, in every case alike; without it the kernel places all
threads, in every case alike.

Speeds are ratios of the mean steps of one repeat (above 1: faster than the other); their median decides.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramserver
from paramserver.tools.bench.instrumentation import file_barrier
from tests.measure.common import (
    BATCH_SIZE,
    Measured,
    measured_config,
    measured_in_turn,
    measuring_environment,
    measuring_parser,
    origin,
    parsed,
    read_stamps,
    run_fresh,
    spread,
    verdict,
)
from tests.measure.overhead import Timing, timing_of

TRAINERS = 2
MODES = {"ddp": "ddp", "gloo": "ddp", "memory": "rpc", "wire": "rpc", "limit": "local"}
SECTIONS: dict[str, dict[str, Any]] = {
    "gloo": {"ddp": {"shared_memory": "off"}},
    "memory": {"server": {"transport": "shared_memory"}},
    "wire": {"server": {"transport": "rpc"}},
}
REFERENCES = ("gloo", "ddp", "limit")


@dataclass(frozen=True)
class Setting:
    """A network, an optimizer, and the required speed of a case against a reference."""

    model: str
    optimizer: str
    required: dict[tuple[str, str], float]


SETTINGS = {
    "cnn": Setting("cnn", "sgd", {("memory", "ddp"): 1.0, ("wire", "gloo"): 0.75, ("memory", "limit"): 0.85}),
    "mlp-sgd": Setting(
        "mlp", "sgd", {("ddp", "gloo"): 1.15, ("memory", "ddp"): 1.0, ("memory", "gloo"): 1.15, ("wire", "gloo"): 0.5}
    ),
    "mlp-adam": Setting("mlp", "adam", {("ddp", "gloo"): 1.15, ("memory", "ddp"): 1.3, ("memory", "gloo"): 1.0}),
    "tiny": Setting("tiny", "sgd", {}),
}


# One process of a measurement.


class Paired(Measured):
    """One of two trainers that begin together.

    Args:
        model, folder, optimizer: see ``Measured``.
        pin: bind the training thread to the core of this trainer's number.
        lone_rank: the number of this run of one trainer, which waits for the other run in ``folder``; None where one
            run has both trainers.
    """

    def __init__(self, model: str, folder: str, optimizer: str, pin: bool, lone_rank: int | None = None) -> None:
        super().__init__(model, folder, optimizer)
        self.pin = pin
        self.lone_rank = lone_rank

    def on_train_start(self) -> None:
        number = self.trainer.trainer_index if self.lone_rank is None else self.lone_rank
        if self.pin:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[number % len(cores)]})
        if self.lone_rank is not None:
            assert self.folder is not None
            file_barrier(Path(self.folder).parent / "barrier", number, TRAINERS)


def be_child(arguments: argparse.Namespace) -> None:
    setting = SETTINGS[arguments.settings[0]]
    alone = MODES[arguments.child] == "local"
    folder = arguments.folder / str(arguments.rank)
    folder.mkdir()
    task_args = {"model": setting.model, "folder": str(folder), "optimizer": setting.optimizer, "pin": arguments.pin}
    if alone:
        task_args["lone_rank"] = arguments.rank
    config = measured_config(MODES[arguments.child], folder, arguments.steps, TRAINERS, task_args)
    paramserver.run(Paired, {**config, **SECTIONS.get(arguments.child, {})})


# The measurement.


def measure(case: str, name: str, arguments: argparse.Namespace) -> Timing:
    """One fresh run of a case; the timing of its slower trainer."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "tests.measure.versus_ddp", "--child", case, "--folder", folder, "--settings", name]
        words += ["--steps", str(arguments.steps), *(["--pin"] if arguments.pin else [])]
        processes = TRAINERS if MODES[case] == "local" else 1
        run_fresh([[*words, "--rank", str(rank)] for rank in range(processes)], measuring_environment())
        stamps = [one for rank in range(processes) for one in read_stamps(Path(folder) / str(rank))]
    assert len(stamps) == TRAINERS
    return max((timing_of(one, arguments.warm) for one in stamps), key=lambda timing: timing.mean_ms)


def speeds(timings: dict[str, list[Timing]], case: str, reference: str) -> list[float]:
    """How many times as fast as the reference, repeat by repeat."""
    return [b.mean_ms / a.mean_ms for a, b in zip(timings[case], timings[reference], strict=True)]


def report(setting: Setting, timings: dict[str, list[Timing]]) -> None:
    print(f"  {'':8s}{'mean step, ms':26s}{'CPU of a trainer, ms':26s}speed")
    for case, taken in timings.items():
        row = f"  {case:8s}{spread([t.mean_ms for t in taken]):26s}{spread([t.cpu_ms for t in taken]):26s}"
        compared = [reference for reference in REFERENCES if reference in timings and reference != case]
        print(row + "; ".join(compare(setting, timings, case, reference) for reference in compared), flush=True)


def compare(setting: Setting, timings: dict[str, list[Timing]], case: str, reference: str) -> str:
    ratios = speeds(timings, case, reference)
    text = f"{spread(ratios, '.3f')} of {reference}"
    required = setting.required.get((case, reference))
    return (
        text if required is None else f"{text}, at least {required:g}: {verdict(statistics.median(ratios) >= required)}"
    )


def make_parser() -> argparse.ArgumentParser:
    parser = measuring_parser(__doc__, list(MODES))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--pin", action="store_true")
    return parser


def main() -> None:
    arguments = parsed(make_parser())
    if arguments.child is not None:
        be_child(arguments)
        return
    print(origin())
    for name in arguments.settings:
        timings = measured_in_turn(
            arguments.cases, arguments.repeats, lambda case, name=name: measure(case, name, arguments)
        )
        steps = arguments.steps - arguments.warm - 1
        print(f"\n{name}, batch {BATCH_SIZE}, {steps} steps, {arguments.repeats} repeats: median (least to greatest)")
        report(SETTINGS[name], timings)


if __name__ == "__main__":
    main()

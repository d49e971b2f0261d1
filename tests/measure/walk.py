"""Counts the function calls of this package in one step, one sample and one checkpoint of a real run.

    python -m tests.measure.walk [local] [rpc] [sample] [checkpoint] [--list]

Only calls of functions defined in ``paramserver`` and ``trainers`` are counted, with ``sys.setprofile``. The number of
calls, distinct functions and files, and the number of times that a call is in another file than the call before it,
are a measure of how much of the code a reader follows. They are not a measure of speed.

``local``       one steady step of a trainer in mode local.
``rpc``         one steady step with one server and one trainer (sync, shared memory): the trainer's main thread and the
                server's threads that handle its messages.
``sample``      one sample from the data set to the buffer, as a mean over those of the first batch.
``checkpoint``  one checkpoint of the ``rpc`` run, written in the foreground: all threads of both processes but the
                feeder, from the call of ``Trainer.save`` until it returns.

A step extends from the return of ``training_step`` to its next call, so that it begins with the backward. Of all
steps measured, the one with the median number of calls is reported: a heartbeat or a periodic record falls into some.

``--list`` prints each call of the walk as ``file:function``. The script imports nothing from the package but
``paramserver.run`` and ``paramserver.Task``, so that it also measures another version of the package (``PYTHONPATH``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.rpc import internal as rpc_internal
from torch.nn import functional as F
from torch.utils.data import Dataset

import paramserver
from paramserver import Task

PACKAGE = Path(paramserver.__file__).parent
FOLDERS = (f"{PACKAGE}{os.sep}", f"{PACKAGE.parent / 'trainers'}{os.sep}")
BATCH_SIZE = 32
SAMPLES = 2048
STEPS = 60
WARM_STEPS = 20
SAVE_AT = 30
RPC_RUN = {"mode": "rpc", "server": {"transport": "shared_memory"}}
WALKS: dict[str, dict[str, Any]] = {
    "local": {"mode": "local"},
    "rpc": RPC_RUN,
    "sample": RPC_RUN,
    "checkpoint": RPC_RUN,
}


# In the ranks of the run: record calls.


class CallRecorder:
    """A profile function that appends each call of the package's functions, and markers, to a file of this process.

    Each line is written at once: a rank may end without running exit handlers.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / f"{os.getpid()}.calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDERS):
            path = Path(code.co_filename).relative_to(PACKAGE.parent)
            self.write("call", str(path), getattr(code, "co_qualname", code.co_name), code.co_firstlineno)

    def write(self, *words: object) -> None:
        fields = (time.perf_counter_ns(), threading.get_ident(), *words)
        os.write(self._file, ("\t".join(map(str, fields)) + "\n").encode())

    def start_here(self) -> None:
        """Record the calls of this thread."""
        sys.setprofile(self)

    def start_new_threads(self) -> None:
        """Record the calls of each Python thread started from now on, and of each call that torch makes into Python.

        torch's own threads, in which remote calls and remote backwards run, have no Python thread state between two
        calls, so the profile function is set at the start of each.
        """
        threading.setprofile(self)
        rpc_internal._run_function = self._recorded(rpc_internal._run_function)
        BackwardCFunction.apply = self._recorded(BackwardCFunction.apply)  # type: ignore[method-assign]

    def _recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if sys.getprofile() is not None:
                return function(*arguments)
            sys.setprofile(self)
            try:
                return function(*arguments)
            finally:
                sys.setprofile(None)

        return call


class MarkedImages(Dataset[tuple[Tensor, int]]):
    """Random images; ``recorder`` gets a marker for each that is read."""

    def __init__(self, recorder: CallRecorder) -> None:
        self._recorder = recorder
        generator = torch.Generator().manual_seed(0)
        self._images = torch.randn(SAMPLES, 8, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._recorder.write("sample")
        return self._images[index], index % 4


class WalkedTask(Task):
    """A linear model with two parameter tensors, and markers around the measured parts.

    Overrides no hook that changes when the trainer sends gradients (``on_batch_end``, ``on_after_backward``).

    Args:
        folder: the place of the recorded calls.
    """

    def __init__(self, folder: str) -> None:
        self._recorder = CallRecorder(Path(folder))
        self._recorder.start_new_threads()

    def build_model(self) -> nn.Module:
        return nn.Linear(8, 4)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_source(self, partition: Any) -> Any:
        return MarkedImages(self._recorder)

    def on_train_start(self) -> None:
        self._recorder.start_here()
        save_part = self.trainer.save_part

        def marked_save(reason: str, since: float) -> None:
            self._recorder.write("save", reason)
            save_part(reason, since)
            self._recorder.write("saved")

        self.trainer.save_part = marked_save

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor:
        self._recorder.write("step")
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)


# In the script: run, read and count.


@dataclass(frozen=True)
class Event:
    """A recorded call, or a marker.

    Args:
        time_ns: the monotonic clock, which all processes of a machine share.
        process, thread: where it was recorded.
        kind: ``call``, or the name of a marker.
        file, function, line: of a call.
    """

    time_ns: int
    process: str
    thread: str
    kind: str
    file: str = ""
    function: str = ""
    line: str = ""

    @property
    def definition(self) -> tuple[str, str, str]:
        return self.file, self.function, self.line


@dataclass
class Walk:
    """The calls of each process in a measured part, in the order of time.

    Args:
        calls: by the name of the process.
        repeats: the number of times that the part was passed; figures of calls and changes are means.
    """

    calls: dict[str, list[Event]] = field(default_factory=dict)
    repeats: int = 1

    def row(self, processes: Sequence[str]) -> tuple[float, int, int, float]:
        """Calls, distinct functions, distinct files, and changes of file, which are counted in each process."""
        sequences = [self.calls[name] for name in processes]
        calls = [event for sequence in sequences for event in sequence]
        changes = sum(a.file != b.file for sequence in sequences for a, b in pairwise(sequence))
        functions, files = {event.definition for event in calls}, {event.file for event in calls}
        return len(calls) / self.repeats, len(functions), len(files), changes / self.repeats


def recorded_run(config: dict[str, Any], background: bool) -> list[Event]:
    """Run ``WalkedTask`` and read what its processes recorded."""
    with tempfile.TemporaryDirectory() as folder:
        values = {
            **config,
            "task_args": {"folder": folder},
            "cluster": {} if config["mode"] == "local" else {"num_trainers": 1, "num_servers": 1},
            "training": {"max_steps": STEPS, "batch_size": BATCH_SIZE, "validate_every": 0},
            "checkpoint": {"every": SAVE_AT, "background": background},
            "logging": {"run_dir": folder, "name": "run", "log_every": 10 * STEPS},
        }
        with contextlib.redirect_stdout(sys.stderr):
            paramserver.run(WalkedTask, values)
        return sorted(_read(Path(folder)), key=lambda event: event.time_ns)


def _read(folder: Path) -> Iterator[Event]:
    for path in folder.glob("*.calls"):
        for line in path.read_text().splitlines():
            time_ns, *words = line.split("\t")
            yield Event(int(time_ns), path.stem, *words)


def steady_step(events: Sequence[Event]) -> Walk:
    """The step with the median number of calls."""
    markers = [event for event in events if event.kind == "step"][WARM_STEPS:]
    steps = [
        _between(events, before.time_ns, after.time_ns, main=before)
        for before, after in pairwise(markers)
        if not any(event.kind == "save" and before.time_ns < event.time_ns < after.time_ns for event in events)
    ]
    sizes = [sum(map(len, step.calls.values())) for step in steps]
    return steps[sizes.index(statistics.median_low(sizes))]


def one_checkpoint(events: Sequence[Event]) -> Walk:
    """The periodic checkpoint at half of the run."""
    began = next(event for event in events if event.kind == "save")
    ended = next(event for event in events if event.kind == "saved")
    return _between(events, began.time_ns, ended.time_ns)


def one_sample(events: Sequence[Event]) -> Walk:
    """The first batch, up to the start of the second, which is read before the first step."""
    markers = [event for event in events if event.kind == "sample"]
    walk = _between(events, markers[0].time_ns, markers[BATCH_SIZE].time_ns, main=markers[0])
    return Walk({"trainer": walk.calls["trainer"]}, repeats=BATCH_SIZE)


def _between(events: Sequence[Event], start_ns: int, end_ns: int, main: Event | None = None) -> Walk:
    """The calls between two times; of the trainer those of the thread of ``main``, or of all but a feeder thread."""
    step = next(event for event in events if event.kind == "step")
    trainer = step.process
    feeders = {event.thread for event in events if event.kind == "sample"} - {step.thread}
    calls: dict[str, list[Event]] = {"trainer": [], "server": []}
    for event in events:
        if event.kind == "call" and start_ns < event.time_ns < end_ns:
            if event.process != trainer:
                calls["server"].append(event)
            elif event.thread not in feeders if main is None else event.thread == main.thread:
                calls["trainer"].append(event)
    return Walk({name: sequence for name, sequence in calls.items() if sequence})


MEASURES: dict[str, Callable[[Sequence[Event]], Walk]] = {
    "local": steady_step,
    "rpc": steady_step,
    "sample": one_sample,
    "checkpoint": one_checkpoint,
}


def measure(name: str) -> Walk:
    """Run and count one of ``WALKS``."""
    return MEASURES[name](recorded_run(WALKS[name], background=name != "checkpoint"))


def show(name: str, walk: Walk) -> None:
    groups = {name: list(walk.calls)}
    if len(walk.calls) > 1:
        groups |= {f"  {process}": [process] for process in walk.calls}
    for title, processes in groups.items():
        calls, functions, files, changes = walk.row(processes)
        print(f"{title:<16}{calls:>8.4g}{functions:>11}{files:>7}{changes:>9.4g}")


def show_calls(walk: Walk) -> None:
    for process, events in walk.calls.items():
        print(f"\n{process}")
        for event in events[: len(events) // walk.repeats + 1]:
            print(f"  {event.file}:{event.function}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"{', '.join(WALKS)}; default: all")
    parser.add_argument("--list", action="store_true", help="print each call as file:function")
    arguments = parser.parse_args()
    if unknown := set(arguments.walks) - set(WALKS):
        parser.error(f"WALK ({', '.join(sorted(unknown))}) must be one of {', '.join(WALKS)}")
    walks = {name: measure(name) for name in arguments.walks or WALKS}
    print(f"{'':<16}{'calls':>8}{'functions':>11}{'files':>7}{'changes':>9}")
    for name, walk in walks.items():
        show(name, walk)
    if arguments.list:
        for name, walk in walks.items():
            print(f"\n{name}")
            show_calls(walk)


if __name__ == "__main__":
    main()

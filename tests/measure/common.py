"""Shared by the measurement scripts: networks and samples, the environment of a run, fresh processes, figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from paramserver import Task
from paramserver.cluster import child_environment, process_environ
from paramserver.tools.bench.cases import interleaved

T = TypeVar("T")

BATCH_SIZE = 32
SAMPLES = 4096
DEADLINE_S = 900.0

Stamp: TypeAlias = tuple[float, float]
"""A moment: ``time.perf_counter()``, and the CPU seconds that this process has used, all its threads together."""


def now() -> Stamp:
    return time.perf_counter(), time.process_time()


def cnn() -> nn.Sequential:
    """The network of torch's MNIST example and RPC tutorial, 1.2 million parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
        nn.LogSoftmax(1),
    )


def mlp(width: int = 1024) -> nn.Sequential:
    """784-1024-1024-10, 1.9 million parameters: little arithmetic for each byte that is sent."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
        nn.LogSoftmax(1),
    )


def small() -> nn.Sequential:
    """784-64-64-10: a step takes about a millisecond, so many fit into a minute."""
    return mlp(64)


def tiny() -> nn.Sequential:
    """784-6-10, 4,780 parameters: next to no compute, so that a step shows its fixed cost."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 6), nn.ReLU(), nn.Linear(6, 10), nn.LogSoftmax(1))


def digits() -> nn.Sequential:
    """The network of examples/digits."""
    return nn.Sequential(*_digits_task().build_model(), nn.LogSoftmax(1))


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "cnn": cnn,
    "mlp": mlp,
    "small": small,
    "tiny": tiny,
    "digits": digits,
}


def _digits_task() -> Any:
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "digits" / "task.py"))["Digits"]()


def samples_of(model: str) -> Dataset[Any]:
    """What a network is trained on: the digits, or random images."""
    return _digits_task().train_source(None) if model == "digits" else random_images()


def random_images(samples: int = SAMPLES) -> TensorDataset:
    """Pairs of a float32 (1, 28, 28) and a label."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 1, 28, 28, generator=generator)
    return TensorDataset(images, torch.randint(0, 10, (samples,), generator=generator))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.001)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {"sgd": _sgd, "adam": _adam}


def optimizer_of(model: nn.Module, name: str = "sgd") -> torch.optim.Optimizer:
    """One of ``OPTIMIZERS``; SGD has a momentum of 0.9."""
    return OPTIMIZERS[name](model)


def loss_of(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    images, labels = batch
    return F.nll_loss(model(images), labels)


class Measured(Task):
    """Trains one of ``MODELS`` and records when each batch begins, after it was formed.

    Args:
        model: a name among ``MODELS``.
        folder: where each trainer leaves its time stamps; None for nowhere.
        optimizer: a name among ``OPTIMIZERS``.
    """

    def __init__(self, model: str = "cnn", folder: str | None = None, optimizer: str = "sgd") -> None:
        self.model_name = model
        self.folder = folder
        self.optimizer_name = optimizer
        self.stamps: list[Stamp] = []

    def build_model(self) -> nn.Module:
        return MODELS[self.model_name]()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return optimizer_of(model, self.optimizer_name)

    def train_source(self, partition: Any) -> Any:
        return samples_of(self.model_name)

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(model, batch)

    def on_batch_start(self, batch_idx: int) -> None:
        if self.folder is not None:
            self.stamps.append(now())

    def on_train_end(self) -> None:
        if self.folder is not None:
            write_stamps(Path(self.folder), self.trainer.trainer_index, self.stamps)


def measured_config(mode: str, folder: Path, steps: int, trainers: int, task_args: Mapping[str, Any]) -> dict[str, Any]:
    """A run of ``Measured`` in which nothing happens between the first step and the last but training and logging."""
    return {
        "mode": mode,
        "task_args": dict(task_args),
        "cluster": {"num_trainers": trainers},
        "training": {"max_steps": steps, "batch_size": BATCH_SIZE, "validate_every": 0},
        "checkpoint": {"every": 0},
        "logging": {"run_dir": str(folder), "name": "run"},
    }


def write_stamps(folder: Path, trainer_index: int, stamps: Sequence[Stamp]) -> None:
    (folder / f"stamps-{trainer_index}.json").write_text(json.dumps(list(stamps)), encoding="utf-8")


def read_stamps(folder: Path) -> list[list[Stamp]]:
    """The stamps of each trainer."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("stamps-*.json"))]


def read_records(run: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind in a run's metrics.jsonl, in the order written."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def measuring_environment() -> dict[str, str]:
    """One torch thread per process and the package's allocator settings, for every process that is measured.

    Those of ``child_environment`` alone would give our ranks an allocator that a hand-written loop lacks.
    """
    return {**child_environment(process_environ(), num_trainers=1), "OMP_NUM_THREADS": "1"}


def run_fresh(
    commands: Sequence[Sequence[str]], environ: Mapping[str, str], timeout_s: float = DEADLINE_S
) -> list[str]:
    """Run fresh interpreters at the same time and return what each printed.

    Raises:
        RuntimeError: one failed, or took longer than ``timeout_s``.
    """
    processes = [_start([sys.executable, *arguments], environ) for arguments in commands]
    try:
        return [_finish(process, timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )


def _finish(process: subprocess.Popen[str], timeout_s: float) -> str:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{process.args!r} must end within {timeout_s:g} s; measure less") from error
    if process.returncode != 0:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}:\n{output}")
    return output


def parser_of(description: str | None, **numbers: float) -> argparse.ArgumentParser:
    """The parser of a script: ``description`` is its docstring; an argument for each number, with this default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser


def measuring_parser(description: str | None, cases: Sequence[str]) -> argparse.ArgumentParser:
    """The arguments of scripts that time the steps of several cases, each in fresh processes of the script."""
    parser = parser_of(description, steps=200, warm=40, repeats=7)
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--child", choices=cases, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, of which at least two steps are left to be timed."""
    arguments = parser.parse_args()
    if arguments.child is None and arguments.steps < arguments.warm + 2:
        parser.error(f"--steps ({arguments.steps}) must be at least --warm ({arguments.warm}) + 2; raise it")
    return arguments


def measured_in_turn(
    cases: Sequence[str], repeats: int, measure: Callable[[str], T], form: str = ""
) -> dict[str, list[T]]:
    """What ``measure`` gives for each case in each repeat, one case after the other."""
    found: dict[str, list[T]] = {case: [] for case in cases}
    for repeat, case in interleaved(cases, repeats):
        found[case].append(measure(case))
        print(f"  {repeat + 1}/{repeats} {case}: {found[case][-1]:{form}}", file=sys.stderr)
    return found


def origin() -> str:
    """The command, the machine and the versions that figures are of."""
    words = [sys.orig_argv[0].rsplit("/", 1)[-1], *sys.orig_argv[1:]]
    cores = len(os.sched_getaffinity(0))
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{' '.join(words)}\n{platform.machine()}, {cores} cores, {versions}"


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median, least and greatest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"

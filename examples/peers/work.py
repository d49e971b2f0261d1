"""Shared by the programs here: the network, the samples in their order, the loss, and the clock of the steps."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler

from paramserver import Task

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))  # the networks are those of the measuring scripts, which are modules of the checkout

from tests.measure.common import BATCH_SIZE, MODELS, Measured  # noqa: E402

SEED = 0
TIMEOUT_S = 120.0
LOOPBACK = "lo"
NAMES = tuple(MODELS)


def make_task(name: str) -> Task:
    """The task of ``examples/digits``, or one on random images with a network of ``tests/measure/common.py``."""
    if name == "digits":
        made: Task = runpy.run_path(str(HERE.parent / "digits" / "task.py"))["Digits"]()
        return made
    return Measured(name)


def make_network(task: Task) -> nn.Module:
    """The network of a task, with the same weights in every process and program."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return task.build_model()


def make_samples(task: Task, count: int) -> Dataset[Any]:
    """At least ``count`` samples, so that no program reaches the end of a pass, where their behaviour differs."""
    once: Any = task.train_source(None)  # type: ignore[arg-type]
    return ConcatDataset([once] * -(-count // len(once)))


def make_batches(task: Task, trainer: int, trainers: int, steps: int) -> DataLoader[Any]:
    """The batches of one trainer: the same that this package partitions to it with the same seed."""
    data = make_samples(task, steps * trainers * BATCH_SIZE)
    order: Any = DistributedSampler(data, trainers, trainer, shuffle=True, seed=SEED)
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=order)


class Clock:
    """Records the steps of one trainer: the time of its batch, the number of samples, and the loss."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int, Tensor]] = []

    def loss(self, task: Task, model: nn.Module, batch: Any, step: int) -> Tensor:
        """The loss of a batch, as every program computes it."""
        began = time.perf_counter()
        loss = task.training_step(model, batch, step)
        self.steps.append((began, len(batch[0]), loss.detach()))
        return loss

    def rows(self) -> list[tuple[float, int, float]]:
        """Seconds, samples and loss of each step."""
        return [(began, samples, loss.item()) for began, samples, loss in self.steps]

    def write(self, folder: Path, trainer: int) -> None:
        write_rows(folder, trainer, self.rows())


def write_rows(folder: Path, trainer: int, rows: list[tuple[float, int, float]]) -> None:
    (folder / f"steps-{trainer}.json").write_text(json.dumps(rows), encoding="utf-8")


def read_rows(folder: Path, trainers: int) -> list[list[tuple[float, int, float]]]:
    """The recorded steps of each trainer."""
    texts = [(folder / f"steps-{i}.json").read_text(encoding="utf-8") for i in range(trainers)]
    return [[(row[0], row[1], row[2]) for row in json.loads(text)] for text in texts]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments of each program that trains."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=NAMES, default="digits")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int, default=29500, help="of the rendezvous, if it is not in the folder")
    parser.add_argument("--folder", type=Path, required=True, help="an empty one, for the steps of each trainer")
    return parser

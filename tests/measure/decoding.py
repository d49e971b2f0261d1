"""How fast trainers train on a data set whose samples take long to read, with and without worker processes.

    python -m tests.measure.decoding [--mode rpc] [--trainers 2] [--workers 0 4] [--milliseconds 10] [--repeats 3]

Each ``__getitem__`` waits for ``--milliseconds``, as reading from a network does.
Prints samples/s of all trainers together, from the first step after ``--warm`` to the last.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from torch.utils.data import Dataset

from tests.measure.common import (
    BATCH_SIZE,
    Measured,
    measured_config,
    measuring_environment,
    origin,
    random_images,
    read_stamps,
    run_fresh,
    spread,
    verdict,
)

AIM = 700.0
"""Samples/s of two trainers with four workers each, of 10 ms a sample."""


class Decoded(Dataset[Any]):
    """Images that take ``seconds`` each."""

    def __init__(self, images: Dataset[Any], seconds: float) -> None:
        self.images = images
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.images)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.images[index]


class Decodes(Measured):
    """``Measured`` on a data set that takes ``seconds`` per sample."""

    def __init__(self, seconds: float, folder: str) -> None:
        super().__init__("small", folder)
        self.seconds = seconds

    def train_source(self, partition: Any) -> Any:
        return Decoded(random_images(), self.seconds)


def samples_per_s(mode: str, trainers: int, workers: int, seconds: float, steps: int, warm: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = measured_config(mode, folder, steps, trainers, {"seconds": seconds, "folder": name})
        config["task"] = "tests.measure.decoding:Decodes"
        config["training"]["loader_workers"] = workers
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        run_fresh([["-m", "paramserver.launch", "--config", str(file)]], measuring_environment())
        stamps = read_stamps(folder)
    began, ended = (statistics.mean(of[at][0] for of in stamps) for at in (warm, -1))
    return len(stamps) * (steps - 1 - warm) * BATCH_SIZE / (ended - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="rpc")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--milliseconds", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--warm", type=int, default=40, help="steps; what workers have read ahead is used up by then")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(origin())
    for workers in args.workers:
        case = (args.mode, args.trainers, workers, args.milliseconds / 1000, args.steps, args.warm)
        rates = [samples_per_s(*case) for _ in range(args.repeats)]
        line = f"{args.trainers} trainers, {workers} workers each: {spread(rates, '.0f')} samples/s"
        if (args.trainers, workers, args.milliseconds) == (2, 4, 10.0):
            line += f", at least {AIM:g}: {verdict(statistics.median(rates) >= AIM)}"
        print(line, flush=True)


if __name__ == "__main__":
    main()

"""The pause of a checkpoint, compared with one memory copy of the same bytes, and the speed while it is written.

    python -m tests.measure.checkpoint_pause [--modes local ddp rpc] [--kind fifo] [--repeats 7] [--every 150]

A model of 10 million parameters (SGD with momentum) and buffers whose samples a checkpoint must hold: 400 MB in
``local``, 200 MB in each of two trainers otherwise; one torch thread per process. Just before each checkpoint every
trainer copies tensors of its buffer's, the model's and the optimizer's sizes: into memory that was touched before, and
into fresh memory (``Tensor.clone``). The pause is what the run records. The first checkpoint is copied into fresh
memory, so a clone is the fair comparison; the later ones use that memory again, so it is the copy into touched memory.
The other is printed next to it; of several trainers the slowest copy counts. Steps per second are counted from the end
of the pause to the end of the writing, and from there to the next checkpoint.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from paramserver import Task
from tests.measure.common import measuring_environment, parser_of, read_records, run_fresh, spread, verdict

WIDTH = 1024
SAMPLE_BYTES = 4 * WIDTH
AIM = 1.5
TRAINERS = {"local": 1, "ddp": 2, "rpc": 2}
BUFFER_BYTES = {"local": 400 * 10**6, "ddp": 200 * 10**6, "rpc": 200 * 10**6}


class Large(Task):
    """Samples that only the buffer has, a large model, and a copy of as many bytes just before each checkpoint.

    Args:
        samples: all that there are; the buffer holds them and serves them again and again.
        every: steps between two checkpoints.
        folder: where each trainer leaves what it measured.
    """

    def __init__(self, samples: int, every: int, folder: str) -> None:
        self.samples, self.every, self.folder = samples, every, folder
        self.began: list[float] = []
        self.copies: list[tuple[float, float]] = []

    def build_model(self) -> nn.Module:
        layers = [nn.Linear(WIDTH, 4096), nn.ReLU(), nn.Linear(4096, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1536)]
        return nn.Sequential(*layers)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def train_source(self, partition: Any) -> Any:
        return (torch.full((WIDTH,), index / self.samples) for index in range(self.samples))

    def on_train_start(self) -> None:
        sizes = [p.numel() for p in self.trainer.unwrapped_model.parameters()]
        self.sources = [torch.ones(n) for n in (self.samples * WIDTH, *sizes, *sizes)]
        self.targets = [torch.ones_like(source) for source in self.sources]

    def on_batch_start(self, batch_idx: int) -> None:
        self.began.append(time.time())
        if (batch_idx + 1) % self.every == 0:
            self.copies.append((self._touched_s(), self._fresh_s()))

    def _touched_s(self) -> float:
        started = time.perf_counter()
        for source, target in zip(self.sources, self.targets, strict=True):
            target.copy_(source)
        return time.perf_counter() - started

    def _fresh_s(self) -> float:
        started = time.perf_counter()
        kept = [source.clone() for source in self.sources]
        elapsed_s = time.perf_counter() - started
        assert len(kept) == len(self.sources)
        return elapsed_s

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(model(batch), batch.new_zeros(len(batch), 1536))

    def on_train_end(self) -> None:
        file = Path(self.folder) / f"copies-{self.trainer.trainer_index}.json"
        file.write_text(json.dumps({"began": self.began, "copies": self.copies}), encoding="utf-8")


@dataclass(frozen=True)
class Saved:
    """One checkpoint: seconds of its pause and of both copies (of the slowest trainer), bytes, (steps, seconds)."""

    pause_s: float
    touched_s: float
    fresh_s: float
    bytes: int
    writing_s: float
    while_writing: tuple[int, float]
    otherwise: tuple[int, float]


def measure(mode: str, kind: str, repeats: int, every: int) -> list[Saved]:
    samples = BUFFER_BYTES[mode] // SAMPLE_BYTES
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "task": "tests.measure.checkpoint_pause:Large",
            "task_args": {"samples": samples, "every": every, "folder": folder},
            "mode": mode,
            "cluster": {"num_trainers": TRAINERS[mode]},
            "training": {"max_steps": every * (repeats + 1) + every // 2, "batch_size": 8, "validate_every": 0},
            "buffer": {"kind": kind, "capacity": samples, "watermark": samples, "pseudo_epochs": 10**6},
            "checkpoint": {"every": every, "keep": 1},
            "logging": {"run_dir": folder, "name": "run", "tensorboard": False, "log_every": 100},
        }
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        run_fresh([["-m", "paramserver.launch", "--config", str(file)]], measuring_environment())
        records = {r["step"]: r for r in read_records(Path(folder) / "run", "checkpoint") if r["reason"] == "periodic"}
        files = sorted(Path(folder).glob("copies-*.json"))
        trainers = [json.loads(one.read_text(encoding="utf-8")) for one in files]
    missing = {every * (i + 1) for i in range(repeats + 1)} - set(records)
    if missing:
        raise RuntimeError(f"checkpoints of steps {sorted(missing)} gave way to newer ones; raise --every")
    return [_saved(records[step], trainers, every) for step in sorted(records)]


def _saved(record: dict[str, Any], trainers: list[dict[str, Any]], every: int) -> Saved:
    step, began = record["step"], trainers[0]["began"]
    touched, fresh = zip(*(one["copies"][step // every - 1] for one in trainers), strict=True)
    until = min(step + every, len(began)) - 1  # the batch that begins with the next copies
    written = sum(moment < record["time"] for moment in began[step:until])
    moments = [began[place] for place in (step, step + written, until)]
    while_writing, otherwise = (written, moments[1] - moments[0]), (until - step - written, moments[2] - moments[1])
    pause_s, writing_s = record["pause_ms"] / 1e3, record["time"] - began[step]
    return Saved(pause_s, max(touched), max(fresh), record["bytes"], writing_s, while_writing, otherwise)


def rate(spans: list[tuple[int, float]]) -> float:
    """Steps per second of several spans together."""
    return sum(steps for steps, _ in spans) / max(sum(seconds for _, seconds in spans), 1e-9)


def report(mode: str, saved: list[Saved]) -> None:
    first, later = saved[0], saved[1:]

    def line(what: str, values: list[float], form: str = ".1f", more: str = "") -> None:
        print(f"  {what:34s} {spread(values, form)}{more}", flush=True)

    print(
        f"{mode}: {TRAINERS[mode]} x {BUFFER_BYTES[mode] / 1e6:.0f} MB of samples, {saved[0].bytes / 1e6:.0f} MB in all"
    )
    ratio = first.pause_s / first.fresh_s
    against = f"clone {first.fresh_s * 1e3:.1f}, touched {first.touched_s * 1e3:.1f}"
    print(f"  first pause {first.pause_s * 1e3:.1f} ms, {against}; pause / clone {ratio:.2f}: {verdict(ratio <= AIM)}")
    line("pause, ms", [one.pause_s * 1e3 for one in later])
    line("copy into touched memory, ms", [one.touched_s * 1e3 for one in later])
    line("copy into fresh memory (clone), ms", [one.fresh_s * 1e3 for one in later])
    ratios = [one.pause_s / one.touched_s for one in later]
    line("pause / touched copy", ratios, ".2f", f", at most {AIM:g}: {verdict(statistics.median(ratios) <= AIM)}")
    line("pause / clone", [one.pause_s / one.fresh_s for one in later], ".2f")
    line("from the pause to the end, s", [one.writing_s for one in saved], ".2f")
    rates = rate([one.while_writing for one in saved]), rate([one.otherwise for one in saved])
    print(f"  steps per second while writing {rates[0]:.1f}, otherwise {rates[1]:.1f}", flush=True)


def main() -> None:
    parser = parser_of(__doc__, repeats=7, every=150)
    parser.add_argument("--modes", nargs="+", choices=list(TRAINERS), default=list(TRAINERS))
    parser.add_argument("--kind", choices=["fifo", "firo"], default="fifo")
    arguments = parser.parse_args()
    for mode in arguments.modes:
        report(mode, measure(mode, arguments.kind, arguments.repeats, arguments.every))


if __name__ == "__main__":
    main()

"""The recorded steps of a trainer: written by the trainer's process, read by the benchmark."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paramserver.errors import TrainingError
from paramserver.metrics.records import PHASES

COLUMNS = (*PHASES, "hidden")


@dataclass(frozen=True)
class StepStamp:
    """A step of a trainer.

    ``end`` is ``time.perf_counter()``, the kernel's monotonic clock, which all processes of a host share; ``phases``
    are the seconds of each of ``COLUMNS``.
    """

    end: float
    seconds: float
    samples: int
    wire_bytes: int
    phases: tuple[float, ...]

    @property
    def begin(self) -> float:
        return self.end - self.seconds


@dataclass
class StepStamps:
    """The steps of one trainer; ``model_bytes`` is the size of the parameters that it trains."""

    trainer_index: int
    pid: int
    model_bytes: int = 0
    steps: list[StepStamp] = field(default_factory=list)

    def add(self, end: float, seconds: float, samples: int, wire_bytes: int, phases: Mapping[str, float]) -> None:
        self.steps.append(StepStamp(end, seconds, samples, wire_bytes, tuple(phases[name] for name in COLUMNS)))

    def write(self, folder: Path) -> None:
        # Once, at the end of the training: a write in each step would be part of what is measured.
        rows = [[s.end, s.seconds, s.samples, s.wire_bytes, *s.phases] for s in self.steps]
        about = {"trainer": self.trainer_index, "pid": self.pid, "model_bytes": self.model_bytes, "steps": rows}
        (folder / f"steps-{self.trainer_index}.json").write_text(json.dumps(about), encoding="utf-8")


def register_process(folder: Path) -> None:
    """Register this process as part of the run in ``folder``."""
    (folder / f"process-{os.getpid()}").touch()


def registered_pids(folder: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in folder.glob("process-*")]


def read_stamps(folder: Path, trainers: int) -> list[StepStamps]:
    """The steps that the trainers of a run wrote to ``folder``.

    Raises:
        TrainingError: one wrote none.
    """
    return [_read(folder / f"steps-{i}.json", i) for i in range(trainers)]


def _read(path: Path, trainer_index: int) -> StepStamps:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainingError(f"trainer {trainer_index} left no record of its steps, though its run ended well") from None
    steps = [StepStamp(row[0], row[1], row[2], row[3], tuple(row[4:])) for row in about["steps"]]
    return StepStamps(about["trainer"], about["pid"], about["model_bytes"], steps)


def server_pids(folder: Path, trainers: Sequence[StepStamps]) -> list[int]:
    """The registered processes that are not trainers."""
    return sorted(set(registered_pids(folder)) - {one.pid for one in trainers})

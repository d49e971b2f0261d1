"""Compares the throughput of a benchmark with a clock outside of the run: samples reported by the task over a pipe.

    python -m tests.measure.outside_clock [--model mlp] [--seconds 5] [--trainers 2] [--repeats 3]

The task writes the time and the number of samples of each batch to a pipe, which this process reads. From ``--warm``
seconds after the first line to the last line, samples over seconds is the outside throughput. The record's own must be
within 3 %, and the phases of a step must sum to its mean within 5 %.
"""

from __future__ import annotations

import os
import selectors
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn

from paramserver.cluster import child_environment, process_environ
from paramserver.metrics.records import PHASES
from paramserver.tools.bench.cases import Case, RequestedCases, interleaved, make_cases
from paramserver.tools.bench.measure import MeasuringMethod, measure
from paramserver.tools.report.results import CaseResult
from tests.measure.common import BATCH_SIZE, MODELS, Measured, origin, parser_of, spread, verdict

AGREES = 0.03
SUMS = 0.05
ROOT = Path(__file__).resolve().parents[2]


class Reporting(Measured):
    """Writes the samples of each batch into a pipe.

    Args:
        pipe: its name.
        model: a name among ``MODELS``.
    """

    def __init__(self, pipe: str, model: str = "small") -> None:
        super().__init__(model)
        self.pipe = pipe

    def on_train_start(self) -> None:
        self.out = os.open(self.pipe, os.O_WRONLY)

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor:
        # The time is that of the kernel's monotonic clock, which all processes of a host share.
        os.write(self.out, f"{time.perf_counter()} {len(batch[0])}\n".encode())
        return super().training_step(model, batch, batch_idx)

    def on_train_end(self) -> None:
        os.close(self.out)
        super().on_train_end()


class Listener:
    """Reads the pipe in a thread. A context manager.

    Args:
        pipe: made here.

    Attributes:
        received: time and number of samples of each batch.
    """

    def __init__(self, pipe: Path) -> None:
        os.mkfifo(pipe)
        # Open for writing too, so that no writer has to wait, and the last one that leaves ends nothing.
        self._file = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="outside-clock")
        self.received: list[tuple[float, int]] = []

    def _listen(self) -> None:
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._file, selectors.EVENT_READ)
            while True:
                ended = self._ended.is_set()  # before the last look: what was written until then is read
                if not selector.select(0 if ended else 0.1):
                    if ended:
                        return
                    continue
                *lines, rest = (rest + os.read(self._file, 1 << 16)).split(b"\n")
                self.received += [(float(moment), int(count)) for moment, count in map(bytes.split, lines)]

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        os.close(self._file)

    def rate(self, warm_s: float) -> float:
        """Samples per second, from ``warm_s`` after the first batch to the last."""
        begin, end = self.received[0][0] + warm_s, self.received[-1][0]
        return sum(count for moment, count in self.received if begin < moment <= end) / (end - begin)

    def samples_within(self, seconds: float) -> tuple[int, int]:
        """The least and the most samples of any window of this length between the first batch and the last."""
        received = sorted(self.received)
        begins = [moment for moment, _ in received if moment + seconds <= received[-1][0]]
        windows = [sum(n for moment, n in received if begin <= moment < begin + seconds) for begin in begins]
        return min(windows), max(windows)


def config_of(pipe: Path, model: str, trainers: int) -> dict[str, Any]:
    return {
        "task": "tests.measure.outside_clock:Reporting",
        "task_args": {"pipe": str(pipe), "model": model},
        "cluster": {"num_trainers": trainers},
        "training": {"max_steps": 1, "batch_size": BATCH_SIZE},
    }


def method_of(folder: Path, seconds: float, warm_s: float, folders: Sequence[Path] = (ROOT,)) -> MeasuringMethod:
    environ = {**child_environment(process_environ(), num_trainers=1, folders=folders), "OMP_NUM_THREADS": "1"}
    return MeasuringMethod(out=folder, folders=folders, environ=environ, seconds=seconds, warm_s=warm_s)


def heard_and_recorded(case: Case, repeat: int, method: MeasuringMethod, pipe: Path) -> tuple[Listener, CaseResult]:
    """What the task reported, and the record of the same run."""
    pipe.unlink(missing_ok=True)
    with Listener(pipe) as listener:
        record = measure(case, repeat, method)
    if not record.is_completed:
        raise RuntimeError(record.error)
    return listener, record


def phase_share(record: CaseResult) -> float:
    """What the phases sum to, in mean steps."""
    return sum(record.phases_ms[name] or 0.0 for name in PHASES) / (record.step_ms["mean"] or 1.0)


def main() -> None:
    parser = parser_of(__doc__, trainers=2, seconds=5.0, warm=1.0, repeats=3)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    arguments = parser.parse_args()
    print(origin())
    with tempfile.TemporaryDirectory() as folder:
        pipe, file = Path(folder) / "pipe", Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(config_of(pipe, arguments.model, arguments.trainers)), encoding="utf-8")
        cases = make_cases(RequestedCases(file))
        method = method_of(Path(folder) / "out", arguments.seconds, arguments.warm)
        ratios: dict[str, list[float]] = {case.name: [] for case in cases}
        shares: dict[str, list[float]] = {case.name: [] for case in cases}
        for repeat, case in interleaved(cases, arguments.repeats):
            listener, record = heard_and_recorded(case, repeat, method, pipe)
            outside = listener.rate(method.warm_s)
            ratios[case.name].append((record.samples_per_second or 0.0) / outside)
            shares[case.name].append(phase_share(record))
            print(f"  {repeat + 1}/{arguments.repeats} {case.name}: {outside:.0f} samples/s outside", file=sys.stderr)
    print(f"\n{'':30s}{'record / outside clock':34s}phases / step")
    for name, found in ratios.items():
        agrees = verdict(max(abs(ratio - 1) for ratio in found) <= AGREES)
        sums = verdict(abs(statistics.median(shares[name]) - 1) <= SUMS)
        print(f"{name:30s}{spread(found, '.3f')} {agrees:8s} {spread(shares[name], '.3f')} {sums}")


if __name__ == "__main__":
    main()

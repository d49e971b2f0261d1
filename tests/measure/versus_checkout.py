"""Compares this checkout with another one of the project: the same runs, in turns, from the command line only.

    git worktree add /tmp/other COMMIT
    python -m tests.measure.versus_checkout --other /tmp/other --repeats 7

Each case is a run of random images through a small CNN or an MLP, once with each checkout, in alternating order. The
first figure is the median step of the slower trainer, the second the time from the command to the first step, the third
the CPU time of all processes of the run, which depends least on what else the machine does. All are ratios of this
checkout to the other one in the same repeat: above 1 this one is slower. A checkout is found through
``PYTHONPATH``; both use this interpreter.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from tests.measure.common import measuring_environment, origin, parser_of, spread

ROOT = Path(__file__).resolve().parents[2]
TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from paramserver import Task


class Images(Task):
    def __init__(self, model="cnn", adam=False):
        self.kind, self.adam = model, adam

    def build_model(self):
        if self.kind == "mlp":
            return nn.Sequential(nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
                                 nn.Linear(1024, 10))
        return nn.Sequential(nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 13 * 13, 10))

    def build_optimizer(self, model):
        if self.adam:
            return torch.optim.Adam(model.parameters(), lr=0.001)
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_source(self, partition):
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(4096, 1, 28, 28, generator=generator),
                             torch.randint(10, (4096,), generator=generator))

    def training_step(self, model, batch, batch_idx):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
CASES = {
    f"{mode} {name}": {"mode": mode, "task_args": arguments}
    for name, arguments in (("cnn", {}), ("mlp", {"model": "mlp"}), ("mlp-adam", {"model": "mlp", "adam": True}))
    for mode in ("local", "ddp", "rpc")
}
DEFAULT_CASES = [case for case in CASES if not case.endswith("adam")]


def run(checkout: Path, folder: Path, case: str, steps: int) -> tuple[float, float, float]:
    """Return milliseconds of the median step, seconds from the command to the first step, and CPU seconds of all."""
    (folder / "task.py").write_text(TASK)
    config = {
        "task": "task.py:Images",
        "training": {"max_steps": steps, "batch_size": 32, "validate_every": 0},
        "checkpoint": {"every": 0},
        "cluster": {"num_trainers": 1 if case.startswith("local") else 2},
        "logging": {"run_dir": str(folder / "runs"), "name": "run", "tensorboard": False, "progress": "off"},
        **CASES[case],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    environ = {**measuring_environment(), "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "paramserver.launch", "--config", str(folder / "config.yaml")]
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True, timeout=300)
    cpu_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
    run_dir = folder / "runs" / "run"
    summary = json.loads((run_dir / "summary.json").read_text())
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    starts = [sum(record["phases"].values()) for record in records if record["kind"] == "phase"]
    return summary["step_ms"]["p50"], max(starts), cpu_s


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--other", type=Path, required=True, help="folder of the other checkout")
    parser.add_argument("--repeats", type=int, default=7, help="of each case with each checkout (default 7)")
    parser.add_argument("--steps", type=int, default=300, help="of each run (default 300)")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=DEFAULT_CASES, metavar="CASE", help=", ".join(CASES)
    )
    arguments = parser.parse_args()
    figures: dict[tuple[str, Path], list[tuple[float, float, float]]] = {}
    for repeat in range(arguments.repeats):
        order = (ROOT, arguments.other) if repeat % 2 else (arguments.other, ROOT)
        for case in arguments.cases:
            for checkout in order:
                with tempfile.TemporaryDirectory() as folder:
                    measured = run(checkout, Path(folder), case, arguments.steps)
                figures.setdefault((case, checkout), []).append(measured)
    print(origin())
    for case in arguments.cases:
        pairs = list(zip(figures[case, ROOT], figures[case, arguments.other], strict=True))
        steps, starts, cpu = ([this[i] / other[i] for this, other in pairs] for i in (0, 1, 2))
        milliseconds = spread([this[0] for this, _ in pairs])
        print(
            f"{case:<10} step {spread(steps)} of the other ({milliseconds} ms), first step {spread(starts)}, ", end=""
        )
        print(f"CPU {spread(cpu, '.3f')}")


if __name__ == "__main__":
    main()

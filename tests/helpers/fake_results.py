"""Records of benchmarks that never ran, whose figures are chosen."""

import math
import random

from paramserver.metrics.records import DurationHistogram
from paramserver.tools.report.results import CaseResult

ENVIRONMENT = {
    "versions": {"python": "3.11.9", "paramserver": "0.1.0", "torch": "2.13.0"},
    "host": "green",
    "cores": 8,
    "commit": "0123456789abcdef",
    "config": "task: digits.py:Digits\ntraining:\n  batch_size: 32\n",
    "command": ["python", "-m", "paramserver.benchmark", "--config", "a & b.yaml"],
}
SHARES = {"data": 0.05, "wait": 0.05, "pull": 0.1, "forward": 0.3, "backward": 0.35, "push": 0.1, "apply": 0.05}


def result(case="rpc, 2 trainers", repeat=0, speed=1000.0, **fields):
    """A completed record with ``speed`` samples/s; ``fields`` take the place of what follows from that."""
    trainers = fields.get("trainers", 2)
    step_ms = 32 * trainers / speed * 1e3 if speed else 0.0
    histogram = DurationHistogram()
    generator = random.Random(f"{case}{repeat}")
    for _ in range(200):
        histogram.add(generator.lognormvariate(math.log(step_ms / 1e3 or 1e-3), 0.2))
    base = {
        "mode": "rpc",
        "trainers": trainers,
        "servers": 1,
        "status": "completed",
        "started": 1.7e9 + repeat,
        "wall_s": 9.0,
        "seconds": 5.0,
        "steps": int(5 * speed / 32 / trainers),
        "samples": int(5 * speed),
        "samples_per_second": speed,
        "per_trainer": (speed / trainers,) * trainers,
        "per_process": speed / (trainers + 1),
        "step_ms": histogram.summary_ms(),
        "step_bins": histogram.bins,
        "phases_ms": {**{name: share * step_ms for name, share in SHARES.items()}, "hidden": 0.1 * step_ms},
        "wire_bytes_per_step": 4.8e6,
        "cpu_s": {"servers": 1.5, "trainers": 8.0},
        "peak_rss_mb": {"server": 300.0, "trainer": 350.0},
        "loss": tuple((speed * s, float(s), 2.0 * math.exp(-speed * s / 5e3) + 0.1) for s in range(1, 6)),
        "validation": tuple((speed * s, float(s), {"accuracy": 1 - math.exp(-speed * s / 3e3)}) for s in (2, 4)),
        "environment": ENVIRONMENT,
    }
    return CaseResult(case=case, repeat=repeat, **{**base, **fields})


def failed(case, repeat=0, error="TaskError: no data", **fields):
    plain = {"mode": "rpc", "trainers": 2, "servers": 1, "environment": ENVIRONMENT, **fields}
    return CaseResult(case=case, repeat=repeat, status="failed", error=error, **plain)


def repeats(case, speeds, **fields):
    """One record for each speed."""
    return [result(case, repeat, speed, **fields) for repeat, speed in enumerate(speeds)]


def stale(*histograms):
    """The staleness of a record whose trainers have these histograms."""
    total = {}
    for histogram in histograms:
        for value, count in histogram.items():
            total[value] = total.get(value, 0) + count
    return {
        **_figures(total),
        "dropped": 0,
        "trainers": [{"trainer": i, **_figures(histogram)} for i, histogram in enumerate(histograms)],
    }


def _figures(histogram):
    count = sum(histogram.values())
    mean = sum(value * n for value, n in histogram.items()) / count
    return {
        "mean": mean,
        "p95": max(histogram),
        "max": max(histogram),
        "histogram": {str(k): v for k, v in histogram.items()},
    }

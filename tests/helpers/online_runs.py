"""Runs of tests that are fed by simulations: their config, and the accounts of their samples."""

import json
import time
from itertools import product
from threading import Event

from launching import TASKS
from simulations import SHAPE

from paramserver.distributed.timeouts import poll_until

STREAMS = TASKS.with_name("stream_tasks.py")
SIMULATIONS = TASKS.with_name("simulations.py")
COUNT, STEPS = 4, 20
ALL = sorted(product(range(COUNT), range(STEPS)))
"""Simulation and step of all samples."""


def online_config(folder, task=f"{STREAMS}:Fed", task_args=None, simulations=None, training=None, **sections):
    """Of a run whose samples are served exactly as they came, to the ledger in ``folder``."""
    ledger = folder / "ledger"
    ledger.mkdir(parents=True, exist_ok=True)
    trainers = 1 if sections.get("mode") == "local" else 2
    return {
        "task": task,
        "task_args": {"ledger": str(ledger), **(task_args or {})},
        "simulations": {
            "function": f"{SIMULATIONS}:simulate",
            "count": COUNT,
            "at_once": 3,
            "steps": STEPS,
            "fields": {"u": {"shape": list(SHAPE), "finite": True}},
            "parameters": {"a": [0.0, 1.0], "b": [2.0, 3.0]},
            "timeout_s": 20.0,
            **(simulations or {}),
        },
        "training": {"max_steps": None, "batch_size": 4, "uneven_inputs": "join", **(training or {})},
        "cluster": {"num_trainers": trainers, "timeout_s": 30, **sections.pop("cluster", {})},
        **sections,
    }


def streams(finished, name="received"):
    """A figure of the streams, of all trainers."""
    return sum(trainer["stream"][name] for trainer in finished.summary["trainers"])


def ages(folder):
    """[simulation, step, version, step of the model] of every sample that ``FedWithVersions`` was served."""
    lines = [line for file in (folder / "ages").iterdir() for line in file.read_text().splitlines()]
    return list(map(json.loads, lines))


def wait_for(condition, timeout_s=30):
    assert poll_until(time.monotonic() + timeout_s, lambda: condition() or None, Event()), "it did not come"

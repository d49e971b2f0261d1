"""A synchronous parameter server of Ray actors, after the pattern in Ray's documentation; one process starts all.

A server actor holds the network and the optimizer. In each step every worker actor gets the weights and computes the
gradients of its own batch; the server applies their mean and returns the new weights, which are passed on in Ray's
object store.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from work import HERE, TIMEOUT_S, Clock, make_batches, make_network, make_parser, make_task, write_rows

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before ray is imported, which reads it
import ray

STORE_BYTES = 512 * 2**20
AHEAD = 10  # steps that are submitted before the driver waits

Weights = dict[str, torch.Tensor]
Gradients = list[np.ndarray]  # type: ignore[type-arg]


@ray.remote(num_cpus=1)
class Server:
    """Holds the weights."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        task = make_task(model)
        self.network = make_network(task)
        self.optimizer = task.build_optimizer(self.network)

    def apply_gradients(self, *gradients: Gradients) -> Weights:
        for parameter, *parts in zip(self.network.parameters(), *gradients, strict=True):
            parameter.grad = torch.from_numpy(np.stack(parts).mean(axis=0))
        self.optimizer.step()
        return self.get_weights()

    def get_weights(self) -> Weights:
        return self.network.state_dict()


@ray.remote(num_cpus=1)
class Worker:
    """Computes gradients, of a batch at a time."""

    def __init__(self, model: str, trainer: int, trainers: int, steps: int) -> None:
        torch.set_num_threads(1)
        self.task, self.clock = make_task(model), Clock()
        self.network = make_network(self.task)
        self.batches: Iterator[Any] = iter(make_batches(self.task, trainer, trainers, steps))

    def compute_gradients(self, weights: Weights) -> Gradients:
        self.network.load_state_dict(weights)
        loss = self.clock.loss(self.task, self.network, next(self.batches), len(self.clock.steps))
        self.network.zero_grad()
        loss.backward()
        return [parameter.grad.numpy() for parameter in self.network.parameters() if parameter.grad is not None]

    def rows(self) -> list[tuple[float, int, float]]:
        return self.clock.rows()


def train(model: str, trainers: int, steps: int) -> list[list[tuple[float, int, float]]]:
    """The steps of each worker."""
    server = Server.remote(model)
    workers = [Worker.remote(model, i, trainers, steps) for i in range(trainers)]
    weights = server.get_weights.remote()
    for step in range(1, steps + 1):
        weights = server.apply_gradients.remote(*(worker.compute_gradients.remote(weights) for worker in workers))
        if step % AHEAD == 0 and not ray.wait([weights], timeout=TIMEOUT_S, fetch_local=False)[0]:
            raise TimeoutError(f"step {step} was not done within {TIMEOUT_S:g} s")
    rows: list[list[tuple[float, int, float]]] = ray.get(
        [worker.rows.remote() for worker in workers], timeout=TIMEOUT_S
    )
    return rows


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(
                address="local",
                num_cpus=1 + arguments.trainers,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
            )
            for trainer, rows in enumerate(train(arguments.model, arguments.trainers, arguments.steps)):
                write_rows(arguments.folder, trainer, rows)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()

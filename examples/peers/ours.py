"""This package: ``python examples/peers/ours.py --mode rpc --folder DIR`` starts all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from work import BATCH_SIZE, Clock, make_network, make_parser, make_samples, make_task

import paramserver
from paramserver import Task
from tests.measure.common import measured_config


class Timed(Task):
    """One of the tasks that are compared, with a clock.

    Args:
        model: its name.
        steps: the number of batches of each trainer.
        folder: to which the steps are written.
    """

    def __init__(self, model: str, steps: int, folder: str) -> None:
        self.steps, self.folder = steps, Path(folder)
        self.task, self.clock = make_task(model), Clock()

    def build_model(self) -> nn.Module:
        return make_network(self.task)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.task.build_optimizer(model)
        return optimizer

    def train_source(self, partition: Any) -> Any:
        return make_samples(self.task, self.steps * partition.count * BATCH_SIZE)

    def training_step(self, model: nn.Module, batch: Any, batch_idx: int) -> Tensor:
        return self.clock.loss(self.task, model, batch, batch_idx)

    def on_train_end(self) -> None:
        self.clock.write(self.folder, self.trainer.trainer_index)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--mode", choices=("rpc", "ddp"), default="rpc")
    arguments = parser.parse_args()
    task_args = {"model": arguments.model, "steps": arguments.steps, "folder": str(arguments.folder.resolve())}
    paramserver.run(
        Timed, measured_config(arguments.mode, arguments.folder, arguments.steps, arguments.trainers, task_args)
    )


if __name__ == "__main__":
    main()

"""Lightning with its DDP strategy on gloo and CPUs, without logger, checkpoints and progress bar; a process a rank."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from work import LOOPBACK, TIMEOUT_S, Clock, batches_of, make_parser, network_of, task_of

from paramserver.process_utils import exit_process


class Module(LightningModule):
    """One of the tasks that are compared, as Lightning has it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.task, self.clock = task_of(name), Clock()
        self.network = network_of(self.task)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.clock.loss(self.task, self.network, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.task.build_optimizer(self.network)


def main() -> None:
    asked = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    # What torchrun sets: Lightning then starts no processes of its own.
    ranks = {"RANK": asked.rank, "LOCAL_RANK": asked.rank, "GROUP_RANK": 0}
    sizes = {"WORLD_SIZE": asked.trainers, "LOCAL_WORLD_SIZE": asked.trainers}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": asked.port, "TORCHELASTIC_RUN_ID": "peers"}
    os.environ.update({name: str(value) for name, value in {**ranks, **sizes, **place}.items()})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    module = Module(asked.model)
    trainer = Trainer(
        accelerator="cpu",
        devices=asked.trainers,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)),
        max_steps=asked.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, batches_of(module.task, asked.rank, asked.trainers, asked.steps))
    module.clock.write(asked.folder, asked.rank)


if __name__ == "__main__":
    main()
    exit_process(0)  # torch's threads of gloo abort one of twenty processes that end as usual

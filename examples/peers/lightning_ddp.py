"""Lightning with its DDP strategy on gloo and CPUs, without logger, checkpoints and progress bar; a process a rank."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from work import LOOPBACK, TIMEOUT_S, Clock, make_batches, make_network, make_parser, make_task

from paramserver.process_utils import exit_process


class Module(LightningModule):
    """One of the tasks that are compared, as Lightning has it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.task, self.clock = make_task(name), Clock()
        self.network = make_network(self.task)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.clock.loss(self.task, self.network, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.task.build_optimizer(self.network)


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    # The variables of torchrun: with them Lightning starts no further processes.
    ranks = {"RANK": arguments.rank, "LOCAL_RANK": arguments.rank, "GROUP_RANK": 0}
    sizes = {"WORLD_SIZE": arguments.trainers, "LOCAL_WORLD_SIZE": arguments.trainers}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": arguments.port, "TORCHELASTIC_RUN_ID": "peers"}
    os.environ.update({name: str(value) for name, value in {**ranks, **sizes, **place}.items()})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    module = Module(arguments.model)
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.trainers,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)),
        max_steps=arguments.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, make_batches(module.task, arguments.rank, arguments.trainers, arguments.steps))
    module.clock.write(arguments.folder, arguments.rank)


if __name__ == "__main__":
    main()
    exit_process(0)  # one of twenty processes aborts in a thread of gloo when it ends as usual

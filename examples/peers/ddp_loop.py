"""A loop as one writes it by hand around DistributedDataParallel; one process for each ``--rank``."""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from work import LOOPBACK, TIMEOUT_S, Clock, batches_of, make_parser, network_of, task_of

from paramserver.process_utils import exit_process


def main() -> None:
    asked = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{asked.folder.resolve()}/meeting",
        rank=asked.rank,
        world_size=asked.trainers,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    task, clock = task_of(asked.model), Clock()
    model = DistributedDataParallel(network_of(task))
    optimizer = task.build_optimizer(model)
    for step, batch in enumerate(islice(batches_of(task, asked.rank, asked.trainers, asked.steps), asked.steps)):
        loss = clock.loss(task, model, batch, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
    clock.write(asked.folder, asked.rank)


if __name__ == "__main__":
    main()
    exit_process(0)  # torch's threads of gloo abort one of twenty processes that end as usual

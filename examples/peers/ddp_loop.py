"""A hand-written loop around DistributedDataParallel; one process for each ``--rank``."""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from work import LOOPBACK, TIMEOUT_S, Clock, make_batches, make_network, make_parser, make_task

from paramserver.process_utils import exit_process


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.folder.resolve()}/rendezvous",
        rank=arguments.rank,
        world_size=arguments.trainers,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    task, clock = make_task(arguments.model), Clock()
    model = DistributedDataParallel(make_network(task))
    optimizer = task.build_optimizer(model)
    for step, batch in enumerate(
        islice(make_batches(task, arguments.rank, arguments.trainers, arguments.steps), arguments.steps)
    ):
        loss = clock.loss(task, model, batch, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
    clock.write(arguments.folder, arguments.rank)


if __name__ == "__main__":
    main()
    exit_process(0)  # one of twenty processes aborts in a thread of gloo when it ends as usual

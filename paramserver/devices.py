"""Which devices a process computes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from paramserver.config import Config, server_computes
from paramserver.errors import UnsupportedConfiguration


@dataclass(frozen=True)
class Placement:
    """The devices of one process (the first takes the inputs) and the process-group backend that fits them."""

    devices: tuple[torch.device, ...]
    backend: str

    @property
    def device(self) -> torch.device:
        return self.devices[0]


CPU = Placement((torch.device("cpu"),), "gloo")


def place_server(config: Config, gpus_here: int | None = None) -> Placement:
    """Where the server computes the model that trainers call: on ``device.num_gpus`` GPUs if it has them, or the CPU.

    Its parameters live on the CPU in any case.
    """
    available = torch.cuda.device_count() if gpus_here is None else gpus_here
    wanted = (config.device.num_gpus or 0) if server_computes(config) and config.device.server == "auto" else 0
    if not 0 < wanted <= available:
        return CPU
    return Placement(tuple(torch.device("cuda", i) for i in range(wanted)), "gloo")


def place_trainer(config: Config, local_index: int, trainers_here: int, gpus_here: int | None = None) -> Placement:
    """The devices of one trainer: its own GPUs where the host has enough for all of its trainers, the CPU otherwise.

    A trainer whose model is on the server computes the loss alone, on the CPU.

    Args:
        config: ``device`` and ``cluster.backend``.
        local_index: of this trainer among those of its host.
        trainers_here: how many trainers the host runs.
        gpus_here: how many GPUs the host has; None asks torch.

    Raises:
        UnsupportedConfiguration: ``device.kind: cuda`` without enough GPUs, or a backend that the device cannot use.
    """
    if server_computes(config):
        return CPU
    available = torch.cuda.device_count() if gpus_here is None else gpus_here
    each = 1 if config.device.num_gpus is None else config.device.num_gpus
    needed = each * trainers_here
    wants_cuda = config.device.kind == "cuda" or (config.device.kind == "auto" and available >= needed > 0)
    if config.device.kind == "cuda" and each == 0:
        raise UnsupportedConfiguration(
            "device.num_gpus (0) must be at least 1 with device.kind cuda; leave it out, or use device.kind: cpu"
        )
    if config.device.kind == "cuda" and available < needed:
        raise UnsupportedConfiguration(
            f"device.kind (cuda) needs {needed} GPUs on this host ({trainers_here} trainer(s) with {each} each), "
            f"which has {available}; start fewer trainers here, or use device.kind: auto"
        )
    backend = config.cluster.backend
    if not wants_cuda:
        if backend == "nccl":
            raise UnsupportedConfiguration(
                f"cluster.backend (nccl) needs a GPU for each trainer; {needed} would be needed and {available} are "
                "here; use cluster.backend: auto"
            )
        return CPU
    first = local_index * each
    devices = tuple(torch.device("cuda", first + i) for i in range(each))
    return Placement(devices, "nccl" if backend == "auto" else backend)


def move_to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``; nested tuples, lists and dicts keep their form."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to_device(item, device) for item in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(move_to_device(item, device) for item in batch)
    if isinstance(batch, dict):
        return {name: move_to_device(item, device) for name, item in batch.items()}
    return batch

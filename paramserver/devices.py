"""Placement: the devices that each process computes on, and the move of a batch to a device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from paramserver.config import Config, server_computes
from paramserver.errors import UnsupportedConfiguration


@dataclass(frozen=True)
class Placement:
    """The devices of one process and the process-group backend for them.

    Attributes:
        devices: inputs go to the first one.
        backend: gloo or nccl.

    Example::

        >>> CPU.device, CPU.backend
        (device(type='cpu'), 'gloo')
    """

    devices: tuple[torch.device, ...]
    backend: str

    @property
    def device(self) -> torch.device:
        return self.devices[0]


CPU = Placement((torch.device("cpu"),), "gloo")


def place_server(config: Config, gpus_here: int | None = None) -> Placement:
    """Return the devices on which the server runs the forward (``server.compute: server``).

    They are ``device.num_gpus`` GPUs if the host has as many, otherwise the CPU. The parameters live on the CPU in
    either case.

    Example::

        >>> place_server(Config(), gpus_here=8) == CPU
        True
    """
    available = torch.cuda.device_count() if gpus_here is None else gpus_here
    wanted = (config.device.num_gpus or 0) if server_computes(config) and config.device.server == "auto" else 0
    if not 0 < wanted <= available:
        return CPU
    return Placement(tuple(torch.device("cuda", i) for i in range(wanted)), "gloo")


def place_trainer(config: Config, local_index: int, trainers_here: int, gpus_here: int | None = None) -> Placement:
    """Return the devices of one trainer: GPUs of its own if the host has enough for all its trainers, else the CPU.

    With ``server.compute: server`` a trainer computes only the loss, on the CPU.

    Args:
        config: the config, for ``device`` and ``cluster.backend``.
        local_index: index of this trainer among those of its host.
        trainers_here: number of trainers on the host.
        gpus_here: number of GPUs of the host; None = ask torch.

    Raises:
        UnsupportedConfiguration: ``device.kind: cuda`` without enough GPUs, or a backend that the device does not
            support.

    Example::

        >>> place_trainer(Config(), local_index=1, trainers_here=2, gpus_here=2).devices
        (device(type='cuda', index=1),)
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
    """Return ``batch`` with its tensors on ``device``; nested tuples, lists and dicts keep their structure.

    Example::

        >>> move_to_device({"x": torch.zeros(2)}, torch.device("meta"))["x"].device
        device(type='meta')
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(move_to_device, batch, repeat(device)))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map(move_to_device, batch, repeat(device)))
    if isinstance(batch, dict):
        return {name: move_to_device(item, device) for name, item in batch.items()}
    return batch

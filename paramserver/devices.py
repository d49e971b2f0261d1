"""Devices: those that each process computes on, and what is different on a GPU.

Everything else is written for a ``torch.device``: tensors of messages and of shared memory are on the CPU, and what a
process computes with is on its devices. A copy to the CPU that does not block is followed by ``synchronize`` before the
memory is read.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paramserver.config import Config, server_computes
from paramserver.errors import UnsupportedConfiguration


@dataclass(frozen=True)
class Placement:
    """The devices of one process and the process-group backend for them. Inputs go to the first device."""

    devices: tuple[torch.device, ...]
    backend: str

    @property
    def device(self) -> torch.device:
        return self.devices[0]


CPU = Placement((torch.device("cpu"),), "gloo")

GPU = "cuda"
"""The type of device that the keys of the section ``device`` call cuda."""


def num_gpus() -> int:
    """Return the number of GPUs that torch sees."""
    return int(torch.get_device_module(GPU).device_count())


def require_visible_gpus(config: Config, allocated: tuple[int, str], visible: int | None = None) -> None:
    """Check that torch sees a GPU where the allocation has some, unless the config asks for the CPU.

    ``allocated`` is the number of its GPUs on this host, and the environment variable that has it. ``visible`` is the
    number of GPUs that torch sees; None = ask torch.

    Raises:
        UnsupportedConfiguration: torch sees none of them.
    """
    count, variable = allocated
    if not count or (config.device.kind == "cpu" and config.device.server != "cuda"):
        return
    if not (num_gpus() if visible is None else visible):
        raise UnsupportedConfiguration(
            f"this allocation has {count} GPU(s) on this host ({variable}), and torch sees 0 of them; "
            "install a build of torch for GPUs, check CUDA_VISIBLE_DEVICES and nvidia-smi, or set device.kind: cpu"
        )


def place_parameters(config: Config, gpus_here: int | None = None) -> Placement:
    """Return the device of a server's parameters and optimizer: the CPU, or with ``device.server: cuda`` a GPU.

    It is the last one of the host, which no trainer has if there is one more than these need.

    Raises:
        UnsupportedConfiguration: there is no GPU.
    """
    if config.device.server != "cuda":
        return CPU
    available = num_gpus() if gpus_here is None else gpus_here
    if not available:
        raise UnsupportedConfiguration(
            "device.server (cuda) needs a GPU on the host of the server, which has none; use device.server: auto"
        )
    return Placement((torch.device(GPU, available - 1),), "gloo")


def place_server(config: Config, gpus_here: int | None = None) -> Placement:
    """Return the devices on which a server computes.

    With ``server.compute: server`` they are ``device.num_gpus`` GPUs if the host has as many, otherwise the CPU; the
    parameters are on the CPU in either case. Otherwise it computes where the parameters are.
    """
    if not server_computes(config):
        return place_parameters(config, gpus_here)
    available = num_gpus() if gpus_here is None else gpus_here
    wanted = (config.device.num_gpus or 0) if config.device.server == "auto" else 0
    if not 0 < wanted <= available:
        return CPU
    return Placement(tuple(torch.device(GPU, i) for i in range(wanted)), "gloo")


def place_trainer(config: Config, local_index: int, trainers_here: int, gpus_here: int | None = None) -> Placement:
    """Return the devices of one trainer: GPUs of its own if the host has enough for all its trainers, else the CPU.

    With ``device.share_gpus`` trainers share GPUs where there are not enough. With ``server.compute: server`` a trainer
    computes only the loss, on the CPU. ``gpus_here`` is the number of GPUs of the host; None = ask torch.

    Raises:
        UnsupportedConfiguration: ``device.kind: cuda`` without enough GPUs, or a backend that the device does not
            support.
    """
    if server_computes(config):
        return CPU
    available = num_gpus() if gpus_here is None else gpus_here
    each = 1 if config.device.num_gpus is None else config.device.num_gpus
    needed = each * trainers_here
    shares = config.device.share_gpus and needed > available >= each
    is_enough = shares or available >= needed > 0
    wants_cuda = config.device.kind == "cuda" or (config.device.kind == "auto" and is_enough)
    if config.device.kind == "cuda" and each == 0:
        raise UnsupportedConfiguration(
            "device.num_gpus (0) must be at least 1 with device.kind cuda; leave it out, or use device.kind: cpu"
        )
    if config.device.kind == "cuda" and not is_enough:
        cure = "start fewer trainers here, set device.share_gpus, or " if available >= each else ""
        raise UnsupportedConfiguration(
            f"device.kind (cuda) needs {needed} GPUs on this host ({trainers_here} trainer(s) with {each} each), "
            f"which has {available}; {cure}use device.kind: auto"
        )
    backend = config.cluster.backend
    if not wants_cuda:
        if backend == "nccl":
            raise UnsupportedConfiguration(
                f"cluster.backend (nccl) needs a GPU for each trainer; {needed} would be needed and {available} are "
                "here; use cluster.backend: auto"
            )
        return CPU
    if shares and backend == "nccl":
        raise UnsupportedConfiguration(
            f"cluster.backend (nccl) needs a GPU for each trainer, and {trainers_here} trainers of this host share "
            f"{available} (device.share_gpus); use cluster.backend: auto, which is gloo then"
        )
    first = local_index % (available // each) * each
    devices = tuple(torch.device(GPU, first + i) for i in range(each))
    return Placement(devices, ("gloo" if shares else "nccl") if backend == "auto" else backend)


def use_device(device: torch.device) -> None:
    """Make it the current device of this thread: what user code means by ``cuda`` without a number, and nccl."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def pins_memory(device: torch.device) -> bool:
    """Return whether memory of the CPU is to be pinned for copies from and to ``device``."""
    return device.type == "cuda"


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until the devices have done what this thread has enqueued, copies to the CPU included."""
    for device in set(devices):
        if device.type != "cpu":
            torch.get_device_module(device).current_stream(device).synchronize()


def to_cpu(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors in memory of the CPU, which messages are sent from: themselves if they are there."""
    devices = {tensor.device for tensor in tensors}
    if all(device.type == "cpu" for device in devices):
        return tensors
    copies = []
    for tensor in tensors:
        # New memory each time, because what is sent must not change. torch keeps pinned memory that is free for reuse.
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins_memory(tensor.device))
        copies.append(copy.copy_(tensor.detach(), non_blocking=True))
    synchronize(devices)
    return copies


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with its tensors on ``device``; nested tuples, lists and dicts keep their structure and type.

    What has a method ``to``, as a ``PackedSequence`` and batches of other libraries, is moved by it.
    """
    if isinstance(batch, torch.Tensor):
        # Not to the CPU: such a copy would be read before it is complete.
        return batch.to(device, non_blocking=device.type != "cpu")
    if callable(getattr(type(batch), "to", None)):  # of the type: some dicts have their keys as attributes
        return batch.to(device)
    if isinstance(batch, tuple):
        moved = [move_to_device(item, device) for item in batch]
        if all(map(operator.is_, moved, batch)):  # also of a type that cannot be made of its items
            return batch
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    if isinstance(batch, list):
        several = copy.copy(batch)  # with its further attributes
        several[:] = [move_to_device(item, device) for item in batch]
        return several
    if isinstance(batch, dict):
        items = {name: move_to_device(item, device) for name, item in batch.items()}
        if type(batch) is dict:
            return items
        copied = copy.copy(batch)  # with its further attributes, such as the factory of a defaultdict
        copied.update(items)
        return copied
    return batch

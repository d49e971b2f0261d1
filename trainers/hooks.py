"""Communication hooks of DDP that compress gradients, by the names of ``ddp.comm_hook``."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def _none(model: DistributedDataParallel) -> None:
    """DDP's own all-reduce."""


def _fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, fp16_compress_hook)


def _bf16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, bf16_compress_hook)


def _powersgd(model: DistributedDataParallel) -> None:
    # Vogels et al., "PowerSGD", NeurIPS 2019. The first steps, in which DDP rebuilds its buckets, go uncompressed.
    state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=10)
    model.register_comm_hook(state, powerSGD_hook)


_HOOKS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "none": _none,
    "fp16": _fp16,
    "bf16": _bf16,
    "powersgd": _powersgd,
}


def register_comm_hook(model: DistributedDataParallel, name: str) -> None:
    _HOOKS[name](model)

"""Time of one RPC, measured over the agents, channels and options of a run."""

from __future__ import annotations

import time

import torch
import torch.distributed.rpc as rpc
from torch import Tensor


def _count_elements(tensor: Tensor) -> int:
    """RPC handler: receive a tensor and reply with a number."""
    return tensor.numel()


def measure_call_s(name: str, tensor: Tensor) -> float:
    """Return the seconds of one call that sends ``tensor`` to the agent ``name`` and receives a number."""
    began = time.perf_counter()
    count = rpc.rpc_sync(name, _count_elements, args=(tensor,))
    assert count == tensor.numel()
    return time.perf_counter() - began


def measure_empty_call_s(name: str) -> float:
    """Return the seconds of one call that sends a single element to the agent ``name``."""
    return measure_call_s(name, torch.zeros(1))

"""How fast a call is, for those who measure a link: the agents, channels and options are those of a run."""

from __future__ import annotations

import time

import torch
import torch.distributed.rpc as rpc
from torch import Tensor


def _take(tensor: Tensor) -> int:
    """What the other end does with a tensor that it gets."""
    return tensor.numel()


def call_s(name: str, tensor: Tensor) -> float:
    """Seconds of one call that gives ``tensor`` to the agent ``name`` and gets a number back."""
    began = time.perf_counter()
    taken = rpc.rpc_sync(name, _take, args=(tensor,))
    assert taken == tensor.numel()
    return time.perf_counter() - began


def empty_call_s(name: str) -> float:
    """The same with next to nothing."""
    return call_s(name, torch.zeros(1))

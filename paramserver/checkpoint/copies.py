"""The cut: a private copy of a state, taken quickly, that can be written while training goes on."""

import copy
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

from paramserver.checkpoint.memory import CopyMemory

__all__ = ["private_copy"]

_Memo = dict[Hashable, torch.Tensor]


def private_copy(obj: Any, memory: CopyMemory | None = None) -> Any:
    """Copy nested dict, list and tuple of tensors so that nothing in it changes, or is shared, any more.

    Every tensor (a parameter too) becomes a plain, contiguous CPU tensor with a storage of its own size: saving a view
    of a flat tensor would otherwise write the whole flat tensor. Tensors that show the same memory in the same way
    (tied weights) share one copy. numpy arrays, sets and bytearrays are copied. Other leaves are kept as they are.

    Args:
        obj: what is copied.
        memory: where large copies are made; None = in fresh memory.

    Returns:
        The same structure; classes of dictionaries and named tuples, and a ``state_dict``'s ``_metadata``, are kept.
    """
    return _copied(obj, {}, memory)


def _copied(obj: Any, memo: _Memo, memory: CopyMemory | None) -> Any:
    if isinstance(obj, torch.Tensor):
        return _tensor(obj.detach(), memo, memory)
    if isinstance(obj, np.ndarray | set | bytearray):
        return obj.copy()
    if isinstance(obj, dict):
        fresh = copy.copy(obj)  # keeps the class, a defaultdict's factory and the attributes of a state_dict
        for key, value in obj.items():
            fresh[key] = _copied(value, memo, memory)
        return fresh
    if isinstance(obj, list):
        return [_copied(item, memo, memory) for item in obj]
    if isinstance(obj, tuple):
        items = [_copied(item, memo, memory) for item in obj]
        return type(obj)(*items) if hasattr(obj, "_fields") else tuple(items)
    return obj


def _tensor(tensor: torch.Tensor, memo: _Memo, memory: CopyMemory | None) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor.cpu().clone()
    # The originals stay alive during the copy, so an address cannot come up twice for two tensors.
    view = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    key = (*view, tensor.device)
    if key not in memo or tensor.numel() == 0:
        memo[key] = _empty_like(tensor, memory).copy_(tensor)
    return memo[key]


def _empty_like(tensor: torch.Tensor, memory: CopyMemory | None) -> torch.Tensor:
    if memory is None or tensor.is_quantized or tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    lent = torch.from_numpy(memory.take(tensor.numel() * tensor.element_size()))
    return lent.view(tensor.dtype).view(tensor.shape)

"""Calls and replies as bytes, and the memory of their tensors, which is not copied.

torch's own way to pickle a tensor writes an archive, which takes longer than a call over a socket.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# A tensor of less is copied into the bytes.
_LEAST_BYTES = 4096


def _tensor_of(data: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def _sparse_of(indices: Tensor, values: Tensor, shape: torch.Size, is_coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.is_sparse:
        return _sparse_of, (tensor._indices(), tensor._values(), tensor.shape, tensor.is_coalesced())
    plain = tensor.detach().cpu().contiguous()
    memory = pickle.PickleBuffer(plain.view(-1).view(torch.uint8).numpy().data)
    return _tensor_of, (memory, plain.dtype, plain.shape)


_REDUCERS = {**copyreg.dispatch_table, Tensor: _reduce_tensor}


def pack(value: Any, separates: bool = True) -> tuple[bytes, list[memoryview]]:
    """Return a value as bytes, and with ``separates`` the memory of its larger tensors, of which nothing is copied."""
    buffers: list[memoryview] = []

    def keep_in_bytes(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes < _LEAST_BYTES:
            return True
        buffers.append(memory)
        return False

    packed = io.BytesIO()
    pickler = pickle.Pickler(
        packed, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=keep_in_bytes if separates else None
    )
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    return packed.getvalue(), buffers


def unpack(packed: bytes | bytearray, buffers: Sequence[memoryview] = ()) -> Any:
    """Return the value again; its larger tensors are over ``buffers``."""
    return pickle.loads(packed, buffers=buffers)

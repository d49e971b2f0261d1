"""Calls and replies as bytes, and the memory of their tensors, which is not copied.

torch's own way to pickle a tensor writes an archive, which takes longer than a call over a socket.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""Memory as it is sent. No memoryview: one that is garbage in a cycle ends the process in Python 3.11."""

# A tensor of less is copied into the bytes.
_LEAST_BYTES = 4096


def pack(value: Any) -> bytes:
    """Return a value as bytes, with a copy of its tensors."""
    packed = io.BytesIO()
    pickler = pickle.Pickler(packed, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    return packed.getvalue()


def unpack(packed: bytes) -> Any:
    """Return the value that was packed."""
    return pickle.loads(packed)


def pack_apart(value: Any) -> tuple[bytes, list[Bytes]]:
    """Return a value as bytes, and the memory of its larger tensors, of which nothing is copied."""
    packed = io.BytesIO()
    pickler = _Pickler(packed)
    pickler.dump(value)
    return packed.getvalue(), pickler.memory


def unpack_apart(packed: bytes, memory: Sequence[Tensor]) -> Any:
    """Return the value that was packed; its larger tensors are over ``memory``, which has their bytes."""
    unpickler = _Unpickler(io.BytesIO(packed))
    unpickler.memory = memory
    return unpickler.load()


def _tensor_of(data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def _sparse_of(indices: Tensor, values: Tensor, shape: torch.Size, is_coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)


def _is_expanded(tensor: Tensor) -> bool:
    """Whether one element stands for all."""
    return tensor.numel() > 1 and not any(tensor.stride())


def _expanded_of(element: Tensor, shape: torch.Size) -> Tensor:
    return element.expand(shape)


def _bytes_of(plain: Tensor) -> Bytes:
    memory: Bytes = plain.view(-1).view(torch.uint8).numpy()
    return memory


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.is_sparse:
        return _sparse_of, (tensor._indices(), tensor._values(), tensor.shape, tensor.is_coalesced())
    if _is_expanded(tensor):
        return _expanded_of, (tensor.detach().as_strided((1,), (1,)), tensor.shape)
    plain = _plain(tensor)
    return _tensor_of, (_bytes_of(plain).tobytes(), plain.dtype, plain.shape)


_REDUCERS = {**copyreg.dispatch_table, Tensor: _reduce_tensor}


class _Pickler(pickle.Pickler):
    dispatch_table = _REDUCERS

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.memory: list[Bytes] = []

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not Tensor or value.is_sparse or value.nbytes < _LEAST_BYTES or _is_expanded(value):
            return None
        plain = _plain(value)
        self.memory.append(_bytes_of(plain))
        return len(self.memory) - 1, plain.dtype, plain.shape


class _Unpickler(pickle.Unpickler):
    memory: Sequence[Tensor] = ()

    def persistent_load(self, found: Any) -> Tensor:
        number, dtype, shape = found
        tensor: Tensor = self.memory[number].view(dtype).view(shape)
        return tensor

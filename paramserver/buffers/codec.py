"""Samples as trees that ``torch.load(weights_only=True)`` reads back: only tensors, numbers, str, bytes, lists, None.

Every node is a list that starts with its kind, so that an array comes back as an array and a tuple as a tuple.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paramserver.errors import CheckpointError, UnsupportedConfiguration

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def is_namedtuple(kind: type) -> TypeGuard[type[Any]]:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def refuse_grad(tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise ValueError(
            f"a tensor of a sample (shape {tuple(tensor.shape)}) must not require gradients, a buffer keeps "
            "values only; put tensor.detach()"
        )


def size_of(sample: Any) -> int:
    """Bytes of the leaves of an object sample: of tensors and arrays their data, of anything else the object itself."""
    if isinstance(sample, (tuple, list)):
        return sum(size_of(value) for value in sample)
    if isinstance(sample, dict):
        return sum(size_of(value) for value in sample.values())
    if isinstance(sample, Tensor):
        refuse_grad(sample)
        return sample.element_size() * sample.numel()
    if isinstance(sample, np.ndarray):
        return sample.nbytes
    return sys.getsizeof(sample)


def encode_key(key: Any) -> Any:
    """Turn a key into plain values; numpy integers become int, which compare and hash alike."""
    if type(key) in _PLAIN:
        return key
    if type(key) is tuple:
        return tuple(encode_key(part) for part in key)
    if isinstance(key, np.generic) and type(key.item()) in _PLAIN:
        return key.item()
    raise _cannot_store("key", key, "give an int, a str or a tuple of these as key")


def encode(sample: Any) -> list[Any]:
    """Return the tree of one sample, with copies of its tensors and arrays.

    Raises:
        UnsupportedConfiguration: a part has a type that cannot be stored without pickling its class.
    """
    kind = type(sample)
    if kind in _PLAIN:
        return ["value", sample]
    if kind is Tensor:
        return ["tensor", sample.detach().to("cpu", copy=True)]
    if isinstance(sample, (np.ndarray, np.generic)):
        return _encode_numpy(sample)
    if kind is dict:
        return ["dict", [[encode(name), encode(value)] for name, value in sample.items()]]
    if kind in (list, tuple):
        return [kind.__name__, [encode(value) for value in sample]]
    if is_namedtuple(kind):
        return ["namedtuple", [kind.__module__, kind.__qualname__, *kind._fields], [encode(value) for value in sample]]
    raise _cannot_store(
        "part of a sample", sample, "make samples of tensors, arrays, numbers and str, or put them with keys"
    )


def decode(tree: list[Any]) -> Any:
    kind, body = tree[0], tree[1]
    if kind in ("value", "tensor"):
        return body
    if kind == "array":
        return body.numpy()
    if kind in ("bytes", "scalar"):
        array = _from_bytes(body, tree[2], tree[3])
        return array[()] if kind == "scalar" else array
    if kind == "dict":
        return {decode(name): decode(value) for name, value in body}
    if kind in ("list", "tuple"):
        values = [decode(value) for value in body]
        return values if kind == "list" else tuple(values)
    if kind == "namedtuple":
        return _find_namedtuple(*body)(*(decode(value) for value in tree[2]))
    raise CheckpointError(
        f"a sample in the checkpoint has kind ({kind}), it must be of a known kind; use the version that wrote it"
    )


def _encode_numpy(value: npt.NDArray[Any] | np.generic) -> list[Any]:
    dtype = value.dtype
    if dtype.hasobject or dtype.names is not None or type(value) in (np.ma.MaskedArray, np.matrix, np.recarray):
        raise _cannot_store("part of a sample", value, f"its dtype is {dtype}; use arrays of numbers or str")
    # Of a scalar the bytes: as a tensor a longdouble or a date would lose its type.
    if isinstance(value, np.generic):
        return ["scalar", value.tobytes(), dtype.str, []]
    try:
        return ["array", torch.from_numpy(np.array(value))]
    except (TypeError, ValueError):
        # A dtype or byte order that torch does not have.
        return ["bytes", value.tobytes(), dtype.str, list(value.shape)]


def _from_bytes(data: bytes, dtype: str, shape: list[int]) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()
    return array


def _find_namedtuple(module: str, name: str, *fields: str) -> Any:
    """Return the class where the program has loaded it (nothing is imported), else one with the same fields."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and is_namedtuple(found) and found._fields == fields:
        return found
    return namedtuple(name.rpartition(".")[2], fields)


def _cannot_store(what: str, value: Any, cure: str) -> UnsupportedConfiguration:
    kind = type(value)
    return UnsupportedConfiguration(
        f"a {what} (type {kind.__module__}.{kind.__qualname__}) must be of a type that a checkpoint can store; {cure}"
    )

"""Samples as trees of tensors: their spec, flattening and stacking, and an encoding for checkpoints.

``SampleSpec.stack`` returns what ``torch.utils.data.default_collate`` returns (a tuple becomes a list), and
``SampleSpec.rebuild`` returns the samples as they were put. ``encode`` turns a tree into one that
``torch.load(weights_only=True)`` reads back: tensors, numbers, str, bytes, lists and None, where each node is a list
that starts with its kind, so that an array comes back as an array and a tuple as a tuple.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Iterable, Iterator, Sequence
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


_INT64 = range(-(2**63), 2**63)


class SampleSpec(ABC):
    """A leaf, or a nest of layouts."""

    @abstractmethod
    def flatten(self, sample: Any, leaves: list[Any]) -> bool:
        """Append the leaves of ``sample``; False where it has another layout."""

    @abstractmethod
    def leaves(self) -> list[LeafSpec]: ...

    @abstractmethod
    def stack(self, columns: Iterator[Tensor]) -> Any: ...

    @abstractmethod
    def rebuild(self, columns: Iterator[Tensor], size: int) -> list[Any]: ...


class LeafSpec(SampleSpec):
    """One tensor per sample, of fixed ``dtype`` and ``shape``."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> None:
        self.dtype = dtype
        self.shape = shape

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    @abstractmethod
    def fits(self, value: Any) -> bool: ...

    def flatten(self, sample: Any, leaves: list[Any]) -> bool:
        leaves.append(sample)
        return self.fits(sample)

    def leaves(self) -> list[LeafSpec]:
        return [self]

    def stack(self, columns: Iterator[Tensor]) -> Any:
        return next(columns)


class TensorLeaf(LeafSpec):
    def fits(self, value: Any) -> bool:
        return type(value) is Tensor and value.dtype is self.dtype and value.shape == self.shape and _has_rows(value)

    def rebuild(self, columns: Iterator[Tensor], size: int) -> list[Any]:
        return list(next(columns).unbind(0))


class ArrayLeaf(LeafSpec):
    def __init__(self, array: npt.NDArray[Any], dtype: torch.dtype) -> None:
        super().__init__(dtype, array.shape)
        self.numpy_dtype = array.dtype

    def fits(self, value: Any) -> bool:
        return type(value) in _ARRAYS and value.dtype == self.numpy_dtype and value.shape == self.shape

    def rebuild(self, columns: Iterator[Tensor], size: int) -> list[Any]:
        # The dots keep a row of a vector a 0-d array, where an index alone would give a scalar.
        rows = next(columns).numpy()
        return [rows[i, ...] for i in range(size)]


class ScalarLeaf(LeafSpec):
    def __init__(self, scalar: np.generic, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.numpy_dtype = scalar.dtype

    def fits(self, value: Any) -> bool:
        return isinstance(value, np.generic) and value.dtype == self.numpy_dtype

    def rebuild(self, columns: Iterator[Tensor], size: int) -> list[Any]:
        return list(next(columns).numpy())


class NumberLeaf(LeafSpec):
    def __init__(self, number: bool | int | float) -> None:
        super().__init__(_NUMBERS[type(number)])
        self.type = type(number)

    def fits(self, value: Any) -> bool:
        return type(value) is self.type and (self.type is not int or value in _INT64)

    def rebuild(self, columns: Iterator[Tensor], size: int) -> list[Any]:
        return next(columns).tolist()


class TreeSpec(SampleSpec):
    """A tuple, named tuple, list or dict of layouts; ``names`` are a dict's keys in order."""

    def __init__(self, kind: type[Any], names: tuple[Any, ...] | None, children: Sequence[SampleSpec]) -> None:
        self.kind = kind
        self.names = names
        self.children = children

    def flatten(self, sample: Any, leaves: list[Any]) -> bool:
        if type(sample) is not self.kind or len(sample) != len(self.children):
            return False
        try:
            values: Iterable[Any] = sample if self.names is None else [sample[name] for name in self.names]
        except KeyError:
            return False
        for child, value in zip(self.children, values, strict=True):  # noqa: SIM110 - all() would take twice as long
            if not child.flatten(value, leaves):
                return False
        return True

    def leaves(self) -> list[LeafSpec]:
        return [leaf for child in self.children for leaf in child.leaves()]

    def stack(self, columns: Iterator[Tensor]) -> Any:
        values = [child.stack(columns) for child in self.children]
        # default_collate turns a tuple into a list, but keeps named tuples.
        return values if self.kind is tuple else self._pack(values)

    def rebuild(self, columns: Iterator[Tensor], size: int) -> list[Any]:
        values = [child.rebuild(columns, size) for child in self.children]
        rows = zip(*values, strict=True) if values else [()] * size
        return [self._pack(row) for row in rows]

    def _pack(self, values: Sequence[Any]) -> Any:
        if self.names is not None:
            return dict(zip(self.names, values, strict=True))
        return self.kind(*values) if is_namedtuple(self.kind) else self.kind(values)


def sample_spec_of(sample: Any) -> SampleSpec | None:
    """Return the layout that samples like this one can be stacked in; None where torch cannot stack them."""
    kind = type(sample)
    if kind in (tuple, list) or is_namedtuple(kind):
        return _nest(kind, None, sample)
    if kind is dict:
        return _nest(dict, tuple(sample), sample.values())
    if kind is Tensor:
        return TensorLeaf(sample.dtype, tuple(sample.shape)) if _has_rows(sample) else None
    if kind in _NUMBERS:
        return NumberLeaf(sample) if kind is not int or sample in _INT64 else None
    return _numpy_leaf(sample)


def _nest(kind: type[Any], names: tuple[Any, ...] | None, values: Any) -> TreeSpec | None:
    children = [sample_spec_of(value) for value in values]
    stackable = [child for child in children if child is not None]
    return TreeSpec(kind, names, stackable) if len(stackable) == len(children) else None


def _numpy_leaf(value: Any) -> LeafSpec | None:
    try:
        if type(value) in _ARRAYS:
            return ArrayLeaf(value, torch.from_numpy(np.empty(0, value.dtype)).dtype)
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            # As default_collate does, which cannot take every scalar whose array torch can.
            return ScalarLeaf(value, torch.as_tensor([value]).dtype)
    except (TypeError, ValueError):
        # A dtype or byte order that torch does not have.
        return None
    return None


def _has_rows(tensor: Tensor) -> bool:
    """Whether a strided column on the CPU can hold it. A complex32 column would warn at each allocation."""
    refuse_grad(tensor)
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype is not torch.complex32
        and not (tensor.is_quantized or tensor.is_nested)
    )


_ARRAYS = (np.ndarray, np.memmap)
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}

"""Samples as trees of tensors, arrays and numbers: their layout, and an encoding for checkpoints.

``sample_spec_of`` describes the layout of a sample. ``SampleSpec.stack`` returns what
``torch.utils.data.default_collate`` returns (a tuple becomes a list), ``SampleSpec.rebuild`` the samples as they were
put. ``encode`` turns a sample into a tree that ``torch.load(weights_only=True)`` can read: tensors, numbers, str,
bytes, lists and None. Each node is a list that starts with its kind, so ``decode`` returns an array for an array and a
tuple for a tuple.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paramserver.errors import CheckpointError, UnsupportedConfiguration

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def is_namedtuple(kind: type) -> TypeGuard[type[Any]]:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def size_of(sample: Any) -> int:
    """Return the bytes of a sample's leaves: the data of tensors and arrays, the object itself for anything else."""
    if isinstance(sample, (tuple, list)):
        return sum(size_of(value) for value in sample)
    if isinstance(sample, dict):
        return sum(size_of(value) for value in sample.values())
    if isinstance(sample, Tensor):
        _check_grad(sample)
        return sample.element_size() * sample.numel()
    if isinstance(sample, np.ndarray):
        return sample.nbytes
    return sys.getsizeof(sample)


def encode_keys(keys: list[Any]) -> list[Any]:
    """Convert keys to plain values; numpy integers become int, which compare and hash the same."""
    # Keys are mostly plain, and there may be a hundred thousand of them in a checkpoint.
    return keys if set(map(type, keys)).issubset(_PLAIN) else [_encode_key(key) for key in keys]


def _encode_key(key: Any) -> Any:
    if type(key) in _PLAIN:
        return key
    if type(key) is tuple:
        return tuple(_encode_key(part) for part in key)
    if isinstance(key, np.generic) and type(key.item()) in _PLAIN:
        return key.item()
    raise _cannot_store("key", key, "give an int, a str or a tuple of these as key")


def pack_keys(keys: list[Any]) -> Tensor | list[Any]:
    """Return a tensor of keys that are whole numbers, or of tuples of as many of them, in its rows; others as they are.

    A part of a checkpoint may have a hundred thousand keys, and each value of a list costs time when it is stored.
    """
    kinds = set(map(type, keys))
    is_rows = kinds == {tuple} and len(set(map(len, keys))) == 1
    if kinds == {int} or (is_rows and set(map(type, chain.from_iterable(keys))) == {int}):
        with suppress(OverflowError):
            return torch.from_numpy(np.array(keys, np.int64))
    return keys


def unpack_keys(packed: Tensor | list[Any]) -> list[Any]:
    """Return the keys of ``pack_keys``."""
    if isinstance(packed, list):
        return packed
    keys: list[Any] = packed.tolist()
    return keys if packed.ndim == 1 else list(map(tuple, keys))


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
    """Return the sample that ``encode`` was given.

    Raises:
        CheckpointError: the tree has a node of an unknown kind.
    """
    kind, body = tree[0], tree[1]
    if kind in ("value", "tensor"):
        return body
    if kind == "array":
        return body.numpy()
    if kind in ("bytes", "scalar"):
        array = np.frombuffer(body, np.dtype(tree[2])).reshape(tree[3]).copy()
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
    # A scalar is stored as bytes: as a tensor a longdouble or a date would lose its type.
    if isinstance(value, np.generic):
        return ["scalar", value.tobytes(), dtype.str, []]
    try:
        return ["array", torch.from_numpy(np.array(value))]
    except (TypeError, ValueError):
        # torch lacks this dtype or byte order.
        return ["bytes", value.tobytes(), dtype.str, list(value.shape)]


def _find_namedtuple(module: str, name: str, *fields: str) -> Any:
    """Return the class if the program has loaded it (nothing is imported), else a new one with the same fields."""
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


INT64 = range(-(2**63), 2**63)


class SampleSpec(ABC):
    """The layout that all samples of a column storage share: a leaf, or a container of layouts. Compared by value."""

    @abstractmethod
    def flatten(self, samples: Sequence[Any], columns: list[list[Any]]) -> bool:
        """Append a list per leaf, with its value in each of the samples; return False if one has another layout.

        There is at least one sample. All are visited leaf by leaf, because a call per sample and leaf takes longer than
        what is checked.
        """

    @abstractmethod
    def leaves(self) -> list[LeafSpec]:
        """Return the leaves in the order of ``flatten``."""

    @abstractmethod
    def stack(self, columns: Iterator[Tensor]) -> Any:
        """Return the batch that ``default_collate`` makes, of one column (size, *shape) per leaf."""

    @abstractmethod
    def rebuild(self, columns: Iterator[Tensor], size: int) -> list[Any]:
        """Return the ``size`` samples of these columns, in the types they were put in."""


class LeafSpec(SampleSpec):
    """One tensor per sample, of fixed ``dtype`` and ``shape``."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> None:
        self.dtype = dtype
        self.shape = shape

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def leaves(self) -> list[LeafSpec]:
        return [self]

    def stack(self, columns: Iterator[Tensor]) -> Any:
        return next(columns)


class TensorLeaf(LeafSpec):
    def flatten(self, samples: Sequence[Any], columns: list[list[Any]]) -> bool:
        columns.append(list(samples))
        dtype, shape = self.dtype, self.shape
        return all(
            type(one) is Tensor and one.dtype is dtype and one.shape == shape and _fits_column(one) for one in samples
        )

    def rebuild(self, columns: Iterator[Tensor], size: int) -> list[Any]:
        return list(next(columns).unbind(0))


class ArrayLeaf(LeafSpec):
    def __init__(self, array: npt.NDArray[Any], dtype: torch.dtype) -> None:
        super().__init__(dtype, array.shape)
        self.numpy_dtype = array.dtype

    def flatten(self, samples: Sequence[Any], columns: list[list[Any]]) -> bool:
        columns.append(list(samples))
        dtype, shape = self.numpy_dtype, self.shape
        return all(type(one) in _ARRAYS and one.dtype == dtype and one.shape == shape for one in samples)

    def rebuild(self, columns: Iterator[Tensor], size: int) -> list[Any]:
        # With the ellipsis a row of a vector stays a 0-d array; an index alone would return a scalar.
        rows = next(columns).numpy()
        return [rows[i, ...] for i in range(size)]


class ScalarLeaf(LeafSpec):
    def __init__(self, scalar: np.generic, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.numpy_dtype = scalar.dtype

    def flatten(self, samples: Sequence[Any], columns: list[list[Any]]) -> bool:
        columns.append(list(samples))
        return all(isinstance(one, np.generic) and one.dtype == self.numpy_dtype for one in samples)

    def rebuild(self, columns: Iterator[Tensor], size: int) -> list[Any]:
        return list(next(columns).numpy())


class NumberLeaf(LeafSpec):
    def __init__(self, number: bool | int | float) -> None:
        super().__init__(_NUMBERS[type(number)])
        self.type = type(number)

    def flatten(self, samples: Sequence[Any], columns: list[list[Any]]) -> bool:
        columns.append(list(samples))
        if set(map(type, samples)) != {self.type}:
            return False
        return self.type is not int or (min(samples) in INT64 and max(samples) in INT64)

    def rebuild(self, columns: Iterator[Tensor], size: int) -> list[Any]:
        return next(columns).tolist()


@dataclass
class TreeSpec(SampleSpec):
    """A tuple, named tuple or list of layouts, or a dict with the ``names`` of its keys in order."""

    kind: type[Any]
    names: tuple[Any, ...] | None
    children: Sequence[SampleSpec]

    def __post_init__(self) -> None:
        kind, names = self.kind, self.names
        # Makes a container of its elements; chosen once, because ``rebuild`` calls it for each sample.
        self._pack: Callable[[Sequence[Any]], Any] = kind
        if names is not None:
            self._pack = lambda values: dict(zip(names, values, strict=True))
        elif is_namedtuple(kind):
            self._pack = lambda values: kind(*values)

    def __reduce__(self) -> tuple[type[TreeSpec], tuple[Any, ...]]:
        return TreeSpec, (self.kind, self.names, self.children)

    def flatten(self, samples: Sequence[Any], columns: list[list[Any]]) -> bool:
        if set(map(type, samples)) != {self.kind} or set(map(len, samples)) != {len(self.children)}:
            return False
        names: Sequence[Any] = range(len(self.children)) if self.names is None else self.names
        try:
            values = [[sample[name] for sample in samples] for name in names]
        except KeyError:
            return False
        return all(child.flatten(column, columns) for child, column in zip(self.children, values, strict=True))

    def leaves(self) -> list[LeafSpec]:
        return [leaf for child in self.children for leaf in child.leaves()]

    def stack(self, columns: Iterator[Tensor]) -> Any:
        # A leaf is one column: no call per leaf and batch.
        values = [next(columns) if isinstance(child, LeafSpec) else child.stack(columns) for child in self.children]
        # default_collate turns a tuple into a list, but keeps named tuples.
        return values if self.kind is tuple else self._pack(values)

    def rebuild(self, columns: Iterator[Tensor], size: int) -> list[Any]:
        values = [child.rebuild(columns, size) for child in self.children]
        rows = zip(*values, strict=True) if values else [()] * size
        return [self._pack(row) for row in rows]


def sample_spec_of(sample: Any) -> SampleSpec | None:
    """Return the layout in which samples like this one can be stacked; None if torch cannot stack them."""
    kind = type(sample)
    if kind in (tuple, list) or is_namedtuple(kind):
        return _tree_spec(kind, None, sample)
    if kind is dict:
        return _tree_spec(dict, tuple(sample), sample.values())
    if kind is Tensor:
        return TensorLeaf(sample.dtype, tuple(sample.shape)) if _fits_column(sample) else None
    if kind in _NUMBERS:
        return NumberLeaf(sample) if kind is not int or sample in INT64 else None
    return _numpy_leaf(sample)


def _tree_spec(kind: type[Any], names: tuple[Any, ...] | None, values: Any) -> TreeSpec | None:
    children = [sample_spec_of(value) for value in values]
    stackable = [child for child in children if child is not None]
    return TreeSpec(kind, names, stackable) if len(stackable) == len(children) else None


def _numpy_leaf(value: Any) -> LeafSpec | None:
    try:
        if type(value) in _ARRAYS:
            return ArrayLeaf(value, torch.from_numpy(np.empty(0, value.dtype)).dtype)
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            # Like default_collate, which rejects some scalars whose arrays torch accepts.
            return ScalarLeaf(value, torch.as_tensor([value]).dtype)
    except (TypeError, ValueError):
        # torch lacks this dtype or byte order.
        return None
    return None


def _fits_column(tensor: Tensor) -> bool:
    """Return whether a strided column on the CPU can hold it. A complex32 column would warn at each allocation."""
    if tensor.requires_grad:
        _check_grad(tensor)
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype is not torch.complex32
        and not (tensor.is_quantized or tensor.is_nested)
    )


def _check_grad(tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise ValueError(
            f"a tensor of a sample (shape {tuple(tensor.shape)}) must not require gradients, a buffer keeps "
            "values only; put tensor.detach()"
        )


_ARRAYS = (np.ndarray, np.memmap)
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}

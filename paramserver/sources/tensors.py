"""Reads of data sets that only arrange tensors: a group of samples is one gather per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from paramserver.buffers.sample_tree import TensorLeaf, TreeSpec
from paramserver.buffers.storage import StackedSamples, numpy_view

_Indices = npt.NDArray[np.int64]


class TensorRows:
    """A ``TensorDataset``, or a ``Subset`` or ``ConcatDataset`` of such, as rows of its tensors.

    Args:
        tables: the tensor data sets.
        rows: for each sample its row in its table; None: sample n is row n.
        which: for each sample its table; None: there is one.
    """

    def __init__(
        self,
        tables: Sequence[TensorDataset],
        rows: _Indices | None = None,
        which: npt.NDArray[np.int32] | None = None,
    ) -> None:
        self.tables = tables
        self.rows = rows
        self.which = which
        self._tensors: list[tuple[Tensor, ...]] = []

    @classmethod
    def of(cls, dataset: Any) -> TensorRows | None:
        """Return the rows of a data set; None if it, or one that it consists of, is of another class."""
        kind = type(dataset)
        if kind is TensorDataset:
            return cls([dataset]) if all(_is_plain(tensor) for tensor in dataset.tensors) else None
        if kind is Subset:
            return _subset(cls.of(dataset.dataset), len(dataset.dataset), dataset.indices)
        if kind is ConcatDataset:
            return _concatenation([cls.of(part) for part in dataset.datasets], [len(part) for part in dataset.datasets])
        return None

    @property
    def sample_bytes(self) -> int:
        return sum(tensor[:1].nbytes for tensor in self.tables[0].tensors)

    def take(self, indices: Sequence[int]) -> StackedSamples:
        """Return copies of the samples of these indices."""
        # A program may replace the tensors of its data set.
        if len(self._tensors) < len(self.tables) or any(
            table.tensors is not known for table, known in zip(self.tables, self._tensors, strict=True)
        ):
            self._load()
        at = np.array(indices, np.int64)
        rows = at if self.rows is None else self.rows[at]
        if self.which is None:
            columns = [_gather(array, rows) for array in self._arrays[0]]
        else:
            columns = self._gather_parts(rows, self.which[at])
        return StackedSamples(self._layout, columns, len(at))

    def _load(self) -> None:
        self._tensors = [table.tensors for table in self.tables]
        self._arrays = [[numpy_view(tensor) for tensor in tensors] for tensors in self._tensors]
        leaves = [TensorLeaf(tensor.dtype, tuple(tensor.shape[1:])) for tensor in self._tensors[0]]
        self._layout = TreeSpec(tuple, None, leaves)

    def _gather_parts(self, rows: _Indices, which: npt.NDArray[np.int32]) -> list[npt.NDArray[Any]]:
        columns = [np.empty((len(rows), *array.shape[1:]), array.dtype) for array in self._arrays[0]]
        for table in np.unique(which):
            here = which == table
            for column, array in zip(columns, self._arrays[table], strict=True):
                column[here] = _gather(array, rows[here])
        return columns


def _is_plain(tensor: Tensor) -> bool:
    """Whether numpy can gather its rows."""
    strided = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided
    special = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return strided and not special and tensor.dtype is not torch.complex32


def _gather(array: npt.NDArray[Any], rows: _Indices) -> npt.NDArray[Any]:
    # ``take`` would copy the whole of an array that is not contiguous.
    return array.take(rows, axis=0) if array.flags.c_contiguous else array[rows]


def _subset(whole: TensorRows | None, length: int, indices: Sequence[int]) -> TensorRows | None:
    if whole is None:
        return None
    at = np.asarray(indices)
    if at.ndim != 1 or at.dtype.kind not in "iu" or (at.size and not (-length <= at.min() and at.max() < length)):
        return None  # the data set's own __getitem__ raises what is wrong with them
    at = np.where(at < 0, at + length, at).astype(np.int64)
    which = None if whole.which is None else whole.which[at]
    return TensorRows(whole.tables, at if whole.rows is None else whole.rows[at], which)


def _concatenation(parts: Sequence[TensorRows | None], lengths: Sequence[int]) -> TensorRows | None:
    known = [part for part in parts if part is not None]
    tables = list({id(table): table for part in known for table in part.tables}.values())
    shapes = {tuple((tensor.dtype, tensor.shape[1:]) for tensor in table.tensors) for table in tables}
    if len(known) < len(parts) or len(shapes) != 1:
        return None
    places = {id(table): place for place, table in enumerate(tables)}
    rows, which = [], []
    for part, length in zip(known, lengths, strict=True):
        rows.append(np.arange(length) if part.rows is None else part.rows)
        own = np.array([places[id(table)] for table in part.tables], np.int32)
        which.append(np.full(length, own[0]) if part.which is None else own[part.which])
    return TensorRows(tables, np.concatenate(rows), np.concatenate(which) if len(tables) > 1 else None)

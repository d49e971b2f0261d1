"""Reads of data sets that only arrange tensors: a group of samples is one gather per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from paramserver.buffers.sample_tree import TensorLeaf, TreeSpec
from paramserver.buffers.storage import StackedSamples, numpy_view

_Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TensorRows:
    """A ``TensorDataset``, or a ``Subset`` or ``ConcatDataset`` of such, as rows of its tensors.

    Attributes:
        tables: the tensor data sets.
        rows: for each sample its row in its table; None: sample n is row n.
        which: for each sample its table; None: there is one.

    Example::

        >>> data = TensorDataset(torch.arange(6).view(3, 2), torch.tensor([0.5, 1.5, 2.5]))
        >>> rows = TensorRows.of(ConcatDataset([data, Subset(data, [2])]))
        >>> list(rows.take([3, 1]))
        [(tensor([4, 5]), tensor(2.5000)), (tensor([2, 3]), tensor(1.5000))]
        >>> class Doubled(TensorDataset):
        ...     def __getitem__(self, index): return 2 * self.tensors[0][index]
        >>> TensorRows.of(Doubled(torch.ones(3))) is None
        True
    """

    tables: tuple[TensorDataset, ...]
    rows: _Indices | None = None
    which: npt.NDArray[np.int32] | None = None

    @classmethod
    def of(cls, dataset: Any) -> TensorRows | None:
        """Return the rows of a data set; None if it, or one that it consists of, is of another class."""
        kind = type(dataset)
        if kind is TensorDataset:
            return cls((dataset,)) if all(_is_plain(tensor) for tensor in dataset.tensors) else None
        if kind is Subset:
            return _subset(cls.of(dataset.dataset), len(dataset.dataset), dataset.indices)
        if kind is ConcatDataset:
            return _concatenation([cls.of(part) for part in dataset.datasets], [len(part) for part in dataset.datasets])
        return None

    def take(self, indices: Sequence[int]) -> StackedSamples:
        """Return copies of the samples of these indices."""
        at = np.asarray(indices, np.int64)
        rows = at if self.rows is None else self.rows[at]
        if self.which is None:
            # Read anew each time: a program may replace the tensors of its data set.
            tensors = self.tables[0].tensors
            columns = [_gather(tensor, rows) for tensor in tensors]
        else:
            columns = self._gather_parts(rows, self.which[at])
            tensors = self.tables[0].tensors
        layout = TreeSpec(tuple, None, [TensorLeaf(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors])
        return StackedSamples(layout, columns, len(at))

    def _gather_parts(self, rows: _Indices, which: npt.NDArray[np.int32]) -> list[npt.NDArray[Any]]:
        columns: list[npt.NDArray[Any]] = []
        for table in np.unique(which):
            here = which == table
            parts = [_gather(tensor, rows[here]) for tensor in self.tables[table].tensors]
            columns = columns or [np.empty((len(rows), *part.shape[1:]), part.dtype) for part in parts]
            for column, part in zip(columns, parts, strict=True):
                column[here] = part
        return columns


def _is_plain(tensor: Tensor) -> bool:
    """Whether numpy can gather its rows."""
    strided = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided
    special = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return strided and not special and tensor.dtype is not torch.complex32


def _gather(tensor: Tensor, rows: _Indices) -> npt.NDArray[Any]:
    array = numpy_view(tensor)
    # ``take`` would copy the whole of an array that is not contiguous.
    return array.take(rows, axis=0) if array.flags.c_contiguous else array[rows]


def _subset(whole: TensorRows | None, length: int, indices: Sequence[int]) -> TensorRows | None:
    if whole is None:
        return None
    at = np.asarray(indices)
    if at.ndim != 1 or at.dtype.kind not in "iu" or (at.size and not (-length <= at.min() and at.max() < length)):
        return None  # the data set itself says what is wrong with them
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
    return TensorRows(tuple(tables), np.concatenate(rows), np.concatenate(which) if len(tables) > 1 else None)

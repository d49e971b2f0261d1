"""Reads of a map-style data set that draw the same random numbers wherever they take place."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from paramserver.buffers.sample_tree import TensorLeaf, TreeSpec
from paramserver.buffers.storage import StackedSamples, numpy_view
from paramserver.rng import GeneratorStates, seed_read


class SampleReader:
    """Reads samples with the default CPU generators seeded by (seed, epoch, index), and leaves those as they were.

    A call of ``__getitems__`` is one read, seeded by its first index. As long as no read draws from the generators,
    none of them is seeded, which takes longer than many a read. Samples among which one draws for the first time are
    read again. A data set of tensors is read without its ``__getitem__`` (``TensorRows``). If it ``wraps``, an index
    may be greater than the length of the data set, see ``SamplerOrder``. ``failed_at`` names the sample that the last
    read that raised was reading.
    """

    def __init__(self, dataset: Any, seed: int, wraps: bool = False) -> None:
        self.dataset = dataset
        self.seed = seed
        self.wraps = wraps
        self.rows = TensorRows.of(dataset)  # if it has no code of the user that could draw
        self._rows_of: tuple[int | None, list[Any]] = None, []  # the pass and the parts of the data set
        self.reads_groups = hasattr(dataset, "__getitems__")
        self.failed_at = ""
        self._draws = False

    def read(self, epoch: int, indices: Sequence[Any], skip: int = 0) -> tuple[Sequence[Any], BaseException | None]:
        """Return the samples of ``indices``, without the first ``skip``, up to one that raises, and what it raised.

        Where an index is a tuple of indices, its sample is a whole batch: the list of their samples. ``indices`` are
        those of one call of ``__getitems__``, which reads those to skip too, for the random numbers of the rest.
        """
        if indices and isinstance(indices[0], tuple):
            batches: list[list[Any]] = []
            for batch in indices[skip:]:
                samples, error = self.read(epoch, batch)
                if error is not None:
                    return batches, error
                batches.append(list(samples))
            return batches, None
        if self.rows is not None:
            # A program may replace the tensors or indices of its data set, or write to a list of indices for a pass.
            parts, (of_epoch, known) = _parts(self.dataset), self._rows_of
            if epoch != of_epoch or len(parts) != len(known) or not all(map(is_, parts, known)):
                self.rows, self._rows_of = TensorRows.of(self.dataset), (epoch, parts)
        if self.rows is not None:
            return self.rows.take(self.in_dataset(indices[skip:])), None
        if not self._draws:
            before = GeneratorStates.take()
            result = self._read(None, indices, skip)
            if GeneratorStates.take() == before:
                return result
            before.restore()
            self._draws = True
        before = GeneratorStates.take(gauss=True)
        try:
            return self._read(epoch, indices, skip)
        finally:
            before.restore()

    def in_dataset(self, indices: Sequence[int]) -> Sequence[int]:
        return [index % len(self.dataset) for index in indices] if self.wraps else indices

    def _read(self, epoch: int | None, indices: Sequence[int], skip: int) -> tuple[list[Any], BaseException | None]:
        samples: list[Any] = []
        inside: Sequence[int] = ()
        try:
            inside = self.in_dataset(indices)
            if self.reads_groups:
                if epoch is not None:
                    seed_read(self.seed, epoch, indices[0])
                samples = list(self.dataset.__getitems__(list(inside)))[skip:]
            else:
                for index, at in zip(indices[skip:], inside[skip:], strict=True):
                    if epoch is not None:
                        seed_read(self.seed, epoch, index)
                    samples.append(self.dataset[at])
        except BaseException as error:  # noqa: BLE001 - returned with the samples before it
            if self.reads_groups or not inside:
                self.failed_at = f"one of the indices {', '.join(map(str, inside or indices))} of the data set"
            else:
                self.failed_at = f"index {inside[skip + len(samples)]} of the data set"
            return samples, error
        return samples, None


_Indices = npt.NDArray[np.int64]


class TensorRows:
    """A ``TensorDataset``, or a ``Subset`` or ``ConcatDataset`` of such, as rows of its tensors.

    Sample n is row ``rows[n]`` of table ``which[n]``; without ``rows`` row n, without ``which`` of the only table.
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
        self._arrays = [[numpy_view(tensor) for tensor in table.tensors] for table in tables]
        leaves = [TensorLeaf(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tables[0].tensors]
        self._layout = TreeSpec(tuple, None, leaves)

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
        at = np.array(indices, np.int64)
        rows = at if self.rows is None else self.rows[at]
        if self.which is None:
            columns = [_gather(array, rows) for array in self._arrays[0]]
        else:
            columns = self._gather_parts(rows, self.which[at])
        return StackedSamples(self._layout, columns, len(at))

    def _gather_parts(self, rows: _Indices, which: npt.NDArray[np.int32]) -> list[npt.NDArray[Any]]:
        columns = [np.empty((len(rows), *array.shape[1:]), array.dtype) for array in self._arrays[0]]
        for table in np.unique(which):
            here = which == table
            for column, array in zip(columns, self._arrays[table], strict=True):
                column[here] = _gather(array, rows[here])
        return columns


def _parts(dataset: Any) -> list[Any]:
    """Return the indices and tensors that the rows of a data set are of."""
    if type(dataset) is Subset:
        return [dataset.indices, *_parts(dataset.dataset)]
    if type(dataset) is ConcatDataset:
        return [one for part in dataset.datasets for one in _parts(part)]
    return [dataset.tensors if type(dataset) is TensorDataset else dataset]


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

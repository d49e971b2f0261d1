"""Reads of a map-style data set that draw the same random numbers wherever they take place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paramserver.rng import GeneratorStates, seed_read
from paramserver.sources.tensors import TensorRows


class SampleReader:
    """Reads samples with the default CPU generators seeded by (seed, epoch, index), and leaves those as they were.

    A call of ``__getitems__`` is one read, seeded by its first index. As long as no read draws from the generators,
    none of them is seeded, which takes longer than many a read. Samples among which one draws for the first time are
    read again. A data set of tensors is read without its ``__getitem__`` (``TensorRows``).

    Args:
        wraps: an index may be greater than the length of the data set, see ``SamplerOrder``.

    Attributes:
        failed_at: which sample the last read that raised was reading, for messages.
    """

    def __init__(self, dataset: Any, seed: int, wraps: bool = False) -> None:
        self.dataset = dataset
        self.seed = seed
        self.wraps = wraps
        self.rows = TensorRows.of(dataset)  # if it has no code of the user that could draw
        self.reads_groups = hasattr(dataset, "__getitems__")
        self.failed_at = ""
        self._draws = False

    def read(self, epoch: int, indices: Sequence[Any], skip: int = 0) -> tuple[Sequence[Any], BaseException | None]:
        """Return the samples of ``indices``, without the first ``skip``, up to one that raises, and what it raised.

        Where an index is a tuple of indices, its sample is a whole batch: the list of their samples.

        Args:
            indices: those of one call of ``__getitems__``, where the data set has it.
            skip: how many samples are not needed; ``__getitems__`` reads them too, for the random numbers of the rest.
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
        """Return the indices in the data set."""
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

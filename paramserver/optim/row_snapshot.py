"""A snapshot of an embedding table and its optimizer state that copies only rows that change before they are read."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor


class RowSnapshot:
    """The rows of tensors as they are when this is made, to be read once and in order while updates change them.

    ``copy_before_update`` is called with the rows that an update changes, and copies those that are not read yet. So
    the memory is that of the rows which change while the snapshot is read. All tensors have the same number of rows.
    Thread-safe: one thread updates, and another one reads.

    Example::

        >>> table = torch.zeros(3, 2)
        >>> snapshot = RowSnapshot({"weight": table})
        >>> rows = torch.tensor([0, 2])
        >>> snapshot.copy_before_update(rows)
        >>> table[rows] = 1.0
        >>> snapshot.read("weight", 0, 3)
        tensor([[0., 0.],
                [0., 0.],
                [0., 0.]])
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._num_rows = len(next(iter(self.tensors.values())))
        self._lock = threading.Lock()
        self._num_read = dict.fromkeys(self.tensors, 0)
        self._is_copied = torch.zeros(self._num_rows, dtype=torch.bool)
        # Rows, ascending, each once, and their values of every tensor that was not read to its end by then.
        self._copies: list[tuple[Tensor, dict[str, Tensor]]] = []

    def copy_before_update(self, rows: Tensor) -> None:
        """Copy rows that are about to change, unless they are copied or read already; they are ascending."""
        with self._lock:
            unread = self._unread()
            if not unread:
                return
            rows = rows[torch.searchsorted(rows, min(self._num_read[name] for name in unread)) :]
            rows = rows[~self._is_copied[rows]]
            if not len(rows):
                return
            self._is_copied[rows] = True
            self._copies.append((rows, {name: self.tensors[name].index_select(0, rows) for name in unread}))
            # So there are few copies to search, and each row is merged a few times only.
            while len(self._copies) > 1 and len(self._copies[-2][0]) < 2 * len(self._copies[-1][0]):
                self._merge_last(unread)

    def read(self, name: str, first: int, end: int) -> Tensor:
        """Return a copy of rows of a tensor; the next ones are read next.

        Raises:
            ValueError: the rows before them are not read, or these are.
        """
        with self._lock:
            if first != self._num_read[name]:
                raise ValueError(f"rows of {name} from {self._num_read[name]} must be read next, not from {first}")
            found = self.tensors[name][first:end].clone()
            for rows, values in self._copies:
                begin, stop = torch.searchsorted(rows, torch.tensor([first, end])).tolist()
                if begin < stop:
                    found[rows[begin:stop] - first] = values[name][begin:stop]
            self._num_read[name] = end
            # Without those of which everything has been read.
            first = min(self._num_read.values())
            self._copies = [own for own in self._copies if int(own[0][-1]) >= first]
            return found

    def _unread(self) -> list[str]:
        """Return the tensors of which rows are still to be read."""
        return [name for name, count in self._num_read.items() if count < self._num_rows]

    def _merge_last(self, names: list[str]) -> None:
        """Make one copy of the last two, without what has been read."""
        first = min(self._num_read[name] for name in names)
        parts = [self._copies.pop(-2), self._copies.pop()]
        cuts = [int(torch.searchsorted(rows, first)) for rows, _ in parts]
        rows, order = torch.sort(torch.cat([own[cut:] for (own, _), cut in zip(parts, cuts, strict=True)]))
        values = {
            name: torch.cat([own[name][cut:] for (_, own), cut in zip(parts, cuts, strict=True)])[order]
            for name in names
        }
        self._copies.append((rows, values))

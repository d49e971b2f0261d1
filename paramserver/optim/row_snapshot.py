"""A snapshot of an embedding table and its optimizer state that copies only rows that change before they are read."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

# More would make the search for copied rows longer, fewer would copy them more often.
_MOST_COPIES = 16


class RowSnapshot:
    """The rows of tensors as they are when this is made, to be read once and in order while updates change them.

    ``keep`` is called before an update, with the rows that it changes, and copies those that are not read yet. So the
    memory is that of the rows which change while the snapshot is read. All tensors have the same number of rows.
    Thread-safe: one thread updates, and another one reads.

    Example::

        >>> table = torch.zeros(3, 2)
        >>> snapshot = RowSnapshot({"weight": table})
        >>> rows = torch.tensor([0, 2])
        >>> snapshot.keep(rows)
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
        self._is_kept = torch.zeros(self._num_rows, dtype=torch.bool)
        # Rows, ascending, each once, and their values of every tensor that was not read to its end by then.
        self._copies: list[tuple[Tensor, dict[str, Tensor]]] = []

    def keep(self, rows: Tensor) -> None:
        """Copy rows that are about to change, unless they are copied or read already; they are ascending."""
        with self._lock:
            unread = self._unread()
            if not unread:
                return
            rows = rows[torch.searchsorted(rows, min(self._num_read[name] for name in unread)) :]
            rows = rows[~self._is_kept[rows]]
            if not len(rows):
                return
            self._is_kept[rows] = True
            self._copies.append((rows, {name: self.tensors[name].index_select(0, rows) for name in unread}))
            if len(self._copies) > _MOST_COPIES:
                self._merge(unread)

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
            if end == self._num_rows and not self._unread():
                self._copies.clear()
            return found

    def _unread(self) -> list[str]:
        """Return the tensors of which rows are still to be read."""
        return [name for name, count in self._num_read.items() if count < self._num_rows]

    def _merge(self, names: list[str]) -> None:
        """Make one copy of all, without what has been read."""
        first = min(self._num_read[name] for name in names)
        cuts = [int(torch.searchsorted(rows, first)) for rows, _ in self._copies]
        rows = torch.cat([own[cut:] for (own, _), cut in zip(self._copies, cuts, strict=True)])
        rows, order = torch.sort(rows)
        values = {}
        for name in names:
            # One tensor after the other, so that few values exist twice.
            parts = [own.pop(name)[cut:] for (_, own), cut in zip(self._copies, cuts, strict=True)]
            values[name] = torch.cat(parts)[order]
        self._copies = [(rows, values)]

"""How a trainer gets the rows of embedding tables that a batch uses, where its tables are not the servers' memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paramserver.metrics.records import PhaseClock
from paramserver.parameters.flat import FlatLayout
from paramserver.parameters.remote_tables import make_remote
from paramserver.parameters.sharding import Shard
from paramserver.parameters.tables import TableRange, empty_gradient, table_ranges
from paramserver.server.client import InFlightCall, ServerClient


@dataclass(frozen=True)
class _IdsInBatch:
    """Which elements of a batch were ids of a table: all of the tensor ``leaf``, or the same columns of each row."""

    table: int
    leaf: int
    columns: tuple[tuple[int, ...], tuple[int, ...], int] | None  # shape of a row, strides, offset from the leaf

    @classmethod
    def find(cls, table: int, ids: Tensor, leaves: Sequence[Tensor]) -> _IdsInBatch | None:
        """Return where the ids are in a batch; None if they were computed."""
        for number, leaf in enumerate(leaves):
            if leaf.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr():
                continue
            if leaf.numel() == ids.numel():
                return cls(table, number, None)
            if ids.dim() and leaf.dim() and (len(ids), ids.stride(0)) == (len(leaf), leaf.stride(0)):
                offset = int(ids.storage_offset() - leaf.storage_offset())
                return cls(table, number, (tuple(ids.shape[1:]), tuple(ids.stride()), offset))
        return None

    def read(self, leaves: Sequence[Tensor]) -> Tensor | None:
        """Return these elements of another batch; None if it has another form."""
        if self.leaf >= len(leaves):
            return None
        leaf = leaves[self.leaf]
        if self.columns is None:
            return leaf
        shape, stride, offset = self.columns
        last = offset + sum((size - 1) * step for size, step in zip((len(leaf), *shape), stride, strict=True))
        if leaf.stride()[:1] != stride[:1] or not leaf.is_contiguous() or not 0 <= offset <= last < leaf.numel():
            return None
        return leaf.as_strided((len(leaf), *shape), stride, leaf.storage_offset() + offset)


class RowLookup:
    """Looks up rows on the servers, each once in a step, and makes the tables of a model use them (``RemoteTable``).

    The ids of most tables are elements of the batch. Those that were ids in the step before are looked up when a step
    begins, in one call to each server for all tables, and others when a module uses them. In lockstep rows are those of
    the version of the step. Otherwise they are the newest when they are looked up. ``parameters`` are those of the
    model, in the order of the layout.
    """

    def __init__(
        self,
        server: ServerClient,
        layout: FlatLayout,
        shards: Sequence[Shard],
        parameters: Sequence[Tensor],
        lockstep: bool,
        clock: PhaseClock,
    ) -> None:
        self.num_bytes = 0  # that were sent and received
        self._server = server
        self._lockstep = lockstep
        self._clock = clock
        self._version: int | None = None  # of the step; None between two steps
        self._num_rows = {number: layout.slots[number].shape[0] for number in layout.tables}
        self._no_rows = {n: empty_gradient(parameters[n].shape, parameters[n].dtype)._values() for n in layout.tables}
        self._ranges: dict[int, list[TableRange]] = {number: [] for number in layout.tables}
        for own in table_ranges(layout, shards):
            self._ranges[own.slot].append(own)
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # of each table: rows of this step, ascending, and values
        self._leaves: list[list[Tensor]] = []  # of the batches of this step: their tensors of integers
        self._ids_in_batches: dict[_IdsInBatch, None] = {}  # in this step
        self._prefetched: _Lookup | None = None
        for number in layout.tables:
            table = parameters[number]
            assert isinstance(table, nn.Parameter)
            make_remote(table, layout.slots[number].name, partial(self._find, number))

    def prefetch(self, version: int | None, batches: Iterable[Any] = ()) -> None:
        """Forget the rows of earlier versions, and request those that the batches of a step will probably use.

        ``version`` is that of the step. Between two steps it is None, and the newest rows are looked up.
        """
        self._prefetched = None
        self._version = version
        self._known.clear()
        self._leaves = [
            [
                leaf
                for leaf in tree_leaves(batch)
                if isinstance(leaf, Tensor) and leaf.dtype in (torch.int64, torch.int32)
            ]
            for batch in batches
        ]
        if not self._leaves:  # no step
            return
        used, self._ids_in_batches = self._ids_in_batches, {}
        wanted: dict[int, list[Tensor]] = defaultdict(list)
        for own in used:
            wanted[own.table] += [ids.flatten() for leaves in self._leaves if (ids := own.read(leaves)) is not None]
        rows = {table: torch.unique(torch.cat(ids)).to(torch.int64).cpu() for table, ids in wanted.items() if ids}
        # A step that uses an id without a row fails when it uses it.
        rows = {
            table: own for table, own in rows.items() if len(own) and 0 <= own[0] <= own[-1] < self._num_rows[table]
        }
        if rows:
            self._prefetched = self._request(rows)

    def wait(self) -> None:
        """Wait for the rows that were requested."""
        if self._prefetched is not None:
            prefetched, self._prefetched = self._prefetched, None
            self._known.update(
                {table: (prefetched.rows[table], values) for table, values in self._receive(prefetched).items()}
            )

    def _find(self, table: int, ids: Tensor, rows: Tensor) -> Tensor:
        """Return the values of rows, which are ascending and different; look up those that are not known."""
        for leaves in self._leaves:
            if (place := _IdsInBatch.find(table, ids, leaves)) is not None:
                self._ids_in_batches[place] = None
        rows, no_values = rows.cpu(), self._no_rows[table]
        if not len(rows) or 0 in no_values.shape[1:]:
            return no_values.new_zeros((len(rows), *no_values.shape[1:]))
        known_rows, known_values = self._known.get(table, (rows[:0], None))
        places = torch.searchsorted(known_rows, rows).clamp_(max=max(len(known_rows) - 1, 0))
        missing = rows if known_values is None else rows[known_rows[places] != rows]
        if known_values is None or len(missing):
            self._clock.lap("forward")
            values = self._receive(self._request({table: missing}))[table]
            self._clock.lap("pull")
            if known_values is None:
                known_rows, known_values = missing, values
            else:
                known_rows, order = torch.cat([known_rows, missing]).sort()
                known_values = torch.cat([known_values, values])[order]
            self._known[table] = known_rows, known_values
            places = torch.searchsorted(known_rows, rows)
        return known_values if len(known_rows) == len(rows) else known_values[places]

    def _request(self, rows: Mapping[int, Tensor]) -> _Lookup:
        """Request the values of rows of some tables, in one call to each server that owns some of them."""
        parts: dict[int, list[TableRange]] = {table: [] for table in rows}
        wanted: dict[int, dict[int, Tensor]] = defaultdict(dict)
        for table, own_rows in rows.items():
            ranges = self._ranges[table]
            ends = torch.searchsorted(own_rows, torch.tensor([own.rows.stop for own in ranges])).tolist()
            for own, first, end in zip(ranges, [0, *ends[:-1]], ends, strict=True):
                if first < end:
                    wanted[own.server_index][own.flat_index] = own_rows[first:end] - own.rows.start
                    parts[table].append(own)
        version = self._version if self._lockstep else None
        return _Lookup(dict(rows), parts, self._server.look_up(version, wanted))

    def _receive(self, lookup: _Lookup) -> dict[int, Tensor]:
        found = {server_index: call.wait() for server_index, call in lookup.calls.items()}
        values = {
            table: torch.cat([found[own.server_index][own.flat_index] for own in parts])
            for table, parts in lookup.parts.items()
        }
        self.num_bytes += sum(lookup.rows[table].nbytes + own.nbytes for table, own in values.items())
        return values


@dataclass(frozen=True)
class _Lookup:
    """Calls for rows of some tables, and the ranges that have them, in their order."""

    rows: dict[int, Tensor]
    parts: dict[int, list[TableRange]]
    calls: Mapping[int, InFlightCall[dict[int, Tensor]]]

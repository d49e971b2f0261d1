"""Embedding tables: weights of ``nn.Embedding`` and ``nn.EmbeddingBag`` whose gradients are sparse.

A batch uses few rows of a table. Its gradient has these rows only, and so do what a trainer pushes and what the
optimizer steps. A sparse gradient is here one of ``torch.sparse_coo`` with one sparse dimension, the rows.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from paramserver.errors import UnsupportedConfiguration
from paramserver.parameters.flat import FlatLayout
from paramserver.parameters.sharding import Shard, rows_of

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
LARGE_BYTES = 16 * 2**20
"""From this size on a table takes no memory where it is not needed, and is stepped and stored by rows."""
_COSTLY_BYTES = 64 * 2**20


def find_tables(model: nn.Module) -> list[str]:
    """Return the names of the trained parameters that are tables.

    Call it when the model is built. Tables that are tied to each other are one parameter, with one name.

    Raises:
        UnsupportedConfiguration: a module with a table has a setting for which torch has no sparse gradient, or which
            changes rows in the forward; or another layer uses the table.
    """
    users: dict[int, list[tuple[str, nn.Module]]] = {}  # of each parameter, by its id
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            users.setdefault(id(parameter), []).append((f"{prefix}.{name}".lstrip("."), module))
    tables = []
    for name, parameter in model.named_parameters():
        own = users[id(parameter)]
        if not parameter.requires_grad or not any(_is_sparse(module) for _, module in own):
            continue
        for user, module in own:
            _check_module(name, user, module)
        tables.append(name)
    return tables


def changed_by_gradients(model: nn.Module) -> frozenset[int]:
    """Return the ids of the tables that no forward changes, as one with ``max_norm`` does."""
    embeddings = [module for module in model.modules() if isinstance(module, EMBEDDINGS)]
    changed = {id(module.weight) for module in embeddings if module.max_norm is not None}
    return frozenset(id(module.weight) for module in embeddings if module.sparse) - changed


def describe_large(model: nn.Module) -> str | None:
    """Return what a step costs because a large embedding has dense gradients; None if none is large."""
    for name, module in model.named_modules():
        if not isinstance(module, EMBEDDINGS) or _is_sparse(module) or not module.weight.requires_grad:
            continue
        if module.weight.nbytes >= _COSTLY_BYTES:
            return (
                f"the gradient of {type(module).__name__} {name} is dense, and each step computes and applies all of "
                f"its {module.weight.nbytes / 2**20:,.0f} MiB; with sparse=True it has the rows of the batch only"
            )
    return None


def opt_out_of_checks(model: nn.Module) -> None:
    """Opt out of checks of each sparse gradient of a model with tables, unless they are enabled.

    Otherwise torch warns in the first step that it does not make them.
    """
    checks = torch.sparse.check_sparse_tensor_invariants
    if any(map(_is_sparse, model.modules())) and not checks.is_enabled():  # type: ignore[no-untyped-call]
        checks.disable()  # type: ignore[no-untyped-call]


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, EMBEDDINGS) and module.sparse


def _check_module(table: str, user: str, module: nn.Module) -> None:
    kind = type(module).__name__
    if not _is_sparse(module):
        raise UnsupportedConfiguration(
            f"{user} ({kind}) must not be the table {table}, as its gradient is dense and that of the table is sparse; "
            "give the layer a weight of its own, or set sparse=False for the table"
        )
    assert isinstance(module, EMBEDDINGS)
    _check_max_norm(module, f"table {table}")
    if module.scale_grad_by_freq:
        raise UnsupportedConfiguration(
            f"scale_grad_by_freq of table {table} ({kind}) must be False with sparse=True, as torch has no such sparse "
            "gradient; set one of them to False"
        )
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        raise UnsupportedConfiguration(
            f"mode (max) of table {table} ({kind}) must be sum or mean with sparse=True, as torch has no sparse "
            "gradient of a maximum; use one of them, or sparse=False"
        )


def refuse_max_norm(model: nn.Module) -> None:
    """Refuse what changes trained rows in a forward, as only the copy of one trainer would be changed.

    Raises:
        UnsupportedConfiguration: an embedding that is trained has ``max_norm``.
    """
    for name, module in model.named_modules():
        if isinstance(module, EMBEDDINGS) and module.weight.requires_grad:
            _check_max_norm(module, f"{name}.weight".lstrip("."))


def _check_max_norm(module: nn.Embedding | nn.EmbeddingBag, what: str) -> None:
    if module.max_norm is not None:
        raise UnsupportedConfiguration(
            f"max_norm ({module.max_norm}) of {what} ({type(module).__name__}) must be None, as it changes rows in the "
            "forward of one trainer only; normalize what the module returns, or the rows in the step of the optimizer"
        )


def describe_missing_row(error: BaseException, model: nn.Module) -> str | None:
    """Return which table of ``model`` has no row for an id, and the id's place, if that is what ``error`` is about."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, ids = frame.f_locals.get("self"), frame.f_locals.get("input")
        if not isinstance(module, EMBEDDINGS) or not isinstance(ids, Tensor) or ids.is_floating_point():
            continue
        is_missing = (ids < 0) | (ids >= module.num_embeddings)
        if not bool(is_missing.any()):
            return None
        place = is_missing.nonzero()[0].tolist()
        name = next((name for name, own in model.named_modules() if own is module), "a module outside of the model")
        return (
            f"id {int(ids[tuple(place)])} at {place} of the input must be from 0 to {module.num_embeddings - 1}, the "
            f"rows of {type(module).__name__} {name}; make the table larger, or correct the ids in the data set"
        )
    return None


class RowSegment:
    """The gradients of tables in flat tensors of ``FlatLayout.of_gradients``, which trainer and server share.

    The rows of a gradient follow each other at the beginning of the table's flat tensor. A second one has their number,
    and then the ids of the rows, ascending. So what is written is as large as the gradient, and not as the table.
    ``layout`` is that of the parameters.
    """

    def __init__(self, layout: FlatLayout, flats: Sequence[Tensor]) -> None:
        self._slots = {number: layout.slots[number] for number in layout.tables}
        ids = flats[len(layout.sizes) :]
        self._ids = dict(zip(layout.tables, ids, strict=True))
        self._values = {number: flats[slot.group] for number, slot in self._slots.items()}

    def write(self, number: int, gradient: Tensor | None) -> None:
        """Write the gradient of a table, which is coalesced, or None; ``number`` is that of its slot."""
        ids = self._ids[number]
        if gradient is None:
            ids[0] = 0
            return
        rows, values = gradient._indices()[0], gradient._values()
        ids[0] = len(rows)
        ids[1 : 1 + len(rows)].copy_(rows)
        self._values[number][: values.numel()].view(values.shape).copy_(values)

    def read(self, number: int) -> Tensor:
        """Return the gradient of a table that was written last, in the same memory."""
        shape, ids = self._slots[number].shape, self._ids[number]
        count = int(ids[0])
        values = self._values[number][: count * math.prod(shape[1:])].view(count, *shape[1:])
        return sparse_gradient(ids[1 : 1 + count], values, shape)


def sparse_gradient(ids: Tensor, values: Tensor, shape: Sequence[int], is_coalesced: bool = True) -> Tensor:
    """Return the gradient of a table: ``values`` of shape (n, width) for the rows ``ids``.

    They are ascending and different if it ``is_coalesced``.
    """
    # The invariants hold by construction, and checking them would sort the ids again.
    return torch.sparse_coo_tensor(ids[None], values, tuple(shape), check_invariants=False, is_coalesced=is_coalesced)


def empty_gradient(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the gradient of a table of which no row was used."""
    return sparse_gradient(torch.zeros(0, dtype=torch.int64), torch.zeros((0, *shape[1:]), dtype=dtype), shape)


def slice_gradient(gradient: Tensor, rows: range) -> Tensor:
    """Return the gradient of some rows of a table, numbered from the first of them, in the same memory."""
    if len(rows) == len(gradient):
        return gradient
    ids = gradient._indices()[0]
    first, end = torch.searchsorted(ids, torch.tensor([rows.start, rows.stop])).tolist()
    return sparse_gradient(ids[first:end] - rows.start, gradient._values()[first:end], (len(rows), *gradient.shape[1:]))


def nbytes_of_rows(gradient: Tensor) -> int:
    """Return the size of a sparse gradient: its values and the ids of their rows."""
    return gradient._values().nbytes + gradient._indices().nbytes


@dataclass(frozen=True)
class TableRange:
    """Where rows of a table are: the range ``flat_index`` of a server has ``rows`` of the table of slot ``slot``."""

    slot: int
    server_index: int
    flat_index: int
    rows: range


def table_ranges(layout: FlatLayout, shards: Sequence[Shard]) -> list[TableRange]:
    """Return where the rows of all tables are, ascending for each table; ``layout`` is that of the parameters."""
    tables = set(layout.tables)
    return [
        TableRange(piece.slot, server_index, own.group, rows_of(piece, layout.slots[piece.slot]))
        for server_index, shard in enumerate(shards)
        for piece, own in zip(shard.slices, shard.layout.slots, strict=True)
        if piece.slot in tables
    ]


def large_tables(layout: FlatLayout) -> list[int]:
    """Return the slots of the tables that are large as a whole. All tables lie in memory row by row."""
    return [
        number
        for number in layout.tables
        if (slot := layout.slots[number]).numel * layout.dtypes[slot.group].itemsize >= LARGE_BYTES
    ]


def row_ends(layout: FlatLayout, shards: Sequence[Shard]) -> dict[str, list[int]]:
    """Return of each table, by its name, where the rows of each server end; a server may have none."""
    ends = {number: [0] * len(shards) for number in layout.tables}
    for own in table_ranges(layout, shards):
        ends[own.slot][own.server_index] = own.rows.stop
    return {layout.slots[number].name: list(accumulate(own, max)) for number, own in ends.items()}


def merge_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return all rows that are in ``rows``, ascending, and the place of each one given; each of ``rows`` is ascending.

    As ``torch.unique(torch.cat(rows), return_inverse=True)`` in a seventh of the time, as a stable sort merges what is
    ascending already.
    """
    given = torch.cat(list(rows)).numpy()
    order = np.argsort(given, kind="stable")
    ascending = given[order]
    is_first = np.ones(len(given), dtype=bool)
    np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
    places = np.empty_like(order)
    places[order] = np.cumsum(is_first) - 1
    return torch.from_numpy(ascending[is_first]), torch.from_numpy(places)


def mean_of_rows(gradients: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Return the mean of scaled, coalesced sparse gradients, which is coalesced. A row that one lacks is zero there.

    Values of a row are added in the order of ``gradients``, which are overwritten. With one gradient, the mean is that
    one itself.
    """
    for gradient, factor in zip(gradients, factors, strict=True):
        if factor != 1.0:
            gradient._values().mul_(factor)
    if len(gradients) == 1:
        return gradients[0]
    rows, places = merge_rows([gradient._indices()[0] for gradient in gradients])
    shape = gradients[0].shape
    total = gradients[0]._values().new_zeros((len(rows), *shape[1:]))
    first = 0
    for gradient in gradients:
        count = gradient._nnz()
        # In one gradient each row occurs once, so these sums are in the order of the gradients.
        total.index_add_(0, places[first : first + count], gradient._values())
        first += count
    return sparse_gradient(rows, total.div_(float(len(gradients))), shape)


def with_values(parameter: Tensor) -> Tensor:
    """Return a tensor with the values of a coalesced sparse ``.grad`` as its ``.grad``; otherwise the parameter itself.

    Functions for dense gradients, such as clipping, then read and write the values of the sparse one in place. The norm
    of the values is that of the gradient.
    """
    if parameter.grad is None or not parameter.grad.is_sparse:
        return parameter
    values = parameter.grad._values()
    stand_in = values.detach()
    stand_in.grad = values
    return stand_in


def coalesce_gradients(parameters: Sequence[Tensor]) -> None:
    """Add up values for the same row in sparse gradients, so that a step and a norm see each row once."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()

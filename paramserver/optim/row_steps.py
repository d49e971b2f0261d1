"""Rows of embedding tables on a server: steps of those of a sparse gradient, and the optimizers that make them.

Also the version that changed each row last, and snapshots of a table that updates change while it is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from paramserver.errors import TaskError
from paramserver.optim.named_optimizers import optimizers_of
from paramserver.optim.parallel_step import ThreadTeam, has_foreign_hooks
from paramserver.optim.row_wise_adagrad import RowWiseAdagrad
from paramserver.parameters.tables import LARGE_BYTES, sparse_gradient

_ALL_ROWS = "it would change all of its rows in each step"
_NOT_FUSED = "torch has no fused step with a sparse gradient"
# Of torch, with the hyper-parameters that must not be set, and why. Any other class declares it by the class attribute
# ``steps_rows = True``.
_STEPS_ROWS: Mapping[type[torch.optim.Optimizer], Mapping[str, str]] = {
    torch.optim.SGD: {"momentum": _ALL_ROWS, "weight_decay": _ALL_ROWS, "fused": _NOT_FUSED},
    torch.optim.Adagrad: {"weight_decay": _ALL_ROWS, "fused": _NOT_FUSED},
    torch.optim.SparseAdam: {},
}


def check_steps_rows(optimizer: torch.optim.Optimizer, tables: Mapping[str, Tensor]) -> None:
    """Check that each optimizer that has a table, or needs one, steps it by rows.

    Raises:
        TaskError: one does not; the message names the optimizer and the table, or the hyper-parameter.
    """
    names = {id(table): name for name, table in tables.items()}
    for own in optimizers_of(optimizer):
        kind = type(own).__name__
        for group in own.param_groups:
            for name in (names[id(p)] for p in group["params"] if id(p) in names):
                _check_group(own, group, name)
            dense = next((p for p in group["params"] if id(p) not in names), None)
            if dense is not None and isinstance(own, torch.optim.SparseAdam):
                raise TaskError(
                    f"{kind} must step tables only (nn.Embedding or nn.EmbeddingBag with sparse=True), and has a "
                    f"parameter of shape {tuple(dense.shape)} that is none; use Adam for it, or set sparse=True"
                )


def _check_group(optimizer: torch.optim.Optimizer, group: Mapping[str, object], table: str) -> None:
    kind, unusable = type(optimizer), _unusable(optimizer)
    if unusable is None:
        known = ", ".join(known.__name__ for known in _STEPS_ROWS)
        raise TaskError(
            f"optimizer ({kind.__name__}) must step the rows of a sparse gradient only, as table {table} has "
            f"sparse=True; use {known} or RowWiseAdagrad, or declare it by the class attribute steps_rows = True"
        )
    for key, reason in unusable.items():
        if group.get(key):
            raise TaskError(
                f"{key} ({group[key]}) of {kind.__name__} must not be set for table {table} with sparse=True, as "
                f"{reason}; leave it out for the table, or set sparse=False"
            )


def _unusable(optimizer: torch.optim.Optimizer) -> Mapping[str, str] | None:
    """Return with which hyper-parameters an optimizer changes other rows than those of a gradient; None: it always may.

    The values are the reasons.
    """
    kind = type(optimizer)
    return {} if getattr(kind, "steps_rows", False) else _STEPS_ROWS.get(kind)


# Their state is made in the first step of a parameter, and has numbers and tensors with an entry for each row only.
_STATE_BY_ROWS = (*_STEPS_ROWS, RowWiseAdagrad)


class RowStep:
    """Steps an optimizer over copies of the rows that have gradients, and writes them back.

    The optimizers of torch go through the rows of parameter and state several times, and in a large table, which does
    not stay in the caches of a processor, nearly every access misses them. Here the rows are read once and written
    once, by all threads of ``team``. The optimizer makes the same operations with each row, so no bit changes. Other
    optimizers than those that are known, and those with hooks, step the whole table.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.team: ThreadTeam | None = None
        self._optimizer = optimizer
        self._has_state: set[int] = set()  # ids of parameters; an optimizer makes their states in their first steps

    def __call__(self) -> None:
        with ExitStack() as copies, torch.no_grad():
            for own in optimizers_of(self._optimizer):
                if type(own) not in _STATE_BY_ROWS or has_foreign_hooks(own):
                    continue
                for group in own.param_groups:
                    for parameter in group["params"]:
                        gradient = parameter.grad
                        if gradient is None or not gradient.is_sparse or parameter.nbytes < LARGE_BYTES:
                            continue
                        if id(parameter) in self._has_state:
                            copies.enter_context(self._copied_rows(own, parameter))
                        self._has_state.add(id(parameter))
            self._optimizer.step()

    @contextmanager
    def _copied_rows(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> Iterator[None]:
        """Let a parameter, its gradient and its state be copies of the rows of the gradient in this context."""
        gradient, data, state = parameter.grad, parameter.data, optimizer.state.get(parameter, {})
        assert gradient is not None
        rows = gradient._indices()[0]
        wholes = {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape[:1] == parameter.shape[:1] and name != ROW_VERSION
        }
        parameter.grad = None
        parameter.data = self._read(data, rows)
        numbers = torch.arange(len(rows))
        parameter.grad = sparse_gradient(numbers, gradient._values(), (len(rows), *data.shape[1:]))
        state.update({name: self._read(whole, rows) for name, whole in wholes.items()})
        try:
            yield
            for whole, own in [(data, parameter.data), *((wholes[name], state[name]) for name in wholes)]:
                self._write(whole, rows, own)
        finally:
            parameter.grad = None
            parameter.data = data
            parameter.grad = gradient
            state.update(wholes)

    def _read(self, whole: Tensor, rows: Tensor) -> Tensor:
        own = whole.new_empty((len(rows), *whole.shape[1:]))
        self._run(lambda part: torch.index_select(whole, 0, rows[part], out=own[part]), len(rows))
        return own

    def _write(self, whole: Tensor, rows: Tensor, own: Tensor) -> None:
        self._run(lambda part: whole.index_copy_(0, rows[part], own[part]), len(rows))

    def _run(self, work: Callable[[slice], object], count: int) -> None:
        """Do ``work`` for each row."""
        if self.team is None:
            work(slice(count))
            return
        share = max(-(-count // self.team.size), 1)
        self.team.run([partial(work, slice(first, first + share)) for first in range(0, count, share)])


# Versions of rows.


ROW_VERSION = "row_version"
"""In the optimizer's state of a table, so that it is sharded, staged, stored and restored like that."""


def record_rows(optimizer: torch.optim.Optimizer, version: int, tables: Container[int] | None = None) -> None:
    """Record which rows ``version`` may have changed, of the parameters that have a sparse gradient now or had one.

    These are the rows for which the gradient, which is coalesced, has values. They are all rows if the gradient is
    dense, if the optimizer or a hook of it may change others too, or if the parameter is none of ``tables``, which are
    ids; None for every one.

    Call it after the step, as an optimizer may make its state in the first one only if it is empty.
    """
    for own in optimizers_of(optimizer):
        if not isinstance(getattr(own, "state", None), MutableMapping):
            continue  # a wrapper with a state of its own kind
        unusable = _unusable(own)
        for group in own.param_groups:
            by_rows = (
                unusable is not None and not has_foreign_hooks(own) and not any(group.get(key) for key in unusable)
            )
            for parameter in group["params"]:
                gradient = parameter.grad
                is_sparse = gradient is not None and gradient.is_sparse
                if not (is_sparse or ROW_VERSION in own.state.get(parameter, ())):
                    continue
                state = own.state.setdefault(parameter, {})
                if ROW_VERSION not in state:  # any version before may have changed any row
                    state[ROW_VERSION] = parameter.new_full((len(parameter),), version - 1, dtype=torch.int32)
                is_stepped_by_rows = by_rows and (tables is None or id(parameter) in tables)
                if is_stepped_by_rows and is_sparse:
                    state[ROW_VERSION].index_fill_(0, gradient._indices()[0], version)
                elif not is_stepped_by_rows or gradient is not None:
                    state[ROW_VERSION].fill_(version)


def drop_row_versions(optimizer: torch.optim.Optimizer, tables: Container[int]) -> None:
    """Remove the versions of rows from the states of parameters that are none of ``tables``, when they are loaded."""
    for parameter, state in optimizer.state.items():
        if id(parameter) not in tables and isinstance(state, MutableMapping):
            state.pop(ROW_VERSION, None)


# Snapshots.


class RowSnapshot:
    """The rows of tensors as they are when this is made, to be read once and in order while updates change them.

    ``copy_before_update`` is called with the rows that an update changes, and copies those that are not read yet. So
    the memory is that of the rows which change while the snapshot is read. All tensors have the same number of rows.
    Thread-safe: one thread updates, and another one reads.
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

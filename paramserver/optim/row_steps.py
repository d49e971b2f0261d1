"""Steps of the rows of a sparse gradient, as embedding tables on a server need; and the optimizers that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from paramserver.errors import TaskError
from paramserver.optim.averaging import has_foreign_hooks
from paramserver.optim.named_optimizers import optimizers_of
from paramserver.optim.parallel_step import ThreadTeam
from paramserver.optim.row_versions import ROW_VERSION
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
    kind = type(optimizer)
    if getattr(kind, "steps_rows", False):
        return
    unusable = _STEPS_ROWS.get(kind)
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

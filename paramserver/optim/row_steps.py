"""Which optimizers step the rows of a sparse gradient only, as embedding tables on a server need."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paramserver.errors import TaskError
from paramserver.optim.named_optimizers import optimizers_of

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
